"""What is taken away from the page: links, the page, pictures and numbers, as they are seen."""

import csv
import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from browser.test_page import DARK, PHONE, accessible, hash_of
from in_browser import READY, Tab, weights

NUMBER = re.compile(r"\d+(?:\.\d+)?")
SVG = "{http://www.w3.org/2000/svg}"


def saved(page: Any, key: str, folder: Path) -> Path:
    """Save by the letter of an entry."""
    page.keyboard.press("s")
    page.wait_for_selector("dialog.share[open]", timeout=20_000)
    with page.expect_download() as waited:
        page.keyboard.press(key)
    page.wait_for_function("() => /saved/.test(document.querySelector('dialog.share [role=status]').textContent)")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.share:not([open])", state="attached")  # until then keys are the dialog's
    path = folder / waited.value.suggested_filename
    waited.value.save_as(path)
    return path


@pytest.mark.parametrize("tab", [{}, DARK, PHONE], indirect=True)
def test_the_menu_is_accessible(tab: Tab) -> None:
    page = tab.open("view=map&layer=1&head=1")
    page.wait_for_selector(READY["map"])
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector("dialog.share[open]")
    accessible(page)
    page.keyboard.press("Escape")
    assert page.locator("dialog.share").is_hidden()


def test_keys_are_the_pages_once_the_menu_has_closed(tab: Tab) -> None:
    """Browsers give the focus back some time after a dialog closes; until then its entries hear the keys."""
    page = tab.open("view=map&layer=1&head=1")
    page.wait_for_selector(READY["map"])
    page.keyboard.press("s")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.share:not([open])", state="attached")
    late = "new KeyboardEvent('keydown', { key: 's', bubbles: true, cancelable: true })"
    page.evaluate(f"document.querySelector('dialog.share [data-item=s]').dispatchEvent({late})")
    assert page.locator("dialog.share[open] [role=status]").inner_text() == ""  # it opened, and saved nothing


@pytest.mark.parametrize("tab", [{"permissions": ["clipboard-read", "clipboard-write"]}], indirect=True)
def test_a_link_leads_back_to_the_same_view(tab: Tab) -> None:
    page = tab.open("view=map&layer=2&head=2&type=true")
    page.wait_for_selector(READY["map"])
    page.locator("textarea").fill("né & 'one' <two> #3 né & 'one'")
    page.wait_for_function("() => location.hash.includes('text=')")
    page.wait_for_function("() => document.querySelectorAll('.stage').length === 1")  # the view before gave way
    page.wait_for_timeout(300)
    page.locator(".stage").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash.includes('zoom=')")
    page.keyboard.press("s")
    page.keyboard.press("l")
    page.wait_for_function("() => /copied/.test(document.querySelector('dialog.share [role=status]').textContent)")
    link = page.evaluate("navigator.clipboard.readText()")
    before, readout = hash_of(page), page.locator(".readout").inner_text()
    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector(READY["map"])
    page.wait_for_timeout(900)
    after = hash_of(page)
    zooms = [[float(x) for x in state.pop("zoom").split(",")] for state in (before, after)]
    np.testing.assert_allclose(*zooms, atol=0.02)
    assert before == after
    assert page.locator(".readout").inner_text() == readout


def test_a_row_and_a_part_are_numbers(tab: Tab, arrays: dict[str, Any], tmp_path: Path) -> None:
    call = arrays["arrays"]
    page = tab.open("view=map&scene=arrays&head=1&i=500&j=480&zoom=100,140,90,130")
    page.wait_for_selector(READY["map"])
    page.wait_for_function("() => location.hash.includes('%2C')")  # the map is at rest
    with np.load(saved(page, "n", tmp_path)) as row:
        expected = weights(call, slice(500, 501))[1]
        np.testing.assert_array_equal(np.nan_to_num(row["weights"]), expected)
        assert np.isnan(row["weights"][0, 501:]).all()
        assert row["key_tokens"].tolist() == call["tokens"]
        assert (row["queries"].tolist(), row["keys"][[0, -1]].tolist()) == ([500], [0, 999])
    with np.load(saved(page, "z", tmp_path)) as part:
        rows, cols = part["queries"], part["keys"]
        assert rows[0] <= 100 < 139 <= rows[-1]
        expected = weights(call, slice(rows[0], rows[-1] + 1), slice(cols[0], cols[-1] + 1))[1]
        np.testing.assert_allclose(np.nan_to_num(part["weights"]), expected, rtol=4e-6)
    with saved(page, "c", tmp_path).open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 501
    np.testing.assert_array_equal([np.float32(x["weight"]) for x in lines], weights(call, slice(500, 501))[1, 0, :501])
    assert [x["key token"] for x in lines] == call["tokens"][:501]
    page = tab.open("view=map&scene=arrays-3")
    page.wait_for_selector(READY["map"])
    page.keyboard.press("s")
    page.keyboard.press("t")
    page.wait_for_function("() => /zoom in/.test(document.querySelector('dialog.share [role=status]').textContent)")


