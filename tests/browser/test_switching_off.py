"""A head is switched off in the page: what is shown is what runs of the model without it say."""

from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest

from in_browser import READY, Tab
from regard.examplemodel import ExampleModel
from regard.viewer.scene.sources import SENTENCE


def numbers(page: Any, selector: str, name: str) -> list[float]:
    script = "(all, name) => all.map(x => Number(x.getAttribute(name)))"
    return list(page.eval_on_selector_all(selector, script, f"data-{name}"))


def test_a_head_is_switched_off(tab: Tab) -> None:
    page = tab.open("view=overview&layer=0&head=1&i=51")
    page.get_by_role("button", name="Switch a head off").click()
    page.wait_for_selector(".effect", timeout=40_000)  # thirteen runs of the model
    model = ExampleModel.load()
    ids = model.encode(SENTENCE)
    whole = model.run(ids).losses().mean()
    losses = {(layer, head): trace.losses().mean() for layer, head, trace in model.ablations(ids)}
    order = sorted(losses, key=lambda at: -losses[at])
    shown = page.eval_on_selector_all(".effect", "all => all.map(x => x.dataset.head)")
    assert shown == [f"{layer}/{head}" for layer, head in order]
    changes = numbers(page, ".effect", "change")
    np.testing.assert_allclose(changes, [losses[at] - whole for at in order], atol=1e-6)

    page.locator(".effect[data-head='2/2']").click()
    page.wait_for_function("() => document.querySelector('.detail h2').textContent === 'Without L2 H2'")
    page.get_by_label("In the head's place").select_option("mean")
    page.wait_for_function(
        "loss => document.querySelector('.outcome').textContent.includes(loss)",
        arg=f"{model.run(ids, ablate={(2, 2): 'mean'}).losses().mean():.3f}",
    )
    page.locator(".detail [data-token='53']").click()
    page.wait_for_function("() => document.querySelector('.detail').textContent.includes('after 53')")
    state = dict(parse_qsl(page.evaluate("location.hash").lstrip("#")))
    assert {name: state[name] for name in ("view", "layer", "head", "i", "without")} == {
        "view": "ablation", "layer": "2", "head": "2", "i": "53", "without": "mean",
    }  # fmt: skip
    odds = {name: numbers(page, f".odds [data-{name}]", name) for name in ("before", "after")}
    link = page.url

    page = tab.open(link.split("#")[1])  # the link brings the same back
    page.wait_for_selector(".effect.current[data-head='2/2']")
    page.wait_for_selector(".odds [data-after]")
    for name, ablate in (("before", {}), ("after", {(2, 2): "mean"})):
        logits = model.run(ids, ablate=ablate).logits[53].astype(float)
        share = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        found = numbers(page, f".odds [data-{name}]", name)
        assert found == odds[name]
        assert max(found) == pytest.approx(share.max())
    tokens = page.eval_on_selector_all("[data-odds]", "all => all.map(x => x.dataset.odds)")
    assert tokens[0] == "i"


def test_weight_times_the_length_of_the_value(tab: Tab) -> None:
    page = tab.open("view=ablation&layer=2&head=2&i=53")
    page.wait_for_selector("[data-key]")
    trace = ExampleModel.load().run(ExampleModel.load().encode(SENTENCE))
    weights = trace.weights(2, rows=slice(53, 54))[2, 0]
    taken = weights * np.linalg.norm(trace.v[2][2].astype(float), axis=-1)
    keys = [int(key) for key in page.eval_on_selector_all("[data-key]", "all => all.map(x => x.dataset.key)")]
    assert keys[:5] == np.argsort(-taken)[:5].tolist()
    assert set(np.argsort(-weights)[:5].tolist()) <= set(keys)
    np.testing.assert_allclose(numbers(page, "[data-key] [data-taken]", "taken"), taken[keys], rtol=1e-4)
    np.testing.assert_allclose(numbers(page, "[data-key] [data-weight]", "weight"), weights[keys], rtol=1e-4)


@pytest.mark.parametrize("view", ["overview", "map", "text", "token"])
def test_what_is_taken_along_stands_beside_the_weight(tab: Tab, view: str) -> None:
    page = tab.open(f"view={view}&layer=2&head=2&i=53&near=true")
    page.wait_for_selector("[data-taken]:visible")
    trace = ExampleModel.load().run(ExampleModel.load().encode(SENTENCE))
    weights = trace.weights(2, rows=slice(53, 54))[2, 0]
    taken = weights * np.linalg.norm(trace.v[2][2].astype(float), axis=-1)
    shown = numbers(page, "[data-taken]", "taken")
    assert len(shown) >= 8
    np.testing.assert_allclose(shown[:8], taken[np.argsort(-weights)[:8]], rtol=1e-4)
    assert page.get_by_text("× ‖value‖").first.is_visible()
    page = tab.turn(f"view={view}&scene=arrays-3&i=40", READY[view])  # no values were given
    page.wait_for_function("() => !document.querySelector('[data-taken]')")
    if view == "text":
        page = tab.turn("view=text&scene=example&layer=2&head=2&i=53&words=true&near=true", "[data-taken]")
        first = page.locator(".strongest button").first
        start, word = int(first.get_attribute("data-token")), first.locator(".which").inner_text()
        assert len(word) > 1
        queries = trace.weights(2, rows=slice(51, 54))[2].mean(axis=0)  # of the last word, " Br"
        norms = np.linalg.norm(trace.v[2][2].astype(float), axis=-1)
        expected = (queries * norms)[start : start + len(word)].sum()
        assert numbers(page, "[data-taken]", "taken")[0] == pytest.approx(expected, rel=1e-3)


def test_other_scenes_say_why_not(tab: Tab) -> None:
    page = tab.open("view=ablation&scene=arrays&i=40")
    page.wait_for_selector("[data-key]")
    said = page.locator(".ablation .empty").inner_text()
    assert "Arrays are queries and keys without the model" in said
    assert f"The heads of “{SENTENCE[:6]}" in said
    assert page.locator(".effects").is_hidden()
    assert not tab.api("/ablation")
