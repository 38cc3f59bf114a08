"""Statistics of heads against weights whose answers are known by hand."""

import re

import numpy as np
import pytest

import regard
from regard import cli, insight
from regard.examplemodel import ExampleModel, repeated_bytes
from regard.interpret.heads import all_notable, notable, sampled_statistics

pytestmark = pytest.mark.engine("tiled")

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


def measured(query, key, ids, *, prefix=1, **options):
    """What `measure_heads` must find, from the weights."""
    weights = regard.weights(query, key, **options)
    return insight.head_statistics(weights, ids, prefix=prefix)


@pytest.mark.parametrize("prefix", [1, 2])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_heads_measured_from_queries_and_keys(lead, prefix):
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((*lead, 4, 40, 6)), rng.standard_normal((*lead, 2, 40, 6))
    ids = rng.integers(0, 7, (*lead, 40))
    found = insight.measure_heads(query, key, ids, layer=3, prefix=prefix, causal=True, scale=0.7)
    expected = measured(query, key, ids, prefix=prefix, causal=True, scale=0.7)
    assert [(head.layer, head.head, head.kv_head) for head in found] == [(3, 0, 0), (3, 1, 0), (3, 2, 1), (3, 3, 1)]
    for mine, other in zip(found, expected, strict=True):
        assert mine.scores == pytest.approx(other.scores, abs=1e-12)
        assert mine.entropy == pytest.approx(other.entropy)
        assert mine.normalized_entropy == pytest.approx(other.normalized_entropy)


def test_heads_measured_when_rows_see_little_or_nothing():
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 2, 30, 4))
    hidden = regard.mask(lambda b, h, i, j: (j <= i) & (i % 4 != 2) & (i - j < 6))
    ids = rng.integers(0, 4, 30)
    found = insight.measure_heads(query, key, ids, mask=hidden)
    expected = measured(query, key, ids, mask=hidden)
    for mine, other in zip(found, expected, strict=True):
        assert mine.scores == pytest.approx(other.scores, abs=1e-12)
        assert 0 < mine.normalized_entropy < 1
    one = insight.measure_heads(query[:, :1], key[:, :1], [5])
    assert one[0].scores == dict.fromkeys(insight.KINDS, 0.0)


def test_the_shipped_model_has_induction_and_previous_token_heads():
    model = ExampleModel.load()
    ids = repeated_bytes(60, copies=3)[0]
    trace = model.run(ids)
    heads = [
        head
        for layer in range(trace.layers)
        for head in insight.measure_heads(
            trace.q[layer], trace.k[layer], ids, layer=layer, causal=True, scale=trace.scale
        )
    ]
    induction, previous = (insight.strongest(heads, kind) for kind in ("induction", "previous token"))
    assert induction.induction > 0.5
    assert previous.previous > 0.5
    assert previous.layer < induction.layer
    weights = [insight.head_statistics(trace.weights(layer), ids, layer=layer) for layer in range(trace.layers)]
    assert induction.scores == pytest.approx(weights[induction.layer][induction.head].scores, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((np.ones((4, 2)), np.ones((1, 4, 2)), [1] * 4), {}, r"query and key must have shape \(..., h, n, d\) each"),
        ((np.ones((1, 4, 2)), np.ones((1, 4, 2)), [1] * 5), {}, r"ids must have shape \(..., 4\) to fit key"),
        ((np.ones((1, 4, 2)), np.ones((1, 4, 2)), [1] * 4), {"prefix": 0}, "prefix must be at least 1, got 0"),
    ],
)
def test_measure_heads_says_what_is_wrong(arguments, options, text):
    with pytest.raises(ValueError, match=text):
        insight.measure_heads(*arguments, **options)


def test_the_distance_of_heads():
    a, b = np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.0, 1.0], [0.5, 0.5]])
    np.testing.assert_allclose(insight.head_distance([a, b]), [[0, np.log(2) / 2], [np.log(2) / 2, 0]], atol=1e-12)
    np.testing.assert_allclose(insight.head_distance([a, 3 * a]), 0, atol=1e-12)  # shares, not sizes
    blind = np.array([[0.0, 0.0], [0.5, 0.5]])
    np.testing.assert_allclose(insight.head_distance([a, blind, 0 * a]), 0, atol=1e-12)
    with pytest.raises(ValueError, match=r"maps must have shape \(h, rows, cols\), got \(2, 2\)"):
        insight.head_distance(a)


def test_clusters_of_heads():
    place = np.array([0.0, 10.0, 0.1, 10.2, 5.0])
    distance = np.abs(place[:, None] - place)
    before = distance.copy()
    assert insight.cluster_heads(distance, 3).tolist() == [0, 1, 0, 1, 2]
    assert insight.cluster_heads(distance, 5).tolist() == [0, 1, 2, 3, 4]
    assert insight.cluster_heads(distance, 1).tolist() == [0] * 5
    # By the nearest pair alone, the last would be left: the widest gap is before it.
    near = np.array([0.0, 1.0, 2.5, 4.2, 6.0])
    assert insight.cluster_heads(np.abs(near[:, None] - near), 2).tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_array_equal(distance, before)
    for number in (0, 6):
        with pytest.raises(ValueError, match=f"number must be from 1 to 5, got {number}"):
            insight.cluster_heads(distance, number)
    with pytest.raises(ValueError, match="distance must have shape"):
        insight.cluster_heads(place, 1)


