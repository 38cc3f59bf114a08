"""Blocks of dense masks and biases: what is empty or full is found in any array, and changes no result."""

from collections.abc import Callable
from dataclasses import is_dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import regard
from regard.core.statistics import NAMES
from regard.engines.cpu.schedule import stages, work
from regard.engines.cpu.schedule.arguments import arrays_of
from regard.engines.cpu.schedule.block_mask import BlockMask, hides
from regard.engines.cpu.spec.tiles import PART
from regard.engines.cpu.target.instructions import chosen
from regard.ops.normalization import problem_from
from regard.rules import Ranges, interval

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
N_Q, N_K = 331, 421


def window(n_q: int = N_Q, n_k: int = N_K) -> Array:
    i, j = np.ogrid[:n_q, :n_k]
    return np.asarray(abs(i - j) < 40)


def blocks(*lead: int) -> Array:
    """Another array for each of the leading dimensions: rectangles, and single bytes that differ."""
    made = np.repeat(np.repeat(RNG.random((*lead, 8, 10)) < 0.5, 45, -2), 45, -1)[..., :N_Q, :N_K]
    at = tuple(RNG.integers(0, n, 20) for n in made.shape)
    made[at] ^= True
    return made


ARRAYS: dict[str, Callable[[], Array]] = {
    "window": window,
    "heads": lambda: blocks(4),
    "batch": lambda: blocks(2, 1),
    "batch and heads": lambda: blocks(2, 4),
    "rows alike": lambda: blocks(2, 1)[:, :, :1],
    "every other row": lambda: np.repeat(blocks(4), 2, -2)[:, ::2],
    "reversed rows": lambda: blocks()[::-1],
    "keys apart": lambda: np.ascontiguousarray(blocks().T).T,
    "keys alike": lambda: blocks()[:, :1],
    "full": lambda: np.ones((N_Q, N_K), bool),
    "empty": lambda: np.zeros((N_Q, N_K), bool),
    "bytes that are no booleans": lambda: np.where(blocks(), 0xFE, 0).astype(np.uint8).view(bool),
}


@pytest.fixture(autouse=True)
def small_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "BLOCK_MASK", 1)
    monkeypatch.setattr(work, "_schedules", {})


def arrays() -> tuple[Array, Array, Array]:
    q, k, v = (RNG.standard_normal((2, 4, n, 16), dtype=np.float32) for n in (N_Q, N_K, N_K))
    return q, k, v


