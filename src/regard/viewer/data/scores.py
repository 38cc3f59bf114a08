"""Scores of heads, and the columns of a table of them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.core.parts import part_of
from regard.insight import HeadStatistics, measure_heads
from regard.interpret.heads import CLEAR, all_notable, notable, sampled_statistics
from regard.runtime.threads import one_blas_thread
from regard.viewer.data.numbers import finite
from regard.viewer.data.outlines import MapRows, Outline, outline, words_in
from regard.viewer.scene.scenes import SMALL, Scene, SceneLayer

COMPILED = 2**25
"""Query-key pairs of all heads above which a kernel takes less time than NumPy's tiles, its compiler included."""

TOGETHER = 2**28
"""Maximum pairs of a layer whose heads are measured in one call."""


class HeadKind(NamedTuple):
    """A kind of head: its name, a short name, what its score measures, its definition."""

    name: str
    short: str
    meaning: str
    definition: str


KINDS = (
    HeadKind(
        "previous token", "prev", "weight on the token just before",
        "Looks at the token just before. The first half of an induction circuit (Elhage et al. 2021).",
    ),
    HeadKind(
        "induction", "ind", "weight on what came next last time",
        "Looks at what followed the last time the current tokens occurred, and so continues what repeats "
        "(prefix matching score, Olsson et al. 2022).",
    ),
    HeadKind(
        "first-token sink", "sink", "weight on the first token",
        "Rests on the first token where it finds nothing else: attention sums to 1 and has to go somewhere "
        "(attention sink, Xiao et al. 2024, Gu et al. 2025).",
    ),
    HeadKind(
        "duplicate token", "dup", "weight on earlier copies of the token",
        "Looks at earlier copies of the current token (Wang et al. 2022).",
    ),
    HeadKind("current token", "self", "weight on the token itself", "Looks at the current token itself."),
    HeadKind(
        "n tokens back", "back", "weight on one distance of 2 to 5 tokens",
        "Looks a fixed number of tokens back, two or more: the distance with the largest mean weight.",
    ),
)  # fmt: skip
FEATURED = KINDS[:3]

COLUMNS: tuple[dict[str, Any], ...] = (
    *({"name": kind.name, "label": kind.name, "help": kind.meaning, "low": 0.0, "high": 1.0} for kind in KINDS),
    {"name": "entropy", "label": "entropy", "help": "of a query's weights, in nats", "low": 0.0, "high": None},
    {
        "name": "normalized entropy", "label": "normalized entropy",
        "help": "entropy over the logarithm of how many keys the query sees: 0 one key, 1 all alike",
        "low": 0.0, "high": 1.0,
    },
)  # fmt: skip
"""The columns of the page's table of heads."""


class NamedKind(NamedTuple):
    """A notable kind of one head, and its score.

    called: the kind's name, with the distance filled in.
    """

    kind: HeadKind
    called: str
    score: float

    @property
    def tentative(self) -> bool:
        """True for a score below `CLEAR`, from which on a kind is certain."""
        return self.score < CLEAR


def kinds_of(head: HeadStatistics) -> tuple[NamedKind, ...]:
    """Return every notable kind of a head, the main one first."""
    by_name = {kind.name: kind for kind in KINDS}
    return tuple(NamedKind(by_name[x], head.called(x), head.scores[x]) for x in all_notable(head.scores))


def table(heads: Iterable[HeadStatistics]) -> dict[str, Any]:
    """Return scores of heads as JSON: the columns of a table, and its rows."""
    rows = [_row(head) for head in heads]
    highest = max((row["scores"]["entropy"] or 0.0 for row in rows), default=0.0)
    columns = [{**column, "high": column["high"] or highest or 1.0} for column in COLUMNS]
    return {"columns": columns, "rows": rows}


def _row(head: HeadStatistics) -> dict[str, Any]:
    scores = head.scores | {"entropy": head.entropy, "normalized entropy": head.normalized_entropy}
    kinds = [
        {"kind": x.kind.name, "name": x.called, "score": x.score, "tentative": x.tentative} for x in kinds_of(head)
    ]
    return {
        "layer": head.layer, "head": head.head, "kv_head": head.kv_head, "kind": notable(head.scores), "kinds": kinds,
        "scores": {name: finite(score) for name, score in scores.items()},
    }  # fmt: skip


