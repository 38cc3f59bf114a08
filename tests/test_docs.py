"""The documentation: it builds without a warning, links hold, sentences are short, pages ask no other host."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from matplotlib.image import imread

import regard
from benchmarks.measure import Report
from in_browser import AXE
from regard.viewer.data.scores import KINDS
from regard.viewer.data.sentences import GLOSSARY
from regard.viewer.serve import built

DOCS = Path(__file__).parents[1] / "docs"
WRITTEN = sorted(
    [DOCS / "index.md", *(page for x in ("explain", "howto", "learn") for page in (DOCS / x).glob("*.md"))]
)
MOST_WORDS = 35


def sentences(text: str) -> list[str]:
    """The sentences of a page, without its pictures, blocks, tables, tags, comments and formulas."""
    text = re.sub(r"^> ?(\[![^\n]*)?|!\[[^]]*\]|<!--.*?-->", "", text, flags=re.MULTILINE)
    text = re.sub(r"^```.*?^```$|^\$\$.*?^\$\$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    lines = ["" if re.match(r"\||#|<", line) else re.sub(r"^(\d+\.|[-*]) ", "\n", line) for line in text.splitlines()]
    prose = re.sub(r"\$[^$]+\$|`[^`]+`", "x", "\n".join(lines))
    return [" ".join(x.split()) for x in re.split(r"(?<=[.?!:])\s+|\n\s*\n", prose) if x.strip()]


def too_long(text: str) -> list[str]:
    return [x for x in sentences(text) if len(x.split()) > MOST_WORDS]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(DOCS)))
def test_sentences_are_short(page: Path) -> None:
    text = page.read_text("utf-8")
    assert sentences(text)
    assert too_long(text) == []


def test_a_long_sentence_is_seen() -> None:
    text = f"# Title\n\nShort one. {'word ' * 36}\nends.\n\n```python\n{'code ' * 50}\n```\n"
    assert [len(x.split()) for x in too_long(text)] == [37]


CHAPTERS = sorted(page for page in (DOCS / "learn").glob("*.md") if page.stem != "index")
BLOCK = re.compile(r"^(`{3,})\{(?P<name>[\w-]+)\}[^\n]*\n(?P<code>.*?)^\1$", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"^> ?\$\$.*?^> ?\$\$|^\$\$.*?^\$\$", re.DOTALL | re.MULTILINE)


def minutes(text: str) -> float:
    """The time that reading a chapter takes.

    Prose at 200 words a minute: 238 is the mean for non-fiction (Brysbaert 2019), and this is dense. A line of code
    takes 4 s, and a formula on a line of its own or a slider half a minute. A figure takes as long as its description.
    The folded code of a figure is not read, and neither are what the build checks and what the site does not show.
    """
    text = re.sub(r"^> This is the source of .*\n> .*\n|<!--.*?-->", "", text, flags=re.MULTILINE)
    text = re.sub(r"^<summary>What the build checks.*?^</details>$", "", text, flags=re.DOTALL | re.MULTILINE)
    hidden = ("viewer.show.figure", "return lines(", "```{film}")
    code = "".join(block["code"] for block in BLOCK.finditer(text) if not any(x in block[0] for x in hidden))
    prose = BLOCK.sub("", text)
    words = re.sub(r"\$[^$]+\$", "x", FORMULA.sub("", prose)).split()
    halves = len(FORMULA.findall(prose)) + text.count("\n```{film}")
    return len(words) / 200 + sum(map(bool, code.splitlines())) / 15 + halves / 2


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_chapters_take_as_long_as_they_say(page: Path) -> None:
    text = page.read_text("utf-8")
    says = re.search(r"^\*(\d+) minutes\.\*", text, re.MULTILINE)
    assert says is not None
    assert int(says[1]) in (5, 10, 15)
    assert int(says[1]) - 5 < minutes(text) <= int(says[1])


MOST_COLUMNS = 88
"""As many characters of code as the column of text is wide on a large screen."""


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_is_as_narrow_as_its_page(page: Path) -> None:
    shown = [x for x in BLOCK.finditer(page.read_text("utf-8")) if x["name"] in ("code-cell", "run", "fold", "look")]
    lines = [line for block in shown if "{code-cell} remove-" not in block[0] for line in block["code"].splitlines()]
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


TUTORIALS = {
    "attention in NumPy, two queries and three keys of seed 42": ("dictionary", "np.random.RandomState(42)"),
    "self-attention in NumPy from random matrices": ("dictionary", "by_hand = e / e.sum"),
    "10 queries, 20 keys and 64 features: output and weights": ("dictionary", "regard.weights(mine, theirs).shape"),
    "eight heads of them": ("heads", "multihead(x, y)"),
    "scaled dot-product attention in PyTorch, a mask of -1e9": ("pytorch", "masked_fill(mask == 0, -1e9)"),
    "the same with a causal mask of torch.triu": ("pytorch", "torch.triu(torch.ones(10, 10), diagonal=1)"),
    "the same as a module, with dropout": ("pytorch", "class Attention(nn.Module)"),
    "multi-head attention as a module": ("pytorch", "class MultiHead(nn.Module)"),
    "multi-head attention head by head, and torch.cat": ("pytorch", "torch.cat(heads, dim=-1)"),
    "a transformer block, 2 x 100 x 512 with 8 heads": ("pytorch", "theirs = Block(d_model=512, heads=8, d_ff=2048)"),
    "Var(q k) = d, and 1 after scaling": ("scale", "scaled = (dots / np.sqrt(d)).var()"),
    "256 MiB of scores at 8,192 tokens": ("quadratic", "size, work = scores_in_mib(n)"),
    "flash attention against the naive form": ("tiles", "best(naive_attention)"),
    "a map without and with something, under a slider": ("positions", "{compare} Without positions | With ALiBi"),
}
"""What tutorials of attention compute, and the chapter whose block computes it."""


@pytest.mark.parametrize("what", TUTORIALS)
def test_chapters_compute_what_tutorials_do(what: str) -> None:
    chapter, code = TUTORIALS[what]
    assert any(code in block[0] for block in BLOCK.finditer((DOCS / f"learn/{chapter}.md").read_text("utf-8")))


@pytest.mark.parametrize("index", ["learn/index.md", "howto/index.md", "reference/index.md"])
def test_every_page_is_listed(index: str, markup: Any) -> None:
    listed = [x["page"] for x in markup.ENTRY.finditer((DOCS / index).read_text("utf-8"))]
    assert {page.stem for page in (DOCS / index).parent.glob("*.md")} - {"index"} <= {*listed}


def test_the_glossary_says_what_the_viewer_does() -> None:
    text = (DOCS / "glossary.md").read_text("utf-8")
    for term in GLOSSARY:
        assert f"### {term.name}\n\n{term.meaning} Plainly: {term.plain}" in text
    for kind in KINDS:
        assert f"### {kind.name}\n\n{kind.definition} Score: {kind.meaning}.\n" in text


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    homes = " ".join(re.findall(r"^```\{names\} (.*)$", pages, re.MULTILINE)).split()
    assert sorted([*homes, "regard.version"]) == sorted(regard._HOMES)
    assert set(regard._MODULES) <= set(re.findall(r"^\.\. automodule:: regard\.(\w+)$", pages, re.MULTILINE))


def opening(text: str) -> str:
    """What is between the title of a chapter and its first section."""
    return text.partition("# ")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_sources_of_chapters_say_where_the_built_page_is(page: Path, markup: Any) -> None:
    """Below the title, and in the sources alone."""
    text = page.read_text("utf-8")
    first = opening(text).partition("\n\n")[2].partition("\n\n")[0]
    assert first.startswith(f"> This is the source of `docs/_build/learn/{page.stem}.html`")
    (link,) = re.findall(r"\]\(([^)]+)\)", first)
    file, _, anchor = link.partition("#")
    headings = re.findall(r"^#+ (.*)", (page.parent / file).read_text("utf-8"), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
    assert "the source of" not in markup.rewritten(text, f"learn/{page.stem}")


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_chapters_are_notebooks_too(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Markdown without the site's own markup, and of code that Python reads."""
    monkeypatch.syspath_prepend(DOCS)
    cells = json.loads(import_module("extensions.notebooks").notebook(page.read_text("utf-8")))["cells"]
    assert [x["source"] for x in cells if x["cell_type"] == "code" and not ast.parse(x["source"]).body] == []
    text = "\n".join(x["source"] for x in cells if x["cell_type"] == "markdown")
    assert re.findall(r"^</?details>|^> \[!.*|^```\{.*|\]\([^)]*\.(?:md|svg)|<!--", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_chapters_open_with_a_figure_and_close_with_a_summary(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "*You need:* " in opening(text)
    assert "from regard.viewer.show.figure import" in opening(text)
    assert re.search(r"^## In short\n\n- ", text, re.MULTILINE)
    assert text.index("## In short") < text.index("## Exercises") < text.index("<summary>Solution")
    assert "matplotlib" not in text


# Markup of our own


@pytest.fixture
def markup(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS)
    return import_module("extensions.markup")


def test_callouts_become_directives(markup: Any) -> None:
    for kind, opening in (
        ("TIP", ":::{tip}"),
        ("WARNING", ":::{warning}"),
    ):
        assert markup.rewritten(f"> [!{kind}]\n> Text.\n>\n> More.\n") == f"{opening}\nText.\n\nMore.\n:::\n\n"
    with pytest.raises(ValueError, match=r"a callout is one of .*, got NONSENSE"):
        markup.rewritten("> [!NONSENSE]\n> Text.\n")


def test_blocks_become_code(markup: Any) -> None:
    made = markup.rewritten("```{look} Two words\nregard.look(x, x, causal=True)\n```\n", "learn/page")
    assert "```python\nregard.look(x, x, causal=True)\n```" in made
    assert "\n_look('../', 'learn-page-1', 'Two words', x, x, causal=True)\n" in made
    folded = markup.rewritten("```{fold} It's long\ncode\n```\n")
    assert folded.endswith("tags: [run, hide-input]\nmystnb:\n  code_prompt_show: 'It''s long'\n"
                           "  code_prompt_hide: 'It''s long'\n---\ncode\n```\n")  # fmt: skip
    assert markup.rewritten("```sh {demo}\nregard look x\n```\n") == "```{demo}\nregard look x\n```\n"
    names = markup.rewritten("```{names} regard.warning regard.ops.retrieval\n```\n").splitlines()
    assert names[3:5] == [".. autoexception:: RegardWarning", ".. autofunction:: hopfield"]
    assert names[5:] == [".. autoclass:: Retrieval", "   :members:", "```"]
    tagged = markup.rewritten("```{run} volatile\ncode\n```\n")
    assert tagged == "```{code-cell}\n---\ntags: [run, volatile]\n---\ncode\n```\n"


def test_a_block_below_a_figure_computes_it(markup: Any) -> None:
    text = "![A line.](pictures/line.svg)\n\n```{code-cell} hide-input\ncode\n```\n"
    assert "---\ntags: [hide-input, remove-output]\nfigure: pictures/line.svg\n---\n" in markup.rewritten(text)
    assert "figure:" not in markup.rewritten(text.replace("\n\n", "\n\nText.\n\n", 1))


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ('<path d="M70.4 99.95L80 12"/>', '<path d="M70.9 99.9L80.1 12"/>', ""),
        ('<path d="M70.4 12"/>', '<path d="M72.4 12"/>', '<path d="M70.4 where the block gives <path d="M72.4'),
        ("<text>80 %</text>", "<text>79 %</text>", "<text>80 where the block gives <text>79"),
        ("<text>one</text>", "<text>two</text>", "<text>one</text> where the block gives <text>two</text>"),
        ("<text>1</text>", "<text>1</text><text>2</text>", "1</text> where the block gives 1</text><text>"),
        ("1 ", "1 2", "another number of elements than the block gives"),
    ],
)
def test_a_figure_that_differs_is_seen(outputs: Any, old: str, new: str, difference: str) -> None:
    assert import_module("extensions.figures").difference(old, new) == difference


