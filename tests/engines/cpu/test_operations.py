"""Rules as vector code: every operation has a lowering, and gives what NumPy gives."""

from typing import Any

import numpy as np
import pytest

from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import LEAVES, OPERATIONS, Lowering, TileContext
from regard.engines.cpu.language.types import F32, F64, I32, I64, Type
from regard.engines.cpu.spec.operands import RuleArguments, integer_type
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target, targets
from regard.rules import At, Node, Program, evaluate, table
from regard.rules.expression import OPS, SCORE_LEAVES, build, cast, make, number
from regard.rules.tracing import trace

NO_FUNCTIONS = {*LEAVES, "ds", "number", "literal", "dense", "gather", "float", "int"}
HERE = [t for t in targets().values() if t.runs and not t.amx]  # their rules are those of vectors


def test_every_operation_is_there() -> None:
    assert set(OPS) == NO_FUNCTIONS | set(OPERATIONS)


INTEGERS = {
    I64: [-(2**63), -(2**62), -100, -7, -1, 0, 1, 2, 3, 5, 64, 65, 2**31, 2**40 + 3, 2**62, 2**63 - 1],
    I32: [-(2**31), -(2**30), -100, -7, -1, 0, 1, 2, 3, 5, 31, 32, 64, 65, 2**30 + 3, 2**31 - 1],
}
FLOATS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.5, 0.3, -0.7, 1e30, -3e38, 1e-30, 88.0, -104.0, 3.0, 1.0]
EXACT = {"add", "subtract", "multiply", "divide", "sqrt", "floor", "ceil", "rint", "trunc", "negative", "absolute",
         "sign", "minimum", "maximum", "where"}  # fmt: skip


def leaf(name: str) -> Node:
    return make(name, "float" if name == "s" else "int")


def expressions() -> dict[str, Node]:
    """Every operation on integers and on floats, as far as it takes them; j is the same in every lane."""
    found = {}
    for name in OPS:
        if name in NO_FUNCTIONS or name == "where":
            continue
        for kind, x, y in (("float", leaf("s"), build("divide", leaf("j"), leaf("h"))), ("int", leaf("i"), leaf("j"))):
            for operands in [(x,)] if name == "erf" or getattr(np, name).nin == 1 else [(x, y), (y, x)]:
                try:
                    found[f"{name} of {kind}, {operands[0].op} first"] = build(name, *operands)
                except TypeError:
                    continue
    found["where"] = build("where", build("less", leaf("i"), leaf("j")), leaf("s"), leaf("i"))
    found["right_shift of int, far"] = build("add", build("right_shift", leaf("j"), number(40)), leaf("i"))
    found["truncated"] = build("multiply", cast(leaf("s"), "int"), leaf("i"))
    return found


def evaluated(node: Node, j: int, dtype: Any, target: Target, integer: Type = I64) -> tuple[Any, Any]:
    """By the compiled rule, what does not depend on i and s outside the loop, and by NumPy."""
    real, integers = F64 if dtype is np.float64 else F32, INTEGERS[integer]
    W, program = target.lanes(real.size), Program.of([node])
    arguments = RuleArguments("rule", program)
    k = Kernel("rule", target, ("i", "s", "y", "j", *arguments.fields))
    rule = Lowering(k, arguments, real, integer)
    fixed = {"j": k.integer("j"), "h": k.constant(I64, 3)}
    prepared = rule.prepare(TileContext(fixed))
    with k.loop(len(integers), step=W) as n:
        s = k.pointer("s", real).load(n, W)
        context = TileContext(fixed | {"i": k.pointer("i", I64).load(n, W), "s": s}, lambda slot: s)
        made = rule.at(context, prepared)[0].spread(W)
        k.pointer("y", F64)[n] = made.to(I64).to(F64) if node.kind == "bool" else made.to(F64)
    text = k.text()
    i, s = np.array(integers, np.int64), np.array(FLOATS, dtype)
    y = np.empty(len(i))
    arrays = [np.ascontiguousarray(t.array, dtype if t.kind == "float" else np.int64) for t in program.tables]
    words = [word for x in arrays for word in (x.ctypes.data, *x.shape)]
    fields = np.array([i.ctypes.data, s.ctypes.data, y.ctypes.data, j, *program.numbers, *words], np.int64)
    cache.kernel(text, "rule", target, lambda: text)(fields.ctypes.data)
    at = At(b=np.zeros(1, np.int64), h=np.array([3]), i=i, j=np.array([j]), s=s, dtype=dtype)
    with np.errstate(all="ignore"):
        return y, np.broadcast_to(evaluate([node], at)[0], i.shape).astype(np.float64)


