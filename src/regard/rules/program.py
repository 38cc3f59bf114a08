"""Expressions as linear programs, for compilers, and rules as text.

A program has one instruction per node, each operand computed before its use. The text is for files, and for compiled
programs of other frameworks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from regard.rules.expression import Array, Kind, Node, Number, make, once, order
from regard.rules.masks import Mask, Requirement, Rule
from regard.rules.scores import Score
from regard.rules.tracing import Table

KINDS: dict[str, Any] = {"Mask": Mask, "Score": Score}


class Instruction(NamedTuple):
    """``op`` of the results of the instructions ``operands``.

    slot: the index of the program's number, table or dense array that a ``number``, ``gather`` or ``dense`` reads; the
    value itself for a ``literal``; else None.
    """

    op: str
    kind: Kind
    operands: tuple[int, ...]
    slot: Any = None


@dataclass(frozen=True, eq=False)
class Program:
    """Expressions in static single assignment: instruction n computes value n.

    results: the values returned. numbers, tables, dense: the run-time arguments, by slot. structure: text of the
    program without the values of numbers, and the contents and lengths of arrays. Programs of equal structure may share
    compiled code.
    """

    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]
    numbers: tuple[Number, ...]
    tables: tuple[Table, ...]
    dense: tuple[Array, ...]
    structure: str

    @staticmethod
    def of(nodes: Sequence[Node]) -> "Program":
        """Return the program that computes `nodes`; that of a single node is cached.

        >>> from regard.rules import causal
        >>> print(Program.of([causal().node]))
        %0 = j : int
        %1 = i : int
        %2 = less_equal %0 %1 : bool
        return %2
        """
        return _of_one(nodes[0]) if len(nodes) == 1 else _of(nodes)

    def __str__(self) -> str:
        arguments = [f"number {slot} = {value!r}" for slot, value in enumerate(self.numbers)]
        arguments += [f"table {slot} = {value!r}" for slot, value in enumerate(self.tables)]
        arguments += [f"dense {slot} = array of shape {value.shape}" for slot, value in enumerate(self.dense)]
        return "\n".join([*arguments, *_lines(self.instructions, self.results)])


def _of(nodes: Sequence[Node]) -> Program:
    slots: dict[str, dict[Any, tuple[int, Any]]] = {"number": {}, "gather": {}, "dense": {}}
    position: dict[Node, int] = {}
    instructions = []
    for node in order(nodes):
        slot = node.payload
        if node.op in slots:
            # A number is a slot of its own; arrays are shared by identity.
            key = id(node) if node.op == "number" else id(node.payload)
            payloads = slots[node.op]
            slot, _ = payloads.setdefault(key, (len(payloads), node.payload))
        position[node] = len(position)
        instructions.append(Instruction(node.op, node.kind, tuple(position[arg] for arg in node.args), slot))
    numbers, tables, dense = (tuple(value for _, value in payloads.values()) for payloads in slots.values())
    results = tuple(position[node] for node in nodes)
    signature = [f"table {table.dtype}" for table in tables]
    structure = "\n".join([*signature, *_lines(instructions, results)])
    return Program(tuple(instructions), results, numbers, tables, dense, structure)


@once
def _of_one(node: Node) -> Program:
    return _of([node])


def _lines(instructions: Sequence[Instruction], results: Sequence[int]) -> list[str]:
    lines = []
    for position, (op, kind, operands, slot) in enumerate(instructions):
        words = [op, *([] if slot is None else [repr(slot)]), *(f"%{operand}" for operand in operands)]
        lines.append(f"%{position} = {' '.join(words)} : {kind}")
    return [*lines, f"return {' '.join(f'%{result}' for result in results)}"]


def rule_text(node: Node) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """Return an expression as text, and the tables and dense arrays that it reads."""
    program = Program.of([node])
    steps = [
        (op, kind, operands, program.numbers[slot] if op == "number" else slot)
        for op, kind, operands, slot in program.instructions
    ]
    return json.dumps([steps, program.results[0]]), program.tables, program.dense


def rule_from_text(text: str, tables: Sequence[Any], dense: Sequence[Any]) -> Node:
    """Return the expression that `rule_text` wrote, over these arrays."""
    steps, result = json.loads(text)
    nodes: list[Node] = []
    arrays = {"gather": tables, "dense": dense}
    for op, kind, operands, slot in steps:
        payload = arrays[op][slot] if op in arrays else slot
        nodes.append(make(op, kind, tuple(nodes[n] for n in operands), payload))
    expression: Node = nodes[result]
    return expression


@dataclass(frozen=True)
class RuleText:
    """A rule as text, without its arrays.

    kind: "Mask" or "Score". expression: see `rule_text`. prints: the text of one such rule, which may show values.
    """

    kind: str
    expression: str
    prints: str = field(compare=False)
    requires: tuple[Requirement, ...]
    binds: int | None = None

    @classmethod
    def of(cls, rule: Rule) -> tuple[Self, tuple[Any, ...], tuple[Any, ...]]:
        """Return the text of a rule, and the tables and dense arrays that it reads."""
        expression, tables, dense = rule_text(rule.node)
        binds = getattr(rule, "binds", None)
        return cls(type(rule).__name__, expression, rule.text, rule.requires, binds), tables, dense

    def rule(self, tables: Sequence[Any], dense: Sequence[Any]) -> Any:
        """Return the rule over these arrays."""
        binds = () if self.binds is None else (self.binds,)
        node = rule_from_text(self.expression, tables, dense)
        return KINDS[self.kind](node, self.prints, self.requires, *binds)
