"""Forward: O = softmax(score(scale · Q Kᵀ) + bias) V with lanes as queries, Sᵀ = K Qᵀ and Oᵀ += Vᵀ Pᵀ.

An *item* is a block of queries that share a key and a value head, one in each lane; a *tile* is KEYS keys, counted from
the absolute position j = 0; a *span* is TILES tiles. Every span has its own running maximum, sum and output, which are
merged in order, so that a query meets the same numbers in the same order whatever else the call holds. What is vertical
(maximum, sum, mask, rule, dropout) costs one vector operation for each key; K and V are read through broadcasts where
they lie, or from a converted copy of one tile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from regard.engines.cpu import mathematics
from regard.engines.cpu.element import F32, I8, I32, I64, Type
from regard.engines.cpu.emit import Kernel, Pointer, Value, Variable
from regard.engines.cpu.layout import KEYS, TILE_BITS, TILES, Kind
from regard.engines.cpu.lowering import Lowering, Place
from regard.engines.cpu.target import Target

UNROLL = 2


def forward(kind: Kind, target: Target) -> str:
    """The IR of the kernel."""
    k = Kernel("forward", target, kind.fields)
    items = k.pointer("items", I64)
    with k.loop(k.integer("count")) as n:
        Item(k, kind, items + n * len(kind.item)).run()
    return k.text()


class Item:
    """The kernel's work on one block of queries."""

    def __init__(self, k: Kernel, kind: Kind, words: Pointer):
        self.k, self.kind, self.words = k, kind, words
        self.real, self.W, self.C = kind.real, k.target.lanes(kind.real.size), kind.columns
        self.B = self.W * self.C
        self.ROWS = k.target.tile[0]
        self.d, self.d_v = k.integer("d"), k.integer("d_v")
        self.scale2 = mathematics.LOG2_E if kind.ruled else 1.0  # from scores to logarithms of base 2
        self.mask = Lowering(k, kind.mask, kind.real) if kind.mask else None
        self.score = Lowering(k, kind.score, kind.real) if kind.score else None
        self._divide_scratch()

    def word(self, name: str) -> Value:
        return self.words[self.kind.item.index(name)]

    def address(self, name: str, type: Type) -> Pointer:
        return self.k.pointer_at(self.words, self.kind.item.index(name), type)

    def _divide_scratch(self) -> None:
        place = self.k.pointer("scratch", self.real)

        def take(size: object) -> Pointer:
            nonlocal place
            taken, place = place, place + size
            return taken

        B = self.B
        take_lanes = [take(B) for _ in range(12)]
        self.m, self.l, self.e, self.top, self.rescale = take_lanes[:5]
        self.m_all, self.l_all, self.e_all, self.old, self.new = take_lanes[5:10]
        first, second = take_lanes[10:]
        self.first, self.second = first.of(I32), second.of(I32)
        words = B * 8 // self.real.size
        self.i_lane, self.h_lane, self.g_lane, self.r_lane = (take(words).of(I64) for _ in range(4))
        self.qt, self.P, self.seen = take(self.d * B), take(KEYS * B), take(KEYS * B)
        self.O, self.O_all = take(self.d_v * B), take(self.d_v * B)
        self.bias = take(KEYS * B) if self.kind.bias else None
        self.dense = [take(KEYS * B) for _ in range(self.kind.dense)]
        if self.kind.copied:
            self.k_copy, self.v_copy = take(KEYS * self.d), take(KEYS * self.d_v)

    # Lanes

    def vectors(self) -> range:
        """Where the vectors of a row of lanes begin."""
        return range(0, self.B, self.W)

    def load(self, p: Pointer, *offsets: object) -> Value:
        for x in offsets:
            p = p + x
        return p.load(0, self.W)

    def fill(self, p: Pointer, x: float, rows: object = 1) -> None:
        with self.k.loop(self.k.whole(rows) * self.B, step=self.W) as n:
            p[n] = self.k.constant(self.real, x).spread(self.W)

    def each_lane(self, work: Callable[[Value, Value, Value], None]) -> None:
        """Work on every lane, given its number, its head in the item and its row; lanes without one repeat the last."""
        k, last, rows = self.k, self.word("lanes") - 1, self.word("rows")
        with k.loop(self.B) as lane:
            n = k.minimum(lane, last)
            work(lane, n // rows, n % rows)

    def run(self) -> None:
        k = self.k
        self.each_lane(self._start_lane)
        self._turn_queries()
        # A masked NaN or infinity in V makes 0 · NaN; if a NaN shows in the output, all is done again with care.
        self.careful, again = k.variable(k.constant(I64, 0)), k.variable(k.constant(I64, 1))
        with k.loop_while(lambda: again.value != 0):
            for p, x in ((self.m_all, -math.inf), (self.l_all, 0.0), (self.e_all, 0.0)):
                self.fill(p, x)
            self.fill(self.O_all, 0.0, self.d_v)
            self._spans()
            bad = self._finish()
            again.value = (bad & (self.careful.value == 0)).to(I64)
            self.careful.value = k.constant(I64, 1)
        self._write()

    def _start_lane(self, lane: Value, g: Value, r: Value) -> None:
        """What rules and dropout must know of the row."""
        k, kind = self.k, self.kind
        i, h = self.word("i") + r, self.word("h") + g
        self.i_lane[lane], self.h_lane[lane] = i, h
        self.g_lane[lane], self.r_lane[lane] = g, r
        if kind.dropout:
            first, second = mathematics.row_key(k, k.integer("seed"), self.word("b"), h, i)
            self.first[lane], self.second[lane] = first, second

    def _turn_queries(self) -> None:
        """Qᵀ with the scale folded in."""
        k = self.k
        scale = k.real("scale", self.real) * (1.0 if self.kind.ruled else mathematics.LOG2_E)
        strides = [k.integer(f"q_{axis}") for axis in ("head", "row", "feature")]
        self._turn(self.address("q", self.kind.element), strides, self.d, self.qt, scale)

    def _row(self, base: Pointer, lane: Value, head: Value, row: Value) -> Pointer:
        """The row that belongs to a lane, in an array that begins at the item's first row."""
        return base.bytes(self.g_lane[lane] * head + self.r_lane[lane] * row)

    def _turn(self, base: Pointer, strides: list[Value], count: Value, turned: Pointer, scale: Value | float) -> None:
        """turned[x, lane] = scale · base[head, row, x] for the head and the row of each lane and x below `count`."""
        k, W, B = self.k, self.W, self.B
        head, row, step = strides
        whole = k.where(step == base.type.size, count - count % W, k.whole(0))
        with k.loop(B, step=W) as c:
            rows = [self._row(base, c + r, head, row) for r in range(W)]
            with k.loop(whole, step=W) as x:
                vectors = k.transpose([p.load(x, W).to(self.real) * scale for p in rows])
                for n, vector in enumerate(vectors):
                    turned[(x + n) * B + c] = vector
            with k.loop(W) as r:
                p = self._row(base, c + r, head, row)
                with k.loop(count, start=whole) as x:
                    turned[x * B + c + r] = p.bytes(x * step)[0].to(self.real) * scale

    # Spans and tiles

    def _spans(self) -> None:
        """Tiles of one span after the other, each span merged when it is done."""
        k = self.k
        t, end = k.variable(self.word("tiles")), self.word("tiles") + self.word("count")
        tiles, first = k.pointer("tiles", I64), k.integer("first_tile")

        def span() -> Value:
            return ((tiles[t.value] >> TILE_BITS) + first) // TILES

        with k.loop_while(lambda: t.value < end):
            for p, x in ((self.m, -math.inf), (self.l, 0.0), (self.e, 0.0)):
                self.fill(p, x)
            self.fill(self.O, 0.0, self.d_v)
            current = span()
            inside = k.variable(k.constant(I64, 1))
            with k.loop_while(lambda: inside.value != 0):
                self._tile(tiles[t.value])
                t.value = t.value + 1
                inside.value = k.constant(I64, 0)
                with k.when(t.value < end):
                    inside.value = (span() == current).to(I64)
            self._merge()

    def _tile(self, word: Value) -> None:
        k = self.k
        start = (word >> TILE_BITS) * KEYS - k.integer("shift")
        column = k.maximum(start + ((word >> 9) & 255), k.whole(0))
        count = k.minimum(start + ((word >> 1) & 255), k.integer("n_k")) - column
        key, value = self._operands(column, count)
        self._scores(key, count)
        self._rules(column, count, (word & 1) != 0)
        with k.when(self.careful.value != 0):
            self._remember_visible(count)
        self._weights(column, count)
        with k.choice(self.careful.value != 0) as (yes, no):
            with yes:
                self._add_visible(value, count)
            with no:
                self._add(value, count)

    def _operands(self, column: Value, count: Value) -> tuple["Rows", "Rows"]:
        """The rows of K and V of a tile."""
        k, kind, result = self.k, self.kind, []
        for name in ("k", "v"):
            row, feature = k.integer(f"{name}_row"), k.integer(f"{name}_feature")
            here = self.address(name, kind.element).bytes(column * row)
            if kind.copied:
                copy, width = (self.k_copy, self.d) if name == "k" else (self.v_copy, self.d_v)
                self._copy(here, row, feature, copy, width, count)
                here, row = copy, width * self.real.size
            result.append(Rows(here, row))
        return result[0], result[1]

    def _copy(self, source: Pointer, row: Value, feature: Value, copy: Pointer, width: Value, count: Value) -> None:
        k, size = self.k, self.kind.element.size
        with k.loop(count) as j:
            whole = k.where(feature == size, width - width % self.W, k.whole(0))
            with k.loop(whole, step=self.W) as x:
                copy[j * width + x] = source.bytes(j * row + x * size).load(0, self.W).to(self.real)
            with k.loop(width, start=whole) as x:
                copy[j * width + x] = source.bytes(j * row + x * feature)[0].to(self.real)

    def _product(
        self, rows: int, n: Value, factor: Callable[[int, Value], Value], vector: Callable[[Value, int], Value]
    ) -> list[list[Variable]]:
        """sum[r][c] = Σ_x factor(r, x) · vector(x, c), the factors broadcast, one chain of sums each."""
        k = self.k
        zero = k.constant(self.real, 0.0).spread(self.W)
        sums = [[k.variable(zero) for _ in self.vectors()] for _ in range(rows)]

        def step(x: Value) -> None:
            vectors = [vector(x, c) for c in self.vectors()]
            for r in range(rows):
                f = factor(r, x).spread(self.W)
                for c, v in enumerate(vectors):
                    sums[r][c].value = k.fma(f, v, sums[r][c].value)

        unroll = UNROLL if rows > 1 else 1
        whole = n - n % unroll
        with k.loop(whole, step=unroll) as x:
            for u in range(unroll):
                step(x + u)
        if unroll > 1:
            with k.loop(n, start=whole) as x:
                step(x)
        return sums

    def _blocks(self, stop: Value, work: Callable[[int, Value], None]) -> None:
        """Work on ROWS at a time, and on what is left one at a time."""
        k = self.k
        whole = stop - stop % self.ROWS
        with k.loop(whole, step=self.ROWS) as n:
            work(self.ROWS, n)
        with k.loop(stop, start=whole) as n:
            work(1, n)

    def _scores(self, key: "Rows", count: Value) -> None:
        """Sᵀ = K Qᵀ and its maximum."""
        k = self.k
        tops = [k.variable(self.load(self.m, c)) for c in self.vectors()]

        def block(rows: int, j: Value) -> None:
            keys = [key.at(j + r) for r in range(rows)]
            sums = self._product(rows, self.d, lambda r, x: keys[r][x], lambda x, c: self.load(self.qt, x * self.B, c))
            for r in range(rows):
                for c, top, s in zip(self.vectors(), tops, sums[r], strict=True):
                    self.P[(j + r) * self.B + c] = s.value
                    top.value = k.maximum(s.value, top.value)

        self._blocks(count, block)
        for c, top in zip(self.vectors(), tops, strict=True):
            self.top[c] = top.value

    # Rules

    def _rules(self, column: Value, count: Value, masked: Value) -> None:
        """S ← score(S) + bias, −∞ where the mask hides the pair; the maximum is taken again."""
        k = self.k
        if self.mask is None:
            if self.kind.ruled:
                self._rules_in(column, count, False)
            return
        with k.choice(masked) as (yes, no):
            with yes:
                self._rules_in(column, count, True)
            with no:
                if self.kind.ruled:
                    self._rules_in(column, count, False)

    def _rules_in(self, column: Value, count: Value, masked: bool) -> None:
        k = self.k
        if self.bias is not None and self.kind.bias is not None:
            self._fetch("bias", self.kind.bias, self.bias, column, count)
        if masked:
            for n, tile in enumerate(self.dense):
                self._fetch(f"dense{n}", I8, tile, column, count)
        leaves = {"b": self.word("b"), "keys": k.integer("keys")}
        with k.loop(self.B, step=self.W) as c:
            leaves |= {"i": self.i_lane.load(c, self.W), "h": self.h_lane.load(c, self.W)}
            top = k.variable(self.load(self.m, c))
            with k.loop(count) as j:
                at = j * self.B + c
                s = self.load(self.P, at)
                place = Place(
                    leaves | {"j": column + k.integer("j") + j, "s": s},
                    lambda n, at=at: self.load(self.dense[n], at) != 0.0,  # type: ignore[misc]
                )
                if self.score is not None:
                    s = self.score.at(place)[0].spread(self.W)
                if self.bias is not None:
                    s = s + self.load(self.bias, at)
                if masked and self.mask is not None:
                    visible = self.mask.at(place)[0].spread(self.W)
                    s = k.where(visible, s, k.constant(self.real, -math.inf))
                self.P[at] = s
                top.value = k.maximum(s, top.value)
            self.top[c] = top.value

    def _fetch(self, name: str, type: Type, tile: Pointer, column: Value, count: Value) -> None:
        """A tile of a dense array, turned so that lanes are queries."""
        strides = [self.k.integer(f"{name}_{axis}") for axis in ("head", "row", "key")]
        self._turn(self.address(name, type).bytes(column * strides[2]), strides, count, tile, 1.0)

    # Weights and output

    def _remember_visible(self, count: Value) -> None:
        k = self.k
        with k.loop(count * self.B, step=self.W) as n:
            hidden = self.load(self.P, n) == -math.inf
            self.seen[n] = k.where(hidden, k.constant(self.real, 0.0), k.constant(self.real, 1.0)).spread(self.W)

    def _finite(self, m: Value) -> Value:
        """The least number for a maximum of nothing, so that −∞ − m is not NaN."""
        return self.k.maximum(self.k.constant(self.real, -LARGEST[self.real.name]), m)

    def _power(self, x: Value) -> Value:
        """The exponential of a difference of scores, at most 1."""
        return mathematics.weight2(self.k, x * self.scale2 if self.kind.ruled else x)

    def _weights(self, column: Value, count: Value) -> None:
        """P = exp(S − m), l = Σ P, and by how much the span's older sums shrink."""
        k, kind = self.k, self.kind
        zero = k.constant(self.real, 0.0).spread(self.W)
        shifts = [self._finite(self.load(self.top, c)) for c in self.vectors()]
        sums, entropies = ([k.variable(zero) for _ in self.vectors()] for _ in range(2))
        with k.loop(count) as j:
            for n, c in enumerate(self.vectors()):
                at = j * self.B + c
                s = self.load(self.P, at) - shifts[n]
                p = self._power(s)
                sums[n].value = sums[n].value + p
                if kind.entropy:
                    # 0 · (S − m) must be 0 where S is −∞.
                    least = k.constant(self.real, -1000.0 if self.real is F32 else -4000.0)
                    entropies[n].value = entropies[n].value + p * k.maximum(least, s)
                if kind.dropout:
                    keys = self.first.load(c, self.W), self.second.load(c, self.W)
                    bits = mathematics.random_bits(k, keys, column + k.integer("j") + j)
                    dropped = bits.below(k.integer("threshold").to(I32))
                    p = k.where(dropped, zero, p * k.real("kept", self.real))
                self.P[at] = p
        for n, c in enumerate(self.vectors()):
            difference = self.load(self.m, c) - shifts[n]
            rescale = self._power(difference)
            if kind.entropy:
                moved = self._moved(self.load(self.e, c), self.load(self.l, c), rescale, difference)
                self.e[c] = moved + entropies[n].value
            self.l[c] = k.fma(self.load(self.l, c), rescale, sums[n].value)
            self.m[c], self.rescale[c] = self.load(self.top, c), rescale

    def _moved(self, e: Value, l: Value, factor: Value, difference: Value) -> Value:
        """e = Σ exp(S − m) (S − m) for another m, `factor` = exp(difference); 0 where there was nothing."""
        k = self.k
        zero = k.constant(self.real, 0.0)
        inside = k.where(factor == 0.0, zero, difference)
        return k.where(factor == 0.0, zero, factor * k.fma(inside, l, e))

    def _add(self, value: "Rows", count: Value) -> None:
        """Oᵀ ← rescale · Oᵀ + Vᵀ Pᵀ."""

        def block(rows: int, a: Value) -> None:
            start = value.first + a
            sums = self._product(
                rows,
                count,
                lambda r, j: (start + r).bytes(j * value.row)[0],
                lambda j, c: self.load(self.P, j * self.B, c),
            )
            for r in range(rows):
                for c, s in zip(self.vectors(), sums[r], strict=True):
                    at = (a + r) * self.B + c
                    self.O[at] = self.k.fma(self.load(self.O, at), self.load(self.rescale, c), s.value)

        self._blocks(self.d_v, block)

    def _add_visible(self, value: "Rows", count: Value) -> None:
        """As `_add`, in the same order, but what is hidden counts as 0 whatever it is."""
        k = self.k
        zero = k.constant(self.real, 0.0).spread(self.W)
        with k.loop(self.d_v) as a, k.loop(self.B, step=self.W) as c:
            total = k.variable(zero)
            with k.loop(count) as j:
                at = j * self.B + c
                v = k.where(self.load(self.seen, at) != 0.0, (value.first + a).bytes(j * value.row)[0], zero)
                total.value = k.fma(v, self.load(self.P, at), total.value)
            at = a * self.B + c
            self.O[at] = k.fma(self.load(self.O, at), self.load(self.rescale, c), total.value)

    def _merge(self) -> None:
        """The span into the whole."""
        k = self.k
        with k.loop(self.B, step=self.W) as c:
            m_old, m_new = self.load(self.m_all, c), self.load(self.m, c)
            m = k.maximum(m_old, m_new)
            shift = self._finite(m)
            old, new = self._power(m_old - shift), self._power(m_new - shift)
            l_old, l_new = self.load(self.l_all, c), self.load(self.l, c)
            if self.kind.entropy:
                self.e_all[c] = self._moved(self.load(self.e_all, c), l_old, old, m_old - shift) + self._moved(
                    self.load(self.e, c), l_new, new, m_new - shift
                )
            self.m_all[c], self.l_all[c] = m, k.fma(l_old, old, l_new * new)
            self.old[c], self.new[c] = old, new
            with k.loop(self.d_v) as a:
                at = a * self.B + c
                self.O_all[at] = k.fma(self.load(self.O_all, at), old, self.load(self.O, at) * new)

    def _finish(self) -> Value:
        """The sink counted in, O / l, lse, entropy and the largest weight; whether an output is NaN."""
        k, kind = self.k, self.kind
        zero, one = (k.constant(self.real, x).spread(self.W) for x in (0.0, 1.0))
        unit = 1.0 if kind.ruled else mathematics.LN_2  # scores to natural ones
        bad = k.variable(k.constant(I64, 0))
        sinks = k.pointer("sink", self.real)
        with k.loop(self.B, step=self.W) as c:
            m_old, l = self.load(self.m_all, c), self.load(self.l_all, c)
            m, old = m_old, one
            if kind.sink:
                sink = sinks.gather(self.h_lane.load(c, self.W) - self.word("h") + self.word("head"))
                sink = sink if kind.ruled else sink * mathematics.LOG2_E
                m = k.maximum(m_old, sink)
                shift = self._finite(m)
                old = self._power(m_old - shift)
                l = k.fma(l, old, self._power(sink - shift))
            inverse = k.where(l == 0.0, zero, one / l)
            self.top[c] = m * unit + mathematics.log(k, l)  # lse
            self.m[c] = old * inverse  # the largest weight
            if kind.entropy:
                kept, e = self.load(self.l_all, c), self.load(self.e_all, c) * unit
                if kind.sink:
                    e = self._moved(e, kept, old, (m_old - self._finite(m)) * unit)
                positive = k.where(l == 0.0, one, l)
                self.e[c] = (kept * old * mathematics.log(k, positive) - e) / positive
            factor = old * inverse
            with k.loop(self.d_v) as a:
                at = a * self.B + c
                o = self.load(self.O_all, at) * factor + 0.0  # not −0
                self.O[at] = o
                with k.when(o.is_nan().any()):
                    bad.value = k.constant(I64, 1)
            if kind.sink:
                # The largest weight is that of a key.
                self.m[c] = k.where(m_old == -math.inf, zero, self.load(self.m, c))
        return bad.value != 0

    def _write(self) -> None:
        self._turn_output()
        k, kind = self.k, self.kind
        lanes = self.word("lanes")

        def lane(n: Value, g: Value, r: Value) -> None:
            with k.when(n < lanes):
                row = g * k.integer("row_head") + r
                self.address("lse", self.real)[row] = self.top[n]
                if kind.entropy:
                    self.address("entropy", self.real)[row] = self.e[n]
                with k.when(self.word("max") != 0):
                    self.address("max", self.real)[row] = self.m[n]

        self.each_lane(lane)

    def _turn_output(self) -> None:
        k, W, B = self.k, self.W, self.B
        lanes, out = self.word("lanes"), self.address("out", self.kind.element)
        strides = k.integer("out_head"), k.integer("out_row")
        whole = self.d_v - self.d_v % W
        with k.loop(lanes, step=W) as c:
            with k.loop(whole, step=W) as a:
                turned = k.transpose([self.load(self.O, (a + x) * B, c) for x in range(W)])
                for r in range(W):
                    with k.when(c + r < lanes):
                        self._row(out, c + r, *strides)[a] = turned[r].to(self.kind.element)
            with k.loop(k.minimum(lanes, c + W), start=c) as n:
                row = self._row(out, n, *strides)
                with k.loop(self.d_v, start=whole) as a:
                    row[a] = self.O[a * B + n].to(self.kind.element)


@dataclass(frozen=True)
class Rows:
    """Rows of K or V of one tile: the first, and the bytes from each to the next; features lie together."""

    first: Pointer
    row: Value | int

    def at(self, n: Value) -> Pointer:
        return self.first.bytes(n * self.row)


LARGEST = {"f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308}
