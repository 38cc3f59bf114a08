"""Random well-typed expressions, for the property tests of rules."""

import numpy as np
from hypothesis import strategies as st

from regard.rules import Node, Table, Traced, where
from regard.rules.expression import make

ARITHMETIC = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    np.minimum,
    np.maximum,
    lambda x, y: x // y,
    lambda x, y: x % y,
]
COMPARISONS = [
    lambda x, y: x < y,
    lambda x, y: x <= y,
    lambda x, y: x > y,
    lambda x, y: x >= y,
    lambda x, y: x == y,
    lambda x, y: x != y,
]
BITS = [lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y]
FUNCTIONS = [
    np.exp,
    np.exp2,
    np.expm1,
    np.log,
    np.log2,
    np.log10,
    np.log1p,
    np.sqrt,
    np.tanh,
    np.sinh,
    np.cosh,
    np.sin,
    np.cos,
    np.tan,
    np.arctan,
    np.floor,
    np.ceil,
    np.rint,
    np.trunc,
    np.sign,
    np.abs,
    np.negative,
    np.square,
    np.reciprocal,
]
INTEGERS = st.integers(-9, 9) | st.sampled_from([63, 64, 100, 2**31, 2**40, 2**62, 2**63 - 1, -(2**62), -(2**63)])
FLOATS = st.floats(-4, 4, width=32) | st.sampled_from([0.0, np.inf, -np.inf, np.nan, 1e30, -3e38, 1e-30])


def leaf(name: str) -> Traced:
    return Traced(make(name, "float" if name == "s" else "int"))


@st.composite
def tables(draw, kind):
    shape = draw(st.sampled_from([(1,), (5,), (70,), (300,), (3, 7), (2, 200), (2, 2, 9)]))
    seed = draw(st.integers(0, 99))
    random = np.random.default_rng(seed)
    if kind == "bool":
        return Table(random.random(shape) < draw(st.sampled_from([0.1, 0.5, 1.0])))
    if kind == "int":
        return Table(np.sort(random.integers(-5, 60, shape)) if draw(st.booleans()) else random.integers(-5, 60, shape))
    values = random.normal(size=shape).astype(draw(st.sampled_from(["float16", "float32", "float64"])))
    values.reshape(-1)[seed % values.size] = draw(st.sampled_from([0.0, np.nan, np.inf, -np.inf]))
    return Table(values)


@st.composite
def expressions(draw, kind, depth, score=False):
    """A traced value of `kind`, operations at most `depth` deep; with `score`, it may read s."""

    def of(kind):
        return draw(expressions(kind, depth - 1, score))

    def pick(choices):
        return draw(st.sampled_from(choices))

    choice = draw(st.integers(0, 7)) if depth else 0
    if choice == 6:
        return where(of("bool"), of(kind), of(kind))
    if choice == 7:
        table = draw(tables(kind))
        return table[tuple(of("int") for _ in table.shape)]
    if kind == "bool":
        if choice == 0:
            return pick(COMPARISONS)(leaf(pick("bhij")), leaf(pick("ij")))
        if choice == 1:
            return ~of("bool")
        if choice == 2:
            return pick([np.isnan, np.isinf, np.isfinite])(of("float"))
        if choice == 3:
            return pick(BITS)(of("bool"), of("bool"))
        operands = pick(["int", "float"])
        return pick(COMPARISONS)(of(operands), of(operands))
    if kind == "int":
        if choice == 0:
            return leaf(pick("bhijijij")) if pick([True, True, False]) else leaf("i") * 0 + draw(INTEGERS)
        if choice == 1:
            return pick([np.abs, np.negative, np.sign, np.invert])(of("int"))
        if choice == 2:
            return pick([*BITS, np.left_shift, np.right_shift])(of("int"), of("int"))
        if choice == 3:
            return of(pick(["bool", "float"])).astype(int)
        return pick(ARITHMETIC)(of("int"), draw(INTEGERS) if choice == 4 else of("int"))
    if choice == 0:
        return leaf("s") if score and pick([True, False]) else leaf(pick("ij")).astype(float) * draw(FLOATS)
    if choice in (1, 2):
        return pick(FUNCTIONS)(of("float"))
    if choice == 3:
        return of(pick(["bool", "int"])).astype(float)
    return pick([*ARITHMETIC, np.divide])(of("float"), draw(FLOATS) if choice == 4 else of("float"))


def nodes(kind, depth=4, score=False) -> st.SearchStrategy[Node]:
    return expressions(kind, depth, score).map(lambda value: value.node)
