"""Backward in tiles, and its tangent.

With G = D (dO V), the gradient of a score is dS = P · c, where c = G + c_row − dH (log P + 1) and
c_row = −dO · (O + low) + dlse + dH (Σ P − H) is one number for each row. Along a direction, P˙ = P (S˙ − lse˙) and
dS˙ = P ((S˙ − lse˙) c + c˙).
"""

from itertools import groupby
from typing import Any

import numpy as np

from regard.core.problem import Differential, Outputs, Problem, collapse
from regard.engines.tiled.derivatives import TANGENT_TILES, BlockOutputs, BlockTangents, ChunkWeights, InputTangents
from regard.engines.tiled.forward_pass import in_order, rows_of, threads_for
from regard.engines.tiled.tiles import BAND, BLOCK_K, BLOCK_Q, Chunk, HeadBlock, QueryBlock, head_blocks, product
from regard.rules import scatter
from regard.runtime.threads import spread_numpy

Array = np.ndarray[Any, np.dtype[Any]]


class Cotangents:
    """Cotangents of a query block.

    c_row: the part of c that is one number for each row.
    """

    def __init__(self, saved: BlockOutputs, ct: Outputs):
        block, p = saved.block, saved.block.p
        shape = (*block.head_shape, 1, BLOCK_Q)
        self.dO = np.zeros((*shape, p.d_v), p.compute)
        self.c_row: Array = np.zeros((*shape, 1), p.compute)
        self.dH: Array | None = None
        if ct.out is not None:
            self.dO = block.take(block.heads.per_query_head(ct.out, 2))
            self.c_row = self.c_row - dot(self.dO, saved.out)
            if saved.low is not None:
                self.c_row = self.c_row - dot(self.dO, saved.low)
        if ct.lse is not None:
            self.c_row = self.c_row + saved.column(ct.lse)
        if ct.entropy is not None:
            self.dH = saved.column(ct.entropy)
            self.c_row = self.c_row + self.dH * (saved.total - saved.entropy)

    def through(self, x: ChunkWeights) -> Array:
        """Return c, which is linear in the cotangents."""
        c = x.dropped(np.matmul(self.dO, x.chunk.v.swapaxes(-1, -2)))
        c += self.c_row
        if self.dH is not None:
            c -= self.dH * x.surprise
        return c


