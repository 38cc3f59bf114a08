"""The end of forward: O / l, lse, the entropy and the largest weights of a query block."""

import math

from regard.engines.cpu.kernels.best_keys import BestKeyLists
from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.layout import LaneLayout
from regard.engines.cpu.kernels.softmax import RunningSoftmax, finite, is_large
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.spec.scratch import SplitState, TileScratch


class Finish:
    """The results of a query block from its sums.

    `scratch.top` becomes lse, `scratch.rescale` the factor of outputs; in the block's state `e` becomes the entropy and
    `m` the largest weight.
    """

    def __init__(
        self, lanes: Lanes, scratch: TileScratch, own: SplitState, softmax: RunningSoftmax, layout: LaneLayout
    ):
        self.k, self.spec, self.real, self.lanes = lanes.k, lanes.spec, lanes.real, lanes
        self.scratch, self.own, self.softmax, self.layout = scratch, own, softmax, layout

    def compute(self, block: RowBlock) -> None:
        """Add the sink; compute O / l, lse, entropy and the largest weight."""
        k, spec, state, softmax, load = self.k, self.spec, block.state, self.softmax, self.lanes.load
        one, zero = k.constant(self.real, 1.0).spread(self.lanes.W), self.lanes.zero()
        natural_scale, sinks = softmax.natural_scale, k.pointer("sink", self.real)
        with k.loop(self.lanes.B, step=self.lanes.W) as c:
            largest, l = load(state.m, c), load(state.l, c)
            m_old = softmax.scaled(largest)
            m, old = m_old, one
            if spec.sink:
                position = state.h.load(c, self.lanes.W).to(I64) - block.field("h") + block.field("head")
                sink = sinks.gather(position)
                sink = sink if spec.ruled else sink * mathematics.LOG2_E
                m = k.maximum(m_old, sink)
                shift = finite(k, m)
                old = softmax.power(m_old - shift)
                l = k.fma(l, old, softmax.power(sink - shift))
            inverse = k.where(l == 0.0, zero, one / l)
            natural = m * natural_scale
            if spec.sink and not spec.ruled:  # a large sink without rounding: its gradient is exp(sink − lse)
                natural = k.where(is_large(k, m, m) & (m == sink), sinks.gather(position), natural)
            self.scratch.top[c] = natural + mathematics.log(k, l)  # lse
            if spec.entropy:
                own_sum, e = load(state.l, c), load(state.e, c) * natural_scale
                if spec.sink:
                    e = softmax.moved(e, own_sum, old, (m_old - finite(k, m)) * natural_scale)
                positive = k.where(l == 0.0, one, l)
                state.e[c] = (own_sum * old * mathematics.log(k, positive) - e) / positive
            factor = old * inverse
            before, after = softmax.reference(largest)
            for n in range(spec.best):
                s = load(state.values, n * self.lanes.B, c)
                weight = softmax.weight(s if before is None else s - before, -after)[0] * (old * inverse)
                state.values[n * self.lanes.B + c] = k.where(s == -math.inf, zero, weight)
            # The largest weight is that of a key, not of the sink.
            heaviest = factor
            if before is not None:
                heaviest = k.where(l == 0.0, zero, softmax.weight(largest - before, -after)[0] * old / l)
            state.m[c] = k.where(load(state.l, c) == 0.0, zero, heaviest)
            self.scratch.rescale[c] = factor
        self.divide(block)

    def divide(self, block: RowBlock) -> None:
        """Divide the output by l."""
        with self.layout.outputs(block) as (at, of):
            block.state.O[at] = self.lanes.load(block.state.O, at) * of(self.scratch.rescale) + 0.0  # not −0

    def store(self, block: RowBlock) -> None:
        """Store the results in the call's arrays."""
        self.layout.store_output(block)
        k, spec, state = self.k, self.spec, block.state
        lanes = block.field("lanes")

        def lane(n: Value, g: Value, r: Value) -> None:
            with k.when(n < lanes):
                row = g * k.integer("row_head") + r
                block.address("lse")[row] = self.scratch.top[n]
                if spec.entropy:
                    block.address("entropy")[row] = state.e[n]
                with k.when(block.has("max")):
                    block.address("max")[row] = state.m[n]
                best, place = BestKeyLists(self.lanes).of(state), row * spec.best
                for x in range(spec.best):
                    block.address("values")[place + x] = best.values[n + x * self.lanes.B]
                    block.address("indices")[place + x] = best.indices[n + x * self.lanes.B].to(I64)

        block.each_lane(lane)
