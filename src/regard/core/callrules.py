"""The rules of a call: bounds that hide tiles, derivatives, the width of integers."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from regard.core.extents import Extents
from regard.rules import Mask, Node, Ranges, Reading, Score, Table, intervals, once, order, partials
from regard.rules.extremes import has_infinite
from regard.runtime.forks import cached_property


@dataclass(eq=False)
class CallRules:
    """The mask and the score of a call over its indices.

    constants: as in `Problem`.
    """

    mask: Mask | None
    score: Score | None
    constants: frozenset[Any]
    extents: Extents

    @cached_property
    def hiding_node(self) -> Node | None:
        """The score if its bounds can hide a whole tile, else None."""
        return self.score.node if self.score is not None and _hides(self.score.node) else None

    @property
    def hiding(self) -> tuple[Node, ...]:
        """The rules with bounds that can hide a whole tile."""
        mask = None if self.mask is None else self.mask.node
        return tuple(node for node in (mask, self.hiding_node) if node is not None)

    @cached_property
    def score_partials(self) -> tuple[Node | None, Mapping[Node, Node]]:
        """∂score/∂s, and the derivative in each reading of a float table.

        ∂score/∂s is None without a rule, and then means 1.
        """
        return (None, {}) if self.score is None else partials(self.score.node)

    @cached_property
    def table_partials(self) -> Mapping[Node, Node]:
        """The part of `score_partials` in tables that need a gradient."""
        return {leaf: x for leaf, x in self.score_partials[1].items() if leaf.payload not in self.constants}

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The float tables of the score that need a gradient."""
        return tuple(dict.fromkeys(leaf.payload for leaf in self.table_partials))

    @cached_property
    def mask_reading(self) -> Reading | None:
        """The mask, ready to be evaluated tile by tile."""
        return None if self.mask is None else Reading([self.mask.node])

    @cached_property
    def score_reading(self) -> Reading | None:
        """The score, ready to be evaluated tile by tile."""
        return None if self.score is None else Reading([self.score.node])

    @cached_property
    def integers(self) -> type[np.signedinteger[Any]]:
        """int32 if bounds prove that all integers of the rules fit, else int64.

        The `width` of tables decides, not their values: rules of one form have one kernel.
        """
        nodes = [rule.node for rule in (self.mask, self.score) if rule is not None]
        integers = [node for node in order(nodes) if node.kind == "int"]
        near = 2**16  # a tile may reach beyond the call, by less than this
        indices = {axis: (a - near, b + near) for axis, (a, b) in self.extents.indices.items()}
        limit = 2**31
        bounds = intervals(integers, Ranges(**indices, keys=self.extents.keys, any_values=True))
        return np.int32 if all(np.all((x.lo >= -limit) & (x.hi < limit)) for x in bounds) else np.int64


@once
def _hides(node: Node) -> bool:
    """Return whether the bounds of a score may be −∞ for a whole tile: it selects between floats, and one may be −∞.

    All entries of its tables decide, once. Their bounds over tiles would take far longer, for each schedule.
    """
    nodes = order([node])
    selects = any(x.op in ("where", "minimum") and x.kind == "float" for x in nodes)
    return selects and any(map(_may_be_infinite, nodes))


def _may_be_infinite(x: Node) -> bool:
    """Return whether a node may be infinite where its operands are finite, without overflow."""
    if x.op in ("number", "literal"):
        return isinstance(x.payload, float) and not isfinite(x.payload)
    if x.op == "gather":
        return x.kind == "float" and has_infinite(x.payload)
    return x.op in ("divide", "log", "log2", "log10", "log1p")
