"""Calls that make one sequence: the layer that they become has the weights that each call had."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import regard
from regard.interpret.capture import joining
from regard.interpret.capture.calls import CallSequence, CapturedCall, Continuation
from regard.interpret.capture.joining import ArrayStore, JoinedCalls, UnjoinableCalls

pytestmark = pytest.mark.engine("tiled")

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
    sequence, joined = CallSequence(calls[0]), JoinedCalls(calls[0], ArrayStore(), heads)
    for x in calls[1:]:
        how = sequence.continuation(x)
        assert how is not None
        sequence.add(x, how)
        joined.add(x, how)
    return joined.layer("x", {}, (None, None), 0)


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
        for head in (3, 1):
            np.testing.assert_array_equal(layer.weights(head, batch=b), whole.weights(head, batch=b))


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


@pytest.mark.engine("cpu")
def test_a_cache_that_was_made_in_full() -> None:
    options = [{"causal": True, "offset": begin} for begin, _ in STEPS]
    made = [call(begin, end, o, until=N) for (begin, end), o in zip(STEPS, options, strict=True)]
    some = layer_of([x for x, _ in made[:3]])
    assert (some.n_q, some.n_k) == (8, 8)
    np.testing.assert_allclose(some.weights(1), regard.weights(Q[:, :, :8], K[:, :, :8], causal=True)[0, 1], atol=1e-14)


def test_what_does_not_follow() -> None:
    first, later = call(0, 6, {})[0], call(6, 7, {})[0]
    known = CallSequence(first)
    assert known.continuation(first) is None
    assert known.continuation(call(7, 8, {})[0]) is None
    assert known.continuation(CapturedCall.of(Q[:1, :2, 6:7], K[:1, :, :7], np.zeros((1, 2, 1)), {}, False)) is None
    assert known.continuation(later) == Continuation(6, ((0,), (1,)))
    for position in (0, 5):  # sampled keys are compared, the first and the last among them
        key = later.key.copy()
        key[1, 1, position, 7] += 1e-9
        assert known.continuation(CapturedCall.of(later.query, key, later.lse, {}, False)) is None


@pytest.mark.parametrize("kind", ["causal", "a window", "tables that grow", "dense masks", "biases", "a prefix"])
def test_a_call_that_goes_back_in_its_cache(kind: str) -> None:
    steps = [(0, 6), (6, 10), (7, 8), (8, 13), (11, 13)]
    made = [call(begin, end, KINDS[kind](begin, end)) for begin, end in steps]
    rejected = np.random.default_rng(1).standard_normal((2, 4, 4, 8))
    for n, places in ((1, slice(7, 10)), (3, slice(11, 13))):  # their keys are others than those that come later
        x = made[n][0]
        key = x.key.copy()
        key[:, :, places] = rejected[:, :2, : places.stop - places.start]
        made[n] = replace(x, key=key), made[n][1]
    layer = layer_of([x for x, _ in made])
    assert (layer.n_q, layer.n_k) == (13, 13)
    np.testing.assert_array_equal(layer.key, K)
    for begin, end, n in ((0, 6, 0), (6, 7, 1), (7, 8, 2), (8, 11, 3), (11, 13, 4)):
        rows = slice(begin - steps[n][0], end - steps[n][0])
        expected = made[n][1][1, 2, rows]
        np.testing.assert_allclose(layer.weights(2, slice(begin, end), batch=1)[:, : steps[n][1]], expected, atol=1e-14)


def test_a_call_that_replaces_keys_that_were_seen() -> None:
    with pytest.raises(UnjoinableCalls, match="a later call replaces keys that its queries have seen"):
        layer_of([call(0, 6, {})[0], call(4, 6, {})[0]])


def test_batch_elements_that_change_places() -> None:
    """As in beam search: keys of one step are another element's in the next, and prompts are the same."""
    shown = SHOWN[:, :, :, :] & np.tril(np.ones((N, N), bool))
    key, order = K.copy(), np.array([1, 1, 0])
    key[1, :, :4] = key[0, :, :4]
    key = key[[0, 1, 0]]
    key[2, :, 8] += 1
    query = Q[[0, 1, 0]]
    mask = shown[[0, 0, 0]]
    calls = []
    for begin, end in ((0, 4), (4, 9), (9, 10)):
        k = key if begin < 9 else np.concatenate([key[order, :, :9], key[:, :, 9:]], axis=2)
        options = {"mask": mask[:, :, begin:end, :end]}
        q = query[:, :, begin:end]
        lse = regard.attention(q, k[:, :, :end], k[:, :, :end], observe=["lse"], **options)[1].lse
        calls.append(CapturedCall.of(q, k[:, :, :end], lse, options, False))
    sequence = CallSequence(calls[0])
    how = sequence.continuation(calls[1])
    assert how is not None
    assert how.order == [0, 1, 2]
    sequence.add(calls[1], how)
    again = sequence.continuation(calls[2])
    assert again is not None
    assert again.order == [1, 1, 0]
    layer = layer_of(calls)
    assert layer.deviation(rows=10) < 4
    np.testing.assert_array_equal(layer.query[:, :, :9], query[order, :, :9])


