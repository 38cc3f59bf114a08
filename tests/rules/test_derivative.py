"""Derivatives of rules: against finite differences in extended precision, at kinks, behind masks; their transpose."""

import numpy as np
import pytest
from hypothesis import given, settings

from random_rules import nodes
from regard.rules import (
    At,
    Table,
    as_score,
    evaluate,
    partials,
    relative,
    scatter,
    score,
    softcap,
    tangent,
    temperature,
    where,
)
from regard.rules.derivative import TANGENTS, _differentiate
from regard.rules.expression import OPS, literal, make, order

REAL = np.longdouble
STEP = REAL(1e-5)
N = 6
SCORES = np.linspace(-1, 1, N * N).reshape(1, 1, N, N).astype(REAL)
B, H, I, J = (np.arange(n).reshape(-1, *(1,) * k) for n, k in ((1, 3), (2, 2), (N, 1), (N, 0)))

UNARY = {
    function.__name__: function
    for function in (
        *(np.negative, np.absolute, np.sign, np.sqrt, np.exp, np.exp2, np.expm1, np.log, np.log2, np.log10, np.log1p),
        *(np.tanh, np.sinh, np.cosh, np.sin, np.cos, np.tan, np.arctan, np.floor, np.ceil, np.rint, np.trunc),
    )
}
POSITIVE = {"sqrt", "log", "log2", "log10"}
CASES = {
    **{name: lambda x, y, k, f=f: f(x) for name, f in UNARY.items()},
    **{f"{name} of -x": lambda x, y, k, f=f: f(-x) for name, f in UNARY.items() if name not in POSITIVE},
    "add": lambda x, y, k: x * x + y,
    "subtract": lambda x, y, k: x - y * y,
    "multiply": lambda x, y, k: x * y,
    "divide": lambda x, y, k: x / y,
    "divide by a number": lambda x, y, k: x * x / 3.0,
    "minimum": lambda x, y, k: np.minimum(x * x, y) + np.minimum(y, x * x),
    "maximum": lambda x, y, k: np.maximum(x * x, y) + np.maximum(y, x * x),
    "where": lambda x, y, k: where(k > 0, x * x, y * x),
    "float": lambda x, y, k: x * y * k,
    "floor_divide": lambda x, y, k: (4 * x) // 3.0 + x * x,
    "remainder": lambda x, y, k: x * x % 0.3,
    "power": lambda x, y, k: x**3 + x**0.5 + y**-2,
    "other powers": lambda x, y, k: x**1.5 + y**0.3 + x**-2.5 + 2**x + 0.7**y,
    "erf": lambda x, y, k: x.erf() + (2 * y).erf(),
    "clip": lambda x, y, k: np.clip(x * x, 0.1, y),
    "square and reciprocal": lambda x, y, k: np.square(x) * np.reciprocal(y),
}


def rule_and_tables(case):
    """A rule in which s and two tables meet before the operation, inside its domain and away from its kinks."""
    t, u = Table(np.array([0.5, 0.9])), Table(np.linspace(0.4, 0.8, 5))

    def rule(s, b, h, i, j):
        x = 0.75 + 0.1 * s * t[h] + 0.02 * u[i - j + 2]
        return CASES[case](x, 0.7 - 0.3 * s * t[h] * u[i - j + 2], i - j)

    return score(rule).node, t, u


def at(ds=None, s=SCORES, **tables):
    return At(B, H, I, J, s=s, ds=ds, dtype=REAL, **tables)


def differences(node, t, u):
    """Central differences of `node` along one direction in s and both tables, and that direction."""
    random = np.random.default_rng(3)
    ds = random.normal(size=SCORES.shape).astype(REAL)
    directions = {table: random.normal(size=table.shape).astype(REAL) for table in (t, u)}

    def value(step):
        tables = {table: table.array + step * directions[table] for table in (t, u)}
        return evaluate([node], at(s=SCORES + step * ds, tables=tables))[0]

    return (value(STEP) - value(-STEP)) / (2 * STEP), ds, {t: Table(directions[t]), u: Table(directions[u])}


def agree(found, expected):
    # Central differences: third derivatives of order 10 times STEP squared, and rounding divided by STEP.
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-7, atol=1e-7)


