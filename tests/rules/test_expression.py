"""Tracing: what rules may say, what it means, and what they are told when they may not."""

import copy
import math
import pickle
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings

import regard
from random_rules import nodes
from regard.rules import At, Program, RuleText, Table, Traced, as_mask, evaluate, reads, table, where
from regard.rules.expression import MASK_LEAVES, OPS, SCORE_LEAVES, build, erf, make, number, order
from regard.rules.tracing import UFUNCS, trace

I, J = np.arange(-3, 5)[:, None], np.arange(6)
PLACE = At(np.zeros((1, 1, 1, 1), int), np.arange(2)[:, None, None], I, J)


def value(function, dtype=np.float64, s=None, **given):
    """What a rule of (b, h, i, j), or (s, b, h, i, j) if `s` is given, evaluates to."""
    leaves = MASK_LEAVES if s is None else SCORE_LEAVES
    traced = function(*(Traced(make(leaf, "float" if leaf == "s" else "int")) for leaf in leaves))
    s = None if s is None else np.asarray(s, dtype)
    return evaluate([traced.node], At(PLACE.b, PLACE.h, I, J, s=s, dtype=dtype, **given))[0]


# Meaning

INTEGERS = [
    lambda i, j: i + j,
    lambda i, j: 3 - i,
    lambda i, j: i * j * -2,
    lambda i, j: -i + abs(i),
    lambda i, j: i // 3 + (-j) // 4,
    lambda i, j: i % 3 + (i - j) % -4,
    lambda i, j: 17 // (j + 1) - 17 % (j + 1),
    lambda i, j: i**3 + j**0 + 2 * i**1,
    lambda i, j: (i & 5) | (j ^ 3),
    lambda i, j: ~i + (i << 2) + (i >> 1),
    lambda i, j: np.minimum(i, j) - np.maximum(i, 2),
    lambda i, j: np.sign(i) + np.square(j) + np.negative(i),
    lambda i, j: np.clip(i, -1, 2) + np.clip(j, None, 3),
    lambda i, j: np.abs(i) + +j,
    lambda i, j: np.floor(i) + np.rint(j),
    lambda i, j: 5 & (i | 1),
    lambda i, j: np.int32(3) * i - np.array(2) * j,
]
BOOLEANS = [
    lambda i, j: i < j,
    lambda i, j: i >= 2,
    lambda i, j: 3 + 0 * i > j,
    lambda i, j: (i != j) & ~(i == 2),
    lambda i, j: (i <= j) | (j > 4) ^ (i < 0),
    lambda i, j: np.logical_and(i, j) | np.logical_not(i),
    lambda i, j: np.greater_equal(i, j) & np.less(i, 4),
    lambda i, j: (i < j) == (j < 3),
    lambda i, j: np.isfinite(i / j) & ~np.isnan(i / j) | np.isinf(j / i),
    lambda i, j: (i % 2).astype(bool),
]


@pytest.mark.parametrize("function", INTEGERS)
def test_integers_as_in_numpy(function):
    with np.errstate(all="ignore"):
        expected = function(I, J)
    found = value(lambda b, h, i, j: function(i, j))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


