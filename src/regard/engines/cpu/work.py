"""From a problem to the kernel's memory: its fields, the items (blocks of queries) and the tiles that each may see.

Tiles are found for WAVE blocks of queries at once and forgotten when those are done, so that what is kept does not
grow with n_q · n_k.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from regard.engines.cpu import cache
from regard.engines.cpu.element import BF16, F16, F32, F64, type_of
from regard.engines.cpu.forward_kernel import forward
from regard.engines.cpu.layout import ITEM, KEYS, PART, Kind, scratch_size, tile_word
from regard.engines.cpu.lowering import Arguments
from regard.engines.cpu.target import Target, chosen
from regard.problem import Problem
from regard.rules import EVERYTHING, MIXED, NOTHING, Node, Program, Ranges, Table, classify, reads, tile_pairs
from regard.threads import Scratch, num_threads, spread

Array = np.ndarray[Any, np.dtype[Any]]

WAVE = 64  # blocks of queries whose tiles are found together
SMALL = 2**21  # products below which another thread would begin too late
_tables: WeakKeyDictionary[Table, dict[Any, Array]] = WeakKeyDictionary()


def table_array(table: Table, real: Any) -> Array:
    """The array of a table as kernels read it: the call's float type, or int64."""
    kept = _tables.setdefault(table, {})
    dtype = np.dtype(real if table.kind == "float" else np.int64)
    if dtype not in kept:
        kept[dtype] = np.ascontiguousarray(table.array, dtype)
    return kept[dtype]


def nodes_of(p: Problem) -> list[Node]:
    """The rules of a call that may hide a tile."""
    return [node for node in (p.mask_node, p.hiding_node) if node is not None]


def bytes_of(x: Array) -> Array:
    """A boolean array as bytes; a view."""
    return x.view(np.int8)


@dataclass(frozen=True, eq=False)
class Results:
    """Where the kernel writes: out (..., h, n_q, d_v), the others (..., h, n_q)."""

    out: Array
    lse: Array
    entropy: Array | None
    max: Array | None


