"""The contract of the backward kernel.

It has a spec, fields, query blocks and scratch layouts.
"""

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

WORK_GROUP, AMX_WORK_GROUP = 8, 16  # query blocks of a work group, by vectors and by AMX
TRAINED_WORK_GROUP = 4  # the same where a table has a gradient
PARTIAL_SUMS = 4, 4  # partial sums of a table's gradient: over batch elements and heads, and over tiles

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
    """A read of a float table that has a gradient.

    table: its number in the program. indices: their number.
    """

    table: int
    indices: int


@dataclass(frozen=True)
class BackwardSpec(KernelSpec):
    """The spec of a backward kernel.

    The results of the `score` program are followed by its derivative in the score if it is `nonlinear`. Then come, for
    each of `table_reads`, the derivative in the entry and its indices. trains_bias: dS is summed for a bias.
    bias_rows, bias_keys: axes of these sums. bias_shared: several heads add to each sum.
    """

    nonlinear: bool
    table_reads: tuple[TableRead, ...]
    trains_bias: bool
    bias_rows: bool
    bias_keys: bool
    bias_shared: bool

    @property
    def work_group(self) -> int:
        """Query blocks that share each tile while it is in cache."""
        return AMX_WORK_GROUP if self.amx else WORK_GROUP

    @property
    def fields(self) -> tuple[str, ...]:
        rules = [name for program in (self.mask, self.score) if program for name in program.fields]
        return (*FIELDS, *self.dense_fields, *rules, *(f"dtable{n}{x}" for n in self.trained for x in ("", "_step")))

    @property
    def trained(self) -> list[int]:
        """Numbers of the program's tables that have a gradient."""
        return sorted({reading.table for reading in self.table_reads})

    # Operands, products and sums, by name; tangents add to them.

    @property
    def weights(self) -> tuple[str, ...]:
        """Tiles S and dP, one number for each query and key, which become P · D and dT."""
        return ("P", "dS")

    @property
    def score_gradients(self) -> tuple[str, ...]:
        """Return the members of `weights` that become dT."""
        return ("dS",)

    @property
    def cotangents(self) -> tuple[str, ...]:
        return ("dout",)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Scalars of each query."""
        return ("lse", "d_entropy", *self.rests)

    @property
    def rests(self) -> tuple[str, ...]:
        """Return the members of `numbers` that the gradient of a sink needs."""
        return ("c",)

    @property
    def fetched(self) -> tuple[str, ...]:
        return (*self.dense_names, *(["bias"] if self.bias else []))

    @property
    def varying(self) -> tuple[str, ...]:
        """Optional arrays of a call."""
        return ()

    @property
    def before(self) -> int:
        """The number of results of `score` before those of table reads."""
        return 1 + self.nonlinear

    @property
    def derivatives(self) -> int:
        """The number of results of each table read before its indices."""
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


# Scratch layouts, in elements of `real`, by name; d and d_v may be numbers or values of the kernel.


def padded(size: int, d: Any) -> Any:
    """Return the length of a row of d features, in whole vectors of 64 bytes."""
    return multiple(d, 64 // size)


def copied(spec: KernelSpec, d: Any) -> Any:
    """Return the length of a row of d features in the copy of a tile."""
    return multiple(d, AMX_DEPTH) if spec.amx else padded(spec.real.size, d) if spec.paired else d


def transposed_rows(spec: KernelSpec, d: Any) -> Any:
    """Return the number of rows of a transposed query block.

    Its d features are padded with zeros to whole products.
    """
    return multiple(d, AMX_DEPTH if spec.amx else 2)


def tile_scratch(spec: BackwardSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """Return the scratch layout of one tile.

    It holds P and dS with a query in every lane, and copies of K and V.
    """
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
    """Return the scratch layout of a query block.

    It holds its rows as read and transposed, and dQ.
    """
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
    """Return the size of a work group's scratch memory, in elements of `real`."""
    return int(sum(tile_scratch(spec, d, d_v).values()) + blocks * sum(block_scratch(spec, d, d_v).values()))
