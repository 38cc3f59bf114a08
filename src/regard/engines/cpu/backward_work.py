"""From a problem and its cotangents to the backward kernel's memory, and in which order its work is done.

A *unit* is a batch element and a key-value head with all query heads of its group. Nothing is shared between units but
the gradient of a bias that broadcasts, of tables and of sinks. Within one, work is cut into *cells*: some groups of
items against a column of tiles. A cell is begun when the one with the same items and the tiles before, and the one with
the same tiles and the items before, have ended; so each sum is made in one order, however the work is cut.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.engines.cpu import cache
from regard.engines.cpu.backward_layout import (
    FIELDS,
    GROUP,
    STRANDS,
    TRAINED_GROUP,
    BackwardKind,
    Reading,
    padded,
    scratch_size,
)
from regard.engines.cpu.element import BF16, F32, F64, I64, type_of
from regard.engines.cpu.layout import KEYS, TILE_BITS, Arguments, integer_type
from regard.engines.cpu.target import Target
from regard.engines.cpu.work import (
    SMALL,
    WAVE,
    Results,
    Stages,
    address_of,
    dense_masks,
    kept,
    packed,
    programs,
    shared_fields,
    signature,
    written,
)
from regard.problem import Differential, Outputs, Problem, collapse
from regard.rules import Node, Program, Table, tangent
from regard.threads import Scratch, num_threads, spread

if TYPE_CHECKING:
    from regard.engines.cpu.emit import Kernel

Array = np.ndarray[Any, np.dtype[Any]]

ALL_TILES = 2**31
EVERYWHERE = (0, ALL_TILES)


class Arrays:
    """The arrays of one call: what the kernel reads beside the inputs, and what it writes; and which kernel it is."""

    name = "backward"

    def __init__(self, p: Problem, outputs: Outputs, ct: Outputs):
        self.p, real = p, p.compute
        assert outputs.out is not None
        assert outputs.lse is not None
        self.out, self.lse = outputs.out, np.ascontiguousarray(outputs.lse)
        self.dout = np.broadcast_to(np.zeros((), p.dtype), self.out.shape) if ct.out is None else ct.out
        self.p_sink: Any = real.type(0)
        if p.sink is not None:
            self.p_sink = np.where(self.lse == -np.inf, 0, np.exp(self.by_head(p.sink) - self.lse))
        self.given = None if ct.lse is None else ct.lse.astype(real)
        self.d_entropy = None if ct.entropy is None else np.ascontiguousarray(ct.entropy, real)
        if self.d_entropy is not None:
            assert outputs.entropy is not None
            self.spread = np.where(self.lse == -np.inf, 0, 1 - self.p_sink) - outputs.entropy
            more = self.d_entropy * self.spread
            self.given = more if self.given is None else self.given + more
        if self.given is not None:
            self.given = np.ascontiguousarray(self.given, real)
        self.c = None if p.sink is None else np.zeros(self.lse.shape, real)
        self.dq = np.empty(p.shape(p.n_q, p.d), real)
        self.dk, self.dv = (
            np.zeros((*p.lead, p.kv_heads, p.n_k, padded(real.itemsize, width)), real) for width in (p.d, p.d_v)
        )
        self.dbias = None if p.bias is None else np.zeros(self.bias_shape(p.bias), real)
        self.dtables = {table: np.zeros((*STRANDS, *table.shape), real) for table in p.tables}
        self.tables: Mapping[Table, Array] = {}  # tangents of some

    def by_head(self, sink: Array) -> Array:
        return np.broadcast_to(sink.astype(self.p.compute), (self.p.heads,))[:, None]

    def bias_shape(self, bias: Array) -> tuple[int, ...]:
        """Of the sums of dS: for each batch element and head, but as the bias where that is n_q · n_k."""
        rows, keys = bias_axes(bias)
        if rows and keys:
            return tuple(bias.shape)
        return self.p.shape(self.p.n_q if rows else 1, self.p.n_k if keys else 1)

    def arrays(self) -> list[tuple[str, Array | None, int, bool]]:
        """Whatever an item has an address in, in its order: the name, the array, the dimensions behind the leading
        ones, and whether heads of a group share it, and all rows.
        """
        p = self.p
        bias, dbias = (None if x is None else p.dense(x) for x in (p.bias, self.dbias))
        return [
            ("q", p.query, 3, False), ("k", p.key, 3, True), ("v", p.value, 3, True), ("out", self.out, 3, False),
            ("dout", self.dout, 3, False), ("lse", self.lse, 2, False), ("given", self.given, 2, False),
            ("d_entropy", self.d_entropy, 2, False), ("c", self.c, 2, False), ("dq", self.dq, 3, False),
            ("dk", self.dk, 3, True), ("dv", self.dv, 3, True), ("bias", bias, 3, False), ("dbias", dbias, 3, False),
            *self.more(), *((f"dense{n}", x, 3, False) for n, x in enumerate(dense_masks(p))),
        ]  # fmt: skip

    def more(self) -> list[tuple[str, Array | None, int, bool]]:
        """Those that only a tangent has."""
        return []

    @property
    def lie(self) -> tuple[Any, ...]:
        """What plans depend on beside the problem."""
        a = self
        return tuple(None if x is None else x.strides for x in (a.out, a.dout, a.lse, a.given, a.d_entropy))

    @cached_property
    def rule(self) -> "Rule":
        """The score and its derivatives."""
        return rule_of(self.p)

    def kind(self, target: Target) -> BackwardKind:
        return kind_of(self.p, target, self.d_entropy is not None, self.rule)

    def source(self, kind: BackwardKind, target: Target) -> str:
        """The IR of the kernel."""

        def write(k: "Kernel") -> None:
            from regard.engines.cpu.backward_kernel import Backward

            Backward(k, kind).run()

        return written(self.name, kind.fields, target, write)

    def result(self) -> Differential:
        p = self.p

        def fit(x: Array | None, like: Array | None) -> Any:
            return None if x is None or like is None else collapse(x, like.shape).astype(like.dtype, copy=False)

        return Differential(
            query=fit(self.dq, p.query),
            key=fit(np.ascontiguousarray(self.dk[..., : p.d]), p.key),
            value=fit(np.ascontiguousarray(self.dv[..., : p.d_v]), p.value),
            bias=fit(self.dbias, p.bias),
            sink=None if self.c is None else self.sink(self.c),
            tables={table: x.sum(axis=(0, 1)).astype(table.dtype, copy=False) for table, x in self.dtables.items()},
        )

    def sink(self, c: Array) -> Any:
        return self.sink_of(self.p_sink * c)

    def sink_of(self, rows: Array) -> Any:
        """The gradient of the sink from its parts by query."""
        assert self.p.sink is not None
        by_head = rows.reshape(self.p.batch, self.p.heads, self.p.n_q).sum(axis=(0, 2))
        return collapse(by_head, self.p.sink.shape).astype(self.p.sink.dtype, copy=False)


def backward(p: Problem, target: Target, outputs: Outputs, ct: Outputs) -> Differential:
    """Gradients of ⟨ct.out, out⟩ + ⟨ct.lse, lse⟩ + ⟨ct.entropy, entropy⟩, from the outputs of forward."""
    with np.errstate(all="ignore"):
        return run(p, target, Arrays(p, outputs, ct))


def run(p: Problem, target: Target, arrays: Arrays) -> Differential:
    if p.batch * p.heads * p.n_q:
        small = p.batch * p.heads * p.n_q * p.n_k * (p.d + p.d_v + 16) < SMALL
        plan(p, target, arrays, 1 if small else num_threads()).run(p, arrays)
    return arrays.result()


def plan(p: Problem, target: Target, arrays: Arrays, threads: int) -> "Plan":
    """The plan for such a call: the one of an earlier call if nothing that it depends on has changed."""
    call = (arrays.name, target.name, threads, *arrays.lie, p.signature or signature(p))
    return kept(call, lambda: Plan(p, target, arrays, threads))


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
        self.key, self.names = kind.key, kind.fields
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
        bases = [0 if x is None else address_of(x) for _, x, _, _ in arrays.arrays()]
        for wave in self.waves:
            items = wave.items + np.array(bases + [0] * (wave.items.shape[1] - len(bases)))
            fields[ITEMS], fields[TILE_LIST] = address_of(items), address_of(wave.tiles)
            scratch, done = Scratch(wave.scratch), _Done(wave.cells, self.threads)

            def work(cell: Cell, fields: Any = fields, scratch: Scratch = scratch, done: _Done = done) -> None:
                mine = fields[:]
                mine[GROUPS], mine[COUNT], mine[SCRATCH] = address_of(cell.groups), len(cell.groups), scratch.address
                mine[FROM], mine[TO] = cell.tiles
                for at, sums in trained:
                    mine[at] = address_of(sums[cell.strand])
                with done.after(cell):
                    kernel(mine.buffer_info()[0])

            spread(work, wave.cells, self.threads)

    def _words(self, p: Problem, a: Arrays, rules: list[tuple[str, Program]]) -> dict[str, int | float]:
        words = shared_fields(p, rules) | {"strand_tiles": _strand_tiles(p)}
        for name, x, keep, _ in a.arrays():
            if x is not None and keep == 3:
                last = "key" if "bias" in name or "dense" in name else "feature"
                words |= zip((f"{name}_head", f"{name}_row", f"{name}_{last}"), x.strides[-3:], strict=True)
        for at, n in self.trained:
            words[self.names[at + 1]] = _tables(p)[n].array.size * p.compute.itemsize
        return words


SEED, ITEMS, TILE_LIST, GROUPS, COUNT, SCRATCH, FROM, TO = (
    FIELDS.index(x) for x in ("seed", "items", "tiles", "groups", "count", "scratch", "from", "to")
)


class Waves(Stages):
    """The waves of a plan, found one after the other each time they are asked for."""

    def __init__(self, kind: BackwardKind, p: Problem, arrays: Arrays, threads: int):
        super().__init__(kind, p, Results(arrays.out, arrays.lse, None, None), range(p.n_q), threads)
        self.sums, self.backward = arrays, kind
        # Groups are cut where rows are, which may not change the order in which a table's tiles are met.
        self.group, self.step = (TRAINED_GROUP, TRAINED_GROUP) if arrays.dtables else (GROUP, 1)

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
        finally:
            self.events[cell].set()


@dataclass(frozen=True)
class Rule:
    """The program of a score with its derivatives, as `BackwardKind` has it.

    moving: of the program's tables those that are tangents, by number, and of which tables.
    """

    score: Arguments | None = None
    bent: bool = False
    readings: tuple[Reading, ...] = ()
    moving: Mapping[int, Table] = field(default_factory=dict)


def kind_of(p: Problem, target: Target, entropy: bool, rule: Rule) -> BackwardKind:
    """The kernel for a call. entropy: whether it has a cotangent."""
    real = F64 if p.compute == np.float64 else F32
    W = target.lanes(real.size)
    lanes = max(1, min(p.n_q, W * target.tile[1]))
    mask = None if p.mask_node is None else Arguments("mask", Program.of([p.mask_node]))
    score = rule.score
    rows, keys = (True, False) if p.bias is None else bias_axes(p.bias)
    return BackwardKind(
        element=type_of(p.dtype),
        real=real,
        integer=integer_type(p.integers, mask, score) if mask or score else I64,
        lanes=-(-lanes // W) * W,
        few=0,
        pairs=type_of(p.dtype) is BF16 and target.bf16_dot,
        copied=True,
        mask=mask,
        score=score,
        bias=None if p.bias is None else type_of(p.bias.dtype),
        dropout=bool(p.dropout),
        sink=p.sink is not None,
        entropy=entropy,
        best=0,
        bent=rule.bent,
        readings=rule.readings,
        bias_rows=rows,
        bias_keys=keys,
        bias_shared=p.bias is not None and rows and keys and p.bias.size != p.batch * p.heads * p.n_q * p.n_k,
    )


def bias_axes(bias: Array) -> tuple[bool, bool]:
    """Whether the sums of dS for a bias have rows and keys; they have rows at least."""
    rows, keys = (1, *bias.shape)[-2:] if bias.ndim else (1, 1)
    return rows != 1 or keys == 1, keys != 1


def rule_of(p: Problem, tangents: Mapping[Table, Table] | None = None) -> Rule:
    """The rule of a call and its derivatives; with tangents of tables, each with its tangent behind."""
    if p.score_node is None:
        return Rule()
    d_ds, slopes = p.score_partials
    assert d_ds is not None

    def both(node: Node) -> list[Node]:
        return [node] if tangents is None else [node, tangent(node, tangents)]

    bent = not (d_ds.op == "literal" and d_ds.payload == 1)
    nodes = both(p.score_node) + (both(d_ds) if bent else [])
    leaves = [leaf for leaf, slope in slopes.items() if not (slope.op == "literal" and slope.payload == 0)]
    for leaf in leaves:
        nodes += [*both(slopes[leaf]), *leaf.args]
    program = Program.of(nodes)
    numbers = {table: n for n, table in enumerate(program.tables)}
    readings = tuple(Reading(numbers[leaf.payload], len(leaf.args)) for leaf in leaves)
    moving = {numbers[x]: table for table, x in (tangents or {}).items() if x in numbers}
    return Rule(Arguments("score", program), bent, readings, moving)
