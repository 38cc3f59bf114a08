"""What derivatives in tiles share: the rows of a block, its pairs, how a direction moves them; `jvp` and its tangent.

The scores of a tile are computed again, its weights come from lse. A dot after a name is a tangent. Backward and its
tangent are in `regard.engines.tiled.backward_pass`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from regard.core.problem import Differential, Outputs, Problem
from regard.core.statistics import Statistic
from regard.engines.tiled.forward_pass import Given, forward, in_order, rows_of, spread_blocks, weight
from regard.engines.tiled.tiles import ROWS, TILES, Chunk, Rows, masked, product
from regard.rules import Node, Table, reading, tangent
from regard.rules.derivative import multiply
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
X = TypeVar("X")

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

    def raw_along(self, other: "Moving", x: Pairs) -> Array:
        """T¨, the second derivative of the scores before a rule along this direction and another."""
        T = np.zeros(x.chunk.shape, x.S.dtype)
        for a, b in ((self, other), (other, self)):
            if a.q is not None and b.k is not None:
                T += np.matmul(a.q, x.chunk.take(b.k).swapaxes(-1, -2))
        return T


class Moved(NamedTuple):
    """How the weights of some pairs move: by P (w − lse˙), lse˙ being Σ P w and what the sink adds.

    weighted: P w. bend: what is added to Σ P w (log P + 1), by which the entropy falls. values: weights, and the
    tangents of V that they are multiplied with.
    """

    weighted: Array
    bend: Array | None
    values: list[tuple[Array, Array]]


def moved(p: Problem, outputs: Outputs, begin: Callable[[Known], tuple[Any, Callable[[Pairs], Moved]]]) -> Outputs:
    """Tangents of the outputs, of the entropy if it is given, in one pass.

    begin: gives for the rows of a block what the sink adds to lse˙, and how the pairs of any chunk move. The tangent of
    the output is Σ P D w V − lse˙ · O and what V's own adds, that of the entropy lse˙ · (Σ P − H) − Σ P w (log P + 1).
    """
    c = p.compute
    d_out = p.new_output()
    d_lse = np.empty(p.shape(p.n_q), c)
    d_entropy = None if outputs.entropy is None else np.empty_like(d_lse)

    def work(rows: Rows) -> None:
        known = Known(rows, outputs)
        of_sink, of_pairs = begin(known)
        mean = np.zeros((*rows.heads, ROWS), c)
        total, bend, out = np.zeros_like(mean), np.zeros_like(mean), np.zeros((*mean.shape, p.d_v), c)
        for chunk in rows.chunks(AT_ONCE):
            x = Pairs(known, chunk)
            weighted, more, values = of_pairs(x)
            mean += in_order(weighted.sum(axis=-1))
            if d_entropy is not None:
                # Not 1 − p_sink, which is 0 where nearly all goes to the sink.
                total += in_order(x.P.sum(axis=-1))
                bend += in_order((weighted * x.surprise).sum(axis=-1))
                if more is not None:
                    bend += in_order(more.sum(axis=-1))
            clean = bool(rows.unit.finite_v[chunk.tiles].all())
            out += in_order(product(x.dropped(weighted), chunk.v, None if clean else x.hidden))
            for P, v in values:
                out += in_order(product(x.dropped(P), chunk.take(v), x.hidden))

        lse = mean[:, :, None, :, None] + of_sink
        d = out[:, :, None] - lse * known.out
        inside = rows.inside
        rows_of(rows, d_out, 2)[...] = d[:, :, 0, inside].astype(p.dtype)
        rows_of(rows, d_lse, 1)[...] = lse[:, :, 0, inside, 0]
        if d_entropy is not None:
            entropy = lse[:, :, 0, :, 0] * (total - known.entropy[:, :, 0, :, 0]) - bend
            rows_of(rows, d_entropy, 1)[...] = entropy[:, :, inside]

    spread_blocks(p, work)
    return Outputs(d_out, d_lse, d_entropy)


def jvp(p: Problem, t: Differential, outputs: Outputs | None = None) -> tuple[Outputs, Outputs]:
    """Outputs (those given, if they are), and their tangents along tangents of the inputs; w is S˙.

    The tangent of the entropy is None where the entropy was not given.
    """
    if outputs is None:
        outputs, _ = forward(replace(p, observe=(Statistic("entropy"),)))
    way = Direction(p, t)

    def begin(known: Known) -> tuple[Any, Callable[[Pairs], Moved]]:
        moving = Moving(known, way)

        def pairs(x: Pairs) -> Moved:
            _, S = moving.scores(x)
            S *= x.P
            return Moved(S, None, [] if moving.v is None else [(x.P, moving.v)])

        return known.p_sink * moving.sink, pairs

    return outputs, moved(p, outputs, begin)


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    """The second derivatives of the outputs along t and u. d_t, d_u: their tangents along each, as `jvp` gives them.

    With a = S˙ − lse˙ along t and b along u, P moves by P a and P b, and by P (w − lse¨) along both, w = S¨ + a b.
    """
    ways = Direction(p, t), Direction(p, u)
    slope, slopes = p.rules.score_partials
    bend = ways[1].of(slope)
    bends = [
        multiply(tangent(node, ways[1].tables), reading(leaf, ways[0].tables))
        for leaf, node in slopes.items()
        if leaf.payload in ways[0].tables
    ]

    def begin(known: Known) -> tuple[Any, Callable[[Pairs], Moved]]:
        first, second = (Moving(known, way) for way in ways)
        lse_t, lse_u = (Known(known.rows, d).lse for d in (d_t, d_u))

        def pairs(x: Pairs) -> Moved:
            (T_t, S_t), (T_u, S_u) = first.scores(x), second.scores(x)
            w = first.raw_along(second, x)
            if slope is not None:
                w = w * x.chunk.evaluate(slope, x.raw) + T_t * x.chunk.evaluate(need(bend), x.raw, T_u)
            for node in bends:
                w += x.chunk.evaluate(node, x.raw, T_u)
            a, b = S_t - lse_t, S_u - lse_u
            more = a * b
            w = x.visible(w) + more
            Pa, Pb = x.P * a, x.P * b
            values = [(P, moving.v) for P, moving in ((Pa, second), (Pb, first)) if moving.v is not None]
            return Moved(w * x.P, more * x.P, values)

        return known.p_sink * (first.sink - lse_t) * (second.sink - lse_u), pairs

    return moved(p, outputs, begin)


def need(x: X | None) -> X:
    assert x is not None
    return x
