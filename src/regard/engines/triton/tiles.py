"""What kernels do with a tile: its scores, what of it is visible, products that nothing hidden reaches; which tiles there are.

T = scale · Q K are the raw scores, S those after rules, bias and mask (−∞ where a pair is hidden).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.language import real
from regard.engines.triton.place import kept, keys_of, load_cell, load_matrix

INFINITY: tl.constexpr = tl.constexpr(float("inf"))
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Form(NamedTuple):
    """What a kernel is compiled for.

    REAL: of sums. INT: of integers in rules. M, N, T: queries of a block, keys of a tile, tiles of a chunk (at most 64); D, V: features,
    to the next power of two. SCORE, MASK, BOUNDS: functions of the rules. BIAS, DROPOUT: whether there is one. HIDES: whether something may be
    hidden in a tile of which bounds say that the mask allows all of it. PRECISION: of float32 products.
    """

    REAL: Any
    INT: Any
    M: Any
    N: Any
    T: Any
    D: Any
    V: Any
    SCORE: Any
    MASK: Any
    BOUNDS: Any
    BIAS: Any
    DROPOUT: Any
    HIDES: Any
    PRECISION: Any


class Arrays(NamedTuple):
    """The arrays of a call."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sink: Any
    mask: Any
    score: Any


class Rules(NamedTuple):
    mask: Any
    score: Any


@triton.jit
def dot(x, y, F: tl.constexpr):
    """x @ y, summed in float32, or float64 for float64."""
    if x.dtype == tl.float64:
        return tl.dot(x, y, out_dtype=tl.float64)
    elif INTERPRETED and x.dtype == tl.bfloat16:  # which multiplies the bits of bfloat16 as integers
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    else:
        return tl.dot(x, y, input_precision=F.PRECISION)


@triton.jit
def raw(call, q, k, F: tl.constexpr):
    """T of the rows of q and the keys of k."""
    return dot(q, tl.trans(k), F).to(F.REAL) * real(call.scale, F.REAL)


@triton.jit
def rule(function: tl.constexpr, call, arrays, read, rows, keys, s, ds, dense, F: tl.constexpr):
    """What the function of a rule gives in a tile: a tuple of values that broadcast to it."""
    i, j = rows.i[:, None], keys.j[None, :]
    cell = (call, rows, keys)
    return function(rows.b, rows.h, i, j, s, ds, call.keys, read, dense, cell, F.REAL, F.INT)


@triton.jit
def scores(call, arrays, rules, T, rows, keys, MASKED: tl.constexpr, F: tl.constexpr):
    """S, and which pairs are visible; MASKED: the mask is to be looked at, and the edge of the keys."""
    S = T
    if F.SCORE is not None:
        S = rule(F.SCORE, call, arrays, rules.score, rows, keys, T, T, arrays.score, F)[0].to(F.REAL)
        S = tl.broadcast_to(S, T.shape)
    if F.BIAS:
        S += load_cell(arrays.bias, (call, rows, keys)).to(F.REAL)
    visible = S != -INFINITY
    if MASKED:
        visible = visible & keys.inside[None, :]
        if F.MASK is not None:
            visible = visible & rule(F.MASK, call, arrays, rules.mask, rows, keys, T, T, arrays.mask, F)[0]
        S = tl.where(visible, S, -INFINITY)
    return S, visible


@triton.jit
def product(w, x, visible, CAREFUL: tl.constexpr, F: tl.constexpr):
    """w @ x, w in the dtype of x; a pair that is not visible has weight 0 and no influence.

    CAREFUL: there may be such pairs, and then 0 · NaN must not count: what is not finite in x is taken apart.
    """
    w = w.to(x.dtype)
    if CAREFUL:
        y = x if F.REAL == tl.float64 else x.to(tl.float32)
        wild = y - y != 0
        if tl.max(tl.max(wild.to(tl.int32), 1), 0) > 0:
            total = dot(w, tl.where(wild, 0.0, y).to(x.dtype), F)
            total = (total + of_infinite(w.to(y.dtype), y, visible)).to(total.dtype)
        else:
            total = dot(w, x, F)
    else:
        total = dot(w, x, F)
    return total.to(F.REAL)


@triton.jit
def of_infinite(w, x, visible):
    """What the entries of x that are not finite add to w @ x where they are visible: ±∞ or NaN, or 0."""
    nan, infinite = (x != x).to(tl.float16), tl.where(x == INFINITY, 1.0, tl.where(x == -INFINITY, -1.0, 0.0)).to(tl.float16)
    sign = tl.where(visible, tl.where(w > 0, 1.0, tl.where(w < 0, -1.0, 0.0)), 0.0).to(tl.float16)
    nothing = tl.where(visible & (sign == 0), 1.0, 0.0).to(tl.float16)
    size = tl.abs(infinite)
    difference, both = tl.dot(sign, infinite), tl.dot(tl.abs(sign), size)
    lost = tl.dot(visible.to(tl.float16), nan) + tl.dot(nothing, size)
    made = tl.where(both + difference > 0, INFINITY, 0.0) - tl.where(both - difference > 0, INFINITY, 0.0)
    return tl.where(lost > 0, float("nan"), made)


@triton.jit
def dropped(call, x, rows, keys, F: tl.constexpr):
    """x where dropout keeps a pair, else 0; the factor 1 / (1 − p) is left to the end."""
    if F.DROPOUT:
        x = tl.where(kept(call, rows, keys), x, 0.0)
    return x


@triton.jit
def kinds(call, rules, rows, chunk, F: tl.constexpr):
    """Of the tiles of keys of a chunk, against a block of rows: which are live, and which of them hide nothing."""
    t = chunk * F.T + tl.arange(0, F.T)
    first = t.to(tl.int64) * F.N
    last = tl.minimum(first + F.N, call.n_k) - 1
    row = tl.where(rows.inside, rows.i, tl.min(rows.i, 0))
    return classified(call, rules, rows.b, rows.h, tl.min(row, 0), tl.max(row, 0), first, last, F)


@triton.jit
def classified(call, rules, b, h, i_lo, i_hi, first, last, F: tl.constexpr):
    """first, last: the first and the last column of each tile."""
    origin = tl.full([], call.j, tl.int64)
    SPAN: tl.constexpr = max(F.M, F.N)
    never, always = F.BOUNDS(
        b, h, i_lo, i_hi, first + origin, last + origin, call.keys, rules.mask, rules.score, SPAN, F.REAL, F.INT
    )
    there = first <= last
    live = there & ~never
    return live, live & always & (last - first == F.N - 1)


@triton.jit
def run_of(full, live, F: tl.constexpr):
    """The first and the end of the tiles that hide nothing, if they follow each other, and a word of the other live ones."""
    t = tl.arange(0, F.T)
    begin, end = tl.min(tl.where(full, t, F.T), 0), tl.max(tl.where(full, t + 1, 0), 0)
    count = tl.sum(full.to(tl.int32), 0)
    begin = tl.where(count == end - begin, begin, end)
    rest = live & ~((t >= begin) & (t < end))
    word = tl.sum(tl.where(rest, tl.full([], 1, tl.int64) << t.to(tl.int64), 0), 0)
    return begin, end, word


@triton.jit
def load_keys(call, arrays_x, ptr, keys, size, BLOCK: tl.constexpr):
    return load_matrix(ptr, arrays_x, keys.c, keys.inside, size, BLOCK, None)
