"""The tiles of a call: how queries and keys are cut, which pairs a tile sees, and the scores in it.

Rows are cut at multiples of ROWS counted from the absolute position i = 0, keys at multiples of KEYS from j = 0, and
every tile is computed at its full size, padded where the call ends. So a query meets the same products and sums, in
the same order, whatever else the call holds: prefill and decode give the same bits.

A *unit* is one batch element and some of its heads, a *block* is ROWS queries of a unit, a *tile* is a block against
KEYS keys, a *span* is TILES tiles, counted from j = 0. Tiles in which nothing is visible are left out; the tiles of a
span that are left are a *chunk* and are computed at once, as arrays (kv heads, group, T, ROWS, KEYS).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.reference.specification import kept
from regard.rules import EVERYTHING, At, Node, evaluate, reads, tile_pairs
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
Positions = range | tuple[int, ...]

ROWS, KEYS, TILES = 128, 128, 8
CHUNK = 2**18  # scores computed at once: a megabyte of float32, in cache, and Python between them counts for little
BAND = 16  # blocks whose tiles are found together, at most


def block(x: Array, start: int, size: int, dtype: Any) -> Array:
    """Positions start to start + size of x (..., n, d), zero where there are none, in a form that BLAS reads."""
    n, width = x.shape[-2:]
    if start >= 0 and start + size <= n:
        part = x[..., start : start + size, :]
        straight = part.strides[-1] == part.itemsize and part.strides[-2] >= width * part.itemsize and width > 1
        if part.dtype == dtype and straight and part.flags.aligned:
            return part
        return np.ascontiguousarray(part, dtype)
    result = np.zeros((*x.shape[:-2], size, width), dtype)
    low, high = max(start, 0), min(start + size, n)
    if high > low:
        result[..., low - start : high - start, :] = x[..., low:high, :]
    return result


def is_finite(x: Array, starts: range) -> Array:
    """For each start, whether x (..., n, d) is finite at the next KEYS positions; their sum tells, or overflows."""
    n, real = x.shape[-2], np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        sums = [x[..., max(s, 0) : min(s + KEYS, n), :].sum(dtype=real) for s in starts]
    return np.asarray(np.isfinite(np.array(sums, real)))


@dataclass(frozen=True, eq=False)
class Unit:
    """One batch element and the query heads of key-value heads `kv`, or `group` of one key-value head's."""

    p: Problem
    b: int
    kv: slice
    group: slice

    @cached_property
    def index(self) -> tuple[int, ...]:
        return tuple(int(x) for x in np.unravel_index(self.b, self.p.lead)) if self.p.lead else ()

    @cached_property
    def offset(self) -> int:
        return int(self.p.offset[self.b])

    @cached_property
    def heads(self) -> range:
        """The query heads of this unit, counted from the first of the call."""
        first, stop, _ = self.group.indices(self.p.group)
        return range(self.kv.start * self.p.group + first, (self.kv.stop - 1) * self.p.group + stop)

    @cached_property
    def h(self) -> Array:
        """The absolute query heads, (kv heads, group, 1, 1, 1)."""
        heads = np.array(self.heads, np.int64).reshape(self.kv.stop - self.kv.start, -1)
        return heads[:, :, None, None, None] + self.p.origin[1]

    def per_query_head(self, x: Array, tail: int) -> Array:
        """The part of x (..., h, *tail) that belongs to this unit, (kv heads, group, *tail); a view."""
        x = self.p.leading(x, tail + 1)[self.index]
        x = np.broadcast_to(x, (self.p.heads, *x.shape[1:]))
        grouped = x.reshape(self.p.kv_heads, self.p.group, *x.shape[1:])
        mine: Array = grouped[self.kv, self.group]
        return mine

    def per_kv_head(self, x: Array) -> Array:
        """The part of key or value that belongs to this unit, (kv heads, 1, n_k, d); a view."""
        mine: Array = self.p.leading(x, 3)[self.index][self.kv, None]
        return mine

    @cached_property
    def k(self) -> Array:
        return self.per_kv_head(self.p.key)

    @cached_property
    def v(self) -> Array:
        return self.per_kv_head(self.p.value)

    @cached_property
    def q(self) -> Array:
        return self.per_query_head(self.p.query, 2)

    @cached_property
    def sink(self) -> Array | None:
        """(kv heads, group, 1), so that it broadcasts over rows."""
        if self.p.sink is None:
            return None
        return np.broadcast_to(self.p.sink.astype(self.p.compute), (self.p.heads,)).reshape(self.p.kv_heads, -1)[
            self.kv, self.group, None
        ]

    @cached_property
    def finite_k(self) -> Array:
        return is_finite(self.k, self.tile_starts)

    @cached_property
    def finite_v(self) -> Array:
        return is_finite(self.v, self.tile_starts)

    @cached_property
    def tile_starts(self) -> range:
        """The first key of each tile as a column of this call; the first may be negative."""
        return range(-(self.p.origin[2] % KEYS) if self.p.n_k else 0, self.p.n_k, KEYS)

    @cached_property
    def row_starts(self) -> range:
        """The first query of each block as a row of this call; the first may be negative."""
        return range(-(self.offset % ROWS) if self.p.n_q else 0, self.p.n_q, ROWS)

    def own(self, x: Array) -> Array:
        """The part of a result (..., h, *tail) that belongs to this unit, (kv heads, group, *tail); a view."""
        mine = x[self.index]
        part: Array = mine.reshape(self.p.kv_heads, self.p.group, *mine.shape[1:])[self.kv, self.group]
        return part

    def bands(self, size: int, rows: Positions | None = None, cols: Positions | None = None) -> list["Band"]:
        """The blocks that hold some of `rows`, at most `size` of them together, and the tiles from the first of `cols`
        to the last; all unless they are given.
        """
        starts, tiles = list(self.row_starts), range(len(self.tile_starts))
        if rows is not None:
            first = self.row_starts.start
            starts = [starts[n] for n in dict.fromkeys(sorted((row - first) // ROWS for row in rows))]
        if cols is not None:
            first = self.tile_starts.start
            tiles = range((min(cols) - first) // KEYS, (max(cols) - first) // KEYS + 1)
        return [Band(self, starts[n : n + size], tiles) for n in range(0, len(starts), size)]

    @property
    def blocks(self) -> Iterator["Rows"]:
        for band in self.bands(BAND):
            yield from band


def units(p: Problem) -> Iterator[Unit]:
    """The units of a call, each of as many heads as fit a chunk, one head where the mask differs between heads."""
    apart = p.mask_node is not None and "h" in reads(p.mask_node)
    tiles = min(-(-p.n_k // KEYS) or 1, TILES)
    heads = 1 if apart else max(1, CHUNK // (ROWS * KEYS * tiles))
    for b in range(p.batch if p.heads else 0):
        if heads >= p.group:
            step = max(1, heads // p.group)
            for kv in range(0, p.kv_heads, step):
                yield Unit(p, b, slice(kv, min(kv + step, p.kv_heads)), slice(None))
        else:
            for kv in range(p.kv_heads):
                for g in range(0, p.group, heads):
                    yield Unit(p, b, slice(kv, kv + 1), slice(g, min(g + heads, p.group)))


@dataclass(frozen=True, eq=False)
class Band:
    """Some blocks of a unit; iterating finds their tiles."""

    unit: Unit
    starts: list[int]
    tiles: range

    def __iter__(self) -> Iterator["Rows"]:
        unit, p = self.unit, self.unit.p
        tiles = np.arange(self.tiles.start, self.tiles.stop)
        if not p.rules.hiding:
            everything = np.full(len(tiles), EVERYTHING, np.int8)
            for start in self.starts:
                yield Rows(unit, start, tiles, everything)
            return
        first, last = np.maximum(self.starts, 0), np.minimum(np.add(self.starts, ROWS), p.n_q) - 1
        ranges = p.extents.ranges(unit.b, unit.heads, first, last)
        edges = p.extents.key_edges(KEYS)[self.tiles.start : self.tiles.stop + 1]
        row, tile, kind = tile_pairs(p.mask_node, p.rules.hiding_node, ranges, edges)
        tile = tile + self.tiles.start
        cuts = np.searchsorted(row, np.arange(len(self.starts) + 1))
        for start, (a, b) in zip(self.starts, pairwise(cuts), strict=True):
            yield Rows(unit, start, tile[a:b], kind[a:b])


class Rows:
    """A block of queries of a unit, and the tiles that it may see."""

    def __init__(self, unit: Unit, start: int, tiles: Array, kinds: Array):
        self.unit, self.p, self.start, self.tiles, self.kinds = unit, unit.p, start, tiles, kinds
        self.inside = slice(max(-start, 0), min(ROWS, unit.p.n_q - start))  # the rows of the block that the call has
        self.outside = slice(start + self.inside.start, start + self.inside.stop)  # the same, as rows of the call
        self.whole = self.inside == slice(0, ROWS)
        self.heads = unit.h.shape[:2]
        self.i = (np.arange(ROWS, dtype=np.int64) + (start + unit.offset))[:, None]

    @cached_property
    def q(self) -> Array:
        """scale · q, (kv heads, group, 1, ROWS, d)."""
        scaled: Array = self.take(self.unit.q) * self.p.compute.type(self.p.scale)
        return scaled

    def take(self, x: Array) -> Array:
        """The rows of x (kv heads, group, n_q, d) as (kv heads, group, 1, ROWS, d)."""
        return block(x, self.start, ROWS, self.p.compute)[:, :, None]

    def chunks(self, tiles_at_once: int = TILES) -> Iterator["Chunk"]:
        """The tiles span by span, or by so many, in rising order."""
        if not len(self.tiles):
            return
        first = self.p.origin[2] // KEYS  # the absolute number of tile 0
        spans = (self.tiles + first) // tiles_at_once
        cuts = np.flatnonzero(np.diff(spans)) + 1
        for tiles, kinds in zip(np.split(self.tiles, cuts), np.split(self.kinds, cuts), strict=True):
            inside = np.arange(tiles[0], tiles[-1] + 1)
            # A tile between them that was left out is here again, and has to be masked.
            mixed = np.ones(len(inside), bool)
            mixed[tiles[kinds == EVERYTHING] - tiles[0]] = False
            yield Chunk(self, inside, inside[mixed])


class Chunk:
    """T consecutive tiles of a span: those from the first to the last that may hold a visible pair."""

    def __init__(self, rows: Rows, tiles: Array, mixed: Array):
        self.rows, self.p = rows, rows.p
        self.T, first = len(tiles), int(tiles[0])
        self.tiles = slice(first, first + self.T)
        self.start = rows.unit.tile_starts[first]
        self.shape = (*rows.heads, self.T, ROWS, KEYS)
        # The tiles, counted from the first, between which the mask has to be evaluated.
        self.mixed = slice(int(mixed[0]) - first, int(mixed[-1]) + 1 - first) if len(mixed) else slice(0, 0)
        size = self.T * KEYS
        self.inside = slice(max(-self.start, 0), min(size, self.p.n_k - self.start))  # columns that the call has
        self.outside = slice(self.start + self.inside.start, self.start + self.inside.stop)  # as columns of the call
        self.whole = rows.whole and self.inside == slice(0, size)  # no part of it is padding
        self.full = self.whole and not len(mixed)  # and nothing is masked

    def take(self, x: Array) -> Array:
        """The keys of x (kv heads, 1, n_k, d) as (kv heads, 1, T, KEYS, d)."""
        part = block(x, self.start, self.T * KEYS, self.p.compute)
        return part.reshape(*part.shape[:-2], self.T, KEYS, part.shape[-1])

    @cached_property
    def k(self) -> Array:
        return self.take(self.rows.unit.k)

    @cached_property
    def v(self) -> Array:
        return self.take(self.rows.unit.v)

    def columns(self, tiles: slice = slice(None)) -> Array:
        """The keys of some tiles as columns of the call, (T, 1, KEYS)."""
        first, stop, _ = tiles.indices(self.T)
        size = (stop - first) * KEYS
        return np.arange(size, dtype=np.int64).reshape(-1, 1, KEYS) + (self.start + first * KEYS)

    def dense(self, x: Array, tiles: slice = slice(None)) -> Array:
        """Some tiles of a dense mask or bias."""
        full = self.rows.unit.per_query_head(self.p.dense(x), 2)[..., self.rows.outside, self.outside]
        if not self.whole:
            padded = np.zeros((*full.shape[:2], ROWS, self.T * KEYS), full.dtype)
            padded[..., self.rows.inside, self.inside] = full
            full = padded
        return full.reshape(*full.shape[:3], self.T, KEYS).swapaxes(2, 3)[:, :, tiles]

    def at(self, tiles: slice = slice(None), s: Array | None = None, ds: Array | None = None) -> At:
        """Where the rules are evaluated for some tiles."""
        return At(
            b=np.array(self.p.origin[0] + self.rows.unit.b),
            h=self.rows.unit.h,
            i=self.rows.i,
            j=self.columns(tiles) + self.p.origin[2],
            dtype=self.p.compute.type,
            keys=self.p.keys,
            dense=lambda x: self.dense(x, tiles),
            integers=self.p.rules.integers,
            s=s,
            ds=ds,
        )

    def raw(self) -> Array:
        """T = scale · Q K."""
        T: Array = np.matmul(self.rows.q, self.k.swapaxes(-1, -2))
        return T

    def scores(self, raw: Array) -> Array:
        """S: the score rules, the bias, and −∞ for what is masked. Overwrites `raw` where there is no rule."""
        p = self.p
        S = raw
        if p.rules.score_reading is not None:
            S = np.array(np.broadcast_to(p.rules.score_reading(self.at(s=raw))[0], self.shape), p.compute)
        if p.bias is not None:
            S += self.dense(p.bias)
        self.hide(S, -np.inf)
        return S

    def hide(self, S: Array, value: float) -> None:
        """Set what the mask hides, or what lies outside the call, to a value."""
        if self.mixed.stop and self.p.rules.mask_reading is not None:
            hidden = ~self.p.rules.mask_reading(self.at(self.mixed))[0]
            np.copyto(S[:, :, self.mixed], value, where=hidden)
        if not self.whole:
            S[..., : self.rows.inside.start, :] = value
            S[..., self.rows.inside.stop :, :] = value
            S[:, :, 0, :, : self.inside.start] = value
            S[:, :, -1, :, self.inside.stop - (self.T - 1) * KEYS :] = value

    def evaluate(self, node: Node, s: Array, ds: Array | None = None) -> Array:
        """A score rule or a derivative of one."""
        return evaluate([node], self.at(s=s, ds=ds))[0]

    def dropout(self) -> Array | None:
        """D = keep / (1 − p); None without dropout."""
        p = self.p
        if not p.dropout:
            return None
        at = self.at()
        D: Array = kept(p.dropout, p.seed, at.b, at.h, at.i, at.j) * p.compute.type(1 / (1 - p.dropout))
        return D


def masked(S: Array) -> Array:
    """The pairs that do not see each other."""
    return np.asarray(S == -np.inf)


def product(weight: Array, x: Array, hidden: Array | None) -> Array:
    """weight @ x for weight (..., n, m) and x (..., m, d), where the weight of a `hidden` pair is 0.

    None says that x is finite. Otherwise what is hidden must not make 0 · NaN.
    """
    if hidden is None:
        plain: Array = np.matmul(weight, x)
        return plain
    wild = ~np.isfinite(x)
    total: Array = np.matmul(weight, np.where(wild, x.dtype.type(0), x))
    for m in np.flatnonzero(wild.any(axis=(*range(x.ndim - 2), x.ndim - 1))):
        row = x[..., m, None, :]
        total += np.where(~np.isfinite(row) & ~hidden[..., m, None], weight[..., m, None] * row, 0)
    return total
