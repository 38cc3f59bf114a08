"""Bringing memory near before it is read.

Lines are not asked for one after the other: in a block, lines at some distance from each other come first, then those
behind them. What is best differs among processors, so the target says how long a block is, and how many lines of it are
asked for in a row. Granite Rapids brings the lines that follow what is asked for in order by itself too, twice or too
soon: reading does 0.92 of what it could then, and decoding 0.8 to 0.9. Zen 5 wants them in order: decoding is 1.15
times as fast, and 1.04 times as fast 9 to 10 KiB ahead as 12. Zen 3 brings more by itself the more pages are gone
through at once, up to some four, but not where lines of a page are skipped.

Zen 4 leaves out what is asked for while 24 lines are on their way, half of what its bandwidth needs, and brings the
rest by itself where one instruction reads in order: there, what is read out of order is read in order before. It
follows some eight pages at once, and learns anew what it comes back to after others or after a pause.
"""

from collections.abc import Iterator

from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.target.instructions import Target

LINE = 64  # bytes that come at once


class Prefetcher:
    """How memory is brought near on a target."""

    def __init__(self, target: Target):
        self.prefetch = target.prefetch
        self.several = self.prefetch.several
        self.stride = self.prefetch.block // self.several

    def interleaved(self, at: Value) -> Value:
        """Of lines one behind the other, where that is which is asked for in place of the one at these bytes."""
        row, block = self.several * LINE, self.prefetch.block
        line, behind = at & (row - LINE), at & (block - 1) & -row
        return (at & -block) + line * (self.stride // LINE) + behind // self.several

    def lines(self, start: Pointer, count: int, distance: int | None = None) -> Iterator[Pointer]:
        """So many of those at the distance, from one on that a multiple of as many, or of `several`, come before."""
        several = self.several
        distance = self.prefetch.distance if distance is None else distance
        return (start.bytes(distance + n % several * self.stride + n // several * LINE) for n in range(count))
