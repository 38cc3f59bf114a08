"""Forward in tiles by the online softmax, with statistics and weights.

Each query has a running maximum, sum and output, into which the key splits are merged in order (Milakov and Gimelshein
2018; Rabe and Staats 2021; Dao et al. 2022). Sums over queries run over the query blocks of a head block in order, on
one thread.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.core.problem import Carried, Outputs, Problem, SumShapes
from regard.core.statistics import (
    ENTROPY,
    LSE,
    VISIBLE,
    Argmax,
    Entropy,
    Largest,
    Pooled,
    Received,
    Statistic,
    TopWeights,
    Visible,
    WeightByDistance,
    WeightsOf,
    bin_edges,
    pooled,
)
from regard.engines import engines
from regard.engines.normalized import is_small, of_whole_rows, too_large
from regard.engines.observed import ForwardSums, basic, complete
from regard.engines.tiled.tiles import (
    BAND,
    BLOCK_K,
    BLOCK_Q,
    Band,
    Chunk,
    HeadBlock,
    Positions,
    QueryBlock,
    head_blocks,
    masked,
    product,
)
from regard.runtime.threads import num_threads, spread_numpy

Array = np.ndarray[Any, np.dtype[Any]]


def threads_for(p: Problem, rows: int | None = None) -> int:
    """Return the number of threads for `rows` rows of a call, all by default.

    A single thread runs calls in which starting more would take longer.
    """
    return num_threads() if p.all_heads * (p.n_q if rows is None else rows) * p.n_k >= 2**20 else 1


def spread_blocks(
    p: Problem, work: Callable[[QueryBlock], None], rows: Positions | None = None, cols: Positions | None = None
) -> None:
    """Call work on every query block on several threads.

    rows: only blocks with some of them. cols: only tiles from the first of them to the last.
    """

    def each(band: Band) -> None:
        for block in band:
            work(block)

    threads, parts = threads_for(p, None if rows is None else len(rows)), list(head_blocks(p))
    size = max(1, min(BAND, len(parts) * -(-p.n_q // BLOCK_Q) // (4 * threads)))
    spread_numpy(each, [band for heads in parts for band in heads.bands(size, rows, cols)], threads)


def forward(p: Problem, rows: range | None = None, into: Outputs | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    """Return the outputs and every observed statistic.

    Entropy is None unless it is observed. rows: the rows that are needed, at least; None for all. into: an array for
    `low`, if that is needed.
    """
    observe = basic(p.observe)
    out, lse = p.new_output(), np.empty(p.shape(p.n_q), p.compute)
    low = None if into is None else into.low
    seen = {s: s.empty(p.sizes, p.compute) for s in observe if type(s) in OF_BLOCK}
    k = max((1 if s.of is None else s.of for s in seen if isinstance(s, Argmax | TopWeights)), default=0)

    part = None if p.part is None else p.part.query
    if part is not None and part.first:
        part.sums.update({name: np.empty(*x) for name, x in carried(p).items()})

    def work(block: QueryBlock) -> None:
        top = TopKeys(block, k) if k else None
        softmax = OnlineSoftmax(block, ENTROPY in seen)
        if part is not None and not part.first:
            softmax.resume(part)
        visible = np.zeros((*block.head_shape, BLOCK_Q), np.int64)
        for chunk in block.chunks():
            S = chunk.scores(chunk.raw())
            if top is not None:
                top.add(chunk, S)
            if VISIBLE in seen:
                visible += np.count_nonzero(S != -np.inf, axis=(2, 4))
            softmax.add(chunk, S)
        if part is not None and not part.last:
            softmax.keep(part)
            return
        O, log_sum = softmax.finish()
        rows_of(block, out, 2)[...] = O[:, :, block.valid].astype(p.dtype)
        if low is not None:
            rows_of(block, low, 2)[...] = remainder(O[:, :, block.valid], p.dtype)
        rows_of(block, lse, 1)[...] = log_sum[:, :, block.valid]
        for s, arrays in seen.items():
            for whole, own in zip(s.split(arrays), OF_BLOCK[type(s)](s, softmax, top, visible), strict=True):
                rows_of(block, whole, own.ndim - 2)[...] = own[:, :, block.valid]

    spread_blocks(p, work, rows)
    seen[LSE] = lse
    tiled = engines()["tiled"]
    sums = ForwardSums(p, lse, lambda p: tiled.forward(p, rows), tiled.maps, tiled.weights)
    seen |= passed(sums, tuple(s for s in observe if s not in seen))
    seen = complete(seen, sums)
    return Outputs(out, lse, seen.get(ENTROPY), low), seen


def carried(p: Problem) -> SumShapes:
    """Return the shapes and dtypes of the sums of an `OnlineSoftmax` that go on from part to part."""
    widths = {"m": (), "l": (), "O": (p.d_v,)} | ({"e": ()} if ENTROPY in p.observe else {})
    return {name: (p.shape(p.n_q, *width), p.compute) for name, width in widths.items()}


def remainder(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return x − x as `dtype`; 0 where x or that is not finite."""
    with np.errstate(all="ignore"):
        rest = x - x.astype(dtype).astype(x.dtype)
        return np.where(np.isfinite(rest), rest, 0)


