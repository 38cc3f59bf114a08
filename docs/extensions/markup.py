"""Markup of our own, rewritten before a page is parsed. What is in a code block of another kind stays.

Blocks are written as `{code-cell}` is, with a title behind the name:

    {look} TITLE          an island of the viewer's page: arguments of `regard.look`
    {compare} A | B       two pictures under a slider: two maps of weights (n_q, n_k), or paths of SVG files
    {film} NAME           frames under a slider: a list of (caption, {title: map or figure})
    {fold} TITLE          a `{run}` block, folded below its title

Callouts are quotations that begin with [!TIP] or another of the kinds below. The first lines of chapters, which tell
readers of the sources where the built page is, are left out of it.
"""

import re
from typing import Any

FENCE = re.compile(r"(?P<fence>`{3,}|~{3,}|:{3,})(\{(?P<name>[\w-]+)\})?(?P<title>.*)")
CALLOUT = re.compile(r"> \[!(?P<kind>[A-Z]+)\]\s*(?P<title>.*)")
ELSEWHERE = re.compile(r"^> This is the source of `.*\n> \[how to build it\].*\n\n", re.MULTILINE)
RUNS = "---\nfile_format: mystnb\n"

NUMBERED = ("DEFINITION", "PROOF", "EXAMPLE")
PLAIN = ("NOTE", "TIP", "IMPORTANT", "WARNING", "CAUTION")
TITLED = {  # with a title of their own, in the colours of another
    "ABSTRACT": ("In short", "note"),
    "QUESTION": ("Question", "seealso"),
    "CRITICAL": ("Critical", "danger"),
    "SUCCESS": ("Success", "hint"),
}


def callout(kind: str, title: str, lines: list[str]) -> list[str]:
    """Return the directive of a callout. Numbered ones are referred to by `:label:`, else by kind and title.

    >>> callout("TIP", "", ["Look."])
    [':::{tip}', 'Look.', ':::', '']
    """
    if kind in NUMBERED:
        opening = [f":::{{prf:{kind.lower()}}} {title}".rstrip()]
        if kind != "PROOF" and not lines[0].startswith(":label:"):
            opening.append(f":label: {kind.lower()}-{re.sub(r'[^a-z]+', '-', title.lower())}")
    elif kind in PLAIN:
        opening = [f":::{{admonition}} {title}", f":class: {kind.lower()}"] if title else [f":::{{{kind.lower()}}}"]
    elif kind in TITLED:
        usual, colours = TITLED[kind]
        opening = [f":::{{admonition}} {title or usual}", f":class: {kind.lower()} {colours}"]
    else:
        raise ValueError(f"a callout is one of {', '.join([*NUMBERED, *PLAIN, *TITLED])}, got {kind}")
    return [*opening, *lines, ":::", ""]


def cell(tags: str, code: list[str], **options: str) -> list[str]:
    """Return a block that MyST-NB runs."""
    named = [f"  {name}: '{text.replace(chr(39), chr(39) * 2)}'" for name, text in options.items()]
    return ["```{code-cell}", "---", f"tags: [{tags}]", *(["mystnb:", *named] if named else []), "---", *code, "```"]


def block(name: str, title: str, code: list[str], place: str, number: int) -> list[str]:
    """Return what a block of ours becomes; `place` is the page's name, in which it has this number."""
    if name == "fold":
        return cell("run, hide-input", code, code_prompt_show=title, code_prompt_hide=title)
    given = [f"    {line}" for line in code]
    names = [repr(x.strip()) for x in (title.split("|") if name == "compare" else [title])]
    if name == "look":
        names = [repr("../" * place.count("/")), repr(f"{place.replace('/', '-')}-{number}"), *names]
    function, arguments = f"_{name}", f"    {', '.join(names)},"
    called = [f"from extensions.pictures import {name} as {function}", f"{function}(", arguments, *given, ")"]
    shown = ["```python", "regard.look(", *given, ")", "```", ""] if name == "look" else []
    if len(code) == 1 and name == "look":
        shown[1:4] = [f"regard.look({code[0].strip().rstrip(',')})"]
    return [*shown, *cell("remove-input", called)]


def rewritten(text: str, place: str = "page") -> str:
    """Rewrite a page.

    >>> print(rewritten("> [!QUESTION]\\n> Why?\\n\\nBecause."), end="")
    :::{admonition} Question
    :class: question seealso
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
            if opened["name"] in ("look", "compare", "film", "fold"):
                numbers += 1
                made += block(opened["name"], opened["title"].strip(), inner, place, numbers)
            else:
                made += [line, *inner, *closing]
        elif called:
            inner = []
            while lines and lines[0].startswith(">"):
                inner.append(re.sub(r"^> ?", "", lines.pop(0)))
            made += callout(called["kind"], called["title"].strip(), inner)
        else:
            made.append(line)
    return "\n".join(made) + "\n"


def rewrite(app: Any, name: str, source: list[str]) -> None:
    if source[0].startswith(RUNS):
        source[0] = rewritten(source[0], name)


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
