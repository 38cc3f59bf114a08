"""Calls on JAX arrays, as a user's type checker sees them. A line that must be refused says so."""

from typing import assert_type

import jax.numpy as jnp

import jax
import regard

q = jnp.zeros((2, 8, 10, 64))

assert_type(regard.attention(q, q, q, causal=True, dropout=0.1, seed=jax.random.key(0)), jax.Array)
assert_type(regard.attention(q, q, q, return_weights=True), tuple[jax.Array, jax.Array])
assert_type(regard.attention(q, q, q, observe=["lse"]), tuple[jax.Array, regard.Seen])

regard.attention(q, q, q, attn_mask=None)  # refused
