"""Masks and scores as vector code.

Each instruction of a `Program` becomes operations of the kernel language. Values that depend on the key alone stay
scalars; those that depend on the query are vectors. `prepare` computes once what does not depend on the key. Integers
have 32 bits if bounds prove that they fit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import BOOL, F64, I32, I64, Type
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.operands import RuleArguments
from regard.rules import Instruction

LEAVES = ("b", "h", "i", "j", "s", "ds", "keys")


@dataclass(frozen=True)
class TileContext:
    """The inputs of a rule at one place of a tile.

    Leaves have values by name, dense arrays by slot. For `Lowering.prepare`, leaves may be absent, and `dense` too.
    """

    leaves: Mapping[str, Value]
    dense: Callable[[int], Value] | None = None


class Lowering:
    """One program in one kernel.

    integer: the type of its integers, see `integer_type`.
    """

    def __init__(self, k: Kernel, arguments: RuleArguments, real: Type, integer: Type):
        self.k, self.real, self.prefix, self.program = k, real, arguments.prefix, arguments.program
        self.types = {"bool": BOOL, "int": integer, "float": real}
        self.numbers = [self._number(f"{self.prefix}_number{n}", x) for n, x in enumerate(self.program.numbers)]
        self.tables = [self._table(n) for n in range(len(self.program.tables))]

    def _number(self, field: str, x: Any) -> Value:
        if isinstance(x, float):
            return self.k.real(field, self.real)
        return self.k.integer(field).to(BOOL if isinstance(x, bool) else self.types["int"])

    def _table(self, n: int) -> tuple[Pointer, list[Value]]:
        table = self.program.tables[n]
        field = f"{self.prefix}_table{n}"
        type = self.real if table.kind == "float" else I64
        sizes = [self.k.integer(f"{field}_size{axis}").to(self.types["int"]) for axis in range(len(table.shape))]
        return self.k.pointer(field, type), sizes

    def prepare(self, context: TileContext) -> list[Value | None]:
        """Compute the instructions that the given leaves determine, None for others."""
        values: list[Value | None] = []
        for x in self.program.instructions:
            operands = [values[n] for n in x.operands]
            absent = (x.op in LEAVES and x.op not in context.leaves) or (x.op == "dense" and context.dense is None)
            determined = [y for y in operands if y is not None]
            values.append(None if absent or len(determined) < len(operands) else self._one(x, context, determined))
        return values

    def at(self, context: TileContext, prepared: Sequence[Value | None] | None = None) -> list[Value]:
        """Return the program's results.

        prepared: instructions computed before, for the same values of some leaves.
        """
        values: list[Value] = []
        for n, x in enumerate(self.program.instructions):
            determined = None if prepared is None else prepared[n]
            values.append(self._one(x, context, [values[m] for m in x.operands]) if determined is None else determined)
        return [values[n] for n in self.program.results]

    def _one(self, x: Instruction, context: TileContext, operands: list[Value]) -> Value:
        k, type = self.k, self.types[x.kind]
        if x.op == "literal":
            return k.constant(type, x.slot)
        if x.op == "number":
            return self.numbers[int(x.slot)]
        if x.op == "gather":
            return self._gather(x, operands).to(type)
        if x.op == "dense":
            assert context.dense is not None
            return context.dense(x.slot)
        if x.op in LEAVES:
            return context.leaves[x.op].to(type)
        if x.op in ("float", "int"):
            return operands[0].to(type)
        return OPERATIONS[x.op](k, *operands)

    def _gather(self, x: Instruction, indices: list[Value]) -> Value:
        return self.tables[int(x.slot)][0].gather(self.position(int(x.slot), indices))

    def position(self, table: int, indices: Sequence[Value]) -> Value:
        """Return the flat index of an entry of a table, indices clamped to its shape."""
        k = self.k
        flat = zero = k.constant(self.types["int"], 0)
        for size, index in zip(self.tables[table][1], indices, strict=True):
            flat = flat * size + k.maximum(k.minimum(index, size - 1), zero)
        return flat


def _is_float(x: Value) -> bool:
    return x.type.category == "float"


def _absolute(k: Kernel, x: Value) -> Value:
    return k.intrinsic("fabs", x.type, x) if _is_float(x) else k.where(x < 0, -x, x)


def _sign(k: Kernel, x: Value) -> Value:
    zero, one = k.constant(x.type, 0), k.constant(x.type, 1)
    sign = k.where(x > 0, one, k.where(x < 0, -one, zero))
    return k.where(x.is_nan(), x, sign) if _is_float(x) else sign


def _least(k: Kernel, x: Value, y: Value) -> Value:
    least = k.minimum(x, y)  # y if one is NaN
    return k.where(x.is_nan(), x, least) if _is_float(x) else least


def _greatest(k: Kernel, x: Value, y: Value) -> Value:
    greatest = k.maximum(x, y)
    return k.where(x.is_nan(), x, greatest) if _is_float(x) else greatest


def _divided(k: Kernel, x: Value, y: Value) -> tuple[Value, Value]:
    """Return the floored quotient and its remainder; both are 0 for a divisor of 0."""
    # A divisor of −1 becomes a negation, which wraps where a division would trap.
    plain = (y != 0) & (y != -1)
    safe = k.where(plain, y, k.constant(y.type, 1))
    if x.type is I32 and max(x.lanes, y.lanes):
        # Division in float64 is exact here: a fractional quotient is at least 2^-31 of itself away from an integer.
        quotient = (x.to(F64) / safe.to(F64)).to(I32)
        rest = x - quotient * safe
    else:
        quotient, rest = x // safe, x % safe
    below = (rest != 0) & ((rest ^ safe) < 0)
    quotient, rest = k.where(below, quotient - 1, quotient), k.where(below, rest + safe, rest)
    zero = k.constant(x.type, 0)
    return k.where(plain, quotient, k.where(y == 0, zero, -x)), k.where(plain, rest, zero)


def _left_shift(k: Kernel, x: Value, y: Value) -> Value:
    inside = y.below(8 * y.type.size)
    return k.where(inside, x << k.where(inside, y, k.constant(y.type, 0)), k.constant(x.type, 0))


def _right_shift(k: Kernel, x: Value, y: Value) -> Value:
    bits = 8 * y.type.size
    return x >> k.where(y.below(bits), y, k.constant(y.type, bits - 1))


def _log_of_base(base: float) -> Callable[[Kernel, Value], Value]:
    return lambda k, x: k.library({2: "log2", 10: "log10"}[int(base)], x)


def _library(name: str) -> Callable[[Kernel, Value], Value]:
    return lambda k, x: k.library(name, x)


def _intrinsic(name: str) -> Callable[[Kernel, Value], Value]:
    return lambda k, x: k.intrinsic(name, x.type, x)


OPERATIONS: dict[str, Callable[..., Value]] = {
    "where": lambda k, condition, x, y: k.where(condition, x, y),
    "add": lambda k, x, y: x + y,
    "subtract": lambda k, x, y: x - y,
    "multiply": lambda k, x, y: x * y,
    "divide": lambda k, x, y: x / y,
    "negative": lambda k, x: -x,
    "absolute": _absolute,
    "sign": _sign,
    "minimum": _least,
    "maximum": _greatest,
    "less": lambda k, x, y: x < y,
    "less_equal": lambda k, x, y: x <= y,
    "equal": lambda k, x, y: x == y,
    "not_equal": lambda k, x, y: x != y,
    "bitwise_and": lambda k, x, y: x & y,
    "bitwise_or": lambda k, x, y: x | y,
    "bitwise_xor": lambda k, x, y: x ^ y,
    "invert": lambda k, x: ~x,
    "floor_divide": lambda k, x, y: _divided(k, x, y)[0],
    "remainder": lambda k, x, y: _divided(k, x, y)[1],
    "left_shift": _left_shift,
    "right_shift": _right_shift,
    "exp": mathematics.exp,
    "exp2": mathematics.exp2,
    "log": mathematics.log,
    "tanh": mathematics.tanh,
    "log2": _log_of_base(2),
    "log10": _log_of_base(10),
    **{name: _intrinsic(name) for name in ("sqrt", "floor", "ceil", "rint", "trunc")},
    **{name: _library(name) for name in ("expm1", "log1p", "sinh", "cosh", "sin", "cos", "tan", "erf")},
    "arctan": _library("atan"),
}
