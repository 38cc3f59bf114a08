"""Products of a tile in backward by vectors, with hidden pairs or without.

Hidden pairs of query and key have the weight −0, which no other weight is. It counts as 0 in sums. Where a row of Q, K,
V or dO is not finite, so that 0 · NaN would be NaN, it marks the products to leave out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regard.engines.cpu.kernels.backward_terms import Factors, ProductTerms, pick_terms
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.prefetching import prefetch_bias
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.amx import add_products_by_vectors
from regard.engines.cpu.language.types import I16
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.scratch import copied, padded
from regard.engines.cpu.spec.specs import BackwardSpec
from regard.engines.cpu.spec.tiles import KEYS


@dataclass(frozen=True)
class Columns:
    """Some vectors of features of dV or dK."""

    base: Pointer  # the first of them, for the first key of the tile
    row: Value  # bytes from key to key
    a: Value  # the number of the first
    width: Value  # features of a row of queries
    vectors: int


class GradientProducts(ABC):
    """Products that add to dQ, with queries in lanes, and to dV and dK, with features."""

    def __init__(self, lanes: Lanes, spec: BackwardSpec, factors: Factors):
        self.k, self.lanes, self.spec, self.factors = lanes.k, lanes, spec, factors
        self.W, self.B = lanes.W, lanes.B

    def add(self, tile: KeyTile) -> None:
        """Add a tile's products to the gradients."""
        if self.spec.gradients != "key":
            self.add_queries(tile)
        if self.spec.gradients != "query":
            self.add_keys(tile)

    def add_keys(self, tile: KeyTile) -> None:
        """Add to dV and dK."""
        k, lanes, block = self.k, self.lanes, tile.block
        with k.loop(2) as which:
            v = which == 0
            terms = pick_terms(which, self.factors.keys(tile))
            width = padded(lanes.real.size, k.where(v, lanes.d_v, lanes.d))
            row = k.where(v, k.integer("dv_row"), k.integer("dk_row"))
            base = k.pick_pointer(which, [block.address("dv"), block.address("dk")]).bytes(tile.start * row)
            whole = width - width % (self.vectors * self.W)
            for start, stop, vectors in ((0, whole, self.vectors), (whole, width, 1))[: self.vectors]:
                with k.loop(stop, start=start, step=vectors * self.W) as a:
                    self.add_features(tile, terms, Columns(base + a, row, a, width, vectors))

    @property
    def vectors(self) -> int:
        """Vectors of features that are summed together."""
        return 4 if self.k.target.registers >= 32 else 2

    @abstractmethod
    def add_queries(self, tile: KeyTile) -> None:
        """Compute dQᵀ += Kᵀ dTᵀ."""

    @abstractmethod
    def add_features(self, tile: KeyTile, terms: ProductTerms, columns: Columns) -> None:
        """Compute base[j, a] += Σ_i weights[j, i] rows[i, a] for some features."""


