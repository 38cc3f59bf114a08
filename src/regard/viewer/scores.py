"""Scores of heads, and what a table of them says of each: its columns, and the kind a head is of."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from regard.insight import HeadStatistics, measure_heads
from regard.problem import Problem
from regard.stepping import Array

from .scene import SMALL, Scene


class Kind(NamedTuple):
    """A kind of head: its name, a short one, and what its score measures."""

    name: str
    short: str
    meaning: str


KINDS = (
    Kind("previous token", "prev", "weight on the token just before"),
    Kind("induction", "ind", "weight on what came next last time"),
    Kind("first-token sink", "sink", "weight on the first token"),
    Kind("duplicate token", "dup", "weight on earlier copies of the token"),
    Kind("current token", "self", "weight on the token itself"),
)
FEATURED = KINDS[:3]

NOTABLE = 0.25
"""The score from which a head is called by its kind."""


def kind_of(scores: dict[str, float]) -> tuple[Kind, float] | None:
    """The kind for which a head scores highest, and that score, if it is notable. Heads rest on the first token where
    they find nothing else: a head is called a sink only if it is of no other kind.
    """
    notable = [(kind, scores[kind.name]) for kind in KINDS if scores[kind.name] >= NOTABLE]
    return max(notable, key=lambda pair: (pair[0].name != "first-token sink", pair[1]), default=None)


def layer_scores(
    scene: Scene, layer: int, b: int = 0, progress: Callable[[float], object] = lambda done: None
) -> tuple[HeadStatistics, ...]:
    """The scores of every head of a layer, in O(n) memory; NaN where a score has no meaning: nothing repeats, there are
    no tokens, or queries and keys are not the same tokens.
    """
    of = scene.layers[layer]
    ids = None if scene.ids is None or of.problem.n_q != scene.ids.shape[1] else scene.ids[b]
    found = []
    for number in range(of.heads):
        progress(number / of.heads)
        head = _scores(of.problem.part(b, number), ids, scene.prefix, of.cross)
        found.append(replace(head, layer=layer, head=number, kv_head=number // of.problem.group))
    return tuple(found)


def _scores(p: Problem, ids: Array | None, prefix: int, cross: bool) -> HeadStatistics:
    engine = "tiled" if p.n_q * p.n_k <= SMALL else None
    options = {
        "mask": p.mask, "score": p.score, "bias": p.bias, "scale": p.scale, "sink": p.sink,
        "offset": int(p.offset[0]), "origin": p.origin,
    }  # fmt: skip
    q, k = p.query, p.key
    same = p.n_q == p.n_k and not cross
    if not same:  # as if the last queries of a sequence of keys; what compares positions is left out below
        q = np.zeros((1, p.n_k, p.d), q.dtype)
    (found,) = measure_heads(q, k, ids, prefix=prefix, engine=engine, **options)
    if ids is not None:
        for field, length in (("induction", prefix), ("duplicate", 1)):
            if not repeats(ids, length):
                found = replace(found, **{field: np.nan})
    return found


def repeats(ids: Array, length: int) -> bool:
    """Whether some run of so many tokens occurs twice."""
    runs = np.lib.stride_tricks.sliding_window_view(ids, min(length, len(ids)))
    return length <= len(ids) and len(np.unique(runs, axis=0)) < len(runs)
