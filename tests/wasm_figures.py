"""Figures of docs/lab/webassembly.md: python tests/wasm_figures.py

GFLOP/s of a causal call of 2 heads, d = 64, on one thread: of exported modules, of a plain loop in JavaScript, and of
the engine on this processor. All take turns, since a machine may be shared; the best of each counts.
"""

import base64
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import regard
from in_browser import FLAGS
from in_node import call
from regard.engines.cpu.target.instructions import targets

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
