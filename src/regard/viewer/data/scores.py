"""Scores of heads, and the columns of a table of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.core.parts import part_of
from regard.insight import HeadStatistics, measure_heads
from regard.viewer.scene.scenes import SMALL, Scene


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


def layer_scores(
    scene: Scene, layer: int, b: int = 0, progress: Callable[[float], object] = lambda done: None
) -> tuple[HeadStatistics, ...]:
    """The scores of every head of a layer, in O(n) memory; NaN where a score has no meaning: nothing repeats, there are
    no tokens, or queries and keys are those of different sequences. `layer` and `head` are places in the scene.
    """
    of = scene.layers[layer]
    ids = None if scene.ids is None or of.cross else scene.ids[b]
    nothing: dict[str, Any] = {name: np.nan for name in ("previous", "current") if of.cross}
    if ids is not None:
        lengths = {"induction": scene.prefix, "duplicate": 1}
        nothing |= {name: np.nan for name, length in lengths.items() if not repeats(ids, length)}
    small = of.problem.n_q * of.problem.n_k <= SMALL
    found: list[HeadStatistics] = []
    for number in [None] if small else range(of.heads):
        progress((number or 0) / of.heads)
        p = part_of(of.problem, b, number)
        found += measure_heads(
            p.query, p.key, ids, layer=layer, prefix=scene.prefix, engine="tiled" if small else None, mask=p.mask,
            score=p.score, bias=p.bias, scale=p.scale, sink=p.sink, offset=int(p.offset[0]), origin=p.origin,
        )  # fmt: skip
    return tuple(replace(x, head=n, kv_head=of.kv_numbers[n], **nothing) for n, x in enumerate(found))


def repeats(ids: NDArray[np.int64], length: int) -> bool:
    """Whether some run of so many tokens occurs twice."""
    runs = np.lib.stride_tricks.sliding_window_view(ids, min(length, len(ids)))
    return length <= len(ids) and len(np.unique(runs, axis=0)) < len(runs)
