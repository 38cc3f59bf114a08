"""Numbers in sentences of the documentation: a false one fails the build, and those of chapters have their check."""

import ast
import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import Report

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
CHAPTERS = sorted(page for page in (DOCS / "learn").glob("*.md") if page.stem != "index")


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS)
    return import_module("extensions.claims")


@pytest.mark.parametrize("name", ["claims", "figures", "markup", "notebooks", "outputs"])
def test_examples_in_docstrings_run(claims: Any, name: str) -> None:
    failed, attempted = doctest.testmod(import_module(f"extensions.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert attempted
    assert not failed


def failing(claims: Any, text: str, code: str = "") -> list[str]:
    """Check a text against a block."""
    names: dict[str, Any] = {}
    exec(code, names)
    stated = claims.claims(text)
    return list(claims.failures(stated, claims.evaluated([x.code for x in stated], [code], names)))


@pytest.mark.parametrize(
    "text",
    [
        "takes 17 GiB<!--= 18243862528 / 2**30 -->",
        "and 32,768 tokens<!--= 2**15 -->",
        "falls by −0.25<!--= -1 / 4 -->, and again by -0.25<!--= -1 / 4 -->",
        "has 80 %<!--= 0.798 --> of it, then 79.8%<!--= 0.798 -->",
        "Twelve heads<!--= 3 * 4 -->, of which two\nlook back<!--= 2.0 -->",
        "an error of 3.1e-08<!--= 3.14e-8 -->",
        "an error of 3e-8<!--~= 5e-8 -->, and of 0.0014<!--~= 0.00135 -->",
        "from 1982 to 2021<!--= 2021 -->",
        "is larger<!--? sum(x for x in (1, 2)) == 3 -->",
    ],
)
def test_true_sentences_pass(claims: Any, text: str) -> None:
    assert failing(claims, text) == []


@pytest.mark.parametrize(
    "text",
    [
        "17 GiB<!--= 17.6 -->",
        "1,024<!--= 1025 -->",
        "−2<!--= 2 -->",
        "80 %<!--= 0.79 -->",
        "two<!--= 3 -->",
        "0.14<!--~= 0.18 -->",
        "12<!--~= 13 -->",
        "is larger<!--? 1 > 2 -->",
    ],
)
def test_false_sentences_fail(claims: Any, text: str) -> None:
    assert len(failing(claims, text)) == 1


def test_a_failure_names_sentence_number_and_value(claims: Any) -> None:
    text = "# Title\n\nYes. The scores take\n17 GiB<!--= size -->. No.\n"
    assert failing(claims, text, "size = 16.2") == [
        "“The scores take 17 GiB.” says 17, but size gives 16.2",
    ]
    assert failing(claims, text) == [
        "“The scores take 17 GiB.” says 17, but size gives NameError: name 'size' is not defined"
    ]
    with pytest.raises(ValueError, match=r"“No number here.” has no number before <!--= 2 -->"):
        claims.claims("There are 2. No number<!--= 2 --> here.")
    (why,) = claims.failures(claims.claims("two<!--= heads -->"), {})
    assert why == "“two” says two, but heads gives no value"


def test_a_name_of_several_blocks_is_refused(claims: Any) -> None:
    blocks = ["import math\nn = 2\nm = [k for k in (1, 2)]", "import math\nn = 3\ndef f():\n    m = 1"]
    assert claims.ambiguous(blocks) == {"n"}
    values = claims.evaluated(["n", "len(m)"], blocks, {"n": 3, "m": [1]})
    assert values == {"n": "NameError: several blocks bind n", "len(m)": 1.0}


def test_a_sentence_may_have_a_figure_of_a_report(claims: Any) -> None:
    results = Report.from_json((DOCS / "benchmarks/zen-5/report.json").read_text("utf-8")).results
    row = next(x for x in results if x.group == "forward")
    assert claims.report("zen-5", f"forward: {row.name}") == row.figure()
    with pytest.raises(ValueError, match="not enough"):
        claims.report("zen-5", "no such row")


PAGE = """---
file_format: mystnb
kernelspec:
  name: python3
---

# A page

```{code-cell}
n = 3
```

It has two heads<!--= n --> and 3 layers<!--= n -->.
"""


def test_a_false_number_fails_the_build(tmp_path: Path) -> None:
    """Changing the number fails it, and changing the block above."""
    pytest.importorskip("myst_nb")
    tmp_path.joinpath("conf.py").write_text(
        f"import sys\nsys.path[:0] = {[str(DOCS), str(DOCS.parent)]}\n"
        "extensions = ['myst_nb', 'extensions.execution']\n"
        "nb_execution_mode, nb_execution_raise_on_error = 'force', True\n",
        "utf-8",
    )

    def errors(text: str) -> str:
        tmp_path.joinpath("index.md").write_text(text, "utf-8")
        command = [sys.executable, "-m", "sphinx", "-q", "-E", "-b", "dummy", str(tmp_path), str(tmp_path / "made")]
        paths = [os.path.abspath(x) for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert bool(done.returncode) == ("says" in done.stderr), done.stderr
        return done.stderr

    assert "“It has two heads and 3 layers.” says two, but n gives 3.0" in errors(PAGE)
    assert "says" not in errors(PAGE.replace("two", "three"))
    assert "says three, but n gives 4.0" in errors(PAGE.replace("two", "three").replace("n = 3", "n = 4"))


# The sources


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_comments_are_read_and_stay_inside_of_their_paragraph(page: Path, claims: Any) -> None:
    """CommonMark ends a paragraph where a comment begins a line, and a cell of a table at a vertical bar."""
    text = page.read_text("utf-8")
    comments = [(line, x) for line in text.splitlines() for x in re.findall("<!--.*?(?:-->|$)", line)]
    assert [x for _, x in comments if not claims.CLAIM.fullmatch(x)] == []
    assert [line for line, _ in comments if re.match(r"[\s>*-]*<!--", line)] == []
    assert [x for line, x in comments if line.startswith("|") and "|" in x] == []
    assert not comments or import_module("extensions.markup").RUNS.search(text), "no block of this page runs"


BLOCK = re.compile(r"^(`{3,})\{(?P<name>[\w-]+)\}[^\n]*\n(?::tags:.*?\n)?(?P<code>.*?)^\1$", re.DOTALL | re.MULTILINE)
NO_CLAIM = re.compile(
    r"^> This is the source of [^\n]*\n[^\n]*|^\*\d+ minutes\.\*|^#[^\n]*|^(?:\*\*)?\d+\."
    r"|!\[[^]]*\]|\$\$.*?\$\$|\$[^$]+\$|`[^`]+`|\]\([^)]*\)"
    r"|\b(?:19|20)\d\d\b|\b(?:section|equation|arXiv|layer|head|Zen) [\d.]+|\b\d+ bits",
    re.DOTALL | re.MULTILINE,
)
"""Headings, figures, formulas, code, links, years, names that have a number, and numbers of exercises."""
LISTED, ASKED = "counts what the sentence or the page lists", "a size that the sentence chooses"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "dictionary": {"three dot products are": LISTED},
    "generating": {"ten to hundred times as many": "of data sheets", "1,000 tokens": ASKED},
    "looking": {"Four reasons for caution": LISTED, "three steps:": LISTED},
    "positions": {"four ways to put order in:": LISTED},
    "quadratic": {"32 heads has 8 GiB": ASKED},
    "tiles": {"three things": LISTED, "twenty lines": "a name; checked where the page first says it"},
    "transformer": {"four steps from the first norm": LISTED},
    "variants": {"32 layers bring": ASKED},
}
"""For each chapter the beginnings of phrases with a number that no block computes, and the reason."""


def sizes(block: re.Match[str]) -> set[float]:
    """The numbers that a reader can change in a block."""
    code = f"f({block['code']})" if block["name"] == "look" else block["code"]
    try:
        nodes = ast.walk(ast.parse(code))
    except SyntaxError:  # another directive
        return set()
    return {float(x.value) for x in nodes if isinstance(x, ast.Constant) and type(x.value) in (int, float)}


def unchecked(text: str, claims: Any) -> Iterator[str]:
    """Yield the sentences with a number that has no check, from that number on.

    0, 1, "one" and "two" need none, and neither do sizes that the block above or below has as a literal. A condition
    checks the number before it.
    """
    blocks = list(BLOCK.finditer(text))
    bounds = [0, *(x for block in blocks for x in block.span()), len(text)]
    near = [set[float](), *map(sizes, blocks), set[float]()]
    for above, below, start, end in zip(near, near[1:], bounds[::2], bounds[1::2], strict=False):
        prose = NO_CLAIM.sub("§", claims.CLAIM.sub("†", text[start:end]))
        for sentence in claims.END.split(prose):
            for number in claims.NUMBER.finditer(sentence):
                after = sentence[number.end() :]
                checked = "†" in (claims.NUMBER.split(after)[0] if after else "")
                small = number[0].lower() in ("zero", "one", "two", "0", "1")
                if not (checked or small or value(number, claims) in above | below):
                    yield " ".join(sentence[number.start() :].replace("†", "").split())


def value(number: re.Match[str], claims: Any) -> float:
    return float(claims.typed(number))


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_numbers_of_chapters_are_checked(page: Path, claims: Any) -> None:
    exceptions = EXCEPTIONS.get(page.stem, {})
    found = list(unchecked(page.read_text("utf-8"), claims))
    assert [x for x in found if not x.startswith(tuple(exceptions))] == []
    assert [x for x in exceptions if not any(text.startswith(x) for text in found)] == []  # none too many


def test_a_number_without_a_check_is_seen(claims: Any) -> None:
    block = "```{run}\nn = 4\nprint(x)\n```\n"
    text = f"# 7 heads\n\nIn 2017, $8$ of 4 took 17 GiB and three<!--= n --> or 12 parts.\n\n{block}\n5 of 4 heads.\n"
    assert list(unchecked(text, claims)) == ["17 GiB and three or 12 parts.", "12 parts.", "5 of 4 heads."]


def test_figures_of_a_table_are_those_of_the_pages_it_leads_to() -> None:
    text = (DOCS / "howto/when.md").read_text("utf-8")
    figures = re.findall(r"\[([\d.]+) ×\]\(([\w-]+\.md)[)#]", text)
    assert len(figures) > 4
    pages = {page: (DOCS / "howto" / page).read_text("utf-8") for _, page in figures}
    assert [(x, page) for x, page in figures if not re.search(rf"\b{re.escape(x)}( ×| \|)", pages[page])] == []
