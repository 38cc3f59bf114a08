"""Expressions as text, which a compiled program or a saved one can carry: JSON of their instructions.

What tables and dense arrays hold is not in it; whoever reads it gives arrays for their places.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from regard.rules.expression import Array, Node, make
from regard.rules.program import Program
from regard.rules.tracing import Table


def rule_text(node: Node) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """An expression as text, and the tables and the dense arrays that it reads."""
    program = Program.of([node])
    steps = [
        (op, kind, operands, program.numbers[slot] if op == "number" else slot)
        for op, kind, operands, slot in program.instructions
    ]
    return json.dumps([steps, program.results[0]]), program.tables, program.dense


def build(text: str, tables: Sequence[Any], dense: Sequence[Any]) -> Node:
    """The expression that `rule_text` wrote, over these tables and dense arrays."""
    steps, result = json.loads(text)
    nodes: list[Node] = []
    arrays = {"gather": tables, "dense": dense}
    for op, kind, operands, slot in steps:
        payload = arrays[op][slot] if op in arrays else slot
        nodes.append(make(op, kind, tuple(nodes[n] for n in operands), payload))
    found: Node = nodes[result]
    return found


@lru_cache(maxsize=1024)
def outline(text: str) -> tuple[Node, tuple[Table, ...], tuple[Array, ...]]:
    """The expression over tables and dense arrays that only mark their places, and those."""
    steps, _ = json.loads(text)
    count = 1 + max((slot for op, *_, slot in steps if op in ("gather", "dense")), default=0)
    tables, dense = tuple(Table([0.0]) for _ in range(count)), tuple(np.zeros((), bool) for _ in range(count))
    return build(text, tables, dense), tables, dense
