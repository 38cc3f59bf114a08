"""The operands of all kernels, in one table.

Fields, strides, addresses, argument arrays, schedules' cache keys and checks follow from it. A new operand is a line
in OPERANDS, its array in `schedule/`, and its meaning in a kernel; README.md has the steps. The order of lines means
nothing.

A kernel has one argument, the address of its *fields*: 64-bit numbers and addresses. Query blocks have fields of their
own: the offset of each operand from its base, and numbers.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from regard.engines.cpu.language.types import I8, I32, I64, Type
from regard.rules import Program

FORWARD, JVP, BACKWARD, BACKWARD_JVP = "forward", "jvp", "backward", "backward_jvp"
SECOND, WEIGHTS = "second", "weights"  # the second pass, with statistics or weights as its result
FORWARDS, BACKWARDS, JVPS = (FORWARD, JVP, SECOND, WEIGHTS), (BACKWARD, BACKWARD_JVP), (JVP, BACKWARD_JVP)
EVERY = (*FORWARDS, *BACKWARDS)

ROWS = ("head", "row")
MATRIX, DENSE = (*ROWS, "feature"), (*ROWS, "key")


@dataclass(frozen=True)
class Operand:
    """An array that kernels read or write.

    role: its part in the formulas; a spec finds operands by it. axes: those after the batch. kernels: those that take
    it. type: of its numbers, or the attribute of a spec that holds the type. contiguous: the number of last axes
    without a stride. tangent_of: the operand that it is a tangent of. shared: the heads of a GQA group share it, and
    the rows of a head too. needs: the attribute of a spec without which a kernel has no code for it. tested: a call may
    lack it, and kernels test for its address.
    """

    name: str
    role: str
    axes: tuple[str, ...]
    kernels: tuple[str, ...]
    type: str | Type = "element"
    contiguous: int = 0
    tangent_of: str | None = None
    shared: bool = False
    needs: str | None = None
    tested: bool = False

    @property
    def strides(self) -> tuple[str, ...]:
        """Fields: the strides of axes in bytes."""
        return tuple(f"{self.name}_{axis}" for axis in self.axes[: len(self.axes) - self.contiguous])

    @property
    def by_block(self) -> bool:
        """True if query blocks have offsets into it; else its address is a field."""
        return self.role not in ("sink", "bins")


OPERANDS = (
    Operand("q", "query", MATRIX, EVERY),
    Operand("k", "key", MATRIX, EVERY, shared=True),
    Operand("v", "value", MATRIX, EVERY, shared=True),
    Operand("out", "output", MATRIX, (FORWARD,), contiguous=1),
    Operand("out", "output", MATRIX, (JVP, *BACKWARDS)),
    Operand("low", "low", MATRIX, (FORWARD,), contiguous=1),  # out − round(out)
    Operand("low", "low", MATRIX, (JVP, *BACKWARDS)),
    Operand("lse", "number", ROWS, EVERY, "real", 2),
    Operand("entropy", "statistic", ROWS, (FORWARD, JVP), "real", 2, needs="entropy"),
    Operand("max", "statistic", ROWS, (FORWARD, JVP), "real", 2, tested=True),
    Operand("values", "best", (*ROWS, "rank"), (FORWARD, JVP), "real", 3, needs="best"),
    Operand("indices", "best", (*ROWS, "rank"), (FORWARD, JVP), I64, 3, needs="best"),
    Operand("dout", "cotangent", MATRIX, BACKWARDS),
    Operand("given", "statistic", ROWS, BACKWARDS, "real", 2, tested=True),  # the part of c that the caller computes
    Operand("d_entropy", "number", ROWS, BACKWARDS, "real", 2, needs="entropy"),
    Operand("c", "rest", ROWS, BACKWARDS, "real", 2, needs="sink"),
    Operand("dq", "gradient", MATRIX, BACKWARDS, "real", 1),
    Operand("dk", "gradient", MATRIX, BACKWARDS, "real", 1, shared=True),
    Operand("dv", "gradient", MATRIX, BACKWARDS, "real", 1, shared=True),
    Operand("bias", "bias", DENSE, EVERY, "bias"),
    Operand("dbias", "gradient", DENSE, BACKWARDS, "real", needs="trains_bias"),
    Operand("sink", "sink", ("head",), (FORWARD, JVP, WEIGHTS), "real", 1, needs="sink"),
    # Tangents
    Operand("q_dot", "query", MATRIX, JVPS, tangent_of="q"),
    Operand("k_dot", "key", MATRIX, JVPS, tangent_of="k", shared=True),
    Operand("v_dot", "value", MATRIX, JVPS, tangent_of="v", shared=True),
    Operand("dout_dot", "cotangent", MATRIX, (BACKWARD_JVP,), tangent_of="dout"),
    Operand("bias_dot", "bias", DENSE, JVPS, "bias_dot", tangent_of="bias"),
    Operand("out_dot", "output", MATRIX, (JVP,), contiguous=1, tangent_of="out"),
    Operand("out_dot", "output", MATRIX, (BACKWARD_JVP,), tangent_of="out"),
    Operand("c_dot", "rest", ROWS, (BACKWARD_JVP,), "real", 2, tangent_of="c", needs="sink"),
    Operand("lse_dot", "number", ROWS, JVPS, "real", 2, tangent_of="lse"),
    Operand("entropy_dot", "statistic", ROWS, (JVP,), "real", 2, tangent_of="entropy"),
    Operand("given_dot", "statistic", ROWS, (BACKWARD_JVP,), "real", 2, tangent_of="given"),
    Operand("d_entropy_dot", "number", ROWS, (BACKWARD_JVP,), "real", 2, tangent_of="d_entropy", needs="entropy"),
    Operand("sink_dot", "sink", ("head",), (JVP,), "real", 1, tangent_of="sink"),
    # The second pass: its sums, and the bins of its maps
    Operand("rest", "rest", ROWS, (SECOND,), "real", 2, needs="rest"),  # log Σ exp(S − lse)
    Operand("visible", "sum", ROWS, (SECOND,), I64, 2),
    Operand("received", "sum", ("head", "part", "key"), (SECOND,), "real", 3),
    Operand("profile", "sum", ("head", "part", "diagonal"), (SECOND,), "real", 3),
    Operand("mass", "sum", ("head", "row", "column"), (SECOND,), "real", 3),
    Operand("max_map", "sum", ("head", "row", "column"), (SECOND,), "real", 3),
    Operand("seen_map", "sum", ("head", "row", "column"), (SECOND,), "real", 3),  # 1 where any pair is visible
    Operand("row_bins", "bins", ("row",), (SECOND,), I64, 1),
    Operand("tile_bins", "bins", ("tile",), (SECOND,), I64, 1),
    Operand("edges", "bins", ("bin",), (SECOND,), I64, 1),
    # A part of the weights
    Operand("weights", "sum", (*ROWS, "column"), (WEIGHTS,), "real", 1),
    # States of key splits that run separately
    Operand("split_state", "state", ("split",), FORWARDS, "real", 1, tested=True),
)

MAPS = tuple(x.name for x in OPERANDS if x.axes == ("head", "row", "column") and SECOND in x.kernels)

# The first fields of every kernel: the work groups, their number, the address of the counter of those taken, the query
# blocks, the base addresses of their offsets, and numbers.
FIELDS = (
    "work_groups", "count", "taken", "blocks", "bases", "tiles", "scratch",
    "d", "d_v", "n_k", "shift", "first_tile", "j", "keys", "scale", "row_head", "threshold", "keep_scale", "seed",
)  # fmt: skip
WORK_GROUPS, COUNT, TAKEN, BLOCKS, BASES, TILE_LIST, SCRATCH = range(7)
SEED = FIELDS.index("seed")
OWN_FIELDS = {
    **dict.fromkeys(FORWARDS, ("split_bits",)),
    WEIGHTS: ("split_bits", "first_column", "stop_column", "whole"),
    **dict.fromkeys(BACKWARDS, ("from", "to", "dbias_streams", "partial_tiles")),
}
# The numbers of a query block; before them its number of key splits, or its partial sum of table gradients.
BLOCK_FIELDS = ("b", "h", "head", "i", "rows", "lanes", "tiles", "count")


@cache
def operands_of(kernel: str, masks: int = 0, low: bool = False) -> dict[str, Operand]:
    """Return the operands of a kernel by name, dense masks included.

    low: with the operand of that name.
    """
    rows = {x.name: x for x in OPERANDS if kernel in x.kernels and (low or x.role != "low")}
    return rows | {f"dense{n}": Operand(f"dense{n}", "mask", DENSE, EVERY, I8) for n in range(masks)}


@cache
def fields_of(kernel: str, masks: int = 0, low: bool = False) -> tuple[str, ...]:
    """Return the fields of a kernel, without those of rules."""
    operands = operands_of(kernel, masks, low).values()
    strides = (stride for x in operands if x.by_block for stride in x.strides)
    return (*FIELDS, *OWN_FIELDS[kernel], *strides, *(x.name for x in operands if not x.by_block))


@cache
def block_fields_of(kernel: str, masks: int = 0, low: bool = False) -> tuple[str, ...]:
    """Return the fields of a query block; operands come first."""
    offsets = (x.name for x in operands_of(kernel, masks, low).values() if x.by_block)
    own = "partial_sum" if kernel in BACKWARDS else "splits"
    return (*offsets, own, *BLOCK_FIELDS, *(("row",) if kernel == SECOND else ()))


@dataclass(frozen=True)
class RuleArguments:
    """The fields for a program's numbers and tables.

    prefix: tells programs apart.
    """

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

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what a kernel is compiled for: structure of the program, ranks of tables."""
        return self.prefix, self.program.structure, [len(table.shape) for table in self.program.tables]


def integer_type(integers: type[np.signedinteger[Any]], *rules: RuleArguments | None) -> Type:
    """Return the type of a rule's integers.

    I32 is the type if all integers fit (`CallRules.integers`), positions in tables included.
    """
    sizes = [table.array.size for rule in rules if rule for table in rule.program.tables]
    return I32 if integers is np.int32 and max(sizes, default=0) < 2**31 else I64
