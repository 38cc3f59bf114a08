"""Floored integers, mathematical functions and random bits, which Triton lacks.

Functions compute in the dtype of their argument, float32 or float64. They use Triton's exp, log and square root alone,
so that they run on the interpreter as on a device.
"""

import triton
import triton.language as tl

from regard.reference.specification import GOLDEN as GOLDEN_INT

GOLDEN: tl.constexpr = tl.constexpr(GOLDEN_INT)
GOLDEN32: tl.constexpr = tl.constexpr(GOLDEN_INT & 0xFFFFFFFF)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOG10_E: tl.constexpr = tl.constexpr(0.4342944819032518)
PI: tl.constexpr = tl.constexpr(3.141592653589793)
INT64_MIN: tl.constexpr = tl.constexpr(-(2**63))
INT64_MAX: tl.constexpr = tl.constexpr(2**63 - 1)


# Numbers of a call


@triton.jit
def real(x, REAL: tl.constexpr):
    """Return a float of the call.

    Launchers round floats to 32 bits, so one of 64 bits is passed as two integers of 32.
    """
    if REAL == tl.float64:
        return word64(x[0], x[1]).to(tl.float64, bitcast=True)
    else:
        return tl.full([], x, tl.float32)


@triton.jit
def word64(high, low):
    return (tl.full([], high, tl.int64) << 32) | (tl.full([], low, tl.int64) & 0xFFFFFFFF)


@triton.jit
def exp_ftz(x):
    """Return e^x. In float32, subnormal results are flushed to zero: half of the instructions of `tl.exp`."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return tl.exp2(x * LOG2_E)


# Integers


@triton.jit
def floor_divide(x, y):
    """Return the floored quotient; 0 for a divisor of 0."""
    safe = tl.where(y == 0, 1, y)
    quotient = x // safe
    rest = x - quotient * safe
    below = (rest != 0) & ((rest ^ safe) < 0)
    return tl.where(y == 0, 0, tl.where(below, quotient - 1, quotient))


@triton.jit
def remainder(x, y):
    return tl.where(y == 0, 0, x - floor_divide(x, y) * y)


@triton.jit
def left_shift(x, y, BITS: tl.constexpr):
    inside = (y >= 0) & (y < BITS)
    return tl.where(inside, x << tl.where(inside, y, 0), 0)


@triton.jit
def right_shift(x, y, BITS: tl.constexpr):
    inside = (y >= 0) & (y < BITS)
    return x >> tl.where(inside, y, BITS - 1)


@triton.jit
def to_int(x):
    """Truncate x to int64; saturate beyond its range; 0 for NaN."""
    below, above = x < -9.223372036854775808e18, x >= 9.223372036854775808e18
    inside = tl.where(below | above | (x != x), 0.0, x).to(tl.int64)
    return tl.where(below, INT64_MIN, tl.where(above, INT64_MAX, inside))


@triton.jit
def clamp(x, size):
    return tl.minimum(tl.maximum(x, 0), size - 1)


# Functions


@triton.jit
def least(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sign(x):
    made = tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)
    return tl.where(x == x, made, x)


@triton.jit
def sqrt(x):
    """Return the square root rounded to nearest, as in float64."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def rint(x):
    """Round half to even."""
    low = tl.floor(x)
    rest = x - low
    odd = low != 2 * tl.floor(low * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), low + 1, low)


@triton.jit
def expm1(x):
    """Return eˣ − 1 by Kahan's method: the roundings of exp and log cancel."""
    u = tl.exp(x)
    near = tl.where(u == 1.0, 2.0, u)  # its logarithm is not 0
    made = (u - 1.0) * x / tl.log(near)
    return tl.where(u == 1.0, x, tl.where((u - 1.0 == -1.0) | (u == float("inf")), u - 1.0, made))


@triton.jit
def log1p(x):
    u = 1.0 + x
    plain = (u == 1.0) | (u == float("inf"))
    return tl.where(u == 1.0, x, tl.where(plain, u, tl.log(u) * (x / tl.where(plain, 1.0, u - 1.0))))


