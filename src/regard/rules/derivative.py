"""Derivatives of rules in the score and in the tables, as rules of their own.

The derivative of an expression is an expression: `tangent` differentiates along directions, `partials` in the score
and in each reading of a float table. Differentiating the result again gives second derivatives, mixed ones included.

Conventions where there is no derivative: ``where`` follows the branch that it takes, and the other one has no
influence. ``minimum`` and ``maximum`` give all to their first operand if both are equal. That of ``absolute`` is the
sign, 0 at 0. ``floor``, ``ceil``, ``rint``, ``trunc``, ``sign``, comparisons and casts to integers have derivative 0.
"""

import math
from collections.abc import Callable, Mapping
from heapq import heappop, heappush

import numpy as np

from regard.rules.expression import Array, At, Node, evaluate, flat_index, literal, make, order
from regard.rules.tracing import Table

ZERO, ONE = literal(0.0), literal(1.0)


# Constructors that simplify literals and nothing else


def add(a: Node, b: Node) -> Node:
    if is_zero(a):
        return b
    return a if is_zero(b) else make("add", "float", (a, b))


def negative(a: Node) -> Node:
    return a if is_zero(a) else make("negative", "float", (a,))


def subtract(a: Node, b: Node) -> Node:
    if is_zero(a):
        return negative(b)
    return a if is_zero(b) else make("subtract", "float", (a, b))


def multiply(a: Node, b: Node) -> Node:
    if is_zero(a) or is_zero(b):
        return ZERO
    if _is_one(a):
        return b
    return a if _is_one(b) else make("multiply", "float", (a, b))


def divide(a: Node, b: Node) -> Node:
    return a if is_zero(a) or _is_one(b) else make("divide", "float", (a, b))


def where(condition: Node, a: Node, b: Node) -> Node:
    return a if a is b else make("where", "float", (condition, a, b))


def is_zero(node: Node) -> bool:
    """Return True for the literal 0, the derivative of a constant."""
    return node.op == "literal" and node.payload == 0


def _is_one(node: Node) -> bool:
    return node.op == "literal" and node.payload == 1


# Rules: the tangent of y = op(x...), given the tangents of x


def _flat(y: Node, x: tuple[Node, ...], dx: tuple[Node, ...]) -> Node:
    return ZERO


def _chain(slope: Callable[[Node, Node], Node]) -> Callable[..., Node]:
    """Return the rule of a function of one variable from its derivative slope(y, x)."""

    def rule(y: Node, x: tuple[Node, ...], dx: tuple[Node, ...]) -> Node:
        return ZERO if is_zero(dx[0]) else multiply(slope(y, *x), dx[0])

    return rule


def _choose(y: Node, x: tuple[Node, ...], dx: tuple[Node, ...]) -> Node:
    a, b = x if y.op == "minimum" else x[::-1]
    first = make("less_equal", "bool", (a, b))
    return where(first, *dx)


def _square(x: Node) -> Node:
    return multiply(x, x)


def _make(op: str, x: Node) -> Node:
    return make(op, "float", (x,))


TANGENTS: dict[str, Callable[[Node, tuple[Node, ...], tuple[Node, ...]], Node]] = {
    "add": lambda y, x, dx: add(*dx),
    "subtract": lambda y, x, dx: subtract(*dx),
    "multiply": lambda y, x, dx: add(multiply(dx[0], x[1]), multiply(x[0], dx[1])),
    "divide": lambda y, x, dx: divide(subtract(dx[0], multiply(y, dx[1])), x[1]),
    "negative": lambda y, x, dx: negative(*dx),
    "absolute": _chain(lambda y, x: _make("sign", x)),
    "minimum": _choose,
    "maximum": _choose,
    "where": lambda y, x, dx: where(x[0], dx[1], dx[2]),
    "sqrt": _chain(lambda y, x: divide(literal(0.5), y)),
    "exp": _chain(lambda y, x: y),
    "exp2": _chain(lambda y, x: multiply(literal(math.log(2)), y)),
    "expm1": _chain(lambda y, x: _make("exp", x)),
    "log": _chain(lambda y, x: divide(ONE, x)),
    "log2": _chain(lambda y, x: divide(literal(1 / math.log(2)), x)),
    "log10": _chain(lambda y, x: divide(literal(1 / math.log(10)), x)),
    "log1p": _chain(lambda y, x: divide(ONE, add(ONE, x))),
    "tanh": _chain(lambda y, x: subtract(ONE, _square(y))),
    "sinh": _chain(lambda y, x: _make("cosh", x)),
    "cosh": _chain(lambda y, x: _make("sinh", x)),
    "sin": _chain(lambda y, x: _make("cos", x)),
    "cos": _chain(lambda y, x: negative(_make("sin", x))),
    "tan": _chain(lambda y, x: add(ONE, _square(y))),
    "arctan": _chain(lambda y, x: divide(ONE, add(ONE, _square(x)))),
    "erf": _chain(lambda y, x: multiply(literal(2 / math.sqrt(math.pi)), _make("exp", negative(_square(x))))),
    **dict.fromkeys(("sign", "floor", "ceil", "rint", "trunc"), _flat),
    "float": _flat,  # of an index or a boolean
}


