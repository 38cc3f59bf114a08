"""What a kernel and its caller agree on: fields, items, lists of tiles, scratch memory, and what is compiled anew."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.engines.cpu.language.types import BF16, I32, I64, Type
from regard.rules import Program

Array = np.ndarray[Any, np.dtype[Any]]

KEYS = 128
SIDE, DEPTH, SUMS = 16, 32, 4  # of matrices: rows, products that are summed at once, and how many grow at once
TILES, SPAN = 8, 2**19  # of a span: tiles at most, bytes of K and V at most
PART = 16  # keys, of which what lanes may see of a tile is told apart
GROUP, WIDE_GROUP = 16, 64  # items that share the tiles of a span while they are near, of few tiles and of many
LANES = 16  # of a vector, at most

TILE_BITS = 32


def span_bits(d: int, size: int) -> int:
    """The logarithm of the number of tiles in a span, for d numbers of some bytes: bits depend on it, so on no more."""
    fit = SPAN // max(1, KEYS * 2 * d * size)
    return min(max(1, fit), TILES).bit_length() - 1


# What the list of an item says of a tile beside its number; here of one that all lanes see. Keys are counted in PARTs.
TILE_WORD = {
    "first": 0, "stop": KEYS, "mixed_first": 0, "mixed_stop": 0, "both_first": 0, "both_stop": KEYS,
    "early": 0, "late": 0,
}  # fmt: skip
TILE_WORD_BITS = 4


def tile_word(tile: Array, **fields: Array | int) -> Array:
    """Tiles in the list of an item.

    first, stop: the keys that are there. mixed: those of which a mask may hide some. both, early, late: `Halves`.
    """
    word: Array = tile << TILE_BITS
    for n, (name, whole) in enumerate(TILE_WORD.items()):
        word = word | (fields.get(name, whole) // (1 if name in ("early", "late") else PART) << n * TILE_WORD_BITS)
    return word


# What every kernel begins with: groups of items, how many there are and, at an address, how many have been taken; the
# items, and where the arrays begin that their addresses are counted from.
FIRST = ("groups", "count", "taken", "items", "bases", "tiles", "scratch")
GROUPS, COUNT, TAKEN, ITEMS, BASES, TILE_LIST, SCRATCH = range(len(FIRST))
FIELDS = (
    *FIRST, "d", "d_v", "n_k", "shift", "first_tile", "span_bits", "j", "keys", "scale",
    "q_head", "q_row", "q_feature", "k_head", "k_row", "k_feature", "v_head", "v_row", "v_feature",
    "out_head", "out_row", "row_head",
    "bias_head", "bias_row", "bias_key", "sink", "threshold", "kept", "seed",
)  # fmt: skip
# Words of an item: addresses, counted from the bases of the same places, among them those of dense masks and, last, of
# memory for spans worked on apart; the rest.
ADDRESSES = ("q", "k", "v", "out", "lse", "entropy", "max", "values", "indices", "bias")
ITEM = ("spans", "b", "h", "head", "i", "rows", "lanes", "tiles", "count")


@dataclass(frozen=True)
class Arguments:
    """The fields by which a program's numbers and tables reach a kernel; `prefix` sets programs apart."""

    prefix: str
    program: Program

    @property
    def fields(self) -> list[str]:
        numbers = [f"{self.prefix}_number{n}" for n in range(len(self.program.numbers))]
        tables = [
            f"{self.prefix}_table{n}{part}"
            for n, table in enumerate(self.program.tables)
            for part in ("", *(f"_size{axis}" for axis in range(len(table.shape))))
        ]
        return numbers + tables


