"""The products of a tile in backward by matrices: blocks of 16 rows against blocks of 16 columns.

They sum to where the gradients lie, step by step, rows of keys a tile does not have included, whose weights are 0.
"""

from collections.abc import Callable

from regard.engines.cpu.kernels.backward_terms import Sums, Terms
from regard.engines.cpu.kernels.lanes import Tile
from regard.engines.cpu.language.amx import add_products
from regard.engines.cpu.language.types import I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.forward import DEPTH, KEYS, SIDE, multiple


class MatrixSums(Sums):
    def _scores_by_matrices(self, tile: Tile) -> None:
        """Sᵀ = K Qᵀ and dPᵀ = V dOᵀ."""
        k, B, totals = self.k, self.B, self._totals()
        height = len(totals) * SIDE
        results, counts, products = zip(*self._terms_of_scores(), strict=True)
        with k.loop(len(results)) as n:
            features = multiple(self._pick(n, counts), DEPTH)
            into, terms = self._pick_pointer(n, results), self._pick_terms(n, products)
            with k.loop(tile.stop, start=tile.first & -height, step=height) as p:
                if self.kind.bias:
                    with k.when(n == 0):
                        self._approach(self.kind.bias, tile, p, height)
                for line in totals:
                    for total in line:
                        total.clear()
                with self._each(terms) as (keys, queries):
                    add_products(
                        self.matrices,
                        totals,
                        (k.whole(0), features // DEPTH),
                        lambda r, x: keys.bytes(((p + r * SIDE) * features + x * DEPTH) * 2),
                        features * 2,
                        lambda c, x: queries + (x * (SIDE * B) + c * SIDE),
                        B * 4,
                    )
                for r, line in enumerate(totals):
                    for c, total in enumerate(line):
                        total.store(into + ((p + r * SIDE) * B + c * SIDE), B * 4)

    def _hide_beyond(self, tile: Tile) -> None:
        """Weights of keys that a tile does not have, in whole steps of products."""
        k, kind, half = self.k, self.kind, self.B // 2
        ends = [(tile.first & -DEPTH, tile.first & -2), (multiple(tile.stop, 2), multiple(tile.stop, DEPTH))]
        rows = [self._short(name).of(I32) for name in kind.weights]
        rows += [self._slopes_of(name).of(I32) for name in kind.slopes]
        for first, stop in ends:
            with k.loop(stop * half, start=first * half, step=self.W) as n:
                for words in rows:
                    words[n] = k.constant(I32, 0).spread(self.W)

    def _add_queries_by_matrices(self, tile: Tile) -> None:
        """dQᵀ += Kᵀ dTᵀ."""
        k, B, dq = self.k, self.B, self.item.dq
        totals, width = self._totals()[0], KEYS * 2
        terms, steps = self._terms_of_queries(), (tile.first // DEPTH, multiple(tile.stop, DEPTH) // DEPTH)
        with k.loop(self.d, step=SIDE) as a:
            homes = [dq + (a * B + c * SIDE) for c in range(len(totals))]
            for total, home in zip(totals, homes, strict=True):
                total.load(home, B * 4)
            with self._each(terms) as (columns, slopes):
                add_products(
                    self.matrices,
                    [totals],
                    steps,
                    lambda _, n: columns.bytes(a * width + n * (2 * DEPTH)),
                    width,
                    lambda c, n: slopes + (n * (SIDE * B) + c * SIDE),
                    B * 4,
                )
            for total, home in zip(totals, homes, strict=True):
                total.store(home, B * 4)

    def _add_features_by_matrices(
        self, tile: Tile, terms: Terms, a: Value, width: Value, base: Pointer, row: Value, count: int
    ) -> None:
        """base[j, a] += Σ_i weights[j, i] rows[i, a] for so many blocks of features; `row` bytes lie between keys."""
        k, B, totals = self.k, self.B, self.matrices[:count]
        with k.loop(tile.stop, start=tile.first & -SIDE, step=SIDE) as p:
            for r in range(SIDE):
                for c in range(count):
                    (base.bytes((p + r) * row) + c * SIDE).prefetch()
            # Rows that are not all there are added to elsewhere.
            first, stop = k.maximum(-tile.start - p, 0), k.minimum(k.integer("n_k") - tile.start - p, SIDE)
            whole, here, edge = stop - first == SIDE, base.bytes(p * row), self.tile.edge
            home, pitch = self._pick_pointer(whole.to(I64), [edge, here]), k.where(whole, row, count * SIDE * 4)

            def move(into: Callable[[Value], Pointer], source: Callable[[Value], Pointer]) -> None:
                with k.when(~whole), k.loop(stop, start=first) as r:
                    for c in range(0, count * SIDE, self.W):
                        into(r)[c] = self.load(source(r), c)

            lines = [lambda r: edge + r * (count * SIDE), lambda r: here.bytes(r * row)]
            move(*lines)
            for c, total in enumerate(totals):
                total.load(home + c * SIDE, pitch)
            with self._each(terms) as (weights, rows):
                add_products(
                    self.matrices,
                    [totals],
                    (k.whole(0), k.whole(B // DEPTH)),
                    lambda _, n: weights.bytes(p * (B * 2) + n * (2 * DEPTH)),
                    B * 2,
                    lambda c, n: rows + (n * SIDE * width + a + c * SIDE),
                    width * 4,
                )
            for c, total in enumerate(totals):
                total.store(home + c * SIDE, pitch)
            move(*lines[::-1])
