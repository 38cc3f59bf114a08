"""Rules as vector code: every operation has a lowering, and gives what NumPy gives."""

from typing import Any

import numpy as np
import pytest

from regard.engines.cpu import cache
from regard.engines.cpu.element import F32, F64, I64
from regard.engines.cpu.emit import Kernel
from regard.engines.cpu.lowering import OPERATIONS, Arguments, Lowering, Place
from regard.engines.cpu.target import Target, targets
from regard.rules import At, Node, Program, evaluate
from regard.rules.expression import OPS, build, cast, make

LEAVES = {"b", "h", "i", "j", "s", "ds", "keys", "number", "literal", "dense", "gather", "float", "int"}


def test_every_operation_is_there() -> None:
    assert set(OPS) == LEAVES | set(OPERATIONS)


INTEGERS = [-(2**63), -(2**62), -100, -7, -1, 0, 1, 2, 3, 5, 64, 65, 2**31, 2**40 + 3, 2**62, 2**63 - 1]
FLOATS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.5, 0.3, -0.7, 1e30, -3e38, 1e-30, 88.0, -104.0, 3.0, 1.0]
EXACT = {"add", "subtract", "multiply", "divide", "sqrt", "floor", "ceil", "rint", "trunc", "negative", "absolute",
         "sign", "minimum", "maximum", "where"}  # fmt: skip


def leaf(name: str) -> Node:
    return make(name, "float" if name == "s" else "int")


def expressions() -> dict[str, Node]:
    """Every operation on integers and on floats, as far as it takes them; j is the same in every lane."""
    found = {}
    for name in OPS:
        if name in LEAVES or name == "where":
            continue
        for kind, x, y in (("float", leaf("s"), build("divide", leaf("j"), leaf("h"))), ("int", leaf("i"), leaf("j"))):
            for operands in [(x,)] if getattr(np, name).nin == 1 else [(x, y), (y, x)]:
                try:
                    found[f"{name} of {kind}, {operands[0].op} first"] = build(name, *operands)
                except TypeError:
                    continue
    found["where"] = build("where", build("less", leaf("i"), leaf("j")), leaf("s"), leaf("i"))
    found["truncated"] = build("multiply", cast(leaf("s"), "int"), leaf("i"))
    return found


def evaluated(node: Node, j: int, dtype: Any, target: Target) -> tuple[Any, Any]:
    """By the compiled rule, and by NumPy."""
    real = F64 if dtype is np.float64 else F32
    W, program = target.lanes(real.size), Program.of([node])
    k = Kernel("rule", target, ("i", "s", "y", "j"))
    rule = Lowering(k, Arguments("rule", program), real)
    with k.loop(len(INTEGERS), step=W) as n:
        leaves = {
            "i": k.pointer("i", I64).load(n, W), "s": k.pointer("s", real).load(n, W), "j": k.integer("j"),
            "h": k.constant(I64, 3),
        }  # fmt: skip
        made = rule.at(Place(leaves, lambda slot: leaves["s"]))[0].spread(W)
        k.pointer("y", F64)[n] = made.to(I64).to(F64) if node.kind == "bool" else made.to(F64)
    text = k.text()
    i, s = np.array(INTEGERS, np.int64), np.array(FLOATS, dtype)
    y = np.empty(len(i))
    fields = np.array([i.ctypes.data, s.ctypes.data, y.ctypes.data, j], np.int64)
    cache.kernel(text, "rule", target, lambda: text)(fields.ctypes.data)
    at = At(b=np.zeros(1, np.int64), h=np.array([3]), i=i, j=np.array([j]), s=s, dtype=dtype)
    with np.errstate(all="ignore"):
        return y, np.broadcast_to(evaluate([node], at)[0], i.shape).astype(np.float64)


@pytest.mark.parametrize("target", [t for t in targets().values() if t.runs][::3], ids=lambda t: t.name)
@pytest.mark.parametrize("name", expressions())
def test_operations(name: str, target: Target) -> None:
    node = expressions()[name]
    for dtype, j in ((np.float32, 0), (np.float32, -7), (np.float64, 65)):
        got, expected = evaluated(node, j, dtype, target)
        if node.kind != "float" or name.split()[0] in EXACT:
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=8 * np.finfo(dtype).eps, atol=np.finfo(dtype).tiny)
