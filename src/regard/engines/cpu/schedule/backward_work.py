"""From a problem and its cotangents to the backward kernel's memory, and in which order its work is done.

A *unit* is a batch element and a key-value head with all query heads of its group. Nothing is shared between units but
the gradient of a bias that broadcasts, of tables and of sinks. Within one, work is cut into *cells*: some groups of
items against a column of tiles. A cell is begun when the one with the same items and the tiles before, and the one with
the same tiles and the items before, have ended; so each sum is made in one order, however the work is cut.
"""

import threading
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from regard.core.problem import Differential, Outputs, Problem
from regard.engines.cpu.schedule.backward_arrays import Arrays
from regard.engines.cpu.schedule.fields import address_of, base_of, packed
from regard.engines.cpu.schedule.work import (
    PORTION,
    WAVE,
    Results,
    Stages,
    in_portions,
    kept,
    programs,
    run_groups,
    shared_fields,
    threads_for,
)
from regard.engines.cpu.spec.backward import (
    FIELDS,
    STRANDS,
    TRAINED_GROUP,
    BackwardKind,
    scratch_size,
)
from regard.engines.cpu.spec.forward import BASES, ITEMS, KEYS, TILE_BITS, TILE_LIST
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.rules import Program, Table
from regard.runtime.forks import cached_property
from regard.runtime.threads import Scratch, spread

Array = np.ndarray[Any, np.dtype[Any]]

ALL_TILES = 2**31
EVERYWHERE = (0, ALL_TILES)


def backward(
    p: Problem, target: Target, outputs: Outputs, ct: Outputs, into: Differential | None = None
) -> Differential:
    """Gradients of ⟨ct.out, out⟩ + ⟨ct.lse, lse⟩ + ⟨ct.entropy, entropy⟩, from the outputs of forward."""
    with np.errstate(all="ignore"):
        return run(p, target, Arrays(p, outputs, ct, into))


def run(p: Problem, target: Target, arrays: Arrays) -> Differential:
    """The gradients, or their tangents, whichever arrays they are."""
    count = p.batch * p.heads * p.n_q
    if count:
        plan(p, target, arrays, threads_for(p, count)).run(p, arrays)
    return arrays.result(target)


def plan(p: Problem, target: Target, arrays: Arrays, threads: int) -> "Plan":
    """The plan for such a call: the one of an earlier call if nothing that it depends on has changed."""
    call = (arrays.name, target.name, threads, *arrays.lie)
    return kept(call, p, lambda: Plan(p, target, arrays, threads))


@dataclass(frozen=True, eq=False)
class Cell:
    """Groups of items (first, after the last) against their tiles from `start` to before `stop`.

    strand: where its part of the gradients of tables is summed. before: the cells whose sums come first.
    """

    groups: Array
    tiles: tuple[int, int]
    strand: int
    before: "tuple[Cell, ...]" = ()

    @cached_property
    def depth(self) -> int:
        """How many cells have to end one after the other before it."""
        return max((cell.depth + 1 for cell in self.before), default=0)


@dataclass(frozen=True, eq=False)
class Wave:
    """Items with addresses counted from where each array begins, their tiles, and cells in an order to begin them."""

    tiles: Array
    items: Array
    cells: list[Cell]
    scratch: int


