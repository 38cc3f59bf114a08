"""Masks, score rules and dropout at pairs of queries and keys."""

from collections.abc import Mapping
from dataclasses import dataclass

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.rules import Lowering, TileContext
from regard.engines.cpu.language.types import I32
from regard.engines.cpu.language.values import Value

Prepared = list[Value | None] | None


@dataclass(frozen=True)
class RuleRows:
    """Rules at some rows before their keys: leaves, and what follows from these."""

    leaves: Mapping[str, Value]
    score: Prepared
    mask: Prepared


class Rules:
    """The mask and the score rule of a kernel."""

    def __init__(self, lanes: Lanes):
        self.k, self.lanes, spec = lanes.k, lanes, lanes.spec
        self.mask = Lowering(self.k, spec.mask, spec.real, spec.integer) if spec.mask else None
        self.score = Lowering(self.k, spec.score, spec.real, spec.integer) if spec.score else None

    def rows(self, block: RowBlock, lane: Value, lanes: int) -> RuleRows:
        """Prepare rules for some lanes of a block; `lanes` is 0 for a single one."""
        leaves = {"b": block.field("b"), "keys": self.k.integer("keys")}
        leaves |= {"i": block.state.i.load(lane, lanes), "h": block.state.h.load(lane, lanes)}
        context = TileContext(leaves)
        score, mask = (None if rule is None else rule.prepare(context) for rule in (self.score, self.mask))
        return RuleRows(leaves, score, mask)

    def scores(self, context: TileContext, rows: RuleRows) -> list[Value]:
        """Return the rule's results, of which the first is the score; else that alone."""
        if self.score is None:
            return [context.leaves["s"]]
        return [x.spread(self.lanes.W) for x in self.score.at(context, rows.score)]

    def visible(self, context: TileContext, rows: RuleRows) -> Value | None:
        """Return the mask; None if there is none."""
        return None if self.mask is None else self.mask.at(context, rows.mask)[0].spread(self.lanes.W)


class Dropout:
    """Dropout of weights, by random bits of a row's keys and the absolute position j."""

    def __init__(self, lanes: Lanes):
        self.k, self.lanes = lanes.k, lanes

    def keys(self, block: RowBlock, lane: Value | int) -> tuple[Value, Value]:
        """Return the dropout keys of the vector of lanes from `lane` on."""
        return block.state.first.load(lane, self.lanes.W), block.state.second.load(lane, self.lanes.W)

    def applied(self, w: Value, keys: tuple[Value, Value], j: Value) -> Value:
        """Return weights, 0 where they are dropped.

        Where weights are rounded, outputs take the scale instead, so that a lone key has the weight 1.
        """
        if not self.lanes.spec.paired:
            w = w * self.k.real("keep_scale", self.lanes.real)
        return self.k.where(self._dropped(keys, j), self.lanes.zero(), w)

    def remaining(self, keys: tuple[Value, Value], j: Value) -> Value:
        """Test for weights that are not dropped."""
        return ~self._dropped(keys, j)

    def scale(self, keys: tuple[Value, Value], j: Value) -> Value:
        """Return the factor of weights."""
        return self.k.where(self._dropped(keys, j), self.lanes.zero(), self.k.real("keep_scale", self.lanes.real))

    def _dropped(self, keys: tuple[Value, Value], j: Value) -> Value:
        return mathematics.random_bits(self.k, keys, j).below(self.k.integer("threshold").to(I32))