@pytest.mark.parametrize(("causal", "own_keys"), [(False, False), (False, True), (True, True)])
def test_pieces_of_one_forward(causal: bool, own_keys: bool) -> None:
    bounds, alibi = [(0, 5), (5, 6), (6, 13)], regard.alibi(np.arange(4.0))
    expected, calls = np.zeros((2, 4, N, N)), []
    for begin, end in bounds:
        keys = slice(begin, end) if own_keys else slice(0, N)
        options = {"score": alibi, "causal": causal} | ({} if own_keys else {"offset": begin})
        q, k = Q[:, :, begin:end], K[:, :, keys]
        lse = regard.attention(q, k, k, observe=["lse"], **options)[1].lse
        calls.append(CapturedCall.of(q, k, lse, options, False))
        expected[:, :, begin:end, keys] = regard.weights(q, k, **options)
    joined = JoinedCalls(calls[0], ArrayStore())
    assert all(joined.add_piece(x, own_keys) for x in calls[1:])
    layer = joined.layer("x", {}, (None, None), 0)
    assert layer.n_k == N
    assert ("documents" in repr(layer)) == own_keys
    np.testing.assert_allclose(layer.weights(3, batch=1), expected[1, 3], atol=1e-14)
    joined.order = np.random.default_rng(0).permutation(N)
    sorted_layer = joined.layer("x", {}, (None, None), 0)
    moved = expected[:, :, joined.order][..., joined.order]
    np.testing.assert_allclose(sorted_layer.weights(3, batch=1), moved[1, 3], atol=1e-14)
    for other in ({"scale": 0.5}, {"score": alibi, "causal": causal, "bias": np.zeros((4, 7))}):
        x = CapturedCall.of(Q[:, :, 6:], K[:, :, 6:], np.zeros((2, 4, 7)), other, False)
        assert not joined.add_piece(x, True)


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
        known.add(call(6, 7, options)[0], Continuation(6, ((0,), (1,))))


def test_too_many_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "RULES_AT_MOST", 2)
    calls = [call(begin, end, {"mask": regard.window(12 - begin)})[0] for begin, end in STEPS]
    with pytest.raises(UnjoinableCalls, match="more than 2 different masks follow each other"):
        layer_of(calls)


def test_masks_that_look_at_rows_of_another_sequence() -> None:
    options = {"mask": regard.mask(lambda b, h, i, j: i != j)}
    first, second = (CapturedCall.of(Q[:, :, n : n + 1], K, np.zeros((2, 4, 1)), options, cross=True) for n in (0, 1))
    with pytest.raises(UnjoinableCalls, match="its masks look at the positions of queries in another sequence"):
        JoinedCalls(first, ArrayStore()).add(second, Continuation(1, ((0,), (1,))))


def test_steps_of_cross_attention() -> None:
    options = {"mask": regard.padding(np.array([9, 13]))}
    calls = []
    for n in range(3):
        q = Q[:, :, n : n + 1]
        _, seen = regard.attention(q, K, K, observe=["lse"], **options)
        calls.append(CapturedCall.of(q, K, seen.lse, options, cross=True))
    sequence, known = CallSequence(calls[0]), JoinedCalls(calls[0], ArrayStore())
    for n, x in enumerate(calls[1:], 1):
        how = sequence.continuation(x, Continuation(n, ((0,), (1,))))
        assert how == Continuation(n, ((0,), (1,)))
        sequence.add(x, how)
        known.add(x, how)
    layer = known.layer("x", {}, (None, None), 0)
    np.testing.assert_allclose(layer.weights(3, batch=0), regard.weights(Q[:, :, :3], K, **options)[0, 3], atol=1e-14)
    other = CapturedCall.of(Q[:, :, :1], K + 1, np.zeros((2, 4, 1)), options, cross=True)
    assert sequence.continuation(other, Continuation(3, ((0,), (1,)))) is None
    assert sequence.continuation(calls[0]) is None


def test_leading_dimensions_become_one() -> None:
    q, k = RNG.standard_normal((2, 3, 4, 5, 8)), RNG.standard_normal((1, 3, 2, 7, 8))
    options = {"bias": RNG.standard_normal((2, 1, 4, 5, 7)), "mask": RNG.random((3, 1, 5, 7)) < 0.7,
               "offset": np.array([[2], [3]]), "causal": True}  # fmt: skip
    _, seen = regard.attention(q, k, k, observe=["lse"], **options)
    layer = JoinedCalls(CapturedCall.of(q, k, seen.lse, options, False), ArrayStore()).layer("x", {}, (None, None), 0)
    expected = regard.weights(q, k, **options).reshape(6, 4, 5, 7)
    for b, h in np.ndindex(6, 4):
        np.testing.assert_array_equal(layer.weights(h, batch=b), expected[b, h])
