"""The source of scenes that have weights alone: results of other tools, and of models that return them.

Attention with scores b = log P, zero queries and no mask has the weights P. So a layer of weights is a `Problem` whose
bias is their logarithm, and all that reads weights of a head reads these. A weight of 0 has the score `ZERO`, so
its key is visible. Hidden are the keys of rows of nothing but 0, and those after a query if all weights there are 0.
Where rows sum to less than 1, as with a learned sink, b = log(P / r) beside a sink of score 0 leaves the rest
r = 1 − Σ P to the sink.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.ops.normalization import problem_from
from regard.viewer.scene.scenes import Array, Kind, Scene, SceneLayer

TOLERANCE = 0.01
"""Deviation of a row's sum from 1 that counts as rounding: in bfloat16 it reaches 0.004."""

LEAST_REST = 1e-6
"""What a row leaves at least beside rows that leave more than `TOLERANCE`."""

ZERO = -1e4
"""The score of a weight of 0: its exponential is 0 in float32, and 0 · `ZERO` is 0, as in 0 · log 0 = 0."""

LACKS = "This head came as weights alone: its scores, steps and matrices need its queries, keys and values"


class Operands(NamedTuple):
    """Query, key and value of a head, (n_q, d), (n_k, d) and (n_k, d_v), and the scale of its scores."""

    query: Array
    key: Array
    value: Array
    scale: float | None = None


def weights(
    given: Any,
    *,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    operands: Mapping[tuple[int, int], Operands] | None = None,
    name: str = "weights",
    kind: Kind = "weights",
) -> Scene:
    """Return a scene of weights.

    given: an array (heads, n_q, n_k) or (layers, heads, n_q, n_k); or arrays (heads, n_q, n_k) or (batch, heads, n_q,
    n_k) of layers, as a sequence, with None for a layer without, or as a mapping by the model's numbers. tokens,
    key_tokens: as of `sources.arrays`. operands: what made the weights of some heads of batch element 0, by the numbers
    of layer and head.

    Rows that sum to 1 within `TOLERANCE` are scaled to 1. In a layer with rows that sum to less, a sink has the rest.

    Raises TypeError or ValueError for weights of another form, negative or infinite ones, and rows that sum to more
    than 1.

    >>> scene = weights([[[[1.0, 0.0], [0.25, 0.75]]]], tokens=["a", "b"])
    >>> scene.layers[0].causal, scene.layers[0].head(0).seen(range(1, 2), range(2))
    (True, array([[0.25, 0.75]], dtype=float32))
    """
    layers = dict(_layers(given))
    if not layers:
        raise ValueError("weights hold no layer; models of transformers return them with attn_implementation='eager'")
    batch, _, n_q, n_k = next(iter(layers.values())).shape
    for number, layer in layers.items():
        if (layer.shape[0], *layer.shape[2:]) != (batch, n_q, n_k):
            raise ValueError(
                f"weights of every layer must be of the same tokens: layer {next(iter(layers))} has {n_q} queries and "
                f"{n_k} keys in {batch} sequences, layer {number} {layer.shape[2]} and {layer.shape[3]} in "
                f"{layer.shape[0]}"
            )
    same = tokens if key_tokens is None and n_q == n_k else key_tokens
    for argument, pieces, size in (("tokens", tokens, n_q), ("key_tokens", key_tokens, n_k)):
        if pieces is not None and len(pieces) != size:
            raise ValueError(f"{argument} must be one for each row, {size}, got {len(pieces)}")
    queries, keys = tuple(map(str, tokens or ())), tuple(map(str, same or ()))
    ids = np.unique(keys, return_inverse=True)[1].astype(np.int64) if keys else None
    return Scene(
        name=name,
        kind=kind,
        layers=tuple(
            _layer(number, layer, n_q != n_k or queries != keys, _of_layer(number, operands or {}))
            for number, layer in layers.items()
        ),
        query_tokens=queries,
        key_tokens=keys,
        ids=None if ids is None else np.broadcast_to(ids, (batch, n_k)),
    )


def _of_layer(number: int, operands: Mapping[tuple[int, int], Operands]) -> dict[int, Operands]:
    return {head: x for (layer, head), x in operands.items() if layer == number}


