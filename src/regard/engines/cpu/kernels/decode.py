"""Tiles with a key in every lane, for a few queries: decoding, where reading K and V is what takes the time.

Rows of K are turned in registers, so that scores of W keys grow in one chain over features; O is summed with features
in lanes. Every number meets the operations of `ManyQueries` in the same order, so the bits are the same.

Where the rows of several heads lie beside each other, heads inside of tokens, an item is *joined*: it has the queries
of them all, and some keys are worked on for each head before the next keys, so that memory is read in order.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from regard.engines.cpu.kernels.forward import Forward
from regard.engines.cpu.kernels.lanes import Tile
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.prefetch import LINE, Ahead
from regard.engines.cpu.language.rules import Place
from regard.engines.cpu.language.types import BF16, I8, I16, I32, I64, Type
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.forward import DEPTH, KEYS, Kind

READ = 2**12  # bytes of V that are read in order before they are used
EARLY = KEYS // 16  # rows of V that are asked for while a tile's weights are made


class Keys(NamedTuple):
    """At most `block` keys of a tile, from `first` on, or where the tile begins, to before `stop`; they are summed for
    the rows of one key head.
    """

    tile: Tile
    head: Value
    first: Value
    block: Value
    stop: Value


class FewQueries(Forward):
    def __init__(self, k: Kernel, kind: Kind):
        super().__init__(k, kind)
        # What is moved but not converted has the type that every target can move.
        self.raw = I16 if kind.element.size == 2 else kind.element
        # K in words, one feature each or, of bfloat16, two; rows of Q are padded to whole vectors.
        self.word_type, self.features = (I32, 2) if kind.element is BF16 else (self.raw, 1)
        self.count = (self.d + (self.features - 1)) // self.features
        self.padded = (self.count + (self.W - 1)) & -self.W
        self.factors = 1 if kind.words else self.features  # of Q, for a word
        self.query_width = self.padded * self.factors
        # Features of V, two vectors in one step where rows or numbers are taken by pairs.
        self.step = self.W * (2 if kind.pairs else 1)
        self.width = (self.d_v + (self.step - 1)) & -self.step
        self.ahead, self.in_order = Ahead(k.target), k.target.prefetch.in_order
        # Of V, summed before the next where one pass over their features is not enough.
        self.some = k.whole(DEPTH)
        if kind.joined and not kind.matrices:  # as few as pay for what they are added to
            self.some = k.whole(2 if kind.few <= 2 < kind.element.size else 4)
        elif self.in_order and not kind.matrices:
            for fewer in (16, 8, 4):
                self.some = k.where(self.d_v * self.some * kind.element.size > READ, fewer, self.some)
        self.k_ahead, self.v_ahead = (
            k.whole(self.ahead.prefetch.distance) // k.maximum(x * kind.element.size, LINE) for x in (self.d, self.d_v)
        )

    # An item's rows, those of one key head after the other

    @property
    def rows(self) -> Value:
        return self.word("lanes") if self.kind.joined else self.k.whole(self.kind.few)

    @property
    def heads(self) -> Value:
        return self.word("lanes") // self.kind.few if self.kind.joined else self.k.whole(1)

    @contextmanager
    def _heads(self) -> Iterator[Value]:
        """Over the key heads."""
        if self.kind.joined:
            with self.k.loop(self.heads) as head:
                yield head
        else:
            yield self.k.whole(0)

    def _rows_of(self, head: Value) -> list[Value]:
        return [head * self.kind.few + r for r in range(self.kind.few)]

    def _of_head(self, name: str, head: Value, source: Pointer) -> Pointer:
        """Where a key head begins in a row of K or V."""
        return source.bytes(head * self.k.integer(f"{name}_head")) if self.kind.joined else source

    def _length(self, name: str, features: Value) -> Value:
        """The bytes of a row of K or V, all heads."""
        own = features * self.kind.element.size
        return own + (self.heads - 1) * self.k.integer(f"{name}_head") if self.kind.joined else own

    def _gapless(self, name: str, features: Value) -> Value:
        """Whether rows of K or V, of so many features for a head, follow each other without a gap."""
        return self.k.integer(f"{name}_row") == self._length(name, features)

    def _prepare_queries(self) -> None:
        """The rows of Q, scaled, one behind the other; where products take pairs, their scale is left for later."""
        k, item = self.k, self.item
        head, row, feature = (k.integer(f"q_{axis}") for axis in ("head", "row", "feature"))
        with k.loop(self.query_width * self.rows, step=self.W) as n:
            item.q[n] = self.zero()
        with k.loop(self.rows) as r:
            source = self._row(self.address("q", self.kind.element), r, head, row)
            q = (item.q + self.query_width * r).of(BF16 if self.kind.words else self.real)
            with k.loop(self.d) as x:
                q[x] = (source.bytes(x * feature)[0].to(self.real) * self.query_scale).to(q.type)

    @contextmanager
    def _outputs(self) -> Iterator[tuple[Value, Callable[[Pointer], Value]]]:
        with self.k.loop(self.rows) as r, self.k.loop(self.width, step=self.W) as a:
            yield r * self.width + a, lambda p: p[r].spread(self.W)

    def _turn_output(self) -> None:
        k, W, element = self.k, self.W, self.kind.element
        out, strides = self.address("out", element), (k.integer("out_head"), k.integer("out_row"))
        whole = self.d_v & -W
        with k.loop(self.word("lanes")) as r:
            row, O = self._row(out, r, *strides), self.item.O + r * self.width
            with k.loop(whole, step=W) as a:
                row[a] = O.load(a, W).to(element)
            with k.loop(self.d_v, start=whole) as a:
                row[a] = O[a].to(element)

    def _work(self, first: Value) -> Value:
        """All of the span's keys, then all of its values: each is read from memory in one go."""
        self._tiles(first, self._score)
        if not self.in_order:
            return self._tiles(first, self._weigh_and_add)
        # Weights between values would be pauses, after which the processor follows them anew.
        begin = self._tile(self.k.pointer("tiles", I64)[first]).start

        def weigh(tile: Tile) -> None:
            self._bring_values(begin + (self.place - first) * EARLY)
            self._weigh(tile)

        self._tiles(first, weigh)
        return self._tiles(first, self._add)

    def _weigh_and_add(self, tile: Tile) -> None:
        self._weigh(tile)
        self._add(tile)

    def _bring_values(self, key: Value) -> None:
        """Ask for some rows of V, from a key on, while weights are made: memory would be idle."""
        k, rows = self.k, self.k.integer("v_row") * EARLY
        with k.when(self._gapless("v", self.d_v)), k.loop(rows, step=LINE) as x:
            self._source("v", key).bytes(x).prefetch(self.ahead.prefetch.level)

    def _score(self, tile: Tile) -> None:
        self._at(tile)
        self._scores(tile)
        self._rules(tile)
        self._tops(tile)
        for c in self.vectors():
            self.tops[c] = self.load(self.tile.top, c)

    def _weigh(self, tile: Tile) -> None:
        k = self.k
        self._at(tile)
        for c in self.vectors():
            self.tile.top[c] = self.load(self.tops, c)
        with k.when(self.careful.value != 0), k.loop(self.rows) as r, self._keys(tile) as p:
            hidden = self.load(self.P(r), p) == -math.inf
            self.seen[r * KEYS + p] = k.where(hidden, self.zero(), k.constant(self.real, 1.0))
        self._move_maximum(tile)
        for c in self.vectors():
            self.rescale[c] = self.load(self.tile.rescale, c)
        self._weights(tile)
        self._add_sums()

    def _subtract(self, tile: Tile) -> None:
        with self.k.loop(self.rows) as r:
            before = self.tile.before[r].spread(self.W)
            with self._keys(tile) as p:
                self.P(r)[p] = self.load(self.P(r), p) - before

    def _add(self, tile: Tile) -> None:
        self._at(tile)
        with self.k.choice(self.careful.value != 0) as (yes, no):
            with yes:
                self._add_values(tile, careful=True)
            with no:
                self._add_values(tile, careful=False)

    def _at(self, tile: Tile) -> None:
        """What is kept of a tile lies where that of this one does."""
        slot = self._slot(tile)
        self.scores, self.seen = (x + slot * (KEYS * self.kind.rows) for x in (self.tile.P, self.tile.seen))
        self.tops, self.rescale = (x + slot * self.B for x in (self.tile.tops, self.tile.rescales))

    def P(self, r: Value) -> Pointer:
        """Scores, then weights, of a row."""
        row: Pointer = self.scores + r * KEYS
        return row

    @contextmanager
    def _keys(self, tile: Tile, blocks: int = 1) -> Iterator[Value]:
        """Over vectors of keys, some at once, from the start of a tile; the first and the last may hold keys that are
        not there.
        """
        with self.k.loop(tile.stop, start=tile.first & -(self.W * blocks), step=self.W * blocks) as p:
            yield p

    def _scores(self, tile: Tile) -> None:
        """S = Q Kᵀ; −∞ for keys that are not there."""
        k, kind, W = self.k, self.kind, self.W
        queries = self.item.q.of(I32) if kind.words else self.item.q
        nothing = k.constant(self.real, -math.inf).spread(W)
        ahead, add = self._keys_ahead(tile), self._add_halves if kind.matrices else self._add_words
        width = W if kind.abreast == 1 else 16 // self.word_type.size  # words of a row turned at once
        with self._keys(tile, kind.abreast) as p, self._heads() as head:
            places, rows = [p + n * W for n in range(kind.abreast)], self._rows_of(head)
            blocks = [self._block(tile, head, place, n) for n, place in enumerate(places)]
            sums = [[k.variable(self.zero()) for _ in rows] for _ in blocks]
            with k.loop(self.count, step=W) as x:
                lines = ahead(p, head, x)
                for first in range(0, W, width):
                    for (keys, row), totals in zip(blocks, sums, strict=True):
                        words = self._turned(keys + x + first, row, width)
                        add(totals, words, queries + (self.query_width * rows[0] + (x + first) * self.factors), lines)
            for place, totals in zip(places, sums, strict=True):
                there = self._there(tile, place)
                for r, total in zip(rows, totals, strict=True):
                    self.P(r)[place] = k.where(there, total.value, nothing)

    def _turned(self, keys: Pointer, row: Value, width: int) -> list[Value]:
        """The first words of W rows, a vector for each of them."""
        k, rows = self.k, [keys.bytes(row * n).load(0, width) for n in range(self.W)]
        while len(rows) > width:  # rows that go to other parts of the vectors
            half = len(rows) // 2
            rows = [k.shuffle(x, y, range(2 * x.lanes)) for x, y in zip(rows[:half], rows[half:], strict=True)]
        return k.transpose(rows)

    def _keys_ahead(self, tile: Tile) -> Callable[[Value, Value, Value], Iterator[Pointer]]:
        """What gives, while W words of a head from x on of the keys from p on are read, as many lines to bring near."""
        k, size, several = self.k, self.word_type.size, self.W * self.kind.abreast
        count = max(1, self.W * several * size // LINE)

        def joined(p: Value, head: Value, x: Value) -> Iterator[Pointer]:
            at = (head * self.count + x) * (several * size)
            return self._lines_of_rows("k", self.d, tile, p + several, at, count)

        if self.kind.joined:
            return joined
        source, row, nowhere = self._source("k", tile.start), k.integer("k_row"), self.tile.P.address
        dense = self._gapless("k", self.d)

        def apart(p: Value, head: Value, x: Value) -> Iterator[Pointer]:
            with k.when(~dense), k.loop(several) as n:
                source.bytes((p + self.k_ahead + n) * row + x * size).prefetch()
            start = source.bytes(self.ahead.in_turn(p * row + x * (several * size)))
            return self.ahead.lines(k.at(k.where(dense, start.address, nowhere), I8), count)

        return apart

    def _lines_of_rows(
        self, name: str, features: Value, tile: Tile, key: Value, at: Value, count: int
    ) -> Iterator[Pointer]:
        """So many lines of the rows of all heads from a key on, `at` being counted without what lies between rows.

        Rows are gone through once for each head, so they should be near before the first: those of the keys that come
        next are asked for, however near that is.
        """
        length, row = self._length(name, features), self.k.integer(f"{name}_row")
        at = self.ahead.in_turn(at)
        start = self._source(name, tile.start).bytes((key + at // length) * row + at % length)
        return self.ahead.lines(start, count, distance=0)

    def _bring_next(self, lines: Iterator[Pointer]) -> None:
        """Bring the next line near, here and not before or after."""
        for line in itertools.islice(lines, 1):
            line.prefetch(self.ahead.prefetch.level)
            self.k.stay()

    def _add_words(
        self, sums: Sequence[Variable], words: Sequence[Value], queries: Pointer, ahead: Iterator[Pointer]
    ) -> None:
        """Words of K times queries, one product after the other: as pairs, or feature by feature."""
        for n, word in enumerate(words):
            self._bring_next(ahead)
            for m, part in enumerate(self._parts(word)):
                for r, total in enumerate(sums):
                    q = queries[self.query_width * r + n * self.factors + m].spread(self.W)
                    total.value = self.multiply_add(total.value, q, part)

    def _parts(self, word: Value) -> Sequence[Value]:
        """What is multiplied of words of K: their features, or the words themselves where products take pairs."""
        if self.kind.pairs:
            return [word]
        return self.k.halves(word) if self.features == 2 else [word.bits(self.kind.element).to(self.real)]

    def _add_halves(
        self, sums: Sequence[Variable], words: Sequence[Value], queries: Pointer, ahead: Iterator[Pointer]
    ) -> None:
        """Words of two features each, times queries, as matrices are summed: two chains, then both, then the total."""
        k = self.k
        chains = [[self.zero(), self.zero()] for _ in sums]
        for n, word in enumerate(words):
            self._bring_next(ahead)
            for half, features in enumerate(k.halves(word)):
                for r, chain in enumerate(chains):
                    q = queries[self.query_width * r + 2 * n + half].spread(self.W)
                    chain[half] = k.fma(q, features, chain[half])
        for total, (low, high) in zip(sums, chains, strict=True):
            total.value += low + high

    def _block(self, tile: Tile, head: Value, p: Value, number: int) -> tuple[Pointer, Value]:
        """W rows of a head of K from p on as whole vectors of words, and the bytes from row to row: where they lie, or
        a copy. In the copy of that number, rows and features that are not there are 0.
        """
        k, W, element = self.k, self.W, self.kind.element
        row, feature = k.integer("k_row"), k.integer("k_feature")
        width = self.padded * (self.word_type.size // element.size)
        there = (p >= tile.first) & (p + W <= tile.stop) & (width == self.d) & (feature == element.size)
        copy, source = self.tile.block.of(self.raw), self._source("k", tile.start).of(self.raw)
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
        """So many rows, in order and by a single instruction, for processors that follow that."""
        k = self.k
        with k.choice(apart == size) as (yes, no):
            with yes:
                # The last of 64 bytes, for rows seldom begin where a line does. Summed, so that the processor does not
                # read further ahead than it can wait for.
                total = k.variable(k.constant(I8, 0))
                with k.loop(count * size, start=k.minimum(size, LINE) - 1, step=LINE) as x:
                    total.value += rows.bytes(x).of(I8)[0]
                k.need(total.value)
            with no, k.loop(count) as n, k.loop(size, step=LINE) as x:
                k.need(rows.bytes(n * apart + x).of(I8)[0])

    def _there(self, tile: Tile, p: Value) -> Value:
        lanes = self.k.lane_numbers(I64, self.W) + p
        return (lanes >= tile.first) & (lanes < tile.stop)

    def _total(self, x: Value) -> Value:
        """The lanes of a vector summed, from the first to the last."""
        total = x.lane(0)
        for n in range(1, x.lanes):
            total = total + x.lane(n)
        return total

    def _tops(self, tile: Tile) -> None:
        """The largest score of every row."""
        k = self.k
        with k.loop(self.rows) as r:
            top = k.variable(k.constant(self.real, -math.inf).spread(self.W))
            with self._keys(tile) as p:
                top.value = k.maximum(self.load(self.P(r), p), top.value)
            self.tile.top[r] = self._folded(top.value, k.maximum)

    def _rules(self, tile: Tile) -> None:
        """S ← score(S) + bias, −∞ where the mask hides the pair."""
        k, kind, W = self.k, self.kind, self.W
        if not kind.ruled and not kind.mask:
            return
        nothing = k.constant(self.real, -math.inf).spread(W)
        with k.loop(self.rows) as r:
            if kind.bias:
                self._fetch_row("bias", kind.bias, r, tile)
            for n in range(kind.dense):
                self._fetch_row(f"dense{n}", I8, r, tile)
            row = {"b": self.word("b"), "keys": k.integer("keys"), "i": self.item.i[r], "h": self.item.h[r]}
            prepared = [None if rule is None else rule.prepare(Place(row)) for rule in (self.score, self.mask)]
            with self._keys(tile) as p:
                at = r * KEYS + p
                s = self._natural(self.load(self.scores, at))
                place = Place(
                    row | {"j": k.lane_numbers(I64, W) + (tile.start + k.integer("j") + p), "s": s},
                    lambda n, p=p: self.load(getattr(self.tile, f"dense{n}"), p) != 0.0,  # type: ignore[misc]
                )
                if self.score is not None:
                    s = self.score.at(place, prepared[0])[0].spread(W)
                if kind.bias:
                    s = s + self.load(self.tile.bias, p)
                visible = self._there(tile, p)
                if self.mask is not None:
                    visible = visible & self.mask.at(place, prepared[1])[0].spread(W)
                self.scores[at] = k.where(visible, s, nothing)

    def _fetch_row(self, name: str, type: Type, r: Value, tile: Tile) -> None:
        """The keys of a tile in a row of a dense array."""
        k, into = self.k, getattr(self.tile, name)
        base, (head, row, key) = self._dense_at(name, type, tile.start)
        source = self._row(base, r, head, row)
        with k.loop(tile.stop, start=tile.first) as p:
            into[p] = source.bytes(p * key)[0].to(self.real)

    def _weights(self, tile: Tile) -> None:
        """P = exp(S − m) and its sums: those of keys that are W apart lie in lanes."""
        k, kind, W = self.k, self.kind, self.W
        with k.loop(self.rows) as r:
            shift = self.tile.shift[r].spread(W)
            sums = [k.variable(self.zero()) for _ in range(2 if kind.entropy else 1)]
            with self._keys(tile) as p:
                weight, difference = self._weight(self.load(self.P(r), p), shift)
                sums[0].value += weight
                if kind.entropy:
                    sums[1].value += self._entropy_term(weight, difference)
                if kind.dropout:
                    j = k.lane_numbers(I64, W) + (tile.start + k.integer("j") + p)
                    weight = self._drop(weight, (self.item.first[r], self.item.second[r]), j)
                if kind.words:
                    self.P(r).of(BF16)[p] = k.rounded(weight)
                else:
                    self.P(r)[p] = k.rounded(weight).to(self.real) if kind.matrices else weight
            for name, total in zip(("l", "e"), sums, strict=False):
                getattr(self.tile, name)[r] = self._total(total.value)

    def _add_values(self, tile: Tile, careful: bool) -> None:
        """O ← rescale · O + P V; with care, what is hidden counts as 0 whatever it is."""
        k, kind, W, step = self.k, self.kind, self.W, self.step
        sums = k.target.registers // (4 if kind.matrices else 2)  # vectors of O that grow at once
        most = 1 if careful else max(1, sums * W // (kind.few * step))
        widths = [x * step for x in (8, 4, 2, 1) if x <= most]
        # Where rows that follow each other take several passes, some take all of them before the next ones.
        block = self.some
        if not kind.joined:
            block = k.where(self._gapless("v", self.d_v), block, KEYS)
            for x in widths:
                block = k.where(self.d_v == x, k.whole(KEYS), block)
        with k.loop(self.width * self.rows, step=W) as a:
            self.tile.total[a] = self.zero()
        with k.loop(tile.stop, start=tile.first & -self.some, step=block) as first, self._heads() as head:
            keys = Keys(tile, head, first, block, k.minimum(first + block, tile.stop))
            if self.in_order:
                with k.when((block < KEYS) & (head == 0)):
                    begin, row = k.maximum(first, tile.first), k.integer("v_row")
                    rows = self._source("v", tile.start).bytes(begin * row)
                    self._read(rows, keys.stop - begin, row, self._length("v", self.d_v))
            start, whole = k.whole(0), self.d_v & -step
            for width in widths:
                stop = whole - (whole - start) % width
                with k.loop(stop, start=start, step=width) as a:
                    self._add_features(keys, a, width // step, None, careful)
                start = stop
            with k.when(whole < self.d_v):
                self._add_features(keys, whole, 1, self.d_v - whole, careful)
        with k.loop(self.rows) as r:
            rescale = self.rescale[r].spread(W)
            with k.loop(self.width, step=step) as a:
                places = [self.width * r + a + n for n in range(0, step, W)]
                totals = self._in_order([self.load(self.tile.total, place) for place in places])
                for place, total in zip(places, totals, strict=True):
                    self.span.O[place] = k.fma(self.load(self.span.O, place), rescale, total)

    def _add_features(self, keys: Keys, a: Value, steps: int, count: Value | None, careful: bool) -> None:
        """Some features of O from the a-th on, whole vectors or the first `count` of one step."""
        k, W, tile = self.k, self.W, keys.tile
        at = [[self.width * r + a + n for n in range(0, steps * self.step, W)] for r in self._rows_of(keys.head)]
        sums = [[k.variable(self.load(self.tile.total, place)) for place in row] for row in at]
        rows = self._of_head("v", keys.head, self._source("v", tile.start)), k.integer("v_row")
        values = functools.partial(self._add_keys, keys, *rows, a, steps, count, careful)
        approach = self._values_ahead(keys, a, 0 if careful else steps * self.step)
        if self.kind.matrices:
            # As matrices are summed: even keys, odd ones, then both, and then the total.
            chains = [[[k.variable(self.zero()) for _ in row] for row in sums] for _ in range(2)]
            with k.loop(keys.stop, start=keys.first, step=DEPTH) as block:
                for variable in (x for chain in chains for row in chain for x in row):
                    variable.value = self.zero()
                start, stop = k.maximum(tile.first & -2, block), k.minimum(keys.stop, block + DEPTH)
                with k.loop(stop, start=start, step=2) as p:
                    for n, chain in enumerate(chains):
                        values(chain, p + n)
                    approach(p, 2)
                for total, low, high in zip(sums, *chains, strict=True):
                    for x, y, z in zip(total, low, high, strict=True):
                        x.value += y.value + z.value
        else:
            several = 2 if self.kind.pairs else 1
            with k.loop(keys.stop, start=k.maximum(keys.first, tile.first & -several), step=several) as p:
                values(sums, p)
                approach(p, several)
        for places, row in zip(at, sums, strict=True):
            for place, total in zip(places, row, strict=True):
                self.tile.total[place] = total.value

    def _add_keys(
        self,
        keys: Keys,
        source: Pointer,
        width: Value,
        a: Value,
        steps: int,
        count: Value | None,
        careful: bool,
        sums: Sequence[Sequence[Variable]],
        p: Value,
    ) -> None:
        """What a key, or two where they are taken by pairs, gives to some features."""
        k, kind, W, tile = self.k, self.kind, self.W, keys.tile
        several = range(2 if kind.words else 1)

        def row(p: Value) -> Pointer:
            # What is not there weighs nothing, and may be any number.
            inside = k.minimum(k.maximum(p, tile.first), tile.stop - 1) if kind.pairs else p
            return source.bytes(inside * width)

        values = self._values([row(p + n) for n in several], a, steps, count)
        for r, totals in zip(self._rows_of(keys.head), sums, strict=True):
            weight = (self.P(r).of(I32) if kind.words else self.P(r))[p // len(several)].spread(W)
            visible = [self.seen[r * KEYS + p + n] != 0.0 for n in several] if careful else []
            for n, v in enumerate(values):
                if kind.words:
                    if careful:
                        low, high = (k.where(x, k.constant(I32, 0xFFFF << 16 * h), 0) for h, x in enumerate(visible))
                        v = v & (low | high)
                    totals[n].value = k.dot_pairs(totals[n].value, v, weight)
                else:
                    for there in visible:
                        v = k.where(there, v, self.zero())
                    totals[n].value = k.fma(v, weight, totals[n].value)

    def _values_ahead(self, keys: Keys, a: Value, features: int) -> Callable[[Value, int], None]:
        """What brings near, when some keys from p on are read, as much as so many features of them are from a on."""
        if not features:
            return lambda p, several: None
        k, size, width = self.k, self.kind.element.size, features * self.kind.element.size

        def joined(p: Value, several: int) -> None:
            at = (p - keys.first) * width + (keys.head * self.d_v + a) * size * keys.block
            count, following = -(-several * width // LINE), keys.first + keys.block
            for line in self._lines_of_rows("v", self.d_v, keys.tile, following, at, count):
                line.prefetch(self.ahead.prefetch.level)

        if self.kind.joined:
            return joined
        source, row, dense = self._source("v", keys.tile.start), k.integer("v_row"), self._gapless("v", self.d_v)
        # The passes over some rows are, one after the other, what the rows are.
        begin = keys.first * (row - width) + a * size * keys.block

        def apart(p: Value, several: int) -> None:
            # Where reading in order is enough, a single pass is that.
            with k.when(keys.block < KEYS) if self.in_order else nullcontext(), k.choice(dense) as (yes, no):
                with yes:
                    start = source.bytes(self.ahead.in_turn(p * width + begin))
                    for line in self.ahead.lines(start, -(-several * width // LINE)):
                        line.prefetch(self.ahead.prefetch.level)
                with no, k.loop(several) as n, k.loop(width, step=LINE) as x:
                    source.bytes((p + self.v_ahead + n) * row + a * size + x).prefetch()

        return apart

    def _values(self, rows: Sequence[Pointer], a: Value, steps: int, count: Value | None) -> list[Value]:
        """Vectors of a row of V, every other number for matrices; or of two rows as pairs, interleaved in 16 bytes."""
        k, W, size = self.k, self.W, self.kind.element.size

        def load(row: Pointer, n: int) -> Value:
            at = row.bytes((a + n * self.step) * size).of(self.raw)
            return at.load(0, self.step) if count is None else at.load_first(count, self.step)

        if self.kind.matrices:
            return [half for n in range(steps) for half in k.halves(load(rows[0], n).bits(I32))]
        if not self.kind.words:
            return [load(rows[0], n).bits(self.kind.element).to(self.real) for n in range(steps)]
        made = []
        for n in range(steps):
            low, high = (load(row, n) for row in rows)
            for half in (0, 4):
                lanes = [x for b in range(half, 2 * W, 8) for i in range(b, b + 4) for x in (i, i + 2 * W)]
                made.append(k.shuffle(low, high, lanes).bits(I32))
        return made

    def _in_order(self, totals: list[Value]) -> list[Value]:
        """Sums of features in the order of features."""
        if not self.kind.pairs:
            return totals
        k, W, made, together = self.k, self.W, [], 1 if self.kind.matrices else 4
        for low, high in zip(totals[::2], totals[1::2], strict=True):
            lanes = [x + half for b in range(0, W, together) for half in (0, W) for x in range(b, b + together)]
            made += [k.shuffle(low, high, lanes[:W]), k.shuffle(low, high, lanes[W:])]
        return made
