"""The executable specification: attention and its derivatives as formulas.

It judges every engine, takes O(n²) time and memory, and imports nothing but NumPy, the rules and the call as data.

    T = scale · Q K                     raw scores; with a metric M, scale · Q M K, where Q M has the dtype of Q
    S = score(T) + bias                 −∞ where the mask or the score hides the pair
    lse = log(Σ_j exp S + exp sink)
    P = exp(S − lse)
    O = (P · D) V                       D = keep / (1 − p), the dropout
    H = −Σ_j P log P                    the entropy

Read from the top: `terms` computes these lines. Then come outputs and statistics, gradients, tangents, second
derivatives, and last their parts.

Indices: b batch (leading dimensions, row-major), h head, i query, j key, a feature of query and key, c feature of
value. A name that begins with d is a gradient. In comments, a dot after a name is a tangent. Arrays are float64, or
longdouble to judge float64 itself.
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


# Attention


@dataclass(frozen=True)
class Terms:
    """All quantities of the formulas above, (b, h, i, j) or (b, h, i) each."""

    x: Array  # the query as the caller gave it
    M: Array | None
    q: Array  # the query, times the metric if any, rounded once for all engines
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
    short: Any  # the dtype of naive code in 16 bit, else None

    @property
    def surprise(self) -> Array:
        """The derivative of P log P in P; 0 where P is 0, since only its product with P counts."""
        return np.where(self.P == 0, 0, self.logP + 1)


def rounded(x: Array, short: Any) -> Array:
    """Round to the `short` dtype, unless it is None."""
    return x if short is None else x.astype(short).astype(x.dtype)


def terms(p: Problem, real: Real = np.float64, short: Any = None) -> Terms:
    """Compute all quantities of a call.

    Naive code in 16 bit is real=float32, with S, P, O and the tangent of Q M rounded to the `short` dtype.
    """
    q, k, v = (flatten(p, x, 3, real) for x in (p.query, p.key, p.value))
    x, M = (q, None) if p.factors is None else (flatten(p, p.factors[0], 3, real), p.factors[1].astype(real))
    T = real(p.scale) * einsum("bhia,bhja->bhij", q, k)
    at = indices_of(p, real, T)
    visible = np.ones(T.shape, bool)
    if p.mask_node is not None:  # in the dtype of the call, so that every engine hides the same pairs
        visible = evaluate_one(p.mask_node, indices_of(p, p.compute.type), T.shape)
    S = T if p.score_node is None else evaluate_one(p.score_node, at, T.shape)
    S = S if p.bias is None else S + dense(p, p.bias).astype(real)
    visible = visible & (S != -np.inf)
    S = rounded(np.where(visible, S, -np.inf), short)

    sink = np.broadcast_to(np.asarray(-np.inf if p.sink is None else p.sink, real), (p.heads,))[:, None]
    m = np.maximum(S.max(axis=-1, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)  # a query that sees nothing: every exp below is 0
    log_sum = np.log(np.exp(S - m[..., None]).sum(axis=-1) + np.exp(sink - m))
    lse = np.where(visible.any(axis=-1), m + log_sum, sink)
    logP = np.where(visible, S - m[..., None] - log_sum[..., None], 0)  # not S − lse: a large m absorbs log_sum
    P = rounded(np.where(visible, np.exp(logP), 0), short)
    p_sink = np.where(sink == -np.inf, 0, np.where(visible.any(axis=-1), np.exp(sink - m - log_sum), 1))
    D = np.ones(T.shape, real)
    if p.dropout:
        D = np.broadcast_to(dropout_mask(p.dropout, p.seed, at.b, at.h, at.i, at.j), T.shape) / (1 - real(p.dropout))
    O = rounded(visible_einsum("bhij,bhjc->bhic", P * D, v, visible), short)
    H = -(P * logP).sum(axis=-1)
    return Terms(x, M, q, k, v, sink, at, visible, T, S, lse, P, p_sink, D, O, H, logP, short)


def forward(p: Problem, real: Real = np.float64, short: Any = None) -> Outputs:
    """Return out (..., h, n_q, d_v), lse and entropy (..., h, n_q)."""
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
    return outputs(p, f.O, f.lse, f.H)


def weights(p: Problem, real: Real = np.float64) -> Array:
    """Return P (..., h, n_q, n_k), before dropout."""
    with np.errstate(all="ignore"):
        return terms(p, real).P.reshape(p.shape(p.n_q, p.n_k))


def outputs(p: Problem, out: Array, lse: Array, entropy: Array) -> Outputs:
    """Restore the leading dimensions of outputs (b, h, i, ...)."""
    return Outputs(*(x.reshape(p.shape(*x.shape[2:])) for x in (out, lse, entropy)))


# Statistics


def statistics(p: Problem, real: Real = np.float64) -> dict[str, Array]:
    """Return the statistics that have no parameters, by name.

    `order` lists the keys of each query by falling score, where NaN counts as ∞, −1 for hidden ones.
    """
    with np.errstate(all="ignore"):
        f = terms(p, real)
        visible = f.visible.sum(axis=-1)
        normalized = np.where(visible > 1, f.H / np.log(np.maximum(visible, 2).astype(real)), 0)
    falling = np.where(np.isnan(f.S), -np.inf, -f.S)
    order = np.lexsort((np.broadcast_to(np.arange(p.n_k), f.P.shape), falling, ~f.visible), axis=-1)
    first = order[..., 0] if p.n_k else np.zeros(f.lse.shape, np.int64)
    received = f.P.sum(axis=-2)
    on_diagonals = [f.P.trace(p.n_k - 1 - n, axis1=-2, axis2=-1) for n in range(p.extents.diagonals)]
    by_name = {
        "lse": f.lse,
        "entropy": f.H,
        "visible": visible,
        "normalized_entropy": normalized,
        "effective_states": np.exp(f.H),
        "max": f.P.max(axis=-1, initial=0),
        "argmax": np.where(visible > 0, first, -1),
        "received": received,
        "profile": np.stack(on_diagonals, axis=-1) if on_diagonals else received[..., :0],
        "order": np.where(np.take_along_axis(f.visible, order, -1), order, -1),
    }
    shaped = {name: x.reshape(p.shape(*x.shape[2:])) for name, x in by_name.items()}
    return shaped | {"group_received": received.reshape(*p.lead, p.kv_heads, p.group, p.n_k).sum(axis=-2)}


def mass(p: Problem, P: Array, rule: Mask) -> Array:
    """Return Σ_j P over the pairs that a rule allows, (..., h, n_q)."""
    chosen = evaluate_one(rule.node, indices_of(p, p.compute.type), (p.batch, p.heads, p.n_q, p.n_k)).reshape(P.shape)
    return np.asarray(np.where(chosen, P, 0).sum(axis=-1))


def renyi(p: Problem, alpha: float, real: Real = np.float64) -> Array:
    """Return the Rényi entropy (..., h, n_q): log(Σ_j P^alpha / Σ_j P) / (1 − alpha).

    At 1 and ∞ it is the limit.
    """
    with np.errstate(all="ignore"):
        f = terms(p, real)
        total = f.P.sum(axis=-1)
        top = np.where(f.visible, f.logP, -np.inf).max(axis=-1, initial=-np.inf)
        if alpha == 1:
            entropy = f.H / total
        elif alpha == np.inf:
            entropy = -top
        else:
            powers = np.where(f.visible, np.exp(real(alpha) * (f.logP - top[..., None])), 0).sum(axis=-1)
            entropy = (real(alpha) * top + np.log(powers / total)) / (1 - real(alpha))
    return np.where(f.visible.any(axis=-1), entropy, 0).reshape(p.shape(p.n_q))


def pooled(P: Array, rows: int, cols: int, reduce: str) -> Array:
    """Pool P into a map of `rows` × `cols` bins, but no more than queries and keys.

    "mass" is the mean over queries of the sum over keys, "max" the largest weight.
    """
    edges, columns = (bin_edges(*x).astype(np.intp) for x in ((rows, P.shape[-2]), (cols, P.shape[-1])))
    if reduce == "max":
        return np.maximum.reduceat(np.maximum.reduceat(P, edges[:-1], axis=-2), columns[:-1], axis=-1)
    total = np.add.reduceat(np.add.reduceat(P, edges[:-1], axis=-2), columns[:-1], axis=-1)
    return np.asarray(total / np.diff(edges)[:, None].astype(P.dtype))


# Gradients


def gradients(p: Problem, ct: Outputs, real: Real = np.float64, short: Any = None) -> Differential:
    """Return the gradients of ⟨dO, out⟩ + ⟨dlse, lse⟩ + ⟨dH, entropy⟩ in every input."""
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
        g = adjoint(p, ct, f)
        dq = p.scale * visible_einsum("bhij,bhja->bhia", g.dT, f.k, f.visible)
        return Differential(
            query=unflatten(p, unprojected(dq, f.M), p.query),
            key=unflatten(p, p.scale * visible_einsum("bhij,bhia->bhja", g.dT, f.q, f.visible), p.key),
            value=unflatten(p, visible_einsum("bhij,bhic->bhjc", f.P * f.D, g.dO, f.visible), p.value),
            bias=unflatten(p, g.dS, p.trained_bias),
            sink=sink_gradient(p, (f.p_sink * g.c_row).sum(axis=(0, 2))),
            tables=table_gradients(
                p, f, {leaf: through(f, node, g.dS) for leaf, node in p.rules.table_partials.items()}
            ),
            metric=None if f.M is None else metric_gradient(p, f, dq),
        )


@dataclass(frozen=True)
class Adjoint:
    """Cotangents and intermediate gradients of backward."""

    dO: Array
    dlse: Array
    dH: Array
    G: Array  # the gradient of P: D · (dO V)
    c: Array  # dS = P · c
    c_row: Array  # the part of c that is one number for each query; the sink has no other
    dS: Array
    dT: Array


def adjoint(p: Problem, ct: Outputs, f: Terms) -> Adjoint:
    """Compute the gradients of the intermediate quantities."""
    dO, dlse, dH = cotangents(p, ct, f.T.dtype.type)
    G = np.where(f.visible, f.D * einsum("bhic,bhjc->bhij", dO, f.v), 0)
    mean = (f.P * G).sum(axis=-1)
    m = f.P.sum(axis=-1)
    c_row = -mean + dlse + dH * (m - f.H)
    c = np.where(f.visible, G + c_row[..., None] - dH[..., None] * f.surprise, 0)
    dS = f.P * c
    return Adjoint(dO, dlse, dH, G, c, c_row, dS, through(f, p.rules.score_partials[0], dS))


def cotangents(p: Problem, ct: Outputs, real: Real) -> tuple[Array, Array, Array]:
    """Return dO (b, h, i, c), dlse and dH (b, h, i), zeros for absent ones."""
    rows = (p.batch, p.heads, p.n_q)
    dO, dlse, dH = (
        np.zeros(rows + tail, real) if x is None else x.astype(real).reshape(rows + tail)
        for x, tail in zip(ct[:3], ((p.d_v,), (), ()), strict=True)
    )
    return dO, dlse, dH


def through(f: Terms, node: Node | None, dS: Array) -> Array:
    """Return dS · node, where node is a derivative of the score rule; None means 1."""
    return dS if node is None else np.where(f.visible, dS * evaluate_one(node, f.at, dS.shape), 0)


def table_gradients(p: Problem, f: Terms, parts: Mapping[Node, Array]) -> dict[Table, Array]:
    """Sum each table's gradient over its readings, at the indices read."""
    total = {table: np.zeros(table.shape, f.T.dtype) for table in p.rules.tables}
    for leaf, part in parts.items():
        scatter(leaf, part, f.at, total[leaf.payload])
    return total