OF_BLOCK: dict[type[Statistic], Callable[..., tuple[Array, ...]]] = {
    Entropy: lambda s, softmax, top, visible: (softmax.entropy(),),
    Visible: lambda s, softmax, top, visible: (visible,),
    Largest: lambda s, softmax, top, visible: (softmax.weight(softmax.m),),
    Argmax: lambda s, softmax, top, visible: (top.indices[..., 0],),
    TopWeights: lambda s, softmax, top, visible: (
        np.where(top.indices < 0, 0, softmax.weight(top.values))[..., : s.of],
        top.indices[..., : s.of],
    ),
}
"""The statistics of a query block, of its own rows: (kv heads, group, BLOCK_Q, ...) each."""


class OnlineSoftmax:
    """The running maximum, sum and output of a query block.

    Arrays are (kv heads, group, BLOCK_Q), O with d_v features:

        m, the largest score so far        l = Σ exp(S − m)
        O = Σ exp(S − m) D V               e = Σ exp(S − m) (S − m)

    A key split without a visible key changes no bit of them.
    """

    def __init__(self, block: QueryBlock, entropy: bool):
        p, self.block = block.p, block
        self.outside, self.clean = block.heads.outside, block.heads.finite_v
        shape = (*block.head_shape, BLOCK_Q)
        self.m = np.full(shape, -np.inf, p.compute)
        self.l = np.zeros(shape, p.compute)
        self.O = np.zeros((*shape, p.d_v), p.compute)
        self.e = np.zeros(shape, p.compute) if entropy else None

    def add(self, chunk: Chunk, S: Array) -> None:
        """Merge the scores S of a chunk, which are overwritten."""
        m = S.max(axis=2).max(axis=-1)
        hidden = None if self.clean[chunk.tiles].all() else masked(S)
        S -= finite(m)[:, :, None, :, None]
        shifted = None if self.e is None else bounded(S)
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
            self.e = rescaled(self.e, self.l, old, old_shift) + rescaled(e, l, new, new_shift)
        self.m, self.l = top, self.l * old + l * new
        self.O *= old[..., None]
        O *= new[..., None]
        self.O += O

    def resume(self, part: Carried) -> None:
        """Go on from the sums of the part before."""
        for name, x in part.sums.items():
            rows = rows_of(self.block, x, x.ndim - len(self.block.p.lead) - 1)
            getattr(self, name)[:, :, self.block.valid] = rows

    def keep(self, part: Carried) -> None:
        """Store the sums for the part that follows."""
        for name, x in part.sums.items():
            rows = rows_of(self.block, x, x.ndim - len(self.block.p.lead) - 1)
            rows[...] = getattr(self, name)[:, :, self.block.valid]

    def finish(self) -> tuple[Array, Array]:
        """Return out and lse, with what rows have besides keys."""
        m, old, total = self._with_outside()
        inverse = np.where(total == 0, 0, 1 / total)
        return self.O * (old * inverse)[..., None], m + np.log(total)

    def entropy(self) -> Array:
        """Return H = −Σ P (S − lse).

        P = exp(S − m) / total and S − lse = (S − m) − log total.
        """
        m, old, total = self._with_outside()
        assert self.e is not None
        shifted = rescaled(self.e, self.l, old, self.m - finite(m))
        positive = np.where(total == 0, 1, total)
        H: Array = (self.l * old * np.log(positive) - shifted) / positive
        return H

    def weight(self, S: Array) -> Array:
        """Return P of scores (kv heads, group, BLOCK_Q, ...).

        P follows from m and the total: next to a large m, lse has no digits left for log total.
        """
        m, _, total = (x.reshape(x.shape + (1,) * (S.ndim - x.ndim)) for x in self._with_outside())
        P = np.exp(S - finite(m)) * np.where(total == 0, 0, 1 / total)
        return np.where(S == -np.inf, 0, P)

    def _with_outside(self) -> tuple[Array, Array, Array]:
        """Return m with `Problem.outside`, exp(old maximum − m), and the sum of exponentials."""
        m = self.m if self.outside is None else np.maximum(self.m, self.outside)
        old = np.exp(self.m - finite(m))
        if self.outside is None:
            return m, old, self.l * old
        alone = (self.m == -np.inf) & ~(self.outside < np.inf)  # NaN, or ∞ − ∞ would be
        old = np.where(alone, 0, old)
        return m, old, self.l * old + np.exp(np.where(alone, 0, self.outside - finite(m)))


