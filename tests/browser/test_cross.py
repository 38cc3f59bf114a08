"""Queries and keys of two texts, and learned sinks: arcs, the text and lists say what the weights say."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import regard
from in_browser import READY, Tab, serving, structured
from regard.interpret.formats import weight_text

SINK = {"query": structured(24, 2)[0], "key": structured(24, 2)[1], "causal": True, "sink": np.array([8.0, 0.0])}
LATER = {"query": structured(24, 2)[0][:, -4:], "key": structured(24, 2)[1], "causal": True, "offset": 20}
WORDS = structured(24, 2)[3]
# Whether anything is drawn in the sink's column.
COLUMN = """() => { const one = document.querySelector(".sinks"), none = document.createElement("canvas");
  [none.width, none.height] = [one.width, one.height];
  return one.clientWidth === 16 && one.toDataURL() !== none.toDataURL(); }"""


@pytest.fixture(scope="module")
def viewer(needed: None) -> Iterator[Any]:
    from regard.viewer.scene import sources

    scenes = [
        sources.translation(),
        sources.arrays(**SINK, tokens=WORDS),
        sources.arrays(**LATER, tokens=WORDS[-4:], key_tokens=WORDS),
        sources.arrays(*structured(24, 9)[:3], causal=True),
    ]
    with serving(scenes) as viewer:
        yield viewer


def arcs(page: Any) -> dict[tuple[str, str], float]:
    """The arcs by the two tokens that they join, as their titles name them."""
    titles = page.locator(".arcs .arc title").all_text_contents()
    parted = [title.rpartition(": ") for title in titles]
    return {tuple(ends.split(" → ")): float(weight) for ends, _, weight in parted}


@pytest.mark.parametrize("scene", ["cross", "arrays-2"])
def test_arcs_join_queries_and_keys(tab: Tab, scene: str) -> None:
    page = tab.open(f"view=arcs&scene={scene}&layer=0&head=0")
    page.wait_for_selector(READY["arcs"])
    P = np.nan_to_num(tab.viewer.answers.get(f"{scene}/values/0/0").content)
    told = [float(x) for x in page.eval_on_selector_all(".arcs .arc", "all => all.map(a => a.dataset.weight)")]
    ends = page.eval_on_selector_all(".arcs .arc", "all => all.map(a => [Number(a.dataset.i), Number(a.dataset.j)])")
    np.testing.assert_allclose(told, [P[i, j] for i, j in ends], rtol=1e-5)
    assert {(i, j) for i, j in ends} >= {(i, j) for i, j in np.argwhere(P >= 0.06).tolist()}
    labels = page.locator(".arcs g.word.key").all_text_contents()
    assert len(labels) == P.shape[1]
    if scene == "cross":
        assert all(key in {"the·", "white·", "cat·", "is·", "sleeping"} for _, key in arcs(page))
        assert page.locator(".arcs svg.in-columns").count() == 1  # so few stand in columns
        assert labels == ["the·", "white·", "cat·", "is·", "sleeping"]
    page.locator(".arcs g.word.key").nth(2).click()
    page.wait_for_selector(".arcs g.word.key.chosen")
    assert "j=2" in page.url
    page.locator(".arcs g.word.query").nth(1).click()
    page.wait_for_function("() => location.hash.includes('i=1')")


def test_each_text_chooses_its_own_tokens(tab: Tab) -> None:
    page = tab.open("view=text&scene=cross")
    page.wait_for_selector(READY["text"])
    assert page.locator("aside h2").first.inner_text() == "What 3 “dort” attends to"
    assert page.locator(".choosing .token").all_inner_texts() == ["le ", "chat ", "blanc ", "dort"]
    page.locator(".text-scroll [data-token='2']").click()
    page.wait_for_function("() => location.hash.includes('j=2')")
    assert page.locator("aside h2").first.inner_text() == "What 3 “dort” attends to"
    page.locator(".choosing [data-token='1']").click()
    page.wait_for_function("() => document.querySelector('aside h2').textContent === 'What 1 “chat·” attends to'")
    page.get_by_label("Shade").select_option("true")
    page.wait_for_function("() => document.querySelector('aside h2').textContent === 'What attends to 2 “cat·”'")
    assert len(page.locator(".choosing .token").all()) == 5
    assert len(page.locator(".text-scroll .token").all()) == 4


def test_a_learned_sink_is_an_entry_of_its_own(tab: Tab) -> None:
    sink = 1 - regard.weights(**SINK)[0, -1].sum()
    page = tab.open("view=arcs&scene=arrays&layer=0&head=0")
    page.wait_for_selector(READY["arcs"])
    assert page.locator(".arcs g.word.sink").text_content() == "sink"
    shown = page.locator(".arcs .arc[data-i='23'][data-j='-1']").get_attribute("data-weight")
    assert float(shown) == pytest.approx(sink, abs=1e-5)
    page = tab.turn("view=map&scene=arrays&layer=0&head=0&i=23", ".token-row .shares li")
    entry = page.locator(".token-row .shares").first.locator("li", has_text="sink")
    assert entry.inner_text().split() == ["sink", weight_text(sink)]
    page.wait_for_selector(READY["map"])
    assert "the learned sink 0.7" in page.locator(".readout").inner_text()
    assert "a row and the learned sink sum to 1." in page.locator("p.said").inner_text()
    page.wait_for_function(COLUMN)
    page = tab.turn("view=heads&scene=arrays", READY["heads"])
    page.locator(".card canvas").nth(1).wait_for()
    assert page.eval_on_selector_all(".card canvas", "all => all.map(one => one.width)") == [71, 71]
    page = tab.turn("view=token&scene=arrays&i=23", READY["token"])
    assert page.locator(".cell").first.inner_text().split()[-2:] == ["sink", weight_text(sink)]
    page = tab.turn("view=map&scene=cross", READY["map"])
    assert not page.locator(".sinks").is_visible()


def test_lists_leave_aside_what_most_heads_look_at(tab: Tab) -> None:
    page = tab.open("view=text&scene=arrays&layer=0&head=1&i=20")
    page.wait_for_selector(READY["text"])
    tokens = "all => all.map(b => Number(b.dataset.token))"
    listed = page.eval_on_selector_all("aside > div:first-child .strongest button", tokens)
    assert listed
    assert not {0, 19, 20} & set(listed)
    assert "itself" in page.locator(".aside-line").first.inner_text()
    page.locator(".aside-line button").first.click()
    page.wait_for_selector(".strongest button[data-token='20']")
    assert "near=true" in page.url


def test_every_view_names_keys_by_their_own_tokens(tab: Tab) -> None:
    keys = {"cross": ["the·", "white·", "cat·", "is·", "sleeping"], "arrays-2": [w.replace(" ", "·") for w in WORDS]}
    for scene, names in keys.items():
        page = tab.open(f"view=token&scene={scene}&layer=0&head=0")
        page.wait_for_selector(READY["token"])
        assert page.locator(".cell .word").first.inner_text() in names
        page = tab.turn(f"view=steps&scene={scene}&layer=0&head=0&i=1&j=2", READY["steps"])
        page.wait_for_function(f"() => document.querySelectorAll('.controls .word')[1].textContent === '{names[2]}'")
        page = tab.turn(f"view=compare&scene={scene}&layer=0&head=0&i=1&j=4", READY["compare"])
        page.wait_for_function(f"() => document.querySelector('.readout').innerText.includes('key 4 “{names[4]}”')")
        page = tab.turn(f"view=scale&scene={scene}&layer=0&head=0", READY["scale"])
        assert page.eval_on_selector(".scale canvas", "one => one.width") == len(names)
        page = tab.turn(f"view=profiles&scene={scene}&layer=0&head=0", READY["profiles"])
        assert page.locator("figcaption", has_text="By distance").count() == (0 if scene == "cross" else 1)
        page = tab.turn(f"view=heads&scene={scene}", ".heads .one-kind")
        assert page.get_by_text("Queries and keys are two texts.").count() == (5 if scene == "cross" else 0)


# The heads in each line of a box.
LINES = """boxes => boxes.map(box => Object.values(
  Object.groupBy([...box.children], one => Math.round(one.getBoundingClientRect().top))).map(line => line.length))"""
SEES_ALL = """() => document.querySelector(".stage.all") &&
  getComputedStyle(document.querySelector(".navigator")).visibility === "hidden" """


def test_nine_heads_are_wrapped_evenly_and_no_minimap_covers_a_whole_map(tab: Tab) -> None:
    for state, boxes in (
        ("view=heads&scene=arrays-3", ".layer .row"),
        ("view=heads&scene=arrays-3&sort=entropy", ".cards"),
        ("view=overview&scene=arrays-3", ".gridheads"),
    ):
        page = tab.open(state)
        page.wait_for_selector(READY[state.partition("&")[0][5:]])
        for width in (320, 640, 738, 1000, 1300, 1700, 2560):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_function(
                f"() => ({LINES})([...document.querySelectorAll('{boxes}')]).flat().every((n, k, all) => "
                "Math.max(...all) - n <= 1)"
            )
    for scene in ("arrays", "arrays-2"):
        page = tab.turn(f"view=map&scene={scene}", READY["map"])
        for width in (320, 1020, 1040):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_function(SEES_ALL)
