"""The second pass: from lse, the weights of every tile and their reductions.

Scores are forward's, to the bit. P = exp(S − lse) has a query in every lane. It is reduced to counts of visible keys,
sums over queries (`received`), sums along diagonals (`profile`), and maps of bins.
"""

import math

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.forward import ForwardKernel
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.prefill import Prefill
from regard.engines.cpu.kernels.softmax import finite, is_large, subtract_lse
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.kernels.weights import StoredWeights
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.operands import MAPS
from regard.engines.cpu.spec.specs import SecondPassSpec
from regard.engines.cpu.spec.tiles import KEYS


class SecondPassKernel(ForwardKernel):
    """The second-pass kernel: forward's scores, and `results` in place of O.

    In its query blocks `m` holds −lse in the scale of exponents, and `l` counts visible keys. `e` holds an lse to
    subtract before scaling, or 0.
    """

    spec: SecondPassSpec
    layout: Prefill

    def __init__(self, k: Kernel, spec: SecondPassSpec):
        super().__init__(k, spec)
        self.results: Reductions | StoredWeights
        if spec.statistics:
            self.results = Reductions(self.lanes)
        else:
            self.results = StoredWeights(self.lanes, self.softmax, self.own.l, self.sink)

    @property
    def subtracts(self) -> bool:
        """True if `e` is subtracted: for the sake of scaling, or of a rest."""
        return self.spec.rest or not self.spec.ruled

    def begin(self, block: RowBlock) -> None:
        self.start(block)
        k, none = self.k, self.k.constant(self.real, 0.0)
        exponent_scale = 1.0 if self.spec.ruled else mathematics.LOG2_E
        nobody = k.constant(self.real, -math.inf)  # a lane without a query has no weight

        def begin_row(lane: Value, g: Value, r: Value) -> None:
            lse = block.address("lse")[g * k.integer("row_head") + r]
            shift = -finite(k, lse * exponent_scale)
            if self.subtracts:
                rest = block.address("rest")[g * k.integer("row_head") + r] if self.spec.rest else none
                far = rest != 0.0 if self.spec.ruled else is_large(k, lse, lse * exponent_scale)
                shift = k.where(far, -rest * exponent_scale if self.spec.rest else none, shift)
                block.merged.e[lane] = k.where(far, lse, none)
            block.merged.m[lane] = k.where(lane < block.field("lanes"), shift, nobody)

        block.each_lane(begin_row)
        self.results.begin(block)

    def split(self, block: RowBlock) -> None:
        """Reduce the weights of the tiles of the block's next key split."""

        def work(tile: KeyTile) -> None:
            self.layout.scores(tile)
            self.weights(tile)
            self.results.add(tile)

        self.results.begin_split()
        block.state.cursor[0] = self.splits.each_tile(block, block.state.cursor[0], work)
        self.results.end_split(block)

    def weights(self, tile: KeyTile) -> None:
        """Compute P, 0 for hidden and absent keys; for `seen_map`, −0 for hidden ones."""
        k, P, W, B, load, state = self.k, tile.scratch.P, self.lanes.W, self.lanes.B, self.lanes.load, tile.block.merged
        none = k.constant(self.real, -0.0 if "seen_map" in self.spec.statistics else 0.0).spread(W)
        if self.subtracts:
            subtract_lse(self.lanes, tile, state.e, self.softmax.product_scale)
        seen = state.l.of(mathematics.integer_of(self.real))
        for start, stop in ((k.whole(0), tile.first), (tile.stop, k.whole(KEYS))):
            with k.loop(stop * B, start=start * B, step=W) as n:
                P[n] = self.lanes.zero()
        with k.loop(B, step=W) as c:
            shift, count = load(state.m, c), k.variable(seen.load(c, W))
            with k.loop(tile.stop, start=tile.first) as p:
                at = p * B + c
                s = load(P, at)
                hidden = s == -math.inf
                P[at] = k.where(hidden, none, self.softmax.weight(s, shift)[0])
                if "visible" in self.spec.statistics:
                    count.value = count.value + (~hidden).to(count.type)
            if "visible" in self.spec.statistics:
                seen[c] = count.value

    def end(self, block: RowBlock) -> None:
        self.results.end(block)
        if "visible" not in self.spec.statistics:
            return
        seen = block.merged.l.of(mathematics.integer_of(self.real))
        with self.k.loop(block.field("lanes")) as n:
            block.address("visible")[n] = seen[n].to(I64)


