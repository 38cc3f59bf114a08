"""Pictures that a model reads whole and in tiles, as LLaVA-NeXT and LLaVA-OneVision do.

A text has the tokens of the whole picture, and then those of all its tiles as one picture: without padding, and with a
token for a new line after each row. A picture without tiles has one such token in all.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from regard.interpret.capture.grids import PatchGrid

Array = np.ndarray[Any, np.dtype[Any]]

SHAPE, UNPADDED = "get_anyres_image_grid_shape", "unpad_image"
"""transformers' functions for the tiles of a picture, and for the part of them that is no padding."""

ENLARGED = 1.1
"""Tiles are read at a lower resolution if their sides are longer than those of the most that are allowed by more."""


@dataclass(frozen=True)
class PictureTiles:
    """The tiles of a picture, down and across; their patches that are no padding, from `top` and `left` on.

    side: patches along a tile. rows, columns: of tokens, at most one a patch. height, width: in patches.
    """

    side: int
    down: int = 0
    across: int = 0
    top: int = 0
    left: int = 0
    height: int = 0
    width: int = 0
    rows: int = 0
    columns: int = 0

    @classmethod
    def of(cls, module: nn.Module, size: Sequence[int]) -> Self:
        """Return the tiles of a picture of (height, width) in pixels, by the functions of a model's file."""
        of, config = sys.modules[type(module).__module__], module.config
        each = int(config.vision_config.image_size)
        side = each // int(config.vision_config.patch_size)
        down, across = getattr(of, SHAPE)(list(size), config.image_grid_pinpoints, each)
        patches = torch.arange(down * across * side**2, device="cpu").reshape(1, down * side, across * side)
        shown = getattr(of, UNPADDED)(patches, list(size))[0]
        top, left = divmod(int(shown[0, 0]), across * side)
        height, width = shown.shape
        most = re.search(r"\d+", str(getattr(config, "vision_aspect_ratio", "")))
        ratio = 0.0 if most is None else (height * width / (int(most[0]) * side**2)) ** 0.5
        rows, columns = (int(x // ratio) if ratio > ENLARGED else x for x in (height, width))
        return cls(side, down, across, top, left, height, width, rows, columns)

    @property
    def count(self) -> int:
        """The number of pictures that the tower reads: the whole, and each tile."""
        return 1 + self.down * self.across

    @property
    def length(self) -> int:
        """The number of tokens in a text."""
        return self.side**2 + (self.rows * (self.columns + 1) if self.rows else 1)

    def grids(self, tokens: Array, shown: Sequence[Any], batch: int) -> list[PatchGrid]:
        """Return the grids of the whole picture and of its tiles. tokens: of both. shown: the pixels of each."""
        whole, others = np.split(tokens, [self.side**2])
        grids = [PatchGrid(self.side, self.side, whole, picture=shown[0], batch=batch, name="whole")]
        if self.rows:
            others = others.reshape(self.rows, -1)[:, :-1].reshape(-1)
            grids.append(PatchGrid(self.rows, self.columns, others, picture=shown[1], batch=batch, name="tiles"))
        return grids

    def shown(self, read: Array) -> list[Array]:
        """Return the whole picture, and its tiles as one without its padding: (3, y, x).

        read (count, 3, y, x): as the tower reads them.
        """
        if not self.rows:
            return [read[0]]
        pixels = read.shape[-1] // self.side  # of a patch: fewer than one beside the last are not read
        whole, *tiles = read[..., : self.side * pixels, : self.side * pixels]
        x = np.reshape(tiles, (self.down, self.across, *whole.shape)).transpose(2, 0, 3, 1, 4)
        x = x.reshape(3, self.down * self.side * pixels, -1)
        top, left = self.top * pixels, self.left * pixels
        return [whole, x[:, top : top + self.height * pixels, left : left + self.width * pixels]]


def tiles_read(module: nn.Module, image_sizes: Any) -> list[PictureTiles]:
    """Return the tiles of each picture that a model is given; none if it reads none in tiles.

    image_sizes (pictures, 2): height and width in pixels, before any tiles.
    """
    of, config = sys.modules.get(type(module).__module__), getattr(module, "config", None)
    if not all(hasattr(of, name) for name in (SHAPE, UNPADDED)) or not hasattr(config, "image_grid_pinpoints"):
        return []
    return [PictureTiles.of(module, [int(x) for x in size]) for size in image_sizes]
