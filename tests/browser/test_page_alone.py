"""The page without a server: from a file on disk, and in a notebook."""

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from in_browser import READY, Tab, weights
from in_node import native_maps
from regard.engines.cpu.target.instructions import targets


@pytest.mark.parametrize("scene", ["arrays", "arrays-2", "example"])
def test_a_saved_page_opens_from_disk(tab: Tab, arrays: dict[str, Any], tmp_path: Path, scene: str) -> None:
    from regard.viewer.serve.answers import Answers

    file = tmp_path / "saved page.html"
    mine = Answers(tab.viewer.answers.scenes.values(), patience=None)
    file.write_text(mine.page(scene), "utf-8")
    mine.close()
    tab.open("view=heads", file.as_uri())
    for view, sign in READY.items():
        without_model = view == "ablation"  # no head can be switched off, but its values are there
        page = tab.turn(f"view={view}&i=40&j=37", f".{view} .empty:not(:empty)" if without_model else sign)
        if without_model:
            assert "No head can be switched off here." in page.locator(".ablation .empty").inner_text()
        assert page.locator(".banner").is_hidden(), page.locator(".banner").inner_text()
        if view == "steps":
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
        np.testing.assert_allclose(shown, expected, rtol=1e-4)
        page.locator(".stage").focus()
        for _ in range(2):
            page.keyboard.press("Shift+ArrowRight")
        page.wait_for_selector(".readout output[data-weight='NaN']")  # query 250 does not see key 260
        page.keyboard.press("Enter")
        page.wait_for_timeout(500)
        assert page.locator(".banner").is_hidden()
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in tab.asked)


def test_a_saved_page_with_a_model_reads_what_is_typed(tab: Tab, tmp_path: Path) -> None:
    file = tmp_path / "demo.html"
    regard.look(text="to be or not to be", save=file, with_model=True)
    assert file.stat().st_size < 3_000_000
    page = tab.open("view=overview", file.as_uri())
    page.get_by_role("button", name="Type your own text").click()
    page.get_by_role("textbox", name="Your text").fill("Dr. Zavrel met Otokar Brix. Nobody knew why Otokar Br")
    page.locator(".following", has_text="next: i 98 %").wait_for()
    for view, sign in READY.items():
        page.locator(f"nav [data-view={view}]").click()
        page.wait_for_selector(sign)
        assert page.locator(".banner").is_hidden(), page.locator(".banner").inner_text()
    page.locator("nav [data-view=map]").click()
    hash = re.sub(r"&?\b(i|j)=\d+", "", page.evaluate("location.hash"))
    page = tab.turn(f"{hash}&i=10&j=40", READY["map"])
    page.wait_for_selector(".readout output[data-weight='NaN']")
    page.get_by_label("Causal").uncheck()
    page.wait_for_selector(".readout output:not([data-weight='NaN'])")
    page.get_by_role("textbox", name="Your text").fill("x" * 1024)
    page.locator(".editor .problem", has_text="at most 1,024").wait_for()
    tab.page.reload()  # the address holds the text
    page.wait_for_selector(READY["map"])
    assert page.locator(".readout output").get_attribute("data-weight") != "NaN"
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in tab.asked)


WATCHED = """
window.asked = [];
window.Worker = class extends Worker {
    constructor(...given) {
        super(...given);
        const keep = ({ data }) => asked.find(({ id }) => id === data.id).found = structuredClone(data);
        this.addEventListener("message", keep);
    }
    postMessage(order) {
        if (order.what === "maps") asked.push({ id: order.id, head: order.head, rows: order.rows, cols: order.cols });
        super.postMessage(order);
    }
};
"""


REFUSED = "delete window.WebAssembly; window.Worker = class { constructor() { throw Error('no') } }"

ANSWERED = """async ([source, data, text, paths]) => {
    const { FileSource } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    const file = await FileSource.of(data);
    const settings = { text, temperature: 0.7, scaled: true, causal: true };
    const found = text ? { run: (await file.post("api/example/run", settings)).scene } : {};
    for (const path of paths) {
        const numbers = /\\/(row|column|tile|thumbs|values|scores|dots|norms)\\//.test(path);
        const asked = `api/${path}`;
        found[path] = numbers ? [...new Uint8Array((await file.numbers(asked)).data)] : await file.json(asked);
    }
    return found;
}"""


