"""Rules as expressions: tracing, evaluation, and the table of operations.

A rule is an ordinary Python function of ``(b, h, i, j)``, or ``(s, b, h, i, j)``. It is called once, with `Traced`
values that record what is done to them as a graph of `Node`. The graph is data: `evaluate` reads it on index arrays,
`regard.rules.intervals` on ranges of indices, `regard.rules.derivative` differentiates it, and
`regard.rules.program` lists it for a compiler.

Meaning of an expression
    - Three kinds of value: bool, int (64 bits, wrapping), and float (float32, or what the call computes in).
      Operands of different kinds meet in the wider one; ``/`` and functions such as ``exp`` give float.
    - Integer ``//`` and ``%`` floor, and give 0 for a zero divisor. Of floats, ``a // b`` is ``floor(a / b)`` and
      ``a % b`` is ``a - b * floor(a / b)``.
    - A float cast to int truncates, saturates at the ends of the 64-bit range, and maps NaN to 0.
    - ``minimum``, ``maximum`` and ``clip`` propagate NaN, as NumPy's do.
    - The indices of a table clamp to its ends.
    - Python numbers in a rule are run-time arguments. The exponent of ``**`` is not: it shapes the expression.
    - ``x ** p`` multiplies for whole p, and is sqrt for 1/2. Other halves are a product of both, other p are
      ``exp(p * log(x))``; their derivatives are 0 where x is 0. ``p ** x`` is ``exp2(x * log2(p))``, or a shift if both
      are integers and p is a power of two.

Operations are named as NumPy names them. To add one: an entry in `OPS`, one in ``intervals.INTERVALS`` and, if its
result is a float, one in ``derivative.TANGENTS``; the tests enumerate `OPS` and fail until all are there.
"""

from __future__ import annotations  # so that `help` shows the names of types

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.runtime.forks import renewed

if TYPE_CHECKING:
    from regard.rules.tracing import Table

Array = NDArray[Any]
Kind = Literal["bool", "int", "float"]
Number = bool | int | float
T = TypeVar("T")

KINDS: tuple[Kind, ...] = ("bool", "int", "float")
MASK_LEAVES = ("b", "h", "i", "j")
SCORE_LEAVES = ("s", "b", "h", "i", "j")
INT64 = np.iinfo(np.int64)


# Graph


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class Node:
    """One value of an expression: an operation and its operands.

    Equal expressions are one object. op: an operation in `OPS`. args: its operands. kind: of its result. payload: the
    value of a ``number`` or ``literal``, the `Table` of a ``gather``, the array of a ``dense``. cached: see `once`.
    """

    op: str
    kind: Kind
    args: tuple[Node, ...] = ()
    payload: Any = None
    cached: dict[Callable[..., Any], Any] = field(default_factory=dict, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A list, not a tree: pickle and copy follow a tree by recursion.
        nodes = order([self])
        number_of = {node: n for n, node in enumerate(nodes)}
        return _from_list, ([(x.op, x.kind, tuple(number_of[arg] for arg in x.args), x.payload) for x in nodes],)

    def __repr__(self) -> str:
        return _text(self, depth=6)


_nodes: WeakValueDictionary[tuple[object, ...], Node] = WeakValueDictionary()
_nodes_lock = renewed(sys.modules[__name__], "_nodes_lock", threading.Lock)


def make(op: str, kind: Kind, args: tuple[Node, ...] = (), payload: Any = None) -> Node:
    """Return the node with these fields, an existing one if possible.

    Numbers are always new: each is a run-time argument of its own.
    """
    if op == "number":
        return Node(op, kind, args, payload)
    # Equal literals need not be the same number (0.0 and -0.0), and arrays have no hash.
    identity = repr(payload) if op == "literal" else id(payload) if op == "dense" else payload
    with _nodes_lock:
        return _nodes.setdefault((op, kind, args, identity), Node(op, kind, args, payload))


def _from_list(steps: list[tuple[str, Kind, tuple[int, ...], Any]]) -> Node:
    """Return the last node of a list in which operands precede their users."""
    nodes: list[Node] = []
    for op, kind, args, payload in steps:
        nodes.append(make(op, kind, tuple(nodes[n] for n in args), payload))
    return nodes[-1]


def literal(value: Number, kind: Kind = "float") -> Node:
    """Return a constant of an expression's structure, such as the 1 of a derivative."""
    return make("literal", kind, (), {"bool": bool, "int": int, "float": float}[kind](value))


def number(value: Any) -> Node:
    """Return a new run-time argument of the kind of `value`."""
    if isinstance(value, bool | np.bool_):
        return make("number", "bool", (), bool(value))
    if isinstance(value, int | np.integer):
        if not INT64.min <= value <= INT64.max:
            raise ValueError(f"the integer {value} in a rule does not fit into 64 bits")
        return make("number", "int", (), int(value))
    return make("number", "float", (), float(value))


def order(nodes: Iterable[Node], ends: Callable[[Node], bool] = lambda node: False) -> list[Node]:
    """List `nodes` and every node that they depend on, operands before users.

    Order is by first use. ends: True for nodes whose operands are left out.
    """
    done: dict[Node, None] = {}
    stack = [(node, False) for node in reversed(list(nodes))]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready or not node.args or ends(node):
            done[node] = None
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))
    return list(done)


