"""Statistics of attention heads, computed from their weights.

Every statistic is an average over rows. The first row, which sees one key, and rows that see
nothing are left out. Scores of copies also leave out rows with tokens that have no earlier copy.
Without any row left, a statistic is 0.
"""

from __future__ import annotations  # so that `help` shows the names of types

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.arguments.values import boolean, integer, number
from regard.interpret.formats import score_text

Floats = NDArray[np.floating[Any]]
Means = NDArray[np.float64]
RowFlags = NDArray[np.bool_]
RowValues = tuple[NDArray[np.float64], RowFlags]

KINDS = ("previous token", "duplicate token", "induction", "first-token sink", "current token", "n tokens back")

NOTABLE = 0.25
"""The score from which on a head is called by a kind."""

CLEAR = 0.5
"""The score from which on a kind is certain, and no longer tentative."""

DISTANCES = range(2, 6)
"""The distances that "n tokens back" tries."""

LEAST_ROWS = 8
"""Minimum rows for a distance: the mean of fewer says little."""


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of one head, averaged over the rows that count.

    Scores are weights in [0, 1]. `entropy` is in nats, `normalized_entropy` relative to attending
    evenly. `sink` is the weight on the first token. `kv_head` is the key-value head that it reads,
    None if unknown. `back` is the largest mean weight on one distance of `DISTANCES`, and
    `distance` that distance, None if every distance has too few rows.
    """

    layer: int
    head: int
    previous: float
    duplicate: float
    induction: float
    sink: float
    current: float
    entropy: float
    normalized_entropy: float
    kv_head: int | None = None
    back: float = 0.0
    distance: int | None = None

    @property
    def scores(self) -> dict[str, float]:
        """The score of each of `KINDS`."""
        values = (self.previous, self.duplicate, self.induction, self.sink, self.current, self.back)
        return dict(zip(KINDS, values, strict=True))

    def called(self, kind: str) -> str:
        """Return a kind's name, with this head's number for the n of "n tokens back"."""
        return f"{self.distance} tokens back" if kind == "n tokens back" and self.distance else kind

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print two digits of each score in a notebook's cell."""
        scores = ", ".join(f"{self.called(kind)} {score_text(score)}" for kind, score in self.scores.items())
        printer.text(f"layer {self.layer}, head {self.head}: {scores}; entropy {score_text(self.entropy)}")


def previous_token(weights: ArrayLike) -> Means:
    """Average the weight on the token just before, per head.

    `weights` (..., h, n, n) gives (..., h). Row 0 has no token before it and is left out; without
    any row left: 0. Such a head is the first half of an induction circuit (Elhage et al. 2021, "A
    Mathematical Framework for Transformer Circuits").

    >>> previous_token([[[1.0, 0.0], [0.75, 0.25]]])
    array([0.75])
    """
    return _mean(_previous(_whole(weights)))


def current_token(weights: ArrayLike) -> Means:
    """Average the weight on the token itself, per head, without row 0.

    (..., h, n, n) gives (..., h).

    >>> current_token([[[1.0, 0.0], [0.75, 0.25]]])
    array([0.25])
    """
    return _mean(_current(_whole(weights)))


def duplicate_token(weights: ArrayLike, ids: ArrayLike) -> Means:
    """Average the weight on all earlier copies of the current token, per head.

    `weights` (..., h, n, n) and `ids` (..., n) give (..., h). The average is over rows with an
    earlier copy of their token; without any: 0. Named by Wang et al. 2022, "Interpretability in the
    Wild".

    >>> duplicate_token([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0]]], [7, 8, 7])
    array([0.75])
    """
    return _mean(_duplicate(_whole(weights, ids)))


def induction(weights: ArrayLike, ids: ArrayLike, *, prefix: int = 1) -> Means:
    """Average the weight on tokens that came after earlier copies of the current one.

    `weights` (..., h, n, n) and `ids` (..., n) give (..., h). The weight is summed over all earlier
    copies of a row's token, since with several each one alone would read low. It is then averaged
    over the rows with an earlier copy; without any: 0. On repeated random tokens this is the prefix
    matching score of Olsson et al. 2022, "In-context Learning and Induction Heads". A copy must
    agree in the last `prefix` tokens: in text, single letters recur by chance, and three in a row
    seldom do.

    >>> weights = [[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0]]]
    >>> induction(weights, [7, 8, 7]), induction(weights, [7, 8, 7], prefix=2)
    (array([0.25]), array([0.]))
    """
    return _mean(_induction(_whole(weights, ids, prefix=prefix)))