def test_every_operation_that_gives_a_float_has_a_derivative_and_a_case():
    floats = {name for name, op in OPS.items() if op.rule in ("number", "float", "where")} | {"float"}
    assert TANGENTS.keys() == floats
    assert floats <= CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_first_derivatives(case):
    node, t, u = rule_and_tables(case)
    expected, ds, directions = differences(node, t, u)
    agree(evaluate([tangent(node, directions)], at(ds))[0] * np.ones((1, 2, N, N)), expected)

    d_ds, d_tables = partials(node)
    assert {leaf.payload for leaf in d_tables} == {t, u}
    total = evaluate([d_ds], at())[0] * ds
    for leaf, slope in d_tables.items():
        (along,) = evaluate([leaf], at(tables={table: x.array for table, x in directions.items()}))
        total = total + along * evaluate([slope], at())[0]
    agree(total * np.ones((1, 2, N, N)), expected)


@pytest.mark.parametrize("case", CASES)
def test_second_derivatives_are_tangents_of_first_ones(case):
    node, t, u = rule_and_tables(case)
    d_ds, d_tables = partials(node)
    for first in (d_ds, *d_tables.values()):
        expected, ds, directions = differences(first, t, u)
        agree(evaluate([tangent(first, directions)], at(ds))[0] * np.ones((1, 2, N, N)), expected)


def test_derivatives_of_composed_scores():
    t, u = Table(np.array([1.5, 0.9])), Table(np.linspace(0.4, 0.8, 5))
    node = as_score([temperature(t), softcap(2.0), relative(u), softcap(t)]).node
    expected, ds, directions = differences(node, t, u)
    agree(evaluate([tangent(node, directions)], at(ds))[0], expected)
    for first in (partials(node)[0], *partials(node)[1].values()):
        expected, ds, directions = differences(first, t, u)
        agree(evaluate([tangent(first, directions)], at(ds))[0], expected)


def d_ds(function, values):
    """First and second derivative of a function of s alone, at values."""
    s = np.array(values, np.float64)
    place = At(0, 0, 0, 0, s=s, ds=np.ones_like(s))
    first, _ = partials(score(lambda s, b, h, i, j: function(s)).node)
    second = tangent(first)
    return tuple(np.broadcast_to(x, s.shape).tolist() for x in evaluate([first, second], place))


@pytest.mark.parametrize(
    ("function", "value", "slope"),
    [
        (lambda s: np.minimum(s, 0.0), 0.0, 1.0),
        (lambda s: np.minimum(0.0, s), 0.0, 0.0),
        (lambda s: np.maximum(s, 0.0), 0.0, 1.0),
        (lambda s: np.maximum(0.0, s), 0.0, 0.0),
        (abs, 0.0, 0.0),
        (abs, -2.0, -1.0),
        (lambda s: s**1.5, 0.0, 0.0),
        (lambda s: s**0.7, 0.0, 0.0),
        (lambda s: s**2.5 + 3 * s, 0.0, 3.0),
        (lambda s: where(s >= 1.0, 3 * s, 5 * s), 1.0, 3.0),
        (np.floor, 1.0, 0.0),
        (np.sign, 0.0, 0.0),
        (lambda s: s * s.astype(int), 2.5, 2.0),
        (lambda s: (s > 1) * 3.0 + s, 1.0, 1.0),
    ],
)
def test_convention_at_kinks(function, value, slope):
    first, second = d_ds(function, [value])
    assert first == [slope]
    assert second == [0.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda s: where(s > 0, np.sqrt(s), 0.0),
        lambda s: where(s > 0, np.log(s), 0.0) + where(s > 1, np.log(s), 0.0),
        lambda s: where(s > 0, where(s > 1, 1 / np.sqrt(s), s), 0.0),
        lambda s: where(s > 0, s * np.sqrt(s) / s, 0.0) * 2.0,
    ],
)
def test_a_branch_not_taken_has_no_influence(function):
    first, second = d_ds(function, [-1.0, -0.0, 0.0])
    assert first == [0.0, 0.0, 0.0]
    assert second == [0.0, 0.0, 0.0]


def test_partials_of_what_does_not_vary():
    table = Table(np.array([1, 2]))
    first, in_tables = partials(score(lambda s, b, h, i, j: table[h] + 0.0 * j).node)
    assert repr(first) == "0.0"
    assert in_tables == {}


