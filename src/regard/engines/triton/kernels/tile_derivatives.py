"""Tangents and gradients of the scores of a tile.

A dot after a name is a tangent; a name that begins with d is a gradient.

G = D (dO V)        c = G + c_row − dH (log P + 1)        dS = P c        dT = dS ∂S/∂T
P˙ = P (S˙ − lse˙)  dS˙ = P (c˙ + (S˙ − lse˙) c)          dT˙ = dS˙ ∂S/∂T + dS (∂S/∂T)˙
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import (
    dropout_mask,
    head_of,
    load_dense,
    load_matrix,
    load_rows,
    of_queries,
    tile_of,
)
from regard.engines.triton.kernels.forward import finite
from regard.engines.triton.kernels.tiles import query_key_products, scores
from regard.engines.triton.language.functions import exp_ftz, real


class RowCotangents(NamedTuple):
    """The lse, and the cotangents dO, dH and c_row of each query; None is 0.

    rest: log Σ exp(S − lse), which lse lacks by rounding where scores are large.
    """

    lse: Any
    dO: Any
    dH: Any
    c_row: Any
    rest: Any = None


class DirectionArguments(NamedTuple):
    """Tangents of the inputs, lse, c_row and the cotangents; None does not vary."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sink: Any
    lse: Any
    dO: Any
    dH: Any
    c_row: Any


class QueryOperands(NamedTuple):
    """The matrices and numbers of a query block, with their tangents."""

    q: Any
    dO: Any
    lse: Any
    rest: Any
    dH: Any
    c_row: Any
    q_dot: Any
    dO_dot: Any
    lse_dot: Any
    dH_dot: Any
    c_row_dot: Any


class KeyOperands(NamedTuple):
    """The K and V of a tile, with their tangents."""

    k: Any
    v: Any
    k_dot: Any
    v_dot: Any


class QueryContext(NamedTuple):
    """The state of a loop over tiles of keys, for one query block x."""

    call: Any
    arrays: Any
    rules: Any
    direction: Any
    rows: Any
    x: Any


class TileScores(NamedTuple):
    """T and S, their tangents if ALONG a direction, and all results of the score rule."""

    T: Any
    T_dot: Any
    S: Any
    S_dot: Any
    visible: Any
    found: Any


class TileGradients(NamedTuple):
    """The gradients of the pairs of a tile; those with a dot if ALONG a direction.

    found: all results of the score rule. PD lacks the factor 1 / (1 − p), which its sums get at the end.
    """

    visible: Any
    found: Any
    PD: Any
    dS: Any
    dT: Any
    PD_dot: Any
    dS_dot: Any
    dT_dot: Any


@triton.jit
def matrix_or_none(x, call, batch, head, rows, inside, size, BLOCK: tl.constexpr):
    if x is None:
        return None
    else:
        return load_matrix(head_of(x, call, batch, head), x, rows, inside, size, BLOCK, None)


@triton.jit
def rows_or_none(x, call, rows, F: tl.constexpr):
    if x is None:
        return None
    else:
        return of_queries(load_rows(x, call, rows, F.REAL), F.KEYS_FIRST)


@triton.jit
def query_operands(arrays, call, g, t, rows, F: tl.constexpr):
    b, h, r, inside = rows.batch, rows.head, rows.r, rows.inside
    return QueryOperands(
        matrix_or_none(arrays.q, call, b, h, r, inside, call.d, F.D),
        matrix_or_none(g.dO, call, b, h, r, inside, call.d_v, F.V),
        rows_or_none(g.lse, call, rows, F),
        rows_or_none(g.rest, call, rows, F),
        rows_or_none(g.dH, call, rows, F),
        rows_or_none(g.c_row, call, rows, F),
        matrix_or_none(t.q, call, b, h, r, inside, call.d, F.D),
        matrix_or_none(t.dO, call, b, h, r, inside, call.d_v, F.V),
        rows_or_none(t.lse, call, rows, F),
        rows_or_none(t.dH, call, rows, F),
        rows_or_none(t.c_row, call, rows, F),
    )


@triton.jit
def key_operands(arrays, call, t, batch, kv, keys, F: tl.constexpr):
    c, inside = keys.c, keys.inside
    return KeyOperands(
        matrix_or_none(arrays.k, call, batch, kv, c, inside, call.d, F.D),
        matrix_or_none(arrays.v, call, batch, kv, c, inside, call.d_v, F.V),
        matrix_or_none(t.k, call, batch, kv, c, inside, call.d, F.D),
        matrix_or_none(t.v, call, batch, kv, c, inside, call.d_v, F.V),
    )


