"""A picture as a scene: the digit that the example vision transformer tells, in a server and in a saved page."""

import json
import zlib
from base64 import b64decode

import numpy as np
import pytest

from regard.interpret.examplemodel.vit import held_out
from regard.viewer.scene.digits import DigitRunner, digit, encoded
from regard.viewer.serve.answers import Answers


@pytest.fixture(scope="module")
def answers():
    made = Answers([digit()], patience=None)
    yield made
    made.close()


def test_a_picture_is_listed_with_its_patches_and_odds(answers):
    (listed,) = answers.get("scenes").content["scenes"]
    assert (listed["id"], listed["kind"], listed["n_tokens"], listed["editable"]) == ("picture", "picture", 37, True)
    (grid,) = listed["grids"]
    assert (grid["side"], grid["rows"], grid["columns"], grid["picture"]) == ("both", 6, 6, "picture/0")
    assert grid["tokens"] == list(range(1, 37))
    assert sum(one["probability"] for one in listed["odds"]) == pytest.approx(1)
    assert int(listed["odds"][0]["token"]) == held_out()[1][int(listed["settings"]["picture"])]


def test_it_opens_on_the_class_token(answers):
    found = answers.get("picture/finding").content
    assert found["i"] == 0
    row = answers.get(f"picture/row/{found['layer']}/{found['head']}/0").content
    assert row[1:].argmax() + 1 == found["j"]
    assert f"{row[found['j']]:.2f} of its weight" in found["why"]


def test_a_drawn_picture_is_run(answers):
    pixels = np.rint(255 * held_out()[0][8]).astype(np.uint8)
    drawn = answers.post("picture/run", {"picture": encoded(pixels)}).content["scene"]
    stored = answers.post("picture/run", {"picture": "8"}).content["scene"]
    assert drawn["odds"] == stored["odds"]
    assert "drawn" in drawn["name"]
    heat = answers.get(f"{drawn['id']}/heat", {"token": "0", "side": "row"}).content["layers"]
    row = answers.get(f"{drawn['id']}/row/2/3/0").content
    np.testing.assert_allclose(heat[2][3], row[1:], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"picture": "20"}, "picture 20 does not exist: 20 are stored"),
        ({"picture": "AAAA"}, "picture must be 2304 bytes in base64, or the number of a stored picture"),
        ({"picture": "§"}, "picture must be 2304 bytes in base64, or the number of a stored picture"),
        ({"picture": 3}, "picture must be a str, got int"),
        ({"text": "to be"}, "text is not a setting; there is picture alone"),
        ({"continue": "drawn"}, "this model predicts no tokens: it tells the digit of a picture"),
    ],
)
def test_what_is_no_picture_is_refused(answers, body, error):
    answer = answers.post("picture/run", body)
    assert (answer.status, answer.content) == (422, {"error": error})


def test_no_head_is_switched_off(answers):
    with pytest.raises(ValueError, match="predicts no tokens"):
        DigitRunner().expected(answers.scenes["picture"])


def test_a_saved_page_holds_the_model_and_the_picture(answers):
    html = answers.page("picture")
    (_, data) = html.split('id="regard-data">', 1)
    held = json.loads(data[: data.index("</script>")])
    assert set(held["model"]) >= {"vit", "pictures"}
    assert len(b64decode(held["model"]["pictures"])) == 20 * 48 * 48
    saved = json.loads(zlib.decompress(b64decode(held["answers"])))
    assert b64decode(saved["api/picture/picture/0"]["bytes"]).startswith(b"\x89PNG")
    assert saved["api/scenes"]["scenes"][0]["editable"]
    assert len(html) < 2_000_000
