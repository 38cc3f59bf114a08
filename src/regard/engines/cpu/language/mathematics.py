"""Elementary functions in the kernel language.

Errors: exp2, exp and log within 2 ulp, tanh and softmax weights within 3.
exp2: 2ⁿ · p(f) with x = n + f, |f| ≤ 1/2, and p a minimax polynomial with p(0) = 1 exactly.
log: the reduction and polynomial of FreeBSD's msun (e_log.c).
tanh: a minimax rational function of x / 2, or a table of polynomials.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import F32, F64, I32, I64, Type
from regard.engines.cpu.language.values import Value

LOG2_E, LN_2 = 1 / math.log(2), math.log(2)
GOLDEN = 0x9E3779B97F4A7C15

# 2^f = 1 + f (c0 + c1 f + ...): the relative error is below 2e-9 and 2e-17.
EXP2 = {
    F32: (0.693147202855970, 0.240226479134982, 0.0555033246946969, 0.00961843736649738, 0.00133988748668952,
          0.000153533606102554),
    F64: (0.6931471805599453, 0.24022650695910072, 0.055504108664821625, 0.009618129107628472, 0.0013333558146408095,
          0.00015403530393363278, 1.5252733839934363e-05, 1.3215486830018637e-06, 1.0178057767236438e-07,
          7.054884988795769e-09, 4.455715822973832e-10, 2.5751021339944406e-11),
}  # fmt: skip

# The same for softmax weights: the relative error is below 1e-7.
WEIGHT2 = {
    F32: (0.6931469775915043, 0.2402224208035514, 0.05550733754236256, 0.009671512869931478, 0.0013264723896154462),
    F64: EXP2[F64],
}
# With a table of 2ᵏ in registers: its bits of k, and the polynomial for 0 ≤ f < 2^-bits; below 7e-8 and 2e-17.
WEIGHT2_TABLE = {
    F32: (5, (0.6931237316072931, 0.24265269229097688)),
    F64: (4, (0.6931471805599398, 0.24022650696098072, 0.055504108455373305, 0.009618139634026504,
              0.0013330915883793398, 0.0001572667865698423)),
}  # fmt: skip

# log(1 + f), by powers of (f / (2 + f))².
LOG = {
    F32: (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841),
    F64: (0.6666666666666735130, 0.3999999999940941908, 0.2857142874366239149, 0.2222219843214978396,
          0.1818357216161805012, 0.1531383769920937332, 0.1479819860511658591),
}  # fmt: skip
LN_2_HIGH = {F32: 6.9313812256e-01, F64: 6.93147180369123816490e-01}
LN_2_LOW = {F32: 9.0580006145e-06, F64: 1.90821492927058770002e-10}

# 2 tanh(x/2) = x + x³ P(x²) / Q(x²) while tanh x < 1; the error of tanh x is below 2e-8 and 3e-18.
TANH_LIMIT = {F32: 9.5, F64: 19.5}
TANH_P = {
    F32: (-79.45206392517508, -0.9271227911341358, -6.491510969369767e-05),
    F64: (-40849711784027.71, -809067281739.9486, -4417320527.176472, -8674215.144701324, -5950.603198485429,
          -0.9901950754683119),
}  # fmt: skip
TANH_Q = {
    F32: (953.4256058234795, 106.46717624035541, 1.0),
    F64: (490196541408332.6, 58728461521712.445, 965531853294.1073, 4897472935.399394, 9223026.956141027,
          6146.885269118053, 1.0),
}  # fmt: skip

TANH_QUARTERS = [n / 4 for n in range(32)]

MANTISSA = {F32: 23, F64: 52}
BIAS = {F32: 127, F64: 1023}


def integer(x: Value) -> Type:
    """Return the integer type of a float's size."""
    return integer_of(x.type)


def integer_of(real: Type) -> Type:
    return I32 if real is F32 else I64


def horner(k: Kernel, x: Value, coefficients: Any) -> Value:
    """Evaluate a polynomial by Horner's scheme, the highest power first."""
    first, *rest = coefficients
    total = k.constant(x.type, first).spread(x.lanes)
    for c in rest:
        total = k.fma(total, x, k.constant(x.type, c))
    return total


def power_of_two(k: Kernel, n: Value, like: Type) -> Value:
    """Return 2ⁿ for an integral float n; the result must be a normal number."""
    word = I32 if like is F32 else I64
    return ((n.to(word) + BIAS[like]) << MANTISSA[like]).bits(like)


