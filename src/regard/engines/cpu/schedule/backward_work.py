"""Schedules of backward: its graph of tasks, and the order of its sums.

Query heads of a batch element that share a key-value head are independent of other heads, except for shared gradients:
those of a bias that broadcasts, of tables and of sinks. Their work is divided into *tasks*: some work groups times a
column of tiles. A task starts after two others: the one with the same query blocks and earlier tiles, and the one with
the same tiles and earlier query blocks. So each sum has one order, however the work is divided.
"""

import threading
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.core.problem import Differential, Outputs, Problem
from regard.engines.cpu.schedule.arguments import (
    Arrays,
    arrays_of,
    base_of,
    check,
    field_values,
    layout_of,
    pack_fields,
    programs,
)
from regard.engines.cpu.schedule.backward_arrays import BackwardArrays
from regard.engines.cpu.schedule.launches import PORTION, in_portions, in_work_groups, run_work_groups
from regard.engines.cpu.schedule.stages import CHUNK_BLOCKS, LaunchStages
from regard.engines.cpu.schedule.work import cached, threads_for
from regard.engines.cpu.spec.operands import BACKWARD, BASES, BLOCKS, SEED, TILE_LIST, fields_of
from regard.engines.cpu.spec.scratch import backward_scratch_size
from regard.engines.cpu.spec.specs import PARTIAL_SUMS, TRAINED_WORK_GROUP, BackwardSpec
from regard.engines.cpu.spec.tiles import KEYS, TILE_BITS
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.rules import Table
from regard.runtime.forks import cached_property
from regard.runtime.memory import address_of
from regard.runtime.threads import Scratch, spread

Array = np.ndarray[Any, np.dtype[Any]]

ALL_TILES = 2**31
EVERYWHERE = (0, ALL_TILES)
TASKS = 8  # for each thread, if key-value heads are not divided


def backward(
    p: Problem, target: Target, outputs: Outputs, ct: Outputs, into: Differential | None = None
) -> Differential:
    """Return the gradients of the inputs, from forward's outputs.

    The sum ⟨ct.out, out⟩ + ⟨ct.lse, lse⟩ + ⟨ct.entropy, entropy⟩ is differentiated.
    """
    with np.errstate(all="ignore"):
        return run(p, target, BackwardArrays(p, outputs, ct, into))


def run(p: Problem, target: Target, arrays: BackwardArrays) -> Differential:
    """Run a schedule, and return the gradients, or their tangents.

    arrays: decide which of the two.
    """
    count = p.all_heads * p.n_q
    if count:
        operands = arrays_of(p, arrays.own(p))
        schedule_for(p, target, arrays, operands, threads_for(p, count)).run(p, arrays, operands)
    return arrays.result(target)


def schedule_for(p: Problem, target: Target, arrays: BackwardArrays, found: Arrays, threads: int) -> "BackwardSchedule":
    """Return the schedule of a call, cached if nothing that it depends on has changed."""
    call = (arrays.name, target.name, threads, *layout_of(found.values()), *arrays.identity)
    return cached(call, p, lambda: BackwardSchedule(p, target, arrays, found, threads))


@dataclass(frozen=True, eq=False)
class Task:
    """A node of the graph: work groups times a column of tiles.

    work_groups: (first, stop) of each. tiles: the first tile and the one after the last. before: tasks with earlier
    sums.
    """

    work_groups: Array
    tiles: tuple[int, int]
    before: "tuple[Task, ...]" = ()

    @cached_property
    def depth(self) -> int:
        """The length of the longest chain of tasks before it."""
        return max((task.depth + 1 for task in self.before), default=0)


@dataclass(frozen=True, eq=False)
class BackwardChunk:
    """Query blocks, their tiles, and tasks in topological order.

    Blocks have offsets from each array's base.
    """

    tiles: Array
    blocks: Array
    tasks: list[Task]
    scratch: int