@pytest.mark.parametrize("function", BOOLEANS)
def test_booleans_as_in_numpy(function):
    with np.errstate(all="ignore"):
        expected = function(I, J)
    found = value(lambda b, h, i, j: function(i, j))
    assert found.dtype == np.bool_
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.rule == "float"])
def test_floats_as_in_numpy(name, dtype):
    function = erf if name == "erf" else getattr(np, name)
    s = np.array([0.5, -1.5, 0.0, np.inf, np.nan, 2.5], dtype)
    arguments = (s, s[::-1]) if name == "divide" else (s,)
    with np.errstate(all="ignore"):
        expected = function(*arguments)
    other = table(s[::-1])
    others = {"divide": lambda s, j: function(s, other[j]), "erf": lambda s, j: s.erf()}
    found = value(lambda s, b, h, i, j: others.get(name, lambda s, j: function(s))(s, j), dtype, s)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_stay_in_the_dtype_of_the_call(dtype):
    wide, narrow, flags = table(np.array([0.1, 0.2])), table(np.array([0.5], np.float16)), table(np.array([True]))

    def rule(s, b, h, i, j):
        x = s * 0.1 + 2 + (i - j) * np.float64(0.3) + wide[h] + narrow[h] - flags[h] + (i < j)
        return where(i > j, x / 3, i / 7) + (i - j).astype(np.float64) + s.astype(float)

    node = trace(rule, SCORE_LEAVES)
    place = At(PLACE.b, PLACE.h, I, J, s=np.ones((8, 6), dtype), dtype=dtype)
    for part in order([node]):
        (found,) = evaluate([part], place)
        assert found.dtype == {"float": dtype, "int": np.int64, "bool": np.bool_}[part.kind], part
    assert node.kind == "float"