class TopKeys:
    """The k largest scores so far and their columns, in falling order; NaN counts as ∞.

    Each is (kv heads, group, BLOCK_Q, k).
    """

    def __init__(self, block: QueryBlock, k: int):
        self.k = k
        self.values = np.full((*block.head_shape, BLOCK_Q, k), -np.inf, block.p.compute)
        self.indices = np.full(self.values.shape, -1, np.int64)

    def add(self, chunk: Chunk, S: Array) -> None:
        for t in range(chunk.T):
            rest = np.where(np.isnan(S[:, :, t]), np.inf, S[:, :, t])
            values, indices = [self.values], [self.indices]
            for _ in range(self.k):
                index = rest.argmax(axis=-1, keepdims=True)
                value = np.take_along_axis(rest, index, -1)
                if not (value > self.values[..., -1:]).any():
                    break
                values.append(value)
                indices.append(np.where(value == -np.inf, -1, index + (chunk.start + t * BLOCK_K)))
                np.put_along_axis(rest, index, -np.inf, -1)
            if len(values) > 1:
                # Lower keys come first, and a stable sort lets them win ties.
                candidates = np.concatenate(values, axis=-1)
                order = np.lexsort((-candidates,), axis=-1)[..., : self.k]
                self.values = np.take_along_axis(candidates, order, -1)
                self.indices = np.take_along_axis(np.concatenate(indices, axis=-1), order, -1)


def in_order(parts: Array) -> Array:
    """Return the sum over the tiles of a chunk, in order.

    parts: (kv heads, group, T, BLOCK_Q, ...). Tiles of 0 change no bit.
    """
    total: Array = parts[:, :, 0] + parts.dtype.type(0)  # not −0
    for t in range(1, parts.shape[2]):
        total += parts[:, :, t]
    return total


def finite(m: Array) -> Array:
    """Replace −∞ by the least number, so that exp(−∞ − m) is 0 and not NaN."""
    least: Array = np.maximum(m, np.finfo(m.dtype).min)
    return least


def bounded(difference: Array) -> Array:
    """Return S − m, or where exp(S − m) is 0 a number whose product with 0 is 0."""
    x: Array = np.maximum(difference, 2 * np.log(np.finfo(difference.dtype).tiny))
    return x


def rescaled(e: Array, l: Array, factor: Array, shift: Array) -> Array:
    """Return e = Σ exp(S − m) (S − m) for another m.

    factor: exp(shift), 0 where there was nothing.
    """
    return np.where(factor == 0, factor, factor * (e + np.where(factor == 0, 0, shift) * l))


def weight(S: Array, lse: Array) -> Array:
    """Return exp(S − lse), 0 for masked scores."""
    P: Array = np.exp(S - finite(lse))
    return P


def rows_of(block: QueryBlock, x: Array, tail: int) -> Array:
    """Return a view (kv heads, group, rows, *tail) of a block's rows in an output (..., h, n_q, *tail)."""
    p = block.p
    heads = x[block.heads.index].reshape(p.kv_heads, p.group, *x.shape[x.ndim - tail :])
    part: Array = heads[block.heads.kv, block.heads.group, block.in_call]
    return part


class BlockLse:
    """A query block with its lse, which gives the weights of any chunk.

    lse: (kv heads, group, 1, BLOCK_Q, 1).
    """

    def __init__(self, block: QueryBlock, lse: Array):
        self.block = block
        self.lse = self.column(lse)  # −∞ where the row sees nothing
        self.finite_lse = finite(self.lse)
        self.has_nan = bool(np.isnan(self.lse).any())

    def column(self, x: Array) -> Array:
        """Return the rows of x (..., h, n_q) as (kv heads, group, 1, BLOCK_Q, 1), 0 for padding."""
        return self.block.take(self.block.heads.per_query_head(x[..., None], 2))

    def weights(self, chunk: Chunk, raw: Array) -> tuple[Array, Array]:
        """Return S and P of a chunk; `raw` is overwritten without a score rule."""
        S = chunk.scores(raw)
        P: Array = np.exp(S - self.finite_lse)
        if self.has_nan:
            np.copyto(P, 0, where=masked(S))
        return S, P


