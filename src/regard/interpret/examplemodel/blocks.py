"""Transformer blocks in NumPy, of which the example model is made."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.ops import attention

Floats = NDArray[np.float32]

_LAYER = ("norm1", "q", "q_bias", "k", "k_bias", "v", "o", "norm2", "up", "down")


class BlockRun(NamedTuple):
    """One layer of a run: q, k, v and out (..., h, n, d), lse (..., h, n), and its input x (..., n, width)."""

    q: Floats
    k: Floats
    v: Floats
    lse: Floats
    x: Floats
    out: Floats


def layer_weights(weights: Mapping[str, Floats], layer: int) -> dict[str, Floats]:
    """Return the weights of a layer by their short names."""
    return {name: weights[f"{layer}.{name}"] for name in _LAYER}


def attended(
    x: Floats,
    w: Mapping[str, Floats],
    heads: int,
    scale: float,
    causal: bool,
    rotate: Callable[[Floats], Floats],
) -> BlockRun:
    """Compute the attention of a block on its input x (..., n, width). rotate: is applied to queries and keys."""
    y = rms_norm(x, w["norm1"])
    query = rotate(split(y @ w["q"] + w["q_bias"], heads))
    key = rotate(split(y @ w["k"] + w["k_bias"], heads))
    value = split(y @ w["v"], heads)
    out, seen = attention.attention(query, key, value, causal=causal, scale=scale, observe=["lse"])
    return BlockRun(query, key, value, seen.lse, x, out)


def after(x: Floats, out: Floats, w: Mapping[str, Floats]) -> Floats:
    """Return the output (..., n, width) of a block, from its input and the outputs of its heads (..., h, n, d)."""
    x = x + joined(out) @ w["o"]
    return np.asarray(x + gelu(rms_norm(x, w["norm2"]) @ w["up"]) @ w["down"])


def split(x: Floats, heads: int) -> Floats:
    """Split heads: (..., n, h·d) to (..., h, n, d)."""
    return np.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -3, -2)


def joined(out: Floats) -> Floats:
    """Put heads side by side: (..., h, n, d) to (..., n, h·d)."""
    swapped = np.swapaxes(out, -3, -2)
    return swapped.reshape(*swapped.shape[:-2], -1)


def rms_norm(x: Floats, gain: Floats) -> Floats:
    """Divide x by the root of its mean square, and multiply by `gain`."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6)) * gain)


def gelu(x: Floats) -> Floats:
    """Compute GELU in its tanh form (Hendrycks and Gimpel 2016)."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x))))
