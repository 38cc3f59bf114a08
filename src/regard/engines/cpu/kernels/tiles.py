"""Tiles of keys, read from the lists of query blocks."""

from dataclasses import dataclass
from typing import NamedTuple

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.spec.scratch import TileScratch
from regard.engines.cpu.spec.tiles import KEYS, PART, TILE_BITS, TILE_WORD, TILE_WORD_BITS


class Halves(NamedTuple):
    """The keys of a tile that each half of the lanes may see.

    Both halves may see the keys from `first` to `stop`; one half alone may see whole PARTs before and after.
    """

    first: Value
    stop: Value
    early: Value  # 0 or 1: the half that may see the keys before
    late: Value  # and those after


@dataclass(frozen=True)
class TileKeys:
    """The keys of a tile.

    Keys from `first` to before `stop` are present, counted from the start of the tile.
    """

    number: Value  # counted from the absolute j = 0
    start: Value  # the column of its first key; negative if it begins before the call's keys
    first: Value
    stop: Value
    mixed: tuple[Value, Value]  # the keys of which a mask may hide some
    halves: Halves


@dataclass(frozen=True)
class KeyTile(TileKeys):
    """A tile of keys against a query block."""

    place: Value  # its index in the list of tiles
    block: RowBlock
    scratch: TileScratch  # where its scores and weights are


def read_keys(k: Kernel, word: Value) -> TileKeys:
    """Return the keys that an entry of the list of tiles names."""
    number = word >> TILE_BITS
    start = number * KEYS - k.integer("shift")
    entry = {name: word >> n * TILE_WORD_BITS & (1 << TILE_WORD_BITS) - 1 for n, name in enumerate(TILE_WORD)}
    first = k.maximum(entry["first"] * PART, -start)
    stop = k.minimum(entry["stop"] * PART, k.integer("n_k") - start)
    mixed = k.minimum(k.maximum(entry["mixed_first"] * PART, first), stop)
    both_first = k.maximum(k.minimum(entry["both_first"] * PART, stop), first)
    both_first = k.where((first | both_first) % PART == 0, both_first, first)
    both_stop = k.maximum(k.minimum(entry["both_stop"] * PART, stop), both_first)
    both_stop = k.where((both_stop | stop) % PART == 0, both_stop, stop)
    return TileKeys(
        number + k.integer("first_tile"),
        start,
        first,
        stop,
        (mixed, k.minimum(k.maximum(entry["mixed_stop"] * PART, mixed), stop)),
        Halves(both_first, both_stop, entry["early"], entry["late"]),
    )


def read_tile(block: RowBlock, scratch: TileScratch, place: Value, word: Value) -> KeyTile:
    """Return a query block's tile at an index of the list, from its entry there."""
    return KeyTile(**vars(read_keys(block.k, word)), place=place, block=block, scratch=scratch)
