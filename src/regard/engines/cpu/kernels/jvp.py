"""The tangent of forward along tangents of its inputs, in the same pass over the keys.

    Ṡ = tangent of score along scale · (Q̇ Kᵀ + Q K̇ᵀ), + ḃias         l̇se = Σ P Ṡ + p_sink · sink˙
    Ȯ = Σ P D (Ṡ V + V̇) − l̇se · O                                   Ḣ = −Σ P Ṡ (log P + 1) + l̇se · (Σ P − H)

Beside the sums of forward over the weights w = exp(S − m) it makes those over w Ṡ, which take another maximum and are
merged in the same way: four more products, or three more if the output is given. The output has the bits of forward.
"""

import math

from regard.engines.cpu.kernels.prefill import ManyQueries
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import Place
from regard.engines.cpu.language.types import I64, Type
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.jvp import TangentKind


class Tangent(ManyQueries):
    kind: TangentKind

    def __init__(self, k: Kernel, kind: TangentKind):
        super().__init__(k, kind)
        # From what products leave of Ṡ to natural numbers.
        self.tangent_scale: Value | float = 1.0 if kind.ruled else mathematics.LN_2
        if self.product_scale is not None:
            self.tangent_scale = self.product_scale * self.tangent_scale

    # Scores

    def _products_of_keys(self) -> list[tuple[str, Pointer, Pointer]]:
        """Also Ṡᵀ = K Q̇ᵀ + K̇ Qᵀ."""
        products, varies = super()._products_of_keys(), self.kind.varies
        if "q" in varies:
            products.append(("k", self.item.q_dot, self.tile.S_dot))
        if "k" in varies:
            products.append(("k_dot", self.item.q, self.tile.S_dot))
        return products

    @property
    def _biases(self) -> list[tuple[str, Type]]:
        return super()._biases + ([("bias_dot", self.kind.bias_dot)] if self.kind.bias_dot else [])

    def _ruled(self, s: Value, place: Place, prepared: list[Value | None] | None, at: Value) -> Value:
        kind, s_dot = self.kind, self.zero()
        if not (kind.ruled and kind.moves):
            return super()._ruled(s, place, prepared, at)
        if kind.varies & {"q", "k"}:
            s_dot = self.load(self.tile.S_dot, at) * self.tangent_scale
        if self.score is not None:
            results = self.score.at(Place({**place.leaves, "ds": s_dot}, place.dense), prepared)
            s, *more = (x.spread(self.W) for x in results)
            s_dot = more[0] if more else s_dot
        if kind.bias:
            s = s + self.load(self.near.bias, at)
        if kind.bias_dot:
            s_dot = s_dot + self.load(self.near.bias_dot, at)
        self.tile.S_dot[at] = s_dot
        return s

    # Weights and output

    def _weights_at(self, at: Value, shift: Value) -> tuple[list[Value], Value]:
        """Also w Ṡ, 0 where the pair is hidden."""
        weights, difference = super()._weights_at(at, shift)
        if self.kind.moves:
            s, s_dot = self.load(self.tile.P, at), self.load(self.tile.S_dot, at)
            if not self.kind.ruled:
                s_dot = s_dot * self.tangent_scale
            weights.append(self.k.where(s == -math.inf, self.zero(), weights[0] * s_dot))
        return weights, difference

    def _products_of_values(self) -> list[tuple[str, Pointer, Pointer]]:
        """Also Ȯᵀ ← rescale · Ȯᵀ + Vᵀ (P Ṡ)ᵀ + V̇ᵀ Pᵀ."""
        products = [] if self.kind.given else super()._products_of_values()
        if self.kind.moves:
            products.append(("v", self.tile.S_dot, self.span.O_dot))
        if "v" in self.kind.varies:
            products.append(("v_dot", self.tile.P, self.span.O_dot))
        return products

    # The end

    def _written(self) -> tuple[str, ...]:
        return ("out_dot",) if self.kind.given else ("out", "out_dot")

    def _finish(self) -> None:
        """Also l̇se and Ḣ, which lie where factors of spans did, and Ȯ."""
        k, kind, item, tile = self.k, self.kind, self.item, self.tile
        unit = 1.0 if kind.ruled else mathematics.LN_2
        with k.loop(self.B, step=self.W) as c:
            tile.old[c] = self._scaled(self.load(item.m, c)) * unit
        super()._finish()
        sinks = k.pointer("sink", self.real), k.pointer("sink_dot", self.real)
        with k.loop(self.B, step=self.W) as c:
            lse, factor = self.load(tile.top, c), self.load(tile.rescale, c)
            total, entropy = self.load(item.l, c) * factor, self.load(item.e, c)
            lse_dot = mean = bend = self.zero()
            if kind.moves:
                mean = lse_dot = self.load(item.l_dot, c) * factor
                shift = k.where(total == 0.0, mean, self.load(tile.old, c) - lse)
                bend = k.fma(self.load(item.e_dot, c) * factor, unit, mean * shift)
            if "sink" in kind.varies:
                h = item.h.load(c, self.W).to(I64) - self.word("h") + self.word("head")
                sink, sink_dot = (x.gather(h) for x in sinks)
                p_sink = mathematics.weight2(k, (sink - self._finite(lse)) * mathematics.LOG2_E)
                lse_dot = k.fma(p_sink, sink_dot, lse_dot)
            tile.old[c], tile.new[c] = lse_dot, lse_dot * (total - entropy) - (bend + mean)
        with self._outputs() as (at, of):
            moved = self.load(item.O_dot, at) * of(tile.rescale)
            item.O_dot[at] = k.fma(-of(tile.old), self.load(self.output, at), moved)

    @property
    def output(self) -> Pointer:
        """The item's output when it is done."""
        found: Pointer = self.own.O_dot if self.kind.given else self.item.O
        return found

    def _divide(self) -> None:
        if not self.kind.given:
            super()._divide()
            return
        strides = [self.k.integer(f"out_{axis}") for axis in ("head", "row", "feature")]
        self._turn(self.address("out", self.kind.element), strides, self.d_v, self.output, 1.0)

    def _write(self) -> None:
        k = self.k
        if not self.kind.given:
            super()._write()
        strides = k.integer("out_dot_head"), k.integer("out_dot_row")
        self._turn_back(self.item.O_dot, self.d_v, self.address("out_dot", self.kind.element), *strides)

        def lane(n: Value, g: Value, r: Value) -> None:
            with k.when(n < self.word("lanes")):
                row = g * k.integer("row_head") + r
                self.address("lse_dot", self.real)[row] = self.tile.old[n]
                self.address("entropy_dot", self.real)[row] = self.tile.new[n]

        self.each_lane(lane)
