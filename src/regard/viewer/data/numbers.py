"""Numbers as JSON has them."""

from collections.abc import Iterable

import numpy as np


def finite(x: float) -> float | None:
    """Return the number, or None for infinities and NaN, which JSON lacks."""
    return x if np.isfinite(x) else None


def all_finite(numbers: Iterable[float]) -> list[float | None]:
    """Return numbers as JSON, None for those that it lacks.

    >>> all_finite([0.5, float("-inf")])
    [0.5, None]
    """
    return [finite(x) for x in numbers]
