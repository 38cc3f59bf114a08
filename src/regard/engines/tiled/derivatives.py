"""Weights and tangents of a chunk; `jvp` and its tangent.

The scores of a tile are computed again; its weights come from lse. A dot after a name is a tangent. Backward and its
tangent are in `regard.engines.tiled.backward_pass`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from regard.core.problem import Carried, Differential, Outputs, Problem, SumShapes, share
from regard.core.statistics import ENTROPY
from regard.engines import engines
from regard.engines.tiled.forward_pass import BlockLse, bounded, in_order, rows_of, spread_blocks
from regard.engines.tiled.tiles import BLOCK_Q, SPLIT_TILES, Chunk, QueryBlock, masked, product
from regard.rules import Node, Table, reading, tangent
from regard.rules.derivative import multiply
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
X = TypeVar("X")

TANGENT_TILES = SPLIT_TILES // 2  # tangents double the number of arrays that are alive


class BlockOutputs(BlockLse):
    """Outputs of forward for a query block, (kv heads, group, 1, BLOCK_Q, ·) each."""

    def __init__(self, block: QueryBlock, outputs: Outputs):
        super().__init__(block, need(outputs.lse))
        self.outputs = outputs

    @cached_property
    def out(self) -> Array:
        return self.block.take(self.block.heads.per_query_head(need(self.outputs.out), 2))

    @cached_property
    def low(self) -> Array | None:
        low = self.outputs.low
        return None if low is None else self.block.take(self.block.heads.per_query_head(low, 2))

    @cached_property
    def entropy(self) -> Array:
        return self.column(need(self.outputs.entropy))

    @cached_property
    def shares(self) -> dict[str, Array]:
        """`Problem.shares` of the block's rows."""
        logits = self.block.p.denominators
        return {name: share(self.block.heads.logit(x), self.lse) for name, x in logits.items()}

    @cached_property
    def total(self) -> Array:
        """Σ_j P = 1 − Σ shares, 0 if the row sees nothing."""
        return np.where(self.lse == -np.inf, 0, 1 - sum(self.shares.values()))


class ChunkWeights:
    """Scores S, weights P and dropout D of a chunk.

    raw: the scores before score rules. D: None without dropout. plain: nothing is hidden, so no mask of hidden pairs is
    needed.
    """

    def __init__(self, saved: BlockLse, chunk: Chunk, plain: bool = False):
        self.saved, self.chunk = saved, chunk
        self.raw = chunk.raw()
        self.S, self.P = saved.weights(chunk, self.raw)
        self.hidden = None if plain else masked(self.S)
        self.D = chunk.dropout()

    def visible(self, x: Array) -> Array:
        """Set x to 0 in place where a pair is hidden, NaN included."""
        if self.hidden is not None:
            np.copyto(x, 0, where=self.hidden)
        return x

    def dropped(self, x: Array) -> Array:
        """Multiply x by D in place."""
        if self.D is not None:
            x *= self.D
        return x

    @cached_property
    def surprise(self) -> Array:
        """Return log P + 1, the derivative of P log P; finite where P is 0."""
        return self.visible(bounded(self.S - self.saved.finite_lse)) + 1

    def through(self, node: Node | None, x: Array, ds: Array | None = None) -> Array:
        """Return x · node, where node is a derivative of the score rule; None means 1.

        ds: T˙, for a derivative along a direction.
        """
        return x if node is None else self.visible(x * self.chunk.evaluate(node, self.raw, ds))


class InputTangents:
    """Tangents of the inputs of a call, and the tangent of its score rule along them."""

    def __init__(self, p: Problem, t: Differential):
        self.t = t
        self.tables = {table: Table(x) for table, x in t.tables.items()}
        self.score = self.of(p.score_node)

    def of(self, node: Node | None) -> Node | None:
        """Return the tangent of an expression in the score and in the tables."""
        return None if node is None else tangent(node, self.tables)