def scaled(k: Kernel, x: Value, n: Value) -> Value:
    """Return x · 2ⁿ for an integral float n, rounded once.

    Infinite or 0 beyond the range.
    """
    if k.target.scalef and x.lanes * x.type.size == 64:
        return k.scale_floor(x, n)
    half = k.intrinsic("floor", x.type, n * 0.5)
    return x * power_of_two(k, half, x.type) * power_of_two(k, n - half, x.type)


def exp2(k: Kernel, x: Value) -> Value:
    """Compute 2ˣ; NaN stays NaN."""
    limit = 2.0 * BIAS[x.type]
    x = k.maximum(k.constant(x.type, -limit), k.minimum(k.constant(x.type, limit), x))
    n = k.rint(x)
    f = x - n
    return scaled(k, k.fma(horner(k, f, EXP2[x.type][::-1]), f, k.constant(x.type, 1.0)), n)


def weight2(k: Kernel, x: Value) -> Value:
    """Compute 2ˣ for x ≤ 1/2, for softmax weights.

    −∞ and x far below the normal range give 0, x = 0 gives exactly 1, NaN stays NaN.
    """
    type, word = x.type, integer(x)
    mantissa, bias = MANTISSA[type], BIAS[type]
    if k.target.permute:
        if not x.lanes:
            return weight2(k, x.spread(k.target.lanes(type.size))).lane(0)
        bits, polynomial = WEIGHT2_TABLE[type]
        # The sum's low bits count multiples of 2^-bits, which index the table. The fraction of ±∞ is 0.
        shifted = k.add_down(x, k.constant(type, 1.5 * 2.0 ** (mantissa - bits)))
        table = [2.0 ** (n / 2**bits) for n in range(2**bits)]
        power, f = k.scale_floor(k.look_up(table, shifted.bits(word), type), x), k.fraction(x, bits)
    else:
        # The sum's low bits count from −bias: they are the exponent, and the least power is 0.
        polynomial, magic = WEIGHT2[type], 1.5 * 2.0**mantissa + bias
        x = k.maximum(k.constant(type, -bias), x)
        shifted = x + magic
        power, f = (shifted.bits(word) << mantissa).bits(type), x - (shifted - magic)
    return k.fma(horner(k, f, polynomial[::-1]) * f, power, power)


def exp(k: Kernel, x: Value) -> Value:
    """Compute eˣ with ln 2 in two parts, so that large x keep their accuracy."""
    limit = 3.0 * BIAS[x.type]
    x = k.maximum(k.constant(x.type, -limit), k.minimum(k.constant(x.type, limit), x))
    n = k.rint(x * LOG2_E)
    r = k.fma(n, k.constant(x.type, -LN_2_LOW[x.type]), k.fma(n, k.constant(x.type, -LN_2_HIGH[x.type]), x))
    f = r * LOG2_E
    limit = 2.0 * BIAS[x.type]
    n = k.maximum(k.constant(x.type, -limit), k.minimum(k.constant(x.type, limit), n))
    return scaled(k, k.fma(horner(k, f, EXP2[x.type][::-1]), f, k.constant(x.type, 1.0)), n)


def log(k: Kernel, x: Value) -> Value:
    """Compute the natural logarithm; −∞ at 0, NaN below."""
    t, word, m = x.type, integer(x), MANTISSA[x.type]
    small = x < float(2.0 ** (1 - BIAS[t]))
    normal = k.where(small, x * float(2.0 ** (m + 1)), x)
    # Bring the mantissa to [√½, √2).
    root = {F32: 0x3F3504F3, F64: 0x3FE6A09E667F3BCD}[t]
    shifted = normal.bits(word) - root
    n = (shifted >> m).to(t) - k.where(small, k.constant(t, m + 1), k.constant(t, 0))
    f = ((shifted & ((1 << m) - 1)) + root).bits(t) - 1.0
    s = f / (f + 2.0)
    z = s * s
    r = horner(k, z, LOG[t][::-1]) * z
    half = f * f * 0.5
    logarithm = k.fma(n, k.constant(t, LN_2_HIGH[t]), f - (half - k.fma(s, half + r, n * LN_2_LOW[t])))
    logarithm = k.where(x == math.inf, x, logarithm)
    logarithm = k.where(x == 0.0, k.constant(t, -math.inf), logarithm)
    return k.where(x >= 0.0, logarithm, k.constant(t, math.nan))


