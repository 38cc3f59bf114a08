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
from regard.engines.cpu.emit import F32, I8, I32, I64, Kernel, Pointer, Type, Value, Variable
from regard.engines.cpu.lowering import Arguments, Lowering, Place
from regard.engines.cpu.target import Target

KEYS, TILES = 128, 8

FIELDS = (
    "items", "count", "tiles", "scratch", "d", "d_v", "n_k", "shift", "first_tile", "j", "keys", "scale",
    "q_head", "q_row", "q_feature", "k_row", "k_feature", "v_row", "v_feature", "out_head", "out_row", "row_head",
    "bias_head", "bias_row", "bias_key", "sink", "threshold", "kept", "seed",
)  # fmt: skip
ITEM = ("q", "k", "v", "out", "lse", "entropy", "max", "bias", "b", "h", "head", "i", "rows", "lanes", "tiles", "count")


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for.

    element: of q, k, v and out. real: of sums. columns: vectors of queries. copied: whether tiles of K and V are copied
    (16 bits, or features that do not lie together). bias: the type of a dense bias.
    """

    element: Type
    real: Type
    columns: int
    copied: bool
    mask: Arguments | None
    score: Arguments | None
    bias: Type | None
    dropout: bool
    sink: bool
    entropy: bool

    @property
    def fields(self) -> tuple[str, ...]:
        rules = [name for program in (self.mask, self.score) if program for name in program.fields]
        return (*FIELDS, *self.dense_fields, *rules)

    @property
    def dense(self) -> int:
        """Dense masks."""
        return len(self.mask.program.dense) if self.mask else 0

    @property
    def dense_fields(self) -> list[str]:
        return [f"dense{n}_{axis}" for n in range(self.dense) for axis in ("head", "row", "key")]

    @property
    def item(self) -> tuple[str, ...]:
        return (*ITEM, *(f"dense{n}" for n in range(self.dense)))

    @property
    def ruled(self) -> bool:
        """Whether scores are changed after the product: then they are natural ones, else logarithms of base 2."""
        return self.score is not None or self.bias is not None

    @property
    def key(self) -> str:
        rules = [None if x is None else x.program.structure for x in (self.mask, self.score)]
        ranks = [[len(t.shape) for t in x.program.tables] for x in (self.mask, self.score) if x]
        rest = (self.element, self.real, self.columns, self.copied, self.bias, self.dropout, self.sink, self.entropy)
        return repr(("forward", rest, rules, ranks))


def scratch_size(lanes: int, d: int, d_v: int, dense: int, copied: bool) -> int:
    """Numbers of scratch memory that a kernel for `lanes` queries needs; dense: biases and masks."""
    return lanes * (26 + d + 2 * d_v + KEYS * (2 + dense)) + (KEYS * (d + d_v) if copied else 0) + 256


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
        take_lanes = [take(B) for _ in range(13)]
        self.m, self.l, self.e, self.top, self.rescale = take_lanes[:5]
        self.m_all, self.l_all, self.e_all, self.old, self.new = take_lanes[5:10]
        self.unused, first, second = take_lanes[10:]
        self.first, self.second = first.of(I32), second.of(I32)
        words = B * 8 // self.real.size
        self.i_lane, self.h_lane, self.place = (take(words).of(I64) for _ in range(3))
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
        """Qᵀ with the scale folded in, and what rules and dropout must know of the row."""
        k, kind = self.k, self.kind
        i, h = self.word("i") + r, self.word("h") + g
        self.i_lane[lane], self.h_lane[lane] = i, h
        q = self.address("q", kind.element).bytes(g * k.integer("q_head") + r * k.integer("q_row"))
        scale = k.real("scale", self.real)
        if not kind.ruled:
            scale = scale * mathematics.LOG2_E
        with k.loop(self.d) as a:
            self.qt[a * self.B + lane] = q.bytes(a * k.integer("q_feature"))[0].to(self.real) * scale
        if kind.dropout:
            first, second = mathematics.row_key(k, k.integer("seed"), self.word("b"), h, i)
            self.first[lane], self.second[lane] = first, second

    # Spans and tiles

    def _spans(self) -> None:
        """Tiles of one span after the other, each span merged when it is done."""
        k = self.k
        t, end = k.variable(self.word("tiles")), self.word("tiles") + self.word("count")
        tiles, first = k.pointer("tiles", I64), k.integer("first_tile")

        def span() -> Value:
            return ((tiles[t.value] >> 1) + first) // TILES

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
        start = (word >> 1) * KEYS - k.integer("shift")
        column = k.maximum(start, k.whole(0))
        count = k.minimum(start + KEYS, k.integer("n_k")) - column
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
        with k.loop(n) as x:
            vectors = [vector(x, c) for c in self.vectors()]
            for r in range(rows):
                f = factor(r, x).spread(self.W)
                for c, v in enumerate(vectors):
                    sums[r][c].value = k.fma(f, v, sums[r][c].value)
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
        k = self.k
        head, row, key = (k.integer(f"{name}_{axis}") for axis in ("head", "row", "key"))
        here = self.address(name, type).bytes(column * key)

        def lane(lane: Value, g: Value, r: Value) -> None:
            source = here.bytes(g * head + r * row)
            with k.loop(count) as j:
                tile[j * self.B + lane] = source.bytes(j * key)[0].to(self.real)

        self.each_lane(lane)

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
        with k.loop(self.B, step=self.W) as c:
            m_old, m = self.load(self.m, c), self.load(self.top, c)
            shift = self._finite(m)
            total, e = k.variable(zero), k.variable(zero)
            if kind.dropout:
                keys = self.first.load(c, self.W), self.second.load(c, self.W)
                threshold, kept = k.integer("threshold").to(I32), k.real("kept", self.real)
            with k.loop(count) as j:
                at = j * self.B + c
                s = self.load(self.P, at) - shift
                p = self._power(s)
                total.value = total.value + p
                if kind.entropy:
                    # 0 · (S − m) must be 0 where S is −∞.
                    least = k.constant(self.real, -1000.0 if self.real is F32 else -4000.0)
                    e.value = e.value + p * k.maximum(least, s)
                if kind.dropout:
                    bits = mathematics.random_bits(k, keys, column + k.integer("j") + j)
                    p = k.where(bits.below(threshold), zero, p * kept)
                self.P[at] = p
            difference = m_old - shift
            rescale = self._power(difference)
            if kind.entropy:
                self.e[c] = self._moved(self.load(self.e, c), self.load(self.l, c), rescale, difference) + e.value
            self.l[c] = k.fma(self.load(self.l, c), rescale, total.value)
            self.m[c], self.rescale[c] = m, rescale

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
        k, kind = self.k, self.kind
        lanes = self.word("lanes")

        def lane(n: Value, g: Value, r: Value) -> None:
            with k.when(n < lanes):
                out = self.address("out", kind.element).bytes(g * k.integer("out_head") + r * k.integer("out_row"))
                with k.loop(self.d_v) as a:
                    out[a] = self.O[a * self.B + n].to(kind.element)
                row = g * k.integer("row_head") + r
                self.address("lse", self.real)[row] = self.top[n]
                if kind.entropy:
                    self.address("entropy", self.real)[row] = self.e[n]
                with k.when(self.word("max") != 0):
                    self.address("max", self.real)[row] = self.m[n]

        self.each_lane(lane)


@dataclass(frozen=True)
class Rows:
    """Rows of K or V of one tile: the first, and the bytes from each to the next; features lie together."""

    first: Pointer
    row: Value | int

    def at(self, n: Value) -> Pointer:
        return self.first.bytes(n * self.row)


LARGEST = {"f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308}