class BlockTangents:
    """Tangents of a query block: q˙, scaled as q is, and k˙ and v˙ of all keys; None means constant.

    logits: those of `Problem.denominators`, by field; 0 means constant.
    """

    def __init__(self, saved: BlockOutputs, along: InputTangents):
        block, t = saved.block, along.t
        heads, self.along, self.saved = block.heads, along, saved
        self.q: Array | None = None
        if t.query is not None:
            self.q = block.take(heads.per_query_head(t.query, 2)) * block.p.compute.type(block.p.scale)
        self.k, self.v = (None if x is None else heads.per_kv_head(x) for x in (t.key, t.value))
        logits = {name: getattr(t, name, None) for name in block.p.denominators}
        self.logits = {name: 0 if x is None else heads.logit(x) for name, x in logits.items()}

    def scores(self, x: ChunkWeights) -> tuple[Array, Array]:
        """Return T˙ and S˙, which are 0 for hidden pairs.

        Without a score rule both are one array.
        """
        chunk, along = x.chunk, self.along
        T = np.zeros(chunk.shape, x.S.dtype)
        if self.q is not None:
            T += np.matmul(self.q, chunk.k.swapaxes(-1, -2))
        if self.k is not None:
            T += np.matmul(chunk.block.q, chunk.take(self.k).swapaxes(-1, -2))
        S = T
        if along.score is not None:
            S = chunk.evaluate(along.score, x.raw, T)
            if S is T or S.shape != chunk.shape:
                S = np.array(np.broadcast_to(S, chunk.shape))
        if along.t.bias is not None:
            S += chunk.dense(along.t.bias)
        return T, x.visible(S)

    def second_raw(self, other: "BlockTangents", x: ChunkWeights) -> Array:
        """Return T¨, the second derivative of T along this direction and another."""
        T = np.zeros(x.chunk.shape, x.S.dtype)
        for a, b in ((self, other), (other, self)):
            if a.q is not None and b.k is not None:
                T += np.matmul(a.q, x.chunk.take(b.k).swapaxes(-1, -2))
        return T


class WeightTangents(NamedTuple):
    """Tangents of a chunk's weights.

    P˙ = P (w − lse˙), with lse˙ = Σ P w + what no key has. weighted: P w. second_order: a term of −H˙ in addition to
    Σ P w (log P + 1). values: pairs of weights and tangents of V; their products add to the output's tangent.
    """

    weighted: Array
    second_order: Array | None
    values: list[tuple[Array, Array]]


ChunkTangents = Callable[[ChunkWeights], WeightTangents]


def carried(p: Problem) -> SumShapes:
    """Return the shapes and dtypes of the sums of `output_tangents` that go on from part to part."""
    tails = {"mean": (), "total": (), "falling": (), "tangent": (p.d_v,)}
    return {name: (p.shape(p.n_q, *tail), p.compute) for name, tail in tails.items()}


def output_tangents(
    p: Problem, outputs: Outputs, begin: Callable[[BlockOutputs], tuple[Any, ChunkTangents]]
) -> Outputs:
    """Return tangents of the outputs, of the entropy if it is given, in one pass.

    begin: returns for a query block the part of lse˙ that no key has, and a function from a chunk to its weights'
    tangents.

        O˙ = Σ P D w V + Σ P D V˙ − lse˙ (O + low)
        H˙ = lse˙ (Σ P − H) − Σ P w (log P + 1)
    """
    c = p.compute
    d_out = p.new_output()
    d_lse = np.empty(p.shape(p.n_q), c)
    d_entropy = None if outputs.entropy is None else np.empty_like(d_lse)
    part = Carried(True, True, {}) if p.part is None or p.part.query is None else p.part.query
    if part.first:
        part.sums.update({name: np.zeros(*x) for name, x in carried(p).items()})

    def work(block: QueryBlock) -> None:
        saved = BlockOutputs(block, outputs)
        outside, chunk_tangents = begin(saved)
        mean, total, falling, out = sums = [
            np.zeros((*block.head_shape, BLOCK_Q, *x.shape[len(p.lead) + 2 :]), c) for x in part.sums.values()
        ]
        for own, every in zip(sums, part.sums.values(), strict=True):
            own[:, :, block.valid] = rows_of(block, every, own.ndim - 2)
        for chunk in block.chunks(TANGENT_TILES):
            x = ChunkWeights(saved, chunk)
            weighted, second_order, values = chunk_tangents(x)
            mean += in_order(weighted.sum(axis=-1))
            if d_entropy is not None:
                # 1 − p_sink would be 0 if the sink has nearly all of the weight.
                total += in_order(x.P.sum(axis=-1))
                falling += in_order((weighted * x.surprise).sum(axis=-1))
                if second_order is not None:
                    falling += in_order(second_order.sum(axis=-1))
            clean = bool(block.heads.finite_v[chunk.tiles].all())
            out += in_order(product(x.dropped(weighted), chunk.v, None if clean else x.hidden))
            for P, v in values:
                out += in_order(product(x.dropped(P), chunk.take(v), x.hidden))
        for own, every in zip(sums, part.sums.values(), strict=True):
            rows_of(block, every, own.ndim - 2)[...] = own[:, :, block.valid]

        lse = mean[:, :, None, :, None] + outside
        d = out[:, :, None] - lse * saved.out
        if saved.low is not None:
            d -= lse * saved.low
        valid = block.valid
        rows_of(block, d_out, 2)[...] = d[:, :, 0, valid].astype(p.dtype)
        rows_of(block, d_lse, 1)[...] = lse[:, :, 0, valid, 0]
        if d_entropy is not None:
            entropy = lse[:, :, 0, :, 0] * (total - saved.entropy[:, :, 0, :, 0]) - falling
            rows_of(block, d_entropy, 1)[...] = entropy[:, :, valid]

    spread_blocks(p, work)
    return Outputs(d_out, d_lse, d_entropy)


