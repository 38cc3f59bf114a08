"""The example vision transformer: its accuracy, its heads, what it refuses, and the page's numbers of it."""

import json
from base64 import b64decode
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from regard.interpret.examplemodel.vit import ExampleViT, held_out

PAGE = Path(__file__).parents[2] / "page" / "tests" / "vit.json"
FILES = files("regard.interpret.examplemodel")
LARGEST = 300_000
DIGIT = 16


@pytest.fixture(scope="module")
def model():
    return ExampleViT.load()


def test_it_is_small(model):
    assert 130_000 < model.parameters < 150_000
    assert len(FILES.joinpath("vit.safetensors").read_bytes()) <= LARGEST
    assert f"{model.parameters:,} parameters" in FILES.joinpath("VIT.md").read_text("utf-8")


def test_it_reads_digits_that_it_never_saw(model):
    pictures, digits = held_out()
    assert digits.tolist() == [digit for digit in range(10) for _ in range(2)]
    trace = model.run(pictures)
    assert np.mean(trace.logits.argmax(-1) == digits) >= 0.85  # 17 of 20; the card has the figure for 1,000
    np.testing.assert_allclose(trace.odds().sum(-1), 1)


def test_the_class_token_looks_at_the_digit(model):
    with np.load(BytesIO(FILES.joinpath("vit-pictures.npz").read_bytes())) as stored:
        corners = stored["corners"]
    cells, patch = model.config.cells, model.config.patch
    inside = np.zeros((len(corners), model.config.side, model.config.side))
    for n, (top, left) in enumerate(corners):
        inside[n, top : top + DIGIT, left : left + DIGIT] = 1
    shares = inside.reshape(-1, cells, patch, cells, patch).mean((2, 4)).reshape(len(corners), 1, -1)
    trace = model.run(held_out()[0])
    rows = [trace.weights(layer, rows=slice(0, 1))[:, :, 0, 1:] for layer in range(trace.layers)]
    on_digit = np.array([((row * shares).sum(-1) / row.sum(-1)).mean(0) for row in rows])
    assert shares.mean() == pytest.approx(1 / 9, abs=1e-6)
    assert on_digit.max() > 0.6


def test_a_run_is_that_of_a_softmax_over_patches(model):
    picture = held_out()[0][3]
    trace = model.run(picture)
    for layer in range(trace.layers):
        scores = trace.scale * trace.q[layer] @ trace.k[layer].swapaxes(-1, -2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(trace.weights(layer), weights, atol=1e-5)
        np.testing.assert_allclose(trace.out[layer], weights @ trace.v[layer], atol=1e-4)
    again = model.run(np.stack([picture, 1 - picture]))
    np.testing.assert_allclose(again.logits[0], trace.logits, atol=1e-4)


def test_patches_are_the_tokens_row_by_row(model):
    dark = np.zeros((48, 48), np.float32)
    light = dark.copy()
    light[8:16, 40:48] = 1  # row 1, column 5
    changed = np.abs(model.run(light).x[0] - model.run(dark).x[0]).max(-1)
    assert np.flatnonzero(changed).tolist() == [1 + 1 * 6 + 5]


def test_weights_survive_a_file(model):
    data = model.to_safetensors()
    again = ExampleViT.from_safetensors(data)
    picture = held_out()[0][0]
    np.testing.assert_array_equal(again.run(picture).logits, model.run(picture).logits)
    assert again.config.patch == 8
    assert load(data)["0.q"].dtype == np.float16


@pytest.mark.parametrize(
    ("pictures", "error"),
    [
        (np.zeros((47, 48)), "must be (..., 48, 48), got shape (47, 48)"),
        (np.zeros((48, 48), np.uint8), "must be floats from 0 to 1, got uint8"),
        (np.full((48, 48), 1.5), "must lie in 0..1"),
        (np.full((48, 48), np.nan), "must lie in 0..1"),
        (np.zeros((0, 48, 48)), "there must be one at least"),
    ],
)
def test_what_is_no_picture_is_refused(model, pictures, error):
    with pytest.raises((TypeError, ValueError)) as raised:
        model.run(pictures)
    assert error in str(raised.value)


def test_the_page_is_held_to_the_same_numbers(model):
    for case in json.loads(PAGE.read_text("utf-8")):
        pixels = np.frombuffer(b64decode(case["picture"]), np.uint8).reshape(48, 48)
        trace = model.run(pixels.astype(np.float32) / 255)
        np.testing.assert_allclose(trace.odds(), case["odds"], atol=1e-6)
        rows = [trace.weights(layer, rows=slice(0, 1))[:, 0] for layer in range(trace.layers)]
        np.testing.assert_allclose(rows, case["cls"], atol=1e-6)