def test_figures_are_compared_or_written(outputs: Any, tmp_path: Path) -> None:
    figures = import_module("extensions.figures")
    given = [{"output_type": "execute_result", "data": {figures.SVG: "<svg>1.0</svg>"}}]
    path = tmp_path / "pictures" / "one.svg"
    with pytest.raises(ValueError, match="there is no"):
        figures.check(path, given, writes=False)
    figures.check(path, given, writes=True)
    figures.check(path, given, writes=False)
    path.write_text("<svg>2.0</svg>")
    with pytest.raises(ValueError, match=r"has <svg>2.0 where the block gives <svg>1.0; .* writes figures anew"):
        figures.check(path, given, writes=False)


def test_other_blocks_stay(markup: Any) -> None:
    text = "````\n```{look} Title\n> [!TIP]\n```\n````\n\n> A quotation.\n\n:::{note}\nText.\n:::\n"
    assert markup.rewritten(text) == text


def build(target: Path, *first: Path) -> None:
    """Build the site as README does, with these folders before others in Python's path. A warning fails it."""
    paths = [*map(str, first), *(os.path.abspath(x) for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x)]
    trees = str(target.with_suffix(".trees"))
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-j", "auto", "-d", trees, str(DOCS), str(target)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that REGARD_SITE names, or else one that is built here."""
    if "REGARD_SITE" in os.environ:
        return Path(os.environ["REGARD_SITE"]).resolve()
    if find_spec("myst_nb") is None:
        pytest.skip("the documentation needs Sphinx: pip install -c constraints.txt '.[docs-full]'")
    try:
        built.page()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    target = tmp_path_factory.mktemp("docs") / "site"
    build(target)
    return target


