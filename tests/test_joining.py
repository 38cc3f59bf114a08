"""Calls that make one sequence: the layer that they become has the weights that each call had."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import regard
from regard.interpret.capture import joining
from regard.interpret.capture.joining import ArrayStore, CallSequence, CapturedCall, JoinedCalls, UnjoinableCalls

RNG = np.random.default_rng(0)
N = 13
Q, K = RNG.standard_normal((2, 4, N, 8)), RNG.standard_normal((2, 2, N, 8))
BIAS, SHOWN = RNG.standard_normal((4, N, N)), RNG.random((2, 1, N, N)) < 0.8
SHOWN |= np.eye(N, dtype=bool)
IDS = np.arange(N) // 5
EDGES = (0, 6, 7, 8, 11, 13)
STEPS = list(pairwise(EDGES))


def documents(end: int) -> Any:
    """What a model would make anew for each call: a table as long as what is there."""
    ids = regard.table(IDS[:end])
    return regard.mask(lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i))


KINDS: dict[str, Any] = {
    "causal": lambda begin, end: {"causal": True},
    "a window": lambda begin, end: {"mask": regard.window(3)},
    "causal, and all for a single query": lambda begin, end: {"causal": True} if end - begin > 1 else {},
    "all that is there": lambda begin, end: {},
    "tables that grow": lambda begin, end: {"mask": documents(end)},
    "a prefix": lambda begin, end: {"mask": regard.prefix(4) | regard.causal()},
    "the number of keys": lambda begin, end: {"mask": regard.padding(end - 2, side="left")},
    "other rules later": lambda begin, end: {"mask": regard.window(9 if begin < 7 else 2)},
    "dense masks": lambda begin, end: {"mask": SHOWN[:, :, begin:end, :end], "causal": True},
    "a dense mask with a rule": lambda begin, end: {"mask": regard.window(5) & SHOWN[:, :, begin:end, :end]},
    "biases": lambda begin, end: {"bias": BIAS[:, begin:end, :end], "causal": True},
    "biases of keys": lambda begin, end: {"bias": BIAS[:, :1, :end], "causal": True},
    "some have biases": lambda begin, end: {
        "causal": True, "bias": None if begin == 7 else BIAS[:, begin:end, :end],
    },
    "scores and sinks": lambda begin, end: {
        "causal": True, "score": regard.alibi(np.arange(4.0)), "sink": BIAS[:, 0, 0].copy(), "scale": 0.5,
    },
}  # fmt: skip


def call(
    begin: int, end: int, options: dict[str, Any], first: int = 0, until: int | None = None
) -> tuple[CapturedCall, Any]:
    """The call on some queries and the keys from `first`, and its weights."""
    q, k = Q[:, :, begin:end], K[:, :, first : end if until is None else until]
    _, seen = regard.attention(q, k, k, observe=["lse"], **options)
    return CapturedCall.of(q.copy(), k.copy(), seen.lse, options, cross=False), regard.weights(q, k, **options)


def layer_of(calls: list[CapturedCall], heads: Any = None) -> Any:
    known = JoinedCalls(calls[0], ArrayStore(), heads)
    for x in calls[1:]:
        assert known.precedes(x)
        assert known.add(x)
    return known.layer("x", {}, (None, None), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_calls(kind: str) -> None:
    made = [call(begin, end, KINDS[kind](begin, end)) for begin, end in STEPS]
    layer = layer_of([x for x, _ in made])
    assert layer.deviation(rows=N) < 4
    for (begin, end), (_, weights) in zip(STEPS, made, strict=True):
        for b, h in np.ndindex(2, 4):
            found = layer.weights(h, slice(begin, end), batch=b)
            np.testing.assert_allclose(found[:, :end], weights[b, h], rtol=0, atol=1e-14)
            assert not found[:, end:].any()


def test_few_rules_say_it_all() -> None:
    for kind, text in (
        ("causal, and all for a single query", "causal()"), ("tables that grow", "mask(<lambda>)"),
        ("a prefix", "prefix(4) | causal()"), ("a window", "window(3)"),
    ):  # fmt: skip
        layer = layer_of([call(begin, end, KINDS[kind](begin, end))[0] for begin, end in STEPS])
        assert layer.options["mask"].text == text


def test_some_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["scores and sinks"]
    made = [call(begin, end, kind(begin, end) | {"bias": BIAS[:, begin:end, :end]}) for begin, end in STEPS]
    layer = layer_of([x for x, _ in made], heads=(3, 1))
    whole = layer_of([x for x, _ in made])
    for b in range(2):
        np.testing.assert_array_equal(layer.weights(0, batch=b), whole.weights(3, batch=b))
        np.testing.assert_array_equal(layer.weights(1, batch=b), whole.weights(1, batch=b))


def test_a_cache_that_slides() -> None:
    made = []
    for begin, end in STEPS:
        first = max(0, begin - 3)
        made.append(call(begin, end, {"mask": regard.window(3), "offset": begin, "origin": (0, 0, first)}, first))
    layer = layer_of([x for x, _ in made])
    expected = regard.weights(Q, K, mask=regard.window(3))
    np.testing.assert_allclose(layer.weights(2, batch=1), expected[1, 2], atol=1e-14)
    with pytest.raises(UnjoinableCalls, match="keys are missing between its calls"):
        layer_of([made[0][0], call(6, 7, {"offset": 6, "origin": (0, 0, 7)}, 7, 9)[0]])


def test_a_cache_that_was_made_in_full() -> None:
    options = [{"causal": True, "offset": begin} for begin, _ in STEPS]
    made = [call(begin, end, o, until=N) for (begin, end), o in zip(STEPS, options, strict=True)]
    some = layer_of([x for x, _ in made[:3]])
    assert (some.n_q, some.n_k) == (8, 8)
    np.testing.assert_allclose(some.weights(1), regard.weights(Q[:, :, :8], K[:, :, :8], causal=True)[0, 1], atol=1e-14)


def test_what_does_not_follow() -> None:
    first, later = call(0, 6, {})[0], call(6, 7, {})[0]
    known = JoinedCalls(first, ArrayStore())
    assert not known.precedes(first)
    assert not known.precedes(call(7, 8, {})[0])
    assert not CallSequence(first).precedes(
        CapturedCall.of(Q[:1, :, 6:7], K[:1, :, :7], np.zeros((1, 4, 1)), {}, False)
    )
    assert known.precedes(later)
    for position in (0, 5):  # sampled keys are compared, the first and the last among them
        key = later.key.copy()
        key[1, 1, position, 7] += 1e-9
        assert not known.add(CapturedCall.of(later.query, key, later.lse, {}, False))
    assert known.add(later)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scale": 0.5}, "its scale changes from call to call"),
        ({"score": regard.softcap(2.0)}, "its score changes from call to call"),
        ({"sink": np.zeros(4)}, "its sink changes from call to call"),
    ],
)
def test_what_makes_no_sequence(options: dict[str, Any], reason: str) -> None:
    known = JoinedCalls(call(0, 6, {})[0], ArrayStore())
    with pytest.raises(UnjoinableCalls, match=reason):
        known.add(call(6, 7, options)[0])


def test_too_many_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "RULES_AT_MOST", 2)
    calls = [call(begin, end, {"mask": regard.window(12 - begin)})[0] for begin, end in STEPS]
    with pytest.raises(UnjoinableCalls, match="more than 2 different masks follow each other"):
        layer_of(calls)


def test_masks_that_look_at_rows_of_another_sequence() -> None:
    options = {"mask": regard.mask(lambda b, h, i, j: i != j)}
    first, second = (CapturedCall.of(Q[:, :, n : n + 1], K, np.zeros((2, 4, 1)), options, cross=True) for n in (0, 1))
    with pytest.raises(UnjoinableCalls, match="its masks look at the positions of queries in another sequence"):
        JoinedCalls(first, ArrayStore()).add(second)


def test_steps_of_cross_attention() -> None:
    options = {"mask": regard.padding(np.array([9, 13]))}
    calls = []
    for n in range(3):
        q = Q[:, :, n : n + 1]
        _, seen = regard.attention(q, K, K, observe=["lse"], **options)
        calls.append(CapturedCall.of(q, K, seen.lse, options, cross=True))
    known = JoinedCalls(calls[0], ArrayStore())
    assert all(known.add(x) for x in calls[1:])
    layer = known.layer("x", {}, (None, None), 0)
    np.testing.assert_allclose(layer.weights(3, batch=0), regard.weights(Q[:, :, :3], K, **options)[0, 3], atol=1e-14)
    assert not known.add(CapturedCall.of(Q[:, :, :1], K + 1, np.zeros((2, 4, 1)), options, cross=True))


def test_leading_dimensions_become_one() -> None:
    q, k = RNG.standard_normal((2, 3, 4, 5, 8)), RNG.standard_normal((1, 3, 2, 7, 8))
    options = {"bias": RNG.standard_normal((2, 1, 4, 5, 7)), "mask": RNG.random((3, 1, 5, 7)) < 0.7,
               "offset": np.array([[2], [3]]), "causal": True}  # fmt: skip
    _, seen = regard.attention(q, k, k, observe=["lse"], **options)
    layer = JoinedCalls(CapturedCall.of(q, k, seen.lse, options, False), ArrayStore()).layer("x", {}, (None, None), 0)
    expected = regard.weights(q, k, **options).reshape(6, 4, 5, 7)
    for b, h in np.ndindex(6, 4):
        np.testing.assert_array_equal(layer.weights(h, batch=b), expected[b, h])
