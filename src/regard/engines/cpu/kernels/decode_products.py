"""QK and PV products of decode.

S = Q Kᵀ has keys in lanes, O += P V features.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.copies import slot_of
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.splits import Split
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.prefetch import LINE, Prefetcher
from regard.engines.cpu.language.types import BF16, I8, I16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.tiles import AMX_DEPTH, KEYS

READ = 2**12  # bytes of V that are read in order before they are used
SHARED = 2**14  # bytes of V, of all heads, that stay in the first level while heads take turns


class TileSlot(NamedTuple):
    """The memory of a tile; a split computes all scores before its weights."""

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
        self.prefetcher, reads = Prefetcher(k.target), k.target.prefetch.in_order and not spec.amx
        self.in_order = reads and not spec.packed_vectors
        # Rows of V that are summed before the next, where one pass over their features is not enough.
        self.some = k.whole(AMX_DEPTH)
        if reads:
            own = lanes.d_v * spec.element.size, READ
            size, most = (k.integer("v_row"), SHARED) if spec.packed_vectors else own
            for fewer in (16, 8, 4, 2):
                self.some = k.where(size * self.some > most, fewer, self.some)
        elif spec.packed_vectors and not spec.amx:  # few, but enough to pay for loading and storing the sums
            self.some = k.whole(2 if spec.decode_rows <= 2 < spec.element.size else 4)
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
        """Loop over `count` vectors of keys; the first and the last may hold absent keys."""
        with self.k.loop(tile.stop, start=tile.first & -(self.W * count), step=self.W * count) as p:
            yield p

    def present(self, tile: KeyTile, p: Value) -> Value:
        """Test the vector of keys from p on for those that are in the tile."""
        lanes = self.k.lane_numbers(I64, self.W) + p
        return (lanes >= tile.first) & (lanes < tile.stop)

    def read(self, rows: Pointer, count: Value, apart: Value, size: Value) -> None:
        """Read rows in order by one instruction, which hardware prefetchers follow."""
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

        `at` counts their bytes without gaps. Rows are read once for each head, so they should be in cache before the
        first head. The keys that come next are therefore prefetched, whatever the prefetch distance is.
        """
        length, row = self.length(tile.block, name, features), self.k.integer(f"{name}_row")
        at = self.prefetcher.interleaved(at)
        start = tile.block.source(name, tile.start).bytes((key + at // length) * row + at % length)
        return self.prefetcher.lines(start, count, distance=0)


class DecodeQK:
    """S = Q Kᵀ, with −∞ for absent keys."""

    def __init__(self, rows: DecodeRows):
        self.k, self.spec, self.W, self.lanes, self.rows = rows.k, rows.spec, rows.W, rows.lanes, rows

    def __call__(self, tile: KeyTile, slot: TileSlot) -> None:
        k, spec, W, rows, block = self.k, self.spec, self.W, self.rows, tile.block
        queries = block.state.q.of(I32) if spec.bf16_dot else block.state.q
        nothing = k.constant(self.lanes.real, -math.inf).spread(W)
        prefetches, add = self._prefetches(tile), self._add_halves if spec.amx else self._add_features
        width = W if spec.key_vectors == 1 else 16 // rows.word_type.size  # words of a row transposed at once
        with rows.keys(tile, spec.key_vectors) as p, rows.each_head(block) as head:
            places, mine = [p + n * W for n in range(spec.key_vectors)], rows.of_head(head)
            sources = [self._rows(tile, head, place, n) for n, place in enumerate(places)]
            sums = [[k.variable(self.lanes.zero()) for _ in mine] for _ in sources]
            with k.loop(rows.count, step=W) as x:
                lines = prefetches(p, head, x)
                for first in range(0, W, width):
                    for (keys, row), totals in zip(sources, sums, strict=True):
                        packed = self._transposed(keys + x + first, row, width)
                        at = rows.query_width * mine[0] + (x + first) * rows.factors
                        add(totals, packed, queries + at, lines)
            for place, totals in zip(places, sums, strict=True):
                present = rows.present(tile, place)
                for r, total in zip(mine, totals, strict=True):
                    slot.row(r)[place] = k.where(present, total.value, nothing)

    def _transposed(self, keys: Pointer, row: Value, width: int) -> list[Value]:
        """Load the first `width` words of W rows of K, transposed."""
        k, rows = self.k, [keys.bytes(row * n).load(0, width) for n in range(self.W)]
        while len(rows) > width:  # rows that go to other parts of the vectors
            half = len(rows) // 2
            rows = [k.shuffle(x, y, range(2 * x.lanes)) for x, y in zip(rows[:half], rows[half:], strict=True)]
        return k.transpose(rows)

    def _prefetches(self, tile: KeyTile) -> Callable[[Value, Value, Value], Iterator[Pointer]]:
        """Return a function that yields the lines to prefetch.

        The function takes p, a head and x: W words of the head are read from x on, of the keys from p on. It yields the
        lines that these words take.
        """
        k, rows, size, several = self.k, self.rows, self.rows.word_type.size, self.W * self.spec.key_vectors
        count = max(1, self.W * several * size // LINE)

        def packed(p: Value, head: Value, x: Value) -> Iterator[Pointer]:
            at = (head * rows.count + x) * (several * size)
            return rows.lines(tile, "k", self.lanes.d, p + several, at, count)

        if self.spec.packed_vectors:
            return packed
        source, row, nowhere = tile.block.source("k", tile.start), k.integer("k_row"), tile.scratch.P.address
        dense = rows.gapless(tile.block, "k", self.lanes.d)

        def apart(p: Value, head: Value, x: Value) -> Iterator[Pointer]:
            with k.when(~dense), k.loop(several) as n:
                source.bytes((p + rows.k_distance + n) * row + x * size).prefetch()
            start = source.bytes(rows.prefetcher.interleaved(p * row + x * (several * size)))
            return rows.prefetcher.lines(k.at(k.where(dense, start.address, nowhere), I8), count)

        return apart

    def _prefetch_next(self, lines: Iterator[Pointer]) -> None:
        """Prefetch the next line exactly here."""
        for line in itertools.islice(lines, 1):
            line.prefetch(self.rows.prefetcher.prefetch.level)
            self.k.stay()

    def _add_features(
        self, sums: Sequence[Variable], packed: Sequence[Value], queries: Pointer, lines: Iterator[Pointer]
    ) -> None:
        """Add features of K times queries to the sums, one product after the other."""
        for n, word in enumerate(packed):
            self._prefetch_next(lines)
            for m, part in enumerate(self._factors(word)):
                for r, total in enumerate(sums):
                    q = queries[self.rows.query_width * r + n * self.rows.factors + m].spread(self.W)
                    total.value = self.lanes.multiply_add(total.value, q, part)

    def _factors(self, word: Value) -> Sequence[Value]:
        """Return the factors in words of K: packed pairs, or their features in float."""
        if self.spec.paired:
            return [word]
        if self.rows.features == 2:
            return self.k.unpack_bf16(word)
        return [word.bits(self.spec.element).to(self.lanes.real)]

    def _add_halves(
        self, sums: Sequence[Variable], packed: Sequence[Value], queries: Pointer, lines: Iterator[Pointer]
    ) -> None:
        """Add packed features in AMX's order: two chains, their sum, then the total."""
        k, zero = self.k, self.lanes.zero()
        chains = [[zero, zero] for _ in sums]
        for n, word in enumerate(packed):
            self._prefetch_next(lines)
            for half, features in enumerate(k.unpack_bf16(word)):
                for r, chain in enumerate(chains):
                    q = queries[self.rows.query_width * r + 2 * n + half].spread(self.W)
                    chain[half] = k.fma(q, features, chain[half])
        for total, (low, high) in zip(sums, chains, strict=True):
            total.value += low + high

    def _rows(self, tile: KeyTile, head: Value, p: Value, number: int) -> tuple[Pointer, Value]:
        """Return W rows of a head of K as whole vectors of words, and the stride in bytes.

        The rows are K's own memory, or copy `number`, in which absent rows and features are 0.
        """
        k, W, rows, d, element = self.k, self.W, self.rows, self.lanes.d, self.spec.element
        row, feature = k.integer("k_row"), k.integer("k_feature")
        width = rows.padded * (rows.word_type.size // element.size)
        there = (p >= tile.first) & (p + W <= tile.stop) & (width == d) & (feature == element.size)
        copy, source = tile.scratch.key_block.of(rows.raw), tile.block.source("k", tile.start).of(rows.raw)
        copy = copy + width * (W * number)
        if rows.in_order:
            with k.when(there):
                rows.read(source.bytes(p * row), k.whole(W), row, d * element.size)
        source = rows.at_head("k", head, source)
        with k.when(~there):
            with k.loop(width * W, step=W) as n:
                copy[n] = k.constant(rows.raw, 0).spread(W)
            with k.loop(k.minimum(p + W, tile.stop), start=k.maximum(p, tile.first)) as n:
                one, into = source.bytes(n * row), copy + (n - p) * width
                whole = k.where(feature == element.size, d & -W, k.whole(0))
                with k.loop(whole, step=W) as x:
                    into[x] = one.load(x, W)
                with k.loop(d, start=whole) as x:
                    into[x] = one.bytes(x * feature)[0]
        home = k.where(there, source.bytes(p * row).address, copy.address)
        return k.at(home, rows.word_type), k.where(there, row, width * element.size)


class KeyRange(NamedTuple):
    """A range of at most `size` keys of a tile, for one key head.

    The range goes from `first`, or the tile's first key, to before `stop`. Hidden values count as 0 if
    `exclude_hidden`.
    """

    tile: KeyTile
    slot: TileSlot
    head: Value
    first: Value
    size: Value
    stop: Value
    exclude_hidden: bool


class DecodePV:
    """O ← rescale · O + P V."""

    def __init__(self, rows: DecodeRows):
        self.k, self.spec, self.W, self.lanes, self.rows = rows.k, rows.spec, rows.W, rows.lanes, rows

    def __call__(self, split: Split, tile: KeyTile, slot: TileSlot) -> None:
        with self.k.choice(split.exclude_hidden.value != 0) as (yes, no):
            with yes:
                self._product(split, tile, slot, exclude_hidden=True)
            with no:
                self._product(split, tile, slot, exclude_hidden=False)

    def _product(self, split: Split, tile: KeyTile, slot: TileSlot, exclude_hidden: bool) -> None:
        k, spec, W, rows, step, d_v = self.k, self.spec, self.W, self.rows, self.rows.step, self.lanes.d_v
        load, block_rows = self.lanes.load, tile.block
        sums = k.target.registers // (4 if spec.amx else 2)  # vectors of O that grow at once
        most = 1 if exclude_hidden else max(1, sums * W // (spec.decode_rows * step))
        widths = [x * step for x in (8, 4, 2, 1) if x <= most]
        # Where contiguous rows need several passes over features, some rows take all passes before the next rows.
        block = rows.some
        if not spec.packed_vectors:
            block = k.where(rows.gapless(block_rows, "v", d_v), block, KEYS)
            for x in widths:
                block = k.where(d_v == x, k.whole(KEYS), block)
        with k.loop(rows.width * rows.number(block_rows), step=W) as a:
            tile.scratch.total[a] = self.lanes.zero()
        with k.loop(tile.stop, start=tile.first & -rows.some, step=block) as first, rows.each_head(block_rows) as head:
            keys = KeyRange(tile, slot, head, first, block, k.minimum(first + block, tile.stop), exclude_hidden)
            if rows.in_order:
                with k.when(block < KEYS):
                    begin, row = k.maximum(first, tile.first), k.integer("v_row")
                    source = block_rows.source("v", tile.start).bytes(begin * row)
                    rows.read(source, keys.stop - begin, row, d_v * spec.element.size)
            start, whole = k.whole(0), d_v & -step
            for width in widths:
                stop = whole - (whole - start) % width
                with k.loop(stop, start=start, step=width) as a:
                    self._add_features(keys, a, width // step, None)
                start = stop
            with k.when(whole < d_v):
                self._add_features(keys, whole, 1, d_v - whole)
        with k.loop(rows.number(block_rows)) as r:
            rescale = slot.rescale[r].spread(W)
            with k.loop(rows.width, step=step) as a:
                places = [rows.width * r + a + n for n in range(0, step, W)]
                totals = self._in_order([load(tile.scratch.total, place) for place in places])
                for place, total in zip(places, totals, strict=True):
                    split.state.O[place] = k.fma(load(split.state.O, place), rescale, total)

    def _add_features(self, keys: KeyRange, a: Value, steps: int, count: Value | None) -> None:
        """Compute whole vectors of O from a on, or the first `count` features of one step."""
        k, W, tile, rows, into = self.k, self.W, keys.tile, self.rows, keys.tile.scratch.total
        at = [[rows.width * r + a + n for n in range(0, steps * rows.step, W)] for r in rows.of_head(keys.head)]
        sums = [[k.variable(self.lanes.load(into, place)) for place in row] for row in at]
        source = rows.at_head("v", keys.head, tile.block.source("v", tile.start)), k.integer("v_row")
        add = functools.partial(self._add_keys, keys, *source, a, steps, count)
        prefetch = self._prefetches(keys, a, 0 if keys.exclude_hidden else steps * rows.step)
        if self.spec.amx:
            # In AMX's order: even keys, odd keys, their sum, and then the total.
            chains = [[[k.variable(self.lanes.zero()) for _ in row] for row in sums] for _ in range(2)]
            with k.loop(keys.stop, start=keys.first, step=AMX_DEPTH) as block:
                for variable in (x for chain in chains for row in chain for x in row):
                    variable.value = self.lanes.zero()
                start, stop = k.maximum(tile.first & -2, block), k.minimum(keys.stop, block + AMX_DEPTH)
                with k.loop(stop, start=start, step=2) as p:
                    for n, chain in enumerate(chains):
                        add(chain, p + n)
                    prefetch(p, 2)
                for total, low, high in zip(sums, *chains, strict=True):
                    for x, y, z in zip(total, low, high, strict=True):
                        x.value += y.value + z.value
        else:
            several = 2 if self.spec.paired else 1
            with k.loop(keys.stop, start=k.maximum(keys.first, tile.first & -several), step=several) as p:
                add(sums, p)
                prefetch(p, several)
        for places, row in zip(at, sums, strict=True):
            for place, total in zip(places, row, strict=True):
                into[place] = total.value

    def _add_keys(
        self,
        keys: KeyRange,
        source: Pointer,
        width: Value,
        a: Value,
        steps: int,
        count: Value | None,
        sums: Sequence[Sequence[Variable]],
        p: Value,
    ) -> None:
        """Add a key's contribution to some features, or that of a packed pair of keys."""
        k, spec, W, tile, slot = self.k, self.spec, self.W, keys.tile, keys.slot
        several = range(2 if spec.bf16_dot else 1)

        def row(p: Value) -> Pointer:
            # Absent keys have the weight 0; any row serves for them.
            inside = k.minimum(k.maximum(p, tile.first), tile.stop - 1) if spec.paired else p
            return source.bytes(inside * width)

        values = self._values([row(p + n) for n in several], a, steps, count)
        for r, totals in zip(self.rows.of_head(keys.head), sums, strict=True):
            weight = (slot.row(r).of(I32) if spec.bf16_dot else slot.row(r))[p // len(several)].spread(W)
            visible = [slot.seen[r * KEYS + p + n] != 0.0 for n in several] if keys.exclude_hidden else []
            for n, v in enumerate(values):
                if spec.bf16_dot:
                    if keys.exclude_hidden:
                        v = k.mask_bf16(v, visible)
                    totals[n].value = k.dot_bf16(totals[n].value, v, weight)
                else:
                    for there in visible:
                        v = k.where(there, v, self.lanes.zero())
                    totals[n].value = k.fma(v, weight, totals[n].value)

    def _prefetches(self, keys: KeyRange, a: Value, features: int) -> Callable[[Value, int], None]:
        """Return a callback that prefetches features [a, a + features) of V, of the keys from p on."""
        if not features:
            return lambda p, several: None
        k, rows, tile = self.k, self.rows, keys.tile
        size, width, d_v = self.spec.element.size, features * self.spec.element.size, self.lanes.d_v
        level = rows.prefetcher.prefetch.level

        def packed(p: Value, several: int) -> None:
            at = (p - keys.first) * width + (keys.head * d_v + a) * size * keys.size
            count, following = -(-several * width // LINE), keys.first + keys.size
            for line in rows.lines(tile, "v", d_v, following, at, count):
                line.prefetch(level)

        if self.spec.packed_vectors:
            return packed
        source, row = tile.block.source("v", tile.start), k.integer("v_row")
        dense = rows.gapless(tile.block, "v", d_v)
        # Passes over contiguous rows read them from the first byte to the last.
        begin = keys.first * (row - width) + a * size * keys.size

        def apart(p: Value, several: int) -> None:
            # Where in-order reads are best, a single pass is one.
            with k.when(keys.size < KEYS) if rows.in_order else nullcontext(), k.choice(dense) as (yes, no):
                with yes:
                    start = source.bytes(rows.prefetcher.interleaved(p * width + begin))
                    for line in rows.prefetcher.lines(start, -(-several * width // LINE)):
                        line.prefetch(level)
                with no, k.loop(several) as n, k.loop(width, step=LINE) as x:
                    source.bytes((p + rows.v_distance + n) * row + a * size + x).prefetch()

        return apart

    def _values(self, rows: Sequence[Pointer], a: Value, steps: int, count: Value | None) -> list[Value]:
        """Load vectors of a row of V.

        For AMX even and odd features are apart; for packed pairs two rows are interleaved within 16 bytes.
        """
        k, W, step, size = self.k, self.W, self.rows.step, self.spec.element.size

        def load(row: Pointer, n: int) -> Value:
            at = row.bytes((a + n * step) * size).of(self.rows.raw)
            return at.load(0, step) if count is None else at.load_first(count, step)

        if self.spec.amx:
            return [half for n in range(steps) for half in k.unpack_bf16(load(rows[0], n).bits(I32))]
        if not self.spec.bf16_dot:
            return [load(rows[0], n).bits(self.spec.element).to(self.lanes.real) for n in range(steps)]
        vectors = []
        for n in range(steps):
            low, high = (load(row, n) for row in rows)
            for half in (0, 4):
                lanes = [x for b in range(half, 2 * W, 8) for i in range(b, b + 4) for x in (i, i + 2 * W)]
                vectors.append(k.shuffle(low, high, lanes).bits(I32))
        return vectors

    def _in_order(self, totals: list[Value]) -> list[Value]:
        """Restore the order of features in sums."""
        if not self.spec.paired:
            return totals
        k, W, ordered, together = self.k, self.W, [], 1 if self.spec.amx else 4
        for low, high in zip(totals[::2], totals[1::2], strict=True):
            lanes = [x + half for b in range(0, W, together) for half in (0, W) for x in range(b, b + together)]
            ordered += [k.shuffle(low, high, lanes[:W]), k.shuffle(low, high, lanes[W:])]
        return ordered
