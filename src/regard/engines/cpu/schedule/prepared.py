"""Forward calls that are prepared once, and run on other arrays without checks and schedules.

In a short call checks and schedules take longer than attention itself, also where keys have evicted Python's own data
from the caches. A prepared call has scratch memory, and serves one thread.
"""

from array import array
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.schedule.arguments import arrays_of, base_of, dense_masks, programs, table_array
from regard.engines.cpu.schedule.launches import LaunchStage, RepeatedStage, address_in, launch
from regard.engines.cpu.schedule.stages import ONE_TILE, LaunchStages, long
from regard.engines.cpu.schedule.work import KernelResults, Schedule, schedule_for, threads_for
from regard.engines.cpu.spec.operands import BASES, FIELDS, SEED
from regard.engines.cpu.spec.tiles import KEYS, tile_word
from regard.engines.cpu.target.instructions import Target
from regard.rules import Table, tables_of
from regard.runtime.memory import address_of
from regard.runtime.threads import team_for

Array = np.ndarray[Any, np.dtype[Any]]

MOST_QUERIES = 2**16  # of a prepared call
VARYING = frozenset({"mask", "score", "bias", "sink", "dropout", "positions_first", "constants"})
"""The optional fields that a prepared call may have: it is given their arrays, or does not depend on them."""
PLAIN = frozenset({"positions_first", "constants"})  # those of a decode step
N_K, KEY_END = FIELDS.index("n_k"), FIELDS.index("keys")


class RunFields:
    """The fields that each run of a prepared call sets: the seed, and the addresses of its rules' tables.

    own: those of the problem. now: those that the fields have.
    """

    def __init__(self, p: Problem, names: Sequence[str]):
        self.at = [names.index(f"{prefix}_table{n}") for prefix, x in programs(p) for n in range(len(x.tables))]
        self.own, self.real = (p.seed, tables_of(p.mask_node, p.score_node)), p.compute
        self.now: tuple[int, tuple[Table, ...]] | None = None

    def set(self, seed: int | None, tables: tuple[Table, ...] | None, copies: Sequence["array[int]"]) -> None:
        """Set all copies of the fields; None stands for the problem's."""
        values = self.own[0] if seed is None else seed, self.own[1] if tables is None else tables
        if values == self.now:
            return
        self.now = None  # invalid until all is done: Ctrl-C may come in between
        addresses = [address_of(table_array(table, self.real)) for table in values[1]]
        for fields in copies:
            fields[SEED] = values[0]
            for at, address in zip(self.at, addresses, strict=True):
                fields[at] = address
        self.now = values


