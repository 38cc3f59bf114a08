"""Stages: query blocks, the tiles that each may see, and work groups.

Long calls evaluate their rules for CHUNK_BLOCKS query blocks at a time and keep no result of it, so that memory does
not grow with n_q · n_k.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.schedule.arguments import Arrays, dense_masks
from regard.engines.cpu.schedule.block_mask import BlockMask, dense_bounds, hides, least_visible
from regard.engines.cpu.schedule.forward_spec import heads_in_rows
from regard.engines.cpu.schedule.launches import LaunchStage, in_portions, in_work_groups
from regard.engines.cpu.spec.scratch import scratch_size, split_scratch
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import (
    CARRIED,
    KEYS,
    PART,
    RESUMED,
    TILE_BITS,
    TILE_WORD,
    WIDE_WORK_GROUP,
    WORK_GROUP,
    split_bits,
    tile_word,
)
from regard.engines.cpu.target.instructions import chosen
from regard.rules import EVERYTHING, NOTHING, Program, Ranges, classify, reads, visible_tiles
from regard.rules.expression import Node, make
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]

CHUNK_BLOCKS = 64  # query blocks whose tiles are found together
LONG_WORK_GROUP = 2**32  # products above which work groups are smaller, since a kernel is not interrupted within one
HALVINGS = 4  # halvings of the work groups that start last
BLOCK_MASK = 2**28  # products from which empty blocks of dense masks are looked for
ONE_TILE = 2**27, 2**20  # products from which a single tile of keys is classified: of a call, and of a list of tiles
CACHED_BYTES = 2**20  # of the stages of a schedule that is cached
BLOCK_TILES = 2048  # pairs of block and tile, whose parts are classified together
LIST_TILES = 2**15  # pairs of block and tile that are classified together


def summarized(p: Problem) -> list[tuple[Array, Array]]:
    """Return the dense masks, and a bias with low numbers, whose blocks are classified; also as (..., h, n_q, n_k).

    Empty for calls that would not gain by it. Otherwise stages depend on the contents of arrays, and are not cached.
    """
    if not long(p) or p.origin[2] % PART:
        return []
    masks = () if p.mask_node is None else Program.of([p.mask_node]).dense
    dense = list(zip(masks, dense_masks(p), strict=True))
    if p.bias is not None and hides(view := p.dense(p.bias)):
        dense.append((p.bias, view))
    return [(x, view) for x, view in dense if view.strides[-1] == view.itemsize]


def long(p: Problem) -> bool:
    """Test whether a call takes long enough to look at the contents of arrays."""
    return p.pairs * (p.d + p.d_v) >= BLOCK_MASK


class LaunchStages:
    """The stages of a schedule, computed anew by each iteration.

    columns: only tiles with some of them; by default all.
    """

    def __init__(
        self, spec: KernelSpec, p: Problem, arrays: Arrays, rows: range, threads: int, columns: range | None = None
    ):
        self.spec, self.p, self.arrays, self.rows, self.threads = spec, p, arrays, rows, threads
        shift, columns = p.origin[2] % KEYS, range(p.n_k) if columns is None else columns
        self.tile_range = range((columns.start + shift) // KEYS, -(-(columns.stop + shift) // KEYS) if columns else 0)

    @cached_property
    def grid(self) -> tuple[Array, Array]:
        """Heads (first, count) and rows (first, count) of query blocks.

        Blocks have whole heads where they fit.
        """
        p, count, lanes, first = self.p, len(self.rows), self.spec.lanes, self.rows.start
        whole, step = p.group, min(p.group, lanes // count) if count <= lanes else 1
        if self.spec.packed_vectors:
            # Rows that are read whole are faster, but each thread should have two key splits.
            splits = -(-p.n_k // (KEYS << split_bits(p.d, p.dtype.itemsize)))
            most = p.all_heads * splits // (2 * self.threads) if self.threads > 1 else p.heads
            whole, step = p.heads, max(1, min(lanes // count, most) // p.group) * p.group
        elif self.spec.decode_rows:
            step = min(p.group, self.spec.decode_rows // count)
        starts = (np.arange(0, p.heads, whole)[:, None] + np.arange(0, whole, step)).reshape(-1)
        heads = np.stack([starts, np.minimum(step, whole - starts % whole)], axis=1)
        rows = np.arange(first, self.rows.stop, lanes)
        return heads, np.stack([rows, np.minimum(lanes, self.rows.stop - rows)], axis=1)

    @cached_property
    def least(self) -> float:
        """Return the bias up to which pairs are skipped: −∞, or more where they have weight 0 and that is all."""
        p, spec = self.p, self.spec
        if not spec.skips_zeros or p.mask_node is not None or p.score_node is not None or p.part is not None:
            return -np.inf
        others = [x for name, x in self.arrays.items() if name in ("dout", "given", "d_entropy") and x is not None]
        return least_visible(p) if all(np.isfinite(x).all() for x in others) else -np.inf

    @cached_property
    def masks(self) -> list[tuple[Array, Array]]:
        """Return those of `summarized` that hide, and also as (..., h, n_q, n_k)."""
        bias = self.p.bias
        return [(x, view) for x, view in summarized(self.p) if x is not bias or hides(view, self.least)]

    @cached_property
    def mask(self) -> Node | None:
        """Return the mask that hides whole blocks, a hiding bias included."""
        mask, bias = self.p.mask_node, self.p.bias
        if not any(x is bias for x, _ in self.masks):
            return mask
        visible = make("dense", "bool", (), bias)
        return visible if mask is None else make("bitwise_and", "bool", (mask, visible))

    @cached_property
    def varying(self) -> frozenset[str]:
        """Return the indices, such as "b" and "h", that lists of tiles depend on."""
        views = [view for _, view in self.masks]
        indices = {"h" for x in views if x.strides[-3]} | {"b" for x in views if any(x.strides[:-3])}
        return reads(*self.p.rules.hiding) | indices

    @cached_property
    def alike(self) -> bool:
        """True if all batch elements see the same keys."""
        return "b" not in self.varying and len(set(self.p.offset.tolist())) == 1

    @cached_property
    def lists(self) -> int:
        """The number of lists of tiles, if tiles are classified."""
        heads, rows = self.grid
        return len(rows) * (1 if self.alike else self.p.batch) * (len(heads) if "h" in self.varying else 1)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the stages, if every tile is visible."""
        p, (heads, rows) = self.p, self.grid
        tiles = len(self.tile_range) * (self.lists if self.classified else 1)
        return 8 * (tiles + p.batch * len(heads) * len(rows) * len(self.spec.block_fields))

    @property
    def short(self) -> bool:
        """True if the stages are small enough to cache."""
        return self.nbytes <= CACHED_BYTES

    def __iter__(self) -> Iterator[LaunchStage]:
        for tiles, blocks in self.chunks():
            if self.threads > 1 and len(blocks) < 2 * self.threads and not self.spec.carried:
                yield from self.split(tiles, blocks)
            else:
                yield self.stage(tiles, blocks)

    @cached_property
    def classified(self) -> bool:
        """True if rules hide something, and it is worth a look what; for one tile of a short call it is not."""
        p, tiles = self.p, len(self.tile_range)
        if not tiles or (self.mask is None and p.rules.hiding_node is None):
            return False
        products = p.all_heads * len(self.rows) * p.n_k * (p.d + p.d_v)
        return tiles > 1 or (products >= ONE_TILE[0] and products >= ONE_TILE[1] * self.lists)

    @cached_property
    def state_bytes(self) -> int:
        """The bytes of the merged splits of a query block."""
        size: int = sum(split_scratch(self.spec, self.p.d_v).values()) * self.spec.real.size
        return size

    @property
    def carried(self) -> int:
        """The bytes that go on from part to part: those of every query block."""
        heads, rows = self.grid
        return self.p.batch * len(heads) * len(rows) * self.state_bytes if self.spec.carried else 0

    def field(self, name: str) -> int:
        return self.spec.block_fields.index(name)

    def stage(self, tiles: Array, blocks: Array, split_state: int = 0, most: int = WIDE_WORK_GROUP) -> LaunchStage:
        """Form work groups of query blocks, the longest first.

        Blocks of a group share keys and values, or pages of them.
        """
        all_heads = self.spec.decode_rows and heads_in_rows(self.p.key)
        # Under a window, only as many query blocks as one of them sees keys share any.
        tiles_of = blocks[:, self.field("count")]
        longest = int(tiles_of.max())
        sharing = -(-longest * KEYS // self.spec.lanes)
        products = self.spec.lanes * KEYS * max(1, self.p.d + self.p.d_v)  # heads may have no features
        size = min(most, max(WORK_GROUP, sharing), max(1, LONG_WORK_GROUP // (products * max(1, longest))))
        if self.threads > 1:  # enough work groups that threads end at about the same time
            each = len(blocks) // self.threads
            size = max(1, min(size, each if all_heads else each // 8))
        # Where rows hold several heads, all of them use some rows before the next.
        alike = [self.field(name) for name in (["b"] if all_heads else ["k", "v"])]
        shared = (np.diff(blocks[:, alike], axis=0) == 0).all(axis=1)
        ends = np.append(np.flatnonzero(~shared) + 1, len(blocks))
        bounds = in_work_groups(np.append(0, ends[:-1]), ends, size)
        if len(bounds) > 1:
            cost = np.add.reduceat(blocks[:, self.field("count")], bounds[:, 0])
            bounds = bounds[np.argsort(-cost, kind="stable")]
        if self.threads > 1 and not self.spec.decode_rows:
            # Halve the last work groups repeatedly, so that threads, which may differ in speed, end together.
            for _ in range(HALVINGS):
                last = bounds[-2 * self.threads :]
                middle = last.mean(axis=1, dtype=np.int64)
                halves = np.stack([last[:, 0], middle, middle, last[:, 1]], axis=1).reshape(-1, 2)
                bounds = np.concatenate([bounds[: -2 * self.threads], halves[halves[:, 0] < halves[:, 1]]])
        most = int((bounds[:, 1] - bounds[:, 0]).max())
        scratch = scratch_size(self.spec, most, self.p.d, self.p.d_v) * self.spec.real.size
        return LaunchStage(tiles, blocks, bounds, scratch, split_state, in_portions(bounds, tiles_of, products))

    def split(self, tiles: Array, blocks: Array) -> Iterator[LaunchStage]:
        """Yield stages for few query blocks with many keys.

        Each key split runs by itself; then they are merged.
        """
        p, size = self.p, self.state_bytes
        splits = ((tiles >> TILE_BITS) + p.origin[2] // KEYS) >> split_bits(p.d, p.dtype.itemsize)
        parts, numbers = [], []
        for block in blocks:
            own = splits[block[self.field("tiles")] :][: block[self.field("count")]]
            starts = np.flatnonzero(np.diff(own, prepend=-1))
            part = np.repeat(block[None], len(starts), axis=0)
            part[:, self.field("tiles")] += starts
            part[:, self.field("count")] = np.diff(starts, append=len(own))
            parts.append(part)
            numbers.append(len(starts))
        if max(numbers) < 2:
            yield self.stage(tiles, blocks)
            return
        each, merged = np.concatenate(parts), blocks.copy()
        each[:, self.field("split_state")] = size * np.arange(len(each))
        merged[:, self.field("split_state")] = size * np.append(0, np.cumsum(numbers[:-1]))
        merged[:, self.field("splits")], merged[:, self.field("count")] = numbers, 0
        yield self.stage(tiles, each, size * len(each), most=1)
        yield self.stage(tiles, merged, size * len(each))

    def chunks(self, size: int = CHUNK_BLOCKS) -> Iterator[tuple[Array, Array]]:
        """Yield lists of tiles, and query blocks that index them.

        size: rows of blocks at a time.
        """
        p, (heads, rows) = self.p, self.grid
        tiles = np.arange(self.tile_range.start, self.tile_range.stop, dtype=np.int64)
        everyone = range(p.batch)
        if not self.classified:
            zero = np.zeros(len(rows), np.int64)
            mixed = KEYS if p.rules.hiding else 0
            word = tile_word(tiles, mixed_stop=mixed)
            yield word, self.block_table(everyone, heads, rows, zero, zero + len(tiles))
            return
        edges, reading = p.extents.key_edges(KEYS), self.varying
        height, target = max(1, self.spec.lanes // 2), chosen()
        masks = {
            id(x): BlockMask(
                view, self.rows.start, height, target, self.threads, self.least if x is p.bias else -np.inf
            )
            for x, view in self.masks
        }
        dense = dense_bounds(masks, p.lead, p.origin, p.offset) if masks else None
        apart, alike = heads if "h" in reading else np.array([[0, p.heads]]), self.alike
        # As many batch elements at a time as have few tiles together.
        step = max(1, LIST_TILES // (len(apart) * min(size, len(rows)) * len(tiles)))
        for batch in [everyone] if alike else [everyone[b : b + step] for b in range(0, p.batch, step)]:
            elements = np.array(batch[:1] if alike else batch)[:, None, None]
            # Later rows first: under a causal mask they see more.
            for stop in range(len(rows), 0, -size):
                band = rows[max(stop - size, 0) : stop][::-1]
                shape = len(elements), len(apart), len(band)
                some = elements, apart[:, :1], apart.sum(axis=1)[:, None] - 1, band[:, 0], band.sum(axis=1) - 1
                b, *head, first, last = (np.broadcast_to(x, shape).reshape(-1) for x in some)
                ranges = replace(p.extents.ranges(b, (head[0], head[1]), first, last), dense=dense)
                listed, begin, number = self.visible(ranges, edges)
                yield listed, self.block_table(batch, heads, band, begin.reshape(shape), number.reshape(shape))

    def visible(self, ranges: Ranges, edges: Array) -> tuple[Array, Array, Array]:
        """Return the tiles of some query blocks, which may be of several batch elements and heads.

        With them come where each block's begin, and their number. ranges: b, h and i are arrays (query blocks,).
        """
        count = len(ranges.b[0])
        step = max(1, LIST_TILES // (len(edges) - 1))
        some = [self._visible(ranges.take(slice(n, n + step), ranges.j), edges) for n in range(0, count, step)]
        tiles, number = map(np.concatenate, zip(*some, strict=True))
        return tiles, np.cumsum(number) - number, number

    def _visible(self, ranges: Ranges, edges: Array) -> tuple[Array, Array]:
        """Return the tiles of some query blocks, and their number for each block."""
        p = self.p
        own = edges[self.tile_range.start : self.tile_range.stop + 1]
        row, tile, visibility = visible_tiles(self.mask, p.rules.hiding_node, ranges, own)
        tile = tile + self.tile_range.start
        fields = {name: np.full(len(tile), x) for name, x in TILE_WORD.items()}
        mixed = np.flatnonzero(visibility != EVERYTHING)
        if len(mixed):
            for some in np.split(mixed, range(BLOCK_TILES, len(mixed), BLOCK_TILES)):
                for name, x in self.parts(ranges, row[some], tile[some], edges).items():
                    fields[name][some] = x
            live = fields["stop"] > 0
            row, tile, fields = row[live], tile[live], {name: x[live] for name, x in fields.items()}
        return tile_word(tile, **fields), np.bincount(row, minlength=len(ranges.b[0]))

    def parts(self, ranges: Ranges, row: Array, tile: Array, edges: Array) -> dict[str, Array]:
        """Classify the parts of tiles; return the fields of `tile_word`."""
        p = self.p
        start = tile[:, None] * KEYS - p.origin[2] % KEYS + p.origin[2] + np.arange(0, KEYS, PART)
        low, high = np.maximum(start, edges[tile, None]), np.minimum(start + PART, edges[tile + 1, None]) - 1
        outside = low > high
        ranges = ranges.take(row[:, None], (low, np.maximum(low, high)))
        # Each half of a full block by itself; in other blocks both halves are the block.
        least, greatest = ranges.i
        full = greatest - least + 1 == self.spec.lanes
        middle = least + self.spec.lanes // 2
        halves = (least, np.where(full, middle - 1, greatest)), (np.where(full, middle, least), greatest)
        visibilities = [
            classify(self.mask, p.rules.hiding_node, replace(ranges, i=i)) for i in halves[: 1 + full.any()]
        ]
        seen = [(x != NOTHING) & ~outside for x in visibilities]
        first, stop = _ends(seen[0] | seen[-1])
        number = np.arange(0, KEYS, PART)
        between = (number >= first[:, None]) & (number < stop[:, None]) & ~outside
        mixed_first, mixed_stop = _ends(((visibilities[0] != EVERYTHING) | (visibilities[-1] != EVERYTHING)) & between)
        (first_0, stop_0), (first_1, stop_1) = _ends(seen[0]), _ends(seen[-1])
        both_first, both_stop = np.maximum(first_0, first_1), np.minimum(stop_0, stop_1)
        # Where one half sees nothing, all is the other's; where they are disjoint, all is both's.
        nobody = (stop_0 == 0) | (stop_1 == 0)
        apart = ~nobody & (both_first > both_stop)
        return {
            "first": first,
            "stop": stop,
            "mixed_first": mixed_first,
            "mixed_stop": mixed_stop,
            "both_first": np.where(nobody, stop, np.where(apart, first, both_first)),
            "both_stop": np.where(nobody | apart, stop, both_stop),
            "early": np.where(nobody, stop_0 == 0, first_1 < first_0).astype(np.int64),
            "late": (stop_1 > stop_0).astype(np.int64),
        }

    def block_table(self, batch: range, heads: Array, rows: Array, begin: Array, number: Array) -> Array:
        """Return query blocks (batch × heads × rows, fields) of some batch elements.

        begin, number: where the tiles of each block begin, and how many there are; they broadcast.
        """
        p = self.p
        table = np.zeros((len(batch), len(heads), len(rows), len(self.spec.block_fields)), np.int64)
        column = {name: table[..., n] for n, name in enumerate(self.spec.block_fields)}
        h, first = heads[:, 0, None], rows[:, 0]
        b = np.arange(batch.start, batch.stop)[:, None, None]

        for name, operand in self.spec.operands.items():
            x, keep, shared = self.arrays.get(name), len(operand.axes), operand.shared
            if x is not None and operand.by_block:
                step, width = x.strides[-keep], 0 if shared else x.strides[1 - keep]
                place = (h // p.group if shared else h) * step + first * width
                column[name][...] = _batch_offsets(x, p.lead, keep)[b] + place
        column["b"][...] = p.origin[0] + b
        column["h"][...] = p.origin[1] + h
        column["head"][...] = h
        column["i"][...] = first + p.offset[b]
        column["rows"][...] = rows[:, 1]
        column["lanes"][...] = rows[:, 1] * heads[:, 1, None]
        column["tiles"][...] = begin
        column["count"][...] = number
        if self.spec.carried and p.part is not None:
            every_head, every_row = self.grid
            at = b * len(every_head) + np.searchsorted(every_head[:, 0], h)
            at = at * len(every_row) + (first - self.rows.start) // self.spec.lanes
            column["split_state"][...] = at * self.state_bytes
            assert p.part.query is not None
            column["splits"][...] = RESUMED * (not p.part.query.first) + CARRIED * (not p.part.query.last)
        return table.reshape(-1, len(self.spec.block_fields))


def _batch_offsets(x: Array, lead: tuple[int, ...], keep: int) -> Array:
    """Return the byte offset of each batch element.

    The array broadcasts to the leading shape.
    """
    offsets = np.zeros(1, np.int64)
    leading = x.ndim - keep
    for axis, size in enumerate(lead):
        own = axis - (len(lead) - leading)
        step = x.strides[own] if own >= 0 and x.shape[own] != 1 else 0
        offsets = (offsets[:, None] + step * np.arange(size)).reshape(-1)
    return offsets


def _ends(marked: Array) -> tuple[Array, Array]:
    """Return the first key of the first marked part, and the key after the last; 0 without a marked part."""
    any_one, last = marked.any(axis=1), marked.shape[1] - marked[:, ::-1].argmax(axis=1)
    return np.where(any_one, marked.argmax(axis=1), 0) * PART, np.where(any_one, last, 0) * PART
