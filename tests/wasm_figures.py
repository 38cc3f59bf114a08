"""Figures of lab/webassembly.md: python tests/wasm_figures.py

GFLOP/s of a causal call of 2 heads, d = 64, on one thread: of exported modules, of a plain loop in JavaScript, and of
the engine on this processor. All take turns, since a machine may be shared; the best of each counts. Then milliseconds
of a map of 16,384 tokens, and of a typed text, in saved pages.
"""

import base64
import os
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import regard
from in_browser import FLAGS, READY
from in_node import call
from regard.engines.cpu.target.instructions import targets
from regard.examplemodel import ExampleModel
from regard.viewer.scene.sources import Settings, arrays, example
from regard.viewer.serve import built
from regard.viewer.serve.answers import Answers

HEADS, D, SECONDS, ROUNDS = 2, 64, 0.25, 16
SIZES = 256, 1024, 4096
LOOP = """(n, heads, d) => {
    const x = Float32Array.from({ length: heads * n * d }, () => Math.random() - 0.5);
    const out = new Float32Array(heads * n * d), weights = new Float32Array(n);
    return () => {
        for (let h = 0; h < heads; h++) for (let i = 0; i < n; i++) {
            const at = (h * n + i) * d;
            let most = -Infinity, total = 0;
            for (let j = 0; j <= i; j++) {
                let s = 0;
                for (let a = 0; a < d; a++) s += x[at + a] * x[(h * n + j) * d + a];
                weights[j] = s / Math.sqrt(d);
                most = Math.max(most, weights[j]);
            }
            for (let j = 0; j <= i; j++) total += weights[j] = Math.exp(weights[j] - most);
            out.fill(0, at, at + d);
            for (let j = 0; j <= i; j++) {
                for (let a = 0; a < d; a++) out[at + a] += weights[j] / total * x[(h * n + j) * d + a];
            }
        }
    };
}"""
MODULE = """async (n, heads, d, files) => {
    const [loader, module] = files.map((text) => Uint8Array.from(atob(text), (x) => x.charCodeAt(0)));
    const { load } = await import(URL.createObjectURL(new Blob([loader], { type: "text/javascript" })));
    const attention = await load(module);
    const x = Float32Array.from({ length: heads * n * d }, () => Math.random() - 0.5);
    return () => attention({ q: x, k: x, v: x, heads, d });
}"""
TIMED = """async ([n, heads, d, seconds, files]) => {
    const run = await (%s)(n, heads, d, files);
    let best = Infinity;
    for (const stop = performance.now() + 1000 * seconds; performance.now() < stop; ) {
        const begun = performance.now();
        run();
        best = Math.min(best, performance.now() - begun);
    }
    return best;
}"""

TOKENS = 16384
ASKED = """async ([source, data, ask]) => {
    const { FileSource } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    const file = await FileSource.of(data);
    const times = [];
    for (let n = 0; n < ask.rounds; n++) {
        const begun = performance.now();
        if (ask.text) {
            const settings = { text: ask.text.slice(0, 200 - n), temperature: 1, scaled: true, causal: true };
            const { scene } = await file.post("api/example/run", settings);
            await file.numbers(`api/${scene.id}/tile/2/2/0/0/0?kind=mass`);
        }
        await Promise.all((ask.tiles ?? []).map((tile) => file.numbers(tile)));
        times.push(performance.now() - begun);
    }
    return Math.min(...times);
}"""


def native(target: str, n: int) -> float:
    os.environ["REGARD_CPU"] = target
    x = np.random.default_rng(0).standard_normal((HEADS, n, D), dtype=np.float32)
    best, stop = np.inf, time.perf_counter() + SECONDS
    while time.perf_counter() < stop:
        begun = time.perf_counter()
        regard.attention(x, x, x, causal=True, engine="cpu")
        best = min(best, time.perf_counter() - begun)
    return 1000 * best


