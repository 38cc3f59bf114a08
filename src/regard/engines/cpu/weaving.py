"""Weights of a tile made beside the scores of the next one, with a query in every lane.

Products leave parts of the processor idle that weights need, and registers where a micro-tile is small (`weaves` of a
target). The scores and weights of two tiles lie in two places by turns; sums over weights lie in memory by the lane
that a key has in the other layout, so that they are added in the same order.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from regard.engines.cpu.element import I64
from regard.engines.cpu.lanes import Halves, Tile
from regard.engines.cpu.layout import KEYS
from regard.engines.cpu.matrix_products import MatrixProducts
from regard.engines.cpu.values import Pointer, Value, Variable


class Weaving(MatrixProducts):
    due: Variable  # the next key, of the tile whose weights are made

    def _tiles_woven(self, first: Value) -> Value:
        """As `_tiles`, with the weights of a tile made beside the scores of the next: products leave parts of the
        processor idle that weights need.
        """
        k, tiles = self.k, self.k.pointer("tiles", I64)
        current = self._span_of(tiles[first])
        places = {name: getattr(self.tile, name) for name in self.kind.weights}

        @contextmanager
        def placed(n: Value) -> Iterator[None]:
            """Scores and weights lie in one of their two places."""
            outer = {name: getattr(self.tile, name) for name in places}
            vars(self.tile).update({name: p + n * (KEYS * self.B) for name, p in places.items()})
            yield
            vars(self.tile).update(outer)

        none = k.whole(0)
        # What the weights and products of a tile need of the one whose weights are made; first there is none.
        held = [k.variable(none) for _ in range(4 + len(Halves._fields))]

        def holding() -> Tile:
            number, start, first, stop, *halves = (x.value for x in held)
            return Tile(number, start, first, stop, (none, none), Halves(*halves))

        t, turns, place, self.due = (k.variable(x) for x in (first, k.whole(2), none, none))
        with k.loop_while(lambda: turns.value != 0):  # 2 while there are tiles, then 1 for the weights of the last
            before, there = holding(), place.value

            def weigh(before: Tile = before, there: Value = there) -> None:
                with placed(there):
                    for c in self.vectors():
                        self._weigh_into_parts(before, self.due.value, c)
                self.due.value = self.due.value + 2

            with k.when(turns.value == 2), placed(1 - there):
                self.place = t.value
                tile = self._tile(tiles[t.value])
                self._copies(tile)
                self._scores(tile, weigh, before.stop)
                self._rules(tile)
                for x, value in zip(held, (tile.number, tile.start, tile.first, tile.stop, *tile.halves), strict=True):
                    x.value = value
            with (
                placed(there),
                k.loop(before.stop, start=self.due.value, step=2) as p,
                k.loop(self.B, step=self.W) as c,
            ):
                self._weigh_into_parts(before, p, c)
            with k.when(before.first < before.stop), placed(there):
                self._add_parts()
                self._after_weights(before)
            turns.value = turns.value - 1
            with k.when(turns.value == 1), placed(1 - there):
                tile = holding()
                self._before_weights(tile)
                self._empty_parts()
                self.due.value = tile.first - tile.first % 2
                t.value = t.value + 1
                turns.value = self._inside(t.value, current) + 1
            place.value = 1 - there
        return t.value

    @abstractmethod
    def _scores(self, tile: Tile, weigh: Callable[[], None] | None = None, until: Value | int = 0) -> None:
        """The scores of a tile; beside them, `weigh` as long as a key before `until` is due."""

    @abstractmethod
    def _rules(self, tile: Tile) -> None:
        """What rules make of scores."""

    @abstractmethod
    def _before_weights(self, tile: Tile) -> None:
        """What scores must tell before they become weights."""

    @abstractmethod
    def _weigh(self, tile: Tile, p: Value, c: Value | int, shift: Value) -> list[list[Value]]:
        """P = exp(S − m) of the keys p and p + 1 in the lanes from c on, and of each what is summed."""

    @abstractmethod
    def _after_weights(self, tile: Tile) -> None:
        """A tile into the span."""

    def _summed(self) -> list[str]:
        """The names of what is summed over weights."""
        return [name for both in self.kind.sums for name in both[: 1 + self.kind.entropy]]

    def _weigh_into_parts(self, tile: Tile, p: Value, c: Value | int) -> None:
        """The weights of two keys, and what is summed of them into the sums of keys that are W apart."""
        for n, terms in enumerate(self._weigh(tile, p, c, self.load(self.tile.shift, c))):
            at = ((p + n) & (self.W - 1)) * self.B + c
            for part, term in zip(self._parts_of_sums(), terms, strict=True):
                part[at] = self.load(part, at) + term

    def _parts_of_sums(self) -> list[Pointer]:
        return [getattr(self.tile, f"{name}_parts") for name in self._summed()]

    def _empty_parts(self) -> None:
        for part in self._parts_of_sums():
            self.fill(part, 0.0, self.W)

    def _add_parts(self) -> None:
        for name, part in zip(self._summed(), self._parts_of_sums(), strict=True):
            with self.k.loop(self.B, step=self.W) as c:
                total = self.zero()
                for r in range(self.W):
                    total = total + self.load(part, c + r * self.B)
                getattr(self.tile, name)[c] = total
