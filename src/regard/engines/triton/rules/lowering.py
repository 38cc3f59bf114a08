"""Rules as Triton functions of their values in a tile.

A `Program` becomes the source of one function, with one line per instruction. The numbers, tables and dense arrays that
it reads are arguments. Sources are stored in `linecache`, so that `inspect` and tracebacks show them.
"""

import functools
import hashlib
import linecache
from collections.abc import Sequence
from typing import Any

import triton

from regard.engines.triton.kernels import addresses
from regard.engines.triton.language import functions
from regard.rules import Instruction, Program

LEAVES = ("b", "h", "i", "j", "s", "ds")
ARGUMENTS = "b, h, i, j, s, ds, keys, rule, dense, tile, REAL: tl.constexpr, INT: tl.constexpr"

OPERATIONS: dict[str, str] = {
    "where": "tl.where({0}, {1}, {2})",
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "negative": "-{0}",
    "absolute": "tl.abs({0})",
    "sign": "sign({0})",
    "minimum": "least({0}, {1})",
    "maximum": "greatest({0}, {1})",
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "equal": "{0} == {1}",
    "not_equal": "{0} != {1}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "invert": "~{0}",
    "floor_divide": "floor_divide({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "left_shift": "left_shift({0}, {1}, INT.primitive_bitwidth)",
    "right_shift": "right_shift({0}, {1}, INT.primitive_bitwidth)",
    "sqrt": "sqrt({0})",
    "rint": "rint({0})",
    "trunc": "trunc({0})",
    "log2": "tl.log2({0})",
    "log10": "tl.log({0}) * LOG10_E",
    **{name: f"tl.{name}({{0}})" for name in ("exp", "exp2", "log", "sin", "cos", "floor", "ceil", "erf")},
    **{name: f"{name}({{0}})" for name in ("expm1", "log1p", "tanh", "sinh", "cosh", "tan", "arctan")},
}
TYPES = {"bool": "tl.int1", "int": "INT", "float": "REAL"}


def function(name: str, arguments: str, lines: Sequence[str], result: str) -> Any:
    """Return a source's jitted function, named by a digest for Triton's caches."""
    body = "\n".join(f"    {line}" for line in (*lines, f"return {result}"))
    return _function(name, arguments, body)


@functools.cache
def _function(name: str, arguments: str, body: str) -> Any:
    name = f"{name}_{hashlib.sha256((arguments + body).encode()).hexdigest()[:16]}"
    source = f"def {name}({arguments}):\n{body}\n"
    file = f"<regard rule {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {**vars(functions), **vars(addresses), "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[name])


def values(program: Program, positions: Sequence[Sequence[int]] = ()) -> Any:
    """Return a function from a tile to the program's results, as a tuple.

    positions: for some readings of tables, the table's slot and the instructions of its indices. Their positions in the
    table follow the results.
    """
    return _values(
        tuple(program.instructions), tuple(program.results), table_types(program), tuple(map(tuple, positions))
    )


def table_types(program: Program) -> tuple[tuple[str, int], ...]:
    return tuple((table.kind, len(table.shape)) for table in program.tables)


@functools.lru_cache(maxsize=512)
def _values(instructions: tuple[Instruction, ...], results: Any, tables: Any, positions: Any) -> Any:
    lines = [f"x{n} = {_value(x)}" for n, x in enumerate(instructions)]
    found = [f"x{n}" for n in results]
    for n, (slot, *indices) in enumerate(positions):
        lines.append(f"at{n} = {_position(slot, [f'x{m}' for m in indices])}")
        found.append(f"at{n}")
    return function("values", ARGUMENTS, lines, f"({', '.join(found)},)")


def _value(x: Instruction) -> str:
    names, type = [f"x{n}" for n in x.operands], TYPES[x.kind]
    if x.op == "literal":
        return f"tl.full([], {literal(x.slot)}, {type})"
    if x.op == "number":
        return number(x)
    if x.op == "gather":
        read = f"tl.load(rule.tables[{x.slot}].ptr + {_position(x.slot, names)})"
        return f"{read} != 0" if x.kind == "bool" else f"{read}.to({type})"
    if x.op == "dense":
        return f"load_dense(dense[{x.slot}], tile) != 0"
    if x.op == "keys":
        return "tl.full([], keys, INT)"
    if x.op in LEAVES:
        return f"{x.op}.to({type})"
    if x.op == "float":
        return f"{names[0]}.to(REAL)"
    if x.op == "int":
        return f"to_int({names[0]}).to(INT) if {names[0]}.dtype.is_floating() else {names[0]}.to(INT)"
    return OPERATIONS[x.op].format(*names)


def number(x: Instruction) -> str:
    given = f"rule.numbers[{x.slot}]"
    return f"real({given}, REAL)" if x.kind == "float" else f"tl.full([], {given}, {TYPES[x.kind]})"


def literal(value: Any) -> str:
    return f'float("{value!r}")' if isinstance(value, float) else repr(int(value))


def _position(slot: int, indices: Sequence[str]) -> str:
    """Return the row-major position of clamped indices, in the integers of the call."""
    flat = "0"
    for axis, index in enumerate(indices):
        size = f"rule.tables[{slot}].sizes[{axis}]"
        flat = f"({flat}) * {size} + clamp({index}, {size})" if axis else f"clamp({index}, {size})"
    return flat
