"""Wide screens are used: no view leaves a third of one empty."""

import io
from typing import Any

import numpy as np
import pytest

from browser.test_page import DARK_WIDE
from in_browser import READY, READY_PICTURE, Tab
from regard.interpret.formats import weight_text

CELL = 16
"""Pixels of a square that is empty or is not."""

WIDE = [{"viewport": {"width": 1280, "height": 720}}, DARK_WIDE]


def largest_empty(page: Any) -> float:
    """The largest rectangle of the page that is paper alone, as a share of the screen."""
    from PIL import Image

    picture = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).astype(int)
    paper = page.evaluate(
        """() => [...document.querySelectorAll(".regard, .stage, .sheet, figure")].map(
            x => getComputedStyle(x).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number))"""
    )
    rows, cols = picture.shape[0] // CELL, picture.shape[1] // CELL
    cells = picture[: rows * CELL, : cols * CELL].reshape(rows, CELL, cols, CELL, 3).swapaxes(1, 2)
    empty = np.zeros((rows, cols), bool)
    for colour in {tuple(one) for one in [*paper, (255, 255, 255)]}:
        empty |= (cells == colour).all(axis=(2, 3, 4))
    best, above = 0, np.zeros(cols, int)
    for line in empty:
        above = np.where(line, above + 1, 0)
        for start in range(cols):
            heights = np.minimum.accumulate(above[start:])
            best = max(best, int((heights * np.arange(1, len(heights) + 1)).max()))
    return best / (rows * cols)


@pytest.mark.parametrize("tab", WIDE, ids=["1280", "1600-dark"], indirect=True)
def test_no_third_of_a_wide_screen_is_empty(tab: Tab) -> None:
    shares = {}
    for view, sign in (READY | READY_PICTURE).items():
        page = tab.open(f"view={view}&layer=2&head=2")
        page.wait_for_selector(sign)
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(300)
        shares[view] = round(largest_empty(page), 3)
    assert max(shares.values()) < 1 / 3, shares


def test_beside_a_map_stand_its_row_and_its_column(tab: Tab) -> None:
    page = tab.open("view=map&layer=2&head=2&i=53&j=25")
    page.wait_for_selector(".map .token-row [data-taken]")
    answers = tab.viewer.answers
    titles = page.locator(".map .token-row h2").all_inner_texts()
    assert titles == ["Where 53 “r” looks", "What looks at 25 “i”"]
    column = answers.get("example/column/2/2/25").content
    listed = page.locator(".map .token-row ol").nth(1).locator("button")
    assert listed.first.locator("b").inner_text() == weight_text(np.nanmax(column))
    listed.nth(1).click()
    page.wait_for_function("i => location.hash.includes(`i=${i}`)", arg=int(np.argsort(-np.nan_to_num(column))[1]))
    page.set_viewport_size({"width": 800, "height": 700})
    page.wait_for_selector(".map .token-row", state="hidden")


def test_a_short_text_has_its_lists_below(tab: Tab) -> None:
    page = tab.open("view=text&layer=2&head=2&i=30&near=true")
    page.wait_for_selector(".back .name")
    text, list_ = page.locator(".text-scroll").bounding_box(), page.locator(".strongest").first.bounding_box()
    assert list_["y"] > text["y"] + text["height"]
    found = tab.viewer.answers.get("example/token/30").content["rows"]
    best = max(found, key=lambda row: row["weights"][0])
    head = page.locator(".back button:has(.name)").first
    assert head.inner_text().startswith(f"L{best['layer']} H{best['head']}")
    head.click()
    page.wait_for_function(f"() => location.hash.includes('head={best['head']}')")
    column = np.nan_to_num(tab.viewer.answers.get(f"example/column/{best['layer']}/{best['head']}/30").content)
    page.wait_for_function(
        "w => Number(document.querySelector('.back .strongest button')?.dataset.weight) === w",
        arg=float(column.max()),
    )
    page = tab.turn("view=text&scene=arrays&i=30", ".text .strongest li")
    page.wait_for_selector(".back", state="hidden")
