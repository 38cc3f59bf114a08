"""Derivatives, run: the programs of their rules, their arrays, and sums over what broadcasts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from regard.core.problem import Differential, Outputs, Problem, device_of
from regard.core.tensors import array, tensor
from regard.engines.triton.kernels import backward as backward_kernel
from regard.engines.triton.kernels import jvp as jvp_kernel
from regard.engines.triton.kernels import jvp_jvp as jvp_jvp_kernel
from regard.engines.triton.kernels import pairs, tables
from regard.engines.triton.launch.arguments import Work, empty, output
from regard.engines.triton.launch.forward_launch import forward
from regard.engines.triton.launch.launching import Launch, lying
from regard.engines.triton.launch.tuning import Cut, chosen
from regard.engines.triton.rules import lowering
from regard.rules import Node, Program, Table, reading, reads, tangent
from regard.rules.derivative import multiply
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
AT_ONCE = 2**22  # pairs whose part in tables is kept at once
BLOCK = 128  # rows, of which any block of queries is a part
NONE = Outputs(None, None, None)


@dataclass(frozen=True, eq=False)
class Way:
    """Tangents of the inputs, of the outputs and of the cotangents; all None for backward itself."""

    t: Differential
    d_outputs: Outputs = NONE
    d_ct: Outputs = NONE

    @cached_property
    def tables(self) -> dict[Table, Table]:
        return {table: Table(x) if device_of(x) is None else Table.of_device(x) for table, x in self.t.tables.items()}


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
        slope, slopes = self.p.rules.score_partials
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
        for leaf in self.readings:
            taken = [rest.pop(0) for _ in leaf.args]
            positions.append([program.tables.index(leaf.payload), *taken])
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

    def over_queries(self, kernel: Any, task: Any, **forms: Any) -> None:
        """Run a kernel that has a program for each block of queries."""

        def launch(cut: Cut) -> Launch:
            form = self.form(cut)
            blocks = -(-self.p.n_q // form.M) * self.p.batch * self.p.heads
            return self.launch(kernel, (blocks,), task, cut, F=form, **forms)

        chosen(kernel.__name__, self, launch).run()

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
    task = jvp_kernel.Task(given, work.direction(), work.known(outputs), *work.known(found))
    work.over_queries(jvp_kernel.tangent, task)
    return outputs, found


@dataclass(frozen=True, eq=False)
class Bends(Work):
    """What the rule gives along `other` beside what it gives along `way`: S˙, (∂S/∂T)˙, and what the tables that vary
    along `way` add to the second derivative.
    """

    way: Way
    other: Way

    @cached_property
    def score_program(self) -> Program | None:
        p, t, u = self.p, self.way.tables, self.other.tables
        if p.score_node is None:
            return None
        slope, slopes = p.rules.score_partials
        assert slope is not None
        varying = [multiply(tangent(x, u), reading(leaf, t)) for leaf, x in slopes.items() if leaf.payload in t]
        return Program.of([tangent(p.score_node, u), tangent(slope, u), *varying])


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    ways = Way(t, d_t), Way(u, d_u)
    first, second = (Derivative(p, way=way) for way in ways)
    bends = Bends(p, *ways)
    rows = p.shape(p.n_q)
    found = Outputs(
        output(p), empty(p, rows, p.compute), None if outputs.entropy is None else empty(p, rows, p.compute)
    )
    task = jvp_jvp_kernel.Task(
        pairs.Given(first.rows(outputs.lse), None, None, None), first.direction(), second.direction(),
        bends.rules.score, bends.arrays.score, first.known(outputs), *first.known(found),
    )  # fmt: skip
    first.over_queries(jvp_jvp_kernel.bend, task, BENDS=bends.score_function)
    return found


def backward(p: Problem, outputs: Outputs, ct: Outputs, way: Way | None = None) -> Differential:
    """Gradients; along a way, their tangents."""
    c, along = p.compute, way is not None
    work = Derivative(p, way=way)
    rows = p.shape(p.n_q)
    c_row, c_row_dot = empty(p, rows, c), empty(p, rows, c) if along else None
    d_sink = None if p.sink is None else empty(p, rows, c)
    given = pairs.Given(work.rows(outputs.lse), work.matrix(ct.out), work.rows(ct.entropy), work.rows(c_row))

    def rows_task(to: Array | None, w: Derivative, given: Any) -> None:
        d = way or Way(Differential())
        task = backward_kernel.RowsTask(
            given, w.known(outputs), w.rows(ct.lse), w.direction(), w.known(d.d_outputs), w.rows(d.d_ct.lse),
            w.rows(to), w.rows(d_sink),
        )  # fmt: skip
        w.over_queries(backward_kernel.rows, task, ALONG=w.way is not None)

    rows_task(c_row, Derivative(p), given._replace(c_row=None))
    if along:
        rows_task(c_row_dot, work, given._replace(c_row=None))
    direction = work.direction(c_row_dot)
    dq = empty(p, p.shape(p.n_q, p.d), fits(p, p.query))
    dk, dv = (empty(p, (*p.lead, p.kv_heads, p.n_k, size), fits(p, x)) for size, x in ((p.d, p.key), (p.d_v, p.value)))
    task = backward_kernel.Task(given, direction, work.matrix(dq), work.matrix(dk), work.matrix(dv), None, None)
    work.over_queries(backward_kernel.query, task, ALONG=along)

    def launch(cut: Cut) -> Launch:
        form = work.form(cut)
        tiles = -(-p.n_k // form.N) * p.batch * p.kv_heads
        return work.launch(backward_kernel.key_value, (tiles,), task, cut, F=form, ALONG=along)

    chosen("key_value", work, launch).run()
    return Differential(
        query=fitted(dq, p.query),
        key=fitted(dk, p.key),
        value=fitted(dv, p.value),
        bias=None if p.trained_bias is None else bias_gradient(work, task),
        sink=None if d_sink is None or p.sink is None else sink_gradient(p, d_sink),
        tables=table_gradients(p, given, direction, way),
    )


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


def bias_gradient(work: Derivative, task: backward_kernel.Task) -> Array:
    p = work.p
    assert p.bias is not None
    full = (*(1,) * (len(p.lead) + 3 - p.bias.ndim), *p.bias.shape)
    total = empty(p, full, p.compute)
    lead = full[:-3] or (1,)
    lies = lying(total.reshape(*lead, *full[-3:]), len(lead), 2)
    heads, rows, cols = full[-3:]
    task = task._replace(dbias=lies, own=(lead, heads, rows, cols, p.batch))

    def launch(cut: Cut) -> Launch:
        form = work.form(cut)
        grid = int(np.prod(lead)) * heads * -(-rows // form.M) * -(-cols // form.N)
        return work.launch(backward_kernel.bias, (grid,), task, cut, ALONG=work.way is not None, F=form)

    chosen("bias", work, launch).run()
    return fitted(array(tensor(total).reshape(p.bias.shape)), p.bias)


def table_gradients(p: Problem, given: Any, direction: Any, way: Way | None) -> dict[Table, Array]:
    """A chunk of rows at a time, sorted by entry and then summed entry by entry: slow, but the same in every run."""
    slopes = p.rules.table_partials
    if not slopes:
        return {}
    work = Derivative(p, way=way, readings=tuple(slopes))
    totals = {
        table: torch.zeros(table.shape, dtype=tensor(np.empty(0, p.compute)).dtype, device=p.device).reshape(-1)
        for table in p.rules.tables
    }
    size = max(1, AT_ONCE // max(1, p.n_k * p.batch * p.heads * BLOCK)) * BLOCK
    for first in range(0, p.n_q if p.n_k * p.batch * p.heads else 0, size):
        rows = range(first, min(first + size, p.n_q))
        shape = p.shape(len(rows), p.n_k)
        values = [empty(p, shape, p.compute) for _ in slopes]
        entries = [empty(p, shape, np.int64) for _ in slopes]
        to = tuple(map(work.matrix, values)), tuple(map(work.matrix, entries))
        task = tables.Task(given, direction, first, *to)
        chosen("table", work, partial(table_part, work, task, len(rows))).run()
        for leaf, value, entry in zip(slopes, values, entries, strict=True):
            scatter(totals[leaf.payload], leaf.args, tensor(value), tensor(entry))
    return {table: fitted(array(x.reshape(table.shape)), table.array) for table, x in totals.items()}


def table_part(work: Derivative, task: tables.Task, rows: int, cut: Cut) -> Launch:
    p, form, along = work.p, work.form(cut), work.way is not None
    grid = (-(-rows // form.M), -(-p.n_k // form.N), p.batch * p.heads)
    forms = {"FIRST": 4 if along else 2, "LAST": len(work.results), "ALONG": along}
    return work.launch(tables.table, grid, task, cut, **forms, F=form)


def scatter(total: torch.Tensor, indices: Sequence[Node], value: torch.Tensor, entry: torch.Tensor) -> None:
    """Adds values (..., rows, keys) where they belong; what is one entry for a whole axis is summed over it first."""
    leaves = reads(*indices)
    for axis, leaf in ((-1, "j"), (-2, "i")):
        if not leaves & {leaf, "s"}:
            value, entry = value.sum(axis, keepdim=True), entry.narrow(axis, 0, 1)
    places, order = torch.sort(entry.reshape(-1), stable=True)
    ends = torch.searchsorted(places, torch.arange(total.numel() + 1, device=places.device))
    # `unsafe` leaves out a check for which the host would wait.
    total += torch.segment_reduce(value.reshape(-1).gather(0, order), "sum", offsets=ends, initial=0, unsafe=True)