def sink(weights: ArrayLike) -> Means:
    """Average the weight that the first token receives, per head.

    (..., h, n, n) gives (..., h). This is the importance score of the first token of Gu et al.
    2025, "When Attention Sink Emerges in Language Models", without row 0. That row sees nothing
    else, and would make short texts look like sinks.

    >>> sink([[[1.0, 0.0], [0.75, 0.25]]])
    array([0.75])
    """
    return _mean(_sink(_whole(weights)))


def sink_rate(weights: ArrayLike, epsilon: float = 0.3) -> float:
    """Return the share of heads with a `sink` above `epsilon`.

    Gu et al. 2025, with 0.3.
    """
    return float((sink(weights) > number("epsilon", epsilon)).mean())


def entropy(weights: ArrayLike) -> Means:
    """Average -Σ P log P over the rows of each head, in nats, without row 0.

    (..., h, n, n) gives (..., h).

    >>> entropy([[[1.0, 0.0], [0.5, 0.5]]]).round(3)
    array([0.693])
    """
    return _mean(_entropy(_whole(weights)))


def normalized_entropy(weights: ArrayLike, *, causal: bool = True) -> Means:
    """Average the entropy of rows over the log of their visible keys, without row 0.

    0 is one key, 1 all evenly. With `causal`, row i sees i + 1 keys; otherwise every row sees all.

    >>> normalized_entropy([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1/3, 1/3, 1/3]]])
    array([1.])
    """
    return _mean(_normalized(_whole(weights, causal=causal)))


def head_statistics(
    weights: ArrayLike | Callable[[slice], Floats],
    ids: ArrayLike,
    *,
    layer: int = 0,
    prefix: int = 1,
    causal: bool = True,
    rows: int = 256,
) -> tuple[HeadStatistics, ...]:
    """Compute every statistic of every head of one layer, in order of heads.

    `weights` is an array (..., h, n, n), or a function that returns the rows of a slice, (..., h,
    m, n). A function needs memory for `rows` rows at a time only. `ids` (..., n). Leading
    dimensions are averaged.

    >>> head, = head_statistics([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.75, 0.25, 0.0]]], [7, 8, 7])
    >>> head.induction, head.duplicate, head.sink
    (0.25, 0.75, 0.625)
    >>> kind(head)
    ('duplicate token', 0.75)
    """
    layer, prefix = integer("layer", layer), integer("prefix", prefix, least=1)
    causal, rows = boolean("causal", causal), integer("rows", rows, least=1)
    if callable(weights):
        ids, give = np.asarray(ids), weights
    else:
        whole = _whole(weights, ids)
        ids, give = whole.ids, lambda part: whole.weights[..., part, :]
    sums = np.zeros(())
    for start in range(0, ids.shape[-1], rows):
        some = np.asarray(give(slice(start, start + rows)), np.float64)
        tile = _Tile(some, ids, np.arange(start, start + some.shape[-2]), causal, prefix)
        sums = sums + _all_sums(tile)
    return _statistics_of(sums, layer)


def sampled_statistics(
    weights: ArrayLike, rows: ArrayLike, ids: ArrayLike, *, layer: int = 0, prefix: int = 1
) -> tuple[HeadStatistics, ...]:
    """Estimate `head_statistics` from some rows.

    weights: (h, m, n), of the row numbers in `rows` (m,). Entropies are normalized by the number of
    keys with a weight.
    """
    some = np.asarray(weights, np.float64)
    visible = np.count_nonzero(some, axis=-1)
    tile = _Tile(some, np.asarray(ids), np.asarray(rows), prefix=prefix, visible=visible)
    return _statistics_of(_all_sums(tile), layer)


def most_back(
    means: NDArray[np.float64], counts: NDArray[Any], least: int = LEAST_ROWS
) -> tuple[list[float], list[int | None]]:
    """Find the largest mean weight over `DISTANCES` per head, and its distance.

    Weight and distance are 0 and None if there are too few rows. means, counts: of rows, (distances, h).
    """
    reliable = np.where(counts >= least, means, -1.0)
    best = reliable.argmax(0)
    values = reliable[best, np.arange(reliable.shape[1])]
    return np.maximum(values, 0).tolist(), [
        DISTANCES[k] if value >= 0 else None for k, value in zip(best.tolist(), values.tolist(), strict=True)
    ]


