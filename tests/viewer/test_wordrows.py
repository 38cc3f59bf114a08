"""Saved pages of rows: weights of words over pictures that are too large, as 8-bit codes."""

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.interpret.capture.captured import Capture
from regard.interpret.capture.grids import PatchGrid
from regard.interpret.capture.layers import Layer
from regard.viewer.scene import scenes
from regard.viewer.scene.sources import captured
from regard.viewer.serve import wordrows
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.contents import Contents
from regard.viewer.serve.wordrows import Cells, WordRows

N, WORDS = 40, (0, 1, 38, 39)
GRID = PatchGrid(6, 6, np.array([-1, *range(3, 38)]), picture=np.zeros((12, 12, 3), np.uint8))


def scene_of(cross: bool = False, grid: PatchGrid | None = GRID) -> scenes.Scene:
    """Three layers of four heads over two, of 5 queries or all keys; token 2 is a patch of a second picture."""
    rng = np.random.default_rng(0)
    other = PatchGrid(1, 1, np.array([2]))
    rules = {} if cross else {"causal": True}
    layers = []
    for number in range(3):
        n_q = 5 if cross else N
        q, k = (3 * rng.standard_normal((1, *shape, 8), dtype=np.float32) for shape in ((4, n_q), (2, N)))
        grids = () if grid is None else (grid, other)
        layers.append(Layer.of(f"layers.{number}", q, k, cross=cross, grids=grids, **rules))
    return captured(Capture(layers))[0]


def decoded(stored: dict[str, Any], layer: int, which: str, words: int) -> np.ndarray:
    """Return the rows (heads, words, keys) as the page reads them."""
    of_key = np.frombuffer(zlib.decompress(base64.b64decode(stored["cells"][which]["of_key"])), np.int32)
    parts, count = stored["cells"][which]["parts"], of_key.max() + 1
    held = stored["layers"][layer][which]
    codes = np.frombuffer(zlib.decompress(base64.b64decode(held["codes"])), np.uint8).reshape(-1, words, count)
    scales = np.frombuffer(base64.b64decode(held["scales"]), np.float32).reshape(-1, words, len(parts))
    return (codes * np.repeat(scales, np.diff([*parts, count]), axis=-1))[..., of_key]


def saved(scene: scenes.Scene, limit: int = 2000) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of a saved page, and its answers."""
    answers = Answers([scene], patience=None)
    html = answers.page(next(iter(answers.scenes)), limit=limit)
    data = json.loads(html.partition('id="regard-data">')[2].partition("</script>")[0])
    return data["rows"], json.loads(zlib.decompress(base64.b64decode(data["answers"])))


def weights(scene: scenes.Scene) -> np.ndarray:
    """(layers, heads, n_q, N)."""
    n_q = scene.layers[0].problem.n_q
    return np.array([[layer.head(h).weights(range(n_q), range(N)) for h in range(4)] for layer in scene.layers])


def off(rows: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, in shares of the largest weight on the same picture or on words."""
    picture = GRID.tokens[1:]
    parts = (picture, np.array([2]), np.array(WORDS))
    errors = [np.abs(rows - expected)[..., at].max(-1) / expected[..., at].max(-1).clip(1e-30) for at in parts]
    return max(float(x.max()) for x in errors)


def test_rows_of_words_are_right_to_a_255th_of_the_largest() -> None:
    scene = scene_of()
    rows, answers = saved(scene)
    assert answers["api/scenes"]["scenes"][0]["held"] == {"tokens": list(WORDS), "pool": 1}
    expected = weights(scene)[:, :, WORDS]
    for layer in range(3):
        assert off(decoded(rows, layer, "heads", 4), expected[layer]) <= 1 / 255
        assert off(decoded(rows, layer, "mean", 4)[0], expected[layer].mean(axis=0)) <= 1 / 255
    found = answers["api/capture/finding"]
    on_picture = expected[:, :, -1, GRID.tokens[1:]].max(axis=-1)
    assert on_picture[found["layer"], found["head"]] == pytest.approx(on_picture.max(), rel=0.02)
    assert found["i"] == 39