def test_division_by_zero_is_defined():
    assert value(lambda b, h, i, j: i // (j * 0)).tolist() == np.zeros((8, 6)).tolist()
    assert value(lambda b, h, i, j: i % (j * 0)).tolist() == np.zeros((8, 6)).tolist()
    assert value(lambda b, h, i, j: i / (j * 0)).tolist()[0] == [-np.inf] * 6


def test_floored_floats():
    s = np.array([7.5, -7.5, 0.0, -0.5, 2.0, 1e9])
    np.testing.assert_array_equal(value(lambda s, b, h, i, j: s // 2, s=s), np.floor(s / 2))
    np.testing.assert_array_equal(value(lambda s, b, h, i, j: s % 2.0, s=s), s - 2 * np.floor(s / 2))


def test_casts_to_int_saturate():
    s = np.array([2.9, -2.9, np.nan, np.inf, -1e30, -(2.0**63)])
    assert value(lambda s, b, h, i, j: s.astype(int), s=s).tolist() == [2, -2, 0, 2**63 - 1, -(2**63), -(2**63)]
    assert value(lambda s, b, h, i, j: s.astype(bool).astype(int), s=s).tolist() == [1] * 6


def test_powers():
    s = np.array([1.5, -2.0, 0.5, 3.0, -1.0, 0.25])
    np.testing.assert_array_equal(value(lambda s, b, h, i, j: s**5, s=s), s * (s * s) * (s * s))
    np.testing.assert_array_equal(value(lambda s, b, h, i, j: s**-2, s=s), 1 / (s * s))
    np.testing.assert_array_equal(value(lambda s, b, h, i, j: abs(s) ** 0.5, s=s), np.sqrt(np.abs(s)))
    assert value(lambda b, h, i, j: j**2.0).dtype == np.float64
    x = np.abs(s)
    for power in (0.3, 1.7, -0.4, -1.5, 2.5):
        np.testing.assert_allclose(value(lambda s, b, h, i, j, power=power: abs(s) ** power, s=s), x**power, rtol=1e-15)
        zero = value(lambda s, b, h, i, j, power=power: (0 * s) ** power, s=s)
        np.testing.assert_array_equal(zero, 0 * x if power > 0 else np.inf)
    np.testing.assert_array_equal(value(lambda s, b, h, i, j: 2**s + 2.0**j, s=s), np.exp2(s) + np.exp2(J))
    np.testing.assert_allclose(value(lambda s, b, h, i, j: 0.7**s, s=s), 0.7**s, rtol=1e-15)
    assert value(lambda b, h, i, j: 2**j + 8**j + 1**j).tolist() == (2**J + 8**J + 1).tolist()
    assert np.isnan(value(lambda s, b, h, i, j: s**0.3, s=s)).tolist() == (s < 0).tolist()


@pytest.mark.parametrize(
    ("power", "message"),
    [
        (lambda s, j: s**s, r"np.exp\(y \* np.log\(x\)\)"),
        (lambda s, j: s**math.inf, "a finite number on one side"),
        (lambda s, j: 3**j, "a power of two, or a float"),
        (lambda s, j: 0**s, "base of .* must be positive .*, got 0"),
        (lambda s, j: (-2.0) ** j, "base of .* must be positive .*, got -2.0"),
    ],
)
def test_powers_that_rules_do_not_have(power, message):
    with pytest.raises(TypeError, match=message):
        value(lambda s, b, h, i, j: power(s, j), s=np.zeros(6))


def test_what_has_no_influence_is_left_out():
    """`and_masks` and `or_masks` begin with a constant, which costs nothing."""
    i, true = Traced(make("i", "int")), Traced(make("literal", "bool", (), True))
    late = i > 2
    assert (late & true).node is (true & late).node is (late | i.constant(0, bool)).node is late.node
    assert (late | true).node.op == "bitwise_or"
    assert (i & true).node.kind == "int"


def test_indices_of_tables_clamp():
    numbers = np.arange(12).reshape(3, 4)
    look = table(numbers)
    i, j = np.clip(I, 0, 2), np.clip(J, 0, 3)
    np.testing.assert_array_equal(value(lambda b, h, i, j: look[i, j]), numbers[i, j])
    other = numbers[::-1] * 2
    np.testing.assert_array_equal(value(lambda b, h, i, j: look[i, j], tables={look: other}), other[i, j])


def test_results_have_the_shape_of_what_they_depend_on():
    assert value(lambda b, h, i, j: j + 1).shape == (6,)
    assert value(lambda b, h, i, j: i < 2).shape == (8, 1)
    assert value(lambda b, h, i, j: h * 0 + i).shape == (2, 8, 1)


@settings(deadline=None, max_examples=settings().max_examples // 5)
@given(nodes("bool", "int", "float", score=True))
def test_every_node_evaluates_to_its_kind(node):
    place = At(PLACE.b, PLACE.h, I, J, s=np.ones((1, 2, 8, 6), np.float32), dtype=np.float32)
    for part, found in zip(order([node]), evaluate(order([node]), place), strict=True):
        assert found.dtype == {"float": np.float32, "int": np.int64, "bool": np.bool_}[part.kind]


def test_missing_leaves_are_named():
    with pytest.raises(ValueError, match="'s'"):
        evaluate([make("s", "float")], PLACE)
    with pytest.raises(ValueError, match="'dense'"):
        evaluate([as_mask(np.ones((2, 2), bool)).node], PLACE)


# Errors


@pytest.mark.parametrize(
    "function",
    [
        lambda i, j: i if i > j else j,
        lambda i, j: i > 1 and j > 1,
        lambda i, j: i > 1 or j > 1,
        lambda i, j: not i > j,
        lambda i, j: max(i, j),
        lambda i, j: min(i, j),
        lambda i, j: 0 <= i < j,
        lambda i, j: bool(i),
    ],
)
def test_branching_says_what_to_use(function):
    with pytest.raises(TypeError, match=r"& \| ~.*regard\.where.*np\.maximum"):
        value(lambda b, h, i, j: function(i, j))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda i, j: int(i), r"astype\(int\)"),
        (lambda i, j: float(i), r"astype\(int\)"),
        (lambda i, j: math.exp(i), "NumPy's functions, not math's"),
        (lambda i, j: round(i), "np.rint"),
        (lambda i, j: len(i), "one number"),
        (lambda i, j: list(i), "one number"),
        (lambda i, j: i[0], "one number"),
        (lambda i, j: i in (1, 2), "no truth value"),
        (lambda i, j: 1 in i, "in is not available"),
        (lambda i, j: i.__setitem__(0, 1), "assign"),
        (lambda i, j: [1, 2, 3][i], r"regard\.table\(array\)\[index\]"),
        (lambda i, j: np.arange(3)[i], r"regard\.table\(array\)\[index\]"),
        (lambda i, j: np.arange(3) + i, r"regard\.table\(array\)\[index\]"),
        (lambda i, j: i * [1, 2], r"regard\.table\(array\)\[index\]"),
        (lambda i, j: i + table([1.0]), r"table\[h, i - j\]"),
        (lambda i, j: i + "a", "cannot use a str"),
        (lambda i, j: i + None, "cannot use a NoneType"),
        (lambda i, j: i + Fraction(1, 2), "cannot use a Fraction"),
        (lambda i, j: i + 1j, "cannot use a complex"),
        (lambda i, j: np.hypot(i, j), "np.hypot is not available in a rule; available: absolute, add"),
        (lambda i, j: divmod(i, j), "not available|unsupported operand"),
        (lambda i, j: np.sum(i), "np.sum is not available in a rule, which computes one number at a time"),
        (lambda i, j: np.add.reduce(i), "np.add.reduce is not available"),
        (lambda i, j: np.add(i, j, out=np.zeros(3)), "np.add takes no out"),
        (lambda i, j: i / 2 & 1, "bitwise_and needs boolean or integer"),
        (lambda i, j: i << 0.5, "left_shift needs boolean or integer"),
        (lambda i, j: ~(i / 2), "invert needs boolean or integer"),
        (lambda i, j: where(i, 1, 2), "condition of where must be boolean"),
        (lambda i, j: i.astype(complex), "astype takes int, float or bool"),
        (lambda i, j: table([1.0, 2.0])[i, j], "takes 1 indices, got 2"),
        (lambda i, j: table([1.0, 2.0])[i / 2], "index 0 of a table must be an int, not float"),
        (lambda i, j: table([1.0, 2.0])[i > 2], "index 0 of a table must be an int, not bool"),
        (lambda i, j: list(table([1.0, 2.0])), "cannot be iterated"),
    ],
)
def test_errors_in_rules(function, message):
    with pytest.raises(TypeError, match=message):
        value(lambda b, h, i, j: function(i, j))


def test_integers_beyond_64_bits():
    with pytest.raises(ValueError, match="64 bits"):
        value(lambda b, h, i, j: i + 2**63)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.array([1j]), np.array(["2020"], "M8")])