def jvp(p: Problem, t: Differential, outputs: Outputs | None = None) -> tuple[Outputs, Outputs]:
    """Return the outputs and their tangents along t; w is S˙.

    Given outputs are not computed again. If their entropy is None, so is its tangent.
    """
    primal = outputs
    if primal is None:
        low = p.new_low()
        if low is not None:
            # NumPy takes long to convert float16, where a remainder is often subnormal.
            low = Outputs(None, None, None, np.empty_like(low.low, dtype=p.compute))
        primal, _ = engines()["tiled"].forward(replace(p, observe=(ENTROPY,)), None, low)
    along = InputTangents(p, t)

    def begin(saved: BlockOutputs) -> tuple[Any, ChunkTangents]:
        tangents = BlockTangents(saved, along)

        def chunk_tangents(x: ChunkWeights) -> WeightTangents:
            _, S = tangents.scores(x)
            S *= x.P
            return WeightTangents(S, None, [] if tangents.v is None else [(x.P, tangents.v)])

        return sum(x * tangents.logits[name] for name, x in saved.shares.items()), chunk_tangents

    return outputs or primal._replace(low=None), output_tangents(p, primal, begin)


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    """Return the second derivatives of the outputs along t and u.

    d_t, d_u: the tangents of the outputs along each, as `jvp` returns them. With a = S˙ − lse˙ along t and b along u,
    P˙ is P a and P b, and P¨ = P (w − lse¨) with w = S¨ + a b.
    """
    along_t, along_u = InputTangents(p, t), InputTangents(p, u)
    d_ds, d_tables = p.rules.score_partials
    d_ds_along_u = along_u.of(d_ds)
    mixed = [
        multiply(tangent(node, along_u.tables), reading(leaf, along_t.tables))
        for leaf, node in d_tables.items()
        if leaf.payload in along_t.tables
    ]

    def begin(saved: BlockOutputs) -> tuple[Any, ChunkTangents]:
        first, second = BlockTangents(saved, along_t), BlockTangents(saved, along_u)
        lse_t, lse_u = (BlockOutputs(saved.block, d).lse for d in (d_t, d_u))

        def chunk_tangents(x: ChunkWeights) -> WeightTangents:
            (T_t, S_t), (T_u, S_u) = first.scores(x), second.scores(x)
            w = first.second_raw(second, x)
            if d_ds is not None:
                w = w * x.chunk.evaluate(d_ds, x.raw) + T_t * x.chunk.evaluate(need(d_ds_along_u), x.raw, T_u)
            for node in mixed:
                w += x.chunk.evaluate(node, x.raw, T_u)
            a, b = S_t - lse_t, S_u - lse_u
            ab = a * b
            w = x.visible(w) + ab
            Pa, Pb = x.P * a, x.P * b
            values = [(P, tangents.v) for P, tangents in ((Pa, second), (Pb, first)) if tangents.v is not None]
            return WeightTangents(w * x.P, ab * x.P, values)

        terms = (x * (first.logits[name] - lse_t) * (second.logits[name] - lse_u) for name, x in saved.shares.items())
        return sum(terms), chunk_tangents

    return output_tangents(p, outputs, begin)


def need(x: X | None) -> X:
    """Return x as not None, for type checkers."""
    assert x is not None
    return x