def layer_scores(
    scene: Scene, layer: int, b: int = 0, progress: Callable[[float], object] = lambda done: None
) -> tuple[HeadStatistics, ...]:
    """Measure every head of a layer, in O(n) memory.

    A score is NaN where it has no meaning: nothing repeats, there are no tokens, or queries and keys belong to
    different sequences. `layer` and `head` are indices in the scene.
    """
    of = scene.layers[layer]
    ids, nothing = _tokens(scene, of, b)
    pairs = of.problem.n_q * of.problem.n_k
    engine = "tiled" if pairs <= SMALL and scene.pairs <= COMPILED else None
    measured: list[HeadStatistics] = []
    for number in [None] if pairs * of.heads <= TOGETHER else range(of.heads):
        progress((number or 0) / of.heads)
        p = part_of(of.problem, b, number)
        measured += measure_heads(
            p.query, p.key, ids, layer=layer, prefix=scene.prefix, engine=engine, mask=p.mask,
            score=p.score, bias=p.bias, scale=p.scale, sink=p.sink, offset=int(p.offset[0]), origin=p.origin,
        )  # fmt: skip
    return tuple(replace(x, head=n, kv_head=of.kv_numbers[n], **nothing) for n, x in enumerate(measured))


class Estimate(NamedTuple):
    """The scores of a head and the outline of its map, from some of its queries."""

    scores: HeadStatistics
    outline: Outline


def estimates(scene: Scene, layer: int, rows: int, b: int = 0) -> tuple[Estimate, ...]:
    """Estimate `layer_scores`, and the outlines of maps, from `rows` evenly spaced queries of each head.

    O(rows · n) work, without a pass for lse. As many rows as there are queries give exact results.
    """
    of = scene.layers[layer]
    ids, nothing = _tokens(scene, of, b)
    n_q, n_k = of.problem.n_q, of.problem.n_k
    some = np.unique(np.linspace(0, n_q - 1, min(rows, n_q)).round().astype(np.int64))
    positions = np.clip(some + int(of.problem.offset[0]), 0, n_k - 1)
    tokens = np.arange(n_k) if ids is None else ids
    nothing |= {name: np.nan for name in ("induction", "duplicate") if ids is None}
    words = words_in(scene.key_tokens) if scene.key_tokens and ids is not None else None
    estimated: list[Estimate] = []
    for head in range(of.heads):
        with one_blas_thread():  # products this small take longer on several
            weights = of.head(head, b).weights_of(some)
        (one,) = sampled_statistics(weights[None], positions, tokens, layer=layer, prefix=scene.prefix)
        sink = of.problem.sink is not None
        visible = _visible(of, head, b, some, positions)
        seen = MapRows(weights, visible, some, None if of.cross else positions, ids, scene.prefix, sink)
        scores = replace(one, head=head, kv_head=of.kv_numbers[head], **nothing)
        estimated.append(Estimate(scores, outline(seen, words)))
    return tuple(estimated)


def _visible(
    of: SceneLayer, head: int, b: int, some: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which keys the sampled queries see: those whose score is not −∞, whatever their weight."""
    if not of.plain:
        return of.head(head, b).visible_of(some)
    keys = np.arange(of.problem.n_k)
    return keys <= positions[:, None] if of.causal else np.ones((len(some), len(keys)), bool)


def _tokens(scene: Scene, of: SceneLayer, b: int) -> tuple[NDArray[np.int64] | None, dict[str, Any]]:
    """Return a layer's token ids, and NaN for the scores that have no meaning."""
    ids = None if scene.ids is None or of.cross else scene.ids[b]
    nothing: dict[str, Any] = {name: np.nan for name in ("previous", "current", "back") if of.cross}
    if ids is not None:
        lengths = {"induction": scene.prefix, "duplicate": 1}
        nothing |= {name: np.nan for name, length in lengths.items() if not repeats(ids, length)}
    return ids, nothing


def repeats(ids: NDArray[np.int64], length: int) -> bool:
    """Return whether some run of `length` tokens occurs twice."""
    runs = np.lib.stride_tricks.sliding_window_view(ids, min(length, len(ids)))
    return length <= len(ids) and len(np.unique(runs, axis=0)) < len(runs)
