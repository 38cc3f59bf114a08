"""Arrays of a saved page as text: float32, or 16-bit codes on a scale of each feature.

A feature's codes are even steps from its smallest to its largest value: value = low + code · step. Scores from codes
have a tenth of the error that float16 gives, whose steps grow with the size of a value.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.viewer.scene.scenes import Array, Head
from regard.viewer.serve.codecs import base64

STEPS = 2**16 - 1
"""Steps of a feature's scale."""

TOLERANCE = 1e-3
"""Largest error of a score, and relative error of its weight, for which a layer is held as codes."""

ROWS = 64
"""Queries of a head whose scores are compared."""


def encode(x: Array) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Return the codes of finite values (n, d), and the low and the step of each feature: (2, d).

    >>> encode(np.array([[0.0], [65535.0], [32768.4]]))[0].ravel()
    array([    0, 65535, 32768], dtype=uint16)
    """
    values = np.asarray(x, np.float64)
    low = values.min(axis=0, initial=np.inf)
    span = values.max(axis=0, initial=-np.inf) - low
    scale = np.stack([low, np.where(span > 0, span, 1) / STEPS]).astype(np.float32)
    codes = np.clip(np.rint((values - scale[0]) / scale[1].astype(np.float64)), 0, STEPS)
    return codes.astype(np.uint16), scale


def decode(codes: NDArray[np.uint16], scale: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the values of codes."""
    return np.asarray(scale[0].astype(np.float64) + codes * scale[1].astype(np.float64))


def precise(heads: Sequence[Head], group: int = 1) -> bool:
    """Return whether codes of queries and keys keep every score within `TOLERANCE`, in at most `ROWS` rows a head.

    group: the number of adjacent heads that share keys and values.
    """
    return all(_precise(heads[first : first + group]) for first in range(0, len(heads), group))


def _precise(heads: Sequence[Head]) -> bool:
    """Return the answer of `precise` for heads that share keys and values."""
    p = heads[0].problem
    k = np.asarray(p.key[0], np.float64)
    if not (np.isfinite(k).all() and np.isfinite(p.value[0]).all()):
        return False
    coded_k = decode(*encode(k))
    return all(_score_error(head, k, coded_k) <= TOLERANCE for head in heads)


def _score_error(head: Head, k: NDArray[np.float64], coded_k: NDArray[np.float64]) -> float:
    q = np.asarray(head.problem.query[0], np.float64)
    if not np.isfinite(q).all():
        return float("inf")
    coded_q = decode(*encode(q))
    rows = np.linspace(0, head.n_q - 1, min(ROWS, head.n_q)).astype(np.int64)
    return float(abs(head.problem.scale) * np.abs(coded_q[rows] @ coded_k.T - q[rows] @ k.T).max(initial=0.0))


def arrays(named: dict[str, Array], dtype: str) -> dict[str, Any]:
    """Return arrays (n, d) as text by name; those of codes with their scales.

    dtype: "f32", or "u16" for codes.
    """
    if dtype == "f32":
        return {name: base64(x.astype(np.float32)) for name, x in named.items()}
    coded = {name: encode(x) for name, x in named.items()}
    return {name: base64(codes) for name, (codes, _) in coded.items()} | {
        "scales": {name: base64(scale) for name, (_, scale) in coded.items()}
    }
