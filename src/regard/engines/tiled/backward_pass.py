"""Backward in tiles, and its tangent.

With G = D (dO V), the gradient of a score is dS = P · c, where c = G + c_row − dH (log P + 1) and
c_row = −dO · O + dlse + dH (Σ P − H) is one number for each row. Along a direction, P˙ = P (S˙ − lse˙) and
dS˙ = P ((S˙ − lse˙) c + c˙).
"""

from itertools import groupby
from typing import Any

import numpy as np

from regard.core.problem import Differential, Outputs, Problem, collapse
from regard.engines.tiled.derivatives import AT_ONCE, Direction, Known, Moving, Pairs
from regard.engines.tiled.forward_pass import in_order, rows_of, threads_for
from regard.engines.tiled.tiles import KEYS, ROWS, Chunk, Rows, Unit, product, units
from regard.rules import scatter
from regard.runtime.threads import spread_numpy

Array = np.ndarray[Any, np.dtype[Any]]


class Cotangents:
    """The cotangents of a block, and of each row the number that they add to the gradients of its scores."""

    def __init__(self, known: Known, ct: Outputs):
        rows, p = known.rows, known.rows.p
        shape = (*rows.heads, 1, ROWS)
        self.dO = np.zeros((*shape, p.d_v), p.compute)
        self.c_row: Array = np.zeros((*shape, 1), p.compute)
        self.dH: Array | None = None
        if ct.out is not None:
            self.dO = rows.take(rows.unit.per_query_head(ct.out, 2))
            self.c_row = self.c_row - dot(self.dO, known.out)
        if ct.lse is not None:
            self.c_row = self.c_row + known.column(ct.lse)
        if ct.entropy is not None:
            self.dH = known.column(ct.entropy)
            self.c_row = self.c_row + self.dH * (known.total - known.entropy)

    def through(self, x: Pairs) -> Array:
        """c, linear in the cotangents."""
        c = x.dropped(np.matmul(self.dO, x.chunk.v.swapaxes(-1, -2)))
        c += self.c_row
        if self.dH is not None:
            c -= self.dH * x.surprise
        return c


class Gradients:
    """The gradients being summed, in the dtype of sums; of a unit's rows and keys in place."""

    def __init__(self, p: Problem):
        self.p, c = p, p.compute
        self.query = np.zeros(p.shape(p.n_q, p.d), c)
        self.key = np.zeros((*p.lead, p.kv_heads, p.n_k, p.d), c)
        self.value = np.zeros((*p.lead, p.kv_heads, p.n_k, p.d_v), c)
        self.bias = None if p.trained_bias is None else np.zeros(p.trained_bias.shape, c)
        self.sink = None if p.sink is None else np.zeros((p.kv_heads, p.group), c)
        self.tables = {table: np.zeros(table.shape, c) for table in p.rules.tables}
        # Units that add to the same array have to do so in order.
        self.shared = self.bias is not None or p.sink is not None or bool(p.rules.tables)

    def add(
        self,
        x: Pairs,
        hidden: Array | None,
        dT: Array,
        PD: Array,
        k: Array | None,
        q: Array | None,
        dO: Array,
        dq: Array,
    ) -> None:
        """dq += dT K, dk += dTᵀ Q, dv += (P D)ᵀ dO; a k or q of None adds nothing. hidden: None if all is finite."""
        turned = None if hidden is None else hidden.swapaxes(-1, -2)
        if k is not None:
            dq += in_order(product(dT, k, hidden))
        if q is not None:
            self._add_keys(self.key, product(dT.swapaxes(-1, -2), q, turned), x.chunk)
        self._add_keys(self.value, product(PD.swapaxes(-1, -2), dO, turned), x.chunk)

    @staticmethod
    def _add_keys(total: Array, part: Array, chunk: Chunk) -> None:
        """total (..., h_kv, n_k, d) += part (kv heads, group, T, KEYS, d), summed over the group."""
        part = part.sum(axis=1).reshape(part.shape[0], chunk.T * KEYS, part.shape[-1])
        unit = chunk.rows.unit
        total[unit.index][unit.kv, chunk.outside] += part[:, chunk.inside]

    def add_bias(self, dS: Array, chunk: Chunk) -> None:
        """dbias += dS, summed over the axes along which the bias broadcasts."""
        if self.bias is None:
            return
        unit, p = chunk.rows.unit, self.p
        full = self.bias.reshape((1,) * (len(p.lead) + 3 - self.bias.ndim) + self.bias.shape)
        target = full[tuple(i if size > 1 else 0 for i, size in zip(unit.index, full.shape, strict=False))]
        if target.shape[0] == p.heads:
            target = target.reshape(p.kv_heads, p.group, *target.shape[1:])[unit.kv, unit.group]
        else:
            target = target[None]
        outside = (chunk.rows.outside, chunk.outside)
        rows, keys = (s if size > 1 else slice(None) for s, size in zip(outside, target.shape[2:], strict=True))
        part = dS.swapaxes(2, 3).reshape(*chunk.rows.heads, ROWS, -1)[..., chunk.rows.inside, chunk.inside]
        spot = target[:, :, rows, keys]
        spot += collapse(part, spot.shape)

    def finish(self, rows: Rows, dq: Array, d_sink: Array) -> None:
        """The gradients of a block's queries, and what its rows add to that of the sink."""
        rows_of(rows, self.query, 2)[...] = (dq * self.p.compute.type(self.p.scale))[:, :, rows.inside]
        if self.sink is not None:
            self.sink[rows.unit.kv, rows.unit.group] += d_sink[:, :, 0, rows.inside, 0].sum(axis=-1)

    def result(self) -> Differential:
        p = self.p

        def fit(x: Array | None, like: Array | None) -> Any:
            return None if x is None or like is None else collapse(x, like.shape).astype(like.dtype, copy=False)

        return Differential(
            query=fit(self.query, p.query),
            key=fit(self.key, p.key),
            value=fit(self.value, p.value),
            bias=fit(self.bias, p.bias),
            sink=None if self.sink is None else fit(self.sink.reshape(-1), p.sink),
            tables={table: x.astype(table.dtype, copy=False) for table, x in self.tables.items()},
        )


