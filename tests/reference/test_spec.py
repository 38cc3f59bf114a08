"""The specification against finite differences, against higher precision and against independent formulas."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import regard
from cases import CASES, Case
from regard.core.problem import Differential, Outputs, Problem
from regard.ops.normalization import problem_from
from regard.reference import specification
from regard.rules import Node, Score, Table
from regard.rules.expression import make, order, substitute
from support import norm

SMALL = [c for c in CASES if "tile" not in c.name and c.poison is None]
LONG = np.longdouble
MOVED = ("query", "metric")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def problem(case: Case) -> Problem:
    q, k, v, options = case.inputs(np.float64)
    return problem_from(q, k, v, **options)


def like(rng: np.random.Generator, x: Any) -> Any:
    return None if x is None else rng.standard_normal(x.shape)


def direction(rng: np.random.Generator, p: Problem) -> Differential:
    parts = (like(rng, x) for x in (p.query, p.key, p.value, p.bias, p.sink))
    tables = {table: rng.standard_normal(table.shape) for table in p.rules.tables}
    return Differential(*parts, tables, like(rng, p.metric))


def cotangents(rng: np.random.Generator, p: Problem) -> Outputs:
    return Outputs(*(rng.standard_normal(p.shape(*tail)) for tail in ((p.n_q, p.d_v), (p.n_q,), (p.n_q,))))


def moved(p: Problem, t: Differential, step: Any) -> Problem:
    """The problem a step along t from p, in longdouble."""
    score = p.score
    if score is not None and p.rules.tables:
        new = {table: Table(table.array.astype(LONG) + step * t.tables[table]) for table in p.rules.tables}

        def moved_leaf(node: Node) -> Node:
            return make("gather", "float", node.args, new[node.payload])

        leaves = [node for node in order([score.node]) if node.op == "gather" and node.payload in new]
        score = Score(substitute(score.node, {node: moved_leaf(node) for node in leaves}), "moved")
    arrays = {
        name: None if x is None else x.astype(LONG) + step * getattr(t, name)
        for name, x in ((n, getattr(p, n)) for n in ("query", "key", "value", "bias", "sink"))
    }
    if p.factors is not None:
        query, metric = (x.astype(LONG) + step * getattr(t, n) for n, x in zip(MOVED, p.factors, strict=True))
        arrays |= {"query": specification.projected(query, metric), "factors": (query, metric)}
    return replace(p, score=score, **arrays)


def slope(f: Any, step: float = 2e-3) -> Any:
    """The derivative at 0 of a function of a longdouble, by central differences extrapolated twice (Richardson)."""
    h = LONG(step)
    first, second, third = ((f(x) - f(-x)) / (2 * x) for x in (h, h / 2, h / 4))
    a, b = (4 * second - first) / 3, (4 * third - second) / 3
    return (16 * b - a) / 15


def assert_close(name: str, got: Any, exact: Any, scale: Any) -> None:
    error = norm(np.asarray(got - exact))
    assert error <= 1e-10 * (1 + norm(np.asarray(scale))), f"{name}: {error:.2e}"


def entropy_of(x: Outputs) -> Any:
    return np.nan_to_num(x.entropy)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_tangents_are_slopes(case: Case) -> None:
    p, rng = problem(case), np.random.default_rng(0)
    t = direction(rng, p)
    _, tangent = specification.jvp(p, t, LONG)
    for name in ("out", "lse", "entropy"):

        def value(step: Any, name: str = name) -> Any:
            return np.nan_to_num(getattr(specification.forward(moved(p, t, step), LONG), name), neginf=0)

        numeric = slope(value)
        assert_close(name, getattr(tangent, name), numeric, numeric)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_gradients_are_slopes(case: Case) -> None:
    p, rng = problem(case), np.random.default_rng(1)
    ct = cotangents(rng, p)
    g = specification.gradients(p, ct, LONG)
    for only in (*Differential.__dataclass_fields__, "all"):
        t = direction(rng, p)
        if only != "all":
            zero = Differential(
                *(None if x is None else x * 0 for x in (t.query, t.key, t.value, t.bias, t.sink)),
                {table: x * 0 for table, x in t.tables.items()},
                None if t.metric is None else t.metric * 0,
            )
            if getattr(t, only) is None:
                continue
            t = replace(zero, **{only: getattr(t, only)})

        def loss(step: Any, t: Differential = t) -> Any:
            out = specification.forward(moved(p, t, step), LONG)
            return sum((np.nan_to_num(x, neginf=0) * c).sum() for x, c in zip(out[:3], ct[:3], strict=True))

        analytic = sum(
            (getattr(g, n) * getattr(t, n)).sum()
            for n in ("query", "key", "value", "bias", "sink", "metric")
            if getattr(t, n) is not None
        ) + sum((g.tables[table] * x).sum() for table, x in t.tables.items())
        numeric = slope(loss)
        assert_close(only, analytic, numeric, numeric)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_tangents_of_gradients_are_slopes(case: Case) -> None:
    p, rng = problem(case), np.random.default_rng(2)
    t, ct, ct_dot = direction(rng, p), cotangents(rng, p), cotangents(rng, p)
    got = specification.gradients_jvp(p, t, ct, ct_dot, LONG)

    def gradients(step: Any) -> list[Any]:
        at = moved(p, t, step)
        turned = Outputs(*(c + step * d for c, d in zip(ct[:3], ct_dot[:3], strict=True)))
        g = specification.gradients(at, turned, LONG)
        arrays = [g.query, g.key, g.value, g.bias, g.sink, g.metric, *(g.tables[table] for table in at.rules.tables)]
        return [np.zeros(0, LONG) if x is None else x for x in arrays]

    arrays = [
        got.query,
        got.key,
        got.value,
        got.bias,
        got.sink,
        got.metric,
        *(got.tables[table] for table in p.rules.tables),
    ]
    for n, x in enumerate(arrays):
        numeric = slope(lambda step, n=n: gradients(step)[n])
        if x is not None:
            assert_close(f"array {n}", x, numeric, numeric)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_tangents_of_tangents_are_slopes(case: Case) -> None:
    p, rng = problem(case), np.random.default_rng(3)
    t, u = direction(rng, p), direction(rng, p)
    got, other = specification.jvp_jvp(p, t, u, LONG), specification.jvp_jvp(p, u, t, LONG)
    for name in ("out", "lse", "entropy"):

        def tangent(step: Any, name: str = name) -> Any:
            at = moved(p, u, step)
            tables = {new: t.tables[old] for new, old in zip(at.rules.tables, p.rules.tables, strict=True)}
            return getattr(specification.jvp(at, replace(t, tables=tables), LONG)[1], name)

        numeric = slope(tangent)
        assert_close(name, getattr(got, name), numeric, numeric)
        assert_close(name, getattr(got, name), getattr(other, name), numeric)


def test_a_wrong_derivative_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out second derivatives of the rule makes the tangents of backward and of JVP wrong, and tests see it."""
    monkeypatch.setattr(specification, "tangent", lambda node, tables: Node("literal", "float", (), 0.0))
    for name, test in (
        ("curved score", test_tangents_of_gradients_are_slopes),
        ("curved score", test_tangents_of_tangents_are_slopes),
        ("score with a table", test_tangents_of_tangents_are_slopes),
    ):
        with pytest.raises(AssertionError):
            test(next(c for c in CASES if c.name == name))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_float64_against_longdouble(case: Case) -> None:
    p = problem(case)
    for got, exact in zip(specification.forward(p)[:3], specification.forward(p, LONG)[:3], strict=True):
        assert got is not None
        assert exact is not None
        finite = np.isfinite(exact.astype(np.float64))
        assert norm(np.where(finite, got - exact, 0)) <= 1e-13 * (1 + norm(np.where(finite, exact, 0)))


