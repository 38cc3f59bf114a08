"""Products of backward by AMX: blocks of 16 rows times blocks of 16 columns.

Sums go straight to the gradients, step by step. Absent keys of a tile take part with the weight 0.
"""

from collections.abc import Callable

from regard.engines.cpu.kernels.backward_products import Columns, GradientProducts
from regard.engines.cpu.kernels.backward_terms import Factors, ProductTerms, pick_terms
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.prefetching import prefetch_bias
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.amx import AmxRegisters, add_products
from regard.engines.cpu.language.types import I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.specs import BackwardSpec
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE, KEYS, multiple


class AmxGradientProducts(GradientProducts):
    """Products by AMX tiles."""

    def __init__(self, lanes: Lanes, spec: BackwardSpec, factors: Factors, registers: AmxRegisters):
        super().__init__(lanes, spec, factors)
        self.registers, self.totals = registers.tiles, registers.totals(lanes.B)

    def scores(self, tile: KeyTile) -> None:
        """Compute Sᵀ = K Qᵀ and dPᵀ = V dOᵀ; weights of absent keys become 0."""
        k, B, totals = self.k, self.B, self.totals
        height = len(totals) * AMX_SIDE
        results, counts, products = zip(*self.factors.scores(tile), strict=True)
        with k.loop(len(results)) as n:
            features = multiple(k.pick(n, counts), AMX_DEPTH)
            into, terms = k.pick_pointer(n, results), pick_terms(n, products)
            with k.loop(tile.stop, start=tile.first & -height, step=height) as p:
                if self.spec.bias:
                    with k.when(n == 0):
                        prefetch_bias(self.lanes, tile, p, height)
                for line in totals:
                    for total in line:
                        total.clear()
                with terms.each() as (keys, queries):
                    add_products(
                        self.registers,
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
        self._hide_beyond(tile)

    def _hide_beyond(self, tile: KeyTile) -> None:
        """Set the weights of a tile's absent keys to 0, in whole AMX steps."""
        k, spec, half = self.k, self.spec, self.B // 2
        ends = [(tile.first & -AMX_DEPTH, tile.first & -2), (multiple(tile.stop, 2), multiple(tile.stop, AMX_DEPTH))]
        rows = [self.factors.weights(tile.scratch, name).of(I32) for name in spec.weights]
        rows += [self.factors.gradients(tile.scratch, name).of(I32) for name in spec.score_gradients]
        for first, stop in ends:
            with k.loop(stop * half, start=first * half, step=self.W) as n:
                for packed in rows:
                    packed[n] = k.constant(I32, 0).spread(self.W)

    def add_queries(self, tile: KeyTile) -> None:
        k, B, dq, totals, width = self.k, self.B, tile.block.state.dq, self.totals[0], KEYS * 2
        terms, steps = (
            self.factors.queries(tile),
            (tile.first // AMX_DEPTH, multiple(tile.stop, AMX_DEPTH) // AMX_DEPTH),
        )
        with k.loop(self.lanes.d, step=AMX_SIDE) as a:
            homes = [dq + (a * B + c * AMX_SIDE) for c in range(len(totals))]
            for total, home in zip(totals, homes, strict=True):
                total.load(home, B * 4)
            with terms.each() as (columns, gradients):
                add_products(
                    self.registers,
                    [totals],
                    steps,
                    lambda _, n: columns.bytes(a * width + n * (2 * AMX_DEPTH)),
                    width,
                    lambda c, n: gradients + (n * (AMX_SIDE * B) + c * AMX_SIDE),
                    B * 4,
                )
            for total, home in zip(totals, homes, strict=True):
                total.store(home, B * 4)

    def add_features(self, tile: KeyTile, terms: ProductTerms, columns: Columns) -> None:
        k, B, count = self.k, self.B, columns.vectors
        base, row, a, width, totals = columns.base, columns.row, columns.a, columns.width, self.registers[:count]
        with k.loop(tile.stop, start=tile.first & -AMX_SIDE, step=AMX_SIDE) as p:
            for r in range(AMX_SIDE):
                for c in range(count):
                    (base.bytes((p + r) * row) + c * AMX_SIDE).prefetch()
            # Row blocks that are cut off by the ends of K are summed in a buffer.
            first, stop = k.maximum(-tile.start - p, 0), k.minimum(k.integer("n_k") - tile.start - p, AMX_SIDE)
            whole, here, edge = stop - first == AMX_SIDE, base.bytes(p * row), tile.scratch.edge
            home, pitch = k.pick_pointer(whole.to(I64), [edge, here]), k.where(whole, row, count * AMX_SIDE * 4)

            def move(into: Callable[[Value], Pointer], source: Callable[[Value], Pointer]) -> None:
                with k.when(~whole), k.loop(stop, start=first) as r:
                    for c in range(0, count * AMX_SIDE, self.W):
                        into(r)[c] = self.lanes.load(source(r), c)

            lines = [lambda r: edge + r * (count * AMX_SIDE), lambda r: here.bytes(r * row)]
            move(*lines)
            for c, total in enumerate(totals):
                total.load(home + c * AMX_SIDE, pitch)
            with terms.each() as (weights, rows):
                add_products(
                    self.registers,
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
