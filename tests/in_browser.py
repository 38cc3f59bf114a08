"""What tests in a browser share: a watched tab, calls to look at, and what `regard` says of them."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import regard
from regard.viewer.scene.sources import SENTENCE

AXE = Path(__file__).parents[1] / "page" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--allow-file-access-from-files",
)  # fmt: skip
OWN = ("data:", "blob:", "about:", "file:")
LATE = "Ignoring tile %s loaded before reset"  # OpenSeadragon says so of a picture that was left meanwhile
DIGIT = Path(__file__).parents[1] / "docs" / "pictures" / "digit.safetensors"
"""The capture of a digit on a photograph: 4 layers of 4 heads, a class token and 6 × 6 patches."""

# What is there when a view of a text is, and the view that only pictures have.
READY = {
    "overview": ".overview .token-row .shares li",
    "heads": ".heads .card canvas",
    "map": ".map .readout output",
    "text": ".text .strongest li",
    "token": ".one-token .cell",
    "compare": ".compare .readout output",
    "profiles": ".profiles .uplot canvas",
    "scale": ".scale .pair .bars span",
    "steps": ".steps .stage-card .katex",
    "ablation": ".ablation .effect",
    "arcs": ".arcs svg .arc",
}
READY_PICTURE = {"picture&scene=capture": ".on-picture .heats .thumb canvas"}


def structured(n: int, heads: int, seed: int = 0, d: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Queries, keys and values whose maps have something to see, and words."""
    rng = np.random.default_rng(seed)
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "the",
        "mat",
        "and",
        "then",
        "a",
        "dog",
        "ran",
        "to",
        "the",
        "old",
        "red",
        "house",
    ]
    tokens = [words[k % len(words)] + ("\n" if k % 23 == 22 else " ") for k in range(n)]
    known = {word: rng.standard_normal(d) for word in sorted(set(tokens))}
    x = np.array([known[token] for token in tokens])
    angle = np.arange(n)[:, None] / 10 ** (np.arange(d // 2) / (d / 16 * 3))
    place = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)
    q = np.stack([x + h * np.roll(place, h, axis=0) for h in range(heads)]).astype(np.float32)
    k = np.stack([x + h * place for h in range(heads)]).astype(np.float32)
    return q, k, rng.standard_normal(k.shape).astype(np.float32), tokens


def weights(call: dict[str, Any], rows: slice = slice(None), cols: slice = slice(None)) -> np.ndarray:
    """What `regard.weights` says of the heads of a call, one by one as the page shows them: (heads, rows, cols)."""
    options = {name: call[name] for name in ("causal", "mask") if name in call}
    query, key = call["query"], call["key"]
    heads = zip(query, np.repeat(key, len(query) // len(key), axis=0), strict=True)
    return np.stack([regard.weights(q, k, rows=rows, cols=cols, **options) for q, k in heads])


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, int]]:
    """Yield the address of `regard look`, by default on the example model's text, and its process, meanwhile."""
    run = "from regard.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", run, "look", "--no-open", *(arguments or [SENTENCE])]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1], server.pid
    finally:
        server.terminate()
        server.wait()


@contextmanager
def serving(scenes: Iterable[Any]) -> Iterator[Any]:
    """Serve scenes as `regard look` does, in a thread."""
    from regard.viewer.serve.answers import Answers
    from regard.viewer.serve.server import Viewer, bound

    with bound() as home:
        viewer = Viewer(Answers(scenes), home)
    thread = threading.Thread(target=viewer.run, daemon=True)
    thread.start()
    yield viewer
    viewer.close()
    thread.join(10)


class Tab:
    """A page of the browser, with what it asked for and what it complained about."""

    def __init__(self, page: Any, viewer: Any):
        self.page, self.viewer = page, viewer
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()
        self.origins = (viewer.url.rsplit("/", 2)[0] + "/", *OWN)
        page.set_default_timeout(8_000)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("websocket", lambda socket: self.asked.append(socket.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))

    def open(self, state: str, base: str | None = None) -> Any:
        """Go to a link to a view: what stands after #."""
        self.page.goto("about:blank")  # a hash alone would not load the page anew
        self.page.goto(f"{base or self.viewer.url}#{state}")
        return self.page

    def turn(self, state: str, sign: str) -> Any:
        """Follow a link within the page, until the sign of what it leads to is seen."""
        self.page.evaluate("state => (location.hash = state)", state)
        self.page.wait_for_selector(sign)
        return self.page

    def hold(self, asked: str) -> Callable[[], None]:
        """Answer no request of that pattern until the function that is returned is called."""
        held: list[Any] = []
        self.page.route(asked, lambda route: held.append(route))  # which takes no method of a list

        def release() -> None:
            for route in held:
                route.continue_()
            self.page.unroute(asked)

        return release

    def api(self, part: str) -> list[str]:
        """What was asked of the server that has this in its path, without the part that is always there."""
        start = f"{self.viewer.url}api/"
        return [url.removeprefix(start) for url in self.asked if url.startswith(start) and part in url]

    def check(self) -> None:
        """Nothing went wrong, and nothing left this machine."""
        away = [url for url in self.asked if not url.startswith(self.origins)]
        wrong = [text for text in self.complaints if not any(part in text for part in (LATE, *self.expected))]
        if away or wrong:
            raise AssertionError(f"asked elsewhere: {away}; complaints: {wrong}")
