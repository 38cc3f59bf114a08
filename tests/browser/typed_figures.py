"""How long a model of one's own takes to read what is typed, and what it needs: figures for lab/viewer.md.

    python tests/browser/typed_figures.py MODEL            # a folder of transformers; SmolLM2-135M there

Times are of the wall, the least and the median of some tries. Memory is what the server has beside a process that loads
the same model and runs it once on the same text.
"""

import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from browser.figures import memory
from in_browser import FLAGS, served

WORDS = "the old red house on the hill was sold to a man who knew that nobody had ever lived there before him and so"
TRIES = 5

SHOWN = """was => {
    const view = document.querySelector("main .view:not(.stale)"), map = view?.querySelector(".deepmap");
    return location.hash.match(/scene=[^&]*/)?.[0] !== was && !document.querySelector("main .stale")
        && map && [...map.querySelectorAll("[role=status], .waiting")].every(x => x.hidden || !x.textContent);
}"""

ALONE = """
import sys, torch, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    model(**tokenizer(sys.argv[2], return_tensors="pt"))
print(open("/proc/self/status").read())
"""


def asked(url: str, path: str, body: Any = None) -> Any:
    """An answer of the server, asked again while it is computed."""
    home = "/".join(url.split("/")[:3])
    headers = {"Content-Type": "application/json", "Origin": home}
    data = None if body is None else json.dumps(body).encode()
    while True:
        with urllib.request.urlopen(urllib.request.Request(f"{url}api/{path}", data, headers)) as answer:
            if answer.status != 202:
                return json.load(answer)
        time.sleep(0.05)


def said(times: list[float]) -> str:
    return f"{min(times):.2f} s, median {statistics.median(times):.2f}"


def typed(url: str) -> list[float]:
    """Seconds from the last key to the new map of a text of some 40 tokens, and the pause among them."""
    from playwright.sync_api import sync_playwright

    times = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 720}, reduced_motion="reduce")
        page.goto(f"{url}#view=overview&type=true")
        text = page.locator(".editor textarea")
        text.wait_for()
        text.fill(f"{WORDS} {WORDS[:50]}")
        page.wait_for_timeout(4000)
        for n in range(TRIES):
            was = page.evaluate("() => location.hash.match(/scene=[^&]*/)?.[0]")
            text.press("End")
            started = time.perf_counter()
            text.press_sequentially("abcdefgh"[n])
            page.wait_for_function(SHOWN, arg=was, polling="raf")
            times.append(time.perf_counter() - started)
            page.wait_for_timeout(3000)  # what is measured of all heads comes after the map
        browser.close()
    return times


def run(url: str, text: str) -> float:
    started = time.perf_counter()
    asked(url, "model/run", {"text": text})
    return time.perf_counter() - started


def losses(url: str) -> float:
    """Seconds until the losses without each head are known."""
    started = time.perf_counter()
    while asked(url, "model/ablations?how=zero")["done"] < 1:
        time.sleep(0.2)
    return time.perf_counter() - started


def main() -> None:
    (model,) = sys.argv[1:]
    text = f"{WORDS} {WORDS[:50]}"
    with served("--model", model, "--text", text) as (url, pid):
        tokens = asked(url, "scenes")["scenes"][0]["n_tokens"]
        print(f"{tokens} tokens: typed, from a key to the new map, a pause of 0.25 s among it: {said(typed(url))}")
        alone = [run(url, f"{text} {n}") for n in range(TRIES)]
        asked(url, "model/ablations?how=mean")  # which goes on in the background
        meanwhile = [run(url, f"{text} {n}!") for n in range(3)]
        print(f"a run alone: {said(alone)}; while losses are computed: {said(meanwhile)}")
        print(f"losses without each head: {losses(url):.1f} s")
        own = memory(pid)
    command = [sys.executable, "-c", ALONE, model, text]
    status = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak = int(re.search(r"^VmHWM:\s+(\d+)", status, re.M)[1]) / 1000  # type: ignore[index]
    print(f"memory: {own:.0f} MB, {own - peak:.0f} more than the model alone ({peak:.0f})")


if __name__ == "__main__":
    main()