def near(got: Any, wanted: Any, where: str) -> None:
    """Compare JSON: numbers to four digits."""
    if isinstance(wanted, dict):
        wanted = {name: x for name, x in wanted.items() if name != "rotary" or x}  # left out where it is 0
        assert got.keys() == wanted.keys(), where
        for name, x in wanted.items():
            near(got[name], x, f"{where} {name}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), where
        for n, x in enumerate(wanted):
            near(got[n], x, f"{where} {n}")
    elif isinstance(wanted, float):
        assert abs(got - wanted) <= 1e-4 * abs(wanted) + 2e-5, where  # of many thousands
    else:
        assert got == wanted, where


@pytest.mark.parametrize("webassembly", ["", "delete window.WebAssembly"], ids=["webassembly", "none"])
def test_a_saved_page_with_a_model_answers_as_the_server(tab: Tab, webassembly: str) -> None:
    from regard.examplemodel import ExampleModel
    from regard.viewer.scene.sources import Settings, example
    from regard.viewer.serve import built
    from regard.viewer.serve.answers import Answers

    text = "Né Zavrel met Otokar Brix.\nNobody knew why Né Zavrel met Ot"
    server = Answers([example(Settings("to be or not to be"))], patience=None)
    html = server.page("example", model=ExampleModel.load())
    data = re.search(r'id="regard-data">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    run = server.post("example/run", {"text": text, "temperature": 0.7, "scaled": True, "causal": True}).content
    assert isinstance(run, dict)
    head = "example-2/{}/1/3"
    paths = [
        *(f"example-2/{what}" for what in ("tokens?axis=key&start=0&stop=4096", "heads", "finding", "token/40")),
        *(f"example-2/{what}" for what in ("ablations?how=mean", "ablation/1/0?how=zero&i=50")),
        "example-2/earlier/2/2/50/8", "example-2/claims/1", "example-2/claims/2", "example-2/thumbs/1?size=64&kind=max",
        *(head.format(what) for what in ("map", "profiles", "matrices", "norms")),
        *(f"{head.format(what)}/{more}" for what, more in (("step", "50/8"), ("row", "40"), ("column", "8"))),
        f"{head.format('tile')}/0/0/0?kind=mass", f"{head.format('dots')}?rows=0:9&cols=0:20",
        "example/ablations?how=zero",
        f"{head.format('scores')}/44", "example/matrices/0/1",
    ]  # fmt: skip
    tab.page.set_content("<!doctype html><title>a page</title>")
    tab.page.evaluate(webassembly)
    found = tab.page.evaluate(ANSWERED, [built.page()["page.js"], data[1], text, paths])
    near(found["run"], run["scene"], "scene")
    for path in paths:
        as_answered(found[path], server, path)


def as_answered(found: Any, server: Any, path: str) -> None:
    """Compare an answer of a saved page with that of the server."""
    bare, _, query = path.partition("?")
    wanted = server.get(bare, dict(part.split("=") for part in query.split("&") if part)).content
    if isinstance(wanted, dict):
        near(found, wanted, path)
    else:
        got = np.frombuffer(bytes(found), wanted.dtype).reshape(wanted.shape)
        digits = {"rtol": 2**-9, "atol": 1e-3} if wanted.dtype == np.float16 else {"rtol": 1e-4, "atol": 2e-5}
        np.testing.assert_allclose(got, wanted, err_msg=path, **digits)


STEPPED: dict[str, dict[str, Any]] = {
    "window": {"mask": regard.window(9, 2)},
    "documents": {"mask": regard.documents(np.arange(40) // 11), "causal": True, "sink": np.array([0.5, -0.5])},
    "alibi": {"score": regard.alibi([0.5, 0.25]), "causal": True},
    "softcap": {"score": [regard.softcap(2.0), regard.temperature(0.7)], "offset": 3},
    "hiding": {"score": lambda s, b, h, i, j: regard.where(i >= j, s, -np.inf)},
}


@pytest.mark.parametrize("rules", STEPPED)
def test_a_saved_page_shows_the_steps_of_any_rule(tab: Tab, rules: str) -> None:
    from regard.viewer.scene.sources import arrays
    from regard.viewer.serve import built
    from regard.viewer.serve.answers import Answers

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8), dtype=np.float32)
    server = Answers([arrays(q, k, v, **STEPPED[rules])], patience=None)
    data = re.search(r'id="regard-data">(.*?)</script>', server.page("arrays"), re.DOTALL)
    assert data is not None
    paths = ["step/0/1/20/15", "step/0/1/3/30", "matrices/0/1", "scores/0/0/7", "dots/0/1?rows=0:9&cols=5:20"]
    paths = [f"arrays/{path}" for path in paths]
    tab.page.set_content("<!doctype html><title>a page</title>")
    found = tab.page.evaluate(ANSWERED, [built.page()["page.js"], data[1], "", paths])
    for path in paths:
        as_answered(found[path], server, path)


def saved(tab: Tab, scene: str, folder: Path) -> Path:
    from regard.viewer.serve.answers import Answers

    file, mine = folder / "saved.html", Answers([tab.viewer.answers.scenes[scene]], patience=None)
    file.write_text(mine.page(next(iter(mine.scenes))), "utf-8")
    mine.close()
    return file


def settled(page: Any) -> None:
    """Wait until the worker has answered all that it was asked, for half a second."""
    calm = 0
    for _ in range(200):  # a page like this evaluates no text, as `wait_for_function` would have it do
        calm = calm + 1 if page.evaluate("asked.length > 2 && asked.every(({ found }) => found)") else 0
        if calm == 5:
            return
        page.wait_for_timeout(100)


def has_the_bits(page: Any, scene: Any, name: str) -> None:
    """Compare what the worker answered about heads of this name with the engine: tiles, rows, columns and weights."""
    settled(page)
    found = page.evaluate(
        """name => asked.filter(({ head }) => head.includes(name)).map(({ found: { mass, max, seen }, ...order }) =>
        ({ ...order, mass: [...mass], max: [...max], seen: [...seen] }))""",
        name,
    )
    assert {len(one["rows"]) for one in found} & {2, 257}
    for one in found:
        layer, number = map(int, re.findall(r"/(\d+)", one["head"]))
        head = scene.layers[layer].head(number)
        rows, cols = np.array(one["rows"]), np.array(one["cols"])
        expected = native_maps(head.problem, head.lse.astype(np.float32), rows, cols)
        for name, x in expected.items():
            np.testing.assert_array_equal(np.array(one[name], x.dtype), x.reshape(-1), err_msg=name)


@pytest.mark.parametrize("scene", ["arrays", "arrays-2"])
def test_a_saved_page_has_the_bits_of_the_engine(
    tab: Tab, tmp_path: Path, scene: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of every level, rows, columns and single weights, from the worker's answers."""
    if not targets()["baseline"].runs:
        pytest.skip("the baseline target is one of x86-64")
    monkeypatch.setenv("REGARD_CPU", "baseline")
    tab.page.add_init_script(WATCHED)
    page = tab.open("view=map&i=250&j=240&layer=0&head=1", saved(tab, scene, tmp_path).as_uri())
    page.wait_for_selector(READY["map"])
    tab.turn("view=text&i=200", READY["text"])
    has_the_bits(page, tab.viewer.answers.scenes[scene], "arrays/")
    assert page.locator(".banner").is_hidden()


def test_a_saved_page_without_webassembly(tab: Tab, arrays: dict[str, Any], tmp_path: Path) -> None:
    tab.page.add_init_script(REFUSED)
    page = tab.open("view=map&i=250&j=240&layer=0&head=1", saved(tab, "arrays", tmp_path).as_uri())
    shown = float(page.wait_for_selector(READY["map"]).get_attribute("data-weight"))
    expected = weights(arrays["arrays"], slice(250, 251), slice(240, 241))[1, 0, 0]
    np.testing.assert_allclose(shown, expected, rtol=1e-5)
    page = tab.open("view=map&i=250&j=240&layer=0&head=1", saved(tab, "arrays-2", tmp_path).as_uri())
    page.wait_for_selector(".banner:not([hidden])")
    assert "The weights of this head need WebAssembly, for its rules: no." in page.locator(".banner").inner_text()


NOTEBOOK = """async source => {
    const listeners = new Set();
    window.silent = false;
    const model = {
        get: name => name === "still" ? "picture" : undefined,
        on: (_, listener) => listeners.add(listener),
        off: (_, listener) => listeners.delete(listener),
        send: async message => {
            if (window.silent) return;
            const { content, buffers } = await ask(message);
            const views = buffers.map(b => new DataView(Uint8Array.from(atob(b), c => c.charCodeAt(0)).buffer));
            for (const listener of listeners) listener(content, views);
        },
    };
    const widget = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    const el = document.body.appendChild(document.createElement("div"));
    window.leave = widget.default.render({ model, el });
    window.listeners = listeners;
}"""


def notebook(tab: Tab, before: str) -> set[str]:
    """Show the widget of all scenes in a page, and return what it asks of its kernel, as a set that grows."""
    from regard.viewer.serve import built
    from regard.viewer.serve.notebook import answered

    page, questions = tab.page, set[str]()
    page.set_content("<!doctype html><html lang='en'><title>a notebook</title><img data-regard-still='picture'>")
    page.evaluate(f"() => {{ {before} }}")

    def ask(message: dict[str, Any]) -> dict[str, Any]:
        questions.add(message.get("path", "").removeprefix("api/"))
        content, buffers = answered(tab.viewer.answers, message)
        return {"content": content, "buffers": [base64.b64encode(b).decode() for b in buffers]}

    page.expose_function("ask", ask)
    page.add_style_tag(content=built.page()["page.css"])
    page.evaluate(NOTEBOOK, built.page()["page.js"])
    page.wait_for_selector(READY["overview"])
    assert page.evaluate("document.querySelector('[data-regard-still]').hidden")  # it is for where no kernel answers
    return questions


def shown_in(page: Any, scene: str) -> str:
    """Open a scene's map, and return the weight that is told."""
    page.get_by_label("Text", exact=True).select_option(scene)
    page.get_by_role("button", name="Map", exact=True).click()
    page.wait_for_selector(READY["map"])
    return str(page.locator(".map .readout output").get_attribute("data-weight"))


def of_weights(questions: set[str], scene: str) -> set[str]:
    """Return the questions about weights that a page may compute."""
    return {x for x in questions if re.match(rf"{scene}/(tile|row|column|values|dots)/", x)}


@pytest.mark.parametrize("scene", ["arrays", "arrays-2"])
def test_a_notebook_has_the_bits_of_the_engine(tab: Tab, scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are computed in the page from queries and keys, also while the kernel runs a cell."""
    if not targets()["baseline"].runs:
        pytest.skip("the baseline target is one of x86-64")
    monkeypatch.setenv("REGARD_CPU", "baseline")
    page = tab.page
    questions = notebook(tab, WATCHED)
    settled(page)
    shown_in(page, scene)
    has_the_bits(page, tab.viewer.answers.scenes[scene], f"/{scene}/")
    page.evaluate("silent = true")
    before = page.locator(".readout").inner_text()
    page.locator(".stage").focus()
    page.keyboard.press("Shift+ArrowUp")
    page.wait_for_function("before => document.querySelector('.readout').innerText !== before", arg=before)
    assert of_weights(questions, scene) == set()
    assert page.locator(".banner").is_hidden()
    settled(page)
    assert page.evaluate("location.hash") == ""  # the notebook's address is not ours
    page.evaluate("leave()")
    assert page.evaluate("listeners.size") == 0


def test_a_notebook_without_webassembly(tab: Tab, arrays: dict[str, Any]) -> None:
    """A loop computes plain heads, and the kernel those with other rules; long maps are the kernel's too."""
    page = tab.page
    questions = notebook(tab, REFUSED)
    shown = shown_in(page, "arrays")
    head = int(page.get_by_label("Head", exact=True).input_value())
    last = len(arrays["arrays"]["tokens"]) - 1
    expected = weights(arrays["arrays"], slice(last, last + 1), slice(0, last + 1))[head].max()
    np.testing.assert_allclose(float(shown), expected, rtol=1e-5)
    assert of_weights(questions, "arrays") == set()
    for scene in ("arrays-2", "arrays-3"):
        shown_in(page, scene)
        for _ in range(80):  # the last scene's weight may still be there
            if of_weights(questions, scene):
                break
            page.wait_for_timeout(100)
        assert of_weights(questions, scene)
    assert page.locator(".banner").is_hidden()
