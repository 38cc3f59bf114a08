"""The outline of a head's map: its columns, diagonals and stripes, and its heaviest weights.

Every claim is measured on weights of the head. Claims are in the order of the weight that they cover, in which the
eye finds them.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.interpret.heads import DISTANCES, LEAST_ROWS, NOTABLE

Flags = NDArray[np.bool_]

ABOVE_CHANCE = 1.5
"""A shape holds that many times the weight that even attention would give it, at least."""

EVEN = 0.9
"""The normalized entropy from which on weights are called even."""

STEADY = 0.1
"""Median weight of a column, at least: a few large weights on one key are no column."""

MOST_COLUMNS = 2
MOST_CLAIMS = 4
MOST_KEYS = 2
MOST_QUERIES = 2
IN_COLUMN = 3
"""Queries at most that are named with a key among others, and with one that is a column."""

FEWEST = 0.1
"""Weight from which on a query is named with a key."""

HEAVY = 0.4
"""Weight from which on a head counts as one that looks at a key."""

NEARLY = 0.8
"""Share of the largest weight on a key that counts as nearly as much."""

KEPT = 8
"""Far pairs of a head that are kept."""

IDEOGRAPHS = 0x2E80
"""The code point from which on most letters are those of scripts in which one letter is a word or a syllable."""


class Pair(NamedTuple):
    """A query, a key, and the weight between them."""

    query: int
    key: int
    weight: float


class Claim(NamedTuple):
    """A shape of a map, and the mean weight in it.

    name: a key of `sentences.CLAIMS`. key: of a column, or the distance of a line. pairs: the heaviest weights.
    """

    name: str
    share: float
    key: int = 0
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Outline:
    """Shapes that a reader sees in a head's map.

    far: weights between words that are no neighbours, one for each of some keys: of the queries that look at the key
    nearly as much as any, the farthest. heavy: the keys of all such weights of at least `HEAVY`.
    """

    claims: tuple[Claim, ...]
    far: tuple[Pair, ...] = ()
    heavy: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class MapRows:
    """Weights of some queries of a head.

    weights: (m, n_k), 0 where a key is hidden. visible: (m, n_k). queries: (m,), their numbers. positions: (m,), the
    key that is a query's own token, None if queries are of another sequence. ids: (n_k,), None without tokens. prefix:
    tokens that make a repeated run. learned: a learned sink takes the rest of each row.
    """

    weights: NDArray[np.floating]
    visible: Flags
    queries: NDArray[np.int64]
    positions: NDArray[np.int64] | None
    ids: NDArray[np.int64] | None = None
    prefix: int = 1
    learned: bool = False

    @property
    def counted(self) -> Flags:
        """The rows (m,) with a choice: those that see two keys or more."""
        return np.asarray(self.visible.sum(1) >= 2)

    @property
    def distances(self) -> NDArray[np.int64]:
        """Positions minus keys (m, n_k); a number that no distance has if queries are of another sequence."""
        keys = np.arange(self.weights.shape[1])
        return np.full(self.weights.shape, len(keys)) if self.positions is None else self.positions[:, None] - keys


class _Shape(NamedTuple):
    """A claim, and the cells (m, n_k) that it is about."""

    claim: Claim
    cells: Flags


def outline(rows: MapRows, words: Flags | None = None) -> Outline:
    """Return what a reader sees in a head's map.

    words: (n_k,), keys that are words; None without tokens.

    >>> weights = np.tril(np.ones((9, 9))) / np.arange(1, 10)[:, None]
    >>> outline(MapRows(weights, weights > 0, np.arange(9), np.arange(9))).claims
    (Claim(name='even', share=1.0, key=0, pairs=()),)
    """
    far, heavy = _far(rows, words) if words is not None else ((), ())
    if not rows.visible.any():
        return Outline((Claim("hidden", 0.0),))
    if (unknown := np.isnan(rows.weights).any(1)).any():
        return Outline((Claim("nan", float(unknown.mean())),))
    if (evenness := _evenness(rows)) >= EVEN:
        return Outline((Claim("even", evenness),), far, heavy)
    accepted, claimed = _seen_first(rows)
    heaviest = _heaviest(rows, claimed, NOTABLE if accepted else 0.0)
    return Outline((*accepted, *heaviest), far, heavy)


def _seen_first(rows: MapRows) -> tuple[list[Claim], Flags]:
    """Return the claims that cover most weight, and their cells; none is about the cells of those before it."""
    weights = rows.weights * rows.counted[:, None] / max(1, int(rows.counted.sum()))
    shapes = [(float(weights[cells].sum()), claim, cells) for claim, cells in _shapes(rows)]
    accepted = [(share, Claim("learned", share)) for share in _learned(rows)]
    claimed = np.zeros(weights.shape, bool)
    for mass, claim, cells in sorted(shapes, key=lambda shape: -round(shape[0], 2)):
        columns = sum(earlier.name == "column" for _, earlier in accepted)
        room = len(accepted) < MOST_CLAIMS and not (claim.name == "column" and columns == MOST_COLUMNS)
        if room and float(weights[cells & ~claimed].sum()) >= mass / 2:
            accepted.append((mass, claim))
            claimed |= cells
    return [claim for _, claim in sorted(accepted, key=lambda one: -round(one[0], 2))], claimed


def _shapes(rows: MapRows) -> list[_Shape]:
    return [*_columns(rows), *_lines(rows), *_stripes(rows)]


def _notable(rows: MapRows, cells: Flags, least: int = 1) -> float | None:
    """Return the mean weight in cells over the rows that have any, None if it is small or not above chance."""
    has = cells.any(1) & rows.counted
    if has.sum() < least:
        return None
    share = float((rows.weights * cells).sum(1)[has].mean())
    chance = float((cells.sum(1)[has] / rows.visible.sum(1)[has]).mean())
    return share if share >= max(NOTABLE, ABOVE_CHANCE * chance) else None


def _columns(rows: MapRows) -> Iterator[_Shape]:
    """Yield the first key of a sequence as its sink, and other keys that most rows look at."""
    others = rows.visible & (rows.distances != 0) & rows.counted[:, None]
    counts = others.sum(0)
    means = (rows.weights * others).sum(0) / np.maximum(counts, 1)
    least = max(3, int(rows.counted.sum()) // 3)
    for key in np.flatnonzero(means >= NOTABLE).tolist():
        first = key == 0 and rows.positions is not None
        cells = others & (np.arange(len(means)) == key)
        share = _notable(rows, cells, 1 if first else least)
        if share is not None and (first or np.median(rows.weights[others[:, key], key]) >= STEADY):
            pairs = () if first else _pairs(rows, key, rows.weights[:, key] * cells[:, key], IN_COLUMN)
            yield _Shape(Claim("sink" if first else "column", share, key, pairs), cells)


def _lines(rows: MapRows) -> Iterator[_Shape]:
    """Yield the diagonals: the token itself, its neighbours, and those some tokens back."""
    if rows.positions is None:
        return
    for by, name in ((1, "previous"), (0, "current"), (-1, "next"), *((by, "back") for by in DISTANCES)):
        cells = rows.visible & (rows.distances == by)
        share = _notable(rows, cells, LEAST_ROWS if name == "back" else 1)
        if share is not None:
            yield _Shape(Claim(name, share, abs(by)), cells)


def _stripes(rows: MapRows) -> Iterator[_Shape]:
    """Yield what followed earlier copies of a token, and these copies."""
    if rows.positions is None or rows.ids is None:
        return
    after = np.zeros(rows.visible.shape, bool)
    after[:, 1:] = _copies(rows, rows.prefix)[:, :-1]
    for name, cells in (("induction", after), ("duplicate", _copies(rows, 1))):
        share = _notable(rows, cells & rows.visible)
        if share is not None:
            yield _Shape(Claim(name, share), cells & rows.visible)


def _copies(rows: MapRows, length: int) -> Flags:
    """Return the keys (m, n_k) before a query's own whose last `length` tokens are the same."""
    assert rows.positions is not None
    assert rows.ids is not None
    keys = np.arange(len(rows.ids))
    same = rows.distances > 0
    for back in range(length):
        own, other = rows.positions - back, keys - back
        same &= (rows.ids[own][:, None] == rows.ids[other]) & (own >= 0)[:, None] & (other >= 0)
    return same


