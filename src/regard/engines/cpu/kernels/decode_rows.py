"""Rows of Q, K and V in decode: their sizes, their key heads, and how they are read from memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.copies import slot_of
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.prefetch import LINE, Prefetcher
from regard.engines.cpu.language.types import BF16, I8, I16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import AMX_DEPTH, KEYS

READ = 2**12  # bytes of V that are read in order before they are used


class TileSlot(NamedTuple):
    """The memory of a tile of a split, as all its scores are computed before its weights."""

    scores: Pointer  # later the weights
    seen: Pointer
    tops: Pointer
    rescale: Pointer

    def row(self, r: Value) -> Pointer:
        """Return the scores, later the weights, of a row."""
        return self.scores + r * KEYS


class DecodeRows:
    """The rows of a query block, sorted by key head, and those of K and V."""

    def __init__(self, lanes: Lanes):
        self.k, self.spec, self.lanes, self.W = k, spec, lanes, W = lanes.k, lanes.spec, lanes, lanes.W
        # The type of data that is moved but not converted, which every target can move.
        self.raw = I16 if spec.element.size == 2 else spec.element
        # Words of K hold one feature or, of bfloat16, two; rows of Q are padded to whole vectors.
        self.word_type, self.features = (I32, 2) if spec.element is BF16 else (self.raw, 1)
        self.count = (lanes.d + (self.features - 1)) // self.features
        self.padded = (self.count + (W - 1)) & -W
        self.factors = 1 if spec.bf16_dot else self.features  # factors of Q for a word of K
        self.query_width = self.padded * self.factors
        # Features of V in one step: two vectors where products take packed pairs.
        self.step = W * (2 if spec.paired else 1)
        self.width = (lanes.d_v + (self.step - 1)) & -self.step
        self.prefetcher, self.in_order = Prefetcher(k.target), k.target.prefetch.in_order
        # Rows of V that are summed before the next, where one pass over their features is not enough.
        self.some = k.whole(AMX_DEPTH)
        if spec.packed_vectors and not spec.amx:  # few, but enough to pay for loading and storing the sums
            self.some = k.whole(2 if spec.decode_rows <= 2 < spec.element.size else 4)
        elif self.in_order and not spec.amx:
            for fewer in (16, 8, 4):
                self.some = k.where(lanes.d_v * self.some * spec.element.size > READ, fewer, self.some)
        self.k_distance, self.v_distance = (
            k.whole(self.prefetcher.prefetch.distance) // k.maximum(x * spec.element.size, LINE)
            for x in (lanes.d, lanes.d_v)
        )

    def number(self, block: RowBlock) -> Value:
        """Return the number of rows."""
        return block.field("lanes") if self.spec.packed_vectors else self.k.whole(self.spec.decode_rows)

    def heads(self, block: RowBlock) -> Value:
        """Return the number of key heads."""
        return block.field("lanes") // self.spec.decode_rows if self.spec.packed_vectors else self.k.whole(1)

    @contextmanager
    def each_head(self, block: RowBlock) -> Iterator[Value]:
        """Loop over the key heads of the query block."""
        if self.spec.packed_vectors:
            with self.k.loop(self.heads(block)) as head:
                yield head
        else:
            yield self.k.whole(0)

    def of_head(self, head: Value) -> list[Value]:
        """Return the rows of a key head."""
        return [head * self.spec.decode_rows + r for r in range(self.spec.decode_rows)]

    def at_head(self, name: str, head: Value, source: Pointer) -> Pointer:
        """Return the address of a key head in a row of K or V."""
        return source.bytes(head * self.k.integer(f"{name}_head")) if self.spec.packed_vectors else source

    def length(self, block: RowBlock, name: str, features: Value) -> Value:
        """Return the bytes of a row of K or V, over all heads."""
        own = features * self.spec.element.size
        if not self.spec.packed_vectors:
            return own
        return own + (self.heads(block) - 1) * self.k.integer(f"{name}_head")

    def gapless(self, block: RowBlock, name: str, features: Value) -> Value:
        """Test if rows of K or V, with `features` for each head, are contiguous."""
        return self.k.integer(f"{name}_row") == self.length(block, name, features)

    def slot(self, tile: KeyTile) -> TileSlot:
        """Return the memory of a tile."""
        slot, scratch = slot_of(tile), tile.scratch
        scores, seen = (x + slot * (KEYS * self.spec.rows) for x in (scratch.P, scratch.seen))
        tops, rescale = (x + slot * self.lanes.B for x in (scratch.tops, scratch.rescales))
        return TileSlot(scores, seen, tops, rescale)

    @contextmanager
    def keys(self, tile: KeyTile, count: int = 1) -> Iterator[Value]:
        """Loop over vectors of keys, `count` at a time.

        The first and the last may hold absent keys.
        """
        with self.k.loop(tile.stop, start=tile.first & -(self.W * count), step=self.W * count) as p:
            yield p

    def present(self, tile: KeyTile, p: Value) -> Value:
        """Test the vector of keys from p on for those that are in the tile."""
        lanes = self.k.lane_numbers(I64, self.W) + p
        return (lanes >= tile.first) & (lanes < tile.stop)

    def read(self, rows: Pointer, count: Value, apart: Value, size: Value) -> None:
        """Read rows in order by a single instruction.

        Hardware prefetchers follow that.
        """
        k = self.k
        with k.choice(apart == size) as (yes, no):
            with yes:
                # The last of 64 bytes, as rows seldom start on a line. They are summed, so that the processor does not
                # run further ahead than its loads.
                total = k.variable(k.constant(I8, 0))
                with k.loop(count * size, start=k.minimum(size, LINE) - 1, step=LINE) as x:
                    total.value += rows.bytes(x).of(I8)[0]
                k.need(total.value)
            with no, k.loop(count) as n, k.loop(size, step=LINE) as x:
                k.need(rows.bytes(n * apart + x).of(I8)[0])

    def lines(self, tile: KeyTile, name: str, features: Value, key: Value, at: Value, count: int) -> Iterator[Pointer]:
        """Yield `count` lines of the rows of all heads from a key on.

        `at` counts their bytes without gaps.

        Rows are read once for each head, so they should be in cache before the first head. The keys that come next are
        therefore prefetched, whatever the prefetch distance is.
        """
        length, row = self.length(tile.block, name, features), self.k.integer(f"{name}_row")
        at = self.prefetcher.interleaved(at)
        start = tile.block.source(name, tile.start).bytes((key + at // length) * row + at % length)
        return self.prefetcher.lines(start, count, distance=0)
