"""Scores or weights P[i, j] = exp(S[i, j] − lse[i]) of some rows and columns."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import KeyAddresses, RowAddresses, head_of, load_matrix, load_rows
from regard.engines.triton.kernels.forward import finite
from regard.engines.triton.kernels.tiles import raw, scores
from regard.engines.triton.language.functions import exp_ftz


class Part(NamedTuple):
    """The arguments of `part`; without lse it computes scores.

    rows: the address of the list of rows. first, step: the columns. out: the array to write.
    """

    lse: Any
    rows: Any
    first: Any
    step: Any
    n_rows: Any
    n_cols: Any
    out: Any


@triton.jit
def part(arrays, rules, call, p, F: tl.constexpr):
    blocks = tl.cdiv(p.n_rows, F.M)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = head // call.heads, head % call.heads
    n = tl.program_id(0) % blocks * F.M + tl.arange(0, F.M)
    m = tl.program_id(1) * F.N + tl.arange(0, F.N)
    r = tl.load(p.rows + n, mask=n < p.n_rows, other=0)
    offset = tl.full([], call.offset, tl.int64)
    if call.offsets is not None:
        offset = tl.load(call.offsets + batch)
    b, h = batch + tl.full([], call.b, tl.int64), head + tl.full([], call.h, tl.int64)
    rows = RowAddresses(batch, head, b, h, r, n < p.n_rows, r + offset)
    c = tl.full([], p.first, tl.int64) + m.to(tl.int64) * p.step
    keys = KeyAddresses(c, m < p.n_cols, c + tl.full([], call.j, tl.int64))
    q = load_matrix(head_of(arrays.q, call, batch, head), arrays.q, rows.r, rows.inside, call.d, F.D, None)
    k_ptr = head_of(arrays.k, call, batch, head // call.group)
    k = load_matrix(k_ptr, arrays.k, keys.c, keys.inside, call.d, F.D, None)
    T = raw(call, q, k, F)
    found, visible, _ = scores(call, arrays, rules, T, T, rows, keys, True, F)
    if p.lse is not None:
        lse = load_rows(p.lse, call, rows, F.REAL)
        found = tl.where(visible, exp_ftz(found - finite(lse)[:, None]), 0.0)
    out = head_of(p.out, call, batch, head)
    at = n.to(tl.int64)[:, None] * p.out.row + m[None, :] * p.out.column
    tl.store(out + at, found, mask=rows.inside[:, None] & keys.inside[None, :])
