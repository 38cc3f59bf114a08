"""Calls on JAX arrays, as a user's type checker sees them. A line that must be refused says so."""

from typing import Any, assert_type

import jax.numpy as jnp

import jax
import regard

q = jnp.zeros((2, 8, 10, 64))

assert_type(regard.attention(q, q, q, causal=True, dropout=0.1, seed=jax.random.key(0)), jax.Array)
assert_type(regard.attention(q, q, q, return_weights=True), tuple[jax.Array, jax.Array])
assert_type(regard.attention(q, q, q, observe=["lse"]), tuple[jax.Array, regard.Seen])
assert_type(regard.hopfield(q, q).energies, jax.Array)


def loss(x: jax.Array) -> jax.Array:
    return jnp.sum(regard.attention(x, x, x, causal=True))


assert_type(jax.grad(loss)(q), Any)
jax.jit(loss)(q)
jax.vmap(loss)(q)
jax.jvp(loss, (q,), (q,))
jax.vjp(loss, q)
assert_type(regard.multihead_attention(q, q, q, 8, causal=True), jax.Array)
assert_type(regard.linear_attention(q, q, q), jax.Array)

regard.attention(q, q, q, attn_mask=None)  # refused
regard.multihead_attention(q, q, q, 8, casual=True)  # refused
jax.grad(regard.attention(q, q, q, scale="1"))  # refused
