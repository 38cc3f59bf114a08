"""Bounds of rules as Triton functions, for tiles with nothing visible or hidden.

They are the intervals of `regard.rules.intervals`, for integers and comparisons, which masks consist of. Anything else
is *unknown*, which is always sound. An interval is the names of two values, its least and its greatest, both included.
What is the same in the whole tile (b, h, numbers) has one name. Booleans are int1.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.triton.rules.lowering import TYPES, function, literal, number, table_types
from regard.rules import Instruction, Node, Program, Ranges, intervals, order

ARGUMENTS = (
    "b, h, i_lo, i_hi, j_lo, j_hi, keys, mask_rule, score_rule, "
    "REACH: tl.constexpr, REAL: tl.constexpr, INT: tl.constexpr"
)
Interval = tuple[str, str] | None
LIMIT = 2**62  # integers below it surely did not wrap
ROWS = 2  # of a table that a tile may reach, along an axis before its last


class Emitter:
    """The lines of a function under construction.

    of: the interval of each instruction.
    """

    def __init__(self, prefix: str, rule: str, program: tuple[Instruction, ...], tables: Any, unsure: frozenset[int]):
        self.prefix, self.rule, self.program, self.tables, self.unsure = prefix, rule, program, tables, unsure
        self.lines: list[str] = []
        self.of: list[Interval] = []
        for x in program:
            found = None if len(self.of) in unsure else self.interval(x)
            self.of.append(found)

    def name(self, expression: str) -> str:
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"{name} = {expression.replace('rule.', self.rule + '.')}")
        return name

    def both(self, lo: str, hi: str) -> Interval:
        return self.name(lo), self.name(hi)

    def point(self, expression: str) -> Interval:
        name = self.name(expression)
        return name, name

    def interval(self, x: Instruction) -> Interval:
        if x.op == "literal":
            return self.point(f"tl.full([], {literal(x.slot)}, {TYPES[x.kind]})")
        if x.op == "number":
            return self.point(number(x))
        if x.op in ("b", "h"):
            return self.point(f"{x.op}.to(INT)")
        if x.op == "keys":
            return self.point("tl.full([], keys, INT)")
        if x.op in ("i", "j"):
            return self.both(f"{x.op}_lo.to(INT)", f"{x.op}_hi.to(INT)")
        if x.op == "gather":
            return self.gather(x)
        given = [self.of[n] for n in x.operands]
        if x.op in ("bitwise_and", "bitwise_or") and x.kind == "bool":
            return self.connective("&" if x.op == "bitwise_and" else "|", given)
        if x.op == "where" and x.kind != "float":
            return self.where(x.kind, given)
        if any(y is None for y in given) or any(self.program[n].kind == "float" for n in x.operands):
            return self.remainder(None, given[1]) if x.op == "remainder" and given[1] is not None else None
        known: Any = given
        if all(lo == hi for lo, hi in known) and x.op in POINTS:
            return self.point(POINTS[x.op].format(*(lo for lo, _ in known)))
        rule = RULES.get(x.op)
        return None if rule is None or (x.kind == "bool" and x.op not in LOGICAL) else rule(self, *known)

    def connective(self, sign: str, given: Sequence[Interval]) -> Interval:
        """Return the interval of & or |; with one operand unknown, one end alone is known."""
        known = [y for y in given if y is not None]
        if not known:
            return None
        if len(known) == 2:
            (a, b), (c, d) = known
            return self.both(f"{a} {sign} {c}", f"{b} {sign} {d}")
        unknown = ("tl.full([], 0, tl.int1)", "tl.full([], 1, tl.int1)")
        a, b = known[0]
        return self.both(f"{a} {sign} {unknown[0]}", f"{b} {sign} {unknown[1]}")

    def where(self, value_type: str, given: Sequence[Interval]) -> Interval:
        condition, a, b = given
        if a is None or b is None:
            return None
        c = condition or self.both("tl.full([], 0, tl.int1)", "tl.full([], 1, tl.int1)")
        assert c is not None
        low, high = (
            ("{0} & {1}", "{0} | {1}") if value_type == "bool" else ("tl.minimum({0}, {1})", "tl.maximum({0}, {1})")
        )
        pick = "tl.where({0}, {2}, tl.where({1}, {4}, {3}))"
        return self.both(
            pick.format(*c, a[0], b[0], low.format(a[0], b[0])), pick.format(*c, a[1], b[1], high.format(a[1], b[1]))
        )

    def remainder(self, a: Interval, b: Interval) -> Interval:
        if b is None or b[0] != b[1]:
            return None
        y = b[0]
        low, high = f"tl.minimum({y} + 1, 0)", f"tl.maximum({y} - 1, 0)"
        if a is None:
            return self.both(low, high)
        q = self.name(f"floor_divide({a[0]}, {y})")
        once = self.name(f"({q} == floor_divide({a[1]}, {y})) & ({y} != 0)")
        whole = self.name(f"tl.where(({a[0]} >= 0) & ({y} > 0), tl.minimum({high}, {a[1]}), {high})")
        return self.both(
            f"tl.where({once}, {a[0]} - {q} * {y}, {low})", f"tl.where({once}, {a[1]} - {q} * {y}, {whole})"
        )

    def gather(self, x: Instruction) -> Interval:
        """Return the interval of a look-up.

        Single indices give one entry. Otherwise it spans the extremes along the last axis, in up to two rows.
        """
        given = [self.of[n] for n in x.operands]
        value_type, rank = self.tables[x.slot]
        if value_type == "float":
            return None
        table = f"rule.tables[{x.slot}]"
        read = "({0} != 0)" if value_type == "bool" else "{0}.to(INT)"
        if any(y is None for y in given):
            return self.whole(value_type, table)
        known: Any = given
        wide_axes = [n for n, (lo, hi) in enumerate(known) if lo != hi]
        ends = [
            tuple(self.name(f"clamp({end}, {table}.sizes[{n}])") for end in (y if n in wide_axes else y[:1]))
            for n, y in enumerate(known)
        ]

        def flat(rows: Sequence[str]) -> str:
            at = "0"
            for n, index in enumerate(rows):
                at = f"({at}) * {table}.sizes[{n}] + {index}" if n else index
            return at

        if not wide_axes:
            return self.point(read.format(f"tl.load({table}.ptr + {flat([e[0] for e in ends])})"))
        if len(wide_axes) > 2 or wide_axes[-1] != rank - 1:
            return self.whole(value_type, table)
        first, last = ends[-1]
        fits = f"({last} - {first} < REACH)"
        rows = [[e[0] for e in ends[:-1]]]
        if len(wide_axes) == 2:
            rows.append([e[-1] for e in ends[:-1]])
            lo, hi = ends[wide_axes[0]]
            fits += f" & ({hi} - {lo} < {ROWS})"
        found = []
        for row in rows:
            begin = self.name(flat([*row, first]))
            found += [
                self.name(f"{name}_of({table}.ptr, {begin}, {last} - {first}, REACH)") for name in ("least", "greatest")
            ]
        low = found[0] if len(rows) == 1 else self.name(f"tl.minimum({found[0]}, {found[2]})")
        high = found[1] if len(rows) == 1 else self.name(f"tl.maximum({found[1]}, {found[3]})")
        if value_type == "bool":
            return self.both(f"({low} != 0) & {fits}", f"({high} != 0) | ~({fits})")
        return self.both(
            f"tl.where({fits}, {low}, {table}.least).to(INT)", f"tl.where({fits}, {high}, {table}.greatest).to(INT)"
        )

    def whole(self, value_type: str, table: str) -> Interval:
        if value_type == "bool":
            return None
        return self.both(f"tl.full([], {table}.least, INT)", f"tl.full([], {table}.greatest, INT)")

    def hidden(self, n: int) -> str | None:
        """Return an expression that is true where a score is surely −∞, or None."""
        x = self.program[n]
        if x.kind == "float" and x.op in ("number", "literal") and self.of[n] is not None:
            return f"surely_hidden({self.of[n][0]})"  # type: ignore[index]
        if x.op != "where":
            return None
        a, b = (self.hidden(m) for m in x.operands[1:])
        c = self.of[x.operands[0]]
        cases = [f"({a} & {b})"] if a and b else []
        if c is not None:
            cases += [f"({c[0]} & {a})"] if a else []
            cases += [f"(~{c[1]} & {b})"] if b else []
        return f"({' | '.join(cases)})" if cases else None


def _extremes(make: str) -> Callable[..., Interval]:
    """Return the rule of an operation with its extremes at the ends."""

    def rule(e: Emitter, *given: tuple[str, str]) -> Interval:
        corners = [""]
        for lo, hi in given:
            corners = [f"{c},{end}" for c in corners for end in dict.fromkeys((lo, hi))]
        names = [e.name(make.format(*c[1:].split(","))) for c in corners]
        low, high = names[0], names[0]
        for name in names[1:]:
            low, high = f"tl.minimum({low}, {name})", f"tl.maximum({high}, {name})"
        return e.both(low, high)

    return rule


def _equal(e: Emitter, a: tuple[str, str], b: tuple[str, str]) -> Interval:
    surely = f"({a[0]} == {a[1]}) & ({b[0]} == {b[1]}) & ({a[0]} == {b[0]})"
    return e.both(surely, f"({a[0]} <= {b[1]}) & ({b[0]} <= {a[1]})")


def _not(e: Emitter, x: Interval) -> Interval:
    assert x is not None
    return e.both(f"~{x[1]}", f"~{x[0]}")


def _absolute(e: Emitter, x: tuple[str, str]) -> Interval:
    return e.both(f"tl.maximum(tl.maximum({x[0]}, -{x[1]}), 0)", f"tl.maximum(-{x[0]}, {x[1]})")


def _divided(e: Emitter, a: tuple[str, str], b: tuple[str, str]) -> Interval:
    rule = _extremes("floor_divide({0}, {1})")
    return rule(e, a, b) if b[0] == b[1] else None


def _comparison(sign: str) -> Callable[..., Interval]:
    return lambda e, a, b: e.both(f"{a[1]} {sign} {b[0]}", f"{a[0]} {sign} {b[1]}")


RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda e, a, b: e.both(f"{a[0]} + {b[0]}", f"{a[1]} + {b[1]}"),
    "subtract": lambda e, a, b: e.both(f"{a[0]} - {b[1]}", f"{a[1]} - {b[0]}"),
    "negative": lambda e, x: e.both(f"-{x[1]}", f"-{x[0]}"),
    "multiply": _extremes("{0} * {1}"),
    "absolute": _absolute,
    "minimum": lambda e, a, b: e.both(f"tl.minimum({a[0]}, {b[0]})", f"tl.minimum({a[1]}, {b[1]})"),
    "maximum": lambda e, a, b: e.both(f"tl.maximum({a[0]}, {b[0]})", f"tl.maximum({a[1]}, {b[1]})"),
    "floor_divide": _divided,
    "remainder": lambda e, a, b: e.remainder(a, b),
    "less": _comparison("<"),
    "less_equal": _comparison("<="),
    "equal": _equal,
    "not_equal": lambda e, a, b: _not(e, _equal(e, a, b)),
    "invert": _not,
    "int": lambda e, x: e.both(f"{x[0]}.to(INT)", f"{x[1]}.to(INT)"),
}
LOGICAL = ("less", "less_equal", "equal", "not_equal", "invert")  # with a boolean result
POINTS = {
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "negative": "-{0}",
    "floor_divide": "floor_divide({0}, {1})", "less": "{0} < {1}", "less_equal": "{0} <= {1}",
}  # fmt: skip


def bounds(p: Problem) -> Any:
    """Return a function from tiles to flags: nothing is visible, nothing is hidden.

    None if the rules of the call never allow either.
    """
    mask = None if p.mask_node is None else _parts(p, p.mask_node)
    score = None if p.rules.hiding_node is None else _parts(p, p.rules.hiding_node)
    return None if mask is None and score is None else _bounds(mask, score)


def _parts(p: Problem, node: Node) -> Any:
    program = Program.of([node])
    return program.instructions, program.results[0], table_types(program), _unsure(p, node)


def _unsure(p: Problem, node: Node) -> frozenset[int]:
    """Return the integers that may wrap in the call, with unknown bounds."""
    if p.rules.integers is np.int32:
        return frozenset()
    near, nodes = 2**16, order([node])
    ranges = Ranges(**{axis: (a - near, b + near) for axis, (a, b) in p.extents.indices.items()}, keys=p.keys)
    found = intervals(nodes, ranges)
    wide = (n for n, x in enumerate(found) if nodes[n].kind == "int" and not np.all(np.abs(x.lo) < LIMIT))
    high = (n for n, x in enumerate(found) if nodes[n].kind == "int" and not np.all(np.abs(x.hi) < LIMIT))
    return frozenset((*wide, *high))


@functools.lru_cache(maxsize=512)
def _bounds(mask: Any, score: Any) -> Any:
    lines, never, always = [], "(j_lo > j_hi)", "(j_lo <= j_hi)"
    if mask is not None:
        instructions, result, tables, unsure = mask
        e = Emitter("m", "mask_rule", instructions, tables, unsure)
        lines += e.lines
        lo_hi = e.of[result]
        always = f"{always} & {lo_hi[0]}" if lo_hi else f"{never}"
        never = f"{never} | ~{lo_hi[1]}" if lo_hi else never
    if score is not None:
        instructions, result, tables, unsure = score
        e = Emitter("s", "score_rule", instructions, tables, unsure)
        hidden = e.hidden(result)
        lines += e.lines
        never = f"{never} | {hidden}" if hidden else never
    return function("bounds", ARGUMENTS, lines, f"({never}), ({always})")