def test_softmax_written_out() -> None:
    """Independent of the specification's code: the textbook formula, pair by pair."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 5, 3))
    out, P = regard.attention(q, k, v, causal=True, engine="spec", return_weights=True)
    for i in range(5):
        e = [np.exp(sum(q[0, i, a] * k[0, j, a] for a in range(3)) / 3**0.5) for j in range(i + 1)]
        assert np.allclose(P[0, i, : i + 1], np.array(e) / sum(e), rtol=1e-14)
        assert (P[0, i, i + 1 :] == 0).all()
        assert np.allclose(out[0, i], sum(w * v[0, j] for j, w in enumerate(e)) / sum(e), rtol=1e-13)


def test_dropout_bits_look_random() -> None:
    n = 512
    index = np.arange(n, dtype=np.int64)
    one = np.int64(1)
    bits = specification.random_bits(7, one, one, index[:, None], index)
    assert bits.dtype == np.uint32
    share = np.unpackbits(bits.view(np.uint8)).reshape(-1, 8).mean(axis=0)
    assert (np.abs(share - 0.5) < 5 * 0.5 / (4 * n * n) ** 0.5).all()
    signs = 2.0 * (bits >= 2**31) - 1
    sigma = 1 / n
    for other in (
        np.roll(signs, 1, 0),
        np.roll(signs, 1, 1),
        signs.T,
        2.0 * (specification.random_bits(8, one, one, index[:, None], index) >= 2**31) - 1,
        2.0 * (specification.random_bits(7, 2 * one, one, index[:, None], index) >= 2**31) - 1,
        2.0 * (specification.random_bits(7, one, 2 * one, index[:, None], index) >= 2**31) - 1,
    ):
        off_diagonal = (signs * other).sum() - (np.trace(signs * other) if other is signs.T else 0)
        assert abs(off_diagonal) / n**2 < 5 * sigma
    counts = np.bincount((bits >> np.uint32(24)).ravel(), minlength=256)
    chi = ((counts - n * n / 256) ** 2 / (n * n / 256)).sum()
    assert 255 - 6 * 510**0.5 < chi < 255 + 6 * 510**0.5
    assert len(np.unique(bits)) > n * n * (1 - n * n / 2**33 * 2)


def test_dropout_is_a_function_of_seed_and_indices() -> None:
    """Fixed values: whoever changes the generator changes every trained model's masks."""
    index = np.arange(4, dtype=np.int64)
    got = specification.random_bits(42, np.int64(1), np.int64(2), np.int64(3), index)
    assert got.tolist() == FIXED_BITS
    kept = specification.dropout_mask(0.25, 42, np.int64(1), np.int64(2), np.int64(3), np.arange(100_000))
    assert abs(kept.mean() - 0.75) < 5 * (0.25 * 0.75 / 1e5) ** 0.5


FIXED_BITS = [2123132856, 2667782089, 2044385851, 2904121319]
