"""The executable specification: attention, its derivatives and its statistics, O(n²), slow and obviously right.

It judges every engine and imports nothing but NumPy and the rules. Indices: b batch (leading dimensions, row-major),
h head, i query, j key, a feature of query and key, c feature of value. Arrays are float64, or longdouble where
float64 itself is judged. A dot after a name in a comment is a tangent; a name that begins with d is a gradient.

    T = scale · Q K                     raw scores
    S = score(T) + bias                 −∞ where the mask or the score hides the pair
    lse = log(Σ_j exp S + exp sink)
    P = exp(S − lse)
    O = (P · D) V                       D = keep / (1 − p), the dropout
    H = −Σ_j P log P                    the entropy
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from regard.core.problem import Differential, Outputs, Problem, collapse
from regard.core.statistics import bin_edges
from regard.rules import At, Mask, Node, Table, evaluate, reading, scatter, tangent

Array = np.ndarray[Any, np.dtype[Any]]
Real = type[np.float32] | type[np.float64] | type[np.longdouble]

GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: Any) -> Any:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(seed: int, b: ArrayLike, h: ArrayLike, i: ArrayLike, j: ArrayLike) -> Array:
    """32 random bits for each (b, h, i, j): SplitMix64 makes the two keys of a row, 32-bit arithmetic counts along it.

    The mixer has the multipliers and shifts of lowbias32 (Wellons 2018); the row's second key enters halfway.
    """
    key = mix64(np.full(1, seed, np.uint64) + np.uint64(GOLDEN))
    for index in (b, h, i):
        key = mix64((key ^ np.asarray(index).astype(np.uint64)) + np.uint64(GOLDEN))
    first, second = key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)
    j = np.atleast_1d(j)
    x = (j.astype(np.uint32) ^ (j >> 32).astype(np.uint32) * np.uint32(GOLDEN & 0xFFFFFFFF)) + first
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D) + second
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return np.asarray(x ^ (x >> np.uint32(16)))


def dropout_mask(p: float, seed: int, b: ArrayLike, h: ArrayLike, i: ArrayLike, j: ArrayLike) -> Array:
    """Return True for each pair that dropout keeps: its bits reach the integer threshold ⌊p · 2³²⌋."""
    return random_bits(seed, b, h, i, j) >= np.uint32(int(p * 2**32))


def einsum(pattern: str, x: Array, y: Array) -> Array:
    """np.einsum, but a sum over nothing is 0: NumPy 2.4 can leave such a result unwritten."""
    terms, result = pattern.split("->")
    size = dict(zip(terms.replace(",", ""), x.shape + y.shape, strict=True))
    return np.einsum(pattern, x, y) if all(size.values()) else np.zeros([size[n] for n in result], x.dtype)


def seen(pattern: str, weight: Array, x: Array, visible: Array) -> Array:
    """`einsum(pattern, weight, x)` over the visible pairs alone, so that a masked pair never makes 0 · NaN.

    The pattern sums over the first index of x after its head, on the side of j or of i.
    """
    bad = ~np.isfinite(x)
    total = einsum(pattern, weight, np.where(bad, 0, x))
    axis = -1 if pattern.startswith("bhij,bhj") else -2
    for n in np.flatnonzero(bad.any(axis=(0, 1, 3))):
        w, see = np.take(weight, n, axis)[..., None], np.take(visible, n, axis)[..., None]
        row = x[:, :, n, None, :]
        total = total + np.where(see & ~np.isfinite(row), w * row, 0)
    return total


@dataclass(frozen=True)
class Terms:
    """Every quantity of the formulas above, (b, h, i, j) or (b, h, i)."""

    q: Array
    k: Array
    v: Array
    sink: Array
    at: At
    visible: Array
    T: Array
    S: Array
    lse: Array
    P: Array
    p_sink: Array
    D: Array
    O: Array
    H: Array
    logP: Array


def flat(p: Problem, x: Array, keep: int, real: Real) -> Array:
    """Leading dimensions broadcast and made one; key-value heads repeated for their query heads."""
    x = p.leading(x, keep).astype(real).reshape(p.batch, *x.shape[x.ndim - keep :])
    return np.repeat(x, p.group, axis=1) if keep == 3 and x.shape[1] != p.heads else x


def fold(p: Problem, x: Array, like: Array | None) -> Array | None:
    """The transpose of `flat`: a gradient (b, h, ...) summed into the shape of the input it belongs to."""
    if like is None:
        return None
    if like is p.key or like is p.value:
        x = x.reshape(x.shape[0], p.kv_heads, p.group, *x.shape[2:]).sum(axis=2)
    return collapse(x.reshape(*p.lead, *x.shape[1:]), like.shape)


def square(p: Problem, x: Array) -> Array:
    """A dense mask or bias as (b, h, i, j)."""
    return p.dense(x).reshape(p.batch, p.heads, p.n_q, p.n_k)


def place(p: Problem, real: Real, T: Array | None = None, **more: Any) -> At:
    """Where the rules are evaluated: absolute indices of every pair."""
    b0, h0, j0 = p.origin
    b, h, i, j = (np.arange(n, dtype=np.int64) for n in (p.batch, p.heads, p.n_q, p.n_k))
    return At(
        b=b[:, None, None, None] + b0,
        h=h[:, None, None] + h0,
        i=i[:, None] + p.offset[:, None, None, None],
        j=j + j0,
        s=T,
        dtype=real,
        keys=p.keys,
        dense=lambda x: square(p, x),
        **more,
    )


def evaluate_one(node: Node, at: At, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(evaluate([node], at)[0], shape)


def terms(p: Problem, real: Real = np.float64, short: Any = None) -> Terms:
    """Every quantity. As naive code computes them: real=float32, and S, P and O rounded to a `short` dtype."""

    def rounded(x: Array) -> Array:
        return x if short is None else x.astype(short).astype(real)

    q, k, v = (flat(p, x, 3, real) for x in (p.query, p.key, p.value))
    T = real(p.scale) * einsum("bhia,bhja->bhij", q, k)
    at = place(p, real, T)
    visible = np.ones(T.shape, bool)
    if p.mask_node is not None:  # in the arithmetic of the call, so that every engine hides the same pairs
        visible = evaluate_one(p.mask_node, place(p, p.compute.type), T.shape)
    S = T if p.score_node is None else evaluate_one(p.score_node, at, T.shape)
    S = S if p.bias is None else S + square(p, p.bias).astype(real)
    visible = visible & (S != -np.inf)
    S = rounded(np.where(visible, S, -np.inf))

    sink = np.broadcast_to(np.asarray(-np.inf if p.sink is None else p.sink, real), (p.heads,))[:, None]
    m = np.maximum(S.max(axis=-1, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)  # a query that sees nothing: every exp below is 0
    rest = np.log(np.exp(S - m[..., None]).sum(axis=-1) + np.exp(sink - m))  # beside a large m it would be lost
    lse = m + rest
    logP = np.where(visible, S - m[..., None] - rest[..., None], 0)
    P = rounded(np.where(visible, np.exp(logP), 0))
    p_sink = np.where(sink == -np.inf, 0, np.exp(sink - m - rest))
    D = np.ones(T.shape, real)
    if p.dropout:
        D = np.broadcast_to(dropout_mask(p.dropout, p.seed, at.b, at.h, at.i, at.j), T.shape) / (1 - real(p.dropout))
    O = rounded(seen("bhij,bhjc->bhic", P * D, v, visible))
    H = -(P * logP).sum(axis=-1)
    return Terms(q, k, v, sink, at, visible, T, S, lse, P, p_sink, D, O, H, logP)


def outputs(p: Problem, out: Array, lse: Array, entropy: Array) -> Outputs:
    return Outputs(*(x.reshape(p.shape(*x.shape[2:])) for x in (out, lse, entropy)))


def forward(p: Problem, real: Real = np.float64, short: Any = None) -> Outputs:
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
    return outputs(p, f.O, f.lse, f.H)


def weights(p: Problem, real: Real = np.float64) -> Array:
    """P (..., h, n_q, n_k), before dropout."""
    with np.errstate(all="ignore"):
        return terms(p, real).P.reshape(p.shape(p.n_q, p.n_k))


def statistics(p: Problem, real: Real = np.float64) -> dict[str, Array]:
    """The statistics that have no parameters; `order` lists every key of a query, heaviest first."""
    with np.errstate(all="ignore"):
        f = terms(p, real)
        visible = f.visible.sum(axis=-1)
        normalized = np.where(visible > 1, f.H / np.log(np.maximum(visible, 2).astype(real)), 0)
    order = np.lexsort((np.broadcast_to(np.arange(p.n_k), f.P.shape), -f.P, ~f.visible), axis=-1)
    first = order[..., 0] if p.n_k else np.zeros(f.lse.shape, np.int64)
    received = f.P.sum(axis=-2)
    on_diagonals = [f.P.trace(p.n_k - 1 - n, axis1=-2, axis2=-1) for n in range(p.diagonals)]
    found = {
        "lse": f.lse,
        "entropy": f.H,
        "visible": visible,
        "normalized_entropy": normalized,
        "max": f.P.max(axis=-1, initial=0),
        "argmax": np.where(visible > 0, first, -1),
        "received": received,
        "profile": np.stack(on_diagonals, axis=-1) if on_diagonals else received[..., :0],
        "order": np.where(np.take_along_axis(f.visible, order, -1), order, -1),
    }
    made = {name: x.reshape(p.shape(*x.shape[2:])) for name, x in found.items()}
    return made | {"group_received": received.reshape(*p.lead, p.kv_heads, p.group, p.n_k).sum(axis=-2)}


def mass(p: Problem, P: Array, rule: Mask) -> Array:
    """Σ_j P over the pairs that a rule allows, (..., h, n_q)."""
    chosen = evaluate_one(rule.node, place(p, p.compute.type), (p.batch, p.heads, p.n_q, p.n_k)).reshape(P.shape)
    return np.asarray(np.where(chosen, P, 0).sum(axis=-1))


def pooled(P: Array, rows: int, cols: int, kind: str) -> Array:
    """P by cells of `rows` × `cols` (no more than there are): the mass of a query in it, on average, or the maximum."""
    edges, columns = bin_edges(rows, P.shape[-2]), bin_edges(cols, P.shape[-1])
    if kind == "max":
        return np.maximum.reduceat(np.maximum.reduceat(P, edges[:-1], axis=-2), columns[:-1], axis=-1)
    total = np.add.reduceat(np.add.reduceat(P, edges[:-1], axis=-2), columns[:-1], axis=-1)
    return np.asarray(total / np.diff(edges)[:, None].astype(P.dtype))


@dataclass(frozen=True)
class Adjoint:
    """The cotangents, and what backward makes of them on the way to the gradients."""

    dO: Array
    dlse: Array
    dH: Array
    G: Array  # the gradient of P: D · (dO V)
    c: Array  # dS = P · c
    c_row: Array  # the part of c that is one number for a query; the sink has nothing else
    dS: Array
    dT: Array


def through(f: Terms, node: Node | None, dS: Array) -> Array:
    """dS · node, where `node` is a derivative of the score rule (None: no rule, so 1)."""
    return dS if node is None else np.where(f.visible, dS * evaluate_one(node, f.at, dS.shape), 0)


def cotangents(p: Problem, ct: Outputs, real: Real) -> tuple[Array, Array, Array]:
    """dO (b, h, i, c), dlse and dH (b, h, i); zeros where there is none."""
    rows = (p.batch, p.heads, p.n_q)
    dO, dlse, dH = (
        np.zeros(rows + tail, real) if x is None else x.astype(real).reshape(rows + tail)
        for x, tail in zip(ct, ((p.d_v,), (), ()), strict=True)
    )
    return dO, dlse, dH


def adjoint(p: Problem, ct: Outputs, f: Terms) -> Adjoint:
    dO, dlse, dH = cotangents(p, ct, f.T.dtype.type)
    G = np.where(f.visible, f.D * einsum("bhic,bhjc->bhij", dO, f.v), 0)
    mean = (f.P * G).sum(axis=-1)
    m = f.P.sum(axis=-1)
    c_row = -mean + dlse + dH * (m - f.H)
    c = np.where(f.visible, G + c_row[..., None] - dH[..., None] * (f.logP + 1), 0)
    dS = f.P * c
    return Adjoint(dO, dlse, dH, G, c, c_row, dS, through(f, p.score_partials[0], dS))


def gather(p: Problem, f: Terms, parts: Mapping[Node, Array]) -> dict[Table, Array]:
    """For each table, the parts of its gradient summed where they were read."""
    total = {table: np.zeros(table.shape, f.T.dtype) for table in p.tables}
    for leaf, part in parts.items():
        scatter(leaf, part, f.at, total[leaf.payload])
    return total


def gradients(p: Problem, ct: Outputs, real: Real = np.float64, short: Any = None) -> Differential:
    """The gradients of ⟨dO, out⟩ + ⟨dlse, lse⟩ + ⟨dH, entropy⟩ with respect to every input."""
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
        g = adjoint(p, ct, f)
        return Differential(
            query=fold(p, p.scale * seen("bhij,bhja->bhia", g.dT, f.k, f.visible), p.query),
            key=fold(p, p.scale * seen("bhij,bhia->bhja", g.dT, f.q, f.visible), p.key),
            value=fold(p, seen("bhij,bhic->bhjc", f.P * f.D, g.dO, f.visible), p.value),
            bias=fold(p, g.dS, p.trained_bias),
            sink=sink_shape(p, (f.p_sink * g.c_row).sum(axis=(0, 2))),
            tables=gather(p, f, {leaf: through(f, node, g.dS) for leaf, node in p.table_partials.items()}),
        )


def sink_shape(p: Problem, x: Array) -> Array | None:
    return None if p.sink is None else collapse(x, p.sink.shape)


@dataclass(frozen=True)
class Dot:
    """The tangents of `Terms` along tangents of the inputs."""

    q: Array
    k: Array
    v: Array
    at: At
    tables: Mapping[Table, Table]
    sink: Array
    S: Array
    lse: Array
    P: Array
    p_sink: Array
    O: Array
    H: Array


def dot(p: Problem, t: Differential, f: Terms) -> Dot:
    real = f.T.dtype.type
    q, k, v = (
        np.zeros_like(full) if x is None else flat(p, x, 3, real)
        for x, full in ((t.query, f.q), (t.key, f.k), (t.value, f.v))
    )
    T = real(p.scale) * (einsum("bhia,bhja->bhij", q, f.k) + einsum("bhia,bhja->bhij", f.q, k))
    tables = {table: Table(x) for table, x in t.tables.items()}
    at = place(p, real, f.T, ds=T)
    S = T if p.score_node is None else evaluate_one(tangent(p.score_node, tables), at, T.shape)
    S = S if t.bias is None else S + square(p, t.bias).astype(real)
    S = np.where(f.visible, S, 0)
    sink = np.zeros(()) if t.sink is None else np.broadcast_to(t.sink.astype(real), (p.heads,))[:, None]
    lse = (f.P * S).sum(axis=-1) + f.p_sink * sink
    P = f.P * (S - lse[..., None])
    O = seen("bhij,bhjc->bhic", P * f.D, f.v, f.visible) + seen("bhij,bhjc->bhic", f.P * f.D, v, f.visible)
    H = -(P * (f.logP + 1)).sum(axis=-1)
    return Dot(q, k, v, at, tables, sink, S, lse, P, f.p_sink * (sink - lse), O, H)


def jvp(p: Problem, t: Differential, real: Real = np.float64, short: Any = None) -> tuple[Outputs, Outputs]:
    """Outputs, and their tangents along tangents of the inputs."""
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
        d = dot(p, t, f)
    return outputs(p, f.O, f.lse, f.H), outputs(p, d.O, d.lse, d.H)


def bent(p: Problem, f: Terms, x: Dot, y: Dot) -> Array:
    """The second derivative of the scores along two directions."""
    T = f.T.dtype.type(p.scale) * (einsum("bhia,bhja->bhij", x.q, y.k) + einsum("bhia,bhja->bhij", y.q, x.k))
    d_ds, d_tables = p.score_partials
    S = through(f, d_ds, T)
    if d_ds is not None:
        S = S + evaluate_one(tangent(d_ds, y.tables), y.at, T.shape) * x.at.ds
    for leaf, slope in d_tables.items():
        if leaf.payload in x.tables:
            moved = evaluate_one(reading(leaf, x.tables), f.at, T.shape)
            S = S + evaluate_one(tangent(slope, y.tables), y.at, T.shape) * moved
    return np.where(f.visible, S, 0)


def jvp_jvp(p: Problem, t: Differential, u: Differential, real: Real = np.float64, short: Any = None) -> Outputs:
    """The tangents of `jvp`'s tangents along t, which does not move itself, along u: symmetric in both."""
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
        x, y = dot(p, t, f), dot(p, u, f)
        S = bent(p, f, x, y)
        lse = (y.P * x.S + f.P * S).sum(axis=-1) + y.p_sink * x.sink
        P = y.P * (x.S - x.lse[..., None]) + f.P * (S - lse[..., None])
        parts = ((P, f.v), (x.P, y.v), (y.P, x.v))
        O = sum((seen("bhij,bhjc->bhic", w * f.D, v, f.visible) for w, v in parts), start=np.zeros_like(f.O))
        logP = np.where(f.visible, y.S - y.lse[..., None], 0)
        H = -(P * (f.logP + 1) + x.P * logP).sum(axis=-1)
    return outputs(p, O, lse, H)


