"""Multi-head attention: features split into heads, attended, and joined."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np

from regard.arguments.frameworks import NUMPY, Namespace, dispatched
from regard.arguments.signatures import passing_on
from regard.core import checks
from regard.core.statistics import Seen, Statistic, StatisticName
from regard.core.types import Array, ArrayLike, HeadsOptions
from regard.ops.attention import attention

NDArray = np.ndarray[Any, np.dtype[Any]]
WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")


@overload
def multihead_attention(  # type: ignore[overload-overlap]  # () is also a sequence of statistics
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    *,
    return_weights: Literal[False] = False,
    observe: tuple[()] = (),
    **options: Unpack[HeadsOptions],
) -> Array: ...
@overload
def multihead_attention(  # type: ignore[overload-overlap]  # () is also a sequence of statistics
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    *,
    return_weights: Literal[True],
    observe: tuple[()] = (),
    **options: Unpack[HeadsOptions],
) -> tuple[Array, Array]: ...
@overload
def multihead_attention(
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    *,
    return_weights: Literal[False] = False,
    observe: Sequence[StatisticName | Statistic],
    **options: Unpack[HeadsOptions],
) -> tuple[Array, Seen]: ...
@overload
def multihead_attention(
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    *,
    return_weights: Literal[True],
    observe: Sequence[StatisticName | Statistic],
    **options: Unpack[HeadsOptions],
) -> tuple[Array, Array, Seen]: ...
@overload
def multihead_attention(
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    *,
    return_weights: bool = False,
    observe: Sequence[StatisticName | Statistic] = (),
    **options: Unpack[HeadsOptions],
) -> Any: ...
@dispatched
@passing_on(attention, without=["layout"])
def multihead_attention(
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    w_q: ArrayLike | None = None,
    w_k: ArrayLike | None = None,
    w_v: ArrayLike | None = None,
    w_o: ArrayLike | None = None,
    b_q: ArrayLike | None = None,
    b_k: ArrayLike | None = None,
    b_v: ArrayLike | None = None,
    b_o: ArrayLike | None = None,
    **attention_options: Any,
) -> Any:
    """Compute multi-head attention (Vaswani et al. 2017, section 3.2.2).

    In index notation, i is a query, j a key, c a feature of the model, and h a head of queries. g
    is the head of keys and values that h reads; a and b are features of a head.

        Q[h,i,a] = X[i,c] W_q[c,h,a] + b_q[h,a]
        K[g,j,a] = Y[j,c] W_k[c,g,a] + b_k[g,a]
        V[g,j,b] = Z[j,c] W_v[c,g,b] + b_v[g,b]
        O[h,i,b] = attention(Q, K, V)                  as `regard.attention` defines it
        out[i,c] = O[h,i,b] W_o[h,b,c] + b_o[c]

    X, Y, Z are query, key and value. Self-attention is `multihead_attention(x, x, x, 8)`. In
    cross-attention, key and value are another sequence, of any length.

    Args:
        query: (..., n_q, d_model), or (n_q, d_model).
        key: (..., n_k, d_key). Leading dimensions broadcast.
        value: (..., n_k, d_value). All arrays share one dtype of float16, bfloat16, float32,
            float64.
        num_heads: h.
        num_kv_heads: h_kv, a divisor of h: groups of h / h_kv heads share a key and a value head.
            Default h.
        w_q: (d_model, h·d), the columns of a head side by side, for `query @ w_q`. (The weight of a
            `torch.nn.Linear` is the transpose.) A missing projection is the identity; w_q and w_k
            come together.
        w_k: (d_key, h_kv·d).
        w_v: (d_value, h_kv·d_v).
        w_o: (h·d_v, d_out).
        b_q, b_k, b_v, b_o: one number for each column of their projection.
        attention_options: those of `regard.attention`: mask, causal, score, bias, ... Masks and
            biases align right to (..., h, n_q, n_k). There is no `layout`: heads have no axis of
            their own.

    Returns:
        (..., n_q, d_out), or (..., n_q, h·d_v) without w_o; with `return_weights` or `observe` a
        tuple as from `regard.attention`, with weights (..., h, n_q, n_k). Products of 16-bit arrays
        accumulate in float32.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected.

    >>> import numpy as np, regard
    >>> x = np.random.default_rng(0).standard_normal((10, 64), dtype=np.float32)
    >>> regard.multihead_attention(x, x, x, 8).shape
    (10, 64)
    >>> out, weights = regard.multihead_attention(x, x[:6], x[:6], 8, return_weights=True)
    >>> weights.shape
    (8, 10, 6)
    >>> w = np.eye(64, dtype=np.float32)
    >>> projections = {"w_q": w, "w_k": w[:, :16], "w_v": w[:, :16]}
    >>> out = regard.multihead_attention(x, x, x, 8, num_kv_heads=2, causal=True, **projections)
    >>> out.shape
    (10, 64)
    """
    weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o, "b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    return projected(NUMPY, query, key, value, num_heads, num_kv_heads=num_kv_heads, **weights, **attention_options)


def projected(
    space: Namespace,
    query: Any,
    key: Any,
    value: Any,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    **options: Any,
) -> Any:
    """Compute `multihead_attention` on the arrays of a framework.

    options: its projections and those of attention.
    """
    arrays = {"query": query, "key": key, "value": value} | {name: options.pop(name, None) for name in WEIGHTS}
    hollow: dict[str, Any] = {name: None if x is None else space.hollow(name, x) for name, x in arrays.items()}
    h = checks.integer("num_heads", num_heads)
    h_kv = h if num_kv_heads is None else checks.integer("num_kv_heads", num_kv_heads)
    if h < 1 or h_kv < 1 or h % h_kv:
        numbers = f"{checks.shown(h)} and {checks.shown(h_kv)}"
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {numbers}")
    if (hollow["w_q"] is None) != (hollow["w_k"] is None):
        raise ValueError(f"w_q and w_k come together, got {'w_q' if hollow['w_k'] is None else 'w_k'} alone")
    inputs = {name: hollow[name] for name in ("query", "key", "value")}
    present = inputs | {name: x for name, x in hollow.items() if x is not None}
    checks.same_dtype(**{name: checks.array(name, x) for name, x in present.items()})
    shapes = ", ".join(f"{name} {x.shape}" for name, x in inputs.items())
    if min(x.ndim for x in inputs.values()) < 2:
        raise ValueError(f"query, key and value must be (..., n, features), got {shapes}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have the same number of keys n_k, got {shapes}")
    try:
        np.broadcast_shapes(*(x.shape[:-2] for x in inputs.values()))
    except ValueError:
        raise ValueError(f"the leading dimensions must broadcast, got {shapes}") from None

    def columns(source: str, shape: tuple[int, ...], name: str) -> tuple[int, str]:
        return _columns(source, shape, name, hollow[f"w_{name}"], hollow[f"b_{name}"])

    d = _per_head(columns("query", inputs["query"].shape, "q"), "num_heads", h)
    d_key = _per_head(columns("key", inputs["key"].shape, "k"), "num_kv_heads", h_kv)
    d_v = _per_head(columns("value", inputs["value"].shape, "v"), "num_kv_heads", h_kv)
    if d != d_key:
        raise ValueError(f"query and key must have the same number of features d in a head, got {d} and {d_key}")
    columns("the joined heads", (*inputs["query"].shape[:-1], h * d_v), "o")

    def linear(x: Any, name: str) -> Any:
        """Return x @ w + b in the dtype of x, computed in float32 for 16 bit."""
        w, b = arrays[f"w_{name}"], arrays[f"b_{name}"]
        if w is None:
            return x
        narrow = inputs["query"].dtype
        wide = np.result_type(narrow, np.float32)
        y = space.cast(x, wide) @ space.cast(w, wide)
        if b is not None:
            b = space.cast(b, wide)
            y = np.add(y, b, out=y) if space is NUMPY else y + b
        return space.cast(y, narrow)

    q, k, v = linear(query, "q"), linear(key, "k"), linear(value, "v")
    split = ((q, h, d), (k, h_kv, d), (v, h_kv, d_v))
    result = attention(*(x.reshape(*x.shape[:-1], *sizes) for x, *sizes in split), layout="bnhd", **options)
    out, *rest = result if isinstance(result, tuple) else (result,)
    out = linear(out.reshape(*out.shape[:-2], h * d_v), "o")
    return (out, *rest) if rest else out


def _columns(source: str, shape: tuple[int, ...], name: str, w: NDArray | None, b: NDArray | None) -> tuple[int, str]:
    """Check a projection; return its number of features, and their source."""
    if w is None:
        if b is not None:
            raise ValueError(f"b_{name} needs w_{name}")
        return shape[-1], f"{source} {shape}"
    if w.ndim != 2 or w.shape[0] != shape[-1]:
        raise ValueError(f"w_{name} must be a matrix with a row for each feature of {source} {shape}, got {w.shape}")
    if b is not None and b.shape != w.shape[1:]:
        raise ValueError(f"b_{name} must have a number for each column of w_{name} {w.shape}, got {b.shape}")
    return w.shape[1], f"w_{name} {w.shape}"


def _per_head(columns: tuple[int, str], argument: str, heads: int) -> int:
    features, source = columns
    if features % heads:
        raise ValueError(f"{argument}={checks.shown(heads)} must divide the {features} features of {source}")
    return features // heads
