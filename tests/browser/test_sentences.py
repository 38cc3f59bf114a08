"""The page opens on a sentence, marks a word with its line, and says what weights alone do not tell."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from in_browser import AXE, READY, Tab, serving


@pytest.fixture(scope="module")
def viewer(needed: None) -> Iterator[Any]:
    from regard.viewer.scene import words

    with serving(words.page()) as viewer:
        yield viewer


def ends(page: Any) -> list[str]:
    """The two marked words of the text beside the map."""
    return [page.locator(f".shaded .token.{name}").text_content().strip() for name in ("query", "key")]


def test_the_page_opens_on_a_sentence(tab: Tab) -> None:
    page = tab.open("")
    page.wait_for_selector(".shaded.lined path[d]", state="attached")
    said = page.locator(".finding").inner_text()
    assert said.startswith("In L13 H8 “it” looks at “cat” (0.804)")
    assert "Click another word" in said
    assert ends(page) == ["it", "cat"]
    page.evaluate(AXE.read_text("utf-8"))
    assert page.evaluate("async () => (await axe.run(document)).violations") == []
    line = page.locator(".shaded path").get_attribute("d")
    page.locator(".shaded .token", has_text="tired").click()
    page.wait_for_function("() => location.hash.includes('i=9')")
    page.wait_for_function("line => document.querySelector('.shaded path[d]')?.getAttribute('d') !== line", arg=line)
    assert ends(page) == ["tired", "cat"]
    page.get_by_label("Text").select_option("words-5")
    page.wait_for_function("() => document.querySelector('.finding').textContent.includes('no coreference head')")
    assert ends(page) == ["she", "Peter"]


def test_what_a_sentence_lacks_is_said(tab: Tab) -> None:
    tab.expected = ("422",)
    page = tab.open("view=steps&scene=words&layer=13&head=8")
    page.wait_for_selector(READY["steps"])
    page.keyboard.press("[")
    page.wait_for_function(
        "() => document.querySelector('.steps .empty').textContent.includes('came as weights alone')"
    )
    assert "those of L13 H8 are here" in page.locator(".steps .empty").inner_text()


def test_the_model_that_runs_is_a_click_away(tab: Tab) -> None:
    page = tab.open("")
    page.wait_for_selector(".shaded.lined")
    page.get_by_role("button", name="Type your own text").click()
    page.wait_for_selector("textarea")
    page.wait_for_function("() => location.hash.includes('scene=example')")
    page.get_by_label("Text", exact=True).first.select_option("words")
    page.wait_for_selector(".shaded.lined")
    page.get_by_role("button", name="Take the tour").click()
    page.wait_for_function("() => location.hash.includes('scene=example')")


def test_a_saved_sentence_opens_alone(tab: Tab, tmp_path: Path) -> None:
    from regard.viewer.scene import words
    from regard.viewer.serve.answers import Answers

    file = tmp_path / "cat.html"
    cat = words.opening()[0]
    layer = replace(cat, layers=cat.layers[13:14], opening=cat.opening._replace(layer=0))  # of 30: those take seconds
    file.write_text(Answers([layer], patience=None).page("words"), "utf-8")
    page = tab.open("", file.as_uri())
    page.wait_for_selector(".shaded.lined path[d]", state="attached")
    assert ends(page) == ["it", "cat"]
    tab.turn("view=steps&layer=0&head=8&i=7&j=1", READY["steps"])
    tab.turn("view=scale&layer=0&head=7&i=7", ".scale .empty:not(:empty)")
    assert "came as weights alone" in page.locator(".scale .empty").inner_text()
