"""The terms of prefill: what its products multiply, and what becomes a weight. A tangent adds terms."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.rules import RuleRows, Rules
from regard.engines.cpu.kernels.softmax import RunningSoftmax
from regard.engines.cpu.kernels.splits import Split
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.values import Pointer, Value


class TileProduct(NamedTuple):
    """A product: rows of K or V by name, transposed queries or weights, and where the sums go."""

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
