"""What the page says of a head that is switched off is what runs of the model say."""

from typing import Any

import numpy as np
import pytest

from regard.examplemodel import ExampleModel
from regard.viewer.data.questions import Answer
from regard.viewer.scene.sources import Settings, arrays, example
from regard.viewer.serve.answers import Answers
from support import softmax

SETTINGS = Settings("Dr. Zavrel met Otokar Brix. Nobody knew why Otokar Br", temperature=1.5)
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model() -> ExampleModel:
    return ExampleModel.load()


@pytest.fixture(scope="module")
def answers(model: ExampleModel) -> Answers:
    q, k, v = RNG.standard_normal((3, 2, 7, 4))
    scenes = [example(SETTINGS, model), arrays(q, k, v, causal=True), arrays(q, k)]
    return Answers(scenes, patience=None)


def asked(answers: Answers, path: str, **query: str) -> Any:
    found = answers.get(path, query)
    assert found.status == 200, found.content
    return found.content


def run(model: ExampleModel, **options: Any) -> Any:
    return model.run(model.encode(SETTINGS.text), temperature=SETTINGS.temperature, **options)


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_heads_by_the_loss_without_them(answers: Answers, model: ExampleModel, how: Any) -> None:
    told = asked(answers, "example/ablations", how=how)
    assert told["loss"] == pytest.approx(run(model).losses().mean())
    assert [(row["layer"], row["head"]) for row in told["rows"]] == [(n // 4, n % 4) for n in range(12)]
    for row in told["rows"][::5]:
        expected = run(model, ablate={(row["layer"], row["head"]): how}).losses().mean()
        assert row["loss"] == pytest.approx(expected)
    assert max(told["rows"], key=lambda row: row["loss"])["loss"] > told["loss"] + 0.05


@pytest.mark.parametrize("i", [10, None])
def test_odds_of_the_next_token(answers: Answers, model: ExampleModel, i: int | None) -> None:
    told = asked(answers, "example/ablation/2/2", **({} if i is None else {"i": str(i)}))
    traces = {"before": run(model), "after": run(model, ablate={(2, 2): "zero"})}
    last = len(traces["before"].ids) - 1
    assert told["i"] == (last if i is None else i)
    for name, trace in traces.items():
        np.testing.assert_allclose(told["losses"][name], trace.losses(), rtol=1e-12)
        shares = softmax(trace.logits[told["i"]].astype(float))
        listed = {odd["token"]: odd[name] for odd in told["odds"]}
        for byte in np.argsort(-shares)[:5]:
            assert listed[chr(byte)] == pytest.approx(shares[byte])
    assert [odd["token"] for odd in told["odds"] if odd["actual"]] == ([] if i is None else [SETTINGS.text[i]])
    before = [odd["before"] for odd in told["odds"]]
    assert before == sorted(before, reverse=True)


def test_norms_of_values(answers: Answers) -> None:
    for name, head in (("example", 3), ("arrays", 1)):
        p = answers.scenes[name].layers[0].problem
        value = p.value.reshape(p.heads, p.n_k, p.d_v)[head].astype(float)
        np.testing.assert_allclose(asked(answers, f"{name}/norms/0/{head}"), np.linalg.norm(value, axis=-1), rtol=1e-6)
    assert asked(answers, "arrays-2/norms/0/1").shape == (0,)  # no values were given


NOT_HERE = "this needs a model that runs here: regard's example model, or one of your own by --model"


@pytest.mark.parametrize(
    ("path", "query", "sentence"),
    [
        ("arrays/ablations", {}, NOT_HERE),
        ("arrays/ablation/0/1", {}, NOT_HERE),
        ("arrays/expected", {}, NOT_HERE),
        ("example/ablations", {"how": "half"}, "how must be zero or mean, got half"),
        ("example/ablation/0/0", {"i": "54"}, "token must be a number from 0 to 53, got 54"),
        ("example/ablation/3/0", {}, "layer 3 does not exist: there are 3"),
    ],
)
def test_questions_without_an_answer(answers: Answers, path: str, query: dict[str, str], sentence: str) -> None:
    found = answers.get(path, query)
    assert isinstance(found, Answer)
    assert found.status in (404, 422)
    assert found.content == {"error": sentence}
