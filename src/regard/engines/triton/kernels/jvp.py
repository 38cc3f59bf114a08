"""The tangent of forward, given its outputs.

lse˙ = Σ P S˙ + p_sink sink˙        O˙ = Σ P D (S˙ V + V˙) − lse˙ O        H˙ = lse˙ (Σ P − H) − Σ P S˙ (log P + 1)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import (
    head_of,
    keys_of,
    load_head,
    load_matrix,
    load_rows,
    rows_of_program,
    store_matrix,
    store_rows,
)
from regard.engines.triton.kernels.forward import finite, sink_weight
from regard.engines.triton.kernels.tile_derivatives import QueryContext, key_operands, query_operands, tangent_scores
from regard.engines.triton.kernels.tiles import dropped, over_keys, product
from regard.engines.triton.language.functions import exp_ftz, real


class JvpArguments(NamedTuple):
    """The arguments of the kernel; entropy may be None."""

    given: Any
    direction: Any
    known: Any
    out: Any
    lse: Any
    entropy: Any


class TangentSums(NamedTuple):
    """Σ P S˙, Σ P, Σ P S˙ (log P + 1) and Σ P D (S˙ V + V˙)."""

    mean: Any
    total: Any
    log_mean: Any
    O: Any


@triton.jit
def nothing(F: tl.constexpr):
    zero = tl.zeros([F.M], F.REAL)
    return TangentSums(zero, zero, zero, tl.zeros([F.M, F.V], F.REAL))


@triton.jit
def add(a, context, tile, MASKED: tl.constexpr, ALONG: tl.constexpr, F: tl.constexpr):
    call, rows = context.call, context.rows
    keys = keys_of(call, tile, F.N)
    y = key_operands(context.arrays, call, context.direction, rows.batch, rows.head // call.group, keys, F)
    s = tangent_scores(
        call, context.arrays, context.rules, context.direction, context.x, y, rows, keys, MASKED, ALONG, F
    )
    visible = s.visible
    logP = tl.where(visible, s.S - finite(context.x.lse), 0.0)
    P = tl.where(visible, exp_ftz(logP), 0.0)
    PS = P * s.S_dot
    GUARDED: tl.constexpr = MASKED or F.HIDES
    O = a.O + product(dropped(call, PS, rows, keys, F), y.v, visible, GUARDED, F)
    if y.v_dot is not None:
        O += product(dropped(call, P, rows, keys, F), y.v_dot, visible, GUARDED, F)
    log_mean = a.log_mean + tl.sum(PS * (logP + 1.0), 1)
    return TangentSums(a.mean + tl.sum(PS, 1), a.total + tl.sum(P, 1), log_mean, O)


@triton.jit
def tangent(arrays, rules, call, task, F: tl.constexpr):
    rows = rows_of_program(call, F.M)
    context = QueryContext(
        call, arrays, rules, task.direction, rows, query_operands(arrays, call, task.given, task.direction, rows, F)
    )
    a = over_keys(add, nothing(F), context, call, rules, rows, 0, 1, True, F)
    lse_dot = a.mean
    if task.direction.sink is not None:
        sink = load_head(arrays.sink, rows, F.REAL)
        sink_dot = load_head(task.direction.sink, rows, F.REAL)
        lse_dot += sink_weight(sink, load_rows(task.known.lse, call, rows, F.REAL)) * sink_dot
    finish(a, lse_dot, call, task, rows, F)


@triton.jit
def finish(a, lse_dot, call, task, rows, F: tl.constexpr):
    """Write the tangents of the outputs from the sums and lse˙."""
    O = a.O
    if F.DROPOUT:
        O *= real(call.keep, F.REAL)
    known = task.known.out
    out = load_matrix(head_of(known, call, rows.batch, rows.head), known, rows.r, rows.inside, call.d_v, F.V, F.REAL)
    O -= lse_dot[:, None] * out
    low = task.known.low
    if low is not None:
        rest = load_matrix(head_of(low, call, rows.batch, rows.head), low, rows.r, rows.inside, call.d_v, F.V, F.REAL)
        O -= lse_dot[:, None] * rest
    store_matrix(head_of(task.out, call, rows.batch, rows.head), task.out, rows.r, rows.inside, call.d_v, O, F.V)
    store_rows(task.lse, call, rows, lse_dot)
    if task.entropy is not None:
        H = load_rows(task.known.entropy, call, rows, F.REAL)
        store_rows(task.entropy, call, rows, lse_dot * (a.total - H) - a.log_mean)
