"""The tangent of the tangent of forward along two directions, which the names end in: t and u.

With a = S˙t − lse˙t and b = S˙u − lse˙u, P moves by P a and P b, and by P (w − lse¨) along both, w = S¨ + a b:

    lse¨ = Σ P w + p_sink (sink˙t − lse˙t) (sink˙u − lse˙u)        O¨ = Σ P D (w V + a V˙u + b V˙t) − lse¨ O
    H¨ = lse¨ (Σ P − H) − Σ P (w (log P + 1) + a b)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import keys_of, load_cell, load_rows, rows_of_program
from regard.engines.triton.kernels.forward import finite
from regard.engines.triton.kernels.jvp import Sums, finish, nothing
from regard.engines.triton.kernels.pairs import block_of, matrix_or_none, moving, products, tile_of
from regard.engines.triton.kernels.tiles import dropped, over_keys, product, rule
from regard.engines.triton.language.functions import real


class Task(NamedTuple):
    """What is known, the directions t and u, what the rule along u reads, and where to write."""

    given: Any
    direction: Any
    other: Any
    read: Any
    dense: Any
    known: Any
    out: Any
    lse: Any
    entropy: Any


class Of(NamedTuple):
    """What a block of queries is given, whatever the tile; x, z: what is known of it along t and along u."""

    call: Any
    arrays: Any
    rules: Any
    task: Any
    rows: Any
    x: Any
    z: Any


@triton.jit
def sink_minus_lse(x, call, rows, F: tl.constexpr):
    """sink˙ − lse˙ along a direction."""
    lse = load_rows(x.lse, call, rows, F.REAL)
    if x.sink is None:
        return -lse
    else:
        return tl.load(x.sink.ptr + rows.head * x.sink.head).to(F.REAL) - lse


@triton.jit
def add(a, of, tile, MASKED: tl.constexpr, BENDS: tl.constexpr, F: tl.constexpr):
    """BENDS: the function of S˙u, of (∂S/∂T)˙u, and of what tables that vary along t add to S¨."""
    call, task, rows = of.call, of.task, of.rows
    keys = keys_of(call, tile, F.N)
    kv = rows.head // call.group
    y = tile_of(of.arrays, call, task.direction, rows.batch, kv, keys, F)
    k_u = matrix_or_none(task.other.k, call, rows.batch, kv, keys.c, keys.inside, call.d, F.D)
    v_u = matrix_or_none(task.other.v, call, rows.batch, kv, keys.c, keys.inside, call.d_v, F.V)
    s = moving(call, of.arrays, of.rules, task.direction, of.x, y, rows, keys, MASKED, True, F)
    scale = real(call.scale, F.REAL)
    T_u, w = tl.zeros_like(s.T), tl.zeros_like(s.T)
    along_u = products(of.z.q_dot, y.k, of.x.q, k_u, F)
    if along_u is not None:
        T_u = along_u * scale
    along_both = products(of.x.q_dot, k_u, of.z.q_dot, y.k_dot, F)
    if along_both is not None:
        w = along_both * scale
    S_u = T_u
    if BENDS is not None:
        bent = rule(BENDS, call, task.read, task.dense, rows, keys, s.T, T_u, F)
        S_u = tl.broadcast_to(bent[0].to(F.REAL), s.T.shape)
        w = w * s.found[1].to(F.REAL) + s.T_dot * bent[1].to(F.REAL)
        for n in tl.static_range(2, len(bent)):
            w += bent[n].to(F.REAL)
    if task.other.bias is not None:
        S_u += load_cell(task.other.bias, (call, rows, keys)).to(F.REAL)
    logP = tl.where(s.visible, s.S - finite(of.x.lse), 0.0)
    P = tl.where(s.visible, tl.exp(logP), 0.0)
    by_t, by_u = s.S_dot - of.x.lse_dot, S_u - of.z.lse_dot
    Pt, Pu = tl.where(s.visible, P * by_t, 0.0), tl.where(s.visible, P * by_u, 0.0)
    more = tl.where(s.visible, Pt * by_u, 0.0)
    Pw = tl.where(s.visible, P * w, 0.0) + more
    CAREFUL: tl.constexpr = MASKED or F.HIDES
    O = a.O + product(dropped(call, Pw, rows, keys, F), y.v, s.visible, CAREFUL, F)
    if v_u is not None:
        O += product(dropped(call, Pt, rows, keys, F), v_u, s.visible, CAREFUL, F)
    if y.v_dot is not None:
        O += product(dropped(call, Pu, rows, keys, F), y.v_dot, s.visible, CAREFUL, F)
    bend = a.bend + tl.sum(Pw * (logP + 1.0) + more, 1)
    return Sums(a.mean + tl.sum(Pw, 1), a.total + tl.sum(P, 1), bend, O)


@triton.jit
def bend(arrays, rules, call, task, BENDS: tl.constexpr, F: tl.constexpr):
    rows = rows_of_program(call, F.M)
    x = block_of(arrays, call, task.given, task.direction, rows, F)
    z = block_of(arrays, call, task.given, task.other, rows, F)
    of = Of(call, arrays, rules, task, rows, x, z)
    a = over_keys(add, nothing(F), of, call, rules, rows, 0, 1, BENDS, F)
    lse = a.mean
    if arrays.sink is not None:
        sink = tl.load(arrays.sink.ptr + rows.head * arrays.sink.head).to(F.REAL)
        p_sink = tl.exp(sink - finite(load_rows(task.known.lse, call, rows, F.REAL)))
        lse += p_sink * sink_minus_lse(task.direction, call, rows, F) * sink_minus_lse(task.other, call, rows, F)
    finish(a, lse, call, task, rows, F)