def _learned(rows: MapRows) -> list[float]:
    seen = rows.visible.any(1)
    share = float((1 - rows.weights[seen].sum(1)).mean()) if rows.learned else 0.0
    return [share] if share >= NOTABLE else []


def _evenness(rows: MapRows) -> float:
    """Return the mean normalized entropy of the rows that see two keys or more, 0 with a learned sink."""
    if rows.learned or not rows.counted.any():
        return 0.0
    weights, visible = rows.weights[rows.counted], rows.visible[rows.counted]
    logarithms = np.log(weights, out=np.zeros(weights.shape), where=weights > 0)
    return float((-(weights * logarithms).sum(1) / np.log(visible.sum(1))).mean())


def _heaviest(rows: MapRows, claimed: Flags, least: float) -> list[Claim]:
    """Return the heaviest weights outside of other claims, by key, and the queries that they are of.

    least: of the first, 0 if there are no other claims. Then the first key and a query's own are named if no other is.
    A neighbour is named after a query that is none.
    """
    here = rows.distances
    rest = np.where(claimed, 0, rows.weights)
    far = rest * (abs(here) > 1) * (rows.positions is None or np.arange(rest.shape[1]) > 0)
    apart = least > 0 or bool(far.max() > 0)
    named, ranked = (rest * (here != 0), far) if apart else (rest, rest)
    pairs: list[Pair] = []
    for key in np.argsort(-ranked.max(0), kind="stable")[:MOST_KEYS].tolist():
        if ranked[:, key].max() < max(least, FEWEST if pairs else 0):
            break
        pairs += _pairs(rows, key, named[:, key])
    return [Claim("heaviest", pairs[0].weight, pairs[0].key, tuple(pairs))] if pairs else []