WITHOUT_FRAMEWORKS = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        frameworks = ("torch", "jax", "jaxlib", "transformers")
        return None if name.partition(".")[0] in frameworks else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def article(page: Path) -> list[str]:
    return page.read_text("utf-8").partition("<article")[2].partition("</article>")[0].splitlines()


def test_the_reference_is_the_same_without_frameworks(site: Path, tmp_path: Path) -> None:
    """In README's build, whose other pages have stored outputs, and say so."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_FRAMEWORKS, "utf-8")
    build(without := tmp_path / "site", tmp_path)
    pages = sorted((site / "reference").glob("*.html"))
    assert len(pages) > 5
    for page in pages:
        assert article(without / "reference" / page.name) == article(page), page.name
    said = {str(page.relative_to(without)) for page in without.rglob("*.html") if STORED in page.read_text("utf-8")}
    store = json.loads((DOCS / "outputs.json").read_text("utf-8"))
    assert said == {f"{entry['page']}.html" for entry in store.values()}
    assert not any(STORED in page.read_text("utf-8") for page in site.rglob("*.html"))


STORED = '<p class="stored">'
COMMAND = re.compile(r"python -m sphinx (-W .*? docs/_build)")


def test_every_site_is_built_by_one_command() -> None:
    """README's, a contributor's, and the one of CI and of releases; the site has none of Sphinx's own files."""
    root = DOCS.parent
    files = [root / "README.md", root / "CONTRIBUTING.md", *(root / ".github" / "workflows").glob("*.yml")]
    commands = [x for file in files for x in COMMAND.findall(file.read_text("utf-8"))]
    assert len(commands) >= 3
    assert set(commands) == {"-W -j auto -d docs/_trees docs docs/_build"}