def passed(sums: ForwardSums, observe: tuple[Statistic, ...]) -> dict[Statistic, Any]:
    """Return the statistics that need the weights and lse: sums over queries, maps, and single rows."""
    p, lse = sums.p, sums.raw
    seen: dict[Statistic, Any] = {
        s: sums.weights(p, lse, s.of, range(p.n_k)) for s in observe if isinstance(s, WeightsOf)
    }
    others = tuple(s for s in observe if s not in seen)
    if others:
        engines()["tiled"].require("maps", p)
        seen |= second_pass(p, lse, others, sums.factor)
    return seen


def second_pass(
    p: Problem, lse: Array, observe: tuple[Statistic, ...], factor: Array | None = None
) -> dict[Statistic, Any]:
    """Return statistics that are sums over queries, or maps, from the weights and lse.

    factor: that of each query's weights.
    """
    seen: dict[Statistic, Any] = {}
    sums = {s: np.zeros(s.shapes(p.sizes)[0], p.compute) for s in observe if type(s) in ADD}

    def work(heads: HeadBlock) -> None:
        totals = [(s, heads.own(total)) for s, total in sums.items()]
        for block in heads.blocks:
            block_lse = BlockLse(block, lse)
            for chunk in block.chunks():
                P = block_lse.weights(chunk, chunk.raw())[1]
                P = by_rows(P if factor is None else P * block_lse.column(factor))
                for s, total in totals:
                    ADD[type(s)](s, total, P, block, chunk)

    if sums:
        spread_numpy(work, head_blocks(p), threads_for(p))
    for s, total in sums.items():
        if isinstance(s, Pooled) and not s.largest:
            total /= np.diff(bin_edges(s.of[0], p.n_q)).astype(p.compute)[:, None]
        seen[s] = s.result([total, p.extents.distances][: len(s.parts)])
    return seen


def maps(p: Problem, lse: Array, rows: int, cols: int) -> tuple[Array, Array]:
    """Return the maps (..., h, rows, cols) of mass and largest weight, as `regard.pooled` defines them."""
    mass, largest = pooled(rows, cols), pooled(rows, cols, "max")
    pooled_maps = second_pass(p, lse, (mass, largest))
    return pooled_maps[mass], pooled_maps[largest]


def add_received(s: Statistic, total: Array, P: Array, block: QueryBlock, chunk: Chunk) -> None:
    """Add the weights of a chunk to those that its keys received."""
    total[..., chunk.in_call] += P[..., block.valid, chunk.valid].sum(axis=-2)


def add_diagonals(s: Statistic, total: Array, P: Array, block: QueryBlock, chunk: Chunk) -> None:
    """Add the sums of P (..., n, m) along its diagonals. Those outside of `total` have to be 0."""
    middle = block.start - chunk.start + block.p.n_k - 1  # where the diagonal of P[0, 0] goes
    n, m = P.shape[-2:]
    # Read as rows one number shorter than the padded ones, each row is shifted by one more.
    skewed = np.zeros((*P.shape[:-2], n, m + n), P.dtype)
    skewed[..., :m] = P[..., ::-1]
    sums = skewed.reshape(*P.shape[:-2], -1)[..., :-n].reshape(*P.shape[:-2], n, m + n - 1).sum(axis=-2)
    first = middle - (m - 1)
    low, high = max(first, 0), min(first + n + m - 1, total.shape[-1])
    total[..., low:high] += sums[..., low - first : high - first]


def add_bins(s: Pooled, total: Array, P: Array, block: QueryBlock, chunk: Chunk) -> None:
    """Add the weights of a chunk to the bins of a map, or take the maximum."""
    p = block.p
    (row, row_starts), (col, col_starts) = (
        touched(bin_edges(number, n), part)
        for number, n, part in ((s.of[0], p.n_q, block.in_call), (s.of[1], p.n_k, chunk.in_call))
    )
    operation: Any = np.maximum if s.largest else np.add
    part = operation.reduceat(P[..., block.valid, chunk.valid], col_starts, axis=-1)
    part = operation.reduceat(part, row_starts, axis=-2)
    bins = total[..., row, col]
    operation(bins, part, out=bins)


