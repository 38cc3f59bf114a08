"""Calls on a device: arguments, tile configs and launches.

| Module | Contents |
|---|---|
| `devices` | where arrays are: on a device, copied to one, or on the host |
| `arguments` | a problem as the arguments of kernels |
| `launching` | one launch, on a device or Triton's interpreter |
| `tuning` | tile configs: queries of a block, keys of a tile, warps, stages |
| `forward_launch`, `derivatives` | forward and the derivatives, run |
| `statistics` | statistics that need the weights themselves |
"""
