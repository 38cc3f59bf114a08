"""The page under what people do to it: links, typing, wheels, long tokens, small screens, both themes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from browser.test_page import DARK, PHONE, accessible, hash_of, picture_of
from in_browser import READY, Tab, serving, structured

LONG = "a" * 3000
LAYER = "decoder.transformer_layers.11.self_attention.inner_attention"
LANDSCAPE = {"viewport": {"width": 844, "height": 390}, "has_touch": True}
ENLARGED = {"viewport": {"width": 640, "height": 360}}
"""A window of 1,280 × 720 pixels at 200 %."""


@pytest.fixture(scope="module")
def viewer(needed: None) -> Iterator[Any]:
    from regard.viewer.scene import sources

    q, k, _, words = structured(200, 2)
    tokens = [LONG if at % 40 == 7 else word for at, word in enumerate(words)]
    long = sources.arrays(q, k, tokens=tokens, causal=True)
    long = dataclasses.replace(long, layers=tuple(dataclasses.replace(x, name=LAYER) for x in long.layers))
    scenes = [sources.example(sources.Settings()), long, sources.arrays(*structured(1200, 1)[:2], causal=True)]
    with serving(scenes) as viewer:
        yield viewer


def test_the_readout_follows_the_wheel(tab: Tab) -> None:
    page = tab.open("view=map&layer=1&head=1")
    page.wait_for_selector(".readout output")
    box = page.locator(".stage").bounding_box()
    x, y = box["x"] + box["width"] * 0.46, box["y"] + box["height"] * 0.7
    page.mouse.move(x, y)
    page.wait_for_timeout(200)
    start = page.locator(".readout").inner_text()
    for _ in range(6):
        page.mouse.wheel(0, 240)  # away from where the pointer is, so that the map slides below it
        page.mouse.wheel(0, -480)
    page.wait_for_timeout(900)
    zoomed = page.locator(".readout").inner_text()
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    page.wait_for_timeout(100)
    page.mouse.move(x, y)
    page.wait_for_timeout(300)
    assert page.locator(".readout").inner_text() == zoomed
    page.keyboard.press("0")
    page.locator(".stage").focus()
    page.mouse.move(x, y)
    page.wait_for_timeout(200)
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.wait_for_timeout(500)
    zoomed = page.locator(".readout").inner_text()
    page.mouse.move(x + 200, y)
    page.mouse.move(x, y)
    page.wait_for_timeout(300)
    assert page.locator(".readout").inner_text() == zoomed != start


def test_a_link_to_a_text_that_is_gone(tab: Tab) -> None:
    page = tab.open("view=text&scene=example-77")
    page.wait_for_selector(READY["text"])
    assert "This link is to a text that is not here, example-77." in page.locator(".notice").inner_text()
    accessible(page)
    page.get_by_role("button", name="Close", exact=True).click()
    assert page.locator(".notice").is_hidden()
    page = tab.open("view=text&scene=example-78&text=one+two+one&temperature=2&causal=false&i=3")
    page.wait_for_selector(READY["text"])
    assert page.locator(".notice").is_hidden()
    shown = tab.viewer.answers.scenes[hash_of(page)["scene"]].settings
    assert shown == {"text": "one two one", "temperature": 2.0, "scaled": True, "causal": False}
    assert page.locator(".token").all_inner_texts()[:4] == ["⊢", "o", "n", "e"]
    # The same id, another text: a link says which.
    name = hash_of(page)["scene"]
    page = tab.open(f"view=text&scene={name}&text=three")
    page.wait_for_selector(READY["text"])
    assert tab.viewer.answers.scenes[hash_of(page)["scene"]].settings["text"] == "three"


def test_typing_makes_one_scene_and_one_step(tab: Tab) -> None:
    page = tab.open("view=text&type=true")
    page.wait_for_selector(READY["text"])
    texts, steps = len(tab.viewer.answers.scenes), page.evaluate("history.length")
    for text in ("a slow", "a slow typist", "a slow typist pauses"):
        page.locator("textarea").fill(text)
        page.wait_for_function("text => new URLSearchParams(location.hash.slice(1)).get('text') === text", arg=text)
    assert (len(tab.viewer.answers.scenes), page.evaluate("history.length")) == (texts + 1, steps + 1)
    tokens = "() => [...document.querySelectorAll('.token')].map(x => x.textContent).join('')"
    page.wait_for_function(f"() => ({tokens})() === '⊢a slow typist pauses'")
    page.locator("textarea").blur()
    page.wait_for_timeout(300)
    page.get_by_label("Causal").uncheck()
    page.wait_for_function("() => location.hash.includes('causal=false')")
    page.locator("textarea").fill("another")  # what was settled stays
    page.wait_for_function("() => location.hash.includes('text=another')")
    kept = [scene.settings["text"] for scene in tab.viewer.answers.scenes.values() if scene.settings]
    assert kept.count("a slow typist pauses") == 2
    page.go_back()
    page.wait_for_function("() => location.hash.includes('causal=false') && location.hash.includes('pauses')")
    assert page.locator(".notice").is_hidden()


def test_typing_goes_on_while_a_text_is_brought(tab: Tab) -> None:
    page = tab.open("view=text&type=true&i=2&j=-1")
    page.wait_for_selector(READY["text"])
    release = tab.hold("**/row/**")
    page.locator("textarea").fill("a slow")
    page.wait_for_function("() => location.hash.includes('text=a+slow')")
    page.locator("textarea").fill("a slow typist")
    release()  # "a slow" is shown before "a slow typist" is sent
    page.wait_for_function("() => location.hash.includes('typist')")


def test_a_scene_with_fewer_layers_is_shown(tab: Tab) -> None:
    page = tab.open("view=text&layer=2&head=1")
    page.wait_for_function("() => document.querySelectorAll('.token').length === 54")
    page.locator("header").get_by_label("Text", exact=True).select_option("arrays")
    page.wait_for_function("() => document.querySelector('.token')?.textContent === 'the '")
    assert (hash_of(page)["scene"], hash_of(page)["layer"]) == ("arrays", "0")


def test_an_error_takes_the_prediction_with_it(tab: Tab) -> None:
    tab.expected = ("422",)
    page = tab.open("view=text&type=true")
    page.wait_for_function("() => /Expected next/.test(document.querySelector('.following')?.textContent)")
    page.locator("textarea").fill("")
    page.wait_for_selector(".editor .problem:not(:empty)")
    assert page.locator(".following").inner_text() == ""
    page.locator("textarea").fill("and then")
    page.wait_for_function("() => /Expected next/.test(document.querySelector('.following')?.textContent)")


@pytest.mark.parametrize(
    ("state", "view"),
    [
        ("view=__proto__", "overview"),
        ("view=constructor", "overview"),
        ("view=map&kind=foo", "map"),
        ("view=map&i=2.5&j=0.5", "map"),
        ("view=map&tone=toString&scale=__proto__", "map"),
        ("view=map&layer=1.5&head=NaN", "map"),
        ("view=map&zoom=a,b,c,d", "map"),
        ("view=map&zoom=9,3,0,0", "map"),
        ("view=text&scene=arrays:zz", "text"),
        ("view=text&scene=arrays:7", "text"),
        ("view=compare&other=example/0/-1", "compare"),
        ("view=compare&other=example/0.5/0", "compare"),
        ("view=compare&other=example:9/0/0", "compare"),
        ("view=compare&other=__proto__/x/y", "compare"),
    ],
)
def test_links_with_values_that_are_none(tab: Tab, state: str, view: str) -> None:
    page = tab.open(state)
    page.wait_for_selector(READY[view])
    page.wait_for_timeout(200)
    assert page.locator(".problem.banner").is_hidden(), page.locator(".banner").inner_text()
    if view == "compare":
        assert "is not here any more" in page.locator(".compare .empty").inner_text()


def test_arcs_end_above_their_tokens(tab: Tab) -> None:
    page = tab.open("view=arcs")
    page.wait_for_selector(READY["arcs"])
    apart = page.evaluate(
        """() => [...document.querySelectorAll(".arcs .arc")].slice(0, 50).flatMap(arc => {
            const end = arc.getPointAtLength(0), words = document.querySelectorAll(".arcs g.word text");
            const box = words[arc.dataset.i].getBoundingClientRect(), svg = arc.ownerSVGElement.getBoundingClientRect();
            return Math.abs(box.x + box.width / 2 - svg.x - end.x);
        })"""
    )
    assert len(apart) > 10
    assert max(apart) <= 1.5


@pytest.mark.parametrize("tab", [PHONE], indirect=True)
def test_on_a_touch_screen_one_taps(tab: Tab) -> None:
    page = tab.open("view=arcs")
    page.wait_for_selector(READY["arcs"])
    assert "Tap a token" in page.locator(".arcs .help").inner_text()


@pytest.mark.parametrize("tab", [{}, PHONE], ids=["wide", "phone"], indirect=True)
def test_a_long_token_hides_nothing(tab: Tab) -> None:
    page = tab.open("view=text&scene=arrays&i=47")
    page.wait_for_selector(READY["text"])
    beside = page.evaluate("() => [...document.querySelectorAll('.line')].map(x => x.scrollWidth - x.clientWidth)")
    assert max(beside) <= 0
    inside = page.evaluate(
        """() => {
            const box = document.querySelector(".text-scroll").getBoundingClientRect();
            return [...document.querySelectorAll(".token")].every(x => x.getBoundingClientRect().right <= box.right);
        }"""
    )
    assert inside
    for weight in page.locator(".strongest b").all():
        box, aside = weight.bounding_box(), page.locator("aside").bounding_box()
        assert box["x"] + box["width"] <= aside["x"] + aside["width"]
    page = tab.turn("view=map&scene=arrays&i=47&j=7", READY["map"])
    box, below = page.locator(".readout output").bounding_box(), page.locator(".below").bounding_box()
    assert box["y"] + box["height"] <= below["y"] + below["height"] < 844
    assert page.locator(".readout").bounding_box()["height"] < 120


def test_tokens_without_text_are_their_numbers(tab: Tab) -> None:
    page = tab.open("view=text&scene=arrays-2")
    page.wait_for_selector(READY["text"])
    listed = page.locator(".strongest button").first.inner_text().split()
    assert len(listed) == 2, listed
    assert listed[0].replace(",", "").isdecimal()


def test_a_layer_is_broken_between_words(tab: Tab) -> None:
    page = tab.open("view=heads&scene=arrays")
    page.wait_for_selector(READY["heads"])
    assert page.locator(".layer small").inner_text().replace("\n", "") == LAYER
    parts = page.evaluate(
        """() => [...document.querySelector(".layer small").childNodes].filter(x => x.data).map(x => {
            const range = document.createRange();
            range.selectNodeContents(x);
            return range.getClientRects().length;
        })"""
    )
    assert len(parts) == len(LAYER.replace("_", ".").split("."))
    assert set(parts) == {1}


def test_few_tabs_to_the_first_head(tab: Tab) -> None:
    page = tab.open("view=heads")
    page.wait_for_selector(READY["heads"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the view"
    page.keyboard.press("Enter")
    tabs = 1
    while not page.evaluate("document.activeElement.classList.contains('card')"):
        page.keyboard.press("Tab")
        tabs += 1
        assert tabs <= 6
    page.keyboard.press("Enter")
    page.wait_for_selector(READY["map"])


def test_a_map_says_that_it_is_on_its_way(tab: Tab) -> None:
    release = tab.hold("**/tile/**")
    page = tab.open("view=map&layer=2&head=1&scale=ink")
    page.wait_for_selector(".waiting:visible")
    assert "on its way" in page.locator(".waiting").inner_text()
    release()
    page.wait_for_selector(".waiting", state="hidden")
    page.wait_for_timeout(300)
    page.keyboard.press("]")
    page.wait_for_timeout(100)
    assert page.locator(".waiting").is_hidden()  # the last map stays until the next is there


def test_a_map_is_as_dark_as_the_page(tab: Tab) -> None:
    """Each click changes what is seen, the first one too, and the theme that was before comes back to the pixel."""
    shown = []
    page = tab.open("view=map&layer=2&head=2&zoom=10,40,0,30")
    page.wait_for_selector(READY["map"])
    page.wait_for_load_state("networkidle")
    for theme in ("light", "dark", "light"):
        assert page.evaluate("document.querySelector('.regard').dataset.theme") == theme
        page.wait_for_timeout(700)
        picture = picture_of(page)
        half = picture.shape[1] // 2
        shown.append(picture[40:-40, half - 150 : half + 150])
        page.get_by_role("button", name="Light or dark").click()
        page.mouse.move(2, 2)
    light, dark, again = shown
    assert min(light.std(), dark.std()) > 5
    assert np.array_equal(light, again)
    assert np.median(dark) < 60 < 200 < np.median(light)


@pytest.mark.parametrize("tab", [LANDSCAPE, ENLARGED, PHONE, {**LANDSCAPE, **DARK}], indirect=True)
def test_small_screens_have_room_for_a_map(tab: Tab) -> None:
    for view in ("map", "compare"):
        page = tab.open(f"view={view}&layer=2&head=2")
        page.wait_for_selector(READY[view])
        page.wait_for_timeout(300)
        for box in [x.bounding_box() for x in page.locator(".stage:visible").all()]:
            assert min(box["height"], box["width"]) >= 240, box
        accessible(page)
        if page.viewport_size["height"] > 600:
            continue
        assert page.evaluate("document.documentElement.scrollHeight > innerHeight")
        page.locator("footer").scroll_into_view_if_needed()
        assert page.locator("footer").bounding_box()["y"] < page.viewport_size["height"]
    for view in ("heads", "text", "profiles", "steps", "arcs"):
        page = tab.turn(f"view={view}", READY[view])
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize("tab", [PHONE], indirect=True)
def test_compare_on_a_phone_shows_one_map_at_a_time(tab: Tab) -> None:
    page = tab.open("view=compare&layer=2&head=2")
    page.wait_for_selector(READY["compare"])
    seen = []
    for name in ("L2 H2", "L2 H3", "Difference"):
        page.get_by_role("button", name=name, exact=True).click()
        page.wait_for_timeout(500)
        assert page.locator(".stage:visible").count() == 1
        box = page.locator(".stage:visible").bounding_box()
        assert page.locator(".below").bounding_box()["y"] >= box["y"] + box["height"] - 1
        seen.append(page.screenshot(clip=box))
    assert len(set(seen)) == 3
