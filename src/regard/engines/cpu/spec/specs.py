"""Specs: all that a kernel is compiled for, shared with its caller."""

from dataclasses import dataclass
from typing import Any

from regard.engines.cpu.language.types import BF16, Type
from regard.engines.cpu.spec.operands import (
    BACKWARD,
    BACKWARD_JVP,
    FORWARD,
    JVP,
    SECOND,
    WEIGHTS,
    Operand,
    RuleArguments,
    block_fields_of,
    fields_of,
    operands_of,
)

WORK_GROUP, AMX_WORK_GROUP = 8, 16  # query blocks of a work group of backward, by vectors and by AMX
TRAINED_WORK_GROUP = 4  # the same where a table has a gradient
PARTIAL_SUMS = 4, 4  # partial sums of a table's gradient: over batch elements and heads, and over tiles
OPTIONAL = ("query", "key", "value", "cotangent", "bias")  # roles with tangents that a call may lack
LEFT_OUT = {"query": ("dk", "dv"), "key": ("dq",)}  # gradients that `BackwardSpec.gradients` leaves out


@dataclass(frozen=True)
class KernelSpec:
    """The spec of a forward kernel.

    element: of q, k, v and out. real: of sums. integer: of indices in rules. lanes: queries of a query block, in whole
    vectors. decode_rows: rows that share a key head if lanes are keys, 0 if lanes are queries. packed_vectors: vectors
    of rows of a query block that covers all heads of token-major K and V, else 0. paired: products take packed bf16
    pairs. amx: products of AMX tiles. copied: tiles of K and V are copied before use. pipelined: a tile's softmax is
    interleaved with the QK product of the next. bias: the type of a dense bias. best: the number of largest weights to
    return. low: what rounding takes from the output is stored, or read, too. carried: merged splits go on from call
    to call, as `split_state`.
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
    low: bool
    carried: bool

    @property
    def kernel(self) -> str:
        """The kernel's name in the table of operands."""
        return FORWARD

    @property
    def key(self) -> str:
        """Text that no other kernel of a target has."""
        return repr((self.kernel, *map(_identity, vars(self).values())))

    @property
    def skips_zeros(self) -> bool:
        """True if pairs of weight 0 change no result: sums over pairs, and the largest weight."""
        return self.kernel == BACKWARD or (self.kernel == FORWARD and self.best <= 1)

    # Operands and fields, see `spec/operands.py`

    @property
    def operands(self) -> dict[str, Operand]:
        return operands_of(self.kernel, self.dense, self.low)

    @property
    def fields(self) -> tuple[str, ...]:
        rules = [name for program in (self.mask, self.score) if program for name in program.fields]
        return (*fields_of(self.kernel, self.dense, self.low), *rules)

    @property
    def block_fields(self) -> tuple[str, ...]:
        return block_fields_of(self.kernel, self.dense, self.low)

    def names(self, *roles: str) -> tuple[str, ...]:
        """Return the operands of some roles that this kernel reads or writes."""
        return tuple(x.name for x in self.operands.values() if x.role in roles and self.takes(x))

    def takes(self, x: Operand) -> bool:
        """Return whether a kernel of this spec has code for an operand."""
        return self._type(x) is not None and (x.needs is None or bool(getattr(self, x.needs)))

    def operand(self, name: str) -> Operand:
        """Return an operand. Raises ValueError for one that a kernel of this spec has no code for."""
        x = self.operands[name]
        if not self.takes(x):
            raise ValueError(f"a kernel cannot address {name!r}, which its spec does not take")
        return x

    @property
    def varying(self) -> tuple[str, ...]:
        """Return the tangents that a call may lack, as known at run time."""
        return ()

    @property
    def stored(self) -> tuple[str, ...]:
        """Return the outputs that a kernel stores."""
        return self.names("output")

    def type_of(self, name: str) -> Type:
        """Return the type of an operand's numbers."""
        type = self._type(self.operands[name])
        assert type is not None
        return type

    def _type(self, x: Operand) -> Type | None:
        type: Type | None = getattr(self, x.type) if isinstance(x.type, str) else x.type
        return type

    @property
    def queries(self) -> tuple[str, ...]:
        return self.names("query")

    @property
    def keys(self) -> tuple[str, ...]:
        return self.names("key")

    @property
    def values(self) -> tuple[str, ...]:
        return self.names("value")

    @property
    def biases(self) -> tuple[str, ...]:
        return self.names("bias")

    @property
    def masks(self) -> tuple[str, ...]:
        return self.names("mask")

    @property
    def fetched(self) -> tuple[str, ...]:
        """Dense arrays with transposed tiles, so that lanes are queries."""
        return (*self.masks, *self.biases)

    @property
    def dense(self) -> int:
        """The number of dense masks."""
        return len(self.mask.program.dense) if self.mask else 0

    # Products and sums, by name; tangents add to them

    @property
    def weights(self) -> tuple[str, ...]:
        """Tiles with one number for each query and key, which multiply V."""
        return ("P",)

    @property
    def sums(self) -> tuple[tuple[str, str], ...]:
        """Names of Σ w, and of Σ w (S − m) for the entropy, over the keys of a query."""
        return (("l", "e"),)

    @property
    def rounded_sums(self) -> tuple[str, ...]:
        """Names of Σ w as `weights` multiply V, rounded to bfloat16, which outputs are divided by."""
        return tuple(f"{name}_rounded" for name, _ in self.sums) if self.paired else ()

    @property
    def row_sums(self) -> tuple[str, ...]:
        """Names of all sums over the keys of a query."""
        return (*(name for both in self.sums for name in both), *self.rounded_sums)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("O",)

    # Layouts of lanes

    @property
    def rows(self) -> int:
        """The maximum number of rows of a query block."""
        return self.decode_rows if self.decode_rows and not self.packed_vectors else self.lanes

    @property
    def vector(self) -> int:
        """Lanes of a vector if lanes are keys."""
        return self.lanes // max(1, self.packed_vectors)

    @property
    def bf16_dot(self) -> bool:
        """True if products take packed bf16 pairs without AMX."""
        return self.paired and not self.amx

    @property
    def key_vectors(self) -> int:
        """Vectors of keys with scores summed at once in decode.

        There are two if one chain of sums would be too slow.
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


@dataclass(frozen=True)
class TangentSpec(KernelSpec):
    """The spec of a tangent kernel.

    varies: those of "q", "k", "v" and "sink" that have a tangent. bias_dot: the type of the bias's tangent. nonlinear:
    the rule's tangent is the second result of the `score` program. reads_output: the output is not computed.
    """

    varies: frozenset[str]
    bias_dot: Type | None
    nonlinear: bool
    reads_output: bool

    @property
    def kernel(self) -> str:
        return JVP

    @property
    def moves(self) -> bool:
        """True if scores have a tangent."""
        return bool(self.varies & {"q", "k"}) or self.bias_dot is not None or self.nonlinear

    def takes(self, x: Operand) -> bool:
        if self.reads_output and x.role in ("statistic", "best") and x.tangent_of is None:
            return False
        return x.tangent_of in self.varies if x.tangent_of in ("q", "k", "v", "sink") else super().takes(x)

    @property
    def stored(self) -> tuple[str, ...]:
        return tuple(name for name in super().stored if not (self.reads_output and name == "out"))

    @property
    def weights(self) -> tuple[str, ...]:
        return (*super().weights, *(["S_dot"] if self.moves else []))

    @property
    def sums(self) -> tuple[tuple[str, str], ...]:
        """In addition the same sums of w Ṡ."""
        return (*super().sums, *([("l_dot", "e_dot")] if self.moves else []))

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*(() if self.reads_output else super().outputs), "O_dot")


@dataclass(frozen=True)
class SecondPassSpec(KernelSpec):
    """The spec of a second pass.

    statistics: the names of some operands with the role "sum"; none to store the weights themselves. rest: each query
    has what its lse, which is rounded, lacks.
    """

    statistics: tuple[str, ...]
    rest: bool = False

    @property
    def kernel(self) -> str:
        return SECOND if self.statistics else WEIGHTS

    def takes(self, x: Operand) -> bool:
        return x.name in self.statistics if self.statistics and x.role == "sum" else super().takes(x)


@dataclass(frozen=True)
class TableRead:
    """A read of a float table that has a gradient.

    table: the table's number in the program. indices: the number of its indices.
    """

    table: int
    indices: int


@dataclass(frozen=True)
class BackwardSpec(KernelSpec):
    """The spec of a backward kernel, or of its tangent.

    The results of the `score` program are followed by its derivative in the score if it is `nonlinear`. Then come, for
    each of `table_reads`, the derivative in the entry and its indices. With `tangent`, the tangent of the score and
    those of derivatives follow each of them. trains_bias: dS is summed for a bias. bias_rows, bias_keys: axes of these
    sums. bias_shared: several heads add to each sum. bias_dot: the type of the bias's tangent. gradients: "all"; or
    "both", which go on from call to call, or of them those of the query alone ("query"), or of key and value ("key").
    """

    nonlinear: bool
    table_reads: tuple[TableRead, ...]
    trains_bias: bool
    bias_rows: bool
    bias_keys: bool
    bias_shared: bool
    tangent: bool = False
    bias_dot: Type | None = None
    gradients: str = "all"

    @property
    def kernel(self) -> str:
        return BACKWARD_JVP if self.tangent else BACKWARD

    def takes(self, x: Operand) -> bool:
        return x.name not in LEFT_OUT.get(self.gradients, ()) and super().takes(x)

    @property
    def work_group(self) -> int:
        """Query blocks that share each tile while it is in cache."""
        return AMX_WORK_GROUP if self.amx else WORK_GROUP

    @property
    def fields(self) -> tuple[str, ...]:
        return (*super().fields, *(f"dtable{n}{x}" for n in self.trained for x in ("", "_step")))

    @property
    def trained(self) -> list[int]:
        """Numbers of the program's tables that have a gradient."""
        return sorted({reading.table for reading in self.table_reads})

    @property
    def outputs(self) -> tuple[str, ...]:
        """The operands with the roles "output" and "low", transposed."""
        first, *dot = self._with_tangents("O")
        return (first, *(["O_low"] if self.low else []), *dot)

    @property
    def weights(self) -> tuple[str, ...]:
        """Tiles S and dP, which become P · D and dT, and their tangents."""
        return self._with_tangents("P", "dS")

    @property
    def score_gradients(self) -> tuple[str, ...]:
        """Return the members of `weights` that become dT or its tangent."""
        return self._with_tangents("dS")

    def _with_tangents(self, *names: str) -> tuple[str, ...]:
        return (*names, *(f"{name}_dot" for name in names if self.tangent))

    @property
    def cotangents(self) -> tuple[str, ...]:
        return self.names("cotangent")

    @property
    def numbers(self) -> tuple[str, ...]:
        """Scalars of each query; one that the kernel does not read is not written either."""
        return tuple(x.name for x in self.operands.values() if x.role in ("number", "rest"))

    @property
    def varying(self) -> tuple[str, ...]:
        """Return the tangents that a call may lack, as known at run time."""
        return tuple(x.name for x in self.operands.values() if x.tangent_of is not None and x.role in OPTIONAL)

    @property
    def derivatives(self) -> int:
        """The number of results of each table read before its indices."""
        return 2 if self.tangent else 1

    @property
    def before(self) -> int:
        """The number of results of `score` before those of table reads."""
        return self.derivatives * (1 + self.nonlinear)


def _identity(x: Any) -> Any:
    """Return a value of a spec with the same text for the same kernel."""
    if isinstance(x, RuleArguments):
        return x.key
    return sorted(x) if isinstance(x, frozenset) else x