class Plan:
    """What a call has to do, but for addresses."""

    def __init__(self, p: Problem, target: Target, arrays: Arrays, threads: int):
        self.target, self.threads = target, threads
        kind = arrays.kind(target)
        rules = [(rule.prefix, rule.program) for rule in (kind.mask, kind.score) if rule is not None]
        self.key, self.names, self.count = kind.key, kind.fields, kind.item.index("count")
        self.products = kind.lanes * KEYS * (3 * p.d + 2 * p.d_v)
        # The rules of each call hold the same tables; they are known here by their places.
        every = _tables(p)
        trained = [] if kind.score is None else [(n, kind.score.program.tables[n]) for n in kind.trained]
        self.trained = [(self.names.index(f"dtable{n}"), every.index(table)) for n, table in trained]
        self.moving = [(self.names.index(f"score_table{n}"), every.index(x)) for n, x in arrays.rule.moving.items()]
        self.fields = packed(self.names, self._words(p, arrays, rules))
        self.waves: Iterable[Wave] = Waves(kind, p, arrays, threads)

    def keep(self) -> bool:
        if not isinstance(self.waves, Waves) or not self.waves.short:
            return False
        self.waves = tuple(self.waves)
        return True

    def run(self, p: Problem, arrays: Arrays) -> None:
        def code() -> str:
            return arrays.source(arrays.kind(self.target), self.target)

        kernel = cache.kernel(self.key, arrays.name, self.target, code)
        fields, trained = self.fields[:], []
        fields[SEED] = p.seed
        if self.trained or self.moving:
            every = _tables(p)
            trained = [(at, arrays.dtables[every[n]]) for at, n in self.trained]
            for at, n in self.moving:
                fields[at] = address_of(arrays.tables[every[n]])
        bases = array("Q", [base_of(x) for _, x, _, _ in arrays.arrays()])
        fields[BASES] = bases.buffer_info()[0]
        for wave in self.waves:
            fields[ITEMS], fields[TILE_LIST] = address_of(wave.items), address_of(wave.tiles)
            scratch, done = Scratch(wave.scratch), _Done(wave.cells, self.threads)
            counts = wave.items[:, self.count]
            long = int(counts.sum()) * self.products > PORTION

            def work(
                cell: Cell,
                fields: Any = fields,
                scratch: Scratch = scratch,
                done: _Done = done,
                counts: Array = counts,
                long: bool = long,
            ) -> None:
                mine = fields[:]
                mine[FROM], mine[TO] = cell.tiles
                for at, sums in trained:
                    mine[at] = address_of(sums[cell.strand])
                with done.after(cell):
                    for portion in in_portions(cell.groups, counts, self.products) if long else [cell.groups]:
                        if done.failed:
                            break
                        run_groups(kernel, mine, portion, scratch, array("q", [0]))

            spread(work, wave.cells, self.threads)

    def _words(self, p: Problem, a: Arrays, rules: list[tuple[str, Program]]) -> dict[str, int | float]:
        words = shared_fields(p, rules) | {"strand_tiles": _strand_tiles(p), "dbias_streams": int(a.streams)}
        for name, x, keep, _ in a.arrays():
            if x is not None and keep == 3:
                last = "key" if "bias" in name or "dense" in name else "feature"
                words |= zip((f"{name}_head", f"{name}_row", f"{name}_{last}"), x.strides[-3:], strict=True)
        for at, n in self.trained:
            words[self.names[at + 1]] = _tables(p)[n].array.size * p.compute.itemsize
        return words


SEED, FROM, TO = (FIELDS.index(x) for x in ("seed", "from", "to"))


