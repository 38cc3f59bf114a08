"""Tiles with a key in every lane, for a few queries: decoding, where reading K and V is what takes the time.

Rows of K are turned in registers, so that scores of W keys grow in one chain over features; O is summed with features
in lanes. Every number meets the operations of `ManyQueries` in the same order, so the bits are the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from regard.engines.cpu.element import BF16, I8, I32, I64, Type
from regard.engines.cpu.emit import Pointer, Value
from regard.engines.cpu.forward_kernel import Forward, Tile
from regard.engines.cpu.layout import KEYS
from regard.engines.cpu.lowering import Place

SUMS = 8  # vectors of O that grow at once
BOTH = 1  # vectors of scores that do: a chain of sums alone would be waited for


class FewQueries(Forward):
    @property
    def rows(self) -> range:
        return range(self.kind.few)

    def _prepare_queries(self) -> None:
        """The rows of Q, scaled, one behind the other; where products take pairs, as they are."""
        k = self.k
        head, row, feature = (k.integer(f"q_{axis}") for axis in ("head", "row", "feature"))
        q = self.item.q.of(self.key_type)
        for r in self.rows:
            source = self._row(self.address("q", self.kind.element), k.whole(r), head, row)
            with k.loop(self.d) as x:
                scaled = source.bytes(x * feature)[0].to(self.real) * self.query_scale
                q[r * self.key_width + x] = scaled.to(q.type)

    def _begin_span(self) -> None:
        super()._begin_span()
        with self.k.loop(self.kind.few * self.d_v) as n:
            self.tile.O_rows[n] = self.k.constant(self.real, 0.0)

    def _end_span(self) -> None:
        for r in self.rows:
            with self.k.loop(self.d_v) as a:
                self.span.O[a * self.B + r] = self.tile.O_rows[r * self.d_v + a]

    def _work(self, tile: Tile) -> None:
        k = self.k
        self._scores(tile)
        self._rules(tile)
        with k.when(self.careful.value != 0):
            for r in self.rows:
                with self._keys(tile) as p:
                    hidden = self.load(self.P(r), p) == -math.inf
                    self.tile.seen[r * KEYS + p] = k.where(hidden, self.zero(), k.constant(self.real, 1.0))
        self._weights(tile)
        self._add_sums()
        with k.choice(self.careful.value != 0) as (yes, no):
            with yes:
                self._add(tile, careful=True)
            with no:
                self._add(tile, careful=False)

    def P(self, r: int) -> Pointer:
        """Scores, then weights, of a row."""
        row: Pointer = self.tile.P + r * KEYS
        return row

    @contextmanager
    def _keys(self, tile: Tile) -> Iterator[Value]:
        """Over vectors of keys from the start of a tile; the first and the last may hold keys that are not there."""
        with self.k.loop(tile.stop, start=tile.first & -self.W, step=self.W) as p:
            yield p

    def _scores(self, tile: Tile) -> None:
        """S = Q Kᵀ; −∞ for keys that are not there."""
        k, kind, W = self.k, self.kind, self.W
        row = k.integer("k_row")
        type = I32 if kind.pairs else kind.element
        queries = self.item.q.of(I32) if kind.pairs else self.item.q
        count = self.d // 2 if kind.pairs else self.d
        whole = count - count % W
        tops = [k.variable(k.constant(self.real, -math.inf).spread(W)) for _ in self.rows]
        with k.loop(tile.stop, start=tile.first & -W, step=BOTH * W) as p:
            self._prefetch("k", tile.start + KEYS + p, BOTH * W)
            near = [k.minimum(k.maximum(p + n, tile.first), tile.stop - 1) for n in range(BOTH * W)]
            keys = [self._source("k", tile.start).bytes(n * row).of(type) for n in near]
            parts = range(BOTH)
            sums = [[k.variable(self.zero()) for _ in self.rows] for _ in parts]

            def add(x: Value, part: int, turned: Sequence[Value]) -> None:
                for n, features in enumerate(turned):
                    features = features if kind.pairs else features.to(self.real)
                    for r, total in zip(self.rows, sums[part], strict=True):
                        q = queries[count * r + x + n].spread(W)
                        if kind.pairs:
                            total.value = k.dot_pairs(total.value, q, features)
                        else:
                            total.value = k.fma(q, features, total.value)

            with k.loop(whole, step=W) as x:
                for part in parts:
                    add(x, part, k.transpose([key.load(x, W) for key in keys[part * W :][:W]]))
            with k.loop(count, start=whole) as x:
                for part in parts:
                    one = keys[part * W].load(x).spread(W)
                    for n in range(1, W):
                        one = one.with_lane(n, keys[part * W + n][x])
                    add(x, part, [one])
            for part in parts:
                at = p + part * W
                there = self._there(tile, at)
                for r in self.rows:
                    s = k.where(there, sums[part][r].value, k.constant(self.real, -math.inf))
                    self.P(r)[at] = s
                    tops[r].value = k.maximum(s, tops[r].value)
        self._store(self.tile.top, [self._across(top.value, k.maximum) for top in tops])

    def _store(self, into: Pointer, numbers: Sequence[Value]) -> None:
        """One number for each row, as a whole vector: a part of it would be read too soon after."""
        vector = self.zero()
        for r, x in enumerate(numbers):
            vector = vector.with_lane(r, x)
        into[0] = vector

    def _prefetch(self, name: str, column: Value, count: int) -> None:
        """Bring some rows of K or V near, which need not be there."""
        k, width = self.k, (self.d if name == "k" else self.d_v) * self.kind.element.size
        first, row = self._source(name, column), k.integer(f"{name}_row")
        with k.loop(width, step=64) as x:
            for n in range(count):
                first.bytes(x + row * n).prefetch()

    def _there(self, tile: Tile, p: Value) -> Value:
        lanes = self.k.lane_numbers(I64, self.W) + p
        return (lanes >= tile.first) & (lanes < tile.stop)

    def _across(self, x: Value, operation: Callable[[Value, Value], Value]) -> Value:
        """The lanes of a vector put together, from the first to the last."""
        total = x.lane(0)
        for n in range(1, x.lanes):
            total = operation(total, x.lane(n))
        return total

    def _rules(self, tile: Tile) -> None:
        """S ← score(S) + bias, −∞ where the mask hides the pair, and the maximum of that."""
        k, kind, W = self.k, self.kind, self.W
        if not kind.ruled and not kind.mask:
            return
        nothing = k.constant(self.real, -math.inf).spread(W)
        with k.loop(kind.few) as r:
            if kind.bias:
                self._fetch("bias", kind.bias, r, tile)
            for n in range(kind.dense):
                self._fetch(f"dense{n}", I8, r, tile)
            row = {"b": self.word("b"), "keys": k.integer("keys"), "i": self.item.i[r], "h": self.item.h[r]}
            prepared = [None if rule is None else rule.prepare(Place(row)) for rule in (self.score, self.mask)]
            top = k.variable(nothing)
            with self._keys(tile) as p:
                at = r * KEYS + p
                s = self._natural(self.load(self.tile.P, at))
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
                s = k.where(visible, s, nothing)
                self.tile.P[at] = s
                top.value = k.maximum(s, top.value)
            self.tile.top[r] = self._across(top.value, k.maximum)

    def _fetch(self, name: str, type: Type, r: Value, tile: Tile) -> None:
        """The keys of a tile in a row of a dense array."""
        k, into = self.k, getattr(self.tile, name)
        head, row, key = (k.integer(f"{name}_{axis}") for axis in ("head", "row", "key"))
        source = self._row(self.address(name, type), r, head, row).bytes(tile.start * key)
        with k.loop(tile.stop, start=tile.first) as p:
            into[p] = source.bytes(p * key)[0].to(self.real)

    def _weights(self, tile: Tile) -> None:
        """P = exp(S − m) and its sums: those of keys that are W apart lie in lanes."""
        k, kind, W = self.k, self.kind, self.W
        shifts = self._new_maximum(0)[1]
        across: list[list[Value]] = []
        for r in self.rows:
            shift = shifts.lane(r).spread(W)
            sums = [k.variable(self.zero()) for _ in range(2 if kind.entropy else 1)]
            with self._keys(tile) as p:
                weight, difference = self._weight(self.load(self.P(r), p), shift)
                sums[0].value += weight
                if kind.entropy:
                    sums[1].value += self._entropy_term(weight, difference)
                if kind.dropout:
                    j = k.lane_numbers(I64, W) + (tile.start + k.integer("j") + p)
                    weight = self._drop(weight, (self.item.first[r], self.item.second[r]), j)
                if kind.pairs:
                    self.P(r).of(BF16)[p] = k.rounded(weight)
                else:
                    self.P(r)[p] = weight
            across.append([self._across(x.value, lambda x, y: x + y) for x in sums])
        for name, numbers in zip(("sum", "sum_e"), zip(*across, strict=True), strict=False):
            self._store(getattr(self.tile, name), numbers)

    def _add(self, tile: Tile, careful: bool) -> None:
        """O ← rescale · O + P V; with care, what is hidden counts as 0 whatever it is."""
        k, W = self.k, self.W
        start = k.whole(0)
        most = 1 if careful else max(1, SUMS // self.kind.few)
        for vectors in (x for x in (8, 4, 2, 1) if x <= most):
            width = vectors * W
            stop = self.d_v - (self.d_v - start) % width
            with k.loop(stop, start=start, step=width) as a:
                self._add_features(tile, a, [n * W for n in range(vectors)], W, careful)
            start = stop
        with k.loop(self.d_v, start=start) as a:
            self._add_features(tile, a, [0], 0, careful)

    def _add_features(self, tile: Tile, a: Value, vectors: Sequence[int], lanes: int, careful: bool) -> None:
        """Some features of O."""
        k, pairs, O, seen = self.k, self.kind.pairs, self.tile.O_rows, self.tile.seen
        step, wide = 2 if pairs else 1, self.W if pairs else lanes  # there are no pairs but in vectors
        sums = [[k.variable(k.constant(self.real, 0.0).spread(wide)) for _ in vectors] for _ in self.rows]
        add = k.dot_pairs if pairs else lambda total, x, y: k.fma(x, y, total)
        with self._keys(tile) as block:
            self._prefetch("v", tile.start + KEYS + block, self.W)
            start, stop = k.maximum(block, tile.first & -step), k.minimum(block + self.W, tile.stop)
            with k.loop(stop, start=start, step=step) as p:
                value = self._pair_of_rows(tile, p, tile.first, tile.stop) if pairs else self._row_of_values(tile, p)
                for n, offset in enumerate(vectors):
                    v = value((a + offset) * self.kind.element.size, lanes).spread(wide)
                    for r in self.rows:
                        weight = (self.P(r).of(I32) if pairs else self.P(r))[p // step]
                        shown = v
                        if careful:
                            visible = [seen[r * KEYS + p + x] != 0.0 for x in range(step)]
                            if pairs:
                                halves = [
                                    k.where(x, k.constant(I32, 0xFFFF << 16 * h), 0) for h, x in enumerate(visible)
                                ]
                                shown = v & (halves[0] | halves[1])
                            else:
                                shown = k.where(visible[0], v, k.constant(self.real, 0.0))
                        sums[r][n].value = add(sums[r][n].value, shown, weight.spread(wide))
        for r in self.rows:
            for n, offset in enumerate(vectors):
                o, total = O + (r * self.d_v + a + offset), sums[r][n].value
                total = total.lane(0) if wide and not lanes else total
                o[0] = k.fma(o.load(0, lanes), self.tile.rescale[r].spread(lanes), total)

    def _row_of_values(self, tile: Tile, p: Value) -> Callable[[Value, int], Value]:
        row = self._source("v", tile.start + p)
        return lambda offset, lanes: row.bytes(offset).load(0, lanes).to(self.real)
