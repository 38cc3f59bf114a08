"""The tangent of forward, in the same pass over the keys.

    Ṡ = tangent of score along scale · (Q̇ Kᵀ + Q K̇ᵀ), + ḃias         l̇se = Σ P Ṡ + p_sink · sink˙
    Ȯ = Σ P D (Ṡ V + V̇) − l̇se · O                                   Ḣ = −Σ P Ṡ (log P + 1) + l̇se · (Σ P − H)

In addition to forward's sums over w = exp(S − m) it computes those over w Ṡ, which are rescaled and merged alike. That
is four more products, or three if the output is given. The output has the bits of forward.
"""

import math
from collections.abc import Mapping

from regard.engines.cpu.kernels.prefill import PrefillKernel
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.specs import TangentSpec


class TangentKernel(PrefillKernel):
    """The tangent kernel."""

    spec: TangentSpec

    def __init__(self, k: Kernel, spec: TangentSpec):
        super().__init__(k, spec)
        # From the products Ṡ to natural numbers.
        self.tangent_scale: Value | float = 1.0 if spec.ruled else mathematics.LN_2
        if self.product_scale is not None:
            self.tangent_scale = self.product_scale * self.tangent_scale

    # QK products

    def _qk_products(self, tile: KeyTile) -> list[tuple[str, Pointer, Pointer]]:
        """Return also Ṡᵀ = K Q̇ᵀ + K̇ Qᵀ."""
        products, varies = super()._qk_products(tile), self.spec.varies
        if "q" in varies:
            products.append(("k", self.block.q_dot, tile.scratch.S_dot))
        if "k" in varies:
            products.append(("k_dot", self.block.q, tile.scratch.S_dot))
        return products

    def _ruled(
        self,
        tile: KeyTile,
        s: Value,
        context: TileContext,
        prepared: list[Value | None] | None,
        at: Value,
        biases: Mapping[str, Pointer],
    ) -> Value:
        spec, s_dot = self.spec, self.zero()
        if not (spec.ruled and spec.moves):
            return super()._ruled(tile, s, context, prepared, at, biases)
        if spec.varies & {"q", "k"}:
            s_dot = self.load(tile.scratch.S_dot, at) * self.tangent_scale
        if self.score is not None:
            results = self.score.at(TileContext({**context.leaves, "ds": s_dot}, context.dense), prepared)
            s, *more = (x.spread(self.W) for x in results)
            s_dot = more[0] if more else s_dot
        if spec.bias:
            s = s + self.load(biases["bias"], at)
        if spec.bias_dot:
            s_dot = s_dot + self.load(biases["bias_dot"], at)
        tile.scratch.S_dot[at] = s_dot
        return s

    # Softmax and PV products

    def _weights_at(self, tile: KeyTile, at: Value, shift: Value) -> tuple[list[Value], Value]:
        """Compute also w Ṡ, 0 where the pair is hidden."""
        weights, difference = super()._weights_at(tile, at, shift)
        if self.spec.moves:
            s, s_dot = self.load(tile.scratch.P, at), self.load(tile.scratch.S_dot, at)
            if not self.spec.ruled:
                s_dot = s_dot * self.tangent_scale
            weights.append(self.k.where(s == -math.inf, self.zero(), weights[0] * s_dot))
        return weights, difference

    def _pv_products(self, tile: KeyTile) -> list[tuple[str, Pointer, Pointer]]:
        """Return also Ȯᵀ ← rescale · Ȯᵀ + Vᵀ (P Ṡ)ᵀ + V̇ᵀ Pᵀ."""
        products = [] if self.spec.given else super()._pv_products(tile)
        if self.spec.moves:
            products.append(("v", tile.scratch.S_dot, self.split.O_dot))
        if "v" in self.spec.varies:
            products.append(("v_dot", tile.scratch.P, self.split.O_dot))
        return products

    # Finishing

    def _finish(self) -> None:
        """Compute also l̇se and Ḣ, in the place of the factors of merging, and Ȯ."""
        k, spec, block, tile = self.k, self.spec, self.block, self.tile
        natural_scale = 1.0 if spec.ruled else mathematics.LN_2
        with k.loop(self.B, step=self.W) as c:
            tile.old[c] = self._scaled(self.load(block.m, c)) * natural_scale
        super()._finish()
        sinks = k.pointer("sink", self.real), k.pointer("sink_dot", self.real)
        with k.loop(self.B, step=self.W) as c:
            lse, factor = self.load(tile.top, c), self.load(tile.rescale, c)
            total, entropy = self.load(block.l, c) * factor, self.load(block.e, c)
            lse_dot = mean = entropy_term = self.zero()
            if spec.moves:
                mean = lse_dot = self.load(block.l_dot, c) * factor
                shift = k.where(total == 0.0, mean, self.load(tile.old, c) - lse)
                entropy_term = k.fma(self.load(block.e_dot, c) * factor, natural_scale, mean * shift)
            if "sink" in spec.varies:
                h = block.h.load(c, self.W).to(I64) - self.field("h") + self.field("head")
                sink, sink_dot = (x.gather(h) for x in sinks)
                p_sink = mathematics.weight2(k, (sink - self._finite(lse)) * mathematics.LOG2_E)
                lse_dot = k.fma(p_sink, sink_dot, lse_dot)
            tile.old[c], tile.new[c] = lse_dot, lse_dot * (total - entropy) - (entropy_term + mean)
        with self._outputs() as (at, of):
            moved = self.load(block.O_dot, at) * of(tile.rescale)
            block.O_dot[at] = k.fma(-of(tile.old), self.load(self.output, at), moved)

    @property
    def output(self) -> Pointer:
        """The block's output when it is done."""
        return self.own.O_dot if self.spec.given else self.block.O

    def _divide(self) -> None:
        if not self.spec.given:
            super()._divide()
            return
        strides = self.strides("out")
        self._transpose(self.address("out"), strides, self.d_v, self.output, 1.0)

    def _write(self) -> None:
        k = self.k
        if not self.spec.given:
            super()._write()
        strides = self.strides("out_dot")
        self._transpose_back(self.block.O_dot, self.d_v, self.address("out_dot"), *strides)

        def lane(n: Value, g: Value, r: Value) -> None:
            with k.when(n < self.field("lanes")):
                row = g * k.integer("row_head") + r
                self.address("lse_dot")[row] = self.tile.old[n]
                self.address("entropy_dot")[row] = self.tile.new[n]

        self.each_lane(lane)
