"""Weights on the patches of pictures: of one token in every head, and through all layers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.interpret.capture.grids import PatchGrid
from regard.viewer.scene.scenes import Array, Scene

MOST_PAIRS = 2**32
"""Pairs of all heads up to which a rollout is computed: some 20 s of work."""

BAND = 2**24
"""Pairs of all heads of a layer whose weights are in memory at once."""


def laid(grid: PatchGrid, weights: Array) -> Array:
    """Return weights (..., n), (..., 1, n) or (..., n, 1) as those of the patches: (..., patches) of float32."""
    flat = weights.reshape(*weights.shape[:-2], -1) if weights.ndim > 2 else weights
    return grid.laid(flat.astype(np.float32)).reshape(*flat.shape[:-1], -1)


def plain(weights: Array) -> list[Any]:
    """Return weights as lists, None for NaN.

    >>> plain(np.array([[0.5, np.nan]]))
    [[0.5, None]]
    """
    numbers = weights.astype(object)
    numbers[np.isnan(weights)] = None
    return list(numbers.tolist())


def unrolled(scene: Scene) -> str:
    """Return why a scene has no rollout; "" if it has one."""
    of = scene.layers[0]
    numbers = [layer.number for layer in scene.layers]
    if of.cross or of.problem.n_q != of.problem.n_k:
        return "rollout needs layers whose queries are their keys: here they are not the same tokens"
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return "rollout goes through every layer, and some were not kept"
    if scene.pairs > MOST_PAIRS:
        return f"rollout goes through all pairs of all heads: {scene.pairs:,} are more than {MOST_PAIRS:,}"
    return ""


def rollout(
    scene: Scene, token: int, weights: Callable[[int, range], Array], progress: Callable[[float], object]
) -> Array:
    """Return the shares (n,) of all tokens in a token of the last layer (Abnar & Zuidema 2020, attention rollout).

    Shares are the token's row of the product of ½ (A + I) over all layers, A the mean of a layer's heads.
    weights(layer, rows): (heads, rows, n). Rollout takes attention for all that a model does: values, the width of the
    residual stream and other layers change nothing.
    """
    n = scene.layers[0].problem.n_k
    shares = np.zeros(n)
    shares[token] = 1
    for done, number in enumerate(reversed(range(len(scene.layers)))):
        before, band = shares / 2, max(1, BAND // (n * scene.layers[number].heads))
        used = np.flatnonzero(shares)
        for start in range(int(used[0]), int(used[-1]) + 1, band):
            rows = range(start, min(start + band, int(used[-1]) + 1))
            mean = weights(number, rows).mean(axis=0, dtype=np.float64)
            before = before + shares[rows.start : rows.stop] @ mean / 2
            progress((done + (start - used[0]) / (used[-1] + 1 - used[0])) / len(scene.layers))
        shares = before
    return shares
