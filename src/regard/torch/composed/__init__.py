"""Attention by PyTorch's own operations, which differentiates to any order; third derivatives use it.

| Module | Contents |
|---|---|
| `rows` | the outputs of a block of rows, by the formulas of the specification |
| `rules` | rules and dropout as tensors, with the derivatives that rules define |
| `higher` | derivatives of second derivatives, block by block |
"""
