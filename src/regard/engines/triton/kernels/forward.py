"""Forward: the online softmax of a query block over its visible tiles of keys.

    m = max S     l = Σ exp(S − m)     e = Σ exp(S − m) (S − m)     O = Σ exp(S − m) D V

(Milakov and Gimelshein 2018; Dao et al. 2022). Calls with few queries split the keys between programs (split-KV), and
`merge` combines the splits in order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import (
    head_of,
    keys_of,
    load_head,
    load_matrix,
    rows_of_program,
    store_matrix,
    store_rows,
)
from regard.engines.triton.kernels.tiles import INFINITY, dropped, over_keys, product, raw, scores
from regard.engines.triton.language.functions import exp_ftz, real

NO_KEY: tl.constexpr = tl.constexpr(2**62)  # later than any key


class State(NamedTuple):
    """The running sums of each query.

    best: the column of the largest score. seen: the number of visible keys.
    """

    m: Any
    l: Any
    e: Any
    O: Any
    best: Any
    seen: Any


class ForwardResults(NamedTuple):
    """The arrays to write; None is not computed.

    low: what rounding takes from out. parts, columns: the states of key splits, one query block after another.
    """

    out: Any
    low: Any
    lse: Any
    entropy: Any
    max: Any
    argmax: Any
    visible: Any
    parts: Any
    columns: Any


class ForwardOptions(NamedTuple):
    """The results to compute, and the number of key splits."""

    ENTROPY: Any
    BEST: Any
    COUNT: Any
    SPLITS: Any


@triton.jit
def nothing(F: tl.constexpr):
    m = tl.full([F.M], -INFINITY, F.REAL)
    zero = tl.zeros([F.M], F.REAL)
    return State(
        m, zero, zero, tl.zeros([F.M, F.V], F.REAL), tl.full([F.M], NO_KEY, tl.int64), tl.zeros([F.M], tl.int64)
    )


@triton.jit
def finite(m):
    """Return m, or 0 for the maximum of nothing, so that exp(−∞ − m) is 0."""
    return tl.where(m == -INFINITY, 0.0, m)


@triton.jit
def sink_weight(sink, lse):
    """Return exp(sink − lse); 1 for an infinite sink alone, where ∞ − ∞ would be NaN."""
    return tl.where(lse == INFINITY, 1.0, exp_ftz(sink - finite(lse)))


@triton.jit
def moved(e, l, factor, shift):
    """Rescale e to another maximum; `factor` is exp(shift), 0 where there was nothing."""
    return tl.where(factor == 0, 0.0, factor * (e + tl.where(factor == 0, 0.0, shift) * l))


class ForwardContext(NamedTuple):
    """The state of a loop over tiles; k, v: the addresses of the head's matrices."""

    call: Any
    arrays: Any
    rules: Any
    rows: Any
    q: Any
    k: Any
    v: Any


@triton.jit
def add(a, context, tile, MASKED: tl.constexpr, W: tl.constexpr, F: tl.constexpr):
    """Return the state with one more tile of keys."""
    call, arrays, rows = context.call, context.arrays, context.rows
    keys = keys_of(call, tile, F.N)
    k = load_matrix(context.k, arrays.k, keys.c, keys.inside, call.d, F.D, None)
    v = load_matrix(context.v, arrays.v, keys.c, keys.inside, call.d_v, F.V, None)
    T = raw(call, context.q, k, F)
    S, visible, _ = scores(call, arrays, context.rules, T, T, rows, keys, MASKED, F)
    highest = tl.max(S, 1)
    m = tl.maximum(a.m, highest)
    shift, x = a.m - finite(m), S - finite(m)[:, None]
    old, w = exp_ftz(shift), exp_ftz(x)
    l, e, best, seen = a.l * old + tl.sum(w, 1), a.e, a.best, a.seen
    if W.ENTROPY:
        e = moved(e, a.l, old, shift) + tl.sum(tl.where(w == 0, 0.0, w * x), 1)
    if W.BEST:
        column = tl.min(tl.where((S == highest[:, None]) & visible, keys.c[None, :], NO_KEY), 1)
        best = tl.where(highest > a.m, column, best)
    if W.COUNT:
        seen += tl.sum(visible.to(tl.int64), 1)
    O = a.O * old[:, None] + product(dropped(call, w, rows, keys, F), v, visible, MASKED or F.HIDES, F)
    return State(m, l, e, O, best, seen)


