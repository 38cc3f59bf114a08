"""What is remembered between calls is never stale, and lets go of arrays."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.engines import cpu
from regard.engines.cpu.target.instructions import targets
from regard.ops import callcache
from regard.ops.normalization import problem_from
from regard.rules import Program, causal, window

Array = np.ndarray[Any, np.dtype[Any]]
cpu_forward = cpu.forward
X = np.random.default_rng(0).standard_normal((2, 6, 4))
ANEW = tuple(map(int, "000"))  # not the default itself, so that nothing kept serves the call
CAUSAL = np.tril(np.ones((6, 6), bool))


def call(**wishes: Any) -> Array:
    out: Array = regard.attention(X, X, X, **wishes)
    return out


@pytest.mark.parametrize("more", [{}, {"causal": True}])
def test_an_array_that_is_changed_in_place(more: dict[str, Any]) -> None:
    flags = CAUSAL.copy()
    rule = regard.window(None, None) & flags
    for mask in (flags, rule):
        np.testing.assert_array_equal(call(mask=mask, **more), call(causal=True))
    flags[:] = np.eye(6, dtype=bool)
    np.testing.assert_allclose(call(mask=flags, **more), X, atol=1e-15)
    np.testing.assert_array_equal(call(mask=rule, **more), call(causal=True))  # a rule has a copy


def test_integers_are_looked_at_in_every_call() -> None:
    flags = CAUSAL.astype(int)
    np.testing.assert_array_equal(call(mask=flags), call(causal=True))
    flags[3, 4] = 2
    with pytest.raises(ValueError, match="mask must be booleans or 0/1 integers, got 2"):
        call(mask=flags)


def test_an_offset_that_is_changed_in_place() -> None:
    offset = np.array(0)
    assert not np.array_equal(call(causal=True, offset=offset), call())
    offset[...] = 5
    np.testing.assert_array_equal(call(causal=True, offset=offset), call())
    offset[...] = 2**62 + 1
    with pytest.raises(ValueError, match=r"offset must be within ±2\*\*62"):
        call(causal=True, offset=offset)


def test_a_number_that_a_rule_takes_from_elsewhere() -> None:
    reach = [0]

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return abs(i - j) <= reach[0]

    np.testing.assert_allclose(call(mask=near), X, atol=1e-15)
    reach[0] = 6
    np.testing.assert_array_equal(call(mask=near), call())

    def near_only(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - 1e9 * (abs(i - j) > reach[0])

    np.testing.assert_allclose(call(score=near_only), call(), atol=1e-12)
    reach[0] = 0
    np.testing.assert_allclose(call(score=near_only), X, atol=1e-15)


def test_the_same_rule_is_the_same_expression_in_every_call() -> None:
    """So that an engine knows it again without reading it."""

    def program(mask: Any = None) -> Program:
        node = problem_from(X, X, X, mask=mask, causal=True).mask_node
        assert node is not None
        return Program.of([node])

    mask = window(3)
    assert program(mask) is program(mask)
    assert program(mask) is not program(window(3))
    assert program() is Program.of([causal().node])


@pytest.mark.parametrize("more", [{}, {"causal": True}])
def test_what_is_remembered_of_a_rule_goes_with_it(more: dict[str, Any]) -> None:
    flags = CAUSAL.copy()
    table = regard.table(np.ones(2))
    alive = [weakref.ref(flags), weakref.ref(table)]
    gc.collect()
    gc.disable()
    try:
        mask, score = regard.window(None, None) & flags, regard.alibi(table)
        call(mask=mask, score=score, **more)
        assert [x() is None for x in alive] == [False, False]
        del flags, table, mask, score
        assert [x() is None for x in alive] == [True, True]
    finally:
        gc.enable()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"causal": 0}, "causal must be a bool"),
    "scale": ({"scale": True}, "scale must be a number"),
    "dropout": ({"dropout": False}, "dropout must be a number"),
    "origin": ({"origin": (False, 0, 0)}, "b of origin must be an int"),
    "layout": ({"layout": "BHND"}, "layout must be"),
    "observe": ({"observe": "lse"}, "observe must be a sequence"),
    "key": ({"key": X[:, :, :3]}, "the same number of features"),
    "heads": ({"query": X[:1]}, "must be a multiple"),
    "dtype": ({"value": X.astype(np.float32)}, "must share one dtype"),
    "class": ({"query": np.ma.masked_array(np.ones((3, 6, 4)))}, "query must be a NumPy array"),
    "documents": ({"mask": regard.documents(np.zeros(5, int))}, "but this call reaches"),
    "slopes": ({"score": regard.alibi(np.ones(2))}, "but this call reaches"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_seen_after_the_right_one(name: str) -> None:
    options, message = WRONG[name]
    right: dict[str, Any] = dict.fromkeys(("query", "key", "value"), np.ones((3, 6, 4))) | {"scale": 1.0}
    regard.attention(**right)
    with pytest.raises((TypeError, ValueError), match=message):
        regard.attention(**right | options)


def test_an_array_whose_shape_is_changed_in_place() -> None:
    flags = CAUSAL.copy()
    call(mask=flags)
    flags.resize((4, 9), refcheck=False)
    with pytest.raises(ValueError, match="mask must align right"):
        call(mask=flags)


def test_the_same_rule_in_a_longer_call() -> None:
    mask = regard.documents(np.arange(6))
    np.testing.assert_allclose(call(mask=mask), X, atol=1e-15)
    longer = np.zeros((2, 7, 4))
    with pytest.raises(ValueError, match="but this call reaches"):
        regard.attention(longer, longer, longer, mask=mask)


@pytest.mark.parametrize("name", ["scale", "zero", "mask", "score", "layout", "causal", "query", "key", "value"])
def test_a_call_of_another_form_has_another_result(name: str) -> None:
    upward = regard.score(lambda s, b, h, i, j: regard.where(1.0 / s > 0.0, 1.0, 2.0))
    forms: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "scale": ({"scale": 0.5}, {"scale": 2.0}),
        "zero": ({"scale": 0.0, "score": upward}, {"scale": -0.0, "score": upward}),
        "mask": ({"mask": regard.window(2)}, {"mask": regard.window(3)}),
        "score": ({"score": upward}, {"score": regard.softcap(0.5)}),
        "layout": ({"layout": "bhnd"}, {"layout": "bnhd"}),
        "causal": ({}, {"causal": True}),
        **{name: ({}, {name: X[::-1]}) for name in ("query", "key", "value")},  # other strides
    }
    inputs = {"query": X, "key": X, "value": X}
    with np.errstate(divide="ignore"):
        results = []
        for options in forms[name] * 2:
            found = regard.attention(**inputs | options, engine="spec" if name == "zero" else None)
            expected = regard.attention(**inputs | options, engine="spec", origin=ANEW)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
            results.append(found)
    assert not np.allclose(*results[:2])


def test_what_is_made_of_a_call_is_another_call() -> None:
    """Weights without lse take a call whose values have no features."""
    expected = regard.attention(X, X, np.eye(6)[None].repeat(2, 0), origin=ANEW)
    for _ in range(2):
        call()
        np.testing.assert_allclose(regard.weights(X, X), expected, atol=1e-12)


# Calls that are kept whole

FORMS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (((2, 6, 4),) * 3, {}),
    "one matrix": (((6, 4),) * 3, {"causal": True}),
    "positions first": (((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 3)), {"layout": "bnhd", "scale": 0.5}),
    "decoding, broadcast": (((3, 1, 4, 1, 40), (2, 2, 300, 40), (2, 2, 300, 8)), {"causal": True}),
    "window": (((2, 130, 16),) * 3, {"mask": regard.window(20)}),
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("form", FORMS)
def test_a_kept_call_gives_what_the_first_gave(form: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, options = FORMS[form]
    known(options)
    kept = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        calls = seen_calls(monkeypatch)
        got, expected = regard.attention(q, k, v, **options), regard.attention(q, k, v, **options, engine="cpu")
        assert len(calls) == (1 if seed else 2)  # of the engine itself
        assert (got.dtype, got.shape, got.strides) == (expected.dtype, expected.shape, expected.strides)
        kept.append((got, expected))
    for got, expected in kept:  # none lies where another does
        assert got.tobytes() == expected.tobytes()


def known(options: dict[str, Any]) -> None:
    """Let rules be those of an earlier call: only of such are calls kept."""
    regard.attention(X, X, X, **{name: rule for name, rule in options.items() if name in ("mask", "score", "causal")})


def test_a_call_is_kept_for_a_rule_that_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its third call at the latest; one whose numbers change is never kept."""
    for n in range(4):
        calls = seen_calls(monkeypatch)
        call(mask=window(1234))
        assert len(calls) == (n < 2)
    stored = len(callcache.entries())
    for n in range(4):
        calls = seen_calls(monkeypatch)
        call(mask=window(2345 + n))
        assert len(calls) == 1
    assert len(callcache.entries()) == stored


