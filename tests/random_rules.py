"""Random well-typed expressions, for the property tests of rules."""

from random import Random

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
    lambda x: x.astype(float).erf(),
    lambda x: x**1.5,
    lambda x: 1.7 ** (x * 0.1),
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
INTEGERS = [
    *range(-9, 10),
    *range(-9, 10),
    63,
    64,
    100,
    2**31,
    2**25 + 1,
    2**40 + 3,
    2**62,
    2**63 - 1,
    -(2**62),
    -(2**63),
]
FLOATS = [*np.linspace(-4, 4, 33).tolist(), 0.1, -0.3, np.inf, -np.inf, np.nan, 1e30, -3e38, 1e-30]
SHAPES = [(1,), (5,), (70,), (300,), (3, 7), (2, 200), (2, 2, 9)]


def leaf(name: str) -> Traced:
    return Traced(make(name, "float" if name == "s" else "int"))


def random_table(random: Random, kind: str) -> Table:
    shape, generator = random.choice(SHAPES), np.random.default_rng(random.randrange(100))
    if kind == "bool":
        return Table(generator.random(shape) < random.choice([0.1, 0.5, 1.0]))
    if kind == "int":
        values = generator.integers(-5, 60, shape)
        return Table(np.sort(values) if random.random() < 0.5 else values)
    values = generator.normal(size=shape).astype(random.choice(["float16", "float32", "float64"]))
    values.reshape(-1)[random.randrange(values.size)] = random.choice([0.0, np.nan, np.inf, -np.inf])
    return Table(values)


def expression(random: Random, kind: str, depth: int, score: bool = False) -> Traced:
    """A traced value of `kind`, operations at most `depth` deep; with `score`, it may read s."""

    def of(kind: str) -> Traced:
        return expression(random, kind, depth - 1, score)

    pick = random.choice
    choice = random.randrange(8) if depth else 0
    if choice == 6:
        return where(of("bool"), of(kind), of(kind))
    if choice == 7:
        table = random_table(random, kind)
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
            return leaf(pick("bhijijij")) if random.random() < 0.7 else leaf("i") * 0 + pick(INTEGERS)
        if choice == 1:
            return pick([np.abs, np.negative, np.sign, np.invert])(of("int"))
        if choice == 2:
            return pick([*BITS, np.left_shift, np.right_shift])(of("int"), of("int"))
        if choice == 3:
            return of(pick(["bool", "float"])).astype(int)
        return pick(ARITHMETIC)(of("int"), pick(INTEGERS) if choice == 4 else of("int"))
    if choice == 0:
        return leaf("s") if score and random.random() < 0.5 else leaf(pick("ij")).astype(float) * pick(FLOATS)
    if choice in (1, 2):
        return pick(FUNCTIONS)(of("float"))
    if choice == 3:
        return of(pick(["bool", "int"])).astype(float)
    return pick([*ARITHMETIC, np.divide])(of("float"), pick(FLOATS) if choice == 4 else of("float"))


def nodes(*kinds: str, score: bool = False) -> st.SearchStrategy[Node]:
    """Expressions of `kinds`. The seed does not shrink, the depth does."""
    return st.builds(
        lambda kind, depth, seed: expression(Random(seed), kind, depth, score).node,
        st.sampled_from(kinds),
        st.integers(0, 4),
        st.integers(0, 2**32 - 1),
    )
