"""Backward and its tangent: one kernel for queries, one for keys and values.

Every sum has one order, and needs no atomics.

    dQ = scale · dT K        dK = scale · dTᵀ Q        dV = (P D)ᵀ dO

ALONG a direction they compute the tangents of these, with two products for each. `bias` sums dS over the axes along
which a bias broadcasts.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import (
    at_batch,
    head_of,
    keys_of,
    load_head,
    load_matrix,
    load_rows,
    rows_of,
    rows_of_program,
    store_matrix,
    store_rows,
)
from regard.engines.triton.kernels.forward import finite, sink_weight
from regard.engines.triton.kernels.tile_derivatives import QueryContext, key_operands, query_operands, tile_gradients
from regard.engines.triton.kernels.tiles import over_keys, over_rows, product, raw, scores
from regard.engines.triton.language.functions import exp_ftz, real


class OutputArguments(NamedTuple):
    """The outputs of forward, or their tangents; out, entropy and low may be None."""

    out: Any
    lse: Any
    entropy: Any
    low: Any


class RowArguments(NamedTuple):
    """The arguments of `rows`.

    It writes c_row, the part of dS / P that is one number for a query. It also writes d_sink, the query's part of the
    sink's gradient. With tangents it writes those of both. `given.rest` is written too, unless it is None.
    """

    given: Any
    known: Any
    dlse: Any
    direction: Any
    known_dot: Any
    dlse_dot: Any
    c_row: Any
    d_sink: Any


class BackwardArguments(NamedTuple):
    """The arguments of the other kernels; a result that is None is not computed.

    own: the leading sizes of a bias, its heads, rows and columns, and the batch elements of the call.
    """

    given: Any
    direction: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    own: Any


@triton.jit
def row_dot(x, y, call, rows, F: tl.constexpr):
    """Return Σ_c x y of each query, or None if one of them is None."""
    if x is None or y is None:
        return None
    else:
        a = load_matrix(head_of(x, call, rows.batch, rows.head), x, rows.r, rows.inside, call.d_v, F.V, F.REAL)
        b = load_matrix(head_of(y, call, rows.batch, rows.head), y, rows.r, rows.inside, call.d_v, F.V, F.REAL)
        return tl.sum(a * b, 1)


@triton.jit
def less(total, x):
    return total if x is None else total - x


@triton.jit
def add_total(total, context, tile, MASKED: tl.constexpr, W: tl.constexpr, F: tl.constexpr):
    """Return Σ exp(S − lse) with one more tile of keys."""
    call, arrays, rows = context.call, context.arrays, context.rows
    q, lse = context.x
    keys = keys_of(call, tile, F.N)
    k_ptr = head_of(arrays.k, call, rows.batch, rows.head // call.group)
    k = load_matrix(k_ptr, arrays.k, keys.c, keys.inside, call.d, F.D, None)
    T = raw(call, q, k, F)
    S, visible, _ = scores(call, arrays, context.rules, T, T, rows, keys, MASKED, F)
    return total + tl.sum(tl.where(visible, exp_ftz(S - finite(lse)[:, None]), 0.0), 1)


@triton.jit
def rest_of(arrays, rules, call, task, lse, p_sink, r, F: tl.constexpr):
    """Return log Σ exp(S − lse) where rounding lse may have cost half of the digits of the weights, else 0.

    Only blocks with such a row visit their keys.
    """
    LARGE: tl.constexpr = 2.0**26 if F.REAL == tl.float64 else 2.0**11.5  # eps^−½
    large = (tl.abs(lse) > LARGE) & (tl.abs(lse) < float("inf"))
    total = tl.zeros([F.M], F.REAL)
    if tl.max(large.to(tl.int32), 0) > 0:
        q_ptr = head_of(arrays.q, call, r.batch, r.head)
        q = load_matrix(q_ptr, arrays.q, r.r, r.inside, call.d, F.D, None)
        context = QueryContext(call, arrays, rules, task.direction, r, (q, lse))
        total = p_sink + over_keys(add_total, total, context, call, rules, r, 0, 1, None, F)
    return tl.where(large & (total > 0), tl.log(tl.where(total > 0, total, 1.0)), 0.0)


@triton.jit
def rows(arrays, rules, call, task, ALONG: tl.constexpr, F: tl.constexpr):
    """Write c_row = −dO · (O + low) + dlse + dH (Σ P − H), and its product with p_sink."""
    r = rows_of_program(call, F.M)
    g, t = task.given, task.direction
    lse = load_rows(task.known.lse, call, r, F.REAL)
    zero = tl.zeros([F.M], F.REAL)
    p_sink, p_sink_dot = zero, zero
    if arrays.sink is not None:
        p_sink = sink_weight(load_head(arrays.sink, r, F.REAL), lse)
    if g.rest is not None:
        rest = rest_of(arrays, rules, call, task, lse, p_sink, r, F)
        store_rows(g.rest, call, r, rest)
        p_sink *= exp_ftz(-rest)
    if ALONG:
        lse_dot = load_rows(task.known_dot.lse, call, r, F.REAL)
        p_sink_dot = -p_sink * lse_dot
        if t.sink is not None:
            p_sink_dot += p_sink * load_head(t.sink, r, F.REAL)
    total = tl.where(lse == -float("inf"), 0.0, 1.0 - p_sink)
    c = less(zero, row_dot(g.dO, task.known.out, call, r, F))
    c = less(c, row_dot(g.dO, task.known.low, call, r, F))
    if task.dlse is not None:
        c += load_rows(task.dlse, call, r, F.REAL)
    if g.dH is not None:
        c += load_rows(g.dH, call, r, F.REAL) * (total - load_rows(task.known.entropy, call, r, F.REAL))
    sink = p_sink * c
    if ALONG:
        c_dot = less(zero, row_dot(t.dO, task.known.out, call, r, F))
        c_dot = less(c_dot, row_dot(t.dO, task.known.low, call, r, F))
        c_dot = less(c_dot, row_dot(g.dO, task.known_dot.out, call, r, F))
        if task.dlse_dot is not None:
            c_dot += load_rows(task.dlse_dot, call, r, F.REAL)
        if t.dH is not None:
            c_dot += load_rows(t.dH, call, r, F.REAL) * (total - load_rows(task.known.entropy, call, r, F.REAL))
        if g.dH is not None:
            H_dot = load_rows(task.known_dot.entropy, call, r, F.REAL)
            c_dot -= load_rows(g.dH, call, r, F.REAL) * (p_sink_dot + H_dot)
        sink = p_sink_dot * c + p_sink * c_dot
        c = c_dot
    store_rows(task.c_row, call, r, c)
    if task.d_sink is not None:
        store_rows(task.d_sink, call, r, sink)


# Gradients of queries


@triton.jit
def add_query(dq, context, tile, MASKED: tl.constexpr, ALONG: tl.constexpr, F: tl.constexpr):
    call, rows = context.call, context.rows
    keys = keys_of(call, tile, F.N)
    y = key_operands(context.arrays, call, context.direction, rows.batch, rows.head // call.group, keys, F)
    z = tile_gradients(
        call, context.arrays, context.rules, context.direction, context.x, y, rows, keys, MASKED, ALONG, F
    )
    GUARDED: tl.constexpr = MASKED or F.HIDES
    if ALONG:
        dq += product(z.dT_dot, y.k, z.visible, GUARDED, F)
        if y.k_dot is not None:
            dq += product(z.dT, y.k_dot, z.visible, GUARDED, F)
    else:
        dq += product(z.dT, y.k, z.visible, GUARDED, F)
    return dq


@triton.jit
def query(arrays, rules, call, task, ALONG: tl.constexpr, F: tl.constexpr):
    rows = rows_of_program(call, F.M)
    x = query_operands(arrays, call, task.given, task.direction, rows, F)
    context = QueryContext(call, arrays, rules, task.direction, rows, x)
    dq = over_keys(add_query, tl.zeros([F.M, F.D], F.REAL), context, call, rules, rows, 0, 1, ALONG, F)
    out = head_of(task.dq, call, rows.batch, rows.head)
    store_matrix(out, task.dq, rows.r, rows.inside, call.d, dq * real(call.scale, F.REAL), F.D)


# Gradients of keys and values


class KeyGradients(NamedTuple):
    dk: Any
    dv: Any


class KeyContext(NamedTuple):
    """The state of a loop over query blocks, for one tile y of keys."""

    call: Any
    arrays: Any
    rules: Any
    task: Any
    keys: Any
    batch: Any
    head: Any
    y: Any


@triton.jit
def add_key(a, context, block, MASKED: tl.constexpr, ALONG: tl.constexpr, F: tl.constexpr):
    call, direction = context.call, context.task.direction
    rows = rows_of(call, context.batch, context.head, block, F.M)
    x = query_operands(context.arrays, call, context.task.given, direction, rows, F)
    z = tile_gradients(
        call, context.arrays, context.rules, direction, x, context.y, rows, context.keys, MASKED, ALONG, F
    )
    dk, dv = a.dk, a.dv
    # Rows beyond the end of a block are hidden too; they hold zeros.
    GUARDED: tl.constexpr = MASKED or F.HIDES
    if ALONG:
        dk += product(z.dT_dot, x.q, z.visible, GUARDED, F)
        if x.q_dot is not None:
            dk += product(z.dT, x.q_dot, z.visible, GUARDED, F)
        if x.dO is not None:
            dv += product(z.PD_dot, x.dO, z.visible, GUARDED, F)
        if x.dO_dot is not None:
            dv += product(z.PD, x.dO_dot, z.visible, GUARDED, F)
    else:
        dk += product(z.dT, x.q, z.visible, GUARDED, F)
        if x.dO is not None:
            dv += product(z.PD, x.dO, z.visible, GUARDED, F)
    return KeyGradients(dk, dv)


@triton.jit
def key_value(arrays, rules, call, task, ALONG: tl.constexpr, F: tl.constexpr):
    tiles = tl.cdiv(call.n_k, F.N)
    kv_heads = call.heads // call.group
    kv = (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv = kv // kv_heads, kv % kv_heads
    keys = keys_of(call, tl.program_id(0) % tiles, F.N)
    y = key_operands(arrays, call, task.direction, batch, kv, keys, F)
    a = KeyGradients(tl.zeros([F.N, F.D], F.REAL), tl.zeros([F.N, F.V], F.REAL))
    for n in range(call.group):
        head = kv * call.group + n
        context = KeyContext(call, arrays, rules, task, keys, batch, head, y)
        a = over_rows(add_key, a, context, call, rules, batch, head, keys, ALONG, F)
    dk, dv = a.dk * real(call.scale, F.REAL), a.dv
    if F.DROPOUT:
        dv *= real(call.keep, F.REAL)
    store_matrix(head_of(task.dk, call, batch, kv), task.dk, keys.c, keys.inside, call.d, dk, F.D)
    store_matrix(head_of(task.dv, call, batch, kv), task.dv, keys.c, keys.inside, call.d_v, dv, F.V)


# Gradient of a bias


@triton.jit
def bias(arrays, rules, call, task, ALONG: tl.constexpr, F: tl.constexpr):
    """Sum dS over the batch elements, heads, rows and columns of an entry, in order."""
    own = task.own
    n_rows, n_cols = tl.cdiv(own[2], F.M), tl.cdiv(own[3], F.N)
    program = tl.program_id(0)
    tile, program = program % n_cols, program // n_cols
    block, program = program % n_rows, program // n_rows
    own_head, mine = program % own[1], (program // own[1]).to(tl.int64)
    here = mine * 0
    for n in tl.static_range(len(own[0])):
        size = own[0][len(own[0]) - 1 - n]
        here += (mine % size) * task.dbias.lead[len(own[0]) - 1 - n]
        mine = mine // size
    heads, blocks, tiles = own_head + 1, block + 1, tile + 1
    if own[1] == 1:
        heads = call.heads
    if own[2] == 1:
        blocks = tl.cdiv(call.n_q, F.M)
    if own[3] == 1:
        tiles = tl.cdiv(call.n_k, F.N)
    total = tl.zeros([F.M, F.N], F.REAL)
    for b in range(own[4]):
        batch = tl.full([], b, tl.int64)
        if at_batch(task.dbias, call.lead, batch) == here:
            for h in range(own_head, heads):
                head = tl.full([], h, tl.int64)
                for i in range(block, blocks):
                    rows = rows_of(call, batch, head, i, F.M)
                    x = query_operands(arrays, call, task.given, task.direction, rows, F)
                    for j in range(tile, tiles):
                        keys = keys_of(call, j, F.N)
                        y = key_operands(arrays, call, task.direction, batch, head // call.group, keys, F)
                        z = tile_gradients(call, arrays, rules, task.direction, x, y, rows, keys, True, ALONG, F)
                        total += z.dS_dot if ALONG else z.dS
    r, c = tl.arange(0, F.M), tl.arange(0, F.N)
    row, column = block.to(tl.int64) * F.M + r, tile.to(tl.int64) * F.N + c
    if own[2] == 1:
        total = tl.where(r[:, None] == 0, tl.sum(total, 0)[None, :], 0.0)
    if own[3] == 1:
        total = tl.where(c[None, :] == 0, tl.sum(total, 1)[:, None], 0.0)
    at = here + own_head * task.dbias.head + row[:, None] * task.dbias.row + column[None, :] * task.dbias.column
    tl.store(task.dbias.ptr + at, total, mask=(row < own[2])[:, None] & (column < own[3])[None, :])
