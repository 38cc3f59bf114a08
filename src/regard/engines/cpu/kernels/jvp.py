"""The tangent of forward, in the same pass over the keys.

    Ṡ = tangent of score along scale · (Q̇ Kᵀ + Q K̇ᵀ), + ḃias         l̇se = Σ P Ṡ + p_sink · sink˙
    Ȯ = Σ P D (Ṡ V + V̇) − l̇se · O                                   Ḣ = −Σ P Ṡ (log P + 1) + l̇se · (Σ P − H)

In addition to forward's sums over w = exp(S − m) it computes those over w Ṡ, which are rescaled and merged alike. That
is four more products, or three if the output is given. The output has the bits of forward.
"""

import math
from collections.abc import Mapping

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.forward import ForwardKernel
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.products import ForwardTerms, TileProduct
from regard.engines.cpu.kernels.rules import RuleRows, Rules
from regard.engines.cpu.kernels.softmax import RunningSoftmax, finite
from regard.engines.cpu.kernels.splits import Split
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.kernels.transposes import Transposes
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.specs import TangentSpec


class TangentKernel(ForwardKernel):
    """The tangent kernel: prefill with the terms below."""

    spec: TangentSpec

    def __init__(self, k: Kernel, spec: TangentSpec):
        super().__init__(k, spec, TangentTerms)

    def finish(self, block: RowBlock) -> None:
        """Compute also Ȯ, l̇se in `scratch.old` and Ḣ in `scratch.new`."""
        k, spec, lanes, load = self.k, self.spec, self.lanes, self.lanes.load
        state, scratch = block.merged, self.scratch
        natural_scale = self.softmax.natural_scale
        with k.loop(lanes.B, step=lanes.W) as c:
            scratch.old[c] = self.softmax.natural_maximum(load(state.m, c))
        super().finish(block)
        sinks = [lanes.operand(name) for name in ("sink", "sink_dot") if "sink" in spec.varies]
        with k.loop(lanes.B, step=lanes.W) as c:
            lse, factor = load(scratch.top, c), load(scratch.rescale, c)
            total, entropy = load(state.l, c) * factor, load(state.e, c)
            lse_dot = mean = entropy_term = lanes.zero()
            if spec.moves:
                mean = lse_dot = load(state.l_dot, c) * factor
                shift = k.where(total == 0.0, mean, load(scratch.old, c) - lse)
                entropy_term = k.fma(load(state.e_dot, c) * factor, natural_scale, mean * shift)
            if "sink" in spec.varies:
                h = block.state.h.load(c, lanes.W).to(I64) - block.field("h") + block.field("head")
                sink, sink_dot = (x.gather(h) for x in sinks)
                below = k.where(lse == math.inf, lanes.zero(), sink - finite(k, lse))
                p_sink = mathematics.weight2(k, below * mathematics.LOG2_E)
                lse_dot = k.fma(p_sink, sink_dot, lse_dot)
            scratch.old[c], scratch.new[c] = lse_dot, lse_dot * (total - entropy) - (entropy_term + mean)
            if spec.paired and spec.moves:  # of the sums that Ȯ has, so that values that are alike cancel
                rounded = load(state.l_dot_rounded, c) * load(state.l_rounded, c)
                state.l_dot_rounded[c] = rounded + (lse_dot - mean)
        output = self.own.O_dot if spec.reads_output else state.O
        centre = state.l_dot_rounded if spec.paired and spec.moves else scratch.old
        with self.layout.outputs(block) as (at, of):
            moved = load(state.O_dot, at) * self.output_factor(block, of)
            state.O_dot[at] = k.fma(-of(centre), load(output, at), moved)
        if spec.low:  # Ȯ cancels where weights saturate, so O is as exact as its remainder makes it
            self._read(block, "low")
            with self.layout.outputs(block) as (at, of):
                state.O_dot[at] = k.fma(-of(centre), load(self.own.O_dot, at), load(state.O_dot, at))

    def divide(self, block: RowBlock) -> None:
        """Divide the output by l, or read it if it is given."""
        if not self.spec.reads_output:
            super().divide(block)
            return
        self._read(block, "out")

    def _read(self, block: RowBlock, name: str) -> None:
        """Read an output that is given into the scratch of Ȯ, which is merged by then."""
        strides = block.strides(name)
        Transposes(self.lanes).to_lanes(block, block.address(name), strides, self.lanes.d_v, self.own.O_dot, 1.0)

    def store(self, block: RowBlock) -> None:
        k = self.k
        if not self.spec.reads_output:
            super().store(block)
        strides = block.strides("out_dot")
        into = block.address("out_dot")
        Transposes(self.lanes).to_rows(block, block.merged.O_dot, self.lanes.d_v, into, *strides)

        def lane(n: Value, g: Value, r: Value) -> None:
            with k.when(n < block.field("lanes")):
                row = g * k.integer("row_head") + r
                block.address("lse_dot")[row] = self.scratch.old[n]
                block.address("entropy_dot")[row] = self.scratch.new[n]

        block.each_lane(lane)


