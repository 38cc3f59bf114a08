"""`jax.nn.dot_product_attention` with its conventions, on this library's engines."""

from __future__ import annotations  # so that `help` shows the names of types

import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import jax
from regard.jax.sharding import resharded
from regard.jax.xla.values import promotion
from regard.ops.attention import attention
from regard.rules import Mask, as_mask, masks, scores, tracing


@promotion()
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool | None = None,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
) -> Any:
    """Compute attention as `jax.nn.dot_product_attention` does, with its signature.

    The function serves as Flax's `attention_fn` too. O(n) memory, forward and backward, with every
    derivative. Letters: B batch, T queries, S keys, N query heads, K key-value heads (N a multiple
    of K), H features.

    Args:
        query: (B, T, N, H) or (T, N, H); more leading dimensions too.
        key: (B, S, K, H) or (S, K, H).
        value: as key; the features may differ in number.
        bias: added to the logits; numbers of any type that broadcast to (B, N, T, S).
        mask: booleans that broadcast to (B, N, T, S), True = attend.
        scale: factor of the logits, by default 1/√H. A number, or an array that broadcasts to
            (B, K, T, S), shared by the heads of a group. Arrays may be traced and differentiated.
        is_causal: key s is seen by the queries t ≥ s, counted from the first of each.
        query_seq_lengths: int32 (B,); later queries give 0.
        key_value_seq_lengths: int32 (B,); later keys are masked.
        local_window_size: (left, right), or one number for both: query t sees the keys t − left ≤ s
            ≤ t + right. Both may be negative.
        implementation: None for the best engine; "xla" computes by XLA; "cudnn" is not supported.
        return_residual: also return the log-sum-exp of the logits, (B, T, N), without a gradient.
        dropout_rng, dropout_rate, broadcast_dropout, deterministic, dtype, precision, module: what
            Flax passes to an `attention_fn`. A mask may then be of any dtype. `broadcast_dropout`
            drops the same weights in every batch element and head, which are then computed one
            after the other. `precision` has no effect: products are exact to the dtype. `module`
            must be None.

    Returns:
        (B, T, N, H), or with `return_residual` a pair. A query with masked keys only gives the mean
        of all values, as in jax.nn.

    Raises:
        ValueError: for shapes and dtypes that do not fit, as jax.nn; TypeError, ValueError of
            `regard.attention`.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 5, 2, 4))
    >>> dot_product_attention(x, x, x, is_causal=True).shape
    (1, 5, 2, 4)
    """
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    shape = query.shape
    _check_shapes(query, key, value)
    if query.ndim == 3:
        query, key, value = (x[None] for x in (query, key, value))
    lead, T = query.shape[:-3], query.shape[-3]
    S, K = key.shape[-3:-1]
    flax = deterministic is not None
    bias, mask = (None if x is None else _four(jnp.asarray(x)) for x in (bias, mask))
    if mask is not None and mask.dtype != bool:
        if not flax:
            raise ValueError(f"mask dtype should be bool, but got {mask.dtype}")
        mask = mask.astype(bool)
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None and x.ndim > 4 and x.ndim != query.ndim:
            raise ValueError(f"{name} ndim should be {query.ndim}, but got {x.ndim}")
    real = jnp.promote_types(query.dtype, np.float32)
    if bias is not None and bias.dtype.kind in "biu":
        bias = bias.astype(real)
    if implementation not in (None, "xla"):
        raise ValueError(f"Unsupported implementation option: {implementation}; regard has None and 'xla'")
    if module is not None:
        raise ValueError("the weights are not kept: give sow_weights=False, or regard.attention(return_weights=True)")
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    q_len, k_len = (_lengths(name, x, lead) for name, x in lengths.items())
    factors = None
    if scale is not None:
        if isinstance(scale, jax.Array) or np.ndim(scale):
            factors, scale = _factors(jnp.asarray(scale, real), (*lead, K, T, S)), 1.0
        scale = float(scale)
    options: dict[str, Any] = {
        "causal": bool(is_causal), "window": _window(local_window_size), "scale": scale, "engine": implementation,
    }  # fmt: skip
    arrays = {"bias": bias, "mask": mask, "q_len": q_len, "k_len": k_len, "factors": factors}
    arrays = {"query": query, "key": key, "value": value} | {n: x for n, x in arrays.items() if x is not None}
    if bool(dropout_rate) and not deterministic:
        if dropout_rng is None:
            raise ValueError(f"dropout_rate={dropout_rate} needs dropout_rng=, a key of jax.random")
        options |= {"dropout": float(dropout_rate), "seed": dropout_rng}
    alike = "dropout" in options and broadcast_dropout
    out, lse = _each(arrays, options) if alike else _attend(**arrays, **options)
    out = out.reshape(*shape[:-1], value.shape[-1])
    if not return_residual:
        return out
    return out, jax.lax.stop_gradient(lse.astype(key.dtype)).reshape(shape[:-1])