def test_the_effective_rank_of_maps():
    maps = np.stack([np.diag([1.0, 1, 0, 0]), np.diag([1.0, 0.5, 0, 0]), np.zeros((4, 4))])
    p = np.array([2 / 3, 1 / 3])
    np.testing.assert_allclose(insight.effective_rank(maps), [2, np.exp(-(p * np.log(p)).sum()), 0])


def test_copying_is_that_of_the_whole_circuit():
    rng = np.random.default_rng(0)
    E, U = rng.standard_normal((9, 5)), rng.standard_normal((5, 9))
    value, output = rng.standard_normal((2, 5, 3)), rng.standard_normal((4, 3, 5))
    found = insight.copying(E, value, output, U)
    for head, score in enumerate(found):
        eigenvalues = np.linalg.eigvals(E @ value[head // 2] @ output[head] @ U)
        assert score == pytest.approx((eigenvalues.sum() / np.abs(eigenvalues).sum()).real)
    with pytest.raises(ValueError, match="must fit"):
        insight.copying(E, value, output[:3], U)


def test_a_head_that_looks_n_tokens_back_is_named():
    n = 30
    weights = np.stack([np.eye(n)[np.maximum(np.arange(n) - back, 0)] for back in (1, 3, 5, 6)])
    heads = insight.head_statistics(weights, np.arange(n))
    assert [(head.back, head.distance) for head in heads[1:3]] == [(1.0, 3), (1.0, 5)]
    assert heads[0].back == heads[3].back == 0  # the previous token has a kind of its own, 6 is beyond
    assert heads[1].called("n tokens back") == "3 tokens back"
    assert all_notable(heads[1].scores) == ("n tokens back",)
    few = insight.head_statistics(np.eye(6)[np.maximum(np.arange(6) - 2, 0)][None], np.arange(6))[0]
    assert (few.back, few.distance) == (0.0, None)  # three rows say little, and the first key is a sink's


def test_a_head_has_all_its_kinds():
    scores = dict.fromkeys(insight.KINDS, 0.0) | {"induction": 0.3, "first-token sink": 0.9, "current token": 0.6}
    assert all_notable(scores) == ("current token", "induction", "first-token sink")
    assert notable(scores) == "current token"
    assert all_notable(dict.fromkeys(insight.KINDS, np.nan)) == ()


def test_sampled_rows_estimate_what_all_rows_say():
    weights, ids = random_weights((2, 40)), np.random.default_rng(1).integers(0, 6, 40)
    whole = insight.head_statistics(weights, ids)
    for one, other in zip(sampled_statistics(weights, np.arange(40), ids), whole, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-14)
        assert one.normalized_entropy == pytest.approx(other.normalized_entropy)
    rows = np.array([5, 20, 39])
    some = sampled_statistics(weights[:, rows], rows, ids)
    assert some[1].sink == pytest.approx(weights[1, rows, 0].mean())
    assert some[1].previous == pytest.approx(weights[1, rows, rows - 1].mean())


@pytest.mark.parametrize("prefix", [1, 3])
@pytest.mark.parametrize("ids", [[7] * 30, list(range(20)) * 3, [1, 2, 3], [0, 1, 0, 1, 1, 0, 1, 0, 0] * 3, [5, 5]])
def test_what_induction_scores_by_chance_is_that_of_even_weights(ids, prefix):
    even = np.tril(np.ones((len(ids), len(ids))))
    even /= even.sum(-1, keepdims=True)
    assert insight.by_chance(ids, prefix=prefix) == pytest.approx(insight.induction(even[None], ids, prefix=prefix)[0])


def test_a_word_where_a_text_repeats_too_much(capsys):
    said = r"this text repeats so much that a head which attends evenly scores 0\.\d\d for induction; read another"
    for text, too_much in (("ab" * 40, True), ("Nobody knew why Otokar Brix met Otokar", False)):
        assert cli.main(["insight", "--text", text]) == 0
        assert bool(re.search(said, capsys.readouterr().out.replace("\n", " "))) is too_much
        assert cli.main(["look", "--text", text, "--terminal"]) == 0
        assert bool(re.search(said, " ".join(capsys.readouterr().out.split()))) is too_much


def test_repeated_tokens():
    ids = insight.repeated_tokens(50, length=7, times=3, count=2, seed=1)
    assert ids.shape == (2, 21)
    assert 0 <= ids.min() <= ids.max() < 50
    np.testing.assert_array_equal(ids[:, :14], ids[:, 7:])
    assert (ids[0] != ids[1]).any()
    with pytest.raises(ValueError, match="must be at least 1"):
        insight.repeated_tokens(50, length=0)
