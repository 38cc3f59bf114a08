"""Key splits: runs of tiles, each with sums of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from regard.engines.cpu.kernels.blocks import NONE, RowBlock
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile, read_tile
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.scratch import SplitState, TileScratch
from regard.engines.cpu.spec.tiles import TILE_BITS

Loaded = Callable[[Pointer], Value]


@dataclass(frozen=True)
class Split:
    """A key split of a query block that is computed."""

    block: RowBlock
    state: SplitState  # its maximum, sums, outputs and best keys
    exclude_hidden: Variable  # 1 if values that a mask hides count as 0


class KeySplits:
    """The tiles of a query block's list, split after split."""

    def __init__(self, lanes: Lanes, scratch: TileScratch):
        self.k, self.scratch = lanes.k, scratch

    def next(self, block: RowBlock) -> Value:
        """Return the split of the block's next tile."""
        k = self.k
        split, cursor = k.variable(k.constant(I64, NONE)), block.state.cursor[0]
        with k.when(cursor < block.field("tiles") + block.field("count")):
            split.value = self.of(k.pointer("tiles", I64)[cursor])
        return split.value

    def of(self, word: Value) -> Value:
        """Return the split of an entry of the list."""
        return ((word >> TILE_BITS) + self.k.integer("first_tile")) >> self.k.integer("split_bits")

    def each_tile(self, block: RowBlock, first: Value, work: Callable[[KeyTile], None]) -> Value:
        """Call `work` on a split's tiles from list index `first` on; return the end."""
        k, tiles = self.k, self.k.pointer("tiles", I64)
        current = self.of(tiles[first])
        t, inside = k.variable(first), k.variable(k.constant(I64, 1))
        with k.loop_while(lambda: inside.value != 0):
            work(read_tile(block, self.scratch, t.value, tiles[t.value]))
            t.value = t.value + 1
            inside.value = self.contains(block, t.value, current)
        return t.value

    def contains(self, block: RowBlock, t: Value, split: Value) -> Value:
        """Return 1 if the block's tile at list index t belongs to a split, else 0."""
        flag = self.k.variable(self.k.constant(I64, 0))
        with self.k.when(t < block.field("tiles") + block.field("count")):
            flag.value = (self.of(self.k.pointer("tiles", I64)[t]) == split).to(I64)
        return flag.value


class LaneLayout(ABC):
    """The part of forward that depends on the layout of lanes."""

    @abstractmethod
    def prepare_queries(self, block: RowBlock) -> None:
        """Store the block's queries in the layout of the products."""

    @abstractmethod
    def compute(self, split: Split, first: Value) -> Value:
        """Compute a split's tiles from list index `first` on; return the index after."""

    @abstractmethod
    def outputs(self, block: RowBlock) -> AbstractContextManager[tuple[Value, Loaded]]:
        """Loop over vectors of an output; yield their offset and a loader of their rows."""

    @abstractmethod
    def store_output(self, block: RowBlock) -> None:
        """Store the block's output in the call's."""
