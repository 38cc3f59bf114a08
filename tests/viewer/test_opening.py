"""The page without a text opens on sentences that larger models have read."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from regard.interpret.formats import weight_text
from regard.viewer.looking import scenes_of, scenes_of_page
from regard.viewer.scene import words
from regard.viewer.serve.answers import Answers

SCENES = words.opening()
BY_NAME = dict(zip(words.TEXTS, SCENES, strict=True))
LARGEST = 2**20
"""Bytes that the wheel spends on sentences, at most."""


@pytest.fixture(scope="module")
def answers() -> Any:
    return Answers(SCENES, patience=None)


def weight(look: words.Look) -> float:
    """A weight, from the scene."""
    scene = BY_NAME[look.text]
    i, j = (max(k for k, x in enumerate(scene.key_tokens) if x.strip() == token) for token in (look.query, look.key))
    return float(scene.layers[look.layer].head(look.head).weights(range(i, i + 1), range(j, j + 1))[0, 0])


@pytest.mark.parametrize("name", words.TEXTS)
def test_what_is_said_of_a_sentence(name: str, answers: Any) -> None:
    text, scene = words.TEXTS[name], BY_NAME[name]
    opening = scene.opening
    assert opening is not None
    pieces = [token for token in scene.key_tokens if not token.startswith("[")]
    assert "".join(pieces) == text.text
    for look in text.looks:
        assert weight_text(weight(look)) in opening.text
    said = set(re.findall(r"\d\.\d+", opening.text))
    assert said == {weight_text(weight(look)) for look in text.looks}
    id = next(id for id, x in answers.scenes.items() if x is scene)
    finding = answers.get(f"{id}/finding").content
    assert (finding["layer"], finding["head"]) == text.looks[0][1:3]
    assert [scene.key_tokens[finding[at]].strip() for at in "ij"] == [text.looks[0].query, text.looks[0].key]


def test_expected_next() -> None:
    expected = {name: BY_NAME[name].following[0] for name in ("gift", "copy", "code")}
    assert {name: token for name, (token, _) in expected.items()} == {"gift": " Mary", "copy": " B", "code": " height"}
    assert all(share > 0.5 for _, share in expected.values())
    assert BY_NAME["tired"].following == ()


def test_the_pair_differs_at_it_in_an_encoder_alone() -> None:
    """In a decoder what comes after a token changes nothing before it."""
    tired, wide = (BY_NAME[name].layers[3].head(1) for name in ("tired", "wide"))
    assert BY_NAME["tired"].key_tokens[:13] == BY_NAME["wide"].key_tokens[:13]
    assert weight(words.TEXTS["tired"].looks[0]) - weight(words.TEXTS["wide"].looks[0]) > 0.3
    assert not BY_NAME["tired"].layers[0].causal
    assert BY_NAME["cat"].layers[0].causal
    assert np.abs(tired.weights(range(16), range(16)) - wide.weights(range(16), range(16))).max() > 0.3


@pytest.mark.parametrize(("name", "layer", "head"), [("cat", 13, 8), ("code", 23, 7), ("tired", 3, 1)])
def test_stored_queries_and_keys_make_the_weights(name: str, layer: int, head: int, answers: Any) -> None:
    id = next(id for id, x in answers.scenes.items() if x is BY_NAME[name])
    stored = answers.get(f"{id}/values/{layer}/{head}").content
    made = answers.get(f"{id}/matrices/{layer}/{head}").content["matrices"]
    softmax = next(x["values"] for x in made if x["name"] == "softmax")
    np.testing.assert_allclose(np.nan_to_num(stored), softmax, atol=2e-3)
    assert answers.get(f"{id}/matrices/{layer}/{(head + 1) % 9}").status == 422


def test_the_card_and_its_size() -> None:
    card = (words.FOLDER / "CARD.md").read_text("utf-8")
    assert f"{words.STORED.stat().st_size:,} bytes" in card
    assert all(scene.opening is not None and scene.opening.text in card for scene in SCENES)
    assert words.STORED.stat().st_size + (words.FOLDER / "CARD.md").stat().st_size < LARGEST


def test_the_page_without_a_text() -> None:
    kinds = [scene.kind for scene in scenes_of_page()]
    assert kinds == ["words"] * len(SCENES) + ["example", "hand", "cross"]
    assert [scene.kind for scene in scenes_of_page(text="to be")] == ["example"]
    assert [scene.kind for scene in scenes_of()] == ["example"]  # files show one scene


def test_sentences_need_no_framework() -> None:
    code = (
        "import sys; from regard.viewer.scene.words import page; from regard.viewer.serve.answers import Answers;"
        "assert Answers(page(), patience=None).get('words/row/13/8/7').status == 200;"
        "print(sorted({'torch', 'jax', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
