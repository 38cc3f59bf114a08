"""regard for PyTorch: modules, transformers' models, and what follows PyTorch's conventions.

`regard.attention` on tensors needs none of this.
"""

from regard.arguments.signatures import listed
from regard.torch import autograd as autograd  # operations and derivatives, before a saved program is loaded
from regard.torch.dropins.functional import scaled_dot_product_attention, sdpa
from regard.torch.nn.modules import BlockCache, FeedForward, KVCache, MultiHeadAttention, Transformer, TransformerBlock
from regard.torch.nn.positions import Alibi, Relative, Rope
from regard.torch.transformers import register_transformers
from regard.torch.varlen import jagged_attention, varlen_attention

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
    "jagged_attention",
    "register_transformers",
    "scaled_dot_product_attention",
    "sdpa",
    "varlen_attention",
]

listed(*(globals()[name] for name in __all__))
