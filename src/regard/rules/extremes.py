"""Least and greatest entries of ranges of a table, from an O(n / block) summary."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from math import prod
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from regard.rules.expression import Array
from regard.rules.tracing import Table
from regard.runtime.bounded import make_room

BLOCK = 64
ENTRIES = 2**18  # entries read together, which limits temporary memory
ROWS = 64  # rows of a box that are read one after the other; boxes with more are read by the hulls of these rows
CACHED = 2**18  # bytes of the summaries of a small table
Spans = tuple[tuple[int, int], ...]
T = TypeVar("T")
WIDTHS = (16, 24, 32, 64)


class Extremes:
    """Least and greatest entries of ranges of columns in each row of a matrix (r, m), NaN left out.

    A sparse table holds the extremes of every 2^k consecutive blocks: O(r · m / BLOCK · log m) numbers. A range is two
    runs of at most BLOCK columns, read directly, and the blocks between them, covered by two of those numbers. joined:
    all rows are one.

    >>> Extremes(np.array([[5, 1, 4, 2, 8]])).between(0, np.array([0, 2]), np.array([4, 3]))
    (array([1, 2]), array([8, 4]))
    """

    def __init__(self, rows: Array, joined: bool = False) -> None:
        # Integers have no NaN, and NumPy compares them faster by these functions.
        self.best = (np.fmin, np.fmax) if rows.dtype.kind == "f" else (np.minimum, np.maximum)
        self.low = self.high = rows
        if joined:
            self.low, self.high = (best.reduce(rows, axis=0, keepdims=True) for best in self.best)
        self.blocks = tuple(map(self._levels, self.best, (self.low, self.high)))
        self.nbytes = sum(x.nbytes for x in (self.low, self.high, *self.blocks))

    @staticmethod
    def _levels(best: np.ufunc, values: Array) -> Array:
        """Return the extremes of blocks p, ..., p + 2^k - 1 of row r in [k, r, p]."""
        count = values.shape[1] // BLOCK
        rows = [best.reduce(values[:, : count * BLOCK].reshape(len(values), count, BLOCK), axis=2)]
        while 2 ** len(rows) <= count:
            row, step = rows[-1].copy(), 2 ** (len(rows) - 1)
            row[:, :-step] = best(row[:, :-step], row[:, step:])
            rows.append(row)
        return np.stack(rows)

    def between(self, row: Any, first: Array, last: Array) -> tuple[Array, Array]:
        """Return the least and greatest of the entries first, ..., last of a row, elementwise."""
        row, first, last = np.broadcast_arrays(row, first, last)
        width = int((last - first).max(initial=0)) + 1
        step = ENTRIES // min(width, BLOCK)
        if len(first) <= step:
            return self._between(row, first, last, width)
        parts = [slice(n, n + step) for n in range(0, len(first), step)]
        results = zip(*(self._between(row[some], first[some], last[some], width) for some in parts), strict=True)
        low, high = map(np.concatenate, results)
        return low, high

    def _between(self, row: Array, first: Array, last: Array, width: int) -> tuple[Array, Array]:
        run = np.arange(min(width, BLOCK))[:, None]
        columns = [np.minimum(first + run, last)]
        if width > BLOCK:
            columns.append(np.maximum(last - run, first))
        begin, end = first // BLOCK + 1, last // BLOCK
        inner = np.flatnonzero(end > begin)
        values = [self.low[row, at] for at in columns]
        others = values if self.high is self.low else [self.high[row, at] for at in columns]
        results = []
        for best, read, levels in zip(self.best, (values, others), self.blocks, strict=True):
            result = best.reduce([best.reduce(x, axis=0) for x in read], axis=0)
            if len(inner):
                r, p, q = row[inner], begin[inner], end[inner]
                level = np.frexp((q - p).astype(np.float64))[1] - 1  # floor of the binary logarithm
                result[inner] = best(result[inner], best(levels[level, r, p], levels[level, r, q - 2**level]))
            results.append(result)
        return results[0], results[1]


def _once(function: Callable[[Table], T]) -> Callable[[Table], T]:
    """Cache what a function finds in a table, since tables never change."""
    results: WeakKeyDictionary[Table, T] = WeakKeyDictionary()

    @wraps(function)
    def cached(table: Table) -> T:
        if table not in results:
            results[table] = function(table)
        return results[table]

    return cached


def _entries(table: Table) -> Array:
    array = table.array
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


@_once
def has_nan(table: Table) -> bool:
    """Return whether an entry of a table is NaN."""
    return table.kind == "float" and bool(np.isnan(_entries(table)).any())


@_once
def has_infinite(table: Table) -> bool:
    """Return whether an entry of a float table is NaN or infinite in float32; False for unknown entries."""
    return table.known is not None and not bool((abs(_entries(table)) <= np.finfo(np.float32).max).all())


@_once
def width(table: Table) -> int:
    """Return the least of WIDTHS whose signed integers include all entries of an integer table."""
    values = table.known
    if values is None:
        return WIDTHS[-1]
    most = max(int(values.max()), -1 - int(values.min()))
    return next(bits for bits in WIDTHS if most < 2 ** (bits - 1))


def _summarize(table: Table, axis: int, spans: Spans | None) -> Extremes:
    array = _entries(table)
    part = array if spans is None else array[tuple(slice(first, last + 1) for first, last in spans)]
    summary = Extremes(np.moveaxis(part, axis, -1).reshape(-1, array.shape[axis]), joined=spans is not None)
    summary.nbytes -= sum(x.nbytes for x in (summary.low, summary.high) if np.may_share_memory(x, table.array))
    return summary


_summaries: WeakKeyDictionary[Table, dict[Any, Extremes]] = WeakKeyDictionary()


def extremes(table: Table, axis: int, spans: Spans | None = None) -> Extremes:
    """Return the cached `Extremes` along `axis` of a table.

    Rows of a summary are those of the other axes, in row-major order. With spans (first, last) of every index, all rows
    within them are one; for `axis` its span is all. Summaries of a table take no more memory than itself, or `CACHED`
    bytes.
    """
    summaries = _summaries.setdefault(table, {})
    summary = summaries.get((axis, spans))
    if summary is None:
        summary = _summarize(table, axis, spans)
        make_room(summaries, summary.nbytes, max(CACHED, table.array.nbytes))
        summaries[axis, spans] = summary
    return summary


def look_up(table: Table, boxes: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return the extremes of each box of indices.

    boxes: one (first, last) for each axis, (tiles,) inside the table.
    """
    lengths = [int((last - first).max(initial=0)) + 1 for first, last in boxes]
    axis = max(range(len(boxes)), key=lambda n: (lengths[n], n))
    if prod(lengths) // lengths[axis] > ROWS:
        return _by_hulls(table, boxes, axis)
    summary, (first, last) = extremes(table, axis), boxes[axis]
    results = [summary.between(row, first, last) for row in _rows(table, boxes, lengths, axis)]
    if len(results) == 1:
        return results[0]
    low, high = (best.reduce(x, axis=0) for best, x in zip(summary.best, zip(*results, strict=True), strict=True))
    return low, high


