"""Attention in tiles on NumPy alone: O(n) memory, every wish, wherever NumPy runs.

Forward keeps a running maximum, sum and output for each query and merges one span of keys after the other into them
(the online softmax of Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao et al. 2022). Sums over rows run over the
blocks of a unit in order, on one thread. Derivatives are in `regard.engines.tiled_backward`
and `tiled_derivatives`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.engines.tiles import BAND, KEYS, ROWS, Band, Chunk, Rows, Unit, masked, product, units
from regard.observing import Statistic, Top
from regard.problem import Differential, Outputs, Problem
from regard.threads import num_threads, spread_numpy

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
    from regard.engines import tiled_backward

    return tiled_backward.backward(p, outputs, ct)


def jvp(p: Problem, t: Differential, outputs: Outputs | None = None) -> tuple[Outputs, Outputs]:
    from regard.engines import tiled_derivatives

    return tiled_derivatives.jvp(p, t, outputs)


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    from regard.engines import tiled_backward

    return tiled_backward.backward_jvp(p, outputs, ct, t, d_outputs, d_ct)


def threads_for(p: Problem) -> int:
    """One for a call that is done before another thread has started."""
    return num_threads() if p.batch * p.heads * p.n_q * p.n_k >= 2**20 else 1


def spread_blocks(p: Problem, work: Callable[[Rows], None], rows: range | None = None) -> None:
    """Do independent work for every block of queries, or for those between the first and the last of `rows`."""
    first, last = (0, p.n_q - 1) if rows is None or not rows else (min(rows), max(rows))

    def each(band: Band) -> None:
        for block in band:
            work(block)

    threads, parts = threads_for(p), list(units(p))
    size = max(1, min(BAND, len(parts) * -(-p.n_q // ROWS) // (4 * threads)))
    spread_numpy(each, [band for unit in parts for band in unit.bands(size, first, last)], threads)


def forward(p: Problem, rows: range | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    """Outputs (entropy only where it is observed) and every statistic observed, at least for `rows` if given."""
    names = {s.name for s in p.observe}
    out, lse = p.new_output(), np.empty(p.shape(p.n_q), p.compute)
    seen: dict[Statistic, Any] = {}
    for s in p.observe:
        if s.name in ("entropy", "max"):
            seen[s] = np.empty_like(lse)
        elif s.name == "argmax":
            seen[s] = np.empty(lse.shape, np.int64)
        elif s.name == "top":
            seen[s] = Top(np.empty((*lse.shape, s.k), p.compute), np.empty((*lse.shape, s.k), np.int64))
    k = max((s.k if s.name == "top" else 1 for s in seen if s.name in ("top", "argmax")), default=0)

    def work(rows: Rows) -> None:
        best = Best(rows, k) if k else None
        running = Running(rows, "entropy" in names)
        for chunk in rows.chunks():
            S = chunk.scores(chunk.raw())
            if best is not None:
                best.add(chunk, S)
            running.add(chunk, S)
        O, log_sum = running.finish()
        rows_of(rows, out, 2)[...] = O[:, :, rows.inside].astype(p.dtype)
        rows_of(rows, lse, 1)[...] = log_sum[:, :, rows.inside]
        for s, found in seen.items():
            if s.name == "entropy":
                rows_of(rows, found, 1)[...] = running.entropy()[:, :, rows.inside]
            elif s.name == "max":
                rows_of(rows, found, 1)[...] = weight(running.m, log_sum)[:, :, rows.inside]
            elif best is not None and s.name == "argmax":
                rows_of(rows, found, 1)[...] = best.indices[:, :, rows.inside, 0]
            elif best is not None:
                values = weight(best.values, log_sum[..., None])
                rows_of(rows, found.values, 2)[...] = values[:, :, rows.inside, : s.k]
                rows_of(rows, found.indices, 2)[...] = best.indices[:, :, rows.inside, : s.k]

    spread_blocks(p, work, rows)
    for s in p.observe:
        if s.name == "lse":
            seen[s] = lse
        elif s.name == "received":
            seen[s] = received(p, lse)
    return Outputs(out, lse, seen.get(Statistic("entropy"))), {s: seen[s] for s in p.observe}


class Running:
    """What forward knows of a block after some of its spans: (kv heads, group, ROWS) each, O with d_v features.

    m is the largest score so far, l = Σ exp(S − m), O = Σ exp(S − m) D V, e = Σ exp(S − m) (S − m). A span without a
    visible key changes no bit of them.
    """

    def __init__(self, rows: Rows, entropy: bool):
        p = rows.p
        self.sink, self.clean = rows.unit.sink, rows.unit.finite_v
        shape = (*rows.heads, ROWS)
        self.m = np.full(shape, -np.inf, p.compute)
        self.l = np.zeros(shape, p.compute)
        self.O = np.zeros((*shape, p.d_v), p.compute)
        self.e = np.zeros(shape, p.compute) if entropy else None

    def add(self, chunk: Chunk, S: Array) -> None:
        """Merge a chunk; S is overwritten."""
        m = S.max(axis=2).max(axis=-1)
        hidden = None if self.clean[chunk.tiles].all() else masked(S)
        S -= finite(m)[:, :, None, :, None]
        # exp is 0 below the limit, and 0 · (S − m) must be 0 where S is −∞.
        shifted = None if self.e is None else np.maximum(S, 2 * np.log(np.finfo(S.dtype).tiny))
        P = np.exp(S, out=S)
        l = in_order(P.sum(axis=-1))
        e = None if shifted is None else in_order(np.multiply(P, shifted, out=shifted).sum(axis=-1))
        D = chunk.dropout()
        if D is not None:
            P *= D
        O = in_order(product(P, chunk.v, hidden))

        top = np.maximum(self.m, m)
        old_shift, new_shift = self.m - finite(top), m - finite(top)
        old, new = np.exp(old_shift), np.exp(new_shift)
        if self.e is not None and e is not None:
            self.e = moved(self.e, self.l, old, old_shift) + moved(e, l, new, new_shift)
        self.m, self.l = top, self.l * old + l * new
        self.O *= old[..., None]
        O *= new[..., None]
        self.O += O

    def finish(self) -> tuple[Array, Array]:
        """out and lse, the sink counted in."""
        m, old, total = self._with_sink()
        inverse = np.where(total == 0, 0, 1 / total)
        return self.O * (old * inverse)[..., None], m + np.log(total)

    def entropy(self) -> Array:
        """H = −Σ P (S − lse), where P = exp(S − m) / total and S − lse = (S − m) − log total."""
        m, old, total = self._with_sink()
        assert self.e is not None
        shifted = moved(self.e, self.l, old, self.m - finite(m))
        positive = np.where(total == 0, 1, total)
        H: Array = (self.l * old * np.log(positive) - shifted) / positive
        return H

    def _with_sink(self) -> tuple[Array, Array, Array]:
        """The maximum m with the sink, exp(old maximum − m), and the sum of exponentials."""
        m = self.m if self.sink is None else np.maximum(self.m, self.sink)
        old = np.exp(self.m - finite(m))
        return m, old, self.l * old + (0 if self.sink is None else np.exp(self.sink - finite(m)))


class Best:
    """The k largest scores of a block so far and their columns, (kv heads, group, ROWS, k), in falling order."""

    def __init__(self, rows: Rows, k: int):
        self.k = k
        self.values = np.full((*rows.heads, ROWS, k), -np.inf, rows.p.compute)
        self.indices = np.full(self.values.shape, -1, np.int64)

    def add(self, chunk: Chunk, S: Array) -> None:
        for t in range(chunk.T):
            rest = S[:, :, t].copy()
            values, indices = [self.values], [self.indices]
            for _ in range(self.k):
                index = rest.argmax(axis=-1, keepdims=True)
                value = np.take_along_axis(rest, index, -1)
                if not (value > self.values[..., -1:]).any():
                    break
                values.append(value)
                indices.append(np.where(value == -np.inf, -1, index + (chunk.start + t * KEYS)))
                np.put_along_axis(rest, index, -np.inf, -1)
            if len(values) > 1:
                # Stable, and lower keys come first: they win ties.
                found = np.concatenate(values, axis=-1)
                order = np.argsort(-found, axis=-1, kind="stable")[..., : self.k]
                self.values = np.take_along_axis(found, order, -1)
                self.indices = np.take_along_axis(np.concatenate(indices, axis=-1), order, -1)


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

    spread_numpy(work, units(p), threads_for(p))
    return total


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    """P (..., h, rows, cols): any part of the weights, from the same tiles that forward computes."""
    tile = np.zeros(p.shape(len(rows), len(cols)), p.compute)

    def work(block: Rows) -> None:
        mine = tile[block.unit.index].reshape(p.kv_heads, p.group, len(rows), len(cols))[
            block.unit.kv, block.unit.group
        ]
        take, put = overlap(rows, block.start, ROWS)
        given = Given(block, lse)
        for chunk in block.chunks():
            columns, there = overlap(cols, chunk.start, chunk.T * KEYS)
            if len(columns):
                P = given.weights(chunk, chunk.raw())[1].swapaxes(2, 3).reshape(*block.heads, ROWS, -1)
                mine[..., put[:, None], there] = P[..., take[:, None], columns]

    spread_blocks(p, work, rows)
    return tile


def overlap(wanted: range, start: int, size: int) -> tuple[Array, Array]:
    """The positions in [start, start + size) that are wanted, counted from start, and their places in `wanted`."""
    positions = np.asarray(wanted, dtype=np.int64)
    places = np.flatnonzero((positions >= start) & (positions < start + size))
    return positions[places] - start, places
