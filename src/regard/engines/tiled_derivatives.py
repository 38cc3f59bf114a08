"""What derivatives in tiles share: the rows of a block, its pairs and how a direction moves them; and `jvp`.

The scores of a tile are computed again, its weights come from lse. A dot after a name is a tangent. Backward and its
tangent are in `regard.engines.tiled_backward`.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from regard.engines.tiled import Given, forward, in_order, rows_of, spread_blocks, weight
from regard.engines.tiles import ROWS, TILES, Chunk, Rows, masked, product
from regard.observing import Statistic
from regard.problem import Differential, Outputs, Problem
from regard.rules import Node, Table, tangent

Array = np.ndarray[Any, np.dtype[Any]]

AT_ONCE = TILES // 2  # along a direction twice as many arrays are alive


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


class Pairs:
    """The pairs of a chunk: scores S, weights P, dropout D (None without), `raw` the scores before a rule.

    plain: nothing in it is hidden, so that nothing has to be asked whether it is.
    """

    def __init__(self, known: Given, chunk: Chunk, plain: bool = False):
        self.known, self.chunk = known, chunk
        self.raw = chunk.raw()
        self.S, self.P = known.weights(chunk, self.raw)
        self.hidden = None if plain else masked(self.S)
        self.D = chunk.dropout()

    def visible(self, x: Array) -> Array:
        """x, in place 0 where a pair is hidden, whatever stands there."""
        if self.hidden is not None:
            np.copyto(x, 0, where=self.hidden)
        return x

    def dropped(self, x: Array) -> Array:
        """x · D, in place."""
        if self.D is not None:
            x *= self.D
        return x

    @cached_property
    def surprise(self) -> Array:
        """log P + 1, by which −P log P grows less than P."""
        return self.visible(self.S - self.known.finite_lse) + 1

    def through(self, node: Node | None, x: Array, ds: Array | None = None) -> Array:
        """x · node, a derivative of the rule (None: no rule, so 1), along ds if it is one along a direction."""
        return x if node is None else self.visible(x * self.chunk.evaluate(node, self.raw, ds))


class Direction:
    """Tangents of the inputs of a call, and its rule along them."""

    def __init__(self, p: Problem, t: Differential):
        self.t = t
        self.tables = {table: Table(x) for table, x in t.tables.items()}
        self.score = self.of(p.score_node)
        self.sink: Array | None = None
        if t.sink is not None:
            self.sink = np.broadcast_to(t.sink.astype(p.compute), (p.heads,)).reshape(p.kv_heads, p.group, 1, 1, 1)

    def of(self, node: Node | None) -> Node | None:
        """The tangent of an expression in the score and in the tables."""
        return None if node is None else tangent(node, self.tables)


class Moving:
    """How a direction moves a block: q˙ (scaled, as q is), k˙ and v˙ (of all keys); None does not vary."""

    def __init__(self, known: Known, way: Direction):
        rows, t = known.rows, way.t
        unit, self.way, self.known = rows.unit, way, known
        self.q: Array | None = None
        if t.query is not None:
            self.q = rows.take(unit.per_query_head(t.query, 2)) * rows.p.compute.type(rows.p.scale)
        self.k, self.v = (None if x is None else unit.per_kv_head(x) for x in (t.key, t.value))
        self.sink: Any = 0 if way.sink is None else way.sink[unit.kv, unit.group]

    def scores(self, x: Pairs) -> tuple[Array, Array]:
        """T˙ and S˙, which is 0 where a pair is hidden; they share their memory where there is no rule."""
        chunk, way = x.chunk, self.way
        T = np.zeros(chunk.shape, x.S.dtype)
        if self.q is not None:
            T += np.matmul(self.q, chunk.k.swapaxes(-1, -2))
        if self.k is not None:
            T += np.matmul(chunk.rows.q, chunk.take(self.k).swapaxes(-1, -2))
        S = T
        if way.score is not None:
            S = chunk.evaluate(way.score, x.raw, T)
            if S is T or S.shape != chunk.shape:
                S = np.array(np.broadcast_to(S, chunk.shape))
        if way.t.bias is not None:
            S += chunk.dense(way.t.bias)
        return T, x.visible(S)


def jvp(p: Problem, t: Differential, outputs: Outputs | None = None) -> tuple[Outputs, Outputs]:
    """Outputs (those given, if they are), and their tangents along tangents of the inputs.

    With lse˙ = Σ P S˙ + p_sink · sink˙, the tangent of the output is Σ P D (S˙ V + V˙) − lse˙ · O, and that of the
    entropy −Σ P S˙ (log P + 1) + lse˙ · (Σ P − H); None where the entropy was not given.
    """
    c = p.compute
    if outputs is None:
        outputs, _ = forward(replace(p, observe=(Statistic("entropy"),)))
    d_out = p.new_output()
    d_lse = np.empty(p.shape(p.n_q), c)
    d_entropy = None if outputs.entropy is None else np.empty_like(d_lse)
    way = Direction(p, t)

    def work(rows: Rows) -> None:
        known = Known(rows, outputs)
        moving = Moving(known, way)
        mean = np.zeros((*rows.heads, ROWS), c)
        total, bend, moved = np.zeros_like(mean), np.zeros_like(mean), np.zeros((*mean.shape, p.d_v), c)
        for chunk in rows.chunks(AT_ONCE):
            x = Pairs(known, chunk)
            _, PS = moving.scores(x)
            PS *= x.P
            mean += in_order(PS.sum(axis=-1))
            if d_entropy is not None:
                # Not 1 − p_sink, which is 0 where nearly all goes to the sink.
                total += in_order(x.P.sum(axis=-1))
                bend += in_order((PS * x.surprise).sum(axis=-1))
            clean = bool(rows.unit.finite_v[chunk.tiles].all())
            moved += in_order(product(x.dropped(PS), chunk.v, None if clean else x.hidden))
            if moving.v is not None:
                moved += in_order(product(x.dropped(x.P), chunk.take(moving.v), x.hidden))

        lse = mean[:, :, None, :, None] + known.p_sink * moving.sink
        out = moved[:, :, None] - lse * known.out
        inside = rows.inside
        rows_of(rows, d_out, 2)[...] = out[:, :, 0, inside].astype(p.dtype)
        rows_of(rows, d_lse, 1)[...] = lse[:, :, 0, inside, 0]
        if d_entropy is not None:
            entropy = lse[:, :, 0, :, 0] * (total - known.entropy[:, :, 0, :, 0]) - bend
            rows_of(rows, d_entropy, 1)[...] = entropy[:, :, inside]

    spread_blocks(p, work)
    return outputs, Outputs(d_out, d_lse, d_entropy)


def need(x: Array | None) -> Array:
    assert x is not None
    return x
