"""What is seen in the page is what `regard` computes; and it works by keyboard, in the dark, and on a phone."""

import io
import json
import threading
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pytest

import regard
from in_browser import AXE, READY, READY_PICTURE, Tab, weights
from regard.interpret.formats import figure, weight_text
from regard.viewer.data import sentences
from regard.viewer.show.colour import ramp

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
NARROW = {**PHONE, "viewport": {"width": 320, "height": 844}}
DARK = {"color_scheme": "dark"}
DARK_WIDE = {**DARK, "viewport": {"width": 1600, "height": 900}}

WIDER = """() => Math.max(document.documentElement.scrollWidth - innerWidth, ...[
    ...document.querySelectorAll(".view, .text-scroll")
].map(x => x.scrollWidth - x.clientWidth))"""


def hash_of(page: Any) -> dict[str, str]:
    return dict(parse_qsl(page.evaluate("location.hash").lstrip("#")))


def accessible(page: Any) -> None:
    """axe-core finds nothing to complain about."""
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("async () => (await axe.run(document)).violations")
    if found:
        brief = [(v["id"], v["help"], [node["html"][:120] for node in v["nodes"][:3]]) for v in found]
        raise AssertionError(json.dumps(brief, indent=1))


@pytest.mark.parametrize("tab", [{}, DARK_WIDE, NARROW], ids=["light", "dark", "phone"], indirect=True)
def test_every_view_loads_and_is_accessible(tab: Tab) -> None:
    tab.open("type=true")
    for view, sign in (READY | READY_PICTURE).items():
        page = tab.turn(f"view={view}&layer=1&head=1&type=true", sign)
        assert page.locator(".banner").is_hidden()
        assert "does not by itself explain" in page.locator("footer").inner_text()
        wide = page.evaluate(WIDER)
        assert wide <= 0, f"{view} is {wide} pixels wider than the screen"
        accessible(page)


@pytest.mark.parametrize("scene", ["arrays", "arrays-2"])
def test_the_chosen_weight_is_exact(tab: Tab, arrays: dict[str, Any], scene: str) -> None:
    call = arrays[scene]
    i, j = 123, 101
    page = tab.open(f"view=map&scene={scene}&head=1&i={i}&j={j}")
    expected = weights(call, slice(i, i + 1), slice(j, j + 1))[1, 0, 0]
    shown = page.wait_for_selector(".readout output[data-weight]").get_attribute("data-weight")
    assert np.float32(shown) == expected
    assert f"query {i} “{call['tokens'][i].strip()}" in page.locator(".readout").inner_text()


def test_keys_move_the_chosen_pair(tab: Tab, arrays: dict[str, Any]) -> None:
    page = tab.open("view=map&scene=arrays&i=500&j=480")
    page.wait_for_selector(".readout output")
    page.locator(".stage").focus()
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "Shift+ArrowLeft"):
        page.keyboard.press(key)
    assert (hash_of(page)["i"], hash_of(page)["j"]) == ("499", "472")
    expected = float(weights(arrays["arrays"], slice(499, 500), slice(472, 473))[0, 0, 0])
    page.wait_for_function("w => Number(document.querySelector('.readout output').dataset.weight) === w", arg=expected)
    assert "499" in page.locator(".spoken").inner_text()
    page.keyboard.press("]")
    assert hash_of(page)["head"] == "1"
    page.keyboard.press("4")
    page.wait_for_selector(READY["text"])
    page.go_back()
    page.wait_for_selector(READY["map"])


def test_zooming_fetches_the_tiles_that_are_seen(tab: Tab) -> None:
    page = tab.open("view=map&scene=arrays&i=700&j=300&kind=mass")
    page.wait_for_selector(".readout output")
    page.wait_for_load_state("networkidle")
    assert {"arrays/tile/0/0/0/0/0?kind=mass"} <= set(tab.api("/tile/"))
    tab.asked.clear()
    page.locator(".stage").focus()
    page.keyboard.press("Enter")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)
    fine = [url for url in tab.api("/tile/") if url.startswith("arrays/tile/0/0/2/")]
    assert "arrays/tile/0/0/2/1/2?kind=mass" in fine  # key 300 is in tile 1 of 256, query 700 in tile 2
    assert len(fine) == len(set(fine)) <= 4, fine


