"""The style sheet of the page."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

STYLE = Path(__file__).parents[2] / "page" / "src" / "style.css"


@pytest.mark.skipif(not STYLE.exists(), reason="the page's sources are not here")
def test_every_colour_is_stated_once() -> None:
    """A colour of one theme alone, or of a theme that is written twice, would be forgotten."""
    text = re.sub(r"/\*.*?\*/", "", STYLE.read_text("utf-8"), flags=re.DOTALL)
    stated = re.findall(r"(--[a-z-]+):[^;{}]*#[0-9a-f]{3,8}", text)
    assert len(stated) > 12
    assert len(stated) == len(set(stated)), stated
    themed = re.findall(r"(--[a-z-]+): var\(--on-light, #\w+\) var\(--on-dark, #\w+\);", text)
    assert len(themed) > 10


@pytest.mark.skipif(not STYLE.exists(), reason="the page's sources are not here")
def test_no_rule_is_written_twice() -> None:
    """Rules that say the same would drift apart, and of a selector in two places one is overlooked."""
    rules = list(rules_of(re.sub(r"/\*.*?\*/", "", STYLE.read_text("utf-8"), flags=re.DOTALL)))
    assert len(rules) > 200
    bodies = Counter(body for _, body in rules if len(body) > 1)
    assert not [body for body, n in bodies.items() if n > 1]
    selectors = Counter(place for place, _ in rules if place != (".regard",))
    assert not [place for place, n in selectors.items() if n > 1]


def rules_of(text: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield each rule: its selector with those around it, and its declarations in order."""
    around: list[tuple[str, list[str]]] = []
    for part, end in re.findall(r"([^{};]*)([{};])", text):
        words = " ".join(part.split())
        if end == "{":
            around.append((words, []))
            continue
        if words and around:
            around[-1][1].append(words)
        if end == "}":
            yield tuple(selector for selector, _ in around), tuple(sorted(around[-1][1]))
            around.pop()