def test_tables_of_what_is_not_a_number(array):
    with pytest.raises(TypeError, match=f"booleans, integers or floats, got {re.escape(str(array.dtype))}"):
        table(array)


def test_tables_of_any_layout():
    numbers = np.arange(12.0).reshape(3, 4)
    for array in (numbers.astype(">f8"), np.asfortranarray(numbers), numbers[::-1], numbers.tolist(), numbers > 5):
        look = table(array)
        assert look.dtype.isnative
        i, j = np.clip(I, 0, 2), np.clip(J, 0, 3)
        np.testing.assert_array_equal(value(lambda b, h, i, j, look=look: look[i, j]), np.asarray(array)[i, j])


def test_other_bad_tables():
    with pytest.raises(ValueError, match=r"table must not be empty, got shape \(2, 0\)"):
        table(np.zeros((2, 0)))
    with pytest.raises(ValueError, match="64-bit"):
        table(np.array([2**64 - 1], np.uint64))


def two(i, j):
    return i < j


def of_kind(kind):
    def f(b, h, i, j):
        return {"int": i - j, "float": i / 2, "text": "x", "none": None, "array": np.ones(3, bool)}[kind]

    return f


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (two, r"mask rule 'two' must take \(b, h, i, j\)"),
        (of_kind("int"), r"mask rule 'f' returned an int expression; a mask must return a boolean one, e.g. i - j > 0"),
        (of_kind("float"), "mask rule 'f' returned a float expression"),
        (of_kind("text"), "mask rule 'f' returned a str; a mask must return"),
        (of_kind("none"), "mask rule 'f' returned a NoneType"),
        (of_kind("array"), "mask rule 'f' returned a ndarray"),
        (3, r"a mask rule must be a function of \(b, h, i, j\), got int"),
    ],
)
def test_rules_of_the_wrong_kind(function, message):
    with pytest.raises(TypeError, match=message):
        trace(function, MASK_LEAVES)