@triton.jit
def products(a, x, b, y, F: tl.constexpr):
    """Return a xᵀ + b yᵀ as a tile; a term with None is 0, and two of them return None.

    a, b: rows of queries. x, y: rows of keys.
    """
    if a is None or x is None:
        if b is None or y is None:
            return None
        else:
            return query_key_products(b, y, F).to(F.REAL)
    elif b is None or y is None:
        return query_key_products(a, x, F).to(F.REAL)
    else:
        return (query_key_products(a, x, F) + query_key_products(b, y, F)).to(F.REAL)


@triton.jit
def tangent_scores(
    call, arrays, rules, t, x, y, rows, keys, MASKED: tl.constexpr, ALONG: tl.constexpr, F: tl.constexpr
):
    """Return the scores of a query block x and a tile y, and their tangents.

    Along a direction the rule returns S, ∂S/∂T, S˙, (∂S/∂T)˙, and then further requested results.
    """
    scale = real(call.scale, F.REAL)
    T = products(x.q, y.k, None, None, F) * scale
    T_dot = T
    if ALONG:
        moved = products(x.q_dot, y.k, x.q, y.k_dot, F)
        T_dot = tl.zeros_like(T) if moved is None else moved * scale
    S, visible, found = scores(call, arrays, rules, T, T_dot, rows, keys, MASKED, F)
    visible = visible & of_queries(rows.inside, F.KEYS_FIRST)
    S_dot = T_dot
    if ALONG:
        if F.SCORE is not None:
            S_dot = tl.broadcast_to(found[2].to(F.REAL), T.shape)
        if t.bias is not None:
            S_dot += load_dense(t.bias, tile_of(call, rows, keys, F.KEYS_FIRST)).to(F.REAL)
        S_dot = tl.where(visible, S_dot, 0.0)
    return TileScores(T, T_dot, S, S_dot, visible, found)


@triton.jit
def through(found, n: tl.constexpr, x, visible, F: tl.constexpr):
    """Return x times the rule's result n, a derivative; x itself without a rule."""
    if F.SCORE is None:
        return x
    else:
        return tl.where(visible, x * found[n].to(F.REAL), 0.0)


@triton.jit
def tile_gradients(
    call, arrays, rules, t, x, y, rows, keys, MASKED: tl.constexpr, ALONG: tl.constexpr, F: tl.constexpr
):
    """Return the gradients of the pairs of a query block x and a tile y."""
    s = tangent_scores(call, arrays, rules, t, x, y, rows, keys, MASKED, ALONG, F)
    S, visible, found = s.S, s.visible, s.found
    if not MASKED and not F.HIDES and not ALONG and x.dH is None:
        visible = tl.full(S.shape, True, tl.int1)  # rows beyond the end are zeros
    logP = S - finite(x.lse)
    if x.rest is not None:
        logP -= x.rest
    logP = tl.where(visible, logP, 0.0)
    P = tl.where(visible, exp_ftz(logP), 0.0)
    c, PD = x.c_row, P
    G = products(x.dO, y.v, None, None, F)
    if F.DROPOUT:
        D = dropout_mask(call, rows, keys, F.KEYS_FIRST)
        PD = tl.where(D, P, 0.0)
        if G is not None:
            G = tl.where(D, G * real(call.keep, F.REAL), 0.0)
    if G is not None:
        c = G + c
    if x.dH is not None:
        c = c - x.dH * (logP + 1.0)
    dS = tl.where(visible, P * c, 0.0)
    dT = through(found, 1, dS, visible, F)
    PD_dot, dS_dot, dT_dot = PD, dS, dT
    if ALONG:
        grown = s.S_dot - x.lse_dot
        c_dot = x.c_row_dot
        G_dot = products(x.dO_dot, y.v, x.dO, y.v_dot, F)
        if G_dot is not None:
            if F.DROPOUT:
                G_dot = tl.where(D, G_dot * real(call.keep, F.REAL), 0.0)
            c_dot = c_dot + G_dot
        if x.dH_dot is not None:
            c_dot = c_dot - x.dH_dot * (logP + 1.0)
        if x.dH is not None:
            c_dot = c_dot - x.dH * grown
        PD_dot = tl.where(visible, PD * grown, 0.0)
        dS_dot = tl.where(visible, P * (c_dot + grown * c), 0.0)
        dT_dot = through(found, 1, dS_dot, visible, F)
        if F.SCORE is not None:
            dT_dot += through(found, 3, dS, visible, F)
    return TileGradients(visible, found, PD, dS, dT, PD_dot, dS_dot, dT_dot)