class Links(HTMLParser):
    """The addresses and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [x for name in ("href", "src") if (x := given.get(name))]
        self.anchors |= {x for name in ("id", "name") if (x := given.get(name))}


def dead_links(site: Path) -> list[str]:
    """The links of a site to pages, files and anchors that it lacks."""
    pages = {page: Links(page.read_text("utf-8")) for page in site.rglob("*.html")}
    dead = []
    for page, found in pages.items():
        for address in found.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            to = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            to = to / "index.html" if to.is_dir() else to
            anchor = unquote(parts.fragment)
            if not to.exists() or (anchor and to in pages and anchor not in pages[to].anchors):
                dead.append(f"{page.relative_to(site)}: {address}")
    return dead


def test_every_block_runs_and_nothing_is_warned_of(site: Path) -> None:
    for name in ("index.html", "objects.inv", "searchindex.js", "howto/sdpa.html", "learn/dictionary.html"):
        assert (site / name).exists(), name


def test_a_failing_block_is_told() -> None:
    """In a process of its own, as blocks run in forks."""
    pytest.importorskip("myst_nb")
    code = """
import sys
sys.path.append("..")  # the benchmarks
from extensions import execution
run = execution.run(["print('x')\\n1 + 1", "y = 2\\ny"], ["y / 4", "z"], 60)
shown, value = run.outputs
assert [x.output_type for x in shown] == ["stream", "execute_result"]
assert (value[0]["data"]["text/plain"], run.failure) == ("2", None)
assert run.values == {"y / 4": 0.5, "z": "NameError: name 'z' is not defined"}
assert "ValueError: wrong" in execution.run(["1", "raise ValueError('wrong')", "2"], [], 60).failure
assert "status" in execution.run(["import os; os._exit(3)"], [], 60).failure
"""
    subprocess.run([sys.executable, "-c", code], cwd=DOCS, check=True)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module that stores outputs, with a store of one page."""
    monkeypatch.syspath_prepend(DOCS)
    module = import_module("extensions.outputs")
    blocks = ["import torch", "print('error', 1e-7)", "print('0.25 s')"]
    given = [[], *([{"output_type": "stream", "name": "stdout", "text": x}] for x in ("error 1e-07", "0.25 s"))]
    store = tmp_path / "outputs.json"
    entry = {"page": "x", "outputs": given, "values": {"n": 2.0}}
    store.write_text(json.dumps({module.digest(blocks): entry}), "utf-8")
    monkeypatch.setattr(module, "STORE", store)
    return module, blocks, given


