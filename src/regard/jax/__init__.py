"""Attention on JAX arrays: `dot_product_attention` as jax.nn has it, and sequences inside of `shard_map`."""

from regard.arguments.signatures import listed
from regard.jax.contextparallel import context_parallel_attention
from regard.jax.dropins.functional import dot_product_attention

__all__ = ["context_parallel_attention", "dot_product_attention"]

listed(*(globals()[name] for name in __all__))
