"""All ranks in one process, in lockstep: the specification of the exchange."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from regard.parallel.programs import Exchange, Program, Transfer

Array = np.ndarray[Any, np.dtype[Any]]


def run(programs: Sequence[Program]) -> list[Any]:
    """Run the programs of all ranks, and return the result of each.

    All have to ask for the same exchanges in the same order.
    """
    results: list[Any] = [None] * len(programs)
    answers: list[Any] = [None] * len(programs)
    while True:
        asked: list[Exchange | Transfer] = []
        for rank, program in enumerate(programs):
            try:
                asked.append(program.send(answers[rank]))
            except StopIteration as end:
                results[rank] = end.value
        if not asked:
            return results
        if len(asked) < len(programs):
            raise RuntimeError("some ranks ask for an exchange that others do not know")
        answers = [partial(answer, asked, rank) for rank in range(len(programs))]


def answer(asked: Sequence[Any], rank: int) -> Any:
    """Return what a rank is sent in a step."""
    if isinstance(asked[rank], Exchange):
        return received(asked, rank)
    return {owner: delivered(asked[owner], asked[rank], owner, rank) for owner in asked[rank].expected}


def delivered(sent: Transfer, wanted: Transfer, owner: int, rank: int) -> list[Array]:
    """Return the arrays that one rank sends another."""
    arrays = [np.array(x) for x in sent.sent.get(rank, ())]
    forms = [(x.shape, x.dtype) for x in arrays]
    if forms != list(wanted.expected[owner]):
        raise RuntimeError(f"rank {rank} expects {wanted.expected[owner]} of rank {owner}, which sends {forms}")
    return arrays


def received(asked: Sequence[Exchange], rank: int) -> dict[str, Array]:
    """Return what a rank is sent: the rows of the tiles that it wants, 0 elsewhere."""
    mine = asked[rank]
    result = {}
    for name, local in mine.local.items():
        result[name] = np.zeros((*local.shape[:-2], len(mine.rows), local.shape[-1]), local.dtype)
        for owner, other in enumerate(asked):
            for own, into in mine.deal.pieces(owner, mine.rows):
                result[name][..., into, :] = other.local[name][..., own, :]
        absent = ~mine.rows_for(rank)
        result[name][..., absent, :] = 0
    return result
