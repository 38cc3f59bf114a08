"""What the page is told is what `regard.weights` and the statistics say; what cannot be told is one sentence."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard import insight
from regard.core.parts import part_of
from regard.examplemodel import ExampleModel
from regard.interpret.capture.captured import Capture
from regard.interpret.capture.layers import Layer
from regard.ops.normalization import problem_from
from regard.viewer.data import pyramid
from regard.viewer.data.questions import Answer
from regard.viewer.data.summary import look_data, pooled
from regard.viewer.scene.scenes import BLOCK, SMALL, Head, Scene, triangle
from regard.viewer.scene.sources import ExampleRunner, Settings, arrays, captured, example
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.store import Grower, Store, Unfinished, Worker
from support import traced_memory

pytestmark = pytest.mark.engine("tiled")

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((4, 700, 8)), RNG.standard_normal((2, 900, 8)), RNG.standard_normal((2, 900, 3))
LONG = "9" * 5000
SHOWN = RNG.random((4, 700, 900)) < 0.7
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.7},
    "rules": {
        "mask": regard.window(300, 5) & regard.documents(np.arange(900) // 250),
        "score": [regard.softcap(3.0), regard.alibi(RNG.random(4))],
    },
    "arrays": {"mask": SHOWN, "bias": RNG.standard_normal((4, 1, 900)), "sink": RNG.standard_normal(4)},
    "padding on the left": {"mask": regard.padding(800, side="left")},
    "a place": {"causal": True, "offset": 40},
    "some see nothing": {"mask": regard.mask(lambda b, h, i, j: (i % 3 != 0) & (j < i))},
}


def asked(answers: Answers, path: str, **query: Any) -> Any:
    found = answers.get(path, {name: str(x) for name, x in query.items()})
    assert found.status == 200, found.content
    return found.content


def refused(found: Answer) -> tuple[int, str]:
    assert isinstance(found.content, dict)
    return found.status, found.content["error"]


def cells_of(P: np.ndarray, cell: int, kind: str) -> np.ndarray:
    """The specification of a level: sums over keys and means over queries, or the largest, of cells of pairs."""
    height, width = (-(-n // cell) for n in P.shape)
    padded = np.zeros((height * cell, width * cell))
    padded[: P.shape[0], : P.shape[1]] = P
    blocks = padded.reshape(height, cell, width, cell)
    rows = np.minimum(cell, P.shape[0] - cell * np.arange(height))
    return blocks.max((1, 3)) if kind == "max" else blocks.sum((1, 3)) / rows[:, None]


def grown(head: Head) -> pyramid.Coarse:
    """All levels of a head that are kept."""
    made = pyramid.Coarse(head)
    while not made.whole:
        made.grow()
    return made


@cache
def weights_of(name: str) -> np.ndarray:
    """By the specification, for all tests of a case."""
    P = regard.weights(Q, K, engine="spec", **CASES[name])
    P.flags.writeable = False
    return P


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Answers, np.ndarray, dict[str, Any]]]:
    """Answers about arrays with some rules, without patience's end, and the weights by the specification."""
    options = CASES[request.param]
    answers = Answers([arrays(Q, K, V, **options)], patience=None)
    yield answers, weights_of(request.param), options
    answers.close()


def test_values_are_the_weights(case: tuple[Answers, np.ndarray, dict[str, Any]]) -> None:
    answers, weights, options = case
    for head in (0, 3):
        found = asked(answers, f"arrays/values/0/{head}", rows="100:103", cols="5:899")
        assert found.dtype == np.float32
        np.testing.assert_allclose(np.nan_to_num(found), weights[head, 100:103, 5:899], atol=1e-7)
        for i in (0, 333, 699):
            np.testing.assert_allclose(
                np.nan_to_num(asked(answers, f"arrays/row/0/{head}/{i}")), weights[head, i], atol=1e-7
            )
        for j in (0, 450, 899):
            column = asked(answers, f"arrays/column/0/{head}/{j}")
            np.testing.assert_allclose(np.nan_to_num(column), weights[head, :, j], atol=1e-7)
        # What is drawn as hidden is hidden, and of rules of affine comparisons all that is.
        whole = asked(answers, f"arrays/values/0/{head}", rows="0:700", cols="0:900")
        assert (weights[head][np.isnan(whole)] == 0).all()
        if options.get("causal"):
            i = np.arange(700)[:, None] + options.get("offset", 200)
            np.testing.assert_array_equal(np.isnan(whole), np.arange(900) > i)


