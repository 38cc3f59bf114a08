"""The two layouts of a call's arrays, converted by views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from regard.core import checks
from regard.core.problem import Outputs, Problem
from regard.core.statistics import Seen, Statistic, each_array

NDArray = np.ndarray[Any, np.dtype[Any]]


class Layout(NamedTuple):
    """The layout of the caller's arrays; conversions are views, never copies.

    matrices: plain (n, d), one head. positions_first: (..., n, h, d). `to_bhnd` makes operands (..., h, n, d),
    `from_bhnd` converts results back.
    """

    matrices: bool
    positions_first: bool

    @classmethod
    def of(cls, query: Any, layout: object) -> Layout:
        return cls(query.ndim == 2, checks.layout(layout) == "bnhd" and query.ndim > 2)

    def to_bhnd(self, x: NDArray) -> NDArray:
        return x[None] if self.matrices else x.swapaxes(-2, -3) if self.positions_first else x

    def from_bhnd(self, x: NDArray) -> NDArray:
        return x[0] if self.matrices else x.swapaxes(-2, -3) if self.positions_first else x

    def per_head(self, x: NDArray) -> NDArray:
        """Return a statistic or weights: (..., h, ...), without h for matrices."""
        return x[0] if self.matrices else x

    def rows_to_bhn(self, x: NDArray) -> NDArray:
        """Return a per-query array of the caller as (..., h, n_q)."""
        return x[None] if self.matrices else x

    def per_head_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[1:] if self.matrices else shape

    def out_shape(self, p: Problem) -> tuple[int, ...]:
        """Return the shape of the output as the caller sees it."""
        return tuple(self.from_bhnd(np.broadcast_to(np.float32(0), p.shape(p.n_q, p.d_v))).shape)

    def seen(self, found: Mapping[Statistic, Any]) -> Seen:
        return Seen({s: each_array(x, self.per_head) for s, x in found.items()})

    def outputs(self, x: Outputs) -> Outputs:
        lse, entropy = (None if a is None else self.per_head(a) for a in (x.lse, x.entropy))
        out, low = (None if a is None else self.from_bhnd(a) for a in (x.out, x.low))
        return Outputs(out, lse, entropy, low)
