"""Backward calls that are prepared once, and run on other arrays without checks and schedules."""

import ctypes
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from regard.core.problem import Outputs, Problem, share
from regard.engines.cpu.schedule.arguments import Arrays, arrays_of, base_of
from regard.engines.cpu.schedule.backward_arrays import BackwardArrays
from regard.engines.cpu.schedule.backward_work import FROM, TO, BackwardSchedule, schedule_for
from regard.engines.cpu.schedule.launches import PORTION, LaunchStage, RepeatedStage, address_in
from regard.engines.cpu.schedule.narrowing import Narrowing
from regard.engines.cpu.schedule.prepared import RunFields, dense_operands, new_results, preparable
from regard.engines.cpu.schedule.work import threads_for
from regard.engines.cpu.spec.operands import BASES
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.engines.normalized import too_large
from regard.rules import Table
from regard.runtime.memory import LARGE, address_of

Array = np.ndarray[Any, np.dtype[Any]]

OPERANDS = ("out", "lse", "dout", "q", "k", "v")
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v"}


class PreparedBackward:
    """A schedule of backward that one thread runs again, with other arrays of the same layout.

    Sums that have the dtype and the layout of a gradient are stored there, others are converted. own: the arrays that
    it was made of.
    """

    def __init__(
        self, schedule: BackwardSchedule, kernel: Any, own: Arrays, run_fields: RunFields, more: Sequence[str],
        target: Target,
    ):  # fmt: skip
        self.bases = array("Q", [*(base_of(own.get(name)) for name in schedule.addresses), 0])  # the last is unread
        self.positions = [schedule.addresses.index(name) for name in (*OPERANDS, *GRADIENTS, *more)]
        fields = schedule.fields[:]
        fields[BASES] = address_in(self.bases)
        self.stages = []
        for chunk in schedule.chunks:
            for task in chunk.tasks:
                fields[FROM], fields[TO] = task.tiles
                stage = LaunchStage(chunk.tiles, chunk.blocks, task.work_groups, chunk.scratch, 0, [])
                self.stages.append(RepeatedStage(kernel, fields, stage, 1))
        lse = own["lse"]
        assert lse is not None
        self.lse, self.size, self.lse_bytes = np.empty_like(lse), np.empty_like(lse), lse.nbytes
        self.lse_address, self.safe = address_of(self.lse), float(np.finfo(lse.dtype).eps) ** -0.5 / 2
        self.zeroed: list[tuple[int, int]] = []  # gradients that begin as 0: their place, and bytes
        self.sums: list[Array] = []  # those that do, and are converted
        self.narrowings: list[tuple[int, Narrowing]] = []
        for at, (name, operand) in enumerate(GRADIENTS.items(), len(OPERANDS)):
            sums, like = own[name], own[operand]
            assert sums is not None
            assert like is not None
            if (sums.shape, sums.dtype) == (like.shape, like.dtype):
                self.zeroed += [(at, sums.nbytes)] * (name != "dq")
                continue
            self.positions[at] = len(schedule.addresses)
            self.narrowings.append((at, Narrowing(sums[..., : like.shape[-1]], like.dtype, target)))
            self.sums += [sums] * (name != "dq")
        self.run_fields, self.c, sink = run_fields, own.get("c"), own.get("sink")
        self.sink = None if sink is None else sink.copy()  # each run writes here
        self.copies, self.busy = [stage.fields[0] for stage in self.stages], False

    def __call__(
        self, addresses: Sequence[int], *, seed: int | None = None, tables: tuple[Table, ...] | None = None
    ) -> bool:
        """Run the call, and return True; False where weights are corrected, as an lse is too large.

        addresses: of out, lse, the cotangent of out, query, key, value and their gradients, then of low, the bias, the
        dense masks and the sink that there are, and of the gradient of that. seed: of dropout.
        tables: those of rules of the same forms. By default both are the problem's.
        """
        if self.busy:  # in a signal's handler
            return False
        self.busy = True
        try:
            ctypes.memmove(self.lse_address, addresses[1], self.lse_bytes)
            if not np.maximum.reduce(np.abs(self.lse, self.size), None) < self.safe and too_large(self.lse).any():
                return False
            for position, address in zip(self.positions, addresses, strict=False):
                self.bases[position] = address
            for at, nbytes in self.zeroed:
                ctypes.memset(addresses[at], 0, nbytes)
            for sums in self.sums:
                sums.fill(0)
            self.run_fields.set(seed, tables, self.copies)
            for stage in self.stages:
                stage(None)
            for at, narrowing in self.narrowings:
                narrowing(addresses[at])
            if self.c is not None and self.sink is not None:
                ctypes.memmove(address_of(self.sink), addresses[-2], self.sink.nbytes)
                rows = share(self.sink[:, None], self.lse) * self.c
                sums = rows.reshape(-1, *rows.shape[-2:]).sum(axis=(0, 2))
                ctypes.memmove(addresses[-1], address_of(sums), sums.nbytes)
            return True
        finally:
            self.busy = False


def prepare(p: Problem, target: Target, vary: Collection[str]) -> PreparedBackward | None:
    """Return a prepared call for the cotangent of out, None where forward has none.

    There is none either for several threads, large gradients, operands that broadcast, and gradients of a bias or of
    tables. With "low" in `vary` the call reads that, too.
    """
    operands = p.query, p.key, p.value
    if (
        not preparable(p)
        or p.trained_bias is not None
        or p.rules.tables
        or any(x.shape[:-3] != p.lead for x in operands)
    ):
        return None
    large = max(x.size for x in operands) * p.compute.itemsize >= LARGE
    if large or threads_for(p, p.batch * p.heads * p.n_q) > 1:
        return None
    out, lse, *_ = new_results(p)
    arrays = BackwardArrays(
        p, Outputs(out, lse, None, p.new_output() if "low" in vary else None), Outputs(p.new_output(), None, None)
    )
    own = arrays_of(p, arrays.own(p))
    schedule = schedule_for(p, target, arrays, own, 1)
    if not isinstance(schedule.chunks, tuple):
        return None
    if sum(int(x.blocks[:, schedule.count].sum()) for x in schedule.chunks) * schedule.products > PORTION:
        return None
    kernel = cache.kernel(schedule.key, arrays.name, target, lambda: arrays.source(arrays.spec(target), target))
    run_fields, more = RunFields(p, schedule.names), [*["low"] * ("low" in vary), *dense_operands(p)]
    return PreparedBackward(schedule, kernel, own, run_fields, more, target)
