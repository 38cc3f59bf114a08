"""Numbers for distances between queries and keys: the slopes of ALiBi."""

from __future__ import annotations  # so that `help` shows the names of types

import numpy as np
from numpy.typing import NDArray

from regard.arguments import values


def alibi_slopes(num_heads: int) -> NDArray[np.float32]:
    """Return ALiBi's slope of each head, to subtract slope · |i - j| from scores.

    Press et al. 2022. (num_heads,) float32, all positive. A power of two h gives 2^(-8k/h) for k =
    1, ..., h. Any other number takes the slopes of the power of two below it, then every second one
    of the power of two above, as the paper's code does.

    Raises:
        ValueError: for num_heads < 1.

    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    """
    num_heads = values.integer("num_heads", num_heads, least=1, below=2**31)
    below = 1 << (num_heads.bit_length() - 1)
    between = np.arange(1, 2 * (num_heads - below), 2) / 2
    k = np.concatenate([np.arange(1, below + 1), between])
    slopes: NDArray[np.float32] = np.exp2(-8 * k / below).astype(np.float32)
    return slopes
