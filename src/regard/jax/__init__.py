"""Attention on JAX arrays, and `dot_product_attention` as jax.nn has it."""

from regard.arguments.signatures import listed
from regard.jax.dropins.functional import dot_product_attention

__all__ = ["dot_product_attention"]

listed(*(globals()[name] for name in __all__))