class PreparedForward:
    """A schedule that one thread runs again, with other arrays of the same layout, and other tables."""

    def __init__(
        self, schedule: Schedule, kernel: Any, run_fields: RunFields, dense: Sequence[str] = (), sink: bool = False
    ):
        self.arguments: tuple[Any, ...] = schedule, kernel, run_fields, dense, sink
        self.run_fields, self.kernel, self.threads = copy(run_fields), kernel, schedule.threads
        self.stages: tuple[LaunchStage, ...] = tuple(schedule.stages)
        self.fields, self.bases = schedule.fields[:], array("Q", [0] * (len(schedule.addresses) + 1))
        self.fields[BASES] = address_in(self.bases)
        self.split_state_at = schedule.split_state
        self.positions = [schedule.addresses.index(name) for name in ("out", "lse", "q", "k", "v", *dense)]
        self.whole = [at for at, name in schedule.whole if name == "sink"] if sink else []
        self.positions += [len(schedule.addresses)] * sink  # an address that is a field; this base is not read
        self.repeated: tuple[RepeatedStage, ...] = ()
        self.copies = [self.fields]  # and those of `repeated`
        self.members, self.busy = 0, False
        self.allocate()

    def __call__(
        self, addresses: Sequence[int], *keys: Any, seed: int | None = None, tables: tuple[Table, ...] | None = None
    ) -> bool:
        """Run the call, and return True.

        addresses: of out, lse, query, key and value, then of low, the bias, the dense masks and the sink that there
        are. keys: see `PreparedStep.arrange`. seed: of dropout. tables: those of rules of the same forms. By default
        both are the problem's.
        """
        if self.busy:  # in a signal's handler
            return type(self)(*self.arguments)(addresses, *keys, seed=seed, tables=tables)
        self.busy = True
        try:
            if keys:
                self.arrange(*keys)
            bases = self.bases
            for position, address in zip(self.positions, addresses, strict=True):
                bases[position] = address
            for at in self.whole:
                for fields in self.copies:
                    fields[at] = addresses[-1]
            self.run_fields.set(seed, tables, self.copies)
            team, members = team_for(self.threads) if self.threads > 1 else (None, 1)
            if members == self.members:
                for stage in self.repeated:
                    stage(team)
            else:
                self.launch(members)
            return True
        finally:
            self.busy = False

    def allocate(self) -> None:
        """Allocate the memory of key splits, which all stages share."""
        size = self.stages[0].split_state
        self.split_state = np.empty(size, np.uint8) if size else None
        self.bases[self.split_state_at] = base_of(self.split_state)

    def launch(self, members: int) -> None:
        """Run the stages, and store them for the number of members of a team."""
        for stage in self.stages:
            launch(self.kernel, self.fields, stage, self.threads)
        if members == self.threads and all(len(stage.portions) == 1 for stage in self.stages):
            self.repeated = tuple(RepeatedStage(self.kernel, self.fields, x, members) for x in self.stages)
            self.copies = [self.fields, *(fields for stage in self.repeated for fields in stage.fields)]
            self.members = members

    def arrange(self, n_k: int, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        raise NotImplementedError


class PreparedStep(PreparedForward):
    """A decode step that one thread runs again: one query of each head, and any number of keys.

    Only the number of keys and the strides of a cache between batch elements and heads change. So one schedule serves
    all steps with the same number of tiles. A new one takes many times as long as a short step.
    """

    def __init__(self, p: Problem, target: Target):
        self.p = p = form_of(p, p.n_k)
        self.results = new_results(p)
        self.arrays = self.results.own(p)
        threads = threads_for(p, p.batch * p.heads)
        schedule = Schedule(p, target, self.results, arrays_of(p, self.arrays), range(1), threads)
        super().__init__(schedule, schedule.kernel(p, self.results).call, RunFields(p, schedule.names))
        self.arguments = p, target
        self.spec = self.results.spec(p, target, 1)
        self.heads = [self.spec.fields.index(f"{name}_head") for name in "kv"]
        self.strides: tuple[tuple[int, ...], ...] = ()
        self.n_k = 0
        self.tile_list: Array = np.empty(0, np.int64)
        self.list_tiles(-(-p.n_k // KEYS))

    def arrange(self, n_k: int, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        """Adapt the schedule to a number of keys, and to strides of keys and values in numbers, not bytes."""
        tiles = -(-n_k // KEYS)
        if tiles != self.tiles:
            self.distribute(tiles)
        if (key, value) != self.strides:
            self.set_strides(key, value)
        if n_k != self.n_k:
            self.n_k = n_k
            for fields in self.copies:
                fields[N_K] = fields[KEY_END] = n_k

    def distribute(self, tiles: int) -> None:
        """Distribute `tiles` tiles of keys among threads."""
        p, before = form_of(self.p, tiles * KEYS), self.threads
        threads = threads_for(p, p.batch * p.heads)
        self.tiles = self.threads = self.members = 0  # invalid until all is done: Ctrl-C may come in between
        if before == threads == 1:
            self.stages[0].blocks[:, self.spec.block_fields.index("count")] = tiles
        else:
            self.strides = ()
            self.stages = tuple(LaunchStages(self.spec, p, arrays_of(p, self.arrays), range(1), threads))
            self.allocate()
        self.threads = threads
        self.list_tiles(tiles)

    def list_tiles(self, tiles: int) -> None:
        """Give the stages a list that begins with `tiles` tiles, and has some for steps to come."""
        if tiles > len(self.tile_list):
            self.tile_list = tile_word(np.arange(2 * tiles, dtype=np.int64))
        self.stages = tuple(replace(stage, tiles=self.tile_list) for stage in self.stages)
        self.tiles = tiles

    def set_strides(self, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        self.strides, size, column = (), self.p.dtype.itemsize, self.spec.block_fields.index
        for name, field, strides in zip("kv", self.heads, (key, value), strict=True):
            for fields in self.copies:
                fields[field] = strides[-3] * size
            for blocks in (stage.blocks for stage in self.stages):
                b, h = blocks[:, column("b")], blocks[:, column("head")] // self.p.group
                blocks[:, column(name)] = (b * strides[0] + h * strides[-3]) * size
        self.strides = key, value


def form_of(p: Problem, n_k: int) -> Problem:
    """Return the problem with n_k keys.

    The arrays have no memory, and must not be read.
    """

    def form(x: Array, rows: int) -> Array:
        return np.lib.stride_tricks.as_strided(np.empty(1, x.dtype), (*x.shape[:-2], rows, x.shape[-1]), x.strides)

    return replace(p, query=form(p.query, p.n_q), key=form(p.key, n_k), value=form(p.value, n_k))


def prepare(p: Problem, target: Target, vary: Collection[str]) -> PreparedForward | None:
    """Return a prepared call, None for those that are not `preparable`.

    With "keys" in `vary` there is none either for calls with rules or a bias, and several queries of a head. With "low"
    the call stores that, too.
    """
    if not preparable(p):
        return None
    if "keys" in vary:
        lead = p.query.shape[:-3]
        alike = lead == p.key.shape[:-3] == p.value.shape[:-3] and len(lead) < 2
        return PreparedStep(p, target) if p.used <= PLAIN and alike and p.n_q == 1 else None
    low = ["low"] * ("low" in vary)
    results = new_results(p)._replace(low=p.new_output() if low else None)
    arrays = arrays_of(p, results.own(p))
    schedule = schedule_for(p, target, results, arrays, range(p.n_q), threads_for(p, p.batch * p.heads * p.n_q))
    if not isinstance(schedule.stages, tuple):
        return None
    run_fields, dense = RunFields(p, schedule.names), [*low, *dense_operands(p)]
    return PreparedForward(schedule, schedule.kernel(p, results).call, run_fields, dense, p.sink is not None)


def preparable(p: Problem) -> bool:
    """Return False for long calls, other options than `VARYING`, and where values decide which tiles are skipped.

    Values do so in a bias that may hide, and in tables of rules where keys are several tiles.
    """
    if not (0 < p.batch * p.heads * p.n_q <= MOST_QUERIES and p.n_k and p.used <= VARYING):
        return False
    one_tile = p.origin[2] % KEYS + p.n_k <= KEYS and p.pairs * (p.d + p.d_v) < ONE_TILE[0]
    return (one_tile or not tables_of(p.mask_node, p.score_node)) and (p.bias is None or not long(p))


def dense_operands(p: Problem) -> list[str]:
    """Return the names of the bias and the dense masks that there are."""
    return ["bias"] * (p.bias is not None) + [f"dense{n}" for n in range(len(dense_masks(p)))]


def new_results(p: Problem) -> KernelResults:
    return KernelResults(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
