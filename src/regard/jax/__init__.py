"""Attention as a primitive of JAX: `regard.attention` on JAX arrays, and `dot_product_attention` as jax.nn has it."""

from regard.jax.drop_in import dot_product_attention

__all__ = ["dot_product_attention"]
