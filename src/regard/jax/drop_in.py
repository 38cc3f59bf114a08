"""`jax.nn.dot_product_attention` by its own conventions, on the engines of this library."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import jax
import regard
from regard.rules import Mask, as_mask


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
    """Attention with the signature and the conventions of `jax.nn.dot_product_attention`; Flax's `attention_fn` too.

    In O(n) memory, forward and backward, with every derivative. Letters: B batch, T queries, S keys, N query heads, K
    key-value heads (N a multiple of K), H features.

    Args:
        query: (B, T, N, H) or (T, N, H); more leading dimensions too.
        key: (B, S, K, H) or (S, K, H).
        value: as key; the features may differ in number.
        bias: added to the logits; broadcasts to (B, N, T, S).
        mask: booleans that broadcast to (B, N, T, S), True = attend.
        scale: of the logits, 1/√H unless given; may be traced, and differentiates.
        is_causal: key s is seen by the queries t ≥ s, counted from the first of each.
        query_seq_lengths: int32 (B,); later queries give 0.
        key_value_seq_lengths: int32 (B,); later keys are masked.
        local_window_size: (left, right), or one number for both: query t sees the keys t − left ≤ s ≤ t + right.
        implementation: None for the best engine; "xla" computes by XLA; "cudnn" is not here.
        return_residual: also return the log-sum-exp of the logits, (B, T, N), without a gradient.
        dropout_rng, dropout_rate, broadcast_dropout, deterministic, dtype, precision, module: what Flax passes to an
            `attention_fn`. A mask may then be of any dtype. `broadcast_dropout` drops the same weights in every batch
            element and head. `precision` asks for nothing: products are exact to the dtype. `module` must be None.

    Returns:
        (B, T, N, H), or with `return_residual` a pair. A query whose keys are all masked gives the mean of all values,
        as jax.nn has it.

    Raises:
        ValueError: for shapes and dtypes that do not fit, as jax.nn; TypeError, ValueError of `regard.attention`.

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
    lead, (T, N) = query.shape[:-3], query.shape[-3:-1]
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
    if implementation not in (None, "xla"):
        raise ValueError(f"Unsupported implementation option: {implementation}; regard has None and 'xla'")
    if module is not None:
        raise ValueError("the weights are not kept: give sow_weights=False, or regard.attention(return_weights=True)")
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    q_len, k_len = (_lengths(name, x, lead) for name, x in lengths.items())

    rules = None if mask is None else as_mask(mask)
    if q_len is not None:
        rows = regard.table(q_len)
        rules = _and(rules, regard.mask(lambda b, h, i, j: i < rows[b]))
    if k_len is not None:
        rules = _and(rules, regard.padding(k_len))
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
        rules = _and(rules, regard.window(left, right))
    hides = rules is not None
    score = None
    if isinstance(scale, jax.Array):
        factor, scale = regard.table(scale), 1.0
        score = regard.score(lambda s, b, h, i, j: s * factor[()])
    dropping = bool(dropout_rate) and not deterministic
    if dropping and dropout_rng is None:
        raise ValueError(f"dropout_rate={dropout_rate} needs dropout_rng=, a key of jax.random")
    if dropping and broadcast_dropout:
        raise ValueError("the same weights cannot be dropped in all batch elements: give broadcast_dropout=False")
    options: dict[str, Any] = {
        "causal": is_causal, "mask": rules, "score": score, "scale": None if scale is None else float(scale),
        "offset": 0, "layout": "bnhd", "engine": implementation,
    }  # fmt: skip
    if dropping:
        options |= {"dropout": float(dropout_rate), "seed": dropout_rng}
    out, seen = regard.attention(query, key, value, bias=bias, observe=["lse"], **options)
    lse = jnp.moveaxis(seen.lse, -2, -1)
    if hides:
        dead = lse == -jnp.inf
        mean = jnp.repeat(value.mean(-3, keepdims=True, dtype=lse.dtype), N // K, axis=-2).astype(out.dtype)
        real = dead if q_len is None else dead & (jnp.arange(T)[:, None] < q_len.reshape(*lead, 1, 1))
        out = jnp.where(real[..., None], mean, out)
        lse = jnp.where(dead, -0.7 * np.finfo(np.float32).max + np.log(max(S, 1)), lse)
    out = out.reshape(*shape[:-1], value.shape[-1])
    if not return_residual:
        return out
    return out, jax.lax.stop_gradient(lse.astype(key.dtype)).reshape(shape[:-1])


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