def test_scores_of_the_wrong_kind():
    with pytest.raises(
        TypeError, match="score rule '<lambda>' returned a bool expression; a score must return a float"
    ):
        trace(lambda s, b, h, i, j: s > 0, SCORE_LEAVES)
    assert trace(lambda s, b, h, i, j: i - j, SCORE_LEAVES).kind == "float"
    assert trace(lambda s, b, h, i, j: 0, SCORE_LEAVES).kind == "float"


def test_an_error_inside_a_rule_names_the_rule():
    def broken(b, h, i, j):
        return i < missing  # noqa: F821

    with pytest.raises(NameError) as error:
        trace(broken, MASK_LEAVES)
    assert error.value.__notes__ == ["while tracing mask rule 'broken'"]


def test_a_mask_may_be_a_constant():
    node = trace(lambda b, h, i, j: True, MASK_LEAVES)
    assert evaluate([node], PLACE)[0].tolist() is True


# Graph


def test_equal_expressions_are_one_object():
    def rule(b, h, i, j):
        return (i - j) * (i - j) > abs(i - j)

    node = trace(rule, MASK_LEAVES)
    assert [part.op for part in order([node])].count("subtract") == 1


def test_numbers_are_arguments_and_each_a_slot():
    node = trace(lambda b, h, i, j: (i - 3 < j + 3) & (j < np.int32(3)), MASK_LEAVES)
    program = Program.of([node])
    assert program.numbers == (3, 3, 3)
    assert trace(lambda b, h, i, j: i < 2 + 3 * j, MASK_LEAVES) is not trace(
        lambda b, h, i, j: i < 2 + 3 * j, MASK_LEAVES
    )


def structure(function, leaves=SCORE_LEAVES):
    return Program.of([trace(function, leaves)]).structure


def test_structure_leaves_out_values_and_contents():
    a, b_, longer = (Table(x) for x in (np.zeros(3), np.ones(3), np.ones(7)))
    base = structure(lambda s, b, h, i, j: s * 2.0 + a[h])
    assert base == structure(lambda s, b, h, i, j: s * 5.5 + b_[h])
    assert base == structure(lambda s, b, h, i, j: s * 2 + longer[h])
    for other in (
        lambda s, b, h, i, j: s - 2.0 + a[h],
        lambda s, b, h, i, j: s * 2.0 + a[i],
        lambda s, b, h, i, j: s * 2.0 + Table(np.zeros(3, np.float32))[h],
        lambda s, b, h, i, j: s * 2.0 + Table(np.zeros((3, 3)))[h, h],
        lambda s, b, h, i, j: s * i + a[h],
        lambda s, b, h, i, j: s * 2.0 + a[h] + a[h],
        lambda s, b, h, i, j: s**3 + a[h],
    ):
        assert structure(other) != base
    assert structure(lambda s, b, h, i, j: a[h] + a[i]) != structure(lambda s, b, h, i, j: a[h] + b_[i])