def test_outputs_that_differ_from_the_stored_ones_are_told(outputs: Any) -> None:
    module, blocks, given = outputs
    volatile = [False, False, True]
    assert module.stored(blocks) == given
    assert module.values(blocks) == {"n": 2.0}
    assert module.differences(blocks, given, volatile, {"n": 2.0}) == []
    assert module.differences(blocks, given, volatile, {"m": 2.0}) == ["docs/outputs.json has no value of m"]
    given[1][0]["text"], given[2][0]["text"] = "error 9.3e-08", "1.75 s"
    assert module.differences(blocks, given, volatile) == []
    assert "block 3 gives\n1.75 s" in module.differences(blocks, given, [False] * 3)[0]
    given[1][0]["text"] = "error 1e-03"
    assert "block 2 gives\nerror 1e-03" in module.differences(blocks, given, volatile)[0]
    assert module.differences(["import torch"], [[]], [False]) == ["its blocks are not in docs/outputs.json"]
    assert module.stored(["import torch"]) is None


def test_numbers_agree_as_those_of_two_processors_do(outputs: Any) -> None:
    agree = outputs[0].agree
    assert agree("error 3.1e-08, 12 rows", "error 2.9e-08,  12 rows")
    assert agree("0.0014", "0.0013")
    assert agree("5065.9189", "5065.9201")
    assert not agree("504 of 625", "505 of 625")
    assert not agree("loss 1.93", "loss 1.83")
    assert not agree("True", "False")


def test_links_lead_somewhere(site: Path) -> None:
    assert dead_links(site) == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a id="x" href="b.html">b</a><a href="#x">x</a><a href="#y">y</a>')
    assert dead_links(tmp_path) == ["a.html: b.html", "a.html: #y"]


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Any:
    need = (
        None
        if shutil.which("chromium") and AXE.exists() and find_spec("playwright")
        else "Chromium, Playwright, axe-core"
    )
    if need and os.environ.get("REGARD_BROWSER") == "required":
        pytest.fail(f"this test needs {need}")
    if need:
        pytest.skip(f"this test needs {need}")
    return request.getfixturevalue("chromium")


OUT_OF_REACH = """async () => {
    const found = () => [...document.querySelectorAll("article *")].filter(box =>
        box.scrollWidth > box.clientWidth && ["auto", "scroll"].includes(getComputedStyle(box).overflowX)
        && box.tabIndex < 0 && !box.querySelector("a, button, input, [tabindex]"));
    for (let frame = 0; found().length && frame < 20; frame++) await new Promise(requestAnimationFrame);
    return found().map(box => box.outerHTML.slice(0, 100));
}"""
"""What scrolls sideways and no key reaches, once the page is drawn."""


