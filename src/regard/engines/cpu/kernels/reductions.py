"""The second pass: from lse, the weights of every tile and their reductions.

Scores are forward's, to the bit. P = exp(S − lse) has a query in every lane. It is reduced to counts of visible keys,
sums over queries (`received`), sums along diagonals (`profile`), and maps of bins.
"""

import math

from regard.engines.cpu.kernels.prefill import PrefillKernel
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.operands import MAPS
from regard.engines.cpu.spec.specs import SecondPassSpec
from regard.engines.cpu.spec.tiles import KEYS


class SecondPassKernel(PrefillKernel):
    """The second-pass kernel.

    In its query blocks `m` holds −lse in the scale of exponents, and `l` counts visible keys. `e` holds an lse to
    subtract before scaling, or 0.
    """

    spec: SecondPassSpec

    def _begin(self) -> None:
        super()._begin()
        self.each_lane(self._begin_row)

    def _begin_row(self, lane: Value, g: Value, r: Value) -> None:
        lse = self.address("lse")[g * self.k.integer("row_head") + r]
        k, none = self.k, self.k.constant(self.real, 0.0)
        exponent_scale = 1.0 if self.spec.ruled else mathematics.LOG2_E
        shift = -self._finite(lse * exponent_scale)
        if not self.spec.ruled:
            far = self._is_large(lse, lse * exponent_scale)
            shift, self.block.e[lane] = k.where(far, none, shift), k.where(far, lse, none)
        nobody = k.constant(self.real, -math.inf)  # a lane without a query has no weight
        self.block.m[lane] = k.where(lane < self.field("lanes"), shift, nobody)

    def _split(self) -> None:
        self.block.cursor[0] = self._tiles(self.block.cursor[0], self._work_on)

    def _work_on(self, tile: KeyTile) -> None:
        self._copies(tile)
        self._qk_product(tile)
        self._rules(tile)
        self._softmax(tile)
        for name, work in (("received", self._receive), ("profile", self._slide)):
            if name in self.spec.statistics:
                work(tile)
        if self.maps:
            self._pool(tile)

    @property
    def maps(self) -> list[str]:
        return [name for name in MAPS if name in self.spec.statistics]

    def _pooled_rows(self) -> list[Pointer]:
        """Return a row of lanes for each map."""
        return [self.tile.old, self.tile.new, self.tile.rescale][: len(self.maps)]

    def _softmax(self, tile: KeyTile) -> None:
        """Compute P; 0 for hidden and absent keys of the tile, −0 for hidden ones where `seen_map` is wanted."""
        k, P = self.k, tile.scratch.P
        none = k.constant(self.real, -0.0 if "seen_map" in self.spec.statistics else 0.0).spread(self.W)
        if not self.spec.ruled:
            self._subtract_lse(tile, self.block.e, self.product_scale)
        seen = self.block.l.of(mathematics.integer_of(self.real))
        for start, stop in ((k.whole(0), tile.first), (tile.stop, k.whole(KEYS))):
            with k.loop(stop * self.B, start=start * self.B, step=self.W) as n:
                P[n] = self.zero()
        with k.loop(self.B, step=self.W) as c:
            shift, count = self.load(self.block.m, c), k.variable(seen.load(c, self.W))
            with k.loop(tile.stop, start=tile.first) as p:
                at = p * self.B + c
                s = self.load(P, at)
                hidden = s == -math.inf
                P[at] = k.where(hidden, none, self._weight(s, shift)[0])
                if "visible" in self.spec.statistics:
                    count.value = count.value + (~hidden).to(count.type)
            if "visible" in self.spec.statistics:
                seen[c] = count.value

    def _receive(self, tile: KeyTile) -> None:
        """Add the sums over lanes, W keys at a time."""
        k, W, B = self.k, self.W, self.B
        total = self.address("received") + (tile.start + k.integer("shift"))
        with k.loop(tile.stop, start=tile.first & -W, step=W) as p:
            rows = []
            for n in range(W):
                first, *others = (self.load(tile.scratch.P, (p + n) * B, c) for c in self.vectors())
                rows.append(sum(others, first))
            first, *others = k.transpose(rows)
            total[p] = total.load(p, W) + sum(others, first)

    def _slide(self, tile: KeyTile) -> None:
        """Add the sums along diagonals: lanes and keys that are both W apart share one."""
        k, W = self.k, self.W
        total = self.address("profile") + (-tile.start)
        keys, lanes = range(0, KEYS, W), self.vectors()
        with k.loop(W) as n:
            for diagonal in range(W - KEYS, self.B, W):
                there = [(p, p + diagonal) for p in keys if p + diagonal in lanes]
                first, *others = (self.load(tile.scratch.P, (n + p) * self.B, c) for p, c in there)
                at = diagonal - n
                total[at] = total.load(at, W) + sum(others, first)

    def _pool(self, tile: KeyTile) -> None:
        """Pool the keys of each bin that the tile touches, then its queries."""
        k = self.k
        edges = k.pointer("edges", I64)
        number = (tile.start + k.integer("shift")) // KEYS
        bin, p = k.variable(k.pointer("tile_bins", I64)[number]), k.variable(tile.first)
        with k.loop_while(lambda: p.value < tile.stop):
            end = k.minimum(edges[bin.value + 1] - tile.start, tile.stop)
            with k.when(end > p.value):
                with k.loop(self.B, step=self.W) as c:
                    made = [k.variable(self.zero()) for _ in self.maps]
                    with k.loop(end, start=p.value) as q:
                        for name, x in zip(self.maps, made, strict=True):
                            weight = self.load(tile.scratch.P, q * self.B, c)
                            x.value = self._pooled(name, x.value, self._seen(weight) if name == "seen_map" else weight)
                    for into, x in zip(self._pooled_rows(), made, strict=True):
                        into[c] = x.value
                self._pool_rows(bin.value)
                p.value = end
            bin.value = bin.value + 1

    def _seen(self, weight: Value) -> Value:
        """Return 0 for the weight of a hidden pair, else 1."""
        integer = mathematics.integer_of(self.real)
        hidden = weight.bits(integer) == -(2 ** (8 * self.real.size - 1))
        return self.k.where(hidden, self.zero(), self.k.constant(self.real, 1.0))

    def _pooled(self, name: str, x: Value, weight: Value) -> Value:
        if name == "mass":
            return x + weight
        return self.k.where((weight > x) | weight.is_nan(), weight, x)

    def _pool_rows(self, col: Value) -> None:
        k, zero = self.k, self.k.constant(self.real, 0.0)
        row_bins, lanes = k.pointer("row_bins", I64) + self.field("row"), self.field("lanes")
        made = [k.variable(zero) for _ in self.maps]
        with k.loop(lanes) as n:
            for name, x, source in zip(self.maps, made, self._pooled_rows(), strict=True):
                x.value = self._pooled(name, x.value, source[n])
            here = row_bins[n]
            with k.when((row_bins[n + 1] != here) | (n + 1 == lanes)):
                for name, x in zip(self.maps, made, strict=True):
                    map = self.address(name)
                    map[here + col] = self._pooled(name, map[here + col], x.value)
                    x.value = zero

    def _end(self) -> None:
        if "visible" not in self.spec.statistics:
            return
        seen = self.block.l.of(mathematics.integer_of(self.real))
        with self.k.loop(self.field("lanes")) as n:
            self.address("visible")[n] = seen[n].to(I64)
