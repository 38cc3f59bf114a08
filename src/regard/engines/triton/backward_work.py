"""Derivatives, run: the programs of their rules, their arrays, and sums over what broadcasts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from regard.engines.triton import backward_kernel, lowering, pairs, table_kernel, tangent_kernel
from regard.engines.triton.forward_work import forward, shape
from regard.engines.triton.launch import lying
from regard.engines.triton.work import Work, empty, output
from regard.problem import Differential, Outputs, Problem, device_of
from regard.rules import Node, Program, Table, reads, tangent
from regard.torch.arrays import array, tensor

Array = np.ndarray[Any, np.dtype[Any]]
AT_ONCE = 2**22  # pairs whose part in tables is kept at once
NONE = Outputs(None, None, None)


@dataclass(frozen=True, eq=False)
class Way:
    """Tangents of the inputs, of the outputs and of the cotangents; all None for backward itself."""

    t: Differential
    d_outputs: Outputs = NONE
    d_ct: Outputs = NONE

    @cached_property
    def tables(self) -> dict[Table, Table]:
        return {table: Table(x) if device_of(x) is None else Table.lying(x) for table, x in self.t.tables.items()}


@dataclass(frozen=True, eq=False)
class Derivative(Work):
    """The arguments of the kernels of derivatives: forward's, with more results of the rule."""

    way: Way | None = None
    readings: tuple[Node, ...] = ()

    @cached_property
    def results(self) -> tuple[Node, ...]:
        """S, ∂S/∂T, their tangents along a direction, then slopes in readings of tables, and their tangents."""
        node = self.p.score_node
        if node is None:
            return ()
        slope, slopes = self.p.score_partials
        nodes = [node, slope, *(slopes[x] for x in self.readings)]
        assert slope is not None
        if self.way is not None:
            dots = [tangent(x, self.way.tables) for x in nodes if x is not None]
            return (node, slope, dots[0], dots[1], *(slopes[x] for x in self.readings), *dots[2:])
        return tuple(x for x in nodes if x is not None)

    @cached_property
    def indices(self) -> tuple[Node, ...]:
        return tuple(arg for reading in self.readings for arg in reading.args)

    @cached_property
    def score_program(self) -> Program | None:
        return Program.of([*self.results, *self.indices]) if self.results else None

    @cached_property
    def score_function(self) -> Any:
        program = self.score_program
        if program is None:
            return None
        count = len(self.results)
        rest, positions = list(program.results[count:]), []
        for reading in self.readings:
            taken = [rest.pop(0) for _ in reading.args]
            positions.append([program.tables.index(reading.payload), *taken])
        return lowering.values(replace(program, results=program.results[:count]), positions)

    def direction(self, c_row: Array | None = None) -> pairs.Direction:
        """The tangents; c_row: that of the rows."""
        way = self.way
        if way is None:
            return pairs.Direction(*[None] * 9)
        t = way.t
        sink = None if t.sink is None else lying(np.broadcast_to(t.sink, (self.p.heads,)), 0, 0)
        bias = None if t.bias is None else self.dense(t.bias)
        return pairs.Direction(
            self.matrix(t.query), self.matrix(t.key), self.matrix(t.value), bias, sink,
            self.rows(way.d_outputs.lse), self.matrix(way.d_ct.out), self.rows(way.d_ct.entropy), self.rows(c_row),
        )  # fmt: skip

    def known(self, x: Outputs) -> backward_kernel.Known:
        return backward_kernel.Known(self.matrix(x.out), self.rows(x.lse), self.rows(x.entropy))


def jvp(p: Problem, t: Differential, outputs: Outputs | None = None) -> tuple[Outputs, Outputs]:
    if outputs is None:
        outputs = forward(p, frozenset(["entropy"]))[0]
    work = Derivative(p, way=Way(t))
    given = pairs.Given(work.rows(outputs.lse), None, None, None)
    d_lse = empty(p, p.shape(p.n_q), p.compute)
    d_entropy = None if outputs.entropy is None else empty(p, p.shape(p.n_q), p.compute)
    found = Outputs(output(p), d_lse, d_entropy)
    form = work.form(*small(p))
    task = tangent_kernel.Task(given, work.direction(), work.known(outputs), *work.known(found))
    work.launch(tangent_kernel.tangent, (row_blocks(p, form.M),), task, form).run()
    return outputs, found


