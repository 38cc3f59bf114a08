"""A PyTorch model on the page: a text is typed, goes on by a token, and heads are switched off."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[transformers]'")

from in_browser import READY, Tab, serving
from regard.viewer.data.sentences import UNWRITTEN
from regard.viewer.scene.own import TextRunner
from small_models import MODELS
from torch_tokenizers import words


@pytest.fixture(scope="module")
def viewer(needed: None) -> Iterator[Any]:
    runners = [TextRunner(MODELS[name].build(), words()) for name in ("mistral", "bert")]
    with serving([scene for runner in runners for scene in runner.scenes({"text": "w5 w9 w21 w5 w9"})]) as viewer:
        yield viewer


def test_a_text_is_typed_and_goes_on(tab: Tab) -> None:
    page = tab.open("view=overview&scene=model&type=true")
    page.wait_for_selector(READY["overview"])
    assert page.locator(".editor input").count() == 0  # such a model has no temperature to turn
    page.locator(".editor textarea").fill("w7 w8")
    page.wait_for_function("() => document.querySelectorAll('.token-row .shares.next li').length")
    page.wait_for_function("() => document.title && location.hash.includes('w7')")
    page.locator(".token-row .shaded .token").first.click()
    page.wait_for_function("() => location.hash.includes('i=0')")
    page.get_by_role("button", name="Add the likeliest token").click()
    page.wait_for_function("() => document.querySelector('.editor textarea').value.startsWith('w7 w8w')")
    scenes = tab.viewer.answers.scenes
    typed = [scene.settings["text"] for name, scene in scenes.items() if name not in ("model", "model-2")]
    assert (len(typed), typed[0]) == (2, "w7 w8")
    assert typed[1] == page.locator(".editor textarea").input_value()


def test_heads_are_switched_off(tab: Tab) -> None:
    page = tab.open("view=ablation&scene=model-2&layer=1&head=2&i=3")
    page.wait_for_function("() => document.querySelectorAll('.ablation .effect').length === 8")
    page.locator(".ablation .place", has_text="L1 H2 is in place").wait_for()
    assert page.get_by_text("What the model expects in place of").count() == 1
    assert page.locator(".ablation [data-odds] small").all_text_contents() == [" stands here"]


def test_an_earlier_head_is_gone_to(tab: Tab) -> None:
    page = tab.open("view=overview&scene=model&layer=1&head=2&i=4")
    page.get_by_role("button", name="Which earlier heads feed it?").click()
    first = page.locator(".earlier [data-earlier]").first
    first.wait_for()
    layer, head = first.get_attribute("data-earlier").split("/")
    first.get_by_role("button").click()
    page.wait_for_function("at => location.hash.includes(`layer=${at[0]}&head=${at[1]}`)", arg=[layer, head])
    page.get_by_text(UNWRITTEN["first"], exact=True).wait_for()
