"""Tiles with a query in every lane: Sᵀ = K Qᵀ and Oᵀ += Vᵀ Pᵀ.

What is vertical (maximum, sum, mask, rule, dropout) costs one vector operation for each key; K and V are read through
broadcasts where they lie, or from a copy of the tile.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from regard.engines.cpu.kernels.lanes import Tile
from regard.engines.cpu.kernels.pipelining import Weaving
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import Place
from regard.engines.cpu.language.types import I8, I16, I32, I64, Type
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.forward import Kind

BOTH = -1  # halves of the lanes


class ManyQueries(Weaving):
    def __init__(self, k: Kernel, kind: Kind):
        super().__init__(k, kind)
        # Whether products leave out what a mask hides from half of the lanes. A half of one vector is too narrow: its
        # chains of sums are waited for.
        self.halved = bool(kind.mask) and kind.keys == ("k",) and not kind.matrices and len(self.vectors()) % 4 == 0
        # Whether a bias is all that changes scores, and they are all that is made of pairs before weights.
        self.biased = bool(kind.bias) and kind.score is None and kind.weights == ("P",)
        self.near = SimpleNamespace()  # biases of the keys that rules are applied to, see `_parts`

    def _prepare_queries(self) -> None:
        """Qᵀ, scaled; where products take pairs, each word holds two features."""
        k, kind = self.k, self.kind
        for name in kind.queries:
            strides, q = [k.integer(f"{name}_{axis}") for axis in ("head", "row", "feature")], getattr(self.item, name)
            if kind.pairs:
                self._turn_pairs(self.address(name, I16), strides, q.of(I32))
            else:
                self._turn(self.address(name, kind.element), strides, self.d, q, self.query_scale)

    def _turn_output(self) -> None:
        strides = self.k.integer("out_head"), self.k.integer("out_row")
        self._turn_back(self.item.O, self.d_v, self.address("out", self.kind.element), *strides)

    def _work(self, first: Value) -> Value:
        return self._tiles_woven(first) if self.kind.woven else self._tiles(first, self._work_on)

    def _work_on(self, tile: Tile) -> None:
        self._copies(tile)
        self._scores(tile)
        self._rules(tile)
        self._before_weights(tile)
        self._weights(tile)
        self._add_sums()
        self._add_values(tile)

    def _before_weights(self, tile: Tile) -> None:
        """What scores must tell before they become weights."""
        k = self.k
        if self.kind.best:
            with k.when(self.careful.value == 0):
                self._choose(tile)
        with k.when(self.careful.value != 0):
            self._remember_visible(tile)
        # Keys are taken two by two, so one that is missing must be there and weigh nothing.
        nothing = k.constant(self.real, -math.inf).spread(self.W)
        for c in self.vectors():
            with k.when(tile.first % 2 != 0):
                self.tile.P[(tile.first - 1) * self.B + c] = nothing
            with k.when(tile.stop % 2 != 0):
                self.tile.P[tile.stop * self.B + c] = nothing
        self._move_maximum(tile)

    def _add_values(self, tile: Tile, weigh: Callable[[], None] | None = None, until: Value | int = 0) -> None:
        with self.k.choice(self.careful.value != 0) as (yes, no):
            with yes:
                self._add(tile, self._add_visible, self._add_visible_by_matrices)
            with no:
                self._add(tile, partial(self._add_all, weigh=weigh, until=until), self._add_by_matrices)

    # Products

    def _products_of_keys(self) -> list[tuple[str, Pointer, Pointer]]:
        """What is multiplied: rows of keys, turned queries, and where the products go."""
        return [("k", self.item.q, self.tile.P)]

    def _scores(self, tile: Tile, weigh: Callable[[], None] | None = None, until: Value | int = 0) -> None:
        """Sᵀ = K Qᵀ, and the maximum over the keys that no mask and no rule touches.

        weigh: makes the weights of two keys more, beside the products, as long as some before `until` are due.
        """
        if self.kind.matrices:
            self._scores_by_matrices(tile)
            return
        k, kind, number = self.k, self.kind, I32 if self.kind.pairs else self.real
        names, turned, results = zip(*self._products_of_keys(), strict=True)
        stop = (self.d + 1) // 2 if kind.pairs else self.d
        tops = [k.variable(k.constant(self.real, -math.inf).spread(self.W)) for _ in self.vectors()]
        plain = k.variable(k.constant(I64, 1))
        halved = self.halved and not kind.ruled  # rules are given every score
        alone = k.variable(k.whole(BOTH))  # the half of the lanes that scores are made for
        with k.loop(len(names)) as n:
            keys, widths = zip(*(self._keys(tile, name) for name in names), strict=True)
            rows, width = self._pick_pointer(n, keys).of(number), self._pick(n, widths)
            queries, into = self._pick_pointer(n, turned).of(number), self._pick_pointer(n, results)

            def block(count: int, p: Value) -> None:
                if count > 1:
                    with k.when(n == 0):
                        self._come_near(tile, p, count)
                lines = [rows.bytes((p + r) * width) for r in range(count)]

                def products(columns: range, half: Value | int = 0) -> list[list[Variable]]:
                    """Of the vectors of lanes at some columns, counted from where a half begins."""
                    sums, start = self._sums(count, columns), k.whole(0)

                    def factor(r: int, x: Value) -> Value:
                        return lines[r][x]

                    def vector(x: Value, c: Value) -> Value:
                        return (queries + half + x * self.B + c).load(0, self.W)

                    if weigh and count > 1 and columns == self.vectors():
                        share = k.minimum(self._pairs_due(until), k.whole(count // 2))
                        start = self._beside(
                            weigh, share, start, stop, lambda x, n: self._add_steps(sums, x, n, factor, vector, columns)
                        )
                    self._add_product(sums, start, stop, factor, vector, columns)
                    for r in range(count):
                        for c, s in zip(columns, sums[r], strict=True):
                            self._put_product(into, (p + r) * self.B + half + c, s.value, n, results)
                    return sums

                def of_all() -> None:
                    sums = products(self.vectors())
                    if not kind.ruled:
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

            if kind.mask and not kind.ruled:
                ends, whose = self._sections(tile)
                middle = len(whose) // 2
                with k.loop(len(whose)) as part:
                    start, end = (self._pick(part, ends[m : m + len(whose)]) for m in range(2))
                    alone.value = self._pick(part, whose)
                    plain.value = (((part == middle - 1) | (part == middle + 1)) & (n == 0)).to(I64)
                    self._blocks(start, end, block)
            else:
                plain.value = (n == 0).to(I64)
                self._blocks(tile.first, tile.stop, block)
        for c, top in zip(self.vectors(), tops, strict=True):
            self.tile.top[c] = top.value

    def _sections(self, tile: Tile) -> tuple[list[Value], list[Value]]:
        """Where keys begin, and the last of them end, that differ in who may see them, and the half that may, or BOTH.

        Those in the middle are mixed; those beside them everyone sees, those before and after one half alone.
        """
        k = self.k
        ends, whose = [*tile.mixed], [k.whole(BOTH)] * 3
        if self.halved:
            first, last, early, late = tile.halves
            ends = [first, *(k.minimum(k.maximum(x, first), last) for x in ends), last]
            whose = [early, *whose, late]
        return [tile.first, *ends, tile.stop], whose

    def _come_near(self, tile: Tile, p: Value, count: int) -> None:
        """What is needed soon, a share of it for every block of keys.

        The bias; in an item's first tiles the queries of the next, in its last ones the place of its outputs and, under
        a mask, the first keys that the next one sees; while nobody has seen the next tile, that.
        """
        k, kind = self.k, self.kind
        if kind.bias:
            self._approach(kind.bias, tile, p, count)
        done, tiles = self.place - self.word("tiles"), self.word("count")
        some = k.minimum(tiles, k.whole(2))
        last = done - (tiles - some)
        blocks = k.maximum((tile.stop - tile.first) // count, k.whole(1))

        def share(n: Value, rows: Value | int) -> Any:
            """Over this block's share in rows that are brought near by some tiles, of which this is the n-th."""
            part, whole = n * blocks + (p - tile.first) // count, some * blocks
            return k.loop((part + 1) * rows // whole, start=part * rows // whole)

        def row_of(name: str, base: Pointer, lane: Value, features: Value) -> None:
            row = self._row(base, lane, k.integer(f"{name}_head"), k.integer(f"{name}_row"))
            self._bring(row, features * kind.element.size)

        def key(words: Pointer, row: Value) -> None:
            for names, features in ((kind.keys, self.d), (kind.values, self.d_v)):
                for name in names:
                    self._bring(self._source(name, row, words), features * kind.element.size)

        with k.when(done < some), share(done, self.word("lanes")) as lane:
            for name in kind.queries:
                row_of(name, self.address(name, kind.element, self.following), lane, self.d)
        with k.when(last >= 0):
            with share(last, self.word("lanes")) as lane:
                for name in self._written():
                    row_of(name, self.address(name, kind.element), lane, self.d_v)
            if kind.mask:
                with k.when(self.word("count", self.following) != 0):
                    begin = self._tile(k.pointer("tiles", I64)[self.word("tiles", self.following)])
                    with share(last, self.B) as row:
                        key(self.following, begin.start + begin.first + row)
        with k.when(self.leading & (done + 1 < tiles)):
            first = self._tile(k.pointer("tiles", I64)[self.place + 1]).start + p
            with k.loop(first + count, start=first) as row:
                key(self.words, row)

    def _written(self) -> tuple[str, ...]:
        """The arrays that rows of outputs go to."""
        return ("out",)

    def _keys(self, tile: Tile, name: str) -> tuple[Pointer, Value]:
        """The first row of K of a tile, and the bytes from row to row."""
        if self.kind.copied:
            return self.k_copy(self._slot(tile), name), self.key_width * self.key_type.size
        return self._source(name, tile.start), self.k.integer(f"{name}_row")

    def _put_product(self, into: Pointer, at: Value, x: Value, n: Value, results: Sequence[Pointer]) -> None:
        """Write the n-th product, or add it if one before went to the same place."""
        for m, result in enumerate(results):
            if any(result is before for before in results[:m]):
                x = self.k.where(n == m, self.load(into, at) + x, x)
        into[at] = x

    # Rules

    def _rules(self, tile: Tile) -> None:
        """S ← score(S) + bias, −∞ where the mask hides the pair; the maximum of what that changes."""
        k, kind = self.k, self.kind
        for n in range(kind.dense):
            self._fetch(f"dense{n}", I8, getattr(self.tile, f"dense{n}"), tile, *tile.mixed)
        if kind.mask:
            self._rules_in(tile, *tile.mixed, True)
        work = self._add_bias if self.biased else partial(self._rules_in, masked=False)
        if kind.ruled and kind.mask:
            with k.loop(2) as part:
                before = part == 0
                start = k.where(before, tile.first, tile.mixed[1])
                work(tile, start, k.where(before, tile.mixed[0], tile.stop))
        elif kind.ruled:
            work(tile, tile.first, tile.stop)

    def _add_bias(self, tile: Tile, start: Value, stop: Value) -> None:
        """As `_rules_in` where a bias is all that changes scores: of as many keys as a vector has lanes it is turned in
        registers."""
        k, W, [(name, type)] = self.k, self.W, self._biases
        base, strides = self._dense_at(name, type, tile.start)
        with k.loop(self.B, step=W) as c:
            rows = self._lane_rows(base, strides, c)
            tops = [k.variable(self.load(self.tile.top, c)) for _ in range(2)]  # one would be waited for

            def add(p: Value, bias: Value, top: Variable) -> None:
                at = p * self.B + c
                s = self._natural(self.load(self.tile.P, at)) + bias
                self.tile.P[at] = s
                top.value = k.maximum(s, top.value)

            with (
                k.loop(stop, start=start, step=W) as first,
                k.choice((strides[2] == type.size) & (first + W <= stop)) as (whole, single),
            ):
                with whole:
                    for n, bias in enumerate(self._turned_block(rows, first, 1.0)):
                        add(first + n, bias, tops[n % 2])
                with single:
                    last = k.minimum(first + W, stop)
                    self._turn_singly(base, strides, c, first, last, self.tile.bias, 1.0)
                    with k.loop(last, start=first) as p:
                        add(p, self.load(self.tile.bias, p * self.B + c), tops[0])
            self.tile.top[c] = k.maximum(*(top.value for top in tops))

    def _rules_in(self, tile: Tile, start: Value, stop: Value, masked: bool) -> None:
        k = self.k
        with k.loop(self.B, step=self.W) as c:
            row = {"b": self.word("b"), "keys": k.integer("keys")}
            row |= {"i": self.item.i.load(c, self.W), "h": self.item.h.load(c, self.W)}
            prepared = [None if rule is None else rule.prepare(Place(row)) for rule in (self.score, self.mask)]
            top = k.variable(self.load(self.tile.top, c))
            with self._parts(tile, start, stop, c) as ends, k.loop(ends[1], start=ends[0]) as p:
                at = p * self.B + c
                s = self._natural(k.frozen(self.load(self.tile.P, at)))
                place = Place(
                    row | {"j": tile.start + k.integer("j") + p, "s": s},
                    lambda n, at=at: self.load(self._dense(n), at) != 0.0,  # type: ignore[misc]
                )
                s = self._ruled(s, place, prepared[0], at)
                if masked and self.mask is not None:
                    visible = self.mask.at(place, prepared[1])[0].spread(self.W)
                    s = k.where(visible, s, k.constant(self.real, -math.inf))
                self.tile.P[at] = s
                top.value = k.maximum(s, top.value)
            self.tile.top[c] = top.value

    @property
    def _biases(self) -> list[tuple[str, Type]]:
        """The arrays that are added to scores, and their types."""
        return [("bias", self.kind.bias)] if self.kind.bias else []

    @contextmanager
    def _parts(self, tile: Tile, start: Value, stop: Value, c: Value) -> Iterator[tuple[Value, Value]]:
        """Over the ends of parts of some keys: of vectors of them where there are biases, which then are in `near`, a
        row of lanes for each key, for the lanes of the vector at c; else of them all."""
        if not self._biases:
            yield start, stop
            return
        k, W, B = self.k, self.W, self.B
        sources = []
        for name, type in self._biases:
            base, strides = self._dense_at(name, type, tile.start)
            sources.append((name, base, strides, self._lane_rows(base, strides, c)))
        with k.loop(stop, start=start, step=W) as first:
            for name, base, strides, rows in sources:
                turned = getattr(self.tile, name) + first * -B
                with k.choice((strides[2] == base.type.size) & (first + W <= stop)) as (whole, single):
                    with whole:
                        self._turn_block(rows, first, getattr(self.tile, name) + c, 1.0)
                    with single:
                        self._turn_singly(base, strides, c, first, k.minimum(first + W, stop), turned, 1.0)
                setattr(self.near, name, turned)
            yield first, k.minimum(first + W, stop)

    def _ruled(self, s: Value, place: Place, prepared: list[Value | None] | None, at: Value) -> Value:
        """What the rule and the bias make of a score."""
        if self.score is not None:
            s = self.score.at(place, prepared)[0].spread(self.W)
        return s + self.load(self.near.bias, at) if self.kind.bias else s

    # The largest weights

    def _choose(self, tile: Tile) -> None:
        """The best keys of a tile into the lists: of those, seldom many, that beat the last of the list in any lane."""
        k, P, best = self.k, self.tile.P, self.best
        candidates = self.tile.candidates.of(I64)
        with k.loop(self.B, step=self.W) as c:
            least = self.load(best.values, (self.kind.best - 1) * self.B, c)
            count = k.variable(k.constant(I64, 0))
            with k.loop(tile.stop, start=tile.first) as p:
                candidates[count.value] = p
                count.value = count.value + (self.load(P, p * self.B, c) > least).any().to(I64)
            with k.when(count.value != 0), self._insertion(best, c) as insert, k.loop(count.value) as n:
                p = candidates[n]
                column = (tile.start + p).to(best.indices.type).spread(self.W)
                insert(self.load(P, p * self.B, c), column)

    # Weights and output

    def _subtract(self, tile: Tile) -> None:
        with self.k.loop(tile.stop, start=tile.first) as p:
            for c in self.vectors():
                at = p * self.B + c
                self.tile.P[at] = self.load(self.tile.P, at) - self.load(self.tile.before, c)

    def _remember_visible(self, tile: Tile) -> None:
        k = self.k
        with k.loop(tile.stop * self.B, start=tile.first * self.B, step=self.W) as n:
            hidden = self.load(self.tile.P, n) == -math.inf
            self.tile.seen[n] = k.where(hidden, self.zero(), k.constant(self.real, 1.0))

    def _weights(self, tile: Tile) -> None:
        """P = exp(S − m) and its sums: of keys that are W apart first, then over those."""
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
                    for n, terms in enumerate(self._weigh(tile, p, c, shifts[number])):
                        for part, term in zip(parts, terms, strict=True):
                            part[n][number].value += term
            for total, part in zip(totals, parts, strict=True):
                for n in range(2):
                    for x, y in zip(total, part[n], strict=True):
                        x.value += y.value
        for name, total in zip(names, totals, strict=True):
            for c, x in zip(self.vectors(), total, strict=True):
                getattr(self.tile, name)[c] = x.value

    def _weigh(self, tile: Tile, p: Value, c: Value | int, shift: Value) -> list[list[Value]]:
        """P = exp(S − m) of the keys p and p + 1 in the lanes from c on, and of each what is summed."""
        k, kind = self.k, self.kind
        summed, pair = [], []
        for n in range(2):
            at = (p + n) * self.B + c
            weights, difference = self._weights_at(at, shift)
            terms = []
            for w in weights:
                terms += [w, self._entropy_term(w, difference)] if kind.entropy else [w]
            summed.append(terms)
            if kind.dropout:
                keys = self.item.first.load(c, self.W), self.item.second.load(c, self.W)
                j = tile.start + k.integer("j") + p + n
                weights = [self._drop(w, keys, j) for w in weights]
            pair.append(weights)
            if not kind.pairs:
                for name, w in zip(kind.weights, weights, strict=True):
                    getattr(self.tile, name)[at] = w
        if kind.pairs:
            for name, low, high in zip(kind.weights, *pair, strict=True):
                getattr(self.tile, name).of(I32)[p * self.B + c] = k.pair(low, high)
        return summed

    def _weights_at(self, at: Value, shift: Value) -> tuple[list[Value], Value]:
        """Of some pairs: what values are multiplied with, by `kind.weights`, and S − m."""
        weight, difference = self._weight(self.load(self.tile.P, at), shift)
        return [weight], difference

    def _products_of_values(self) -> list[tuple[str, Pointer, Pointer]]:
        """What is multiplied: rows of values, weights, and the output that the products are added to."""
        return [("v", self.tile.P, self.span.O)]

    def _values(self, tile: Tile, name: str) -> tuple[Pointer, Value]:
        """The first row of V of a tile, and the bytes from row to row; of pairs of rows where products take pairs."""
        if self.kind.copies:
            return self.v_copy(self._slot(tile), name), self.d_v * (4 if self.kind.pairs else self.real.size)
        return self._source(name, tile.start), self.k.integer(f"{name}_row")

    def _add(self, tile: Tile, work: Callable[..., None], by_matrices: Callable[..., None]) -> None:
        """Oᵀ ← rescale · Oᵀ + Vᵀ Pᵀ, by one of two products."""
        products = self._products_of_values()
        if not products:
            return
        k, (names, weights, outputs) = self.k, zip(*products, strict=True)
        with k.loop(len(products)) as n:
            values, widths = zip(*(self._values(tile, name) for name in names), strict=True)
            O = self._pick_pointer(n, outputs)
            again = [m for m, x in enumerate(outputs) if any(x is before for before in outputs[:m])]

            def add(a: Value, c: Value | int, total: Value) -> None:
                at, factor = a * self.B + c, self.load(self.tile.rescale, c)
                for m in again:
                    factor = k.where(n == m, k.constant(self.real, 1.0), factor)
                O[at] = k.fma(self.load(O, at), factor, total)

            place = self._pick_pointer(n, values), self._pick(n, widths), self._pick_pointer(n, weights)
            if self.kind.matrices:
                by_matrices(tile, place[0], place[2], add)
            else:
                work(tile, *place, add)

    def _add_all(
        self,
        tile: Tile,
        values: Pointer,
        row: Value,
        P: Pointer,
        add: Callable[..., None],
        weigh: Callable[[], None] | None,
        until: Value | int,
    ) -> None:
        k, start, stop, step = self.k, tile.first, tile.stop, self.B
        if self.kind.pairs:
            start, stop, step, P = start // 2, (stop + 1) // 2, 2 * self.B, P.of(I32)

        first, last = start, stop
        if self.halved:
            first, last = (x // 2 if self.kind.pairs else x for x in tile.halves[:2])
            last = k.where(tile.halves.stop == tile.stop, stop, last)

        def block(rows: int, a: Value) -> None:
            here, sums = values + a, self._sums(rows)

            def factor(r: int, p: Value) -> Value:
                return (here + r).bytes(p * row)[0]

            def vector(p: Value, c: Value) -> Value:
                return (P + p * step + c).load(0, self.W)

            def of_one(start: Value, stop: Value, half: Value) -> None:
                """Keys that weigh nothing for the other half of the lanes."""
                columns = self.vectors()
                middle = len(columns) // 2
                for n, some in enumerate((slice(0, middle), slice(middle, None))):
                    with k.loop(k.where(half == n, stop, start), start=start, step=2) as p:
                        self._add_steps([x[some] for x in sums], p, 2, factor, vector, columns[some])

            def of_both(start: Value, stop: Value) -> None:
                if weigh and rows > 1 and self.kind.pairs:  # without pairs, more would be needed than registers hold
                    columns, due = self.vectors(), self._pairs_due(until)
                    start = self._beside(
                        weigh, due, start, stop, lambda p, n: self._add_steps(sums, p, n, factor, vector, columns)
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

        self._blocks(k.whole(0), self.d_v, block)

    def _add_visible(self, tile: Tile, values: Pointer, row: Value, P: Pointer, add: Callable[..., None]) -> None:
        """As `_add_all`, in the same order, but what is hidden counts as 0 whatever it is."""
        k, seen = self.k, self.tile.seen
        pairs = self.kind.pairs
        step = 2 if pairs else 1
        with k.loop(self.d_v) as a, k.loop(self.B, step=self.W) as c:
            total = k.variable(self.zero())
            with k.loop(tile.stop, start=tile.first - tile.first % step, step=step) as p:
                at = p * self.B + c
                v = (values + a).bytes(p // step * row)[0]
                if pairs:
                    masks = [
                        k.where(
                            self.load(seen, at + n * self.B) != 0.0,
                            k.constant(I32, 0xFFFF << 16 * n),
                            k.constant(I32, 0),
                        )
                        for n in range(2)
                    ]
                    shown = v.spread(self.W) & (masks[0] | masks[1])
                    total.value = k.dot_pairs(total.value, shown, P.of(I32).load(at, self.W))
                else:
                    shown = k.where(self.load(seen, at) != 0.0, v, self.zero())
                    total.value = k.fma(shown, self.load(P, at), total.value)
            add(a, c, total.value)
