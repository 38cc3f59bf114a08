"""QK and PV products of prefill by AMX.

Blocks of 16 keys or features are multiplied by blocks of 16 lanes.

K is copied with padded rows of features, and V transposed, once for all query blocks of a work group. Queries and
weights are packed bf16 pairs of features and of keys, as for dot products by vectors.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_

from regard.engines.cpu.kernels.forward import ForwardKernel
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.amx import AmxTile, add_products, add_products_by_vectors
from regard.engines.cpu.language.types import I16, I32
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE, KEYS


class AmxProducts(ForwardKernel):
    """QK and PV products by AMX tiles."""

    @abstractmethod
    def _qk_products(self, tile: KeyTile) -> list[tuple[str, Pointer, Pointer]]:
        """Return the QK products.

        Each has the name of K, the transposed queries, and the tile that is written.
        """

    @abstractmethod
    def _prefetch_next_tiles(self, tile: KeyTile, p: Value, count: int) -> None:
        """Prefetch data of the next tiles."""

    def _transpose_packed(self, base: Pointer, strides: list[Value], transposed: Pointer) -> None:
        """Transpose queries to packed pairs of features, a row of lanes for each pair.

        They take the sign of the scale; pairs after the last feature are 0.
        """
        k, W, B = self.k, self.W, self.B
        head, row, feature = strides
        whole, negative = k.where(feature == base.type.size, self.d // 2 & -W, 0), self.query_scale < 0.0
        signs = {type: k.where(negative, k.constant(type, x), 0) for type, x in ((I32, -0x7FFF8000), (I16, -0x8000))}
        with k.loop(self.key_width // 2 * B, start=whole * B, step=W) as n:
            transposed[n] = k.constant(I32, 0).spread(W)
        with k.loop(B, step=W) as c:
            rows = [self._row(base, c + r, head, row).of(I32) for r in range(W)]
            with k.loop(whole, step=W) as x:
                for m, packed in enumerate(k.transpose([p.load(x, W) for p in rows])):
                    transposed[(x + m) * B + c] = packed ^ signs[I32]
            with k.loop(W) as r:
                p, into = self._row(base, c + r, head, row), transposed.of(I16)
                with k.loop(self.d, start=whole * 2) as x:
                    into[(x // 2 * B + c + r) * 2 + x % 2] = p.bytes(x * feature)[0] ^ signs[I16]

    def _qk_product_by_amx(self, tile: KeyTile) -> None:
        """Compute Sᵀ = K Qᵀ and the maxima.

        A maximum is over the keys that no mask and no rule touches.
        """
        k, B, totals = self.k, self.B, self._totals()
        names, transposed, results = zip(*self._qk_products(tile), strict=True)
        accumulated = [m for m, x in enumerate(results) if any(x is before for before in results[:m])]
        width, steps = self.key_width * self.spec.element.size, (k.whole(0), self.key_width // AMX_DEPTH)
        height = len(totals) * AMX_SIDE
        with k.loop(len(names)) as n:
            rows = self._pick_pointer(n, [self.k_copy(self._slot(tile), name) for name in names])
            queries, into = self._pick_pointer(n, transposed).of(I32), self._pick_pointer(n, results)
            with k.loop(tile.stop, start=tile.first & -height, step=height) as p:
                with k.when(n == 0):
                    self._prefetch_next_tiles(tile, p, height)
                places = [
                    [into + ((p + r * AMX_SIDE) * B + c * AMX_SIDE) for c in range(len(x))]
                    for r, x in enumerate(totals)
                ]
                for line, home in zip(totals, places, strict=True):
                    for total, at in zip(line, home, strict=True):
                        self._begin_total(total, at, n, accumulated)
                add_products(
                    self.amx_tiles,
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
        self._row_maxima(tile)

    def _begin_total(self, total: AmxTile, at: Pointer, n: Value, accumulated: Sequence[int]) -> None:
        """Start a tile of sums from 0, or from an earlier product in the same place."""
        if not accumulated:
            total.clear()
            return
        with self.k.choice(reduce(or_, [n == m for m in accumulated])) as (yes, no):
            with yes:
                total.load(at, self.B * 4)
            with no:
                total.clear()

    def _row_maxima(self, tile: KeyTile) -> None:
        """Compute the maximum over the scores that no mask and no rule touches."""
        k, spec = self.k, self.spec
        tops = [k.variable(k.constant(self.real, -math.inf).spread(self.W)) for _ in self.vectors()]
        ends = (tile.first, *tile.mixed, tile.stop) if spec.mask else (tile.first, tile.stop)

        def micro_tile(count: int, p: Value) -> None:
            for c, top in zip(self.vectors(), tops, strict=True):
                scores = [self.load(tile.scratch.P, (p + n) * self.B, c) for n in range(count)]
                top.value = k.maximum(reduce(k.maximum, scores), top.value)

        for start, stop in () if spec.ruled else zip(ends[::2], ends[1::2], strict=True):
            self._micro_tiles(start, stop, micro_tile)
        for c, top in zip(self.vectors(), tops, strict=True):
            self.tile.top[c] = top.value

    def _add_pv_by_amx(self, tile: KeyTile, columns: Pointer, P: Pointer, add: Callable[..., None]) -> None:
        """Compute Oᵀ ← rescale · Oᵀ + Vᵀ Pᵀ.

        Absent keys of whole AMX steps get the weight 0.
        """
        k, B, packed = self.k, self.B, P.of(I32)
        steps = tile.first // AMX_DEPTH, (tile.stop + (AMX_DEPTH - 1)) // AMX_DEPTH
        for low, high in ((steps[0] * AMX_DEPTH, tile.first & -2), ((tile.stop + 1) & -2, steps[1] * AMX_DEPTH)):
            with k.loop(high, start=low, step=2) as p:
                for c in self.vectors():
                    packed[p * B + c] = k.constant(I32, 0).spread(self.W)
        product, width = self.tile.product, KEYS * self.spec.element.size

        totals = self._totals()[0]
        with k.loop(self.d_v, step=AMX_SIDE) as a:
            for total in totals:
                total.clear()
            add_products(
                self.amx_tiles,
                [totals],
                steps,
                lambda r, n: columns.bytes(a * width + n * (2 * AMX_DEPTH)),
                width,
                lambda c, n: packed + (n * (AMX_DEPTH * B) + c * AMX_SIDE),
                2 * B * 4,
            )
            for c, total in enumerate(totals):
                total.store(product + c * AMX_SIDE, B * 4)
            with k.loop(k.minimum(k.whole(AMX_SIDE), self.d_v - a)) as r:
                for c in self.vectors():
                    add(a + r, c, self.load(product, r * B + c))

    def _add_visible_pv_by_amx(self, tile: KeyTile, columns: Pointer, P: Pointer, add: Callable[..., None]) -> None:
        """Compute the PV product by vectors in AMX's order, with hidden values as 0."""
        k, B, seen, packed = self.k, self.B, tile.scratch.seen, P.of(I32)
        with k.loop(self.d_v) as a, k.loop(B, step=self.W) as c:
            total = k.variable(self.zero())

            def halves(n: Value, a: Value = a, c: Value = c) -> Iterator[tuple[Value, Value]]:
                both = k.unpack_bf16(columns[a * (KEYS // 2) + n]), k.unpack_bf16(packed.load(n * (2 * B) + c, self.W))
                for m, (v, weight) in enumerate(zip(*both, strict=True)):
                    yield k.where(self.load(seen, (2 * n + m) * B + c) != 0.0, v, self.zero()), weight

            add_products_by_vectors(k, total, (tile.first // 2, (tile.stop + 1) // 2), halves)
            add(a, c, total.value)
