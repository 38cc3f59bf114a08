"""All ranks in one process have the bits of one call."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.bench.cases import CASES, Case
from regard.core.problem import Differential, Outputs, Problem
from regard.core.statistics import ENTROPY
from regard.engines import Engine, choose
from regard.ops.normalization import problem_from
from regard.parallel import programs, sight, together
from regard.parallel.dealing import Deal
from regard.parallel.gradients import RankGradients
from regard.parallel.pipeline import pipeline_of
from regard.parallel.programs import Rank
from regard.parallel.sight import sight_of

Array = np.ndarray[Any, np.dtype[Any]]
ENGINES = pytest.mark.parametrize("engine", ["tiled", "cpu"])


def uneven(n: int, ranks: int) -> Deal:
    """Shards that are empty, of one position, and of several runs."""
    edges = sorted([0, min(1, n), min(7, n), n * 2 // 3, n])
    a, b, c, d = (range(x, y) for x, y in pairwise(edges))
    runs = ((b,), (), (a, d), (c,), ())
    return Deal("uneven", tuple(tuple(x for x in own if len(x)) for own in runs[:ranks]))


DEALS: dict[str, tuple[int, Callable[[int, int], Deal]]] = {
    "2 contiguous": (2, Deal.contiguous),
    "3 stripes": (3, lambda n, ranks: Deal.stripes(n, ranks, 128)),
    "4 odd stripes": (4, lambda n, ranks: Deal.stripes(n, ranks, 100)),
    "5 uneven": (5, uneven),
}


def shards(x: Any, deal: Deal, axis: int = -2) -> Any:
    """What each rank has of an array."""
    return [np.ascontiguousarray(np.take(x, deal.positions(rank), axis)) for rank in range(deal.ranks)]


def joined(parts: list[Any], deal: Deal, axis: int = -2) -> Any:
    """The whole of an array of which each rank has some rows."""
    if parts[0] is None:
        return None
    order = np.argsort(np.concatenate([deal.positions(rank) for rank in range(deal.ranks)]))
    return np.take(np.concatenate(parts, axis), order, axis)


def outputs_of(parts: list[Outputs], deal: Deal) -> Outputs:
    axes = {"out": -2, "lse": -1, "entropy": -1, "low": -2}
    return Outputs(**{name: joined([getattr(x, name) for x in parts], deal, axis) for name, axis in axes.items()})


def over_ranks(p: Problem, engine: Engine, deal: Callable[[int, int], Deal], ranks: int, ct: Outputs, low: bool) -> Any:
    """Outputs and gradients of all ranks, joined."""
    rows, keys = deal(p.n_q, ranks), deal(p.n_k, ranks)
    tiles = sight_of(p, rows, keys)
    arrays = zip(shards(p.query, rows), shards(p.key, keys), shards(p.value, keys), strict=True)
    every = [Rank(p, engine, tiles, n, *own) for n, own in enumerate(arrays)]
    outs = together.run([rank.forward(low) for rank in every])
    own_ct = zip(shards(ct.out, rows), shards(ct.lse, rows, -1), shards(ct.entropy, rows, -1), strict=True)
    known = list(zip(every, outs, [Outputs(*x) for x in own_ct], strict=True))
    queries = together.run([rank.query_gradient(out, ct) for rank, out, ct in known])
    others = together.run([rank.key_gradients(out, ct) for rank, out, ct in known])
    sink = joined([x[1] for x in queries], rows, -1)
    g = Differential(
        query=joined([x[0] for x in queries], rows),
        key=joined([x.key for x in others], keys),
        value=joined([x.value for x in others], keys),
        sink=None if sink is None else sink.sum(axis=(*range(sink.ndim - 2), sink.ndim - 1)),
    )
    plan = pipeline_of(p, rows, keys)
    programs_ = [
        RankGradients.of(p, engine, plan, x.rank, (x.query, x.key, x.value), out, own).run(rows)
        for x, out, own in known
    ]
    every_g = together.run(programs_)
    both = replace(
        every_g[0],
        query=joined([x.query for x in every_g], rows),
        key=joined([x.key for x in every_g], keys),
        value=joined([x.value for x in every_g], keys),
    )
    return outputs_of(outs, rows), g, both


def check(p: Problem, engine: Engine, name: str) -> None:
    """Compare all ranks with one call, to the bit."""
    whole = {x: p.leading(getattr(p, x), 3) for x in ("query", "key", "value")}
    p = replace(p, observe=(ENTROPY,), positions_first=False, factors=None, **whole)
    low, rng = p.new_low(), np.random.default_rng(1)
    expected, _ = engine.forward(p, None, low)
    kinds = ((p.d_v,), p.dtype), ((), p.compute), ((), p.compute)
    draw = [rng.standard_normal(p.shape(p.n_q, *tail)).astype(kind) for tail, kind in kinds]
    ct = Outputs(*draw)
    g = engine.backward(p, expected, ct)
    ranks, deal = DEALS[name]
    outputs, got, both = over_ranks(p, engine, deal, ranks, ct, low is not None)
    pairs = [(x, getattr(outputs, x), getattr(expected, x)) for x in ("out", "lse", "entropy", "low")]
    pairs += [(f"d{x}", getattr(got, x), getattr(g, x)) for x in ("query", "key", "value")]
    if p.sink is not None and p.sink.shape == (p.heads,):  # one process may sum its rows in another order
        np.testing.assert_allclose(got.sink, g.sink, rtol=1e-4, atol=1e-4)
    pairs += [(f"d{x} of all", getattr(both, x), getattr(g, x)) for x in ("query", "key", "value", "bias", "sink")]
    for table, x in g.tables.items():
        np.testing.assert_allclose(both.tables[table], x, rtol=1e-4, atol=1e-4)
    for x, a, b in pairs:
        assert (a is None) == (b is None), x
        if a is not None:
            np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64), err_msg=x)


@ENGINES
@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case: Case, deal: str, engine: str) -> None:
    q, k, v, options = case.inputs(np.float32)
    p = problem_from(q, k, v, **options)
    check(p, choose(p, engine), deal)


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
    "NaN behind the mask": {"mask": ~regard.mask(lambda b, h, i, j: (j >= 700) & (j < 900))},
}
KINDS = [(name, "float32") for name in WAYS] + [
    ("causal", "float64"),
    ("scores and dropout", "bfloat16"),
    ("sink", "float16"),
]


@ENGINES
@pytest.mark.parametrize("deal", ["3 stripes", "4 odd stripes", "5 uneven"])
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_long_calls(name: str, dtype: str, deal: str, engine: str) -> None:
    """Over several steps of keys and of rows, which begin within shards."""
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q, k, v = (rng.standard_normal((h, N, 8)).astype(kind) for h in (2, 1, 1))
    if name == "NaN behind the mask":
        k[:, 700:900], v[:, 700:900] = np.nan, np.inf
    p = problem_from(q, k, v, **WAYS[name])
    check(p, choose(p, engine), deal)


def test_only_what_is_seen_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank does not ask for is never there: it may be NaN."""

    def poisoned(asked: Any, rank: int) -> Any:
        given = received(asked, rank)
        absent = ~np.repeat(asked[rank].wanted[rank], programs.TILE)[: len(asked[rank].rows)]
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
        check(p, choose(p, "tiled"), "2 contiguous")


def test_these_tests_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, N, 8), dtype=np.float32)
    p = problem_from(q, k, v, causal=True)
    monkeypatch.setattr(sight, "KEY_STEP", 1024 + 128)  # splits that begin elsewhere
    with pytest.raises(AssertionError):
        check(p, choose(p, "tiled"), "3 stripes")
