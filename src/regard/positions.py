"""Where a token is, as numbers: added to embeddings, rotated into queries and keys, or added to scores.

=================  ==========================  =====================================================================
function           used on                     source
=================  ==========================  =====================================================================
sinusoidal         embeddings                  Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
rope               queries and keys            Su et al. 2021, https://arxiv.org/abs/2104.09864
alibi_slopes       scores: `regard.alibi`      Press et al. 2022, https://arxiv.org/abs/2108.12409
t5_buckets         scores: `regard.relative`   Raffel et al. 2020, https://arxiv.org/abs/1910.10683
=================  ==========================  =====================================================================
"""

from __future__ import annotations  # so that `help` shows the names of types

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from regard.core import checks
from regard.core.layout import Layout
from regard.core.signatures import listed
from regard.core.types import LayoutName
from regard.rules.tracing import as_array

Scaling = Callable[[int, float], tuple[NDArray[np.float64], float]]
"""(rotated features, base) -> (frequencies, factor on the rotated features)."""


def sinusoidal(
    n: int, d: int, *, base: float = 10000.0, offset: float = 0, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """Make sinusoidal encodings, (n, d): PE[i, 2a] = sin(ω[a] p), PE[i, 2a+1] = cos(ω[a] p).

    p = i + offset and ω[a] = base^(-2a/d), as in Vaswani et al. 2017, section 3.5. For an odd d the
    last sine has no cosine. Angles are float64 whatever `dtype` is.

    Raises:
        TypeError: for a `dtype` that is not floating.
        ValueError: for n < 0, d < 1, base ≤ 1, or an `offset` that is not finite.

    >>> sinusoidal(3, 4).round(3)
    array([[ 0.   ,  1.   ,  0.   ,  1.   ],
           [ 0.841,  0.54 ,  0.01 ,  1.   ],
           [ 0.909, -0.416,  0.02 ,  1.   ]], dtype=float32)
    """
    n, d = checks.integer("n", n, least=0), checks.integer("d", d, least=1)
    if n * d >= 2**60:
        raise ValueError(f"n times d must be below 2**60, got {checks.shown(n)} and {checks.shown(d)}")
    base, offset = _base(base), checks.number("offset", offset)
    encodings = np.empty((n, d), checks.floating("dtype", dtype))
    angles = np.outer(np.arange(n) + offset, base ** (-np.arange(0, d, 2) / d))
    encodings[:, 0::2] = np.sin(angles)
    encodings[:, 1::2] = np.cos(angles[:, : d // 2])
    return encodings


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: positions divided by `factor`.

    Chen et al. 2023, https://arxiv.org/abs/2306.15595.
    """

    factor: float

    def __post_init__(self) -> None:
        _positive(self, "factor")

    def __call__(self, d: int, base: float) -> tuple[NDArray[np.float64], float]:
        return rope_frequencies(d, base=base) / self.factor, 1.0


@dataclass(frozen=True)
class NTKScaling:
    """NTK-aware interpolation: base · factor^(d/(d-2)).

    So only the slowest frequency is divided by `factor`. Published by bloc97 in 2023; see section
    3.1 of https://arxiv.org/abs/2309.00071. The dynamic form is this one with factor = s · n /
    n_trained - (s - 1), for the s of the model's configuration and n > n_trained positions."""

    factor: float

    def __post_init__(self) -> None:
        _positive(self, "factor")

    def __call__(self, d: int, base: float) -> tuple[NDArray[np.float64], float]:
        # A single pair (d = 2) is the fastest and is not slowed; max() keeps its exponent from being 0/0.
        return rope_frequencies(d, base=base) * self.factor ** (-np.arange(0, d, 2) / max(d - 2, 1)), 1.0


@dataclass(frozen=True)
class YaRNScaling:
    """YaRN: slow frequencies are interpolated, fast ones stay.

    Peng et al. 2023, https://arxiv.org/abs/2309.00071. A frequency that turns more than `beta_fast`
    times within `original_length` positions is kept, one that turns less than `beta_slow` times is
    divided by `factor`; in between a ramp, linear in the feature, whose ends are rounded to whole
    features outwards unless `truncate` is False. The rotated features are multiplied by
    `attention_factor`, by default 0.1 ln(factor) + 1 (1 for factor ≤ 1)."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _positive(self, "factor", "original_length", "beta_fast", "beta_slow")
        checks.boolean("YaRNScaling: truncate", self.truncate)
        if self.attention_factor is not None:
            checks.number("YaRNScaling: attention_factor", self.attention_factor)
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow}")

    def __call__(self, d: int, base: float) -> tuple[NDArray[np.float64], float]:
        def feature(turns: float) -> float:
            return d * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

        low, high = feature(self.beta_fast), feature(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 0.001), 0, 1)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(max(self.factor, 1)) + 1
        return rope_frequencies(d, base=base) * (1 - ramp + ramp / self.factor), factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: as YaRN, with a ramp that is linear in the frequency.

    Kept: more than `high_freq_factor` turns within `original_length` positions; divided by
    `factor`: fewer than `low_freq_factor`. Source: `apply_scaling` in Meta's llama-models;
    parameters as in the models' configurations."""

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _positive(self, "factor", "original_length", "low_freq_factor", "high_freq_factor")
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be greater than low_freq_factor={self.low_freq_factor}"
            )

    def __call__(self, d: int, base: float) -> tuple[NDArray[np.float64], float]:
        frequencies = rope_frequencies(d, base=base)
        turns = self.original_length * frequencies / (2 * math.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequencies * (keep + (1 - keep) / self.factor), 1.0


def rope_frequencies(d: int, *, base: float = 10000.0, scaling: Scaling | None = None) -> NDArray[np.float64]:
    """Return the angular frequencies of `rope`: base^(-2a/d), then `scaling`.

    (d/2,) float64, in radians per position. Raises:
        ValueError: for an odd or non-positive d, or base ≤ 1.

    >>> rope_frequencies(4)
    array([1.  , 0.01])
    >>> rope_frequencies(4, scaling=LinearScaling(2.0))
    array([0.5  , 0.005])
    """
    d = checks.integer("d", d)
    if d < 2 or d % 2:
        raise ValueError(f"rotary features come in pairs: expected an even d ≥ 2, got {checks.shown(d)}")
    base = _base(base)
    return base ** (-np.arange(0, d, 2) / d) if scaling is None else _scaled(scaling, d, base)[0]


def rope(
    x: NDArray[Any],
    positions: ArrayLike | None = None,
    *,
    base: float = 10000.0,
    pairing: Literal["half", "interleaved"] = "half",
    dim: int | None = None,
    scaling: Scaling | None = None,
    layout: LayoutName = "bhnd",
) -> NDArray[Any]:
    """Turn each pair of features by the angle ω[a] · position (rotary, Su et al. 2021).

        (x[h,i,a], x[h,i,a'])  ←  (x[h,i,a] cos - x[h,i,a'] sin,  x[h,i,a'] cos + x[h,i,a] sin)

    Dot products of rotated queries and keys depend on positions through their differences alone.

    Args:
        x: (..., h, n, d), or one head (n, d); float16, bfloat16, float32 or float64.
        positions: integers or floats, (n,) or (..., n) over the leading dimensions of x; default 0,
            1, ..., n - 1.
        base: ω[a] = base^(-2a/dim), then `scaling`.
        pairing: "half" pairs a with a + dim/2 (GPT-NeoX, Llama), "interleaved" 2a with 2a + 1
            (RoFormer, GPT-J). Weights trained with one are wrong with the other.
        dim: rotate the first `dim` features and pass the rest through (partial rotary); default
            all.
        scaling: for contexts longer than trained: `LinearScaling`, `NTKScaling`, `YaRNScaling`,
            `Llama3Scaling`, or any function (dim, base) -> (frequencies (dim/2,), factor on the
            rotated features).
        layout: "bnhd" if x is (..., n, h, d).

    Returns:
        An array of the shape and dtype of x. Angles are float64; 16-bit features are rotated in
        float32. The transpose of this linear map, which takes its gradient, is `rope` at
        -positions.

    Raises:
        TypeError: for anything but a NumPy array of a floating dtype.
        ValueError: for an odd dim or one beyond d, positions that do not broadcast, unknown
            pairings and layouts.

    >>> x = np.ones((1, 2, 4), np.float32)                    # one head, two positions, two pairs
    >>> rope(x).round(3)
    array([[[ 1.   ,  1.   ,  1.   ,  1.   ],
            [-0.301,  0.99 ,  1.382,  1.01 ]]], dtype=float32)
    >>> rope(x, pairing="interleaved")[0, 1].round(3)
    array([-0.301,  1.382,  0.99 ,  1.01 ], dtype=float32)
    """
    x = checks.array("x", x)
    checks.choice("pairing", pairing, ("half", "interleaved"))
    if x.ndim < 2:
        raise ValueError(f"x must be (..., h, n, d) or (n, d), got shape {x.shape}")
    frame = Layout.of(x, layout)
    x = frame.inward(x)
    d = x.shape[-1]
    dim = d if dim is None else checks.integer("dim", dim)
    if dim < 2 or dim % 2 or dim > d:
        raise ValueError(
            f"rotary features come in pairs: expected an even number from 2 to d = {d}, got dim={checks.shown(dim)}"
        )
    rows = (*x.shape[:-3], x.shape[-2])
    p = np.arange(rows[-1]) if positions is None else as_array("positions", positions)
    if p.dtype.kind not in "iuf":
        raise TypeError(f"positions must be integers or floats, got {p.dtype}")
    fits = 1 <= p.ndim <= len(rows) and all(m in (1, n) for m, n in zip(p.shape[::-1], rows[::-1], strict=False))
    if not fits:
        raise ValueError(f"positions must broadcast to (..., n) = {rows}, got shape {p.shape}")

    base = _base(base)
    frequencies, factor = (rope_frequencies(dim, base=base), 1.0) if scaling is None else _scaled(scaling, dim, base)
    angles = p[..., None, :, None] * frequencies
    wide = np.result_type(x.dtype, np.float32)
    cos, sin = (np.cos(angles) * factor).astype(wide), (np.sin(angles) * factor).astype(wide)
    a, b = (slice(0, dim // 2), slice(dim // 2, dim)) if pairing == "half" else (slice(0, dim, 2), slice(1, dim, 2))
    first, second = x[..., a].astype(wide), x[..., b].astype(wide)
    out = x.copy(order="K")
    out[..., a] = first * cos - second * sin
    out[..., b] = second * cos + first * sin
    return frame.outward(out)


def alibi_slopes(num_heads: int) -> NDArray[np.float32]:
    """Return ALiBi's slope of each head (Press et al. 2022), to subtract slope · |i - j|.

    (num_heads,) float32, all positive. A power of two h gives 2^(-8k/h) for k = 1, ..., h. Any
    other number takes the slopes of the power of two below it, then every second one of the power
    of two above, as the paper's code does.

    Raises:
        ValueError: for num_heads < 1.

    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    """
    num_heads = checks.integer("num_heads", num_heads, least=1, below=2**31)
    below = 1 << (num_heads.bit_length() - 1)
    between = np.arange(1, 2 * (num_heads - below), 2) / 2
    k = np.concatenate([np.arange(1, below + 1), between])
    slopes: NDArray[np.float32] = np.exp2(-8 * k / below).astype(np.float32)
    return slopes


def t5_buckets(
    offset: ArrayLike, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> NDArray[np.int64]:
    """Return T5's bucket of each relative position (Raffel et al. 2020, section 2.1).

    int64, of the shape of `offset`. Half of the buckets hold one distance each, the rest grow
    geometrically up to `max_distance`, and beyond it everything shares the last one. Bidirectional:
    the second half of all buckets is for keys after the query. Otherwise those share bucket 0 with
    the query's own position.

    Args:
        offset: integers j - i, key minus query.
        num_buckets: as many as the table has entries.
        max_distance: the distance from which on nothing is told apart.
        bidirectional: True in T5's encoder, False in its decoder.

    With e distances of their own and m buckets beyond, distance n ≥ e lies in bucket e + ⌊m
    log(n/e) / log(D/e)⌋. Implementations take this logarithm in float32, which can fall on the
    wrong side of an edge. Here edges are exact: bucket e + k begins at the least integer n with n^m
    ≥ D^k e^(m-k). The two agree for the sizes in use.

    Raises:
        TypeError: for offsets that are not integers.
        ValueError: for fewer than 4 buckets, or than 2 in one direction, and for a max_distance
            that is not beyond the distances with a bucket of their own.

    >>> t5_buckets(np.arange(-3, 4))
    array([ 3,  2,  1,  0, 17, 18, 19])
    >>> t5_buckets([-1000, -20, -10, 5], bidirectional=False)
    array([31, 17, 10,  0])
    """
    bidirectional = checks.boolean("bidirectional", bidirectional)
    o = as_array("offset", offset)
    if o.dtype.kind not in "iu":
        raise TypeError(f"offset must be integers, j - i, got {o.dtype}")
    num_buckets = checks.integer("num_buckets", num_buckets, least=4 if bidirectional else 2, below=2**31)
    side = num_buckets // 2 if bidirectional else num_buckets
    own = side // 2
    beyond = side - own
    max_distance = checks.integer("max_distance", max_distance, least=own + 1, below=2**62)

    edges = [*range(1, own)]
    for k in range(beyond):
        power = max_distance**k * own ** (beyond - k)
        edges.append(own + bisect_left(range(own, max_distance), power, key=lambda n: n**beyond))
    o = np.clip((np.minimum(o, 2**62) if o.dtype == np.uint64 else o).astype(np.int64), -max_distance, max_distance)
    distance = np.abs(o) if bidirectional else np.maximum(-o, 0)
    buckets = np.asarray(np.searchsorted(edges, distance, side="right"), np.int64)
    return np.asarray(buckets + side * (o > 0) if bidirectional else buckets)


def _base(base: object) -> float:
    value = checks.real("base", base)
    if not 1 < value < math.inf:
        raise ValueError(f"base must be greater than 1 and finite, got {value}")
    return value


def _scaled(scaling: Scaling, d: int, base: float) -> tuple[NDArray[np.float64], float]:
    """What a scaling makes of d features: a number for each pair, and a factor."""
    found = checks.function("scaling", scaling, ("dim", "base"))(d, base)
    if not isinstance(found, tuple) or len(found) != 2 or np.shape(found[0]) != (d // 2,):
        raise ValueError(f"scaling must return (frequencies of shape ({d // 2},), factor), got {checks.shown(found)}")
    return found


def _positive(scaling: object, *names: str) -> None:
    for name in names:
        checks.number(f"{type(scaling).__name__}: {name}", getattr(scaling, name), positive=True)


listed(sinusoidal, rope_frequencies, rope, alibi_slopes, t5_buckets)
listed(LinearScaling, NTKScaling, YaRNScaling, Llama3Scaling)
