"""From a problem and its cotangents to the backward kernel's memory, and in which order its work is done.

A *unit* is a batch element and a key-value head with all query heads of its group. Nothing is shared between units but
the gradient of a bias that broadcasts, of tables and of sinks. Within one, work is cut into *cells*: some groups of
items against a column of tiles. A cell is begun when the one with the same items and the tiles before, and the one with
the same tiles and the items before, have ended; so each sum is made in one order, however the work is cut.
"""

import struct
import threading
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from regard.engines.cpu import cache
from regard.engines.cpu.backward_kernel import Backward
from regard.engines.cpu.backward_layout import (
    FIELDS,
    GROUP,
    GROUP_SIZE,
    BackwardKind,
    Reading,
    item_area,
    padded,
    scratch_size,
)
from regard.engines.cpu.element import BF16, F32, F64, I64, type_of
from regard.engines.cpu.emit import Kernel
from regard.engines.cpu.layout import KEYS, Arguments, integer_type
from regard.engines.cpu.target import Target
from regard.engines.cpu.work import SMALL, Results, Stages, address_of, dense_masks, table_array
from regard.problem import Differential, Outputs, Problem, collapse
from regard.rules import Node, Program
from regard.threads import Scratch, num_threads, spread

Array = np.ndarray[Any, np.dtype[Any]]

ALL_TILES = 2**31
STRANDS = 8  # sums of a table's gradient that are made side by side, whatever the number of threads


class Gradients:
    """The arrays of one call: what the kernel reads beside the inputs, and what it writes."""

    def __init__(self, p: Problem, kind: BackwardKind, outputs: Outputs, ct: Outputs):
        self.p, real = p, p.compute
        assert outputs.out is not None
        assert outputs.lse is not None
        self.out, self.lse = outputs.out, outputs.lse
        nothing = np.zeros((), p.dtype)
        self.dout = np.broadcast_to(nothing, self.out.shape) if ct.out is None else ct.out
        self.p_sink: Any = real.type(0)
        if p.sink is not None:
            sink = np.broadcast_to(p.sink.astype(real), (p.heads,))[:, None]
            self.p_sink = np.where(self.lse == -np.inf, 0, np.exp(sink - self.lse))
        self.given = None if ct.lse is None else ct.lse.astype(real)
        self.d_entropy = None if ct.entropy is None else np.ascontiguousarray(ct.entropy, real)
        if self.d_entropy is not None:
            assert outputs.entropy is not None
            total = np.where(self.lse == -np.inf, 0, 1 - self.p_sink)
            more = self.d_entropy * (total - outputs.entropy)
            self.given = more if self.given is None else self.given + more
        if self.given is not None:
            self.given = np.ascontiguousarray(self.given, real)
        self.c = None if p.sink is None else np.zeros(self.lse.shape, real)
        self.dq = np.empty(p.shape(p.n_q, p.d), real)
        self.dk, self.dv = (np.zeros((*p.lead, p.kv_heads, p.n_k, padded(kind, width)), real) for width in (p.d, p.d_v))
        self.bias = None if p.bias is None else np.zeros(self.bias_shape(kind, p.bias), real)
        self.tables = {table: np.zeros((STRANDS, *table.shape), real) for table in p.tables}

    def bias_shape(self, kind: BackwardKind, bias: Array) -> tuple[int, ...]:
        """Of the sums of dS: for each batch element and head, but as the bias where that is n_q · n_k."""
        if kind.bias_rows and kind.bias_keys:
            return tuple(bias.shape)
        return self.p.shape(self.p.n_q if kind.bias_rows else 1, self.p.n_k if kind.bias_keys else 1)

    def result(self) -> Differential:
        p = self.p

        def fit(x: Array | None, like: Array | None) -> Any:
            return None if x is None or like is None else collapse(x, like.shape).astype(like.dtype, copy=False)

        return Differential(
            query=fit(self.dq, p.query),
            key=fit(np.ascontiguousarray(self.dk[..., : p.d]), p.key),
            value=fit(np.ascontiguousarray(self.dv[..., : p.d_v]), p.value),
            bias=fit(self.bias, p.bias),
            sink=None if self.c is None else self.sink(self.c),
            tables={table: x.sum(axis=0).astype(table.dtype, copy=False) for table, x in self.tables.items()},
        )

    def sink(self, c: Array) -> Any:
        assert self.p.sink is not None
        by_head = (self.p_sink * c).reshape(self.p.batch, self.p.heads, self.p.n_q).sum(axis=(0, 2))
        return collapse(by_head, self.p.sink.shape).astype(self.p.sink.dtype, copy=False)


