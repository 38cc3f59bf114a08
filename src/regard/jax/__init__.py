"""Attention as a primitive of JAX: `regard.attention` on JAX arrays, and `dot_product_attention` in jax.nn's conventions."""

from regard.jax.drop_in import dot_product_attention

__all__ = ["dot_product_attention"]
