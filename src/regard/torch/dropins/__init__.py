"""Attention functions of PyTorch, transformers and other packages, replaced by regard's.

| Module | Contents |
|---|---|
| `functional` | `F.scaled_dot_product_attention` with PyTorch's conventions, and `sdpa()` |
| `flex` | `flex_attention` with PyTorch's conventions, and `flex()` |
| `activation` | PyTorch's operation replaced in the whole process: `activate()`, `deactivate()` |
| `cpu_operator` | the two operations that graphs hold in its place, with PyTorch's strides |
| `modules` | what `torch.nn`'s modules do meanwhile |
| `nested` | the same on nested tensors |
| `transformers` | transformers' attention interface, with masks as rules |
| `stand_in` | `stand_in()`: the table of packages that regard stands in for |
| `packages` | an installed package's functions replaced, modules of a missing one provided |
| `natten`, `natten_grid` | NATTEN's functions and modules; the order of rows on a grid |
| `flash_attn`, `flash_cache`, `flash_padding` | FlashAttention 2's functions, of `regard.torch.flash_attn` |
| `flash_options` | their arguments: checks, and the rules that they mean |
| `flash_modules` | the modules of flash-attn that have them |
| `triangle`, `proteins` | triangle attention; attention of Boltz and OpenFold-3 |
| `xformers` | xFormers' function, and its causal and block-diagonal masks |
"""
