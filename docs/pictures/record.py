"""Record the animated picture of `regard look` in README: docs/pictures/page.webp.

python docs/pictures/record.py         # needs Chromium, and `pip install playwright pillow`
"""

import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "tests"))

from in_browser import READY, served  # noqa: E402

SIZE = {"width": 1000, "height": 640}
TYPED = "Mrs. Quibble lost her umbrella. Nobody told Mrs. Q"
FLAGS = ("--no-sandbox", "--disable-gpu")


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
            """view => {
                const state = new URLSearchParams(location.hash.slice(1));
                state.set("view", view);
                state.delete("zoom");
                location.hash = state;
            }""",
            view,
        )
        self.page.wait_for_selector(sign)
        self.page.wait_for_selector(".working", state="hidden")
        self.page.wait_for_timeout(settle)

    def save(self, path: Path) -> None:
        first, *rest = self.frames
        first.save(path, save_all=True, append_images=rest, duration=self.times, loop=0, quality=70, method=6)


def record(page: Any, url: str) -> Film:
    """Open on the finding, then see its head: the map and its induction, the row without 1/√d, without the head."""
    film = Film(page)
    page.goto(url)
    page.wait_for_selector(READY["overview"])
    page.wait_for_timeout(1500)
    film.show(3500)
    film.turn("map", READY["map"])
    film.show(1500)
    page.evaluate("location.hash += '&zoom=35,54,12,31'")  # the queries that repeat, and what they copy from
    page.wait_for_timeout(1500)
    film.show(3000)
    for view, sign in (("scale", READY["scale"]), ("ablation", ".ablation .odds [data-after]")):
        film.turn(view, sign)
        film.show(2500)
    return film


def record_typing(film: Film) -> None:
    """Type another text, and see what the head finds in it, and what the model expects next."""
    page = film.page
    film.turn("overview", READY["overview"])
    page.get_by_role("button", name="Type your own text").click()
    text = page.locator(".editor textarea")
    text.fill("")
    typed = ""
    for word in re.findall(r"\S+ ?", TYPED):
        typed += word
        text.press_sequentially(word)
        page.wait_for_function("typed => document.querySelector('.shaded')?.textContent.includes(typed)", arg=typed)
        page.wait_for_timeout(1000)
        film.show(400)
    film.times[-1] = 4000


def main() -> None:
    with served() as (url, _), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        film = record(browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce"), url)
        record_typing(film)
        film.save(HERE / "page.webp")
        browser.close()


if __name__ == "__main__":
    main()