@pytest.mark.parametrize("kind", ["mass", "max"])
def test_tiles_of_every_level_are_cells_of_the_weights(
    case: tuple[Answers, np.ndarray, dict[str, Any]], kind: str
) -> None:
    answers, weights, _ = case
    head = 2
    described = asked(answers, f"arrays/map/0/{head}")
    assert (described["levels"], described["max_level"], described["tile"]) == (3, 2, 256)
    for level in range(3):
        expected = cells_of(weights[head], 2 ** (2 - level), kind)
        height, width = (-(-n // 256) for n in expected.shape)
        assert described["maximum"][kind][level] is None or described["maximum"][kind][level] == pytest.approx(
            (expected if kind == "mass" else weights[head]).max(), rel=1e-3
        )
        for y in range(height):
            for x in range(width):
                found = asked(answers, f"arrays/tile/0/{head}/{level}/{x}/{y}", kind=kind)
                part = expected[256 * y : 256 * (y + 1), 256 * x : 256 * (x + 1)]
                assert (found.dtype, found.shape) == (np.float16, part.shape)
                np.testing.assert_allclose(np.nan_to_num(found), part, rtol=1e-3, atol=1e-7)
                assert (part[np.isnan(found)] == 0).all()
    assert described["maximum"][kind][0] is not None


def test_cells_at_the_edges_hold_fewer_pairs() -> None:
    q, k = RNG.standard_normal((1, 701, 4)), RNG.standard_normal((1, 897, 4))
    weights, answers = regard.weights(q, k)[0], Answers([arrays(q, k)], patience=None)
    for kind in ("mass", "max"):
        for level, at in ((0, "0/0"), (1, "1/1")):
            found, whole = (
                asked(answers, f"arrays/tile/0/0/{level}/{at}", kind=kind),
                cells_of(weights, 4 >> level, kind),
            )
            np.testing.assert_allclose(found, whole[-len(found) :, -found.shape[1] :], rtol=2e-3)


def test_rows_of_mass_sum_to_one_at_every_level() -> None:
    answers = Answers([arrays(Q, K)], patience=None)
    for level in range(3):
        tiles = [asked(answers, f"arrays/tile/0/1/{level}/{x}/0", kind="mass") for x in range((1, 2, 4)[level])]
        np.testing.assert_allclose(np.concatenate(tiles, axis=1).astype(float).sum(1), 1, atol=3e-3)


@pytest.mark.parametrize("rules", ["causal", "rules", "a place"])
@pytest.mark.engine("cpu")
def test_a_long_pass_by_a_kernel_is_that_by_strips(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = arrays(Q, K, **CASES[rules]).layers[0].head(1)
    expected = grown(head)
    monkeypatch.setattr("regard.viewer.data.pyramid.WORTH_COMPILING", 0)
    monkeypatch.setattr("regard.viewer.data.pyramid.WORTH_CALLING", 0)
    monkeypatch.setattr("regard.viewer.data.pyramid.STEP", 900 * 128)  # several bands
    found = grown(head)
    assert found.top == pytest.approx(expected.top, rel=1e-6)
    assert found.highest == pytest.approx(expected.highest, rel=1e-3)
    for kind in ("mass", "max"):
        for x, y in zip(found.of(kind), expected.of(kind), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-7)
    at = (None, 2, range(512, 700), range(512, 768), "mass")
    by_kernel = pyramid.tile(head, *at)
    monkeypatch.setattr("regard.viewer.data.pyramid.WORTH_CALLING", 2**30)
    np.testing.assert_allclose(by_kernel, pyramid.tile(head, *at), rtol=2e-3, atol=1e-7)


def test_a_row_of_minima_counts_once_in_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.viewer.data.pyramid.WORTH_COMPILING", 0)
    monkeypatch.setattr("regard.viewer.data.pyramid.WORTH_CALLING", 0)
    scene = arrays(Q, K, bias=np.where(np.arange(len(Q[0])) % 3 > 0, -1e30, 0)[:, None])
    weights = regard.weights(Q, K, bias=scene.layers[0].problem.bias)[1]
    found = grown(scene.layers[0].head(1))
    for kind in ("mass", "max"):
        np.testing.assert_allclose(found.of(kind)[-1], cells_of(weights, 2, kind), rtol=2e-3, atol=1e-7)
    np.testing.assert_allclose(look_data(scene).pooled(0, 1, 7, 9), pooled(weights, 7, 9), rtol=1e-5)


def test_a_rule_that_counts_keys_is_given_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.viewer.data.pyramid.WORTH_COMPILING", 0)
    monkeypatch.setattr("regard.viewer.data.pyramid.WORTH_CALLING", 0)
    head = arrays(Q, K[:, :899], mask=regard.padding(800, side="left")).layers[0].head(1)
    weights = regard.weights(Q, K[:, :899], mask=regard.padding(800, side="left"))[1]
    assert head.counts_keys
    np.testing.assert_allclose(grown(head).max[-1], cells_of(weights, 2, "max"), rtol=1e-3, atol=1e-7)


def test_a_part_of_a_call_has_its_weights() -> None:
    options: dict[str, Any] = {
        "mask": regard.mask(lambda b, h, i, j: (i + b + h + j) % 5 != 0)
        & regard.mask(RNG.random((2, 1, 30, 40)) < 0.8),
        "bias": RNG.standard_normal((1, 4, 1, 40)),
        "sink": RNG.standard_normal(4),
        "offset": np.array([3, 12]),
        "origin": (1, 2, 5),
    }
    q, k = RNG.standard_normal((2, 4, 30, 8)), RNG.standard_normal((2, 2, 40, 8))
    weights = regard.weights(q, k, engine="spec", **options)
    _, seen = regard.attention(q, k, k, observe=["lse"], **options)
    p = problem_from(q, k, k, **options)
    for name in ("cpu", "tiled", "spec"):
        engine = regard.engines.engines()[name]
        for b in range(2):
            part = part_of(p, b, 3, slice(4, 22), slice(8, 38))
            lse = seen.lse[b, 3, None, 4:22]
            inside = weights[b, 3, 4:22, 8:38]
            found = engine.weights(part_of(p, b, 3), seen.lse[b, 3, None], range(4, 22), range(8, 38))
            np.testing.assert_allclose(found[0], inside, atol=1e-12)
            mass, largest = engine.maps(part, lse, 6, 10)
            np.testing.assert_allclose(mass[0], inside.reshape(6, 3, 10, 3).sum(3).mean(1), atol=1e-12)
            np.testing.assert_allclose(largest[0], inside.reshape(6, 3, 10, 3).max((1, 3)), atol=1e-12)
        whole = part_of(p, 1, None)
        np.testing.assert_allclose(engine.maps(whole, seen.lse[1], 30, 40)[1], weights[1], atol=1e-12)


def test_thumbnails() -> None:
    P = regard.weights(Q, K, causal=True)
    scene = arrays(Q, K, causal=True)
    answers = Answers([scene], patience=None)
    for kind in ("mass", "max"):
        found = answers.get("arrays/thumbs/0", {"size": "32", "kind": kind})
        assert found.exact
        assert found.content.shape == (4, 32, 32)  # type: ignore[union-attr]
        rows, cols = (np.arange(33) * n // 32 for n in (700, 900))
        block = P[3, rows[7] : rows[8], cols[11] : cols[12]]
        expected = block.max() if kind == "max" else block.sum(1).mean()
        np.testing.assert_allclose(found.content[3, 7, 11], expected, rtol=2e-3)  # type: ignore[index]
        i, j = (np.append(at[:-1], n) for at, n in ((rows, 700), (cols, 900)))
        nothing = j[:-1] > i[1:, None] - 1 + 200  # the first key of a pixel comes after its last query
        np.testing.assert_array_equal(np.isnan(found.content[3]), nothing)  # type: ignore[index]
    small = Answers([arrays(Q[:, :5], K[:, :5])], patience=None)
    found = small.get("arrays/thumbs/0", {"size": "10", "kind": "max"})
    np.testing.assert_allclose(found.content[0, ::2, ::2], regard.weights(Q[:, :5], K[:, :5])[0], rtol=1e-3)  # type: ignore[index]


def test_thumbnails_of_long_heads_say_that_they_are_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.viewer.data.pyramid.SMALL", 0)
    answers = Answers([arrays(Q, K, causal=True, sink=np.ones(4))], patience=None)
    P = regard.weights(Q, K, causal=True, sink=np.ones(4))
    found = answers.get("arrays/thumbs/0", {"size": "16"})
    assert not found.exact
    rows = np.unique(np.arange(64) * 700 // 64)
    cols = np.arange(16) * 900 // 16
    sampled = np.add.reduceat(P[2][rows], cols, axis=1).reshape(16, 4, 16).mean(1)
    np.testing.assert_allclose(np.nan_to_num(found.content[2]), sampled, rtol=2e-3, atol=1e-7)  # type: ignore[index]
    for head in range(4):
        asked(answers, f"arrays/map/0/{head}")
    assert answers.get("arrays/thumbs/0", {"size": "16"}).exact


def test_scores_are_those_of_insight() -> None:
    model = ExampleModel.load()
    text = "one two three one two three one two"
    answers = Answers([example(Settings(text), model)], patience=None)
    trace = model.run(ids := model.encode(text))
    found = asked(answers, "example/heads")
    assert [(row["layer"], row["head"]) for row in found["rows"]] == [(a, b) for a in range(3) for b in range(4)]
    for row in found["rows"]:
        expected = insight.head_statistics(trace.weights(row["layer"]), ids, prefix=3)[row["head"]]
        for name, score in row["scores"].items():
            true = {**expected.scores, "entropy": expected.entropy, "normalized entropy": expected.normalized_entropy}
            assert score == pytest.approx(true[name], abs=1e-5)
        assert row["kind"] in (None, *insight.KINDS)
    assert {column["name"] for column in found["columns"]} == set(found["rows"][0]["scores"])
    assert any(row["kind"] == "induction" for row in found["rows"])


def test_scores_that_mean_nothing_are_null() -> None:
    nameless = asked(Answers([arrays(Q[:, :50], K[:, :50])], patience=None), "arrays/heads")["rows"][0]["scores"]
    assert nameless["induction"] is nameless["duplicate token"] is None
    assert nameless["previous token"] is not None
    cross = asked(Answers([arrays(Q[:, :50], K[:, :60])], patience=None), "arrays/heads")["rows"][0]["scores"]
    assert cross["previous token"] is cross["current token"] is None
    assert 0 < cross["first-token sink"] < 1
    once = asked(Answers([example(Settings("abcdef"))], patience=None), "example/heads")["rows"][0]["scores"]
    assert once["induction"] is None


@pytest.mark.parametrize("name", ["causal", "rules", "a place", "some see nothing"])
def test_profiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.viewer.data.profiles.BAND", 900 * 100)  # several bands
    options = CASES[name]
    found = asked(Answers([arrays(Q, K, V, **options)], patience=None), "arrays/profiles/0/3")
    observe = ["lse", "entropy", "normalized_entropy", "received", "profile"]
    _, seen = regard.attention(Q, K, V, observe=observe, **options)
    for key in ("lse", "entropy", "normalized_entropy", "received"):
        expected = [x if np.isfinite(x) else None for x in seen[key][3].tolist()]
        assert found[key]["values"] == pytest.approx(expected, abs=1e-5)
        assert (found[key]["start"], found[key]["step"]) == (0, 1)
    P = regard.weights(Q, K, **options)[3]
    assert found["sink"]["values"] == pytest.approx(P[:, 0].tolist(), abs=1e-6)
    first = options.get("offset", 200)
    by_distance: dict[int, list[float]] = {}
    for (r, j), x in np.ndenumerate(P):
        by_distance.setdefault(r + first - j, []).append(x)
    offset = found["offset"]
    assert offset["edges"] == list(range(offset["start"], offset["start"] + len(offset["values"]) + 1))
    for at, value in enumerate(offset["values"]):
        assert value == pytest.approx(np.mean(by_distance[offset["start"] + at]), abs=1e-6)
        assert offset["pairs"][at] == len(by_distance[offset["start"] + at])
    inside = range(offset["start"], offset["start"] + len(offset["values"]))
    assert all(distance in inside or not any(x) for distance, x in by_distance.items())


def test_weight_by_distance_is_exact_where_it_matters() -> None:
    """A previous-token head of 10,000 tokens has 0.97 at distance 1 and 0.03 at 0, and its profile says so."""
    from regard.viewer.data.profiles import EXACT, MOST, along_distances, distance_edges

    n = 10_000
    totals, pairs = np.full(n, 1e-6), n - np.arange(n)
    totals[:2] = 0.03 * pairs[0], 0.97 * pairs[1]
    found = along_distances(totals, pairs, 0)
    assert len(found.values) <= MOST
    np.testing.assert_allclose(found.values[:2], [0.03, 0.97])
    assert found.edges is not None
    assert found.pairs is not None
    assert found.edges[: EXACT + 1].tolist() == list(range(EXACT + 1))
    np.testing.assert_allclose(found.values * found.pairs, np.add.reduceat(totals, found.edges[:-1]))
    assert found.pairs[-1] == sum(pairs[found.edges[-2] :])
    for start, stop in ((0, 100_000), (-50_000, 60_000), (-70_000, 1), (-5, 6), (200, 9000), (-(10**6), 10**6)):
        edges = distance_edges(start, stop)
        assert (edges[0], edges[-1]) == (start, stop)
        assert len(edges) - 1 <= MOST
        assert (np.diff(edges) > 0).all()
        beyond = edges[edges >= EXACT]
        if len(beyond) > 2:  # one ratio: the wider, the farther; to whole numbers
            assert (np.abs(np.diff(beyond[:-1], 2)) <= 1 + 0.01 * beyond[1:-2]).all()


def test_long_profiles_are_means() -> None:
    from regard.viewer.data.profiles import MOST, binned

    x = RNG.random(5000)
    found = binned(x)
    assert (len(found.values), found.step) == (1667, 3)
    assert len(found.values) <= MOST
    np.testing.assert_allclose(found.values[:3], x[:9].reshape(3, 3).mean(1))
    assert found.values[-1] == pytest.approx(x[4998:].mean())


FORMULAS = Path(__file__).parents[2] / "page" / "src" / "numbers" / "formulas.ts"
DRAWN = re.findall(r"String\.raw`(.*?)`", FORMULAS.read_text("utf-8"))
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.mark.parametrize("name", CASES)
def test_stages_lead_to_the_weight_and_the_output(name: str) -> None:
    options = CASES[name]
    answers = Answers([arrays(Q, K, V, **options)], patience=None)
    out = regard.attention(Q, K, V, **options)
    P = regard.weights(Q, K, **options)
    for i, j in ((10, 3), (650, 640), (9, 850)):
        stages = {stage["name"]: stage for stage in asked(answers, f"arrays/step/0/3/{i}/{j}")["stages"]}
        assert stages["softmax weight"]["value"] == pytest.approx(P[3, i, j], abs=1e-7)
        assert stages["dot product"]["value"] == pytest.approx(Q[3, i] @ K[1, j])
        assert stages["products"]["values"] == pytest.approx((Q[3, i] * K[1, j]).tolist())
        assert stages["weighted sum"]["values"] == pytest.approx(out[3, i].tolist(), abs=1e-6)
        assert stages["times value"]["values"] == pytest.approx((P[3, i, j] * V[1, j]).tolist(), abs=1e-7)
        assert all(stage["text"] and NUMBER.sub("N", stage["formula"]) in DRAWN for stage in stages.values())
        hidden = P[3, i, j] == 0
        assert (stages.get("mask", {"value": 0})["value"] is None) == hidden
        assert ("is hidden" in stages.get("mask", {"text": ""})["text"]) == hidden
        if not hidden:
            score = [stages[s]["value"] for s in ("scale", "rules", "bias") if s in stages][-1]
            lse = stages["log-sum-exp"]["value"]
            assert np.exp(score - lse) == pytest.approx(P[3, i, j], rel=1e-5)


def test_without_values_the_last_stage_says_why_there_is_no_sum() -> None:
    answers = Answers([arrays(Q, K, causal=True)], patience=None)
    *stages, last = asked(answers, "arrays/step/0/1/40/3")["stages"]
    assert stages[-1]["name"] == "softmax weight"
    assert (last["name"], last["text"], last["value"]) == ("weighted sum", "not shown: no values were given", None)


def test_batch_elements() -> None:
    q, k = RNG.standard_normal((2, 2, 3, 20, 4))
    options: dict[str, Any] = {"mask": regard.mask(lambda b, h, i, j: (i + j + b) % 3 != 0)}
    answers = Answers([arrays(q, k, **options)], patience=None)
    assert asked(answers, "scenes")["scenes"][0]["batch"] == 2
    for b in range(2):
        found = asked(answers, "arrays/row/0/2/7", b=b)
        np.testing.assert_allclose(np.nan_to_num(found), regard.weights(q, k, **options)[b, 2, 7], atol=1e-7)
    assert (
        refused(answers.get("arrays/row/0/2/7", {"b": "2"}))[1] == "batch element must be a number from 0 to 1, got 2"
    )


def test_captures_are_scenes() -> None:
    q, k = RNG.standard_normal((2, 3, 40, 8))
    seen = Capture.of_arrays(q, k, tokens=[f"t{n % 7}" for n in range(40)], causal=True, model="made up")
    seen.layers.append(Layer.of("cross", q, k[:, :25], mask=regard.window(3, 3), cross=True))
    scenes = captured(seen)
    answers = Answers(scenes, patience=None)
    first, second = asked(answers, "scenes")["scenes"]
    assert (first["id"], first["kind"], first["has_tokens"], first["layers"][0]["causal"]) == (
        "capture",
        "capture",
        True,
        True,
    )
    assert (second["id"], second["layers"][0]["cross"], second["has_tokens"]) == ("capture-2", True, False)
    assert (first["name"], first["note"]) == (f"{'t0t1t2t3t4t5t6' * 3:.39}…, attention", "made up")
    assert second["name"] == "made up, cross"
    assert asked(answers, "capture/tokens", axis="query", start=3, stop=5) == {
        "start": 3,
        "total": 40,
        "tokens": ["t3", "t4"],
    }
    np.testing.assert_allclose(
        np.nan_to_num(asked(answers, "capture/row/0/2/30")), regard.weights(q, k, causal=True)[2, 30], atol=1e-6
    )
    crossed = regard.weights(q, k[:, :25], mask=regard.window(3, 3))[1, 30]
    np.testing.assert_allclose(np.nan_to_num(asked(answers, "capture-2/row/0/1/30")), crossed, atol=1e-6)
    *_, weight, last = asked(answers, "capture/step/0/0/5/3")["stages"]
    assert (weight["name"], last["text"]) == (
        "softmax weight",
        "not shown: a capture keeps queries and keys, not values",
    )
    with pytest.raises(ValueError, match="the capture holds no layer"):
        captured(Capture())


def test_typing_makes_scenes() -> None:
    answers = Answers([example(Settings("hello"))], patience=None)
    found = answers.post("example/run", {"text": "hello hello", "temperature": 2, "scaled": False, "causal": False})
    assert found.status == 200
    assert isinstance(found.content, dict)
    scene = found.content["scene"]
    assert scene["settings"] == {"text": "hello hello", "temperature": 2.0, "scaled": False, "causal": False}
    assert scene["id"] != "example"
    trace = ExampleModel.load().run(ExampleModel.load().encode("hello hello"), temperature=2, scale=False, causal=False)
    np.testing.assert_allclose(asked(answers, f"{scene['id']}/row/2/3/6"), trace.weights(2)[3, 6], atol=1e-6)
    again = answers.post("example/run", scene["settings"])
    assert again.content == found.content
    assert asked(answers, "example/tokens")["tokens"][1:] == list("hello")
    assert list(answers.scenes) == ["example", scene["id"]]


def typed(answers: Answers, text: str, **others: str) -> str:
    """The id of the scene of a text that is typed."""
    found = answers.post("example/run", {"text": text, **others})
    assert found.status == 200, found.content
    return str(found.content["scene"]["id"])  # type: ignore[index]


def test_what_is_being_typed_takes_one_place() -> None:
    answers = Answers([example(Settings("a text to begin with"))])
    compared = typed(answers, "compared")
    draft = ""
    for text in ("o", "on", "one", "one two"):
        draft = typed(answers, text, replaces=draft, keeps=compared)
    assert list(answers.scenes) == ["example", compared, draft]
    assert [scene["given"] for scene in asked(answers, "scenes")["scenes"]] == [True, False, False]
    assert typed(answers, "one two", replaces=draft) == draft  # as it was
    assert typed(answers, "a text to begin with", replaces=draft) == "example"
    assert list(answers.scenes) == ["example", compared]
    typed(answers, "another", replaces="example")  # what was given stays
    assert "example" in answers.scenes


def test_typed_scenes_are_kept_by_their_bytes() -> None:
    given = example(Settings("a text to begin with"))
    most = 3 * example(Settings("text 00")).nbytes
    answers = Answers([given], kept=most, patience=None)
    compared = typed(answers, "text 00")
    asked(answers, f"{compared}/heads")
    asked(answers, f"{compared}/row/0/0/1")
    for n in range(1, 12):
        typed(answers, f"text {n:02}", keeps=compared)
    assert list(answers.scenes) == ["example", compared, "example-12", "example-13"]
    for n in range(12, 15):
        typed(answers, f"text {n}")
    assert list(answers.scenes) == ["example", *(f"example-{n}" for n in (14, 15, 16))]
    gone = answers.get(f"{compared}/heads")
    assert refused(gone) == (404, "there is no scene example-2: it was given up for later ones; run it again")
    assert answers.results.store.nbytes == len(answers.results._heads) == 0
    long = typed(answers, "a text that is larger than all that may be kept " * 20)
    assert list(answers.scenes) == ["example", long]
    assert answers.scenes[long].nbytes > most


@dataclass
class Slow:
    """A runner of the example model that waits before it runs a text, and its texts."""

    runner: ExampleRunner
    texts: list[str] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def scenes(self, settings: Any, progress: Any = None) -> tuple[Scene, ...]:
        self.texts.append(settings["text"])
        self.begun.release()
        assert self.go.acquire(timeout=10)
        return tuple(replace(scene, runner=self) for scene in self.runner.scenes(settings))

    def answers(self) -> Answers:
        return Answers([replace(example(Settings("abc")), runner=self)])


@pytest.fixture
def slow() -> Slow:
    return Slow(ExampleRunner())


def waiting(answers: Answers, count: int) -> None:
    """Returns once so many requests wait for runs."""
    deadline = time.monotonic() + 10
    while answers.registry._waiting < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_equal_runs_are_one(slow: Slow) -> None:
    answers = slow.answers()
    with ThreadPoolExecutor(4) as pool:
        equal = [pool.submit(typed, answers, "one", replaces=replaced) for replaced in ("", "", "x", "y")]
        waiting(answers, 4)
        for _ in equal:
            slow.go.release()
        assert {one.result() for one in equal} == {"example-2"}
    assert slow.texts == ["one"]
    assert list(answers.scenes) == ["example", "example-2"]


def test_a_text_that_a_later_one_replaces_is_not_run(slow: Slow) -> None:
    answers = slow.answers()
    slow.go.release()
    draft = typed(answers, "o")
    assert slow.begun.acquire(timeout=10)
    posted = []
    with ThreadPoolExecutor(3) as pool:
        for n, text in enumerate(("on", "one", "one ")):
            posted.append(pool.submit(answers.post, "example/run", {"text": text, "replaces": draft}))
            waiting(answers, n + 1)
            if n == 0:
                assert slow.begun.acquire(timeout=10)  # this one runs, the others wait
        for _ in posted:
            slow.go.release()
    assert [one.result().status for one in posted] == [409, 409, 200]
    assert refused(posted[1].result()) == (409, "a later text took the place of this one")
    assert slow.texts == ["o", "on", "one "]
    assert [x.settings["text"] for x in answers.scenes.values() if x.settings] == ["abc", "one "]
    assert answers.registry._latest == {}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"text": ""}, "text is empty: give at least one character"),
        ({"text": "ab" * 10_000}, "text is too long: 20001 tokens, at most 16384"),
        ({"text": 3}, "text must be a str, got 3"),
        ({"temperature": 0}, "temperature must be positive and finite, got 0.0"),
        ({"temperature": True}, "temperature must be a float, got True"),
        ({"causal": 1}, "causal must be a bool, got 1"),
        ({"causal": "x" * 9999}, "causal must be a bool, got 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
        ({"text": "a\ud83d"}, "text must be Unicode: character 1 is half of a surrogate pair"),
        ({"text": "\udcff"}, "text must be Unicode: character 0 is half of a surrogate pair"),
        ({"text": "a", "replaces": 3}, "replaces and keeps must be the ids of scenes"),
        (None, "settings must be a JSON object with text, temperature, scaled, causal"),
        ({"speed": 1}, "speed is not a setting; those are text, temperature, scaled, causal"),
        ([], "settings must be a JSON object with text, temperature, scaled, causal"),
    ],
)
def test_settings_that_cannot_be_run(body: Any, sentence: str) -> None:
    assert refused(Answers([example(Settings("a"))]).post("example/run", body)) == (422, sentence)


@pytest.mark.parametrize(
    ("path", "query", "status", "sentence"),
    [
        ("nothing", {}, 404, "there is no nothing"),
        ("other/heads", {}, 404, "there is no scene other: see scenes"),
        ("arrays/map/1/0", {}, 404, "layer 1 does not exist: there are 1"),
        ("arrays/map/0/4", {}, 404, "head 4 does not exist: there are 4"),
        ("arrays/tile/0/0/3/0/0", {}, 404, "level 3 does not exist: this map has levels 0 to 2"),
        ("arrays/tile/0/0/1/2/0", {}, 404, "tile 2, 0 does not exist: level 1 has 2 × 2 tiles"),
        ("arrays/tile/0/0/0/0/0", {"kind": "sum"}, 422, "kind must be mass or max, got sum"),
        ("arrays/row/0/0/700", {}, 404, "query 700 does not exist: there are 700"),
        ("arrays/column/0/0/900", {}, 404, "key 900 does not exist: there are 900"),
        ("arrays/step/0/0/0/900", {}, 404, "key 900 does not exist: there are 900"),
        ("arrays/values/0/0", {"rows": "5:5"}, 422, "rows must be first:end with 0 ≤ first < end ≤ 700, got 5:5"),
        ("arrays/values/0/0", {"cols": "-1:5"}, 422, "cols must be first:end with 0 ≤ first < end ≤ 900, got -1:5"),
        ("arrays/thumbs/0", {"size": "1000"}, 422, "size must be a number from 1 to 256, got 1000"),
        ("arrays/tokens", {"axis": "x"}, 422, "axis must be query or key, got x"),
        ("arrays/tokens", {"start": "x"}, 422, "start must be a number from 0 to 0, got x"),
        ("arrays/tokens", {"start": "²"}, 422, "start must be a number from 0 to 0, got ²"),
        ("arrays/row/0/0/1", {"b": LONG}, 422, f"batch element must be a number from 0 to 0, got {LONG[:59]}…"),
        ("arrays/thumbs/0", {"size": LONG}, 422, f"size must be a number from 1 to 256, got {LONG[:59]}…"),
        (
            "arrays/values/0/0",
            {"rows": f"0:{LONG}"},
            422,
            f"rows must be first:end with 0 ≤ first < end ≤ 700, got 0:{LONG[:57]}…",
        ),
        (f"arrays/row/0/0/{LONG}", {}, 404, f"query {LONG[:59]}… does not exist"),
        (f"arrays/column/{LONG}/0/1", {}, 404, f"layer {LONG[:59]}… does not exist"),
        (f"arrays/tile/0/0/0/{LONG}/0", {}, 404, f"x {LONG[:59]}… does not exist"),
        ("arrays/row/0/0/١", {}, 404, "query ١ does not exist"),
        ("arrays/row/0/0/-1", {}, 404, "query -1 does not exist"),
        ("Arrays/heads", {}, 404, "there is no scene Arrays: see scenes"),
        ("arrays/run", {}, 404, "there is no arrays/run"),
        ("x" * 5000, {}, 404, f"there is no {'x' * 59}…"),
    ],
)
def test_questions_without_an_answer(path: str, query: dict[str, str], status: int, sentence: str) -> None:
    assert refused(Answers([arrays(Q, K)], patience=None).get(path, query)) == (status, sentence)
    assert refused(Answers([arrays(Q, K)]).post("arrays/run", {}))[0] == 422


def test_a_scene_is_one_file() -> None:
    answers = Answers([example(Settings("to be")), arrays(Q, K)], patience=None)
    html = asked(answers, "example/page")["html"]
    place = '<div id="regard-page"'  # where the page writes what it begins with
    assert html.count(f"{place}></div>") == 1
    assert html.index(place) == html.index(f"{place}></div>")
    assert "regard look: to be</title>" in html
    large = np.zeros((40, 2500, 1), np.float32)
    dense = np.ones((2500, 2500), bool)
    found = Answers([arrays(large, large, mask=dense)], patience=None).get("arrays/page")
    assert refused(found)[0] == 422
    assert "one file should hold at most 64 MiB" in refused(found)[1]


def test_too_many_values_at_once() -> None:
    x = np.zeros((1, 1200, 1), np.float32)
    found = Answers([arrays(x, x)], patience=None).get("arrays/values/0/0")
    assert refused(found) == (422, "at most 1048576 values at once, got 1200 × 1200")


def test_the_store_keeps_within_its_limit() -> None:
    store = Store(1000)
    for n in range(20):
        store.put((n % 3, n), n, 100)
        assert store.nbytes <= 1000
        store.get((0, 12))
    assert store.get((0, 12)) == 12  # asked for again and again
    assert store.get((0, 9)) is None
    assert store.get((1, 19)) == 19
    store.forget(1)
    assert store.get((1, 19)) is None
    store.put("large", 0, 2000)
    assert (store.nbytes, store.get("large")) == (0, None)


def test_answers_keep_within_their_limit() -> None:
    answers = Answers([arrays(Q, K)], patience=None, limit=300_000)
    for x in range(4):
        for y in range(3):
            asked(answers, f"arrays/tile/0/0/2/{x}/{y}")
    assert 0 < answers.results.store.nbytes <= 300_000


def test_long_work_goes_on_behind() -> None:
    worker, go, order = Worker(0.05), threading.Event(), []

    def long(progress: Any) -> str:
        progress(0.25)
        go.wait()
        order.append("long")
        return "found"

    with pytest.raises(Unfinished) as first:
        worker.result("long", long)
    assert first.value.done == 0.25
    for name in ("early", "late"):
        with pytest.raises(Unfinished):
            worker.result(name, lambda progress, name=name: order.append(name))
    go.set()
    deadline = time.monotonic() + 10
    while len(order) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert order == ["long", "late", "early"]  # what was asked for last is done first
    assert worker.result("long", lambda progress: "again") == "found"
    with pytest.raises(RuntimeError, match="a defect"):
        Worker(None).result("broken", lambda progress: (_ for _ in ()).throw(RuntimeError("a defect")))


def test_a_map_is_seen_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    go, find = threading.Semaphore(0), pyramid.Coarse._find
    monkeypatch.setattr("regard.viewer.data.pyramid.STEP", 900 * 100)  # bands of 100 queries
    monkeypatch.setattr(pyramid.Coarse, "_find", lambda coarse, rows: (go.acquire(), find(coarse, rows)))
    answers, P = Answers([arrays(Q, K)], patience=0.0), regard.weights(Q, K)[0]

    def until(done: float) -> Answer:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            found = answers.get("arrays/map/0/0")
            assert isinstance(found.content, dict)
            if found.content["done"] == pytest.approx(done, abs=1e-3):
                return found
            time.sleep(0.005)
        raise AssertionError(f"{found.content} instead of {done}")

    def seen(rows: slice) -> None:
        """Just these rows of cells are there, and right."""
        found = answers.get("arrays/tile/0/0/1/0/0", {"kind": "mass"})
        there = np.zeros(256, bool)
        there[rows] = True
        assert isinstance(found.content, np.ndarray)
        np.testing.assert_array_equal(np.isposinf(found.content), np.broadcast_to(~there[:, None], (256, 256)))
        np.testing.assert_allclose(found.content[rows], cells_of(P, 2, "mass")[:256, :256][rows], rtol=1e-3)
        assert found.exact is bool(there.all())

    assert not until(0).exact
    exact = answers.get("arrays/tile/0/0/2/0/0")  # the exact level waits for nothing
    assert exact.exact
    np.testing.assert_allclose(exact.content, P[:256, :256], rtol=1e-3, atol=1e-7)  # type: ignore[arg-type]
    go.release()
    highest = until(1 / 7).content["maximum"]["mass"][1]  # type: ignore[index]
    assert highest == pytest.approx(cells_of(P, 2, "mass")[:50].max(), rel=1e-3)
    seen(slice(0, 50))
    known = answers.results.store.get(("arrays", 0, 0, 0, "coarse"))
    known.prefer(range(530, 590))
    known._wished = 0.0  # long ago
    known.prefer(range(700))  # all of it is no preference
    for done in (2, 3):
        go.release()  # what was begun before the wish; what was wished for
        until(done / 7)
    found = answers.get("arrays/tile/0/0/1/0/1", {"kind": "max"}).content
    np.testing.assert_allclose(found[:44], cells_of(P, 2, "max")[256:300, :256], rtol=1e-3)  # type: ignore[index]
    assert np.isposinf(found[44:]).all()  # type: ignore[index]
    go.release(7)
    assert until(1).exact
    seen(slice(0, 256))
    answers.close()


def test_lse_is_found_for_the_queries_that_are_asked_for() -> None:
    answers = Answers([arrays(Q, K, causal=True)], patience=None)
    head, blocks = answers.head("arrays", 0, 1), slice(256 // BLOCK, 512 // BLOCK)
    asked(answers, "arrays/tile/0/1/2/0/1")
    expected = np.zeros(-(-700 // BLOCK), bool)
    expected[blocks] = True
    np.testing.assert_array_equal(head._known, expected)
    asked(answers, "arrays/row/0/1/699")
    expected[-1] = True
    np.testing.assert_array_equal(head._known, expected)
    _, seen = regard.attention(Q, K, V, causal=True, observe=["lse"], engine="tiled")
    np.testing.assert_array_equal(head.lse_of(range(256, 512)), seen.lse[1, 256:512])
    np.testing.assert_array_equal(head.lse, seen.lse[1])


def test_an_lse_that_was_given_is_not_written_to() -> None:
    _, seen = regard.attention(Q, K, V, causal=True, observe=["lse"])
    given = np.asarray(seen.lse)
    given.setflags(write=False)
    answers = Answers([arrays(Q, K, causal=True, lse=given)], patience=None)
    asked(answers, "arrays/profiles/0/1")  # a pass that finds lse by the way
    np.testing.assert_array_equal(answers.head("arrays", 0, 1).lse, given[1])


def test_lse_of_many_queries_is_found_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.viewer.serve.results.AT_ONCE", 64 * 900)
    answers, go, lse_of = Answers([arrays(Q, K)], patience=0.0), threading.Event(), Head.lse_of

    def slow(head: Head, rows: range, progress: Any = lambda done: None) -> np.ndarray:
        progress(0.5)
        assert go.wait(10)
        return lse_of(head, rows, progress)

    monkeypatch.setattr(Head, "lse_of", slow)
    for _ in range(200):
        if answers.get("arrays/column/0/0/3").content == {"progress": 0.5}:
            break
        time.sleep(0.01)
    assert (answers.get("arrays/column/0/0/3").status, answers.get("arrays/column/0/0/3").content) == (
        202,
        {"progress": 0.5},
    )
    go.set()
    assert answers.get("arrays/row/0/0/3").status == 200
    answers.results.workers["maps"].patience = None
    np.testing.assert_allclose(asked(answers, "arrays/column/0/0/3"), regard.weights(Q, K)[0, :, 3], atol=1e-7)
    answers.close()


class Counted:
    """Grows in some pieces, and tells of each."""

    error: Exception | None = None

    def __init__(self, name: str, pieces: int, told: Any):
        self.name, self.pieces, self.told = name, pieces, told

    @property
    def whole(self) -> bool:
        return self.pieces <= 0

    def grow(self) -> None:
        self.told(self.name)
        self.pieces -= 1


def test_what_was_asked_for_last_grows_first_and_only_while_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    grower, go, order = Grower(0.0), threading.Semaphore(0), []

    def told(name: str) -> None:
        go.acquire()
        order.append(name)

    def wait(n: int) -> None:
        deadline = time.monotonic() + 10
        while len(order) < n and time.monotonic() < deadline:
            time.sleep(0.005)

    early, late = Counted("early", 9, told), Counted("late", 2, told)
    grower.ask(early)
    grower.ask(late)
    go.release(4)
    wait(4)
    monkeypatch.setattr("regard.viewer.serve.store.ASKED_FOR", 0.0)  # nobody asks any more
    assert order in (["early", "late", "late", "early"], ["late", "late", "early", "early"])
    go.release(20)
    for _ in range(200):
        if not grower._running:
            break
        time.sleep(0.01)
    assert not grower._running
    assert early.pieces >= 6  # at most the piece that was begun
    broken = Counted("broken", 1, lambda name: (_ for _ in ()).throw(RuntimeError("a defect")))
    monkeypatch.setattr("regard.viewer.serve.store.ASKED_FOR", 3.0)
    with pytest.raises(RuntimeError, match="a defect"):
        Grower(5.0).ask(broken)
    slow = Counted("slow", 3, lambda name: None)
    Grower(None).ask(slow)
    assert slow.whole


def test_no_square_is_ever_made() -> None:
    n = 12_000
    q, k = RNG.standard_normal((2, 1, n, 16)).astype(np.float32)
    answers = Answers([arrays(q, k, causal=True)], patience=None)
    regard.attention(q[:, :200], k[:, :200], k[:, :200], causal=True)  # what is loaded once is not counted
    asked(answers, "arrays/tile/0/0/6/1/2")
    with traced_memory() as held:
        asked(answers, "arrays/map/0/0")
        asked(answers, "arrays/thumbs/0", size=64)
        for level, at in ((0, "0/0"), (2, "1/2"), (3, "4/5"), (6, "20/40")):
            asked(answers, f"arrays/tile/0/0/{level}/{at}")
        asked(answers, "arrays/profiles/0/0")
        asked(answers, "arrays/row/0/0/11000")
        asked(answers, "arrays/column/0/0/3")
        asked(answers, "arrays/step/0/0/11000/4")
        _, peak = held()
    assert n * n > SMALL
    assert peak < 4 * n * n / 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, True)),
        ({"causal": True}, (True, True)),
        ({"mask": regard.mask(lambda b, h, i, j: j <= i)}, (True, True)),
        ({"mask": regard.mask(lambda b, h, i, j: (j <= i) | (j == 3))}, (False, True)),
        ({"mask": regard.window(40)}, (True, False)),
        ({"mask": regard.window(10, 10)}, (False, False)),
        ({"causal": True, "offset": np.array([40, 0])}, (True, True)),
        ({"mask": regard.causal() & regard.documents(np.array([[0] * 70, [0] * 69 + [1]]))}, (True, False)),
    ],
)
def test_what_is_causal_is_told_by_the_rules_alone(options: dict[str, Any], expected: tuple[bool, bool]) -> None:
    x = np.zeros((2, 1, 70, 4))
    assert triangle(problem_from(x[:, :, :50] if "offset" in options else x, x, x, **options)) == expected


def test_names_and_shapes_that_do_not_fit() -> None:
    for options, message in (
        ({"tokens": ["a"]}, "tokens must be one for each row, 700, got 1"),
        ({"key_tokens": ["a"]}, "key_tokens must be one for each row, 900, got 1"),
        ({"lse": np.zeros(3)}, r"lse must have shape \(4, 700\), got \(3,\)"),
        ({"lse": np.zeros((4, 700))}, "lse does not belong to this query, key and options: with it, the weights"),
    ):
        with pytest.raises(ValueError, match=message):
            arrays(Q, K, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="it has no option dropout"):
        arrays(Q, K, dropout=0.5)
    with pytest.raises(ValueError, match="look needs at least one query, key and head"):
        arrays(Q[:, :0], K)


def test_a_scene_of_matrices() -> None:
    scene: Scene = arrays(Q[0], K[0], V[0], tokens=[str(n) for n in range(700)])
    answers = Answers([scene], patience=None)
    np.testing.assert_allclose(asked(answers, "arrays/row/0/0/5"), regard.weights(Q[0], K[0])[5], atol=1e-7)
    assert asked(answers, "arrays/tokens", axis="query")["total"] == 700
    assert asked(answers, "arrays/tokens", axis="key")["total"] == 0


def test_a_learned_sink_takes_what_a_row_is_short_of_one() -> None:
    sink = np.array([0.0, 1.0, 4.0, -2.0])
    answers = Answers([arrays(Q, K, causal=True, sink=sink)], patience=None)
    layer = asked(answers, "scenes")["scenes"][0]["layers"][0]
    assert layer["sink"]
    assert layer["sinks"] == sink.tolist()
    P = regard.weights(Q, K, causal=True, sink=sink)
    for head in range(4):
        found = asked(answers, f"arrays/sinks/0/{head}")
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, 1 - P[head].sum(-1), atol=2e-6)
        profile = asked(answers, f"arrays/profiles/0/{head}")["learned_sink"]["values"]
        np.testing.assert_allclose(profile, found, rtol=1e-5)
        stages = {stage["name"]: stage for stage in asked(answers, f"arrays/step/0/{head}/30/3")["stages"]}
        assert stages["sink"]["value"] == pytest.approx(found[30], rel=1e-5)
    rows = asked(answers, "arrays/token/30")["rows"]
    assert [row["sink"] for row in rows] == pytest.approx(1 - P[:, 30].sum(-1), abs=1e-5)
    without = Answers([arrays(Q, K)], patience=None)
    assert all(row.keys() == {"layer", "head", "keys", "weights"} for row in asked(without, "arrays/token/30")["rows"])
    layer = asked(without, "scenes")["scenes"][0]["layers"][0]
    assert not layer["sink"]
    assert "sinks" not in layer
    assert asked(without, "arrays/sinks/0/0").size == 0
    assert "learned_sink" not in asked(without, "arrays/profiles/0/0")
    assert "sink" not in {stage["name"] for stage in asked(without, "arrays/step/0/0/30/3")["stages"]}
