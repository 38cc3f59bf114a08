"""Forward: the online softmax, one key split after the other.

    O = softmax(score(scale · Q Kᵀ) + bias) V

- A *query block* is some queries that share a key and a value head.
- A *tile* is KEYS keys, counted from the absolute position j = 0.
- A *key split* is a run of tiles, as long as `split_bits` says. Each has its own running maximum, sum and output, and
  splits are merged in order. So a query meets the same numbers in the same order, whatever else the call holds.
- A *work group* is some query blocks with the same keys. All of them use a key split before the next, so that its tiles
  are read from memory, and converted if need be, once.

Subclasses compute tiles: `PrefillKernel` has a query in every lane, `DecodeKernel` a key. Both do the same operations
on every number in the same order, so the choice is one of speed alone.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from regard.engines.cpu.kernels.copies import Copies
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import F32, I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.scratch import SplitState, TileScratch, block_scratch, split_scratch, tile_scratch
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import SPLIT_TILES, TILE_BITS


class BestKeys(NamedTuple):
    """The largest scores of every lane so far, in falling order, and their columns.

    −∞ and −1 for none.
    """

    values: Pointer
    indices: Pointer


class ForwardKernel(Copies):
    """The part that prefill and decode share.

    That is work groups, key splits, merging, and the end.
    """

    following: Pointer  # the record of the next query block
    leading: Value  # true for the first query block of its work group
    place: Value  # the list index of the current tile

    def __init__(self, k: Kernel, spec: KernelSpec):
        super().__init__(k, spec)
        self.scale2 = mathematics.LOG2_E if spec.ruled else 1.0  # from scores to logarithms of base 2
        scale = k.real("scale", spec.real) * (1.0 if spec.ruled else mathematics.LOG2_E)
        # Queries take the scale. Packed bf16 pairs would lose bits by it, and take its sign alone.
        self.query_scale, self.product_scale = scale, None
        if spec.paired:
            one = k.constant(spec.real, 1.0)
            self.query_scale, self.product_scale = (
                k.where(scale < 0.0, -one, one),
                k.intrinsic("fabs", spec.real, scale),
            )
        # The factor from maxima to the scale of exponents.
        self.maximum_scale = None if spec.ruled else self.product_scale
        self.tile = TileScratch(k.pointer("scratch", self.real), tile_scratch(spec, self.d, self.d_v))
        self.own = SplitState(self.tile.end, split_scratch(spec, self.d_v))
        self.rest = self.own.end

    # Query blocks

    def _block_scratch(self) -> Mapping[str, Any]:
        return block_scratch(self.spec, self.d, self.d_v)

    def _work_group(self, first: Value, stop: Value) -> None:
        k = self.k
        sizes = sum(block_scratch(self.spec, self.d, self.d_v).values(), k.whole(0))

        def each(work: Callable[[], None]) -> None:
            with k.loop(stop, start=first) as n:
                self._open(n, self.rest + (n - first) * sizes)
                self.leading = n == first
                following = k.where(n + 1 < stop, n + 1, self.next_work_group)
                self.following = k.pointer("blocks", I64) + following * len(self.spec.block_fields)
                work()

        each(self._begin)
        none = k.constant(I64, 2**62)
        current = k.variable(none)

        def find() -> None:
            current.value = k.minimum(current.value, self._next_split(none))

        def pass_over() -> None:
            with k.when(self._next_split(none) == current.value):
                with k.when(self.block.cursor[0] == self.field("tiles")):
                    self._prepare_queries()
                self._split()

        each(find)
        with k.loop_while(lambda: current.value != none):
            if self.spec.copies:
                ready = self.tile.ready.of(I64)
                for slot in range(SPLIT_TILES):
                    ready[slot] = k.constant(I64, 0)
            each(pass_over)
            current.value = none
            each(find)
        each(self._end)

    def _split_of(self, word: Value) -> Value:
        return ((word >> TILE_BITS) + self.k.integer("first_tile")) >> self.k.integer("split_bits")

    def _next_split(self, none: Value) -> Value:
        """Return the key split of the block's next tile."""
        k = self.k
        found, cursor = k.variable(none), self.block.cursor[0]
        with k.when(cursor < self.field("tiles") + self.field("count")):
            found.value = self._split_of(k.pointer("tiles", I64)[cursor])
        return found.value

    # Lanes

    @contextmanager
    def _outputs(self) -> Iterator[tuple[Value, Callable[[Pointer], Value]]]:
        """Loop over the vectors of an output.

        Yield their offset, and a function that loads its lanes of a row.
        """
        with self.k.loop(self.d_v) as a, self.k.loop(self.B, step=self.W) as c:
            yield a * self.B + c, lambda p: self.load(p, c)

    def _begin(self) -> None:
        k, block = self.k, self.block
        block.cursor[0] = self.field("tiles")
        self.each_lane(self._begin_lane)
        self._empty(block)
        self._clear_best(self._best(block))
        # Merge key splits that ran separately.
        states, layout = self.address("split_state"), split_scratch(self.spec, self.d_v)
        splits = SplitState(states, layout)
        with k.loop(self.field("splits")) as n:
            size = sum(split_scratch(self.spec, self.d_v).values(), k.whole(0)) * n
            split = splits.moved((name, size) for name in layout)
            self._merge(split)
            self._merge_best(self._best(split))

    def _empty(self, split: SplitState) -> None:
        """Set maximum, sums and outputs of a split to those of no keys."""
        self.fill(split.m, -math.inf)
        for name in (name for both in self.spec.sums for name in both):
            self.fill(split[name], 0.0)
        for name in self.spec.outputs:
            with self._outputs() as (at, _):
                split[name][at] = self.zero()

    @abstractmethod
    def _prepare_queries(self) -> None:
        """Store the block's queries in the layout of the products."""

    # Key splits and tiles

    def _split(self) -> None:
        """Compute the tiles of the block's next key split."""
        k, block = self.k, self.block
        separate, split_state, first = self.has("split_state"), self.address("split_state"), block.cursor[0]
        # A merge with nothing changes nothing: the first split is summed in its final place.
        alone = first == self.field("tiles")
        home = k.where(separate, split_state.address, k.where(alone, block.m.address, self.own.m.address))
        self.split = SplitState(k.at(home, self.real), split_scratch(self.spec, self.d_v))
        if self.spec.best:
            mine, all_splits = self._best(self.split), self._best(block)
            with k.when(separate):
                self._clear_best(mine)
            homes = [k.where(separate, x.address, y.address) for x, y in zip(mine, all_splits, strict=True)]
            self.best = BestKeys(*(k.at(home, x.type) for home, x in zip(homes, mine, strict=True)))
        # A hidden NaN or infinity in V makes 0 · NaN. If a NaN shows, compute the split again without hidden values.
        self.exclude_hidden, repeat = k.variable(k.constant(I64, 0)), k.variable(k.constant(I64, 1))
        t = k.variable(first)
        with k.loop_while(lambda: repeat.value != 0):
            self._empty(self.split)
            t.value = self._work(first)
            repeat.value = (self._has_nan() & (self.exclude_hidden.value == 0)).to(I64)
            self.exclude_hidden.value = k.constant(I64, 1)
        block.cursor[0] = t.value
        with k.when(~separate & ~alone):
            self._merge(self.split)

    def _tiles(self, first: Value, work: Callable[[KeyTile], None]) -> Value:
        """Call `work` on each tile of a split, from list index `first` on.

        Return the index after them.
        """
        k, tiles = self.k, self.k.pointer("tiles", I64)
        current = self._split_of(tiles[first])
        t, inside = k.variable(first), k.variable(k.constant(I64, 1))
        with k.loop_while(lambda: inside.value != 0):
            self.place = t.value
            work(self._tile(tiles[t.value]))
            t.value = t.value + 1
            inside.value = self._inside(t.value, current)
        return t.value

    def _inside(self, t: Value, split: Value) -> Value:
        """Return 1 if the block's tile at list index t belongs to a split, else 0."""
        found = self.k.variable(self.k.constant(I64, 0))
        with self.k.when(t < self.field("tiles") + self.field("count")):
            found.value = (self._split_of(self.k.pointer("tiles", I64)[t]) == split).to(I64)
        return found.value

    @abstractmethod
    def _work(self, first: Value) -> Value:
        """Compute the tiles of a split, from list index `first` on.

        Return the index after them.
        """

    def _has_nan(self) -> Value:
        k = self.k
        bad = k.variable(k.constant(self.real, 0.0).spread(self.W))
        for name in self.spec.outputs:
            with self._outputs() as (at, _):
                o = self.load(self.split[name], at)
                bad.value = k.where(o.is_nan(), o, bad.value)
        return bad.value.is_nan().any()

    def _natural(self, s: Value) -> Value:
        """Return the natural score of a QK product, for rules."""
        scale = self.product_scale if self.spec.ruled else None
        return s if scale is None else s * scale

    def _power(self, x: Value, short: bool = False) -> Value:
        """Compute the exponential of a difference of scores, which is at most 0."""
        return mathematics.weight2(self.k, x * self.scale2 if self.spec.ruled else x, short)

    def _weight(self, s: Value, shift: Value) -> tuple[Value, Value]:
        """Compute exp(s − m) and s − m, in the scale of exponents.

        shift: −m.
        """
        scale = None if self.spec.ruled else self.product_scale
        difference = s + shift if scale is None else self.k.fma(s, scale, shift)
        return self._power(difference, short=self.spec.bf16_dot), difference

    def _entropy_term(self, p: Value, difference: Value) -> Value:
        """Compute p · (s − m); 0 where the score is −∞."""
        least = self.k.constant(self.real, -1000.0 if self.real is F32 else -4000.0)
        return p * self.k.maximum(least, difference)

    # Maxima. S · scale − m is rounded once, but m = max S · scale is rounded before. Where that matters, the maximum is
    # subtracted from the unscaled scores, which is exact for those that count.

    def _scaled(self, m: Value) -> Value:
        """Return a maximum in the scale of exponents."""
        return m if self.maximum_scale is None else m * self.maximum_scale

    def _reference(self, m: Value) -> tuple[Value | None, Value]:
        """Return two numbers to subtract from scores, before and after scaling.

        One of them is 0.

        The first is None where products leave scores in the scale of exponents.
        """
        k, scaled = self.k, self._finite(self._scaled(m))
        if self.maximum_scale is None:
            return None, scaled
        far = self._is_large(m, scaled)
        return k.where(far, m, self.zero()), k.where(far, self.zero(), scaled)

    def _below(self, x: Value, reference: tuple[Value | None, Value]) -> Value:
        """Subtract a `_reference` from a maximum or a score.

        The result is in the scale of exponents.
        """
        before, after = reference
        if before is None or self.maximum_scale is None:
            return x - after
        near = x * self.maximum_scale - after
        return self.k.where(before != 0.0, (x - before) * self.maximum_scale, near)

    def _move_maximum(self, tile: KeyTile) -> None:
        """Update the running maximum with a tile's.

        Compute its shift, and the factor of earlier sums.
        """
        k, split, state = self.k, self.split, tile.scratch
        far = k.variable(k.constant(I64, 0))
        for c in self.vectors():
            m = k.maximum(self.load(state.top, c), self.load(split.m, c))
            before, after = reference = self._reference(m)
            difference = self._below(self.load(split.m, c), reference)
            rescale = self._power(difference)
            for name_l, name_e in self.spec.sums if self.spec.entropy else ():
                l, e = split[name_l], split[name_e]
                e[c] = self._moved(self.load(e, c), self.load(l, c), rescale, difference)
            split.m[c], state.shift[c], state.rescale[c] = m, -after, rescale
            if before is not None:
                state.before[c] = before
                far.value = far.value | (before != 0.0).any().to(I64)
        if self.maximum_scale is not None:
            with k.when(far.value != 0):
                self._subtract(tile)

    @abstractmethod
    def _subtract(self, tile: KeyTile) -> None:
        """Subtract each query's `before` from the scores of a tile."""

    def _add_sums(self, tile: KeyTile) -> None:
        """Add the sums of a tile to the split's."""
        k, split, state = self.k, self.split, tile.scratch
        for c in self.vectors():
            for name_l, name_e in self.spec.sums:
                if self.spec.entropy:
                    e = split[name_e]
                    e[c] = self.load(e, c) + self.load(state[name_e], c)
                l = split[name_l]
                l[c] = k.fma(self.load(l, c), self.load(state.rescale, c), self.load(state[name_l], c))

    def _moved(self, e: Value, l: Value, factor: Value, difference: Value) -> Value:
        """Return e = Σ exp(S − m) (S − m) for another m; `factor` = exp(difference).

        0 for no keys.
        """
        k = self.k
        zero = k.constant(self.real, 0.0)
        inside = k.where(factor == 0.0, zero, difference)
        return k.where(factor == 0.0, zero, factor * k.fma(inside, l, e))

    def _drop(self, p: Value, keys: tuple[Value, Value], j: Value) -> Value:
        """Apply dropout to weights at the absolute positions j."""
        k = self.k
        dropped = mathematics.random_bits(k, keys, j).below(k.integer("threshold").to(I32))
        return k.where(dropped, self.zero(), p * k.real("keep_scale", self.real))

    # The largest weights

    def _best(self, scratch: SplitState) -> BestKeys:
        """Return the best keys of a query block or a split."""
        return BestKeys(scratch.values, scratch.indices.of(mathematics.integer_of(self.real)))

    def _clear_best(self, best: BestKeys) -> None:
        if self.spec.best:
            self.fill(best.values, -math.inf, self.spec.best)
            with self.k.loop(self.spec.best * self.B, step=self.W) as n:
                best.indices[n] = self.k.constant(best.indices.type, -1).spread(self.W)

    @contextmanager
    def _insertion(self, best: BestKeys, c: Value) -> Iterator[Callable[[Value, Value], None]]:
        """Yield a function that inserts a score and its column into the best keys.

        They are those of the lanes from c on.
        """
        k = self.k
        offsets = [n * self.B + c for n in range(self.spec.best)]
        lists = [(k.variable(best.values.load(n, self.W)), k.variable(best.indices.load(n, self.W))) for n in offsets]

        def insert(s: Value, column: Value) -> None:
            better = [s > value.value for value, _ in lists]
            for n in reversed(range(len(lists))):
                value, index = lists[n]
                if n == 0:
                    above = s, column
                else:  # entries above the new score move down
                    (v, i), moved = lists[n - 1], better[n - 1]
                    above = k.where(moved, v.value, s), k.where(moved, i.value, column)
                value.value = k.where(better[n], above[0], value.value)
                index.value = k.where(better[n], above[1], index.value)

        yield insert
        for n, (value, index) in zip(offsets, lists, strict=True):
            best.values[n], best.indices[n] = value.value, index.value

    def _merge_best(self, best: BestKeys) -> None:
        """Merge the best keys of a split into the block's; earlier splits win ties."""
        k = self.k
        if self.spec.best:
            with (
                k.loop(self.B, step=self.W) as c,
                self._insertion(self._best(self.block), c) as insert,
                k.loop(self.spec.best) as n,
            ):
                at = n * self.B + c
                insert(self.load(best.values, at), best.indices.load(at, self.W))

    # Merging and finishing

    def _merge(self, split: SplitState) -> None:
        """Merge a split's state into the block's."""
        k, block, tile = self.k, self.block, self.tile
        for c in self.vectors():
            m_old, m_new = self.load(block.m, c), self.load(split.m, c)
            m = k.maximum(m_old, m_new)
            reference = self._reference(m)
            below_old, below_new = (self._below(x, reference) for x in (m_old, m_new))
            old, new = self._power(below_old), self._power(below_new)
            for name_l, name_e in self.spec.sums:
                l_old, l_new = (self.load(x[name_l], c) for x in (block, split))
                if self.spec.entropy:
                    e_old, e_new = (self.load(x[name_e], c) for x in (block, split))
                    block[name_e][c] = self._moved(e_old, l_old, old, below_old) + self._moved(
                        e_new, l_new, new, below_new
                    )
                block[name_l][c] = k.fma(l_old, old, l_new * new)
            block.m[c], tile.old[c], tile.new[c] = m, old, new
        for name in self.spec.outputs:
            O, part = block[name], split[name]
            with self._outputs() as (at, of):
                O[at] = k.fma(self.load(O, at), of(tile.old), self.load(part, at) * of(tile.new))

    def _end(self) -> None:
        with self.k.when(~self.has("split_state") | (self.field("splits") != 0)):
            self._finish()
            self._write()

    def _finish(self) -> None:
        """Add the sink; compute O / l, lse, entropy and the largest weight."""
        k, spec, block = self.k, self.spec, self.block
        one = k.constant(self.real, 1.0).spread(self.W)
        natural_scale = 1.0 if spec.ruled else mathematics.LN_2  # from scores to natural logarithms
        sinks = k.pointer("sink", self.real)
        with k.loop(self.B, step=self.W) as c:
            largest, l = self.load(block.m, c), self.load(block.l, c)
            m_old = self._scaled(largest)
            m, old = m_old, one
            if spec.sink:
                position = block.h.load(c, self.W).to(I64) - self.field("h") + self.field("head")
                sink = sinks.gather(position)
                sink = sink if spec.ruled else sink * mathematics.LOG2_E
                m = k.maximum(m_old, sink)
                shift = self._finite(m)
                old = self._power(m_old - shift)
                l = k.fma(l, old, self._power(sink - shift))
            inverse = k.where(l == 0.0, self.zero(), one / l)
            natural = m * natural_scale
            if spec.sink and not spec.ruled:  # a large sink without rounding: its gradient is exp(sink − lse)
                natural = k.where(self._is_large(m, m) & (m == sink), sinks.gather(position), natural)
            self.tile.top[c] = natural + mathematics.log(k, l)  # lse
            if spec.entropy:
                own_sum, e = self.load(block.l, c), self.load(block.e, c) * natural_scale
                if spec.sink:
                    e = self._moved(e, own_sum, old, (m_old - self._finite(m)) * natural_scale)
                positive = k.where(l == 0.0, one, l)
                block.e[c] = (own_sum * old * mathematics.log(k, positive) - e) / positive
            factor = old * inverse
            before, after = self._reference(largest)
            for n in range(spec.best):
                s = self.load(block.values, n * self.B, c)
                weight = self._weight(s if before is None else s - before, -after)[0] * (old * inverse)
                block.values[n * self.B + c] = k.where(s == -math.inf, self.zero(), weight)
            # The largest weight is that of a key, not of the sink.
            heaviest = factor
            if before is not None:
                heaviest = k.where(l == 0.0, self.zero(), self._weight(largest - before, -after)[0] * old / l)
            block.m[c] = k.where(self.load(block.l, c) == 0.0, self.zero(), heaviest)
            self.tile.rescale[c] = factor
        self._divide()

    def _divide(self) -> None:
        """Divide the outputs by l."""
        with self._outputs() as (at, of):
            self.block.O[at] = self.load(self.block.O, at) * of(self.tile.rescale) + 0.0  # not −0

    @abstractmethod
    def _store_output(self) -> None:
        """Store the block's output in the call's."""

    def _write(self) -> None:
        self._store_output()
        k, spec, block = self.k, self.spec, self.block
        lanes = self.field("lanes")

        def lane(n: Value, g: Value, r: Value) -> None:
            with k.when(n < lanes):
                row = g * k.integer("row_head") + r
                self.address("lse")[row] = self.tile.top[n]
                if spec.entropy:
                    self.address("entropy")[row] = block.e[n]
                with k.when(self.has("max")):
                    self.address("max")[row] = block.m[n]
                best, place = self._best(block), row * spec.best
                for x in range(spec.best):
                    self.address("values")[place + x] = best.values[n + x * self.B]
                    self.address("indices")[place + x] = best.indices[n + x * self.B].to(I64)

        self.each_lane(lane)
