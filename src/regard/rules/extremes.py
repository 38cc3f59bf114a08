"""Least and greatest entries of ranges of a table, from an O(n / block) summary."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from regard.rules.expression import Array
from regard.rules.tracing import Table

BLOCK = 64
CHUNK = 4096  # boxes read together, which limits temporary memory


class Extremes:
    """Least and greatest entries of ranges of columns of `rows` (r, m), NaN left out.

    A sparse table holds the extremes of every 2^k consecutive blocks: O(m / BLOCK · log m) numbers, and O(m) for
    several rows. A range is two runs of at most BLOCK columns, read directly, and the blocks between them, covered by
    two of those numbers. `nan`: any entry is NaN.

    >>> Extremes(np.array([[5, 1, 4, 2, 8]])).between(np.array([0, 2]), np.array([4, 3]))
    (array([1, 2]), array([8, 4]))
    """

    def __init__(self, rows: Array) -> None:
        self.nan = bool(rows.dtype.kind == "f" and np.isnan(rows).any())
        self.low, self.high = (rows[0] if len(rows) == 1 else best.reduce(rows) for best in (np.fmin, np.fmax))
        self.blocks = self._levels(np.fmin, self.low), self._levels(np.fmax, self.high)

    @staticmethod
    def _levels(best: np.ufunc, values: Array) -> Array:
        """Return the extremes of blocks p, ..., p + 2^k - 1 in row k, column p."""
        count = len(values) // BLOCK
        rows = [best.reduce(values[: count * BLOCK].reshape(count, BLOCK), axis=1)]
        while 2 ** len(rows) <= count:
            row, step = rows[-1].copy(), 2 ** (len(rows) - 1)
            row[:-step] = best(row[:-step], row[step:])
            rows.append(row)
        return np.stack(rows)

    def between(self, first: Array, last: Array) -> tuple[Array, Array]:
        """Return the least and greatest of the entries first, ..., last, elementwise."""
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
    """Return the cached `Extremes` along `axis` of a table.

    ranges: (first, last), both included, of every index; for `axis`, all.
    """
    summary = _summaries.get(table)
    if summary is None:
        summary = _summaries[table] = lru_cache(maxsize=32)(partial(_summarize, table.array))
    result: Extremes = summary(axis, ranges)
    return result


def look_up(table: Table, boxes: Sequence[tuple[Array, Array]]) -> tuple[Array, Array, Array]:
    """Return the extremes of each box of indices, and where any entry is NaN.

    boxes: one (first, last) for each axis, (tiles,) inside the table. Boxes that differ along one axis only are read
    together, others in groups.
    """
    axis = len(boxes) - 1
    for n, (first, last) in enumerate(boxes):
        axis = n if np.ptp(first) or np.ptp(last) else axis
    others = [end for n, box in enumerate(boxes) if n != axis for end in box]
    group = np.zeros(len(boxes[axis][0]), np.intp)
    if any(np.ptp(end) for end in others):
        group = np.unique(np.stack(others), axis=1, return_inverse=True)[1].reshape(-1)

    members = np.argsort(group, kind="stable")
    least, greatest, nan = [], [], []
    for part in np.split(members, np.cumsum(np.bincount(group))[:-1]):
        hulls = [(int(first[part[0]]), int(last[part[0]])) for first, last in boxes]
        hulls[axis] = (0, table.shape[axis] - 1)
        summary = extremes(table, axis, tuple(hulls))
        for some in np.split(part, range(CHUNK, len(part), CHUNK)):
            lo, hi = summary.between(*(end[some] for end in boxes[axis]))
            least.append(lo)
            greatest.append(hi)
            nan.append(np.full(len(some), summary.nan))
    back = np.argsort(members)
    return np.concatenate(least)[back], np.concatenate(greatest)[back], np.concatenate(nan)[back]
