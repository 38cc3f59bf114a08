"""The sums of products of a tile in backward.

Sᵀ = K Qᵀ, dPᵀ = V dOᵀ and dQᵀ += Kᵀ dTᵀ have a query in every lane; dV += (P · D)ᵀ dO and dK += dTᵀ Q have features
there, and read numbers of dT and P through broadcasts. A product is a sum of *terms*, of which a tangent has two.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import BF16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.backward import BackwardKind, tile_area


@dataclass(frozen=True)
class Terms:
    """A sum of products of factors, rows of numbers that are read through broadcasts, and rows of vectors.

    The n-th factors meet the n-th vectors. Those from `first` to before `stop` are there, which is known when it runs.
    """

    factors: Sequence[Pointer]
    vectors: Sequence[Pointer]
    first: Value | int = 0
    stop: Value | int = 1


class Sums(Lanes):
    """What is multiplied, and where it lies. A tangent names other terms."""

    kind: BackwardKind

    def __init__(self, k: Kernel, kind: BackwardKind):
        super().__init__(k, kind)
        scale = k.real("scale", kind.real)
        # Scores are logarithms of base 2 unless a rule wants natural ones.
        self.unit = 1.0 if kind.ruled else mathematics.LOG2_E
        self.tile, self.rest = self._area(k.pointer("scratch", self.real), tile_area(kind, self.d, self.d_v))
        self.state = self.tile.state.of(I64)
        # What products take at once: a number, or a word of two.
        self.both, self.number = (2, I32) if kind.pairs else (1, kind.real)
        # Vectors, so that no loop makes them of numbers.
        self.slope_scale, self.score_scale = scale.spread(self.W), (scale * self.unit).spread(self.W)
        self.query_scale = k.constant(kind.real, 1.0) if kind.pairs else scale * self.unit

    # What is multiplied

    def _terms_of_scores(self) -> list[tuple[Pointer, Value, Terms]]:
        """By pairs, over features: where the products go, the number of features, rows of keys and turned queries."""
        tile, item = self.tile, self.item
        return [
            (tile.P, self.d, Terms([tile.k_copy], [item.q])),
            (tile.dS, self.d_v, Terms([tile.v_copy], [item.dout])),
        ]

    def _terms_of_queries(self) -> Terms:
        """By queries, over keys: rows of keys and slopes."""
        return Terms([self._key_rows("k")], [self._slopes_of("dS")])

    def _terms_of_keys(self) -> tuple[Terms, Terms]:
        """By keys, over queries, of dV and of dK: weights or slopes, and rows of queries."""
        item = self.item
        return Terms([self._short("P")], [item.dout_rows]), Terms([self._short("dS")], [item.q_rows])

    def _key_rows(self, name: str) -> Pointer:
        found: Pointer = getattr(self.tile, f"{name}_pairs" if self.kind.pairs else f"{name}_copy")
        return found

    def _slopes_of(self, name: str) -> Pointer:
        """A tile of slopes, two keys to a word where products take pairs."""
        found: Pointer = getattr(self.tile, f"{name}_pairs" if self.kind.pairs else name)
        return found

    def _short(self, name: str) -> Pointer:
        """A tile of weights or slopes, one key after the other."""
        found: Pointer = getattr(self.tile, f"{name}_short" if self.kind.pairs else name)
        return found.of(BF16) if self.kind.pairs else found

    def _pick_terms(self, n: Value, options: Sequence[Terms]) -> Terms:
        """The n-th of some sums."""
        last = max(len(x.factors) for x in options) - 1
        factors, vectors = (
            [self._pick_pointer(n, [lines[min(m, len(lines) - 1)] for lines in each]) for m in range(last + 1)]
            for each in ([x.factors for x in options], [x.vectors for x in options])
        )
        if not last:
            return Terms(factors, vectors)
        ends = [[self.k.whole(x) for x in each] for each in ([x.first for x in options], [x.stop for x in options])]
        return Terms(factors, vectors, self._pick(n, ends[0]), self._pick(n, ends[1]))

    @contextmanager
    def _each(self, terms: Terms) -> Iterator[tuple[Pointer, Pointer]]:
        """The terms that are there, one after the other: factors and vectors."""
        if len(terms.factors) == 1:
            yield terms.factors[0].of(self.number), terms.vectors[0].of(self.number)
            return
        with self.k.loop(terms.stop, start=terms.first) as n:
            factors, vectors = (self._pick_pointer(n, x) for x in (terms.factors, terms.vectors))
            yield factors.of(self.number), vectors.of(self.number)