def in_node(path: Path, n: int) -> float:
    x = np.random.default_rng(0).standard_normal((HEADS, n, D), dtype=np.float32)
    milliseconds: float = call(path, [{"q": x, "k": x, "v": x, "heads": HEADS, "d": D}], SECONDS)[0]["milliseconds"]
    return milliseconds


def in_chromium(page: Any, path: Path | None, n: int) -> float:
    files = [] if path is None else [path.with_suffix(".js"), path]
    texts = [base64.b64encode(x.read_bytes()).decode() for x in files]
    script = TIMED % (LOOP if path is None else MODULE)
    milliseconds: float = page.evaluate(script, [n, HEADS, D, SECONDS, texts])
    return milliseconds


def of_saved_pages(page: Any) -> None:
    """Milliseconds of a map of many tokens and of a typed text, in saved pages."""

    def asked(html: str, **ask: Any) -> float:
        data = re.search(r'id="regard-data">(.*?)</script>', html, re.DOTALL)
        assert data is not None
        milliseconds: float = page.evaluate(ASKED, [built.page()["page.js"], data[1], ask])
        return milliseconds

    demo = Answers([example(Settings())], patience=None).page("example", model=ExampleModel.load())
    print("saved with the model", len(demo.encode()), "bytes; 200 bytes of text:", end=" ")
    print(f"{asked(demo, text='The cat sat on the mat, and the dog ran to the red house. ' * 4, rounds=24):.0f} ms")
    q, k = np.random.default_rng(0).standard_normal((2, 1, TOKENS, D), dtype=np.float32)
    for name, rules in {"causal": {"causal": True}, "window": {"mask": regard.window(1024)}}.items():
        html = Answers([arrays(q, k, **rules)], patience=None).page("arrays")
        level, across = 3, TOKENS // 2048
        tiles = [f"api/arrays/tile/0/0/{level}/{x}/{y}?kind=mass" for y in range(across) for x in range(across)]
        seconds = asked(html, tiles=tiles, rounds=2) / 1000
        print(f"map of {TOKENS} tokens, {name}, level {level}: {seconds:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file, times = Path(folder) / "demo.html", []
        file.write_text(demo, "utf-8")
        opened = page.context.browser.new_page()  # the file's policy would forbid what is measured next
        for _ in range(8):
            opened.goto("about:blank")
            begun = time.perf_counter()
            opened.goto(file.as_uri())
            opened.wait_for_selector(READY["overview"])
            times.append(1000 * (time.perf_counter() - begun))
        opened.close()
    print(f"first picture from disk: {min(times):.0f} ms", flush=True)


def main() -> None:
    from playwright.sync_api import sync_playwright

    regard.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        paths = {
            name: regard.export_wasm(Path(folder) / name, causal=True, relaxed=name == "relaxed")
            for name in ("plain", "relaxed")
        }
        for path in paths.values():
            print(path.name, path.stat().st_size, "bytes; loader", path.with_suffix(".js").stat().st_size)
        page = driver.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS)).new_page()
        page.set_content("<!doctype html><title>figures</title>")
        of_saved_pages(page)
        runs: dict[str, Callable[[int], float]] = {
            f"native {name}": partial(native, name) for name in ("baseline", "avx2") if targets()[name].runs
        }
        for name, path in paths.items():
            runs |= {f"Node.js {name}": partial(in_node, path), f"Chromium {name}": partial(in_chromium, page, path)}
        runs["loop in Chromium"] = partial(in_chromium, page, None)
        for n in SIZES:
            times = dict.fromkeys(runs, np.inf)
            for _ in range(ROUNDS):
                times = {name: min(best, runs[name](n)) for name, best in times.items()}
            work = 4 * HEADS * n * (n + 1) / 2 * D / 1e6
            print(n, ", ".join(f"{name} {work / ms:.1f}" for name, ms in times.items()), flush=True)


if __name__ == "__main__":
    main()
