"""The forms of rules: what rules share whose tables have other values."""

from typing import Any
from weakref import ref

from regard.rules.expression import Node, once
from regard.rules.extremes import has_infinite, width
from regard.rules.program import Program
from regard.rules.tracing import Table
from regard.runtime.bounded import insert

SIZE = 1024
_forms: dict[Any, "Form"] = {}


class Form:
    """A rule without the values of its tables; equal forms are one object.

    met: whether an earlier call had a rule of this form.
    """

    __slots__ = ("met",)
    met: bool

    def __init__(self) -> None:
        self.met = False


@once
def form_of(node: Node) -> Form:
    """Return the form of a rule: its operations, numbers, and the shapes and dtypes of its tables.

    The values of a table belong to the form where checks read them. Otherwise that is the width of its integers, and
    whether a float is infinite.

    >>> from regard.rules import padding, window
    >>> form_of(padding([3, 2]).node) is form_of(padding([1, 4]).node)
    True
    >>> form_of(window(3).node) is form_of(window(4).node)
    False
    """
    program = Program.of([node])
    checked = any(x.bounds == "raise" for x in program.tables) or _nested(program)
    key = program.structure, str(program.numbers), *[ref(x) if checked else _kind(x) for x in program.tables]
    form = _forms.get(key)
    if form is None:
        form = Form()
        insert(_forms, key, form, SIZE)
    return form


def tables_of(*nodes: Node | None) -> tuple[Table, ...]:
    """Return the tables of rules, in the order of their programs; those of equal forms are alike."""
    each = [tables for node in nodes if node is not None and (tables := Program.of([node]).tables)]
    return each[0] if len(each) == 1 else tuple([x for tables in each for x in tables])


def _nested(program: Program) -> bool:
    """Return whether entries of a table are indices of another."""
    dependent: set[int] = set()
    for position, x in enumerate(program.instructions):
        below = not dependent.isdisjoint(x.operands)
        if x.op == "gather" and below:
            return True
        if x.op == "gather" or below:
            dependent.add(position)
    return False


def _kind(table: Table) -> tuple[Any, ...]:
    return table.shape, table.dtype, table.bounds, has_infinite(table) if table.kind == "float" else width(table)
