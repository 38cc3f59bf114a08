"""Colour scales that stay ordered in greyscale, print and colour blindness.

Every picture draws weights by their square root, from 0 to 1. Small weights stay visible, and the same colour means the
same weight everywhere.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def _anchors(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Viridis (Smith and van der Walt, 2015; CC0) at 17 equal steps: for dark grounds and terminals.
VIRIDIS = _anchors(
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 "
    "fde725"
)
# From paper to ink, with falling lightness: for light grounds and print.
INK = _anchors("eef1f6 d3dfec b3cce1 8eb6d6 669dc9 4482b8 2f67a3 244d8a 1e346d 191d4c")
# Negative, zero, positive: orange and blue differ for every kind of colour vision.
SIGNED = _anchors("ffb45c e0872c a85a17 64391a 2b2b2e 1d4468 246ba5 4296d2 86c8f5")


def ramp(values: ArrayLike, anchors: tuple[str, ...] = VIRIDIS) -> NDArray[np.uint8]:
    """Return colours (..., 3) of values in [0, 1], interpolated between anchors.

    Values outside are clipped.

    >>> ramp([0.0, 1.0]).tolist()
    [[68, 1, 84], [253, 231, 37]]
    """
    table = np.array([[int(anchor[k : k + 2], 16) for k in (0, 2, 4)] for anchor in anchors], dtype=np.float64)
    at = np.clip(np.nan_to_num(np.asarray(values, dtype=np.float64)), 0.0, 1.0)
    stops = np.linspace(0.0, 1.0, len(anchors))
    channels = [np.interp(at, stops, table[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def tone(weights: ArrayLike) -> NDArray[np.float64]:
    """Return the position of a weight on the colour scale: its square root.

    >>> tone([0.0, 0.25, 1.0]).tolist()
    [0.0, 0.5, 1.0]
    """
    return np.sqrt(np.clip(np.asarray(weights, dtype=np.float64), 0.0, 1.0))


def readable_on(colour: ArrayLike) -> str:
    """Return near black or near white, as text that stands out on an sRGB colour.

    The choice is by WCAG relative luminance.

    >>> readable_on([253, 231, 37]), readable_on([68, 1, 84])
    ('#101010', '#f8f8f8')
    """
    channel = np.asarray(colour, dtype=np.float64) / 255.0
    linear = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    return "#101010" if float(linear @ [0.2126, 0.7152, 0.0722]) > 0.18 else "#f8f8f8"
