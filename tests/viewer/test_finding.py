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
from regard.insight import measure_heads
from regard.viewer.data import finding, scores, sentences
from regard.viewer.data.dots import mean_variances
from regard.viewer.data.finding import Candidate, pick, row_sentence
from regard.viewer.data.outlines import Outline, Pair
from regard.viewer.data.scores import KINDS, estimates, layer_scores
from regard.viewer.data.summary import Choice, look_data
from regard.viewer.scene.scenes import Array, Scene
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
    ("candidates", "place"),
    [
        ([Candidate(0, 0, 0.1, 0.0, 0.1), Candidate(2, 1, 0.6, 0.9, 0.9)], (2, 1)),
        ([Candidate(0, 0, 0.24, 0.0, 0.8), Candidate(1, 1, 0.1, 0.0, 0.3)], (1, 1)),  # none is notable
        ([Candidate(0, 0, NAN, 0.0, 0.8), Candidate(1, 1, NAN, NAN, 0.3)], (1, 1)),
        ([Candidate(0, 0, 0.1, 0.9, 0.1), Candidate(0, 1, 0.1, 0.1, 0.9)], (0, 1)),  # a sink says little
        ([Candidate(0, 0, 0.1, 0.9, 0.2), Candidate(0, 1, 0.1, 0.8, 0.1)], (0, 1)),  # unless all are
        ([Candidate(0, 0, NAN, 0.0, NAN), Candidate(0, 1, NAN, 0.0, 0.9)], (0, 1)),
    ],
)
def test_the_head_of_a_finding_without_words(candidates: list[Candidate], place: tuple[int, int]) -> None:
    assert pick(candidates) == (*place, -1)


def test_a_text_of_words_opens_where_few_heads_look_far() -> None:
    """Four heads look at the article, one at the noun: a lighter weight, but rarer."""
    candidates = [Candidate(0, head, 0.9, 0.0, 0.1) for head in range(5)]
    article, noun = Outline((), (Pair(7, 4, 0.9),), (4,)), Outline((), (Pair(7, 1, 0.8), Pair(5, 4, 0.5)), (1, 4))
    outlines = {(0, head): noun if head == 3 else article for head in range(5)}
    assert pick(candidates, outlines) == (0, 3, 7)
    assert pick(candidates[:3], outlines) == (0, 0, 7)  # of the heads that are left
    weak = {(0, 0): Outline((), (Pair(7, 1, 0.2),))}
    assert pick(candidates, weak) == (0, 0, -1)


def test_the_example_opens_on_its_induction_head() -> None:
    scene = example(Settings())
    found = answered(scene, "{}/finding")
    assert found == {"layer": 2, "head": 2, "i": -1, "how": ""}
    data = look_data(scene)
    choice = data.choose()
    assert (choice.layer, choice.head, choice.token) == (2, 2, 53)
    assert data.says(choice) == (
        "L2 H2: The dark column is a first-token sink: “⊢” takes 0.86 of the weight. The short line is induction: of a "
        "repeated token's weight, 0.58 goes to what followed it before.",
        "The last token, 53 “r”, looks most at 25 “i” (weight 0.437), which followed an earlier “·Otokar·Br”.",
        "The model expects next: “i” 98.3%.",
    )


def test_what_is_expected_next_is_not_said_of_another_token() -> None:
    data = look_data(example(Settings()))
    said = data.says(data.choose(2, 2, 20))
    assert len(said) == 2
    assert "expects" not in " ".join(said)


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
    choice, last = data.choose(), data.choose(token=-1)
    said = data.says(last, "dense")
    assert sentences.says(answered(scene, f"{{}}/claims/{choice.layer}")["heads"][choice.head]) in data.says(choice)[0]
    assert len(said) == (3 if given is None else 2)
    for sentence in (*said, sentences.CAVEAT):
        assert sentence in printed
        assert sentence.replace("dense column", "dark column") in drawn
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
    "scene",
    [
        example(Settings("abcdef")),
        arrays(*RNG.standard_normal((2, 3, 40, 8)), causal=True),
        arrays(RNG.standard_normal((2, 9, 8)), RNG.standard_normal((2, 40, 8))),
        arrays(*RNG.standard_normal((2, 2, 40, 8)), causal=True, tokens=[*"abcdefghijklmnopqrst"] * 2),
    ],
    ids=["nothing repeats", "arrays", "cross", "no induction"],
)
def test_without_words_and_induction_the_most_concentrated_head(scene: Scene) -> None:
    found = answered(scene, "{}/finding")
    of = [x for number in range(len(scene.layers)) for x in layer_scores(scene, number) if not x.sink >= 0.5]
    least = min(of, key=lambda x: x.normalized_entropy)
    assert (found["layer"], found["head"], found["i"]) == (least.layer, least.head, -1)
    assert look_data(scene).choose() == Choice(least.layer, least.head, scene.layers[0].problem.n_q - 1)


