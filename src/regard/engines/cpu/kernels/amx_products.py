"""QK and PV products of prefill by AMX.

Blocks of 16 keys or features are multiplied by blocks of 16 lanes.

K is copied with padded rows of features, and V transposed, once for all query blocks of a work group. Queries and
weights are packed bf16 pairs of features and of keys, as for dot products by vectors.
"""

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_

from regard.engines.cpu.kernels.copies import Copies, key_width
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.prefetching import NextTiles
from regard.engines.cpu.kernels.products import Add, ForwardTerms, InFlight, PVProducts, repeated
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.amx import AmxRegisters, AmxTile, add_products, add_products_by_vectors
from regard.engines.cpu.language.types import I32
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE, KEYS


class QKByAmx:
    """Sᵀ = K Qᵀ and the maxima over the keys that no mask and no rule touches."""

    def __init__(self, lanes: Lanes, copies: Copies, terms: ForwardTerms, prefetch: NextTiles, registers: AmxRegisters):
        self.k, self.spec, self.B = lanes.k, lanes.spec, lanes.B
        self.lanes, self.copies, self.terms, self.prefetch = lanes, copies, terms, prefetch
        self.registers, self.totals = registers, registers.totals(self.B)

    def __call__(self, tile: KeyTile, in_flight: InFlight | None = None) -> None:
        k, B, totals = self.k, self.B, self.totals
        names, transposed, results = zip(*self.terms.qk(tile), strict=True)
        width, steps = key_width(self.lanes) * self.spec.element.size, (k.whole(0), key_width(self.lanes) // AMX_DEPTH)
        height = len(totals) * AMX_SIDE
        with k.loop(len(names)) as n:
            rows = k.pick_pointer(n, [self.copies.copied_keys(tile, name) for name in names])
            queries, into = k.pick_pointer(n, transposed).of(I32), k.pick_pointer(n, results)
            with k.loop(tile.stop, start=tile.first & -height, step=height) as p:
                with k.when(n == 0):
                    self.prefetch(tile, p, height)
                places = [
                    [into + ((p + r * AMX_SIDE) * B + c * AMX_SIDE) for c in range(len(x))]
                    for r, x in enumerate(totals)
                ]
                for line, home in zip(totals, places, strict=True):
                    for total, at in zip(line, home, strict=True):
                        self._begin(total, at, n, repeated(results))
                add_products(
                    self.registers.tiles,
                    totals,
                    steps,
                    lambda r, x: rows.bytes((p + r * AMX_SIDE) * width + x * (2 * AMX_DEPTH)),
                    width,
                    lambda c, x: queries + (x * (AMX_SIDE * B) + c * AMX_SIDE),
                    B * 4,
                )
                for line, home in zip(totals, places, strict=True):
                    for total, at in zip(line, home, strict=True):
                        total.store(at, B * 4)
        self._maxima(tile)

    def _begin(self, total: AmxTile, at: Pointer, n: Value, accumulated: Sequence[int]) -> None:
        """Start a tile of sums from 0, or from an earlier product in the same place."""
        if not accumulated:
            total.clear()
            return
        with self.k.choice(reduce(or_, [n == m for m in accumulated])) as (yes, no):
            with yes:
                total.load(at, self.B * 4)
            with no:
                total.clear()

    def _maxima(self, tile: KeyTile) -> None:
        k, spec, lanes = self.k, self.spec, self.lanes
        tops = [k.variable(k.constant(lanes.real, -math.inf).spread(lanes.W)) for _ in lanes.vectors()]
        ends = (tile.first, *tile.mixed, tile.stop) if spec.mask else (tile.first, tile.stop)

        def micro_tile(count: int, p: Value) -> None:
            for c, top in zip(lanes.vectors(), tops, strict=True):
                scores = [lanes.load(tile.scratch.P, (p + n) * self.B, c) for n in range(count)]
                top.value = k.maximum(reduce(k.maximum, scores), top.value)

        for start, stop in () if spec.ruled else zip(ends[::2], ends[1::2], strict=True):
            lanes.micro_tiles(start, stop, micro_tile)
        for c, top in zip(lanes.vectors(), tops, strict=True):
            tile.scratch.top[c] = top.value


class PVByAmx(PVProducts):
    """The PV products by AMX; V is in columns of KEYS numbers."""

    def __init__(self, lanes: Lanes, copies: Copies, terms: ForwardTerms, registers: AmxRegisters):
        super().__init__(lanes, copies, terms)
        self.registers, self.totals = registers, registers.totals(self.B)[0]

    def add(self, tile: KeyTile, values: Pointer, row: Value, P: Pointer, add: Add) -> None:
        """Compute one product; absent keys of whole AMX steps get the weight 0."""
        k, B, lanes, packed = self.k, self.B, self.lanes, P.of(I32)
        steps = tile.first // AMX_DEPTH, (tile.stop + (AMX_DEPTH - 1)) // AMX_DEPTH
        for low, high in ((steps[0] * AMX_DEPTH, tile.first & -2), ((tile.stop + 1) & -2, steps[1] * AMX_DEPTH)):
            with k.loop(high, start=low, step=2) as p:
                for c in lanes.vectors():
                    packed[p * B + c] = k.constant(I32, 0).spread(self.W)
        product, width = tile.scratch.product, KEYS * self.spec.element.size
        with k.loop(lanes.d_v, step=AMX_SIDE) as a:
            for total in self.totals:
                total.clear()
            add_products(
                self.registers.tiles,
                [self.totals],
                steps,
                lambda r, n: values.bytes(a * width + n * (2 * AMX_DEPTH)),
                width,
                lambda c, n: packed + (n * (AMX_DEPTH * B) + c * AMX_SIDE),
                2 * B * 4,
            )
            for c, total in enumerate(self.totals):
                total.store(product + c * AMX_SIDE, B * 4)
            with k.loop(k.minimum(k.whole(AMX_SIDE), lanes.d_v - a)) as r:
                for c in lanes.vectors():
                    add(a + r, c, lanes.load(product, r * B + c))

    def add_visible(self, tile: KeyTile, values: Pointer, row: Value, P: Pointer, add: Add) -> None:
        """Compute one product by vectors in AMX's order, with hidden values as 0."""
        k, B, lanes, seen, packed = self.k, self.B, self.lanes, tile.scratch.seen, P.of(I32)
        with k.loop(lanes.d_v) as a, k.loop(B, step=self.W) as c:
            total = k.variable(lanes.zero())

            def halves(n: Value, a: Value = a, c: Value = c) -> Iterator[tuple[Value, Value]]:
                both = k.unpack_bf16(values[a * (KEYS // 2) + n]), k.unpack_bf16(packed.load(n * (2 * B) + c, self.W))
                for m, (v, weight) in enumerate(zip(*both, strict=True)):
                    yield k.where(lanes.load(seen, (2 * n + m) * B + c) != 0.0, v, lanes.zero()), weight

            add_products_by_vectors(k, total, (tile.first // 2, (tile.stop + 1) // 2), halves)
            add(a, c, total.value)
