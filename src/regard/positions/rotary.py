"""Rotary encodings of pairs of features, and scalings for longer contexts."""

from __future__ import annotations  # so that `help` shows the names of types

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.arguments import values
from regard.core import checks
from regard.core.layout import Layout
from regard.core.types import LayoutName
from regard.positions.sinusoids import checked_base
from regard.rules.tracing import as_array

Scaling = Callable[[int, float], tuple[NDArray[np.float64], float]]
"""(rotated features, base) -> (frequencies, factor on the rotated features)."""


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

    Only the slowest frequency is divided by the whole `factor`. Published by bloc97 in 2023; see
    section 3.1 of https://arxiv.org/abs/2309.00071. The dynamic form has factor = s · n / n_trained
    - (s - 1), for the s of the model's configuration and n > n_trained positions.
    """

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
    times within `original_length` positions stays. One that turns less than `beta_slow` times is
    divided by `factor`. In between is a ramp, linear in the feature. Its ends are rounded outwards
    to whole features unless `truncate` is False. The rotated features are multiplied by
    `attention_factor`, by default 0.1 ln(factor) + 1 (1 for factor ≤ 1).
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _positive(self, "factor", "original_length", "beta_fast", "beta_slow")
        values.boolean("YaRNScaling: truncate", self.truncate)
        if self.attention_factor is not None:
            values.number("YaRNScaling: attention_factor", self.attention_factor)
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

    More than `high_freq_factor` turns within `original_length` positions: the frequency stays.
    Fewer than `low_freq_factor` turns: it is divided by `factor`. Source: `apply_scaling` in Meta's
    llama-models; parameters as in the models' configurations.
    """

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

    (d/2,) float64, in radians per position.

    Raises:
        ValueError: for an odd or non-positive d, or base ≤ 1.

    >>> rope_frequencies(4)
    array([1.  , 0.01])
    >>> rope_frequencies(4, scaling=LinearScaling(2.0))
    array([0.5  , 0.005])
    """
    d = values.integer("d", d)
    if d < 2 or d % 2:
        raise ValueError(f"rotary features come in pairs: expected an even d ≥ 2, got {values.shown(d)}")
    base = checked_base(base)
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
    """Rotate each pair of features by the angle ω[a] · position.

    Rotary encoding, Su et al. 2021.

        (x[h,i,a], x[h,i,a'])  ←  (x[h,i,a] cos - x[h,i,a'] sin,  x[h,i,a'] cos + x[h,i,a] sin)

    Dot products of rotated queries and keys depend only on the differences of positions.

    Args:
        x: (..., h, n, d), or one head (n, d); float16, bfloat16, float32 or float64.
        positions: integers or floats, (n,) or (..., n) over the leading dimensions of x; default 0,
            1, ..., n - 1.
        base: ω[a] = base^(-2a/dim), then `scaling`.
        pairing: "half" pairs a with a + dim/2 (GPT-NeoX, Llama), "interleaved" 2a with 2a + 1
            (RoFormer, GPT-J). Weights trained with one are wrong with the other.
        dim: rotate the first `dim` features only (partial rotary); default all.
        scaling: for contexts longer than trained: `LinearScaling`, `NTKScaling`, `YaRNScaling`,
            `Llama3Scaling`, or any function (dim, base) -> (frequencies (dim/2,), factor on the
            rotated features).
        layout: "bnhd" if x is (..., n, h, d).

    Returns:
        An array of the shape and dtype of x. Angles are float64; 16-bit features are rotated in
        float32. The gradient of this linear map is `rope` at -positions, its transpose.

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
    values.choice("pairing", pairing, ("half", "interleaved"))
    if x.ndim < 2:
        raise ValueError(f"x must be (..., h, n, d) or (n, d), got shape {x.shape}")
    arranged = Layout.of(x, layout)
    x = arranged.to_bhnd(x)
    d = x.shape[-1]
    dim = d if dim is None else values.integer("dim", dim)
    if dim < 2 or dim % 2 or dim > d:
        raise ValueError(
            f"rotary features come in pairs: expected an even number from 2 to d = {d}, got dim={values.shown(dim)}"
        )
    rows = (*x.shape[:-3], x.shape[-2])
    p = np.arange(rows[-1]) if positions is None else as_array("positions", positions)
    if p.dtype.kind not in "iuf":
        raise TypeError(f"positions must be integers or floats, got {p.dtype}")
    fits = 1 <= p.ndim <= len(rows) and all(m in (1, n) for m, n in zip(p.shape[::-1], rows[::-1], strict=False))
    if not fits:
        raise ValueError(f"positions must broadcast to (..., n) = {rows}, got shape {p.shape}")

    base = checked_base(base)
    frequencies, factor = (rope_frequencies(dim, base=base), 1.0) if scaling is None else _scaled(scaling, dim, base)
    angles = p[..., None, :, None] * frequencies
    wide = np.result_type(x.dtype, np.float32)
    cos, sin = (np.cos(angles) * factor).astype(wide), (np.sin(angles) * factor).astype(wide)
    a, b = (slice(0, dim // 2), slice(dim // 2, dim)) if pairing == "half" else (slice(0, dim, 2), slice(1, dim, 2))
    first, second = x[..., a].astype(wide), x[..., b].astype(wide)
    out = x.copy(order="K")
    out[..., a] = first * cos - second * sin
    out[..., b] = second * cos + first * sin
    return arranged.from_bhnd(out)


def _scaled(scaling: Scaling, d: int, base: float) -> tuple[NDArray[np.float64], float]:
    """Return a scaling's frequencies, one for each pair of d features, and its factor."""
    scaled = values.function("scaling", scaling, ("dim", "base"))(d, base)
    if not isinstance(scaled, tuple) or len(scaled) != 2 or np.shape(scaled[0]) != (d // 2,):
        raise ValueError(f"scaling must return (frequencies of shape ({d // 2},), factor), got {values.shown(scaled)}")
    return scaled


def _positive(scaling: object, *names: str) -> None:
    for name in names:
        values.number(f"{type(scaling).__name__}: {name}", getattr(scaling, name), positive=True)
