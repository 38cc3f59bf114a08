"""The largest scores of every query, and their keys."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.scratch import SplitState


class BestKeys:
    """Lists of the `spec.best` largest scores of every lane, and of their columns.

    Scores fall, with −∞ and −1 for none; NaN counts as ∞, and earlier keys win ties. Lists are `values` and `indices`
    of a state.
    """

    def __init__(self, lanes: Lanes):
        self.k, self.lanes, self.W, self.B, self.count = lanes.k, lanes, lanes.W, lanes.B, lanes.spec.best

    def indices(self, state: SplitState) -> Pointer:
        return state.indices.of(mathematics.integer_of(self.lanes.real))

    def clear(self, state: SplitState) -> None:
        indices = self.indices(state)
        if self.count:
            self.lanes.fill(state.values, -math.inf, self.count)
            with self.k.loop(self.count * self.B, step=self.W) as n:
                indices[n] = self.k.constant(indices.type, -1).spread(self.W)

    def choose(self, state: SplitState, tile: KeyTile) -> None:
        """Insert the best keys of a tile.

        Few keys beat the last of the list in any lane.
        """
        k, P, load = self.k, tile.scratch.P, self.lanes.load
        candidates = tile.scratch.candidates.of(I64)
        with k.loop(self.B, step=self.W) as c:
            least = load(state.values, (self.count - 1) * self.B, c)
            count = k.variable(k.constant(I64, 0))
            with k.loop(tile.stop, start=tile.first) as p:
                candidates[count.value] = p
                count.value = count.value + (~(load(P, p * self.B, c) <= least)).any().to(I64)  # NaN too
            with k.when(count.value != 0), self._insertion(state, c) as insert, k.loop(count.value) as n:
                p = candidates[n]
                column = (tile.start + p).to(self.indices(state).type).spread(self.W)
                s = load(P, p * self.B, c)
                insert(k.where(s <= math.inf, s, math.inf), column)

    def merge(self, state: SplitState, other: SplitState) -> None:
        """Merge the lists of a later split."""
        k = self.k
        if self.count:
            with k.loop(self.B, step=self.W) as c, self._insertion(state, c) as insert, k.loop(self.count) as n:
                at = n * self.B + c
                insert(self.lanes.load(other.values, at), self.indices(other).load(at, self.W))

    @contextmanager
    def _insertion(self, state: SplitState, c: Value) -> Iterator[Callable[[Value, Value], None]]:
        """Yield a function that inserts scores and columns of the lanes from c on."""
        k, values, indices = self.k, state.values, self.indices(state)
        offsets = [n * self.B + c for n in range(self.count)]
        lists = [(k.variable(values.load(n, self.W)), k.variable(indices.load(n, self.W))) for n in offsets]

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
            values[n], indices[n] = value.value, index.value
