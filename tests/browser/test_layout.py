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


def test_nothing_moves_while_one_types(tab: Tab) -> None:
    page = tab.open("layer=2&head=2&type=true")
    page.wait_for_selector(READY["overview"])
    page.wait_for_load_state("networkidle")
    place = "() => JSON.stringify(document.querySelector('.overview.stale .stage').getBoundingClientRect())"
    before, bottom = page.evaluate(place.replace(".stale", "")), page.locator(".editor").bounding_box()
    release = tab.hold("**/norms/**")
    page.locator("textarea").fill("Nobody knew why")
    page.wait_for_selector(".overview.stale .stage")
    assert page.evaluate(place) == before
    assert page.locator(".overview.coming").is_hidden()
    release()
    page.wait_for_selector(".overview.stale", state="detached")
    page.wait_for_function("() => document.querySelector('.finding').innerText.includes('15 “y”')")
    assert page.locator(".editor").bounding_box() == bottom


def test_a_text_that_gives_way_while_it_is_mounted_is_not_missed(tab: Tab) -> None:
    page = tab.open("view=text&layer=2&head=2&type=true")
    page.wait_for_selector(READY["text"])
    page.wait_for_load_state("networkidle")
    kept: list[Any] = []

    def typed(text: str, asked: str) -> None:
        """Type, and keep the server's first answer to what is asked then from the page for now."""
        mine: list[Any] = []

        def late(route: Any) -> None:
            if mine:
                route.continue_()
            else:
                mine.append(route)
                kept.append((route, route.fetch()))

        page.route(asked, late)
        page.locator("textarea").fill(text)
        while not any(route in mine for route, _ in kept):
            page.wait_for_timeout(20)

    typed("Nobody knew", "**/row/**")  # which the page waits for, before it shows the text
    tab.expected = ("404",)
    typed("Nobody knew why", "**/run")  # whose text takes the place of the last one
    for route, answer in kept:
        route.fulfill(response=answer)
        page.wait_for_timeout(100)
        assert page.locator(".banner").is_hidden(), page.locator(".banner").inner_text()
    page.wait_for_function("() => document.querySelectorAll('.view.text .token').length === 16")


def test_help_opens_at_its_beginning(tab: Tab) -> None:
    page = tab.open("view=heads")
    page.wait_for_selector(READY["heads"])
    page.set_viewport_size({"width": 900, "height": 500})
    for _ in range(2):
        page.keyboard.press("?")
        help = page.locator("dialog[open]")
        assert help.evaluate("x => [x.scrollTop, x.scrollHeight > x.clientHeight]") == [0, True]
        help.evaluate("x => x.scrollTo(0, 300)")
        page.keyboard.press("Escape")


def test_a_list_keeps_the_focus_while_the_header_is_drawn_anew(tab: Tab) -> None:
    page = tab.open("view=heads")
    page.wait_for_selector(READY["heads"])
    for name, value in (("Layer", "1"), ("Head", "3"), ("Kind", "all")):
        choice = page.get_by_label(name, exact=True)
        choice.focus()
        choice.select_option(value)
        page.wait_for_timeout(50)
        assert page.evaluate("document.activeElement.dataset.focus") == name
