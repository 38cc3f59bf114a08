"""Software pipelining of prefill.

A tile's softmax is interleaved with the QK product of the next tile.

Products leave execution ports idle that the softmax needs, and registers where a micro-tile is small
(`Target.pipelines`). Scores and weights are double-buffered. Sums over weights are partial sums in memory, by the lane
that a key has in decode, so that they are added in the same order. No QK product follows a split's last tile: its
softmax is interleaved with the PV product of the tile before, where products take packed pairs.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

from regard.engines.cpu.kernels.amx_products import AmxProducts
from regard.engines.cpu.kernels.tiles import Halves, KeyTile
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.scratch import TileScratch
from regard.engines.cpu.spec.tiles import KEYS

TOGETHER = 8  # steps of a product that are interleaved with the softmax of two keys


class Pipelining(AmxProducts):
    """The software pipeline of prefill."""

    due: Variable  # the next key whose weight is due, in the tile in flight

    def _tiles_pipelined(self, first: Value) -> Value:
        """Do the work of `_tiles` in a software pipeline.

        Each tile's softmax is interleaved with the QK product of the next.
        """
        k, tiles = self.k, self.k.pointer("tiles", I64)
        current = self._split_of(tiles[first])
        sizes = dict.fromkeys((*self.spec.weights, "seen"), KEYS * self.B) | {"rescale": self.B}

        def buffer(n: Value) -> TileScratch:
            """Return the scratch of a tile in flight, one of two."""
            return self.tile.moved((name, n * size) for name, size in sizes.items())

        none = k.whole(0)
        # The tile in flight: its number, start, keys and halves. At first it has no keys.
        carried = [k.variable(none) for _ in range(4 + len(Halves._fields))]

        def carried_tile() -> KeyTile:
            number, start, first, stop, *halves = (x.value for x in carried)
            return KeyTile(number, start, first, stop, (none, none), Halves(*halves), none, None, self.tile)  # type: ignore[arg-type]

        def softmax_steps(tile: KeyTile, there: Value) -> Callable[[], None]:
            """Return a function that computes the softmax of two more keys of a tile."""

            def softmax_step() -> None:
                here = replace(tile, scratch=buffer(there))
                for c in self.vectors():
                    self._softmax_into_partials(here, self.due.value, c)
                self.due.value = self.due.value + 2

            return softmax_step

        t, place, self.due = (k.variable(x) for x in (first, none, none))
        going, more = (k.variable(k.whole(1)) for _ in range(2))
        with k.loop_while(lambda: going.value != 0):
            before, there, another = carried_tile(), place.value, more.value
            with k.when(another != 0):
                scratch = buffer(1 - there)
                self.place = t.value
                tile = self._tile(tiles[t.value], scratch)
                self._copies(tile)
                self._qk_product(tile, softmax_steps(before, there), before.stop)
                self._rules(tile)
                for x, value in zip(
                    carried, (tile.number, tile.start, tile.first, tile.stop, *tile.halves), strict=True
                ):
                    x.value = value
            before = replace(before, scratch=buffer(there))
            with k.loop(before.stop, start=self.due.value, step=2) as p, k.loop(self.B, step=self.W) as c:
                self._softmax_into_partials(before, p, c)
            with k.when(before.first < before.stop):
                self._add_partials()
                self._add_sums(before)
            tile = carried_tile()
            until = k.variable(none)
            with k.when(another != 0):
                self._before_softmax(replace(tile, scratch=buffer(1 - there)))
                self._empty_partials()
                self.due.value = tile.first - tile.first % 2
                t.value = t.value + 1
                more.value = self._inside(t.value, current)
                # Interleave with the PV product of the tile before, as no QK product follows the last tile.
                until.value = k.where(more.value == 0, tile.stop, none)
            with k.when(before.first < before.stop):
                before = replace(before, scratch=buffer(there))
                self._pv_product(before, softmax_steps(tile, 1 - there), until.value)
            going.value, place.value = another, 1 - there  # one more iteration after the last tile, for its PV product
        return t.value

    def _interleave_softmax(
        self,
        softmax_step: Callable[[], None],
        most: Value,
        start: Value,
        stop: Value,
        steps: Callable[[Value, int], None],
    ) -> Value:
        """Interleave `softmax_step`, at most `most` times, with steps of a product.

        Return where the steps end.
        """
        k = self.k
        count = k.minimum(most, (stop - start) // TOGETHER)
        end = start + k.maximum(count, k.whole(0)) * TOGETHER
        with k.loop(end, start=start, step=TOGETHER) as x:
            k.interleave(lambda: steps(x, TOGETHER), softmax_step)
        return end

    def _steps_due(self, until: Value | int) -> Value:
        """Count the pairs of keys that are due before `until`."""
        return (until - self.due.value + 1) // 2

    @abstractmethod
    def _qk_product(
        self, tile: KeyTile, softmax_step: Callable[[], None] | None = None, until: Value | int = 0
    ) -> None:
        """Compute the QK product of a tile.

        Interleave `softmax_step` while a key before `until` is due.
        """

    @abstractmethod
    def _rules(self, tile: KeyTile) -> None:
        """Apply rules and masks to scores."""

    @abstractmethod
    def _before_softmax(self, tile: KeyTile) -> None:
        """Update maxima and lists from scores, before they become weights."""

    @abstractmethod
    def _softmax_pair(self, tile: KeyTile, p: Value, c: Value | int, shift: Value) -> list[list[Value]]:
        """Compute P = exp(S − m) of keys p and p + 1 in the lanes from c on.

        Return the terms of sums.
        """

    @abstractmethod
    def _pv_product(
        self, tile: KeyTile, softmax_step: Callable[[], None] | None = None, until: Value | int = 0
    ) -> None:
        """Add the PV product of a tile to the split.

        Interleave `softmax_step` as in `_qk_product`.
        """

    def _summed(self) -> list[str]:
        """Return the names of the sums over weights."""
        return [name for both in self.spec.sums for name in both[: 1 + self.spec.entropy]]

    def _softmax_into_partials(self, tile: KeyTile, p: Value, c: Value | int) -> None:
        """Compute the weights of two keys, and add to partial sums.

        Keys that are W apart share a partial sum.
        """
        for n, terms in enumerate(self._softmax_pair(tile, p, c, self.load(self.tile.shift, c))):
            at = ((p + n) & (self.W - 1)) * self.B + c
            for part, term in zip(self._partial_sums(), terms, strict=True):
                part[at] = self.load(part, at) + term

    def _partial_sums(self) -> list[Pointer]:
        return [self.tile[f"{name}_partial"] for name in self._summed()]

    def _empty_partials(self) -> None:
        for part in self._partial_sums():
            self.fill(part, 0.0, self.W)

    def _add_partials(self) -> None:
        for name, part in zip(self._summed(), self._partial_sums(), strict=True):
            with self.k.loop(self.B, step=self.W) as c:
                total = self.zero()
                for r in range(self.W):
                    total = total + self.load(part, c + r * self.B)
                self.tile[name][c] = total