def sink_gradient(p: Problem, x: Array) -> Array | None:
    """Sum x (h,) into the shape of the sink; None without one."""
    return None if p.sink is None else collapse(x, p.sink.shape)


# Tangents


def jvp(p: Problem, t: Differential, real: Real = np.float64, short: Any = None) -> tuple[Outputs, Outputs]:
    """Return the outputs, and their tangents along tangents t of the inputs."""
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
        d = term_tangents(p, t, f)
    return outputs(p, f.O, f.lse, f.H), outputs(p, d.O, d.lse, d.H)


@dataclass(frozen=True)
class TermTangents:
    """Tangents of `Terms` along tangents of the inputs."""

    x: Array
    M: Array
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


def term_tangents(p: Problem, t: Differential, f: Terms) -> TermTangents:
    """Compute the tangents of all quantities along tangents t of the inputs."""
    real = f.T.dtype.type
    x, k, v = (
        np.zeros_like(full) if x is None else flatten(p, x, 3, real)
        for x, full in ((t.query, f.x), (t.key, f.k), (t.value, f.v))
    )
    M = np.zeros((p.d, p.d), real) if t.metric is None else t.metric.astype(real)
    q = x if f.M is None else rounded(projected(x, f.M) + projected(f.x, M), f.short)
    T = real(p.scale) * (einsum("bhia,bhja->bhij", q, f.k) + einsum("bhia,bhja->bhij", f.q, k))
    tables = {table: Table(x) for table, x in t.tables.items()}
    at = indices_of(p, real, f.T, ds=T)
    S = T if p.score_node is None else evaluate_one(tangent(p.score_node, tables), at, T.shape)
    S = S if t.bias is None else S + dense(p, t.bias).astype(real)
    S = np.where(f.visible, S, 0)
    sink = np.zeros(()) if t.sink is None else np.broadcast_to(t.sink.astype(real), (p.heads,))[:, None]
    lse = (f.P * S).sum(axis=-1) + f.p_sink * sink
    P = f.P * (S - lse[..., None])
    O = visible_einsum("bhij,bhjc->bhic", P * f.D, f.v, f.visible) + visible_einsum(
        "bhij,bhjc->bhic", f.P * f.D, v, f.visible
    )
    H = -(P * f.surprise).sum(axis=-1)
    return TermTangents(x, M, q, k, v, at, tables, sink, S, lse, P, f.p_sink * (sink - lse), O, H)


