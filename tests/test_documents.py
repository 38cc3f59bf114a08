"""Documents: links between files lead somewhere, and the lab notes stay readable."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAB = sorted((ROOT / "lab").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *LAB]


def dead_links(page: Path) -> list[str]:
    """Relative links, pictures among them, to files that do not exist."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8"))
    files = [link.partition("#")[0] for link in links if "://" not in link]
    return [file for file in files if file and not (page.parent / file).exists()]


def too_wide(page: Path) -> list[str]:
    """Lines over 130 characters and table cells over 80."""
    lines = page.read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [line for line in lines if len(line) > 130] + [cell for cell in cells if len(cell) > 80]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


@pytest.mark.parametrize("page", LAB, ids=lambda page: page.name)
def test_lab_notes_are_narrow(page: Path) -> None:
    assert too_wide(page) == []


def test_every_lab_note_is_in_the_index() -> None:
    index = (ROOT / "lab" / "README.md").read_text("utf-8")
    assert [page.name for page in LAB if page.name != "README.md" and f"({page.name})" not in index] == []


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = "[a](page.md#b) [c](gone.md) ![d](gone.svg) [e](https://example.org)"
    page.write_text(f"{links}\n| {'x' * 81} |\n{'y' * 131}\n")
    assert dead_links(page) == ["gone.md", "gone.svg"]
    assert too_wide(page) == ["y" * 131, "x" * 81]
