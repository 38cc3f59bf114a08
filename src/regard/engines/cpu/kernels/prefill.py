"""Prefill: a query in every lane, Sᵀ = K Qᵀ and Oᵀ += Vᵀ Pᵀ.

Softmax, mask, rule and dropout are vertical: one vector operation for each key. K and V are read by broadcasts, in
place or from a copy of the tile.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from regard.engines.cpu.kernels.pipelining import Pipelining
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import I16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.specs import KernelSpec

BOTH = -1  # halves of the lanes


class PrefillKernel(Pipelining):
    """The forward kernel for many queries."""

    def __init__(self, k: Kernel, spec: KernelSpec):
        super().__init__(k, spec)
        # True if products skip what a mask hides from half of the lanes. A half of one vector is too narrow: its
        # chains of sums are waited for.
        self.halved = bool(spec.mask) and spec.keys == ("k",) and not spec.amx and len(self.vectors()) % 4 == 0
        # True if a bias is all that changes scores, and P is the only tile of weights.
        self.biased = bool(spec.bias) and spec.score is None and spec.weights == ("P",)

    def _prepare_queries(self) -> None:
        """Store Qᵀ with the scale; where products take packed pairs, in pairs of features."""
        spec = self.spec
        for name in spec.queries:
            strides, q = self.strides(name), self.block[name]
            if spec.paired:
                self._transpose_packed(self.address(name).of(I16), strides, q.of(I32))
            else:
                self._transpose(self.address(name), strides, self.d, q, self.query_scale)

    def _store_output(self) -> None:
        head, row, *_ = self.strides("out")
        self._transpose_back(self.block.O, self.d_v, self.address("out"), head, row)

    def _work(self, first: Value) -> Value:
        return self._tiles_pipelined(first) if self.spec.pipelined else self._tiles(first, self._work_on)

    def _work_on(self, tile: KeyTile) -> None:
        self._copies(tile)
        self._qk_product(tile)
        self._rules(tile)
        self._before_softmax(tile)
        self._softmax(tile)
        self._add_sums(tile)
        self._pv_product(tile)

    def _before_softmax(self, tile: KeyTile) -> None:
        """Update best keys and maxima from the scores of a tile."""
        k = self.k
        if self.spec.best:
            with k.when(self.exclude_hidden.value == 0):
                self._choose_best(tile)
        with k.when(self.exclude_hidden.value != 0):
            self._store_visible(tile)
        # Keys are taken in pairs, so a missing one must be present and have the weight 0.
        nothing = k.constant(self.real, -math.inf).spread(self.W)
        for c in self.vectors():
            with k.when(tile.first % 2 != 0):
                tile.scratch.P[(tile.first - 1) * self.B + c] = nothing
            with k.when(tile.stop % 2 != 0):
                tile.scratch.P[tile.stop * self.B + c] = nothing
        self._move_maximum(tile)

    def _pv_product(
        self, tile: KeyTile, softmax_step: Callable[[], None] | None = None, until: Value | int = 0
    ) -> None:
        with self.k.choice(self.exclude_hidden.value != 0) as (yes, no):
            with yes:
                self._add_pv_products(tile, self._add_visible_pv, self._add_visible_pv_by_amx)
            with no:
                self._add_pv_products(
                    tile, partial(self._add_pv, softmax_step=softmax_step, until=until), self._add_pv_by_amx
                )

    # QK products

    def _qk_products(self, tile: KeyTile) -> list[tuple[str, Pointer, Pointer]]:
        """Return the QK products.

        Each has the name of K, the transposed queries, and the tile that is written.
        """
        return [("k", self.block.q, tile.scratch.P)]

    def _qk_product(
        self, tile: KeyTile, softmax_step: Callable[[], None] | None = None, until: Value | int = 0
    ) -> None:
        """Compute Sᵀ = K Qᵀ and the maxima.

        A maximum is over the keys that no mask and no rule touches.

        softmax_step: computes two more keys' softmax; it is interleaved while some key before `until` is due.
        """
        if self.spec.amx:
            self._qk_product_by_amx(tile)
            return
        k, spec, number = self.k, self.spec, I32 if self.spec.paired else self.real
        names, transposed, results = zip(*self._qk_products(tile), strict=True)
        stop = (self.d + 1) // 2 if spec.paired else self.d
        tops = [k.variable(k.constant(self.real, -math.inf).spread(self.W)) for _ in self.vectors()]
        plain = k.variable(k.constant(I64, 1))
        halved = self.halved and not spec.ruled  # rules need every score
        alone = k.variable(k.whole(BOTH))  # the half of the lanes that scores are computed for
        with k.loop(len(names)) as n:
            keys, widths = zip(*(self._keys(tile, name) for name in names), strict=True)
            rows, width = self._pick_pointer(n, keys).of(number), self._pick(n, widths)
            queries, into = self._pick_pointer(n, transposed).of(number), self._pick_pointer(n, results)

            def micro_tile(count: int, p: Value) -> None:
                if count > 1:
                    with k.when(n == 0):
                        self._prefetch_next_tiles(tile, p, count)
                lines = [rows.bytes((p + r) * width) for r in range(count)]

                def products(columns: range, half: Value | int = 0) -> list[list[Variable]]:
                    """Compute the product for the vectors at `columns`.

                    Columns are counted from the start of a half.
                    """
                    sums, start = self._sums(count, columns), k.whole(0)

                    def factor(r: int, x: Value) -> Value:
                        return lines[r][x]

                    def vector(x: Value, c: Value) -> Value:
                        return (queries + half + x * self.B + c).load(0, self.W)

                    if softmax_step and count > 1 and columns == self.vectors():
                        share = k.minimum(self._steps_due(until), k.whole(count // 2))
                        start = self._interleave_softmax(
                            softmax_step,
                            share,
                            start,
                            stop,
                            lambda x, n: self._add_steps(sums, x, n, factor, vector, columns),
                        )
                    self._add_product(sums, start, stop, factor, vector, columns)
                    for r in range(count):
                        for c, s in zip(columns, sums[r], strict=True):
                            self._put_qk_product(into, (p + r) * self.B + half + c, s.value, n, results)
                    return sums

                def of_all() -> None:
                    sums = products(self.vectors())
                    if not spec.ruled:
                        with k.when(plain.value != 0):
                            for r in range(count):
                                for top, s in zip(tops, sums[r], strict=True):
                                    top.value = k.maximum(s.value, top.value)

                if not halved or count == 1:
                    of_all()
                    return
                with k.choice(alone.value == BOTH) as (both, one):
                    with both:
                        of_all()
                    with one:
                        products(range(0, self.B // 2, self.W), alone.value * (self.B // 2))

            if spec.mask and not spec.ruled:
                ends, whose = self._sections(tile)
                middle = len(whose) // 2
                with k.loop(len(whose)) as part:
                    start, end = (self._pick(part, ends[m : m + len(whose)]) for m in range(2))
                    alone.value = self._pick(part, whose)
                    plain.value = (((part == middle - 1) | (part == middle + 1)) & (n == 0)).to(I64)
                    self._micro_tiles(start, end, micro_tile)
            else:
                plain.value = (n == 0).to(I64)
                self._micro_tiles(tile.first, tile.stop, micro_tile)
        for c, top in zip(self.vectors(), tops, strict=True):
            self.tile.top[c] = top.value

    def _sections(self, tile: KeyTile) -> tuple[list[Value], list[Value]]:
        """Return the sections of keys that differ in visibility.

        They have edges, and a half of the lanes or BOTH.

        The middle one is mixed, its neighbours all lanes see, and the outer ones one half alone.
        """
        k = self.k
        ends, whose = [*tile.mixed], [k.whole(BOTH)] * 3
        if self.halved:
            first, last, early, late = tile.halves
            ends = [first, *(k.minimum(k.maximum(x, first), last) for x in ends), last]
            whose = [early, *whose, late]
        return [tile.first, *ends, tile.stop], whose

    def _prefetch_next_tiles(self, tile: KeyTile, p: Value, count: int) -> None:
        """Prefetch data of the next tiles, a share in every micro-tile of keys.

        That is the bias. In a block's first tiles also the next block's queries; in its last ones the rows of its
        outputs and, under a mask, the first keys of the next block. In a work group's first block also the next tile.
        """
        k, spec = self.k, self.spec
        if spec.bias:
            self._prefetch_bias(tile, p, count)
        done, tiles = self.place - self.field("tiles"), self.field("count")
        some = k.minimum(tiles, k.whole(2))
        last = done - (tiles - some)
        blocks = k.maximum((tile.stop - tile.first) // count, k.whole(1))

        def share(n: Value, rows: Value | int) -> Any:
            """Loop over this micro-tile's share of rows.

            All are prefetched by `some` tiles, this is the n-th.
            """
            part, whole = n * blocks + (p - tile.first) // count, some * blocks
            return k.loop((part + 1) * rows // whole, start=part * rows // whole)

        def row_of(name: str, base: Pointer, lane: Value, features: Value) -> None:
            row = self._row(base, lane, k.integer(f"{name}_head"), k.integer(f"{name}_row"))
            self._prefetch_row(row, features * spec.element.size)

        def key(record: Pointer, row: Value) -> None:
            for names, features in ((spec.keys, self.d), (spec.values, self.d_v)):
                for name in names:
                    self._prefetch_row(self._source(name, row, record), features * spec.element.size)

        with k.when(done < some), share(done, self.field("lanes")) as lane:
            for name in spec.queries:
                row_of(name, self.address(name, self.following), lane, self.d)
        with k.when(last >= 0):
            with share(last, self.field("lanes")) as lane:
                for name in spec.names("output"):
                    row_of(name, self.address(name), lane, self.d_v)
            if spec.mask:
                with k.when(self.field("count", self.following) != 0):
                    begin = self._tile(k.pointer("tiles", I64)[self.field("tiles", self.following)])
                    with share(last, self.B) as row:
                        key(self.following, begin.start + begin.first + row)
        with k.when(self.leading & (done + 1 < tiles)):
            first = self._tile(k.pointer("tiles", I64)[self.place + 1]).start + p
            with k.loop(first + count, start=first) as row:
                key(self.record, row)

    def _keys(self, tile: KeyTile, name: str) -> tuple[Pointer, Value]:
        """Return the first row of K of a tile, and its stride in bytes."""
        if self.spec.copied:
            return self.k_copy(self._slot(tile), name), self.key_width * self.key_type.size
        return self._source(name, tile.start), self.k.integer(f"{name}_row")

    def _put_qk_product(self, into: Pointer, at: Value, x: Value, n: Value, results: Sequence[Pointer]) -> None:
        """Store the n-th product; add it if an earlier one has the same destination."""
        for m, result in enumerate(results):
            if any(result is before for before in results[:m]):
                x = self.k.where(n == m, self.load(into, at) + x, x)
        into[at] = x

    # Rules

    def _rules(self, tile: KeyTile) -> None:
        """Compute S ← score(S) + bias, −∞ where the mask hides the pair.

        The maximum of changed scores is updated.
        """
        k, spec = self.k, self.spec
        for name in spec.masks:
            self._fetch(name, self.tile[name], tile, *tile.mixed)
        if spec.mask:
            self._rules_in(tile, *tile.mixed, True)
        work = self._add_bias if self.biased else partial(self._rules_in, masked=False)
        if spec.ruled and spec.mask:
            with k.loop(2) as part:
                before = part == 0
                start = k.where(before, tile.first, tile.mixed[1])
                work(tile, start, k.where(before, tile.mixed[0], tile.stop))
        elif spec.ruled:
            work(tile, tile.first, tile.stop)

    def _add_bias(self, tile: KeyTile, start: Value, stop: Value) -> None:
        """Do the work of `_rules_in` where a bias is all that changes scores.

        The bias is transposed in registers, a square of keys and lanes at a time.
        """
        k, W, type = self.k, self.W, self.spec.type_of("bias")
        base, strides = self._dense_at("bias", tile.start)
        with k.loop(self.B, step=W) as c:
            rows = self._lane_rows(base, strides, c)
            tops = [k.variable(self.load(self.tile.top, c)) for _ in range(2)]  # two chains, to hide latency

            def add(p: Value, bias: Value, top: Variable) -> None:
                at = p * self.B + c
                s = self._natural(self.load(tile.scratch.P, at)) + bias
                tile.scratch.P[at] = s
                top.value = k.maximum(s, top.value)

            with (
                k.loop(stop, start=start, step=W) as first,
                k.choice((strides[2] == type.size) & (first + W <= stop)) as (whole, single),
            ):
                with whole:
                    for n, bias in enumerate(self._transposed_block(rows, first, 1.0)):
                        add(first + n, bias, tops[n % 2])
                with single:
                    last = k.minimum(first + W, stop)
                    self._transpose_singly(base, strides, c, first, last, self.tile.bias, 1.0)
                    with k.loop(last, start=first) as p:
                        add(p, self.load(self.tile.bias, p * self.B + c), tops[0])
            self.tile.top[c] = k.maximum(*(top.value for top in tops))

    def _rules_in(self, tile: KeyTile, start: Value, stop: Value, masked: bool) -> None:
        k = self.k
        with k.loop(self.B, step=self.W) as c:
            row = {"b": self.field("b"), "keys": k.integer("keys")}
            row |= {"i": self.block.i.load(c, self.W), "h": self.block.h.load(c, self.W)}
            prepared = [None if rule is None else rule.prepare(TileContext(row)) for rule in (self.score, self.mask)]
            top = k.variable(self.load(self.tile.top, c))
            with self._biased_keys(tile, start, stop, c) as (*ends, biases), k.loop(ends[1], start=ends[0]) as p:
                at = p * self.B + c
                s = self._natural(k.frozen(self.load(tile.scratch.P, at)))
                context = TileContext(
                    row | {"j": tile.start + k.integer("j") + p, "s": s},
                    lambda n, at=at: self.load(self._dense(n), at) != 0.0,  # type: ignore[misc]
                )
                s = self._ruled(tile, s, context, prepared[0], at, biases)
                if masked and self.mask is not None:
                    visible = self.mask.at(context, prepared[1])[0].spread(self.W)
                    s = k.where(visible, s, k.constant(self.real, -math.inf))
                tile.scratch.P[at] = s
                top.value = k.maximum(s, top.value)
            self.tile.top[c] = top.value

    @contextmanager
    def _biased_keys(
        self, tile: KeyTile, start: Value, stop: Value, c: Value
    ) -> Iterator[tuple[Value, Value, Mapping[str, Pointer]]]:
        """Loop over ranges of keys, by vectors of them where there are biases; yield their ends, and biases.

        Biases are those of the vector of lanes at c, a row of lanes for each key.
        """
        if not self.spec.biases:
            yield start, stop, {}
            return
        k, W, B = self.k, self.W, self.B
        sources, found = [], {}
        for name in self.spec.biases:
            base, strides = self._dense_at(name, tile.start)
            sources.append((name, base, strides, self._lane_rows(base, strides, c)))
        with k.loop(stop, start=start, step=W) as first:
            for name, base, strides, rows in sources:
                transposed = self.tile[name] + first * -B
                with k.choice((strides[2] == base.type.size) & (first + W <= stop)) as (whole, single):
                    with whole:
                        self._store_transposed(rows, first, self.tile[name] + c, 1.0)
                    with single:
                        self._transpose_singly(base, strides, c, first, k.minimum(first + W, stop), transposed, 1.0)
                found[name] = transposed
            yield first, k.minimum(first + W, stop), found

    def _ruled(
        self,
        tile: KeyTile,
        s: Value,
        context: TileContext,
        prepared: list[Value | None] | None,
        at: Value,
        biases: Mapping[str, Pointer],
    ) -> Value:
        """Apply rule and bias to a score."""
        if self.score is not None:
            s = self.score.at(context, prepared)[0].spread(self.W)
        return s + self.load(biases["bias"], at) if self.spec.bias else s

    # The largest weights

    def _choose_best(self, tile: KeyTile) -> None:
        """Insert the best keys of a tile.

        Those that beat the last of the list in any lane are seldom many.
        """
        k, P, best = self.k, tile.scratch.P, self.best
        candidates = self.tile.candidates.of(I64)
        with k.loop(self.B, step=self.W) as c:
            least = self.load(best.values, (self.spec.best - 1) * self.B, c)
            count = k.variable(k.constant(I64, 0))
            with k.loop(tile.stop, start=tile.first) as p:
                candidates[count.value] = p
                count.value = count.value + (self.load(P, p * self.B, c) > least).any().to(I64)
            with k.when(count.value != 0), self._insertion(best, c) as insert, k.loop(count.value) as n:
                p = candidates[n]
                column = (tile.start + p).to(best.indices.type).spread(self.W)
                insert(self.load(P, p * self.B, c), column)

    # Softmax and PV products

    def _subtract(self, tile: KeyTile) -> None:
        with self.k.loop(tile.stop, start=tile.first) as p:
            for c in self.vectors():
                at = p * self.B + c
                tile.scratch.P[at] = self.load(tile.scratch.P, at) - self.load(self.tile.before, c)

    def _store_visible(self, tile: KeyTile) -> None:
        k = self.k
        with k.loop(tile.stop * self.B, start=tile.first * self.B, step=self.W) as n:
            hidden = self.load(tile.scratch.P, n) == -math.inf
            tile.scratch.seen[n] = k.where(hidden, self.zero(), k.constant(self.real, 1.0))

    def _softmax(self, tile: KeyTile) -> None:
        """Compute P = exp(S − m) and its sums.

        Sums are first over keys that are W apart, then over those.
        """
        k, names, low = self.k, self._summed(), tile.first - tile.first % 2
        shifts = [self.load(self.tile.shift, c) for c in self.vectors()]
        totals = [[k.variable(self.zero()) for _ in self.vectors()] for _ in names]
        parts = [[[k.variable(self.zero()) for _ in self.vectors()] for _ in range(2)] for _ in totals]
        with k.loop(self.W, step=2) as r:
            for part in parts:
                for n in range(2):
                    for x in part[n]:
                        x.value = self.zero()
            with k.loop(tile.stop, start=low + ((r - low) & (self.W - 1)), step=self.W) as p:
                for number, c in enumerate(self.vectors()):
                    for n, terms in enumerate(self._softmax_pair(tile, p, c, shifts[number])):
                        for part, term in zip(parts, terms, strict=True):
                            part[n][number].value += term
            for total, part in zip(totals, parts, strict=True):
                for n in range(2):
                    for x, y in zip(total, part[n], strict=True):
                        x.value += y.value
        for name, total in zip(names, totals, strict=True):
            for c, x in zip(self.vectors(), total, strict=True):
                self.tile[name][c] = x.value

    def _softmax_pair(self, tile: KeyTile, p: Value, c: Value | int, shift: Value) -> list[list[Value]]:
        """Compute P = exp(S − m) of keys p and p + 1 in the lanes from c on.

        Return the terms of sums.
        """
        k, spec = self.k, self.spec
        summed, pair = [], []
        for n in range(2):
            at = (p + n) * self.B + c
            weights, difference = self._weights_at(tile, at, shift)
            terms = []
            for w in weights:
                terms += [w, self._entropy_term(w, difference)] if spec.entropy else [w]
            summed.append(terms)
            if spec.dropout:
                keys = self.block.first.load(c, self.W), self.block.second.load(c, self.W)
                j = tile.start + k.integer("j") + p + n
                weights = [self._drop(w, keys, j) for w in weights]
            pair.append(weights)
            if not spec.paired:
                for name, w in zip(spec.weights, weights, strict=True):
                    tile.scratch[name][at] = w
        if spec.paired:
            for name, low, high in zip(spec.weights, *pair, strict=True):
                tile.scratch[name].of(I32)[p * self.B + c] = k.pack_bf16(low, high)
        return summed

    def _weights_at(self, tile: KeyTile, at: Value, shift: Value) -> tuple[list[Value], Value]:
        """Return the factors of V at some pairs, by `spec.weights`, and S − m."""
        weight, difference = self._weight(self.load(tile.scratch.P, at), shift)
        return [weight], difference

    def _pv_products(self, tile: KeyTile) -> list[tuple[str, Pointer, Pointer]]:
        """Return the PV products: the name of V, weights, and the output."""
        return [("v", tile.scratch.P, self.split.O)]

    def _values(self, tile: KeyTile, name: str) -> tuple[Pointer, Value]:
        """Return the first row of V of a tile, and its stride in bytes.

        Of packed rows that of a pair.
        """
        if self.spec.copies:
            return self.v_copy(self._slot(tile), name), self.d_v * (4 if self.spec.paired else self.real.size)
        return self._source(name, tile.start), self.k.integer(f"{name}_row")

    def _add_pv_products(self, tile: KeyTile, work: Callable[..., None], by_amx: Callable[..., None]) -> None:
        """Compute Oᵀ ← rescale · Oᵀ + Vᵀ Pᵀ, by vectors or by AMX."""
        products = self._pv_products(tile)
        if not products:
            return
        k, (names, weights, outputs) = self.k, zip(*products, strict=True)
        with k.loop(len(products)) as n:
            values, widths = zip(*(self._values(tile, name) for name in names), strict=True)
            O = self._pick_pointer(n, outputs)
            accumulated = [m for m, x in enumerate(outputs) if any(x is before for before in outputs[:m])]

            def add(a: Value, c: Value | int, total: Value) -> None:
                at, factor = a * self.B + c, self.load(tile.scratch.rescale, c)
                for m in accumulated:
                    factor = k.where(n == m, k.constant(self.real, 1.0), factor)
                O[at] = k.fma(self.load(O, at), factor, total)

            operands = self._pick_pointer(n, values), self._pick(n, widths), self._pick_pointer(n, weights)
            if self.spec.amx:
                by_amx(tile, operands[0], operands[2], add)
            else:
                work(tile, *operands, add)

    def _add_pv(
        self,
        tile: KeyTile,
        values: Pointer,
        row: Value,
        P: Pointer,
        add: Callable[..., None],
        softmax_step: Callable[[], None] | None,
        until: Value | int,
    ) -> None:
        k, start, stop, step = self.k, tile.first, tile.stop, self.B
        if self.spec.paired:
            start, stop, step, P = start // 2, (stop + 1) // 2, 2 * self.B, P.of(I32)

        first, last = start, stop
        if self.halved:
            first, last = (x // 2 if self.spec.paired else x for x in tile.halves[:2])
            last = k.where(tile.halves.stop == tile.stop, stop, last)

        def micro_tile(rows: int, a: Value) -> None:
            here, sums = values + a, self._sums(rows)

            def factor(r: int, p: Value) -> Value:
                return (here + r).bytes(p * row)[0]

            def vector(p: Value, c: Value) -> Value:
                return (P + p * step + c).load(0, self.W)

            def of_one(start: Value, stop: Value, half: Value) -> None:
                """Add keys that have no weight in the other half of the lanes."""
                columns = self.vectors()
                middle = len(columns) // 2
                for n, some in enumerate((slice(0, middle), slice(middle, None))):
                    with k.loop(k.where(half == n, stop, start), start=start, step=2) as p:
                        self._add_steps([x[some] for x in sums], p, 2, factor, vector, columns[some])

            def of_both(start: Value, stop: Value) -> None:
                if softmax_step and rows > 1 and self.spec.paired:  # scalars would need more registers than there are
                    columns, due = self.vectors(), self._steps_due(until)
                    start = self._interleave_softmax(
                        softmax_step,
                        due,
                        start,
                        stop,
                        lambda p, n: self._add_steps(sums, p, n, factor, vector, columns),
                    )
                self._add_product(sums, start, stop, factor, vector)

            if self.halved and rows > 1:
                of_one(start, first, tile.halves.early)
                of_both(first, last)
                of_one(last, stop, tile.halves.late)
            else:
                of_both(start, stop)
            for r in range(rows):
                for c, s in zip(self.vectors(), sums[r], strict=True):
                    add(a + r, c, s.value)

        self._micro_tiles(k.whole(0), self.d_v, micro_tile)

    def _add_visible_pv(self, tile: KeyTile, values: Pointer, row: Value, P: Pointer, add: Callable[..., None]) -> None:
        """Compute the product of `_add_pv` in the same order, with hidden values as 0."""
        k, seen = self.k, tile.scratch.seen
        paired = self.spec.paired
        step = 2 if paired else 1
        with k.loop(self.d_v) as a, k.loop(self.B, step=self.W) as c:
            total = k.variable(self.zero())
            with k.loop(tile.stop, start=tile.first - tile.first % step, step=step) as p:
                at = p * self.B + c
                v = (values + a).bytes(p // step * row)[0]
                if paired:
                    masks = [
                        k.where(
                            self.load(seen, at + n * self.B) != 0.0,
                            k.constant(I32, 0xFFFF << 16 * n),
                            k.constant(I32, 0),
                        )
                        for n in range(2)
                    ]
                    shown = v.spread(self.W) & (masks[0] | masks[1])
                    total.value = k.dot_bf16(total.value, shown, P.of(I32).load(at, self.W))
                else:
                    shown = k.where(self.load(seen, at) != 0.0, v, self.zero())
                    total.value = k.fma(shown, self.load(P, at), total.value)
            add(a, c, total.value)
