"""The public functions on tensors.

| Module | Contents |
|---|---|
| `attention` | `attention`, `weights`, `steps`, `plan`, and what watches calls of a thread |
| `others` | `merge`, `multihead_attention`, `linear_attention`, `hopfield` |
| `packed` | packed sequences and jagged nested tensors |
| `padding` | the padding of modules and models |
"""