class Waves(Stages):
    """The waves of a plan, found one after the other each time they are asked for."""

    def __init__(self, kind: BackwardKind, p: Problem, arrays: Arrays, threads: int):
        super().__init__(kind, p, Results(arrays.out, arrays.lse, None, None), range(p.n_q), threads)
        self.sums, self.backward = arrays, kind
        # Groups are cut where rows are, which may not change the order in which a table's tiles are met.
        self.group, self.step = (TRAINED_GROUP, TRAINED_GROUP) if arrays.dtables else (kind.group, 1)

    @cached_property
    def blocks(self) -> tuple[Array, Array]:
        """Heads (first, number) and rows (first, number) of blocks of queries: one head each."""
        heads, starts = np.arange(self.p.heads), np.arange(0, self.p.n_q, self.kind.lanes)
        sizes = np.minimum(self.kind.lanes, self.p.n_q - starts)
        return np.stack([heads, np.ones_like(heads)], axis=1), np.stack([starts, sizes], axis=1)

    def arrays(self) -> list[tuple[str, Array | None, int, bool]]:
        return self.sums.arrays()

    def __iter__(self) -> Iterator[Wave]:  # type: ignore[override]
        p, kind = self.p, self.backward
        # Where threads wait for each other at the end of a wave, it is longer.
        for tiles, given in self.waves(WAVE * self.threads):
            unit = (given[:, self.word("b")] - p.origin[0]) * p.kv_heads + given[:, self.word("head")] // p.group
            order = np.argsort(unit, kind="stable")
            items, ends = given[order], np.flatnonzero(np.diff(unit[order], append=-1)) + 1
            units = [range(*ends) for ends in pairwise([0, *ends.tolist()])]
            most = min(self.group, max(map(len, units)))
            size = scratch_size(kind, most, p.d, p.d_v) * kind.real.size
            yield Wave(tiles, items, self.cells(tiles >> TILE_BITS, items, units), size)

    def cells(self, tiles: Array, items: Array, units: list[range]) -> list[Cell]:
        """The cells of a wave; those that one call of the kernel can do are one where there is one thread."""
        trained, chained = bool(self.sums.dtables), self.backward.bias_shared
        cut = self.threads > 1 and len(units) < 4 * self.threads
        columns = self.cut_tiles(tiles, items, len(units)) if cut else [*EVERYWHERE]
        # What each item has to do in each column.
        lists = [tiles[begin : begin + count] for begin, count in items[:, [self.word("tiles"), self.word("count")]]]
        work = np.array([np.diff(np.searchsorted(x, columns)) for x in lists])
        above: dict[Any, Cell] = {}
        found: list[Cell] = []
        for number, unit in enumerate(units):
            strand = number % STRANDS[0] if trained else 0
            # Units that add to the same numbers follow each other.
            shared = [("table", strand)] * trained
            shared += [("bias", int(items[unit, self.word("dbias")].min()))] * chained
            for rows in self.cut_items(unit, work[unit].sum(axis=1)) if cut else [unit]:
                before: list[Cell] = []
                for m in np.flatnonzero(work[rows].any(axis=0)).tolist() or [0]:
                    keys = [(key, m) for key in (number, *shared)]
                    # The first cell of a row begins dq.
                    ends = columns[m] if before else 0, columns[m + 1]
                    others = dict.fromkeys([*before, *(above[key] for key in keys if key in above)])
                    before = [Cell(self.groups(rows), ends, strand, tuple(others))]
                    above |= dict.fromkeys(keys, before[0])
                    found += before
        if self.threads > 1:
            return sorted(found, key=lambda cell: cell.depth)
        if not chained:
            found.sort(key=lambda cell: cell.strand)
        alike = groupby(found, lambda cell: cell.strand)
        return [Cell(np.concatenate([cell.groups for cell in cells]), EVERYWHERE, strand) for strand, cells in alike]

    def groups(self, rows: range) -> Array:
        starts = np.arange(rows.start, rows.stop, self.group)
        return np.stack([starts, np.minimum(starts + self.group, rows.stop)], axis=1)

    def cut_tiles(self, tiles: Array, items: Array, units: int) -> list[int]:
        """Where the tiles are cut, into parts with as much to do: into few, since each opens every item anew."""
        if self.sums.dtables:
            return [*range(0, _tiles(self.p), _strand_tiles(self.p)), ALL_TILES]
        work = np.zeros(_tiles(self.p) + 1)
        for begin, count in items[:, [self.word("tiles"), self.word("count")]]:
            work[tiles[begin : begin + count]] += 1
        return [*_parts(work[:-1], min(2 * self.threads, -(-4 * self.threads // units)))[:-1], ALL_TILES]

    def cut_items(self, unit: range, work: Array) -> list[range]:
        """A unit's items in parts with as much to do, so many that threads wait little for each other."""
        steps = np.add.reduceat(work, np.arange(0, len(unit), self.step))
        ends = _parts(steps, max(4, min(8 * self.threads, len(unit) // self.group)))
        return [unit[first * self.step : stop * self.step] for first, stop in pairwise(ends)]


def _parts(work: Array, most: int) -> list[int]:
    """Where to cut a row of numbers into at most so many parts of about the same sum."""
    total = np.cumsum(work)
    inside = np.searchsorted(total, total[-1:] * np.arange(1, most) / most) + 1
    return sorted({0, *inside.tolist(), len(work)}) if len(work) else [0, 0]


def _tables(p: Problem) -> list[Table]:
    """The tables that the rules of a call read."""
    return list(dict.fromkeys(table for _, program in programs(p) for table in program.tables))


def _tiles(p: Problem) -> int:
    """How many tiles the keys of a call lie in."""
    return -(-(p.n_k + p.origin[2] % KEYS) // KEYS)


def _strand_tiles(p: Problem) -> int:
    """Tiles whose parts of the gradients of tables are summed together."""
    return max(1, -(-_tiles(p) // STRANDS[1]))


class _Done:
    """Which cells of a wave have ended."""

    def __init__(self, cells: Iterable[Cell], threads: int):
        self.failed = False
        self.events = {cell: threading.Event() for cell in cells} if threads > 1 else {}

    @contextmanager
    def after(self, cell: Cell) -> Iterator[None]:
        """Work on a cell when those before it have ended. They have been begun, so they will."""
        if not self.events:
            yield
            return
        try:
            for other in cell.before:
                self.events[other].wait()
            yield
        except BaseException:
            self.failed = True  # what the others make is of no use
            raise
        finally:
            self.events[cell].set()
