"""Bringing memory near before it is read.

Lines are not asked for one after the other: of each page every eighth comes first, then those behind them. Where a page
is asked for in order, some processors (Granite Rapids) also bring by themselves the lines that follow, twice or too
soon: reading does 0.92 of what it could then, and decoding 0.8 to 0.9. To others (Zen 5) the order is all one.
"""

from collections.abc import Iterator

from regard.engines.cpu.emit import Pointer, Value

AHEAD = 12 * 2**10  # bytes that are on their way: the processor does not see far enough itself
LINE = 64  # bytes that come at once
PAGE, PASS = 2**12, 8  # bytes, and lines of a page that are asked for before those behind them
APART = PAGE // PASS


def in_turn(at: Value) -> Value:
    """Of lines one behind the other, where that is which is asked for in place of the one at these bytes."""
    return (at & -PAGE) + (at & (PASS - 1) * LINE) * (APART // LINE) + (at & (PAGE - 1) & -APART) // PASS


def lines_ahead(start: Pointer, count: int) -> Iterator[Pointer]:
    """So many of those AHEAD, from one on that a multiple of as many, or of PASS, come before."""
    return (start.bytes(AHEAD + n % PASS * APART + n // PASS * LINE) for n in range(count))
