"""A small vision transformer, written in NumPy on regard's own functions."""

from __future__ import annotations  # so that `help` shows the names of types

from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.interpret.examplemodel import blocks
from regard.interpret.examplemodel.blocks import Floats, Maps, StoredModel


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of the model, as its weights file records them.

    A picture of `side` × `side` pixels has patches of `patch` × `patch`. `width` is that of the
    residual stream, `hidden` that inside a feed-forward block.
    """

    layers: int
    heads: int
    width: int
    hidden: int
    side: int
    patch: int
    classes: int

    @property
    def cells(self) -> int:
        """Patches along a side."""
        return self.side // self.patch

    @property
    def tokens(self) -> int:
        """Tokens of a picture: the class token, then its patches, row by row."""
        return self.cells**2 + 1


@dataclass(frozen=True)
class PictureTrace(Maps):
    """One run of the model: logits (..., classes), and the arrays of its attention maps.

    `q`, `k`, `v` hold per layer an array (..., h, n, d); `lse` per layer (..., h, n); `x` the
    residual stream before a layer (..., n, width), `out` the outputs of its heads (..., h, n, d).
    Token 0 is the class token, token 1 + r · cells + c the patch in row r and column c.
    """

    logits: Floats
    q: tuple[Floats, ...]
    k: tuple[Floats, ...]
    v: tuple[Floats, ...]
    lse: tuple[Floats, ...]
    x: tuple[Floats, ...]
    out: tuple[Floats, ...]
    scale: float
    causal: bool = False

    def odds(self) -> NDArray[np.float64]:
        """Return the probability of each class (..., classes)."""
        shifted = np.exp(self.logits.astype(np.float64) - self.logits.max(-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(-1, keepdims=True))


class ExampleViT(StoredModel):
    """Small trained vision transformer that tells which digit was pasted on a photograph.

    Pre-norm (RMSNorm), learned positions, GELU; attention is `regard.attention`. The model card
    next to its weights, VIT.md, describes training data and abilities.

    >>> model = ExampleViT.load()
    >>> pictures, digits = held_out()
    >>> trace = model.run(pictures)
    >>> bool((trace.logits.argmax(-1) == digits).mean() > 0.8), trace.weights(1).shape
    (True, (20, 4, 37, 37))
    """

    _FILE = "vit.safetensors"
    _CONFIG = ViTConfig

    config: ViTConfig

    def run(self, pictures: ArrayLike) -> PictureTrace:
        """Run the model on pictures (..., side, side) in grey, from 0 (black) to 1 (white)."""
        pixels = self._check(pictures)
        config, w = self.config, self._weights
        cells, patch = config.cells, config.patch
        patches = np.swapaxes(pixels.reshape(*pixels.shape[:-2], cells, patch, cells, patch), -3, -2)
        embedded = (patches.reshape(*pixels.shape[:-2], cells**2, patch**2) - np.float32(0.5)) @ w["patches"]
        cls = np.broadcast_to(w["cls"], (*pixels.shape[:-2], 1, config.width))
        x = np.concatenate([cls, embedded + w["patches_bias"]], axis=-2) + w["positions"]
        scale, recorded = (config.width // config.heads) ** -0.5, []
        for layer in range(config.layers):
            of = blocks.layer_weights(w, layer)
            recorded.append(blocks.attended(x, of, config.heads, scale, causal=False))
            x = blocks.after(x, recorded[-1].out, of)
        logits = blocks.rms_norm(x[..., 0, :], w["norm"]) @ w["classes"]
        q, k, v, lse, xs, outs = zip(*recorded, strict=True)
        return PictureTrace(logits, q, k, v, lse, xs, outs, scale)

    def _check(self, pictures: ArrayLike) -> Floats:
        pixels, side = np.asarray(pictures), self.config.side
        if pixels.shape[-2:] != (side, side):
            raise ValueError(f"pictures must be (..., {side}, {side}), got shape {pixels.shape}")
        if not np.issubdtype(pixels.dtype, np.floating):
            raise TypeError(f"pictures must be floats from 0 to 1, got {pixels.dtype}")
        if not (pixels.size and 0 <= pixels.min() and pixels.max() <= 1):
            raise ValueError("pictures must lie in 0..1, and there must be one at least")
        return pixels.astype(np.float32)


def held_out() -> tuple[Floats, NDArray[np.int64]]:
    """Return pictures (20, 48, 48) that the model was not trained on, and their digits (20,).

    >>> pictures, digits = held_out()
    >>> pictures.shape, digits[:4].tolist()
    ((20, 48, 48), [0, 0, 1, 1])
    """
    with np.load(BytesIO(files(__package__).joinpath("vit-pictures.npz").read_bytes())) as stored:
        return stored["pictures"].astype(np.float32) / 255, stored["digits"].astype(np.int64)
