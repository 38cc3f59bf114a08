"""A model of one's own on the page: typed into, continued, and without each of its heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from regard.viewer.scene.own import TextRunner
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.codecs import split_query
from regard.viewer.serve.contents import Contents
from small_models import DECODER, MODELS, VOCABULARY, Model, transformers
from torch_tokenizers import MASK, words

KINDS = MODELS | {"bfloat16": Model("LlamaForCausalLM", "LlamaConfig", DECODER, torch.bfloat16)}
NAMES = ["gpt2", "mistral", "gemma3", "gpt_oss", "bert", "t5", "bfloat16"]
OUTPUT = ("attn.c_proj", "self_attn.o_proj", "attention.output.dense", "SelfAttention.o", "EncDecAttention.o")
"""Modules that read the outputs of all heads, side by side."""

TEXT = "w5 w9 w21 w5 w9 w40 w33 w21"


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> tuple[Any, TextRunner]:
    network = KINDS[request.param].build()
    return network, TextRunner(network, words())


def logits(network: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = network(**given).logits.float()
    return found


@contextmanager
def head_output(network: Any, layer: str, head: int, how: str) -> Iterator[None]:
    """Replaces a head where the module behind the heads reads it: in the model as it is, without regard."""
    parent = layer.removesuffix(".self")
    (module,) = (x for name, x in network.named_modules() if name.startswith(parent) and name.endswith(OUTPUT))

    def enter(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0].clone()
        d = x.shape[-1] // 4
        own = x[..., head * d : (head + 1) * d]
        own[...] = own.mean(-2, keepdim=True) if how == "mean" else 0
        return (x,)

    handle = module.register_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()


def tolerance(network: Any) -> float:
    return {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.06}[network.dtype]


def test_a_text_is_read(model: tuple[Any, TextRunner]) -> None:
    network, runner = model
    scenes = runner.scenes({"text": TEXT})
    assert len(scenes) == (3 if runner.model.answers else 1)
    scene = scenes[-1]
    expected = runner.expected(scene)
    batch = scene.run.batch
    whole = logits(network, batch.given)
    selected = whole[batch.rows, batch.positions] if runner.predicts == "masked" else whole[0]
    np.testing.assert_allclose(expected.logits, selected.numpy(), atol=tolerance(network))
    ids = [5, 9, 21, 5, 9, 40, 33, 21]
    if runner.predicts == "masked":
        assert [expected.actual(i) for i in range(8)] == ids
        assert batch.given["input_ids"].eq(MASK).sum(0).tolist() == [1] * 8  # each token is masked once
    elif not runner.model.answers:
        assert [expected.actual(i) for i in range(8)] == [*ids[1:], None]
        assert scene.following == expected.likeliest(7)
    for layer in scene.layers:
        assert layer.has_values


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_heads_are_switched_off(model: tuple[Any, TextRunner], how: Any) -> None:
    network, runner = model
    for scene in runner.scenes({"text": TEXT}):
        losses = runner.losses(scene, how)
        while not losses.whole:
            losses.grow()
        assert [row[:2] for row in losses.rows] == [(n, h) for n, x in enumerate(scene.layers) for h in range(x.heads)]
        whole = runner.expected(scene)
        assert losses.loss == pytest.approx(np.nanmean(whole.losses()), abs=tolerance(network))
        for layer, head, loss in losses.rows[::3]:
            without = runner.expected(scene, {(layer, head): how})
            batch = scene.run.batch
            with head_output(network, scene.layers[layer].name, head, how):
                plain = logits(network, batch.given)
            selected = plain[batch.rows, batch.positions] if runner.predicts == "masked" else plain[0]
            np.testing.assert_allclose(without.logits, selected.numpy(), atol=tolerance(network))
            assert loss == pytest.approx(np.nanmean(without.losses()), abs=tolerance(network))
            assert np.abs(without.logits - whole.logits).max() > tolerance(network)


def test_the_page_types_and_continues(model: tuple[Any, TextRunner]) -> None:
    _, runner = model
    answers = Answers(runner.scenes({"text": TEXT}), patience=None)
    name = "model" if not runner.model.answers else "model-3"
    scene = answers.post(f"{name}/run", {"text": "w7 w8 w9", "replaces": "typing"}).content["scene"]  # type: ignore[index]
    assert scene["settings"] == {"text": "w7 w8 w9"}
    again = answers.post(f"{name}/run", {"text": "w7 w8", "replaces": "typing"}).content["scene"]["id"]  # type: ignore[index]
    assert scene["id"] not in answers.scenes
    assert len(answers.scenes) == 2 * len(runner.scenes({"text": "w7"}))
    found = answers.post(f"{again}/run", {"continue": "drawn"})
    if runner.predicts == "next" and not runner.model.answers:
        assert found.status == 200
        assert found.content["scene"]["settings"]["text"].startswith("w7 w8")  # type: ignore[index]
        likeliest = answers.get(f"{again}/expected").content["likeliest"][0]["token"]  # type: ignore[index]
        text = answers.post(f"{again}/run", {"continue": "likeliest"}).content["scene"]["settings"]["text"]  # type: ignore[index]
        assert text == f"w7 w8{likeliest}"
    else:
        sentence = "only a decoder continues a text: this model reads the text as a whole"
        assert (found.status, found.content) == (422, {"error": sentence})
    losses = answers.get(f"{again}/ablations").content
    assert losses["done"] == 1  # type: ignore[index]
    scene = answers.scenes[again]
    saved = [path for path in Contents.of(again, scene).paths if "/expected?" in path]  # what a saved page holds of it
    assert len(saved) == (len(scene.query_tokens) if scene.predicts else 0)
    for path in saved:
        assert answers.get(*split_query(path)).status == 200


def test_a_run_ends_at_the_next_layer() -> None:
    network = KINDS["mistral"].build()
    runner = TextRunner(network, words())
    told = []

    def progress(stage: str) -> None:
        told.append(str(stage))
        raise InterruptedError

    with pytest.raises(InterruptedError):
        runner.scenes({"text": TEXT}, progress)
    assert told == ["layer 1 of 2"]
    assert runner.scenes({"text": TEXT})[0].following  # nothing stays behind
    scene = runner.scenes({"text": TEXT})[0]
    wanted = iter([True, True, True, False])
    losses = runner.losses(scene, "zero", lambda: next(wanted, True))
    losses.grow()
    losses.grow()
    assert losses.rows == []  # it was given up
    losses.grow()
    assert len(losses.rows) == 4


def test_models_that_predict_nothing() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**DECODER)
    runner = TextRunner(transformers.LlamaModel(config).eval(), words())
    (scene,) = runner.scenes({"text": TEXT})
    assert scene.following == ()
    answers = Answers([scene], patience=None)
    found = answers.get("model/ablations")
    assert found.status == 422
    assert "this model predicts no tokens" in found.content["error"]  # type: ignore[index]
    assert answers.get("model/norms/0/1").content.shape == (8,)  # type: ignore[union-attr]


def test_of_a_long_text_the_end_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.torch.capture import running

    monkeypatch.setattr(running, "LOGITS", 3 * 4 * VOCABULARY)
    answers = Answers(TextRunner(KINDS["mistral"].build(), words()).scenes({"text": TEXT}), patience=None)
    assert answers.get("model/expected", {"i": "4"}).content == {"i": 4, "likeliest": [], "actual": None}
    known = answers.get("model/expected", {"i": "5"}).content
    assert known["actual"]["token"] == "w33"  # type: ignore[index]
    refused = answers.get("model/ablation/0/0", {"i": "4"}).content
    assert refused == {"error": "token must be a number from 5 to 7, got 4"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"text": ""}, "text is empty: give at least one character"),
        ({"text": "w1 " * 65}, "text is too long: 65 tokens, and the model reads at most 64"),
        ({"text": 3}, "text must be a str, got 3"),
        ({"temperature": 2}, "temperature is not a setting of this model; the only one is text"),
        ({"continue": "now"}, "continue must be likeliest or drawn, got now"),
    ],
)
def test_texts_that_cannot_be_read(body: Any, sentence: str) -> None:
    answers = Answers(TextRunner(KINDS["mistral"].build(), words()).scenes({"text": TEXT}), patience=None)
    found = answers.post("model/run", body)
    assert (found.status, found.content) == (422, {"error": sentence})
