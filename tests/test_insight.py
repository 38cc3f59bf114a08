"""Statistics of heads against weights whose answers are known by hand."""

import numpy as np
import pytest

from regard import insight

SCORES = (insight.previous_token, insight.current_token, insight.sink, insight.entropy, insight.normalized_entropy)


def one_hot(columns):
    """(1, n, n) weights whose row i lies wholly on column columns[i]."""
    return np.eye(len(columns))[None, columns]


def uniform(length):
    return np.tri(length)[None] / np.arange(1, length + 1)[:, None]


def random_weights(shape, seed=0):
    weights = np.tril(np.random.default_rng(seed).random((*shape, shape[-1])))
    return weights / weights.sum(-1, keepdims=True)


def test_a_previous_token_head():
    weights = one_hot([0, 0, 1, 2, 3])
    assert insight.previous_token(weights) == [1.0]
    assert insight.current_token(weights) == [0.0]
    assert insight.sink(weights) == [0.25]
    assert insight.entropy(weights) == [0.0]


def test_a_current_token_head():
    weights = one_hot([0, 1, 2])
    assert insight.current_token(weights) == [1.0]
    assert insight.previous_token(weights) == [0.0]
    assert insight.sink(weights) == [0.0]


def test_a_sink():
    weights = one_hot([0, 0, 0, 0, 0])
    assert insight.sink(weights) == [1.0]
    assert insight.previous_token(weights) == [0.25]


def test_an_even_head():
    weights = uniform(4)
    assert insight.sink(weights) == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert insight.previous_token(weights) == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert insight.entropy(weights) == pytest.approx(np.log([2, 3, 4]).mean())
    assert insight.normalized_entropy(weights) == pytest.approx(1.0)


def test_an_even_head_that_is_not_causal():
    assert insight.normalized_entropy(np.full((1, 4, 4), 0.25), causal=False) == pytest.approx(1.0)
    assert insight.normalized_entropy(np.full((1, 4, 4), 0.25), causal=True) > 1.0


def test_induction_and_duplicates_of_a_repeat():
    #        a  b  c  a  b  c
    ids = [7, 8, 9, 7, 8, 9]
    looks_after_copies = one_hot([0, 0, 0, 1, 2, 3])
    assert insight.induction(looks_after_copies, ids) == [1.0]
    assert insight.duplicate_token(looks_after_copies, ids) == [0.0]
    looks_at_copies = one_hot([0, 0, 0, 0, 1, 2])
    assert insight.induction(looks_at_copies, ids) == [0.0]
    assert insight.duplicate_token(looks_at_copies, ids) == [1.0]


def test_induction_sums_over_all_earlier_copies():
    ids = [5, 6, 5, 6, 5]
    last = [0.05, 0.4, 0.1, 0.3, 0.15]  # row 4 holds a 5: what came after is at 1 and 3, copies at 0 and 2
    weights = np.concatenate([one_hot([0, 0, 0, 0, 0])[:, :4], [[last]]], axis=1)
    rows = [0.0, 0.0, 0.7]  # rows 2, 3 and 4 have an earlier copy; row 2 looks at 0, row 3 at 0
    assert insight.induction(weights, ids) == pytest.approx(np.mean(rows))
    assert insight.duplicate_token(weights, ids) == pytest.approx(np.mean([1.0, 0.0, 0.15]))


def test_the_token_after_a_copy_may_be_the_current_one():
    assert insight.induction(one_hot([0, 1]), [3, 3]) == [1.0]


def test_a_longer_prefix_leaves_out_copies_by_chance():
    #      a  b  c  x  b  y  a  b  c
    ids = [1, 2, 3, 9, 2, 8, 1, 2, 3]
    weights = one_hot([0, 0, 0, 0, 2, 0, 1, 2, 3])
    weights[0, 7] = [0, 0, 0.5, 0, 0, 0.5, 0, 0, 0]  # after `b` came `c` at 2 and `y` at 5
    assert insight.induction(weights, ids) == pytest.approx(1.0)
    assert insight.induction(weights, ids, prefix=2) == pytest.approx((0.5 + 1.0) / 2)
    assert insight.induction(weights, ids, prefix=3) == pytest.approx(1.0)
    assert insight.induction(weights, ids, prefix=4) == [0.0]
    (head,) = insight.head_statistics(weights, ids, prefix=2)
    assert head.induction == pytest.approx(0.75)


def test_a_prefix_does_not_reach_around_the_start():
    assert insight.induction(one_hot([0, 1, 1]), [5, 6, 5], prefix=2) == [0.0]
    assert insight.induction(one_hot([0, 0, 2]), [5, 5, 5], prefix=2) == [1.0]