@triton.jit
def tanh(x):
    """Return tanh x; near 0 by a rational function (Cephes, Moshier 1989).

    There 1 − 2 / (e²ˣ + 1) would lose digits.
    """
    z = x * x
    p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    near = x + x * (z * (p / q))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def cosh(x):
    half = tl.exp(0.5 * tl.abs(x))
    return 0.5 * half * half + 0.5 / half / half


@triton.jit
def sinh(x):
    half = tl.exp(0.5 * tl.abs(x))
    far = 0.5 * half * half - 0.5 / half / half
    grown = expm1(tl.minimum(tl.abs(x), 1.0))
    near = 0.5 * (grown + grown / (grown + 1.0))
    made = tl.where(tl.abs(x) < 1.0, near, far)
    return tl.where(x == x, tl.where(x < 0, -made, made), x)


@triton.jit
def tan(x):
    return tl.sin(x) / tl.cos(x)


@triton.jit
def arctan(x):
    """Return arctan x by Cephes: reduced to |x| < 0.66, then a rational function."""
    size = tl.abs(x)
    large, middle = size > 2.414213562373095, size > 0.66
    shift = tl.where(large, 0.5 * PI, tl.where(middle, 0.25 * PI, 0.0)).to(x.dtype)
    y = tl.where(large, -1.0 / tl.where(large, size, 1.0), tl.where(middle, (size - 1.0) / (size + 1.0), size))
    z = y * y
    p = (-8.750608600031904122785e-1 * z - 1.615753718733365076637e1) * z - 7.500855792314704667340e1
    p = (p * z - 1.228866684490136173410e2) * z - 6.485021904942025371773e1
    q = ((z + 2.485846490142306297962e1) * z + 1.650270098316988542046e2) * z + 4.328810604912902668951e2
    q = (q * z + 4.853903996359136964868e2) * z + 1.945506571482613964425e2
    made = shift + (y + y * z * (p / q))
    return tl.where(x < 0, -made, made)


# Dropout: the generator of regard.reference.specification


@triton.jit
def mix64(x):
    """Apply the output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, b, h, i):
    """Return the key of the rows (b, h, i): uint64, in the shape of i."""
    key = mix64(seed.to(tl.uint64) + GOLDEN)
    key = mix64((key ^ b.to(tl.uint64)) + GOLDEN)
    key = mix64((key ^ h.to(tl.uint64)) + GOLDEN)
    return mix64((key ^ i.to(tl.uint64)) + GOLDEN)


@triton.jit
def random_bits(key, j):
    """Return 32 bits for each column j of the rows with these keys (Wellons 2018)."""
    first, second = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    x = (j.to(tl.uint32) ^ ((j >> 32).to(tl.uint32) * GOLDEN32)) + first
    x = (x ^ (x >> 16)) * 0x7FEB352D + second
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


# For bounds


@triton.jit
def surely_hidden(x):
    """Return true where a number is −∞.

    The comparison is of integers, since the interpreter broadcasts one of floats as a float.
    """
    return (x == float("-inf")).to(tl.int32) != 0


@triton.jit
def least_of(ptr, begin, more, REACH: tl.constexpr):
    """Return the least of the entries begin, ..., begin + more, at most REACH of them."""
    return tl.min(entries(ptr, begin, more, REACH), axis=-1)


@triton.jit
def greatest_of(ptr, begin, more, REACH: tl.constexpr):
    return tl.max(entries(ptr, begin, more, REACH), axis=-1)


@triton.jit
def entries(ptr, begin, more, REACH: tl.constexpr):
    """Load REACH entries from begin; beyond begin + more, the last one again."""
    if len(begin.shape) == 0:
        values = tl.load(ptr + (begin + tl.minimum(tl.arange(0, REACH), more)))
    else:
        steps = tl.minimum(tl.arange(0, REACH)[None, :], tl.expand_dims(more, -1) if len(more.shape) else more)
        values = tl.load(ptr + (begin[:, None] + steps))
    return values
