"""Calls on a device: arguments, tile configs and launches.

| Module | Contents |
|---|---|
| `devices` | calls on arrays of a device or of the host |
| `arguments` | a problem as the arguments of kernels |
| `launching` | one launch, on a device or Triton's interpreter |
| `tuning` | tile configs: queries of a block, keys of a tile, warps, stages |
| `forward_launch`, `derivatives` | launches of forward and of the derivatives |
| `statistics` | statistics that need the weights themselves |
"""
