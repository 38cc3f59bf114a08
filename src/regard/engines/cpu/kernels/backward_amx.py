"""Products of backward by AMX: blocks of 16 rows times blocks of 16 columns.

Sums go straight to the gradients, step by step. Absent keys of a tile take part with the weight 0.
"""

from collections.abc import Callable

from regard.engines.cpu.kernels.backward_terms import BackwardTerms, ProductTerms
from regard.engines.cpu.kernels.prefetching import prefetch_bias
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.amx import add_products
from regard.engines.cpu.language.types import I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE, KEYS, multiple


class BackwardAmxProducts(BackwardTerms):
    """Backward's products by AMX tiles."""

    def _scores_by_amx(self, tile: KeyTile) -> None:
        """Compute Sᵀ = K Qᵀ and dPᵀ = V dOᵀ."""
        k, B, totals = self.k, self.B, self.registers.totals(self.B)
        height = len(totals) * AMX_SIDE
        results, counts, products = zip(*self._terms_of_scores(), strict=True)
        with k.loop(len(results)) as n:
            features = multiple(self.k.pick(n, counts), AMX_DEPTH)
            into, terms = self.k.pick_pointer(n, results), self._pick_terms(n, products)
            with k.loop(tile.stop, start=tile.first & -height, step=height) as p:
                if self.spec.bias:
                    with k.when(n == 0):
                        prefetch_bias(self.lanes, tile, p, height)
                for line in totals:
                    for total in line:
                        total.clear()
                with self._each(terms) as (keys, queries):
                    add_products(
                        self.registers.tiles,
                        totals,
                        (k.whole(0), features // AMX_DEPTH),
                        lambda r, x: keys.bytes(((p + r * AMX_SIDE) * features + x * AMX_DEPTH) * 2),
                        features * 2,
                        lambda c, x: queries + (x * (AMX_SIDE * B) + c * AMX_SIDE),
                        B * 4,
                    )
                for r, line in enumerate(totals):
                    for c, total in enumerate(line):
                        total.store(into + ((p + r * AMX_SIDE) * B + c * AMX_SIDE), B * 4)

    def _hide_beyond(self, tile: KeyTile) -> None:
        """Set the weights of a tile's absent keys to 0, in whole AMX steps."""
        k, spec, half = self.k, self.spec, self.B // 2
        ends = [(tile.first & -AMX_DEPTH, tile.first & -2), (multiple(tile.stop, 2), multiple(tile.stop, AMX_DEPTH))]
        rows = [self._bf16(name).of(I32) for name in spec.weights]
        rows += [self._gradient_tile(name).of(I32) for name in spec.score_gradients]
        for first, stop in ends:
            with k.loop(stop * half, start=first * half, step=self.W) as n:
                for packed in rows:
                    packed[n] = k.constant(I32, 0).spread(self.W)

    def _add_queries_by_amx(self, tile: KeyTile) -> None:
        """Compute dQᵀ += Kᵀ dTᵀ."""
        k, B, dq = self.k, self.B, self.block.dq
        totals, width = self.registers.totals(self.B)[0], KEYS * 2
        terms, steps = self._terms_of_queries(), (tile.first // AMX_DEPTH, multiple(tile.stop, AMX_DEPTH) // AMX_DEPTH)
        with k.loop(self.d, step=AMX_SIDE) as a:
            homes = [dq + (a * B + c * AMX_SIDE) for c in range(len(totals))]
            for total, home in zip(totals, homes, strict=True):
                total.load(home, B * 4)
            with self._each(terms) as (columns, gradients):
                add_products(
                    self.registers.tiles,
                    [totals],
                    steps,
                    lambda _, n: columns.bytes(a * width + n * (2 * AMX_DEPTH)),
                    width,
                    lambda c, n: gradients + (n * (AMX_SIDE * B) + c * AMX_SIDE),
                    B * 4,
                )
            for total, home in zip(totals, homes, strict=True):
                total.store(home, B * 4)

    def _add_features_by_amx(
        self, tile: KeyTile, terms: ProductTerms, a: Value, width: Value, base: Pointer, row: Value, count: int
    ) -> None:
        """Compute base[j, a] += Σ_i weights[j, i] rows[i, a].

        count: blocks of features.

        row: bytes from key to key in `base`.
        """
        k, B, totals = self.k, self.B, self.registers.tiles[:count]
        with k.loop(tile.stop, start=tile.first & -AMX_SIDE, step=AMX_SIDE) as p:
            for r in range(AMX_SIDE):
                for c in range(count):
                    (base.bytes((p + r) * row) + c * AMX_SIDE).prefetch()
            # Row blocks that are cut off by the ends of K are summed in a buffer.
            first, stop = k.maximum(-tile.start - p, 0), k.minimum(k.integer("n_k") - tile.start - p, AMX_SIDE)
            whole, here, edge = stop - first == AMX_SIDE, base.bytes(p * row), self.tile.edge
            home, pitch = self.k.pick_pointer(whole.to(I64), [edge, here]), k.where(whole, row, count * AMX_SIDE * 4)

            def move(into: Callable[[Value], Pointer], source: Callable[[Value], Pointer]) -> None:
                with k.when(~whole), k.loop(stop, start=first) as r:
                    for c in range(0, count * AMX_SIDE, self.W):
                        into(r)[c] = self.lanes.load(source(r), c)

            lines = [lambda r: edge + r * (count * AMX_SIDE), lambda r: here.bytes(r * row)]
            move(*lines)
            for c, total in enumerate(totals):
                total.load(home + c * AMX_SIDE, pitch)
            with self._each(terms) as (weights, rows):
                add_products(
                    self.registers.tiles,
                    [totals],
                    (k.whole(0), k.whole(B // AMX_DEPTH)),
                    lambda _, n: weights.bytes(p * (B * 2) + n * (2 * AMX_DEPTH)),
                    B * 2,
                    lambda c, n: rows + (n * AMX_SIDE * width + a + c * AMX_SIDE),
                    width * 4,
                )
            for c, total in enumerate(totals):
                total.store(home + c * AMX_SIDE, pitch)
            move(*lines[::-1])
