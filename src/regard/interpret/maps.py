"""Heads compared by their maps: distances, clusters, ranks."""

from __future__ import annotations  # so that `help` shows the names of types

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.arguments.values import integer, shown

Floats = NDArray[np.float64]


def head_distance(maps: ArrayLike) -> Floats:
    """Compute the mean Jensen–Shannon divergence of the rows of heads, in nats.

    Returns (h, h) for `maps` (h, rows, cols): weights or `regard.pooled` masses. 0 means equal, log
    2 nothing in common (Clark et al. 2019, "What Does BERT Look At?"). Rows that are empty in
    either of two heads are left out.

    >>> import numpy as np
    >>> head_distance([np.eye(2), np.eye(2), np.eye(2)[::-1]]).round(3)
    array([[0.   , 0.   , 0.693],
           [0.   , 0.   , 0.693],
           [0.693, 0.693, 0.   ]])
    """
    x = _maps(maps)
    total = x.sum(-1, keepdims=True)
    alive = total[..., 0] != 0  # also where it is NaN, which reaches the distances
    x = np.divide(x, total, out=np.zeros_like(x), where=total != 0)
    own = _plogp(x).sum(-1)
    divergences = np.zeros((len(x), len(x)))
    for n, row in enumerate(x):
        both = alive[n] & alive[n + 1 :]
        apart = (own[n] + own[n + 1 :]) / 2 - _plogp((row + x[n + 1 :]) / 2).sum(-1)
        divergences[n, n + 1 :] = np.maximum(apart.sum(-1, where=both) / np.maximum(both.sum(-1), 1), 0)
    return divergences + divergences.T


def cluster_heads(distance: ArrayLike, number: int) -> NDArray[np.int64]:
    """Group heads by average linkage (Sokal and Michener 1958).

    Returns (h,), with groups numbered as they first occur. `distance` (h, h) is that of
    `head_distance`. The two nearest groups are merged until `number` are left.

    >>> cluster_heads([[0, 1, 5], [1, 0, 4], [5, 4, 0]], 2)
    array([0, 0, 1])
    """
    d = np.array(distance, np.float64)
    if d.ndim != 2 or d.shape[0] != d.shape[1]:
        raise ValueError(f"distance must have shape (h, h), got {d.shape}")
    if not 1 <= integer("number", number) <= len(d):
        raise ValueError(f"number must be from 1 to {len(d)}, got {shown(number)}")
    groups = [[head] for head in range(len(d))]
    np.fill_diagonal(d, np.inf)
    while len(groups) > number:
        a, b = sorted(int(x) for x in np.unravel_index(d.argmin(), d.shape))
        sizes = len(groups[a]), len(groups[b])
        merged = (d[a] * sizes[0] + d[b] * sizes[1]) / sum(sizes)
        d[a], d[:, a], d[a, a] = merged, merged, np.inf
        d = np.delete(np.delete(d, b, axis=0), b, axis=1)
        groups[a] += groups.pop(b)
    numbers = np.empty(len(np.asarray(distance)), np.int64)
    for n, group in enumerate(sorted(groups, key=min)):
        numbers[group] = n
    return numbers


def effective_rank(maps: ArrayLike) -> Floats:
    """Compute the effective rank of maps.

    The rank is exp of the entropy of the shares of singular values (Roy and Vetterli 2007). `maps`
    (..., rows, cols), weights or `regard.pooled` masses, give (...,), from 1 to the smaller side; 0
    for an empty map.

    >>> import numpy as np
    >>> effective_rank([np.eye(4), np.ones((4, 4))]).round(6)
    array([4., 1.])
    """
    values = np.linalg.svd(np.asarray(maps, np.float64), compute_uv=False)
    total = values.sum(-1, keepdims=True)
    shares = np.divide(values, total, out=np.zeros_like(values), where=total > 0)
    return np.where(total[..., 0] > 0, np.exp(-_plogp(shares).sum(-1)), 0.0)


def copying(embedding: ArrayLike, value: ArrayLike, output: ArrayLike, unembedding: ArrayLike) -> Floats:
    """Compute how much likelier a head makes the tokens it attends to.

    Returns (h,), from −1 to 1: Σ λ / Σ |λ| over the eigenvalues of its circuit from tokens to
    tokens, E W_V W_O U (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"). A
    head that copies is near 1.

    `embedding` (vocabulary, model), `value` (h or h_kv, model, d), `output` (h, d, model),
    `unembedding` (model, vocabulary), all applied to rows from the right. Grouped heads share
    `value`.

    >>> import numpy as np
    >>> one = np.eye(3)
    >>> copying(one, one[None], [one, -one], one)
    array([ 1., -1.])
    """
    E, v, o, U = (np.asarray(x, np.float64) for x in (embedding, value, output, unembedding))
    if v.ndim != 3 or o.ndim != 3 or len(o) % len(v):
        raise ValueError(f"value (h_kv, model, d) and output (h, d, model) must fit, got {v.shape} and {o.shape}")
    # Moving the first factor of a product to its end keeps the nonzero eigenvalues.
    values = np.linalg.eigvals(o @ (U @ E) @ np.repeat(v, len(o) // len(v), axis=0))
    size = np.abs(values).sum(-1)
    return np.asarray(np.divide(values.sum(-1).real, size, out=np.zeros(len(o)), where=size > 0))


def repeated_tokens(
    vocabulary: int, *, length: int = 25, times: int = 4, count: int = 1, seed: int = 0
) -> NDArray[np.int64]:
    """Make random tokens that repeat, to measure prefix matching.

    Returns (count, length · times). The prefix matching score of Olsson et al. 2022, "In-context
    Learning and Induction Heads", is measured on 25 random tokens repeated four times. It is the
    `induction` of `head_statistics` or `measure_heads`.

    >>> ids = repeated_tokens(100, length=3, times=2)
    >>> ids.shape, bool((ids[:, :3] == ids[:, 3:]).all())
    ((1, 6), True)
    """
    vocabulary, seed = integer("vocabulary", vocabulary, least=1, below=2**62), integer("seed", seed, least=0)
    length, times = integer("length", length, least=1, below=2**31), integer("times", times, least=1, below=2**31)
    count = integer("count", count, least=1, below=2**31)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (count, length))
    return np.tile(tokens, times)


def _maps(maps: ArrayLike) -> Floats:
    x = np.asarray(maps, np.float64)
    if x.ndim != 3:
        raise ValueError(f"maps must have shape (h, rows, cols), got {x.shape}")
    return x


def _plogp(x: NDArray[Any]) -> Floats:
    return np.asarray(x * np.log(x, out=np.zeros_like(x), where=x > 0))
