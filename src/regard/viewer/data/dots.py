"""Dot products of queries and keys, before scale and softmax.

The page applies scales of its own to them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.viewer.data.numbers import all_finite
from regard.viewer.scene.scenes import Head

PAIRS = 2048
"""Random pairs per variance."""


def dots(head: Head, rows: range, cols: range) -> NDArray[np.float32]:
    """Return q · k as float32 (rows, cols), NaN where a pair is certainly hidden."""
    p = head.problem
    q, k = (
        np.asarray(x[0], np.float64)
        for x in (p.query[..., rows.start : rows.stop, :], p.key[..., cols.start : cols.stop, :])
    )
    products = np.ascontiguousarray(q @ k.T, np.float32)
    hidden = head.hidden(*(np.arange(part.start, part.stop + 1) for part in (rows, cols)))
    if hidden is not None:
        products[np.broadcast_to(hidden, products.shape)] = np.nan
    return products


def variance(head: Head) -> dict[str, Any]:
    """Return Var(q · k) over random pairs as JSON, from 1, 2, ..., d of their features.

    The variance of m features is its mean over all orders in which they can be added.
    """
    p, rng = head.problem, np.random.default_rng(0)
    i, j = rng.integers(0, p.n_q, PAIRS), rng.integers(0, p.n_k, PAIRS)
    products = np.asarray(p.query[0][i], np.float64) * np.asarray(p.key[0][j], np.float64)
    return {"d": p.d, "variance": all_finite(mean_variances(products).tolist())}


def mean_variances(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean variance of the sums of m features, m = 1, ..., d, over all orders of the features.

    products: (pairs, d). The mean is m/d · T + m (m − 1) / (d (d − 1)) · (V − T): T sums the features' variances, V is
    the variance of their sum, and V − T the covariances, of which m features hold m (m − 1) of d (d − 1).

    >>> mean_variances(np.array([[0.0, 0.0], [1.0, 1.0]]))
    array([0.25, 1.  ])
    """
    d = products.shape[1]
    m = np.arange(1, d + 1)
    centred = products - products.mean(axis=0)
    T = np.einsum("pa,pa->", centred, centred) / len(products)
    V = np.square(centred.sum(axis=1)).mean()
    return np.asarray(m / d * T + m * (m - 1) / max(d * (d - 1), 1) * (V - T))