@pytest.mark.parametrize("dtype", [None, np.float64, np.float32, np.float16])
@pytest.mark.parametrize("each", [1, 7, 24, 1000])
def test_bounds_are_those_of_the_array(each: int, dtype: Any) -> None:
    mask = blocks(2, 3)
    x = mask.view(np.int8) if dtype is None else np.where(mask, 1, -np.inf).astype(dtype)
    first = 5
    found = BlockMask(x, first, each, chosen(), 2)
    rows = np.arange(N_Q - first) // each
    for _ in range(40):
        at = tuple(RNG.integers(0, n) for n in mask.shape[:2])
        top, bottom = np.sort(RNG.integers(first, N_Q, 2))
        left, right = np.sort(RNG.integers(0, N_K, 2))
        inside = (rows >= rows[top - first]) & (rows <= rows[bottom - first])  # whole blocks
        part = mask[at][first:][inside][:, left // PART * PART : (right // PART + 1) * PART]
        least, greatest = found.bounds(at, (np.array(top), np.array(bottom)), (np.array(left), np.array(right)))
        assert (bool(least), bool(greatest)) == (part.all(), part.any())


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("threads", [1, 2])
def test_results_are_those_without(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, statistics, gradients, tangents and second derivatives have the same bits."""
    monkeypatch.setattr("regard.runtime.threads._chosen", threads)
    q, k, v = arrays()
    mask = ARRAYS[name]()
    options: list[dict[str, Any]] = [
        {"mask": mask},
        {"mask": ~regard.mask(mask) & regard.causal(), "offset": 100},
        {"mask": regard.mask(mask) | regard.window(9)},
    ]
    if name == "heads":
        options.append({"mask": mask, "bias": RNG.standard_normal((4, N_Q, N_K)), "dropout": 0.1, "seed": 3})
    dout = RNG.standard_normal(q.shape, dtype=np.float32)
    for some in options:

        def results(some: dict[str, Any] = some) -> list[Any]:
            out, seen = regard.attention(q, k, v, observe=["lse", "received", "visible"], **some, engine="cpu")
            g = regard.attention_vjp(q, k, v, dout, **some, engine="cpu")
            _, t = regard.attention_jvp(q, k, v, dquery=q, dvalue=v, **some, engine="cpu")
            return [out, seen.lse, seen.received, seen.visible, g.query, g.key, g.value, t.out]

        found = results()
        with monkeypatch.context() as patch:
            patch.setattr(stages, "BLOCK_MASK", 2**62)
            expected = results()
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def pairs(**options: Any) -> int:
    """Tiles of queries and keys that a call goes through."""
    q, k, v = arrays()
    p = problem_from(q, k, v, **options)
    results = work.KernelResults(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
    schedule = work.schedule_for(p, chosen(), results, arrays_of(p, results.own(p)), range(p.n_q), 1)
    count = results.spec(p, chosen(), p.n_q).block_fields.index("count")
    return sum(int(stage.blocks[:, count].sum()) for stage in schedule.stages)


def test_an_array_costs_what_the_rule_costs() -> None:
    rule = regard.window(39, 39)
    assert pairs(mask=window()) == pairs(mask=rule, offset=0) < pairs()
    bias = np.where(window(), 0, -np.inf).astype(np.float32)
    assert pairs(bias=bias) == pairs(mask=rule, offset=0)
    for least in (np.finfo(np.float32).min, -1e9, -5000):
        assert pairs(bias=np.where(window(), 0, least).astype(np.float32)) == pairs(mask=rule, offset=0)
    assert pairs(bias=np.where(window(), 0, -1000).astype(np.float32)) == pairs()  # whose weight may not be 0


def of_minima(bias: Array, *rows: int) -> Array:
    """A bias with some rows of nothing but its minimum."""
    bias = bias.copy()
    bias[..., rows, :] = bias.min()
    return bias


def low(least: float, hidden: Any = window, dtype: Any = np.float32) -> Array:
    return np.where(hidden(), RNG.standard_normal((N_Q, N_K)), least).astype(dtype)


BIASES: dict[str, Callable[[], Array]] = {
    "float32's minimum": lambda: low(np.finfo(np.float32).min),
    "-1e9": lambda: low(-1e9, lambda: blocks(2, 4)),
    "-5000 in float16": lambda: low(-5000, dtype=np.float16),
    "rows of minima": lambda: of_minima(low(-1e9), 0, 40, 41, 42, 330),
    "infinities too": lambda: np.where(blocks(), low(-1e9), -np.inf).astype(np.float32),
    "NaN": lambda: np.where(blocks(), low(-1e9), np.nan).astype(np.float32),
    "padding": lambda: np.where(np.arange(N_K) < [[[[300]]], [[[50]]]], 0, -1e9).astype(np.float32),
    "distances": lambda: -40.0 * abs(np.arange(N_Q)[:, None] - np.arange(N_K)).astype(np.float32),
    "no usual number": lambda: low(-1e9) - np.float32(2000),
}
CHANGES: dict[str, Callable[[Array, Array, Array], None]] = {
    "": lambda q, k, v: None,
    "a score of 1e9": lambda q, k, v: k.__setitem__((0, 0, 400), 1e9),
    "NaN in a key": lambda q, k, v: k.__setitem__((0, 0, 400, 3), np.nan),
    "NaN in a value": lambda q, k, v: v.__setitem__((1, 2, 400, 3), np.nan),
    "infinity in a value": lambda q, k, v: v.__setitem__((1, 2, 5, 3), np.inf),
    "NaN in a query": lambda q, k, v: q.__setitem__((1, 2, 300, 3), np.nan),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", BIASES)
@np.errstate(over="ignore")  # gradients in float16
def test_low_numbers_are_skipped_where_nothing_changes(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every statistic and derivative has the bits of a call that skips infinities alone."""
    q, k, v = arrays()
    CHANGES[change](q, k, v)
    dout = RNG.standard_normal(q.shape, dtype=np.float32)
    options: list[dict[str, Any]] = [
        {"bias": BIASES[name]()},
        {"bias": BIASES[name](), "sink": np.array([0.0, 1, -2, 3]), "dropout": 0.2, "seed": 5},
        {"bias": BIASES[name](), "causal": True, "offset": 60},
    ]
    observe = [*NAMES, regard.top(1), regard.top(4), regard.pooled(5, 7), regard.weights_of([0, 41, 200])]
    for some in options:

        def results(some: dict[str, Any] = some) -> list[Any]:
            found = [regard.attention(q, k, v, engine="cpu", **some)]
            for names in ([], ["entropy", "max"], ["argmax"], observe):
                out, seen = regard.attention(q, k, v, observe=["lse", *names], **some, engine="cpu")
                found += [out, *(x for y in seen.values() for x in (vars(y).values() if is_dataclass(y) else [y]))]
            for given in ({}, {"dlse": seen.entropy, "dentropy": seen.lse}):
                g = regard.attention_vjp(q, k, v, dout, **given, **some, engine="cpu")
                found += [g.query, g.key, g.value, g.bias]
            _, t = regard.attention_jvp(q, k, v, dquery=q, dvalue=v, **some, engine="cpu")
            return [*found, t.out]

        found = results()
        with monkeypatch.context() as patch:
            patch.setattr(stages, "least_visible", lambda p: -np.inf)
            expected = results()
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_number_that_is_not_finite_makes_low_numbers_visible() -> None:
    """A key of 1e10 behind −1e9 has the weight 1."""
    q, k, v = np.ones((3, 1, 300, 8), np.float32)
    bias = np.where(np.arange(300) < 200, 0, -1e9).astype(np.float32)[None]
    k[0, 250], v[0, 250] = 1e10, 2
    assert regard.attention(q, k, v, bias=bias, engine="cpu").tolist() == np.full((1, 300, 8), 2.0).tolist()
    k[0, 250], v[0, 250] = 0, np.nan
    assert np.isnan(regard.attention(q, k, v, bias=bias, engine="cpu")).all()


def test_schedules_do_not_depend_on_earlier_contents() -> None:
    """In any order of calls, each goes through the tiles that it needs alone."""
    hiding, low_, plain = (np.where(window(), 0, x).astype(np.float32) for x in (-np.inf, -1e9, -1))
    alone = [pairs(bias=x) for x in (hiding, low_, plain)]
    for order in permutations(range(3)):
        work._schedules.clear()
        assert [pairs(bias=(hiding, low_, plain)[n]) for n in order] == [alone[n] for n in order]
    assert alone[0] == alone[1] < alone[2]


def test_changes_in_place_are_seen() -> None:
    q, k, v = arrays()
    mask = window()
    rule = regard.mask(mask)
    first = regard.attention(q, k, v, mask=rule)
    mask[:] = ~mask
    assert not np.array_equal(regard.attention(q, k, v, mask=mask), first)
    np.testing.assert_array_equal(
        regard.attention(q, k, v, mask=mask), regard.attention(q, k, v, mask=~regard.window(39, 39), offset=0)
    )


def test_a_bias_with_infinities_has_gradients_where_it_hides() -> None:
    """What is skipped is 0 there, not what was in memory before."""
    q, k, v = arrays()
    bias = np.where(blocks(2, 4), RNG.standard_normal((2, 4, N_Q, N_K)), -np.inf).astype(np.float32)
    assert hides(bias)
    dout = RNG.standard_normal(q.shape, dtype=np.float32)
    g, expected = (regard.attention_vjp(q, k, v, dout, bias=bias, engine=engine) for engine in ("cpu", "tiled"))
    assert (g.bias[np.isneginf(bias)] == 0).all()
    np.testing.assert_allclose(g.bias, expected.bias, rtol=0, atol=1e-5)


def test_ranges_without_arrays_know_nothing_of_them() -> None:
    node = regard.mask(np.zeros((2, 2), bool)).node
    assert interval(node, Ranges(i=(0, 1), j=(0, 1)))[:2] == (0, 1)
