"""Every matrix of one small head, as `regard.steps` gives it, and the scores of one query in a head of any size."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core.parts import part_of
from regard.ops.stepping import steps_of_head
from regard.reference import specification
from regard.viewer.scene.scenes import SceneLayer

MOST = 128
"""Queries, and keys, of a head whose matrices are shown whole."""


@dataclass(frozen=True, eq=False)
class StepMatrix:
    """A step of one head: what `regard.steps` says of it, and its values (rows, columns); lse is one column."""

    name: str
    symbol: str
    tensor: str
    formula: str
    values: NDArray[np.float64]


def matrices(layer: SceneLayer, head: int, b: int = 0) -> tuple[StepMatrix, ...]:
    """The steps of one head. Raises ValueError if it has more than `MOST` queries or keys.

    Values and output are left out where the layer has no values.
    """
    p = part_of(layer.problem, b, head)
    if max(p.n_q, p.n_k) > MOST:
        raise ValueError(f"matrices are shown up to {MOST} tokens, here are {p.n_q} queries and {p.n_k} keys")
    unknown = () if layer.has_values else ("values", "output")
    return tuple(
        StepMatrix(step.name, step.symbol, step.tensor, step.formula, _matrix(step.value))
        for step in steps_of_head(p)
        if step.name not in unknown
    )


def row_scores(layer: SceneLayer, head: int, i: int, b: int = 0) -> NDArray[np.float32]:
    """The scores of query i before and after rules hide keys, and its weights: (3, n_k).

    A hidden key has the score −∞. O(n) work, by the specification.
    """
    p = part_of(layer.problem, b, head, rows=slice(i, i + 1))
    with np.errstate(all="ignore"):
        f = specification.terms(p)
        before: Any = f.T
        if p.score_node is not None:
            before = specification.evaluate_one(p.score_node, specification.indices_of(p, np.float64, f.T), f.T.shape)
        if p.bias is not None:
            before = before + specification.dense(p, p.bias)
    return np.stack([x[0, 0, 0] for x in (np.broadcast_to(before, f.S.shape), f.S, f.P)]).astype(np.float32)


def _matrix(value: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(value if value.ndim > 1 else value[:, None], np.float64)