def tanh(k: Kernel, x: Value) -> Value:
    """Compute the hyperbolic tangent; exactly ±1 for large |x|, never beyond."""
    if k.target.permute and x.type is F32:
        return _tanh_by_table(k, x) if x.lanes else _tanh_by_table(k, x.spread(k.target.lanes(4))).lane(0)
    # Compute it from tanh(x / 2): the doubling damps the error where tanh x is near 1.
    limit = k.constant(x.type, TANH_LIMIT[x.type])
    x = k.maximum(-limit, k.minimum(limit, x))
    z = x * x
    p, q = (horner(k, z, polynomial[x.type][::-1]) for polynomial in (TANH_P, TANH_Q))
    t = k.fma(x, z * p / q, x)
    # The sum above loses the sign of −0.
    return k.intrinsic("copysign", x.type, t / k.fma(t * 0.25, t, k.constant(x.type, 1.0)), x)


def _tanh_by_table(k: Kernel, x: Value) -> Value:
    """Compute tanh without division.

    A table in registers has a polynomial for every quarter up to 8.
    """
    magic = 1.5 * 2.0 ** (MANTISSA[F32] - 2)  # the sum's low bits count quarters
    size = k.minimum(k.constant(F32, TANH_LIMIT[F32]), k.intrinsic("fabs", F32, x))
    shifted = k.minimum(k.constant(F32, magic + TANH_QUARTERS[-1]), size + magic)
    t = size - (shifted - magic)
    *lower, total = (k.look_up(column, shifted.bits(I32), F32) for column in _tanh_table())
    for c in reversed(lower):
        total = k.fma(total, t, c)
    return k.intrinsic("copysign", F32, total, x)


@cache
def _tanh_table() -> list[tuple[float, ...]]:
    """Return the coefficients of tanh(n / 4 + t) for every quarter n / 4, by power.

    The relative error is below 7e-8.
    """
    # Near 0, tanh t = t + t³ p(t²).
    p = _interpolated(lambda u: (np.tanh(np.sqrt(u)) / np.sqrt(u) - 1) / u, 1, 0, 1 / 64)
    rows = [[0.0, 1.0, 0.0, p[0], 0.0, p[1]]]
    for start in TANH_QUARTERS[1:]:
        stop = 1 / 8 if start < TANH_QUARTERS[-1] else TANH_LIMIT[F32] - start
        rows.append(_interpolated(lambda t, start=start: np.tanh(start + t), 5, -1 / 8, stop))  # type: ignore[misc]
    return list(zip(*rows, strict=True))


def _interpolated(f: Callable[[Any], Any], degree: int, low: float, high: float) -> list[float]:
    """Interpolate f at Chebyshev's points; coefficients start with the lowest power."""
    polynomial = np.polynomial.Chebyshev.interpolate(f, degree, [low, high])
    coefficients: list[float] = polynomial.convert(kind=np.polynomial.Polynomial).coef.tolist()
    return coefficients


# Dropout: the generator of regard.reference.specification


def mix64(x: Value) -> Value:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ x.logical_shift(30)) * 0xBF58476D1CE4E5B9
    x = (x ^ x.logical_shift(27)) * 0x94D049BB133111EB
    return x ^ x.logical_shift(31)


def row_key(k: Kernel, seed: Value, b: Value, h: Value, i: Value) -> tuple[Value, Value]:
    """Return the two 32-bit keys of row (b, h, i)."""
    key = mix64(seed + GOLDEN)
    for index in (b, h, i):
        key = mix64((key ^ index) + GOLDEN)
    return key.to(I32), key.logical_shift(32).to(I32)


def random_bits(k: Kernel, keys: tuple[Value, Value], j: Value) -> Value:
    """Return 32 random bits for key j of the rows with these keys (Wellons 2018)."""
    first, second = keys
    x = (j.to(I32) ^ ((j >> 32).to(I32) * (GOLDEN & 0xFFFFFFFF))) + first
    x = (x ^ x.logical_shift(16)) * 0x7FEB352D + second
    x = (x ^ x.logical_shift(15)) * 0x846CA68B
    return x ^ x.logical_shift(16)