def test_rows_without_an_earlier_copy_are_left_out():
    ids = [1, 2, 3, 4, 1]
    weights = one_hot([0, 1, 1, 1, 1])
    assert insight.induction(weights, ids) == [1.0]


def test_without_any_row_the_score_is_zero():
    for score in SCORES:
        assert score([[[1.0]]]) == [0.0]
    assert insight.induction(uniform(3), [1, 2, 3]) == [0.0]
    assert insight.duplicate_token(uniform(3), [1, 2, 3]) == [0.0]


def test_a_row_that_sees_nothing_is_left_out():
    weights = one_hot([0, 0, 0, 1])
    weights[0, 2] = 0
    assert insight.sink(weights) == [0.5]
    assert insight.induction(weights, [1, 2, 1, 1]) == [1.0]
    (head,) = insight.head_statistics(weights, [1, 2, 1, 1])
    assert (head.sink, head.induction) == (0.5, 1.0)


def test_sink_rate_counts_heads():
    weights = np.concatenate([one_hot([0, 0, 0]), one_hot([0, 1, 2]), one_hot([0, 1, 0])])
    assert insight.sink(weights).tolist() == [1.0, 0.0, 0.5]
    assert insight.sink_rate(weights) == pytest.approx(2 / 3)
    assert insight.sink_rate(weights, epsilon=0.5) == pytest.approx(1 / 3)


def test_head_statistics_are_the_single_scores():
    weights, ids = random_weights((3, 20)), np.random.default_rng(1).integers(0, 6, 20)
    heads = insight.head_statistics(weights, ids, layer=2)
    assert [(head.layer, head.head) for head in heads] == [(2, 0), (2, 1), (2, 2)]
    for name, values in {
        "previous": insight.previous_token(weights),
        "current": insight.current_token(weights),
        "sink": insight.sink(weights),
        "duplicate": insight.duplicate_token(weights, ids),
        "induction": insight.induction(weights, ids),
        "entropy": insight.entropy(weights),
        "normalized_entropy": insight.normalized_entropy(weights),
    }.items():
        assert [getattr(head, name) for head in heads] == pytest.approx(values.tolist(), abs=1e-14), name


@pytest.mark.parametrize("rows", [1, 7, 20, 100])
def test_rows_at_a_time_give_the_same(rows):
    weights, ids = random_weights((2, 20)), np.random.default_rng(1).integers(0, 6, 20)
    asked = []

    def give(part):
        asked.append(part)
        return weights[:, part]

    whole = insight.head_statistics(weights, ids)
    parts = insight.head_statistics(give, ids, rows=rows)
    assert len(asked) == -(-20 // rows)
    for one, other in zip(whole, parts, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-14)
        assert one.entropy == pytest.approx(other.entropy, abs=1e-14)


def test_leading_dimensions_are_averaged_over_rows():
    ids = np.array([[1, 2, 1], [1, 2, 3]])
    weights = np.stack([one_hot([0, 0, 1]), one_hot([0, 1, 2])])
    assert insight.induction(weights, ids).tolist() == [[1.0], [0.0]]
    (head,) = insight.head_statistics(weights, ids)
    assert head.induction == 1.0  # the second text has no row with an earlier copy
    assert head.previous == 0.5


def test_kind_names_the_strongest_score():
    heads = insight.head_statistics(np.concatenate([one_hot([0, 0, 1, 2]), one_hot([0, 1, 2, 3])]), [1, 2, 3, 4])
    assert insight.kind(heads[0]) == ("previous token", 1.0)
    assert insight.kind(heads[1]) == ("current token", 1.0)
    assert insight.strongest(heads, "previous token") is heads[0]
    assert insight.strongest(heads, "current token") is heads[1]
    assert set(heads[0].scores) == set(insight.KINDS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: insight.sink(np.ones((3, 3))), r"weights must have shape \(\.\.\., h, n, n\), got \(3, 3\)"),
        (lambda: insight.sink(np.ones((1, 2, 3))), r"weights must have shape .* got \(1, 2, 3\)"),
        (lambda: insight.entropy(np.ones((1, 0, 0))), r"weights must have shape .* got \(1, 0, 0\)"),
        (lambda: insight.induction(uniform(3), [1, 2]), r"ids must have shape \(\.\.\., 3\) to fit .* got \(2,\)"),
        (lambda: insight.head_statistics(uniform(3), 5), r"ids must have shape \(\.\.\., 3\) to fit .* got \(\)"),
        (lambda: insight.induction(uniform(3), [1, 2, 3], prefix=0), "prefix must be at least 1, got 0"),
        (lambda: insight.head_statistics(uniform(3), [1, 2, 3], prefix=-1), "prefix must be at least 1, got -1"),
        (lambda: insight.strongest([], "induktion"), r"kind must be one of previous token, .* got 'induktion'"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
