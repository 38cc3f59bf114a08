"""The tangent of forward, given its outputs.

lse˙ = Σ P S˙ + p_sink sink˙        O˙ = Σ P D (S˙ V + V˙) − lse˙ O        H˙ = lse˙ (Σ P − H) − Σ P S˙ (log P + 1)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.forward_kernel import finite
from regard.engines.triton.language import real
from regard.engines.triton.pairs import block_of, moving, tile_of
from regard.engines.triton.place import head_of, keys_of, load_matrix, load_rows, rows_of, store_matrix, store_rows
from regard.engines.triton.tiles import dropped, kinds, product, run_of


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
def add(a, x, call, arrays, rules, task, rows, kv, tile, MASKED: tl.constexpr, F: tl.constexpr):
    keys = keys_of(call, tile, F.N)
    y = tile_of(arrays, call, task.direction, rows.batch, kv, keys, F)
    S, visible, _, S_dot = moving(call, arrays, rules, task.direction, x, y, rows, keys, MASKED, True, F)
    logP = tl.where(visible, S - finite(x.lse), 0.0)
    P = tl.where(visible, tl.exp(logP), 0.0)
    PS = P * S_dot
    CAREFUL: tl.constexpr = MASKED or F.HIDES
    O = a.O + product(dropped(call, PS, rows, keys, F), y.v, visible, CAREFUL, F)
    if y.v_dot is not None:
        O += product(dropped(call, P, rows, keys, F), y.v_dot, visible, CAREFUL, F)
    bend = a.bend + tl.sum(PS * (logP + 1.0), 1)
    return Sums(a.mean + tl.sum(PS, 1), a.total + tl.sum(P, 1), bend, O)


@triton.jit
def tangent(arrays, rules, call, task, F: tl.constexpr):
    blocks, tiles = tl.cdiv(call.n_q, F.M), tl.cdiv(call.n_k, F.N)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    block = blocks - 1 - tl.program_id(0) % blocks
    batch, head = head // call.heads, head % call.heads
    kv = head // call.group
    rows = rows_of(call, batch, head, block, F.M)
    x = block_of(arrays, call, task.given, task.direction, rows, F)
    zero = tl.zeros([F.M], F.REAL)
    a = Sums(zero, zero, zero, tl.zeros([F.M, F.V], F.REAL))
    if F.BOUNDS is None:
        whole = call.n_k // F.N if F.MASK is None else 0
        for tile in range(whole):
            a = add(a, x, call, arrays, rules, task, rows, kv, tile, False, F)
        for tile in range(whole, tiles):
            a = add(a, x, call, arrays, rules, task, rows, kv, tile, True, F)
    else:
        for chunk in range(tl.cdiv(tiles, F.T)):
            live, full = kinds(call, rules, rows, chunk, F)
            begin, end, others = run_of(full, live, F)
            for t in range(begin, end):
                a = add(a, x, call, arrays, rules, task, rows, kv, chunk * F.T + t, False, F)
            if others != 0:
                for t in range(F.T):
                    if (others >> t) & 1 != 0:
                        a = add(a, x, call, arrays, rules, task, rows, kv, chunk * F.T + t, True, F)
    lse_dot = a.mean
    if task.direction.sink is not None:
        sink = tl.load(arrays.sink.ptr + rows.head * arrays.sink.head).to(F.REAL)
        sink_dot = tl.load(task.direction.sink.ptr + rows.head * task.direction.sink.head).to(F.REAL)
        lse_dot += tl.exp(sink - finite(load_rows(task.known.lse, call, rows, F.REAL))) * sink_dot
    O = a.O
    if F.DROPOUT:
        O *= real(call.keep, F.REAL)
    known = task.known.out
    out = load_matrix(head_of(known, call, batch, head), known, rows.r, rows.inside, call.d_v, F.V, F.REAL)
    O -= lse_dot[:, None] * out
    store_matrix(head_of(task.out, call, batch, head), task.out, rows.r, rows.inside, call.d_v, O, F.V)
    store_rows(task.lse, call, rows, lse_dot)
    if task.entropy is not None:
        H = load_rows(task.known.entropy, call, rows, F.REAL)
        store_rows(task.entropy, call, rows, lse_dot * (a.total - H) - a.bend)
