"""Launches of derivatives: programs of rules, arrays, sums over broadcast axes."""

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
from regard.engines.triton.kernels import tables, tile_derivatives
from regard.engines.triton.launch.arguments import Work, empty
from regard.engines.triton.launch.forward_launch import forward
from regard.engines.triton.launch.launching import Launch, strided
from regard.engines.triton.launch.tuning import TileConfig, chosen
from regard.engines.triton.rules import lowering
from regard.rules import Node, Program, Table, reading, reads, tangent
from regard.rules.derivative import multiply
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
AT_ONCE = 2**22  # pairs to store the parts of tables of at once
BLOCK = 128  # rows; every query block divides it
NONE = Outputs(None, None, None)


@dataclass(frozen=True, eq=False)
class Direction:
    """Tangents of the inputs, the outputs and the cotangents; all None for backward."""

    t: Differential
    d_outputs: Outputs = NONE
    d_ct: Outputs = NONE

    @cached_property
    def tables(self) -> dict[Table, Table]:
        return {table: Table(x) if device_of(x) is None else Table.of_device(x) for table, x in self.t.tables.items()}


@dataclass(frozen=True, eq=False)
class DerivativeWork(Work):
    """The arguments of derivative kernels: forward's, with more results of the rule."""

    direction: Direction | None = None
    readings: tuple[Node, ...] = ()

    @cached_property
    def results(self) -> tuple[Node, ...]:
        """S, ∂S/∂T, their tangents, then slopes in readings of tables, and their tangents."""
        node = self.p.score_node
        if node is None:
            return ()
        slope, slopes = self.p.rules.score_partials
        nodes = [node, slope, *(slopes[x] for x in self.readings)]
        assert slope is not None
        if self.direction is not None:
            dots = [tangent(x, self.direction.tables) for x in nodes if x is not None]
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

    def tangents(self, c_row: Array | None = None) -> tile_derivatives.DirectionArguments:
        """Return the tangents as arguments.

        c_row: that of the rows.
        """
        direction = self.direction
        if direction is None:
            return tile_derivatives.DirectionArguments(*[None] * 9)
        t = direction.t
        sink = None if t.sink is None else strided(np.broadcast_to(t.sink, (self.p.heads,)), 0, 0)
        bias = None if t.bias is None else self.dense(t.bias)
        return tile_derivatives.DirectionArguments(
            self.matrix(t.query), self.matrix(t.key), self.matrix(t.value), bias, sink,
            self.rows(direction.d_outputs.lse), self.matrix(direction.d_ct.out), self.rows(direction.d_ct.entropy),
            self.rows(c_row),
        )  # fmt: skip

    def over_queries(self, kernel: Any, task: Any, **forms: Any) -> None:
        """Run a kernel that has a program for each block of queries."""

        def launch(config: TileConfig) -> Launch:
            form = self.form(config)
            blocks = -(-self.p.n_q // form.M) * self.p.batch * self.p.heads
            return self.launch(kernel, (blocks,), task, config, F=form, **forms)

        chosen(kernel.__name__, self, launch).run()

    def output_arguments(self, x: Outputs) -> backward_kernel.OutputArguments:
        return backward_kernel.OutputArguments(
            self.matrix(x.out), self.rows(x.lse), self.rows(x.entropy), self.matrix(x.low)
        )


def jvp(p: Problem, t: Differential, outputs: Outputs | None = None) -> tuple[Outputs, Outputs]:
    if outputs is None:
        outputs = forward(p, frozenset(["entropy"]), p.new_low())[0]
    work = DerivativeWork(p, direction=Direction(t))
    given = tile_derivatives.RowCotangents(work.rows(outputs.lse), None, None, None)
    d_lse = empty(p, p.shape(p.n_q), p.compute)
    d_entropy = None if outputs.entropy is None else empty(p, p.shape(p.n_q), p.compute)
    found = Outputs(p.new_output(), d_lse, d_entropy)
    task = jvp_kernel.JvpArguments(
        given, work.tangents(), work.output_arguments(outputs), *work.output_arguments(found)[:3]
    )
    work.over_queries(jvp_kernel.tangent, task)
    return outputs._replace(low=None), found


@dataclass(frozen=True, eq=False)
class SecondTangents(Work):
    """The results of the rule along `other`: S˙, (∂S/∂T)˙, and the part of tables.

    That part is the share of the second derivative from tables that vary along `direction`.
    """

    direction: Direction
    other: Direction

    @cached_property
    def score_program(self) -> Program | None:
        p, t, u = self.p, self.direction.tables, self.other.tables
        if p.score_node is None:
            return None
        slope, slopes = p.rules.score_partials
        assert slope is not None
        varying = [multiply(tangent(x, u), reading(leaf, t)) for leaf, x in slopes.items() if leaf.payload in t]
        return Program.of([tangent(p.score_node, u), tangent(slope, u), *varying])


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    directions = Direction(t, d_t), Direction(u, d_u)
    first, second = (DerivativeWork(p, direction=direction) for direction in directions)
    second_tangents = SecondTangents(p, *directions)
    rows = p.shape(p.n_q)
    found = Outputs(
        p.new_output(), empty(p, rows, p.compute), None if outputs.entropy is None else empty(p, rows, p.compute)
    )
    task = jvp_jvp_kernel.JvpJvpArguments(
        tile_derivatives.RowCotangents(first.rows(outputs.lse), None, None, None), first.tangents(), second.tangents(),
        second_tangents.rules.score, second_tangents.arrays.score, first.output_arguments(outputs),
        *first.output_arguments(found)[:3],
    )  # fmt: skip
    first.over_queries(jvp_jvp_kernel.jvp_jvp, task, SCORE_TANGENTS=second_tangents.score_function)
    return found


def backward(p: Problem, outputs: Outputs, ct: Outputs, direction: Direction | None = None) -> Differential:
    """Return the gradients, or their tangents along a direction."""
    c, along = p.compute, direction is not None
    work = DerivativeWork(p, direction=direction)
    rows = p.shape(p.n_q)
    c_row, c_row_dot = empty(p, rows, c), empty(p, rows, c) if along else None
    d_sink = None if p.sink is None else empty(p, rows, c)
    rest = None if along else work.rows(empty(p, rows, c))
    given = tile_derivatives.RowCotangents(
        work.rows(outputs.lse), work.matrix(ct.out), work.rows(ct.entropy), work.rows(c_row), rest
    )

    def rows_task(to: Array | None, w: DerivativeWork, given: Any) -> None:
        d = direction or Direction(Differential())
        task = backward_kernel.RowArguments(
            given, w.output_arguments(outputs), w.rows(ct.lse), w.tangents(), w.output_arguments(d.d_outputs),
            w.rows(d.d_ct.lse), w.rows(to), w.rows(d_sink),
        )  # fmt: skip
        w.over_queries(backward_kernel.rows, task, ALONG=w.direction is not None)

    rows_task(c_row, DerivativeWork(p), given._replace(c_row=None))
    if along:
        rows_task(c_row_dot, work, given._replace(c_row=None))
    tangents = work.tangents(c_row_dot)
    dq = empty(p, p.shape(p.n_q, p.d), fits(p, p.query))
    dk, dv = (empty(p, (*p.lead, p.kv_heads, p.n_k, size), fits(p, x)) for size, x in ((p.d, p.key), (p.d_v, p.value)))
    task = backward_kernel.BackwardArguments(
        given, tangents, work.matrix(dq), work.matrix(dk), work.matrix(dv), None, None
    )
    work.over_queries(backward_kernel.query, task, ALONG=along)

    def launch(config: TileConfig) -> Launch:
        form = work.form(config)._replace(KEYS_FIRST=True)
        tiles = -(-p.n_k // form.N) * p.batch * p.kv_heads
        return work.launch(backward_kernel.key_value, (tiles,), task, config, F=form, ALONG=along)

    chosen("key_value", work, launch).run()
    return Differential(
        query=fitted(dq, p.query),
        key=fitted(dk, p.key),
        value=fitted(dv, p.value),
        bias=None if p.trained_bias is None else bias_gradient(work, task),
        sink=None if d_sink is None or p.sink is None else sink_gradient(p, d_sink),
        tables=table_gradients(p, given, tangents, direction),
    )


def fits(p: Problem, like: Array) -> Any:
    """Return the dtype of a gradient: its input's, or that of sums if it broadcasts."""
    return like.dtype if like.shape[:-3] == p.lead else p.compute


def fitted(x: Array, like: Array) -> Array:
    """Sum a gradient over its input's broadcast axes, and convert it to its dtype."""
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


def bias_gradient(work: DerivativeWork, task: backward_kernel.BackwardArguments) -> Array:
    p = work.p
    assert p.bias is not None
    full = (*(1,) * (len(p.lead) + 3 - p.bias.ndim), *p.bias.shape)
    total = empty(p, full, p.compute)
    lead = full[:-3] or (1,)
    lies = strided(total.reshape(*lead, *full[-3:]), len(lead), 2)
    heads, rows, cols = full[-3:]
    task = task._replace(dbias=lies, own=(lead, heads, rows, cols, p.batch))

    def launch(config: TileConfig) -> Launch:
        form = work.form(config)
        grid = int(np.prod(lead)) * heads * -(-rows // form.M) * -(-cols // form.N)
        return work.launch(backward_kernel.bias, (grid,), task, config, ALONG=work.direction is not None, F=form)

    chosen("bias", work, launch).run()
    return fitted(array(tensor(total).reshape(p.bias.shape)), p.bias)


def table_gradients(p: Problem, given: Any, tangents: Any, direction: Direction | None) -> dict[Table, Array]:
    """Return the gradients of tables, by chunks of rows.

    Parts are sorted by entry and summed entry by entry: slow, but the same in every run.
    """
    slopes = p.rules.table_partials
    if not slopes:
        return {}
    work = DerivativeWork(p, direction=direction, readings=tuple(slopes))
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
        task = tables.TableGradientArguments(given, tangents, first, *to)
        chosen("table", work, partial(table_part, work, task, len(rows))).run()
        for leaf, value, entry in zip(slopes, values, entries, strict=True):
            scatter(totals[leaf.payload], leaf.args, tensor(value), tensor(entry))
    return {table: fitted(array(x.reshape(table.shape)), table.array) for table, x in totals.items()}


def table_part(work: DerivativeWork, task: tables.TableGradientArguments, rows: int, config: TileConfig) -> Launch:
    p, form, along = work.p, work.form(config), work.direction is not None
    grid = (-(-rows // form.M), -(-p.n_k // form.N), p.batch * p.heads)
    forms = {"FIRST": 4 if along else 2, "LAST": len(work.results), "ALONG": along}
    return work.launch(tables.table, grid, task, config, **forms, F=form)


def scatter(total: torch.Tensor, indices: Sequence[Node], value: torch.Tensor, entry: torch.Tensor) -> None:
    """Add values (..., rows, keys) to their entries.

    If all values along an axis share an entry, that axis is summed first.
    """
    leaves = reads(*indices)
    for axis, leaf in ((-1, "j"), (-2, "i")):
        if not leaves & {leaf, "s"}:
            value, entry = value.sum(axis, keepdim=True), entry.narrow(axis, 0, 1)
    places, order = torch.sort(entry.reshape(-1), stable=True)
    ends = torch.searchsorted(places, torch.arange(total.numel() + 1, device=places.device))
    # `unsafe` omits a check that the host would wait for.
    total += torch.segment_reduce(value.reshape(-1).gather(0, order), "sum", offsets=ends, initial=0, unsafe=True)
