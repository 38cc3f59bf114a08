"""The tangent of the tangent of forward, along two directions t and u.

Names end in the direction. With a = S˙t − lse˙t and b = S˙u − lse˙u, P moves by P a and P b, and along both by
P (w − lse¨), w = S¨ + a b:

    lse¨ = Σ P w + p_sink (sink˙t − lse˙t) (sink˙u − lse˙u)        O¨ = Σ P D (w V + a V˙u + b V˙t) − lse¨ O
    H¨ = lse¨ (Σ P − H) − Σ P (w (log P + 1) + a b)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import keys_of, load_dense, load_head, load_rows, rows_of_program, tile_of
from regard.engines.triton.kernels.forward import finite, sink_weight
from regard.engines.triton.kernels.jvp import TangentSums, finish, nothing
from regard.engines.triton.kernels.tile_derivatives import (
    key_operands,
    matrix_or_none,
    products,
    query_operands,
    tangent_scores,
)
from regard.engines.triton.kernels.tiles import dropped, over_keys, product, rule
from regard.engines.triton.language.functions import exp_ftz, real


class JvpJvpArguments(NamedTuple):
    """The arguments of the kernel; read, dense: what the score's tangents read."""

    given: Any
    direction: Any
    other: Any
    read: Any
    dense: Any
    known: Any
    out: Any
    lse: Any
    entropy: Any


class JvpJvpContext(NamedTuple):
    """The state of a loop over tiles; x, z: the query operands along t and u."""

    call: Any
    arrays: Any
    rules: Any
    task: Any
    rows: Any
    x: Any
    z: Any


@triton.jit
def sink_minus_lse(x, call, rows, F: tl.constexpr):
    """Return sink˙ − lse˙ along a direction."""
    lse = load_rows(x.lse, call, rows, F.REAL)
    if x.sink is None:
        return -lse
    else:
        return load_head(x.sink, rows, F.REAL) - lse


@triton.jit
def add(a, context, tile, MASKED: tl.constexpr, SCORE_TANGENTS: tl.constexpr, F: tl.constexpr):
    """Return the sums with one more tile.

    SCORE_TANGENTS: the function of S˙u, (∂S/∂T)˙u, and what tables that vary along t add to S¨.
    """
    call, task, rows = context.call, context.task, context.rows
    keys = keys_of(call, tile, F.N)
    kv = rows.head // call.group
    y = key_operands(context.arrays, call, task.direction, rows.batch, kv, keys, F)
    k_u = matrix_or_none(task.other.k, call, rows.batch, kv, keys.c, keys.inside, call.d, F.D)
    v_u = matrix_or_none(task.other.v, call, rows.batch, kv, keys.c, keys.inside, call.d_v, F.V)
    s = tangent_scores(call, context.arrays, context.rules, task.direction, context.x, y, rows, keys, MASKED, True, F)
    scale = real(call.scale, F.REAL)
    T_u, w = tl.zeros_like(s.T), tl.zeros_like(s.T)
    along_u = products(context.z.q_dot, y.k, context.x.q, k_u, F)
    if along_u is not None:
        T_u = along_u * scale
    along_both = products(context.x.q_dot, k_u, context.z.q_dot, y.k_dot, F)
    if along_both is not None:
        w = along_both * scale
    S_u = T_u
    if SCORE_TANGENTS is not None:
        score_u = rule(SCORE_TANGENTS, call, task.read, task.dense, rows, keys, s.T, T_u, F)
        S_u = tl.broadcast_to(score_u[0].to(F.REAL), s.T.shape)
        w = w * s.found[1].to(F.REAL) + s.T_dot * score_u[1].to(F.REAL)
        for n in tl.static_range(2, len(score_u)):
            w += score_u[n].to(F.REAL)
    if task.other.bias is not None:
        S_u += load_dense(task.other.bias, tile_of(call, rows, keys, F.KEYS_FIRST)).to(F.REAL)
    logP = tl.where(s.visible, s.S - finite(context.x.lse), 0.0)
    P = tl.where(s.visible, exp_ftz(logP), 0.0)
    by_t, by_u = s.S_dot - context.x.lse_dot, S_u - context.z.lse_dot
    Pt, Pu = tl.where(s.visible, P * by_t, 0.0), tl.where(s.visible, P * by_u, 0.0)
    more = tl.where(s.visible, Pt * by_u, 0.0)
    Pw = tl.where(s.visible, P * w, 0.0) + more
    GUARDED: tl.constexpr = MASKED or F.HIDES
    O = a.O + product(dropped(call, Pw, rows, keys, F), y.v, s.visible, GUARDED, F)
    if v_u is not None:
        O += product(dropped(call, Pt, rows, keys, F), v_u, s.visible, GUARDED, F)
    if y.v_dot is not None:
        O += product(dropped(call, Pu, rows, keys, F), y.v_dot, s.visible, GUARDED, F)
    log_mean = a.log_mean + tl.sum(Pw * (logP + 1.0) + more, 1)
    return TangentSums(a.mean + tl.sum(Pw, 1), a.total + tl.sum(P, 1), log_mean, O)


@triton.jit
def jvp_jvp(arrays, rules, call, task, SCORE_TANGENTS: tl.constexpr, F: tl.constexpr):
    rows = rows_of_program(call, F.M)
    x = query_operands(arrays, call, task.given, task.direction, rows, F)
    z = query_operands(arrays, call, task.given, task.other, rows, F)
    context = JvpJvpContext(call, arrays, rules, task, rows, x, z)
    a = over_keys(add, nothing(F), context, call, rules, rows, 0, 1, SCORE_TANGENTS, F)
    lse = a.mean
    if arrays.sink is not None:
        sink = load_head(arrays.sink, rows, F.REAL)
        p_sink = sink_weight(sink, load_rows(task.known.lse, call, rows, F.REAL))
        lse += p_sink * sink_minus_lse(task.direction, call, rows, F) * sink_minus_lse(task.other, call, rows, F)
    finish(a, lse, call, task, rows, F)
