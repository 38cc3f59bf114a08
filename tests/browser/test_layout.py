"""Every width has its layout: maps are seen on all of them, and nothing lies on anything else."""

from typing import Any

from in_browser import READY, Tab

WIDTHS = (320, 480, 700, 900, 1099, 2560)

MAP = """() => {
    const stage = document.querySelector(".stage").getBoundingClientRect();
    return [Math.round(stage.width), Math.round(stage.height), document.documentElement.scrollWidth - innerWidth];
}"""

OVERLAPS = """() => {
    const boxes = [...document.querySelectorAll(".pane:not([hidden]) h2, .pane:not([hidden]) .deepmap")]
        .map(x => [x.className || x.textContent, x.getBoundingClientRect()]).filter(([, box]) => box.width);
    const lies = (a, b) => a.top < b.bottom - 1 && b.top < a.bottom - 1 && a.left < b.right - 1 && b.left < a.right - 1;
    return boxes.flatMap(([x, a], k) => boxes.slice(k + 1).filter(([, b]) => lies(a, b)).map(([y]) => `${x} on ${y}`));
}"""


def settled(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_the_overview_has_a_map_on_every_width(tab: Tab) -> None:
    page = tab.open("layer=2&head=2")
    page.wait_for_selector(READY["overview"])
    page.wait_for_selector(".overview .readout output")
    for width in WIDTHS:
        settled(page, width)
        wide, high, over = page.evaluate(MAP)
        assert min(wide, high) >= 230, (width, wide, high)
        assert abs(wide - high) <= 2, (width, wide, high)  # the stage has the shape of the matrix
        assert over <= 0, width


def test_no_title_lies_under_a_map(tab: Tab) -> None:
    page = tab.open("view=compare&layer=2&head=2")
    page.wait_for_selector(READY["compare"])
    for width in (700, 738, 1000, 1440):
        settled(page, width)
        assert page.evaluate(OVERLAPS) == [], width


def test_a_minimap_is_there_when_part_of_a_map_is_seen(tab: Tab) -> None:
    page = tab.open("view=map&layer=2&head=2&i=50&j=20")
    page.wait_for_selector(READY["map"])
    minimap = page.locator(".stage .navigator").first
    page.wait_for_function("() => getComputedStyle(document.querySelector('.navigator')).visibility === 'hidden'")
    page.locator(".stage").focus()
    page.keyboard.press("Enter")
    minimap.wait_for(state="visible")
    page.keyboard.press("0")
    minimap.wait_for(state="hidden")
