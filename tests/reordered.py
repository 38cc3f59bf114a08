"""Prints digests of results of cpu's kernels, with the rows of their table of operands in another order.

REGARD_CACHE=off python tests/reordered.py reversed       or as-is, or the seed of a shuffle
"""

import ast
import random
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import partial
from hashlib import sha256
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import numpy as np

TABLE = "regard.engines.cpu.spec.operands"
CALLS = "observed", "second pass", "top", "tangent", "all gradients", "tangent of gradients"
SPLIT = 2**14  # keys of four heads that are work for two threads


def reorder(order: str) -> None:
    """Load the module of the table with its rows in this order, before others read it."""
    spec = find_spec(TABLE)
    assert spec is not None
    assert spec.origin is not None
    assert TABLE not in sys.modules
    module = ast.parse(Path(spec.origin).read_text("utf-8"))
    (table,) = (x.value for x in module.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "OPERANDS")
    assert isinstance(table, ast.Tuple)
    if order == "reversed":
        table.elts.reverse()
    elif order != "as-is":
        random.Random(int(order)).shuffle(table.elts)
    sys.modules[TABLE] = module_from_spec(spec)
    exec(compile(module, spec.origin, "exec"), vars(sys.modules[TABLE]))


def results() -> Iterator[tuple[str, Any]]:
    """Yield the results of calls that have every operand between them, small repeated calls and steps among them."""
    import regard
    from cases import CASES
    from kernel_digests import calls
    from regard.engines.cpu.schedule.weights_work import weights
    from regard.engines.cpu.target.instructions import chosen
    from regard.ops.normalization import problem_from
    from regard.runtime.threads import num_threads

    (case,) = (x for x in CASES if x.name == "everything")
    q, k, v, options = case.inputs(np.float32)
    p = problem_from(q, k, v, **options)
    for name, call in calls(p, chosen()):
        if name in CALLS:
            yield name, call()
    lse = regard.attention(q, k, v, **options, observe=["lse"])[1]["lse"]
    yield "weights", weights(p, chosen(), lse, range(21), range(2, 19))
    repeated = partial(regard.attention, engine="cpu", observe=["lse"])
    yield "repeated calls", [repeated(q, k, v) for _ in range(3)]
    yield "steps", [repeated(q[..., :1, :], k[..., :n, :], v[..., :n, :]) for n in (17, 18, 19, 20)]
    one, many = np.ones((4, 1, 8), np.float32), np.resize(k, (4, SPLIT, 8))
    before = num_threads()
    regard.set_num_threads(2)
    yield "separate key splits", regard.attention(one, many, many, engine="cpu")
    regard.set_num_threads(before)


def arrays(x: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the arrays in a result, in order."""
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, dict):
        x = tuple(x.values())
    elif is_dataclass(x) and not isinstance(x, type):
        x = tuple(vars(x).values())
    if isinstance(x, tuple | list):
        for part in x:
            yield from arrays(part)


def digests() -> list[str]:
    """Return a line for each call: its name and a digest of its results."""
    lines = []
    for name, result in results():
        every = b"".join(x.tobytes() for x in arrays(result))
        lines.append(f"{name}: {sha256(every).hexdigest()[:16]} of {len(every)} bytes")
    return lines


if __name__ == "__main__":
    reorder(sys.argv[1])
    print("\n".join(digests()))