def _layer(number: int, P: Array, other: bool, operands: Mapping[int, Operands]) -> SceneLayer:
    """Return one layer. other: queries and keys are different tokens."""
    causal = not other and bool((np.triu(P, 1) == 0).all())
    rest = 1 - P.sum(axis=-1, keepdims=True)
    leaks = bool(((rest > TOLERANCE) & (rest < 1)).any())
    bias = np.where(P.any(axis=-1, keepdims=True), ZERO, -np.inf) * np.ones(P.shape)
    np.log(P, out=bias, where=P > 0)
    bias -= np.log(np.maximum(rest, LEAST_REST)) if leaks else 0
    bias = bias[0] if len(bias) == 1 else bias
    *lead, heads, n_q, n_k = bias.shape
    nothing = np.zeros((*lead, heads, max(n_q, n_k), 1), np.float32)
    problem = problem_from(
        nothing[..., :n_q, :], nothing[..., :n_k, :], nothing[..., :n_k, :], bias=bias.astype(np.float32),
        causal=causal, sink=np.zeros(heads, np.float32) if leaks else None,
    )  # fmt: skip
    present = ", ".join(f"L{number} H{head}" for head in operands)
    return SceneLayer(
        name=f"layers.{number}",
        problem=problem,
        no_values=LACKS,
        lacks=f"{LACKS}; those of {present} are here." if present else f"{LACKS}.",
        cross=other and not causal,
        number=number,
        single_heads={head: _known(number, x, causal) for head, x in operands.items()},
    )


def _known(number: int, of: Operands, causal: bool) -> SceneLayer:
    """Return a head whose operands are known, as a layer of one head."""
    q, k, v = (np.asarray(x, np.float32)[None] for x in (of.query, of.key, of.value))
    return SceneLayer(f"layers.{number}", problem_from(q, k, v, causal=causal, scale=of.scale), number=number)


def _layers(weights: Any) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield the number and the weights (batch, heads, n_q, n_k) of each layer, checked."""
    if isinstance(weights, np.ndarray):
        if weights.ndim not in (3, 4):
            raise ValueError(
                f"weights must be (layers, heads, n_q, n_k), or (heads, n_q, n_k) of one layer, got {weights.shape}"
            )
        weights = [weights] if weights.ndim == 3 else list(weights)
    if not isinstance(weights, Sequence | Mapping) or isinstance(weights, str):
        raise TypeError(f"weights must be an array, or arrays of layers, got {type(weights).__name__}")
    for number, layer in weights.items() if isinstance(weights, Mapping) else enumerate(weights):
        if layer is not None:
            yield number, _checked(number, layer)


def _checked(number: Any, layer: Any) -> NDArray[np.float64]:
    """Return the weights of a layer as (batch, heads, n_q, n_k)."""
    what = f"weights of layer {number}"
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise TypeError(f"weights must be by numbers of layers, from 0 on, got {number!r}")
    try:
        P = np.asarray(layer)
        numbers = np.can_cast(P.dtype, np.float64) and P.dtype != bool
    except (TypeError, ValueError):  # rows of different lengths
        raise ValueError(f"{what} must be (heads, n_q, n_k) or (batch, heads, n_q, n_k)") from None
    if not numbers:
        raise TypeError(f"{what} must be real numbers, got {P.dtype}")
    if P.ndim not in (3, 4) or not P.size:
        raise ValueError(f"{what} must be (heads, n_q, n_k) or (batch, heads, n_q, n_k), none of them 0, got {P.shape}")
    P = P.astype(np.float64).reshape((-1, *P.shape[-3:]))
    for bad, must in ((~np.isfinite(P), "finite"), (P < 0, "at least 0, as a softmax makes them")):
        if bad.any():
            b, head, i, j = np.argwhere(bad)[0].tolist()
            raise ValueError(f"{what} must be {must}, got {P[b, head, i, j]} at head {head}, query {i}, key {j}")
    sums = P.sum(axis=-1)
    if (over := sums > 1 + TOLERANCE).any():
        b, head, i = np.argwhere(over)[0].tolist()
        raise ValueError(f"{what} must sum to at most 1 in a row, got {sums[b, head, i]:.4g} at head {head}, query {i}")
    return P