def kind(head: HeadStatistics) -> tuple[str, float]:
    """Return the kind with the highest score, and that score.

    NaN is lower than any score.
    """
    return max(head.scores.items(), key=lambda item: _number(item[1]))


def notable(scores: Mapping[str, float]) -> str | None:
    """Return the main kind of a head: the first of `all_notable`, or None."""
    return next(iter(all_notable(scores)), None)


def all_notable(scores: Mapping[str, float]) -> tuple[str, ...]:
    """Return the kinds with a score of at least `NOTABLE`, the highest first.

    "first-token sink" is always last, since heads rest on the first token where they find nothing
    else.
    """
    high = {kind: scores[kind] for kind in KINDS if scores.get(kind, 0.0) >= NOTABLE}
    return tuple(sorted(high, key=lambda kind: (kind == "first-token sink", -high[kind])))


def by_chance(ids: ArrayLike, *, prefix: int = 1) -> float:
    """Compute the `induction` score of a causal head that attends evenly.

    `ids` (n,). The score is from 0 to 1. From `NOTABLE` on, a text repeats too much for induction
    scores to tell heads apart. Takes O(n log n) time.

    >>> by_chance([7] * 100) > 0.8, by_chance(np.tile(np.arange(25), 4)) < 0.05
    (True, True)
    """
    prefix = integer("prefix", prefix, least=1)
    tokens = np.asarray(ids)
    if tokens.ndim != 1:
        raise ValueError(f"ids must have shape (n,), got {tokens.shape}")
    if len(tokens) < prefix:
        return 0.0
    runs = np.lib.stride_tricks.sliding_window_view(tokens, prefix)
    number = np.unique(runs, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(number, kind="stable")
    first = np.searchsorted(number[order], number[order])
    earlier = np.empty(len(number), np.int64)
    earlier[order] = np.arange(len(number)) - first
    rows = np.flatnonzero(earlier)
    return float(np.mean(earlier[rows] / (rows + prefix))) if len(rows) else 0.0


def strongest(heads: Iterable[HeadStatistics], kind: str) -> HeadStatistics:
    """Return the head with the highest score of that `kind` (one of `KINDS`).

    >>> weights = [[[1, 0], [1, 0]], [[1, 0], [0, 1]]]
    >>> strongest(head_statistics(weights, [3, 4]), "current token").head
    1
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return max(heads, key=lambda head: _number(head.scores[kind]))


def _number(score: float) -> float:
    return -1.0 if math.isnan(score) else score


@dataclass(frozen=True)
class _Tile:
    """Some rows of the weights, (..., h, m, n), and their numbers (m,).

    visible: (..., h, m), the number of keys that rows see; by default it follows from `causal`.
    """

    weights: NDArray[np.float64]
    ids: NDArray[Any]
    rows: NDArray[np.int64]
    causal: bool = True
    prefix: int = 1
    visible: NDArray[np.integer] | None = None

    def shifted_diagonal(self, by: int) -> NDArray[np.float64]:
        """Return weights[..., i, i - by] for every row i.

        Column 0 replaces negative columns.
        """
        columns = np.maximum(self.rows - by, 0)
        return np.take_along_axis(self.weights, columns.reshape(*(1,) * (self.weights.ndim - 2), -1, 1), -1)[..., 0]

    def earlier_copies(self, length: int = 1) -> RowFlags:
        """Return flags (..., 1, m, n) of the keys j < i with the same last `length` tokens as row i."""
        columns = np.arange(self.ids.shape[-1])
        copies = columns < self.rows[:, None]
        for back in range(min(length, len(columns) + 1)):  # longer runs have no copy either
            tokens = np.roll(self.ids, back, axis=-1)
            copies = copies & (tokens[..., self.rows, None] == tokens[..., None, :]) & (columns >= back)
        return np.asarray(copies[..., None, :, :])

    @property
    def alive(self) -> RowFlags:
        """Flags of the rows that see any key: (..., h, m)."""
        return np.asarray(self.weights.any(-1))

    def after_first(self, values: NDArray[np.float64]) -> RowValues:
        return values, self.alive & (self.rows > 0)


# Each returns a value per row, (..., h, m), and flags of the rows that count, which broadcast to it.


def _previous(tile: _Tile) -> RowValues:
    return tile.after_first(tile.shifted_diagonal(1))


def _duplicate(tile: _Tile) -> RowValues:
    copies = tile.earlier_copies()
    return np.where(copies, tile.weights, 0).sum(-1), copies.any(-1) & tile.alive


def _induction(tile: _Tile) -> RowValues:
    copies = tile.earlier_copies(tile.prefix)
    return np.where(copies[..., :-1], tile.weights[..., 1:], 0).sum(-1), copies.any(-1) & tile.alive


def _sink(tile: _Tile) -> RowValues:
    return tile.after_first(tile.weights[..., 0])


def _current(tile: _Tile) -> RowValues:
    return tile.after_first(tile.shifted_diagonal(0))


def _entropy(tile: _Tile) -> RowValues:
    logs = np.log(tile.weights, where=tile.weights > 0, out=np.zeros_like(tile.weights))
    return tile.after_first(0.0 - (tile.weights * logs).sum(-1))


def _normalized(tile: _Tile) -> RowValues:
    visible = tile.visible
    if visible is None:
        visible = tile.rows + 1 if tile.causal else np.full(tile.rows.shape, tile.weights.shape[-1])
    values, counted = _entropy(tile)
    return values / np.log(np.maximum(visible, 2)), counted


def _back(tile: _Tile, distance: int) -> RowValues:
    """Return the weight on one distance.

    Rows with the first key at that distance are left out: a sink would count.
    """
    return tile.shifted_diagonal(distance), tile.alive & (tile.rows > distance)


_STATISTICS = (_previous, _duplicate, _induction, _sink, _current, _entropy, _normalized)


def _whole(weights: ArrayLike, ids: ArrayLike | None = None, *, causal: bool = True, prefix: int = 1) -> _Tile:
    causal, prefix = boolean("causal", causal), integer("prefix", prefix, least=1)
    array = np.asarray(weights, np.float64)
    if array.ndim < 3 or array.shape[-1] != array.shape[-2] or 0 in array.shape:
        raise ValueError(f"weights must have shape (..., h, n, n), got {array.shape}")
    tokens = np.arange(array.shape[-1]) if ids is None else np.asarray(ids)
    if tokens.ndim < 1 or tokens.shape[-1] != array.shape[-1]:
        expected = f"(..., {array.shape[-1]})"
        raise ValueError(f"ids must have shape {expected} to fit weights {array.shape}, got {tokens.shape}")
    return _Tile(array, tokens, np.arange(array.shape[-1]), causal, prefix)


def _mean(rows: RowValues) -> Means:
    values, counted = rows
    counted = np.broadcast_to(counted, values.shape)
    return divide(values.sum(-1, where=counted), counted.sum(-1))


def _sums(rows: RowValues) -> NDArray[np.float64]:
    """Return per head the sum over all other axes, and its number of rows: (2, h)."""
    values, counted = rows
    counted = np.broadcast_to(counted, values.shape)
    others = tuple(axis for axis in range(values.ndim) if axis != values.ndim - 2)
    return np.stack([values.sum(others, where=counted), counted.sum(others)])


def _all_sums(tile: _Tile) -> NDArray[np.float64]:
    """Return sums and numbers of rows for each statistic: (statistics, 2, h).

    The last ones are those of `_back`, by distance.
    """
    return np.stack([_sums(one(tile)) for one in _STATISTICS] + [_sums(_back(tile, d)) for d in DISTANCES])


def _statistics_of(sums: NDArray[np.float64], layer: int) -> tuple[HeadStatistics, ...]:
    means, few = divide(sums[:, 0], sums[:, 1]), len(_STATISTICS)
    back, distances = most_back(means[few:], sums[few:, 1])
    return tuple(
        replace(HeadStatistics(layer, head, *values), back=back[head], distance=distances[head])
        for head, values in enumerate(means[:few].T.tolist())
    )


def divide(sums: NDArray[np.float64], counts: NDArray[Any]) -> Means:
    """Divide sums by counts; 0 where the count is 0."""
    means: Means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    return means
