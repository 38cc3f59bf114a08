"""Backward: gradients of Q, K, V, the bias and tables, from lse and cotangents.

    P = exp(S − lse)        dP = D · (dO Vᵀ)        dS = P · (dP + c − dH (log P + 1))        dT = scale · dS · ∂score
    dQ = dT K               dK = dTᵀ Q              dV = (P · D)ᵀ dO

with one c = dlse + dH (Σ P − H) − Σ dO · (O + low) for each row. Here low is what rounding took from O, if that is
given. Each query block and tile of keys costs five products. Sᵀ = K Qᵀ, dPᵀ = V dOᵀ and dQᵀ += Kᵀ dTᵀ have a query in
every lane, like forward. dK and dV have features in lanes, and read P and dT by broadcasts.

A work group is some query blocks that share K and V: all of them use a tile before the next. dQ is summed over tiles in
the order of keys, dK and dV over query blocks in their order. The schedule keeps this order between work groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from regard.engines.cpu.kernels.backward_amx import AmxGradientProducts
from regard.engines.cpu.kernels.backward_products import VectorProducts, VisibleProducts
from regard.engines.cpu.kernels.backward_rows import KeyRows, QueryRows
from regard.engines.cpu.kernels.backward_terms import Factors, Products
from regard.engines.cpu.kernels.blocks import NONE, RowBlock, each_step, each_work_group
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.rule_gradients import add_bias_gradient
from regard.engines.cpu.kernels.rules import Rules
from regard.engines.cpu.kernels.score_gradients import Scales, ScoreGradients, ScoreVector
from regard.engines.cpu.kernels.softmax import bounded, subtract_lse
from regard.engines.cpu.kernels.tiles import KeyTile, read_tile
from regard.engines.cpu.kernels.transposes import Transposes
from regard.engines.cpu.language.amx import AmxRegisters
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.spec.scratch import TileScratch, backward_block_scratch, backward_tile_scratch
from regard.engines.cpu.spec.specs import BackwardSpec
from regard.engines.cpu.spec.tiles import TILE_BITS


@dataclass(frozen=True)
class Formulas:
    """The formulas of backward, or of its tangent.

    numbers, rests: as in `QueryRows`. weights_of: as in `ScoreGradients`.
    """

    products: Products
    numbers: Mapping[str, str]
    rests: Sequence[tuple[str, str, str]]
    weights_of: Callable[[ScoreVector], tuple[Value, ...]]


def weights_of(x: ScoreVector) -> tuple[Value, ...]:
    """Return P · D and dT."""
    k, spec, numbers, scales, zero = x.k, x.spec, x.numbers, x.scales, x.k.constant(x.spec.real, 0.0)
    (s, *results), seen = x.scores()
    difference = s - numbers["lse"]
    P = x.weight(difference)
    dP, PD = x.load("dS"), P
    if spec.dropout:
        D = x.dropout_scale()
        dP, PD = dP * D, P * D
    G = dP + numbers["c"]
    if spec.entropy:
        G = G - numbers["d_entropy"] * (bounded(k, difference * (1 / scales.exponent)) + 1.0)
    dS = k.where(seen, P * G, zero)
    dT = dS * scales.gradient
    if spec.nonlinear:
        derivative, *results = results
        dT = k.where(seen, dT * derivative, zero)
    x.add([dS], results, seen)
    return k.where(seen, PD, -zero), dT


BACKWARD = Formulas(
    Products(
        scores={"P": [("k", "q")], "dS": [("v", "dout")]},
        dq=[("k", "dS")],
        dv=[("P", "dout")],
        dk=[("dS", "q")],
    ),
    numbers={"d_entropy": "d_entropy"},
    rests=[("c", "dout", "out")],
    weights_of=weights_of,
)


class BackwardKernel:
    """The backward kernel; with other formulas its tangent."""

    def __init__(self, k: Kernel, spec: BackwardSpec, formulas: Formulas):
        self.k, self.spec, self.lanes = k, spec, Lanes(k, spec)
        lanes, rules, scale = self.lanes, Rules(self.lanes), k.real("scale", spec.real)
        self.scratch = TileScratch(k.pointer("scratch", spec.real), backward_tile_scratch(spec, lanes.d, lanes.d_v))
        scales = Scales(scale, spec, lanes.W)
        self.registers, self.transposes = AmxRegisters(k) if spec.amx else None, Transposes(lanes)
        factors = Factors(lanes, spec, formulas.products)
        self.products = (
            AmxGradientProducts(lanes, spec, factors, self.registers)
            if self.registers
            else VectorProducts(lanes, spec, factors)
        )
        self.visible_products = VisibleProducts(lanes, spec, factors)
        self.score_gradients = ScoreGradients(lanes, spec, rules, scales, factors, formulas.weights_of)
        self.query_rows = QueryRows(lanes, spec, self.scratch, scales, formulas.numbers, formulas.rests)
        self.key_rows = KeyRows(lanes, spec, self.scratch)
        self.score_scale = scales.score if spec.paired else None

    def run(self) -> None:
        each_work_group(self.lanes, self.registers, lambda first, stop, _: self._work_group(first, stop))

    def _work_group(self, first: Value, stop: Value) -> None:
        """Compute the next tile of those that have it, until none is left."""
        k, lanes = self.k, self.lanes
        size = sum(backward_block_scratch(self.spec, lanes.d, lanes.d_v).values(), k.whole(0))
        tiles, none = k.pointer("tiles", I64), k.constant(I64, NONE)

        def block_at(n: Value) -> RowBlock:
            return RowBlock(lanes, n, self.scratch.end + (n - first) * size)

        def each(work: Callable[[RowBlock], None]) -> None:
            with k.loop(stop, start=first) as n:
                work(block_at(n))

        def next_tile(block: RowBlock) -> Value:
            upcoming, end, cursor = k.variable(none), block.field("tiles") + block.field("count"), block.state.state
            with k.when(cursor[0] < end):
                number = tiles[cursor[0]] >> TILE_BITS
                upcoming.value = k.where(number < k.integer("to"), number, none)
            return upcoming.value

        def compute(block: RowBlock) -> None:
            cursor = block.state.state
            place = cursor[0]
            word = tiles[place]
            cursor[0] = place + 1
            self._tile(read_tile(block, self.scratch, place, word))

        each(self._begin)
        each_step(k, each, next_tile, lambda number: self.key_rows.copy(block_at(first), number), compute)
        each(self.query_rows.end)
        if self.spec.trains_bias:
            k.fence()

    def _begin(self, block: RowBlock) -> None:
        """Find the block's first tile, and store its rows."""
        k, state = self.k, block.state.state
        tiles, end = k.pointer("tiles", I64), block.field("tiles") + block.field("count")
        at = k.variable(block.field("tiles"))
        with k.loop_while(lambda: at.value < end):
            with k.when((tiles[at.value] >> TILE_BITS) >= k.integer("from")):
                state[1] = at.value
                at.value = k.constant(I64, NONE)
            at.value = at.value + 1
        state[0] = k.where(at.value > NONE, state[1], end)
        self.query_rows.begin(block)

    def _tile(self, tile: KeyTile) -> None:
        """Add the gradients of a query block and a tile of keys."""
        k, spec = self.k, self.spec
        self.products.scores(tile)
        self._fetch_dense(tile)
        if not spec.ruled:
            subtract_lse(self.lanes, tile, tile.block.state.large, self.score_scale)
        self.score_gradients.compute(tile)
        if spec.trains_bias:
            add_bias_gradient(self.lanes, spec, tile)
        with k.choice((self.scratch.state.of(I64)[0] | tile.block.state.state[1]) != 0) as (not_finite, finite):
            with not_finite:
                self.visible_products.add(tile)
            with finite:
                self.products.add(tile)

    def _fetch_dense(self, tile: KeyTile) -> None:
        """Transpose a tile of the bias, its tangent, and masks; an absent tangent is 0."""
        k, spec, scratch = self.k, self.spec, tile.scratch
        for name in spec.names("bias", "mask"):
            start, stop = tile.mixed if name in spec.masks else (tile.first, tile.stop)
            if name not in spec.varying:
                self.transposes.fetch(name, scratch[name], tile, start, stop)
                continue
            with k.choice(tile.block.has(name)) as (present, absent):
                with present:
                    self.transposes.fetch(name, scratch[name], tile, start, stop)
                with absent:
                    self.lanes.fill(scratch[name] + start * self.lanes.B, 0.0, stop - start)