def integer_type(integers: type[np.signedinteger[Any]], *rules: Arguments | None) -> Type:
    """The type of the integers in rules: I32 if they fit (see `CallRules.integers`), positions in tables included."""
    sizes = [table.array.size for rule in rules if rule for table in rule.program.tables]
    return I32 if integers is np.int32 and max(sizes, default=0) < 2**31 else I64


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for.

    element: of q, k, v and out. real: of sums. integer: of indices in rules. lanes: queries of an item, whole vectors.
    few: rows that share a key head in an item whose lanes are keys, 0 where lanes are queries. joined: vectors of rows
    in such an item if it holds several key heads, whose rows of K and V lie beside each other, else 0. pairs: whether
    products take two numbers of 16 bits at once. copied: whether tiles of K and V are copied before use. woven: whether
    the weights of a tile are made beside the scores of the next. bias: the type of a dense bias. best: how many of the
    largest weights are kept.
    """

    element: Type
    real: Type
    integer: Type
    lanes: int
    few: int
    joined: int
    pairs: bool
    matrices: bool
    copied: bool
    woven: bool
    mask: Arguments | None
    score: Arguments | None
    bias: Type | None
    dropout: bool
    sink: bool
    entropy: bool
    best: int

    @property
    def fields(self) -> tuple[str, ...]:
        rules = [name for program in (self.mask, self.score) if program for name in program.fields]
        return (*FIELDS, *self.dense_fields, *rules)

    # What is read, summed and made, by name; tangents add to it.

    @property
    def queries(self) -> tuple[str, ...]:
        return ("q",)

    @property
    def keys(self) -> tuple[str, ...]:
        return ("k",)

    @property
    def values(self) -> tuple[str, ...]:
        return ("v",)

    @property
    def weights(self) -> tuple[str, ...]:
        """Tiles of numbers, one for each pair, that become what values are multiplied with."""
        return ("P",)

    @property
    def fetched(self) -> tuple[str, ...]:
        """Dense arrays, whose tiles are turned so that lanes are queries."""
        return (*self.dense_names, *(["bias"] if self.bias else []))

    @property
    def sums(self) -> tuple[tuple[str, str], ...]:
        """Σ w and Σ w (S − m) over the keys of a query, the second for the entropy."""
        return (("l", "e"),)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("O",)

    @property
    def dense(self) -> int:
        """Dense masks."""
        return len(self.mask.program.dense) if self.mask else 0

    @property
    def dense_names(self) -> list[str]:
        return [f"dense{n}" for n in range(self.dense)]

    @property
    def dense_fields(self) -> list[str]:
        return [f"{name}_{axis}" for name in self.dense_names for axis in ("head", "row", "key")]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of an item, those that are counted from an array."""
        return (*ADDRESSES, *self.dense_names)

    @property
    def item(self) -> tuple[str, ...]:
        return (*self.addresses, "partial", *ITEM)

    @property
    def rows(self) -> int:
        """How many an item may have room for."""
        return self.few if self.few and not self.joined else self.lanes

    @property
    def vector(self) -> int:
        """Lanes of a vector, where lanes are keys."""
        return self.lanes // max(1, self.joined)

    @property
    def words(self) -> bool:
        """Whether products take words of two numbers, not matrices of them."""
        return self.pairs and not self.matrices

    @property
    def abreast(self) -> int:
        """With few queries, vectors of keys whose scores grow side by side: where one chain of sums is waited for."""
        return 2 if self.element is BF16 and 0 < self.few <= 2 and self.vector * self.real.size == 32 else 1

    @property
    def ruled(self) -> bool:
        """Whether scores are changed after the product: then they are natural ones, else logarithms of base 2."""
        return self.score is not None or self.bias is not None

    @property
    def copies(self) -> bool:
        """Whether copies of tiles are kept, of V at least."""
        return self.copied or (self.pairs and not self.few)

    @property
    def key(self) -> str:
        rules = [None if x is None else x.program.structure for x in (self.mask, self.score)]
        ranks = [[len(t.shape) for t in x.program.tables] for x in (self.mask, self.score) if x]
        rest = (self.element, self.real, self.integer, self.lanes, self.few, self.copied, self.woven, self.bias)
        more = (self.joined, self.pairs, self.matrices, self.dropout, self.sink, self.entropy, self.best)
        return repr(("forward", rest, more, rules, ranks))