def seen_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problems that are given to the engine from here on."""
    seen: list[Any] = []

    def forward(p: Any, rows: Any = None, run: Any = cpu_forward) -> Any:
        seen.append(p)
        return run(p, rows)

    monkeypatch.setattr(cpu, "forward", forward)
    return seen


def test_a_kept_call_belongs_to_its_thread_and_target(monkeypatch: pytest.MonkeyPatch) -> None:
    call(causal=True)
    calls = seen_calls(monkeypatch)
    call(causal=True)
    assert not calls
    with ThreadPoolExecutor(1) as other:
        np.testing.assert_array_equal(other.submit(call, causal=True).result(), call(causal=True))
    assert len(calls) == 1
    name = [t.name for t in targets().values() if t.runs][-1]
    monkeypatch.setenv("REGARD_CPU", name)
    call(causal=True)
    assert len(calls) == 2


def test_a_call_with_wishes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"return_weights": True}, {"observe": ("lse",)}, {"engine": "cpu"}):
        call(**options)
        calls = seen_calls(monkeypatch)
        call(**options)
        assert len(calls) == 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rules", [{}, {"mask": window(100)}, {"causal": True, "score": regard.softcap(3.0)}])
def test_a_call_with_work_for_threads_is_kept(threads: int, rules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.runtime.threads._chosen", threads)
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 1100, 64)).astype(np.float32)
    known(rules)
    first = regard.attention(q, k, v, **rules)
    calls = seen_calls(monkeypatch)
    for arrays in ((q, k, v), (q.copy(), k, v.copy())):
        np.testing.assert_array_equal(regard.attention(*arrays, **rules), first)
    assert not calls
    np.testing.assert_array_equal(regard.attention(q, k, v, **rules, engine="cpu"), first)
    assert len(calls) == 1
    assert not np.array_equal(regard.attention(q[:, ::-1].copy(), k, v, **rules), first)


def test_a_call_of_many_queries_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.engines.cpu.schedule.prepared.MOST_QUERIES", 11)
    monkeypatch.setattr(callcache, "_thread", SimpleNamespace())
    call()
    calls = seen_calls(monkeypatch)
    call()
    assert len(calls) == 1


def test_calls_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callcache, "_thread", SimpleNamespace())
    monkeypatch.setattr(callcache, "SIZE", 3)
    for n in (1, 2, 3, 4, 5, 5):
        regard.attention(X[:, :n], X, X)
    assert [operands[1] for operands, *_ in callcache.entries()] == [(2, 3, 4), (2, 4, 4), (2, 5, 4)]


def with_arrays(seed: int, layout: str) -> dict[str, Any]:
    """Options whose arrays differ from call to call; layout: of their memory."""
    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {"bias": rng.standard_normal((6, 6)), "mask": rng.random((6, 6)) < 0.7}
    if layout == "transposed":
        made = {name: np.ascontiguousarray(x.T).T for name, x in made.items()}
    if layout == "broadcast":
        made = {name: np.broadcast_to(x[:1], (2, 6, 6)) for name, x in made.items()}
    sink = rng.standard_normal(4)
    return made | {"sink": sink[::2] if layout == "strided" else sink[:2]}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "broadcast", "strided"])
@pytest.mark.parametrize("names", [("bias",), ("mask",), ("sink",), ("bias", "mask", "sink")], ids=str)
def test_arrays_of_a_known_call(names: tuple[str, ...], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias, a mask and a sink are read in each call, and dropout takes its seed."""
    for seed in range(4):
        given = {name: x for name, x in with_arrays(seed, layout).items() if name in names}
        options: dict[str, Any] = given | {"dropout": 0.2, "seed": seed, "score": regard.softcap(3.5)}
        calls = seen_calls(monkeypatch)
        found = call(**options)
        assert seed < 2 or not calls
        assert found.tobytes() == call(**options, engine="cpu").tobytes()
