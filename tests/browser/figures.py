"""How long `regard look` takes and what it needs, in a browser: a table for lab/viewer.md.

    python tests/browser/figures.py                                # the shipped model, 1,000, 10,000 and 100,000 tokens
    python tests/browser/figures.py --bertviz 128 256 512 --scripts FOLDER

Times are of the wall; CPU seconds of the server beside them, in brackets, say what they would be on a quiet machine.
BertViz's page asks a CDN for three scripts; FOLDER holds d3.min.js, jquery.min.js and require.min.js instead.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from in_browser import FLAGS, served, structured

PLACES = 8
FIRST_MS, RENDERED_MS = 120_000, 90_000


def cpu(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int, name: str = "VmHWM", file: str = "status") -> float:
    """MB of a process, at its peak unless another line of its file in /proc is named."""
    return int(re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/{file}").read_text(), re.M)[1]) / 1000  # type: ignore[index]


def renderers() -> set[int]:
    """The processes of Chromium that draw pages."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"--type=renderer" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue  # it has ended
    return found


def opened(browser: Any) -> tuple[Any, set[int]]:
    """A page of its own, and the processes that draw others."""
    before = renderers()
    page = browser.new_page(viewport={"width": 1280, "height": 720}, reduced_motion="reduce")
    page.set_default_timeout(FIRST_MS)
    page.add_init_script(WATCHED)
    return page, before


def drawn(others: set[int]) -> str:
    """Memory of the process that draws a page, the largest of those that are not others: Chromium keeps a spare one."""
    return f"{max(memory(pid, 'Pss', 'smaps_rollup') for pid in renderers() - others):.0f} MB"


def look(browser: Any, arguments: list[str]) -> dict[str, str]:
    """Start, first view, map and zoom."""
    mine: dict[str, str] = {}
    started = time.perf_counter()
    with served(*arguments) as (url, pid):

        def note(name: str, since: float = started, used: float = 0.0) -> None:
            mine[name] = f"{time.perf_counter() - since:.2f} s ({cpu(pid) - used:.2f})"

        note("start to the address")
        page, _ = opened(browser)
        page.goto(f"{url}#view=heads")
        page.wait_for_selector(".heads .card canvas")
        note("start to thumbnails")
        page.close()
        page, others = opened(browser)
        since, used = time.perf_counter(), cpu(pid)
        page.goto(f"{url}#view=map&layer=0&head=0")
        page.wait_for_selector(".readout output")
        note("link to a map: the chosen weight, exact", since, used)
        page.wait_for_function("() => !/computed, 0 %/.test(document.querySelector('.legend').innerText)")
        note("first pixels of all of it", since, used)
        page.wait_for_function("() => !document.querySelector('.legend').innerText.includes('computed')")
        note("all of it", since, used)
        mine["a zoom, p50; p95"] = "; ".join(f"{x:.0f}" for x in np.quantile(zooms(page), [0.5, 0.95])) + " ms"
        mine["memory of the server, peak"] = f"{memory(pid):.0f} MB"
        mine["memory of the page (PSS)"] = drawn(others)
    page.close()
    return mine


WATCHED = """
(() => {
    const ask = window.fetch;
    window.asking = { now: 0, last: 0 };
    window.fetch = async (...given) => {
        window.asking.now++;
        try {
            const answer = await ask(...given);
            const whole = await answer.arrayBuffer();
            return new Response(whole, { status: answer.status, headers: answer.headers });
        } finally {
            window.asking.now--;
            window.asking.last = performance.now();
        }
    };
})()
"""
ZOOMED = """
async key => {
    const frame = () => new Promise(requestAnimationFrame), began = performance.now();
    document.querySelector(".stage").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await frame();
    await frame();
    let end = performance.now(), quiet = end;
    while (window.asking.now || performance.now() - quiet < 80) {
        if (window.asking.now) quiet = performance.now();
        if (window.asking.last > end) end = window.asking.last;
        await frame();
    }
    return end - began;
}
"""


def zooms(page: Any) -> list[float]:
    """Milliseconds from a key to the arrival of the last tile that it asks for, two frames at least, at some places."""
    n = page.evaluate("async () => (await (await fetch('api/scenes')).json()).scenes[0].layers[0].n_q")
    rng, taken = np.random.default_rng(0), []
    for _ in range(PLACES):
        i = int(rng.integers(n // 2, n))
        page.evaluate("state => (location.hash = state)", f"view=map&layer=0&head=0&i={i}&j={int(rng.integers(0, i))}")
        page.wait_for_timeout(200)
        taken += [page.evaluate(ZOOMED, key) for key in ("Enter", *"-----++", "0")]
    return taken


def bertviz(browser: Any, n: int, scripts: Path) -> dict[str, str]:
    """The page that BertViz's head view makes of 12 layers of 12 heads, and whether it can be seen."""
    import torch
    from bertviz import head_view

    torch.manual_seed(0)
    hidden = ~torch.ones(n, n, dtype=torch.bool).tril()
    layers = [torch.softmax(torch.randn(1, 12, n, n).masked_fill(hidden, -torch.inf), -1) for _ in range(12)]
    since, used = time.perf_counter(), time.process_time()
    text = head_view(layers, [f"t{k}" for k in range(n)], html_action="return").data
    made = f"{time.perf_counter() - since:.1f} s ({time.process_time() - used:.1f})"
    page, others = opened(browser)

    def script(route: Any) -> None:
        name = route.request.url.rsplit("/", 1)[1]
        route.fulfill(body=(scripts / name).read_bytes(), content_type="text/javascript")

    page.route("https://cdnjs.cloudflare.com/**", script)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_text(text, "utf-8")
        mine = {"making the page": made, "size of the page": f"{file.stat().st_size / 1e6:.0f} MB"}
        since = time.perf_counter()
        try:
            page.goto(file.as_uri(), timeout=RENDERED_MS)
            page.wait_for_function("() => document.querySelectorAll('svg line').length > 0", timeout=RENDERED_MS)
            lines = page.evaluate("() => document.querySelectorAll('svg line').length")
            mine["opening it"] = f"{time.perf_counter() - since:.1f} s, {lines:,} lines"
            mine["memory of the page (PSS)"] = drawn(others)
        except Exception as error:
            mine["opening it"] = f"nothing drawn in {time.perf_counter() - since:.0f} s: {str(error).splitlines()[0]}"
        finally:
            page.close()
    return mine


def table(columns: dict[str, dict[str, str]]) -> str:
    """Columns as a table in Markdown."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [["", *columns], ["---"] * (1 + len(columns))]
    rows += [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1000, 10_000, 100_000])
    parser.add_argument("--bertviz", type=int, nargs="*", help="so many tokens in BertViz instead")
    parser.add_argument("--scripts", type=Path, default=Path("."))
    chosen = parser.parse_args()
    columns: dict[str, dict[str, str]] = {}
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        for n in chosen.bertviz or []:
            columns[f"{n:,} tokens"] = bertviz(browser, n, chosen.scripts)
        if chosen.bertviz is None:
            columns["shipped model"] = look(browser, [])
            for n in chosen.tokens:
                q, k, v, tokens = structured(n, 2, d=64)
                np.savez(Path(folder, "arrays.npz"), query=q, key=k, value=v, tokens=np.array(tokens))
                columns[f"{n:,} tokens"] = look(browser, ["--arrays", f"{folder}/arrays.npz", "--causal"])
        browser.close()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(table(columns))


if __name__ == "__main__":
    main()