# Second derivatives


def jvp_jvp(p: Problem, t: Differential, u: Differential, real: Real = np.float64, short: Any = None) -> Outputs:
    """Return the tangents along u of `jvp`'s tangents along a constant t.

    Symmetric in t and u.
    """
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
        x, y = term_tangents(p, t, f), term_tangents(p, u, f)
        S = second_scores(p, f, x, y)
        lse = (y.P * x.S + f.P * S).sum(axis=-1) + y.p_sink * x.sink
        P = y.P * (x.S - x.lse[..., None]) + f.P * (S - lse[..., None])
        parts = ((P, f.v), (x.P, y.v), (y.P, x.v))
        O = sum((visible_einsum("bhij,bhjc->bhic", w * f.D, v, f.visible) for w, v in parts), start=np.zeros_like(f.O))
        logP = np.where(f.visible, y.S - y.lse[..., None], 0)
        H = -(P * f.surprise + x.P * logP).sum(axis=-1)
    return outputs(p, O, lse, H)


def second_scores(p: Problem, f: Terms, x: TermTangents, y: TermTangents) -> Array:
    """Return the second derivative of S along two directions."""
    T = einsum("bhia,bhja->bhij", x.q, y.k) + einsum("bhia,bhja->bhij", y.q, x.k)
    if f.M is not None:
        T = T + einsum("bhia,bhja->bhij", projected(x.x, y.M) + projected(y.x, x.M), f.k)
    T = f.T.dtype.type(p.scale) * T
    d_ds, d_tables = p.rules.score_partials
    S = through(f, d_ds, T)
    if d_ds is not None:
        S = S + evaluate_one(tangent(d_ds, y.tables), y.at, T.shape) * x.at.ds
    for leaf, d_leaf in d_tables.items():
        if leaf.payload in x.tables:
            leaf_dot = evaluate_one(reading(leaf, x.tables), f.at, T.shape)
            S = S + evaluate_one(tangent(d_leaf, y.tables), y.at, T.shape) * leaf_dot
    return np.where(f.visible, S, 0)


