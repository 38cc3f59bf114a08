"""Scores and products of a tile, and loops over visible tiles.

T = scale · Q K are the raw scores, S those after rules, bias and mask (−∞ where a pair is hidden).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import dropout_mask, load_dense, of_keys, of_queries, rows_of, tile_of
from regard.engines.triton.language.functions import real

INFINITY: tl.constexpr = tl.constexpr(float("inf"))
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Form(NamedTuple):
    """All that a kernel is compiled for.

    REAL: of sums. INT: of integers in rules. M, N, T: queries of a block, keys of a tile, tiles of a chunk (at most
    64); D, V: features, to the next power of two. SCORE, MASK, BOUNDS: functions of the rules. BIAS, DROPOUT: booleans.
    HIDES: true if something may be hidden in a tile that the mask allows whole. PRECISION: of float32 products.
    KEYS_FIRST: true if tiles of scores are (keys, queries), so that products with queries take them from registers.
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
    KEYS_FIRST: Any = False


class CallArrays(NamedTuple):
    """The arrays of a call."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sink: Any
    mask: Any
    score: Any


class MaskAndScore(NamedTuple):
    mask: Any
    score: Any


@triton.jit
def dot(x, y, F: tl.constexpr):
    """Return x @ y, summed in float32, or in float64 for float64."""
    if x.dtype == tl.float64:
        return tl.dot(x, y, out_dtype=tl.float64)
    elif INTERPRETED and x.dtype == tl.bfloat16:  # the interpreter multiplies the bits of bfloat16 as integers
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    else:
        return tl.dot(x, y, input_precision=F.PRECISION)


@triton.jit
def query_key_products(x, y, F: tl.constexpr):
    """Return the products of rows x of queries and rows y of keys, as a tile."""
    if F.KEYS_FIRST:
        return dot(y, tl.trans(x), F)
    else:
        return dot(x, tl.trans(y), F)


@triton.jit
def raw(call, q, k, F: tl.constexpr):
    """Return the raw scores T of q and k."""
    return query_key_products(q, k, F).to(F.REAL) * real(call.scale, F.REAL)


@triton.jit
def rule(function: tl.constexpr, call, read, dense, rows, keys, s, ds, F: tl.constexpr):
    """Return the results of a rule in a tile, which broadcast to it."""
    tile = tile_of(call, rows, keys, F.KEYS_FIRST)
    i, j = of_queries(rows.i, F.KEYS_FIRST), of_keys(keys.j, F.KEYS_FIRST)
    return function(rows.b, rows.h, i, j, s, ds, call.keys, read, dense, tile, F.REAL, F.INT)


@triton.jit
def scores(call, arrays, rules, T, T_dot, rows, keys, MASKED: tl.constexpr, F: tl.constexpr):
    """Return S, the visible pairs, and all results of the score rule.

    The first result is S without the bias. T_dot: the leaf ds. MASKED: apply the mask and the end of the keys.
    """
    S, found = T, (T,)
    if F.SCORE is not None:
        found = rule(F.SCORE, call, rules.score, arrays.score, rows, keys, T, T_dot, F)
        S = tl.broadcast_to(found[0].to(F.REAL), T.shape)
    if F.BIAS:
        S += load_dense(arrays.bias, tile_of(call, rows, keys, F.KEYS_FIRST)).to(F.REAL)
    visible = S != -INFINITY
    if MASKED:
        visible = visible & of_keys(keys.inside, F.KEYS_FIRST)
        if F.MASK is not None:
            visible = visible & rule(F.MASK, call, rules.mask, arrays.mask, rows, keys, T, T, F)[0]
        S = tl.where(visible, S, -INFINITY)
    return S, visible, found


@triton.jit
def product(w, x, visible, GUARDED: tl.constexpr, F: tl.constexpr):
    """Return w @ x, w in the dtype of x; hidden pairs have weight 0 and no influence.

    GUARDED: there may be such pairs. Entries of x that are not finite are then multiplied separately, since 0 · NaN
    must not count.
    """
    w = w.to(x.dtype)
    if GUARDED:
        y = x if F.REAL == tl.float64 else x.to(tl.float32)
        wild = y - y != 0
        if tl.max(tl.max(wild.to(tl.int32), 1), 0) > 0:
            total = dot(w, tl.where(wild, 0.0, y).to(x.dtype), F)
            total = (total + of_infinite(w.to(y.dtype), y, wild, visible)).to(total.dtype)
        else:
            total = dot(w, x, F)
    else:
        total = dot(w, x, F)
    return total.to(F.REAL)


@triton.jit
def of_infinite(w, x, wild, visible):
    """Return the part of w @ x from `wild` entries, which are not finite. Only visible pairs count.

    One row of x at a time: such entries are rare, and products of whole tiles would take registers in every loop.
    """
    K: tl.constexpr = x.shape[0]
    total = tl.full([w.shape[0], x.shape[1]], 0.0, x.dtype)
    for n in range(K):
        here = tl.arange(0, K) == n
        row = tl.sum(tl.where(here[:, None] & wild, x, 0.0), 0)[None, :]
        column = tl.sum(tl.where(here[None, :], w, 0.0), 1)[:, None]
        seen = tl.max((here[None, :] & visible).to(tl.int32), 1)[:, None] > 0
        total += tl.where(seen & (row - row != 0), column * row, 0.0)
    return total


@triton.jit
def dropped(call, x, rows, keys, F: tl.constexpr):
    """Return x where dropout keeps a pair, else 0; without the factor 1 / (1 − p)."""
    if F.DROPOUT:
        x = tl.where(dropout_mask(call, rows, keys, F.KEYS_FIRST), x, 0.0)
    return x


@triton.jit
def live_tiles(call, rules, rows, chunk, F: tl.constexpr):
    """Return flags of the tiles of a chunk that a query block sees, and of full ones.

    Full tiles hide nothing.
    """
    first = (chunk * F.T + tl.arange(0, F.T)).to(tl.int64) * F.N
    last = tl.minimum(first + F.N, call.n_k) - 1
    i_lo, i_hi = tl.min(rows.i, 0), tl.min(rows.i, 0) + tl.sum(rows.inside.to(tl.int64), 0) - 1
    j = tl.full([], call.j, tl.int64)
    never, always = bounded(call, rules, rows.b, rows.h, i_lo, i_hi, first + j, last + j, F)
    live = (first <= last) & ~never
    return live, live & always & (last - first == F.N - 1)


@triton.jit
def live_blocks(call, rules, first_rows, keys, chunk, F: tl.constexpr):
    """Return flags of the query blocks of a chunk that see a tile, and of full ones.

    Full ones hide nothing. first_rows: the rows of block 0.
    """
    first = (chunk * F.T + tl.arange(0, F.T)).to(tl.int64) * F.M
    last = tl.minimum(first + F.M, call.n_q) - 1
    i = tl.min(first_rows.i, 0)
    j_lo, count = tl.min(keys.j, 0), tl.sum(keys.inside.to(tl.int64), 0)
    never, always = bounded(call, rules, first_rows.b, first_rows.h, first + i, last + i, j_lo, j_lo + count - 1, F)
    live = (first <= last) & ~never
    return live, live & always & (count == F.N)


@triton.jit
def bounded(call, rules, b, h, i_lo, i_hi, j_lo, j_hi, F: tl.constexpr):
    REACH: tl.constexpr = max(F.M, F.N)
    return F.BOUNDS(b, h, i_lo, i_hi, j_lo, j_hi, call.keys, rules.mask, rules.score, REACH, F.REAL, F.INT)


@triton.jit
def run_of(full, live, F: tl.constexpr):
    """Return the range of full tiles, and bit masks of live ones before and after it.

    The range is empty if full tiles do not follow each other.
    """
    t = tl.arange(0, F.T)
    begin, end = tl.min(tl.where(full, t, F.T), 0), tl.max(tl.where(full, t + 1, 0), 0)
    count = tl.sum(full.to(tl.int32), 0)
    begin = tl.where(count == end - begin, begin, end)
    bits = tl.where(live, tl.full([], 1, tl.int64) << t.to(tl.int64), 0)
    before = tl.sum(tl.where(t < begin, bits, 0), 0)
    return begin, end, before, tl.sum(tl.where(t >= end, bits, 0), 0)


@triton.jit
def over_keys(
    add: tl.constexpr, a, context, call, rules, rows, part, PARTS: tl.constexpr, W: tl.constexpr, F: tl.constexpr
):
    """Fold `add(a, context, tile, MASKED, W, F)` over the live tiles of a query block.

    The order is always the same. part: the index of one of PARTS shares of the tiles, or of their chunks. W: further
    constants of `add`.
    """
    tiles = tl.cdiv(call.n_k, F.N)
    if F.BOUNDS is None:
        share = tl.cdiv(tiles, PARTS)
        first, last = part * share, tl.minimum((part + 1) * share, tiles)
        whole = tl.minimum(last, call.n_k // F.N) if F.MASK is None else first
        for tile in range(first, whole):
            a = add(a, context, tile, False, W, F)
        for tile in range(tl.maximum(first, whole), last):
            a = add(a, context, tile, True, W, F)
    else:
        chunks = tl.cdiv(tiles, F.T)
        share = tl.cdiv(chunks, PARTS)
        for chunk in range(part * share, tl.minimum((part + 1) * share, chunks)):
            live, full = live_tiles(call, rules, rows, chunk, F)
            a = over_chunk(add, a, context, chunk, live, full, W, F)
    return a


@triton.jit
def over_rows(add: tl.constexpr, a, context, call, rules, batch, head, keys, W: tl.constexpr, F: tl.constexpr):
    """Fold `add` over the live query blocks of a head, for one tile of keys."""
    blocks = tl.cdiv(call.n_q, F.M)
    if F.BOUNDS is None:
        whole = 0
        if F.MASK is None:
            whole = tl.where(tl.sum(keys.inside.to(tl.int32), 0) == F.N, blocks, 0)
        for block in range(whole):
            a = add(a, context, block, False, W, F)
        for block in range(whole, blocks):
            a = add(a, context, block, True, W, F)
    else:
        first = rows_of(call, batch, head, 0, F.M)
        for chunk in range(tl.cdiv(blocks, F.T)):
            live, full = live_blocks(call, rules, first, keys, chunk, F)
            a = over_chunk(add, a, context, chunk, live, full, W, F)
    return a


@triton.jit
def over_chunk(add: tl.constexpr, a, context, chunk, live, full, W: tl.constexpr, F: tl.constexpr):
    """Fold `add` over a chunk in order: no sum depends on which tiles are full.

    Tiles before the range of full ones come first, then that range, which reads no mask, then those after it.
    """
    begin, end, before, after = run_of(full, live, F)
    for side in range(2):
        others = tl.where(side == 0, before, after)
        if others != 0:
            for t in range(F.T):
                if (others >> t) & 1 != 0:
                    a = add(a, context, chunk * F.T + t, True, W, F)
        for t in range(begin, tl.where(side == 0, end, begin)):
            a = add(a, context, chunk * F.T + t, False, W, F)
    return a
