"""Heat on pictures: weights of a token on patches, in every head and through all layers; pictures as files."""

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest

from in_browser import DIGIT
from regard.interpret.capture.captured import Capture
from regard.interpret.capture.grids import PatchGrid
from regard.interpret.capture.layers import Layer, Tokens
from regard.viewer.scene import scenes
from regard.viewer.scene.sources import captured
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.saving import Still, single

PICTURE = np.random.default_rng(1).integers(0, 256, (12, 20, 3), np.uint8)
GRID = PatchGrid(2, 3, np.array([1, 2, 3, 4, -1, 6]), picture=PICTURE)


def scene_of(cross: bool = False, lse: bool = True, **fields: Any) -> scenes.Scene:
    rng = np.random.default_rng(0)
    layers = []
    for number in range(3):
        q, k = rng.standard_normal((2, 2, 4, 7, 8)).astype(np.float32)
        more = {"causal": True} if not cross else {}
        layers.append(Layer.of(f"layers.{number}", q, k[:, :2], cross=cross, grids=(GRID,), **more, **fields))
    return captured(Capture(layers))[0]


@pytest.fixture
def answers() -> Answers:
    return Answers([scene_of()])


def ask(answers: Answers, path: str) -> Any:
    (name,) = answers.scenes
    return answers.get(
        f"{name}/{path.partition('?')[0]}", dict(x.split("=") for x in path.partition("?")[2].split("&") if x)
    )


def weights(scene: scenes.Scene) -> np.ndarray:
    """(layers, heads, n_q, n_k) of the first batch element."""
    rows, cols = range(7), range(7)
    return np.array([[layer.head(h).weights(rows, cols) for h in range(4)] for layer in scene.layers])


def test_a_scene_lists_its_grids(answers: Answers) -> None:
    (listed,) = answers.get("scenes").content["scenes"]
    assert listed["grids"] == [{
        "kind": "picture", "side": "both", "rows": 2, "columns": 3, "tokens": [1, 2, 3, 4, -1, 6],
        "picture": "picture/0", "width": 20, "height": 12, "seconds": None, "name": "",
    }]  # fmt: skip
    assert "grids" not in Answers([scenes_without()]).get("scenes").content["scenes"][0]
    assert scene_of(cross=True).described("x")["grids"][0]["side"] == "keys"


def test_a_page_of_a_picture_opens_on_what_is_no_patch() -> None:
    scene = scene_of()  # tokens 0 and 5 are no patches
    assert ask(Answers([scene]), "finding").content["i"] == 0
    labels = tuple(f"word{i} " for i in range(7))
    texts = scenes.replace(scene, query_tokens=labels, key_tokens=labels)
    assert ask(Answers([texts]), "finding").content["i"] == 5
    patches = scenes.replace(scene, grids=(PatchGrid.after(1, 7),))
    assert ask(Answers([patches]), "finding").content["i"] == -1


def test_words_over_a_sound_are_told_where_its_frames_have_none() -> None:
    x = np.zeros((1, 2, 7, 4), np.float32)
    sound = Layer.of(
        "cross", x[:, :, :2], x, cross=True, query_tokens="ids", grids=(PatchGrid.after(1, 7, kind="sound"),)
    )
    answers = Answers(captured(Capture([sound], {"ids": Tokens(None, (("to ", "be"),))})))
    (listed,) = answers.get("scenes").content["scenes"]
    assert (listed["has_tokens"], listed["has_query_tokens"]) == (False, True)
    assert ask(answers, "tokens?axis=query").content["tokens"] == ["to ", "be"]


def test_a_text_over_a_picture_comes_first_and_is_named_by_its_words() -> None:
    x = np.zeros((1, 2, 7, 4), np.float32)
    grid = PatchGrid.after(2, 2, prefix=1)
    tower = [Layer.of(f"tower.{n}", x, x, grids=(PatchGrid.after(1, 7),)) for n in range(2)]
    labels = ("A ", *["<image>"] * 4, "cat", ".")
    read = {"grids": (grid,), "query_tokens": "ids", "key_tokens": "ids"}
    text = [Layer.of(f"text.{n}", x, x, **read) for n in range(2)]
    made = captured(Capture([*tower, *text], {"ids": Tokens(None, (labels,))}, model="tiny"))
    assert [scene.name for scene in made] == ["A cat., text", "tiny, tower"]
    assert single(made) is made[0]
    with pytest.raises(ValueError, match="only the page shows several sequences"):
        single(tuple(scenes.replace(scene, grids=()) for scene in made))


def scenes_without() -> scenes.Scene:
    x = np.zeros((2, 5, 4), np.float32)
    return captured(Capture.of_arrays(x, x))[0]


@pytest.mark.parametrize("side", ["row", "column"])
@pytest.mark.parametrize("numbers", ["json", "f32"])
def test_heat_of_a_token_in_every_head(answers: Answers, side: str, numbers: str) -> None:
    scene = next(iter(answers.scenes.values()))
    answer = ask(answers, f"heat?token=3&side={side}&grid=0&numbers={numbers}")
    assert answer.status == 200
    w = weights(scene)
    expected = (w[:, :, 3] if side == "row" else w[..., 3])[..., GRID.tokens]
    expected[..., 4] = np.nan
    if numbers == "json":
        heat = np.array(answer.content["layers"], float)
        np.testing.assert_allclose(heat, expected, rtol=1e-5, atol=1e-7)
    else:
        assert answer.content.dtype == np.float32
        np.testing.assert_allclose(answer.content.reshape(3, 4, 6), expected, rtol=1e-5, atol=1e-7)


