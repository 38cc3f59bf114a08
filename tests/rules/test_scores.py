"""Each score against its formula, its text, its tables, and its arguments."""

import ml_dtypes
import numpy as np
import pytest

from regard.positions import t5_buckets
from regard.rules import (
    At,
    Program,
    Requirement,
    Table,
    alibi,
    as_score,
    compose,
    evaluate,
    partials,
    relative,
    score,
    softcap,
    table,
    temperature,
)

H, N, KEYS = 2, 5, 7
S = np.random.default_rng(0).normal(size=(1, H, N, KEYS)) * 3
I, J = np.arange(N)[:, None] + KEYS - N, np.arange(KEYS)
HEAD = np.arange(H)[:, None, None]


def value(rule, s=S, dtype=np.float64):
    at = At(np.zeros((1, 1, 1, 1), int), HEAD, I, J, s=s.astype(dtype), dtype=dtype)
    return np.broadcast_to(evaluate([as_score(rule).node], at)[0], S.shape)


PER_HEAD = np.array([2.0, 0.5])
OFFSETS = np.arange(10.0).reshape(H, 5)
LEARNED = np.random.default_rng(1).normal(size=(H, 8))
CASES = [
    (softcap(2.0), lambda: 2 * np.tanh(S / 2), "softcap(2.0)"),
    (softcap(50), lambda: 50 * np.tanh(S / 50), "softcap(50.0)"),
    (softcap(PER_HEAD), lambda: PER_HEAD[HEAD] * np.tanh(S / PER_HEAD[HEAD]), "softcap(array of shape (2,))"),
    (temperature(0.5), lambda: S / 0.5, "temperature(0.5)"),
    (temperature(np.float32(0.5)), lambda: S / 0.5, "temperature(0.5)"),
    (temperature(table(PER_HEAD)), lambda: S / PER_HEAD[HEAD], "temperature(array of shape (2,))"),
    (temperature(table(0.5)), lambda: S / 0.5, "temperature(array of shape ())"),
    (alibi(PER_HEAD), lambda: S - PER_HEAD[HEAD] * np.abs(I - J), "alibi(array of shape (2,))"),
    (alibi(PER_HEAD[None]), lambda: S - PER_HEAD[HEAD] * np.abs(I - J), "alibi(array of shape (1, 2))"),
    (alibi(0.25), lambda: S - 0.25 * np.abs(I - J), "alibi(0.25)"),
    (relative(OFFSETS), lambda: S + OFFSETS[HEAD, np.clip(J - I, -2, 2) + 2], "relative(array of shape (2, 5))"),
    (relative(OFFSETS[1, :3]), lambda: S + OFFSETS[1][np.clip(J - I, -1, 1) + 1], "relative(array of shape (3,))"),
    (
        relative(LEARNED, buckets="t5", max_distance=4),
        lambda: S + LEARNED[HEAD, t5_buckets(J - I, 8, 4)],
        "relative(array of shape (2, 8), buckets='t5', max_distance=4)",
    ),
    (
        relative(LEARNED[0], buckets="t5", bidirectional=False),
        lambda: S + LEARNED[0][t5_buckets(J - I, 8, 128, False)],
        "relative(array of shape (8,), buckets='t5', bidirectional=False)",
    ),
    (score(lambda s, b, h, i, j: s * j), lambda: S * J, "score(<lambda>)"),
    (
        [temperature(2.0), softcap(3.0), alibi(1.0)],
        lambda: 3 * np.tanh(S / 2 / 3) - np.abs(I - J),
        "[temperature(2.0), softcap(3.0), alibi(1.0)]",
    ),
    ((softcap(3.0), temperature(2.0)), lambda: 3 * np.tanh(S / 3) / 2, "[softcap(3.0), temperature(2.0)]"),
    ([], lambda: S, "[]"),
]


