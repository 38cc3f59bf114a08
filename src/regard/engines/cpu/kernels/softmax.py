"""The online softmax: maxima, exponentials, rescaling."""

import math
from collections.abc import Callable

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import F32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.scratch import SplitState, TileScratch

LARGEST = {"f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308}
LARGE = 2.0**10  # of scores as logarithms of base 2: their rounding changes weights by 2^-15 and more


def finite(k: Kernel, m: Value) -> Value:
    """Replace −∞ by the least number, so that −∞ − m is not NaN."""
    return k.maximum(k.constant(m.type, -LARGEST[m.type.name]), m)


def bounded(k: Kernel, difference: Value) -> Value:
    """Return s − m, or where exp(s − m) is 0 a number whose product with 0 is 0."""
    return k.maximum(k.constant(difference.type, -1000.0 if difference.type is F32 else -4000.0), difference)


def is_large(k: Kernel, m: Value, scaled: Value) -> Value:
    """Test for a maximum or an lse whose rounding changes weights.

    scaled: m in the scale of exponents.
    """
    return (k.intrinsic("fabs", m.type, scaled) > LARGE) & (m > -math.inf)


def subtract_lse(lanes: Lanes, tile: KeyTile, lse: Pointer, scale: Value | None) -> None:
    """Compute S ← S − lse where `lse`, of each query, is not 0.

    scale: from products to exponents.

    The natural score is the one from which forward computed lse. So a lone key has the weight 1, and none has more.
    """
    k, P = lanes.k, tile.scratch.P
    for c in lanes.vectors():
        natural = lanes.load(lse, c)
        far = natural != 0.0
        with k.when(far.any()), k.loop(tile.stop, start=tile.first) as p:
            s = lanes.load(P, p * lanes.B, c)
            if lanes.spec.ruled:
                below = k.where(s == -math.inf, s, finite(k, k.minimum(lanes.zero(), s - natural)))
            else:
                below = k.minimum(lanes.zero(), natural_score(k, s, scale) - natural) * mathematics.LOG2_E
                below = below if scale is None else below / scale
            P[p * lanes.B + c] = k.where(far, below, s)


def natural_score(k: Kernel, s: Value, scale: Value | None) -> Value:
    """Return a score from a QK product, which `scale` makes a logarithm of base 2.

    The logarithm may be infinite where the score is finite.
    """
    if scale is None:
        return s * mathematics.LN_2
    scaled = s * scale
    fits = k.intrinsic("fabs", s.type, scaled) <= LARGEST[s.type.name]
    return k.where(fits, scaled * mathematics.LN_2, s * (scale * mathematics.LN_2))


class RunningSoftmax:
    """The online softmax: running maxima, rescaling, and weights exp(S − m).

    Scores are natural where a rule follows the QK product, else logarithms of base 2. Weights of packed bf16 pairs come
    from unscaled products: there S · scale − m is rounded once, but m = max S · scale is rounded before. Where that
    matters, the maximum is subtracted from the unscaled scores, which is exact for those that count.
    """

    def __init__(self, lanes: Lanes):
        self.k, self.spec, self.lanes, self.real = lanes.k, lanes.spec, lanes, lanes.real
        k, spec, real = lanes.k, lanes.spec, lanes.real
        self.scale2 = mathematics.LOG2_E if spec.ruled else 1.0  # from scores to logarithms of base 2
        self.natural_scale = 1.0 if spec.ruled else mathematics.LN_2  # from scores to natural logarithms
        scale = k.real("scale", real) * (1.0 if spec.ruled else mathematics.LOG2_E)
        # Queries take the scale. Packed bf16 pairs would lose bits by it, and take its sign alone.
        self.query_scale, self.product_scale = scale, None
        if spec.paired:
            one = k.constant(real, 1.0)
            self.query_scale, self.product_scale = k.where(scale < 0.0, -one, one), k.intrinsic("fabs", real, scale)
        # The factor from maxima to the scale of exponents.
        self.maximum_scale = None if spec.ruled else self.product_scale

    def natural(self, s: Value) -> Value:
        """Return the natural score of a QK product, for rules."""
        scale = self.product_scale if self.spec.ruled else None
        return s if scale is None else s * scale

    def power(self, x: Value) -> Value:
        """Compute the exponential of a difference of scores, which is at most 0."""
        return mathematics.weight2(self.k, x * self.scale2 if self.spec.ruled else x)

    def weight(self, s: Value, shift: Value) -> tuple[Value, Value]:
        """Compute exp(s − m) and s − m in the scale of exponents; `shift` is −m."""
        scale = None if self.spec.ruled else self.product_scale
        difference = s + shift if scale is None else self.k.fma(s, scale, shift)
        return self.power(difference), difference

    def entropy_term(self, p: Value, difference: Value) -> Value:
        """Compute p · (s − m); 0 where the score is −∞."""
        return p * bounded(self.k, difference)

    def scaled(self, m: Value) -> Value:
        """Return a maximum in the scale of exponents."""
        return m if self.maximum_scale is None else m * self.maximum_scale

    def natural_maximum(self, m: Value) -> Value:
        """Return a maximum as a natural score."""
        return m if self.spec.ruled else natural_score(self.k, m, self.maximum_scale)

    def reference(self, m: Value) -> tuple[Value | None, Value]:
        """Return numbers to subtract before and after scaling, one of which is 0.

        The first is None where products leave scores in the scale of exponents.
        """
        k, scaled = self.k, finite(self.k, self.scaled(m))
        if self.maximum_scale is None:
            return None, scaled
        far = is_large(k, m, scaled)
        return k.where(far, m, self.lanes.zero()), k.where(far, self.lanes.zero(), scaled)

    def below(self, x: Value, reference: tuple[Value | None, Value]) -> Value:
        """Subtract a `reference` from a maximum or score, in the scale of exponents."""
        before, after = reference
        if before is None or self.maximum_scale is None:
            return x - after
        near = x * self.maximum_scale - after
        return self.k.where(before != 0.0, (x - before) * self.maximum_scale, near)

    def moved(self, e: Value, l: Value, factor: Value, difference: Value) -> Value:
        """Return Σ exp(S − m) (S − m) for another m; factor = exp(difference)."""
        k = self.k
        zero = k.constant(self.real, 0.0)
        inside = k.where(factor == 0.0, zero, difference)
        return k.where(factor == 0.0, zero, factor * k.fma(inside, l, e))

    def move_maximum(self, state: SplitState, tile: KeyTile, subtract: Callable[[KeyTile], None]) -> None:
        """Compute m ← max(m, S), the tile's shift, and the factor of earlier sums.

        subtract: subtracts each query's `before` from the scores of the tile.
        """
        k, load, scratch = self.k, self.lanes.load, tile.scratch
        far = k.variable(k.constant(I64, 0))
        for c in self.lanes.vectors():
            m = k.maximum(load(scratch.top, c), load(state.m, c))
            before, after = reference = self.reference(m)
            difference = self.below(load(state.m, c), reference)
            rescale = self.power(difference)
            for name_l, name_e in self.spec.sums if self.spec.entropy else ():
                l, e = state[name_l], state[name_e]
                e[c] = self.moved(load(e, c), load(l, c), rescale, difference)
            state.m[c], scratch.shift[c], scratch.rescale[c] = m, -after, rescale
            if before is not None:
                scratch.before[c] = before
                far.value = far.value | (before != 0.0).any().to(I64)
        if self.maximum_scale is not None:
            with k.when(far.value != 0):
                subtract(tile)

    def add_sums(self, state: SplitState, tile: KeyTile) -> None:
        """Compute l ← rescale · l + Σ P, and so the other sums."""
        load, scratch = self.lanes.load, tile.scratch
        for c in self.lanes.vectors():
            for name_l, name_e in self.spec.sums:
                if self.spec.entropy:
                    e = state[name_e]
                    e[c] = load(e, c) + load(scratch[name_e], c)
                l = state[name_l]
                l[c] = self.k.fma(load(l, c), load(scratch.rescale, c), load(scratch[name_l], c))
            for name in self.spec.rounded_sums:
                l = state[name]
                l[c] = self.k.fma(load(l, c), load(scratch.rescale, c), load(scratch[name], c))

    def merge(self, state: SplitState, other: SplitState, scratch: TileScratch) -> None:
        """Merge maxima and sums of another split; store the factors of both outputs."""
        k, load = self.k, self.lanes.load
        for c in self.lanes.vectors():
            m_old, m_new = load(state.m, c), load(other.m, c)
            m = k.maximum(m_old, m_new)
            reference = self.reference(m)
            below_old, below_new = (self.below(x, reference) for x in (m_old, m_new))
            old, new = self.power(below_old), self.power(below_new)
            for name_l, name_e in self.spec.sums:
                l_old, l_new = (load(x[name_l], c) for x in (state, other))
                if self.spec.entropy:
                    e_old, e_new = (load(x[name_e], c) for x in (state, other))
                    state[name_e][c] = self.moved(e_old, l_old, old, below_old) + self.moved(
                        e_new, l_new, new, below_new
                    )
                state[name_l][c] = k.fma(l_old, old, l_new * new)
            for name in self.spec.rounded_sums:
                state[name][c] = k.fma(load(state[name], c), old, load(other[name], c) * new)
            state.m[c], scratch.old[c], scratch.new[c] = m, old, new
