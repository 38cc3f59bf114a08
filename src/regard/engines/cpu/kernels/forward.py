"""Forward: the online softmax, one key split after the other.

    O = softmax(score(scale · Q Kᵀ) + bias) V

- A *query block* is some queries that share a key and a value head.
- A *tile* is KEYS keys, counted from the absolute position j = 0.
- A *key split* is a run of tiles, as long as `split_bits` says. Each has its own running maximum, sum and output, and
  splits are merged in order. So a query meets the same numbers in the same order, whatever else the call holds.
- A *work group* is some query blocks with the same keys. All of them use a key split before the next, so that its tiles
  are read from memory, and converted if need be, once.

A layout computes tiles: `Prefill` has a query in every lane, `Decode` a key. Both do the same operations on every
number in the same order, so the choice is one of speed alone.
"""

import math
from collections.abc import Callable

from regard.engines.cpu.kernels.best_keys import BestKeys
from regard.engines.cpu.kernels.blocks import RowBlock, each_step, each_work_group
from regard.engines.cpu.kernels.decode import Decode
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.prefill import Prefill
from regard.engines.cpu.kernels.products import ForwardTerms
from regard.engines.cpu.kernels.rules import Rules
from regard.engines.cpu.kernels.softmax import RunningSoftmax, finite, is_large
from regard.engines.cpu.kernels.splits import KeySplits, LaneLayout, Loaded, Split
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.amx import AmxRegisters
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.scratch import SplitState, TileScratch, block_scratch, split_scratch, tile_scratch
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import CARRIED, RESUMED, SPLIT_TILES