def gradients_jvp(
    p: Problem, t: Differential, ct: Outputs, ct_dot: Outputs, real: Real = np.float64, short: Any = None
) -> Differential:
    """Return the tangents of `gradients` along t and ct_dot.

    t: tangents of the inputs; ct_dot: of the cotangents.
    """
    with np.errstate(all="ignore"):
        f = terms(p, real, short)
        d = term_tangents(p, t, f)
        g = adjoint(p, ct, f)
        dO, dlse, dH = cotangents(p, ct_dot, real)
        G = np.where(f.visible, f.D * (einsum("bhic,bhjc->bhij", dO, f.v) + einsum("bhic,bhjc->bhij", g.dO, d.v)), 0)
        mean = (d.P * g.G + f.P * G).sum(axis=-1)
        m, m_dot = f.P.sum(axis=-1), d.P.sum(axis=-1)
        c_row = -mean + dlse + dH * (m - f.H) + g.dH * (m_dot - d.H)
        logP = np.where(f.visible, d.S - d.lse[..., None], 0)
        c = np.where(f.visible, G + c_row[..., None] - dH[..., None] * f.surprise - g.dH[..., None] * logP, 0)
        dS = d.P * g.c + f.P * c

        def second(node: Node | None) -> Array:
            """Return the tangent of dS · node, where node is a first derivative of the rule."""
            if node is None:
                return np.asarray(dS)
            node_dot = evaluate_one(tangent(node, d.tables), d.at, dS.shape)
            return np.asarray(through(f, node, dS) + np.where(f.visible, g.dS * node_dot, 0))

        dT = second(p.rules.score_partials[0])
        q, k = "bhij,bhja->bhia", "bhij,bhia->bhja"
        dq = p.scale * (visible_einsum(q, dT, f.k, f.visible) + visible_einsum(q, g.dT, d.k, f.visible))
        if f.M is not None:  # the tangents of G Mᵀ and of xᵀ G, for G the gradient of x M
            G = p.scale * visible_einsum(q, g.dT, f.k, f.visible)
            metric = metric_gradient(p, f, dq) + metric_gradient(p, f, G, d.x)
            dq = unprojected(dq, f.M) + unprojected(G, d.M)
        return Differential(
            query=unflatten(p, dq, p.query),
            key=unflatten(
                p, p.scale * (visible_einsum(k, dT, f.q, f.visible) + visible_einsum(k, g.dT, d.q, f.visible)), p.key
            ),
            value=unflatten(
                p, visible_einsum(k, d.P * f.D, g.dO, f.visible) + visible_einsum(k, f.P * f.D, dO, f.visible), p.value
            ),
            bias=unflatten(p, dS, p.trained_bias),
            sink=sink_gradient(p, (d.p_sink * g.c_row + f.p_sink * c_row).sum(axis=(0, 2))),
            tables=table_gradients(p, f, {leaf: second(node) for leaf, node in p.rules.table_partials.items()}),
            metric=None if f.M is None else metric,
        )


