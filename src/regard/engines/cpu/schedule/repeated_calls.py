"""Calls that are repeated with other addresses, without checks and schedules."""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.schedule.arguments import arrays_of, dense_masks, programs
from regard.engines.cpu.schedule.fields import address_of
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.launches import RepeatedStage, address_in, launch
from regard.engines.cpu.schedule.work import KernelResults, Schedule, schedule_for, source, threads_for
from regard.engines.cpu.spec.operands import BASES, BLOCKS, FORWARD, PLAIN, TILE_LIST, block_fields_of
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.runtime.threads import team_for

Array = np.ndarray[Any, np.dtype[Any]]

REPEATED_QUERIES = 2**16  # queries up to which a call can be repeated
NAMES = block_fields_of(FORWARD)
COUNT = len(PLAIN)  # query, key, value, out and lse


class RepeatedCall:
    """A schedule for repeated calls by one thread.

    Arrays have the same layout at other addresses.

    Checks and schedules take longer than attention itself where a call is short. They also do where keys come from
    memory and have evicted Python's own data from the caches.
    """

    def __init__(self, schedule: Schedule, kernel: Callable[[int], None], has_bias: bool):
        (stage,) = schedule.stages
        self.kernel, self.stage, self.threads = kernel, stage, schedule.threads
        self.fields, self.bases = schedule.fields[:], array("Q", [0] * stage.blocks.shape[1])
        self.fields[BLOCKS], self.fields[BASES] = address_of(stage.blocks), address_in(self.bases)
        self.fields[TILE_LIST] = address_of(stage.tiles)
        self.first_dense = NAMES.index("bias") + (not has_bias)
        self.repeated: Any = None
        self.members, self.busy = 0, False

    def __call__(self, *addresses: int) -> None:
        """Run the call.

        addresses: of query, key, value, out and lse, then of the bias and the dense masks that there are.
        """
        team, members = team_for(self.threads) if self.threads > 1 else (None, 1)
        waits = members < self.threads or len(self.stage.portions) > 1  # and a signal's handler may call meanwhile
        if self.busy or waits:
            fields, bases = self.fields[:], self.bases[:]
            fields[BASES] = address_in(bases)
            self.point(bases, addresses)
            launch(self.kernel, fields, self.stage, self.threads)
            return
        self.busy = True
        try:
            self.point(self.bases, addresses)
            if members != self.members:
                self.repeated = RepeatedStage(self.kernel, self.fields, self.stage, members)
                self.members = members
            self.repeated(team)
        finally:
            self.busy = False

    def point(self, bases: "array[int]", addresses: tuple[int, ...]) -> None:
        """Set the addresses of a call."""
        bases[:COUNT] = array("Q", addresses[:COUNT])
        if len(addresses) > COUNT:
            dense = array("Q", addresses[COUNT:])
            bases[self.first_dense : self.first_dense + len(dense)] = dense


def repeated_call(p: Problem, target: Target, dense: bool) -> RepeatedCall | None:
    """Return a repeatable call; None for large ones, and rules that read tables.

    dense: it may have a bias and dense masks, whose blocks are not classified.
    """
    count = p.batch * p.heads * p.n_q
    plain = without_options(p) and not any(program.tables for _, program in programs(p))
    has_dense = p.bias is not None or bool(dense_masks(p))
    if not (0 < count <= REPEATED_QUERIES and p.n_k and plain) or (has_dense and not dense):
        return None
    results = KernelResults(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
    arrays = arrays_of(p, results.own(p))
    found = schedule_for(p, target, results, arrays, range(p.n_q), threads_for(p, count))
    if not isinstance(found.stages, tuple) or len(found.stages) != 1:
        return None
    if found.stages[0].split_state:
        return None
    spec = spec_of(p, target, p.n_q, *results.options)
    kernel = cache.kernel(found.key, "forward", target, lambda: source(spec, target))
    return RepeatedCall(found, kernel.call, has_bias=p.bias is not None)


def without_options(p: Problem) -> bool:
    """Test for a call without options other than rules and a bias."""
    return p.sink is None and not p.dropout and not p.observe
