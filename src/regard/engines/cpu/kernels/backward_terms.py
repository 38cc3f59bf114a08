"""The products of backward by the names of their factors, and where these are.

Sᵀ = K Qᵀ, dPᵀ = V dOᵀ and dQᵀ += Kᵀ dTᵀ have a query in every lane. dV += (P · D)ᵀ dO and dK += dTᵀ Q have features in
lanes, and read P and dT by broadcasts. A product is a sum of terms: one in backward, two in its tangent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from regard.engines.cpu.kernels.blocks import BlockRecord
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import BF16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.scratch import TileScratch
from regard.engines.cpu.spec.specs import BackwardSpec

Terms = Sequence[tuple[str, str]]  # pairs of factors, whose products are summed


@dataclass(frozen=True)
class Products:
    """All products, by the names of their factors."""

    scores: Mapping[str, Terms]  # by the tile that is written: rows of keys, queries
    dq: Terms  # rows of keys, score gradients
    dv: Terms  # weights, rows of queries
    dk: Terms  # score gradients, rows of queries


@dataclass(frozen=True)
class ProductTerms:
    """A sum of products of factors, which are broadcast, and rows of vectors.

    The n-th factors meet the n-th vectors. Terms `first` to `stop` − 1 are present, which is known at run time.
    """

    k: Kernel
    factors: Sequence[Pointer]
    vectors: Sequence[Pointer]
    first: Value | int = 0
    stop: Value | int = 1

    @contextmanager
    def each(self) -> Iterator[tuple[Pointer, Pointer]]:
        """Loop over the terms that are present; yield factors and vectors."""
        if len(self.factors) == 1:
            yield self.factors[0], self.vectors[0]
            return
        with self.k.loop(self.stop, start=self.first) as n:
            yield self.k.pick_pointer(n, self.factors), self.k.pick_pointer(n, self.vectors)


def pick_terms(n: Value, options: Sequence[ProductTerms]) -> ProductTerms:
    """Return the n-th of some sums; shorter ones repeat their last term."""
    k, terms = options[0].k, max(len(x.factors) for x in options)
    factors, vectors = (
        [k.pick_pointer(n, [x[min(m, len(x) - 1)] for x in each]) for m in range(terms)]
        for each in ([x.factors for x in options], [x.vectors for x in options])
    )
    if terms == 1:
        return ProductTerms(k, factors, vectors)
    first, stop = ([k.whole(x) for x in each] for each in ([x.first for x in options], [x.stop for x in options]))
    return ProductTerms(k, factors, vectors, k.pick(n, first), k.pick(n, stop))


def when_given(block: BlockRecord, spec: BackwardSpec, name: str) -> AbstractContextManager[Any]:
    """Return a branch for an array that the call may lack, or a null context."""
    return block.k.when(block.has(name)) if name in spec.varying else nullcontext()


class Factors:
    """The factors of a tile's products.

    both: numbers that a product takes at once, 2 for packed pairs.
    """

    def __init__(self, lanes: Lanes, spec: BackwardSpec, products: Products):
        self.k, self.lanes, self.spec, self.products = lanes.k, lanes, spec, products
        self.both, self.number = (2, I32) if spec.paired else (1, spec.real)
        self.key_rows, self.packed, self.by_key = (
            ("{}_packed", "{}_packed", "{}_bf16") if spec.paired else ("{}_copy", "{}", "{}")
        )

    def scores(self, tile: KeyTile) -> list[tuple[Pointer, Value, ProductTerms]]:
        """Return the products of S and dP: the tile written, features, and terms."""
        return [
            (
                tile.scratch[into],
                self.lanes.d if terms[0][0] in self.spec.keys else self.lanes.d_v,
                self._terms(tile, terms, lambda x: tile.scratch[f"{x}_copy"], lambda y: tile.block.state[y]),
            )
            for into, terms in self.products.scores.items()
        ]

    def queries(self, tile: KeyTile) -> ProductTerms:
        """Return the product of dQ, over keys."""
        scratch = tile.scratch
        return self._terms(
            tile, self.products.dq, lambda x: scratch[self.key_rows.format(x)], lambda y: self.gradients(scratch, y)
        )

    def keys(self, tile: KeyTile) -> list[ProductTerms]:
        """Return the products of dV and dK, over queries."""
        return [
            self._terms(tile, terms, lambda x: self.weights(tile.scratch, x), lambda y: tile.block.state[f"{y}_rows"])
            for terms in (self.products.dv, self.products.dk)
        ]

    def gradients(self, scratch: TileScratch, name: str) -> Pointer:
        """Return a tile of score gradients; in pairs of keys where products take pairs."""
        return scratch[self.packed.format(name)]

    def weights(self, scratch: TileScratch, name: str) -> Pointer:
        """Return a tile of weights or score gradients, key by key."""
        tile = scratch[self.by_key.format(name)]
        return tile.of(BF16) if self.spec.paired else tile

    def _terms(
        self, tile: KeyTile, terms: Terms, factor: Callable[[str], Pointer], vector: Callable[[str], Pointer]
    ) -> ProductTerms:
        """Return a product; each of two terms needs the array that a call may lack."""
        k, number = self.k, self.number
        factors, vectors = [factor(x).of(number) for x, _ in terms], [vector(y).of(number) for _, y in terms]
        if len(terms) == 1:
            return ProductTerms(k, factors, vectors)
        first, second = (next((x for x in pair if x in self.spec.varying), None) for pair in terms)
        start = k.whole(0) if first is None else (~tile.block.has(first)).to(I64)
        assert second is not None
        return ProductTerms(k, factors, vectors, start, tile.block.has(second).to(I64) + 1)
