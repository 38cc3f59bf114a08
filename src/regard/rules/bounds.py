"""Bounds of rules over tiles: *nothing here*, *everything here*, or *mixed*.

Always sound, and exact for one affine comparison of indices (`regard.rules.intervals`). Nothing is stored for each
tile: tables have a summary of O(n / block) numbers (`regard.rules.extremes`), and groups of tiles are classified before
tiles.
"""

from dataclasses import replace

import numpy as np

from regard.rules.expression import Array, Node
from regard.rules.intervals import Ranges, interval

NOTHING, MIXED, EVERYTHING = 0, 1, 2
BRANCH = 16  # tiles in a group, groups in a group of groups


def classify(mask: Node | None, score: Node | None, ranges: Ranges) -> Array:
    """Classify each tile of `ranges` as `NOTHING`, `MIXED` or `EVERYTHING` visible.

    mask: boolean, or None for all. score: hides the pairs that it maps to -inf. It makes a tile `NOTHING` only if that
    is certain for every pair; `EVERYTHING` depends on the mask alone.

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
    """Return the visible key tiles of one query tile, ascending, and their classes.

    ranges: of b, h and i; its j is not used. edges: int64 (tiles + 1,), tile t has the keys edges[t] to edges[t + 1] -
    1, at least one each. Groups of tiles are classified before their tiles, so that the work grows with the visible
    tiles and the logarithm of the others.

    >>> from regard.rules import window
    >>> key_tiles(window(100).node, None, Ranges(i=(4096, 4159)), np.arange(0, 32769, 64))
    (array([62, 63, 64]), array([1, 1, 1], dtype=int8))
    """
    one = replace(ranges, i=(np.reshape(ranges.i[0], 1), np.reshape(ranges.i[1], 1)))
    return visible_tiles(mask, score, one, edges)[1:]


def visible_tiles(mask: Node | None, score: Node | None, ranges: Ranges, edges: Array) -> tuple[Array, Array, Array]:
    """Return the visible tiles of several query tiles.

    ranges: b, h and i are numbers or arrays (query tiles,), of any batch elements and heads; else as in `key_tiles`.
    Returns for each visible tile the number of its query tile, that of its key tile, and its class, in ascending order.

    >>> from regard.rules import causal
    >>> visible_tiles(causal().node, None, Ranges(i=(np.array([0, 64]), np.array([63, 127]))), np.array([0, 64, 128]))
    (array([0, 1, 1]), array([0, 0, 1]), array([1, 2, 1], dtype=int8))
    """
    edges = np.asarray(edges, np.int64)
    (queries,) = replace(ranges, j=(0, 0)).shape
    count = len(edges) - 1
    size = 1
    while size * BRANCH < count:
        size *= BRANCH
    groups = np.arange(0, count, size)
    row, first = np.repeat(np.arange(queries), len(groups)), np.tile(groups, queries)
    kinds = np.full(len(row), MIXED, np.int8)
    while True:
        last = np.minimum(first + size, count)
        open_ = np.flatnonzero(kinds == MIXED)
        if len(open_):
            j = edges[first[open_]], edges[last[open_]] - 1
            kinds[open_] = classify(mask, score, ranges.take(row[open_], j))
        seen = kinds != NOTHING
        row, first, kinds = row[seen], first[seen], kinds[seen]
        if size == 1 or not len(first):
            return row, first, kinds
        size //= BRANCH
        first = (first[:, None] + size * np.arange(BRANCH)).reshape(-1)
        inside = first < count
        row, kinds, first = np.repeat(row, BRANCH)[inside], np.repeat(kinds, BRANCH)[inside], first[inside]