def _differentiate(node: Node, leaf: Callable[[Node], Node]) -> Node:
    """Return the tangent of `node`, given that of each float leaf."""
    tangents: dict[Node, Node] = {}
    for y in order([node]):
        if y.kind != "float" or (not y.args and y.op not in ("s", "ds", "gather")):
            tangents[y] = ZERO
        elif y.op in ("s", "ds", "gather"):
            tangents[y] = leaf(y)
        else:
            tangents[y] = TANGENTS[y.op](y, y.args, tuple(tangents[x] for x in y.args))
    return tangents[node]


def tangent(node: Node, tables: Mapping[Table, Table] | None = None) -> Node:
    """Return the derivative of `node` along a direction.

    The direction is "ds" in the score, and in each table the one that `tables` maps it to. Other tables are constant.
    The result reads the leaf "ds" (`At.ds`), and the tangent tables at the same clamped indices. The tangent of a
    result of `partials` is a second derivative.

    >>> from regard.rules import softcap, temperature
    >>> tangent(temperature(2.0).node)
    multiply(ds, 0.5)
    """
    tables = tables or {}

    def leaf(y: Node) -> Node:
        if y.op == "s":
            return make("ds", "float")
        if y.op == "gather" and y.payload in tables:
            return reading(y, tables)
        return ZERO

    return _differentiate(node, leaf)


def partials(node: Node) -> tuple[Node, dict[Node, Node]]:
    """Return the derivatives of `node` in the score and in each reading of a table.

    A reading is a "gather" leaf.

    >>> from regard.rules import Table, alibi
    >>> d_ds, d_tables = partials(alibi(Table([0.5, 0.25])).node)
    >>> d_ds, d_tables
    (1.0, {table(2,)[h]: negative(float(absolute(subtract(i, j))))})
    """

    nodes = order([node])
    position = {x: n for n, x in enumerate(nodes)}
    users: dict[Node, list[Node]] = {x: [] for x in nodes}
    for y in nodes:
        for x in y.args:
            if x.kind == y.kind == "float":
                users[x].append(y)
    # A tangent passes unchanged through a run of sums without other users: `end` is the last of them. Without these
    # jumps, work on a sum of n readings would grow with n².
    end: dict[Node, Node] = {}
    for x in reversed(nodes):
        passes = len(users[x]) == 1 and users[x][0].op in ("add", "subtract")
        end[x] = end[users[x][0]] if passes and (users[x][0].op == "add" or users[x][0].args[0] is x) else x

    def by(leaf: Node) -> Node:
        tangents, last = {leaf: ONE}, leaf
        open_: list[int] = []  # a heap: positions of nodes that depend on the leaf
        reached = set(open_)
        while True:
            if not is_zero(tangents[last]):
                if not open_:  # every path goes through this node
                    tangents[end[last]] = tangents[last]
                    last = end[last]
                for n in {position[y] for y in users[last]} - reached:
                    heappush(open_, n)
                    reached.add(n)
            if not open_:
                return tangents.get(node, ZERO)
            last = nodes[heappop(open_)]
            tangents[last] = TANGENTS[last.op](last, last.args, tuple(tangents.get(x, ZERO) for x in last.args))

    readings = [leaf for leaf in nodes if leaf.op == "gather" and leaf.kind == "float"]
    s = make("s", "float")
    return by(s) if s in position else ZERO, {leaf: by(leaf) for leaf in readings}


def reading(leaf: Node, tables: Mapping[Table, Table]) -> Node:
    """Return a leaf's reading, of the table that `tables` maps its table to."""
    return make("gather", "float", leaf.args, tables[leaf.payload])


def scatter(leaf: Node, values: Array, at: At, out: Array) -> None:
    """Add `values` to `out` where `leaf` reads its table: the transpose of reading it.

    values: broadcast to the indices of `at`. out: of the table's shape, C-contiguous; sums are in its dtype and in a
    fixed order.
    """
    if not out.flags.c_contiguous:
        raise ValueError("out must be C-contiguous")
    shape = np.broadcast_shapes(at.shape, np.shape(values))
    values = np.broadcast_to(values, shape)
    flat = np.asarray(flat_index(out.shape, evaluate(leaf.args, at)))
    flat = flat.reshape((1,) * (len(shape) - flat.ndim) + flat.shape)
    # An axis along which one entry is read is summed first.
    shared = tuple(axis for axis, length in enumerate(flat.shape) if length == 1 != shape[axis])
    values = values.sum(axis=shared, keepdims=True, dtype=out.dtype)
    np.add.at(out.reshape(-1), flat.reshape(-1), values.reshape(-1))
