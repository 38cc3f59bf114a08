"""Attention functions of PyTorch and transformers, replaced by regard's.

| Module | Contents |
|---|---|
| `functional` | `F.scaled_dot_product_attention` with PyTorch's conventions, and `sdpa()` |
| `nested` | the same on nested tensors |
| `transformers` | transformers' attention interface, with masks as rules |
"""
