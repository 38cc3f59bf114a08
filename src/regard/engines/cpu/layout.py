"""What a kernel and its caller agree on: fields, items, lists of tiles, scratch memory, and what is compiled anew."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.engines.cpu.element import Type
from regard.engines.cpu.lowering import Arguments

Array = np.ndarray[Any, np.dtype[Any]]

KEYS, TILES = 128, 8
PART = 16  # keys: of a tile, what lies before the first and after the last part that is visible is left out

TILE_BITS = 17


def tile_word(tile: Array, first: Array | int, stop: Array | int, masked: Array | int) -> Array:
    """A tile in the list of an item: its number, its first key and the one after its last, whether it is masked."""
    word: Array = (tile << TILE_BITS) | (first << 9) | (stop << 1) | masked
    return word


FIELDS = (
    "items", "count", "tiles", "scratch", "d", "d_v", "n_k", "shift", "first_tile", "j", "keys", "scale",
    "q_head", "q_row", "q_feature", "k_row", "k_feature", "v_row", "v_feature", "out_head", "out_row", "row_head",
    "bias_head", "bias_row", "bias_key", "sink", "threshold", "kept", "seed",
)  # fmt: skip
ITEM = ("q", "k", "v", "out", "lse", "entropy", "max", "bias", "b", "h", "head", "i", "rows", "lanes", "tiles", "count")


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for.

    element: of q, k, v and out. real: of sums. columns: vectors of queries. copied: whether tiles of K and V are copied
    (16 bits, or features that do not lie together). bias: the type of a dense bias.
    """

    element: Type
    real: Type
    columns: int
    copied: bool
    mask: Arguments | None
    score: Arguments | None
    bias: Type | None
    dropout: bool
    sink: bool
    entropy: bool

    @property
    def fields(self) -> tuple[str, ...]:
        rules = [name for program in (self.mask, self.score) if program for name in program.fields]
        return (*FIELDS, *self.dense_fields, *rules)

    @property
    def dense(self) -> int:
        """Dense masks."""
        return len(self.mask.program.dense) if self.mask else 0

    @property
    def dense_fields(self) -> list[str]:
        return [f"dense{n}_{axis}" for n in range(self.dense) for axis in ("head", "row", "key")]

    @property
    def item(self) -> tuple[str, ...]:
        return (*ITEM, *(f"dense{n}" for n in range(self.dense)))

    @property
    def ruled(self) -> bool:
        """Whether scores are changed after the product: then they are natural ones, else logarithms of base 2."""
        return self.score is not None or self.bias is not None

    @property
    def key(self) -> str:
        rules = [None if x is None else x.program.structure for x in (self.mask, self.score)]
        ranks = [[len(t.shape) for t in x.program.tables] for x in (self.mask, self.score) if x]
        rest = (self.element, self.real, self.columns, self.copied, self.bias, self.dropout, self.sink, self.entropy)
        return repr(("forward", rest, rules, ranks))


def scratch_size(lanes: int, d: int, d_v: int, dense: int, copied: bool) -> int:
    """Numbers of scratch memory that a kernel for `lanes` queries needs; dense: biases and masks."""
    return lanes * (30 + d + 2 * d_v + KEYS * (2 + dense)) + (KEYS * (d + d_v) if copied else 0) + 256
