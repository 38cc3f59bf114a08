"""Kernels as Triton functions.

| Module | Contents |
|---|---|
| `addresses` | strides, and the query block or tile of a program |
| `tiles`, `tile_derivatives` | the scores of a tile; its tangents and gradients |
| `forward`, `jvp`, `jvp_jvp` | the online softmax; its tangent; the tangent of that |
| `backward` | backward and its tangent: queries, keys and values, bias |
| `tables` | gradients of tables |
| `weights` | scores or weights of some rows and columns |
"""