@pytest.mark.parametrize("tone", ["linear", "root", "log"])
def test_a_pixel_has_the_colour_of_its_weight(tab: Tab, arrays: dict[str, Any], tone: str) -> None:
    scene, i, j = "arrays-2", 150, 148
    page = tab.open(f"view=map&scene={scene}&head=1&i={i}&j={j}&scale=viridis&tone={tone}")
    page.wait_for_selector(".readout output")
    page.locator(".stage").focus()
    page.keyboard.press("Enter")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)
    picture = picture_of(page)
    call = weights(arrays[scene])
    top = np.float16(call[1].max())
    seen = 0
    # Enter puts the pair into the middle, 44 pixels wide at least; numbers stand in the middle of a cell.
    middle, width = (picture.shape[0] / 2, picture.shape[1] / 2), cell_width(page)
    for di, dj in ((0, 2), (2, 0), (-2, 1), (1, -2), (-1, -3)):
        weight = float(np.float16(call[1, i + di, j + dj]))
        share = weight / float(top)
        place = {"linear": share, "root": share**0.5, "log": max(0.0, 1 + np.log10(share) / 4)}[tone]
        at = (int(middle[0] + (di + 0.36) * width), int(middle[1] + (dj + 0.36) * width))
        assert np.abs(picture[at] - ramp(place).astype(int)).max() <= 2, (di, dj, picture[at], ramp(place))
        seen += weight > 0.001
    assert seen >= 3


def picture_of(page: Any) -> np.ndarray:
    """What the map looks like, (height, width, 3)."""
    from PIL import Image

    box = page.locator(".stage").bounding_box()
    return np.asarray(Image.open(io.BytesIO(page.screenshot(clip=box))).convert("RGB")).astype(int)


def cell_width(page: Any) -> float:
    """Pixels between two keys, from how far apart the pointer finds them."""
    box = page.locator(".stage").bounding_box()
    y, found = box["y"] + box["height"] / 2, []
    for x in range(int(box["x"]) + 2, int(box["x"] + box["width"]) - 2, 2):
        page.mouse.move(x, y)
        name = page.evaluate(
            "() => new Promise(r => requestAnimationFrame(() => r(document.querySelector('.readout').textContent)))"
        )
        key = name.split("key ")[1].split(" ")[0]
        if not found or found[-1][1] != key:
            found.append((x, key))
        if len(found) == 6:
            break
    page.mouse.move(2, 2)
    return (found[5][0] - found[1][0]) / 4