def backward(p: Problem, target: Target, outputs: Outputs, ct: Outputs) -> Differential:
    """Gradients of ⟨ct.out, out⟩ + ⟨ct.lse, lse⟩ + ⟨ct.entropy, entropy⟩, from the outputs of forward."""
    kind = kind_of(p, target, ct.entropy is not None)
    with np.errstate(all="ignore"):
        gradients = Gradients(p, kind, outputs, ct)
        if p.batch * p.heads * p.n_q:
            small = p.batch * p.heads * p.n_q * p.n_k * (p.d + p.d_v + 16) < SMALL
            Work(p, target, kind, gradients, 1 if small else num_threads()).run()
        return gradients.result()


class BackwardStages(Stages):
    """The items of a call, and the tiles that they may see."""

    def __init__(self, kind: BackwardKind, p: Problem, gradients: Gradients, threads: int):
        super().__init__(kind, p, Results(gradients.out, gradients.lse, None, None), range(p.n_q), threads)
        self.gradients = gradients

    @cached_property
    def blocks(self) -> tuple[Array, Array]:
        """Heads (first, number) and rows (first, number) of blocks of queries: one head each."""
        heads, starts = np.arange(self.p.heads), np.arange(0, self.p.n_q, self.kind.lanes)
        sizes = np.minimum(self.kind.lanes, self.p.n_q - starts)
        return np.stack([heads, np.ones_like(heads)], axis=1), np.stack([starts, sizes], axis=1)

    def arrays(self) -> Iterator[tuple[str, Array | None, int, bool]]:
        p, g = self.p, self.gradients
        shared = {"k": p.key, "v": p.value, "dk": g.dk, "dv": g.dv}
        yield from ((name, x, 3, True) for name, x in shared.items())
        full = {name: None if x is None else p.dense(x) for name, x in (("bias", p.bias), ("dbias", g.bias))}
        rows = {"q": p.query, "out": g.out, "dout": g.dout, "dq": g.dq} | full
        yield from ((name, x, 3, False) for name, x in rows.items())
        by_row = {"lse": g.lse, "given": g.given, "d_entropy": g.d_entropy, "c": g.c}
        yield from ((name, x, 2, False) for name, x in by_row.items())
        yield from ((f"dense{n}", x, 3, False) for n, x in enumerate(dense_masks(p)))


