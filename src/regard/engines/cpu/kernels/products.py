"""QK and PV products of prefill by vectors: Sᵀ = K Qᵀ and Oᵀ += Vᵀ Pᵀ.

Factors of K and V are broadcast. `ForwardTerms` says what is multiplied.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from regard.engines.cpu.kernels.copies import Copies
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.prefetching import NextTiles
from regard.engines.cpu.kernels.rules import RuleRows, Rules
from regard.engines.cpu.kernels.softmax import RunningSoftmax
from regard.engines.cpu.kernels.splits import Split
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import I32, I64
from regard.engines.cpu.language.values import Pointer, Value, Variable

BOTH = -1  # halves of the lanes
TOGETHER = 8  # steps of a product that are interleaved with the softmax of two keys
Add = Callable[[Value, Value | int, Value], None]  # adds sums to a feature of some lanes


@dataclass(frozen=True)
class InFlight:
    """The softmax of a tile in flight; `step` computes that of two more keys."""

    k: Kernel
    step: Callable[[], None]
    due: Variable  # the next key
    until: Value  # the key after the last

    def interleave(self, most: int, start: Value, stop: Value, steps: Callable[[Value, int], None]) -> Value:
        """Interleave up to `most` steps with those of a product.

        Returns where the latter end.
        """
        k = self.k
        left = (self.until - self.due.value + 1) // 2
        count = k.minimum(k.minimum(left, k.whole(most)), (stop - start) // TOGETHER)
        end = start + k.maximum(count, k.whole(0)) * TOGETHER
        with k.loop(end, start=start, step=TOGETHER) as x:
            k.interleave(lambda: steps(x, TOGETHER), self.step)
        return end


class TileProduct(NamedTuple):
    """Rows of K or V by name, transposed queries or weights, and where sums go."""

    rows: str
    lanes: Pointer
    into: Pointer


class ForwardTerms:
    """S = K Q, the score of it, P = exp(S − m), and O += V P."""

    def __init__(self, lanes: Lanes, rules: Rules, softmax: RunningSoftmax):
        self.k, self.spec, self.lanes, self.rules, self.softmax = lanes.k, lanes.spec, lanes, rules, softmax

    def qk(self, tile: KeyTile) -> list[TileProduct]:
        """Return the QK products."""
        return [TileProduct("k", tile.block.state.q, tile.scratch.P)]

    def score(
        self, tile: KeyTile, context: TileContext, rows: RuleRows, at: Value, biases: Mapping[str, Pointer]
    ) -> Value:
        """Apply rule and bias to the score in `context`, that of the pairs at `at`."""
        s = self.rules.scores(context, rows)[0]
        return s + self.lanes.load(biases["bias"], at) if self.spec.bias else s

    def weights(self, tile: KeyTile, at: Value, shift: Value) -> tuple[list[Value], Value]:
        """Return the factors of V at some pairs, by `spec.weights`, and S − m."""
        weight, difference = self.softmax.weight(self.lanes.load(tile.scratch.P, at), shift)
        return [weight], difference

    def pv(self, split: Split, tile: KeyTile) -> list[TileProduct]:
        """Return the PV products."""
        return [TileProduct("v", tile.scratch.P, split.state.O)]


def repeated(places: Sequence[Pointer]) -> list[int]:
    """Return the numbers of the places that are the same as an earlier one."""
    return [m for m, x in enumerate(places) if any(x is before for before in places[:m])]


def halved(lanes: Lanes) -> bool:
    """Test if products skip what a mask hides from half of the lanes.

    A half of one vector is too narrow: its chains of sums are waited for.
    """
    spec = lanes.spec
    return bool(spec.mask) and spec.keys == ("k",) and not spec.amx and len(lanes.vectors()) % 4 == 0


class QKProduct:
    """Sᵀ = K Qᵀ and the maxima over the keys that no mask and no rule touches."""

    def __init__(self, lanes: Lanes, copies: Copies, terms: ForwardTerms, prefetch: NextTiles):
        self.k, self.spec, self.real, self.W, self.B = lanes.k, lanes.spec, lanes.real, lanes.W, lanes.B
        self.lanes, self.copies, self.terms, self.prefetch = lanes, copies, terms, prefetch
        self.halved = halved(lanes)

    def __call__(self, tile: KeyTile, in_flight: InFlight | None = None) -> None:
        """Compute the product; interleave the softmax of the tile in flight."""
        k, spec, number, lanes = self.k, self.spec, I32 if self.spec.paired else self.real, self.lanes
        names, transposed, results = zip(*self.terms.qk(tile), strict=True)
        stop = (lanes.d + 1) // 2 if spec.paired else lanes.d
        tops = [k.variable(k.constant(self.real, -math.inf).spread(self.W)) for _ in lanes.vectors()]
        plain = k.variable(k.constant(I64, 1))
        halves = self.halved and not spec.ruled  # rules need every score
        alone = k.variable(k.whole(BOTH))  # the half of the lanes that scores are computed for
        with k.loop(len(names)) as n:
            keys, widths = zip(*(self.copies.keys(tile, name) for name in names), strict=True)
            rows, width = k.pick_pointer(n, keys).of(number), k.pick(n, widths)
            queries, into = k.pick_pointer(n, transposed).of(number), k.pick_pointer(n, results)

            def micro_tile(count: int, p: Value) -> None:
                if count > 1:
                    with k.when(n == 0):
                        self.prefetch(tile, p, count)
                lines = [rows.bytes((p + r) * width) for r in range(count)]

                def products(columns: range, half: Value | int = 0) -> list[list[Variable]]:
                    """Compute the product for the vectors at `columns` of a half."""
                    sums, start = lanes.sums(count, columns), k.whole(0)

                    def factor(r: int, x: Value) -> Value:
                        return lines[r][x]

                    def vector(x: Value, c: Value) -> Value:
                        return (queries + half + x * self.B + c).load(0, self.W)

                    if in_flight and count > 1 and columns == lanes.vectors():
                        start = in_flight.interleave(
                            count // 2, start, stop, lambda x, n: lanes.add_steps(sums, x, n, factor, vector, columns)
                        )
                    lanes.add_product(sums, start, stop, factor, vector, columns)
                    for r in range(count):
                        for c, s in zip(columns, sums[r], strict=True):
                            at, x = (p + r) * self.B + half + c, s.value
                            for m in repeated(results):
                                x = k.where(n == m, lanes.load(into, at) + x, x)
                            into[at] = x
                    return sums

                def of_all() -> None:
                    sums = products(lanes.vectors())
                    if not spec.ruled:
                        with k.when(plain.value != 0):
                            for r in range(count):
                                for top, s in zip(tops, sums[r], strict=True):
                                    top.value = k.maximum(s.value, top.value)

                if not halves or count == 1:
                    of_all()
                    return
                with k.choice(alone.value == BOTH) as (both, one):
                    with both:
                        of_all()
                    with one:
                        products(range(0, self.B // 2, self.W), alone.value * (self.B // 2))

            if spec.mask and not spec.ruled:
                ends, whose = self._sections(tile)
                middle = len(whose) // 2
                with k.loop(len(whose)) as part:
                    start, end = (k.pick(part, ends[m : m + len(whose)]) for m in range(2))
                    alone.value = k.pick(part, whose)
                    plain.value = (((part == middle - 1) | (part == middle + 1)) & (n == 0)).to(I64)
                    lanes.micro_tiles(start, end, micro_tile)
            else:
                plain.value = (n == 0).to(I64)
                lanes.micro_tiles(tile.first, tile.stop, micro_tile)
        for c, top in zip(lanes.vectors(), tops, strict=True):
            tile.scratch.top[c] = top.value

    def _sections(self, tile: KeyTile) -> tuple[list[Value], list[Value]]:
        """Return the edges of sections of keys, and the half of the lanes that sees them.

        The middle one is mixed, its neighbours all lanes see, and the outer ones one half alone.
        """
        k = self.k
        ends, whose = [*tile.mixed], [k.whole(BOTH)] * 3
        if self.halved:
            first, last, early, late = tile.halves
            ends = [first, *(k.minimum(k.maximum(x, first), last) for x in ends), last]
            whose = [early, *whose, late]
        return [tile.first, *ends, tile.stop], whose


class PVProducts(ABC):
    """Oᵀ ← rescale · Oᵀ + Vᵀ Pᵀ, by vectors or by AMX."""

    def __init__(self, lanes: Lanes, copies: Copies, terms: ForwardTerms):
        self.k, self.spec, self.W, self.B = lanes.k, lanes.spec, lanes.W, lanes.B
        self.lanes, self.copies, self.terms = lanes, copies, terms

    def __call__(self, split: Split, tile: KeyTile) -> None:
        with self.k.choice(split.exclude_hidden.value != 0) as (yes, no):
            with yes:
                self._each(split, tile, self.add_visible)
            with no:
                self._each(split, tile, self.add)

    def _each(self, split: Split, tile: KeyTile, work: Callable[[KeyTile, Pointer, Value, Pointer, Add], None]) -> None:
        products = self.terms.pv(split, tile)
        if not products:
            return
        k, load, (names, weights, outputs) = self.k, self.lanes.load, zip(*products, strict=True)
        with k.loop(len(products)) as n:
            values, widths = zip(*(self.copies.values(tile, name) for name in names), strict=True)
            O = k.pick_pointer(n, outputs)

            def add(a: Value, c: Value | int, total: Value) -> None:
                at, factor = a * self.B + c, load(tile.scratch.rescale, c)
                for m in repeated(outputs):
                    factor = k.where(n == m, k.constant(self.lanes.real, 1.0), factor)
                O[at] = k.fma(load(O, at), factor, total)

            work(tile, k.pick_pointer(n, values), k.pick(n, widths), k.pick_pointer(n, weights), add)

    @abstractmethod
    def add(self, tile: KeyTile, values: Pointer, row: Value, P: Pointer, add: Add) -> None:
        """Compute one product, whose rows of V are `row` bytes apart."""

    @abstractmethod
    def add_visible(self, tile: KeyTile, values: Pointer, row: Value, P: Pointer, add: Add) -> None:
        """Compute it in the same order, with hidden values as 0."""


class PVByVectors(PVProducts):
    """The PV products by vectors."""

    def add(self, tile: KeyTile, values: Pointer, row: Value, P: Pointer, add: Add) -> None:
        k, lanes, paired, halves = self.k, self.lanes, self.spec.paired, halved(self.lanes)
        start, stop, step = tile.first, tile.stop, self.B
        if paired:
            start, stop, step, P = start // 2, (stop + 1) // 2, 2 * self.B, P.of(I32)

        first, last = start, stop
        if halves:
            first, last = (x // 2 if paired else x for x in tile.halves[:2])
            last = k.where(tile.halves.stop == tile.stop, stop, last)

        def micro_tile(rows: int, a: Value) -> None:
            here, sums, columns = values + a, lanes.sums(rows), lanes.vectors()

            def factor(r: int, p: Value) -> Value:
                return (here + r).bytes(p * row)[0]

            def vector(p: Value, c: Value) -> Value:
                return (P + p * step + c).load(0, self.W)

            def of_one(start: Value, stop: Value, half: Value) -> None:
                """Add keys that have no weight in the other half of the lanes."""
                middle = len(columns) // 2
                for n, some in enumerate((slice(0, middle), slice(middle, None))):
                    with k.loop(k.where(half == n, stop, start), start=start, step=2) as p:
                        lanes.add_steps([x[some] for x in sums], p, 2, factor, vector, columns[some])

            def of_both(start: Value, stop: Value) -> None:
                lanes.add_product(sums, start, stop, factor, vector)

            if halves and rows > 1:
                of_one(start, first, tile.halves.early)
                of_both(first, last)
                of_one(last, stop, tile.halves.late)
            else:
                of_both(start, stop)
            for r in range(rows):
                for c, s in zip(columns, sums[r], strict=True):
                    add(a + r, c, s.value)

        lanes.micro_tiles(k.whole(0), lanes.d_v, micro_tile)

    def add_visible(self, tile: KeyTile, values: Pointer, row: Value, P: Pointer, add: Add) -> None:
        k, load, seen = self.k, self.lanes.load, tile.scratch.seen
        paired = self.spec.paired
        step = 2 if paired else 1
        with k.loop(self.lanes.d_v) as a, k.loop(self.B, step=self.W) as c:
            total = k.variable(self.lanes.zero())
            with k.loop(tile.stop, start=tile.first - tile.first % step, step=step) as p:
                at = p * self.B + c
                v = (values + a).bytes(p // step * row)[0]
                if paired:
                    shown = k.mask_bf16(v.spread(self.W), (load(seen, at + n * self.B) != 0.0 for n in range(2)))
                    total.value = k.dot_bf16(total.value, shown, P.of(I32).load(at, self.W))
                else:
                    shown = k.where(load(seen, at) != 0.0, v, self.lanes.zero())
                    total.value = k.fma(shown, load(P, at), total.value)
            add(a, c, total.value)
