"""Modules, drop-ins and functions for PyTorch.

`regard.attention` on tensors needs none of them. Reading order of a call: `public/attention`, `call/`, then `autograd/`
for derivatives and `compiled/` for graphs. `README.md` has a line for each file; each folder imports those above it.

| Folder | Contents |
|---|---|
| `tensors/` | tensors as arrays, tables of rules, PyTorch's state |
| `call/` | a call as data, its `Problem`, prepared calls, kernels |
| `composed/` | derivatives beyond the second, by PyTorch's operations |
| `operators/` | the operations of PyTorch's dispatcher |
| `autograd/` | derivatives and `vmap` of calls |
| `compiled/` | calls in graphs that PyTorch traces |
| `public/` | the public functions on tensors |
| `nn/` | modules |
| `dropins/` | functions of PyTorch, transformers and other packages, replaced |
| `processes/` | a sequence over the processes of a device mesh, DTensors |
| `capture/` | `regard.capture` of modules and of pretrained models |
"""

from regard.arguments.signatures import listed
from regard.torch import flash_attn as flash_attn
from regard.torch import natten as natten
from regard.torch import xformers as xformers
from regard.torch.autograd import functions as functions  # operations and derivatives, before a saved program is loaded
from regard.torch.dropins.activation import activate, deactivate, register
from regard.torch.dropins.flex import flex, flex_attention
from regard.torch.dropins.functional import scaled_dot_product_attention, sdpa
from regard.torch.dropins.proteins import adopt
from regard.torch.dropins.stand_in import stand_in
from regard.torch.dropins.tabpfn import register_tabpfn
from regard.torch.dropins.transformers import register_transformers
from regard.torch.dropins.triangle import triangle_attention
from regard.torch.nn.modules import BlockCache, FeedForward, KVCache, MultiHeadAttention, Transformer, TransformerBlock
from regard.torch.nn.positions import Alibi, Relative, Rope
from regard.torch.processes.context_parallel import context_parallel
from regard.torch.public.packed import jagged_attention, varlen_attention

__all__ = [
    "Alibi",
    "BlockCache",
    "FeedForward",
    "KVCache",
    "MultiHeadAttention",
    "Relative",
    "Rope",
    "Transformer",
    "TransformerBlock",
    "activate",
    "adopt",
    "context_parallel",
    "deactivate",
    "flex",
    "flex_attention",
    "jagged_attention",
    "register_tabpfn",
    "register_transformers",
    "scaled_dot_product_attention",
    "sdpa",
    "stand_in",
    "triangle_attention",
    "varlen_attention",
]

register()
listed(*(globals()[name] for name in __all__))
