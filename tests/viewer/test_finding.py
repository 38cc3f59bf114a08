"""The finding that a page opens on, what is said of it, and the tour: the same in the terminal and on the page."""

import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import regard
from regard.cli import main
from regard.viewer.data import finding, sentences
from regard.viewer.data.dots import mean_variances
from regard.viewer.data.finding import Candidate, pick, row_sentence
from regard.viewer.data.scores import KINDS, estimated_scores, layer_scores
from regard.viewer.data.summary import look_data
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.sources import Settings, arrays, example
from regard.viewer.serve import links
from regard.viewer.serve.answers import Answers
from regard.viewer.show.terminal import show

NAN = float("nan")
RNG = np.random.default_rng(0)
Q, K, V = np.random.default_rng(1).standard_normal((3, 2, 40, 8)).astype(np.float32)
GIVEN: dict[str, dict[str, Any]] = {
    "arrays": {"query": Q, "key": K, "value": V},
    "arrays with tokens": {"query": Q, "key": K, "value": V, "tokens": [*"to be, or not to be: that is the questio"]},
}


def answered(scene: Scene, path: str, **query: str) -> Any:
    answers = Answers([scene], patience=None)
    name = next(iter(answers.scenes))
    found = answers.get(path.format(name), query)
    answers.close()
    assert found.status == 200, found.content
    return found.content


@pytest.mark.parametrize(
    ("candidates", "place", "by_induction"),
    [
        ([Candidate(0, 0, 0.1, 0.0, 0.1), Candidate(2, 1, 0.6, 0.9, 0.9)], (2, 1), True),
        ([Candidate(0, 0, 0.24, 0.0, 0.8), Candidate(1, 1, 0.1, 0.0, 0.3)], (1, 1), False),  # none is notable
        ([Candidate(0, 0, NAN, 0.0, 0.8), Candidate(1, 1, NAN, NAN, 0.3)], (1, 1), False),
        ([Candidate(0, 0, 0.1, 0.9, 0.1), Candidate(0, 1, 0.1, 0.1, 0.9)], (0, 1), False),  # a sink says little
        ([Candidate(0, 0, 0.1, 0.9, 0.2), Candidate(0, 1, 0.1, 0.8, 0.1)], (0, 1), False),  # unless all are
        ([Candidate(0, 0, NAN, 0.0, NAN), Candidate(0, 1, NAN, 0.0, 0.9)], (0, 1), False),
    ],
)
def test_the_head_of_a_finding(candidates: list[Candidate], place: tuple[int, int], by_induction: bool) -> None:
    found = pick(candidates)
    assert (found.layer, found.head) == place
    assert found.by_induction is by_induction


def test_the_example_opens_on_its_induction_head() -> None:
    scene = example(Settings())
    found = answered(scene, "{}/finding")
    assert (found["layer"], found["head"], found["how"]) == (2, 2, "")
    assert (
        found["why"]
        == "L2 H2 is an induction head: of a repeated token's weight, 0.58 goes to what followed it before."
    )
    data = look_data(scene)
    choice = data.choose()
    assert (choice.layer, choice.head) == (2, 2)
    assert data.says(choice) == (
        found["why"],
        "The last token, 53 “r”, looks most at 25 “i” (weight 0.44), which followed an earlier “·Otokar·Br”.",
        "The model expects next: “i” 98.3%.",
    )


