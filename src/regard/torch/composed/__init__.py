"""Attention by PyTorch's own operations, which differentiates to any order; third derivatives use it.

| Module | Contents |
|---|---|
| `rows` | the outputs of a block of rows, by the formula of the engine `device` |
| `higher` | derivatives of second derivatives, block by block |
"""
