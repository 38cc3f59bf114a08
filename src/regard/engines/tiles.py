"""The tiles of a call: how queries and keys are cut, which pairs a tile sees, and the scores in it.

Rows are cut at multiples of ROWS counted from the absolute position i = 0, keys at multiples of KEYS from j = 0, and
every tile is computed at its full size, padded where the call ends. So a query meets the same products and sums, in
the same order, whatever else the call holds: prefill and decode give the same bits.

A *unit* is one batch element and some of its heads, a *block* is ROWS queries of a unit, a *span* is KEYS keys; a
chunk of T consecutive spans is computed at once. Arrays of a chunk are (kv heads, group, T, ROWS, KEYS).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from regard.problem import Problem
from regard.rules import EVERYTHING, At, Node, Ranges, evaluate, key_tiles, reads
from regard.spec import kept

Array = np.ndarray[Any, np.dtype[Any]]

ROWS, KEYS = 64, 256
CHUNK = 2**17  # scores computed at once: half a megabyte of float32, so that a chunk stays in cache


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


def is_finite(x: Array, size: int, starts: range) -> Array:
    """For each start, whether x (..., n, d) is finite at the next `size` positions."""
    n = x.shape[-2]
    return np.array([bool(np.isfinite(x[..., max(s, 0) : min(s + size, n), :]).all()) for s in starts], bool)


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
    def h(self) -> Array:
        """The absolute query heads, (kv heads, group, 1, 1, 1)."""
        p = self.p
        heads = np.arange(p.heads, dtype=np.int64).reshape(p.kv_heads, p.group)[self.kv, self.group]
        return heads[:, :, None, None, None] + p.origin[1]

    def per_query_head(self, x: Array, tail: int) -> Array:
        """The part of x (..., h, *tail) that belongs to this unit, (kv heads, group, *tail); a view."""
        x = self.p.leading(x, tail + 1)[self.index]
        x = np.broadcast_to(x, (self.p.heads, *x.shape[1:]))
        return x.reshape(self.p.kv_heads, self.p.group, *x.shape[1:])[self.kv, self.group]

    def per_kv_head(self, x: Array) -> Array:
        """The part of key or value that belongs to this unit, (kv heads, 1, n_k, d); a view."""
        return self.p.leading(x, 3)[self.index][self.kv, None]

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
        return is_finite(self.k, KEYS, self.span_starts)

    @cached_property
    def finite_v(self) -> Array:
        return is_finite(self.v, KEYS, self.span_starts)

    @cached_property
    def span_starts(self) -> range:
        """The first key of each span as a column of this call; the first may be negative."""
        j0 = self.p.origin[2]
        return range(-(j0 % KEYS), self.p.n_k, KEYS)

    @cached_property
    def row_starts(self) -> range:
        """The first query of each block as a row of this call; the first may be negative."""
        return range(-(self.offset % ROWS), self.p.n_q, ROWS)


def units(p: Problem) -> Iterator[Unit]:
    """The units of a call, each of as many heads as fit a chunk, one head where the mask differs between heads."""
    apart = any("h" in reads(node) for node in (p.mask_node,) if node is not None)
    spans = -(-p.n_k // KEYS) or 1
    heads = 1 if apart else max(1, CHUNK // (ROWS * KEYS * min(spans, 4)))
    for b in range(p.batch):
        if heads >= p.group:
            step = max(1, heads // p.group)
            for kv in range(0, p.kv_heads, step):
                yield Unit(p, b, slice(kv, min(kv + step, p.kv_heads)), slice(None))
        else:
            for kv in range(p.kv_heads):
                for g in range(0, p.group, heads):
                    yield Unit(p, b, slice(kv, kv + 1), slice(g, min(g + heads, p.group)))


@dataclass(frozen=True, eq=False)
class Rows:
    """A block of queries of a unit, and the chunks of keys that it may see."""

    unit: Unit
    start: int

    @property
    def p(self) -> Problem:
        return self.unit.p

    @cached_property
    def inside(self) -> slice:
        """The rows of the block that the call has."""
        return slice(max(-self.start, 0), min(ROWS, self.p.n_q - self.start))

    @cached_property
    def outside(self) -> slice:
        """The same rows, as rows of the call."""
        return slice(self.start + self.inside.start, self.start + self.inside.stop)

    @cached_property
    def q(self) -> Array:
        """scale · q, (kv heads, group, 1, ROWS, d)."""
        p = self.p
        return (block(self.unit.q, self.start, ROWS, p.compute) * p.compute.type(p.scale))[:, :, None]

    def take(self, x: Array) -> Array:
        """The rows of x (kv heads, group, n_q, d) as (kv heads, group, 1, ROWS, d)."""
        return block(x, self.start, ROWS, self.p.compute)[:, :, None]

    @cached_property
    def i(self) -> Array:
        return (np.arange(ROWS, dtype=np.int64) + (self.start + self.unit.offset))[:, None]

    def live(self) -> tuple[Array, Array]:
        """The spans that hold a visible pair for some row of the block, and what the bounds say of each."""
        p, starts = self.p, self.unit.span_starts
        columns = np.array([*starts, starts.stop], np.int64).clip(0, p.n_k)
        if p.mask_node is None and p.score_node is None:
            return np.arange(len(starts)), np.full(len(starts), EVERYTHING, np.int8)
        heads = self.unit.h
        ranges = Ranges(
            b=(p.origin[0] + self.unit.b,) * 2,
            h=(int(heads.min()), int(heads.max())),
            i=(int(self.i[self.inside.start, 0]), int(self.i[self.inside.stop - 1, 0])),
            keys=p.keys,
            dtype=p.compute.type,
        )
        return key_tiles(p.mask_node, p.score_node, ranges, columns + p.origin[2])

    def chunks(self) -> Iterator["Chunk"]:
        """The live spans in rising order, in runs of equal treatment."""
        tiles, classes = self.live()
        heads = self.unit.h.size
        most = max(1, CHUNK // (ROWS * KEYS * heads))
        starts = self.unit.span_starts
        whole = self.inside == slice(0, ROWS)
        first = 0
        while first < len(tiles):
            last = first + 1
            while (
                last < len(tiles)
                and last - first < most
                and tiles[last] == tiles[last - 1] + 1
                and classes[last] == classes[first]
            ):
                last += 1
            low, high = starts[int(tiles[first])], starts[int(tiles[last - 1])] + KEYS
            full = classes[first] == EVERYTHING and whole and low >= 0 and high <= self.p.n_k
            yield Chunk(self, slice(int(tiles[first]), int(tiles[last - 1]) + 1), low, full, classes[first] == EVERYTHING)
            first = last


@dataclass(frozen=True, eq=False)
class Chunk:
    """T consecutive spans of keys against a block of queries."""

    rows: Rows
    spans: slice
    start: int
    full: bool  # nothing is masked and nothing lies outside the call
    allowed: bool  # the mask allows every pair that lies inside

    @property
    def p(self) -> Problem:
        return self.rows.p

    @property
    def T(self) -> int:
        return self.spans.stop - self.spans.start

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.unit.h.shape[:2], self.T, ROWS, KEYS)

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

    @cached_property
    def inside(self) -> slice:
        """The columns of the chunk that the call has."""
        return slice(max(-self.start, 0), min(self.T * KEYS, self.p.n_k - self.start))

    @cached_property
    def outside(self) -> slice:
        """The same columns, as columns of the call."""
        return slice(self.start + self.inside.start, self.start + self.inside.stop)

    @cached_property
    def columns(self) -> Array:
        """The keys as columns of the call, (T, 1, KEYS)."""
        return np.arange(self.start, self.start + self.T * KEYS, dtype=np.int64).reshape(self.T, 1, KEYS)

    @cached_property
    def j(self) -> Array:
        """The absolute keys, (T, 1, KEYS)."""
        return self.columns + self.p.origin[2]

    def dense(self, x: Array) -> Array:
        """The tile of a dense mask or bias."""
        full = self.rows.unit.per_query_head(self.p.dense(x), 2)[..., self.rows.outside, self.outside]
        if not self.covered:
            padded = np.zeros((*full.shape[:2], ROWS, self.T * KEYS), full.dtype)
            padded[..., self.rows.inside, self.inside] = full
            full = padded
        return full.reshape(*full.shape[:3], self.T, KEYS).swapaxes(2, 3)

    @cached_property
    def covered(self) -> bool:
        """Whether no part of the tile is padding."""
        return self.rows.inside == slice(0, ROWS) and self.inside == slice(0, self.T * KEYS)

    def at(self, tables: Mapping[Any, Array] | None = None, **score: Array) -> At:
        return At(
            b=np.int64(self.p.origin[0] + self.rows.unit.b),
            h=self.rows.unit.h,
            i=self.rows.i,
            j=self.j,
            dtype=self.p.compute.type,
            keys=self.p.keys,
            dense=self.dense,
            tables=tables,
            **score,
        )

    def visible(self) -> Array | None:
        """The pairs that the mask allows, broadcasting to the tile; None for all of them."""
        if self.full:
            return None
        seen: Array | None = None
        if not self.allowed and self.p.mask_node is not None:
            seen = evaluate([self.p.mask_node], self.at())[0]
        if not self.covered:
            rows = np.zeros((ROWS, 1), bool)
            rows[self.rows.inside] = True
            columns = np.zeros(self.T * KEYS, bool)
            columns[self.inside] = True
            real = rows & columns.reshape(self.T, 1, KEYS)
            seen = real if seen is None else seen & real
        return seen

    def raw(self) -> Array:
        """T = scale · Q K."""
        return np.matmul(self.rows.q, self.k.swapaxes(-1, -2))

    def scores(self, raw: Array) -> Array:
        """S: the score rules, the bias, and −∞ for what is masked. May overwrite `raw` where there is no rule."""
        p = self.p
        S = raw
        if p.score_node is not None:
            S = np.array(np.broadcast_to(evaluate([p.score_node], self.at(s=raw))[0], self.shape), p.compute)
        if p.bias is not None:
            S += self.dense(p.bias)
        visible = self.visible()
        if visible is not None:
            np.copyto(S, -np.inf, where=~visible)
        return S

    def evaluate(self, node: Node, **score: Array) -> Array:
        return evaluate([node], self.at(**score))[0]

    def dropout(self) -> Array | None:
        """Which weights are kept; None without dropout."""
        p = self.p
        if not p.dropout:
            return None
        b = np.int64(p.origin[0] + self.rows.unit.b)
        return kept(p.dropout, p.seed, b, self.rows.unit.h, self.rows.i, self.j)


def product(weight: Array, x: Array, hidden: Callable[[], Array], clean: bool) -> Array:
    """weight @ x, where pairs that are `hidden` have weight 0: unless x is `clean`, they must not make 0 · NaN.

    weight (..., n, m), x (..., m, d), hidden() (..., n, m).
    """
    if clean:
        return np.matmul(weight, x)
    wild = ~np.isfinite(x)
    total = np.matmul(weight, np.where(wild, x.dtype.type(0), x))
    dark = hidden()
    for index in np.flatnonzero(wild.any(axis=(*range(x.ndim - 2), x.ndim - 1))):
        row = x[..., index, None, :]
        part = weight[..., index, None] * row
        total += np.where(~np.isfinite(row) & ~dark[..., index, None], part, 0)
    return total