def once(function: Callable[[Node], T]) -> Callable[[Node], T]:
    """Cache the results of a function with each node, since nodes never change.

    The result must not refer to the node.
    """

    @functools.wraps(function)  # `has` looks results up by `__wrapped__`
    def cached(node: Node) -> T:
        if function not in node.cached:
            node.cached[function] = function(node)
        result: T = node.cached[function]
        return result

    return cached


def has(node: Node, function: Callable[[Node], Any]) -> bool:
    """Return True if the node has a cached result of a function made by `once`."""
    return function.__wrapped__ in node.cached  # type: ignore[attr-defined]


@once
def _leaves(node: Node) -> frozenset[str]:
    return frozenset(x.op for x in order([node]) if OPS[x.op].rule == "leaf" and x.op != "literal")


def reads(*nodes: Node) -> frozenset[str]:
    """Return the names of the leaves that `nodes` depend on.

    Names are among "b" "h" "i" "j" "s" "ds" "keys" "number" "gather" "dense".

    >>> from regard.rules import prefix
    >>> sorted(reads(prefix(2).node))
    ['j', 'number']
    """
    return frozenset().union(*map(_leaves, nodes))


def substitute(node: Node, replacements: Mapping[Node, Node]) -> Node:
    """Return `node` with every node in `replacements` replaced."""
    new: dict[Node, Node] = {}
    for old in order([node]):
        args = tuple(new[arg] for arg in old.args)
        new[old] = replacements.get(old) or (old if args == old.args else make(old.op, old.kind, args, old.payload))
    return new[node]


def rebuild(node: Node, payloads: Mapping[int, Any]) -> Node:
    """Return `node` with other tables and dense arrays.

    payloads: the new arrays, by the ids of the old.
    """
    new: dict[Node, Node] = {}
    for old in order([node]):
        args = tuple(new[arg] for arg in old.args)
        payload = payloads.get(id(old.payload), old.payload) if old.op in ("gather", "dense") else old.payload
        same = args == old.args and payload is old.payload
        new[old] = old if same else make(old.op, old.kind, args, payload)
    return new[node]


def _text(node: Node, depth: int) -> str:
    if node.op in ("number", "literal"):
        return repr(node.payload)
    if not node.args:
        return f"dense{node.payload.shape}" if node.op == "dense" else node.op
    if depth == 0:
        return "..."
    args = ", ".join(_text(arg, depth - 1) for arg in node.args)
    return f"table{node.payload.shape}[{args}]" if node.op == "gather" else f"{node.op}({args})"


# Operations