class ForwardKernel:
    """The forward kernel; its tangent has more terms and results."""

    def __init__(self, k: Kernel, spec: KernelSpec, terms: type[ForwardTerms] = ForwardTerms):
        self.lanes = lanes = Lanes(k, spec)
        self.k, self.spec, self.real = k, lanes.spec, lanes.real
        rules, self.softmax = Rules(lanes), RunningSoftmax(lanes)
        self.scratch = TileScratch(k.pointer("scratch", self.real), tile_scratch(spec, lanes.d, lanes.d_v))
        self.own = SplitState(self.scratch.end, split_scratch(spec, lanes.d_v))
        self.best, self.splits = BestKeys(lanes), KeySplits(lanes, self.scratch)
        self.registers = AmxRegisters(k) if spec.amx and not spec.decode_rows else None
        self.layout: LaneLayout
        if spec.decode_rows:
            self.layout = Decode(lanes, rules, self.softmax, self.splits)
        else:
            row_terms = terms(lanes, rules, self.softmax)
            self.layout = Prefill(lanes, rules, self.softmax, self.splits, row_terms, self.registers)

    def run(self) -> None:
        each_work_group(self.lanes, self.registers, self.work_group)

    def work_group(self, first: Value, stop: Value, following: Value) -> None:
        """Take query blocks from `first` to before `stop` through the key splits."""
        k, spec = self.k, self.spec
        sizes = *block_scratch(spec, self.lanes.d).values(), *split_scratch(spec, self.lanes.d_v).values()
        size = sum(sizes, k.whole(0))

        def each(work: Callable[[RowBlock], None]) -> None:
            with k.loop(stop, start=first) as n:
                work(RowBlock(self.lanes, n, self.own.end + (n - first) * size, (first, stop, following)))

        each(self.begin)

        def discard_copies(_: Value) -> None:
            if spec.copies:
                ready = self.scratch.ready.of(I64)
                for slot in range(SPLIT_TILES):
                    ready[slot] = k.constant(I64, 0)

        def split(block: RowBlock) -> None:
            with k.when(block.state.cursor[0] == block.field("tiles")):
                self.layout.prepare_queries(block)
            self.split(block)

        each_step(k, each, self.splits.next, discard_copies, split)
        each(self.end)

    def begin(self, block: RowBlock) -> None:
        """Start a block, merged with its splits if they ran separately."""
        k, lanes = self.k, self.lanes
        self.start(block)
        if self.spec.carried:
            with k.when((block.field("splits") & RESUMED) != 0):
                self.copy_state(block.address("split_state"), block.merged.m)
            return
        self.best.clear(block.merged)
        states, layout = block.address("split_state"), split_scratch(self.spec, lanes.d_v)
        splits = SplitState(states, layout)
        with k.loop(block.field("splits")) as n:
            size = sum(split_scratch(self.spec, lanes.d_v).values(), k.whole(0)) * n
            split = splits.moved((name, size) for name in layout)
            self.merge(block, split)
            self.best.merge(block.merged, split)

    def copy_state(self, source: Pointer, into: Pointer) -> None:
        """Copy the state of merged splits."""
        size = sum(split_scratch(self.spec, self.lanes.d_v).values(), self.k.whole(0))
        with self.k.loop(size, step=self.lanes.W) as x:
            into[x] = source.load(x, self.lanes.W)

    def start(self, block: RowBlock) -> None:
        """Start a block at its first tile with m = −∞, l = 0 and O = 0."""
        block.state.cursor[0] = block.field("tiles")
        block.each_lane(block.index_lane)
        self.empty(block, block.merged)

    def empty(self, block: RowBlock, state: SplitState) -> None:
        """Set maximum, sums and outputs to those of no keys."""
        self.lanes.fill(state.m, -math.inf)
        for name in self.spec.row_sums:
            self.lanes.fill(state[name], 0.0)
        for name in self.spec.outputs:
            with self.layout.outputs(block) as (at, _):
                state[name][at] = self.lanes.zero()

    def split(self, block: RowBlock) -> None:
        """Compute the tiles of the block's next key split."""
        k = self.k
        separate, split_state, first = block.has("split_state"), block.address("split_state"), block.state.cursor[0]
        # A merge with nothing changes nothing: the first split is summed in its final place.
        alone = first == block.field("tiles")
        if self.spec.carried:
            separate, alone = ~separate, alone & ((block.field("splits") & RESUMED) == 0)
        home = k.where(separate, split_state.address, k.where(alone, block.merged.m.address, self.own.m.address))
        state = SplitState(k.at(home, self.real), split_scratch(self.spec, self.lanes.d_v))
        if self.spec.best:
            with k.when(separate):
                self.best.clear(state)
            places = (state.values, block.merged.values), (state.indices, block.merged.indices)
            homes = [k.where(separate, x.address, y.address) for x, y in places]
            state.values, state.indices = (k.at(home, self.real) for home in homes)
        # A hidden NaN or infinity in V makes 0 · NaN. If a NaN shows, compute the split again without hidden values.
        split = Split(block, state, k.variable(k.constant(I64, 0)))
        repeat, t = k.variable(k.constant(I64, 1)), k.variable(first)
        with k.loop_while(lambda: repeat.value != 0):
            self.empty(block, state)
            t.value = self.layout.compute(split, first)
            repeat.value = (self.has_nan(split) & (split.exclude_hidden.value == 0)).to(I64)
            split.exclude_hidden.value = k.constant(I64, 1)
        block.state.cursor[0] = t.value
        with k.when(~separate & ~alone):
            self.merge(block, state)

    def has_nan(self, split: Split) -> Value:
        """Test the outputs of a split for NaN."""
        k, bad = self.k, self.k.variable(self.lanes.zero())
        for name in self.spec.outputs:
            with self.layout.outputs(split.block) as (at, _):
                o = self.lanes.load(split.state[name], at)
                bad.value = k.where(o.is_nan(), o, bad.value)
        return bad.value.is_nan().any()

    def merge(self, block: RowBlock, split: SplitState) -> None:
        """Merge a split's state into the block's: O ← old · O + new · O of the split."""
        self.softmax.merge(block.merged, split, self.scratch)
        for name in self.spec.outputs:
            O, part = block.merged[name], split[name]
            with self.layout.outputs(block) as (at, of):
                merged = self.lanes.load(O, at), of(self.scratch.old), self.lanes.load(part, at) * of(self.scratch.new)
                O[at] = self.k.fma(*merged)

    def end(self, block: RowBlock) -> None:
        """Divide by l and store the results, unless splits run separately."""
        if self.spec.carried:
            with self.k.choice((block.field("splits") & CARRIED) != 0) as (carried, last):
                with carried:
                    self.copy_state(block.merged.m, block.address("split_state"))
                with last:
                    self.finish(block)
                    self.store(block)
            return
        with self.k.when(~block.has("split_state") | (block.field("splits") != 0)):
            self.finish(block)
            self.store(block)

    def finish(self, block: RowBlock) -> None:
        """Add the sink; compute O / l, lse, entropy and the largest weight.

        `scratch.top` becomes lse, `scratch.rescale` the factor of sums; in `merged`, `e` becomes the entropy, `m` the
        largest weight, and `l_rounded` the factor of outputs.
        """
        k, spec, state, softmax, load = self.k, self.spec, block.merged, self.softmax, self.lanes.load
        one, zero = k.constant(self.real, 1.0).spread(self.lanes.W), self.lanes.zero()
        with k.loop(self.lanes.B, step=self.lanes.W) as c:
            largest, l = load(state.m, c), load(state.l, c)
            old = one
            if spec.sink:
                natural, below, sink_below = self.with_sink(largest, self.sink(block, c))
                old = softmax.power(below)
                sink_weight = softmax.power(sink_below)
                l = k.fma(l, old, sink_weight)
            inverse = k.where(l == 0.0, zero, one / l)
            if not spec.sink:
                natural = softmax.natural_maximum(largest)
            self.scratch.top[c] = natural + mathematics.log(k, l)  # lse
            if spec.entropy:
                own_sum, e = load(state.l, c), load(state.e, c) * softmax.natural_scale
                if spec.sink:
                    e = softmax.moved(e, own_sum, old, below * softmax.natural_scale)
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
            if spec.paired:  # each weight is a part of what is summed: values that are alike give themselves
                total = load(state.l_rounded, c)
                if spec.sink:
                    total = k.fma(total, old, sink_weight)
                state.l_rounded[c] = k.where(total == 0.0, zero, old / total)
        self.divide(block)

    def with_sink(self, largest: Value, sink: Value) -> tuple[Value, Value, Value]:
        """Return the maximum of scores and sinks, and how far both are below it.

        largest: the maximum of scores. Distances are in the scale of exponents. Large sinks are not scaled: that may
        overflow, and it rounds them, but their gradient is exp(sink − lse).
        """
        k, natural, scaled = self.k, self.softmax.natural_maximum(largest), self.softmax.scaled(largest)
        scaled_sink = sink if self.spec.ruled else sink * mathematics.LOG2_E
        m = k.maximum(scaled, scaled_sink)
        shift, top = finite(k, m), k.maximum(natural, sink)
        below, sink_below = scaled - shift, scaled_sink - shift
        if not self.spec.ruled:
            far = is_large(k, top, top * mathematics.LOG2_E)
            below = k.where(far, (natural - top) * mathematics.LOG2_E, below)
            sink_below = k.where(far, (sink - top) * mathematics.LOG2_E, sink_below)
            top = k.where(far, top, m * mathematics.LN_2)
        alone = (natural == -math.inf) & ~(sink < math.inf)  # NaN, or ∞ − ∞ would be
        return top, k.where(alone, natural, below), k.where(alone, self.lanes.zero(), sink_below)

    def sink(self, block: RowBlock, c: Value) -> Value:
        """Return the sinks of a vector of lanes."""
        head = block.state.h.load(c, self.lanes.W).to(I64) - block.field("h") + block.field("head")
        return self.lanes.operand("sink").gather(head)

    def divide(self, block: RowBlock) -> None:
        """Divide the output by l."""
        with self.layout.outputs(block) as (at, of):
            block.merged.O[at] = self.lanes.load(block.merged.O, at) * self.output_factor(block, of) + 0.0  # not −0

    def output_factor(self, block: RowBlock, of: Loaded) -> Value:
        """Return the factor of outputs; `of` loads the numbers of their rows."""
        if not self.spec.paired:
            return of(self.scratch.rescale)
        factor = of(block.merged.l_rounded)
        return factor * self.k.real("keep_scale", self.real) if self.spec.dropout else factor

    def store(self, block: RowBlock) -> None:
        """Store the results in the call's arrays."""
        self.layout.store_output(block)
        k, spec, state = self.k, self.spec, block.merged
        lanes = block.field("lanes")

        def lane(n: Value, g: Value, r: Value) -> None:
            with k.when(n < lanes):
                row = g * k.integer("row_head") + r
                block.address("lse")[row] = self.scratch.top[n]
                if spec.entropy:
                    block.address("entropy")[row] = state.e[n]
                with k.when(block.has("max")):
                    block.address("max")[row] = state.m[n]
                place = row * spec.best
                for x in range(spec.best):
                    block.address("values")[place + x] = state.values[n + x * self.lanes.B]
                    block.address("indices")[place + x] = self.best.indices(state)[n + x * self.lanes.B].to(I64)

        block.each_lane(lane)
