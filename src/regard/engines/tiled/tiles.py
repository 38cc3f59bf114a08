"""Tiles of a call: query blocks, their visible key tiles, and scores.

Query blocks begin at multiples of BLOCK_Q, counted from the absolute position i = 0; key tiles at multiples of BLOCK_K
from j = 0. Every tile is computed at its full size, padded at the ends of the call. A query therefore meets the same
products and sums in the same order in any call: prefill and decode give the same bits.

| Term | Meaning |
|---|---|
| head block | one batch element and some of its heads |
| query block | BLOCK_Q queries of a head block |
| tile | a query block against BLOCK_K keys |
| key split | SPLIT_TILES tiles, counted from j = 0 |
| chunk | the visible tiles of a key split, computed together as arrays (kv heads, group, T, BLOCK_Q, BLOCK_K) |
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.reference.specification import dropout_mask
from regard.rules import EVERYTHING, At, Node, evaluate, reads, visible_tiles
from regard.runtime.forks import cached_property
from regard.runtime.threads import num_threads

Array = np.ndarray[Any, np.dtype[Any]]
Positions = range | tuple[int, ...]

BLOCK_Q, BLOCK_K, SPLIT_TILES = 128, 128, 8
CHUNK_SCORES = 2**18  # scores computed together: a megabyte of float32 stays in cache and hides Python's overhead
BAND = 16  # maximum number of query blocks to find the tiles of together


def padded(x: Array, start: int, size: int, dtype: Any) -> Array:
    """Return positions [start, start + size) of x (..., n, d), zero outside of x.

    The result has a layout for BLAS, and is a view of x if possible.
    """
    n, width = x.shape[-2:]
    if start >= 0 and start + size <= n:
        part = x[..., start : start + size, :]
        row_major = part.strides[-1] == part.itemsize and part.strides[-2] >= width * part.itemsize and width > 1
        if part.dtype == dtype and row_major and part.flags.aligned:
            return part
        return np.ascontiguousarray(part, dtype)
    result = np.zeros((*x.shape[:-2], size, width), dtype)
    low, high = max(start, 0), min(start + size, n)
    if high > low:
        result[..., low - start : high - start, :] = x[..., low:high, :]
    return result


def is_finite(x: Array, starts: range) -> Array:
    """Return for each start whether x (..., n, d) is finite at BLOCK_K positions.

    A sum that overflows counts as not finite, which is safe.
    """
    n, real = x.shape[-2], np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        sums = [x[..., max(s, 0) : min(s + BLOCK_K, n), :].sum(dtype=real) for s in starts]
    return np.asarray(np.isfinite(np.array(sums, real)))


@dataclass(frozen=True, eq=False)
class HeadBlock:
    """One batch element and some of its heads.

    A block has all query heads of the key-value heads `kv`, or the query heads `group` of a single one.
    """

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
    def query_heads(self) -> range:
        """Query heads of this block, counted from the first of the call."""
        first, stop, _ = self.group.indices(self.p.group)
        return range(self.kv.start * self.p.group + first, (self.kv.stop - 1) * self.p.group + stop)

    @cached_property
    def h(self) -> Array:
        """Absolute query heads, (kv heads, group, 1, 1, 1)."""
        heads = np.array(self.query_heads, np.int64).reshape(self.kv.stop - self.kv.start, -1)
        return heads[:, :, None, None, None] + self.p.origin[1]

    def per_query_head(self, x: Array, tail: int) -> Array:
        """Return a view of x (..., h, *tail) for these heads, (kv heads, group, *tail)."""
        x = self.p.leading(x, tail + 1)[self.index]
        x = np.broadcast_to(x, (self.p.heads, *x.shape[1:]))
        grouped = x.reshape(self.p.kv_heads, self.p.group, *x.shape[1:])
        own: Array = grouped[self.kv, self.group]
        return own

    def per_kv_head(self, x: Array) -> Array:
        """Return a view of the keys or values of these heads, (kv heads, 1, n_k, d)."""
        own: Array = self.p.leading(x, 3)[self.index][self.kv, None]
        return own

    @cached_property
    def k(self) -> Array:
        return self.per_kv_head(self.p.key)

    @cached_property
    def v(self) -> Array:
        return self.per_kv_head(self.p.value)

    @cached_property
    def q(self) -> Array:
        return self.per_query_head(self.p.query, 2)

    def logit(self, x: Any) -> Array:
        """Return one of `Problem.denominators`, or its tangent, as (kv heads, group, 1, 1, 1)."""
        return self.per_query_head(self.p.per_head(x), 0)[..., None, None, None]

    @cached_property
    def outside(self) -> Array | None:
        """`Problem.outside` as (kv heads, group, 1), which broadcasts over rows."""
        x = self.p.outside
        return None if x is None else self.per_query_head(x, 0)[..., None]

    @cached_property
    def finite_k(self) -> Array:
        return is_finite(self.k, self.tile_starts)

    @cached_property
    def finite_v(self) -> Array:
        return is_finite(self.v, self.tile_starts)

    @cached_property
    def tile_starts(self) -> range:
        """First column of each tile in the call; the first may be negative."""
        return range(-(self.p.origin[2] % BLOCK_K) if self.p.n_k else 0, self.p.n_k, BLOCK_K)

    @cached_property
    def row_starts(self) -> range:
        """First row of each query block in the call; the first may be negative."""
        return range(-(self.offset % BLOCK_Q) if self.p.n_q else 0, self.p.n_q, BLOCK_Q)

    def own(self, x: Array) -> Array:
        """Return a view of a result for these heads.

        x: (..., h, *tail); the view: (kv heads, group, *tail).
        """
        element = x[self.index]
        own: Array = element.reshape(self.p.kv_heads, self.p.group, *element.shape[1:])[self.kv, self.group]
        return own

    def bands(self, size: int, rows: Positions | None = None, cols: Positions | None = None) -> list["Band"]:
        """Group query blocks into bands of at most `size` blocks.

        rows: only blocks with some of them. cols: only tiles from the first of them to the last.
        """
        starts, tiles = list(self.row_starts), range(len(self.tile_starts))
        if rows is not None:
            first = self.row_starts.start
            starts = [starts[n] for n in dict.fromkeys(sorted((row - first) // BLOCK_Q for row in rows))]
        if cols is not None:
            first = self.tile_starts.start
            tiles = range((min(cols) - first) // BLOCK_K, (max(cols) - first) // BLOCK_K + 1)
        return [Band(self, starts[n : n + size], tiles) for n in range(0, len(starts), size)]

    @property
    def blocks(self) -> Iterator["QueryBlock"]:
        for band in self.bands(BAND):
            yield from band


def head_blocks(p: Problem) -> Iterator[HeadBlock]:
    """Yield the head blocks of a call, each as large as a chunk allows.

    If the mask reads the head, each has one head, since heads see different tiles.
    """
    mask_per_head = p.mask_node is not None and "h" in reads(p.mask_node)
    tiles = min(-(-p.n_k // BLOCK_K) or 1, SPLIT_TILES)
    size = 1 if mask_per_head else max(1, CHUNK_SCORES // (BLOCK_Q * BLOCK_K * tiles))
    for b in range(p.batch if p.heads else 0):
        if size >= p.group:
            step = max(1, size // p.group)
            for kv in range(0, p.kv_heads, step):
                yield HeadBlock(p, b, slice(kv, min(kv + step, p.kv_heads)), slice(None))
        else:
            for kv in range(p.kv_heads):
                for g in range(0, p.group, size):
                    yield HeadBlock(p, b, slice(kv, kv + 1), slice(g, min(g + size, p.group)))


@dataclass(frozen=True, eq=False)
class Band:
    """Consecutive query blocks of a head block; iteration finds their tiles together."""

    heads: HeadBlock
    starts: list[int]
    tiles: range

    def __iter__(self) -> Iterator["QueryBlock"]:
        heads, p = self.heads, self.heads.p
        tiles = np.arange(self.tiles.start, self.tiles.stop)
        if not p.rules.hiding:
            visibility = np.full(len(tiles), EVERYTHING, np.int8)
            for start in self.starts:
                yield QueryBlock(heads, start, tiles, visibility)
            return
        first, last = np.maximum(self.starts, 0), np.minimum(np.add(self.starts, BLOCK_Q), p.n_q) - 1
        few = heads.query_heads
        ranges = p.extents.ranges(heads.b, (few.start, few.stop - 1), first, last)
        edges = p.extents.key_edges(BLOCK_K)[self.tiles.start : self.tiles.stop + 1]
        row, tile, visibility = visible_tiles(p.mask_node, p.rules.hiding_node, ranges, edges)
        tile = tile + self.tiles.start
        edges = np.searchsorted(row, np.arange(len(self.starts) + 1))
        for start, (a, b) in zip(self.starts, pairwise(edges), strict=True):
            yield QueryBlock(heads, start, tile[a:b], visibility[a:b])


class QueryBlock:
    """BLOCK_Q queries of a head block, and their visible tiles.

    valid: the rows of the block that exist. in_call: the same, as rows of the call. visibility: `EVERYTHING` or `MIXED`
    for each tile.
    """

    def __init__(self, heads: HeadBlock, start: int, tiles: Array, visibility: Array):
        self.heads, self.p, self.start, self.tiles, self.visibility = heads, heads.p, start, tiles, visibility
        self.valid = slice(max(-start, 0), min(BLOCK_Q, heads.p.n_q - start))
        self.in_call = slice(start + self.valid.start, start + self.valid.stop)
        self.whole = self.valid == slice(0, BLOCK_Q)
        self.head_shape = heads.h.shape[:2]
        self.i = (np.arange(BLOCK_Q, dtype=np.int64) + (start + heads.offset))[:, None]

    @cached_property
    def q(self) -> Array:
        """scale · Q, (kv heads, group, 1, BLOCK_Q, d)."""
        scaled: Array = self.take(self.heads.q) * self.p.compute.type(self.p.scale)
        return scaled

    def take(self, x: Array) -> Array:
        """Return the block's rows of x, (kv heads, group, 1, BLOCK_Q, d).

        x: (kv heads, group, n_q, d).
        """
        return padded(x, self.start, BLOCK_Q, self.p.compute)[:, :, None]

    def chunks(self, chunk_tiles: int = SPLIT_TILES) -> Iterator["Chunk"]:
        """Yield the visible tiles in ascending order, one key split at a time.

        chunk_tiles: tiles of a key split.
        """
        if not len(self.tiles):
            return
        first = self.p.origin[2] // BLOCK_K  # the absolute number of tile 0
        split = (self.tiles + first) // chunk_tiles
        edges = np.flatnonzero(np.diff(split)) + 1
        for tiles, visibility in zip(np.split(self.tiles, edges), np.split(self.visibility, edges), strict=True):
            consecutive = np.arange(tiles[0], tiles[-1] + 1)
            # Hidden tiles between visible ones are computed too, so they must be masked.
            mixed = np.ones(len(consecutive), bool)
            mixed[tiles[visibility == EVERYTHING] - tiles[0]] = False
            yield Chunk(self, consecutive, consecutive[mixed])


class Chunk:
    """T consecutive tiles of a key split, from the first visible one to the last.

    valid: the columns of the chunk that exist. in_call: the same, as columns of the call. mixed: the range of tiles,
    counted from the first, that need the mask. whole: nothing is padding. full: nothing is padding or masked.
    """

    def __init__(self, block: QueryBlock, tiles: Array, mixed: Array):
        self.block, self.p = block, block.p
        self.T, first = len(tiles), int(tiles[0])
        self.tiles = slice(first, first + self.T)
        self.start = block.heads.tile_starts[first]
        self.shape = (*block.head_shape, self.T, BLOCK_Q, BLOCK_K)
        self.mixed = slice(int(mixed[0]) - first, int(mixed[-1]) + 1 - first) if len(mixed) else slice(0, 0)
        size = self.T * BLOCK_K
        self.valid = slice(max(-self.start, 0), min(size, self.p.n_k - self.start))
        self.in_call = slice(self.start + self.valid.start, self.start + self.valid.stop)
        self.whole = block.whole and self.valid == slice(0, size)
        self.full = self.whole and not len(mixed)

    def take(self, x: Array) -> Array:
        """Return the chunk's keys of x, (kv heads, 1, T, BLOCK_K, d).

        x: (kv heads, 1, n_k, d).
        """
        part = padded(x, self.start, self.T * BLOCK_K, self.p.compute)
        return part.reshape(*part.shape[:-2], self.T, BLOCK_K, part.shape[-1])

    @cached_property
    def k(self) -> Array:
        return self.take(self.block.heads.k)

    @cached_property
    def v(self) -> Array:
        return self.take(self.block.heads.v)

    def columns(self, tiles: slice = slice(None)) -> Array:
        """Return the columns in the call of some tiles, (T, 1, BLOCK_K)."""
        first, stop, _ = tiles.indices(self.T)
        size = (stop - first) * BLOCK_K
        return np.arange(size, dtype=np.int64).reshape(-1, 1, BLOCK_K) + (self.start + first * BLOCK_K)

    def dense(self, x: Array, tiles: slice = slice(None)) -> Array:
        """Return some tiles (kv heads, group, T, BLOCK_Q, BLOCK_K) of a dense mask or bias."""
        full = self.block.heads.per_query_head(self.p.dense(x), 2)[..., self.block.in_call, self.in_call]
        if not self.whole:
            valid, full = full, np.zeros((*full.shape[:2], BLOCK_Q, self.T * BLOCK_K), full.dtype)
            full[..., self.block.valid, self.valid] = valid
        return full.reshape(*full.shape[:3], self.T, BLOCK_K).swapaxes(2, 3)[:, :, tiles]

    def at(self, tiles: slice = slice(None), s: Array | None = None, ds: Array | None = None) -> At:
        """Return the indices of some tiles, to evaluate rules at."""
        return At(
            b=np.array(self.p.origin[0] + self.block.heads.b),
            h=self.block.heads.h,
            i=self.block.i,
            j=self.columns(tiles) + self.p.origin[2],
            dtype=self.p.compute.type,
            keys=self.p.keys,
            dense=lambda x: self.dense(x, tiles),
            integers=self.p.rules.integers,
            s=s,
            ds=ds,
        )

    def raw(self) -> Array:
        """Return T = scale · Q K."""
        T: Array = np.matmul(self.block.q, self.k.swapaxes(-1, -2))
        return T

    def scores(self, raw: Array) -> Array:
        """Return S: T = `raw` after score rules and bias, −∞ where masked.

        Overwrites `raw` without a score rule.
        """
        p = self.p
        S = raw
        if p.rules.score_reading is not None:
            S = np.array(np.broadcast_to(p.rules.score_reading(self.at(s=raw))[0], self.shape), p.compute)
        if p.bias is not None:
            S += self.dense(p.bias)
        self.hide(S, -np.inf)
        return S

    def hide(self, S: Array, value: float) -> None:
        """Set scores that the mask hides, and padding, to a value."""
        if self.mixed.stop and self.p.rules.mask_reading is not None:
            hidden = ~self.p.rules.mask_reading(self.at(self.mixed))[0]
            np.copyto(S[:, :, self.mixed], value, where=hidden)
        if not self.whole:
            S[..., : self.block.valid.start, :] = value
            S[..., self.block.valid.stop :, :] = value
            S[:, :, 0, :, : self.valid.start] = value
            S[:, :, -1, :, self.valid.stop - (self.T - 1) * BLOCK_K :] = value

    def evaluate(self, node: Node, s: Array, ds: Array | None = None) -> Array:
        """Evaluate a score rule, or a derivative of one."""
        return evaluate([node], self.at(s=s, ds=ds))[0]

    def dropout(self) -> Array | None:
        """Return D = keep / (1 − p), or None without dropout."""
        p = self.p
        if not p.dropout:
            return None
        at = self.at()
        D: Array = dropout_mask(p.dropout, p.seed, at.b, at.h, at.i, at.j) * p.compute.type(1 / (1 - p.dropout))
        return D


def masked(S: Array) -> Array:
    """Return the mask of hidden scores."""
    return np.asarray(S == -np.inf)


def product(weight: Array, x: Array, hidden: Array | None) -> Array:
    """Return weight @ x for weight (..., n, m) and x (..., m, d), free of 0 · NaN.

    hidden: the mask of pairs with weight 0, which get no influence; None if x is finite.
    """
    total: Array
    if hidden is None:
        total = np.matmul(weight, x)
        return total
    not_finite = ~np.isfinite(x)
    total = np.matmul(weight, np.where(not_finite, x.dtype.type(0), x))
    for m in np.flatnonzero(not_finite.any(axis=(*range(x.ndim - 2), x.ndim - 1))):
        row = x[..., m, None, :]
        total += np.where(~np.isfinite(row) & ~hidden[..., m, None], weight[..., m, None] * row, 0)
    return total


def working_memory(p: Problem) -> int:
    """Estimate the bytes of the threads' chunks of scores and weights, and of keys and values that are copied for BLAS.

    Keys and values are copied once more if the dtype of sums is wider.
    """
    threads = min(num_threads(), p.all_heads * -(-p.n_q // BLOCK_Q))
    scores = min(CHUNK_SCORES, BLOCK_Q * BLOCK_K * -(-p.n_k // BLOCK_K) * p.heads)
    copies = 2 if p.dtype == p.compute else 3
    return threads * p.compute.itemsize * (2 * scores + copies * (BLOCK_Q + scores // BLOCK_Q) * (p.d + p.d_v))
