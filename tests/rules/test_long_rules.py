"""Rules of thousands of operations: every reading works, in work that grows as the rule does."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import regard
from regard import engines
from regard.engines import cpu
from regard.rules import (
    At,
    Mask,
    Node,
    Program,
    Ranges,
    Score,
    causal,
    evaluate,
    interval,
    mask,
    order,
    partials,
    rule_from_text,
    rule_text,
    score,
    tangent,
    where,
)
from regard.rules.intervals import TERMS, affine

LONG, SHORT, TIMES = 5000, 250, 4
Rule = Mask | Score


def chain(n: int) -> Score:
    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for _ in range(n // 2):
            s = s * 0.5 + j
        return s

    return score(rule)


def nested(n: int) -> Score:
    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for k in range(n // 3):
            s = where(i - j > k, s, s * 0.9)
        return s

    return score(rule)


def products(n: int) -> Score:
    """A chain of products of integers under a sum, with a factor that leaves 64 bits."""

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        x = i
        for _ in range(n):
            x = x * 3
        return s + (x + 1)

    return score(rule)


def sums(n: int) -> Score:
    """A sum of integers that are all different."""
    tables = [regard.table(np.arange(4) + k) for k in range(n // 2)]

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        x = i
        for table in tables:
            x = x + table[j]
        return s + x

    return score(rule)


def read_once(n: int) -> Score:
    """A long chain above one reading of a table."""
    table = regard.table(np.array([0.5, 0.25]))

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = s + table[h]
        for _ in range(n // 2):
            s = s * 0.5 + j
        return s

    return score(rule)


def combined(n: int) -> Mask:
    found = causal()
    for k in range(n // 2):
        found = found & mask(lambda b, h, i, j, k=k: i - j != k + 5)
    return found


RULES = (chain, nested, products, sums, read_once, combined)
QUERY = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(np.float32)


def options(rule: Rule) -> dict[str, Any]:
    return {"mask": rule} if isinstance(rule, Mask) else {"score": rule}


def run(rule: Rule, engine: str | None = None) -> Any:
    return regard.attention(QUERY, QUERY, QUERY, engine=engine, **options(rule))


def vjp(rule: Rule, engine: str | None = None) -> Any:
    return regard.attention_vjp(QUERY, QUERY, QUERY, QUERY, engine=engine, **options(rule))


def values(rule: Rule) -> Any:
    zero, n = np.zeros(1, np.int64), np.arange(3)
    return evaluate([rule.node], At(zero, zero, n[:, None], n, s=np.ones((3, 3)), keys=3))


def bounds(rule: Rule) -> Any:
    return interval(rule.node, Ranges(i=(0, 63), j=(np.array([0, 64]), np.array([63, 127])), keys=128))


def derivatives(rule: Rule) -> list[Node]:
    """The first and second derivatives of a score, and its tangent."""
    if isinstance(rule, Mask):
        return []
    first, readings = partials(rule.node)
    return [first, *readings.values(), tangent(rule.node), tangent(first)]


READINGS: dict[str, Callable[[Rule], Any]] = {
    "text": lambda rule: (repr(rule), repr(rule.node)),
    "values": values,
    "program": lambda rule: str(Program.of([rule.node])),
    "written": lambda rule: rule_from_text(*rule_text(rule.node)),
    "bounds": bounds,
    "derivatives": derivatives,
    "plan": lambda rule: regard.plan(QUERY, QUERY, QUERY, **options(rule)),
    "tiled": partial(run, engine="tiled"),
    "spec": partial(run, engine="spec"),
    "vjp": partial(vjp, engine="tiled"),
}


def work(function: Callable[[], Any]) -> int:
    """How many functions are called, Python's own included, on this thread."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("make", [chain, products, combined])
@pytest.mark.filterwarnings("ignore::regard.RegardWarning")
def test_every_reading_takes_a_long_rule(make: Callable[[int], Rule]) -> None:
    rule = make(LONG)
    for read in READINGS.values():
        read(rule)
    assert len(order([rule.node, *derivatives(rule)])) <= 8 * LONG


@pytest.mark.parametrize("make", RULES)
@pytest.mark.filterwarnings("ignore::regard.RegardWarning")
def test_work_grows_as_the_rule(make: Callable[[int], Rule]) -> None:
    READINGS["vjp"](make(4))  # what is loaded once
    READINGS["plan"](make(4))
    short, long = {}, {}
    for n, found in ((SHORT, short), (SHORT * TIMES, long)):
        made: list[Rule] = []
        found["trace"] = work(lambda n=n, made=made: made.append(make(n)))
        for name, read in READINGS.items():
            found[name] = work(partial(read, made[0]))
    grown = {name: (short[name], long[name]) for name in short if long[name] > 1.25 * TIMES * short[name]}
    assert not grown


@pytest.mark.parametrize("make", [sums, products])
def test_affine_sums_stay_small(make: Callable[[int], Rule]) -> None:
    forms = [affine(x) for x in order([make(300).node]) if x.kind == "int"]
    assert max(len(form.terms) for form in forms) <= TERMS
    assert max(abs(factor) for form in forms for factor in form.terms.values()) < 2**128


@pytest.mark.parametrize("make", [chain, combined])
def test_a_long_rule_is_not_compiled(make: Callable[[int], Rule], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_warned", set())
    rule = make(LONG)
    reason = f"rules of at most {cpu.LONGEST} instructions, those of derivatives included, got "
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = run(rule)
        vjp(rule)
    assert [x.category for x in found] == [regard.RegardWarning]
    assert f"the engine 'cpu' refuses this call: {reason}" in str(found[0].message)
    np.testing.assert_array_equal(out, run(rule, "tiled"))
    assert regard.plan(QUERY, QUERY, QUERY, **options(rule)).engines["cpu"].startswith(reason)


def test_many_readings_of_tables_count() -> None:
    """Each reading has a derivative of its own, of all that is above it."""
    tables = [regard.table(np.ones(2)) for _ in range(100)]

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for table in tables:
            s = s * 0.5 + table[h]
        return s

    assert len(order([score(rule).node])) < cpu.LONGEST < len(order([*derivatives(score(rule))]))
    assert "instructions" in (regard.plan(QUERY, QUERY, QUERY, score=rule).engines["cpu"])


def test_rules_of_ordinary_length_are_compiled() -> None:
    assert regard.plan(QUERY, QUERY, QUERY, score=chain(100), mask=combined(60)).engine == "cpu"
