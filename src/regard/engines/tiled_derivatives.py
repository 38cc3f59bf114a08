"""Backward and the tangent of forward in tiles. The scores of a tile are computed again, its weights come from lse."""

from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from regard.engines.tiled import Given, forward, in_order, rows_of, spread_blocks, threads_for, weight
from regard.engines.tiles import KEYS, ROWS, Chunk, Rows, Unit, masked, product, units
from regard.observing import Statistic
from regard.problem import Differential, Outputs, Problem, collapse
from regard.rules import Table, scatter, tangent
from regard.threads import spread_numpy

Array = np.ndarray[Any, np.dtype[Any]]


class Known(Given):
    """The rows of a block once forward has run: (kv heads, group, 1, ROWS, ·) each."""

    def __init__(self, rows: Rows, outputs: Outputs):
        super().__init__(rows, need(outputs.lse))
        self.outputs = outputs

    @cached_property
    def out(self) -> Array:
        return self.rows.take(self.rows.unit.per_query_head(need(self.outputs.out), 2))

    @cached_property
    def entropy(self) -> Array:
        return self.column(need(self.outputs.entropy))

    @cached_property
    def p_sink(self) -> Any:
        """The weight of the sink."""
        sink = self.rows.unit.sink
        return 0 if sink is None else weight(sink[..., None, None], self.lse)

    @cached_property
    def total(self) -> Array:
        """Σ_j P: what the sink leaves, 0 where the row sees nothing."""
        return np.where(self.lse == -np.inf, 0, 1 - self.p_sink)

    def log_weights(self, S: Array) -> Array:
        return np.where(masked(S), S.dtype.type(0), S - self.finite_lse)


class Cotangents:
    """The cotangents of a block: dS = P · (D (dO V) + c − dH (log P + 1)) with one c for each row."""

    def __init__(self, known: Known, ct: Outputs):
        rows, p = known.rows, known.rows.p
        shape = (*rows.heads, 1, ROWS)
        self.dO = np.zeros((*shape, p.d_v), p.compute)
        self.c: Array = np.zeros((*shape, 1), p.compute)
        self.dH: Array | None = None
        if ct.out is not None:
            self.dO = rows.take(rows.unit.per_query_head(ct.out, 2))
            self.c = self.c - (self.dO * known.out).sum(axis=-1, keepdims=True)
        if ct.lse is not None:
            self.c = self.c + known.column(ct.lse)
        if ct.entropy is not None:
            self.dH = known.column(ct.entropy)
            self.c = self.c + self.dH * (known.total - known.entropy)


class Gradients:
    """The gradients being summed, in the dtype of sums; of a unit's rows and keys in place."""

    def __init__(self, p: Problem):
        self.p, c = p, p.compute
        self.query = np.zeros(p.shape(p.n_q, p.d), c)
        self.key = np.zeros((*p.lead, p.kv_heads, p.n_k, p.d), c)
        self.value = np.zeros((*p.lead, p.kv_heads, p.n_k, p.d_v), c)
        self.bias = None if p.bias is None else np.zeros(p.bias.shape, c)
        self.sink = None if p.sink is None else np.zeros((p.kv_heads, p.group), c)
        self.tables = {table: np.zeros(table.shape, c) for table in p.tables}
        # Units that add to the same array have to do so in order.
        self.shared = p.bias is not None or p.sink is not None or bool(p.tables)

    def add_keys(self, total: Array, part: Array, chunk: Chunk) -> None:
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
    d_ds, d_tables = p.score_partials
    scale = p.compute.type(p.scale)

    def work(rows: Rows) -> None:
        unit = rows.unit
        known = Known(rows, outputs)
        g = Cotangents(known, ct)
        clean_rows = bool(np.isfinite(rows.q).all() and np.isfinite(g.dO).all())
        dq = np.zeros((*rows.heads, ROWS, p.d), p.compute)
        for chunk in rows.chunks():
            raw = chunk.raw()
            S, P = known.weights(chunk, raw if p.score is not None else raw.copy())
            clean = clean_rows and bool(unit.finite_k[chunk.tiles].all() and unit.finite_v[chunk.tiles].all())
            plain = clean and chunk.full and p.score is None and p.bias is None
            hidden = None if plain else masked(S)

            def visible(x: Array, hidden: Array | None = hidden) -> Array:
                return x if hidden is None else np.where(hidden, x.dtype.type(0), x)

            D = chunk.dropout()
            G: Array = np.matmul(g.dO, chunk.v.swapaxes(-1, -2))
            if D is not None:
                G *= D
            G += g.c
            if g.dH is not None:
                G -= g.dH * (known.log_weights(S) + 1)
            G *= P
            dS = visible(G)
            dT = dS if d_ds is None else visible(dS * chunk.evaluate(d_ds, raw))
            total.add_bias(dS, chunk)
            for leaf, slope in d_tables.items():
                scatter(leaf, visible(dS * chunk.evaluate(slope, raw)), chunk.at(), total.tables[leaf.payload])

            PD = P if D is None else P * D
            dark = None if clean or hidden is None else hidden
            turned = None if dark is None else dark.swapaxes(-1, -2)
            dq += in_order(product(dT, chunk.k, dark))
            total.add_keys(total.key, product(dT.swapaxes(-1, -2), rows.q, turned), chunk)
            total.add_keys(total.value, product(PD.swapaxes(-1, -2), g.dO, turned), chunk)
        rows_of(rows, total.query, 2)[...] = (dq * scale)[:, :, rows.inside]
        if total.sink is not None:
            total.sink[unit.kv, unit.group] += (known.p_sink * g.c)[:, :, 0, rows.inside, 0].sum(axis=-1)

    def each(together: list[Unit]) -> None:
        for unit in together:
            for rows in unit.blocks:
                work(rows)

    spread_numpy(each, by_key_head(p), 1 if total.shared else threads_for(p))
    return total.result()