@pytest.mark.parametrize(("rule", "expected", "text"), CASES, ids=[text for _, _, text in CASES])
def test_scores_are_what_they_say(rule, expected, text):
    np.testing.assert_allclose(value(rule), expected(), rtol=1e-14)
    assert str(as_score(rule)) == text
    assert value(rule, dtype=np.float32).dtype == np.float32


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [17, 20, 128])
def test_t5_buckets_far_beyond_the_table_of_offsets(bidirectional, max_distance):
    learned = np.arange(32.0)
    far = np.array([-5000, -129, -128, -127, -21, -16, -3, 0, 1, 15, 17, 20, 127, 128, 129, 5000])
    rule = relative(learned, buckets="t5", bidirectional=bidirectional, max_distance=max_distance)
    at = At(0, 0, 6000, 6000 + far, s=np.zeros(far.shape))
    assert evaluate([rule.node], at)[0].tolist() == t5_buckets(far, 32, max_distance, bidirectional).tolist()


def test_a_table_given_is_the_handle_of_its_gradient():
    slopes, biases = table(PER_HEAD), Table(OFFSETS)
    rule = as_score([alibi(slopes), relative(biases)])
    assert {leaf.payload for leaf in partials(rule.node)[1]} == {slopes, biases}
    assert rule.requires == (Requirement("alibi", "slopes", "h", 2), Requirement("relative", "table", "h", 2))


def test_sixteen_bit_tables():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        found = value(alibi(PER_HEAD.astype(dtype)), dtype=np.float32)
        np.testing.assert_allclose(found, S - PER_HEAD[HEAD] * np.abs(I - J), rtol=1e-6, atol=1e-6)


def test_numbers_are_arguments_not_structure():
    assert Program.of([temperature(2).node]).structure == Program.of([temperature(0.125).node]).structure
    assert Program.of([softcap(20).node]).numbers == (20.0, 1 / 20)


def test_functions_are_scores():
    def halve(s, b, h, i, j):
        return s / 2

    assert str(as_score(halve)) == "score(halve)"
    np.testing.assert_array_equal(value([halve, softcap(3.0)]), value(compose([score(halve), softcap(3.0)])))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: softcap(0), ValueError, "cap of softcap must be positive and finite, got 0.0"),
        (lambda: softcap(float("nan")), ValueError, "cap of softcap must be positive and finite, got nan"),
        (lambda: softcap("big"), TypeError, "cap of softcap must be a number or an array of floats, got 'big'"),
        (lambda: temperature(-1.0), ValueError, "t of temperature must be positive and finite, got -1.0"),
        (lambda: temperature([1.0, 0.0]), ValueError, "t of temperature must be positive, got 0.0"),
        (lambda: temperature([1, 2]), TypeError, "t of temperature must be an array of floats, got int64"),
        (lambda: alibi(np.ones((1, 2, 2))), ValueError, r"must be a number, \(h,\) or \(b, h\), got shape \(1, 2, 2\)"),
        (lambda: alibi([1.0, np.nan]), ValueError, "slopes of alibi must not hold NaN"),
        (lambda: alibi(float("inf")), ValueError, "slopes of alibi must be finite, got inf"),
        (lambda: relative(np.zeros((2, 4))), ValueError, "table of relative must have an odd length, .* got 4"),
        (lambda: relative(np.zeros((1, 2, 3))), ValueError, r"table of relative must be \(m,\) or \(h, m\), got shape"),
        (
            lambda: relative(np.array(["a"])),
            TypeError,
            "table of relative must be an array of booleans, integers or floats",
        ),
        (lambda: relative(np.arange(3)), TypeError, "table of relative must be an array of floats, got int64"),
        (lambda: relative(np.zeros(3), buckets="t6"), ValueError, "buckets of relative must be None or 't5', got 't6'"),
        (lambda: relative(1.0), ValueError, r"table of relative must be \(m,\) or \(h, m\), got shape \(\)"),
        (lambda: relative(np.zeros(8), buckets="t5", max_distance=1), ValueError, "max_distance"),
        (
            lambda: relative(np.zeros(8), buckets="t5", max_distance=2.5),
            TypeError,
            "max_distance of relative must be an",
        ),
        (lambda: relative(np.zeros(5), bidirectional=False), ValueError, "belong to buckets='t5'"),
        (lambda: as_score(3), TypeError, r"score must be a score rule, a function of \(s, b, h, i, j\), .* got int"),
        (lambda: as_score([softcap(1), 3]), TypeError, r"score\[1\] must be a score rule"),
        (lambda: score(lambda s, b, h, i, j: s > 0), TypeError, "returned a bool expression"),
        (lambda: score(lambda b, h, i, j: i), TypeError, r"must take \(s, b, h, i, j\)"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
