"""The rows that each rank has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
PASSES = 8  # least steps of a long sequence: fewer are less work in Python, more take less memory


@dataclass(frozen=True)
class Deal:
    """The runs of positions of each rank, ascending; together they are the whole, once.

    >>> Deal.contiguous(10, 3)
    Deal(name='contiguous', runs=((range(0, 4),), (range(4, 8),), (range(8, 10),)))
    >>> Deal.stripes(10, 2, 4)
    Deal(name='stripes', runs=((range(0, 4), range(8, 10)), (range(4, 8),)))
    """

    name: str
    runs: tuple[tuple[range, ...], ...]

    @classmethod
    def contiguous(cls, n: int, ranks: int) -> "Deal":
        """Deal shards of ceil(n / ranks) positions, as PyTorch's `Shard` does; the last may be shorter, or empty."""
        size = -(-n // ranks) if n else 0
        starts = [min(rank * size, n) for rank in range(ranks)]
        ends = [*starts[1:], n]
        return cls("contiguous", tuple((range(a, b),) if a < b else () for a, b in zip(starts, ends, strict=True)))

    @classmethod
    def stripes(cls, n: int, ranks: int, size: int) -> "Deal":
        """Deal stripes of `size` positions round robin."""
        every = [range(a, min(a + size, n)) for a in range(0, n, size)]
        return cls("stripes", tuple(tuple(every[rank::ranks]) for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @property
    def n(self) -> int:
        return sum(map(len, self.all_runs()))

    def all_runs(self) -> Iterator[range]:
        """Yield the runs of all ranks, rank after rank."""
        for runs in self.runs:
            yield from runs

    def size(self, rank: int) -> int:
        """Return the number of positions of a rank."""
        return sum(map(len, self.runs[rank]))

    def owners(self) -> Array:
        """Return the rank of each run, in the order of `all_runs`."""
        return np.repeat(np.arange(self.ranks), [len(runs) for runs in self.runs])

    def positions(self, rank: int) -> Array:
        """Return the positions of a rank in the whole, ascending."""
        return np.concatenate([np.arange(0), *(np.arange(x.start, x.stop) for x in self.runs[rank])]).astype(np.int64)

    def in_blocks(self, size: int, longest: int) -> "Deal":
        """Return the nearest deal of whole blocks: each to the rank that has most of it, or else has fewest so far.

        size: positions of a block. longest: blocks of a run.

        >>> Deal.contiguous(10, 2).in_blocks(4, 2)
        Deal(name='contiguous', runs=((range(0, 4),), (range(4, 10),)))
        """
        starts = range(0, self.n, size)
        rows = np.zeros((self.ranks, len(starts)), np.int64)
        for rank, runs in enumerate(self.runs):
            for run in runs:
                for n in range(run.start // size, -(-run.stop // size)):
                    rows[rank, n] += min(run.stop, (n + 1) * size) - max(run.start, n * size)
        dealt, load = [list[range]() for _ in self.runs], np.zeros(self.ranks, np.int64)
        for n, first in enumerate(starts):
            owner = min(range(self.ranks), key=lambda rank: (-rows[rank, n], load[rank]))
            block, mine = range(first, min(first + size, self.n)), dealt[owner]
            load[owner] += 1
            if mine and mine[-1].stop == block.start and len(mine[-1]) < size * longest:
                block = range(mine.pop().start, block.stop)
            mine.append(block)
        return Deal(self.name, tuple(map(tuple, dealt)))

    def locals(self, rank: int) -> list[slice]:
        """Return where each run of a rank lies among the rank's own rows."""
        ends = np.cumsum([0, *map(len, self.runs[rank])]).tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    def pieces(self, rank: int, rows: range) -> list[tuple[slice, slice]]:
        """Return the rank's parts of some rows: where each lies among its own, and among those rows."""
        parts = []
        for run, own in zip(self.runs[rank], self.locals(rank), strict=True):
            a, b = max(run.start, rows.start), min(run.stop, rows.stop)
            if a < b:
                parts.append(
                    (slice(own.start + a - run.start, own.start + b - run.start), slice(a - rows.start, b - rows.start))
                )
        return parts


def steps(n: int, align: int, passes: int = PASSES, first: int = 0) -> Sequence[range]:
    """Return the ranges of positions that pass by together; each begins at a multiple of `align`, or at the first.

    first: what the first position counts as.

    >>> steps(2500, 1024), len(steps(65536, 1024))
    ([range(0, 1024), range(1024, 2048), range(2048, 2500)], 8)
    >>> steps(2500, 1024, first=1000)
    [range(0, 24), range(24, 1048), range(1048, 2072), range(2072, 2500)]
    """
    size, shift = align * max(1, n // (passes * align)), first % align
    every = (range(max(0, a - shift), min(a - shift + size, n)) for a in range(0, n + shift, size))
    return [x for x in every if len(x)]