@pytest.mark.parametrize("given", [None, *GIVEN], ids=["example", *GIVEN])
def test_terminal_and_picture_say_what_the_page_says(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same input: `finding`, and sentences that the page fills in as `LookData.says` does (tests/browser)."""
    monkeypatch.chdir(tmp_path)
    scene, command = example(Settings()), ["look"]
    if given is not None:
        np.savez("x.npz", **GIVEN[given])
        scene, command = arrays(**GIVEN[given], causal=True), ["look", "--arrays", "x.npz", "--causal"]
    assert main([*command, "--terminal", "--save", "x.svg"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    texts = ElementTree.parse("x.svg").iter("{http://www.w3.org/2000/svg}text")
    drawn = " ".join("".join(text.itertext()) for text in texts)
    data = look_data(scene)
    said = data.says(data.choose())
    assert said[0] == answered(scene, "{}/finding")["why"]
    assert len(said) == (3 if given is None else 2)
    for sentence in (*said, sentences.CAVEAT):
        assert sentence in printed
        assert sentence in drawn
    assert sentences.view("heads", "denser") in printed
    assert sentences.view("map") in drawn
    if given == "arrays":  # a token without text is its number, once
        assert "What token 39 attends to in" in printed
        assert "39 attends most to" in drawn
        assert "24 24" not in printed + drawn


def test_the_terminal_names_kinds() -> None:
    import io

    from rich.console import Console

    data = look_data(example(Settings()))
    console = Console(file=io.StringIO(), width=200, color_system=None)
    show(data, data.choose(), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "prev? 0.28" in printed
    assert "sink 0.86" in printed  # the second kind of an induction head


@pytest.mark.parametrize(
    ("scene", "reason"),
    [
        (example(Settings("abcdef")), "Nothing repeats in this text, which induction needs, so here is"),
        (arrays(*RNG.standard_normal((2, 3, 40, 8)), causal=True), "These arrays come without tokens, so here is"),
        (
            arrays(RNG.standard_normal((2, 9, 8)), RNG.standard_normal((2, 40, 8))),
            "Queries and keys are of different sequences, so here is",
        ),
        (
            arrays(*RNG.standard_normal((2, 2, 40, 8)), causal=True, tokens=[*"abcdefghijklmnopqrst"] * 2),
            "No head shows induction (the highest score is 0.",
        ),
    ],
    ids=["nothing repeats", "arrays", "cross", "no induction"],
)
def test_without_induction_the_most_concentrated_head(scene: Scene, reason: str) -> None:
    found = answered(scene, "{}/finding")
    assert found["why"].startswith(reason)
    assert look_data(scene).says(look_data(scene).choose())[0] == found["why"]
    of = [x for number in range(len(scene.layers)) for x in layer_scores(scene, number) if not x.sink >= 0.5]
    least = min(of, key=lambda x: x.normalized_entropy)
    assert (found["layer"], found["head"]) == (least.layer, least.head)


def test_all_rows_estimate_the_scores_themselves() -> None:
    scene = example(Settings("One two three. One two three."))
    for number in range(3):
        n = scene.layers[number].problem.n_q
        for one, other in zip(estimated_scores(scene, number, n), layer_scores(scene, number), strict=True):
            assert one.scores == pytest.approx(other.scores, abs=1e-5)
            assert one.normalized_entropy == pytest.approx(other.normalized_entropy, abs=1e-5)


def test_a_long_scene_is_sampled_and_says_so() -> None:
    scene = arrays(*RNG.standard_normal((2, 2, 3000, 8)), causal=True)
    rows = finding.sample_rows(scene)
    assert finding.FEWEST <= rows <= finding.MOST
    assert answered(scene, "{}/finding")["how"] == f"Found from {rows} of 3,000 queries: “Heads” measures all."


def test_a_row_that_sees_nothing() -> None:
    assert row_sentence(np.full(4, np.nan), 2, 4, (), ()).text == "Token 2 sees no key."


def test_words_name_every_view_and_term() -> None:
    words = answered(example(Settings("to be")), "words")
    app = (Path(__file__).parents[2] / "page" / "src" / "app.ts").read_text("utf-8")
    views = re.findall(r"^  (\w+): \[\"", app[app.index("const VIEWS") :], re.MULTILINE)
    assert "overview" in views
    assert set(words["views"]) == set(views) == set(links.VIEWS)
    assert set(words["patterns"]) == {"last", "other", "repeats", "expects", "unseen"}
    assert [kind["name"] for kind in words["kinds"]] == [kind.name for kind in KINDS]
    assert {kind.name for kind in KINDS} == set(regard.insight.KINDS)
    names = [term["name"] for term in words["glossary"]]
    assert len(names) == len(set(names))
    json.dumps(words)


def test_the_tour_of_the_example() -> None:
    steps = answered(example(Settings()), "{}/tour")["steps"]
    assert [step["title"] for step in steps] == [
        "What a map is", "A previous-token head", "An induction head", "How the two compose", "Without 1/√d",
        "Without the mask", "The sink", "Your own text",
    ]  # fmt: skip
    assert [(step["state"]["layer"], step["state"]["head"]) for step in steps[:4]] == [(2, 2), (1, 0), (2, 2), (1, 0)]
    row = steps[4]["state"]["i"]
    weights = look_data(example(Settings())).weights(2, 2, slice(row, row + 1))[0]
    assert f"of the marked row is {np.nanmax(weights):.2f} with it and 1.00 without" in steps[4]["text"]
    assert steps[5]["settings"]["causal"] is False
    sink = steps[6]["state"]
    assert answered(example(Settings()), f"{{}}/row/{sink['layer']}/{sink['head']}/{sink['i']}")[sink["j"]] > 0.9


def test_the_tour_of_arrays_is_shorter() -> None:
    steps = answered(arrays(*RNG.standard_normal((2, 2, 40, 8)), causal=True), "{}/tour")["steps"]
    assert [step["title"] for step in steps][:1] == ["What a map is"]
    assert "Your own text" not in [step["title"] for step in steps]


def test_where_a_token_looks_in_every_head() -> None:
    scene = example(Settings())
    rows = answered(scene, "{}/token/40")["rows"]
    assert len(rows) == 12
    for row in rows:
        weights = np.nan_to_num(answered(scene, f"{{}}/row/{row['layer']}/{row['head']}/40"))
        np.testing.assert_allclose(row["weights"], np.sort(weights)[::-1][:7], rtol=1e-5)
        np.testing.assert_allclose(weights[row["keys"]], row["weights"], rtol=1e-5)
    answers = Answers([scene], patience=None)
    assert answers.get("example/token/54").content == {"error": "query 54 does not exist: there are 54"}
    answers.close()


def test_dot_products_give_the_weights_at_any_scale() -> None:
    q, k = RNG.standard_normal((2, 2, 30, 8)).astype(np.float32)
    scene = arrays(q, k, causal=True)
    dots = answered(scene, "{}/dots/0/1", rows="10:12", cols="0:30")
    np.testing.assert_allclose(dots[0, :11], q[1, 10] @ k[1, :11].T, rtol=1e-5, atol=1e-5)
    assert np.isnan(dots[0, 11:]).all()
    for scale in (8**-0.5, 1.0):
        weights = np.exp(scale * dots - np.nanmax(scale * dots, axis=1, keepdims=True))
        weights = np.nan_to_num(weights / np.nansum(weights, axis=1, keepdims=True))
        expected = regard.weights(q, k, causal=True, scale=scale, rows=slice(10, 12))[1]
        np.testing.assert_allclose(weights, expected, atol=1e-5)


def test_the_variance_of_products_grows_with_their_features() -> None:
    q, k = RNG.standard_normal((2, 1, 500, 64))
    found = answered(arrays(q, k), "{}/variance/0/0")
    np.testing.assert_allclose(found["variance"], np.arange(1, 65), rtol=0.25)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_the_variance_is_the_mean_over_all_orders_of_features(d: int) -> None:
    products = RNG.standard_normal((40, d)) @ RNG.standard_normal((d, d)) + 3
    orders = [products[:, order].cumsum(axis=1).var(axis=0) for order in permutations(range(d))]
    np.testing.assert_allclose(mean_variances(products), np.mean(orders, axis=0), rtol=1e-12)