class Reductions:
    """Sums of a tile's weights over queries, along diagonals, and by bins of maps."""

    spec: SecondPassSpec

    def __init__(self, lanes: Lanes):
        self.k, self.real, self.W, self.B = lanes.k, lanes.real, lanes.W, lanes.B
        assert isinstance(lanes.spec, SecondPassSpec)
        self.spec, self.lanes = lanes.spec, lanes
        self.maps = [name for name in MAPS if name in self.spec.statistics]

    def begin(self, block: RowBlock) -> None:
        """Do nothing: sums start at 0."""

    def begin_split(self) -> None:
        """Do nothing: sums are over all splits."""

    def end_split(self, block: RowBlock) -> None:
        """Do nothing, as above."""

    def end(self, block: RowBlock) -> None:
        """Do nothing: sums are complete."""

    def add(self, tile: KeyTile) -> None:
        if "received" in self.spec.statistics:
            self._receive(tile)
        if "profile" in self.spec.statistics:
            self._slide(tile)
        if self.maps:
            self._pool(tile)

    def _receive(self, tile: KeyTile) -> None:
        """Add the sums over lanes, W keys at a time."""
        k, W, B = self.k, self.W, self.B
        total = tile.block.address("received") + (tile.start + k.integer("shift"))
        with k.loop(tile.stop, start=tile.first & -W, step=W) as p:
            rows = []
            for n in range(W):
                first, *others = (self.lanes.load(tile.scratch.P, (p + n) * B, c) for c in self.lanes.vectors())
                rows.append(sum(others, first))
            first, *others = k.transpose(rows)
            total[p] = total.load(p, W) + sum(others, first)

    def _slide(self, tile: KeyTile) -> None:
        """Add the sums along diagonals: lanes and keys that are both W apart share one."""
        k, W = self.k, self.W
        total = tile.block.address("profile") + (-tile.start)
        keys, lanes = range(0, KEYS, W), self.lanes.vectors()
        with k.loop(W) as n:
            for diagonal in range(W - KEYS, self.B, W):
                there = [(p, p + diagonal) for p in keys if p + diagonal in lanes]
                first, *others = (self.lanes.load(tile.scratch.P, (n + p) * self.B, c) for p, c in there)
                at = diagonal - n
                total[at] = total.load(at, W) + sum(others, first)

    def _pooled_rows(self, tile: KeyTile) -> list[Pointer]:
        """Return a row of lanes for each map."""
        return [tile.scratch.old, tile.scratch.new, tile.scratch.rescale][: len(self.maps)]

    def _pool(self, tile: KeyTile) -> None:
        """Pool the keys of each bin that the tile touches, then its queries."""
        k = self.k
        edges = self.lanes.operand("edges")
        number = (tile.start + k.integer("shift")) // KEYS
        bin, p = k.variable(self.lanes.operand("tile_bins")[number]), k.variable(tile.first)
        with k.loop_while(lambda: p.value < tile.stop):
            end = k.minimum(edges[bin.value + 1] - tile.start, tile.stop)
            with k.when(end > p.value):
                with k.loop(self.B, step=self.W) as c:
                    sums = [k.variable(self.lanes.zero()) for _ in self.maps]
                    with k.loop(end, start=p.value) as q:
                        for name, x in zip(self.maps, sums, strict=True):
                            weight = self.lanes.load(tile.scratch.P, q * self.B, c)
                            x.value = self._pooled(name, x.value, self._seen(weight) if name == "seen_map" else weight)
                    for into, x in zip(self._pooled_rows(tile), sums, strict=True):
                        into[c] = x.value
                self._pool_rows(tile, bin.value)
                p.value = end
            bin.value = bin.value + 1

    def _seen(self, weight: Value) -> Value:
        """Return 0 for the weight of a hidden pair, else 1."""
        integer = mathematics.integer_of(self.real)
        hidden = weight.bits(integer) == -(2 ** (8 * self.real.size - 1))
        return self.k.where(hidden, self.lanes.zero(), self.k.constant(self.real, 1.0))

    def _pooled(self, name: str, x: Value, weight: Value) -> Value:
        if name == "mass":
            return x + weight
        return self.k.where((weight > x) | weight.is_nan(), weight, x)

    def _pool_rows(self, tile: KeyTile, col: Value) -> None:
        k, zero = self.k, self.k.constant(self.real, 0.0)
        row_bins, lanes = self.lanes.operand("row_bins") + tile.block.field("row"), tile.block.field("lanes")
        sums = [k.variable(zero) for _ in self.maps]
        with k.loop(lanes) as n:
            for name, x, source in zip(self.maps, sums, self._pooled_rows(tile), strict=True):
                x.value = self._pooled(name, x.value, source[n])
            here = row_bins[n]
            with k.when((row_bins[n + 1] != here) | (n + 1 == lanes)):
                for name, x in zip(self.maps, sums, strict=True):
                    map = tile.block.address(name)
                    map[here + col] = self._pooled(name, map[here + col], x.value)
                    x.value = zero
