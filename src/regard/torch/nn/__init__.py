"""PyTorch modules around `regard.attention`.

| Module | Contents |
|---|---|
| `modules` | multi-head attention, blocks, stacks and their caches |
| `positions` | position encodings for them |
"""
