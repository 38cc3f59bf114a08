"""How many actions three tasks take from a fresh start of `regard look`: a table for lab/viewer.md.

    python tests/browser/actions.py

An action is a click, or a key that is pressed. Each task is done in a tab of its own, and its outcome is checked.
"""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.append(str(Path(__file__).parents[1]))

from in_browser import FLAGS, READY, served


class User:
    """Somebody at a page that was just opened, and what they did."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.done: list[str] = []
        page.goto(url)
        page.wait_for_selector(READY["overview"])

    def click(self, name: str) -> None:
        self.page.get_by_role("button", name=name).click()
        self.done.append(f"click “{name}”")

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.done.append(f"`{key}`")

    def save(self, key: str) -> Path:
        with self.page.expect_download() as waited:
            self.press(key)
        return Path(waited.value.path())


def induction(user: User) -> str:
    """Find the strongest induction head, and the token that it copies from."""
    said = str(user.page.locator(".finding").inner_text())
    found = re.search(r"(L\d H\d): .* is induction: .* looks most at (\d+ “.”)", said)
    assert found, said
    assert found[1] == "L2 H2", said
    return f"“{found[0]}”"


def saturation(user: User) -> str:
    """Show that without 1/√d the row saturates."""
    user.click("Scale")
    user.page.wait_for_selector(READY["scale"])
    user.click("Query before")
    user.page.wait_for_function("() => document.querySelector('.scale .note').textContent.includes('query 52')")
    told = user.page.locator(".scale .told").all_inner_texts()
    scaled, raw = (float(re.findall(r"largest weight ([\d.]+)", text)[0]) for text in told)
    assert scaled < 0.7 < 0.98 < raw, told
    return f"largest weight {scaled:.2f} with 1/√d, {raw:.2f} without"


def figure(user: User) -> str:
    """Save a captioned figure of one head for a paper."""
    user.click("L1 H0")
    user.page.wait_for_function("() => document.querySelector('.map-title').textContent.startsWith('L1 H0')")
    user.press("s")
    user.page.wait_for_selector("dialog.share[open]")
    root = ElementTree.fromstring(user.save("s").read_text("utf-8"))
    said = " ".join("".join(x.itertext()) for x in root.iter("{http://www.w3.org/2000/svg}text"))
    found = re.search(r"Layer 1, head 0 of “[^”]*”", said)
    assert found, said
    return f"an SVG with the caption “{found[0]}. …”"


TASKS: tuple[Callable[[User], str], ...] = (induction, saturation, figure)


def main() -> None:
    from playwright.sync_api import sync_playwright

    with served() as (url, _), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        print("| Task | Actions | What they are | What is found |\n|---|---|---|---|")
        for task in TASKS:
            user = User(browser.new_page(viewport={"width": 1280, "height": 720}), url)
            found = task(user)
            print(f"| {str(task.__doc__).rstrip('.')} | {len(user.done)} | {', '.join(user.done)} | {found} |")
            user.page.close()
        browser.close()


if __name__ == "__main__":
    main()
