"""Exported attention in a browser: bits of the baseline target under a strict policy, and what is said if it fails."""

import shutil
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
import wasm_cases
from cases import CASES
from in_node import decoded, encoded
from regard.engines.cpu.target.instructions import targets

EXAMPLE = Path(__file__).parents[2] / "examples" / "web"
POLICY = "default-src 'none'; script-src 'self'{}; connect-src 'self'"
CALL = """async ({arrays, call}) => {
    const { load } = await import("/recent.js");
    const given = Object.fromEntries(Object.entries(arrays).map(([name, x]) => [name, Float32Array.from(x)]));
    const { out, lse } = (await load("/recent.wasm"))({ ...given, ...call });
    return { out: [...new Uint32Array(out.buffer)], lse: [...new Uint32Array(lse.buffer)] };
}"""
LOAD = """async () => {
    const { load } = await import("/recent.js");
    return load("/recent.wasm").then(() => "loaded", (error) => error.message);
}"""


EXPORTED = """async ([script, loader, module, calls]) => {
    const modules = [script, loader].map((text) => URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
    const [{ results, bytes }, { load }] = await Promise.all(modules.map((url) => import(url)));
    return results(await load(bytes(module)), calls);
}"""


def test_exports_give_the_bits_of_the_baseline_in_chromium(
    browser: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table of cases in one tab: outputs, statistics, sums over queries, and maps of a head."""
    if not targets()["baseline"].runs:
        pytest.skip("the baseline target is one of x86-64")
    monkeypatch.setenv("REGARD_CPU", "baseline")
    context = browser.new_context()
    tab = context.new_page()
    script = (Path(__file__).parents[1] / "exported_calls.mjs").read_text("utf-8")
    for case in CASES:
        if case.name in wasm_cases.REFUSED:
            continue
        p = wasm_cases.problem_of(case)
        path = regard.export_wasm(tmp_path / "case", **wasm_cases.export_options(p))
        module, loader = b64encode(path.read_bytes()).decode(), path.with_suffix(".js").read_text("utf-8")
        given = [script, loader, module, encoded(wasm_cases.calls_of(p))]
        wasm_cases.check(p, decoded(tab.evaluate(EXPORTED, given)))
    context.close()


class Plain(SimpleHTTPRequestHandler):
    """A server of files with a policy."""

    policy = ""

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", self.policy)
        super().end_headers()

    def log_message(self, *args: Any) -> None: ...


class Strict(Plain):
    policy = POLICY.format(" 'wasm-unsafe-eval'")


class Forbidding(Plain):
    policy = POLICY.format("")


def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j <= i) & ((i - j < 100) | (j % 7 == h))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("webassembly")
    regard.export_wasm(made / "recent", mask=rule, score=regard.softcap(3.0))
    (made / "index.html").write_text("<!doctype html><title>attention</title>")
    return made


@contextmanager
def served(handler: type[Plain], folder: Path, browser: Any) -> Iterator[Any]:
    """A tab with a folder's page."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        context = browser.new_context()
        made = context.new_page()
        made.goto(f"http://127.0.0.1:{server.server_address[1]}/index.html")
        yield made
        context.close()
        server.shutdown()
        thread.join(10)


@pytest.fixture
def page(browser: Any, folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    with served(getattr(request, "param", Strict), folder, browser) as made:
        yield made


def test_bits_in_a_browser(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not targets()["baseline"].runs:
        pytest.skip("the baseline target is one of x86-64")
    monkeypatch.setenv("REGARD_CPU", "baseline")
    for n_q, heads in ((300, 2), (1, 4)):
        rng = np.random.default_rng(n_q)
        q, k, v = (rng.standard_normal((h, n, 24), dtype=np.float32) for h, n in ((heads, n_q), (2, 300), (2, 300)))
        arrays = {name: x.reshape(-1).tolist() for name, x in (("q", q), ("k", k), ("v", v))}
        got = page.evaluate(CALL, {"arrays": arrays, "call": {"heads": heads, "kvHeads": 2, "d": 24}})
        out, seen = regard.attention(q, k, v, mask=rule, score=regard.softcap(3.0), observe=["lse"], engine="cpu")
        for name, expected in (("out", out), ("lse", seen.lse)):
            np.testing.assert_array_equal(np.array(got[name], np.uint32), expected.reshape(-1).view(np.uint32), name)


@pytest.mark.parametrize("page", [Forbidding], indirect=True)
def test_a_policy_without_webassembly(page: Any) -> None:
    assert page.evaluate(LOAD).startswith("this browser does not take the module: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("() => { delete globalThis.WebAssembly }", "attention needs WebAssembly, which this browser lacks or forbids"),
        ("() => { WebAssembly.validate = () => false }",
         "attention needs WebAssembly with SIMD, which this browser lacks"),
        ("() => { globalThis.fetch = async () => new Response('', { status: 404, statusText: 'gone' }) }",
         " could not be read: 404 gone"),
        ("() => { WebAssembly.Memory.prototype.grow = () => { throw new RangeError() } }", "loaded"),
    ],
)  # fmt: skip
def test_what_a_browser_lacks(page: Any, change: str, message: str) -> None:
    page.evaluate(change)
    assert page.evaluate(LOAD) == message


def test_the_example(browser: Any, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "web", ignore=shutil.ignore_patterns("bars.*"))
    subprocess.run([sys.executable, str(tmp_path / "web" / "make.py")], check=True)
    with served(Plain, tmp_path / "web", browser) as page:
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.reload()
        page.wait_for_selector("figure:nth-of-type(4) canvas")
        page.fill("#text", "hello")
        assert page.evaluate("document.querySelector('canvas').width") == 5
        page.click("#measure")
        page.wait_for_function("document.getElementById('report').textContent.endsWith('ms')")
        assert complaints == []


def test_memory_that_a_page_may_not_have(page: Any) -> None:
    page.evaluate("() => { WebAssembly.Memory.prototype.grow = () => { throw new RangeError() } }")
    check = """async () => {
        const attention = await (await import("/recent.js")).load("/recent.wasm");
        const x = new Float32Array(64 * 20000);
        try { attention({ q: x, k: x, v: x, d: 64 }) } catch (error) { return `${error.name}: ${error.message}` }
    }"""
    said = page.evaluate(check)
    assert said.startswith("RangeError: this call of attention takes ")
    assert said.endswith(" MiB, more than this page may have")