def test_pages_in_a_browser_ask_no_other_host(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path.relative_to(site)
        assert page.evaluate(OUT_OF_REACH) == [], path.relative_to(site)
    page.close()
    assert len(asked) > 100
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


def clicks(site: Path, to: str) -> list[str]:
    """The addresses of the links from the front page to another, one on each page, all of them in its text."""
    queue: list[Path] = [site / "index.html"]
    ways: dict[Path, list[str]] = {queue[0]: []}
    for page in queue:  # which grows
        if page == site / to:
            return ways[page]
        text = page.read_text("utf-8").partition("<article")[2].partition("</article>")[0]
        for address in Links(text).addresses:
            found = (page.parent / address.partition("#")[0]).resolve()
            if found.suffix == ".html" and found.exists() and found not in ways:
                ways[found] = [*ways[page], address]
                queue.append(found)
    raise AssertionError(f"no link leads to {to}")


def test_pages_in_a_browser_lead_to_the_call_that_replaces_sdpa(site: Path, browser: Any) -> None:
    """In two clicks at most, on a phone too."""
    way = clicks(site.resolve(), "howto/sdpa.html")
    assert len(way) <= 2
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((site / "index.html").as_uri())
    for address in way:
        page.locator(f'article a[href="{address}"]').first.click()
    page.get_by_text("with regard.torch.sdpa():").first.wait_for()  # the click returns before the page is there
    page.close()


def test_pages_in_a_browser_open_an_island(site: Path, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "learn" / "looking.html").as_uri())
    link = page.locator(".island a")
    stills = {".svg", ".png"}
    assert not [url for url in asked if "youtube" in url or ("_islands" in url and Path(url).suffix not in stills)]
    assert page.locator("iframe, video").count() == 0
    link.click()
    page.frame_locator(".island + iframe").locator(".text .strongest li, .overview .token-row").first.wait_for()
    assert [url for url in asked if "_islands" in url and Path(url).suffix not in stills]
    assert page.url.endswith("looking.html")  # the page stays
    assert page.locator("a[href*=youtube] img").count() == 1
    page.close()


def test_pages_in_a_browser_lead_to_the_demo_in_two_clicks(site: Path, browser: Any) -> None:
    """From the front page to what the model expects after a text of one's own; the first page loads none of it."""
    page = browser.new_page()
    asked: list[str] = []
    clicks: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda said: said.text == "a click" and clicks.append(page.url))
    page.add_init_script("addEventListener('click', () => console.log('a click'), true)")
    page.goto((site / "index.html").as_uri())
    page.locator("figure.demo img").evaluate("async image => await image.decode()")
    assert not [url for url in asked if "demo.html" in url]
    page.locator("figure.demo a").click()
    following = page.locator(".following")
    following.filter(has_text="Expected next").wait_for()
    before = following.inner_text()
    page.get_by_role("textbox", name="Your text").click()
    page.keyboard.press("Control+A")
    page.keyboard.type("Dr. Zavrel met Otokar Brix. Nobody knew why Otokar Br")
    following.filter(has_text="next: i 98 %").wait_for()
    assert following.inner_text() != before
    assert [url.split("/")[-1].split("#")[0] for url in clicks] == ["index.html", "demo.html"]
    page.get_by_role("link", name="Back to the documentation of regard").click()
    page.locator("figure.demo").wait_for()
    page.close()
    assert (site / "_islands/demo.html").stat().st_size < 3_000_000
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_pages_in_a_browser_have_sliders_for_the_keyboard(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "learn" / "positions.html").as_uri())
    page.locator("figure.compare input").focus()
    page.keyboard.press("Home")
    assert page.locator("figure.compare").get_attribute("style") == "--at: 0%;"
    page.goto((site / "learn" / "looking.html").as_uri())
    film = page.locator("figure.film")
    last = film.locator("img").last.get_attribute("src")
    film.locator("input").focus()
    page.keyboard.press("Home")
    assert film.locator("figcaption").inner_text().startswith("step 0:")
    assert film.locator("img").last.get_attribute("src") != last
    page.close()


