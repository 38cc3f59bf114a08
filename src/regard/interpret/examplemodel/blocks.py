"""Transformer blocks in NumPy, of which both example models are made."""

from __future__ import annotations  # so that `help` shows the names of types

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from regard.arguments.packages import require
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


class Maps:
    """Attention maps of a run, which is a dataclass with these fields; any part of a map is computed exactly."""

    q: tuple[Floats, ...]
    k: tuple[Floats, ...]
    lse: tuple[Floats, ...]
    scale: float
    causal: bool

    @property
    def layers(self) -> int:
        return len(self.q)

    @property
    def heads(self) -> int:
        return int(self.q[0].shape[-3])

    def weights(self, layer: int, rows: slice = slice(None), cols: slice = slice(None)) -> Floats:
        """Compute the weights of a layer (..., h, n, n), or the tile of `rows` and `cols`."""
        q, k, lse = self.q[layer], self.k[layer], self.lse[layer]
        return attention.weights(q, k, lse=lse, rows=rows, cols=cols, causal=self.causal, scale=self.scale)


class StoredModel:
    """A model whose weights and configuration lie in a safetensors file of the package.

    _FILE: its name. _CONFIG: the dataclass of its configuration.
    """

    _FILE: ClassVar[str]
    _CONFIG: ClassVar[type]

    def __init__(self, config: Any, weights: Mapping[str, Floats]):
        self.config = config
        self._weights = {name: np.asarray(array, np.float32) for name, array in weights.items()}

    @classmethod
    def load(cls) -> Self:
        """Load the float32 weights shipped in the package."""
        return cls.from_safetensors(files(__package__).joinpath(cls._FILE).read_bytes())

    @classmethod
    def from_safetensors(cls, data: bytes) -> Self:
        """Load a model from the bytes of a safetensors file."""
        require("the example model", "safetensors")
        from safetensors.numpy import load

        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        return cls(cls._CONFIG(**json.loads(metadata["config"])), load(data))

    def to_safetensors(self) -> bytes:
        """Return the bytes of a safetensors file in float16.

        The configuration is in its metadata.
        """
        require("the example model", "safetensors")
        from safetensors.numpy import save

        weights = {name: array.astype(np.float16) for name, array in self._weights.items()}
        return save(weights, {"config": json.dumps(asdict(self.config))})

    @property
    def parameters(self) -> int:
        """Number of learned parameters."""
        return sum(array.size for array in self._weights.values())


def layer_weights(weights: Mapping[str, Floats], layer: int) -> dict[str, Floats]:
    """Return the weights of a layer by their short names."""
    return {name: weights[f"{layer}.{name}"] for name in _LAYER}


def attended(
    x: Floats,
    w: Mapping[str, Floats],
    heads: int,
    scale: float,
    causal: bool,
    rotate: Callable[[Floats], Floats] = lambda x: x,
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
