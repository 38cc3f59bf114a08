"""A head's weights as a map that zooms: a pyramid of tiles.

The last level is exact, one pixel a pair. A pixel of the level before covers twice as many queries and keys, and holds
their mass or largest weight. Tiles of fine levels are computed on request, from at most `ON_DEMAND` queries and keys.
Coarse levels would need too many pairs for that, so they are cached. One pass over all pairs computes the finest of
them, and pooling the others. It runs in bands of queries, visible as soon as they are ready; n × n is never in memory.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from regard.core.parts import part_of
from regard.engines.normalized import too_large
from regard.runtime.forks import renewed
from regard.viewer.scene.scenes import SMALL, Head

Array = np.ndarray[Any, np.dtype[Any]]
Half = NDArray[np.float16]
Kind = Literal["mass", "max"]

TILE = 256
ON_DEMAND = 4096
"""Maximum queries and keys of a tile computed on request: some 20 ms of work."""

WIDEST = 4096
"""Maximum side of a cached level in pixels."""

FEW = 1024
"""Pixels on a side that are always few enough to cache."""

STEP = 2**26
"""Approximate number of pairs in a band of growth: some 50 ms of work."""

STRIP = 2**20
"""Weights that are in memory at once."""

WORTH_COMPILING = 2**26
"""Pairs above which a kernel's pass pays for its compilation."""

WORTH_CALLING = 2**22
"""Pairs of a tile above which a compiled kernel is quicker than tiles on NumPy."""

SAMPLED = 4
"""Queries for each row of pixels, where a long map is sampled."""