def test_tangent_of_a_table_that_is_not_mapped_is_zero():
    table = Table(np.array([1.0, 2.0]))
    node = score(lambda s, b, h, i, j: table[h] * s).node
    assert repr(tangent(node)) == "multiply(table(2,)[h], ds)"
    other = Table(np.array([5.0, 7.0]))
    assert repr(tangent(node, {table: other})) == "add(multiply(table(2,)[h], s), multiply(table(2,)[h], ds))"


@pytest.mark.parametrize(
    "look",
    [
        lambda t, b, h, i, j: t((7,))[i - j + 3],
        lambda t, b, h, i, j: t((2,))[h],
        lambda t, b, h, i, j: t((2, 5))[h, j],
        lambda t, b, h, i, j: t((3, 2))[i // 2, b],
        lambda t, b, h, i, j: t((1,))[j],
        lambda t, b, h, i, j: t(())[()],
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
def test_scatter_is_the_transpose_of_reading(look, dtype):
    random = np.random.default_rng(5)

    def table(shape):
        return Table(random.integers(-9, 9, shape).astype(dtype))

    node = score(lambda s, b, h, i, j: look(table, b, h, i, j)).node
    place = At(np.arange(2)[:, None, None, None], H, I, J, dtype=dtype)
    (values,) = evaluate([node], place)
    weights = random.integers(-9, 9, (2, 2, N, N)).astype(dtype)
    out = np.zeros(node.payload.shape, dtype)
    scatter(node, weights, place, out)
    # Small integers: the sums are exact.
    assert (values * weights).sum() == (out * node.payload.array).sum()
    before = out.copy()
    scatter(node, np.ones((1, 1, 1, 1), dtype), place, out)
    assert (out - before).sum() == weights.size


def test_scatter_adds_in_the_dtype_of_out_and_in_order():
    node = score(lambda s, b, h, i, j: Table(np.zeros(3))[i - j]).node
    values = np.random.default_rng(0).normal(size=(1, 2, N, N)).astype(np.float32)
    results = []
    for _ in range(2):
        out = np.zeros(3, np.float64)
        scatter(node, values, At(B, H, I, J), out)
        results.append(out)
    assert results[0].tobytes() == results[1].tobytes()
    np.testing.assert_allclose(results[0].sum(), values.astype(np.float64).sum(), rtol=1e-14)
    with pytest.raises(ValueError, match="contiguous"):
        scatter(node, values, At(B, H, I, J), np.zeros(6)[::2])


def test_scatter_of_nothing():
    node = score(lambda s, b, h, i, j: Table(np.zeros(2))[h]).node
    out = np.zeros(2)
    scatter(node, np.zeros((1, 2, N, 0)), At(B, H, I, J[:0]), out)
    assert out.tolist() == [0.0, 0.0]


def test_a_table_of_one_number_has_a_derivative():
    factor = Table(np.array(3.0))
    rule = score(lambda s, b, h, i, j: s * factor[()])
    d_ds, d_tables = partials(rule.node)
    assert (d_ds.op, d_ds.payload) == ("gather", factor)
    assert [str(slope) for slope in d_tables.values()] == ["s"]


def sum_of_readings(n):
    t = Table(np.zeros((2, n)))
    return score(lambda s, b, h, i, j: sum((t[h, k] * (i - j) for k in range(n)), s))


@settings(deadline=None, max_examples=settings().max_examples // 2)
@given(nodes("float", score=True))
def test_partials_are_those_of_a_pass_for_each_leaf(node):
    d_ds, d_tables = partials(node)
    found = {make("s", "float"): d_ds, **d_tables}
    readings = {x for x in order([node]) if x.op == "gather" and x.kind == "float"}
    assert found.keys() == {make("s", "float")} | readings
    for x, slope in found.items():
        assert slope is _differentiate(node, lambda y, x=x: literal(1.0 if y is x else 0.0))


def test_partials_of_a_sum_take_one_step_for_each_reading(monkeypatch):
    """A pass over the rule for each reading would take 3 · n² steps."""
    n, steps = 100, []
    node = sum_of_readings(n).node
    for name, rule in TANGENTS.items():
        monkeypatch.setitem(TANGENTS, name, lambda *args, rule=rule: steps.append(1) or rule(*args))
    d_ds, d_tables = partials(node)
    assert str(d_ds) == "1.0"
    assert len(d_tables) == n
    assert len(steps) < 3 * n