def _attend(
    query: Any, key: Any, value: Any, *, bias: Any = None, mask: Any = None, q_len: Any = None, k_len: Any = None,
    factors: Any = None, window: tuple[Any, Any] | None, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Return output (..., T, N, H) and lse (..., T, N).

    factors: see `_factors`.
    """
    lead, (T, N), K = query.shape[:-3], query.shape[-3:-1], key.shape[-2]
    group = N // K
    rules = None if mask is None else as_mask(mask)
    if q_len is not None:
        rows = tracing.table(q_len.reshape(-1))
        rules = _and(rules, masks.mask(lambda b, h, i, j: i < rows[b]))
    if k_len is not None:
        keys = tracing.table(k_len.reshape(-1))
        rules = _and(rules, masks.mask(lambda b, h, i, j: j < keys[b]))
    if window is not None:
        left, right = (tracing.table(x) if isinstance(x, jax.Array) else x for x in window)

        def inside(b: Any, h: Any, i: Any, j: Any) -> Any:
            before, after = (x[()] if isinstance(x, tracing.Table) else x for x in (left, right))
            return (i - j <= before) & (j - i <= after)

        rules = _and(rules, masks.mask(inside))
    score = None
    if factors is not None:
        table, sizes = tracing.table(factors), factors.shape

        def scaled(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            at = zip((b, h // group, i, j), sizes, strict=True)
            return s * table[tuple(index if size > 1 else 0 for index, size in at)]

        score = scores.score(scaled)
    out, seen = attention(
        query, key, value, bias=bias, mask=rules, score=score, observe=["lse"], offset=0, layout="bnhd", **options
    )
    lse = jnp.moveaxis(seen.lse, -2, -1)
    if rules is not None:
        dead = lse == -jnp.inf
        mean = value.mean(-3, keepdims=True, dtype=lse.dtype).astype(out.dtype)[..., None, :]
        mean = jnp.broadcast_to(mean, (*lead, T, K, group, value.shape[-1])).reshape(out.shape)
        unseen = dead if q_len is None else dead & (jnp.arange(T)[:, None] < q_len.reshape(*lead, 1, 1))
        out = jnp.where(unseen[..., None], resharded(mean, jax.typeof(out)), out)
        lse = jnp.where(dead, -0.7 * np.finfo(np.float32).max + np.log(max(key.shape[-3], 1)), lse)
    return out, lse


def _each(arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """Apply `_attend` to each batch element and head, to drop the same weights in all."""
    query, K = arrays["query"], arrays["key"].shape[-2]
    lead, (T, N, _) = query.shape[:-3], query.shape[-3:]
    B, G = math.prod(lead), N // K
    parts = {n: arrays[n].reshape(B, *arrays[n].shape[-3:]) for n in ("key", "value")}
    parts["query"] = query.reshape(B, T, K, G, query.shape[-1])
    axes: dict[str, tuple[int | None, ...]] = {"query": (0, 1, 1), "key": (0, 1, None), "value": (0, 1, None)}
    for name, x in arrays.items():
        if name in parts:
            continue
        if name in ("q_len", "k_len"):
            x = x.reshape(B, 1, 1, 1, 1)
        else:  # (..., heads, T, S), each of which may be 1
            if math.prod(x.shape[:-3]) not in (1, B):
                x = jnp.broadcast_to(x, (*lead, *x.shape[-3:]))
            x = x.reshape(-1, *x.shape[-3:])
            heads = (K, x.shape[1] // K) if x.shape[1] > 1 else (1, 1)
            x = x.reshape(x.shape[0], *heads, *x.shape[-2:])
        axes[name] = tuple(None if size == 1 else 0 for size in x.shape[:3])
        parts[name] = x.squeeze(tuple(n for n in range(3) if x.shape[n] == 1))

    def one(parts: dict[str, Any]) -> tuple[Any, Any]:
        whole = {n: x[None, :, None] if n in ("query", "key", "value") else x for n, x in parts.items()}
        whole |= {n: x[None, None] for n, x in parts.items() if n not in ("query", "key", "value", "q_len", "k_len")}
        out, lse = _attend(**whole, **options)
        return out[0, :, 0], lse[0, :, 0]

    function: Any = one
    for n, at in ((2, 1), (1, 1), (0, 0)):
        function = jax.vmap(function, ({name: each[n] for name, each in axes.items()},), at)
    out, lse = function(parts)
    return out.reshape(*lead, T, N, out.shape[-1]), lse.reshape(*lead, T, N)


def _factors(scale: Any, shape: tuple[int, ...]) -> Any:
    """Return an array scale as (B, K, T, S), or 1 in place of any of these.

    As in jax.nn, it multiplies the logits of a whole group.
    """
    x = _four(scale)
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(reversed(x.shape), reversed(shape), strict=False)):
        raise ValueError(f"scale must be a number, or broadcast to (B, K, T, S) = {shape}, got shape {scale.shape}")
    if math.prod(x.shape[:-3]) > 1:
        x = jnp.broadcast_to(x, (*shape[:-3], *x.shape[-3:]))
    return x.reshape(-1, *x.shape[-3:])


def _window(size: Any) -> tuple[Any, Any] | None:
    """Return the bounds (left, right) of `local_window_size`, which may be traced."""
    if size is None:
        return None
    left, right = (size, size) if isinstance(size, int) else size
    for x in (left, right):
        if np.ndim(x):
            raise ValueError(f"local_window_size must be an int or two numbers (left, right), got {size!r}")
    return left, right


def _and(first: Mask | None, second: Mask) -> Mask:
    return second if first is None else first & second


def _four(x: Any) -> Any:
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3 or x.ndim != query.ndim:
            raise ValueError(f"{name} ndim should be {max(query.ndim, 3)}, but got {x.ndim}")
        if x.dtype != key.dtype:
            raise ValueError(f"{name} dtype should be {key.dtype}, but got {x.dtype}")
    lead, (S, K, H) = key.shape[:-3], key.shape[-3:]
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value shape should be {(*lead, S, K, -1)}: but got {value.shape}")
    if query.shape[:-3] != lead or query.shape[-1] != H:
        raise ValueError(f"query shape should be {(*lead, -1, -1, H)}: but got {query.shape}")
    if not K or query.shape[-2] % K:
        raise ValueError(
            f"The number of query heads must be a multiple of key/value heads, but got {query.shape[-2]} vs {K}"
        )


def _lengths(name: str, x: Any, lead: tuple[int, ...]) -> Any:
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.dtype != np.int32:
        raise ValueError(f"{name} dtype should be int32, but got {x.dtype}")
    if x.shape != lead:
        raise ValueError(f"{name} shape should be {lead}: but got {x.shape}")
    return x