def test_all_rows_estimate_the_scores_themselves() -> None:
    scene = example(Settings("One two three. One two three."))
    for number in range(3):
        n = scene.layers[number].problem.n_q
        for (one, _), other in zip(estimates(scene, number, n), layer_scores(scene, number), strict=True):
            assert one.scores == pytest.approx(other.scores, abs=1e-5)
            assert one.normalized_entropy == pytest.approx(other.normalized_entropy, abs=1e-5)


def test_many_pairs_are_measured_by_kernels_all_heads_of_a_layer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = example(Settings("One two three. One two three."))
    calls: list[tuple[int, str | None]] = []

    def counted(query: Array, *given: Any, engine: str | None, **options: Any) -> Any:
        calls.append((query.shape[-3], engine))
        return measure_heads(query, *given, engine=engine, **options)

    monkeypatch.setattr(scores, "measure_heads", counted)
    by_tiles = layer_scores(scene, 2)
    monkeypatch.setattr(scores, "COMPILED", scene.pairs - 1)
    by_kernels = layer_scores(scene, 2)
    monkeypatch.setattr(scores, "TOGETHER", 0)
    one_by_one = layer_scores(scene, 2)
    heads = scene.layers[2].heads
    assert calls == [(heads, "tiled"), (heads, None), *[(1, None)] * heads]
    for kernels in (by_kernels, one_by_one):
        assert [(x.head, x.kv_head) for x in kernels] == [(x.head, x.kv_head) for x in by_tiles]
        for one, other in zip(kernels, by_tiles, strict=True):
            assert one.scores == pytest.approx(other.scores, abs=1e-5)


def test_a_long_scene_is_sampled_and_says_so() -> None:
    scene = arrays(*RNG.standard_normal((2, 2, 3000, 8)), causal=True)
    rows = finding.sample_rows(scene)
    assert finding.FEWEST <= rows <= finding.MOST
    assert answered(scene, "{}/finding")["how"] == f"Found from {rows} of 3,000 queries: “Heads” measures all."


def test_a_row_that_sees_nothing() -> None:
    assert row_sentence(np.full(4, np.nan), 2, 4, (), ()).text == "Token 2 sees no key."


def test_a_row_that_rests_says_where_else_it_looks() -> None:
    row = np.array([0.6, 0.3, 0.02, 0.08, np.nan])
    said = row_sentence(row, 3, 5, (), ()).text
    assert said == (
        "Token 3 looks most at 0 (weight 0.600). Leaving aside the first token, itself and its neighbours, it looks "
        "most at 1 (weight 0.300)."
    )
    assert row_sentence(row, 3, 5, (), (), same=False).text == "Token 3 looks most at 0 (weight 0.600)."
    assert row_sentence(row / 4, 3, 5, (), (), same=False).text.endswith("The learned sink takes 0.750 of its weight.")


def test_words_name_every_view_and_term() -> None:
    words = answered(example(Settings("to be")), "words")
    app = (Path(__file__).parents[2] / "page" / "src" / "app.ts").read_text("utf-8")
    views = re.findall(r"^  (\w+): \[\"", app[app.index("const VIEWS") :], re.MULTILINE)
    assert "overview" in views
    assert set(words["views"]) == set(views) == set(links.VIEWS)
    assert set(words["patterns"]) == {
        "last", "other", "aside", "resting", "repeats", "expects", "unseen",
    }  # fmt: skip
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
    assert [(step["state"]["layer"], step["state"]["head"]) for step in steps[:4]] == [(2, 2), (1, 0), (2, 2), (2, 2)]
    assert "reads now, and L1 H0 comes first." in steps[3]["text"]
    row = steps[4]["state"]["i"]
    weights = look_data(example(Settings())).weights(2, 2, slice(row, row + 1))[0]
    assert f"of the marked row is {np.nanmax(weights):.3f} with it and 0.998 without" in steps[4]["text"]
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