class Work:
    """One call: its kernel, and its items in waves."""

    def __init__(self, p: Problem, target: Target, results: Results, rows: range | None = None):
        self.p, self.target, self.results = p, target, results
        self.first, self.stop = (0, p.n_q) if rows is None or not rows else (min(rows), max(rows) + 1)
        self.mask = self._arguments("mask", p.mask_node)
        self.score = self._arguments("score", p.score_node)
        real = F64 if p.compute == np.float64 else F32
        element = type_of(p.dtype)
        W = target.lanes(real.size)
        lanes = max(1, min((self.stop - self.first) * p.group, W * target.tile[1]))
        straight = all(x.strides[-1] == x.itemsize or x.shape[-1] <= 1 for x in (p.key, p.value))
        self.kind = Kind(
            element=element,
            real=real,
            columns=-(-lanes // W),
            copied=element in (F16, BF16) or not straight,
            mask=self.mask,
            score=self.score,
            bias=None if p.bias is None else type_of(p.bias.dtype),
            dropout=bool(p.dropout),
            sink=p.sink is not None,
            entropy=results.entropy is not None,
        )
        self.lanes = self.kind.columns * W

    @staticmethod
    def _arguments(prefix: str, node: Any) -> Arguments | None:
        return None if node is None else Arguments(prefix, Program.of([node]))

    @property
    def scratch(self) -> int:
        """Bytes that one thread needs."""
        kind, p = self.kind, self.p
        dense = kind.dense + (kind.bias is not None)
        return scratch_size(self.lanes, p.d, p.d_v, dense, kind.copied) * kind.real.size

    @property
    def kernel(self) -> cache.Compiled:
        return cache.kernel(self.kind.key, "forward", self.target, lambda: forward(self.kind, self.target))

    def run(self) -> None:
        """Fill the results."""
        if not self.p.batch * self.p.heads * (self.stop - self.first):
            return
        kernel, p = self.kernel, self.p
        small = p.batch * p.heads * p.n_q * p.n_k * (p.d + p.d_v + 16) < SMALL
        threads = 1 if small else num_threads()
        scratch = Scratch(self.scratch)
        for tiles, items in self.waves():
            fields = self.fields(tiles)
            width = items.shape[1] * 8
            # Enough parts for every thread to end at about the same time, few enough to cost little.
            parts = 1 if threads == 1 else min(len(items), 16 * threads)
            cuts = np.linspace(0, len(items), parts + 1).astype(int)

            def part(n: int, items: Array = items, fields: Array = fields, cuts: Array = cuts, w: int = width) -> None:
                mine = fields.copy()
                mine[0] = items.ctypes.data + int(cuts[n]) * w
                mine[1] = cuts[n + 1] - cuts[n]
                mine[3] = scratch.address
                kernel(mine.ctypes.data)

            spread(part, range(parts), threads)

    # Fields

    def fields(self, tiles: Array) -> Array:
        p, kind = self.p, self.kind
        j0 = p.origin[2]
        words: dict[str, int | float] = {
            "items": 0, "count": 0, "tiles": tiles.ctypes.data, "scratch": 0, "d": p.d, "d_v": p.d_v, "n_k": p.n_k,
            "shift": j0 % KEYS, "first_tile": j0 // KEYS, "j": j0, "keys": p.keys, "scale": float(p.scale),
            "q_head": p.query.strides[-3], "q_row": p.query.strides[-2], "q_feature": p.query.strides[-1],
            "k_row": p.key.strides[-2], "k_feature": p.key.strides[-1],
            "v_row": p.value.strides[-2], "v_feature": p.value.strides[-1],
            "out_head": self.results.out.strides[-3], "out_row": self.results.out.strides[-2], "row_head": p.n_q,
            "bias_head": 0, "bias_row": 0, "bias_key": 0,
            "sink": 0 if self.sink is None else self.sink.ctypes.data,
            "threshold": int(p.dropout * 2**32), "kept": float(p.compute.type(1 / (1 - p.dropout))), "seed": p.seed,
        }  # fmt: skip
        if self.bias is not None:
            words |= zip(("bias_head", "bias_row", "bias_key"), self.bias.strides[-3:], strict=True)
        for n, x in enumerate(self.dense):
            words |= zip((f"dense{n}_head", f"dense{n}_row", f"dense{n}_key"), x.strides[-3:], strict=True)
        for rule in filter(None, (self.mask, self.score)):
            words |= {f"{rule.prefix}_number{n}": number for n, number in enumerate(rule.program.numbers)}
            for n, table in enumerate(self.tables[rule.prefix]):
                name = f"{rule.prefix}_table{n}"
                words[name] = table.ctypes.data
                words |= {f"{name}_size{axis}": length for axis, length in enumerate(table.shape)}
        made = np.zeros(len(kind.fields), np.uint64)
        for n, name in enumerate(kind.fields):
            word = words[name]
            made[n] = np.float64(word).view(np.uint64) if isinstance(word, float) else int(word) % 2**64
        return made

    @cached_property
    def tables(self) -> dict[str, list[Array]]:
        """The arrays of each rule's tables, kept alive while the kernel runs."""
        return {
            rule.prefix: [table_array(t, self.p.compute) for t in rule.program.tables]
            for rule in (self.mask, self.score)
            if rule
        }

    @cached_property
    def sink(self) -> Array | None:
        p = self.p
        if p.sink is None:
            return None
        return np.ascontiguousarray(np.broadcast_to(p.sink.astype(p.compute), (p.heads,)))

    @cached_property
    def bias(self) -> Array | None:
        """(..., h, n_q, n_k); a view."""
        return None if self.p.bias is None else self.p.dense(self.p.bias)

    @cached_property
    def dense(self) -> list[Array]:
        """The dense masks (..., h, n_q, n_k) as bytes; views."""
        return [self.p.dense(bytes_of(x)) for x in (self.mask.program.dense if self.mask else ())]

    # Items

    @cached_property
    def blocks(self) -> tuple[int, list[tuple[int, int]]]:
        """Heads of a group in one item, and its rows (first, number): whole heads where they fit into the lanes."""
        count = self.stop - self.first
        if count <= self.lanes:
            return min(self.p.group, self.lanes // count), [(self.first, count)]
        return 1, [(r, min(self.lanes, self.stop - r)) for r in range(self.first, self.stop, self.lanes)]

    def waves(self) -> Iterator[tuple[Array, Array]]:
        """Lists of tiles, and the items that point into them."""
        p = self.p
        step, blocks = self.blocks
        group = p.group
        starts = (np.arange(p.kv_heads)[:, None] * group + np.arange(0, group, step)).reshape(-1)
        heads = np.stack([starts, np.minimum(step, group - starts % group)], axis=1)
        rows = np.array(blocks, np.int64).reshape(-1, 2)
        shift = p.origin[2] % KEYS
        tiles = np.arange(-(-(p.n_k + shift) // KEYS) if p.n_k else 0, dtype=np.int64)
        nodes = nodes_of(p)
        if not nodes:
            zero = np.zeros(len(rows), np.int64)
            yield (
                tile_word(tiles, 0, KEYS, 0),
                np.concatenate([self.items(b, heads, rows, zero, zero + len(tiles)) for b in range(p.batch)]),
            )
            return
        edges = np.append(np.maximum(tiles * KEYS - shift, 0), p.n_k) + p.origin[2]
        reading = reads(*nodes)
        apart = heads if "h" in reading else np.array([[0, p.heads]])
        for b in range(p.batch):
            # Later rows first: under a causal mask they see more.
            for stop in range(len(rows), 0, -WAVE):
                band = rows[max(stop - WAVE, 0) : stop][::-1]
                lists, parts, length = [], [], 0
                for first, count in apart:
                    found, begin, number = self.visible(b, int(first), int(count), band, edges)
                    mine = heads[heads[:, 0] == first] if "h" in reading else heads
                    parts.append(self.items(b, mine, band, begin + length, number))
                    lists.append(found)
                    length += len(found)
                yield np.concatenate(lists), np.concatenate(parts)

    def visible(self, b: int, h: int, count: int, rows: Array, edges: Array) -> tuple[Array, Array, Array]:
        """The tiles of some blocks of queries, where each block's begin, and how many there are."""
        p = self.p
        i = rows[:, 0] + int(p.offset[b])
        ranges = Ranges(
            b=(p.origin[0] + b,) * 2,
            h=(p.origin[1] + h, p.origin[1] + h + count - 1),
            i=(i, i + rows[:, 1] - 1),
            keys=p.keys,
            dtype=p.compute.type,
        )
        if len(edges) == 1:
            zero = np.zeros(len(rows), np.int64)
            return zero[:0], zero, zero
        row, tile, kind = tile_pairs(p.mask_node, p.hiding_node, ranges, edges)
        first, stop = np.zeros(len(tile), np.int64), np.full(len(tile), KEYS, np.int64)
        mixed = np.flatnonzero(kind != EVERYTHING)
        if len(mixed):
            first[mixed], stop[mixed], kind[mixed] = self.visible_parts(ranges, row[mixed], tile[mixed], edges)
            live = stop > 0
            row, tile, first, stop, kind = (x[live] for x in (row, tile, first, stop, kind))
        begin = np.searchsorted(row, np.arange(len(rows) + 1))
        return tile_word(tile, first, stop, kind != EVERYTHING), begin[:-1], np.diff(begin)

    def visible_parts(self, ranges: Ranges, row: Array, tile: Array, edges: Array) -> tuple[Array, Array, Array]:
        """Of pairs of blocks and tiles: the first key that may be visible, the one after the last, and the kind."""
        p = self.p
        start = tile[:, None] * KEYS - p.origin[2] % KEYS + p.origin[2] + np.arange(0, KEYS, PART)
        low, high = np.maximum(start, edges[tile, None]), np.minimum(start + PART, edges[tile + 1, None]) - 1
        i = ranges.i[0][row, None], ranges.i[1][row, None]
        kinds = classify(p.mask_node, p.hiding_node, replace(ranges, i=i, j=(low, np.maximum(low, high))))
        outside = low > high
        seen = (kinds != NOTHING) & ~outside
        first, last = seen.argmax(axis=1), KEYS // PART - 1 - seen[:, ::-1].argmax(axis=1)
        number = np.arange(KEYS // PART)
        between = (number >= first[:, None]) & (number <= last[:, None]) & ~outside
        whole = ((kinds == EVERYTHING) | ~between).all(axis=1)
        stop = np.where(seen.any(axis=1), (last + 1) * PART, 0)
        return first * PART, stop, np.where(whole, EVERYTHING, MIXED)

    def items(self, b: int, heads: Array, rows: Array, begin: Array, number: Array) -> Array:
        """Items (heads × rows, words) of one batch element."""
        p, r = self.p, self.results
        made = np.zeros((len(rows), len(heads), len(self.kind.item)), np.int64)
        column = {name: made[..., n] for n, name in enumerate(self.kind.item)}
        index = tuple(int(x) for x in np.unravel_index(b, p.lead)) if p.lead else ()
        h, first = heads[:, 0], rows[:, 0, None]

        def place(name: str, x: Array, of: Array, at: Any) -> None:
            x = x[index]
            column[name][...] = x.ctypes.data + of * x.strides[0] + at * (x.strides[1] if x.ndim > 1 else 0)

        place("q", p.leading(p.query, 3), h, first)
        kv = h // p.group
        place("k", p.leading(p.key, 3), kv, 0)
        place("v", p.leading(p.value, 3), kv, 0)
        place("out", r.out, h, first)
        for name in ("lse", "entropy", "max"):
            x = getattr(r, name)
            if x is not None:
                place(name, x, h, first)
        if self.bias is not None:
            place("bias", self.bias, h, first)
        for n, x in enumerate(self.dense):
            place(f"dense{n}", x, h, first)
        column["b"][...] = p.origin[0] + b
        column["h"][...] = p.origin[1] + h
        column["head"][...] = h
        column["i"][...] = first + int(p.offset[b])
        column["rows"][...] = rows[:, 1, None]
        column["lanes"][...] = rows[:, 1, None] * heads[:, 1]
        column["tiles"][...] = begin[:, None]
        column["count"][...] = number[:, None]
        return made.reshape(-1, len(self.kind.item))


def working_memory(p: Problem) -> int:
    """About how many bytes a call takes beyond inputs and outputs: tiles, items, and lists of tiles."""
    target = chosen()
    lanes = target.lanes(p.compute.itemsize) * target.tile[1]
    blocks = p.heads * -(-p.n_q // lanes)
    dense = (p.bias is not None) + (0 if p.mask is None else len(p.mask.dense))
    scratch = scratch_size(lanes, p.d, p.d_v, dense, p.dtype != p.compute) * p.compute.itemsize
    nodes = nodes_of(p)
    items, lists = p.batch * blocks, 1
    if nodes:
        items = min(blocks, WAVE * p.heads)
        lists = min(-(-p.n_q // lanes), WAVE) * (p.heads if "h" in reads(*nodes) else 1)
    words = 2 * items * (len(ITEM) + dense) + 3 * lists * -(-p.n_k // KEYS)
    return min(num_threads(), p.batch * blocks) * scratch + 8 * words
