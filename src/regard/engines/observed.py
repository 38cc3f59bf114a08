"""Statistics that follow from other statistics, on every engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.core.parts import scores_alone, scores_times
from regard.core.problem import Outputs, Problem
from regard.core.statistics import Statistic
from regard.rules import Mask

Array = np.ndarray[Any, np.dtype[Any]]
Found = dict[Statistic, Any]


def basic(observe: tuple[Statistic, ...]) -> tuple[Statistic, ...]:
    """Return the statistics that an engine has to compute itself for those observed."""
    own = (s for s in observe if s.needs is None)
    return tuple(dict.fromkeys((*own, *(needed for s in observe for needed in s.needs or ()))))


def complete(
    p: Problem, lse: Array, found: Mapping[Statistic, Any], forward: Callable[[Problem], tuple[Outputs, Found]]
) -> Found:
    """Return every statistic observed, given those of `basic`."""
    sums = ForwardSums(p, lse, forward)
    return {
        s: found[s] if s.needs is None else s.follow([found[needed] for needed in s.needs], sums, p.sizes)
        for s in p.observe
    }


@dataclass
class ForwardSums:
    """The `LogSums` of a call, by further forward passes."""

    p: Problem
    lse: Array
    forward: Callable[[Problem], tuple[Outputs, Found]]

    def _sum(self, p: Problem) -> Array:
        found = self.forward(p)[0].lse
        assert found is not None
        return found

    def alone(self) -> Array:
        return self._sum(scores_alone(self.p)) if self.p.denominators else self.lse

    def where(self, mask: Mask) -> Array:
        return self._sum(scores_alone(self.p, mask if self.p.mask is None else self.p.mask & mask))

    def times(self, factor: float) -> Array:
        return self._sum(scores_times(self.p, factor))