@dataclass(frozen=True)
class Levels:
    """The levels of a map of n_q × n_k pairs, and which of them are cached.

    >>> levels = Levels(100_000, 100_000)
    >>> levels.finest, levels.kept, levels.cell(levels.kept), levels.size(levels.kept)
    (9, 4, 32, (3125, 3125))
    """

    n_q: int
    n_k: int

    @property
    def finest(self) -> int:
        """The number of the exact level; 0 is the map in one tile."""
        return _log2(max(self.n_q, self.n_k, 1), TILE)

    @property
    def kept(self) -> int:
        """The finest cached level, −1 if none is."""
        n = max(self.n_q, self.n_k, 1)
        shrunk = max(1, min(_log2(n, FEW), _log2(ON_DEMAND, TILE) + 1), _log2(n, WIDEST))
        return self.finest - shrunk if self.finest else -1

    def cell(self, level: int) -> int:
        """Return the number of queries, and of keys, that a pixel of a level covers."""
        return 1 << (self.finest - level)

    def size(self, level: int) -> tuple[int, int]:
        """Return the rows and columns of a level, in pixels."""
        cell = self.cell(level)
        return -(-self.n_q // cell), -(-self.n_k // cell)

    def pixels(self, level: int, x: int, y: int) -> tuple[range, range]:
        """Return the rows and columns of a tile's pixels, clipped to the map.

        Raises IndexError for a tile that does not exist.
        """
        if not 0 <= level <= self.finest:
            raise IndexError(f"level {level} does not exist: this map has levels 0 to {self.finest}")
        height, width = self.size(level)
        rows, cols = (range(at * TILE, min((at + 1) * TILE, size)) for at, size in ((y, height), (x, width)))
        if x < 0 or y < 0 or not rows or not cols:
            across, down = -(-width // TILE), -(-height // TILE)
            raise IndexError(f"tile {x}, {y} does not exist: level {level} has {across} × {down} tiles")
        return rows, cols

    def covered(self, level: int, pixels: range, n: int) -> range:
        """Return the positions, of n, that some pixels of a level cover."""
        cell = self.cell(level)
        return range(pixels.start * cell, min(pixels.stop * cell, n))


def _log2(n: int, part: int) -> int:
    """Return the least k with n ≤ part · 2ᵏ."""
    shrunk: int = -(-n // part)
    return (shrunk - 1).bit_length()


class Coarse:
    """The cached levels of a head, from 0 on, as float16.

    Levels grow in bands of queries, in order or where a tile was requested. Pixels that are not computed yet are
    infinite. `top` is the largest weight so far, `highest` the largest mass of each level.
    """

    def __init__(self, head: Head):
        self.head, self.levels = head, Levels(head.n_q, head.n_k)
        shapes = [self.levels.size(level) for level in range(self.levels.kept + 1)]
        self.mass, self.max = (tuple(np.full(shape, np.inf, np.float16) for shape in shapes) for _ in range(2))
        self.highest, self.top = [0.0] * len(shapes), 0.0
        self.error: Exception | None = None
        coarsest = self.levels.cell(0)  # bands are multiples of it, so that no pixel of any level needs two
        self._band = max(1, STEP // (head.n_k * coarsest)) * coarsest
        self._missing = list(range(0, head.n_q, self._band))
        self._count = len(self._missing)
        self._preferred, self._preferred_at = range(0), 0.0
        self._lock = renewed(self, "_lock", threading.Lock)

    @property
    def done(self) -> float:
        """The share of queries that is computed."""
        return 1 - len(self._missing) / self._count

    @property
    def whole(self) -> bool:
        """True if all is computed."""
        return not self._missing

    @property
    def nbytes(self) -> int:
        """The memory of the levels."""
        return sum(level.nbytes for level in (*self.mass, *self.max))

    def described(self) -> dict[str, Any]:
        """Return the map as JSON: its size, its levels, and the largest values known so far."""
        levels = self.levels
        fine: list[float | None] = [None] * (levels.finest - levels.kept - 1)
        maximum = {"mass": [*self.highest, *fine, self.top], "max": [self.top] * (levels.finest + 1)}
        return {
            "n_q": levels.n_q, "n_k": levels.n_k, "tile": TILE, "levels": levels.finest + 1,
            "max_level": levels.finest, "maximum": maximum, "done": round(self.done, 3),
        }  # fmt: skip

    def of(self, kind: Kind) -> tuple[Half, ...]:
        """Return the levels of a kind."""
        return self.mass if kind == "mass" else self.max

    def prefer(self, rows: range) -> None:
        """Compute the bands of these queries next, if they are at most a quarter of all.

        Within one second of a request, one for more queries is ignored.
        """
        now = time.monotonic()
        if 4 * len(rows) > self.head.n_q:
            return
        if len(rows) <= len(self._preferred) or now - self._preferred_at > 1:
            self._preferred, self._preferred_at = rows, now

    def grow(self) -> None:
        """Compute the next band, if one is missing."""
        with self._lock:
            if not self._missing:
                return
            preferred = range(self._preferred.start - self._band + 1, self._preferred.stop)
            start = next((start for start in self._missing if start in preferred), self._missing[0])
            self._find(range(start, min(start + self._band, self.head.n_q)))
            self._missing.remove(start)

    def _find(self, rows: range) -> None:
        if not self.mass:
            self.top = max(self.top, float(self.head.weights(rows, range(self.head.n_k)).max(initial=0)))
            return
        totals, largest = _cells(self.head, rows, range(self.head.n_k), self.levels.cell(self.levels.kept))
        self.top = max(self.top, float(np.nan_to_num(largest).max(initial=0)))
        for level in range(self.levels.kept, -1, -1):
            cell = self.levels.cell(level)
            into = slice(rows.start // cell, -(-rows.stop // cell))
            mass = (totals / np.diff(edges(len(rows), cell))[:, None]).astype(np.float16)
            self.highest[level] = max(self.highest[level], float(np.nan_to_num(mass).max(initial=0)))
            self.mass[level][into], self.max[level][into] = mass, largest.astype(np.float16)
            totals, largest = pooled(totals, 2, np.add), pooled(largest, 2, np.maximum)


def _cells(head: Head, rows: range, cols: range, cell: int) -> tuple[Array, Array]:
    """Return sums and maxima of the weights of some rows on some keys, by cells.

    The first row and the first key begin a cell.
    """
    down, across = len(rows) // cell, len(cols) // cell
    even, right = cols[: across * cell], cols[across * cell :]
    # A rule that reads the number of keys must not be given a part of them.
    fits = down and across and (even.stop == head.n_k or not head.counts_keys)
    if not fits or head.problem.pairs < WORTH_COMPILING or len(rows) * len(cols) < WORTH_CALLING:
        return _by_strips(head, rows, cols, cell)
    top, below = rows[: down * cell], rows[down * cell :]
    if too_large(head.lse_of(top)).any():  # weights next to it are exact in whole rows alone
        return _by_strips(head, rows, cols, cell)
    part = part_of(head.problem, rows=slice(top.start, top.stop), cols=slice(even.start, even.stop))
    mass, largest = head.engine.maps(part, head.lse_of(top)[None], down, across)
    totals, largest = mass[0] * np.float32(cell), largest[0]
    if right:
        beside = _by_strips(head, top, right, cell)
        totals, largest = (np.concatenate(pair, axis=1) for pair in zip((totals, largest), beside, strict=True))
    if below:
        last = _by_strips(head, below, cols, cell)
        totals, largest = (np.concatenate(pair) for pair in zip((totals, largest), last, strict=True))
    return totals, largest


def _by_strips(head: Head, rows: range, cols: range, cell: int) -> tuple[Array, Array]:
    """Return sums and maxima by cells from exact weights, one strip at a time."""
    strip = max(1, STRIP // (cell * len(cols))) * cell
    sums, maxima = [], []
    for start in range(0, len(rows), strip):
        weights = head.weights(rows[start : start + strip], cols)
        sums.append(pooled(weights, cell, np.add))
        maxima.append(pooled(weights, cell, np.maximum))
    return np.concatenate(sums), np.concatenate(maxima)


def tile(head: Head, known: Coarse | None, level: int, rows: range, cols: range, kind: Kind) -> Half:
    """Return one tile as float16 pixels, NaN where certainly nothing is visible.

    rows, cols: the tile's pixels, as of `Levels.pixels`. known: cached levels to read, infinite where they are not
    computed yet. Without them the tile is computed from its own pairs.
    """
    levels = Levels(head.n_q, head.n_k)
    cell = levels.cell(level)
    if known is not None:
        values = known.of(kind)[level][rows.start : rows.stop, cols.start : cols.stop].copy()
    else:
        i, j = levels.covered(level, rows, head.n_q), levels.covered(level, cols, head.n_k)
        totals, largest = _cells(head, i, j, cell)
        if kind == "mass":
            largest = totals / np.diff(edges(len(i), cell))[:, None].astype(totals.dtype)
        values = largest.astype(np.float16)
    hidden = head.hidden(*(edges(n, cell)[r.start : r.stop + 1] for r, n in ((rows, head.n_q), (cols, head.n_k))))
    if hidden is not None:
        values[np.broadcast_to(hidden, values.shape)] = np.nan
    return values


def thumbnail(head: Head, size: int, kind: Kind, known: Coarse | None = None) -> tuple[Half, bool]:
    """Return the whole map in size × size pixels, and whether it is exact.

    Pixels are NaN where certainly nothing is visible. Long heads without complete cached levels are sampled: `SAMPLED`
    queries for each row of pixels.
    """
    exact = True
    if known is not None and known.mass and known.whole:
        pixels = _fitted(known.of(kind)[-1].astype(np.float32), size, kind)
    elif head.problem.pairs <= SMALL:
        pixels = _fitted(head.weights(range(head.n_q), range(head.n_k)), size, kind)
    else:
        rows = np.unique(np.arange(size * SAMPLED) * head.n_q // (size * SAMPLED))
        parts = np.array_split(rows, -(-len(rows) * head.n_k // (8 * STRIP)))
        seen = np.concatenate([_fitted(head.weights_of(part), size, kind, axes=(1,)) for part in parts])
        pixels, exact = _fitted(seen, size, kind, axes=(0,)), False
    return np.where(_hidden(head, size), np.nan, pixels).astype(np.float16), exact


def _hidden(head: Head, size: int) -> NDArray[np.bool_] | bool:
    """Return the pixels of a thumbnail where certainly nothing is visible.

    Without rules that hide, return False.
    """
    parts = [np.unique(np.arange(size) * n // size, return_inverse=True) for n in (head.n_q, head.n_k)]
    hidden = head.hidden(*(np.append(at, n) for (at, _), n in zip(parts, (head.n_q, head.n_k), strict=True)))
    if hidden is None:
        return False
    whole: NDArray[np.bool_] = np.broadcast_to(hidden, [len(at) for at, _ in parts])
    return whole[np.ix_(*(which for _, which in parts))]


def _fitted(values: Array, size: int, kind: Kind, axes: tuple[int, ...] = (1, 0)) -> Array:
    """Resize a map, or some of its rows, to `size` pixels on a side.

    Shrinking sums over keys and averages over queries, or takes the largest. Enlarging repeats the nearest.
    """
    for axis in axes:
        n = values.shape[axis]
        starts = np.arange(size) * n // size
        if n <= size:
            values = values.take(starts, axis)
        elif kind == "max":
            values = np.maximum.reduceat(values, starts, axis)
        else:
            values = np.add.reduceat(values, starts, axis)
            values = values / np.diff(starts, append=n)[:, None] if axis == 0 else values
    return values


def pooled(values: Array, cell: int, operation: np.ufunc) -> Array:
    """Reduce a map over cells of `cell` rows and columns."""
    if cell == 1:
        return values
    for axis in (1, 0):
        values = operation.reduceat(values, np.arange(0, values.shape[axis], cell), axis)
    return values


def edges(n: int, cell: int) -> NDArray[np.int64]:
    """Return the edges of cells of `cell` positions; the last cell may be smaller."""
    return np.minimum(np.arange(0, n + cell, cell, dtype=np.int64), n)[: -(-n // cell) + 1]