class BackwardSchedule:
    """The work of a call, without addresses."""

    def __init__(self, p: Problem, target: Target, arrays: BackwardArrays, found: Arrays, threads: int):
        self.target, self.threads = target, threads
        spec = arrays.spec(target)
        check(spec, found)
        self.key, self.names, self.count = spec.key, spec.fields, spec.block_fields.index("count")
        self.addresses = tuple(spec.operands)
        self.products = spec.lanes * KEYS * (3 * p.d + 2 * p.d_v)
        # Rules of different calls hold the same tables; schedules know them by index.
        every = _tables(p)
        trained = [] if spec.score is None else [(n, spec.score.program.tables[n]) for n in spec.trained]
        self.trained = [(self.names.index(f"dtable{n}"), every.index(table)) for n, table in trained]
        self.tangent_tables = [
            (self.names.index(f"score_table{n}"), every.index(x)) for n, x in arrays.rule.tangent_tables.items()
        ]
        values = field_values(p, spec, found) | {
            "partial_tiles": _partial_tiles(p), "dbias_streams": int(arrays.streams),
            **{self.names[at + 1]: every[n].array.size * p.compute.itemsize for at, n in self.trained},
        }  # fmt: skip
        self.fields = pack_fields(self.names, values)
        self.nbytes = 0
        self.chunks: Iterable[BackwardChunk] = BackwardChunks(spec, p, arrays, found, threads)

    def materialize(self) -> bool:
        if not isinstance(self.chunks, BackwardChunks) or not self.chunks.short:
            return False
        self.nbytes = self.chunks.nbytes
        self.chunks = tuple(self.chunks)
        return True

    def run(self, p: Problem, arrays: BackwardArrays, operands: Arrays) -> None:
        def code() -> str:
            return arrays.source(arrays.spec(self.target), self.target)

        kernel = cache.kernel(self.key, arrays.name, self.target, code)
        fields = self.fields[:]
        fields[SEED] = p.seed
        for tables, sources in ((self.trained, arrays.dtables), (self.tangent_tables, arrays.tables)):
            for at, n in tables:
                fields[at] = address_of(sources[_tables(p)[n]])
        bases = array("Q", [base_of(operands.get(name)) for name in self.addresses])
        fields[BASES] = bases.buffer_info()[0]
        for chunk in self.chunks:
            fields[BLOCKS], fields[TILE_LIST] = address_of(chunk.blocks), address_of(chunk.tiles)
            scratch, done = Scratch(chunk.scratch), _Done(chunk.tasks, self.threads)
            counts = chunk.blocks[:, self.count]
            long = int(counts.sum()) * self.products > PORTION

            def work(
                task: Task,
                fields: Any = fields,
                scratch: Scratch = scratch,
                done: _Done = done,
                counts: Array = counts,
                long: bool = long,
            ) -> None:
                mine = fields[:]
                mine[FROM], mine[TO] = task.tiles
                with done.after(task):
                    for portion in in_portions(task.work_groups, counts, self.products) if long else [task.work_groups]:
                        if done.failed:
                            break
                        run_work_groups(kernel, mine, portion, scratch, array("q", [0]))

            spread(work, chunk.tasks, self.threads)


FROM, TO = (fields_of(BACKWARD).index(x) for x in ("from", "to"))


