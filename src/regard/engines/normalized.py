"""Weights, and cotangents, corrected where lse is too large for exp(S − lse) to be exact.

Models write scores such as 3e38 to hide keys. Next to such a score a float cannot hold the logarithm of a sum: in a row
of n such scores each weight would be 1 instead of 1 / n.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from regard.core.problem import Outputs, Problem

Array = np.ndarray[Any, np.dtype[Any]]
Maps = Callable[[Problem, Array, int, int], tuple[Array, Array]]

SMALL = 2**20  # query-key pairs of a problem that is small
STRIP = 2**22  # weights of whole rows that are in memory at once


def too_large(lse: Array) -> Array:
    """Return whether weights next to each lse, computed in its dtype, may have lost half of their digits."""
    size, eps = np.abs(lse), np.finfo(lse.dtype).eps
    large: Array = (size * eps > eps**0.5) & (size < np.inf)
    return large


def factors(p: Problem, lse: Array, maps: Maps) -> Array | None:
    """Return factors (..., h, n_q) of weights exp(S − lse), or None if none is needed.

    A factor is 1 over the sum of a row's weights if lse is too large, else 1. maps: those of the engine, since its
    weights have the same errors. Weights of a part are left as they are: it does not have all of a row.
    """
    large = too_large(lse)
    if p.part is not None or not large.any() or not p.n_k:
        return None
    with np.errstate(all="ignore"):
        total = sum(p.shares(lse).values(), row_sums(p, lse, maps))
        reciprocals: Array = np.where(large & (total > 0), 1 / total, 1).astype(p.compute)
    return reciprocals


def row_sums(p: Problem, lse: Array, maps: Maps) -> Array:
    """Return Σ_j exp(S − lse), (..., h, n_q)."""
    return maps(p, lse, p.n_q, 1)[0][..., 0]


def normalized(p: Problem, outputs: Outputs, ct: Outputs, maps: Maps) -> Outputs:
    """Divide the cotangents of rows by the sum of their weights, if far from 1.

    Gradients are sums of products of a weight and a cotangent of its row, so dividing either is the same.
    """
    assert outputs.lse is not None
    factor = factors(p, outputs.lse, maps)
    if factor is None:
        return ct

    def divided(x: Array | None, factor: Array) -> Array | None:
        return None if x is None else (x * factor).astype(x.dtype)

    out, lse, entropy = ct.out, ct.lse, ct.entropy
    return Outputs(divided(out, factor[..., None]), divided(lse, factor), divided(entropy, factor))


def is_small(p: Problem) -> bool:
    """Test for a problem whose whole rows of weights take a few milliseconds."""
    return p.pairs <= SMALL


def strips(p: Problem, rows: Any) -> Iterator[Any]:
    """Return parts of rows, of which all weights have at most `STRIP` numbers, or one row."""
    count = max(1, STRIP // max(1, p.all_heads * p.n_k))
    return (rows[n : n + count] for n in range(0, len(rows), count))


def of_whole_rows(weights: Callable[..., Array], p: Problem, lse: Array, rows: Any, cols: range) -> Array:
    """Return a part of the weights from those of whole rows, of which lse takes no digits."""
    keys = slice(cols.start, cols.stop, cols.step)
    return np.concatenate([weights(p, lse, some, range(p.n_k))[..., keys] for some in strips(p, rows)], axis=-2)
