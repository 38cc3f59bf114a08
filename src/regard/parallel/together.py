"""All ranks in one process, in lockstep: the specification of the exchange."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.parallel.programs import Exchange, Program
from regard.parallel.sight import TILE

Array = np.ndarray[Any, np.dtype[Any]]


def run(programs: Sequence[Program]) -> list[Any]:
    """Run the programs of all ranks, and return the result of each.

    All have to ask for the same exchanges in the same order.
    """
    results: list[Any] = [None] * len(programs)
    given: list[Any] = [None] * len(programs)
    while True:
        asked: list[Exchange] = []
        for rank, program in enumerate(programs):
            try:
                asked.append(program.send(given[rank]))
            except StopIteration as end:
                results[rank] = end.value
        if not asked:
            return results
        if len(asked) < len(programs):
            raise RuntimeError("some ranks ask for an exchange that others do not know")
        given = [received(asked, rank) for rank in range(len(programs))]


def received(asked: Sequence[Exchange], rank: int) -> dict[str, Array]:
    """Return what a rank is sent: the rows of the tiles that it wants, 0 elsewhere."""
    mine = asked[rank]
    result = {}
    for name, local in mine.local.items():
        result[name] = np.zeros((*local.shape[:-2], len(mine.rows), local.shape[-1]), local.dtype)
        for owner, other in enumerate(asked):
            for own, into in mine.deal.pieces(owner, mine.rows):
                result[name][..., into, :] = other.local[name][..., own, :]
        absent = ~np.repeat(mine.wanted[rank], TILE)[: len(mine.rows)]
        result[name][..., absent, :] = 0
    return result
