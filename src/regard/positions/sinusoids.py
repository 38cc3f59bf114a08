"""Sinusoidal encodings, to add to embeddings."""

from __future__ import annotations  # so that `help` shows the names of types

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from regard.arguments import values


def sinusoidal(
    n: int, d: int, *, base: float = 10000.0, offset: float = 0, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """Make sinusoidal encodings, (n, d).

    PE[i, 2a] = sin(ω[a] p), PE[i, 2a+1] = cos(ω[a] p), with p = i + offset and ω[a] = base^(-2a/d),
    as in Vaswani et al. 2017, section 3.5. For an odd d the last sine has no cosine. Angles are
    float64 for any `dtype`.

    Raises:
        TypeError: for a `dtype` that is not floating.
        ValueError: for n < 0, d < 1, base ≤ 1, or an `offset` that is not finite or exceeds 2**53.

    >>> sinusoidal(3, 4).round(3)
    array([[ 0.   ,  1.   ,  0.   ,  1.   ],
           [ 0.841,  0.54 ,  0.01 ,  1.   ],
           [ 0.909, -0.416,  0.02 ,  1.   ]], dtype=float32)
    """
    n, d = values.integer("n", n, least=0), values.integer("d", d, least=1)
    if n * d >= 2**60:
        raise ValueError(f"n times d must be below 2**60, got {values.shown(n)} and {values.shown(d)}")
    base, offset = checked_base(base), values.number("offset", offset)
    if abs(offset) > 2**53:  # beyond, float64 lacks integers: positions would be equal
        raise ValueError(f"offset must be at most 2**53 in size, got {offset}")
    encodings = np.empty((n, d), values.floating("dtype", dtype))
    angles = np.outer(np.arange(n) + offset, base ** (-np.arange(0, d, 2) / d))
    encodings[:, 0::2] = np.sin(angles)
    encodings[:, 1::2] = np.cos(angles[:, : d // 2])
    return encodings


def checked_base(base: object) -> float:
    """Return the base of the wavelengths as a float.

    Raises TypeError or ValueError for anything else.
    """
    value = values.real("base", base)
    if not 1 < value < math.inf:
        raise ValueError(f"base must be greater than 1 and finite, got {value}")
    return value