def _rows(table: Table, boxes: Sequence[tuple[Array, Array]], lengths: Sequence[int], axis: int) -> Iterable[Array]:
    """Yield the numbers of the n-th row of each box, for every n; short boxes repeat rows."""
    others = [n for n in range(len(boxes)) if n != axis]
    shape = [table.shape[n] for n in others]
    steps = [prod(shape[n + 1 :]) for n in range(len(shape))]
    zero = np.zeros(boxes[axis][0].shape, np.intp)
    for place in np.ndindex(*(lengths[n] for n in others)):
        at = (np.minimum(boxes[n][0] + x, boxes[n][1]) * step for n, x, step in zip(others, place, steps, strict=True))
        yield sum(at, zero)


def _by_hulls(table: Table, boxes: Sequence[tuple[Array, Array]], axis: int) -> tuple[Array, Array]:
    """Return the result of `look_up` for boxes of many rows, by a summary for each hull of rows."""
    others = np.stack([end for n, box in enumerate(boxes) if n != axis for end in box])
    group = np.unique(others, axis=1, return_inverse=True)[1].reshape(-1)
    members = np.argsort(group, kind="stable")
    parts = []
    for some in np.split(members, np.cumsum(np.bincount(group))[:-1]):
        spans = [(int(first[some[0]]), int(last[some[0]])) for first, last in boxes]
        spans[axis] = 0, table.shape[axis] - 1
        summary = extremes(table, axis, tuple(spans))
        parts.append(summary.between(0, *(end[some] for end in boxes[axis])))
    back = np.argsort(members)
    low, high = (np.concatenate(x)[back] for x in zip(*parts, strict=True))
    return low, high
