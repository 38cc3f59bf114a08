"""Software pipelining of prefill.

A tile's softmax is interleaved with the QK product of the next tile.

Products leave execution ports idle that the softmax needs, and registers where a micro-tile is small
(`Target.pipelines`). Scores and weights are double-buffered. Sums over weights are partial sums in memory, by the lane
that a key has in decode, so that they are added in the same order. No QK product follows a split's last tile: its
softmax is interleaved with the PV product of the tile before, where products take packed pairs.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from regard.engines.cpu.kernels.products import InFlight
from regard.engines.cpu.kernels.splits import KeySplits, Split
from regard.engines.cpu.kernels.tiles import Halves, KeyTile, read_tile
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.spec.scratch import TileScratch
from regard.engines.cpu.spec.tiles import KEYS

if TYPE_CHECKING:
    from regard.engines.cpu.kernels.prefill import Prefill


class Pipeline:
    """The tiles of a key split in a software pipeline."""

    def __init__(self, prefill: "Prefill", splits: KeySplits):
        self.k, self.lanes, self.prefill, self.splits = prefill.k, prefill.lanes, prefill, splits
        self.weights = prefill.weights

    def each_tile(self, split: Split, first: Value) -> Value:
        """Compute a split's tiles from list index `first` on; return the index after.

        Each tile's softmax is interleaved with the QK product of the next.
        """
        k, prefill, block, tiles = self.k, self.prefill, split.block, self.k.pointer("tiles", I64)
        current = self.splits.of(tiles[first])
        none = k.whole(0)
        # The tile in flight: its number, start, keys and halves. At first it has no keys.
        carried = [k.variable(none) for _ in range(4 + len(Halves._fields))]

        def carried_tile() -> KeyTile:
            number, start, first, stop, *halves = (x.value for x in carried)
            both = none, none
            return KeyTile(number, start, first, stop, both, Halves(*halves), none, block, self.splits.scratch)

        t, place, due = (k.variable(x) for x in (first, none, none))
        going, more = (k.variable(k.whole(1)) for _ in range(2))

        def step(tile: KeyTile) -> None:
            for c in self.lanes.vectors():
                self.weights.into_partials(tile, due.value, c)
            due.value = due.value + 2

        with k.loop_while(lambda: going.value != 0):
            there, another = place.value, more.value
            before = self._in_buffer(carried_tile(), there)
            with k.when(another != 0):
                scratch = self._buffer(1 - there)
                tile = read_tile(block, scratch, t.value, tiles[t.value])
                prefill.scores(tile, InFlight(k, partial(step, before), due, before.stop))
                position = tile.number, tile.start, tile.first, tile.stop, *tile.halves
                for x, value in zip(carried, position, strict=True):
                    x.value = value
            with k.loop(before.stop, start=due.value, step=2) as p, k.loop(self.lanes.B, step=self.lanes.W) as c:
                self.weights.into_partials(before, p, c)
            with k.when(before.first < before.stop):
                self.weights.add_partials(before)
                prefill.softmax.add_sums(split.state, before)
            tile = carried_tile()
            with k.when(another != 0):
                prefill.before_softmax(split, self._in_buffer(tile, 1 - there))
                self.weights.empty_partials(tile)
                due.value = tile.first - tile.first % 2
                t.value = t.value + 1
                more.value = self.splits.contains(block, t.value, current)
            with k.when(before.first < before.stop):
                prefill.pv(split, before)
            going.value, place.value = another, 1 - there  # one more iteration after the last tile, for its PV product
        return t.value

    def _buffer(self, n: Value) -> TileScratch:
        """Return the scratch of a tile in flight, one of two."""
        B = self.lanes.B
        sizes = dict.fromkeys((*self.lanes.spec.weights, "seen"), KEYS * B) | {"rescale": B}
        return self.splits.scratch.moved((name, n * size) for name, size in sizes.items())

    def _in_buffer(self, tile: KeyTile, n: Value) -> KeyTile:
        return replace(tile, scratch=self._buffer(n))
