"""Pictures of what a model read, as pixels (height, width, 3) of uint8."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.arguments.packages import require
from regard.arguments.values import type_name

Array = np.ndarray[Any, np.dtype[Any]]
Pixels = NDArray[np.uint8]

LARGEST = 1024
"""Pixels on a side of a picture that is kept; a larger one is averaged down to that."""

WAVE = 128
"""Pixels of the height of a waveform."""


def opened(image: Any) -> Any:
    """Return the argument `image` as a picture of Pillow.

    image: a path, a picture of Pillow, or an array (height, width) or (height, width, 3) of uint8. Raises TypeError for
    anything else, ValueError for a file that holds no picture, and MissingPackage without Pillow.
    """
    if not isinstance(image, str | Path | np.ndarray) and not hasattr(image, "convert"):
        raise TypeError(f"image must be a path, a picture of Pillow or an array of pixels, got {type_name(image)}")
    if isinstance(image, np.ndarray) and (image.dtype != np.uint8 or image.ndim not in (2, 3)):
        raise TypeError(
            f"image must have pixels (height, width) or (height, width, 3) of uint8, got {image.shape} of {image.dtype}"
        )
    require("image", "pillow")
    from PIL import Image, UnidentifiedImageError

    if isinstance(image, np.ndarray):
        return Image.fromarray(image).convert("RGB")
    try:
        return (Image.open(image) if isinstance(image, str | Path) else image).convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(f"image {image} is no picture that Pillow can read") from None
    except OSError as error:
        raise ValueError(f"cannot read image {image}: {error.strerror or error}") from None


def pixels(image: Any) -> Pixels:
    """Return the pixels of an image: see `opened`. An array needs no Pillow."""
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        return reduced(image)
    return reduced(np.asarray(opened(image)))


def coloured(values: Array, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> Pixels:
    """Return the pixels of a picture (channels, height, width) that a processor has normalized.

    mean, std: those of the processor, one a channel. Without them the least value is black, and the largest white.
    """
    x = np.asarray(values, np.float32)
    if mean is not None and std is not None and len(mean) == len(std) == len(x):
        x = x * np.asarray(std, np.float32)[:, None, None] + np.asarray(mean, np.float32)[:, None, None]
    else:
        x = _between_extremes(x)
    shown = np.rint(255 * np.clip(x[:3] if len(x) >= 3 else x[:1], 0, 1)).astype(np.uint8)
    return reduced(np.broadcast_to(np.moveaxis(shown, 0, -1), (*x.shape[1:], 3)))


def reduced(x: Pixels) -> Pixels:
    """Average pixels down to at most `LARGEST` on a side.

    >>> reduced(np.zeros((3000, 500, 3), np.uint8)).shape
    (1024, 500, 3)
    """
    for axis in (0, 1):
        size = x.shape[axis]
        if size > LARGEST:
            edges = np.arange(LARGEST + 1) * size // LARGEST
            sums = np.add.reduceat(x, edges[:-1], axis=axis, dtype=np.uint32)
            shape = [-1 if n == axis else 1 for n in range(x.ndim)]
            x = np.rint(sums / np.diff(edges).reshape(shape)).astype(np.uint8)
    return np.ascontiguousarray(x)


def spectrogram(values: Array) -> Pixels:
    """Draw a spectrogram (frequencies, frames), low frequencies at the bottom, loud ones bright."""
    grey = np.rint(255 * _between_extremes(np.asarray(values, np.float32)[::-1])).astype(np.uint8)
    return reduced(np.repeat(grey[..., None], 3, axis=-1))


def waveform(samples: Array) -> Pixels:
    """Draw the samples (n,) of a sound: the range of each of at most `LARGEST` columns, black on white."""
    x = np.asarray(samples, np.float32)
    columns = min(len(x), LARGEST)
    starts = np.arange(columns) * len(x) // columns
    most = max(float(np.abs(x).max(initial=0)), float(np.finfo(np.float32).tiny))
    low, high = (
        np.clip(np.rint((1 - of.reduceat(x, starts) / most) * (WAVE - 1) / 2), 0, WAVE - 1)
        for of in (np.maximum, np.minimum)
    )
    y = np.arange(WAVE)[:, None]
    grey = np.where((low <= y) & (y <= high), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.repeat(grey[..., None], 3, axis=-1))


def _between_extremes(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale values so that the least is 0 and the largest 1; a constant is 0."""
    finite = x[np.isfinite(x)]
    least, most = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    scaled = (x - least) / np.float32(most - least if most > least else 1)
    return np.asarray(np.nan_to_num(scaled, nan=0, posinf=1, neginf=0))
