"""Modules, drop-ins and functions for PyTorch.

`regard.attention` on tensors needs none of them. Reading order of a call: `adapter`, `calls`, `kernels`, then
`autograd` for derivatives and `graph/` for compiled graphs.

| Module | Contents |
|---|---|
| `modes` | active modes, traces and transforms; PyTorch's private names; all others stand on it |
| `adapter` | the public functions of `regard` on tensors |
| `fastpath` | small calls, cached by shape and options |
| `calls` | a call as data, and its `Problem` once its tensors are arrays: checked and prepared there alone |
| `kernels` | an engine's five functions on tensors |
| `autograd` | their derivatives |
| `composed/` | derivatives beyond the second, by PyTorch's operations |
| `batching` | `vmap` of calls |
| `arrays` | checks of tensors, their values, autocast |
| `rules` | rules that read tensors |
| `parameters` | the modules whose parameters rules read |
| `functions` | `merge`, `multihead_attention`, `linear_attention` |
| `parallel` | a sequence over the processes of a device mesh |
| `spreading` | the `context_parallel` that is entered, for all that would compute with one process alone |
| `dtensors` | `regard.attention` of DTensors |
| `varlen` | packed sequences and jagged nested tensors |
| `team` | PyTorch's OpenMP threads, which run the cpu engine's kernels |
| `graph/` | calls in graphs that PyTorch traces |
| `nn/` | modules |
| `dropins/` | functions of PyTorch, transformers and other packages, replaced |
| `natten`, `flash_attn` | the functions of NATTEN and FlashAttention 2, by name |
| `xformers` | an error that names `stand_in` |
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