@settings(deadline=None, max_examples=settings().max_examples // 5)
@given(nodes("bool", "int", "float", score=True))
def test_a_program_computes_what_its_expression_does(node):
    program = Program.of([node, node.args[0] if node.args else node])
    place = At(PLACE.b, PLACE.h, I, J, s=np.full((1, 2, 8, 6), 0.7))
    payloads = {"number": program.numbers, "gather": program.tables, "dense": program.dense}
    rebuilt = []
    for op, kind, operands, slot in program.instructions:
        payload = payloads[op][slot] if op in payloads else slot
        assert all(operand < len(rebuilt) for operand in operands)
        rebuilt.append(make(op, kind, tuple(rebuilt[operand] for operand in operands), payload))
    again = evaluate([rebuilt[result] for result in program.results], place)
    np.testing.assert_equal(again, evaluate([node, node.args[0] if node.args else node], place))


def test_a_program_prints():
    slopes = table(np.array([0.5]))
    node = trace(lambda s, b, h, i, j: s * 2 + slopes[h], SCORE_LEAVES)
    assert str(Program.of([node])).splitlines() == [
        "number 0 = 2.0",
        "table 0 = table of shape (1,), float64",
        "%0 = s : float",
        "%1 = number 0 : float",
        "%2 = multiply %0 %1 : float",
        "%3 = h : int",
        "%4 = gather 0 %3 : float",
        "%5 = add %2 %4 : float",
        "return %5",
    ]


def test_reads():
    flags = table(np.array([True]))
    node = trace(lambda b, h, i, j: (i < 3) & flags[b], MASK_LEAVES)
    assert reads(node) == {"i", "number", "b", "gather"}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_deep_expression_is_copied_without_recursion(again):
    node = make("i", "int")
    for n in range(5000):
        node = build("add", node, number(n))
    copied = again(node)
    at = At(0, 0, np.arange(3), 0)
    np.testing.assert_array_equal(evaluate([copied], at)[0], evaluate([node], at)[0])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_the_same_expression(again):
    numbers = table(np.arange(4.0))
    node = trace(lambda s, b, h, i, j: s * 2 + numbers[j] * (i - j), SCORE_LEAVES)
    copied = again(node)
    place = At(PLACE.b, PLACE.h, I, J, s=np.ones((8, 6)))
    np.testing.assert_array_equal(evaluate([copied], place)[0], evaluate([node], place)[0])
    assert Program.of([copied]).structure == Program.of([node]).structure
    assert again(make("i", "int")) is make("i", "int")


def test_tables_are_frozen_copies():
    source = np.arange(3.0)
    look = table(source)
    source[0] = 9
    assert look.array[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        look.array[0] = 1
    with pytest.raises(AttributeError, match="frozen"):
        look.array = source


def test_every_function_listed_works():
    for name in UFUNCS:
        function = getattr(np, name)
        operands = [Traced(make("i", "int")), Traced(make("j", "int"))][: function.nin]
        if "power" in name:
            operands[1] = 2
        assert isinstance(function(*operands), Traced)


def test_where_of_all_kinds():
    assert value(lambda b, h, i, j: where(i < j, 1, 2)).dtype == np.int64
    assert value(lambda b, h, i, j: where(i < j, 1, 2.5)).dtype == np.float64
    assert value(lambda b, h, i, j: np.where(i < j, i > 0, True)).dtype == np.bool_
    np.testing.assert_array_equal(value(lambda b, h, i, j: np.where(i < j, i, j)), np.where(I < J, I, J))


class Compiled:
    """What Numba makes of a function: it takes no traced values, and has the function."""

    def __init__(self, py_func):
        self.py_func, self.__name__ = py_func, py_func.__name__

    def __call__(self, *args):
        raise TypeError("cannot determine Numba type")


def test_a_function_that_numba_compiles_is_traced_as_python():
    def band(b, h, i, j):
        return abs(i - j) <= 2

    def steep(s, b, h, i, j):
        return s - 0.5 * abs(i - j)

    x = np.random.default_rng(0).standard_normal((2, 7, 4))
    compiled, python = ({"mask": f(band), "score": [f(steep)]} for f in (Compiled, lambda f: f))
    np.testing.assert_array_equal(regard.attention(x, x, x, **compiled), regard.attention(x, x, x, **python))
    assert repr(regard.mask(Compiled(band))) == "mask(band)"
    with pytest.raises(TypeError, match="mask rule 'steep' must take"):
        regard.mask(Compiled(steep))


def test_a_rule_is_its_text_and_its_arrays():
    for rule in (regard.padding([3, 5]) & ~regard.mask(np.eye(5) > 0), regard.alibi([0.5, 0.25])):
        text, tables, dense = RuleText.of(rule)
        again = text.rule(tables, dense)
        assert type(again) is type(rule)
        assert (again.node, again.requires, str(again)) == (rule.node, rule.requires, str(rule))
        assert getattr(again, "binds", None) == getattr(rule, "binds", None)
        assert text == replace(text, prints="")
