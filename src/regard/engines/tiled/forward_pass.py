"""Attention in tiles on NumPy alone: O(n) memory, every wish, wherever NumPy runs.

Forward keeps a running maximum, sum and output for each query and merges one span of keys after the other into them
(the online softmax of Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao et al. 2022). Sums over rows run over the
blocks of a unit in order, on one thread. Derivatives are in `regard.engines.tiled.backward_pass`
and `tiled_derivatives`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.core.problem import Outputs, Problem
from regard.core.statistics import Profile, Statistic, Top, cells, pooled
from regard.engines.observed import basic, complete
from regard.engines.tiled.tiles import BAND, KEYS, ROWS, Band, Chunk, Positions, Rows, Unit, masked, product, units
from regard.runtime.threads import num_threads, spread_numpy

Array = np.ndarray[Any, np.dtype[Any]]


def threads_for(p: Problem, rows: int | None = None) -> int:
    """One for a call, or so many rows of it, that is done before another thread has started."""
    return num_threads() if p.batch * p.heads * (p.n_q if rows is None else rows) * p.n_k >= 2**20 else 1


def spread_blocks(
    p: Problem, work: Callable[[Rows], None], rows: Positions | None = None, cols: Positions | None = None
) -> None:
    """Do independent work for every block of queries, or for those with some of `rows`; of keys, between `cols`."""

    def each(band: Band) -> None:
        for block in band:
            work(block)

    threads, parts = threads_for(p, None if rows is None else len(rows)), list(units(p))
    size = max(1, min(BAND, len(parts) * -(-p.n_q // ROWS) // (4 * threads)))
    spread_numpy(each, [band for unit in parts for band in unit.bands(size, rows, cols)], threads)


def forward(p: Problem, rows: range | None = None, into: Outputs | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    """Outputs (entropy only where it is observed) and every statistic observed, at least for `rows` if given."""
    observe = basic(p.observe)
    names = {s.name for s in observe}
    out, lse = p.new_output(), np.empty(p.shape(p.n_q), p.compute)
    seen: dict[Statistic, Any] = {}
    for s in observe:
        if s.name in ("entropy", "max"):
            seen[s] = np.empty_like(lse)
        elif s.name in ("argmax", "visible"):
            seen[s] = np.empty(lse.shape, np.int64)
        elif s.name == "top":
            seen[s] = Top(np.empty((*lse.shape, s.of), p.compute), np.empty((*lse.shape, s.of), np.int64))
    k = max((s.of if s.name == "top" else 1 for s in seen if s.name in ("top", "argmax")), default=0)

    def work(rows: Rows) -> None:
        best = Best(rows, k) if k else None
        running = Running(rows, "entropy" in names)
        visible = np.zeros((*rows.heads, ROWS), np.int64)
        for chunk in rows.chunks():
            S = chunk.scores(chunk.raw())
            if best is not None:
                best.add(chunk, S)
            if "visible" in names:
                visible += np.count_nonzero(S != -np.inf, axis=(2, 4))
            running.add(chunk, S)
        O, log_sum = running.finish()
        rows_of(rows, out, 2)[...] = O[:, :, rows.inside].astype(p.dtype)
        rows_of(rows, lse, 1)[...] = log_sum[:, :, rows.inside]
        for s, found in seen.items():
            if s.name == "entropy":
                rows_of(rows, found, 1)[...] = running.entropy()[:, :, rows.inside]
            elif s.name == "visible":
                rows_of(rows, found, 1)[...] = visible[:, :, rows.inside]
            elif s.name == "max":
                rows_of(rows, found, 1)[...] = running.weight(running.m)[:, :, rows.inside]
            elif best is not None and s.name == "argmax":
                rows_of(rows, found, 1)[...] = best.indices[:, :, rows.inside, 0]
            elif best is not None:
                values = running.weight(best.values)
                rows_of(rows, found.values, 2)[...] = values[:, :, rows.inside, : s.of]
                rows_of(rows, found.indices, 2)[...] = best.indices[:, :, rows.inside, : s.of]

    spread_blocks(p, work, rows)
    seen[Statistic("lse")] = lse
    seen |= second_pass(p, lse, tuple(s for s in observe if s not in seen))
    seen = complete(p, lse, seen, lambda p: forward(p, rows))
    return Outputs(out, lse, seen.get(Statistic("entropy"))), seen


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

    def weight(self, S: Array) -> Array:
        """P of scores (kv heads, group, ROWS, ...); beside a large m, lse has no digits left for log total."""
        m, _, total = (x.reshape(x.shape + (1,) * (S.ndim - x.ndim)) for x in self._with_sink())
        P: Array = np.exp(S - finite(m)) * np.where(total == 0, 0, 1 / total)
        return P

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


def second_pass(p: Problem, lse: Array, observe: tuple[Statistic, ...]) -> dict[Statistic, Any]:
    """The statistics that need the weights themselves, given lse: sums over queries, maps, and single rows."""
    c = p.compute
    seen: dict[Statistic, Any] = {}
    for s in observe:
        if s.name == "received":
            seen[s] = np.zeros(p.shape(p.n_k), c)
        elif s.name == "profile":
            seen[s] = Profile(np.zeros(p.shape(p.extents.diagonals), c), p.extents.distances)
        elif s.name == "pooled":
            seen[s] = np.zeros(p.shape(min(s.of[0], p.n_q), min(s.of[1], p.n_k)), c)
        else:
            assert s.name == "weights_of"
            seen[s] = weights(p, lse, s.of, range(p.n_k))
    sums = [(s, found.values if s.name == "profile" else found) for s, found in seen.items() if s.name != "weights_of"]

    def work(unit: Unit) -> None:
        totals = [(s, unit.own(found)) for s, found in sums]
        for rows in unit.blocks:
            given = Given(rows, lse)
            for chunk in rows.chunks():
                P = given.weights(chunk, chunk.raw())[1].swapaxes(2, 3).reshape(*rows.heads, ROWS, -1)
                for s, total in totals:
                    if s.name == "received":
                        total[..., chunk.outside] += P[..., rows.inside, chunk.inside].sum(axis=-2)
                    elif s.name == "profile":
                        add_diagonals(total, P, rows.start - chunk.start + p.n_k - 1)
                    else:
                        add_cells(total, s, P[..., rows.inside, chunk.inside], rows.outside, chunk.outside, p)

    if sums:
        spread_numpy(work, units(p), threads_for(p))
    for s, total in sums:
        if s.name == "pooled" and s.of[2] == "mass":
            total /= np.diff(cells(s.of[0], p.n_q)).astype(c)[:, None]
    return seen


def maps(p: Problem, lse: Array, rows: int, cols: int) -> tuple[Array, Array]:
    mass, largest = pooled(rows, cols), pooled(rows, cols, "max")
    found = second_pass(p, lse, (mass, largest))
    return found[mass], found[largest]


def add_diagonals(total: Array, P: Array, middle: int) -> None:
    """Add the sums of P (..., n, m) along its diagonals, that of P[0, 0] to total[..., middle]; what lies beside the
    total is 0.
    """
    n, m = P.shape[-2:]
    # Rows that begin one later each: a row of the padded array with one number less.
    skewed = np.zeros((*P.shape[:-2], n, m + n), P.dtype)
    skewed[..., :m] = P[..., ::-1]
    sums = skewed.reshape(*P.shape[:-2], -1)[..., :-n].reshape(*P.shape[:-2], n, m + n - 1).sum(axis=-2)
    first = middle - (m - 1)
    low, high = max(first, 0), min(first + n + m - 1, total.shape[-1])
    total[..., low:high] += sums[..., low - first : high - first]


def add_cells(total: Array, s: Statistic, P: Array, rows: slice, cols: slice, p: Problem) -> None:
    """Add P to the cells of a map, or take the maximum; `rows` and `cols` say where in the call it lies."""
    number_of_rows, number_of_cols, kind = s.of
    (row, row_cuts), (col, col_cuts) = (
        touched(cells(number, n), part)
        for number, n, part in ((number_of_rows, p.n_q, rows), (number_of_cols, p.n_k, cols))
    )
    operation: Any = np.maximum if kind == "max" else np.add
    part = operation.reduceat(operation.reduceat(P, col_cuts, axis=-1), row_cuts, axis=-2)
    spot = total[..., row, col]
    operation(spot, part, out=spot)


def touched(edges: Array, part: slice) -> tuple[slice, Array]:
    """The cells that a part of the positions touches, and where in it they begin."""
    first, last = np.searchsorted(edges, [part.start, part.stop - 1], side="right") - 1
    return slice(first, last + 1), np.maximum(edges[first : last + 1] - part.start, 0)


def weights(p: Problem, lse: Array, rows: Positions, cols: range) -> Array:
    """P (..., h, rows, cols): any part of the weights, from the same tiles that forward computes."""
    if isinstance(rows, range) and rows.step < 0:
        return weights(p, lse, rows[::-1], cols)[..., ::-1, :]
    if cols.step < 0:
        return weights(p, lse, rows, cols[::-1])[..., ::-1]
    tile = np.zeros(p.shape(len(rows), len(cols)), p.compute)

    def work(block: Rows) -> None:
        mine = block.unit.own(tile)
        take, put = overlap(rows, block.start, ROWS)
        given = Given(block, lse)
        for chunk in block.chunks():
            columns, there = overlap(cols, chunk.start, chunk.T * KEYS)
            if there.start < there.stop:
                P = given.weights(chunk, chunk.raw())[1].swapaxes(2, 3).reshape(*block.heads, ROWS, -1)
                mine[..., put, there] = P[..., take, columns]

    if len(rows) and len(cols):
        spread_blocks(p, work, rows, cols)
    return tile


def overlap(wanted: Positions, start: int, size: int) -> tuple[Any, Any]:
    """The positions in [start, start + size) that are wanted, counted from start, and their places in `wanted`: slices
    of a rising range, else arrays.
    """
    if isinstance(wanted, range):
        step = wanted.step
        first, stop = (max(0, -((wanted.start - edge) // step)) for edge in (start, start + size))
        first, stop = min(first, len(wanted)), min(stop, len(wanted))
        begin = wanted.start + first * step - start
        return slice(begin, begin + (stop - first) * step, step), slice(first, stop)
    positions = np.asarray(wanted, dtype=np.int64)
    places = np.flatnonzero((positions >= start) & (positions < start + size))
    return positions[places] - start, places
