"""What the backward kernel and its caller agree on: fields, items, scratch memory, and what is compiled anew."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.engines.cpu.language.types import I32
from regard.engines.cpu.spec.forward import (
    AMX_DEPTH,
    AMX_SIDE,
    AMX_SUMS,
    BLOCK_FIELDS,
    COMMON_FIELDS,
    KEYS,
    KernelSpec,
    multiple,
)

WORK_GROUP, AMX_WORK_GROUP = 8, 16  # items of a group, by vectors and by matrices
TRAINED_WORK_GROUP = 4  # the same where a table has a gradient
PARTIAL_SUMS = 4, 4  # sums of a table's gradient that are made side by side: of batch elements and heads, of tiles

FIELDS = (
    *COMMON_FIELDS, "from", "to", "d", "d_v", "n_k", "shift", "first_tile", "j",
    "keys", "scale", "q_head", "q_row", "q_feature", "k_row", "k_feature", "v_row", "v_feature",
    "out_head", "out_row", "out_feature", "dout_head", "dout_row", "dout_feature", "row_head",
    "dq_head", "dq_row", "dk_row", "dv_row", "bias_head", "bias_row", "bias_key", "dbias_row", "dbias_key",
    "dbias_streams", "threshold", "keep_scale", "seed", "partial_tiles",
)  # fmt: skip
ADDRESSES = (
    "q", "k", "v", "out", "dout", "lse", "given", "d_entropy", "c", "dq", "dk", "dv", "bias", "dbias",
)  # fmt: skip


@dataclass(frozen=True)
class TableRead:
    """A place where a score reads a float table that has a gradient: which of the program's tables, by how many
    indices, and whether they depend on the key.
    """

    table: int
    indices: int


@dataclass(frozen=True)
class BackwardSpec(KernelSpec):
    """What a backward kernel is compiled for.

    The program of `score` has more results: the derivative in the score if it is `bent`, and for each of `readings`
    the derivative in what is read, and the indices by which it is. trains_bias: whether dS is summed for a bias;
    bias_rows, bias_keys: whether the sums have them; bias_shared: whether several heads add to each.
    """

    nonlinear: bool
    table_reads: tuple[TableRead, ...]
    trains_bias: bool
    bias_rows: bool
    bias_keys: bool
    bias_shared: bool

    @property
    def work_group(self) -> int:
        """Items that share tiles while they are near."""
        return AMX_WORK_GROUP if self.amx else WORK_GROUP

    @property
    def fields(self) -> tuple[str, ...]:
        rules = [name for program in (self.mask, self.score) if program for name in program.fields]
        return (*FIELDS, *self.dense_fields, *rules, *(f"dtable{n}{x}" for n in self.trained for x in ("", "_step")))

    @property
    def trained(self) -> list[int]:
        """The program's tables that have a gradient."""
        return sorted({reading.table for reading in self.table_reads})

    # What is kept, multiplied and made, by name; tangents add to it.

    @property
    def weights(self) -> tuple[str, ...]:
        """Tiles of numbers, one for each pair: S and dP, which become P · D and dT."""
        return ("P", "dS")

    @property
    def score_gradients(self) -> tuple[str, ...]:
        """Those of them that become dT."""
        return ("dS",)

    @property
    def cotangents(self) -> tuple[str, ...]:
        return ("dout",)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Of each query."""
        return ("lse", "d_entropy", *self.rests)

    @property
    def rests(self) -> tuple[str, ...]:
        """Those of them that the gradient of a sink needs."""
        return ("c",)

    @property
    def fetched(self) -> tuple[str, ...]:
        return (*self.dense_names, *(["bias"] if self.bias else []))

    @property
    def varying(self) -> tuple[str, ...]:
        """Arrays that a call need not have."""
        return ()

    @property
    def before(self) -> int:
        """The results of the program of `score` before those of readings."""
        return 1 + self.nonlinear

    @property
    def derivatives(self) -> int:
        """The results for each reading before its indices."""
        return 1

    @property
    def addresses(self) -> tuple[str, ...]:
        return ADDRESSES

    @property
    def block_fields(self) -> tuple[str, ...]:
        return (*self.addresses, *self.dense_names, *BLOCK_FIELDS)

    @property
    def key(self) -> str:
        bias = self.trains_bias, self.bias_rows, self.bias_keys, self.bias_shared
        return repr(("backward", super().key, self.nonlinear, self.table_reads, bias))


# Scratch memory, in numbers of `real`, by name; d and d_v may be numbers or values of the kernel.


def padded(size: int, d: Any) -> Any:
    """The length of a row of d features of `size` bytes in whole vectors of 64 bytes, which any vector divides."""
    return multiple(d, 64 // size)


def copied(spec: KernelSpec, d: Any) -> Any:
    """The length of a row of d features in the copy of a tile."""
    return multiple(d, AMX_DEPTH) if spec.amx else padded(spec.real.size, d) if spec.paired else d


def transposed_rows(spec: KernelSpec, d: Any) -> Any:
    """Of an item's rows, turned: features and zeros behind them, where products take some at once."""
    return multiple(d, AMX_DEPTH if spec.amx else 2)


def tile_scratch(spec: BackwardSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """What one tile needs: P and dS with a query in every lane, and copies of K and V."""
    tile = KEYS * spec.lanes
    sizes = dict.fromkeys((*spec.weights, *spec.fetched), tile)
    if spec.paired:
        sizes |= dict.fromkeys((f"{name}_bf16" for name in spec.weights), tile // 2)
        sizes |= dict.fromkeys((f"{name}_packed" for name in spec.score_gradients), tile // 2)
        sizes |= dict.fromkeys((f"{name}_packed" for name in spec.keys), KEYS // 2 * padded(spec.real.size, d))
    for names, width in ((spec.keys, d), (spec.values, d_v)):
        sizes |= dict.fromkeys((f"{name}_copy" for name in names), KEYS * padded(spec.real.size, width))
    if spec.amx:
        sizes["edge"] = AMX_SIDE * AMX_SIDE * AMX_SUMS
    return sizes | dict.fromkeys(spec.outputs, spec.lanes * d_v) | {"state": 16}


def block_scratch(spec: BackwardSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """What an item keeps from tile to tile: its rows and the same turned, and dQ."""
    B = spec.lanes
    integers64 = dict.fromkeys(("g", "r"), B * 8 // spec.real.size)
    integers = B * (1 if spec.integer is I32 else 8 // spec.real.size)
    lanes = {"i": integers, "h": integers, "first": B, "second": B, **dict.fromkeys(spec.numbers, B)}
    if not spec.ruled:
        lanes["large"] = B
    rows = {"dq": B * (multiple(d, AMX_SIDE) if spec.amx else d)}
    for names, width in ((spec.queries, d), (spec.cotangents, d_v)):
        rows |= dict.fromkeys((f"{name}_rows" for name in names), B * padded(spec.real.size, width))
        rows |= dict.fromkeys(names, B * transposed_rows(spec, width))
    return {"state": 16, **integers64, **lanes, **rows}


def scratch_size(spec: BackwardSpec, blocks: int, d: int, d_v: int) -> int:
    """Numbers of scratch memory for a group of items."""
    return int(sum(tile_scratch(spec, d, d_v).values()) + blocks * sum(block_scratch(spec, d, d_v).values()))
