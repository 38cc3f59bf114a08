"""The contract of the forward kernel.

It has a spec, fields, query blocks, lists of tiles, and scratch layouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.engines.cpu.language.types import BF16, I32, I64, Type
from regard.rules import Program

Array = np.ndarray[Any, np.dtype[Any]]

KEYS = 128
AMX_SIDE, AMX_DEPTH, AMX_SUMS = (
    16,
    32,
    4,
)  # of AMX: rows of a tile, products summed in one step, tiles of sums in registers
SPLIT_TILES, SPLIT_BYTES = 8, 2**19  # of a key split: tiles at most, bytes of K and V at most
PART = 16  # keys whose visibility in a tile is classified together
WORK_GROUP, WIDE_WORK_GROUP = (
    16,
    64,
)  # query blocks that share the tiles of a key split while they are in cache, of few tiles and of many
LANES = 16  # lanes of a vector at most

TILE_BITS = 32


def split_bits(d: int, size: int) -> int:
    """Return log2 of the tiles in a key split.

    Bits of results depend on it, so it depends on d and size alone.
    """
    fit = SPLIT_BYTES // max(1, KEYS * 2 * d * size)
    return min(max(1, fit), SPLIT_TILES).bit_length() - 1


# The fields of an entry of the list of tiles, besides the tile's number, and their values where all lanes see all
# keys. Keys are counted in PARTs.
TILE_WORD = {
    "first": 0, "stop": KEYS, "mixed_first": 0, "mixed_stop": 0, "both_first": 0, "both_stop": KEYS,
    "early": 0, "late": 0,
}  # fmt: skip
TILE_WORD_BITS = 4


def tile_word(tile: Array, **fields: Array | int) -> Array:
    """Return entries of a query block's list of tiles.

    first, stop: the keys that are present. mixed: those of which a mask may hide some. both, early, late: see `Halves`.
    """
    word: Array = tile << TILE_BITS
    for n, (name, whole) in enumerate(TILE_WORD.items()):
        word = word | (fields.get(name, whole) // (1 if name in ("early", "late") else PART) << n * TILE_WORD_BITS)
    return word


# The first fields of every kernel: the work groups, their number, the address of the counter of those taken, the query
# blocks, and the base addresses that their offsets are counted from.
COMMON_FIELDS = ("work_groups", "count", "taken", "blocks", "bases", "tiles", "scratch")
WORK_GROUPS, COUNT, TAKEN, BLOCKS, BASES, TILE_LIST, SCRATCH = range(len(COMMON_FIELDS))
FIELDS = (
    *COMMON_FIELDS, "d", "d_v", "n_k", "shift", "first_tile", "split_bits", "j", "keys", "scale",
    "q_head", "q_row", "q_feature", "k_head", "k_row", "k_feature", "v_head", "v_row", "v_feature",
    "out_head", "out_row", "row_head",
    "bias_head", "bias_row", "bias_key", "sink", "threshold", "keep_scale", "seed",
)  # fmt: skip
# The fields of a query block: offsets from the bases of the same index, among them dense masks and, last, the state of
# splits that run separately; then plain numbers.
ADDRESSES = ("q", "k", "v", "out", "lse", "entropy", "max", "values", "indices", "bias")
BLOCK_FIELDS = ("splits", "b", "h", "head", "i", "rows", "lanes", "tiles", "count")


@dataclass(frozen=True)
class RuleArguments:
    """The fields for a program's numbers and tables; `prefix` tells programs apart."""

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


def integer_type(integers: type[np.signedinteger[Any]], *rules: RuleArguments | None) -> Type:
    """Return the type of a rule's integers.

    It is I32 if all fit (`CallRules.integers`), positions in tables included.
    """
    sizes = [table.array.size for rule in rules if rule for table in rule.program.tables]
    return I32 if integers is np.int32 and max(sizes, default=0) < 2**31 else I64


