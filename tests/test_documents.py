"""Documents as a code host shows them: links lead somewhere, no markup of the site is left, lab notes are narrow."""

import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
LAB = sorted((ROOT / "lab").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *LAB]


GFM = MarkdownIt("commonmark").enable(["table", "strikethrough"])
ALERTS = "NOTE|TIP|IMPORTANT|WARNING|CAUTION"  # the kinds of quotations that hosts know
DIRECTIVE = re.compile(rf"^(:{{3,}}.*|:\w+:.*|\(\S+\)=|% .*|\[!(?!(?:{ALERTS})\]$)[A-Z]+\].*)$", re.MULTILINE)


def plain(token: Token) -> str:
    """The text that a reader sees of an inline token."""
    return "".join(x.content for x in token.children or [] if x.type in ("text", "code_inline"))


@cache
def anchors(page: Path) -> set[str]:
    """What links to sections of a page may name: its headings, as hosts write them."""
    tokens = GFM.parse(page.read_text("utf-8"))
    headings = [plain(inline) for token, inline in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_dead(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = page.parent / file if file else page
    if "://" in link or link.startswith("mailto:"):
        return False
    return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in anchors(target))


def complaints(page: Path) -> Iterator[str]:
    """What a reader of the source on a code host would stumble over."""
    tokens = GFM.parse(page.read_text("utf-8"))
    if page.read_text("utf-8").startswith("---\n"):
        yield "a header, which is shown as a table"
    for token in tokens:
        if token.type == "fence" and re.match(r":\w+:|---$", token.content):
            yield f"code that begins with options: {token.content.splitlines()[0]}"
        inside = token.children or []
        yield from (f"a directive: {x}" for x in DIRECTIVE.findall(token.content) if inside)
        for child, after in pairwise([*inside, Token("end", "", 0)]):
            if child.type == "image":
                if is_dead(page, str(child.attrs["src"])) or not child.content:
                    yield f"a picture without a file or a description: {child.attrs['src']}"
            elif child.type == "link_open":
                if is_dead(page, str(child.attrs["href"])):
                    yield f"a dead link: {child.attrs['href']}"
                if after.type == "link_close":
                    yield f"a link without text: {child.attrs['href']}"
            elif after.type == "code_inline" and re.search(r"\{[\w:-]+\}$", child.content):
                yield f"a role: {child.content}`{after.content}`"


def too_wide(page: Path) -> list[str]:
    """Lines over 130 characters and table cells over 80."""
    lines = page.read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [line for line in lines if len(line) > 130] + [cell for cell in cells if len(cell) > 80]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_code_host_shows_the_whole_page(page: Path) -> None:
    assert list(complaints(page)) == []


CHAPTERS = [x for x in PAGES if x.parent.name == "learn" and x.name != "index.md"]


@pytest.mark.parametrize("page", [ROOT / "docs" / "index.md", *CHAPTERS], ids=lambda page: page.stem)
def test_a_figure_is_above_the_first_section(page: Path) -> None:
    tokens = GFM.parse(page.read_text("utf-8").partition("\n## ")[0])
    (picture, *_) = [x for token in tokens for x in token.children or [] if x.type == "image"]
    figure = (page.parent / str(picture.attrs["src"])).read_text("utf-8")
    assert figure.startswith('<svg xmlns="http://www.w3.org/2000/svg" class="figure"')
    assert len(figure) < 60_000


@pytest.mark.parametrize("page", [ROOT / "docs" / "index.md", *CHAPTERS], ids=lambda page: page.stem)
def test_figures_are_ours_and_described_by_their_titles(page: Path) -> None:
    tokens = [x for token in GFM.parse(page.read_text("utf-8")) for x in token.children or [] if x.type == "image"]
    for picture in tokens:
        figure = (page.parent / str(picture.attrs["src"])).read_text("utf-8")
        assert "Matplotlib" not in figure
        if 'class="figure"' in figure:
            title = re.search(r"<title>(.*?)</title>", figure, re.DOTALL)
            assert title is not None
            assert " ".join(picture.content.split()) == unescape(title[1])


@pytest.mark.parametrize("page", LAB, ids=lambda page: page.name)
def test_lab_notes_are_narrow(page: Path) -> None:
    assert too_wide(page) == []


def test_every_lab_note_is_in_the_index() -> None:
    index = (ROOT / "lab" / "README.md").read_text("utf-8")
    assert [page.name for page in LAB if page.name != "README.md" and f"({page.name})" not in index] == []


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"| {'x' * 81} |\n{'y' * 131}\n")
    assert too_wide(page) == ["y" * 131, "x" * 81]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("---\nfile_format: mystnb\n---\n", "a header, which is shown as a table"),
        ("```{code-cell}\n:tags: [hide-input]\nx\n```", "code that begins with options: :tags: [hide-input]"),
        (":::{tip}\nText.", "a directive: :::{tip}"),
        ("(label)=\n# Title", "a directive: (label)="),
        ("> [!PROOF]\n> Text.", "a directive: [!PROOF]"),
        ("> [!NOTE] A title\n> Text.", "a directive: [!NOTE] A title"),
        ("The {term}`query`.", "a role: The {term}`query`"),
        ("[](other.md)", "a link without text: other.md"),
        ("[a](gone.md)", "a dead link: gone.md"),
        ("[a](other.md#gone)", "a dead link: other.md#gone"),
        ("![a](gone.svg)", "a picture without a file or a description: gone.svg"),
        ("![](other.md)", "a picture without a file or a description: other.md"),
        ("> [!NOTE]\n> $x_{i}$ and `{term}` [a](other.md#a-part) and [b](https://example.org).", ""),
    ],
)
def test_a_page_that_a_host_does_not_show_is_seen(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "other.md").write_text("# A part\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(complaints(page)) == [complaint] * bool(complaint)
