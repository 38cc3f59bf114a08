"""Bounds of rules over tiles: *nothing here*, *everything here*, or *mixed*.

Always sound, exact for one affine comparison of indices (`regard.rules.intervals`). Nothing grows with the number of
tiles: a summary of O(n / block) per table (`regard.rules.extremes`), and `key_tiles` looks at groups of tiles before
it looks at tiles.
"""

from dataclasses import replace

import numpy as np

from regard.rules.expression import Array, Node
from regard.rules.intervals import Ranges, interval

NOTHING, MIXED, EVERYTHING = 0, 1, 2
BRANCH = 16  # tiles in a group, groups in a group of groups


def classify(mask: Node | None, score: Node | None, ranges: Ranges) -> Array:
    """`NOTHING`, `MIXED` or `EVERYTHING` for each tile of `ranges`: which of its pairs the rules leave visible.

    mask: boolean, or None for all. score: a pair that it gives -inf is hidden; only tiles where it surely does so
    everywhere are seen to be `NOTHING`, and `EVERYTHING` speaks of the mask alone.

    >>> from regard.rules import window
    >>> tiles = Ranges(i=(8, 11), j=(np.arange(0, 16, 4), np.arange(3, 16, 4)))
    >>> classify(window(4).node, None, tiles)
    array([0, 1, 1, 0], dtype=int8)
    """
    kinds = np.full(ranges.shape, EVERYTHING, np.int8)
    if mask is not None:
        visible = interval(mask, ranges)
        kinds = np.where(visible.hi == 0, NOTHING, np.where(visible.lo == 1, kinds, MIXED)).astype(np.int8)
    if score is not None:
        value = interval(score, ranges)
        kinds = np.where((value.hi == -np.inf) & ~np.asarray(value.nan), NOTHING, kinds).astype(np.int8)
    return np.broadcast_to(kinds, ranges.shape)


def key_tiles(mask: Node | None, score: Node | None, ranges: Ranges, edges: Array) -> tuple[Array, Array]:
    """The key tiles that are not `NOTHING` for one tile of queries: their numbers, ascending, and their kinds.

    ranges: of b, h and i; its j is not used. edges: int64 (tiles + 1,), tile t has the keys edges[t] to
    edges[t + 1] - 1, at least one each. Groups of tiles are classified before the tiles in them, so that the work
    grows with what is visible and with the logarithm of what is not.

    >>> from regard.rules import window
    >>> key_tiles(window(100).node, None, Ranges(i=(4096, 4159)), np.arange(0, 32769, 64))
    (array([62, 63, 64]), array([1, 1, 1], dtype=int8))
    """
    edges = np.asarray(edges, np.int64)
    count = len(edges) - 1
    size = 1
    while size * BRANCH < count:
        size *= BRANCH
    first, kinds = np.arange(0, count, size), None
    while True:
        last = np.minimum(first + size, count)
        found = np.full(len(first), EVERYTHING, np.int8)
        open_ = np.arange(len(first)) if kinds is None else np.flatnonzero(kinds == MIXED)
        if len(open_):
            j = edges[first[open_]], edges[last[open_]] - 1
            found[open_] = classify(mask, score, replace(ranges, j=j))
        seen = found != NOTHING
        first, kinds = first[seen], found[seen]
        if size == 1 or not len(first):
            return first, kinds
        size //= BRANCH
        first = (first[:, None] + size * np.arange(BRANCH)).reshape(-1)
        kinds = np.repeat(kinds, BRANCH)[first < count]
        first = first[first < count]
