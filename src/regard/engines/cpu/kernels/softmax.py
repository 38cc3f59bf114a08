"""The numerics of maxima and exponentials."""

import math

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.values import Pointer, Value

LARGEST = {"f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308}
LARGE = 2.0**10  # of scores as logarithms of base 2: their rounding changes weights by 2^-15 and more


def finite(k: Kernel, m: Value) -> Value:
    """Replace −∞ by the least number, so that −∞ − m is not NaN."""
    return k.maximum(k.constant(m.type, -LARGEST[m.type.name]), m)


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
            score = (s if scale is None else s * scale) * mathematics.LN_2
            below = k.minimum(lanes.zero(), score - natural) * mathematics.LOG2_E
            P[p * lanes.B + c] = k.where(far, below if scale is None else below / scale, s)
