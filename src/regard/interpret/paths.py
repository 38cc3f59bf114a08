"""Paths through two heads: which earlier heads wrote where a head reads."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class EarlierHead:
    """A head that wrote what a later head reads at a key, and the token that it read there most.

    key: that token. weight: on it. norm: of its value, None if unknown. product: along the whole path.
    """

    layer: int
    head: int
    key: int
    weight: float
    norm: float | None
    product: float


def earlier_heads(weight: float, j: int, layers: Iterable[tuple[Floats, Floats | None]]) -> tuple[EarlierHead, ...]:
    """Rank the heads of earlier layers by the largest product of weights along a path through key j.

    A head reads key j with weight P[i, j]. What stands there was written by heads of earlier layers as they read for
    token j: head g moved the value v[r] of token r with weight P_g[j, r]. The path r → j → i through g has the product

        P[i, j] · P_g[j, r] · ‖v_g[r]‖

    and a head is listed with the r that makes it largest. r = j is left out: that moves nothing between tokens.

    weight: P[i, j]. layers: of each earlier layer the weights (h, n) of query j, and the norms (h, n) of its values.
    Where these are None in any layer, no product has them, and r = 0 is left out too: heads that find nothing rest
    their weight there.

    >>> P, norms = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]]), np.array([[0.5, 1.0, 1.0], [0.5, 1.0, 1.0]])
    >>> [(x.head, x.key, round(x.product, 2)) for x in earlier_heads(0.5, 2, [(P, norms)])]
    [(1, 1, 0.4), (0, 0, 0.23)]
    >>> [(x.head, x.key, x.product) for x in earlier_heads(0.5, 2, [(P, None)])]
    [(1, 1, 0.4), (0, 1, 0.05)]
    """
    before = list(layers)
    measured = all(norms is not None for _, norms in before)
    heads: list[EarlierHead] = []
    for layer, (rows, norms) in enumerate(before):
        moved = np.array(rows * norms if measured and norms is not None else rows, np.float64)
        moved[:, [j] if measured else [0, j]] = 0
        for head, key in enumerate(moved.argmax(-1).tolist()):
            norm = float(norms[head, key]) if measured and norms is not None else None
            heads.append(EarlierHead(layer, head, key, float(rows[head, key]), norm, weight * float(moved[head, key])))
    return tuple(sorted((x for x in heads if x.product > 0), key=lambda x: -x.product))
