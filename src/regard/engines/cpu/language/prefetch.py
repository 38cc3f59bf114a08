"""Software prefetch.

Lines are not requested one after the other: in a block, lines at some stride come first, then the lines next to them.
The best pattern differs among processors, so the target gives the block size and the number of streams.

- Granite Rapids: its own prefetcher follows requests that are in order, repeated or too early. Reading then reaches
  0.92 of its rate, and decoding 0.8 to 0.9.
- Zen 5 needs lines in order: decoding is 1.15 times as fast, and 1.04 times as fast at 9 to 10 KiB ahead as at 12.
- Zen 3's own prefetcher serves up to four pages at once, but not if lines of a page are skipped.
- Zen 4 drops requests while 24 lines are in flight, half of what its bandwidth needs. Its own prefetcher covers the
  rest if one instruction reads in order. So data that is used out of order is read in order first, except rows that
  hold several heads: of those it takes too many at once. The prefetcher follows some eight pages at once, and has to
  relearn a page after others or after a pause.
"""

from collections.abc import Iterator

from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.target.instructions import Target

LINE = 64  # bytes of a cache line


class Prefetcher:
    """The prefetch pattern of a target."""

    def __init__(self, target: Target):
        self.prefetch = target.prefetch
        self.several = self.prefetch.several
        self.stride = self.prefetch.block // self.several

    def interleaved(self, at: Value) -> Value:
        """Return the byte offset of the line to request when reading that at `at`."""
        row, block = self.several * LINE, self.prefetch.block
        line, behind = at & (row - LINE), at & (block - 1) & -row
        return (at & -block) + line * (self.stride // LINE) + behind // self.several

    def lines(self, start: Pointer, count: int, distance: int | None = None) -> Iterator[Pointer]:
        """Yield the addresses of `count` lines at the prefetch distance.

        `start` is a multiple of `count` lines, or of `several`, from the beginning.
        """
        several = self.several
        distance = self.prefetch.distance if distance is None else distance
        return (start.bytes(distance + n % several * self.stride + n // several * LINE) for n in range(count))
