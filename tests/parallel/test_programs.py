"""All ranks in one process have the bits of one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from cases import CASES, Case
from regard.core.problem import Differential, Outputs, Problem
from regard.core.statistics import ENTROPY
from regard.engines import Engine, choose
from regard.ops.normalization import problem_from
from regard.parallel import programs, sight, together
from regard.parallel.dealing import Deal
from regard.parallel.gradients import GradientDirection, RankGradients
from regard.parallel.pipeline import pipeline_of
from regard.parallel.programs import Rank
from regard.parallel.sight import sight_of
from regard.parallel.unordered import unordered_of
from regard.rules import Table
from support import absolute, assert_within

Array = np.ndarray[Any, np.dtype[Any]]
OPERANDS = ("query", "key", "value")
ENGINES = pytest.mark.parametrize("engine", ["tiled", "cpu"])


def uneven(n: int, ranks: int) -> Deal:
    """Shards that are empty, of one position, and of several runs."""
    edges = sorted([0, min(1, n), min(7, n), n * 2 // 3, n])
    a, b, c, d = (range(x, y) for x, y in pairwise(edges))
    runs = ((b,), (), (a, d), (c,), ())
    return Deal("uneven", tuple(tuple(x for x in own if len(x)) for own in runs[:ranks]))


DEALS: dict[str, tuple[int, Callable[[int, int], Deal]]] = {
    "1": (1, Deal.contiguous),
    "2 contiguous": (2, Deal.contiguous),
    "3 stripes": (3, lambda n, ranks: Deal.stripes(n, ranks, 128)),
    "4 odd stripes": (4, lambda n, ranks: Deal.stripes(n, ranks, 100)),
    "5 uneven": (5, uneven),
    "8 stripes": (8, lambda n, ranks: Deal.stripes(n, ranks, 128)),
}


class AllRanks:
    """The ranks of a call, side by side; results are joined."""

    def __init__(self, p: Problem, engine: Engine, name: str):
        ranks, deal = DEALS[name]
        self.p, self.engine = p, engine
        self.rows, self.keys = deal(p.n_q, ranks), deal(p.n_k, ranks)
        arrays = zip(*map(self.shards, ("query", "key", "value"), (p.query, p.key, p.value)), strict=True)
        tiles = sight_of(p, self.rows, self.keys)
        self.ranks = [Rank(p, engine, tiles, n, *own) for n, own in enumerate(arrays)]

    def shards(self, name: str, x: Any) -> list[Any]:
        """What each rank has of an array."""
        deal, axis = self.keys if name in ("key", "value") else self.rows, -1 if name in ("lse", "entropy") else -2
        places = map(deal.positions, range(deal.ranks))
        return [None if x is None else np.ascontiguousarray(np.take(x, at, axis)) for at in places]

    def joined(self, name: str, parts: list[Any]) -> Any:
        """The whole of an array of which each rank has some rows."""
        if parts[0] is None:
            return None
        deal, axis = self.keys if name in ("key", "value") else self.rows, -1 if name in ("lse", "entropy") else -2
        order = np.argsort(np.concatenate([deal.positions(rank) for rank in range(deal.ranks)]))
        return np.take(np.concatenate(parts, axis), order, axis)

    def outputs(self, x: Outputs) -> list[Outputs]:
        return [Outputs(*own) for own in zip(*map(self.shards, x._fields, x), strict=True)]

    def differentials(self, x: Differential) -> list[Differential]:
        own = [self.shards(name, getattr(x, name)) for name in OPERANDS]
        return [replace(x, **dict(zip(OPERANDS, mine, strict=True))) for mine in zip(*own, strict=True)]

    def whole_outputs(self, parts: list[Outputs]) -> Outputs:
        return Outputs(*(self.joined(name, [getattr(x, name) for x in parts]) for name in Outputs._fields))

    def whole_differential(self, parts: list[Differential]) -> Differential:
        whole = {name: self.joined(name, [getattr(x, name) for x in parts]) for name in OPERANDS}
        assert all(bits(x) == bits(parts[0]) for x in parts)
        return replace(parts[0], **whole)

    def forward(self, low: bool) -> Outputs:
        return self.whole_outputs(together.run([rank.forward(low) for rank in self.ranks]))

    def gradients(
        self, outputs: Outputs, ct: Outputs, along: GradientDirection | None = None, plan_of: Any = pipeline_of
    ) -> Differential:
        """All gradients in one pass, or their tangents."""
        plan, directions = plan_of(self.p, self.rows, self.keys), [None] * len(self.ranks)
        if along is not None:
            parts = self.differentials(along.t), self.outputs(along.outputs), self.outputs(along.ct)
            directions = [GradientDirection(*x) for x in zip(*parts, strict=True)]
        known = zip(self.ranks, self.outputs(outputs), self.outputs(ct), directions, strict=True)
        every = [
            RankGradients.of(self.p, self.engine, plan, x.rank, (x.query, x.key, x.value), *own) for x, *own in known
        ]
        return self.whole_differential(together.run([x.run(self.rows) for x in every]))

    def tangent(self, outputs: Outputs, t: Differential) -> Outputs:
        known = zip(self.ranks, self.outputs(outputs), self.differentials(t), strict=True)
        return self.whole_outputs(together.run([rank.tangent(*x) for rank, *x in known]))


def bits(x: Differential) -> list[Any]:
    """The bits of what is whole on every rank."""
    return [None if a is None else np.asarray(a).tobytes() for a in (x.bias, x.sink, *x.tables.values())]


def of_ranks(p: Problem) -> Problem:
    """A call as ranks have it."""
    whole = {name: p.leading(getattr(p, name), 3) for name in OPERANDS}
    return replace(p, observe=(ENTROPY,), positions_first=False, factors=None, **whole)


def drawn(p: Problem, seed: int) -> Outputs:
    """Cotangents, or tangents of them."""
    rng = np.random.default_rng(seed)
    kinds = ((p.d_v,), p.dtype), ((), p.compute), ((), p.compute)
    return Outputs(*(rng.standard_normal(p.shape(p.n_q, *tail)).astype(kind) for tail, kind in kinds))


def check(p: Problem, engine: Engine, name: str) -> None:
    """Compare all ranks with one call, to the bit, and gradients of tables within the bound."""
    p = of_ranks(p)
    ranks, low, ct = AllRanks(p, engine, name), p.new_low(), drawn(p, 1)
    expected, _ = engine.forward(p, None, low)
    same("", ranks.forward(low is not None), expected, Outputs._fields)
    g, both = engine.backward(p, expected, ct), ranks.gradients(expected, ct)
    same("d", both, g, (*OPERANDS, "bias", "sink"))
    if g.tables:
        exact, sizes = exact_tables(p, ct), absolute(p, ct)["tables"]
        for table, x in g.tables.items():
            assert_within("table", both.tables[table], exact[table], x, sizes[table], p.compute)


def check_unordered(p: Problem, engine: Engine, name: str) -> None:
    """Compare dQ of ranks that add gradients in an order of their own to the bit, the others by their error."""
    p = of_ranks(p)
    ranks, ct = AllRanks(p, engine, name), drawn(p, 1)
    outputs, _ = engine.forward(p, None, p.new_low())
    g, both = engine.backward(p, outputs, ct), ranks.gradients(outputs, ct, plan_of=unordered_of)
    same("d", both, g, ("query",))
    exact, sizes = exact_gradients(p, ct), absolute(p, ct)
    for what, kind in {"key": p.dtype, "value": p.dtype, "bias": p.compute, "sink": p.compute}.items():
        got, one = getattr(both, what), getattr(g, what)
        assert (got is None) == (one is None), what
        if got is not None:
            assert_within(what, got, getattr(exact, what), one, sizes[what], kind)


def exact_tables(p: Problem, ct: Outputs) -> Mapping[Table, Array]:
    return exact_gradients(p, ct).tables


def exact_gradients(p: Problem, ct: Outputs) -> Differential:
    """The gradients in float64."""
    wide = replace(p, **{name: getattr(p, name).astype(np.float64) for name in OPERANDS})
    tiled = choose(wide, "tiled")
    wide_ct = Outputs(*(None if x is None else x.astype(np.float64) for x in ct))
    return tiled.backward(wide, tiled.forward(wide)[0], wide_ct)


def same(prefix: str, got: Any, expected: Any, names: Sequence[str]) -> None:
    for name in names:
        a, b = getattr(got, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64), err_msg=prefix + name)


@ENGINES
@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case: Case, deal: str, engine: str) -> None:
    q, k, v, options = case.inputs(np.float32)
    p = problem_from(q, k, v, **options)
    check(p, choose(p, engine), deal)


@pytest.mark.parametrize("deal", ["3 stripes", "4 odd stripes", "5 uneven"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_without_order(case: Case, deal: str) -> None:
    q, k, v, options = case.inputs(np.float32)
    p = problem_from(q, k, v, **options)
    check_unordered(p, choose(p, "cpu"), deal)


N = 2100


def random(*shape: int) -> Array:
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


WAYS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "everything": {},
    "window": {"mask": regard.window(200)},
    "documents": {"mask": regard.documents(np.arange(N) // 300), "causal": True},
    "scores and dropout": {
        "causal": True,
        "score": [regard.softcap(9.0), regard.alibi(np.array([0.1, 0.2]))],
        "dropout": 0.1,
        "seed": 7,
    },
    "sink": {"causal": True, "sink": np.array([0.5, -1.0])},
    "padding left": {"mask": regard.padding(np.array([1300]), side="left")},
    "bias": {"causal": True, "bias": random(2, N, N)},
    "bias of all heads": {"mask": regard.window(300), "bias": random(N, N)},
    "bias of keys": {"causal": True, "bias": random(2, 1, N)},
    "bias of keys of all heads": {"bias": random(N)},
    "bias of rows": {"causal": True, "bias": random(2, N, 1)},
    "bias of heads, sink": {"causal": True, "bias": random(2, 1, 1), "sink": np.array(0.5)},
    "keys from 700 on": {"mask": regard.window(200), "origin": (0, 0, 700), "dropout": 0.1, "seed": 7},
    "offset": {"causal": True, "offset": -300, "origin": (2, 1, 90)},
    "NaN behind the mask": {"mask": ~regard.mask(lambda b, h, i, j: (j >= 700) & (j < 900))},
}
KINDS = [(name, "float32") for name in WAYS] + [
    ("causal", "float64"),
    ("scores and dropout", "bfloat16"),
    ("sink", "float16"),
]


@ENGINES
@pytest.mark.parametrize("deal", ["3 stripes", "4 odd stripes", "5 uneven", "8 stripes"])
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_long_calls(name: str, dtype: str, deal: str, engine: str) -> None:
    """Over several steps of keys and of rows, which begin within shards."""
    p = long_call(name, dtype)
    check(p, choose(p, engine), deal)


def long_call(name: str, dtype: str) -> Problem:
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q, k, v = (rng.standard_normal((h, N, 8)).astype(kind) for h in (2, 1, 1))
    if name == "NaN behind the mask":
        k[:, 700:900], v[:, 700:900] = np.nan, np.inf
    return problem_from(q, k, v, **WAYS[name])


MOVING = [
    ("causal", "float32"),
    ("scores and dropout", "float16"),
    ("bias", "float32"),
    ("bias of keys", "float64"),
    ("bias of heads, sink", "float32"),
]


@ENGINES
@pytest.mark.parametrize("deal", ["3 stripes", "5 uneven"])
@pytest.mark.parametrize(("name", "dtype"), MOVING)
def test_tangents(name: str, dtype: str, deal: str, engine: str) -> None:
    """`jvp`, and the tangents of gradients, of which double backward is made."""
    rng = np.random.default_rng(0)
    q, k, v, *moving = (rng.standard_normal((h, N, 8)).astype(dtype) for h in (2, 1, 1, 2, 1, 1))
    p = of_ranks(problem_from(q, k, v, **WAYS[name]))
    more = {x: rng.standard_normal(a.shape) for x in ("bias", "sink") if (a := getattr(p, x)) is not None}
    tables = {table: rng.standard_normal(table.shape) for table in p.rules.tables}
    t = Differential(*moving, **{x: a.astype(np.float32) for x, a in more.items()}, tables=tables)
    own, ct, d_ct = choose(p, engine), drawn(p, 1), drawn(p, 2)
    outputs, _ = own.forward(p, None, p.new_low())
    ranks, (_, d) = AllRanks(p, own, deal), own.jvp(p, t, outputs)
    same("tangent of ", ranks.tangent(outputs, t), d, ("out", "lse", "entropy"))
    g = own.backward_jvp(p, outputs, ct, t, d, d_ct)
    got = ranks.gradients(outputs, ct, GradientDirection(t, d, d_ct))
    same("tangent of d", got, g, (*OPERANDS, "bias", "sink"))
    for table, x in g.tables.items():
        np.testing.assert_allclose(got.tables[table], x, rtol=1e-3)


@ENGINES
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_long_calls_without_order(name: str, dtype: str, engine: str) -> None:
    p = long_call(name, dtype)
    check_unordered(p, choose(p, engine), "4 odd stripes")


def test_only_what_is_seen_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank does not ask for is never there: it may be NaN."""

    def poisoned(asked: Any, rank: int) -> Any:
        given = received(asked, rank)
        absent = ~asked[rank].rows_for(rank)
        assert all(not x[..., absent, :].any() for x in given.values())
        sent.append(int((~absent).sum()))
        return given

    received, sent = together.received, list[int]()
    monkeypatch.setattr(together, "received", poisoned)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, N, 8), dtype=np.float32)
    p = problem_from(q, k, v, mask=regard.window(100))
    check(p, choose(p, "tiled"), "2 contiguous")
    assert sum(sent) < 3 * (N + 4 * 128)  # each of three passes sends each row once, and a neighbour's tiles


def test_scores_whose_weights_lse_cannot_give() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 4), dtype=np.float32)
    p = problem_from(q, k, v, bias=np.full((8, 8), -1e30, np.float32))
    with pytest.raises(
        ValueError, match=r"need scores of at most 2.9e\+03, got an lse of 1e\+30: hide keys with a mask"
    ):
        programs.check_lse(choose(p, "tiled").forward(p)[0].lse)


def test_these_tests_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, N, 8), dtype=np.float32)
    p = problem_from(q, k, v, causal=True)
    monkeypatch.setattr(sight, "KEY_STEP", 1024 + 128)  # splits that begin elsewhere
    with pytest.raises(AssertionError):
        check(p, choose(p, "tiled"), "3 stripes")