def _pairs(rows: MapRows, key: int, column: NDArray[np.floating], most: int = MOST_QUERIES) -> tuple[Pair, ...]:
    """Return the heaviest weights (m,) on a key that are worth naming."""
    best = [k for k in np.argsort(-column, kind="stable")[:most].tolist() if column[k] > 0]
    enough = [k for k in best if column[k] >= FEWEST] or best[:1]
    return tuple(Pair(int(rows.queries[k]), key, float(column[k])) for k in enough)


def _far(rows: MapRows, words: Flags) -> tuple[tuple[Pair, ...], tuple[int, ...]]:
    """Return the far pairs of an `Outline`, and its heavy keys."""
    if rows.positions is None or rows.ids is None:
        return (), ()
    same = rows.ids[rows.positions][:, None] == rows.ids
    apart = (abs(rows.distances) > 1) & words & words[rows.positions][:, None] & ~same
    apart[:, 0] = False
    weights = rows.weights * apart
    best = np.where(weights >= NEARLY * weights.max(0), abs(rows.distances) * apart, 0).argmax(0)
    merits = weights[best, (keys := np.arange(len(words)))] * np.log2(1 + abs(rows.distances[best, keys]))
    order = [j for j in np.argsort(-merits, kind="stable")[:KEPT].tolist() if merits[j] > 0]
    far = (Pair(int(rows.queries[best[j]]), j, float(weights[best[j], j])) for j in order)
    return tuple(far), tuple(np.flatnonzero(weights.max(0) >= HEAVY).tolist())


def words_in(tokens: Sequence[str]) -> Flags:
    """Return which tokens are words or parts of words, and not marks, single letters or special tokens.

    >>> words_in(["[CLS]", " cat", ".", "a", "猫"]).tolist()
    [False, True, False, False, True]
    """
    return np.array([_is_word(token.strip()) for token in tokens], bool)


def _is_word(token: str) -> bool:
    if token[:1] in "[<" and token[-1:] in "]>":
        return False
    letters = [c for c in token if unicodedata.category(c).startswith("L")]
    return len(letters) >= 2 or any(ord(c) >= IDEOGRAPHS for c in letters)