def test_rows_are_of_every_query_where_these_are_no_keys() -> None:
    scene = scene_of(cross=True)
    rows, answers = saved(scene, limit=4000)
    assert answers["api/scenes"]["scenes"][0]["held"]["tokens"] == [0, 1, 2, 3, 4]
    expected = weights(scene)
    for layer in range(3):
        assert off(decoded(rows, layer, "heads", 5), expected[layer]) <= 1 / 255


@pytest.mark.parametrize("pool", [2, 4])
def test_cells_hold_means_of_patches_and_each_word(pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of()
    fitting = len(json.dumps(saved(scene)[0]["layers"]))
    monkeypatch.setattr(wordrows, "MOST_POOLED", pool)
    monkeypatch.setattr(wordrows, "TEXT", 0)
    rows, answers = saved(scene)
    assert answers["api/scenes"]["scenes"][0]["held"]["pool"] == pool
    assert len(json.dumps(rows["layers"])) < fitting
    expected = weights(scene)[:, :, WORDS]
    row, column = np.divmod(np.arange(1, 36), 6)
    cell = row // pool * 6 + column // pool
    for one in np.unique(cell):
        tokens = GRID.tokens[1:][cell == one]
        expected[..., tokens] = expected[..., tokens].mean(axis=-1, keepdims=True)
    for layer in range(3):
        assert off(decoded(rows, layer, "heads", 4), expected[layer]) <= 1 / 255
        assert off(decoded(rows, layer, "mean", 4)[0], weights(scene)[layer, :, WORDS].mean(axis=1)) <= 1 / 255


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(0, 2**31))
def test_codes_of_any_row(rows: int, columns: int, pool: int, words: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = rows * columns + words
    tokens = rng.permutation(n)[: rows * columns]
    tokens[rng.random(len(tokens)) < 0.2] = -1
    cells = Cells.of(n, [PatchGrid(rows, columns, tokens)], pool)
    x = rng.random((2, 3, n)) ** 8
    codes, scales = cells.encode(x)
    assert codes.max() <= wordrows.STEPS
    part = np.searchsorted(cells.parts, np.arange(cells.count), side="right") - 1
    values = (codes * scales[..., part])[..., cells.of_key]
    for cell in range(cells.count):
        keys = np.flatnonzero(cells.of_key == cell)
        assert len(keys) <= pool**2
        largest = scales[..., part[cell]] * wordrows.STEPS
        assert (np.abs(values[..., keys[0]] - x[..., keys].mean(-1)) <= largest / 255).all()


def test_weights_that_are_no_numbers_stay_none() -> None:
    cells = Cells.of(4, [PatchGrid.after(1, 2, prefix=1)], 1)
    codes, scales = cells.encode(np.array([[0.5, np.nan, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert np.isnan(scales[0, 0])
    assert scales[0, 1] > 0
    assert (scales[1] == 0).all()
    assert (codes[1] == 0).all()


def test_a_file_is_refused_where_rows_are_too_large_too() -> None:
    with pytest.raises(
        ValueError, match=r"12 heads over 40 queries .* Capture fewer words by queries=, or fewer heads"
    ):
        saved(scene_of(), limit=100)
    with pytest.raises(ValueError, match="Take a shorter text"):
        saved(scene_of(grid=None))
    only = PatchGrid.after(5, 8)  # no token is a word
    with pytest.raises(ValueError, match="Capture fewer words"):
        saved(scene_of(grid=only))


def test_a_large_capture_is_saved_by_its_rows() -> None:
    """28 layers of 28 heads over 16,384 patches and 30 words, without memory for them."""
    q = np.broadcast_to(np.float32(0), (1, 28, 30, 128))
    k = np.broadcast_to(np.float32(0), (1, 4, 16414, 128))
    heads = {"numbers": tuple(range(28)), "kv_numbers": tuple(range(4)), "group": 7}
    lse, grid = np.broadcast_to(np.float32(0), (1, 28, 30)), PatchGrid.after(128, 128)
    rows = tuple(range(16384, 16414))
    layer = Layer("x", q, k, lse, {"causal": True}, **heads, grids=(grid,), rows=rows)
    (scene,) = captured(Capture([replace(layer, name=f"layers.{n}") for n in range(28)]))
    contents = Contents.of("capture", scene)
    assert contents.rows is not None
    assert contents.rows.tokens == tuple(range(30))
    assert contents.computed == []
    assert WordRows.of(replace(scene, grids=())) is None