def test_heat_without_a_known_lse(answers: Answers) -> None:
    """Scenes of arrays compute it when it is needed."""
    scene = next(iter(answers.scenes.values()))
    expected = ask(answers, "heat?token=5").content
    bare = scenes.replace(scene, layers=tuple(scenes.replace(layer, lse=None) for layer in scene.layers))
    heat = ask(Answers([bare]), "heat?token=5").content
    np.testing.assert_allclose(np.array(heat["layers"], float), np.array(expected["layers"], float), rtol=1e-5)


def test_rollout_is_the_product_of_all_layers(answers: Answers) -> None:
    scene = next(iter(answers.scenes.values()))
    product = np.eye(7)
    for layer in weights(scene):
        product = (layer.mean(0) + np.eye(7)) / 2 @ product
    for token in (0, 5, 6):
        shares = ask(answers, f"rollout?token={token}&grid=0").content["weights"]
        assert shares[4] is None
        np.testing.assert_allclose([x for x in shares if x is not None], product[token][[1, 2, 3, 4, 6]], atol=1e-6)


def test_the_picture_is_a_file(answers: Answers) -> None:
    file = ask(answers, "picture/0").content
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    lines = zlib.decompress(file[file.index(b"IDAT") + 4 : file.index(b"IEND") - 8])
    pixels = np.frombuffer(lines, np.uint8).reshape(12, 1 + 4 * 20)[:, 1:].reshape(12, 20, 4)
    np.testing.assert_array_equal(pixels[..., :3], PICTURE)
    assert (pixels[..., 3] == 255).all()


def test_batch_elements_have_pictures_of_their_own() -> None:
    own = [scenes.replace(GRID, batch=b, picture=np.full((2, 2, 3), b, np.uint8)) for b in (0, 1)]
    scene = scenes.replace(scene_of(), grids=tuple(own))
    assert len(scene.described("x")["grids"]) == 1
    assert [scene.grids_of(b)[0].picture[0, 0, 0] for b in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("picture/1", 404, "picture 1 does not exist: there are 1"),
        ("heat?token=7", 422, "token must be a number from 0 to 6, got 7"),
        ("heat?token=0&grid=1", 422, "grid must be a number from 0 to 0, got 1"),
        ("heat?side=rows", 422, "side must be row or column, got rows"),
        ("heat?numbers=f8", 422, "numbers must be json or f32, got f8"),
        ("rollout?token=-1", 422, "token must be a number from 0 to 6, got -1"),
    ],
)
def test_what_is_refused(answers: Answers, path: str, status: int, sentence: str) -> None:
    answer = ask(answers, path)
    assert (answer.status, answer.content["error"]) == (status, sentence)


def test_what_other_scenes_refuse() -> None:
    cross = Answers([scene_of(cross=True)])
    assert ask(cross, "heat?token=3").status == 200
    for path, why in (("heat?side=column", "the patches are keys alone"), ("rollout", "rollout needs layers whose")):
        answer = ask(cross, path)
        assert answer.status == 422
        assert answer.content["error"].startswith(why)
    bare = Answers([scenes_without()])
    assert ask(bare, "heat").content["error"] == "no token of this scene is known as a patch of a picture"
    some = scene_of()
    gap = Answers([scenes.replace(some, layers=some.layers[::2])])
    assert ask(gap, "rollout").content["error"] == "rollout goes through every layer, and some were not kept"


def test_a_saved_page_holds_the_picture(answers: Answers, tmp_path: Any) -> None:
    scene = next(iter(answers.scenes.values()))
    Still(scene).save(tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text("utf-8")
    data = json.loads(text.partition('id="regard-data">')[2].partition("</script>")[0])
    stored = json.loads(zlib.decompress(base64.b64decode(data["answers"])))
    (name,) = Answers([scene]).scenes
    assert base64.b64decode(stored[f"api/{name}/picture/0"]["bytes"]) == ask(answers, "picture/0").content


def test_the_stored_capture_of_a_digit() -> None:
    """The class token looks at the digit, and the viewer has all that it shows of a picture."""
    assert DIGIT.stat().st_size <= 100_000
    seen = Capture.load(DIGIT)
    assert {x.dtype for layer in seen for x in (layer.query, layer.key)} == {np.dtype(np.float16)}
    (grid,) = seen[1].grids
    heat = grid.laid(seen[1].weights(3, rows=slice(0, 1)))[0]
    assert np.unravel_index(heat.argmax(), heat.shape) == (1, 2)
    assert heat.max() > 0.8
    lightest = grid.picture.reshape(6, 8, 6, 8, 3).max((1, 3, 4)).ravel().argsort()[-3:]
    assert 6 + 2 in lightest  # a part of the digit
    answers = Answers(captured(seen), patience=None)
    assert ask(answers, "tokens?axis=key").content["tokens"][:2] == ["[CLS] ", "r1c1 "]
    assert ask(answers, "finding").content["i"] == 0
    np.testing.assert_allclose(ask(answers, "heat?token=0").content["layers"][1][3], heat.ravel(), rtol=1e-4, atol=1e-6)
    assert ask(answers, "picture/0").content.startswith(b"\x89PNG")