@dataclass(frozen=True)
class KernelSpec:
    """The spec of a forward kernel: all that it is compiled for.

    element: of q, k, v and out. real: of sums. integer: of indices in rules. lanes: queries of a query block, in whole
    vectors. decode_rows: rows that share a key head where lanes are keys, 0 where lanes are queries.
    packed_vectors: vectors of rows of a query block that covers all heads of token-major K and V, else 0.
    paired: products take packed bf16 pairs. amx: products of AMX tiles. copied: tiles of K and V are copied before use.
    pipelined: a tile's softmax is interleaved with the QK product of the next. bias: the type of a dense bias.
    best: how many of the largest weights are returned.
    """

    element: Type
    real: Type
    integer: Type
    lanes: int
    decode_rows: int
    packed_vectors: int
    paired: bool
    amx: bool
    copied: bool
    pipelined: bool
    mask: RuleArguments | None
    score: RuleArguments | None
    bias: Type | None
    dropout: bool
    sink: bool
    entropy: bool
    best: int

    @property
    def fields(self) -> tuple[str, ...]:
        rules = [name for program in (self.mask, self.score) if program for name in program.fields]
        return (*FIELDS, *self.dense_fields, *rules)

    # Operands, products and sums, by name; tangents add to them.

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
        """Tiles with one number for each query and key, which multiply V."""
        return ("P",)

    @property
    def fetched(self) -> tuple[str, ...]:
        """Dense arrays whose tiles are transposed, so that lanes are queries."""
        return (*self.dense_names, *(["bias"] if self.bias else []))

    @property
    def sums(self) -> tuple[tuple[str, str], ...]:
        """Names of Σ w, and of Σ w (S − m) for the entropy, over the keys of a query."""
        return (("l", "e"),)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("O",)

    @property
    def dense(self) -> int:
        """The number of dense masks."""
        return len(self.mask.program.dense) if self.mask else 0

    @property
    def dense_names(self) -> list[str]:
        return [f"dense{n}" for n in range(self.dense)]

    @property
    def dense_fields(self) -> list[str]:
        return [f"{name}_{axis}" for name in self.dense_names for axis in ("head", "row", "key")]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Fields of a query block that are offsets into an array."""
        return (*ADDRESSES, *self.dense_names)

    @property
    def block_fields(self) -> tuple[str, ...]:
        return (*self.addresses, "split_state", *BLOCK_FIELDS)

    @property
    def rows(self) -> int:
        """Rows that a query block has room for."""
        return self.decode_rows if self.decode_rows and not self.packed_vectors else self.lanes

    @property
    def vector(self) -> int:
        """Lanes of a vector, where lanes are keys."""
        return self.lanes // max(1, self.packed_vectors)

    @property
    def bf16_dot(self) -> bool:
        """True if products take packed bf16 pairs without AMX."""
        return self.paired and not self.amx

    @property
    def key_vectors(self) -> int:
        """Vectors of keys whose scores are summed at once in decode.

        There are two where one chain of sums would be waited for.
        """
        return 2 if self.element is BF16 and 0 < self.decode_rows <= 2 and self.vector * self.real.size == 32 else 1

    @property
    def ruled(self) -> bool:
        """True if a score or bias follows the QK product.

        Scores are then natural, else logarithms of base 2.
        """
        return self.score is not None or self.bias is not None

    @property
    def copies(self) -> bool:
        """True if tiles are copied, of V at least."""
        return self.copied or (self.paired and not self.decode_rows)

    @property
    def key(self) -> str:
        rules = [None if x is None else x.program.structure for x in (self.mask, self.score)]
        ranks = [[len(t.shape) for t in x.program.tables] for x in (self.mask, self.score) if x]
        rest = (
            self.element,
            self.real,
            self.integer,
            self.lanes,
            self.decode_rows,
            self.copied,
            self.pipelined,
            self.bias,
        )
        more = (self.packed_vectors, self.paired, self.amx, self.dropout, self.sink, self.entropy, self.best)
        return repr(("forward", rest, more, rules, ranks))


# Scratch layouts, in elements of `real`, by name; d and d_v may be numbers or values of the kernel.


def tile_scratch(spec: KernelSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """Return the scratch layout of one tile, and of the copied tiles of a key split."""
    tile, slots = KEYS * spec.rows, SPLIT_TILES if spec.decode_rows else 1 + spec.pipelined
    sizes = dict.fromkeys(("top", "shift", "rescale", "old", "new", *_names(spec.sums)), spec.lanes)
    if spec.paired and not spec.ruled:
        sizes["before"] = spec.lanes
    sizes |= dict.fromkeys(spec.weights, tile * slots)
    sizes |= dict.fromkeys(spec.fetched, tile) | {"seen": tile * slots}
    if spec.amx and not spec.decode_rows:
        sizes["product"] = AMX_SIDE * spec.lanes
    if spec.decode_rows:
        sizes |= dict.fromkeys(("tops", "rescales"), spec.lanes * slots)
        sizes["key_block"] = spec.key_vectors * spec.vector * (d + 2 * spec.vector)
        sizes["total"] = output_size(spec, d_v)
    if spec.pipelined:
        sizes["rescale"] *= 2
        sizes |= {f"{name}_partial": LANES * spec.lanes for name in _names(spec.sums)}
    if spec.best:
        sizes["candidates"] = KEYS * 8 // spec.real.size
    if spec.copied:
        sizes |= {f"{name}_copy": SPLIT_TILES * KEYS * feature_rows(spec, d, 1) for name in spec.keys}
    if spec.copies:
        rows = multiple(d_v, AMX_SIDE) if spec.amx else d_v
        sizes |= {f"{name}_copy": SPLIT_TILES * KEYS * rows for name in spec.values} | {"ready": SPLIT_TILES * 2}
    return sizes


def multiple(n: Any, step: int) -> Any:
    """Round n up to a multiple of a step."""
    return (n + (step - 1)) // step * step


def feature_rows(spec: KernelSpec, d: Any, more: int) -> Any:
    """Return elements for d features and some more; AMX takes whole steps."""
    return multiple(d, AMX_DEPTH) if spec.amx else d + more


def _names(sums: tuple[tuple[str, str], ...]) -> list[str]:
    return [name for both in sums for name in both]


def output_size(spec: KernelSpec, d_v: Any) -> Any:
    """Return the elements of O.

    In prefill a row of lanes for each feature; in decode a row of features, in whole vectors, for each query.
    """
    if not spec.decode_rows:
        return spec.lanes * d_v
    step = spec.vector * (2 if spec.paired else 1)
    return multiple(d_v, step) * spec.rows


def split_scratch(spec: KernelSpec, d_v: Any) -> Mapping[str, Any]:
    """Return the layout of a key split's state: maximum, sums, outputs, best keys.

    Merged splits have the same.
    """
    rows = ("m", *_names(spec.sums))
    best = dict.fromkeys(("values", "indices"), spec.best * spec.lanes)
    return dict.fromkeys(rows, spec.lanes) | dict.fromkeys(spec.outputs, output_size(spec, d_v)) | best


def block_scratch(spec: KernelSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """Return the scratch layout of a query block, from split to split."""
    integers = spec.lanes * (1 if spec.integer is I32 else 8 // spec.real.size)
    integers64 = dict.fromkeys(("g", "r"), spec.lanes * 8 // spec.real.size)
    lanes = {"i": integers, "h": integers, "first": spec.lanes, "second": spec.lanes}
    q = spec.rows * feature_rows(spec, d, 2 * spec.vector if spec.decode_rows else 1)
    return {"cursor": 16, **integers64, **lanes, **dict.fromkeys(spec.queries, q), **split_scratch(spec, d_v)}


def scratch_size(spec: KernelSpec, blocks: int, d: int, d_v: int) -> int:
    """Return the size of a work group's scratch memory, in elements of `real`."""
    once = sum(tile_scratch(spec, d, d_v).values()) + sum(split_scratch(spec, d_v).values())
    return int(once + blocks * sum(block_scratch(spec, d, d_v).values()))