@dataclass(frozen=True, slots=True)
class At:
    """The indices at which a rule is evaluated, and what it reads there.

    b, h, i, j: integer arrays of absolute indices that broadcast together. dtype: of float arithmetic. s, ds: score and
    tangent of the score. keys: the number of keys of the whole. dense: returns the values of a dense array here, to
    broadcast with the others. tables: arrays to use in place of the tables' own. integers: the dtype of integer
    arithmetic, narrower than int64 only if bounds prove that all values fit.
    """

    b: ArrayLike
    h: ArrayLike
    i: ArrayLike
    j: ArrayLike
    s: Array | None = None
    ds: Array | None = None
    dtype: Any = np.float64
    keys: int | None = None
    dense: Callable[[Array], Array] | None = None
    tables: Mapping[Table, Array] | None = None
    integers: Any = np.int64

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that b, h, i and j broadcast to."""
        return np.broadcast_shapes(*(np.shape(x) for x in (self.b, self.h, self.i, self.j)))

    def given(self, name: str) -> Any:
        """Return the field `name`, which the rule needs."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the rule reads {name!r}, which is not given where it is evaluated")
        return value

    def array(self, table: Table) -> Array:
        """Return the array that `table` stands for here."""
        return table.array if self.tables is None else self.tables.get(table, table.array)


Typing = Literal["leaf", "number", "float", "int", "bits", "compare", "where", "cast"]


class Op(NamedTuple):
    """An operation: its typing rule (see `build`), and its value on NumPy arrays."""

    rule: Typing
    evaluate: Callable[..., Any]


def flat_index(shape: tuple[int, ...], indices: Sequence[Array]) -> Array:
    """Return row-major positions of clamped `indices` in an array of `shape`."""
    flat: Array = np.zeros((), np.int64)
    for length, index in zip(shape, indices, strict=True):
        flat = flat * length + np.clip(index, 0, length - 1)
    return flat


def _gather(node: Node, at: At, *indices: Array) -> Array:
    array = at.array(node.payload)
    flat = flat_index(array.shape, indices).astype(np.intp, copy=False)  # `take` refuses wider ones, on 32 bits
    values = array.reshape(-1).take(flat)
    return values.astype({"bool": np.bool_, "int": at.integers, "float": at.dtype}[node.kind], copy=False)


def _constant(node: Node, at: At) -> Any:
    return np.dtype({"bool": np.bool_, "int": at.integers, "float": at.dtype}[node.kind]).type(node.payload)


def truncate(x: Array) -> Array:
    if x.dtype.kind != "f":
        return x.astype(np.int64)
    below, above = x < INT64.min, x >= 2.0**63
    inside = np.where(below | above | np.isnan(x), 0, x).astype(np.int64)
    return np.where(below, INT64.min, np.where(above, INT64.max, inside))


_erf = np.frompyfunc(math.erf, 1, 1)  # NumPy has none


def erf(x: Array) -> Array:
    """Return the error function of floats, exact to float64."""
    return np.asarray(_erf(x), x.dtype)


def _index(name: str) -> Callable[..., Any]:
    return lambda node, at: np.asarray(getattr(at, name), at.integers)


def _named(rule: Typing, *functions: np.ufunc) -> dict[str, Op]:
    def op(function: np.ufunc) -> Op:
        return Op(rule, lambda node, at, *args: function(*args))

    return {function.__name__: op(function) for function in functions}


OPS: dict[str, Op] = {
    **{name: Op("leaf", _index(name)) for name in ("b", "h", "i", "j")},
    "keys": Op("leaf", lambda node, at: np.dtype(at.integers).type(at.given("keys"))),
    **{name: Op("leaf", lambda node, at: np.asarray(at.given(node.op), at.dtype)) for name in ("s", "ds")},
    "number": Op("leaf", _constant),
    "literal": Op("leaf", _constant),
    "dense": Op("leaf", lambda node, at: at.given("dense")(node.payload)),
    "gather": Op("leaf", _gather),
    **_named("number", np.add, np.subtract, np.multiply, np.negative, np.absolute, np.sign, np.minimum, np.maximum),
    **_named("float", np.divide, np.sqrt, np.exp, np.exp2, np.expm1, np.log, np.log2, np.log10, np.log1p),
    **_named("float", np.tanh, np.sinh, np.cosh, np.sin, np.cos, np.tan, np.arctan),
    "erf": Op("float", lambda node, at, x: erf(x)),
    **_named("float", np.floor, np.ceil, np.rint, np.trunc),
    **_named("compare", np.less, np.less_equal, np.equal, np.not_equal),
    **_named("bits", np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert),
    **_named("int", np.floor_divide, np.remainder, np.left_shift, np.right_shift),
    "where": Op("where", lambda node, at, condition, a, b: np.where(condition, a, b)),
    "float": Op("cast", lambda node, at, x: x.astype(at.dtype)),
    "int": Op("cast", lambda node, at, x: truncate(x).astype(at.integers, copy=False)),
}