def backward(p: Problem, outputs: Outputs, ct: Outputs, way: Way | None = None) -> Differential:
    """Gradients; along a way, their tangents."""
    c, along = p.compute, way is not None
    work = Derivative(p, way=way)
    form = work.form(*small(p))
    rows = p.shape(p.n_q)
    c_row, c_row_dot = empty(p, rows, c), empty(p, rows, c) if along else None
    d_sink = None if p.sink is None else empty(p, rows, c)
    given = pairs.Given(work.rows(outputs.lse), work.matrix(ct.out), work.rows(ct.entropy), work.rows(c_row))
    blocks = row_blocks(p, form.M)

    def rows_task(to: Array | None, w: Derivative, given: Any) -> None:
        d = way or Way(Differential())
        task = backward_kernel.RowsTask(
            given, w.known(outputs), w.rows(ct.lse), w.direction(), w.known(d.d_outputs), w.rows(d.d_ct.lse),
            w.rows(to), w.rows(d_sink),
        )  # fmt: skip
        w.launch(backward_kernel.rows, (blocks,), task, w.way is not None, form).run()

    rows_task(c_row, Derivative(p), given._replace(c_row=None))
    if along:
        rows_task(c_row_dot, work, given._replace(c_row=None))
    direction = work.direction(c_row_dot)
    dq = empty(p, p.shape(p.n_q, p.d), fits(p, p.query))
    dk, dv = (empty(p, (*p.lead, p.kv_heads, p.n_k, size), fits(p, x)) for size, x in ((p.d, p.key), (p.d_v, p.value)))
    task = backward_kernel.Task(given, direction, work.matrix(dq), work.matrix(dk), work.matrix(dv), None, None)
    work.launch(backward_kernel.query, (blocks,), task, along, form).run()
    tiles = -(-p.n_k // form.N)
    work.launch(backward_kernel.key_value, (tiles * p.batch * p.kv_heads,), task, along, form).run()
    return Differential(
        query=fitted(dq, p.query),
        key=fitted(dk, p.key),
        value=fitted(dv, p.value),
        bias=bias_gradient(work, task, form) if p.trains_bias else None,
        sink=None if d_sink is None or p.sink is None else sink_gradient(p, d_sink),
        tables=table_gradients(p, given, direction, way),
    )


def small(p: Problem) -> tuple[int, int]:
    """Queries and keys of the tiles of derivatives, of which more is alive at once."""
    M, N = shape(p)
    return min(M, 64), min(N, 64)


def row_blocks(p: Problem, M: int) -> int:
    return -(-p.n_q // M) * p.batch * p.heads


def fits(p: Problem, like: Array) -> Any:
    """The dtype in which a gradient is written: its own, or that of sums if it has to be summed over a broadcast."""
    return like.dtype if like.shape[:-3] == p.lead else p.compute


def fitted(x: Array, like: Array) -> Array:
    """A gradient summed over the axes along which its input broadcasts, in the dtype of the input."""
    if x.shape == like.shape and x.dtype == like.dtype:
        return x
    found = tensor(x)
    while found.ndim > like.ndim:
        found = found.sum(0)
    for axis, size in enumerate(like.shape):
        if size == 1 and found.shape[axis] != 1:
            found = found.sum(axis, keepdim=True)
    return array(found.to(tensor(np.empty(0, like.dtype)).dtype))


def sink_gradient(p: Problem, d_sink: Array) -> Array:
    assert p.sink is not None
    per_head = tensor(d_sink).sum(-1).reshape(-1, p.heads).sum(0)
    return fitted(array(per_head), p.sink)


def bias_gradient(work: Derivative, task: backward_kernel.Task, form: Any) -> Array:
    p = work.p
    assert p.bias is not None
    full = (*(1,) * (len(p.lead) + 3 - p.bias.ndim), *p.bias.shape)
    total = empty(p, full, p.compute)
    lead = full[:-3] or (1,)
    lies = lying(total.reshape(*lead, *full[-3:]), len(lead), 2)
    heads, rows, cols = full[-3:]
    task = task._replace(dbias=lies, own=(lead, heads, rows, cols))
    grid = int(np.prod(lead)) * heads * -(-rows // form.M) * -(-cols // form.N)
    work.launch(backward_kernel.bias, (grid,), task, p.batch, work.way is not None, form).run()
    return fitted(array(tensor(total).reshape(p.bias.shape)), p.bias)


def table_gradients(p: Problem, given: Any, direction: Any, way: Way | None) -> dict[Table, Array]:
    """A chunk of rows at a time, sorted by entry and then summed entry by entry: slow, but the same in every run."""
    slopes = p.table_partials
    if not slopes:
        return {}
    work = Derivative(p, way=way, readings=tuple(slopes))
    form = work.form(*small(p))
    totals = {
        table: torch.zeros(table.shape, dtype=tensor(np.empty(0, p.compute)).dtype, device=p.device).reshape(-1)
        for table in p.tables
    }
    size = max(1, AT_ONCE // max(1, p.n_k * p.batch * p.heads * form.M)) * form.M
    for first in range(0, p.n_q if p.n_k * p.batch * p.heads else 0, size):
        rows = min(size, p.n_q - first)
        shape = p.shape(rows, p.n_k)
        values = [empty(p, shape, p.compute) for _ in slopes]
        entries = [empty(p, shape, np.int64) for _ in slopes]
        task = table_kernel.Task(
            given, direction, first, tuple(map(work.matrix, values)), tuple(map(work.matrix, entries))
        )
        grid = (-(-rows // form.M), -(-p.n_k // form.N), p.batch * p.heads)
        work.launch(table_kernel.table, grid, task, 4 if way else 2, len(work.results), way is not None, form).run()
        for reading, value, entry in zip(slopes, values, entries, strict=True):
            scatter(totals[reading.payload], reading.args, tensor(value), tensor(entry))
    return {table: fitted(array(x.reshape(table.shape)), table.array) for table, x in totals.items()}


def scatter(total: torch.Tensor, indices: Sequence[Node], value: torch.Tensor, entry: torch.Tensor) -> None:
    """Adds values (..., rows, keys) where they belong; what is one entry for a whole axis is summed over it first."""
    leaves = reads(*indices)
    for axis, leaf in ((-1, "j"), (-2, "i")):
        if not leaves & {leaf, "s"}:
            value, entry = value.sum(axis, keepdim=True), entry.narrow(axis, 0, 1)
    places, order = torch.sort(entry.reshape(-1), stable=True)
    counts = torch.bincount(places, minlength=total.numel())
    total += torch.segment_reduce(value.reshape(-1)[order], "sum", lengths=counts, initial=0)
