"""Cotangents corrected where lse is too large for exp(S − lse) to be exact.

Models write scores such as 3e38 to hide keys. Next to such a score a float cannot hold the logarithm of a sum: in a row
of n such scores each weight would be 1 instead of 1 / n.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.core.problem import Outputs, Problem

Array = np.ndarray[Any, np.dtype[Any]]
Maps = Callable[[Problem, Array, int, int], tuple[Array, Array]]


def too_large(lse: Array) -> Array:
    """Return whether weights next to each lse, computed in its dtype, may have lost half of their digits."""
    size, eps = np.abs(lse), np.finfo(lse.dtype).eps
    large: Array = (size * eps > eps**0.5) & (size < np.inf)
    return large


def normalized(p: Problem, outputs: Outputs, ct: Outputs, maps: Maps) -> Outputs:
    """Divide the cotangents of rows by the sum of their weights, if far from 1.

    Gradients are sums of products of a weight and a cotangent of its row, so dividing either is the same. Rows are
    corrected if their weights may have lost half of their digits. maps: those of the engine, since its weights have the
    same errors. Cotangents of a part are left as they are: it does not have all weights of a row.
    """
    if p.part is not None:
        return ct
    assert outputs.lse is not None
    large = too_large(outputs.lse)
    if not large.any():
        return ct
    with np.errstate(all="ignore"):
        total = maps(p, outputs.lse, p.n_q, 1)[0][..., 0]
        total = sum(p.shares(outputs.lse).values(), total)
        factor = np.where(large & (total > 0), 1 / total, 1).astype(p.compute)

    def divided(x: Array | None, factor: Array) -> Array | None:
        return None if x is None else (x * factor).astype(x.dtype)

    out, lse, entropy = ct.out, ct.lse, ct.entropy
    return Outputs(divided(out, factor[..., None]), divided(lse, factor), divided(entropy, factor))