def evaluate(nodes: Sequence[Node], at: At) -> tuple[Array, ...]:
    """Evaluate `nodes` at `at`, common subexpressions once.

    A result has the shape of its inputs, which may be less than all of `at`. Raises ValueError for a leaf that `at`
    lacks.

    >>> from regard.rules import causal
    >>> n, zero = np.arange(3), np.zeros(1, np.int64)
    >>> evaluate([causal().node], At(zero, zero, n[:, None], n))[0].astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    return Reading(nodes)(at)


class Reading:
    """Nodes that are ordered once, to be evaluated at many indices (see `evaluate`).

    Each value is dropped after its last use.
    """

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = tuple(nodes)
        steps: list[tuple[Node, Callable[..., Any], tuple[Node, ...], list[Node]]] = []
        used = set(self.nodes)
        for node in reversed(order(nodes)):
            last = [x for x in dict.fromkeys(node.args) if x not in used]
            used.update(last)
            steps.append((node, OPS[node.op].evaluate, node.args, last))
        self._steps = steps[::-1]

    def __call__(self, at: At) -> tuple[Array, ...]:
        values: dict[Node, Array] = {}
        with np.errstate(all="ignore"):
            for node, value_of, args, last in self._steps:
                values[node] = value_of(node, at, *(values[arg] for arg in args))
                for x in last:
                    del values[x]
        return tuple(np.asarray(values[node]) for node in self.nodes)


# Building typed nodes


def cast(node: Node, kind: Kind) -> Node:
    """Return `node` as a value of `kind`."""
    if node.kind == kind:
        return node
    if node.op == "number" and kind == "float":
        # A slot is used once, so it takes the kind of its use, and 2 and 2.0 make the same structure.
        return number(float(node.payload))
    if kind == "bool":
        return make("not_equal", "bool", (node, literal(0, node.kind)))
    return make(kind, kind, (node,))


def _widest(nodes: Sequence[Node], least: Kind = "bool") -> Kind:
    return max([least, *(node.kind for node in nodes)], key=KINDS.index)


def build(name: str, *nodes: Node) -> Node:
    """Return the typed node for an operation, or for one that others define.

    Raises TypeError if the kinds of its operands do not fit.
    """
    if name in _DEFINED:
        return _DEFINED[name](*nodes)
    if name in _NEUTRAL and any(node is not _NEUTRAL[name] and node.kind == "bool" for node in nodes):
        nodes = tuple(node for node in nodes if node is not _NEUTRAL[name])
        if len(nodes) == 1:
            return nodes[0]
    rule = OPS[name].rule
    if rule == "where":
        condition, *branches = nodes
        if condition.kind != "bool":
            raise TypeError(f"the condition of where must be boolean, e.g. i > j, not {condition.kind}")
        kind = _widest(branches)
        return make(name, kind, (condition, *(cast(branch, kind) for branch in branches)))
    if rule == "float":
        kind = "float"
    else:
        kind = _widest(nodes, least="bool" if rule == "bits" else "int")
        if rule in ("bits", "int") and kind == "float":
            raise TypeError(f"{name} needs boolean or integer operands, not float; cast with .astype(int)")
    return make(name, "bool" if rule == "compare" else kind, tuple(cast(node, kind) for node in nodes))


# Operands without influence: those of `and_masks` and `or_masks` begin with them.
_NEUTRAL = {"bitwise_and": literal(True, "bool"), "bitwise_or": literal(False, "bool")}


def _power(base: Node, exponent: Node) -> Node:
    if exponent.op == "number" and math.isfinite(exponent.payload):
        return _constant_power(base, exponent)
    if base.op == "number":
        return _exponential(base.payload, exponent)
    raise TypeError("in a rule, ** takes a finite number on one side at least; else use np.exp(y * np.log(x))")


def _constant_power(base: Node, exponent: Node) -> Node:
    power = exponent.payload
    if power < 0:
        return build("divide", literal(1), _constant_power(base, number(-power)))
    if power == int(power):
        return _whole_power(cast(base, _widest([base], "float" if exponent.kind == "float" else "int")), int(power))
    if power == 0.5:
        return build("sqrt", base)
    base = cast(base, "float")
    zero = build("equal", base, literal(0.0))
    x = build("where", zero, literal(1.0), base)  # so that no derivative is 0 / 0
    if 2 * power == int(2 * power):
        value = build("multiply", _whole_power(x, int(power)), build("sqrt", x))
    else:
        value = build("exp", build("multiply", number(power), build("log", x)))
    return build("where", zero, literal(0.0), value)


def _whole_power(base: Node, power: int) -> Node:
    result, square = literal(1, base.kind), base
    while power:
        if power & 1:
            result = square if result.op == "literal" else build("multiply", result, square)
        power >>= 1
        square = build("multiply", square, square) if power else square
    return result


def _exponential(base: Number, exponent: Node) -> Node:
    """Return the power of a number to a traced exponent."""
    if isinstance(base, int) and exponent.kind != "float":
        if base <= 0 or base & (base - 1):
            raise TypeError(
                f"in a rule, {base} ** an integer is not available: the base must be a power of two, or a float"
            )
        bits = build("multiply", cast(exponent, "int"), number(base.bit_length() - 1))
        return build("left_shift", literal(1, "int"), bits)
    if not base > 0:
        raise TypeError(f"in a rule, the base of ** must be positive if the exponent is traced, got {base}")
    return build("exp2", cast(exponent, "float") if base == 2 else build("multiply", exponent, number(math.log2(base))))


def _floored(name: str) -> Callable[[Node, Node], Node]:
    def rule(a: Node, b: Node) -> Node:
        if "float" not in (a.kind, b.kind):
            return make(name, "int", (cast(a, "int"), cast(b, "int")))
        floor = make("floor", "float", (build("divide", a, b),))
        return floor if name == "floor_divide" else build("subtract", a, build("multiply", b, floor))

    return rule


def _rounded(name: str) -> Callable[[Node], Node]:
    return lambda x: make(name, "float", (x,)) if x.kind == "float" else cast(x, "int")


def _logical(name: str) -> Callable[..., Node]:
    return lambda *xs: make(name, "bool", tuple(cast(x, "bool") for x in xs))


def _magnitude(comparison: str, x: Node) -> Node:
    return build(comparison, build("absolute", cast(x, "float")), literal(math.inf))


_DEFINED: dict[str, Callable[..., Node]] = {
    "greater": lambda a, b: build("less", b, a),
    "greater_equal": lambda a, b: build("less_equal", b, a),
    "floor_divide": _floored("floor_divide"),
    "remainder": _floored("remainder"),
    "power": _power,
    "float_power": lambda x, y: _power(cast(x, "float"), y),
    "square": lambda x: build("multiply", x, x),
    "reciprocal": lambda x: build("divide", literal(1), x),
    "positive": lambda x: cast(x, _widest([x], "int")),
    "fabs": lambda x: build("absolute", cast(x, "float")),
    **{name: _rounded(name) for name in ("floor", "ceil", "rint", "trunc")},
    "logical_and": _logical("bitwise_and"),
    "logical_or": _logical("bitwise_or"),
    "logical_xor": _logical("bitwise_xor"),
    "logical_not": _logical("invert"),
    "isnan": lambda x: make("not_equal", "bool", (cast(x, "float"), cast(x, "float"))),
    "isinf": lambda x: _magnitude("equal", x),
    "isfinite": lambda x: _magnitude("less", x),
}
