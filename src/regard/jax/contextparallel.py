"""Attention on the shards of a sequence inside of `jax.shard_map`."""

from __future__ import annotations  # so that `help` shows the names of types

from typing import Any

from regard.jax import adapter
from regard.jax.shardmap import NAME, devices_along
from regard.jax.xla.values import promotion


@promotion()
def context_parallel_attention(
    query: Any, key: Any, value: Any, *, axis_name: str | tuple[str, ...], observe: Any = (), **options: Any
) -> Any:
    """Compute `regard.attention` of a sequence whose shards lie on the devices of a mesh axis.

    Call it inside of `jax.shard_map`, where each device has its shard of the positions. Results
    are the device's rows of those of the whole call, with the bits of one device: out, lse,
    entropy, and their derivatives up to the second; gradients of tables are within the bound of
    the error. Keys and values pass by in steps, so that no device has them all. Outside of
    `shard_map` `regard.attention` does the same for arrays that are sharded along their sequence.

    Args:
        query: (..., heads, n, d), this device's shard of the n positions; with layout="bnhd"
            (..., n, heads, d). Batch and heads may be sharded over other axes; rules then need
            `origin`.
        key, value: the same of the keys. Shards are contiguous, in the order of devices.
        axis_name: the axis of the mesh, or several, along which the sequence is sharded.
        observe: "lse" and "entropy".
        **options: those of `regard.attention`, except `return_weights`. Positions of rules,
            `offset` and `origin` are those of the whole; a bias and dense masks are given whole.

    Raises:
        ValueError: outside of `shard_map`; for other statistics and engine="xla"; for forward over
            forward mode, and for third derivatives.

    >>> import jax, jax.numpy as jnp, regard, regard.jax
    >>> from functools import partial
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("cp",))
    >>> q = jnp.ones((2, 8, 4))
    >>> call = partial(regard.jax.context_parallel_attention, axis_name="cp", causal=True)
    >>> spread = jax.shard_map(call, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    >>> bool((jax.jit(spread)(q, q, q) == regard.attention(q, q, q, causal=True)).all())
    True
    """
    if options.pop("return_weights", False):
        raise ValueError(f"{NAME} has no return_weights, which are n × n")
    return adapter.attention(query, key, value, observe=observe, spread=devices_along(axis_name), **options)