# The metric


def projected(x: Array, M: Array) -> Array:
    """Return x M for a metric (a, c) or (h, a, c); x: (b, h, i, a)."""
    return einsum("bhia,hac->bhic" if M.ndim == 3 else "bhia,ac->bhic", x, M)


def unprojected(g: Array, M: Array | None) -> Array:
    """Return g Mᵀ, the gradient of x from that of x M; g itself without a metric."""
    return g if M is None else projected(g, M.swapaxes(-1, -2))


def metric_gradient(p: Problem, f: Terms, g: Array, x: Array | None = None) -> Array:
    """Return Σ_i x g in the shape of the metric, over queries that see a key.

    x: by default the query.
    """
    x = np.where(f.visible.any(axis=-1, keepdims=True), f.x if x is None else x, 0)
    assert p.metric is not None
    return collapse(einsum("bhia,bhic->hac", x, g), p.metric.shape)


# Rules, and sums over visible pairs


def indices_of(p: Problem, real: Real, T: Array | None = None, **more: Any) -> At:
    """Return the absolute indices of every pair, for rules.

    T: raw scores.
    """
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
        dense=lambda x: dense(p, x),
        **more,
    )


def evaluate_one(node: Node, at: At, shape: tuple[int, ...]) -> Array:
    """Evaluate one expression, broadcast to a shape."""
    return np.broadcast_to(evaluate([node], at)[0], shape)