OWN = {
    "overview": "After the last token, the model expects",
    "token": "looks in every head",
    "profiles": "distance: query − key",
    "scale": "with 1/√d, d = 32",
    "ablation": "The loss without each head",
}
"""What stands in the figure of a view and in no other."""


@pytest.mark.parametrize("view", READY)
def test_a_view_is_a_figure(tab: Tab, view: str, tmp_path: Path) -> None:
    from PIL import Image

    page = tab.open(f"view={view}&layer=2&head=2&i=50&j=20")
    page.wait_for_selector(READY[view])
    page.wait_for_timeout(400)
    text = saved(page, "s", tmp_path).read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    said = " ".join("".join(x.itertext()) for x in root.iter(f"{SVG}text"))
    assert "Dr. Zavrel" in said
    assert view == "heads" or "ayer 2, head 2" in said
    assert [of for of, own in OWN.items() if own in said] == [view] * (view in OWN)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is loaded
    picture = Image.open(io.BytesIO(saved(page, "p", tmp_path).read_bytes())).convert("RGB")
    assert picture.width == 2100
    assert abs(picture.height - float(root.attrib["height"]) * 300 / 96) <= 1
    assert np.asarray(picture).std() > 5
    assert np.asarray(picture)[-4:].min() == 255  # the caption is not cut off


@pytest.mark.parametrize("tab", [DARK], indirect=True)
def test_a_figure_is_on_white_paper(tab: Tab, tmp_path: Path) -> None:
    page = tab.open("view=overview&layer=2&head=2")
    page.wait_for_selector(READY["overview"])
    dark = saved(page, "s", tmp_path).read_text("utf-8")
    page.keyboard.press("t")
    page.wait_for_selector(".regard[data-theme=light]")
    assert saved(page, "s", tmp_path).read_text("utf-8") == dark


def test_a_figure_has_the_colours_of_the_weights(tab: Tab, arrays: dict[str, Any], tmp_path: Path) -> None:
    from PIL import Image

    from regard.viewer.show.colour import INK, ramp

    page = tab.open("view=map&scene=arrays-2&head=1&tone=linear&zoom=100,140,90,140")
    page.wait_for_selector(READY["map"])
    page.wait_for_function("() => !location.hash.includes('100%2C140%2C90%2C140')")  # the map is at rest
    drawn = ElementTree.fromstring(saved(page, "s", tmp_path).read_text("utf-8"))
    place = {name: float(drawn.find(f"{SVG}image").attrib[name]) * 300 / 96 for name in ("x", "y", "width", "height")}  # type: ignore[union-attr]
    picture = np.asarray(Image.open(saved(page, "p", tmp_path)).convert("RGB")).astype(int)
    state = [float(x) for x in hash_of(page)["zoom"].split(",")]
    r0, r1, c0, c1 = (int(f(x)) for f, x in zip((np.floor, np.ceil) * 2, state, strict=True))
    call = weights(arrays["arrays-2"])[1]
    top, step = float(np.float16(call.max())), place["height"] / (r1 - r0)
    for i, j in ((120, 118), (125, 125), (130, 101), (110, 109)):
        at = int(place["y"] + (i - r0 + 0.5) * step), int(place["x"] + (j - c0 + 0.5) * step)
        expected = ramp(float(np.float16(call[i, j])) / top, INK).astype(int)
        assert np.abs(picture[at] - expected).max() <= 3, (i, j, picture[at], expected)
    assert c1 > 125


def assert_says(text: str, expected: str) -> None:
    """Compare two texts, where a file's portable kernels may differ from the server's in the last digit shown."""
    assert NUMBER.sub("#", text) == NUMBER.sub("#", expected)
    for one, other in zip(NUMBER.findall(text), NUMBER.findall(expected), strict=True):
        decimals = len(other.partition(".")[2])
        assert abs(float(one) - float(other)) < (1.5 * 10.0**-decimals if decimals else 0.5), (one, other)


def test_the_page_is_saved_as_it_is(tab: Tab, tmp_path: Path) -> None:
    page = tab.open("view=text&layer=2&head=2&i=40")
    page.wait_for_selector(READY["text"])
    page.wait_for_selector(".back .name")
    expected = page.locator(".text aside").inner_text()
    file = saved(page, "w", tmp_path)
    page.goto("about:blank")
    page.goto(file.as_uri())
    page.wait_for_selector(READY["text"])
    page.wait_for_selector(".back .name")
    assert_says(page.locator(".text aside").inner_text(), expected)
    assert hash_of(page)["i"] == "40"
    page.keyboard.press("s")
    assert page.locator("dialog.share [data-item=w]").count() == 0  # it is the file already
    accessible(page)