class Gradients:
    """Gradients of a call, summed in the dtype of sums."""

    def __init__(self, p: Problem):
        self.p, c = p, p.compute
        self.query, self.key, self.value = self.sums("query", True), self.sums("key", False), self.sums("value", False)
        rows, full = p.bias_axes[0], all(p.bias_axes)
        self.bias = None
        if p.trained_bias is not None:
            self.bias = np.zeros(p.bias_sums, c) if full else self.sums("bias", rows)
        self.sink = None if p.sink is None else np.zeros(p.shape(p.n_q), c)
        self.tables = {table: np.zeros(table.shape, c) for table in p.rules.tables}
        # Head blocks that add to the same array have to do so in order.
        self.shared = (self.bias is not None and full) or bool(p.rules.tables)

    def sums(self, name: str, by_query: bool) -> Array:
        """Return the sums of a gradient, which go on from part to part."""
        part, like = self.p.part, self.p.gradient_sums[name]
        carried = None if part is None else part.query if by_query else part.key
        if carried is None:
            return np.zeros(*like)
        if carried.first:
            carried.sums[name] = np.zeros(*like)
        return carried.sums[name]

    def begin(self, block: QueryBlock) -> Array:
        """Return dq of a block, without the factor of scores, from the parts before."""
        dq = np.zeros((*block.head_shape, BLOCK_Q, self.p.d), self.p.compute)
        dq[:, :, block.valid] = rows_of(block, self.query, 2)
        return dq

    def add(
        self,
        x: ChunkWeights,
        hidden: Array | None,
        dT: Array,
        PD: Array,
        k: Array | None,
        q: Array | None,
        dO: Array,
        dq: Array,
    ) -> None:
        """Add dT K to dq, dTᵀ Q to dk and (P D)ᵀ dO to dv; a k or q of None adds nothing.

        hidden: the mask of hidden pairs; None if everything is finite.
        """
        hidden_t = None if hidden is None else hidden.swapaxes(-1, -2)
        gradients = "all" if self.p.part is None else self.p.part.gradients
        if k is not None and gradients != "key":
            dq += in_order(product(dT, k, hidden))
        if gradients == "query":
            return
        if q is not None:
            self._add_keys(self.key, product(dT.swapaxes(-1, -2), q, hidden_t), x.chunk)
        self._add_keys(self.value, product(PD.swapaxes(-1, -2), dO, hidden_t), x.chunk)

    @staticmethod
    def _add_keys(total: Array, part: Array, chunk: Chunk) -> None:
        """Add a chunk's part to the gradient of keys or values.

        part: (kv heads, group, T, BLOCK_K, d), summed over the group in order. total: (..., h_kv, n_k, d).
        """
        heads = chunk.block.heads
        gradient = total[heads.index][heads.kv, chunk.in_call]
        for one in part.reshape(*part.shape[:2], chunk.T * BLOCK_K, part.shape[-1]).swapaxes(0, 1):
            gradient += one[:, chunk.valid]

    def add_bias(self, dS: Array, chunk: Chunk) -> None:
        """Add dS to dbias, summed over the axes along which the bias broadcasts."""
        if self.bias is None:
            return
        heads, p = chunk.block.heads, self.p
        full = self.bias.reshape((1,) * (len(p.lead) + 3 - self.bias.ndim) + self.bias.shape)
        target = full[tuple(i if size > 1 else 0 for i, size in zip(heads.index, full.shape, strict=False))]
        if target.shape[0] == p.heads:
            target = target.reshape(p.kv_heads, p.group, *target.shape[1:])[heads.kv, heads.group]
        else:
            target = target[None]
        in_call = (chunk.block.in_call, chunk.in_call)
        rows, keys = (s if size > 1 else slice(None) for s, size in zip(in_call, target.shape[2:], strict=True))
        part = dS.swapaxes(2, 3).reshape(*chunk.block.head_shape, BLOCK_Q, -1)[..., chunk.block.valid, chunk.valid]
        gradient = target[:, :, rows, keys]
        gradient += collapse(part, gradient.shape)

    def finish(self, block: QueryBlock, dq: Array, d_sink: Array | None) -> None:
        """Store a block's dq, and add its rows' part of dsink."""
        last = self.p.part is None or (self.p.part.query is not None and self.p.part.query.last)
        total = dq * self.p.compute.type(self.p.scale) if last else dq
        rows_of(block, self.query, 2)[...] = total[:, :, block.valid]
        if self.sink is not None and d_sink is not None:
            rows_of(block, self.sink, 1)[...] = d_sink[:, :, 0, block.valid, 0]

    @np.errstate(all="ignore")
    def result(self) -> Differential:
        """Return each gradient in the shape and dtype of its input.

        A gradient beyond the range of the dtype is infinite.
        """
        p = self.p
        if p.part is not None:
            return self._of_part()

        def fit(x: Array | None, like: Array | None) -> Any:
            return None if x is None or like is None else collapse(x, like.shape).astype(like.dtype, copy=False)

        return Differential(
            query=fit(self.query, p.query),
            key=fit(self.key, p.key),
            value=fit(self.value, p.value),
            bias=fit(self.bias, p.bias),
            sink=None if self.sink is None else p.sink_gradient(self.sink),
            tables={table: x.astype(table.dtype, copy=False) for table, x in self.tables.items()},
        )

    def _of_part(self) -> Differential:
        """Store the sums that go on, and return the gradients that are whole."""
        p, part = self.p, self.p.part
        assert part is not None
        if part.query is not None and self.sink is not None:
            part.query.sums["sink"] = self.sink
        ends = part.query is not None and part.query.last, part.key is not None and part.key.last
        query = self.query.astype(p.dtype) if ends[0] else None
        key, value = (x.astype(p.dtype) if ends[1] else None for x in (self.key, self.value))
        return Differential(query, key, value, self.bias if all(p.bias_axes) else None, tables=self.tables)