class BackwardChunks(LaunchStages):
    """The chunks of a schedule, computed anew by each iteration."""

    def __init__(self, spec: BackwardSpec, p: Problem, arrays: BackwardArrays, found: Arrays, threads: int):
        super().__init__(spec, p, found, range(p.n_q), threads)
        self.sums, self.backward = arrays, spec
        # Groups end where row ranges do, which must not change the order of a table's tiles.
        self.work_group, self.step = (
            (TRAINED_WORK_GROUP, TRAINED_WORK_GROUP) if arrays.dtables else (spec.work_group, 1)
        )

    @cached_property
    def grid(self) -> tuple[Array, Array]:
        """Heads (first, count) and rows (first, count) of query blocks, one head each."""
        heads, starts = np.arange(self.p.heads), np.arange(0, self.p.n_q, self.spec.lanes)
        sizes = np.minimum(self.spec.lanes, self.p.n_q - starts)
        return np.stack([heads, np.ones_like(heads)], axis=1), np.stack([starts, sizes], axis=1)

    def __iter__(self) -> Iterator[BackwardChunk]:  # type: ignore[override]
        p, spec = self.p, self.backward
        # Threads wait for each other at the end of a chunk, so it is longer for more threads. Gradients of tables have
        # sums over several key-value heads, chunk by chunk, so there its length is fixed.
        for tiles, table in self.chunks(CHUNK_BLOCKS * (1 if self.sums.dtables else self.threads)):
            head, i = table[:, self.field("head")], table[:, self.field("i")]
            kv_head = (table[:, self.field("b")] - p.origin[0]) * p.kv_heads + head // p.group
            # Sums over queries run from the last row to the first, and over the heads of a row, however a call is cut.
            order = np.lexsort((head, -i, kv_head))
            blocks, edges = table[order], np.append(0, np.flatnonzero(np.diff(kv_head[order], append=-1)) + 1)
            counts = np.diff(edges)
            partial_sum = np.arange(len(counts)) % PARTIAL_SUMS[0] * PARTIAL_SUMS[1]
            blocks[:, self.field("partial_sum")] = np.repeat(partial_sum, counts)
            most = min(self.work_group, int(counts.max()))
            size = backward_scratch_size(spec, most, p.d, p.d_v) * spec.real.size
            yield BackwardChunk(tiles, blocks, self.tasks(tiles >> TILE_BITS, blocks, edges), size)

    def tasks(self, tiles: Array, blocks: Array, edges: Array) -> list[Task]:
        """Return the tasks of a chunk.

        Many chains are not divided, and tasks that one launch can do are merged. edges: the first block of each
        key-value head, and the number of blocks.
        """
        chains = self.chains(blocks, edges)
        order, count = np.argsort(chains, kind="stable"), int(chains.max()) + 1
        if self.threads == 1 or count >= (2 if self.sums.dtables else 4) * self.threads:
            return self.whole_chains(blocks, edges, chains, order)
        columns = self.tile_edges(tiles, blocks, count)
        # The tiles in each column before each entry of the lists, and those of all query blocks before each block.
        column = np.searchsorted(columns, tiles, side="right") - 1
        before_entry = _sums_before(column[:, None] == np.arange(len(columns) - 1))
        begin, end = self.list_ends(blocks)
        work_before = _sums_before(before_entry[end] - before_entry[begin])
        tasks: list[Task] = []
        for heads in np.split(order, np.flatnonzero(np.diff(chains[order])) + 1):
            above: dict[int, list[Task]] = {}
            for groups in self.row_ranges(edges[heads], edges[heads + 1], work_before):
                before: list[Task] = []
                seen = (work_before[groups[:, 1]] > work_before[groups[:, 0]]).any(axis=0)
                for m in np.flatnonzero(seen).tolist() or [0]:
                    # The first task of a row sets dq to 0.
                    ends = columns[m] if before else 0, columns[m + 1]
                    before = above[m] = [Task(groups, ends, (*before, *above.get(m, ())))]
                    tasks += before
        return sorted(tasks, key=lambda task: task.depth)

    def chains(self, blocks: Array, edges: Array) -> Array:
        """Return the chain of each key-value head, numbered in order: those of a chain share sums.

        A chain is a partial sum if a table has a gradient, or else a gradient of a shared bias; with both it is all.
        """
        heads = np.arange(len(edges) - 1)
        if not self.backward.bias_shared:
            return heads % PARTIAL_SUMS[0] if self.sums.dtables else heads
        if self.sums.dtables:
            return np.zeros_like(heads)
        start = np.minimum.reduceat(blocks[:, self.field("dbias")], edges[:-1])
        _, first, chain = np.unique(start, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[chain]

    def whole_chains(self, blocks: Array, edges: Array, chains: Array, order: Array) -> list[Task]:
        """Return tasks of whole chains, which do not wait for each other.

        A launch takes Python some 50 µs, so there are no more tasks than needed to divide the work evenly. order: the
        key-value heads by chain.
        """
        work = np.zeros(int(chains.max()) + 1, np.int64)
        np.add.at(work, chains, np.add.reduceat(blocks[:, self.field("count")], edges[:-1]))
        ends = _even_edges(work, TASKS * self.threads if self.threads > 1 else 1)
        parts = np.split(order, np.searchsorted(chains[order], ends[1:-1]))
        return [Task(in_work_groups(edges[x], edges[x + 1], self.work_group), EVERYWHERE) for x in parts]

    def tile_edges(self, tiles: Array, blocks: Array, chains: int) -> list[int]:
        """Return the edges of columns of tiles with equal work.

        Columns are few, since each opens every query block again.
        """
        if self.sums.dtables:
            return [*range(0, _tiles(self.p), _partial_tiles(self.p)), ALL_TILES]
        begin, end = (np.bincount(x, minlength=len(tiles) + 1) for x in self.list_ends(blocks))
        work = np.bincount(tiles, np.cumsum(begin - end)[:-1], _tiles(self.p))
        return [*_even_edges(work, min(2 * self.threads, -(-4 * self.threads // chains)))[:-1], ALL_TILES]

    def list_ends(self, blocks: Array) -> tuple[Array, Array]:
        """Return where the list of tiles of each query block begins and ends."""
        begin = blocks[:, self.field("tiles")]
        return begin, begin + blocks[:, self.field("count")]

    def row_ranges(self, first: Array, stop: Array, work_before: Array) -> Iterator[Array]:
        """Divide a chain's query blocks into ranges of equal work, and yield the work groups of each.

        There are enough of them for threads to wait little; in a single column they run one after the other. first,
        stop: the ends of each key-value head. work_before: in each column, of all query blocks before each.
        """
        steps, work = in_work_groups(first, stop, self.step), work_before.sum(axis=1)
        many = min(8 * self.threads, int((stop - first).sum()) // self.work_group)
        ends = _even_edges(work[steps[:, 1]] - work[steps[:, 0]], max(4, many) if work_before.shape[1] > 1 else 4)
        for part in np.split(steps, ends[1:-1]):
            begin = np.flatnonzero(np.isin(part[:, 0], first) | (part[:, 0] == part[0, 0]))
            yield in_work_groups(part[begin, 0], part[np.append(begin[1:], len(part)) - 1, 1], self.work_group)


def _sums_before(x: Array) -> Array:
    """Return the sums of x up to each index of its first axis, and at last of all."""
    return np.append(np.zeros((1, *x.shape[1:]), np.int64), np.cumsum(x, axis=0), axis=0)


def _even_edges(work: Array, most: int) -> list[int]:
    """Return the edges of at most `most` ranges of about equal sums."""
    total = np.cumsum(work)
    inside = np.searchsorted(total, total[-1:] * np.arange(1, most) / most) + 1
    return sorted({0, *inside.tolist(), len(work)}) if len(work) else [0, 0]


def _tables(p: Problem) -> list[Table]:
    """Return the tables that the rules of a call read."""
    return list(dict.fromkeys(table for _, program in programs(p) for table in program.tables))


def _tiles(p: Problem) -> int:
    """Return the number of tiles of a call's keys."""
    return -(-(p.n_k + p.origin[2] % KEYS) // KEYS)


def _partial_tiles(p: Problem) -> int:
    """Return the tiles that share a partial sum of table gradients."""
    return max(1, -(-_tiles(p) // PARTIAL_SUMS[1]))


class _Done:
    """Events of the tasks of a chunk that have ended."""

    def __init__(self, tasks: Iterable[Task], threads: int):
        self.failed = False
        self.events = {task: threading.Event() for task in tasks} if threads > 1 else {}

    @contextmanager
    def after(self, task: Task) -> Iterator[None]:
        """Wait for the tasks before this one, then mark it as ended.

        Earlier tasks have been started, so they will end.
        """
        if not self.events:
            yield
            return
        try:
            for other in task.before:
                self.events[other].wait()
            yield
        except BaseException:
            self.failed = True  # the other tasks' results are useless
            raise
        finally:
            self.events[task].set()
