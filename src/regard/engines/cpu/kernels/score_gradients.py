"""P · D and dT from scores and dP, for a key and a vector of queries at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from regard.engines.cpu.kernels.backward_terms import Factors
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.rule_gradients import TableGradients
from regard.engines.cpu.kernels.rules import Dropout, RuleRows, Rules
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import I32
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.spec.specs import BackwardSpec


class Scales:
    """Factors between products, scores and exponents.

    exponent: from scores, which are logarithms of base 2, but natural where a rule follows.
    """

    def __init__(self, scale: Value, spec: BackwardSpec, W: int):
        self.exponent = 1.0 if spec.ruled else mathematics.LOG2_E
        # Broadcast once, outside of all loops.
        self.gradient, self.score = scale.spread(W), (scale * self.exponent).spread(W)
        self.query = scale.k.constant(spec.real, 1.0) if spec.paired else scale * self.exponent


@dataclass(frozen=True)
class Queries:
    """Some lanes before their keys."""

    c: Value  # the first of them
    rules: RuleRows
    present: Value  # a bit for each lane that has a row
    numbers: Mapping[str, Value]  # by the names of `BackwardSpec.numbers`
    dropout_keys: tuple[Value, Value]
    tables: TableGradients


class ScoreVector:
    """The scores of some queries and a key.

    p: the key, counted from the tile's start. present: a bit for each lane that takes part. masked: true where a mask
    may hide the key. numbers: of the queries, such as lse and c.
    """

    def __init__(
        self, parts: "ScoreGradients", tile: KeyTile, queries: Queries, p: Value, present: Value, masked: bool
    ):
        self.parts, self.k, self.spec, self.scales = parts, parts.k, parts.spec, parts.scales
        self.tile, self.queries, self.numbers, self.masked = tile, queries, queries.numbers, masked
        self.p, self.at, self.present = p, p * parts.lanes.B + queries.c, present

    def load(self, name: str) -> Value:
        """Return the vector of a tile."""
        return self.parts.lanes.load(self.tile.scratch[name], self.at)

    @property
    def key(self) -> Value:
        """The absolute index of the key."""
        return self.tile.start + self.k.integer("j") + self.p

    def scores(self, **leaves: Value) -> tuple[list[Value], Value]:
        """Return the results of the rule, and visibility.

        The first result is the score with the bias. leaves: of the rule, in addition to those of forward.
        """
        rules, rows, s = self.parts.rules, self.queries.rules, self.load("P")
        if self.spec.paired:
            s = s * self.scales.score
        context = TileContext({**rows.leaves, "j": self.key, "s": s, **leaves}, lambda n: self.load(f"dense{n}") != 0.0)
        results = rules.scores(context, rows)
        if self.spec.bias:
            results[0] = results[0] + self.load("bias")
        seen = self.k.flags(self.present, self.parts.lanes.W) & (results[0] != -math.inf)
        mask = rules.visible(context, rows) if self.masked else None
        return results, seen if mask is None else seen & mask

    def weight(self, difference: Value) -> Value:
        """Return exp(S − lse), of a difference of scores."""
        return mathematics.weight2(self.k, difference * (mathematics.LOG2_E / self.scales.exponent))

    def dropout_scale(self) -> Value:
        return self.parts.dropout.scale(self.queries.dropout_keys, self.key)

    def add(self, dS: Sequence[Value], derivatives: Sequence[Value], seen: Value) -> None:
        """Add dS to the gradients of the bias and of tables.

        derivatives: the results of the rule for tables.
        """
        if self.spec.trains_bias:
            self.tile.scratch.bias[self.at] = dS[0]
        self.queries.tables.add(dS, derivatives, seen)


class ScoreGradients:
    """P · D and dT of tiles, and in the tangent theirs.

    weights_of: computes them for a key and some queries, in the order of `BackwardSpec.weights`.
    """

    def __init__(
        self,
        lanes: Lanes,
        spec: BackwardSpec,
        rules: Rules,
        scales: Scales,
        factors: Factors,
        weights_of: Callable[[ScoreVector], tuple[Value, ...]],
    ):
        self.k, self.lanes, self.spec, self.scales, self.factors = lanes.k, lanes, spec, scales, factors
        self.rules, self.dropout, self.weights_of = rules, Dropout(lanes), weights_of

    def compute(self, tile: KeyTile) -> None:
        """Compute all keys: those that a mask may hide, then those on both sides."""
        k = self.k
        if not self.spec.mask:
            self._keys(tile, tile.first, tile.stop, False)
            return
        self._keys(tile, *tile.mixed, True)
        with k.loop(2) as part:
            before = part == 0
            start = k.where(before, tile.first, tile.mixed[1])
            self._keys(tile, start, k.where(before, tile.mixed[0], tile.stop), False)

    def _keys(self, tile: KeyTile, start: Value, stop: Value, masked: bool) -> None:
        k, spec, lanes, scratch = self.k, self.spec, self.lanes, tile.scratch
        with k.loop(lanes.B, step=lanes.W) as c:
            queries = self._queries(tile, c)

            def weights(p: Value, present: Value) -> dict[str, Value]:
                vectors = self.weights_of(ScoreVector(self, tile, queries, p, present, masked))
                return dict(zip(spec.weights, vectors, strict=True))

            if not spec.paired:
                with k.loop(stop, start=start) as p:
                    for name, x in weights(p, queries.present).items():
                        scratch[name][p * lanes.B + c] = x
            else:
                # A missing key next to one that is present is hidden.
                with k.when(start < stop), k.loop(stop, start=start - start % 2, step=2) as p:
                    both = []
                    for n in range(2):
                        there = (p + n >= tile.first) & (p + n < tile.stop)
                        both.append(weights(p + n, k.where(there, queries.present, 0)))
                        for name, x in both[n].items():
                            self.factors.weights(scratch, name)[(p + n) * lanes.B + c] = k.round_bf16(x)
                    for name in spec.score_gradients:
                        packed = self.factors.gradients(scratch, name).of(I32)
                        packed[p // 2 * lanes.B + c] = k.pack_bf16(both[0][name], both[1][name])
            queries.tables.end()

    def _queries(self, tile: KeyTile, c: Value) -> Queries:
        k, lanes, block = self.k, self.lanes, tile.block
        rules = self.rules.rows(block, c, lanes.W)
        return Queries(
            c,
            rules,
            present=(k.whole(1) << k.minimum(k.maximum(block.field("lanes") - c, 0), lanes.W)) - 1,
            numbers={name: lanes.load(block.state[name], c) for name in self.spec.numbers},
            dropout_keys=self.dropout.keys(block, c),
            tables=TableGradients(lanes, self.spec, self.rules.score, tile, rules.score),
        )