class TangentTerms(ForwardTerms):
    """Forward's terms and their tangents."""

    spec: TangentSpec

    def __init__(self, lanes: Lanes, rules: Rules, softmax: RunningSoftmax):
        super().__init__(lanes, rules, softmax)
        # From the products Ṡ to natural numbers.
        self.tangent_scale: Value | float = softmax.natural_scale
        if softmax.product_scale is not None:
            self.tangent_scale = softmax.product_scale * self.tangent_scale

    def qk(self, tile: KeyTile) -> list[TileProduct]:
        """Return also Ṡᵀ = K Q̇ᵀ + K̇ Qᵀ."""
        products, varies, state = super().qk(tile), self.spec.varies, tile.block.state
        if "q" in varies:
            products.append(TileProduct("k", state.q_dot, tile.scratch.S_dot))
        if "k" in varies:
            products.append(TileProduct("k_dot", state.q, tile.scratch.S_dot))
        return products

    def score(
        self, tile: KeyTile, context: TileContext, rows: RuleRows, at: Value, biases: Mapping[str, Pointer]
    ) -> Value:
        """Compute also Ṡ."""
        spec, load, s_dot = self.spec, self.lanes.load, self.lanes.zero()
        if not (spec.ruled and spec.moves):
            return super().score(tile, context, rows, at, biases)
        if spec.varies & {"q", "k"}:
            s_dot = load(tile.scratch.S_dot, at) * self.tangent_scale
        s, *more = self.rules.scores(TileContext({**context.leaves, "ds": s_dot}, context.dense), rows)
        s_dot = more[0] if more else s_dot
        if spec.bias:
            s = s + load(biases["bias"], at)
        if spec.bias_dot:
            s_dot = s_dot + load(biases["bias_dot"], at)
        tile.scratch.S_dot[at] = s_dot
        return s

    def weights(self, tile: KeyTile, at: Value, shift: Value) -> tuple[list[Value], Value]:
        """Compute also w Ṡ, 0 where the pair is hidden."""
        weights, difference = super().weights(tile, at, shift)
        if self.spec.moves:
            s, s_dot = self.lanes.load(tile.scratch.P, at), self.lanes.load(tile.scratch.S_dot, at)
            if not self.spec.ruled:
                s_dot = s_dot * self.tangent_scale
            weights.append(self.k.where(s == -math.inf, self.lanes.zero(), weights[0] * s_dot))
        return weights, difference

    def pv(self, split: Split, tile: KeyTile) -> list[TileProduct]:
        """Return also Ȯᵀ ← rescale · Ȯᵀ + Vᵀ (P Ṡ)ᵀ + V̇ᵀ Pᵀ."""
        products = [] if self.spec.reads_output else super().pv(split, tile)
        if self.spec.moves:
            products.append(TileProduct("v", tile.scratch.S_dot, split.state.O_dot))
        if "v" in self.spec.varies:
            products.append(TileProduct("v_dot", tile.scratch.P, split.state.O_dot))
        return products
