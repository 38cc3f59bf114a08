"""The style sheet of the page."""

import re
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
