"""Plan of the gradients over ranks without their order: a rank's sums of dK and dV go straight home.

No task waits for another, and rows are computed where they are dealt. The owner of keys adds the sums of ranks in their
order. So dK, dV and what is added over rows differ from one process by rounding, within the bound of the error.
"""

from dataclasses import dataclass

import numpy as np

from regard.core.problem import Problem
from regard.parallel.dealing import Deal
from regard.parallel.pipeline import GradientPipeline, RankTask
from regard.parallel.sight import Sight, sight_of


@dataclass(frozen=True, eq=False)
class UnorderedGradients(GradientPipeline):
    """The tasks of all ranks: a slot has all of a step of keys, rows descending. Nothing moves on from rank to rank."""

    sight: Sight


def unordered_of(p: Problem, row_deal: Deal, key_deal: Deal) -> UnorderedGradients:
    """Return the tasks of a whole call."""
    sight = sight_of(p, row_deal, key_deal)
    every = list(row_deal.all_runs())
    order = np.argsort([x.start for x in every])
    live = sight.key_runs[order]
    slots = [[RankTask(int(run), step) for run in np.flatnonzero(column)[::-1]] for step, column in enumerate(live.T)]
    runs, owners = [every[n] for n in order], row_deal.owners()[order].tolist()
    return UnorderedGradients(row_deal, key_deal, sight.key_steps, runs, owners, live, slots, [], [], sight)