ADD: dict[type[Statistic], Callable[..., None]] = {
    Received: add_received,
    WeightByDistance: add_diagonals,
    Pooled: add_bins,
}
"""The statistics that are sums, or maxima, over queries."""


def touched(edges: Array, part: slice) -> tuple[slice, Array]:
    """Return the bins that overlap some positions, and the offsets of their starts."""
    first, last = np.searchsorted(edges, [part.start, part.stop - 1], side="right") - 1
    starts = np.maximum(edges[first : last + 1] - part.start, 0)
    return slice(first, last + 1), starts.astype(np.intp)  # reduceat takes no wider ones, on 32 bits


def weights(p: Problem, lse: Array, rows: Positions, cols: range) -> Array:
    """Return any part of the weights, P (..., h, rows, cols).

    The part is computed from the same tiles as in forward. Rows with every key are a softmax of their own scores, and
    `lse` is not read. Small problems, and rows whose lse is too large, take the part from such rows. Elsewhere the
    rounding of lse adds |lse| eps to the error.
    """
    if isinstance(rows, range) and rows.step < 0:
        return weights(p, lse, rows[::-1], cols)[..., ::-1, :]
    if cols.step < 0:
        return weights(p, lse, rows, cols[::-1])[..., ::-1]
    if 0 < len(rows) and len(cols) < p.n_k and (is_small(p) or too_large(lse[..., np.asarray(rows)]).any()):
        return of_whole_rows(weights, p, lse, rows, cols)
    tile = np.zeros(p.shape(len(rows), len(cols)), p.compute)

    def part(block: QueryBlock) -> None:
        own = block.heads.own(tile)
        take, put = overlap(rows, block.start, BLOCK_Q)
        block_lse = BlockLse(block, lse)
        for chunk in block.chunks():
            columns, put_columns = overlap(cols, chunk.start, chunk.T * BLOCK_K)
            if put_columns.start < put_columns.stop:
                P = by_rows(block_lse.weights(chunk, chunk.raw())[1])
                own[..., put, put_columns] = P[..., take, columns]

    def whole(block: QueryBlock) -> None:
        own, outside, chunks = block.heads.own(tile), block.heads.outside, list(block.chunks())
        take, put = overlap(rows, block.start, BLOCK_Q)
        if not chunks:
            return
        seen = slice(chunks[0].in_call.start, chunks[-1].in_call.stop)
        P = own[..., put, seen]  # a view, unless rows are listed
        P[...] = -np.inf
        for chunk in chunks:
            into = slice(chunk.in_call.start - seen.start, chunk.in_call.stop - seen.start)
            P[..., into] = by_rows(chunk.scores(chunk.raw()))[..., take, chunk.valid]
        m = P.max(axis=-1, keepdims=True)
        m = finite(m if outside is None else np.maximum(m, outside[..., None]))
        m[m == np.inf] = np.nan
        hidden = masked(P) if np.isnan(m).any() else None
        P -= m
        np.exp(P, out=P)
        if hidden is not None:
            np.copyto(P, 0, where=hidden)
        total = P.sum(axis=-1, keepdims=True) + (0 if outside is None else np.exp(outside[..., None] - m))
        P *= np.where(total > 0, 1 / total, 1)
        if not isinstance(put, slice):
            own[..., put, seen] = P

    if len(rows) and len(cols):
        spread_blocks(p, whole if len(cols) == p.n_k else part, rows, cols)
    return tile


def by_rows(x: Array) -> Array:
    """Join the tiles of a chunk (kv heads, group, T, BLOCK_Q, BLOCK_K) to rows."""
    return x.swapaxes(2, 3).reshape(*x.shape[:2], BLOCK_Q, -1)


def overlap(wanted: Positions, start: int, size: int) -> tuple[Any, Any]:
    """Return wanted positions in [start, start + size), and their indices.

    Positions count from start, indices are those in `wanted`. Both are slices if `wanted` is an ascending range, else
    arrays.
    """
    if isinstance(wanted, range):
        step = wanted.step
        first, stop = (max(0, -((wanted.start - edge) // step)) for edge in (start, start + size))
        first, stop = min(first, len(wanted)), min(stop, len(wanted))
        begin = wanted.start + first * step - start
        return slice(begin, begin + (stop - first) * step, step), slice(first, stop)
    positions = np.asarray(wanted, dtype=np.int64)
    indices = np.flatnonzero((positions >= start) & (positions < start + size))
    return positions[indices] - start, indices