@pytest.mark.parametrize("target", HERE[::3], ids=lambda t: t.name)
@pytest.mark.parametrize("name", expressions())
def test_operations(name: str, target: Target) -> None:
    node = expressions()[name]
    for dtype, j in ((np.float32, 0), (np.float32, -7), (np.float64, 65)):
        got, expected = evaluated(node, j, dtype, target)
        if node.kind != "float" or name.split()[0] in EXACT:
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=8 * np.finfo(dtype).eps, atol=np.finfo(dtype).tiny)


@pytest.mark.parametrize("target", HERE, ids=lambda t: t.name)
@pytest.mark.parametrize(
    "name", [name for name, node in expressions().items() if node.kind != "float" and "of int" in name]
)
def test_integers_of_32_bits(name: str, target: Target) -> None:
    """They give what those of 64 bits give wherever that fits, by vectors of either width."""
    for dtype, j in (
        (np.float32, 0),
        (np.float32, -7),
        (np.float64, 65),
        (np.float32, 2**31 - 1),
        (np.float32, -(2**31)),
    ):
        got, expected = evaluated(expressions()[name], j, dtype, target, I32)
        fits = (expected >= -(2**31)) & (expected < 2**31)
        assert fits.any() or abs(j) >= 2**30
        np.testing.assert_array_equal(got[fits], expected[fits])


@pytest.mark.parametrize("target", HERE, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.float32])
def test_tables(kind: Any, target: Target) -> None:
    """Indices clamp to the ends of each axis, as vectors and as single numbers."""
    values = table((np.arange(15).reshape(3, 5) * 7 % 4 - 1).astype(kind))
    for rule in (lambda s, b, h, i, j: values[i, j] + 0, lambda s, b, h, i, j: values[j - 1, h] + i * 0):
        for integer, j in ((I32, 2), (I64, 2), (I32, -3), (I64, 2**40)):
            got, expected = evaluated(trace(rule, SCORE_LEAVES), j, np.float32, target, integer)
            np.testing.assert_array_equal(got, expected)


def test_what_leaves_determine_is_prepared_and_used() -> None:
    product = build("multiply", leaf("i"), number(3))
    program = Program.of([product, build("add", product, build("absolute", leaf("j")))])
    arguments = RuleArguments("rule", program)
    k = Kernel("rule", HERE[0], arguments.fields)
    rule, leaves = Lowering(k, arguments, F32, I64), {"i": k.constant(I64, 1)}
    prepared = rule.prepare(TileContext(leaves))
    found = {x.op: value for x, value in zip(program.instructions, prepared, strict=True)}
    assert [op for op, value in found.items() if value is None] == ["j", "absolute", "add"]
    assert rule.at(TileContext(leaves | {"j": k.constant(I64, 2)}), prepared)[0] is found["multiply"]


def test_integers_of_32_bits_are_for_small_tables_too() -> None:
    small, large = table(np.zeros(3)), table(np.zeros((1, 1)))
    object.__setattr__(large, "array", np.broadcast_to(0.0, (2**16, 2**15)))
    nodes = trace(lambda s, b, h, i, j: small[i], SCORE_LEAVES), trace(lambda s, b, h, i, j: large[i, j], SCORE_LEAVES)
    few, many = (RuleArguments("score", Program.of([node])) for node in nodes)
    assert integer_type(np.int32, few, None) is I32
    assert integer_type(np.int64, few, None) is I64
    assert integer_type(np.int32, few, many) is I64
