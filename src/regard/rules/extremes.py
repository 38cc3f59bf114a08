"""The least and greatest entry of any span of a table, from a summary: for bounds of what a tile may look up."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from regard.rules.expression import Array
from regard.rules.tracing import Table

BLOCK = 64
CHUNK = 4096  # spans read at once, so that what is read stays small


class Extremes:
    """Least and greatest entries of spans of the columns of `rows` (r, m), NaN left out.

    Keeps the best of every 2^k blocks in a row (a sparse table), O(m / BLOCK · log m) numbers, and O(m) of more than
    one row. A span is two runs of at most BLOCK columns, read directly, and the blocks between them, answered by two
    of those numbers. `nan`: whether any entry is NaN.

    >>> Extremes(np.array([[5, 1, 4, 2, 8]])).span(np.array([0, 2]), np.array([4, 3]))
    (array([1, 2]), array([8, 4]))
    """

    def __init__(self, rows: Array) -> None:
        self.nan = bool(rows.dtype.kind == "f" and np.isnan(rows).any())
        self.low, self.high = (rows[0] if len(rows) == 1 else best.reduce(rows) for best in (np.fmin, np.fmax))
        self.blocks = self._levels(np.fmin, self.low), self._levels(np.fmax, self.high)

    @staticmethod
    def _levels(best: np.ufunc, values: Array) -> Array:
        """Row k, column p: the best of blocks p, ..., p + 2^k - 1, as far as there are that many."""
        count = len(values) // BLOCK
        rows = [best.reduce(values[: count * BLOCK].reshape(count, BLOCK), axis=1)]
        while 2 ** len(rows) <= count:
            row, step = rows[-1].copy(), 2 ** (len(rows) - 1)
            row[:-step] = best(row[:-step], row[step:])
            rows.append(row)
        return np.stack(rows)

    def span(self, first: Array, last: Array) -> tuple[Array, Array]:
        """Least and greatest of the entries first, ..., last, elementwise."""
        first, last = np.broadcast_arrays(first, last)
        width = int(min(BLOCK, (last - first).max(initial=0) + 1))
        run = np.arange(width)
        near = np.minimum(first[..., None] + run, last[..., None])
        far = np.maximum(last[..., None] - run, first[..., None])
        begin, end = first // BLOCK + 1, last // BLOCK
        inner = end > begin
        results = []
        for best, values, levels in zip((np.fmin, np.fmax), (self.low, self.high), self.blocks, strict=True):
            found = best.reduce(best(values[near], values[far]), axis=-1)
            if inner.any():
                count = np.where(inner, end - begin, 1)
                level = np.frexp(count.astype(np.float64))[1] - 1  # floor of the binary logarithm
                p, q = np.where(inner, begin, 0), np.where(inner, end - 2**level, 0)
                found = np.where(inner, best(found, best(levels[level, p], levels[level, q])), found)
            results.append(found)
        return results[0], results[1]


def _summarize(array: Array, axis: int, ranges: tuple[tuple[int, int], ...]) -> Extremes:
    part = np.moveaxis(array[tuple(slice(first, last + 1) for first, last in ranges)], axis, -1)
    rows = part.reshape(-1, part.shape[-1])
    return Extremes(rows.astype(np.float32) if array.dtype.name == "bfloat16" else rows)


_summaries: WeakKeyDictionary[Table, Any] = WeakKeyDictionary()


def extremes(table: Table, axis: int, ranges: tuple[tuple[int, int], ...]) -> Extremes:
    """The `Extremes` along `axis` of the entries whose other indices lie in `ranges` (inclusive; that of axis: all)."""
    summary = _summaries.get(table)
    if summary is None:
        summary = _summaries[table] = lru_cache(maxsize=32)(partial(_summarize, table.array))
    result: Extremes = summary(axis, ranges)
    return result


def look_up(table: Table, spans: Sequence[tuple[Array, Array]]) -> tuple[Array, Array, Array]:
    """Least and greatest entry, and whether any is NaN, where each index lies in its span; elementwise.

    spans: one (first, last) for each axis, (tiles,) inside the table. Tiles are answered together if their spans
    differ along one axis alone, and otherwise in groups of which that is so.
    """
    axis = len(spans) - 1
    for n, (first, last) in enumerate(spans):
        axis = n if np.ptp(first) or np.ptp(last) else axis
    others = [end for n, span in enumerate(spans) if n != axis for end in span]
    group = np.zeros(len(spans[axis][0]), np.int64)
    if any(np.ptp(end) for end in others):
        group = np.unique(np.stack(others), axis=1, return_inverse=True)[1].reshape(-1)

    members = np.argsort(group, kind="stable")
    least, greatest, nan = [], [], []
    for part in np.split(members, np.cumsum(np.bincount(group))[:-1]):
        hulls = [(int(first[part[0]]), int(last[part[0]])) for first, last in spans]
        hulls[axis] = (0, table.shape[axis] - 1)
        summary = extremes(table, axis, tuple(hulls))
        for some in np.split(part, range(CHUNK, len(part), CHUNK)):
            lo, hi = summary.span(*(end[some] for end in spans[axis]))
            least.append(lo)
            greatest.append(hi)
            nan.append(np.full(len(some), summary.nan))
    back = np.argsort(members)
    return np.concatenate(least)[back], np.concatenate(greatest)[back], np.concatenate(nan)[back]