def by_key_head(p: Problem) -> list[list[Unit]]:
    """The units of a call, those that share a key-value head together."""
    return [list(together) for _, together in groupby(units(p), lambda unit: (unit.b, unit.kv.start))]


def jvp(p: Problem, t: Differential) -> tuple[Outputs, Outputs]:
    """Outputs, and their tangents along tangents of the inputs.

    With Ṡ the tangent of a score and lṡe = Σ P Ṡ + p_sink · sink˙, the tangent of the output is
    Σ P D (Ṡ V + V̇) − lṡe · O, and that of the entropy −Σ P Ṡ (log P + 1) + lṡe · (Σ P − H).
    """
    c = p.compute
    outputs, _ = forward(replace(p, observe=(Statistic("entropy"),)))
    d_out = p.new_output()
    d_lse = np.empty(p.shape(p.n_q), c)
    d_entropy = np.empty_like(d_lse)
    d_score = None
    if p.score_node is not None:
        d_score = tangent(p.score_node, {table: Table(x) for table, x in t.tables.items()})
    d_sink = None
    if t.sink is not None:
        d_sink = np.broadcast_to(t.sink.astype(c), (p.heads,)).reshape(p.kv_heads, p.group, 1, 1, 1)

    def work(rows: Rows) -> None:
        unit = rows.unit
        known = Known(rows, outputs)
        dq = None if t.query is None else rows.take(unit.per_query_head(t.query, 2)) * c.type(p.scale)
        dk, dv = (None if x is None else unit.per_kv_head(x) for x in (t.key, t.value))
        mean = np.zeros((*rows.heads, ROWS), c)
        bend, moved = np.zeros_like(mean), np.zeros((*mean.shape, p.d_v), c)
        for chunk in rows.chunks():
            raw = chunk.raw()
            S, P = known.weights(chunk, raw if p.score is not None else raw.copy())
            hidden = masked(S)
            dS = np.zeros(chunk.shape, c)
            if dq is not None:
                dS += np.matmul(dq, chunk.k.swapaxes(-1, -2))
            if dk is not None:
                dS += np.matmul(rows.q, chunk.take(dk).swapaxes(-1, -2))
            if d_score is not None:
                dS = np.array(np.broadcast_to(chunk.evaluate(d_score, raw, dS), chunk.shape))
            if t.bias is not None:
                dS += chunk.dense(t.bias)
            np.copyto(dS, 0, where=hidden)
            PS = P * dS
            mean += in_order(PS.sum(axis=-1))
            bend += in_order((PS * (known.log_weights(S) + 1)).sum(axis=-1))
            D = chunk.dropout()
            if D is not None:
                P, PS = P * D, PS * D
            clean = bool(unit.finite_v[chunk.tiles].all())
            moved += in_order(product(PS, chunk.v, None if clean else hidden))
            if dv is not None:
                moved += in_order(product(P, chunk.take(dv), hidden))

        lse = mean[:, :, None, :, None]
        if d_sink is not None:
            lse = lse + known.p_sink * d_sink[unit.kv, unit.group]
        out = moved[:, :, None] - lse * known.out
        entropy = lse * (known.total - known.entropy) - bend[:, :, None, :, None]
        inside = rows.inside
        rows_of(rows, d_out, 2)[...] = out[:, :, 0, inside].astype(p.dtype)
        rows_of(rows, d_lse, 1)[...] = lse[:, :, 0, inside, 0]
        rows_of(rows, d_entropy, 1)[...] = entropy[:, :, 0, inside, 0]

    spread_blocks(p, work)
    return outputs, Outputs(d_out, d_lse, d_entropy)


def need(x: Array | None) -> Array:
    assert x is not None
    return x
