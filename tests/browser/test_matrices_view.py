"""The matrices of a head in the page: what is touched, what it was made of, and the bars of a row."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest

import regard
from browser.test_page import accessible
from in_browser import Tab
from regard.viewer.scene import sources
from regard.viewer.serve.answers import Answers


def call_of(tab: Tab) -> regard.examplemodel.Trace:
    model = regard.examplemodel.ExampleModel.load()
    return model.run(model.encode(sources.SENTENCE))


def touch(page: Any, name: str, row: int, col: int, shape: tuple[int, int]) -> dict[str, str]:
    """Point at a number, and read what is said of it."""
    stage = page.locator(f".matrix-stage[data-matrix='{name}']")
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    x, y = (col + 0.5) * box["width"] / shape[1], (row + 0.5) * box["height"] / shape[0]
    stage.hover(position={"x": x, "y": y})
    return dict(page.evaluate("({...document.querySelector('.made').dataset})")) | {
        "text": page.locator(".made").inner_text()
    }


def marked(page: Any) -> dict[str, list[str]]:
    """Which matrices are marked, and how."""
    script = """all => Object.fromEntries(all.map(x => [
        x.dataset.matrix, [...x.querySelectorAll('rect')].map(r => r.getAttribute('class')),
    ]).filter(([, marks]) => marks.length))"""
    return dict(page.eval_on_selector_all("[data-matrix].matrix-stage", script))


@pytest.mark.parametrize("saved", [False, True], ids=["served", "saved"])
def test_a_number_says_what_made_it(tab: Tab, tmp_path: Path, saved: bool) -> None:
    base = None
    if saved:
        answers = Answers([sources.example(sources.Settings())], patience=None)
        file = tmp_path / "page.html"
        file.write_text(answers.page("example"), "utf-8")
        base = file.as_uri()
    page = tab.open("view=steps&layer=2&head=2&i=53&j=25", base)
    page.wait_for_selector(".matrix-stage[data-matrix='output']", timeout=40_000)
    trace = call_of(tab)
    steps = regard.steps(trace.q[2], trace.k[2], trace.v[2], causal=True)
    n, d = 54, 32
    expected = {
        "queries": (40, 20, d, {"queries": ["from", "spot"]}),
        "values": (40, 20, d, {"values": ["from", "spot"]}),
        "raw scores": (50, 22, n, {"queries": ["from"], "keys": ["from"], "raw scores": ["spot"]}),
        "scaled": (50, 22, n, {"raw scores": ["from"], "scaled": ["spot"]}),
        "masked": (50, 22, n, {"scaled": ["from"], "masked": ["spot"]}),
        "softmax": (53, 25, n, {"masked": ["from", "from"], "lse": ["from"], "softmax": ["spot"]}),
        "output": (53, 7, d, {"softmax": ["from"], "values": ["from"], "output": ["spot"]}),
    }
    if not saved:  # a saved page has no model
        expected["queries"][-1].clear()
        expected["queries"][-1].update(
            {"projected queries": ["from"], "queries": ["spot"]}
        )  # of feature 16 on: no RoPE
        expected["values"][-1].clear()
        expected["values"][-1].update({"input": ["from"], "value projection": ["from"], "values": ["spot"]})
    else:
        assert "start `regard look`" in page.locator(".steps .long").inner_text()
    for name, (row, col, width, marks) in expected.items():
        told = touch(page, name, row, col, (n, width))
        assert told["matrix"] == name
        assert float(told["value"]) == pytest.approx(steps[name].value[2, row, col], rel=1e-4), name
        assert marked(page) == marks, name
    told = touch(page, "masked", 10, 40, (n, n))
    assert told["value"] == "null"
    assert "query 10 does not see key 40" in told["text"]
    page.locator(".matrix-stage[data-matrix='raw scores']").click(position={"x": 22 * 4 + 1, "y": 50 * 4 + 1})
    state = dict(parse_qsl(page.evaluate("location.hash").lstrip("#")))
    assert (state["i"], state["j"]) == ("50", "22")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => location.hash.includes('j=23')")


def test_projections_and_heads_side_by_side(tab: Tab) -> None:
    page = tab.open("view=steps&layer=2&head=2&i=53&j=25")
    page.wait_for_selector(".matrix-stage[data-matrix='written']")
    assert page.locator(".all-matrices h3").all_inner_texts() == [
        "Queries", "Keys", "Values", "Scores", "Softmax", "Output", "All heads",
    ]  # fmt: skip
    model, trace, n, d, h = regard.examplemodel.ExampleModel.load(), call_of(tab), 54, 32, 4
    of = model.projections(trace, 2)
    own, joined = slice(2 * d, 3 * d), trace.out[2].swapaxes(0, 1).reshape(n, -1)
    made = {what: of["x"] @ of[what[0]][:, own] + of[f"{what[0]}_bias"][own] for what in ("query", "key")}
    expected: dict[str, tuple[int, int, np.ndarray, dict[str, list[str]]]] = {
        "input": (7, 100, of["x"], {"input": ["from", "spot"]}),
        "query projection": (100, 7, of["q"][:, own], {"query projection": ["from", "spot"]}),
        "projected queries": (40, 3, made["query"], {"input": ["from"], "query projection": ["from"]}),
        "projected keys": (41, 3, made["key"], {"input": ["from"], "key projection": ["from"]}),
        "queries": (40, 3, trace.q[2][2], {"projected queries": ["from", "from"]}),  # rotated with feature 11
        "heads side by side": (53, 2 * d + 7, joined, {"output": ["from"]}),
        "written": (53, 9, joined @ of["o"], {"heads side by side": ["from"], "output projection": ["from"]}),
    }
    for name, (row, col, values, marks) in expected.items():
        told = touch(page, name, row, col, values.shape)
        assert float(told["value"]) == pytest.approx(values[row, col], rel=1e-4, abs=1e-5), name
        assert marked(page) == {**marks, name: marks.get(name, ["spot"])}, name
    assert "+ bias" in touch(page, "projected queries", 40, 3, (n, d))["text"]
    assert "of head 0: choose that head" in touch(page, "heads side by side", 53, 7, (n, h * d))["text"]


@pytest.mark.parametrize("tab", [{}, {"color_scheme": "dark"}], ids=["light", "dark"], indirect=True)
def test_a_cross_attention_number_by_number(tab: Tab) -> None:
    page = tab.open("view=steps")
    page.wait_for_selector(".matrix-stage[data-matrix='written']")
    page.get_by_label("Text", exact=True).select_option(label="Cross-attention: le chat blanc dort (5)")
    page.wait_for_selector(".matrix-stage[data-matrix='source']")
    page.get_by_label("Head", exact=True).select_option("0")
    page.wait_for_function("() => location.hash.includes('head=0') || !location.hash.includes('head=')")
    page.wait_for_timeout(300)
    told = touch(page, "queries", 1, 2, (4, 4))
    assert told["text"].startswith("Q[1,2] = 3")
    assert "X[1] · W_Q[:,2] = 1·3" in told["text"]
    assert "query 1 “chat·”" in told["text"]
    assert marked(page) == {"input": ["from"], "query projection": ["from"], "queries": ["spot"]}
    told = touch(page, "keys", 2, 2, (5, 4))
    assert "Z[2] · W_K[:,2] = 1·2" in told["text"]
    assert "key 2 “cat·”" in told["text"]
    told = touch(page, "written", 1, 2, (4, 4))
    assert marked(page) == {"heads side by side": ["from"], "output projection": ["from"], "written": ["spot"]}
    row = tab.viewer.answers.get("cross/row/0/0/1").content
    told = touch(page, "softmax", 1, 2, (4, 5))
    assert float(told["value"]) == pytest.approx(row[2], rel=1e-5)
    accessible(page)


def test_the_whole_row_before_and_after(tab: Tab) -> None:
    page = tab.open("view=steps&scene=arrays-2&head=1&i=60&j=55")
    page.wait_for_selector(".strips small:not(:empty)", timeout=40_000)
    assert page.locator(".all-matrices").is_hidden()
    assert "up to 128 tokens" in page.locator(".steps .long").inner_text()
    told = tab.viewer.answers.get("arrays-2/scores/0/1/60").content
    assert np.isneginf(told[1]).any()
    for row, said in zip(told, page.locator(".strips small").all_inner_texts(), strict=True):
        assert f"largest: key {int(np.argmax(row))}," in said, json.dumps(said)
    page.locator(".strips canvas").nth(2).click(position={"x": 1, "y": 20})
    page.wait_for_function("() => location.hash.includes('j=0')")
