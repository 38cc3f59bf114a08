"""The tangent of forward, given its outputs.

lse˙ = Σ P S˙ + p_sink sink˙        O˙ = Σ P D (S˙ V + V˙) − lse˙ O        H˙ = lse˙ (Σ P − H) − Σ P S˙ (log P + 1)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import (
    head_of,
    keys_of,
    load_matrix,
    load_rows,
    rows_of_program,
    store_matrix,
    store_rows,
)
from regard.engines.triton.kernels.forward import finite
from regard.engines.triton.kernels.pairs import OfQueries, block_of, moving, tile_of
from regard.engines.triton.kernels.tiles import dropped, over_keys, product
from regard.engines.triton.language.functions import real


class Task(NamedTuple):
    """What is known (the outputs of forward; entropy may be None), the direction, and where to write."""

    given: Any
    direction: Any
    known: Any
    out: Any
    lse: Any
    entropy: Any


class Sums(NamedTuple):
    """Σ P S˙, Σ P, Σ P S˙ (log P + 1) and Σ P D (S˙ V + V˙)."""

    mean: Any
    total: Any
    bend: Any
    O: Any


@triton.jit
def nothing(F: tl.constexpr):
    zero = tl.zeros([F.M], F.REAL)
    return Sums(zero, zero, zero, tl.zeros([F.M, F.V], F.REAL))


@triton.jit
def add(a, of, tile, MASKED: tl.constexpr, ALONG: tl.constexpr, F: tl.constexpr):
    call, rows = of.call, of.rows
    keys = keys_of(call, tile, F.N)
    y = tile_of(of.arrays, call, of.direction, rows.batch, rows.head // call.group, keys, F)
    s = moving(call, of.arrays, of.rules, of.direction, of.x, y, rows, keys, MASKED, ALONG, F)
    visible = s.visible
    logP = tl.where(visible, s.S - finite(of.x.lse), 0.0)
    P = tl.where(visible, tl.exp(logP), 0.0)
    PS = P * s.S_dot
    CAREFUL: tl.constexpr = MASKED or F.HIDES
    O = a.O + product(dropped(call, PS, rows, keys, F), y.v, visible, CAREFUL, F)
    if y.v_dot is not None:
        O += product(dropped(call, P, rows, keys, F), y.v_dot, visible, CAREFUL, F)
    bend = a.bend + tl.sum(PS * (logP + 1.0), 1)
    return Sums(a.mean + tl.sum(PS, 1), a.total + tl.sum(P, 1), bend, O)


@triton.jit
def tangent(arrays, rules, call, task, F: tl.constexpr):
    rows = rows_of_program(call, F.M)
    of = OfQueries(
        call, arrays, rules, task.direction, rows, block_of(arrays, call, task.given, task.direction, rows, F)
    )
    a = over_keys(add, nothing(F), of, call, rules, rows, 0, 1, True, F)
    lse_dot = a.mean
    if task.direction.sink is not None:
        sink = tl.load(arrays.sink.ptr + rows.head * arrays.sink.head).to(F.REAL)
        sink_dot = tl.load(task.direction.sink.ptr + rows.head * task.direction.sink.head).to(F.REAL)
        lse_dot += tl.exp(sink - finite(load_rows(task.known.lse, call, rows, F.REAL))) * sink_dot
    finish(a, lse_dot, call, task, rows, F)


@triton.jit
def finish(a, lse_dot, call, task, rows, F: tl.constexpr):
    """What the sums mean, and lse˙."""
    O = a.O
    if F.DROPOUT:
        O *= real(call.keep, F.REAL)
    known = task.known.out
    out = load_matrix(head_of(known, call, rows.batch, rows.head), known, rows.r, rows.inside, call.d_v, F.V, F.REAL)
    O -= lse_dot[:, None] * out
    store_matrix(head_of(task.out, call, rows.batch, rows.head), task.out, rows.r, rows.inside, call.d_v, O, F.V)
    store_rows(task.lse, call, rows, lse_dot)
    if task.entropy is not None:
        H = load_rows(task.known.entropy, call, rows, F.REAL)
        store_rows(task.entropy, call, rows, lse_dot * (a.total - H) - a.bend)
