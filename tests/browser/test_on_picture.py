"""Weights on a picture: what is clicked, what is told, what is saved, and what is drawn."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from in_browser import AXE, Tab
from regard.interpret.capture.captured import Capture
from regard.interpret.capture.grids import PatchGrid
from regard.interpret.capture.layers import Layer
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.sources import captured
from regard.viewer.serve.answers import Answers

STAGE = ".heat-stage canvas"
SAID = re.compile(r"Most on row (\d+), column (\d+) \(([\d.]+)\)")


def heaviest(tab: Tab) -> tuple[int, float]:
    """The token that most weight is told to be on, and how much."""
    row, column, weight = SAID.search(tab.page.locator(".heat-readout output").inner_text()).groups()
    return 1 + 6 * (int(row) - 1) + int(column) - 1, float(weight)


def test_a_click_on_a_patch_shows_where_it_looks(tab: Tab) -> None:
    page = tab.open("view=picture&scene=capture&layer=1&head=0&i=0&type=false")
    answers = tab.viewer.answers
    page.wait_for_selector(".heats .thumb canvas")
    row = answers.get("capture/row/1/0/0").content[1:]
    token, weight = heaviest(tab)
    assert token == 1 + row.argmax()
    np.testing.assert_allclose(weight, row.max(), rtol=0.1)
    side = page.locator(STAGE).bounding_box()["width"]
    page.locator(STAGE).click(position={"x": side * 3.5 / 6, "y": side * 2.5 / 6})  # row 3, column 4
    page.get_by_role("heading", name="Where row 3, column 4 looks: L1 H0").wait_for()
    assert "i=16" in page.evaluate("location.hash")
    page.keyboard.press("Tab")
    page.locator(".heat-stage").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.get_by_role("heading", name="Where row 4, column 5 looks: L1 H0").wait_for()
    page.mouse.move(*centre(page, 0))
    page.mouse.down()
    page.mouse.move(*centre(page, 7))
    page.mouse.up()
    page.get_by_role("heading", name="What looks at 4 patches: L1 H0").wait_for()
    columns = sum(answers.get(f"capture/column/1/0/{token}").content for token in (1, 2, 7, 8))
    assert heaviest(tab)[0] == 1 + columns[1:].argmax()
    page.get_by_label("Show").select_option("row")
    page.get_by_label("Heat of").select_option("rollout")
    page.locator(".on-picture .note", has_text="no proof").wait_for()
    page.evaluate(AXE.read_text("utf-8"))
    assert page.evaluate("axe.run().then(({ violations }) => violations.map(({ id }) => id))") == []


def centre(page: object, patch: int) -> tuple[float, float]:
    """The middle of a patch on the screen."""
    box = page.locator(STAGE).bounding_box()
    row, column = divmod(patch, 6)
    return box["x"] + box["width"] * (column + 0.5) / 6, box["y"] + box["height"] * (row + 0.5) / 6


def test_a_saved_page_shows_where_a_patch_looks(tab: Tab, tmp_path: Path) -> None:
    """Heat and rollout follow from queries and keys in the file, as the server computes them."""
    file = tmp_path / "digit.html"
    alone = Answers([tab.viewer.answers.scenes["capture"]], patience=None)
    file.write_text(alone.page("capture"), "utf-8")
    page = tab.open("view=picture&layer=1&head=3&i=0", file.as_uri())
    page.wait_for_selector(".heats .thumb canvas")
    for heat, (row,) in (
        ("head", alone.get("capture/heat", {"token": "0", "side": "row"}).content["layers"][1][3:]),
        ("rollout", [alone.get("capture/rollout", {"token": "0"}).content["weights"]]),
    ):
        page.get_by_label("Heat of").select_option(heat)
        page.get_by_role("heading", name="L1 H3" if heat == "head" else "rollout").wait_for()
        token, weight = heaviest(tab)
        assert token == 1 + int(np.argmax(row))
        np.testing.assert_allclose(weight, max(row), rtol=0.01)
    for view in ("overview", "heads", "map", "profiles", "steps"):
        page.locator(f"nav [data-view={view}]").click()
        page.wait_for_selector(f".{view}")
        assert page.locator(".banner").is_hidden(), page.locator(".banner").inner_text()
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in tab.asked)
    alone.close()


SIDE, WORDS = 24, 30


def words_over_a_picture() -> Scene:
    """Three layers of four heads over two: 576 patches after two words, and 28 words behind them."""
    rng = np.random.default_rng(0)
    n = SIDE * SIDE + WORDS
    tokens = ["<s>", "A "] + ["▪"] * SIDE**2 + [f"word{i} " for i in range(WORDS - 2)]
    grid = PatchGrid.after(SIDE, SIDE, prefix=2, picture=rng.integers(0, 256, (96, 96, 3), np.uint8))
    layers = []
    for number in range(3):
        q, k = (2 * rng.standard_normal((1, heads, n, 8), dtype=np.float32) for heads in (4, 2))
        layers.append(Layer.of(f"layers.{number}", q, k, causal=True, grids=(grid,), key_tokens=(tuple(tokens),)))
    return replace(captured(Capture(layers))[0], query_tokens=tuple(tokens), key_tokens=tuple(tokens))


@pytest.mark.parametrize("tab", [{"color_scheme": "dark"}], indirect=True)
def test_a_saved_page_of_rows_shows_words_on_the_picture(tab: Tab, tmp_path: Path) -> None:
    scene = words_over_a_picture()
    file = tmp_path / "words.html"
    alone = Answers([scene], patience=None)
    file.write_text(alone.page("capture", limit=2**17), "utf-8")
    page = tab.open("", file.as_uri())
    page.wait_for_selector(".heats .thumb canvas")
    page.locator(".overlay-text .token", has_text="word5").click()
    page.get_by_role("heading", name="Where 583 “word5").wait_for()
    state = dict(part.split("=") for part in page.evaluate("location.hash").lstrip("#").split("&"))
    head = scene.layers[int(state["layer"])].head(int(state["head"]))
    row = head.weights(range(583, 584), range(head.n_k))[0][2 : 2 + SIDE**2]
    box = page.locator(STAGE).bounding_box()
    for patch in (0, int(row.argmax()), 300, 575):
        at = {"x": box["width"] * (patch % SIDE + 0.5) / SIDE, "y": box["height"] * (patch // SIDE + 0.5) / SIDE}
        page.locator(STAGE).hover(position=at)
        place = f"row {patch // SIDE + 1}, column {patch % SIDE + 1}: about "
        page.locator(".heat-readout", has_text=place).wait_for()
        told = page.locator(".heat-readout output").inner_text().removeprefix(place)
        number = float(told.replace(" × 10", "e").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
        assert abs(number - row[patch]) <= row.max() / 255 + 0.05 * row[patch], told  # two digits are told
    page.get_by_text("rounded to 1/255 of the largest").wait_for()
    page.get_by_label("Heat of").select_option("layer")
    page.get_by_role("heading", name=f"the mean of layer {state['layer']}").wait_for()
    page.get_by_label("Heat of").select_option("head")
    page.locator(STAGE).click(position={"x": box["width"] * 12.5 / SIDE, "y": box["height"] * 12.5 / SIDE})
    page.get_by_role("heading", name="What looks at row 13, column 13").wait_for()
    page.locator(".overlay-text .scale-bar").wait_for()
    for view in ("overview", "map", "steps"):
        page.locator(f"nav [data-view={view}]").click()
        page.get_by_text("This file holds the rows of words over the picture").wait_for()
    assert page.locator(".banner").is_hidden()
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in tab.asked)
    alone.close()
