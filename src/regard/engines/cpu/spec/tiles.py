"""Tiles and key splits: sizes, and the lists of tiles of query blocks."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

KEYS = 128  # of a tile
PART = 16  # keys of a tile that are classified together
LANES = 16  # maximum of a vector
SPLIT_TILES, SPLIT_BYTES = 8, 2**19  # maximum tiles, and bytes of K and V, of a key split
# Of AMX: rows of a tile, products summed in one step, tiles of sums in registers.
AMX_SIDE, AMX_DEPTH, AMX_SUMS = 16, 32, 4
# Query blocks that share the tiles of a key split in cache, for few tiles and for many.
WORK_GROUP, WIDE_WORK_GROUP = 16, 64

RESUMED, CARRIED = 1, 2  # flags in `splits` of a carried query block: it goes on from its state; it is not finished

TILE_BITS = 32
# The fields of an entry of the list of tiles, besides the tile's number, and their values where all lanes see all
# keys. Keys are counted in PARTs.
TILE_WORD = {
    "first": 0, "stop": KEYS, "mixed_first": 0, "mixed_stop": 0, "both_first": 0, "both_stop": KEYS,
    "early": 0, "late": 0,
}  # fmt: skip
TILE_WORD_BITS = 4


def split_bits(d: int, size: int) -> int:
    """Return log2 of the tiles in a key split.

    Only d and size decide, since bits of results depend on the split.
    """
    fit = SPLIT_BYTES // max(1, KEYS * 2 * d * size)
    return min(max(1, fit), SPLIT_TILES).bit_length() - 1


def tile_word(tile: Array, **fields: Array | int) -> Array:
    """Return entries of a query block's list of tiles.

    first, stop: the keys that are present. mixed: those of which a mask may hide some. both, early, late: see `Halves`.
    """
    word: Array = tile << TILE_BITS
    for n, (name, whole) in enumerate(TILE_WORD.items()):
        word = word | (fields.get(name, whole) // (1 if name in ("early", "late") else PART) << n * TILE_WORD_BITS)
    return word


def multiple(n: Any, step: int) -> Any:
    """Round n up to a multiple of a step."""
    return (n + (step - 1)) // step * step