# Scratch memory, in numbers of `real`, by name; d and d_v may be numbers or values of the kernel.


def tile_area(kind: Kind, d: Any, d_v: Any) -> Mapping[str, Any]:
    """What one tile needs, and the copies of the tiles of a span."""
    tile, slots = KEYS * kind.rows, TILES if kind.few else 1 + kind.woven
    area = dict.fromkeys(("top", "shift", "rescale", "old", "new", *_names(kind.sums)), kind.lanes)
    if kind.pairs and not kind.ruled:
        area["before"] = kind.lanes
    area |= dict.fromkeys(kind.weights, tile * slots)
    area |= dict.fromkeys(kind.fetched, tile) | {"seen": tile * slots}
    if kind.matrices and not kind.few:
        area["product"] = SIDE * kind.lanes
    if kind.few:
        area |= dict.fromkeys(("tops", "rescales"), kind.lanes * slots)
        area["block"] = kind.abreast * kind.vector * (d + 2 * kind.vector)
        area["total"] = output_size(kind, d_v)
    if kind.woven:
        area["rescale"] *= 2
        area |= {f"{name}_parts": LANES * kind.lanes for name in _names(kind.sums)}
    if kind.best:
        area["candidates"] = KEYS * 8 // kind.real.size
    if kind.copied:
        area |= {f"{name}_copy": TILES * KEYS * feature_rows(kind, d, 1) for name in kind.keys}
    if kind.copies:
        rows = multiple(d_v, SIDE) if kind.matrices else d_v
        area |= {f"{name}_copy": TILES * KEYS * rows for name in kind.values} | {"ready": TILES * 2}
    return area


def multiple(n: Any, step: int) -> Any:
    """n, or the next multiple of a step."""
    return (n + (step - 1)) // step * step


def feature_rows(kind: Kind, d: Any, more: int) -> Any:
    """Numbers for d features and some more; matrices take whole rows of them."""
    return multiple(d, DEPTH) if kind.matrices else d + more


def _names(sums: tuple[tuple[str, str], ...]) -> list[str]:
    return [name for both in sums for name in both]


def output_size(kind: Kind, d_v: Any) -> Any:
    """Numbers of O: a row of lanes for each feature, or for each of few queries a row of features in whole vectors."""
    if not kind.few:
        return kind.lanes * d_v
    step = kind.vector * (2 if kind.pairs else 1)
    return multiple(d_v, step) * kind.rows


def span_area(kind: Kind, d_v: Any) -> Mapping[str, Any]:
    """Maximum, sums, outputs and best keys of a span; also what is merged from spans."""
    rows = ("m", *_names(kind.sums))
    best = dict.fromkeys(("values", "indices"), kind.best * kind.lanes)
    return dict.fromkeys(rows, kind.lanes) | dict.fromkeys(kind.outputs, output_size(kind, d_v)) | best


def item_area(kind: Kind, d: Any, d_v: Any) -> Mapping[str, Any]:
    """What an item keeps from span to span."""
    integers = kind.lanes * (1 if kind.integer is I32 else 8 // kind.real.size)
    words = dict.fromkeys(("g", "r"), kind.lanes * 8 // kind.real.size)
    lanes = {"i": integers, "h": integers, "first": kind.lanes, "second": kind.lanes}
    q = kind.rows * feature_rows(kind, d, 2 * kind.vector if kind.few else 1)
    return {"cursor": 16, **words, **lanes, **dict.fromkeys(kind.queries, q), **span_area(kind, d_v)}


def scratch_size(kind: Kind, items: int, d: int, d_v: int) -> int:
    """Numbers of scratch memory for a group of items."""
    once = sum(tile_area(kind, d, d_v).values()) + sum(span_area(kind, d_v).values())
    return int(once + items * sum(item_area(kind, d, d_v).values()))
