"""Every view, every step of the tour and every file that can be saved, once in Firefox.

    apt-get install firefox-esr && pip install websockets
    python tests/browser/firefox.py                      # --pictures FOLDER keeps what was seen

Raises AssertionError for a view that is not drawn, and for anything that Firefox complains about or asks of elsewhere.
Firefox is driven by WebDriver BiDi, which it speaks itself.
"""

import argparse
import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from in_browser import DIGIT, OWN, READY, READY_PICTURE, served

WIDE, PHONE = (1280, 720), (390, 844)
PATIENCE_S = 30

# The letters of the menu's entries, and the endings of the files that they save.
FILES = {"p": "png", "s": "svg", "c": "csv", "n": "npz", "z": "npz", "w": "html"}

PREFERENCES = """
user_pref("browser.download.dir", "{folder}");
user_pref("browser.download.folderList", 2);
user_pref("browser.shell.checkDefaultBrowser", false);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("layout.css.prefers-color-scheme.content-override", 1);
user_pref("ui.prefersReducedMotion", 1);
"""


class Firefox:
    """A tab, with what it asked for and what it complained about."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.number = 0
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self.tab = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of BiDi and return its result; events that come before it are noted."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self.socket.recv(timeout=PATIENCE_S))
            if told.get("id") == self.number:
                assert told["type"] == "success", told
                return dict(told["result"])
            self.note(told.get("method"), told.get("params", {}))

    def note(self, event: str | None, told: dict[str, Any]) -> None:
        if event == "log.entryAdded" and told["level"] in ("error", "warn"):
            self.complaints.append(told["text"])
        if event == "network.beforeRequestSent":
            self.asked.append(told["request"]["url"])

    def of(self, expression: str) -> Any:
        """What an expression of JavaScript is."""
        expression = f"(async () => JSON.stringify(await ({expression})) ?? 'null')()"
        told = self.call("script.evaluate", expression=expression, target={"context": self.tab}, awaitPromise=True)
        assert told["type"] == "success", told
        return json.loads(told["result"]["value"])

    def wait(self, condition: str) -> None:
        """Wait until an expression of JavaScript holds."""
        end = time.monotonic() + PATIENCE_S
        while not self.of(f"!!({condition})"):
            assert time.monotonic() < end, f"never: {condition}; complaints: {self.complaints}"
            time.sleep(0.05)

    def seen(self, selector: str) -> None:
        """Wait until something is there, and nothing went wrong."""
        self.wait(f"document.querySelector({json.dumps(selector)})")
        wrong = self.of("document.querySelector('.banner:not([hidden])')?.innerText")
        assert wrong is None, wrong

    def open(self, url: str) -> None:
        """Go to an address, from another, so that the page is loaded anew."""
        for address in ("about:blank", url):
            self.call("browsingContext.navigate", context=self.tab, url=address, wait="complete")

    def size(self, width: int, height: int) -> None:
        self.call("browsingContext.setViewport", context=self.tab, viewport={"width": width, "height": height})

    def press(self, key: str) -> None:
        pressed = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.call(
            "input.performActions", context=self.tab, actions=[{"type": "key", "id": "keyboard", "actions": pressed}]
        )

    def picture(self) -> bytes:
        time.sleep(0.5)  # pictures of heads come one after the other
        return base64.b64decode(self.call("browsingContext.captureScreenshot", context=self.tab)["data"])


@contextmanager
def firefox(folder: Path) -> Iterator[Firefox]:
    """Yield a Firefox that saves files to a folder."""
    from websockets.sync.client import connect

    program = shutil.which("firefox-esr") or shutil.which("firefox")
    assert program, "apt-get install firefox-esr"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        Path(profile, "user.js").write_text(PREFERENCES.replace("{folder}", str(folder)), "utf-8")
        said = Path(profile, "said")
        command = [program, "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
        with said.open("w") as output:
            browser = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            end = time.monotonic() + PATIENCE_S
            while not (found := re.search(r"WebDriver BiDi listening on (ws:\S+)", said.read_text("utf-8"))):
                assert time.monotonic() < end, said.read_text("utf-8")
                assert browser.poll() is None, said.read_text("utf-8")
                time.sleep(0.1)
            with connect(f"{found[1]}/session", max_size=None) as socket:
                yield Firefox(socket)
        finally:
            browser.terminate()
            browser.wait()


def views(page: Firefox, url: str, ready: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Look at views, each with the sign that it is there, on a wide screen and on a phone."""
    for size in (WIDE, PHONE):
        page.size(*size)
        for view, sign in ready.items():
            page.open(f"{url}#view={view}&layer=2&head=2")
            page.seen(sign)
            beside = page.of("document.documentElement.scrollWidth - innerWidth")
            assert beside <= 0, f"{view} is {beside} pixels wider than the screen"
            yield f"{view.partition('&')[0]}-{size[0]}", page.picture()


def tour(page: Firefox, url: str) -> Iterator[tuple[str, bytes]]:
    """Take the tour by its buttons."""
    page.size(*WIDE)
    page.open(url)
    page.seen(READY["overview"])
    page.of("document.querySelector('header .take').click()")
    steps = page.of("(await fetch('api/example/tour')).json()")["steps"]
    assert len(steps) == 8
    for number, step in enumerate(steps, 1):
        page.wait(f"document.querySelector('.tour h2')?.textContent === {json.dumps(step['title'])}")
        page.seen(READY[step["state"]["view"]])
        yield f"tour-{number}", page.picture()
        page.of("document.querySelector('.tour .main').click()")
    page.wait("!document.querySelector('.tour')")


def files(page: Firefox, url: str, folder: Path) -> None:
    """Save all that can be saved of a map."""
    page.open(f"{url}#view=map&layer=2&head=2")
    page.seen(READY["map"])
    for key, ending in FILES.items():
        before = set(folder.iterdir())
        page.press("s")
        page.wait("document.querySelector('dialog.share').open")
        page.press(key)
        page.wait("/saved/.test(document.querySelector('dialog.share [role=status]').textContent)")
        page.press("\ue00c")  # Escape
        page.wait("!document.querySelector('dialog.share').open")
        end = time.monotonic() + PATIENCE_S
        while not (new := [x for x in set(folder.iterdir()) - before if x.suffix == f".{ending}" and x.stat().st_size]):
            assert time.monotonic() < end, f"no .{ending} was saved"
            time.sleep(0.05)
        print(f"saved {new[0].name}, {new[0].stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path)
    pictures = parser.parse_args().pictures
    with (
        tempfile.TemporaryDirectory() as folder,
        served() as (url, _),
        served("--capture", str(DIGIT)) as (digit, _),
        firefox(Path(folder)) as page,
    ):
        for looked in (views(page, url, READY), views(page, digit, READY_PICTURE), tour(page, url)):
            for name, picture in looked:
                print(f"seen {name}")
                if pictures:
                    pictures.mkdir(parents=True, exist_ok=True)
                    (pictures / f"{name}.png").write_bytes(picture)
        files(page, url, Path(folder))
        own = *(x.rsplit("/", 2)[0] + "/" for x in (url, digit)), *OWN
        away = [x for x in page.asked if not x.startswith(own)]
    assert not away, f"asked elsewhere: {away}"
    assert not page.complaints, page.complaints


if __name__ == "__main__":
    main()
