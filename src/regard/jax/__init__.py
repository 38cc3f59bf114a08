"""Attention as a primitive of JAX: `regard.attention` on JAX arrays, and `dot_product_attention` as jax.nn has it."""

from regard.jax.drop_in import dot_product_attention
from regard.signatures import listed

__all__ = ["dot_product_attention"]

listed(*(globals()[name] for name in __all__))