def backward(p: Problem, outputs: Outputs, ct: Outputs) -> Differential:
    """Gradients of ⟨ct.out, out⟩ + ⟨ct.lse, lse⟩ + ⟨ct.entropy, entropy⟩, from the outputs of forward."""
    total = Gradients(p)
    d_ds, d_tables = p.rules.score_partials[0], p.rules.table_partials

    def work(rows: Rows) -> None:
        unit, known = rows.unit, Known(rows, outputs)
        g = Cotangents(known, ct)
        clean_rows = bool(np.isfinite(rows.q).all() and np.isfinite(g.dO).all())
        dq = np.zeros((*rows.heads, ROWS, p.d), p.compute)
        for chunk in rows.chunks():
            clean = clean_rows and bool(unit.finite_k[chunk.tiles].all() and unit.finite_v[chunk.tiles].all())
            x = Pairs(known, chunk, plain=clean and chunk.full and p.score is None and p.bias is None)
            dS = g.through(x)
            dS *= x.P
            x.visible(dS)
            total.add_bias(dS, chunk)
            for leaf, slope in d_tables.items():
                scatter(leaf, x.through(slope, dS), chunk.at(), total.tables[leaf.payload])
            dT, PD = x.through(d_ds, dS), x.dropped(x.P)
            total.add(x, None if clean else x.hidden, dT, PD, chunk.k, rows.q, g.dO, dq)
        total.finish(rows, dq, known.p_sink * g.c_row)

    in_turn(p, total, work)
    return total.result()


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    """The tangents of `backward` along tangents t of the inputs and d_ct of the cotangents.

    d_outputs: the tangents of the outputs along t, as `jvp` gives them.
    """
    total = Gradients(p)
    way = Direction(p, t)
    d_ds, d_tables = p.rules.score_partials[0], p.rules.table_partials
    d_ds_dot, d_tables_dot = way.of(d_ds), {leaf: way.of(slope) for leaf, slope in d_tables.items()}

    def work(rows: Rows) -> None:
        known, known_dot = Known(rows, outputs), Known(rows, d_outputs)
        moving = Moving(known, way)
        g, g_dot = Cotangents(known, ct), Cotangents(known, d_ct)
        p_sink = known.p_sink * (moving.sink - known_dot.lse)
        if ct.out is not None:
            g_dot.c_row = g_dot.c_row - dot(g.dO, known_dot.out)
        if g.dH is not None:
            g_dot.c_row = g_dot.c_row - g.dH * (p_sink + known_dot.entropy)
        dq = np.zeros((*rows.heads, ROWS, p.d), p.compute)
        for chunk in rows.chunks(AT_ONCE):
            x = Pairs(known, chunk)
            T_dot, S_dot = moving.scores(x)
            grown = S_dot - known_dot.lse  # P˙ / P
            c, c_dot = g.through(x), g_dot.through(x)
            if moving.v is not None:
                c_dot += x.dropped(np.matmul(g.dO, chunk.take(moving.v).swapaxes(-1, -2)))
            if g.dH is not None:
                c_dot -= g.dH * grown
            P_dot = grown
            P_dot *= x.P
            x.visible(P_dot)
            c_dot *= x.P
            c_dot += P_dot * c
            c *= x.P
            dS, dS_dot = x.visible(c), x.visible(c_dot)
            del S_dot
            total.add_bias(dS_dot, chunk)
            for leaf, slope in d_tables.items():
                part = x.through(slope, dS_dot) + x.through(d_tables_dot[leaf], dS, T_dot)
                scatter(leaf, part, chunk.at(), total.tables[leaf.payload])
            dT, dT_dot = x.through(d_ds, dS), x.through(d_ds, dS_dot)
            if d_ds_dot is not None:
                dT_dot = dT_dot + x.through(d_ds_dot, dS, T_dot)
            k_dot = None if moving.k is None else chunk.take(moving.k)
            total.add(x, x.hidden, dT_dot, x.dropped(P_dot), chunk.k, rows.q, g.dO, dq)
            total.add(x, x.hidden, dT, x.dropped(x.P), k_dot, moving.q, g_dot.dO, dq)
        total.finish(rows, dq, p_sink * g.c_row + known.p_sink * g_dot.c_row)

    in_turn(p, total, work)
    return total.result()


def dot(x: Array, y: Array) -> Array:
    """One number for each row."""
    return np.asarray((x * y).sum(axis=-1, keepdims=True))


def in_turn(p: Problem, total: Gradients, work: Any) -> None:
    """Work for every block; those that add to the same keys, or the same shared array, one after the other."""
    together = [list(one_head) for _, one_head in groupby(units(p), lambda unit: (unit.b, unit.kv.start))]

    def each(one_head: list[Unit]) -> None:
        for unit in one_head:
            for rows in unit.blocks:
                work(rows)

    spread_numpy(each, together, 1 if total.shared else threads_for(p))
