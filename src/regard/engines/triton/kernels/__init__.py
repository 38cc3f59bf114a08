"""The kernels, as Triton functions.

| Module | Contents |
|---|---|
| `addresses` | strides, and the part of an array that a program works on |
| `tiles`, `pairs` | the scores of a tile; what derivatives need of its pairs |
| `forward`, `jvp`, `jvp_jvp` | the online softmax; its tangent; the tangent of that |
| `backward` | backward and its tangent: queries, keys and values, bias |
| `tables` | gradients of tables |
| `weights` | any part of the scores or the weights |
"""
