"""The absolute indices of a call: batch elements, heads, queries and keys."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.rules import Ranges
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(eq=False)
class Extents:
    """Index ranges of a call.

    lead: leading dimensions. offset, origin: as in `Problem`. real: the scalar type of scores. keys: the number of keys
    of the whole sequence, which ends with the call's last key unless the call is a `CallPart`.
    """

    lead: tuple[int, ...]
    heads: int
    n_q: int
    n_k: int
    offset: Array
    origin: tuple[int, int, int]
    real: type[np.floating[Any]]
    keys: int

    @cached_property
    def indices(self) -> dict[str, tuple[int, int]]:
        """The half-open range of each axis: "b", "h", "i" and "j"."""
        b, h, j = self.origin
        offsets = (self.offset if any(self.offset.strides) else self.offset[:1]).tolist()  # one for all: stride 0
        first, last = (min(offsets), max(offsets)) if offsets else (0, -self.n_q)
        i = (first, last + self.n_q if self.n_q else first)
        return {"b": (b, b + len(self.offset)), "h": (h, h + self.heads), "i": i, "j": (j, j + self.n_k)}

    def ranges(self, b: Any, heads: tuple[Any, Any], first: Any, last: Any) -> Ranges:
        """Return the index ranges of batch elements, some heads of each and some queries.

        Arguments count from the first of the call, and are integers or arrays that broadcast. heads: the least and the
        greatest. first, last: of the queries. The keys are left out.
        """
        offset, (batch, head, _) = self.offset[b], self.origin
        return Ranges(
            b=(batch + b,) * 2,
            h=(head + heads[0], head + heads[1]),
            i=(first + offset, last + offset),
            keys=self.keys,
            dtype=self.real,
        )

    def key_edges(self, size: int) -> Array:
        """Return the first key of each tile, and the end: int64 (tiles + 1,).

        Tiles begin at multiples of `size` from j = 0; the first and the last may be smaller.
        """
        first, end = self.origin[2], self.origin[2] + self.n_k
        starts = np.arange(first - first % size if self.n_k else end, end, size, dtype=np.int64)
        return np.append(np.maximum(starts, first), end)

    @property
    def diagonals(self) -> int:
        """The number of differences i − j."""
        return self.n_q + self.n_k - 1 if self.n_q and self.n_k else 0

    @cached_property
    def distances(self) -> Array:
        """The differences i − j, ascending: int64 (..., 1, diagonals)."""
        first = self.offset - self.origin[2] - (self.n_k - 1)
        return (first[:, None] + np.arange(self.diagonals, dtype=np.int64)).reshape(*self.lead, 1, self.diagonals)
