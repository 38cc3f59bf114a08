"""Dot products of queries and keys, before scale and softmax.

The page applies scales of its own to them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.viewer.scene.scenes import Head

PAIRS, ORDERS = 2048, 16
"""Random pairs per variance, and orders of features to average over."""


def dots(head: Head, rows: range, cols: range) -> NDArray[np.float32]:
    """Return q · k as float32 (rows, cols), NaN where a pair is certainly hidden."""
    p = head.problem
    q, k = (
        np.asarray(x[0], np.float64)
        for x in (p.query[..., rows.start : rows.stop, :], p.key[..., cols.start : cols.stop, :])
    )
    found = np.ascontiguousarray(q @ k.T, np.float32)
    hidden = head.hidden(*(np.arange(part.start, part.stop + 1) for part in (rows, cols)))
    if hidden is not None:
        found[np.broadcast_to(hidden, found.shape)] = np.nan
    return found


def variance(head: Head) -> dict[str, Any]:
    """Return Var(q · k) over random pairs, from 1, 2, ..., d of their features.

    Features are added in random order. The variance is the mean over `ORDERS` orders.
    """
    p, rng = head.problem, np.random.default_rng(0)
    i, j = rng.integers(0, p.n_q, PAIRS), rng.integers(0, p.n_k, PAIRS)
    products = np.asarray(p.query[0][i], np.float64) * np.asarray(p.key[0][j], np.float64)
    sums = [np.cumsum(products[:, rng.permutation(p.d)], axis=1).var(axis=0) for _ in range(ORDERS)]
    return {"d": p.d, "variance": np.mean(sums, axis=0).tolist()}
