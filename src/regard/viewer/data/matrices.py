"""Every matrix of a small head, and one query's scores in a head of any size."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core.parts import part_of
from regard.engines import engines
from regard.ops.stepping import steps_of_head
from regard.reference import specification
from regard.viewer.data.numbers import all_finite
from regard.viewer.scene.scenes import Projections, SceneLayer

MOST = 128
"""Maximum number of queries, and of keys, to show whole matrices of a head."""


@dataclass(frozen=True, eq=False)
class StepMatrix:
    """A step of `regard.steps` in one head, with its values (rows, columns).

    lse is one column. rotary: features of projected queries or keys that are rotated next, a with a + rotary / 2.
    """

    name: str
    symbol: str
    tensor: str
    formula: str
    values: NDArray[np.float64]
    rotary: int = 0

    def described(self) -> dict[str, Any]:
        """Return the matrix as JSON, its numbers with six digits."""
        plain = {name: getattr(self, name) for name in ("name", "symbol", "tensor", "formula", "rotary")}
        return plain | {"values": [all_finite(float(f"{x:.6g}") for x in row) for row in self.values.tolist()]}


def matrices(layer: SceneLayer, head: int, b: int = 0) -> tuple[StepMatrix, ...]:
    """Return the steps of one head.

    Values and output are omitted if the layer has no values. If the model is known, projections are included: those of
    queries, keys and values before the steps, that of the joined heads after them.

    Raises ValueError for more than `MOST` queries or keys, and for a head with weights alone.
    """
    layer, head = layer.computed(head)
    p = part_of(layer.problem, b, head)
    if max(p.n_q, p.n_k) > MOST:
        raise ValueError(f"matrices are shown up to {MOST} tokens, here are {p.n_q} queries and {p.n_k} keys")
    unknown = () if layer.has_values else ("values", "output")
    steps = tuple(
        StepMatrix(step.name, step.symbol, step.tensor, step.formula, _matrix(step.value))
        for step in steps_of_head(p)
        if step.name not in unknown
    )
    own = layer.projections
    return steps if own is None else (*_before(own, p.d, p.d_v, head, b), *steps, *_after(own, b))


def _before(projections: Projections, d: int, d_v: int, head: int, b: int) -> Iterator[StepMatrix]:
    """Yield the input and the projections of a head's queries, keys and values."""
    x, own = projections.x[b], slice(head * d, (head + 1) * d)
    yield StepMatrix("input", "X", "X[i,c]", "", _matrix(x))
    source, name = x, "X[j,c]"
    if projections.source is not None:
        source, name = projections.source[b], "Z[j,c]"
        yield StepMatrix("source", "Z", name, "", _matrix(source))
    for letter, index, what, of, rows, w, bias in (
        ("Q", "i", "query", "X[i,c]", x, projections.w_q, projections.b_q),
        ("K", "j", "key", name, source, projections.w_k, projections.b_k),
    ):  # fmt: skip
        weight = f"W_{letter}[c,a]"
        yield StepMatrix(f"{what} projection", f"W_{letter}", weight, "", _matrix(w[:, own]))
        if bias is None and not projections.rotary:
            continue
        bare = _matrix(rows) @ w[:, own] + (0 if bias is None else bias[own])
        formula = f"{letter}′[{index},a] = {of} {weight}" + ("" if bias is None else f" + b_{letter}[a]")
        plural = {"Q": "projected queries", "K": "projected keys"}[letter]
        yield StepMatrix(plural, f"{letter}′", f"{letter}′[{index},a]", formula, bare, projections.rotary)
    own = slice(head * d_v, (head + 1) * d_v)
    yield StepMatrix("value projection", "W_V", "W_V[c,b]", "", _matrix(projections.w_v[:, own]))


def _after(projections: Projections, b: int) -> Iterator[StepMatrix]:
    """Yield the joined heads of a layer, and their projection."""
    joined = np.swapaxes(projections.out[b], 0, 1)
    joined = _matrix(joined.reshape(len(joined), -1))
    yield StepMatrix("heads side by side", "C", "C[i,e]", "C = [O of head 0, O of head 1, …]", joined)
    yield StepMatrix("output projection", "W_O", "W_O[e,c]", "", _matrix(projections.w_o))
    yield StepMatrix("written", "Y", "Y[i,c]", "Y[i,c] = C[i,e] W_O[e,c]", joined @ projections.w_o)


def row_scores(layer: SceneLayer, head: int, i: int, b: int = 0) -> NDArray[np.float32]:
    """Return the scores of query i before and after masking, and its weights.

    Float32 (3, n_k), by the specification in O(n) work. A hidden key has the score −∞. Raises `Unknown` for a head with
    weights alone.
    """
    layer, head = layer.computed(head)
    p = part_of(layer.problem, b, head, rows=slice(i, i + 1))
    with np.errstate(all="ignore"):
        engines()["spec"].require("forward", p)
        f = specification.terms(p)
        before: Any = f.T
        if p.score_node is not None:
            before = specification.evaluate_one(p.score_node, specification.indices_of(p, np.float64, f.T), f.T.shape)
        if p.bias is not None:
            before = before + specification.dense(p, p.bias)
    return np.stack([x[0, 0, 0] for x in (np.broadcast_to(before, f.S.shape), f.S, f.P)]).astype(np.float32)


def _matrix(value: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(value if value.ndim > 1 else value[:, None], np.float64)
