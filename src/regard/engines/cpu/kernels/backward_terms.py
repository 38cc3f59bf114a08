"""Operands of backward's products.

Sᵀ = K Qᵀ, dPᵀ = V dOᵀ and dQᵀ += Kᵀ dTᵀ have a query in every lane. dV += (P · D)ᵀ dO and dK += dTᵀ Q have features in
lanes, and read P and dT by broadcasts. A product is a sum of terms: one in backward, two in its tangent.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.rules import Rules
from regard.engines.cpu.kernels.transposes import Transposes
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.amx import AmxRegisters
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import BF16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.scratch import BlockState, TileScratch, backward_tile_scratch
from regard.engines.cpu.spec.specs import BackwardSpec


@dataclass(frozen=True)
class ProductTerms:
    """A sum of products of factors, which are broadcast, and rows of vectors.

    The n-th factors meet the n-th vectors. Terms `first` to `stop` − 1 are present, which is known at run time.
    """

    factors: Sequence[Pointer]
    vectors: Sequence[Pointer]
    first: Value | int = 0
    stop: Value | int = 1


class BackwardTerms:
    """Operands of products and their addresses; a tangent adds terms."""

    current: RowBlock

    def __init__(self, k: Kernel, spec: BackwardSpec):
        self.spec = spec
        self.lanes = lanes = Lanes(k, spec)
        self.k, self.d, self.d_v = k, lanes.d, lanes.d_v
        self.real, self.W, self.B = lanes.real, lanes.W, lanes.B
        rules, self.transposes = Rules(lanes), Transposes(lanes)
        self.mask, self.score = rules.mask, rules.score
        scale = k.real("scale", spec.real)
        # Scores are logarithms of base 2, but natural where a rule follows.
        self.exponent_scale = 1.0 if spec.ruled else mathematics.LOG2_E
        scratch = k.pointer("scratch", self.real)
        self.tile = TileScratch(scratch, backward_tile_scratch(spec, self.d, self.d_v))
        self.rest = self.tile.end
        self.state = self.tile.state.of(I64)
        # Numbers that a product takes at once, and the type that holds them: a scalar, or a packed pair.
        self.both, self.number = (2, I32) if spec.paired else (1, spec.real)
        # Broadcast once, outside of all loops.
        self.gradient_scale, self.score_scale = scale.spread(self.W), (scale * self.exponent_scale).spread(self.W)
        self.query_scale = k.constant(spec.real, 1.0) if spec.paired else scale * self.exponent_scale

        self.registers = AmxRegisters(k)

    @property
    def block(self) -> BlockState:
        return self.current.state

    # Operands

    def _terms_of_scores(self) -> list[tuple[Pointer, Value, ProductTerms]]:
        """Return the products of S and dP.

        Each has a destination, a number of features, rows of keys and transposed queries.
        """
        tile, block = self.tile, self.block
        return [
            (tile.P, self.d, ProductTerms([tile.k_copy], [block.q])),
            (tile.dS, self.d_v, ProductTerms([tile.v_copy], [block.dout])),
        ]

    def _terms_of_queries(self) -> ProductTerms:
        """Return the product of dQ, over keys: rows of keys and score gradients."""
        return ProductTerms([self._key_rows("k")], [self._gradient_tile("dS")])

    def _terms_of_keys(self) -> tuple[ProductTerms, ProductTerms]:
        """Return the products of dV and of dK, over queries.

        Each has weights or score gradients, and rows of queries.
        """
        block = self.block
        return ProductTerms([self._bf16("P")], [block.dout_rows]), ProductTerms([self._bf16("dS")], [block.q_rows])

    def _key_rows(self, name: str) -> Pointer:
        return self.tile[f"{name}_packed" if self.spec.paired else f"{name}_copy"]

    def _gradient_tile(self, name: str) -> Pointer:
        """Return a tile of score gradients.

        Packed pairs of keys where products take pairs.
        """
        return self.tile[f"{name}_packed" if self.spec.paired else name]

    def _bf16(self, name: str) -> Pointer:
        """Return a tile of weights or score gradients, key by key."""
        found = self.tile[f"{name}_bf16" if self.spec.paired else name]
        return found.of(BF16) if self.spec.paired else found

    def _pick_terms(self, n: Value, options: Sequence[ProductTerms]) -> ProductTerms:
        """Return the n-th of some sums."""
        last = max(len(x.factors) for x in options) - 1
        factors, vectors = (
            [self.k.pick_pointer(n, [lines[min(m, len(lines) - 1)] for lines in each]) for m in range(last + 1)]
            for each in ([x.factors for x in options], [x.vectors for x in options])
        )
        if not last:
            return ProductTerms(factors, vectors)
        ends = [[self.k.whole(x) for x in each] for each in ([x.first for x in options], [x.stop for x in options])]
        return ProductTerms(factors, vectors, self.k.pick(n, ends[0]), self.k.pick(n, ends[1]))

    @contextmanager
    def _each(self, terms: ProductTerms) -> Iterator[tuple[Pointer, Pointer]]:
        """Loop over the terms that are present; yield factors and vectors."""
        if len(terms.factors) == 1:
            yield terms.factors[0].of(self.number), terms.vectors[0].of(self.number)
            return
        with self.k.loop(terms.stop, start=terms.first) as n:
            factors, vectors = (self.k.pick_pointer(n, x) for x in (terms.factors, terms.vectors))
            yield factors.of(self.number), vectors.of(self.number)
