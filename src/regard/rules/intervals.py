"""Interval arithmetic over index ranges, which bounds the values of an expression.

Bounds are sound for float32 and float64 arithmetic as any engine may round it, and for 64-bit integers that wrap. It is
exact for sums of multiples of indices, with repeated indices combined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from regard.rules.expression import INT64, Array, Node, erf, order, truncate
from regard.rules.extremes import has_nan, look_up, width

LIMIT = 2.0**62  # integers beyond this may have wrapped
SUMS = ("add", "subtract", "negative", "multiply")
TERMS = 16  # of an affine sum; a longer one is bounded as a single value
ARITHMETIC, FUNCTION = 2, 12  # ulps: of + - * / sqrt, and of exp, log, tanh, ..., both the engine's and ours

Bound = tuple[Any, Any]  # least and greatest, both included


class Interval(NamedTuple):
    """Values from `lo` to `hi`, both included; where `nan`, also NaN.

    int64 for integers and booleans (0 and 1), float64 for floats.
    """

    lo: Array
    hi: Array
    nan: Any = False


@dataclass(frozen=True)
class Ranges:
    """Index ranges of tiles, (least, greatest) each, both included.

    Bounds are integers or int64 arrays that broadcast. keys: the number of keys of the whole. dtype: of float
    arithmetic, float32 or float64. dense: None, or a function of a dense array and ranges that returns the least and
    the greatest value there. any_values: integer tables may have any values of their `width`.
    """

    b: Bound = (0, 0)
    h: Bound = (0, 0)
    i: Bound = (0, 0)
    j: Bound = (0, 0)
    keys: int | None = None
    dtype: Any = np.float32
    dense: Any = None
    any_values: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(np.shape(end) for bound in (self.b, self.h, self.i, self.j) for end in bound))

    def take(self, rows: Any, j: Bound) -> "Ranges":
        """Return the ranges of b, h and i at some positions of their arrays, with other keys.

        Bounds that are numbers serve all positions.
        """
        b, h, i = (tuple(end[rows] if np.ndim(end) else end for end in x) for x in (self.b, self.h, self.i))
        return replace(self, b=b, h=h, i=i, j=j)


@dataclass(frozen=True)
class Environment:
    """The state of one pass: index ranges, and the intervals of nodes so far."""

    ranges: Ranges
    intervals: dict[Node, Interval]

    def rounded(self, lo: Array, hi: Array, nan: Any, ulps: int = ARITHMETIC) -> Interval:
        """Widen ends by the effect of rounding, overflow and flushing to zero."""
        info = np.finfo(self.ranges.dtype)
        eps, tiny, top = float(info.eps) * ulps, float(info.tiny), float(info.max)
        lo, hi = np.minimum(lo, top), np.maximum(hi, -top)
        lo, hi = lo - (np.abs(lo) * eps + tiny), hi + (np.abs(hi) * eps + tiny)
        return Interval(np.where(lo < -top, -np.inf, lo), np.where(hi > top, np.inf, hi), nan)


def intervals(nodes: Sequence[Node], ranges: Ranges) -> tuple[Interval, ...]:
    """Bound the values of `nodes` for indices in `ranges`, elementwise.

    Common subexpressions are computed once.
    """
    env = Environment(ranges, {})
    with np.errstate(all="ignore"):
        for x in order(nodes):
            env.intervals[x] = INTERVALS[x.op](env, x, *(env.intervals[arg] for arg in x.args))
    return tuple(env.intervals[node] for node in nodes)


def interval(node: Node, ranges: Ranges) -> Interval:
    """Bound the values of `node` for indices in `ranges`, elementwise.

    >>> from regard.rules import causal
    >>> tiles = Ranges(i=(64, 127), j=(np.array([0, 64, 128]), np.array([63, 127, 191])))
    >>> interval(causal().node, tiles)[:2]
    (array([1, 0, 0]), array([1, 1, 0]))
    """
    return intervals([node], ranges)[0]


def _dense(env: Environment, node: Node) -> Interval:
    bounds = env.ranges.dense
    return Interval(np.asarray(0), np.asarray(1)) if bounds is None else Interval(*bounds(node.payload, env.ranges))


# Integers


def _full(x: Interval) -> Any:
    return (x.lo == INT64.min) & (x.hi == INT64.max)


def _corners(function: np.ufunc, *pairs: tuple[Any, Any]) -> Interval:
    """Return the hull of `function` on some corners; all integers if one may wrap."""
    values = [function(x, y) for x, y in pairs]
    sizes = [np.abs(function(np.asarray(x, np.float64), np.asarray(y, np.float64))) for x, y in pairs]
    wraps = reduce(np.maximum, sizes) >= LIMIT
    lo, hi = reduce(np.minimum, values), reduce(np.maximum, values)
    return Interval(np.where(wraps, INT64.min, lo), np.where(wraps, INT64.max, hi))


def _pairs(a: Interval, b: Interval) -> list[tuple[Any, Any]]:
    """Return the corners of two operands; a constant has one end."""
    return [(x, y) for y in ((b.lo,) if b.lo is b.hi else (b.lo, b.hi)) for x in (a.lo, a.hi)]


def _product(function: np.ufunc, a: Interval, b: Interval) -> Interval:
    return _corners(function, *_pairs(a, b))


class Affine(NamedTuple):
    """A sum of multiples of other nodes and a constant."""

    terms: Mapping[Node, int]
    constant: int

    def plus(self, other: "Affine", factor: int = 1) -> "Affine":
        terms = dict(self.terms)
        for node, c in other.terms.items():
            terms[node] = terms.get(node, 0) + factor * c
        return Affine({node: c for node, c in terms.items() if c}, self.constant + factor * other.constant)


_affine: WeakKeyDictionary[Node, Affine | None] = WeakKeyDictionary()


def affine(node: Node) -> Affine:
    """Return an integer node as an affine sum, in unbounded integers."""
    if node not in _affine:
        for x in order([node], ends=lambda x: x in _affine or x.op not in SUMS):
            if x not in _affine:
                _affine[x] = _to_affine(x)
    return _affine[node] or Affine({node: 1}, 0)


def _to_affine(node: Node) -> Affine | None:
    """Return the affine sum of a node, or None if it is not a sum of few terms.

    In the cache None stands for the node itself, because a cached value must not refer to its key. Terms and factors
    are limited, or the work on a long chain would grow with its square.
    """
    form = _combined(node) if node.kind == "int" else None
    if form is None or len(form.terms) > TERMS or max(map(abs, [form.constant, *form.terms.values()])) >= 2**128:
        return None
    return form


def _combined(node: Node) -> Affine | None:
    nothing = Affine({}, 0)
    if node.op in ("number", "literal"):
        return Affine({}, int(node.payload))
    if node.op not in SUMS:
        return None
    parts = [affine(x) for x in node.args]
    if node.op == "multiply":
        constant, other = sorted(parts, key=lambda part: len(part.terms))
        return None if constant.terms else nothing.plus(other, constant.constant)
    return (nothing if node.op == "negative" else parts[0]).plus(parts[-1], 1 if node.op == "add" else -1)


def _sum(env: Environment, form: Affine) -> tuple[Array, Array, Any]:
    """Return the exact ends of an affine sum, and where they may overflow 64 bits."""
    one = np.ones((), np.int64)
    parts = [(form.constant, Interval(one, one)), *((c, env.intervals[x]) for x, c in form.terms.items())]
    lo: Any = 0
    hi: Any = 0
    size: Any = 0.0
    for c, x in parts:
        ends = (x.lo, x.hi) if c > 0 else (x.hi, x.lo)
        size = size + min(abs(c), LIMIT) * np.maximum(*(np.abs(np.asarray(end, np.float64)) for end in ends))
        factor = np.int64(c if abs(c) < LIMIT else 0)
        lo, hi = lo + factor * ends[0], hi + factor * ends[1]
    return lo, hi, size >= LIMIT


def _repeats(node: Node) -> bool:
    """Return True if both operands contain the same node.

    Then intervals alone are not tight.
    """
    return len(node.args) == 2 and bool(affine(node.args[0]).terms.keys() & affine(node.args[1]).terms.keys())


def _linear(natural: Callable[..., Interval]) -> Callable[..., Interval]:
    """Make the rule of an affine integer operation.

    Sums with repeated nodes are combined before they are bounded.
    """

    def rule(env: Environment, node: Node, *args: Interval) -> Interval:
        if node.kind == "float":
            return _FLOATS[node.op](env, node, *args)
        x = natural(*args)
        if not _repeats(node):
            return x
        # Intermediate sums may wrap: a result that fits into 64 bits is right.
        lo, hi, unsure = _sum(env, affine(node))
        return Interval(np.where(unsure, x.lo, lo), np.where(unsure, x.hi, hi))

    return rule


def _multiplied(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
    if node.kind == "float":
        return _times(env, node, a, b)
    x = _product(np.multiply, a, b)
    return Interval(np.where(_full(x), x.lo, np.maximum(x.lo, 0)), x.hi) if node.args[0] is node.args[1] else x


def _floor_divide(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
    values = [np.floor_divide(x, y) for x, y in _pairs(a, b)]
    lo, hi = reduce(np.minimum, values), reduce(np.maximum, values)
    # A divisor of 0 gives 0, and any other does not increase the absolute value.
    zero, wraps = (b.lo <= 0) & (b.hi >= 0), (a.lo <= -LIMIT) | (a.hi >= LIMIT)
    if np.any(zero):
        reach = np.maximum(np.abs(a.lo), np.abs(a.hi))
        lo, hi = np.where(zero, -reach, lo), np.where(zero, reach, hi)
    return Interval(np.where(wraps, INT64.min, lo), np.where(wraps, INT64.max, hi))


def _remainder(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
    lo, hi = np.minimum(b.lo + 1, 0), np.maximum(b.hi - 1, 0)
    lo = np.where(b.lo > 0, 0, lo)
    hi = np.where(b.hi < 0, 0, hi)
    hi = np.where((a.lo >= 0) & (b.lo > 0), np.minimum(hi, a.hi), hi)
    once = (b.lo == b.hi) & (b.lo != 0) & (a.lo // b.lo == a.hi // b.lo)
    return Interval(np.where(once, a.lo % b.lo, lo), np.where(once, a.hi % b.lo, hi))


def _shift(function: np.ufunc) -> Callable[..., Interval]:
    def rule(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
        x = _product(function, a, Interval(*(np.left_shift(1, np.clip(end, 0, 61)) for end in (b.lo, b.hi))))
        within = (b.lo >= 0) & (b.hi <= 61)
        return Interval(np.where(within, x.lo, INT64.min), np.where(within, x.hi, INT64.max))

    return rule


def _bits(function: np.ufunc) -> Callable[..., Interval]:
    def rule(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
        if node.kind == "bool" and function is not np.bitwise_xor:
            return Interval(function(a.lo, b.lo), function(a.hi, b.hi))
        ones = np.maximum(a.hi, b.hi)
        for shift in (1, 2, 4, 8, 16, 32):
            ones = ones | (ones >> shift)
        whole = (a.lo >= 0) & (b.lo >= 0)
        lo, hi = np.where(whole, 0, INT64.min), np.where(whole, ones, INT64.max)
        if function is np.bitwise_and:
            lo = np.where((a.lo >= 0) | (b.lo >= 0), 0, lo)
            hi = np.minimum(np.where(a.lo >= 0, a.hi, INT64.max), np.where(b.lo >= 0, b.hi, INT64.max))
        points = (a.lo == a.hi) & (b.lo == b.hi)
        value = function(a.lo, b.lo)
        return Interval(np.where(points, value, lo), np.where(points, value, hi))

    return rule


def _invert(env: Environment, node: Node, x: Interval) -> Interval:
    one = 1 if node.kind == "bool" else -1
    return Interval(one - x.hi, one - x.lo)


# Floats


def _limits(function: np.ufunc, pairs: list[tuple[Array, Array]], nan_is: tuple[float, float]) -> tuple[Array, Array]:
    values = [function(x, y) for x, y in pairs]
    lows = [np.where(np.isnan(value), nan_is[0], value) for value in values]
    highs = [np.where(np.isnan(value), nan_is[1], value) for value in values]
    return reduce(np.minimum, lows), reduce(np.maximum, highs)


def _has(x: Interval, value: float) -> Any:
    return (x.lo <= value) & (x.hi >= value)


def _infinite(x: Interval) -> Any:
    return (x.lo == -np.inf) | (x.hi == np.inf)


def _added(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
    lo, hi = a.lo + b.lo, a.hi + b.hi
    nan = (_has(a, np.inf) & _has(b, -np.inf)) | (_has(a, -np.inf) & _has(b, np.inf)) | a.nan | b.nan
    return env.rounded(*_anywhere(lo, hi, nan))


def _negated(env: Environment, node: Node, x: Interval) -> Interval:
    return Interval(-x.hi, -x.lo, x.nan)


def _times(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
    nan = (_has(a, 0) & _infinite(b)) | (_infinite(a) & _has(b, 0)) | a.nan | b.nan
    pairs = [(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo, hi = _limits(np.multiply, pairs, (0.0, 0.0))  # 0 · inf at a corner: its neighbours are 0
    x = env.rounded(lo, hi, nan)
    return x._replace(lo=np.maximum(x.lo, 0)) if node.args[0] is node.args[1] else x


def _divided(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
    zero = _has(b, 0)
    nan = (_has(a, 0) & zero) | (_infinite(a) & _infinite(b)) | a.nan | b.nan
    pairs = [(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo, hi = _limits(np.divide, pairs, (-np.inf, np.inf))
    return env.rounded(np.where(zero, -np.inf, lo), np.where(zero, np.inf, hi), nan)


def _rising(
    function: Callable[..., Any], ulps: int, least: float = -np.inf, floor: float = -np.inf
) -> Callable[..., Interval]:
    """Return the rule of an increasing function.

    The function is defined from `least` on, with values from `floor` on.
    """

    def rule(env: Environment, node: Node, x: Interval) -> Interval:
        lo, hi = function(np.maximum(x.lo, least)), function(np.maximum(x.hi, least))
        nan = x.nan | (x.lo < least)
        if not ulps:
            return Interval(lo, hi, nan)
        y = env.rounded(lo, hi, nan, ulps)
        return y._replace(lo=np.maximum(y.lo, floor))

    return rule


def _even(x: Interval) -> tuple[Array, Array]:
    """Return the least and greatest absolute value."""
    lo = np.where(_has(x, 0), 0, np.minimum(np.abs(x.lo), np.abs(x.hi)))
    return lo, np.maximum(np.abs(x.lo), np.abs(x.hi))


def _cosh(env: Environment, node: Node, x: Interval) -> Interval:
    lo, hi = _even(x)
    return env.rounded(np.cosh(lo), np.cosh(hi), x.nan, FUNCTION)


def _periodic(env: Environment, node: Node, x: Interval) -> Interval:
    reach = np.full(np.shape(x.lo), np.inf if node.op == "tan" else 1.0)
    return env.rounded(-reach, reach, x.nan | _infinite(x), FUNCTION)


def _absolute(env: Environment, node: Node, x: Interval) -> Interval:
    lo, hi = _even(x)
    if node.kind == "int":  # the least integer is its own absolute value
        wraps = x.lo == INT64.min
        return Interval(np.where(wraps, INT64.min, lo), np.where(wraps, INT64.max, hi))
    return Interval(lo, hi, x.nan)


# Either


def _compare(env: Environment, node: Node, a: Interval, b: Interval) -> Interval:
    nan = a.nan | b.nan
    same = node.args[0] is node.args[1]
    if node.args[0].kind == "int" and _repeats(node):
        lo, hi, unsure = _sum(env, affine(node.args[0]).plus(affine(node.args[1]), -1))
        unsure = unsure | _full(a) | _full(b)
        a = Interval(np.where(unsure, a.lo, lo), np.where(unsure, a.hi, hi))
        b = Interval(np.where(unsure, b.lo, 0), np.where(unsure, b.hi, 0))
    if node.op in ("less", "less_equal"):
        holds = getattr(np, node.op)
        return Interval((holds(a.hi, b.lo) & ~np.asarray(nan)) * 1, holds(a.lo, b.hi) * 1)
    surely = (same | ((a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo))) & ~np.asarray(nan)
    possibly = (a.lo <= b.hi) & (b.lo <= a.hi)
    return Interval(surely * 1, possibly * 1) if node.op == "equal" else Interval(1 - possibly, 1 - surely)


def _where(env: Environment, node: Node, c: Interval, a: Interval, b: Interval) -> Interval:
    def pick(x: Any, y: Any, either: Any) -> Any:
        return np.where(c.lo == 1, x, np.where(c.hi == 0, y, either))

    lo, hi = pick(a.lo, b.lo, np.minimum(a.lo, b.lo)), pick(a.hi, b.hi, np.maximum(a.hi, b.hi))
    return Interval(lo, hi, pick(a.nan, b.nan, a.nan | np.asarray(b.nan)))


def _to_float(env: Environment, node: Node, x: Interval) -> Interval:
    # Rounding is monotonic, so rounded ends bound rounded values.
    return Interval(*(np.asarray(end).astype(env.ranges.dtype).astype(np.float64) for end in (x.lo, x.hi)))


def _to_int(env: Environment, node: Node, x: Interval) -> Interval:
    lo, hi = truncate(np.asarray(x.lo)), truncate(np.asarray(x.hi))
    return Interval(np.where(x.nan, np.minimum(lo, 0), lo), np.where(x.nan, np.maximum(hi, 0), hi))


def _constant(env: Environment, node: Node) -> Interval:
    if node.kind != "float":
        return Interval(*(np.asarray(node.payload, np.int64),) * 2)
    value = np.asarray(node.payload, env.ranges.dtype).astype(np.float64)
    return _anywhere(value, value, np.isnan(value))


def _gather(env: Environment, node: Node, *indices: Interval) -> Interval:
    table = node.payload
    if table.known is None:
        ends = (-np.inf, np.inf) if table.kind == "float" else (INT64.min, INT64.max)
        low, high = (0, 1) if table.kind == "bool" else ends
        return Interval(np.asarray(low), np.asarray(high), table.kind == "float")
    if env.ranges.any_values and table.kind == "int":
        limit = 2 ** (width(table) - 1)
        return Interval(np.asarray(-limit), np.asarray(limit - 1))
    lo = hi = table.array
    if indices:
        inside = [np.clip(end, 0, length - 1) for length, x in zip(table.shape, indices, strict=True) for end in x[:2]]
        shape = np.broadcast_shapes(*map(np.shape, inside))
        flat = [np.broadcast_to(end, shape).reshape(-1) for end in inside]
        lo, hi = (end.reshape(shape) for end in look_up(table, [*zip(flat[::2], flat[1::2], strict=True)]))
    if table.kind != "float":
        return Interval(lo.astype(np.int64), hi.astype(np.int64))
    lo, hi = (end.astype(env.ranges.dtype).astype(np.float64) for end in (lo, hi))
    return _anywhere(lo, hi, has_nan(table))


def _anywhere(lo: Array, hi: Array, nan: Any) -> Interval:
    """Return an interval that may contain NaN, with NaN ends as unknown."""
    return Interval(np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi), nan)


def _index(env: Environment, node: Node) -> Interval:
    lo, hi = getattr(env.ranges, node.op)
    return Interval(np.asarray(lo, np.int64), np.asarray(hi, np.int64))


def _keys(env: Environment, node: Node) -> Interval:
    if env.ranges.keys is None:
        raise ValueError("the rule reads 'keys', which is not given where it is bounded")
    return Interval(*(np.asarray(env.ranges.keys, np.int64),) * 2)


def _score(env: Environment, node: Node) -> Interval:
    return Interval(np.asarray(-np.inf), np.asarray(np.inf), True)


_FLOATS: dict[str, Callable[..., Interval]] = {
    "add": _added,
    "subtract": lambda env, node, a, b: _added(env, node, a, _negated(env, node, b)),
    "negative": _negated,
}

INTERVALS: dict[str, Callable[..., Interval]] = {
    **dict.fromkeys("bhij", _index),
    "keys": _keys,
    "s": _score,
    "ds": _score,
    "number": _constant,
    "literal": _constant,
    "dense": _dense,
    "gather": _gather,
    "add": _linear(lambda a, b: _corners(np.add, (a.lo, b.lo), (a.hi, b.hi))),
    "subtract": _linear(lambda a, b: _corners(np.subtract, (a.lo, b.hi), (a.hi, b.lo))),
    "multiply": _multiplied,
    "negative": _linear(lambda x: _corners(np.multiply, (x.hi, np.int64(-1)), (x.lo, np.int64(-1)))),
    "absolute": _absolute,
    "sign": lambda env, node, x: Interval(np.sign(x.lo), np.sign(x.hi), x.nan),
    "minimum": lambda env, node, a, b: Interval(np.minimum(a.lo, b.lo), np.minimum(a.hi, b.hi), a.nan | b.nan),
    "maximum": lambda env, node, a, b: Interval(np.maximum(a.lo, b.lo), np.maximum(a.hi, b.hi), a.nan | b.nan),
    "divide": _divided,
    "sqrt": _rising(np.sqrt, ARITHMETIC, least=0.0, floor=0.0),
    "exp": _rising(np.exp, FUNCTION, floor=0.0),
    "exp2": _rising(np.exp2, FUNCTION, floor=0.0),
    "expm1": _rising(np.expm1, FUNCTION),
    "log": _rising(np.log, FUNCTION, least=0.0),
    "log2": _rising(np.log2, FUNCTION, least=0.0),
    "log10": _rising(np.log10, FUNCTION, least=0.0),
    "log1p": _rising(np.log1p, FUNCTION, least=-1.0),
    "tanh": _rising(np.tanh, FUNCTION),
    "sinh": _rising(np.sinh, FUNCTION),
    "arctan": _rising(np.arctan, FUNCTION),
    "erf": _rising(erf, FUNCTION),
    "cosh": _cosh,
    **dict.fromkeys(("sin", "cos", "tan"), _periodic),
    "floor": _rising(np.floor, 0),
    "ceil": _rising(np.ceil, 0),
    "rint": _rising(np.rint, 0),
    "trunc": _rising(np.trunc, 0),
    **dict.fromkeys(("less", "less_equal", "equal", "not_equal"), _compare),
    "bitwise_and": _bits(np.bitwise_and),
    "bitwise_or": _bits(np.bitwise_or),
    "bitwise_xor": _bits(np.bitwise_xor),
    "invert": _invert,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "left_shift": _shift(np.multiply),
    "right_shift": _shift(np.floor_divide),
    "where": _where,
    "float": _to_float,
    "int": _to_int,
}
