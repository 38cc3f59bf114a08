"""Attention in tiles on NumPy alone: O(n) memory, every wish, wherever NumPy runs.

Forward keeps a running maximum, sum and output for each query and merges one span of keys after the other into them
(the online softmax of Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao et al. 2022). Sums over rows run over the
blocks of a unit in order, on one thread. `backward` and `jvp` are in `regard.engines.tiled_derivatives`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.engines.tiles import KEYS, ROWS, Band, Chunk, Rows, Unit, masked, product, units
from regard.observing import Statistic, Top
from regard.problem import Differential, Outputs, Problem
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


def backward(p: Problem, outputs: Outputs, ct: Outputs) -> Differential:
    from regard.engines import tiled_derivatives

    return tiled_derivatives.backward(p, outputs, ct)


def jvp(p: Problem, t: Differential) -> tuple[Outputs, Outputs]:
    from regard.engines import tiled_derivatives

    return tiled_derivatives.jvp(p, t)


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
        shape = (*rows.heads, ROWS)
        self.rows, self.entropy, self.argmax, self.top = rows, entropy, argmax, top
        self.m = np.full(shape, -np.inf, compute)
        self.l = np.zeros(shape, compute)
        self.O = np.zeros((*shape, rows.p.d_v), compute)
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
        hidden = None if clean else masked(S)
        S -= finite(m)[:, :, None, :, None]
        if self.entropy:
            shifted = np.maximum(S, self.least)
        P = np.exp(S, out=S)
        e = in_order(np.multiply(P, shifted, out=shifted).sum(axis=-1)) if self.entropy else None
        l = in_order(P.sum(axis=-1))
        D = chunk.dropout()
        if D is not None:
            P *= D
        O = in_order(product(P, chunk.v, hidden))
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
        sink = self.rows.unit.sink
        m = self.m if sink is None else np.maximum(self.m, sink)
        old = np.exp(self.m - finite(m))
        keys = self.l * old
        total = keys if sink is None else keys + np.exp(sink - finite(m))
        inverse = np.where(total == 0, 0, 1 / total)
        lse = m + np.log(total)
        # H = −Σ P (S − lse) with P = exp(S − m) / total, S − lse = (S − m) − log total
        entropy = (
            keys * np.log(np.where(total == 0, 1, total)) - moved(self.e, self.l, old, self.m - finite(m))
        ) * inverse
        out = self.O * (old * inverse)[..., None]
        inside = self.rows.inside
        return out[:, :, inside], lse[:, :, inside], entropy[:, :, inside]


def in_order(parts: Array) -> Array:
    """The sum over the tiles of a chunk (kv heads, group, T, ROWS, ...) in order; tiles of 0 leave no trace."""
    total: Array = parts[:, :, 0] + parts.dtype.type(0)  # not −0
    for t in range(1, parts.shape[2]):
        total += parts[:, :, t]
    return total


def finite(m: Array) -> Array:
    """The least number for a maximum of nothing, so that exp(−∞ − m) is 0 and not NaN."""
    least: Array = np.maximum(m, np.finfo(m.dtype).min)
    return least


def moved(e: Array, l: Array, factor: Array, shift: Array) -> Array:
    """e = Σ exp(S − m) (S − m) for another m: `factor` is exp(shift), 0 where there was nothing."""
    return np.where(factor == 0, factor, factor * (e + np.where(factor == 0, 0, shift) * l))


def weight(S: Array, lse: Array) -> Array:
    """exp(S − lse), 0 for what is masked."""
    P: Array = np.exp(S - finite(lse))
    return P


def rows_of(rows: Rows, x: Array, tail: int) -> Array:
    """The part of an output (..., h, n_q, *tail) that a block fills, (kv heads, group, rows, *tail); a view."""
    p = rows.p
    heads = x[rows.unit.index].reshape(p.kv_heads, p.group, *x.shape[x.ndim - tail :])
    part: Array = heads[rows.unit.kv, rows.unit.group, rows.outside]
    return part


class Given:
    """The rows of a block once their lse is known: the weights of any chunk follow from it."""

    def __init__(self, rows: Rows, lse: Array):
        self.rows = rows
        self.lse = self.column(lse)  # −∞ where the row sees nothing
        self.finite_lse = finite(self.lse)
        self.sane = not np.isnan(self.lse).any()

    def column(self, x: Array) -> Array:
        """The rows of x (..., h, n_q) as (kv heads, group, 1, ROWS, 1), 0 for padding."""
        return self.rows.take(self.rows.unit.per_query_head(x[..., None], 2))

    def weights(self, chunk: Chunk, raw: Array) -> tuple[Array, Array]:
        """S and P; `raw` is overwritten if there is no rule."""
        S = chunk.scores(raw)
        P: Array = np.exp(S - self.finite_lse)
        if not self.sane:
            np.copyto(P, 0, where=masked(S))
        return S, P


def received(p: Problem, lse: Array) -> Array:
    """Σ_i P (..., h, n_k): a second pass, given lse."""
    total = np.zeros(p.shape(p.n_k), p.compute)

    def work(unit: Unit) -> None:
        mine = total[unit.index].reshape(p.kv_heads, p.group, p.n_k)[unit.kv, unit.group]
        for rows in unit.blocks:
            given = Given(rows, lse)
            for chunk in rows.chunks():
                P = given.weights(chunk, chunk.raw())[1][..., rows.inside, :].sum(axis=-2)
                mine[..., chunk.outside] += P.reshape(*P.shape[:2], -1)[..., chunk.inside]

    spread(work, units(p), num_threads())
    return total


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    """P (..., h, rows, cols): any part of the weights, from the same tiles that forward computes."""
    tile = np.zeros(p.shape(len(rows), len(cols)), p.compute)

    def work(block: Rows) -> None:
        mine = tile[block.unit.index].reshape(p.kv_heads, p.group, len(rows), len(cols))[
            block.unit.kv, block.unit.group
        ]
        take, put = overlap(rows, block.start, ROWS)
        if not len(take):
            return
        given = Given(block, lse)
        for chunk in block.chunks():
            columns, there = overlap(cols, chunk.start, chunk.T * KEYS)
            if len(columns):
                P = given.weights(chunk, chunk.raw())[1].swapaxes(2, 3).reshape(*block.heads, ROWS, -1)
                mine[..., put[:, None], there] = P[..., take[:, None], columns]

    spread_blocks(p, work)
    return tile


def overlap(wanted: range, start: int, size: int) -> tuple[Array, Array]:
    """The positions in [start, start + size) that are wanted, counted from start, and their places in `wanted`."""
    positions = np.asarray(wanted, dtype=np.int64)
    places = np.flatnonzero((positions >= start) & (positions < start + size))
    return positions[places] - start, places
