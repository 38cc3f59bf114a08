"""Products of a tile in backward by vectors, and the sums of its gradients.

Hidden pairs of query and key have the weight −0, which no other weight is. It counts as 0 in sums. Where a row of Q, K,
V or dO is not finite, so that 0 · NaN would be NaN, it marks the products to leave out.
"""

import operator
from collections.abc import Callable, Sequence

from regard.engines.cpu.kernels.backward_amx import BackwardAmxProducts
from regard.engines.cpu.kernels.backward_terms import ProductTerms
from regard.engines.cpu.kernels.prefetching import prefetch_bias
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.amx import add_products_by_vectors
from regard.engines.cpu.language.types import I16, I32
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.scratch import copied, padded
from regard.engines.cpu.spec.tiles import KEYS


class BackwardProducts(BackwardAmxProducts):
    """Backward's products by vectors."""

    def _multiply(
        self,
        rows: int,
        terms: ProductTerms,
        ends: tuple[Value, Value],
        line: Callable[[Pointer, int], Pointer],
        step: Value | int,
        height: Value | int,
        columns: range | None = None,
        column: Value | int = 0,
    ) -> list[list[Variable]]:
        """Compute the product of a micro-tile.

        sum[r][c] = Σ_x line(f, r)[x · step] · v[x · height + column + c] over all terms f, v.

        ends: the first x and the one after the last.
        """
        sums = self.lanes.sums(rows, columns)
        with self._each(terms) as (factors, vectors):
            lines, vectors = [line(factors, r) for r in range(rows)], vectors + column
            self.lanes.add_product(
                sums,
                *ends,
                lambda r, x: lines[r][x * step],
                lambda x, c: self.lanes.load(vectors, x * height, c),
                columns,
            )
        return sums

    # QK and dO Vᵀ products

    def _scores(self, tile: KeyTile) -> None:
        """Compute Sᵀ = K Qᵀ and dPᵀ = V dOᵀ."""
        if self.spec.amx:
            self._scores_by_amx(tile)
            return
        k, (results, counts, products) = self.k, zip(*self._terms_of_scores(), strict=True)
        with k.loop(len(results)) as n:
            count = self.k.pick(n, counts)
            width, stop = copied(self.spec, count) // self.both, (count + (self.both - 1)) // self.both
            into, terms = self.k.pick_pointer(n, results), self._pick_terms(n, products)

            def micro_tile(
                count: int,
                p: Value,
                n: Value = n,
                width: Value = width,
                stop: Value = stop,
                into: Pointer = into,
                terms: ProductTerms = terms,
            ) -> None:
                if self.spec.bias and count > 1:
                    with k.when(n == 0):
                        prefetch_bias(self.lanes, tile, p, count)
                sums = self._multiply(count, terms, (k.whole(0), stop), lambda f, r: f + (p + r) * width, 1, self.B)
                for r in range(count):
                    for c, x in zip(self.lanes.vectors(), sums[r], strict=True):
                        into[(p + r) * self.B + c] = x.value

            self.lanes.micro_tiles(tile.first, tile.stop, micro_tile)

    # Gradients of Q, K, V and the bias

    def _add_queries(self, tile: KeyTile, exclude_hidden: bool) -> None:
        """Compute dQᵀ += Kᵀ dTᵀ."""
        if self.spec.amx and not exclude_hidden:
            self._add_queries_by_amx(tile)
            return
        k, dq, width, n = self.k, self.block.dq, copied(self.spec, self.d), self.both
        terms, ends = self._terms_of_queries(), (tile.first // n, (tile.stop + (n - 1)) // n)

        def micro_tile(count: int, a: Value) -> None:
            sums = self._multiply(count, terms, ends, lambda f, r: f + a + r, width, self.B)
            for r in range(count):
                for c, x in zip(self.lanes.vectors(), sums[r], strict=True):
                    at = (a + r) * self.B + c
                    dq[at] = self.lanes.load(dq, at) + x.value

        if not exclude_hidden:
            self.lanes.micro_tiles(k.whole(0), self.d, micro_tile)
            return
        with k.loop(self.d) as a, k.loop(self.B, step=self.W) as c:

            def factors(rows: Pointer, dS: Pointer, p: Value, a: Value = a, c: Value = c) -> tuple[Value, Value]:
                x = rows[a * (KEYS // 2) + p if self.spec.amx else p * width + a]
                shown = self._shown(x, [self.weights + (n * p + m) * self.B + c for m in range(n)])
                return shown, self.lanes.load(dS, p * self.B + c)

            self._add_one_by_one(dq + (a * self.B + c), terms, ends, factors)

    def _add_one_by_one(
        self,
        home: Pointer,
        terms: ProductTerms,
        ends: tuple[Value, Value],
        factors: Callable[[Pointer, Pointer, Value], tuple[Value, Value]],
    ) -> None:
        """Add one vector of sums in the order of the tile's product.

        `factors` zero what is hidden.
        """
        k, amx = self.k, self.spec.amx
        total = k.variable(self.lanes.load(home) if amx else self.lanes.zero())
        with self._each(terms) as (f, v):
            if amx:
                add_products_by_vectors(
                    k, total, ends, lambda n: zip(*map(k.unpack_bf16, factors(f, v, n)), strict=True)
                )
            else:
                with k.loop(ends[1], start=ends[0]) as n:
                    total.value = self.lanes.multiply_add(total.value, *factors(f, v, n))
        home[0] = total.value if amx else self.lanes.load(home) + total.value

    @property
    def weights(self) -> Pointer:
        """P · D, key by key."""
        return self._bf16("P")

    def _shown(self, x: Value, weights: Sequence[Pointer], lanes: int | None = None) -> Value:
        """Return x, or 0 where the weight is −0, that of a hidden pair.

        Both halves of packed pairs by themselves.
        """
        k, lanes = self.k, self.W if lanes is None else lanes
        hidden = []
        for weight in weights:
            word = I16 if self.spec.paired else mathematics.integer(self.lanes.zero())
            hidden.append(weight.of(word).load(0, lanes) == -(2 ** (8 * word.size - 1)))
        if not self.spec.paired:
            return k.where(hidden[0], k.constant(self.real, 0.0), x)
        zero = k.constant(I32, 0)
        low, high = (k.where(h, zero, k.constant(I32, 0xFFFF << 16 * m)) for m, h in enumerate(hidden))
        return x & (low | high)

    def _add_keys(self, tile: KeyTile, exclude_hidden: bool) -> None:
        """Compute dV += (P · D)ᵀ dO and dK += dTᵀ Q, with features in lanes."""
        k, vectors = self.k, 4 if self.k.target.registers >= 32 else 2
        with k.loop(2) as which:
            v = which == 0
            terms = self._pick_terms(which, self._terms_of_keys())
            width = padded(self.real.size, k.where(v, self.d_v, self.d))
            row = k.where(v, k.integer("dv_row"), k.integer("dk_row"))
            base = self.k.pick_pointer(which, [self.current.address("dv"), self.current.address("dk")])
            base = base.bytes(tile.start * row)
            whole = width - width % (vectors * self.W)
            ranges = ((0, width, 1),) if exclude_hidden else ((0, whole, vectors), (whole, width, 1))
            by_amx = self.spec.amx and not exclude_hidden
            for start, stop, count in ranges:
                with k.loop(stop, start=start, step=count * self.W) as a:
                    if by_amx:
                        self._add_features_by_amx(tile, terms, a, width, base + a, row, count)
                    else:
                        self._add_features(tile, terms, a, width, base + a, row, count, exclude_hidden)

    def _add_features(
        self,
        tile: KeyTile,
        terms: ProductTerms,
        a: Value,
        width: Value,
        base: Pointer,
        row: Value,
        vectors: int,
        exclude_hidden: bool,
    ) -> None:
        """Compute base[j, a] += Σ_i weights[j, i] rows[i, a] for some vectors of features."""
        k, columns, stop = self.k, range(0, vectors * self.W, self.W), self.B // self.both

        def micro_tile(count: int, p: Value) -> None:
            for r in range(count):
                for c in columns:
                    (base.bytes((p + r) * row) + c).prefetch()
            ends = k.whole(0), k.whole(stop)
            sums = self._multiply(count, terms, ends, lambda f, r: f + (p + r) * stop, 1, width, columns, a)
            for r in range(count):
                into = base.bytes((p + r) * row)
                for c, x in zip(columns, sums[r], strict=True):
                    into[c] = self.lanes.load(into, c) + x.value

        if not exclude_hidden:
            self.lanes.micro_tiles(tile.first, tile.stop, micro_tile, 6 if vectors > 1 else 8)
            return
        with k.loop(tile.stop, start=tile.first) as p:

            def factors(weights: Pointer, rows: Pointer, i: Value, p: Value = p) -> tuple[Value, Value]:
                at = self.weights + p * self.B + i * self.both
                shown = self._shown(self.lanes.load(rows, a, i * width), [at + m for m in range(self.both)], 0)
                return shown, weights[p * stop + i].spread(self.W)

            self._add_one_by_one(base.bytes(p * row), terms, (k.whole(0), k.whole(stop)), factors)

    def _add_bias(self, tile: KeyTile) -> None:
        """Compute dbias += dS, summed over the axes that the bias lacks."""
        k, W, B, dS = self.k, self.W, self.B, self.tile.bias
        base, lanes = self.current.address("dbias"), self.current.field("lanes")
        row, key = k.integer("dbias_row"), k.integer("dbias_key")
        if not self.spec.bias_rows:
            with k.loop(tile.stop, start=tile.first) as p:
                total = k.variable(self.lanes.zero())
                with k.loop(B, step=W) as c:
                    total.value += self.lanes.load(dS, p * B + c)
                into = base.bytes((tile.start + p) * key)
                into[0] = into[0] + self.k.folded(total.value, operator.add)
            return
        if not self.spec.bias_keys:
            with k.loop(B, step=W) as c:
                total = k.variable(self.lanes.zero())
                with k.loop(tile.stop, start=tile.first) as p:
                    total.value += self.lanes.load(dS, p * B + c)
                dS[tile.first * B + c] = total.value
            with k.loop(lanes) as n:
                into = base.bytes(n * row)
                into[0] = into[0] + dS[tile.first * B + n]
            return
        whole = tile.stop - (tile.stop - tile.first) % W
        here = base.bytes(tile.start * key)
        with k.loop(lanes, step=W) as c:
            with k.loop(whole, start=tile.first, step=W) as p:
                transposed = k.transpose([self.lanes.load(dS, (p + x) * B, c) for x in range(W)])
                for r in range(W):
                    with k.when(c + r < lanes):
                        self._store_sums(here.bytes((c + r) * row) + p, transposed[r])
            with k.loop(tile.stop, start=whole) as p, k.loop(k.minimum(lanes, c + W), start=c) as n:
                into, x = here.bytes(n * row) + p, dS[p * B + n]
                into[0] = into[0] + x if self.spec.bias_shared else x

    def _store_sums(self, into: Pointer, x: Value) -> None:
        """Store a vector of dbias; past the caches where all of dbias would not fit."""
        if self.spec.bias_shared:
            into[0] = self.lanes.load(into) + x
            return
        with self.k.choice(self.k.integer("dbias_streams") != 0) as (streams, stays):
            with streams:
                into.stream(x)
            with stays:
                into[0] = x
