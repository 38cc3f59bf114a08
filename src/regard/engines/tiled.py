"""Attention in tiles on NumPy alone: O(n) memory, every wish, wherever NumPy runs.

Forward keeps a running maximum, sum and output for each query and merges one span of keys after the other into them
(the online softmax of Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao et al. 2022). The derivatives compute
the scores of a tile again and take the weights from lse. Sums over rows (dk, dv, dbias, tables, `received`) run over
the blocks of a unit in order, on one thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from regard.engines.tiles import KEYS, ROWS, Band, Chunk, Rows, Unit, product, units
from regard.observing import Statistic, Top
from regard.problem import Differential, Outputs, Problem, collapse
from regard.rules import Table, scatter, tangent
from regard.threads import num_threads, spread

Array = np.ndarray[Any, np.dtype[Any]]

NAME = "tiled"
ABOUT = "tiles on NumPy, O(n) memory, any platform"


def supports(p: Problem) -> str | None:
    """None: every valid problem."""
    return None


def state() -> str | None:
    """None: NumPy is always there."""
    return None


def spread_blocks(p: Problem, work: Callable[[Rows], None]) -> None:
    """Do independent work for every block of queries."""

    def each(band: Band) -> None:
        for rows in band:
            work(rows)

    spread(each, [band for unit in units(p) for band in unit.bands], num_threads())


def forward(p: Problem) -> tuple[Outputs, dict[Statistic, Any]]:
    """Outputs (entropy only where it is observed), and every statistic that is observed."""
    out = p.new_output()
    lse = np.empty(p.shape(p.n_q), p.compute)
    names = {s.name for s in p.observe}
    entropy = np.empty_like(lse) if "entropy" in names else None
    peak = np.empty_like(lse) if "max" in names else None
    where = np.empty(lse.shape, np.int64) if "argmax" in names else None
    tops = {
        s: Top(np.zeros((*lse.shape, s.k), p.compute), np.full((*lse.shape, s.k), -1, np.int64))
        for s in p.observe
        if s.name == "top"
    }

    def work(rows: Rows) -> None:
        running = Running(rows, entropy is not None, where is not None, max((s.k for s in tops), default=0))
        for chunk in rows.chunks():
            running.add(chunk)
        result, log_sum, spread_of = running.finish()
        rows_of(rows, out, 2)[...] = result.astype(p.dtype)
        rows_of(rows, lse, 1)[...] = log_sum
        if entropy is not None:
            rows_of(rows, entropy, 1)[...] = spread_of
        if peak is not None:
            rows_of(rows, peak, 1)[...] = weight(running.m[:, :, rows.inside], log_sum)
        if where is not None:
            rows_of(rows, where, 1)[...] = running.where[:, :, rows.inside]
        for s, best in tops.items():
            value, index = running.best(s.k)
            rows_of(rows, best.values, 2)[...] = weight(value, log_sum[..., None])
            rows_of(rows, best.indices, 2)[...] = index

    spread_blocks(p, work)
    seen: dict[Statistic, Any] = dict(tops)
    for name, found in (("lse", lse), ("entropy", entropy), ("max", peak), ("argmax", where)):
        if found is not None:
            seen[Statistic(name)] = found
    if "received" in names:
        seen[Statistic("received")] = received(p, lse)
    return Outputs(out, lse, entropy), {s: seen[s] for s in p.observe}


class Running:
    """What forward knows of a block after some of its spans: (kv heads, group, ROWS) each, O with d_v features.

    m is the largest score so far, l = Σ exp(S − m), O = Σ exp(S − m) · keep · V, e = Σ exp(S − m) · (S − m). A span
    without a visible key changes no bit of them.
    """

    def __init__(self, rows: Rows, entropy: bool, argmax: bool, top: int):
        compute = rows.p.compute
        shape = (*rows.unit.h.shape[:2], ROWS)
        self.rows, self.entropy, self.argmax, self.top = rows, entropy, argmax, top
        self.m = np.full(shape, -np.inf, compute)
        self.l = np.zeros(shape, compute)
        self.O = np.zeros((*shape, rows.p.d_v), compute)  # noqa: E741
        self.e = np.zeros(shape, compute)
        self.where = np.full(shape, -1, np.int64)
        self.values = np.full((*shape, top), -np.inf, compute)
        self.indices = np.full((*shape, top), -1, np.int64)
        # exp(x) is 0 below this, and 0 · x must be 0 for what is masked.
        self.least = compute.type(np.log(np.finfo(compute).tiny) * 2)

    def add(self, chunk: Chunk) -> None:
        S = chunk.scores(chunk.raw())
        if self.argmax:
            self._add_argmax(S, chunk)
        m = S.max(axis=2).max(axis=-1)
        if self.top:
            self._add_top(S, chunk)
        clean = bool(chunk.rows.unit.finite_v[chunk.tiles].all())
        hidden = None if clean else S == -np.inf
        S -= finite(m)[:, :, None, :, None]
        if self.entropy:
            shifted = np.maximum(S, self.least)
        P = np.exp(S, out=S)
        e = in_order(np.multiply(P, shifted, out=shifted).sum(axis=-1)) if self.entropy else None
        l = in_order(P.sum(axis=-1))
        keep = chunk.dropout()
        if keep is not None:
            P *= keep
        O = in_order(product(P, chunk.v, lambda: hidden, clean))  # noqa: E741
        top = np.maximum(self.m, m)
        safe = finite(top)
        old, new = np.exp(self.m - safe), np.exp(m - safe)
        if e is not None:
            self.e = moved(self.e, self.l, old, self.m - safe) + moved(e, l, new, m - safe)
        self.l = self.l * old + l * new
        self.O *= old[..., None]
        O *= new[..., None]
        self.O += O
        self.m = top

    def _add_argmax(self, S: Array, chunk: Chunk) -> None:
        index, m = S.argmax(axis=-1), S.max(axis=-1)
        best = self.m
        for t in range(chunk.T):
            found = index[:, :, t] + chunk.start + t * KEYS
            self.where = np.where((m[:, :, t] > best) | np.isnan(m[:, :, t]) & ~np.isnan(best), found, self.where)
            best = np.maximum(best, m[:, :, t])

    def _add_top(self, S: Array, chunk: Chunk) -> None:
        columns = chunk.columns()
        for t in range(chunk.T):
            index = np.broadcast_to(columns[t], S.shape[:2] + S.shape[3:])
            values = np.concatenate([self.values, S[:, :, t]], axis=-1)
            indices = np.concatenate([self.indices, np.where(S[:, :, t] == -np.inf, -1, index)], axis=-1)
            # Stable, and earlier keys come first: ties go to the lowest key.
            order = np.argsort(-values, axis=-1, kind="stable")[..., : self.top]
            self.values = np.take_along_axis(values, order, -1)
            self.indices = np.take_along_axis(indices, order, -1)

    def best(self, k: int) -> tuple[Array, Array]:
        inside = self.rows.inside
        return self.values[:, :, inside, :k], self.indices[:, :, inside, :k]

    def finish(self) -> tuple[Array, Array, Array]:
        """out, lse and entropy of the rows inside the call, the sink counted in."""
        p, sink = self.rows.p, self.rows.unit.sink
        m = self.m if sink is None else np.maximum(self.m, sink)
        old = np.exp(self.m - finite(m))
        keys = self.l * old
        total = keys if sink is None else keys + np.exp(sink - finite(m))
        inverse = np.where(total == 0, 0, 1 / total)
        lse = m + np.log(total)
        # H = −Σ P (S − lse) with P = exp(S − m) / total, S − lse = (S − m) − log total
        entropy = (keys * np.log(np.where(total == 0, 1, total)) - moved(self.e, self.l, old, self.m - finite(m))) * inverse
        out = self.O * (old * inverse / p.compute.type(1 - p.dropout))[..., None]
        inside = self.rows.inside
        return out[:, :, inside], lse[:, :, inside], entropy[:, :, inside]


def in_order(parts: Array) -> Array:
    """The sum over the tiles of a chunk (kv heads, group, T, ROWS, ...), one after the other; tiles of 0 leave no trace."""
    total = parts[:, :, 0] + parts.dtype.type(0)  # not −0
    for t in range(1, parts.shape[2]):
        total += parts[:, :, t]
    return total


def finite(m: Array) -> Array:
    """The least number for a maximum of nothing, so that exp(−∞ − m) is 0 and not NaN."""
    return np.maximum(m, np.finfo(m.dtype).min)


def moved(e: Array, l: Array, factor: Array, shift: Array) -> Array:
    """e = Σ exp(S − m) (S − m) for another m: `factor` is exp(shift), 0 where there was nothing."""
    return np.where(factor == 0, 0, factor * (e + np.where(factor == 0, 0, shift) * l))


def weight(S: Array, lse: Array) -> Array:
    """exp(S − lse), 0 for what is masked."""
    return np.exp(S - finite(lse))


def rows_of(rows: Rows, x: Array, tail: int) -> Array:
    """The part of an output (..., h, n_q, *tail) that a block fills, (kv heads, group, rows, *tail); a view."""
    p = rows.p
    heads = x[rows.unit.index].reshape(p.kv_heads, p.group, *x.shape[x.ndim - tail :])
    return heads[rows.unit.kv, rows.unit.group, rows.outside]


@dataclass(frozen=True, eq=False)
class Given:
    """lse of the rows of a block, and the weights of a chunk that follow from it."""

    lse: Array  # (kv heads, group, 1, ROWS, 1), 0 where the row sees nothing or is padding
    sane: bool  # no row sees NaN

    @classmethod
    def of(cls, rows: Rows, lse: Array) -> "Given":
        lse = finite(rows.take(rows.unit.per_query_head(lse[..., None], 2)))
        return cls(lse, not np.isnan(lse).any())

    def weights(self, chunk: Chunk, raw: Array | None = None) -> tuple[Array, Array]:
        """S and P of a chunk; `raw` survives if it is given."""
        S = chunk.scores(chunk.raw() if raw is None or chunk.p.score_node is not None else raw.copy())
        P = np.exp(S - self.lse)
        if not self.sane:
            np.copyto(P, 0, where=S == -np.inf)
        return S, P


def received(p: Problem, lse: Array) -> Array:
    """Σ_i P (..., h, n_k): a second pass, given lse."""
    total = np.zeros(p.shape(p.n_k), p.compute)

    def work(unit: Unit) -> None:
        mine = total[unit.index].reshape(p.kv_heads, p.group, p.n_k)[unit.kv, unit.group]
        for rows in unit.blocks:
            given = Given.of(rows, lse)
            for chunk in rows.chunks():
                P = given.weights(chunk)[1][..., rows.inside, :].sum(axis=-2)
                mine[..., chunk.outside] += P.reshape(*P.shape[:2], -1)[..., chunk.inside]

    spread(work, units(p), num_threads())
    return total


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    """P (..., h, rows, cols): any part of the weights, from the same tiles that forward computes."""
    tile = np.zeros(p.shape(len(rows), len(cols)), p.compute)

    def work(block: Rows) -> None:
        mine = tile[block.unit.index].reshape(p.kv_heads, p.group, len(rows), len(cols))[block.unit.kv, block.unit.group]
        take, put = overlap(rows, block.start, ROWS)
        if not len(take):
            return
        given = Given.of(block, lse)
        for chunk in block.chunks():
            columns, there = overlap(cols, chunk.start, chunk.T * KEYS)
            if len(columns):
                P = given.weights(chunk)[1].swapaxes(2, 3).reshape(*tile_heads(block), ROWS, -1)
                mine[..., put[:, None], there] = P[..., take[:, None], columns]

    spread_blocks(p, work)
    return tile


def tile_heads(rows: Rows) -> tuple[int, ...]:
    return rows.unit.h.shape[:2]


def overlap(wanted: range, start: int, size: int) -> tuple[Array, Array]:
    """The positions in [start, start + size) that are wanted, counted from start, and their places in `wanted`."""
    positions = np.asarray(wanted, dtype=np.int64)
    places = np.flatnonzero((positions >= start) & (positions < start + size))
    return positions[places] - start, places


class Cotangents:
    """dO, and what the rows of a block add to dS = P (G + c − dH (log P + 1)), each (kv heads, group, 1, ROWS, ·)."""

    def __init__(self, rows: Rows, ct: Outputs, outputs: Outputs):
        p, unit = rows.p, rows.unit

        def column(x: Array) -> Array:
            return rows.take(unit.per_query_head(x[..., None], 2))

        shape = (*unit.h.shape[:2], 1, ROWS)
        self.dO = np.zeros((*shape, p.d_v), p.compute)
        self.c = np.zeros((*shape, 1), p.compute)
        self.dH: Array | None = None
        self.lse = column(need(outputs.lse))
        if ct.out is not None:
            self.dO = rows.take(unit.per_query_head(ct.out, 2))
            self.c = self.c - (self.dO * rows.take(unit.per_query_head(need(outputs.out), 2))).sum(-1, keepdims=True)
        if ct.lse is not None:
            self.c = self.c + column(ct.lse)
        self.p_sink = 0 if unit.sink is None else weight(unit.sink[..., None, None], self.lse)
        if ct.entropy is not None:
            self.dH = column(ct.entropy)
            alive = np.where(self.lse == -np.inf, 0, 1 - self.p_sink)
            self.c = self.c + self.dH * (alive - column(need(outputs.entropy)))

    @property
    def clean(self) -> bool:
        return bool(np.isfinite(self.dO).all())


def need(x: Array | None) -> Array:
    assert x is not None
    return x


def backward(p: Problem, outputs: Outputs, ct: Outputs) -> Differential:
    """Gradients of ⟨ct.out, out⟩ + ⟨ct.lse, lse⟩ + ⟨ct.entropy, entropy⟩, from the outputs of forward.

    Gradients that several units share (of a bias or key that broadcasts, a sink, a table) are summed unit by unit.
    """
    c = p.compute
    dq = np.zeros(p.shape(p.n_q, p.d), c)
    dk = np.zeros((*p.lead, p.kv_heads, p.n_k, p.d), c)
    dv = np.zeros((*p.lead, p.kv_heads, p.n_k, p.d_v), c)
    dbias = None if p.bias is None else np.zeros(p.bias.shape, c)
    dsink = None if p.sink is None else np.zeros((p.kv_heads, p.group), c)
    tables = {table: np.zeros(table.shape, c) for table in p.tables}
    d_ds, d_tables = p.score_partials
    plain = p.score is None and p.bias is None

    def work(unit: Unit) -> None:
        my_dk, my_dv = dk[unit.index][unit.kv], dv[unit.index][unit.kv]
        for rows in unit.blocks:
            given = Given.of(rows, need(outputs.lse))
            g = Cotangents(rows, ct, outputs)
            clean_q = bool(np.isfinite(rows.q).all())
            sum_dq = np.zeros((*tile_heads(rows), ROWS, p.d), c)
            for chunk in rows.chunks():
                raw = chunk.raw()
                S, P = given.weights(chunk, raw)

                def hidden(S: Array = S) -> Array:
                    return S == -np.inf

                keep = chunk.dropout()
                G = np.matmul(g.dO, chunk.v.swapaxes(-1, -2))
                if keep is not None:
                    G *= keep * c.type(1 / (1 - p.dropout))
                G += g.c
                if g.dH is not None:
                    G -= g.dH * (np.where(hidden(), 0, S - given.lse) + 1)
                dS = np.multiply(P, G, out=G)
                clean_k = bool(unit.finite_k[chunk.tiles].all())
                if not (plain and chunk.full and clean_k and clean_q):
                    np.copyto(dS, 0, where=hidden())
                dT = dS
                if d_ds is not None:
                    dT = np.where(hidden(), 0, dS * chunk.evaluate(d_ds, s=raw))
                for leaf, node in d_tables.items():
                    part = np.where(hidden(), 0, dS * chunk.evaluate(node, s=raw))
                    scatter(leaf, part, chunk.at(s=raw), tables[leaf.payload])
                if dbias is not None:
                    add_bias(dbias, dS, chunk)
                if keep is not None:
                    P = P * (keep * c.type(1 / (1 - p.dropout)))

                for t in np.moveaxis(product(dT, chunk.k, hidden, clean_k), 2, 0):
                    sum_dq += t

                def turned(hidden: Any = hidden) -> Array:
                    return np.asarray(hidden()).swapaxes(-1, -2)

                add_keys(my_dk, product(dT.swapaxes(-1, -2), rows.q, turned, clean_q), chunk)
                add_keys(my_dv, product(P.swapaxes(-1, -2), g.dO, turned, g.clean), chunk)
            rows_of(rows, dq, 2)[...] = (sum_dq * c.type(p.scale))[:, :, rows.inside]
            if dsink is not None:
                dsink[unit.kv, unit.group] += (g.p_sink * g.c)[:, :, 0, rows.inside, 0].sum(axis=-1)

    shared = p.bias is not None or p.sink is not None or bool(p.tables)
    spread(lambda together: [work(unit) for unit in together], by_key_head(p), 1 if shared else num_threads())

    def fit(x: Array, like: Array) -> Array:
        return collapse(x, like.shape).astype(like.dtype)

    return Differential(
        query=fit(dq, p.query),
        key=fit(dk, p.key),
        value=fit(dv, p.value),
        bias=None if dbias is None or p.bias is None else dbias.astype(p.bias.dtype),
        sink=None if dsink is None or p.sink is None else fit(dsink.reshape(-1), p.sink),
        tables={table: x.astype(table.dtype) for table, x in tables.items()},
    )


def by_key_head(p: Problem) -> list[list[Unit]]:
    """The units of a call, those that share a key-value head together."""
    return [list(together) for _, together in groupby(units(p), lambda unit: (unit.b, unit.kv.start))]


def add_keys(total: Array, part: Array, chunk: Chunk) -> None:
    """total (kv heads, n_k, d) += part (kv heads, group, T, KEYS, d), summed over the group."""
    part = part.sum(axis=1).reshape(part.shape[0], chunk.T * KEYS, part.shape[-1])
    total[:, chunk.outside] += part[:, chunk.inside]


def add_bias(total: Array, dS: Array, chunk: Chunk) -> None:
    """The gradient of a bias += dS of a chunk, summed over the axes along which the bias broadcasts."""
    unit, p = chunk.rows.unit, chunk.p
    full = total.reshape((1,) * (len(p.lead) + 3 - total.ndim) + total.shape)
    target = full[tuple(i if size > 1 else 0 for i, size in zip(unit.index, full.shape, strict=False))]
    part = dS.swapaxes(2, 3).reshape(*dS.shape[:2], ROWS, -1)[..., chunk.rows.inside, chunk.inside]
    if target.shape[0] == p.heads:
        target = target.reshape(p.kv_heads, p.group, *target.shape[1:])[unit.kv, unit.group]
    else:
        target = target[None]
    place = tuple(s if size > 1 else slice(None) for s, size in zip((chunk.rows.outside, chunk.outside), target.shape[2:], strict=True))
    spot = target[:, :, *place]
    spot += collapse(part, spot.shape)


def jvp(p: Problem, t: Differential) -> tuple[Outputs, Outputs]:
    """Outputs, and their tangents along tangents of the inputs."""
    c = p.compute
    outputs, _ = forward(replace(p, observe=(Statistic("entropy"),)))
    d_out = p.new_output()
    d_lse = np.empty(p.shape(p.n_q), c)
    d_entropy = np.empty_like(d_lse)
    tables = {table: Table(x) for table, x in t.tables.items()}
    d_score = None if p.score_node is None else tangent(p.score_node, tables)
    sink = None if t.sink is None else np.broadcast_to(t.sink.astype(c), (p.heads,)).reshape(p.kv_heads, p.group, 1)

    def work(rows: Rows) -> None:
        unit = rows.unit
        given = Given.of(rows, need(outputs.lse))
        shape = (*tile_heads(rows), ROWS)
        dq = None if t.query is None else rows.take(unit.per_query_head(t.query, 2)) * c.type(p.scale)
        dk, dv = (None if x is None else unit.per_kv_head(x) for x in (t.key, t.value))
        mean, bend = np.zeros(shape, c), np.zeros(shape, c)
        moved_out = np.zeros((*shape, p.d_v), c)
        for chunk in rows.chunks():
            raw = chunk.raw()
            S, P = given.weights(chunk, raw)
            hidden = S == -np.inf
            dS = np.zeros(chunk.shape, c)
            if dq is not None:
                dS += np.matmul(dq, chunk.k.swapaxes(-1, -2))
            if dk is not None:
                dS += np.matmul(rows.q, chunk.take(dk).swapaxes(-1, -2))
            if d_score is not None:
                dS = np.array(np.broadcast_to(chunk.evaluate(d_score, s=raw, ds=dS), chunk.shape))
            if t.bias is not None:
                dS += chunk.dense(t.bias)
            np.copyto(dS, 0, where=hidden)
            PS = P * dS
            mean += PS.sum(axis=-1).sum(axis=2)
            bend += (PS * (np.where(hidden, 0, S - given.lse) + 1)).sum(axis=-1).sum(axis=2)
            keep = chunk.dropout()
            if keep is not None:
                keep = keep * c.type(1 / (1 - p.dropout))
                P, PS = P * keep, PS * keep
            clean = bool(unit.finite_v[chunk.tiles].all())
            moved_out += product(PS, chunk.v, lambda hidden=hidden: hidden, clean).sum(axis=2)
            if dv is not None:
                moved_out += product(P, chunk.take(dv), lambda hidden=hidden: hidden, False).sum(axis=2)

        def column(x: Array | None) -> Array:
            return rows.take(unit.per_query_head(need(x)[..., None], 2))[:, :, 0, :, 0]

        lse = column(outputs.lse)
        p_sink: Any = 0 if unit.sink is None else weight(unit.sink, lse)
        total = mean if sink is None else mean + p_sink * sink[unit.kv, unit.group]
        alive = np.where(lse == -np.inf, 0, 1 - p_sink)
        out = rows.take(unit.per_query_head(need(outputs.out), 2))[:, :, 0]
        inside = rows.inside
        rows_of(rows, d_out, 2)[...] = (moved_out - total[..., None] * out)[:, :, inside].astype(p.dtype)
        rows_of(rows, d_lse, 1)[...] = total[:, :, inside]
        rows_of(rows, d_entropy, 1)[...] = (total * (alive - column(outputs.entropy)) - bend)[:, :, inside]

    spread_blocks(p, work)
    return outputs, Outputs(d_out, d_lse, d_entropy)