class VectorProducts(GradientProducts):
    """Products by vectors."""

    def scores(self, tile: KeyTile) -> None:
        """Compute Sᵀ = K Qᵀ and dPᵀ = V dOᵀ."""
        k, both, (results, counts, products) = self.k, self.factors.both, zip(*self.factors.scores(tile), strict=True)
        with k.loop(len(results)) as n:
            count = k.pick(n, counts)
            width, stop = copied(self.spec, count) // both, (count + (both - 1)) // both
            into, terms = k.pick_pointer(n, results), pick_terms(n, products)

            def micro_tile(rows: int, p: Value) -> None:
                if self.spec.bias and rows > 1:
                    with k.when(n == 0):
                        prefetch_bias(self.lanes, tile, p, rows)
                sums = self._multiply(rows, terms, (k.whole(0), stop), lambda f, r: f + (p + r) * width, 1, self.B)
                for r in range(rows):
                    for c, x in zip(self.lanes.vectors(), sums[r], strict=True):
                        into[(p + r) * self.B + c] = x.value

            self.lanes.micro_tiles(tile.first, tile.stop, micro_tile)

    def add_queries(self, tile: KeyTile) -> None:
        lanes, dq, width, n = self.lanes, tile.block.state.dq, copied(self.spec, self.lanes.d), self.factors.both
        terms, ends = self.factors.queries(tile), (tile.first // n, (tile.stop + (n - 1)) // n)

        def micro_tile(count: int, a: Value) -> None:
            sums = self._multiply(count, terms, ends, lambda f, r: f + a + r, width, self.B)
            for r in range(count):
                for c, x in zip(lanes.vectors(), sums[r], strict=True):
                    at = (a + r) * self.B + c
                    dq[at] = lanes.load(dq, at) + x.value

        lanes.micro_tiles(self.k.whole(0), lanes.d, micro_tile)

    def add_features(self, tile: KeyTile, terms: ProductTerms, columns: Columns) -> None:
        k, base, row, stop = self.k, columns.base, columns.row, self.B // self.factors.both
        features = range(0, columns.vectors * self.W, self.W)

        def micro_tile(count: int, p: Value) -> None:
            for r in range(count):
                for c in features:
                    (base.bytes((p + r) * row) + c).prefetch()
            ends = k.whole(0), k.whole(stop)
            line = lambda f, r: f + (p + r) * stop  # noqa: E731
            sums = self._multiply(count, terms, ends, line, 1, columns.width, features, columns.a)
            for r in range(count):
                into = base.bytes((p + r) * row)
                for c, x in zip(features, sums[r], strict=True):
                    into[c] = self.lanes.load(into, c) + x.value

        self.lanes.micro_tiles(tile.first, tile.stop, micro_tile, 6 if columns.vectors > 1 else 8)

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
        lanes, sums = self.lanes, self.lanes.sums(rows, columns)
        with terms.each() as (factors, vectors):
            lines, vectors = [line(factors, r) for r in range(rows)], vectors + column
            lanes.add_product(
                sums, *ends, lambda r, x: lines[r][x * step], lambda x, c: lanes.load(vectors, x * height, c), columns
            )
        return sums


class VisibleProducts(GradientProducts):
    """Products without hidden pairs, in the order of the sums of the others."""

    @property
    def vectors(self) -> int:
        return 1

    def add_queries(self, tile: KeyTile) -> None:
        k, lanes, both, width = self.k, self.lanes, self.factors.both, copied(self.spec, self.lanes.d)
        dq, weights = tile.block.state.dq, self.factors.weights(tile.scratch, "P")
        terms, ends = self.factors.queries(tile), (tile.first // both, (tile.stop + (both - 1)) // both)
        with k.loop(lanes.d) as a, k.loop(self.B, step=self.W) as c:

            def factors(rows: Pointer, dS: Pointer, p: Value) -> tuple[Value, Value]:
                x = rows[a * (KEYS // 2) + p if self.spec.amx else p * width + a]
                shown = self._shown(x, [weights + (both * p + m) * self.B + c for m in range(both)], self.W)
                return shown, lanes.load(dS, p * self.B + c)

            self._add(dq + (a * self.B + c), terms, ends, factors)

    def add_features(self, tile: KeyTile, terms: ProductTerms, columns: Columns) -> None:
        k, both, weights = self.k, self.factors.both, self.factors.weights(tile.scratch, "P")
        stop = self.B // both
        with k.loop(tile.stop, start=tile.first) as p:

            def factors(gradients: Pointer, rows: Pointer, i: Value) -> tuple[Value, Value]:
                at = weights + p * self.B + i * both
                x = self.lanes.load(rows, columns.a, i * columns.width)
                shown = self._shown(x, [at + m for m in range(both)], 0)
                return shown, gradients[p * stop + i].spread(self.W)

            self._add(columns.base.bytes(p * columns.row), terms, (k.whole(0), k.whole(stop)), factors)

    def _add(
        self,
        home: Pointer,
        terms: ProductTerms,
        ends: tuple[Value, Value],
        factors: Callable[[Pointer, Pointer, Value], tuple[Value, Value]],
    ) -> None:
        """Add one vector of sums. `factors` zero what is hidden."""
        k, lanes, amx = self.k, self.lanes, self.spec.amx
        total = k.variable(lanes.load(home) if amx else lanes.zero())
        with terms.each() as (f, v):
            if amx:
                add_products_by_vectors(
                    k, total, ends, lambda n: zip(*map(k.unpack_bf16, factors(f, v, n)), strict=True)
                )
            else:
                with k.loop(ends[1], start=ends[0]) as n:
                    total.value = lanes.multiply_add(total.value, *factors(f, v, n))
        home[0] = total.value if amx else lanes.load(home) + total.value

    def _shown(self, x: Value, weights: Sequence[Pointer], lanes: int) -> Value:
        """Return x, or 0 where the weight is −0, that of a hidden pair.

        The halves of packed pairs are judged separately.
        """
        k, paired = self.k, self.spec.paired
        word = I16 if paired else mathematics.integer_of(self.lanes.real)
        seen = [weight.of(word).load(0, lanes) != -(2 ** (8 * word.size - 1)) for weight in weights]
        return k.mask_bf16(x, seen) if paired else k.where(seen[0], x, k.constant(self.lanes.real, 0.0))
