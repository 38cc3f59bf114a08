"""The page without a server: from a file on disk, and in a notebook."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_browser import READY, Tab, weights

import regard


@pytest.mark.parametrize("scene", ["arrays", "arrays-2", "example"])
def test_a_saved_page_opens_from_disk(tab: Tab, arrays: dict[str, Any], tmp_path: Path, scene: str) -> None:
    from regard.viewer.serve import export
    from regard.viewer.serve.answers import Answers

    file = tmp_path / "saved page.html"
    mine = Answers(tab.viewer.answers.scenes.values(), patience=None)
    file.write_text(export.page(mine, scene), "utf-8")
    mine.close()
    tab.open("view=heads", file.as_uri())
    for view, sign in READY.items():
        ruled = view in ("steps", "scale") and scene == "arrays-2"  # its weights are embedded, not what they come from
        without_model = view == "ablation"  # no head can be switched off, but its values are there
        page = tab.turn(f"view={view}&i=40&j=37", f".{view} .empty:not(:empty)" if ruled or without_model else sign)
        if without_model:
            assert "A saved page has no model" in page.locator(".ablation .empty").inner_text()
        assert page.locator(".banner").is_hidden(), page.locator(".banner").inner_text()
        if ruled:
            assert "need queries and keys" in page.locator(f".{view} .empty").inner_text()
            assert "half precision" in page.locator("footer").inner_text()
        elif view == "steps":
            told = tab.viewer.answers.get(f"{scene}/step/0/0/40/37").content["stages"]
            assert page.locator(".stage-card h2").all_inner_texts() == [
                f"{number}\n{stage['name']}" for number, stage in enumerate(told, 1)
            ]
            shown = page.eval_on_selector_all("[data-stage]", "all => all.map(x => Number(x.dataset.value))")
            np.testing.assert_allclose(shown, [stage["value"] for stage in told if "value" in stage], rtol=1e-4)
            assert page.locator(".stage-card p:not(.value)").all_inner_texts() == [stage["text"] for stage in told]
    if scene in arrays:
        page = tab.turn("view=map&i=250&j=240", READY["map"])
        shown = float(page.locator(".readout output").get_attribute("data-weight"))
        expected = float(weights(arrays[scene], slice(250, 251), slice(240, 241))[0, 0, 0])
        exact = "mask" not in arrays[scene]
        np.testing.assert_allclose(shown, expected, rtol=1e-4 if exact else 2**-10)
        page.locator(".stage").focus()
        for _ in range(2):
            page.keyboard.press("Shift+ArrowRight")
        page.wait_for_selector(".readout output[data-weight='NaN']")  # query 250 does not see key 260
        page.keyboard.press("Enter")
        page.wait_for_timeout(500)
        assert page.locator(".banner").is_hidden()
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in tab.asked)


def test_a_notebook_asks_by_messages(tab: Tab, arrays: dict[str, Any]) -> None:
    from regard.viewer.serve import built
    from regard.viewer.serve.notebook import answered

    page = tab.page
    page.set_content("<!doctype html><html lang='en'><title>a notebook</title><body></body></html>")

    def ask(message: dict[str, Any]) -> dict[str, Any]:
        content, buffers = answered(tab.viewer.answers, message)
        return {"content": content, "buffers": [base64.b64encode(b).decode() for b in buffers]}

    page.expose_function("ask", ask)
    page.add_style_tag(content=built.page()["page.css"])
    page.evaluate(
        """async source => {
            const listeners = new Set();
            const model = {
                on: (_, listener) => listeners.add(listener),
                off: (_, listener) => listeners.delete(listener),
                send: async message => {
                    const { content, buffers } = await ask(message);
                    const views = buffers.map(b => new DataView(Uint8Array.from(atob(b), c => c.charCodeAt(0)).buffer));
                    for (const listener of listeners) listener(content, views);
                },
            };
            const widget = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
            const el = document.body.appendChild(document.createElement("div"));
            window.leave = widget.default.render({ model, el });
            window.listeners = listeners;
        }""",
        built.page()["page.js"],
    )
    page.wait_for_selector(READY["overview"])
    page.get_by_label("Text", exact=True).select_option("arrays")
    page.get_by_role("button", name="Map", exact=True).click()
    shown = page.wait_for_selector(".readout output").get_attribute("data-weight")
    n = len(arrays["arrays"]["tokens"])
    call = arrays["arrays"]
    head = int(page.get_by_label("Head", exact=True).input_value())
    options = {"rows": slice(n - 1, n), "causal": True, "engine": "tiled"}  # which serves maps this small
    assert np.float32(shown) == regard.weights(call["query"], call["key"], **options)[head, 0].max()
    assert page.evaluate("location.hash") == ""  # the notebook's address is not ours
    page.evaluate("leave()")
    assert page.evaluate("listeners.size") == 0