def backward(p: Problem, outputs: Outputs, ct: Outputs) -> Differential:
    """Return the gradients of ⟨ct, outputs⟩ in the inputs.

    outputs: those of forward.
    """
    total = Gradients(p)
    d_ds, d_tables = p.rules.score_partials[0], p.rules.table_partials

    def work(block: QueryBlock) -> None:
        heads, saved = block.heads, BlockOutputs(block, outputs)
        g = Cotangents(saved, ct)
        clean_rows = bool(np.isfinite(block.q).all() and np.isfinite(g.dO).all())
        dq = total.begin(block)
        for chunk in block.chunks():
            clean = clean_rows and bool(heads.finite_k[chunk.tiles].all() and heads.finite_v[chunk.tiles].all())
            x = ChunkWeights(saved, chunk, plain=clean and chunk.full and p.score is None and p.bias is None)
            dS = g.through(x)
            dS *= x.P
            x.visible(dS)
            total.add_bias(dS, chunk)
            for leaf, slope in d_tables.items():
                scatter(leaf, x.through(slope, dS), chunk.at(), total.tables[leaf.payload])
            dT, PD = x.through(d_ds, dS), x.dropped(x.P)
            total.add(x, None if clean else x.hidden, dT, PD, chunk.k, block.q, g.dO, dq)
        total.finish(block, dq, saved.shares["sink"] * g.c_row if "sink" in saved.shares else None)

    in_turn(p, total, work)
    return total.result()


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    """Return the tangents of `backward` along t and d_ct.

    t: tangents of the inputs. d_ct: those of the cotangents. d_outputs: those of the outputs along t, as `jvp` returns
    them.
    """
    total = Gradients(p)
    along = InputTangents(p, t)
    d_ds, d_tables = p.rules.score_partials[0], p.rules.table_partials
    d_ds_dot, d_tables_dot = along.of(d_ds), {leaf: along.of(slope) for leaf, slope in d_tables.items()}

    def work(block: QueryBlock) -> None:
        saved, saved_dot = BlockOutputs(block, outputs), BlockOutputs(block, d_outputs)
        tangents = BlockTangents(saved, along)
        g, g_dot = Cotangents(saved, ct), Cotangents(saved, d_ct)
        shares = {name: x * (tangents.logits[name] - saved_dot.lse) for name, x in saved.shares.items()}
        if ct.out is not None:
            g_dot.c_row = g_dot.c_row - dot(g.dO, saved_dot.out)
        if g.dH is not None:
            g_dot.c_row = g_dot.c_row - g.dH * (sum(shares.values()) + saved_dot.entropy)
        dq = total.begin(block)
        for chunk in block.chunks(TANGENT_TILES):
            x = ChunkWeights(saved, chunk)
            T_dot, S_dot = tangents.scores(x)
            relative = S_dot - saved_dot.lse  # P˙ / P
            c, c_dot = g.through(x), g_dot.through(x)
            if tangents.v is not None:
                c_dot += x.dropped(np.matmul(g.dO, chunk.take(tangents.v).swapaxes(-1, -2)))
            if g.dH is not None:
                c_dot -= g.dH * relative
            P_dot = relative
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
            k_dot = None if tangents.k is None else chunk.take(tangents.k)
            total.add(x, x.hidden, dT_dot, x.dropped(P_dot), chunk.k, block.q, g.dO, dq)
            total.add(x, x.hidden, dT, x.dropped(x.P), k_dot, tangents.q, g_dot.dO, dq)
        d_sink = shares["sink"] * g.c_row + saved.shares["sink"] * g_dot.c_row if "sink" in shares else None
        total.finish(block, dq, d_sink)

    in_turn(p, total, work)
    return total.result()


def dot(x: Array, y: Array) -> Array:
    """Sum x · y over features, (..., 1)."""
    return np.asarray((x * y).sum(axis=-1, keepdims=True))


def in_turn(p: Problem, total: Gradients, work: Any) -> None:
    """Call work on every query block, in order if blocks add to the same array.

    Blocks add to the same array if they have the same keys, or share a bias, sink or table. Sums over queries run from
    the last row to the first, and over the heads of a row, however many of those a head block has.
    """
    per_kv_head = [list(one_head) for _, one_head in groupby(head_blocks(p), lambda heads: (heads.b, heads.kv.start))]

    def each(one_head: list[HeadBlock]) -> None:
        bands = zip(*(heads.bands(BAND)[::-1] for heads in one_head), strict=True)
        for together in bands:
            for blocks in zip(*(list(band)[::-1] for band in together), strict=True):
                for block in blocks:
                    work(block)

    spread_numpy(each, per_kv_head, 1 if total.shared else threads_for(p))