def test_a_long_map_is_seen_while_it_is_computed(
    tab: Tab, arrays: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.viewer.data.pyramid import Coarse

    go, find = threading.Semaphore(0), Coarse._find
    monkeypatch.setattr(Coarse, "_find", lambda coarse, rows: (go.acquire(), find(coarse, rows)))
    tab.viewer.answers.results.store.forget("arrays-3")
    page = tab.open("view=map&scene=arrays-3&i=19000&j=18000")
    shown = page.wait_for_selector(".readout output").get_attribute("data-weight")  # waits for no pass
    assert np.float32(shown) == weights(arrays["arrays-3"], slice(19_000, 19_001), slice(18_000, 18_001))[0, 0, 0]
    page.wait_for_function("() => document.querySelector('.legend').innerText.includes('computed, 0 %')")
    go.release()  # the first queries
    page.wait_for_function("() => /computed, [1-9]+ %/.test(document.querySelector('.legend').innerText)")
    page.wait_for_timeout(500)
    half = picture_of(page)
    stripes = [[0xDE, 0xE1, 0xE4], [0xC9, 0xCE, 0xD2]]

    def striped(picture: np.ndarray) -> float:
        return float((picture[:, :, None] == stripes).all(-1).any(-1).mean())

    assert 0.05 < striped(half[half.shape[0] // 2 :]) < 0.8  # of the lower half three quarters lie below the diagonal
    for _ in range(99):
        go.release()
    page.wait_for_function("() => !document.querySelector('.legend').innerText.includes('computed')")
    page.wait_for_timeout(500)
    whole = picture_of(page)
    assert striped(whole) == 0
    top = half[: half.shape[0] // 40], whole[: half.shape[0] // 40]
    assert np.array_equal(*top)  # what was there stays as it was
    assert len(tab.api("/map/")) < 40


def test_text_is_shaded_by_rows_and_columns(tab: Tab, arrays: dict[str, Any]) -> None:
    call = arrays["arrays"]
    for by, chosen, expected in (
        (False, 640, weights(call, slice(640, 641))[1, 0]),
        (True, 77, weights(call, cols=slice(77, 78))[1, :, 0]),
    ):
        index = "j" if by else "i"
        page = tab.open(f"view=text&scene=arrays&head=1&{index}={chosen}&by={'true' if by else 'false'}&near=true")
        page.wait_for_selector(".strongest li")
        listed = page.eval_on_selector_all(
            ".strongest button", "all => all.map(b => [Number(b.dataset.token), Number(b.dataset.weight)])"
        )
        best = np.sort(np.nan_to_num(expected))[::-1][:10]
        tokens, shown = map(list, zip(*listed, strict=True))
        np.testing.assert_allclose(shown, best, rtol=4e-6)
        np.testing.assert_allclose(shown, expected[tokens], rtol=4e-6)
    page.locator(".token[data-token='90']").click()
    page.wait_for_function("() => document.querySelector('aside h2').textContent.includes('90 ')")
    assert hash_of(page)["j"] == "90"


def test_long_text_draws_what_is_seen_alone(tab: Tab, arrays: dict[str, Any]) -> None:
    page = tab.open("view=text&scene=arrays-3&i=19990&near=true")
    page.wait_for_selector(".token[data-token='19990'].chosen")
    assert page.locator(".token").count() < 2_000
    listed = page.locator(".strongest button").first
    expected = weights(arrays["arrays-3"], slice(19_990, 19_991))[0, 0]
    assert np.float32(listed.get_attribute("data-weight")) == np.nanmax(expected)
    listed.click()
    page.wait_for_selector(f".token[data-token='{listed.get_attribute('data-token')}']")


def test_compare_shows_both_and_their_difference(tab: Tab, arrays: dict[str, Any]) -> None:
    page = tab.open("view=compare&scene=arrays&head=0&other=arrays/0/1&i=200&j=190")
    text = page.wait_for_selector(".readout output").inner_text()
    a, b = weights(arrays["arrays"], slice(200, 201), slice(190, 191))[:, 0, 0]
    assert text == f"{figure(a)} and {figure(b)}"
    assert page.locator(".pane:visible").count() == 3
    before = len(tab.api("/tile/"))
    page.locator(".stage").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)
    assert "arrays/tile/0/1/2/0/0?kind=max" in tab.api("/tile/")[before:]  # the second map follows the first
    page.locator(".controls select").nth(0).select_option("arrays-2")
    page.wait_for_function("() => document.querySelectorAll('.pane')[2].hidden")
    assert "different sizes" in page.locator(".compare .empty").inner_text()


def test_steps_end_in_the_weight(tab: Tab, arrays: dict[str, Any]) -> None:
    page = tab.open("view=steps&scene=arrays-2&head=1&i=60&j=55")
    stage = page.wait_for_selector("[data-stage='softmax weight']")
    expected = weights(arrays["arrays-2"], slice(60, 61), slice(55, 56))[1, 0, 0]
    np.testing.assert_allclose(float(stage.get_attribute("data-value")), expected, rtol=1e-5)
    page.get_by_label("Key after").click()
    page.wait_for_function("() => location.hash.includes('j=56')")


def test_arcs_are_the_weights_from_a_threshold(tab: Tab, arrays: dict[str, Any]) -> None:
    page = tab.open("view=arcs&scene=arrays&head=1&i=32")
    page.wait_for_selector(".arc")
    part = np.nan_to_num(weights(arrays["arrays"], slice(0, 64), slice(0, 64))[1])
    expected = int(((part >= np.float32(0.05)) & ~np.eye(64, dtype=bool)).sum())
    assert 0 < expected < 400
    assert page.locator(".arc").count() == expected


def test_heads_are_sorted_and_filtered(tab: Tab) -> None:
    page = tab.open("view=heads&sort=previous token")
    page.wait_for_selector(".card .score")
    scores = [float(text) for text in page.locator(".card .score span:last-child").all_inner_texts() if text != "–"]
    assert len(scores) == 12
    assert scores == sorted(scores, reverse=True)
    page.get_by_label("Kind", exact=True).select_option("induction")
    page.wait_for_function("() => document.querySelectorAll('.card').length < 12")
    for card in page.locator(".card").all():
        assert "induction" in card.inner_text()
    page.locator(".card").first.click()
    page.wait_for_selector(READY["map"])


def test_long_heads_are_measured_when_that_is_asked_for(tab: Tab) -> None:
    """What takes long is not begun by looking."""
    tab.page.route(
        "**/api/scenes",
        lambda route: route.fulfill(json=longer(tab.viewer.answers.get("scenes").content)),
    )
    page = tab.open("view=heads&scene=arrays-2")
    measure = page.get_by_role("button", name="Measure the heads")
    measure.wait_for()
    page.wait_for_selector(READY["heads"])
    assert "20 billion pairs" in page.locator(".heads .note").first.inner_text()
    assert tab.api("/heads") == []
    accessible(page)
    measure.click()
    page.wait_for_function("() => document.querySelector('[aria-label=\"Sort by\"]').options.length > 1")
    assert tab.api("/heads") == ["arrays-2/heads"]


def longer(scenes: Any) -> dict[str, Any]:
    """The list of scenes, with heads of 100,000 tokens."""
    given: dict[str, Any] = json.loads(json.dumps(scenes))
    for scene in given["scenes"]:
        for layer in scene["layers"]:
            layer["n_q"] = layer["n_k"] = 100_000
    return given


def test_typing_runs_the_model(tab: Tab) -> None:
    tab.expected = ("422",)
    page = tab.open("view=map&layer=1&head=0&i=3&j=2&type=true")
    before = page.wait_for_selector(".readout output").get_attribute("data-weight")
    page.locator("textarea").fill("One two three. One two three.")
    page.wait_for_function("() => /scene=(?!example&)/.test(location.hash)")
    page.wait_for_function("w => document.querySelector('.readout output')?.dataset.weight !== w", arg=before)
    name, i, j = (hash_of(page)[key] for key in ("scene", "i", "j"))
    part = {"rows": f"{i}:{int(i) + 1}", "cols": f"{j}:{int(j) + 1}"}
    seen = tab.viewer.answers.get(f"{name}/values/1/0", part).content
    page.wait_for_function(
        "w => Number(document.querySelector('.readout output')?.dataset.weight) === w", arg=float(seen[0, 0])
    )
    page.get_by_label("Causal").uncheck()
    page.wait_for_function("name => !location.hash.includes(name + '&')", arg=f"scene={name}")
    changed = tab.viewer.answers.scenes[hash_of(page)["scene"]].settings
    assert changed["causal"] is False
    for text in ("", "x" * 17_000):
        page.locator("textarea").fill(text)
        page.wait_for_selector(".editor .problem:not(:empty)")
        page.locator("textarea").fill("fine")
        page.wait_for_selector(".editor .problem", state="hidden")


def test_a_server_that_is_gone_is_said(tab: Tab) -> None:
    tab.expected = ("ERR_FAILED", "Failed to fetch")
    page = tab.open("view=map&i=20&j=3")
    page.wait_for_selector(".readout output")
    page.context.route("**/api/**", lambda route: route.abort())
    page.keyboard.press("7")
    page.wait_for_selector(".banner:visible")
    assert "does not answer" in page.locator(".banner").inner_text()
    page.context.unroute("**/api/**")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(READY["profiles"])
    assert page.locator(".banner").is_hidden()


def test_the_page_opens_on_a_finding(tab: Tab) -> None:
    page = tab.open("")
    page.wait_for_selector(READY["overview"])
    page.wait_for_selector(".overview .gridhead.current canvas")
    page.wait_for_selector(".overview .readout output")
    assert (hash_of(page)["layer"], hash_of(page)["head"]) == ("2", "2")
    told = tab.viewer.answers.get("example/claims/2").content["heads"][2]
    said = page.locator(".finding").inner_text()
    row = tab.viewer.answers.get("example/row/2/2/53").content
    key = int(np.nanargmax(row))
    assert said.startswith(f"L2 H2: {sentences.says(told)}")
    assert f"The last token, 53 “r”, looks most at {key} “i” (weight {weight_text(row[key])})" in said
    assert "which followed an earlier “·Otokar·Br”" in said
    assert "The model expects next: “i” 98.3%" in said
    assert page.locator(".readout output").get_attribute("data-weight") == str(float(row[key]))
    accessible(page)


@pytest.mark.parametrize("scene", ["example", "arrays-2", "arrays-4"])
def test_page_and_terminal_say_the_same(tab: Tab, scene: str) -> None:
    from regard.viewer.data.summary import look_data

    data = look_data(tab.viewer.answers.scenes[scene])
    page = tab.open(f"scene={scene}")
    first = data.choose()
    for layer, head in dict.fromkeys(((first.layer, first.head), (0, 0), (0, 1))):
        if (layer, head) != (first.layer, first.head):
            tab.turn(f"scene={scene}&layer={layer}&head={head}", READY["overview"])
        said = data.says(data.choose(layer, head))
        assert len(said) == (3 if scene == "example" else 2)
        page.wait_for_function(
            "text => document.querySelector('.finding')?.innerText.startsWith(text)", arg=said[0].removesuffix(".")
        )
        for sentence in said[1:]:
            page.wait_for_function("text => document.querySelector('.finding').innerText.includes(text)", arg=sentence)


def test_the_key_follows_the_head_unless_it_was_chosen(tab: Tab, arrays: dict[str, Any]) -> None:
    page = tab.open("view=map&scene=arrays&head=0&i=300")
    for head in (0, 1):
        largest = int(np.nanargmax(weights(arrays["arrays"], slice(300, 301))[head, 0]))
        page.wait_for_function(
            "key => document.querySelector('.readout')?.textContent.includes(`key ${key} `)", arg=str(largest)
        )
        assert "j" not in hash_of(page)
        page.keyboard.press("]")
    page = tab.open("view=map&scene=arrays&head=0&i=300&j=7")
    page.wait_for_selector(READY["map"])
    page.keyboard.press("]")
    page.wait_for_function("() => document.querySelector('.map-title').textContent.startsWith('L0 H1')")
    assert "key 7 " in page.locator(".readout").inner_text()


@pytest.mark.parametrize("tab", [DARK, PHONE], ids=["dark", "phone"], indirect=True)
def test_the_tour_is_walked(tab: Tab) -> None:
    page = tab.open("")
    page.wait_for_selector(READY["overview"])
    page.get_by_role("button", name="Take the tour").click()
    steps = tab.viewer.answers.get("example/tour").content["steps"]
    assert len(steps) == 8
    for number, step in enumerate(steps, 1):
        page.wait_for_function("title => document.querySelector('.tour h2')?.textContent === title", arg=step["title"])
        page.wait_for_selector(READY[step["state"]["view"]])
        at = hash_of(page)
        assert (at["tour"], at["layer"], at["head"]) == (
            str(number), str(step["state"]["layer"]), str(step["state"]["head"])
        )  # fmt: skip
        if step["settings"] is not None:
            assert tab.viewer.answers.scenes[at["scene"]].settings["causal"] is False
        accessible(page)
        page.keyboard.press("Enter")  # on "Next", and in the end on "Done"
    page.wait_for_selector(".tour", state="detached")
    page = tab.open("tour=3")  # each step is a link
    page.wait_for_function("title => document.querySelector('.tour h2')?.textContent === title", arg=steps[2]["title"])
    page.wait_for_selector(READY["overview"])
    page.keyboard.press("Escape")
    page.wait_for_selector(".tour", state="detached")


def test_scale_and_temperature_change_the_row(tab: Tab, arrays: dict[str, Any]) -> None:
    call = arrays["arrays-2"]
    page = tab.open("view=scale&scene=arrays-2&head=1&i=150")
    page.wait_for_selector(READY["scale"])

    def largest() -> list[float]:
        return [float(text.split()[2].rstrip(",")) for text in page.locator(".scale .told").all_inner_texts()]

    def expected(temperature: float) -> list[float]:
        return [
            float(
                regard.weights(
                    call["query"], call["key"], rows=slice(150, 151), mask=call["mask"], scale=scale / temperature
                )[1].max()
            )
            for scale in (call["query"].shape[-1] ** -0.5, 1.0)
        ]

    np.testing.assert_allclose(largest(), expected(1), atol=0.006)
    page.get_by_role("slider", name="Temperature").fill("1")
    np.testing.assert_allclose(largest(), expected(10), atol=0.006)
    page.get_by_label("Curves against").select_option("d")
    assert "random vectors" in page.locator(".scale svg").first.text_content()
    assert page.locator(".scale figure").count() == 4


def test_one_token_in_every_head(tab: Tab) -> None:
    page = tab.open("view=token&near=true&scene=example&i=53&layer=1&head=0")
    page.wait_for_selector(READY["token"])
    cells = page.locator(".one-token .cell small").all_inner_texts()
    answers = tab.viewer.answers
    rows = [answers.get(f"example/row/{layer}/{head}/53").content for layer in range(3) for head in range(4)]
    assert cells == [f"{np.nanargmax(row)} · {weight_text(np.nanmax(row))}" for row in rows]
    page.locator(".one-token .cell").nth(10).click()
    assert (hash_of(page)["layer"], hash_of(page)["head"]) == ("2", "2")
    page.locator(".one-token .token[data-token='20']").click()
    page.wait_for_function("() => location.hash.includes('i=20')")


@pytest.mark.parametrize("tab", [{}, PHONE], ids=["screen", "phone"], indirect=True)
def test_terms_are_explained(tab: Tab) -> None:
    page = tab.open("view=heads")
    term, meaning = page.locator(".said .term", has_text="query"), page.locator(".meaning:popover-open")
    term.focus()
    page.keyboard.press("Enter")
    meaning.wait_for()
    assert meaning.inner_text().endswith(" Plainly: what do I look for?")
    assert meaning.get_attribute("id") == term.get_attribute("aria-describedby")
    accessible(page)
    page.keyboard.press("Escape")
    meaning.wait_for(state="hidden")
    term.click()
    box, window = meaning.bounding_box(), page.viewport_size
    assert 0 <= box["x"] < box["x"] + box["width"] <= window["width"]
    assert term.bounding_box()["y"] + term.bounding_box()["height"] <= box["y"]
    page.mouse.click(window["width"] - 4, window["height"] - 4)
    meaning.wait_for(state="hidden")
    page.keyboard.press("?")
    glossary = page.locator("dialog .glossary")
    glossary.wait_for()
    for term in ("max pooling", "normalized entropy", "attention received", "induction", "n tokens back"):
        assert term in glossary.inner_text()
    accessible(page)


def test_links_to_what_is_not_there_lead_to_what_is(tab: Tab) -> None:
    page = tab.open("view=nowhere&scene=none&layer=99&head=-4&i=1e9&tone=loud")
    page.wait_for_selector(READY["overview"])
    assert (hash_of(page)["layer"], hash_of(page)["head"]) == ("2", "0")


def test_the_first_key_can_be_left_out(tab: Tab) -> None:
    page = tab.open("view=map&scene=arrays&scale=viridis&i=500&j=1")
    page.wait_for_selector(".readout output")
    page.locator(".stage").focus()
    page.keyboard.press("Enter")
    page.wait_for_timeout(400)
    for hide in (False, True):
        page.get_by_label("Hide the sink").set_checked(hide)
        page.wait_for_timeout(400)
        picture = picture_of(page)
        width = cell_width(page)
        first, second = (
            picture[int(picture.shape[0] / 2 + 2.36 * width), int(picture.shape[1] / 2 + (dj + 0.36) * width)]
            for dj in (-1, 0)
        )
        assert (first.tolist() == [255, 255, 255]) is hide
        assert second.tolist() != [255, 255, 255]
