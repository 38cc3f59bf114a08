"""Record the animated picture of `regard look` in README: docs/pictures/page.webp.

python docs/pictures/record.py         # needs Chromium, and `pip install playwright pillow`
"""

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests"))

from in_browser import READY  # noqa: E402  the sign that a view is drawn

SIZE = {"width": 1000, "height": 640}
FLAGS = ("--no-sandbox", "--disable-gpu")
LOOK = (sys.executable, "-c", "from regard.cli import main; raise SystemExit(main())", "look", "--no-open")


class Film:
    """Pictures of a page, each with how long it is shown, in milliseconds."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.times: list[int] = []

    def show(self, milliseconds: int) -> None:
        picture = io.BytesIO(self.page.screenshot())
        self.frames.append(Image.open(picture).convert("RGB"))
        self.times.append(milliseconds)

    def turn(self, view: str, sign: str, settle: int = 1200) -> None:
        """Go to another view of the same head and token."""
        self.page.evaluate(
            "view => { const h = new URLSearchParams(location.hash.slice(1)); h.set('view', view); location.hash = h }",
            view,
        )
        self.page.wait_for_selector(sign)
        self.page.wait_for_timeout(settle)

    def save(self, path: Path) -> None:
        first, *rest = self.frames
        first.save(path, save_all=True, append_images=rest, duration=self.times, loop=0, quality=70, method=6)


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The address of `regard look`, which runs meanwhile."""
    server = subprocess.Popen((*LOOK, *arguments), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http\S+", server.stdout.readline())
        assert found is not None
        yield found.group()
    finally:
        server.terminate()
        server.wait()


def record(page: Any, url: str) -> Film:
    """Open on the finding, then go from view to view of the same head and token."""
    film = Film(page)
    page.goto(url)
    page.wait_for_selector(READY["overview"])
    page.wait_for_timeout(1500)
    film.show(3000)
    for view, milliseconds in (("token", 2000), ("scale", 2500), ("ablation", 2500), ("steps", 2000)):
        film.turn(view, READY[view])
        film.show(milliseconds)
    page.mouse.move(SIZE["width"] / 2, SIZE["height"] / 2)
    page.mouse.wheel(0, 420)
    page.wait_for_timeout(500)
    film.show(2000)
    return film


def record_text(film: Film, url: str) -> None:
    """See the same head on a long text, README."""
    film.page.goto("about:blank")
    film.page.goto(f"{url}#view=text&layer=2&head=2")
    film.page.wait_for_selector(READY["text"])
    film.page.wait_for_timeout(2000)
    film.show(2500)


def main() -> None:
    with served() as short, served("--file", str(HERE.parents[1] / "README.md")) as long, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        film = record(browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce"), short)
        record_text(film, long)
        film.save(HERE / "page.webp")
        browser.close()


if __name__ == "__main__":
    main()
