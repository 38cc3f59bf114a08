"""The tangent of backward: its kernel with a tangent of every product and sum.

Along tangents of the inputs and of the cotangents, with the names of `kernels/backward.py` and a dot for a tangent:

    Ṡ = tangent of score along scale · (Q̇ Kᵀ + Q K̇ᵀ), + ḃias         Ṗ = P · (Ṡ − l̇se)
    dṠ = Ṗ · G + P · Ġ        G = dP + c − dH (log P + 1)            Ġ = dṖ + ċ − dḢ (log P + 1) − dH (Ṡ − l̇se)
    dṪ = scale · (dṠ · ∂score + dS · its tangent)                     dṖ = D · (dȮ Vᵀ + dO V̇ᵀ)
    dQ˙ = dṪ K + dT K̇         dK˙ = dṪᵀ Q + dTᵀ Q̇                    dV˙ = (Ṗ · D)ᵀ dO + (P · D)ᵀ dȮ

Twelve products replace backward's five. Inputs without a tangent drop a term, which is known at run time.
"""

from collections.abc import Sequence

from regard.engines.cpu.kernels.backward import BackwardKernel, Lane, QueryRows
from regard.engines.cpu.kernels.backward_terms import ProductTerms
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.specs import BackwardTangentSpec


class BackwardTangentKernel(BackwardKernel):
    """The tangent-of-backward kernel."""

    spec: BackwardTangentSpec

    # Query blocks

    def _arrays_of_rows(self) -> list[QueryRows]:
        """Return also Q̇, dȮ and Ȯ."""
        block, one = self.block, self.k.constant(self.real, 1.0)
        q, dout, out = super()._arrays_of_rows()
        return [
            q,
            dout,
            QueryRows("q_dot", self.d, block.q_dot, block.q_dot_rows, self.query_scale),
            QueryRows("dout_dot", self.d_v, block.dout_dot, block.dout_dot_rows, one),
            out,
            QueryRows("out_dot", self.d_v, self.tile.O_dot, None, one),
        ]

    def _begin_row(self, lane: Value, g: Value, r: Value) -> None:
        super()._begin_row(lane, g, r)
        k, block = self.k, self.block
        row = g * k.integer("row_head") + r
        block.lse_dot[lane] = self.current.address("lse_dot")[row]
        block.c_dot[lane] = self.current.address("given_dot")[row]
        if self.spec.entropy:
            block.d_entropy_dot[lane] = self.current.address("d_entropy_dot")[row]

    def _begin_rest(self) -> None:
        """Compute also ċ − Σ dȮ · O − Σ dO · Ȯ."""
        super()._begin_rest()
        block, tile = self.block, self.tile
        self._subtract(block.c_dot, block.dout, tile.O_dot)
        with self._if_there("dout_dot"):
            self._subtract(block.c_dot, block.dout_dot, tile.O)

    # Products

    def _terms_of_scores(self) -> list[tuple[Pointer, Value, ProductTerms]]:
        """Return also Ṡᵀ = K Q̇ᵀ + K̇ Qᵀ and dṖᵀ = V dȮᵀ + V̇ dOᵀ."""
        tile, block = self.tile, self.block
        S_dot = self._both([tile.k_copy, tile.k_dot_copy], [block.q_dot, block.q], "q_dot", "k_dot")
        dP_dot = self._both([tile.v_copy, tile.v_dot_copy], [block.dout_dot, block.dout], "dout_dot", "v_dot")
        more = [(tile.P_dot, self.d, S_dot), (tile.dS_dot, self.d_v, dP_dot)]
        return [*super()._terms_of_scores(), *more]

    def _terms_of_queries(self) -> ProductTerms:
        """Return dQ˙ᵀ += Kᵀ dṪᵀ + K̇ᵀ dTᵀ."""
        rows = [self._key_rows(name) for name in self.spec.keys]
        return self._both(rows, [self._gradient_tile(name) for name in ("dS_dot", "dS")], None, "k_dot")

    def _terms_of_keys(self) -> tuple[ProductTerms, ProductTerms]:
        """Return dV˙ += (Ṗ · D)ᵀ dO + (P · D)ᵀ dȮ and dK˙ += dṪᵀ Q + dTᵀ Q̇."""
        block = self.block
        weights, gradients = ([self._bf16(name) for name in names] for names in (("P_dot", "P"), ("dS_dot", "dS")))
        return (
            self._both(weights, [block.dout_rows, block.dout_dot_rows], None, "dout_dot"),
            self._both(gradients, [block.q_rows, block.q_dot_rows], None, "q_dot"),
        )

    def _both(
        self, factors: Sequence[Pointer], vectors: Sequence[Pointer], first: str | None, second: str
    ) -> ProductTerms:
        """Return two terms; each is present if its named array is."""
        start = self.k.whole(0) if first is None else (~self.current.has(first)).to(I64)
        return ProductTerms(factors, vectors, start, self.current.has(second).to(I64) + 1)

    # Score gradients

    def _fetch_dense(self, tile: KeyTile) -> None:
        super()._fetch_dense(tile)
        if self.spec.bias_dot:
            bias_dot = self.tile.bias_dot
            with self.k.choice(self.current.has("bias_dot")) as (varies, stays):
                with varies:
                    self.transposes.fetch("bias_dot", bias_dot, tile, tile.first, tile.stop)
                with stays:
                    self.lanes.fill(bias_dot + tile.first * self.B, 0.0, tile.stop - tile.first)

    def _score_gradient(self, tile: KeyTile, p: Value, lanes: Lane, present: Value, masked: bool) -> tuple[Value, ...]:
        """Compute P · D, dT and their tangents for key p in some lanes.

        Add dṠ to the other tangents.
        """
        k, spec, zero = self.k, self.spec, self.lanes.zero()
        at, rows = p * self.B + lanes.c, lanes.rows
        S_dot = self.lanes.load(self.tile.P_dot, at) * (self.gradient_scale if spec.paired else 1 / self.exponent_scale)
        (s, *results), seen = self._ruled(tile, p, lanes, present, masked, {"ds": S_dot})
        if self.score is not None:
            S_dot, *results = results
        if spec.bias_dot:
            S_dot = S_dot + self.lanes.load(self.tile.bias_dot, at)
        difference, grown = s - rows["lse"], S_dot - rows["lse_dot"]
        P = mathematics.weight2(k, difference * (mathematics.LOG2_E / self.exponent_scale))
        dP, dP_dot, PD = self.lanes.load(self.tile.dS, at), self.lanes.load(self.tile.dS_dot, at), P
        if spec.dropout:
            D = self._dropout_scale(lanes.keys, self._key(tile, p))
            dP, dP_dot, PD = dP * D, dP_dot * D, P * D
        G, G_dot = dP + rows["c"], dP_dot + rows["c_dot"]
        if spec.entropy:
            surprise = difference * (1 / self.exponent_scale) + 1.0
            G = G - rows["d_entropy"] * surprise
            G_dot = G_dot - rows["d_entropy_dot"] * surprise - rows["d_entropy"] * grown
        dS, dS_dot = (k.where(seen, P * x, zero) for x in (G, k.fma(grown, G, G_dot)))
        dT, dT_dot = dS * self.gradient_scale, dS_dot * self.gradient_scale
        if spec.nonlinear:
            derivative, derivative_dot, *results = results
            dT_dot = k.where(seen, dT_dot * derivative + dT * derivative_dot, zero)
            dT = k.where(seen, dT * derivative, zero)
        if spec.trains_bias:
            self.tile.bias[at] = dS_dot
        lanes.sums.add(results, [dS_dot, dS], seen)
        return k.where(seen, PD, k.constant(self.real, -0.0)), dT, k.where(seen, PD * grown, zero), dT_dot
