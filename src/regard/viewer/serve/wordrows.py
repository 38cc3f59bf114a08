"""Rows of words over pictures as 8-bit codes: what a saved page holds of heads that are too large.

A row of weights is held for each token that is no patch, in every head and as the mean over the heads of a layer. Keys
share a code by cell: a word has a cell of its own, and a cell of a picture has pool × pool patches, whose mean weight
it holds. weight = code · scale, and a row has a scale for each picture and one for its words: largest / 128. So a
weight is right to 1/255 of the largest beside it. Means over heads are held for every patch.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.interpret.capture.grids import PatchGrid
from regard.runtime.forks import cached_property
from regard.viewer.data.heats import BAND
from regard.viewer.scene.scenes import Array, Scene
from regard.viewer.serve.codecs import base64

LIMIT = 24 * 10**6
"""Bytes of codes that a file may hold."""

TEXT = 18 * 10**6
"""Characters of their text, about: as many as those of the first layer, times layers."""

MOST_POOLED = 8
"""Patches on a side of a cell, at most."""

STEPS = 128
"""Steps of a row's scale: half a step is the error."""


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a row's keys, ordered by the part of the row that shares a scale: each picture, then words.

    of_key (n_k,): the cell of each key. parts: the first cell of each part.
    """

    of_key: NDArray[np.int32]
    parts: tuple[int, ...]

    @classmethod
    def of(cls, n_k: int, grids: Sequence[PatchGrid], pool: int) -> "Cells":
        """Return cells of pool × pool patches, and one for each other key."""
        of_key, parts = np.full(n_k, -1, np.int32), [0]
        for grid in grids:
            row, column = np.divmod(np.arange(grid.rows * grid.columns), grid.columns)
            block = row // pool * grid.columns + column // pool
            new = (grid.tokens >= 0) & (of_key[np.maximum(grid.tokens, 0)] < 0)
            names, cell = np.unique(block[new], return_inverse=True)
            of_key[grid.tokens[new]] = parts[-1] + cell
            parts.append(parts[-1] + len(names))
        words = of_key < 0
        of_key[words] = parts[-1] + np.arange(words.sum())
        parts.append(int(of_key.max()) + 1)
        return cls(of_key, tuple(first for first, after in pairwise(parts) if first < after))

    @property
    def count(self) -> int:
        """The number of cells."""
        return int(self.of_key.max()) + 1

    @cached_property
    def _order(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Keys by cell, the first of each cell, and the number of each."""
        counts = np.bincount(self.of_key)
        return np.argsort(self.of_key, kind="stable"), np.cumsum(counts) - counts, counts

    def encode(self, weights: Array) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the codes (..., cells) of weights (..., n_k), and the scales (..., parts), NaN where a weight is.

        >>> cells = Cells.of(3, [PatchGrid.after(1, 2, prefix=1)], pool=1)  # a word, then two patches
        >>> codes, scales = cells.encode(np.array([0.5, 0.25, 0.125]))
        >>> codes, scales * 128
        (array([128,  64, 128], dtype=uint8), array([0.25, 0.5 ], dtype=float32))
        """
        order, firsts, counts = self._order
        means = np.add.reduceat(weights[..., order], firsts, axis=-1) / counts
        largest = np.maximum.reduceat(means, self.parts, axis=-1)
        scales = (largest / STEPS).astype(np.float32)
        sizes = np.diff([*self.parts, self.count])
        codes = np.nan_to_num(means / np.repeat(np.where(scales > 0, scales, 1), sizes, axis=-1))
        return np.clip(np.rint(codes), 0, STEPS).astype(np.uint8), scales

    def described(self) -> dict[str, Any]:
        """Return the cells as JSON."""
        return {"of_key": _deflated(self.of_key), "parts": list(self.parts)}


@dataclass(frozen=True, eq=False)
class WordRows:
    """The rows that a file holds: of these queries of a scene."""

    scene: Scene
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, scene: Scene, limit: int = LIMIT) -> "WordRows | None":
        """Return the rows of a scene; None if it has none, or if they are over `limit` bytes in the largest cells."""
        rows = cls(scene, scene.words() if scene.grids_of() else ())
        if not rows.tokens:
            return None
        of_heads, of_means = rows.cells(MOST_POOLED).count, rows.cells(1).count
        nbytes = len(rows.tokens) * sum(layer.heads * of_heads + of_means for layer in scene.layers)
        return rows if nbytes <= limit else None

    def cells(self, pool: int) -> Cells:
        """Return the cells of its keys."""
        return Cells.of(self.scene.layers[0].problem.n_k, self.scene.grids_of(), pool)

    def stored(self, weights: Callable[[int, range], Array]) -> dict[str, Any]:
        """Return the rows as JSON, with the head and the word that the page opens on as `finding`.

        weights(layer, rows): (heads, rows, n_k).
        """
        layers: list[dict[str, Any]] = []
        largest = []
        pool, of_means = 0, self.cells(1)
        for number in range(len(self.scene.layers)):
            rows = self._rows(number, weights)
            if number == 0:
                pool, of_heads = self._fitting(rows, of_means)
            heads = of_heads.encode(rows)
            layers.append({"heads": _text(*heads), "mean": _text(*of_means.encode(rows.mean(axis=0)))})
            largest.append(np.nan_to_num(heads[1][:, -1, 0]))
        layer = int(np.argmax([x.max() for x in largest]))
        return {
            "held": {"tokens": list(self.tokens), "pool": pool},
            "finding": {"layer": layer, "head": int(largest[layer].argmax()), "i": self.tokens[-1], "how": ""},
            "cells": {"heads": of_heads.described(), "mean": of_means.described()},
            "layers": layers,
        }

    def _fitting(self, rows: Array, of_means: Cells) -> tuple[int, Cells]:
        """Return the patches on a side of the smallest cells with which layers like this one fit, and the cells."""
        means = _text(*of_means.encode(rows.mean(axis=0)))
        for pool in range(1, MOST_POOLED):
            cells = self.cells(pool)
            codes = [x["codes"] for x in (means, _text(*cells.encode(rows)))]
            if len(self.scene.layers) * sum(map(len, codes)) <= TEXT:
                return pool, cells
        return MOST_POOLED, self.cells(MOST_POOLED)

    def _rows(self, layer: int, weights: Callable[[int, range], Array]) -> Array:
        """Return the rows (heads, tokens, n_k) of a layer, those of adjacent tokens by one call."""
        of = self.scene.layers[layer]
        band = max(1, BAND // (of.heads * of.problem.n_k))
        starts = [n for n, token in enumerate(self.tokens) if n == 0 or self.tokens[n - 1] + 1 != token]
        bands = [
            range(self.tokens[first], self.tokens[min(first + band, end) - 1] + 1)
            for start, end in pairwise([*starts, len(self.tokens)])
            for first in range(start, end, band)
        ]
        return np.concatenate([weights(layer, queries).astype(np.float32) for queries in bands], axis=1)


def _text(codes: Array, scales: Array) -> dict[str, str]:
    return {"codes": _deflated(codes), "scales": base64(scales)}


def _deflated(x: Array) -> str:
    """Return numbers as text, deflated by a strategy for noise: zlib's default takes 10 % more for it."""
    stream = zlib.compressobj(strategy=zlib.Z_FILTERED)
    return base64(stream.compress(np.ascontiguousarray(x).tobytes()) + stream.flush())