def einsum(pattern: str, x: Array, y: Array) -> Array:
    """Compute np.einsum, with 0 for a sum over nothing.

    NumPy 2.4 can leave such a result unwritten.
    """
    terms, result = pattern.split("->")
    size = dict(zip(terms.replace(",", ""), x.shape + y.shape, strict=True))
    return np.einsum(pattern, x, y) if all(size.values()) else np.zeros([size[n] for n in result], x.dtype)


def visible_einsum(pattern: str, weight: Array, x: Array, visible: Array) -> Array:
    """Compute `einsum(pattern, weight, x)` over visible pairs alone.

    The pattern sums over the third index of x, which is j or i. No masked pair gives 0 · NaN.
    """
    bad = ~np.isfinite(x)
    total = einsum(pattern, weight, np.where(bad, 0, x))
    axis = -1 if pattern.startswith("bhij,bhj") else -2
    for n in np.flatnonzero(bad.any(axis=(0, 1, 3))):
        w, see = np.take(weight, n, axis)[..., None], np.take(visible, n, axis)[..., None]
        row = x[:, :, n, None, :]
        total = total + np.where(see & ~np.isfinite(row), w * row, 0)
    return total


# Shapes


def flatten(p: Problem, x: Array, keep: int, real: Real) -> Array:
    """Merge the leading dimensions, and repeat key-value heads for their queries.

    keep: the number of trailing dimensions, 3 for (h, n, d).
    """
    x = p.leading(x, keep).astype(real).reshape(p.batch, *x.shape[x.ndim - keep :])
    return np.repeat(x, p.group, axis=1) if keep == 3 and x.shape[1] != p.heads else x


def unflatten(p: Problem, x: Array, like: Array | None) -> Array | None:
    """Sum a gradient (b, h, ...) into the shape of its input.

    The sum is the transpose of `flatten`. like: the input.
    """
    if like is None:
        return None
    if like is p.key or like is p.value:
        x = x.reshape(x.shape[0], p.kv_heads, p.group, *x.shape[2:]).sum(axis=2)
    return collapse(x.reshape(*p.lead, *x.shape[1:]), like.shape)


def dense(p: Problem, x: Array) -> Array:
    """Return a dense mask or bias as (b, h, i, j)."""
    return p.dense(x).reshape(p.batch, p.heads, p.n_q, p.n_k)


# Dropout


GOLDEN = 0x9E3779B97F4A7C15


def dropout_mask(p: float, seed: int, b: ArrayLike, h: ArrayLike, i: ArrayLike, j: ArrayLike) -> Array:
    """Return True for each pair that dropout keeps.

    A pair is kept if its random bits are at least the integer threshold ⌊p · 2³²⌋.
    """
    return random_bits(seed, b, h, i, j) >= np.uint32(int(p * 2**32))


def random_bits(seed: int, b: ArrayLike, h: ArrayLike, i: ArrayLike, j: ArrayLike) -> Array:
    """Return 32 random bits, uint32, for each (b, h, i, j).

    SplitMix64 makes two 32-bit keys of each row (b, h, i). Along the row, j is mixed with both in 32-bit arithmetic,
    with the multipliers and shifts of lowbias32 (Wellons 2018); the second key enters halfway.
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


def mix64(x: Any) -> Any:
    """Apply the output function of SplitMix64, a bijection of uint64.

    Steele, Lea and Flood 2014.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