@triton.jit
def forward(arrays, rules, call, results, F: tl.constexpr, W: tl.constexpr):
    rows = rows_of_program(call, F.M)
    kv = rows.head // call.group
    q = load_matrix(head_of(arrays.q, call, rows.batch, rows.head), arrays.q, rows.r, rows.inside, call.d, F.D, None)
    k, v = head_of(arrays.k, call, rows.batch, kv), head_of(arrays.v, call, rows.batch, kv)
    part = tl.program_id(1)
    context = ForwardContext(call, arrays, rules, rows, q, k, v)
    a = over_keys(add, nothing(F), context, call, rules, rows, part, W.SPLITS, W, F)
    if W.SPLITS == 1:
        finish(a, arrays, call, results, rows, F, W)
    else:
        keep_part(a, results, tl.program_id(0) * W.SPLITS + part, F)


@triton.jit
def finish(a, arrays, call, results, rows, F: tl.constexpr, W: tl.constexpr):
    """Write the results of a state, with the sink."""
    m = a.m
    if arrays.sink is not None:
        sink = load_head(arrays.sink, rows, F.REAL)
        m = tl.maximum(a.m, sink)
    old = exp_ftz(a.m - finite(m))
    l = a.l * old
    if arrays.sink is not None:
        share = exp_ftz(sink - finite(m))
        l += tl.where(a.m == -INFINITY, tl.where(m == INFINITY, 1.0, share), share)  # ∞ − ∞ is NaN
    positive = tl.where(l == 0, 1.0, l)
    log_sum = tl.where(l == 0, -INFINITY, m + tl.log(positive))
    O = a.O * (old / positive)[:, None]
    if F.DROPOUT:
        O *= real(call.keep, F.REAL)
    store_rows(results.lse, call, rows, log_sum)
    out = head_of(results.out, call, rows.batch, rows.head)
    store_matrix(out, results.out, rows.r, rows.inside, call.d_v, O, F.V)
    if results.low is not None:
        low = O - O.to(results.out.ptr.dtype.element_ty).to(F.REAL)
        low = tl.where(low - low == 0, low, 0.0)
        to = head_of(results.low, call, rows.batch, rows.head)
        store_matrix(to, results.low, rows.r, rows.inside, call.d_v, low, F.V)
    if W.ENTROPY:
        shifted = moved(a.e, a.l, old, a.m - finite(m))
        H = (a.l * old * tl.log(positive) - shifted) / positive
        store_rows(results.entropy, call, rows, H)
    if W.BEST:
        store_rows(results.max, call, rows, old / positive)
        store_rows(results.argmax, call, rows, tl.where(a.best == NO_KEY, -1, a.best))
    if W.COUNT:
        store_rows(results.visible, call, rows, a.seen)


# Split keys


@triton.jit
def keep_part(a, results, part, F: tl.constexpr):
    i, c = tl.arange(0, F.M), tl.arange(0, F.V)
    WIDTH: tl.constexpr = F.V + 3
    base = results.parts.ptr + part.to(tl.int64) * (F.M * WIDTH)
    tl.store(base + i[:, None] * WIDTH + c[None, :], a.O)
    tl.store(base + i * WIDTH + F.V, a.m)
    tl.store(base + i * WIDTH + F.V + 1, a.l)
    tl.store(base + i * WIDTH + F.V + 2, a.e)
    columns = results.columns.ptr + part.to(tl.int64) * (2 * F.M)
    tl.store(columns + i, a.best)
    tl.store(columns + F.M + i, a.seen)


@triton.jit
def merge(arrays, rules, call, results, F: tl.constexpr, W: tl.constexpr):
    """Combine the key splits of a query block in order."""
    rows = rows_of_program(call, F.M)
    i, c = tl.arange(0, F.M), tl.arange(0, F.V)
    WIDTH: tl.constexpr = F.V + 3
    a = nothing(F)
    for part in range(W.SPLITS):
        number = (tl.program_id(0) * W.SPLITS + part).to(tl.int64)
        base = results.parts.ptr + number * (F.M * WIDTH)
        m_part, l_part = tl.load(base + i * WIDTH + F.V), tl.load(base + i * WIDTH + F.V + 1)
        m = tl.maximum(a.m, m_part)
        old_shift, new_shift = a.m - finite(m), m_part - finite(m)
        old, new = exp_ftz(old_shift), exp_ftz(new_shift)
        e = moved(a.e, a.l, old, old_shift) + moved(tl.load(base + i * WIDTH + F.V + 2), l_part, new, new_shift)
        O = a.O * old[:, None] + tl.load(base + i[:, None] * WIDTH + c[None, :]) * new[:, None]
        columns = results.columns.ptr + number * (2 * F.M)
        best = tl.where(m_part > a.m, tl.load(columns + i), a.best)
        a = State(m, a.l * old + l_part * new, e, O, best, a.seen + tl.load(columns + F.M + i))
    finish(a, arrays, call, results, rows, F, W)