class Work:
    """What a call has to do."""

    def __init__(self, p: Problem, target: Target, kind: BackwardKind, gradients: Gradients, threads: int):
        self.p, self.target, self.kind, self.gradients, self.threads = p, target, kind, gradients, threads
        bias = gradients.bias
        self.chained = bias is not None and bias.shape != p.shape(*bias.shape[-2:])
        self.stages = BackwardStages(kind, p, gradients, threads)
        item = sum(item_area(kind, p.d, p.d_v).values()) * kind.real.size
        self.group = max(1, min(GROUP, GROUP_SIZE // item))
        self.kept, self.fields = self._fields()
        score = kind.score
        self.tables = {} if score is None else {f"dtable{n}": score.program.tables[n] for n in kind.trained}

    def run(self) -> None:
        kernel = cache.kernel(self.kind.key, "backward", self.target, lambda: source(self.kind, self.target))
        arrays = list(self.stages.arrays())
        for tiles, items in self.stages.waves():
            for name, x, _, _ in arrays:
                if x is not None:
                    items[:, self.kind.item.index(name)] += address_of(x)
            self._wave(kernel, tiles, self._by_unit(items))

    def _by_unit(self, items: Array) -> list[Array]:
        """The items of each unit."""
        word, p = self.kind.item.index, self.p
        unit = (items[:, word("b")] - p.origin[0]) * p.kv_heads + items[:, word("head")] // p.group
        order = np.argsort(unit, kind="stable")
        return np.split(items[order], np.flatnonzero(np.diff(unit[order])) + 1)

    def _wave(self, kernel: cache.Compiled, tiles: Array, units: list[Array]) -> None:
        """Some items of some units."""
        items = np.concatenate(units)
        sizes = [len(unit) for unit in units]
        tiles_there = -(-(self.p.n_k + self.p.origin[2] % KEYS) // KEYS)
        grids: list[_Grid] = []
        for n, first in enumerate(np.cumsum([0, *sizes[:-1]]).tolist()):
            rows, columns = self._cut(len(units), sizes[n], tiles_there)
            back = 1 if self.chained else STRANDS if self.p.tables else n + 1
            grids.append(_Grid(first, rows, columns, grids[n - back] if n >= back else None, n % STRANDS))
        order = [grids[n : n + 1] for n in range(len(grids))] if self.chained else [grids]
        cells = [cell for some in order for step in _by_step(some) for cell in step]
        most = max(1, min(self.group, max(sizes)))
        scratch = Scratch(scratch_size(self.kind, most, self.p.d, self.p.d_v) * self.kind.real.size)
        word = self.kind.fields.index

        def work(cell: "_Cell") -> None:
            try:
                groups = np.array(cell.groups(self.group), np.int64)
                mine = self.fields.copy()
                mine[word("items")], mine[word("tiles")] = address_of(items), address_of(tiles)
                mine[word("groups")], mine[word("count")] = address_of(groups), len(groups)
                for name, table in self.tables.items():
                    mine[word(name)] = address_of(self.gradients.tables[table][cell.strand])
                mine[word("from")], mine[word("to")], mine[word("scratch")] = cell.start, cell.stop, scratch.address
                cell.wait()
                kernel(address_of(mine))
            finally:
                cell.done.set()

        spread(work, cells, self.threads)

    def _cut(self, units: int, items: int, tiles: int) -> tuple[list[int], list[int]]:
        """Where the items and the tiles of a unit are cut: not at all if there are units enough for all threads, or if
        a table is summed.
        """
        if self.threads == 1 or tiles < 2 or units >= 4 * self.threads or self.p.tables:
            return [0, items], [0, ALL_TILES]
        # Few columns, since each opens every item anew; many rows, so that threads wait little for each other.
        rows, columns = (
            np.unique(np.linspace(0, size, min(size, parts) + 1).astype(int)).tolist()
            for size, parts in ((items, 8 * self.threads), (tiles, 2 * self.threads))
        )
        return rows, [*columns[:-1], ALL_TILES]

    def _fields(self) -> tuple[list[Any], Array]:
        """The kernel's fields, and what has to stay alive while they are used."""
        p, g, j0 = self.p, self.gradients, self.p.origin[2]
        words: dict[str, int | float] = {
            "d": p.d, "d_v": p.d_v, "n_k": p.n_k, "shift": j0 % KEYS, "first_tile": j0 // KEYS, "j": j0,
            "keys": p.keys, "scale": float(p.scale), "row_head": p.n_q,
            "k_row": p.key.strides[-2], "k_feature": p.key.strides[-1],
            "v_row": p.value.strides[-2], "v_feature": p.value.strides[-1],
            "dq_head": g.dq.strides[-3], "dq_row": g.dq.strides[-2],
            "dk_row": g.dk.strides[-2], "dv_row": g.dv.strides[-2],
            "threshold": int(p.dropout * 2**32), "kept": float(p.compute.type(1 / (1 - p.dropout))),
        }  # fmt: skip
        for name, x in (("q", p.query), ("out", g.out), ("dout", g.dout)):
            words |= zip((f"{name}_head", f"{name}_row", f"{name}_feature"), x.strides[-3:], strict=True)
        dense = {f"dense{n}": x for n, x in enumerate(dense_masks(p))}
        if p.bias is not None and g.bias is not None:
            dense["bias"] = p.dense(p.bias)
            words |= zip(("dbias_row", "dbias_key"), p.dense(g.bias).strides[-2:], strict=True)
        for name, x in dense.items():
            words |= zip((f"{name}_head", f"{name}_row", f"{name}_key"), x.strides[-3:], strict=True)
        kept: list[Any] = []
        for rule in (self.kind.mask, self.kind.score):
            if rule is not None:
                words |= {f"{rule.prefix}_number{n}": x for n, x in enumerate(rule.program.numbers)}
                for n, table in enumerate(rule.program.tables):
                    kept.append(table_array(table, p.compute))
                    words[f"{rule.prefix}_table{n}"] = address_of(kept[-1])
                    words |= {f"{rule.prefix}_table{n}_size{axis}": size for axis, size in enumerate(table.shape)}
        values = [words.get(name, 0) for name in self.kind.fields]
        layout = "".join("d" if isinstance(x, float) else "q" for x in values)
        fields = np.frombuffer(bytearray(struct.pack(layout, *values)), np.uint64)
        fields[FIELDS.index("seed")] = p.seed
        return kept, fields


class _Cell:
    """Items from `first` to before `end`, against their tiles from `start` to before `stop`."""

    def __init__(self, items: tuple[int, int], tiles: tuple[int, int], before: "list[_Cell]", strand: int):
        (self.first, self.end), (self.start, self.stop), self.before, self.strand = items, tiles, before, strand
        self.done = threading.Event()

    def groups(self, size: int) -> list[tuple[int, int]]:
        return [(n, min(n + size, self.end)) for n in range(self.first, self.end, size)]

    def wait(self) -> None:
        """Until the cells whose sums come before have ended. They have been begun, so they will."""
        for cell in self.before:
            cell.done.wait()


class _Grid:
    """The cells of a unit by row and column, given where its items and its tiles are cut.

    after: the unit that has to have added to what both share before this one does.
    """

    def __init__(self, first: int, rows: list[int], columns: list[int], after: "_Grid | None", strand: int):
        self.cells: list[list[_Cell]] = []
        above = [] if after is None else after.cells[-1]
        for low, high in pairwise(rows):
            line: list[_Cell] = []
            for m, tiles in enumerate(pairwise(columns)):
                before = [*line[-1:], *above[m : m + 1]]
                line.append(_Cell((first + low, first + high), tiles, before, strand))
            self.cells.append(line)
            above = line

    def steps(self) -> list[list[_Cell]]:
        """Cells that can be worked on at the same time, in an order in which all before come first."""
        height, width = len(self.cells), len(self.cells[0])
        return [
            [self.cells[r][n - r] for r in range(max(0, n - width + 1), min(height, n + 1))]
            for n in range(height + width - 1)
        ]


def _by_step(grids: list[_Grid]) -> Iterator[list[_Cell]]:
    """The first steps of all grids, then the second, ..."""
    for together in zip_longest(*(grid.steps() for grid in grids), fillvalue=[]):
        yield from together


def source(kind: BackwardKind, target: Target) -> str:
    """The IR of a kernel."""
    k = Kernel("backward", target, kind.fields)
    Backward(k, kind).run()
    return k.text()


def kind_of(p: Problem, target: Target, entropy: bool) -> BackwardKind:
    """The kernel for a call. entropy: whether it has a cotangent."""
    real = F64 if p.compute == np.float64 else F32
    W = target.lanes(real.size)
    lanes = max(1, min(p.n_q, W * target.tile[1]))
    mask = None if p.mask_node is None else Arguments("mask", Program.of([p.mask_node]))
    score, bent, readings = _score(p)
    rows, keys = ((1, 1) if p.bias is None else (1, 1, *p.bias.shape))[-2:]
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
        bent=bent,
        readings=readings,
        bias_rows=rows > 1 or keys == 1,
        bias_keys=keys > 1,
    )


def _score(p: Problem) -> tuple[Arguments | None, bool, tuple[Reading, ...]]:
    """The program of the score and its derivatives, whether that in the score is not 1, and what else it has."""
    if p.score_node is None:
        return None, False, ()
    d_ds, slopes = p.score_partials
    assert d_ds is not None
    bent = not (d_ds.op == "literal" and d_ds.payload == 1)
    nodes: list[Node] = [p.score_node, *([d_ds] if bent else [])]
    leaves = [leaf for leaf, slope in slopes.items() if not (slope.op == "literal" and slope.payload == 0)]
    for leaf in leaves:
        nodes += [slopes[leaf], *leaf.args]
    program = Program.of(nodes)
    numbers = {table: n for n, table in enumerate(program.tables)}
    readings = tuple(Reading(numbers[leaf.payload], len(leaf.args)) for leaf in leaves)
    return Arguments("score", program), bent, readings
