"""The products of `ManyQueries` by matrices: blocks of 16 keys or features against 16 lanes.

K is copied with whole rows of features and V turned, once for all items that share them; queries and weights lie as
pairs of features and of keys, as for products of pairs.
"""

from collections.abc import Callable, Sequence

from regard.engines.cpu.element import BF16, I32
from regard.engines.cpu.emit import Pointer, Value
from regard.engines.cpu.forward_kernel import Forward
from regard.engines.cpu.lanes import Tile
from regard.engines.cpu.layout import DEPTH, KEYS, SIDE
from regard.engines.cpu.matrices import Matrix

SUMS = 4  # matrices that grow at once: fewer would wait for themselves


class MatrixProducts(Forward):
    def _copy_turned(self, name: str, tile: Tile, first: Value, stop: Value, copy: Pointer) -> None:
        """Columns of V, KEYS numbers each; a row of V that is not there is 0."""
        k, W, half = self.k, self.W, KEYS // 2
        feature, size = k.integer(f"{name}_feature"), self.kind.element.size
        straight = k.where(feature == size, self.d_v & -W, k.whole(0))
        with k.loop(stop, start=first & -DEPTH, step=DEPTH) as p:
            pairs = [self._pair_of_rows(name, tile, p + 2 * n, first, stop) for n in range(DEPTH // 2)]
            into = copy + p // 2
            with k.loop(straight, step=W) as a:
                for n, column in enumerate(k.transpose([pair(a * size, W) for pair in pairs])):
                    into[(a + n) * half] = column
            with k.loop(self.d_v, start=straight) as a:
                for n, pair in enumerate(pairs):
                    into[a * half + n] = pair(a * feature, 0)

    def _matrix_blocks(self, start: Value, stop: Value, work: Callable[[int, Value], None]) -> None:
        """Work on so many blocks of SIDE rows at a time that enough matrices grow, and on what is left one at a time."""
        k, most = self.k, max(1, SUMS * SIDE // self.B)
        whole = stop - (stop - start) % (most * SIDE)
        with k.loop(whole, start=start, step=most * SIDE) as n:
            work(most, n)
        if most > 1:
            with k.loop(stop, start=whole, step=SIDE) as n:
                work(1, n)

    def _totals(self, blocks: int) -> list[list[Matrix]]:
        across = self.B // SIDE
        return [self.matrices[r * across : (r + 1) * across] for r in range(blocks)]

    def _multiply(
        self,
        totals: Sequence[Sequence[Matrix]],
        start: Value,
        stop: Value,
        row: Callable[[int, Value], Pointer],
        width: Value | int,
        column: Callable[[Value], Pointer],
        pitch: int,
    ) -> None:
        """totals[r][c] += rows times columns, DEPTH products at a time.

        row: where the r-th block begins in the n-th step, its rows `width` bytes apart; column: likewise the first
        block of columns, its rows `pitch` bytes apart.
        """
        k, across = self.k, self.B // SIDE
        _, x, *ys = self.matrices[len(totals) * across - 1 :]
        with k.loop(stop, start=start) as n:
            for c, y in zip(range(across), ys, strict=False):
                y.load(column(n) + c * SIDE, pitch)
            for r, block in enumerate(totals):
                x.load(row(r, n), width)
                for total, y in zip(block, ys, strict=False):
                    total.add_product(x, y)

    def _scores_by_matrices(self, tile: Tile) -> None:
        """Sᵀ = K Qᵀ, and the maximum over the keys that no mask and no rule touches."""
        k, kind, B = self.k, self.kind, self.B
        names, turned, results = zip(*self._products_of_keys(), strict=True)
        again = [m for m, x in enumerate(results) if any(x is before for before in results[:m])]
        width = self.key_width * kind.element.size
        with k.loop(len(names)) as n:
            rows = self._pick_pointer(n, [self.k_copy(self._slot(tile), name) for name in names])
            queries, into = self._pick_pointer(n, turned).of(I32), self._pick_pointer(n, results)

            def block(count: int, p: Value) -> None:
                with k.when(n == 0):
                    self._come_near(tile, p, count * SIDE)
                totals = self._totals(count)
                for line in totals:
                    for total in line:
                        total.clear()
                self._multiply(
                    totals,
                    k.whole(0),
                    self.key_width // DEPTH,
                    lambda r, x: rows.bytes((p + r * SIDE) * width + x * (2 * DEPTH)),
                    width,
                    lambda x: queries + x * (SIDE * B),
                    B * 4,
                )
                for r, line in enumerate(totals):
                    for c, total in enumerate(line):
                        total.store(into + ((p + r * SIDE) * B + c * SIDE), B * 4)

            self._matrix_blocks(tile.first & -SIDE, (tile.stop + (SIDE - 1)) & -SIDE, block)
        self._tops(tile)

    def _tops(self, tile: Tile) -> None:
        k, kind = self.k, self.kind
        tops = [k.variable(k.constant(self.real, float("-inf")).spread(self.W)) for _ in self.vectors()]
        if not kind.ruled:
            parts = ((tile.first, tile.mixed[0]), (tile.mixed[1], tile.stop)) if kind.mask else ((tile.first, tile.stop),)
            for start, stop in parts:
                with k.loop(stop, start=start) as p:
                    for c, top in zip(self.vectors(), tops, strict=True):
                        top.value = k.maximum(self.load(self.tile.P, p * self.B + c), top.value)
        for c, top in zip(self.vectors(), tops, strict=True):
            self.tile.top[c] = top.value

    def _add_by_matrices(self, tile: Tile, columns: Pointer, P: Pointer, add: Callable[..., None]) -> None:
        """Oᵀ ← rescale · Oᵀ + Vᵀ Pᵀ; what is not there weighs nothing."""
        k, B, pairs = self.k, self.B, P.of(I32)
        start, stop = tile.first // DEPTH, (tile.stop + (DEPTH - 1)) // DEPTH
        for low, high in ((start * DEPTH, tile.first // 2 * 2), ((tile.stop + 1) // 2 * 2, stop * DEPTH)):
            with k.loop(high, start=low, step=2) as p:
                for c in self.vectors():
                    pairs[p * B + c] = k.constant(I32, 0).spread(self.W)
        product, width = self.tile.product, KEYS * self.kind.element.size

        def block(count: int, a: Value) -> None:
            totals = self._totals(1)
            for total in totals[0]:
                total.clear()
            self._multiply(
                totals,
                start,
                stop,
                lambda r, n: columns.bytes(a * width + n * (2 * DEPTH)),
                width,
                lambda n: pairs + n * (DEPTH * B),
                2 * B * 4,
            )
            for c, total in enumerate(totals[0]):
                total.store(product + c * SIDE, B * 4)
            with k.loop(k.minimum(k.whole(SIDE), self.d_v - a)) as r:
                for c in self.vectors():
                    add(a + r, c, self.load(product, r * B + c))

        with k.loop(self.d_v, step=SIDE) as a:
            block(1, a)
