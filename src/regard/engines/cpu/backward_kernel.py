"""Backward: the gradients of Q, K, V, of the bias and of tables, from lse and the cotangents.

    P = exp(S − lse)        dP = D · (dO Vᵀ)        dS = P · (dP + c − dH (log P + 1))        dT = scale · dS · ∂score
    dQ = dT K               dK = dTᵀ Q              dV = (P · D)ᵀ dO

with one c = dlse + dH (Σ P − H) − Σ dO · O for each row. Each pair of an item (a block of queries of one head) and a
tile of keys costs five products. Sᵀ = K Qᵀ, dPᵀ = V dOᵀ and dQᵀ += Kᵀ dTᵀ have a query in every lane, as forward has;
dK and dV have features there, and read numbers of dT and P through broadcasts.

A *group* is some items that share K and V: each tile is used by all of them before the next. dQ of a row is summed
tile by tile in the order of keys, dK and dV item by item in the order of items; whoever hands out groups and ranges of
tiles sees to it that this order is kept.

What is hidden has no influence. Its weight is −0, which no other weight is: it counts as 0 in sums, and where a row
of Q, K, V or dO is not finite, so that 0 · NaN would be NaN, tells what to leave out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.engines.cpu import mathematics
from regard.engines.cpu.backward_layout import BackwardKind, Reading, item_area, padded, tile_area
from regard.engines.cpu.element import BF16, I8, I16, I32, I64
from regard.engines.cpu.emit import Kernel, Pointer, Value, Variable
from regard.engines.cpu.lanes import Lanes, Tile
from regard.engines.cpu.layout import KEYS, TILE_BITS
from regard.engines.cpu.lowering import Place

NONE = 2**62


class Backward(Lanes):
    """The kernel. A query is in every lane."""

    kind: BackwardKind

    def __init__(self, k: Kernel, kind: BackwardKind):
        super().__init__(k, kind)
        self.scale = k.real("scale", kind.real)
        # Scores are logarithms of base 2 unless a rule wants natural ones.
        self.unit = 1.0 if kind.ruled else mathematics.LOG2_E
        self.tile, self.rest = self._area(k.pointer("scratch", self.real), tile_area(kind, self.d, self.d_v))
        self.state = self.tile.state.of(I64)
        # What products take at once: a number, or a word of two.
        self.both, self.number = (2, I32) if kind.pairs else (1, kind.real)
        self.query_scale = k.constant(kind.real, 1.0) if kind.pairs else self.scale * self.unit

    # Items

    def _item_area(self) -> Mapping[str, Any]:
        return item_area(self.kind, self.d, self.d_v)

    @property
    def cursor(self) -> Pointer:
        """The next of the item's tiles, in the list of tiles."""
        state: Pointer = self.item.state
        return state

    def _group(self, first: Value, stop: Value) -> None:
        k = self.k
        size = sum(item_area(self.kind, self.d, self.d_v).values(), k.whole(0))
        tiles = k.pointer("tiles", I64)
        none, current = k.constant(I64, NONE), k.variable(k.constant(I64, NONE))

        def each(work: Callable[[], None]) -> None:
            with k.loop(stop, start=first) as n:
                self._open(n, self.rest + (n - first) * size)
                work()

        def next_tile() -> Value:
            found, end = k.variable(none), self.word("tiles") + self.word("count")
            with k.when(self.cursor[0] < end):
                number = tiles[self.cursor[0]] >> TILE_BITS
                found.value = k.where(number < k.integer("to"), number, none)
            return found.value

        def find() -> None:
            current.value = k.minimum(current.value, next_tile())

        def pass_over() -> None:
            with k.when(next_tile() == current.value):
                word = tiles[self.cursor[0]]
                self.cursor[0] = self.cursor[0] + 1
                self._work(self._tile(word))

        each(self._begin)
        each(find)
        with k.loop_while(lambda: current.value != none):
            self._open(first, self.rest)
            self._copies(current.value)
            each(pass_over)
            current.value = none
            each(find)
        each(self._end)

    def _begin(self) -> None:
        k, kind, item = self.k, self.kind, self.item
        tiles, end = k.pointer("tiles", I64), self.word("tiles") + self.word("count")
        at = k.variable(self.word("tiles"))
        with k.loop_while(lambda: at.value < end):
            with k.when((tiles[at.value] >> TILE_BITS) >= k.integer("from")):
                item.state[1] = at.value
                at.value = k.constant(I64, NONE)
            at.value = at.value + 1
        self.cursor[0] = k.where(at.value > NONE, item.state[1], end)
        self.each_lane(self._begin_lane)
        self.each_lane(self._begin_row)
        self._begin_rows()
        with k.loop(self.B, step=self.W) as c:
            total = k.variable(self.load(item.c, c))
            with k.loop(self.d_v) as x:
                at_x = x * self.B + c
                total.value = k.fma(-self.load(item.dout, at_x), self.load(self.tile.O, at_x), total.value)
            item.c[c] = total.value
        with k.choice(k.integer("from") == 0) as (fresh, more):
            with fresh:
                self.fill(item.dq, 0.0, self.d)
            with more, k.loop(self.word("lanes")) as n:
                row = self._row(self.address("dq", self.real), n, k.integer("dq_head"), k.integer("dq_row"))
                with k.loop(self.d) as x:
                    item.dq[x * self.B + n] = row[x]
        wild = self._wild(item.q_rows, self.B * padded(self.real.size, self.d))
        item.state[1] = (wild | self._wild(item.dout_rows, self.B * padded(self.real.size, self.d_v))).to(I64)
        if kind.pairs:
            self._pair_rows()

    def _begin_rows(self) -> None:
        """Q, dO and O turned, Q with the scale; Q and dO as they are."""
        k, item, element = self.k, self.item, self.kind.element
        one = k.constant(self.real, 1.0)
        with k.loop(3) as which:

            def choose(q: Value, dout: Value, out: Value) -> Value:
                return k.where(which == 0, q, k.where(which == 1, dout, out))

            names = ("q", "dout", "out")
            base = k.at(choose(*(self.address(name, element).address for name in names)), element)
            strides = [choose(*(k.integer(f"{name}_{axis}") for name in names)) for axis in ("head", "row", "feature")]
            turned = k.at(choose(item.q.address, item.dout.address, self.tile.O.address), self.real)
            count = choose(self.d, self.d_v, self.d_v)
            self._turn(base, strides, count, turned, choose(self.query_scale, one, one))
            with k.when(which != 2):
                rows = choose(item.q_rows.address, item.dout_rows.address, item.dout_rows.address)
                self._rows(base, strides, count, k.at(rows, self.real))

    def _pair_rows(self) -> None:
        """Two features, and two rows, into each word: of Q and dO turned, and of their rows."""
        k, item = self.k, self.item
        for turned, rows, count in ((item.q, item.q_rows, self.d), (item.dout, item.dout_rows, self.d_v)):
            with k.when(count % 2 != 0):
                self.fill(turned + count * self.B, 0.0)
            width = padded(self.real.size, count)
            for p, lines, size in ((turned, (count + 1) // 2, k.whole(self.B)), (rows, k.whole(self.B // 2), width)):
                with k.loop(lines) as n, k.loop(size, step=self.W) as x:
                    low, high = (self.load(p, (2 * n + m) * size, x) for m in range(2))
                    p.of(I32)[n * size + x] = k.pair(low, high)

    def _begin_row(self, lane: Value, g: Value, r: Value) -> None:
        k, item, real = self.k, self.item, self.real
        row = g * k.integer("row_head") + r
        item.lse[lane] = self._finite(self.address("lse", real)[row] * self.unit)
        item.c[lane] = k.constant(real, 0.0)
        with k.when(self.word("given") != 0):
            item.c[lane] = self.address("given", real)[row]
        if self.kind.entropy:
            item.d_entropy[lane] = self.address("d_entropy", real)[row]

    def _rows(self, base: Pointer, strides: list[Value], count: Value, into: Pointer) -> None:
        """The rows of the item's lanes one behind the other, padded with zeros; lanes without one are zero."""
        k, W = self.k, self.W
        head, row, step = strides
        width = padded(self.real.size, count)
        whole = k.where(step == base.type.size, count - count % W, k.whole(0))
        with k.loop(self.B * width, step=W) as x:
            into[x] = self.zero()
        with k.loop(self.word("lanes")) as n:
            source, here = self._row(base, n, head, row), into + n * width
            with k.loop(whole, step=W) as x:
                here[x] = source.load(x, W).to(self.real)
            with k.loop(count, start=whole) as x:
                here[x] = source.bytes(x * step)[0].to(self.real)

    def _wild(self, p: Pointer, count: Value) -> Value:
        """Whether any of `count` numbers, in whole vectors, is infinite or NaN."""
        k = self.k
        totals = [k.variable(self.zero()) for _ in range(4)]
        whole = count - count % (4 * self.W)
        with k.loop(whole, step=4 * self.W) as n:
            for x, total in enumerate(totals):
                total.value = k.fma(self.load(p, n + x * self.W).to(self.real), 0.0, total.value)
        with k.loop(count, start=whole, step=self.W) as n:
            totals[0].value = k.fma(self.load(p, n).to(self.real), 0.0, totals[0].value)
        return (totals[0].value + totals[1].value + (totals[2].value + totals[3].value)).is_nan().any()

    def _end(self) -> None:
        k = self.k
        self._turn_back(self.item.dq, self.d, self.address("dq", self.real), k.integer("dq_head"), k.integer("dq_row"))
        if self.kind.sink:

            def write(lane: Value, g: Value, r: Value) -> None:
                self.address("c", self.real)[g * k.integer("row_head") + r] = self.item.c[lane]

            self.each_lane(write)

    # Tiles

    def _copies(self, number: Value) -> None:
        """A tile of K and V, one row behind the other; whether they are finite."""
        k = self.k
        start = number * KEYS - k.integer("shift")
        first, stop = k.maximum(-start, 0), k.minimum(k.whole(KEYS), k.integer("n_k") - start)
        tile = Tile(number, start, first, stop, (first, stop))
        wild = k.variable(k.constant(I64, 0))
        for name, copy, count in (("k", self.tile.k_copy, self.d), ("v", self.tile.v_copy, self.d_v)):
            width = self._copy_width(count)
            copy = copy.of(self.kind.element if self.kind.pairs else self.real)
            with k.when((stop - first < KEYS) | (count < width)), k.loop(KEYS * width, step=self.W) as n:
                copy[n] = k.constant(copy.type, 0.0).spread(self.W)
            self._copy(name, tile, first, stop, copy, width, count)
            wild.value = wild.value | self._wild(copy, KEYS * width).to(I64)
        self.state[0] = wild.value
        if self.kind.pairs:
            self._pair_keys()

    def _copy_width(self, count: Value) -> Value:
        """Of a row in the copy of a tile."""
        return padded(self.real.size, count) if self.kind.pairs else count

    def _pair_keys(self) -> None:
        """Rows of K two by two."""
        k, width, keys = self.k, padded(self.real.size, self.d), self.tile.k_copy.of(I16)
        with k.loop(KEYS // 2) as n, k.loop(width, step=self.W) as x:
            low, high = (self.load(keys, (2 * n + m) * width, x).to(I32) & 0xFFFF for m in range(2))
            self.tile.k_pairs.of(I32)[n * width + x] = low | (high << 16)

    def _work(self, tile: Tile) -> None:
        k = self.k
        self._scores(tile)
        self._fetch_dense(tile)
        self._slopes(tile)
        if self.kind.bias:
            self._add_bias(tile)
        with k.choice((self.state[0] | self.item.state[1]) != 0) as (wild, tame):
            with wild:
                self._add_queries(tile, careful=True)
                self._add_keys(tile, careful=True)
            with tame:
                self._add_queries(tile, careful=False)
                self._add_keys(tile, careful=False)

    def _scores(self, tile: Tile) -> None:
        """Sᵀ = K Qᵀ and dPᵀ = V dOᵀ."""
        k = self.k
        with k.loop(2) as which:
            s = which == 0
            count = k.where(s, self.d, self.d_v)
            width, stop = self._copy_width(count) // self.both, (count + (self.both - 1)) // self.both
            rows = self._either(s, self.tile.k_copy, self.tile.v_copy).of(self.number)
            turned = self._either(s, self.item.q, self.item.dout).of(self.number)
            into = self._either(s, self.tile.P, self.tile.dS)

            def block(
                count: int,
                p: Value,
                s: Value = s,
                width: Value = width,
                stop: Value = stop,
                rows: Pointer = rows,
                turned: Pointer = turned,
                into: Pointer = into,
            ) -> None:
                if self.kind.bias and count > 1:
                    with k.when(s):
                        self._approach(self.kind.bias, tile, p, count)
                keys = [rows + (p + r) * width for r in range(count)]
                sums = self._product(
                    count,
                    k.whole(0),
                    stop,
                    lambda r, x: keys[r][x],
                    lambda x, c: (turned + x * self.B + c).load(0, self.W),
                )
                for r in range(count):
                    for c, x in zip(self.vectors(), sums[r], strict=True):
                        into[(p + r) * self.B + c] = x.value

            self._blocks(tile.first, tile.stop, block)

    def _either(self, condition: Value, x: Pointer, y: Pointer) -> Pointer:
        return self.k.at(self.k.where(condition, x.address, y.address), x.type)

    # Weights

    def _fetch_dense(self, tile: Tile) -> None:
        if self.kind.bias:
            self._fetch("bias", self.kind.bias, self.tile.bias, tile, tile.first, tile.stop)
        for n in range(self.kind.dense):
            self._fetch(f"dense{n}", I8, self._dense(n), tile, *tile.mixed)

    def _slopes(self, tile: Tile) -> None:
        """P · D and dT for the keys that a mask may hide, and for those before and behind."""
        k = self.k
        if not self.kind.mask:
            self._slopes_in(tile, tile.first, tile.stop, False)
            return
        self._slopes_in(tile, *tile.mixed, True)
        with k.loop(2) as part:
            before = part == 0
            start = k.where(before, tile.first, tile.mixed[1])
            self._slopes_in(tile, start, k.where(before, tile.mixed[0], tile.stop), False)

    def _slopes_in(self, tile: Tile, start: Value, stop: Value, masked: bool) -> None:
        k, kind, item = self.k, self.kind, self.item
        with k.loop(self.B, step=self.W) as c:
            row = {"b": self.word("b"), "keys": k.integer("keys")}
            row |= {"i": item.i.load(c, self.W), "h": item.h.load(c, self.W)}
            prepared = [None if rule is None else rule.prepare(Place(row)) for rule in (self.score, self.mask)]
            lanes = _Lanes(
                c,
                row,
                prepared,
                absent=k.lane_numbers(I64, self.W) + c >= self.word("lanes"),
                lse=self.load(item.lse, c),
                rest=self.load(item.c, c),
                d_entropy=self.load(item.d_entropy, c),
                keys=(item.first.load(c, self.W), item.second.load(c, self.W)),
                sums=_Sums(self, tile, prepared[0]),
            )
            if not kind.pairs:
                with k.loop(stop, start=start) as p:
                    PD, dT = self._slope(tile, p, lanes, lanes.absent, masked)
                    self.tile.P[p * self.B + c], self.tile.dS[p * self.B + c] = PD, dT
            else:
                # A key that is missing beside one that is there is hidden.
                with k.when(start < stop), k.loop(stop, start=start - start % 2, step=2) as p:
                    slopes = []
                    for n in range(2):
                        missing = (p + n < tile.first) | (p + n >= tile.stop)
                        PD, dT = self._slope(tile, p + n, lanes, lanes.absent | missing, masked)
                        at = (p + n) * self.B + c
                        self.tile.P_short.of(BF16)[at], self.tile.dS_short.of(BF16)[at] = k.rounded(PD), k.rounded(dT)
                        slopes.append(dT)
                    self.tile.dS_pairs.of(I32)[p // 2 * self.B + c] = k.pair(*slopes)
            lanes.sums.end()

    def _slope(self, tile: Tile, p: Value, lanes: "_Lanes", hidden: Value, masked: bool) -> tuple[Value, Value]:
        """P · D and dT of key p in some lanes; also dS, and its part in the gradients of tables."""
        k, kind, zero = self.k, self.kind, self.zero()
        at, j = p * self.B + lanes.c, tile.start + k.integer("j") + p
        s = self.load(self.tile.P, at)
        if kind.pairs:
            s = s * (self.scale * self.unit)
        place = Place({**lanes.leaves, "j": j, "s": s}, lambda n: self.load(self._dense(n), at) != 0.0)
        results = [s] if self.score is None else [x.spread(self.W) for x in self.score.at(place, lanes.prepared[0])]
        s = results[0]
        if kind.bias:
            s = s + self.load(self.tile.bias, at)
        hidden = hidden | (s == -math.inf)
        if masked and self.mask is not None:
            hidden = hidden | ~self.mask.at(place, lanes.prepared[1])[0].spread(self.W)
        difference = s - lanes.lse
        P = mathematics.weight2(k, difference * (mathematics.LOG2_E / self.unit))
        dP, PD = self.load(self.tile.dS, at), P
        if kind.dropout:
            D = self._kept(lanes.keys, j)
            dP, PD = dP * D, P * D
        G = dP + lanes.rest
        if kind.entropy:
            G = G - lanes.d_entropy * (difference * (1 / self.unit) + 1.0)
        dS = k.where(hidden, zero, P * G)
        dT = dS * self.scale
        if kind.bent:
            dT = k.where(hidden, zero, dT * results[1])
        if kind.bias:
            self.tile.bias[at] = dS
        lanes.sums.add(results[1 + kind.bent :], dS, hidden)
        return k.where(hidden, k.constant(self.real, -0.0), PD), dT

    def _kept(self, keys: tuple[Value, Value], j: Value) -> Value:
        k = self.k
        dropped = mathematics.random_bits(k, keys, j).below(k.integer("threshold").to(I32))
        return k.where(dropped, self.zero(), k.real("kept", self.real))

    # Sums

    def _add_queries(self, tile: Tile, careful: bool) -> None:
        """dQᵀ += Kᵀ dTᵀ."""
        k, dq, width, n = self.k, self.item.dq, self._copy_width(self.d), self.both
        rows = (self.tile.k_pairs if self.kind.pairs else self.tile.k_copy).of(self.number)
        dS = (self.tile.dS_pairs if self.kind.pairs else self.tile.dS).of(self.number)
        start, stop = tile.first // n, (tile.stop + (n - 1)) // n

        def block(count: int, a: Value) -> None:
            sums = self._product(
                count, start, stop, lambda r, p: rows[p * width + a + r], lambda p, c: self.load(dS, p * self.B + c)
            )
            for r in range(count):
                for c, x in zip(self.vectors(), sums[r], strict=True):
                    at = (a + r) * self.B + c
                    dq[at] = self.load(dq, at) + x.value

        if not careful:
            self._blocks(k.whole(0), self.d, block)
            return
        with k.loop(self.d) as a, k.loop(self.B, step=self.W) as c:
            total = k.variable(self.zero())
            with k.loop(stop, start=start) as p:
                shown = self._shown(rows[p * width + a], [self.weights + (n * p + m) * self.B + c for m in range(n)])
                total.value = self.multiply_add(total.value, shown, self.load(dS, p * self.B + c))
            dq[a * self.B + c] = self.load(dq, a * self.B + c) + total.value

    @property
    def weights(self) -> Pointer:
        """P · D, one key after the other."""
        found: Pointer = self.tile.P_short.of(BF16) if self.kind.pairs else self.tile.P
        return found

    def _shown(self, x: Value, weights: Sequence[Pointer], lanes: int | None = None) -> Value:
        """x, or 0 where the weight at an address is that of a hidden pair, −0; for each half of a word its own."""
        k, lanes = self.k, self.W if lanes is None else lanes
        hidden = []
        for weight in weights:
            word = I16 if self.kind.pairs else mathematics.integer(self.zero())
            hidden.append(weight.of(word).load(0, lanes) == -(2 ** (8 * word.size - 1)))
        if not self.kind.pairs:
            return k.where(hidden[0], k.constant(self.real, 0.0), x)
        zero = k.constant(I32, 0)
        low, high = (k.where(h, zero, k.constant(I32, 0xFFFF << 16 * m)) for m, h in enumerate(hidden))
        return x & (low | high)

    def _add_keys(self, tile: Tile, careful: bool) -> None:
        """dV += (P · D)ᵀ dO and dK += dTᵀ Q: features in lanes."""
        k, vectors = self.k, 4 if self.k.target.registers >= 32 else 2
        dS = self.tile.dS_short.of(BF16) if self.kind.pairs else self.tile.dS
        with k.loop(2) as which:
            v = which == 0
            weights = self._either(v, self.weights, dS).of(self.number)
            rows = self._either(v, self.item.dout_rows, self.item.q_rows).of(self.number)
            width = padded(self.real.size, k.where(v, self.d_v, self.d))
            row = k.where(v, k.integer("dv_row"), k.integer("dk_row"))
            base = self._either(v, self.address("dv", self.real), self.address("dk", self.real)).bytes(tile.start * row)
            whole = width - width % (vectors * self.W)
            chunks = ((0, width, 1),) if careful else ((0, whole, vectors), (whole, width, 1))
            for start, stop, count in chunks:
                with k.loop(stop, start=start, step=count * self.W) as a:
                    self._add_features(tile, weights, rows + a, width, base + a, row, count, careful)

    def _add_features(
        self,
        tile: Tile,
        weights: Pointer,
        rows: Pointer,
        width: Value,
        base: Pointer,
        row: Value,
        vectors: int,
        careful: bool,
    ) -> None:
        """base[j, a] += Σ_i weights[j, i] rows[i, a] for so many vectors of features."""
        k, columns, stop = self.k, range(0, vectors * self.W, self.W), self.B // self.both

        def block(count: int, p: Value) -> None:
            for r in range(count):
                for c in columns:
                    (base.bytes((p + r) * row) + c).prefetch()
            sums = self._product(
                count,
                k.whole(0),
                k.whole(stop),
                lambda r, i: weights[(p + r) * stop + i],
                lambda i, c: self.load(rows, i * width + c),
                columns,
            )
            for r in range(count):
                into = base.bytes((p + r) * row)
                for c, x in zip(columns, sums[r], strict=True):
                    into[c] = self.load(into, c) + x.value

        if not careful:
            self._blocks(tile.first, tile.stop, block, 6 if vectors > 1 else 8)
            return
        with k.loop(tile.stop, start=tile.first) as p:
            total = k.variable(self.zero())
            with k.loop(stop) as i:
                at = self.weights + p * self.B + i * self.both
                shown = self._shown(self.load(rows, i * width), [at + m for m in range(self.both)], 0)
                total.value = self.multiply_add(total.value, shown, weights[p * stop + i].spread(self.W))
            into = base.bytes(p * row)
            into[0] = self.load(into) + total.value

    def _add_bias(self, tile: Tile) -> None:
        """dbias += dS, summed over the keys or the rows that a bias does not have."""
        k, W, B, dS = self.k, self.W, self.B, self.tile.bias
        base, lanes = self.address("dbias", self.real), self.word("lanes")
        row, key = k.integer("dbias_row"), k.integer("dbias_key")
        if not self.kind.bias_rows:
            with k.loop(tile.stop, start=tile.first) as p:
                total = k.variable(self.zero())
                with k.loop(B, step=W) as c:
                    total.value += self.load(dS, p * B + c)
                into = base.bytes((tile.start + p) * key)
                into[0] = into[0] + self._sum(total.value)
            return
        if not self.kind.bias_keys:
            with k.loop(B, step=W) as c:
                total = k.variable(self.zero())
                with k.loop(tile.stop, start=tile.first) as p:
                    total.value += self.load(dS, p * B + c)
                dS[tile.first * B + c] = total.value
            with k.loop(lanes) as n:
                into = base.bytes(n * row)
                into[0] = into[0] + dS[tile.first * B + n]
            return
        whole = tile.stop - (tile.stop - tile.first) % W
        here = base.bytes(tile.start * key)
        with k.loop(lanes, step=W) as c:
            with k.loop(whole, start=tile.first, step=W) as p:
                turned = k.transpose([self.load(dS, (p + x) * B, c) for x in range(W)])
                for r in range(W):
                    with k.when(c + r < lanes):
                        into = here.bytes((c + r) * row) + p
                        into[0] = self.load(into) + turned[r] if self.kind.bias_shared else turned[r]
            with k.loop(tile.stop, start=whole) as p, k.loop(k.minimum(lanes, c + W), start=c) as n:
                into, x = here.bytes(n * row) + p, dS[p * B + n]
                into[0] = into[0] + x if self.kind.bias_shared else x

    def _sum(self, x: Value) -> Value:
        """Of all lanes, the halves added again and again."""
        while x.lanes > 1:
            half = x.lanes // 2
            low, high = (self.k.shuffle(x, x, range(start, start + half)) for start in (0, half))
            x = low + high
        return x.lane(0)


@dataclass(frozen=True)
class _Lanes:
    """What is known of some lanes before their keys are looked at."""

    c: Value  # the first of them
    leaves: Mapping[str, Value]
    prepared: Sequence[list[Value | None] | None]  # of the score and of the mask
    absent: Value  # whether there is no row
    lse: Value
    rest: Value
    d_entropy: Value
    keys: tuple[Value, Value]  # of dropout
    sums: "_Sums"


class _Sums:
    """The gradients of tables over some keys: what is read by the row alone is summed first."""

    def __init__(self, kernel: Backward, tile: Tile, prepared: list[Value | None] | None):
        self.kernel, self.kind, self.k, self.tile = kernel, kernel.kind, kernel.k, tile
        self.fixed: list[list[Value] | None] = []
        self.totals: list[Variable | None] = []
        if kernel.score is None or prepared is None:
            return
        results, n = kernel.score.program.results, 1 + self.kind.bent
        for reading in self.kind.readings:
            indices = [prepared[m] for m in results[n + 1 : n + 1 + reading.indices]]
            n += 1 + reading.indices
            known = [x.spread(kernel.W) for x in indices if x is not None]
            once = len(known) == len(indices)
            self.fixed.append(known if once else None)
            self.totals.append(self.k.variable(kernel.zero()) if once else None)

    def add(self, results: list[Value], dS: Value, hidden: Value) -> None:
        for reading, total in zip(self.kind.readings, self.totals, strict=True):
            slope, *indices = results[: 1 + reading.indices]
            results = results[1 + reading.indices :]
            part = self.k.where(hidden, self.kernel.zero(), dS * slope)
            if total is None:
                self._scatter(reading, indices, part)
            else:
                total.value += part

    def end(self) -> None:
        for reading, indices, total in zip(self.kind.readings, self.fixed, self.totals, strict=True):
            if indices is not None and total is not None:
                self._scatter(reading, indices, total.value)

    def _scatter(self, reading: Reading, indices: list[Value], part: Value) -> None:
        """Add to the gradient of a table where it was read, one lane after the other."""
        kernel = self.kernel
        assert kernel.score is not None
        k, name = self.k, f"dtable{reading.table}"
        strand = (self.tile.number - k.integer("first_tile")) // k.integer("strand_tiles")
        into = k.pointer(name, kernel.real).bytes(strand * k.integer(f"{name}_step"))
        position = kernel.score.position(reading.table, indices).spread(kernel.W).to(I64)
        for n in range(kernel.W):
            at = position.lane(n)
            into[at] = into[at] + part.lane(n)
