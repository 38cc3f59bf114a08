"""The interface of forward's two layouts of lanes: queries (`prefill`) or keys (`decode`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.splits import Split
from regard.engines.cpu.language.values import Pointer, Value

Loaded = Callable[[Pointer], Value]


class LaneLayout(ABC):
    """The part of forward that depends on the layout of lanes."""

    @abstractmethod
    def prepare_queries(self, block: RowBlock) -> None:
        """Store the block's queries in the layout of the products."""

    @abstractmethod
    def compute(self, split: Split, first: Value) -> Value:
        """Compute the tiles of a split, from list index `first` on.

        Return the index after them.
        """

    @abstractmethod
    def outputs(self, block: RowBlock) -> AbstractContextManager[tuple[Value, Loaded]]:
        """Loop over the vectors of an output.

        Yield their offset, and a function that loads its lanes of a row of numbers.
        """

    @abstractmethod
    def store_output(self, block: RowBlock) -> None:
        """Store the block's output in the call's."""
