"""Markup of our own, rewritten before a page is parsed. What is in a code block of another kind stays.

Blocks are written as `{code-cell}` is, with a title behind the name:

    {look} TITLE          an island of the viewer's page: a call of `regard.look`
    {compare} A | B       two maps of weights (n_q, n_k) under a slider
    {film} NAME           frames under a slider: a list of (caption, figures)
    {fold} TITLE          a `{run}` block, folded below its title
    {run} TAGS            tags of MyST-NB; so too for `{code-cell}`
    {names} MODULES       the docstrings of the public names that these modules have

A folded block below an image line of `pictures/` computes that figure, which `figures.py` compares. Pages with blocks
need no header. `sh {demo}` is the command of `demo.py`.

Callouts are quotations that begin with [!TIP] or another of the kinds that code hosts know. The first lines of a
chapter, which tell readers of its source where the built page is, are left out of the page. The list of pages in an
index is the site's table of contents.
"""

import re
from inspect import isfunction
from typing import Any

import regard

FENCE = re.compile(r"(?P<fence>`{3,}|~{3,}|:{3,})(?:sh )?(\{(?P<name>[\w-]+)\})?(?P<title>.*)")
CALLOUT = re.compile(r"> \[!(?P<kind>[A-Z]+)\]")
FIGURE = re.compile(r".*\]\((pictures/[\w-]+\.svg)\)")
ELSEWHERE = re.compile(r"^> This is the source of `.*\n> \[how to build it\].*\n\n", re.MULTILINE)
RUNS = re.compile(r"^`{3,}\{(code-cell|run|fold|look|compare|film)\}", re.MULTILINE)
HEADER = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n"
CONTENTS = ("index", "benchmarks", "explanation", "howto/index", "learn/index", "reference/index")
"""The pages whose lists of pages are the contents of the site."""

ENTRY = re.compile(r"^(?:-|\d+\.) \[(?P<title>[^]]+)\]\((?P<page>[\w./-]+)\.md\): ", re.MULTILINE)

CALLOUTS = ("NOTE", "TIP", "IMPORTANT", "WARNING", "CAUTION")


def callout(kind: str, lines: list[str]) -> list[str]:
    """Return the directive of a callout.

    >>> callout("TIP", ["Look."])
    [':::{tip}', 'Look.', ':::', '']
    """
    if kind not in CALLOUTS:
        raise ValueError(f"a callout is one of {', '.join(CALLOUTS)}, got {kind}")
    return [f":::{{{kind.lower()}}}", *lines, ":::", ""]


def cell(tags: str, code: list[str], above: str = "", **options: str) -> list[str]:
    """Return a block that MyST-NB runs; the line above may show the committed figure that it computes."""
    header = [f"tags: [{tags}]"]
    if figure := FIGURE.fullmatch(above):
        header = [f"tags: [{tags}, remove-output]", f"figure: {figure[1]}"]
    if options:
        header += ["mystnb:", *(f"  {name}: '{text.replace(chr(39), chr(39) * 2)}'" for name, text in options.items())]
    return ["```{code-cell}", "---", *header, "---", *code, "```"]


def block(name: str, title: str, code: list[str], place: str, number: int) -> list[str]:
    """Return what a block of ours becomes; `place` is the page's name, in which it has this number."""
    if name == "look":
        names = "../" * place.count("/"), f"{place.replace('/', '-')}-{number}", title
        called = "\n".join(code).replace("regard.look(", f"_look({', '.join(map(repr, names))}, ", 1).splitlines()
        shown = ["```python", *code, "```", ""]
    else:
        names = tuple(x.strip() for x in (title.split("|") if name == "compare" else [title]))
        called = [f"_{name}(", f"    {', '.join(map(repr, names))},", *(f"    {line}" for line in code), ")"]
        shown = []
    return [*shown, *cell("remove-input", [f"from extensions.pictures import {name} as _{name}", *called])]


def names(homes: str) -> list[str]:
    """Return the directives for the public names of some modules."""
    lines = ["```{eval-rst}", ".. currentmodule:: regard", ""]
    for name in " ".join(regard._HOMES[home] for home in homes.split()).split():
        x = getattr(regard, name)
        kind = "function" if isfunction(x) else "exception" if issubclass(x, Exception) else "class"
        lines += [f".. auto{kind}:: {name}", *(["   :members:"] if kind == "class" else [])]
    return [*lines, "```"]


def rewritten(text: str, place: str = "page") -> str:
    """Rewrite a page.

    >>> print(rewritten("> [!NOTE]\\n> Why?\\n\\nBecause."), end="")
    :::{note}
    Why?
    :::
    <BLANKLINE>
    <BLANKLINE>
    Because.
    """
    lines, made, numbers = ELSEWHERE.sub("", text).splitlines(), list[str](), 0
    while lines:
        line = lines.pop(0)
        opened, called = FENCE.fullmatch(line), CALLOUT.fullmatch(line)
        if opened and not opened["fence"].startswith(":"):
            inner = []
            while lines and not lines[0].startswith(opened["fence"]):
                inner.append(lines.pop(0))
            closing = [lines.pop(0)] if lines else []
            name, title, above = opened["name"], opened["title"].strip(), next((x for x in reversed(made) if x), "")
            if name in ("look", "compare", "film"):
                numbers += 1
                made += block(name, title, inner, place, numbers)
            elif name == "fold":
                made += cell("run, hide-input", inner, above, code_prompt_show=title, code_prompt_hide=title)
            elif name == "names":
                made += names(title)
            elif name == "demo":
                made += ["```{demo}", *inner, "```"]
            elif name in ("code-cell", "run") and title:
                made += cell(f"run, {title}" if name == "run" else title, inner, above)
            else:
                made += [line, *inner, *closing]
        elif called:
            inner = []
            while lines and lines[0].startswith(">"):
                inner.append(re.sub(r"^> ?", "", lines.pop(0)))
            made += callout(called["kind"], inner)
        else:
            made.append(line)
    return "\n".join(made) + "\n"


def contents(text: str) -> str:
    """Return the table of contents that the list of a page stands for.

    >>> contents("- [Masks](masks.md): which keys count.\\n").splitlines()[-2]
    'Masks <masks>'
    """
    entries = [f"{x['title'].replace('`', '')} <{x['page']}>" for x in ENTRY.finditer(text)]
    return "\n".join(["", "```{toctree}", ":hidden:", "", *entries, "```", ""])


def rewrite(app: Any, name: str, source: list[str]) -> None:
    header = HEADER if RUNS.search(source[0]) else ""
    source[0] = header + rewritten(source[0], name)
    if name in CONTENTS:
        source[0] += contents(source[0])


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