def gradients_jvp(
    p: Problem, t: Differential, ct: Outputs, ct_dot: Outputs, real: Real = np.float64, short: Any = None
) -> Differential:
    """The tangents of `gradients` along tangents of the inputs and of the cotangents."""
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
        d = dot(p, t, f)
        g = adjoint(p, ct, f)
        dO, dlse, dH = cotangents(p, ct_dot, real)
        G = np.where(f.visible, f.D * (einsum("bhic,bhjc->bhij", dO, f.v) + einsum("bhic,bhjc->bhij", g.dO, d.v)), 0)
        mean = (d.P * g.G + f.P * G).sum(axis=-1)
        spread, spread_dot = f.P.sum(axis=-1) - f.H, d.P.sum(axis=-1) - d.H
        c_row = -mean + dlse + dH * spread + g.dH * spread_dot
        logP = np.where(f.visible, d.S - d.lse[..., None], 0)
        c = np.where(f.visible, G + c_row[..., None] - dH[..., None] * (f.logP + 1) - g.dH[..., None] * logP, 0)
        dS = d.P * g.c + f.P * c

        def second(node: Node | None) -> Array:
            """The tangent of dS · node: the node is a first derivative of the rule, its tangent a second one."""
            if node is None:
                return np.asarray(dS)
            bend = np.where(f.visible, g.dS * evaluate_one(tangent(node, d.tables), d.at, dS.shape), 0)
            return np.asarray(through(f, node, dS) + bend)

        dT = second(p.score_partials[0])
        q, k = "bhij,bhja->bhia", "bhij,bhia->bhja"
        return Differential(
            query=fold(p, p.scale * (seen(q, dT, f.k, f.visible) + seen(q, g.dT, d.k, f.visible)), p.query),
            key=fold(p, p.scale * (seen(k, dT, f.q, f.visible) + seen(k, g.dT, d.q, f.visible)), p.key),
            value=fold(p, seen(k, d.P * f.D, g.dO, f.visible) + seen(k, f.P * f.D, dO, f.visible), p.value),
            bias=fold(p, dS, p.trained_bias),
            sink=sink_shape(p, (d.p_sink * g.c_row + f.p_sink * c_row).sum(axis=(0, 2))),
            tables=gather(p, f, {leaf: second(node) for leaf, node in p.table_partials.items()}),
        )
