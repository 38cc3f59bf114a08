"""Decode: a key in every lane, for few queries.

Reading K and V is what takes the time.

Rows of K are transposed in registers, so that the scores of W keys grow in one chain over features. O is summed with
features in lanes. Every number meets the operations of `PrefillKernel` in the same order, so the bits are the same.

For token-major K and V, one query block covers all heads of a token (`packed`). Some keys are used by each head before
the next keys, so that memory is read in order.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from regard.engines.cpu.kernels.forward import ForwardKernel
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.prefetch import LINE, Prefetcher
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import BF16, I8, I16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import AMX_DEPTH, KEYS

READ = 2**12  # bytes of V that are read in order before they are used
PREFETCHED_ROWS = KEYS // 16  # rows of V that are prefetched during a tile's softmax


class KeyRange(NamedTuple):
    """A range of at most `size` keys of a tile, for one key head.

    It goes from `first`, or the tile's first key, to before `stop`.
    """

    tile: KeyTile
    head: Value
    first: Value
    size: Value
    stop: Value


class DecodeKernel(ForwardKernel):
    """The forward kernel for few queries."""

    def __init__(self, k: Kernel, spec: KernelSpec):
        super().__init__(k, spec)
        # The type of data that is moved but not converted, which every target can move.
        self.raw = I16 if spec.element.size == 2 else spec.element
        # Words of K hold one feature or, of bfloat16, two; rows of Q are padded to whole vectors.
        self.word_type, self.features = (I32, 2) if spec.element is BF16 else (self.raw, 1)
        self.count = (self.d + (self.features - 1)) // self.features
        self.padded = (self.count + (self.W - 1)) & -self.W
        self.factors = 1 if spec.bf16_dot else self.features  # factors of Q for a word of K
        self.query_width = self.padded * self.factors
        # Features of V in one step: two vectors where products take packed pairs.
        self.step = self.W * (2 if spec.paired else 1)
        self.width = (self.d_v + (self.step - 1)) & -self.step
        self.prefetcher, self.in_order = Prefetcher(k.target), k.target.prefetch.in_order
        # Rows of V that are summed before the next, where one pass over their features is not enough.
        self.some = k.whole(AMX_DEPTH)
        if spec.packed_vectors and not spec.amx:  # few, but enough to pay for loading and storing the sums
            self.some = k.whole(2 if spec.decode_rows <= 2 < spec.element.size else 4)
        elif self.in_order and not spec.amx:
            for fewer in (16, 8, 4):
                self.some = k.where(self.d_v * self.some * spec.element.size > READ, fewer, self.some)
        self.k_distance, self.v_distance = (
            k.whole(self.prefetcher.prefetch.distance) // k.maximum(x * spec.element.size, LINE)
            for x in (self.d, self.d_v)
        )

    # The rows of a query block, sorted by key head

    @property
    def rows(self) -> Value:
        return self.field("lanes") if self.spec.packed_vectors else self.k.whole(self.spec.decode_rows)

    @property
    def heads(self) -> Value:
        return self.field("lanes") // self.spec.decode_rows if self.spec.packed_vectors else self.k.whole(1)

    @contextmanager
    def _heads(self) -> Iterator[Value]:
        """Loop over the key heads of the query block."""
        if self.spec.packed_vectors:
            with self.k.loop(self.heads) as head:
                yield head
        else:
            yield self.k.whole(0)

    def _rows_of(self, head: Value) -> list[Value]:
        return [head * self.spec.decode_rows + r for r in range(self.spec.decode_rows)]

    def _of_head(self, name: str, head: Value, source: Pointer) -> Pointer:
        """Return the address of a key head in a row of K or V."""
        return source.bytes(head * self.k.integer(f"{name}_head")) if self.spec.packed_vectors else source

    def _length(self, name: str, features: Value) -> Value:
        """Return the bytes of a row of K or V, over all heads."""
        own = features * self.spec.element.size
        return own + (self.heads - 1) * self.k.integer(f"{name}_head") if self.spec.packed_vectors else own

    def _gapless(self, name: str, features: Value) -> Value:
        """Test if rows of K or V, with `features` for each head, are contiguous."""
        return self.k.integer(f"{name}_row") == self._length(name, features)

    def _prepare_queries(self) -> None:
        """Copy the rows of Q with the scale; for packed pairs, with its sign alone."""
        k, block = self.k, self.block
        head, row, feature = self.strides("q")
        with k.loop(self.query_width * self.rows, step=self.W) as n:
            block.q[n] = self.zero()
        with k.loop(self.rows) as r:
            source = self._row(self.address("q"), r, head, row)
            q = (block.q + self.query_width * r).of(BF16 if self.spec.bf16_dot else self.real)
            with k.loop(self.d) as x:
                q[x] = (source.bytes(x * feature)[0].to(self.real) * self.query_scale).to(q.type)

    @contextmanager
    def _outputs(self) -> Iterator[tuple[Value, Callable[[Pointer], Value]]]:
        with self.k.loop(self.rows) as r, self.k.loop(self.width, step=self.W) as a:
            yield r * self.width + a, lambda p: p[r].spread(self.W)

    def _store_output(self) -> None:
        k, W, element = self.k, self.W, self.spec.element
        out, strides = self.address("out"), self.strides("out")
        whole = self.d_v & -W
        with k.loop(self.field("lanes")) as r:
            row, O = self._row(out, r, *strides), self.block.O + r * self.width
            with k.loop(whole, step=W) as a:
                row[a] = O.load(a, W).to(element)
            with k.loop(self.d_v, start=whole) as a:
                row[a] = O[a].to(element)

    def _work(self, first: Value) -> Value:
        """Compute all QK products of the split, then all PV products.

        Each array is read in one stream.
        """
        self._tiles(first, self._qk_tile)
        if not self.in_order:
            return self._tiles(first, self._softmax_and_pv)
        # Softmax between PV products would pause the stream of V, and hardware prefetch would have to restart.
        begin = self._tile(self.k.pointer("tiles", I64)[first]).start

        def softmax_step(tile: KeyTile) -> None:
            self._prefetch_values(begin + (self.place - first) * PREFETCHED_ROWS)
            self._softmax_tile(tile)

        self._tiles(first, softmax_step)
        return self._tiles(first, self._pv_tile)

    def _softmax_and_pv(self, tile: KeyTile) -> None:
        self._softmax_tile(tile)
        self._pv_tile(tile)

    def _prefetch_values(self, key: Value) -> None:
        """Prefetch some rows of V from a key on, while the softmax leaves memory idle."""
        k, rows = self.k, self.k.integer("v_row") * PREFETCHED_ROWS
        with k.when(self._gapless("v", self.d_v)), k.loop(rows, step=LINE) as x:
            self._source("v", key).bytes(x).prefetch(self.prefetcher.prefetch.level)

    def _qk_tile(self, tile: KeyTile) -> None:
        self._select(tile)
        self._qk_product(tile)
        self._rules(tile)
        self._row_maxima(tile)
        for c in self.vectors():
            self.tops[c] = self.load(self.tile.top, c)

    def _softmax_tile(self, tile: KeyTile) -> None:
        k = self.k
        self._select(tile)
        for c in self.vectors():
            self.tile.top[c] = self.load(self.tops, c)
        with k.when(self.exclude_hidden.value != 0), k.loop(self.rows) as r, self._keys(tile) as p:
            hidden = self.load(self.P(r), p) == -math.inf
            self.seen[r * KEYS + p] = k.where(hidden, self.zero(), k.constant(self.real, 1.0))
        self._move_maximum(tile)
        for c in self.vectors():
            self.rescale[c] = self.load(self.tile.rescale, c)
        self._softmax(tile)
        self._add_sums(tile)

    def _subtract(self, tile: KeyTile) -> None:
        with self.k.loop(self.rows) as r:
            before = self.tile.before[r].spread(self.W)
            with self._keys(tile) as p:
                self.P(r)[p] = self.load(self.P(r), p) - before

    def _pv_tile(self, tile: KeyTile) -> None:
        self._select(tile)
        with self.k.choice(self.exclude_hidden.value != 0) as (yes, no):
            with yes:
                self._pv_product(tile, exclude_hidden=True)
            with no:
                self._pv_product(tile, exclude_hidden=False)

    def _select(self, tile: KeyTile) -> None:
        """Select the slots of a tile.

        They store its scores, visibility, maxima and rescaling.
        """
        slot = self._slot(tile)
        self.scores, self.seen = (x + slot * (KEYS * self.spec.rows) for x in (self.tile.P, self.tile.seen))
        self.tops, self.rescale = (x + slot * self.B for x in (self.tile.tops, self.tile.rescales))

    def P(self, r: Value) -> Pointer:
        """Return the scores, later the weights, of a row."""
        row: Pointer = self.scores + r * KEYS
        return row

    @contextmanager
    def _keys(self, tile: KeyTile, count: int = 1) -> Iterator[Value]:
        """Loop over vectors of keys, `count` at a time.

        The first and the last may hold absent keys.
        """
        with self.k.loop(tile.stop, start=tile.first & -(self.W * count), step=self.W * count) as p:
            yield p

    def _qk_product(self, tile: KeyTile) -> None:
        """Compute S = Q Kᵀ, with −∞ for absent keys."""
        k, spec, W = self.k, self.spec, self.W
        queries = self.block.q.of(I32) if spec.bf16_dot else self.block.q
        nothing = k.constant(self.real, -math.inf).spread(W)
        prefetches, add = (
            self._key_prefetches(tile),
            self._add_halves_of_keys if spec.amx else self._add_features_of_keys,
        )
        width = W if spec.key_vectors == 1 else 16 // self.word_type.size  # words of a row transposed at once
        with self._keys(tile, spec.key_vectors) as p, self._heads() as head:
            places, rows = [p + n * W for n in range(spec.key_vectors)], self._rows_of(head)
            rows_of_keys = [self._key_rows(tile, head, place, n) for n, place in enumerate(places)]
            sums = [[k.variable(self.zero()) for _ in rows] for _ in rows_of_keys]
            with k.loop(self.count, step=W) as x:
                lines = prefetches(p, head, x)
                for first in range(0, W, width):
                    for (keys, row), totals in zip(rows_of_keys, sums, strict=True):
                        keys_in_lanes = self._transposed_keys(keys + x + first, row, width)
                        add(
                            totals,
                            keys_in_lanes,
                            queries + (self.query_width * rows[0] + (x + first) * self.factors),
                            lines,
                        )
            for place, totals in zip(places, sums, strict=True):
                there = self._there(tile, place)
                for r, total in zip(rows, totals, strict=True):
                    self.P(r)[place] = k.where(there, total.value, nothing)

    def _transposed_keys(self, keys: Pointer, row: Value, width: int) -> list[Value]:
        """Load the first `width` words of W rows of K, transposed."""
        k, rows = self.k, [keys.bytes(row * n).load(0, width) for n in range(self.W)]
        while len(rows) > width:  # rows that go to other parts of the vectors
            half = len(rows) // 2
            rows = [k.shuffle(x, y, range(2 * x.lanes)) for x, y in zip(rows[:half], rows[half:], strict=True)]
        return k.transpose(rows)

    def _key_prefetches(self, tile: KeyTile) -> Callable[[Value, Value, Value], Iterator[Pointer]]:
        """Return a function that yields the lines to prefetch.

        Its arguments: the keys from p on, of which W words of a head are read from x on. It yields as many lines as
        they take.
        """
        k, size, several = self.k, self.word_type.size, self.W * self.spec.key_vectors
        count = max(1, self.W * several * size // LINE)

        def packed(p: Value, head: Value, x: Value) -> Iterator[Pointer]:
            at = (head * self.count + x) * (several * size)
            return self._lines_of_rows("k", self.d, tile, p + several, at, count)

        if self.spec.packed_vectors:
            return packed
        source, row, nowhere = self._source("k", tile.start), k.integer("k_row"), self.tile.P.address
        dense = self._gapless("k", self.d)

        def apart(p: Value, head: Value, x: Value) -> Iterator[Pointer]:
            with k.when(~dense), k.loop(several) as n:
                source.bytes((p + self.k_distance + n) * row + x * size).prefetch()
            start = source.bytes(self.prefetcher.interleaved(p * row + x * (several * size)))
            return self.prefetcher.lines(k.at(k.where(dense, start.address, nowhere), I8), count)

        return apart

    def _lines_of_rows(
        self, name: str, features: Value, tile: KeyTile, key: Value, at: Value, count: int
    ) -> Iterator[Pointer]:
        """Yield `count` lines of the rows of all heads from a key on.

        `at` counts their bytes without gaps.

        Rows are read once for each head, so they should be in cache before the first head. The keys that come next are
        therefore prefetched, whatever the prefetch distance is.
        """
        length, row = self._length(name, features), self.k.integer(f"{name}_row")
        at = self.prefetcher.interleaved(at)
        start = self._source(name, tile.start).bytes((key + at // length) * row + at % length)
        return self.prefetcher.lines(start, count, distance=0)

    def _prefetch_next(self, lines: Iterator[Pointer]) -> None:
        """Prefetch the next line exactly here."""
        for line in itertools.islice(lines, 1):
            line.prefetch(self.prefetcher.prefetch.level)
            self.k.stay()

    def _add_features_of_keys(
        self, sums: Sequence[Variable], packed: Sequence[Value], queries: Pointer, lines: Iterator[Pointer]
    ) -> None:
        """Add features of K times queries to the sums, one product after the other."""
        for n, word in enumerate(packed):
            self._prefetch_next(lines)
            for m, part in enumerate(self._key_factors(word)):
                for r, total in enumerate(sums):
                    q = queries[self.query_width * r + n * self.factors + m].spread(self.W)
                    total.value = self.multiply_add(total.value, q, part)

    def _key_factors(self, word: Value) -> Sequence[Value]:
        """Return the factors in words of K: packed pairs, or their features in float."""
        if self.spec.paired:
            return [word]
        return self.k.unpack_bf16(word) if self.features == 2 else [word.bits(self.spec.element).to(self.real)]

    def _add_halves_of_keys(
        self, sums: Sequence[Variable], packed: Sequence[Value], queries: Pointer, lines: Iterator[Pointer]
    ) -> None:
        """Add packed features of K times queries in AMX's order.

        That is two chains, their sum, then the total.
        """
        k = self.k
        chains = [[self.zero(), self.zero()] for _ in sums]
        for n, word in enumerate(packed):
            self._prefetch_next(lines)
            for half, features in enumerate(k.unpack_bf16(word)):
                for r, chain in enumerate(chains):
                    q = queries[self.query_width * r + 2 * n + half].spread(self.W)
                    chain[half] = k.fma(q, features, chain[half])
        for total, (low, high) in zip(sums, chains, strict=True):
            total.value += low + high

    def _key_rows(self, tile: KeyTile, head: Value, p: Value, number: int) -> tuple[Pointer, Value]:
        """Return W rows of a head of K as whole vectors of words, and their stride.

        The stride is in bytes.

        They are K's own memory, or copy `number`, in which absent rows and features are 0.
        """
        k, W, element = self.k, self.W, self.spec.element
        row, feature = k.integer("k_row"), k.integer("k_feature")
        width = self.padded * (self.word_type.size // element.size)
        there = (p >= tile.first) & (p + W <= tile.stop) & (width == self.d) & (feature == element.size)
        copy, source = self.tile.key_block.of(self.raw), self._source("k", tile.start).of(self.raw)
        copy = copy + width * (W * number)
        if self.in_order:
            with k.when(there & (head == 0)):
                self._read(source.bytes(p * row), k.whole(W), row, self._length("k", self.d))
        source = self._of_head("k", head, source)
        with k.when(~there):
            with k.loop(width * W, step=W) as n:
                copy[n] = k.constant(self.raw, 0).spread(W)
            with k.loop(k.minimum(p + W, tile.stop), start=k.maximum(p, tile.first)) as n:
                one, into = source.bytes(n * row), copy + (n - p) * width
                whole = k.where(feature == element.size, self.d & -W, k.whole(0))
                with k.loop(whole, step=W) as x:
                    into[x] = one.load(x, W)
                with k.loop(self.d, start=whole) as x:
                    into[x] = one.bytes(x * feature)[0]
        home = k.where(there, source.bytes(p * row).address, copy.address)
        return k.at(home, self.word_type), k.where(there, row, width * element.size)

    def _read(self, rows: Pointer, count: Value, apart: Value, size: Value) -> None:
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

    def _there(self, tile: KeyTile, p: Value) -> Value:
        lanes = self.k.lane_numbers(I64, self.W) + p
        return (lanes >= tile.first) & (lanes < tile.stop)

    def _total(self, x: Value) -> Value:
        """Sum the lanes of a vector, from the first to the last."""
        total = x.lane(0)
        for n in range(1, x.lanes):
            total = total + x.lane(n)
        return total

    def _row_maxima(self, tile: KeyTile) -> None:
        """Compute the maximum score of every row."""
        k = self.k
        with k.loop(self.rows) as r:
            top = k.variable(k.constant(self.real, -math.inf).spread(self.W))
            with self._keys(tile) as p:
                top.value = k.maximum(self.load(self.P(r), p), top.value)
            self.tile.top[r] = self._folded(top.value, k.maximum)

    def _rules(self, tile: KeyTile) -> None:
        """Compute S ← score(S) + bias, with −∞ where the mask hides the pair."""
        k, spec, W = self.k, self.spec, self.W
        if not spec.ruled and not spec.mask:
            return
        nothing = k.constant(self.real, -math.inf).spread(W)
        with k.loop(self.rows) as r:
            if spec.bias:
                self._fetch_row("bias", r, tile)
            for name in spec.masks:
                self._fetch_row(name, r, tile)
            row = {"b": self.field("b"), "keys": k.integer("keys"), "i": self.block.i[r], "h": self.block.h[r]}
            prepared = [None if rule is None else rule.prepare(TileContext(row)) for rule in (self.score, self.mask)]
            with self._keys(tile) as p:
                at = r * KEYS + p
                s = self._natural(self.load(self.scores, at))
                context = TileContext(
                    row | {"j": k.lane_numbers(I64, W) + (tile.start + k.integer("j") + p), "s": s},
                    lambda n, p=p: self.load(self._dense(n), p) != 0.0,  # type: ignore[misc]
                )
                if self.score is not None:
                    s = self.score.at(context, prepared[0])[0].spread(W)
                if spec.bias:
                    s = s + self.load(self.tile.bias, p)
                visible = self._there(tile, p)
                if self.mask is not None:
                    visible = visible & self.mask.at(context, prepared[1])[0].spread(W)
                self.scores[at] = k.where(visible, s, nothing)

    def _fetch_row(self, name: str, r: Value, tile: KeyTile) -> None:
        """Copy the keys of a tile from a row of a dense array."""
        k, into = self.k, self.tile[name]
        base, (head, row, key) = self._dense_at(name, tile.start)
        source = self._row(base, r, head, row)
        with k.loop(tile.stop, start=tile.first) as p:
            into[p] = source.bytes(p * key)[0].to(self.real)

    def _softmax(self, tile: KeyTile) -> None:
        """Compute P = exp(S − m) and its sums; keys that are W apart share a lane."""
        k, spec, W = self.k, self.spec, self.W
        with k.loop(self.rows) as r:
            shift = self.tile.shift[r].spread(W)
            sums = [k.variable(self.zero()) for _ in range(2 if spec.entropy else 1)]
            with self._keys(tile) as p:
                weight, difference = self._weight(self.load(self.P(r), p), shift)
                sums[0].value += weight
                if spec.entropy:
                    sums[1].value += self._entropy_term(weight, difference)
                if spec.dropout:
                    j = k.lane_numbers(I64, W) + (tile.start + k.integer("j") + p)
                    weight = self._drop(weight, (self.block.first[r], self.block.second[r]), j)
                if spec.bf16_dot:
                    self.P(r).of(BF16)[p] = k.round_bf16(weight)
                else:
                    self.P(r)[p] = k.round_bf16(weight).to(self.real) if spec.amx else weight
            for name, total in zip(("l", "e"), sums, strict=False):
                self.tile[name][r] = self._total(total.value)

    def _pv_product(self, tile: KeyTile, exclude_hidden: bool) -> None:
        """Compute O ← rescale · O + P V; with `exclude_hidden`, hidden values count as 0."""
        k, spec, W, step = self.k, self.spec, self.W, self.step
        sums = k.target.registers // (4 if spec.amx else 2)  # vectors of O that grow at once
        most = 1 if exclude_hidden else max(1, sums * W // (spec.decode_rows * step))
        widths = [x * step for x in (8, 4, 2, 1) if x <= most]
        # Where contiguous rows need several passes over features, some rows take all passes before the next rows.
        block = self.some
        if not spec.packed_vectors:
            block = k.where(self._gapless("v", self.d_v), block, KEYS)
            for x in widths:
                block = k.where(self.d_v == x, k.whole(KEYS), block)
        with k.loop(self.width * self.rows, step=W) as a:
            self.tile.total[a] = self.zero()
        with k.loop(tile.stop, start=tile.first & -self.some, step=block) as first, self._heads() as head:
            keys = KeyRange(tile, head, first, block, k.minimum(first + block, tile.stop))
            if self.in_order:
                with k.when((block < KEYS) & (head == 0)):
                    begin, row = k.maximum(first, tile.first), k.integer("v_row")
                    rows = self._source("v", tile.start).bytes(begin * row)
                    self._read(rows, keys.stop - begin, row, self._length("v", self.d_v))
            start, whole = k.whole(0), self.d_v & -step
            for width in widths:
                stop = whole - (whole - start) % width
                with k.loop(stop, start=start, step=width) as a:
                    self._add_features(keys, a, width // step, None, exclude_hidden)
                start = stop
            with k.when(whole < self.d_v):
                self._add_features(keys, whole, 1, self.d_v - whole, exclude_hidden)
        with k.loop(self.rows) as r:
            rescale = self.rescale[r].spread(W)
            with k.loop(self.width, step=step) as a:
                places = [self.width * r + a + n for n in range(0, step, W)]
                totals = self._in_order([self.load(self.tile.total, place) for place in places])
                for place, total in zip(places, totals, strict=True):
                    self.split.O[place] = k.fma(self.load(self.split.O, place), rescale, total)

    def _add_features(self, keys: KeyRange, a: Value, steps: int, count: Value | None, exclude_hidden: bool) -> None:
        """Compute features of O from a on.

        They are whole vectors, or the first `count` of one step.
        """
        k, W, tile = self.k, self.W, keys.tile
        at = [[self.width * r + a + n for n in range(0, steps * self.step, W)] for r in self._rows_of(keys.head)]
        sums = [[k.variable(self.load(self.tile.total, place)) for place in row] for row in at]
        rows = self._of_head("v", keys.head, self._source("v", tile.start)), k.integer("v_row")
        values = functools.partial(self._add_keys, keys, *rows, a, steps, count, exclude_hidden)
        prefetch = self._value_prefetches(keys, a, 0 if exclude_hidden else steps * self.step)
        if self.spec.amx:
            # In AMX's order: even keys, odd keys, their sum, and then the total.
            chains = [[[k.variable(self.zero()) for _ in row] for row in sums] for _ in range(2)]
            with k.loop(keys.stop, start=keys.first, step=AMX_DEPTH) as block:
                for variable in (x for chain in chains for row in chain for x in row):
                    variable.value = self.zero()
                start, stop = k.maximum(tile.first & -2, block), k.minimum(keys.stop, block + AMX_DEPTH)
                with k.loop(stop, start=start, step=2) as p:
                    for n, chain in enumerate(chains):
                        values(chain, p + n)
                    prefetch(p, 2)
                for total, low, high in zip(sums, *chains, strict=True):
                    for x, y, z in zip(total, low, high, strict=True):
                        x.value += y.value + z.value
        else:
            several = 2 if self.spec.paired else 1
            with k.loop(keys.stop, start=k.maximum(keys.first, tile.first & -several), step=several) as p:
                values(sums, p)
                prefetch(p, several)
        for places, row in zip(at, sums, strict=True):
            for place, total in zip(places, row, strict=True):
                self.tile.total[place] = total.value

    def _add_keys(
        self,
        keys: KeyRange,
        source: Pointer,
        width: Value,
        a: Value,
        steps: int,
        count: Value | None,
        exclude_hidden: bool,
        sums: Sequence[Sequence[Variable]],
        p: Value,
    ) -> None:
        """Add a key's contribution to some features, or that of a packed pair of keys."""
        k, spec, W, tile = self.k, self.spec, self.W, keys.tile
        several = range(2 if spec.bf16_dot else 1)

        def row(p: Value) -> Pointer:
            # Absent keys have the weight 0; any row serves for them.
            inside = k.minimum(k.maximum(p, tile.first), tile.stop - 1) if spec.paired else p
            return source.bytes(inside * width)

        values = self._values([row(p + n) for n in several], a, steps, count)
        for r, totals in zip(self._rows_of(keys.head), sums, strict=True):
            weight = (self.P(r).of(I32) if spec.bf16_dot else self.P(r))[p // len(several)].spread(W)
            visible = [self.seen[r * KEYS + p + n] != 0.0 for n in several] if exclude_hidden else []
            for n, v in enumerate(values):
                if spec.bf16_dot:
                    if exclude_hidden:
                        low, high = (k.where(x, k.constant(I32, 0xFFFF << 16 * h), 0) for h, x in enumerate(visible))
                        v = v & (low | high)
                    totals[n].value = k.dot_bf16(totals[n].value, v, weight)
                else:
                    for there in visible:
                        v = k.where(there, v, self.zero())
                    totals[n].value = k.fma(v, weight, totals[n].value)

    def _value_prefetches(self, keys: KeyRange, a: Value, features: int) -> Callable[[Value, int], None]:
        """Return a callback that prefetches features of V from a on.

        It prefetches `features` features of the keys from p on.
        """
        if not features:
            return lambda p, several: None
        k, size, width = self.k, self.spec.element.size, features * self.spec.element.size

        def packed(p: Value, several: int) -> None:
            at = (p - keys.first) * width + (keys.head * self.d_v + a) * size * keys.size
            count, following = -(-several * width // LINE), keys.first + keys.size
            for line in self._lines_of_rows("v", self.d_v, keys.tile, following, at, count):
                line.prefetch(self.prefetcher.prefetch.level)

        if self.spec.packed_vectors:
            return packed
        source, row, dense = self._source("v", keys.tile.start), k.integer("v_row"), self._gapless("v", self.d_v)
        # Passes over contiguous rows read them from the first byte to the last.
        begin = keys.first * (row - width) + a * size * keys.size

        def apart(p: Value, several: int) -> None:
            # Where in-order reads are best, a single pass is one.
            with k.when(keys.size < KEYS) if self.in_order else nullcontext(), k.choice(dense) as (yes, no):
                with yes:
                    start = source.bytes(self.prefetcher.interleaved(p * width + begin))
                    for line in self.prefetcher.lines(start, -(-several * width // LINE)):
                        line.prefetch(self.prefetcher.prefetch.level)
                with no, k.loop(several) as n, k.loop(width, step=LINE) as x:
                    source.bytes((p + self.v_distance + n) * row + a * size + x).prefetch()

        return apart

    def _values(self, rows: Sequence[Pointer], a: Value, steps: int, count: Value | None) -> list[Value]:
        """Load vectors of a row of V.

        For AMX even and odd features are apart; for packed pairs two rows are interleaved within 16 bytes.
        """
        k, W, size = self.k, self.W, self.spec.element.size

        def load(row: Pointer, n: int) -> Value:
            at = row.bytes((a + n * self.step) * size).of(self.raw)
            return at.load(0, self.step) if count is None else at.load_first(count, self.step)

        if self.spec.amx:
            return [half for n in range(steps) for half in k.unpack_bf16(load(rows[0], n).bits(I32))]
        if not self.spec.bf16_dot:
            return [load(rows[0], n).bits(self.spec.element).to(self.real) for n in range(steps)]
        made = []
        for n in range(steps):
            low, high = (load(row, n) for row in rows)
            for half in (0, 4):
                lanes = [x for b in range(half, 2 * W, 8) for i in range(b, b + 4) for x in (i, i + 2 * W)]
                made.append(k.shuffle(low, high, lanes).bits(I32))
        return made

    def _in_order(self, totals: list[Value]) -> list[Value]:
        """Restore the order of features in sums."""
        if not self.spec.paired:
            return totals
        k, W, made, together = self.k, self.W, [], 1 if self.spec.amx else 4
        for low, high in zip(totals[::2], totals[1::2], strict=True):
            lanes = [x + half for b in range(0, W, together) for half in (0, W) for x in range(b, b + together)]
            made += [k.shuffle(low, high, lanes[:W]), k.shuffle(low, high, lanes[W:])]
        return made