def test_pages_in_a_browser_draw_figures(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "benchmarks.html").as_uri())
    figures = page.locator(".figures")
    report = Report.from_json((DOCS / "benchmarks/zen-5/report.json").read_text("utf-8"))
    first = report.group("forward")[0]
    row = figures.locator("tbody tr").first.inner_text().split("\t")
    assert row[:2] == [first.name, f"{first.figure():.1%}".replace("%", " %")]
    circles = figures.locator("svg circle").count()
    figures.get_by_role("checkbox", name="NumPy").click()
    assert figures.locator("svg circle").count() < circles
    figures.get_by_role("combobox", name="Machine").select_option("Zen 3")
    assert figures.locator("tbody tr").first.inner_text().split("\t")[1] != row[1]
    page.close()


def test_pages_in_a_browser_are_light(site: Path, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    files = {Path(unquote(urlsplit(url).path)) for url in asked}
    page.close()
    assert len(files) > 3
    assert sum(file.stat().st_size for file in files) < 300_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_in_a_browser_are_accessible(site: Path, browser: Any, scheme: str) -> None:
    """All of them, the reference and the search too; pages of the viewer have tests of their own."""
    size = {"width": 390 if scheme == "dark" else 1280, "height": 800}
    page = browser.new_page(color_scheme=scheme, viewport=size)
    wrong = []
    for path in sorted({*site.rglob("*.html")} - {*site.glob("_*/**/*.html")}):
        page.goto(path.as_uri())
        page.add_script_tag(path=str(AXE))
        for found in page.evaluate("axe.run(document)")["violations"]:
            wrong.append((str(path.relative_to(site)), found["id"], [x["html"][:200] for x in found["nodes"][:3]]))
    page.close()
    assert wrong == []


FIGURES = """async () => {
    document.querySelectorAll("article details").forEach(fold => (fold.open = true));
    await Promise.all([...document.querySelectorAll("img.drawn")].map(image => image.decode()));
}"""


@pytest.mark.parametrize("name", [page.stem for page in CHAPTERS])
def test_pages_in_a_browser_have_figures_of_their_theme(site: Path, browser: Any, name: str) -> None:
    """Whatever the system prefers, under sliders too; edges differ by up to 3 % where Chromium draws anew."""
    shown = {}
    for system, theme in product(("light", "dark"), ("light", "dark", "auto")):
        page = browser.new_page(color_scheme=system)
        page.add_init_script(f"localStorage.setItem('theme', '{theme}')")  # as the page's button does
        page.goto((site / f"learn/{name}.html").as_uri())
        page.evaluate(FIGURES)
        images = page.locator("article img.drawn").all()
        shown[system, theme] = [imread(BytesIO(image.screenshot())) for image in images]
        page.close()

    def differences(one: tuple[str, str], other: tuple[str, str]) -> list[float]:
        return [float(np.abs(x - y).max()) for x, y in zip(shown[one], shown[other], strict=True)]

    assert min(differences(("light", "light"), ("dark", "dark"))) > 0.5
    for system, other in (("light", "dark"), ("dark", "light")):
        assert max(differences((system, system), (other, system))) < 0.1
        assert max(differences((system, system), (system, "auto"))) < 0.1


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *about: object) -> None:
        pass


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address of the site on a server of this machine."""
    if not (site / "_static/run/cells.js").exists():
        pytest.skip("npm could not be reached")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


RUN = """async number => {
    const cell = document.querySelectorAll(".cell.tag_run")[number];
    const status = cell.querySelector(".run-status");
    const start = performance.now();
    const ended = new Promise(end => new MutationObserver(() => {
        if (["Done", "Failed"].includes(status.textContent)) end();
    }).observe(status, { childList: true }));
    cell.querySelector(".run-button").click();
    await ended;
    return [status.textContent, (performance.now() - start) / 1000, cell.querySelector(".cell_output")?.innerText];
}"""
RUNNING = [x for x in WRITTEN if re.search(r"^```\{(run|fold)\}", x.read_text("utf-8"), re.MULTILINE)]


@pytest.mark.parametrize("name", [str(x.relative_to(DOCS).with_suffix("")) for x in RUNNING])
def test_pages_in_a_browser_run_every_block(served: str, browser: Any, name: str) -> None:
    """Prints the seconds of each, the first with the start of Python."""
    page = browser.new_page()
    page.set_default_timeout(300_000)
    page.goto(f"{served}/{name}.html")
    blocks = page.locator(".cell.tag_run")
    assert blocks.count()
    for number in range(blocks.count()):
        how, seconds, output = page.evaluate(RUN, number)
        print(f"{name}, block {number + 1}: {seconds:.1f} s")
        assert how == "Done", output
    page.close()


ON_32_BITS = """x = np.ones((400, 400))
print((x + x + x).sum())
x, rule = np.ones((2, 8, 4)), regard.relative(np.zeros((2, 15)))
print(regard.attention(x, x, x, mask=regard.documents(np.arange(8) // 4), score=rule).shape)"""
"""What this NumPy would end at or refuse: a large intermediate result, indices of 64 bits in tables of rules."""

HEAT_MAP = """from IPython.display import SVG
regard.look(q, k, v, save="map.svg")
SVG("map.svg")"""


def test_pages_in_a_browser_run_their_blocks(served: str, site: Path, browser: Any) -> None:
    page = browser.new_page(color_scheme="dark")
    page.set_default_timeout(180_000)
    asked: list[str] = []
    page.context.on("request", lambda request: asked.append(request.url))
    page.goto(f"{served}/learn/dictionary.html")
    blocks = page.locator(".tag_run")
    first, second = blocks.nth(1), blocks.nth(2)  # after the figure
    built = second.locator(".cell_output").inner_text().strip()
    assert "0.57142857" in built
    light = ("cells.js", "run.css", "math.css", "math.woff2")
    assert not [url for url in asked if "/run/" in url and not url.split("?")[0].endswith(light)]

    def ran(block: Any, how: str = "Done") -> str:
        block.locator(".run-status", has_text=how).wait_for()
        return str(block.locator(".cell_output").inner_text()).strip()

    def write(block: Any, code: str) -> None:
        block.locator("pre[role=textbox]").click()
        page.keyboard.press("Control+A")
        page.keyboard.type(code)
        page.keyboard.press("Control+Enter")

    second.get_by_role("button", name="Run").click()
    assert ran(second) == built
    assert first.locator(".run-status").inner_text() == "Done"
    write(second, "for x in range(2):\nprint(x)\nif x:\nprint(out := 7 * x)")  # Enter indents
    assert ran(second, "Done") == "0\n1\n7"
    write(second, ON_32_BITS)
    assert ran(second) == "480000.0\n(2, 8, 4)"
    write(second, HEAT_MAP)
    second.locator("img").wait_for()
    assert second.locator("img").evaluate("async image => (await image.decode(), image.naturalWidth)") > 500
    write(second, "print(1)\nregard.attention(q, k[:, :3], v)")
    lines = ran(second, "Failed").splitlines()
    assert lines[0] == "1"
    assert [line for line in lines if "File" in line] == ['  File "block 3", line 2, in <module>']
    assert lines[-1].startswith("ValueError: query and key must have the same")
    write(second, "while True: pass")
    second.locator(".run-status", has_text="Running").wait_for()
    assert blocks.nth(3).get_by_role("button").is_disabled()
    second.get_by_role("button", name="Stop").click()
    ran(second, "Stopped")
    page.add_script_tag(path=str(AXE))
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("axe.run('article')")["violations"]  # the frame around it is the theme's
        assert [(x["id"], [node["html"][:200] for node in x["nodes"][:3]]) for x in found] == []

    page.route("**/numpy.bin", lambda route: route.fulfill(status=404))
    second.get_by_role("button", name="Run").click()
    assert ran(blocks.nth(0), "Failed") == "Python cannot run here: numpy.bin is missing (404)"  # the first that runs
    assert [url for url in asked if not url.startswith((f"{served}/", "data:"))] == []
    page.goto((site / "learn/dictionary.html").as_uri())
    second.get_by_role("button", name="Run").click()
    assert "Python needs a page from a server" in second.locator(".cell_output").inner_text()
    assert second.locator(".cell_output pre").evaluate("error => error.scrollWidth <= error.clientWidth")
    page.close()
