"""regard for PyTorch."""

from regard.torch.modules import FeedForward, KVCache, MultiHeadAttention, Transformer, TransformerBlock
from regard.torch.positions import Alibi, Relative, Rope
from regard.torch.transformers import register_transformers

__all__ = [
    "Alibi",
    "FeedForward",
    "KVCache",
    "MultiHeadAttention",
    "Relative",
    "Rope",
    "Transformer",
    "TransformerBlock",
    "register_transformers",
]
