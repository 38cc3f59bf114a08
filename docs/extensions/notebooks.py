"""Chapters as Jupyter notebooks, with a link to each below its title.

Blocks of code become cells, and what only the site has (sliders, hidden checks against its files) is left out.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from extensions.claims import CLAIM
from extensions.markup import ELSEWHERE

FOLDER = "learn/"
BLOCK = re.compile(r"^(?P<fence>`{3,})\{(?P<name>[\w-]+)\}[^\n]*\n(?P<code>.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE)
CODE = ("run", "fold", "code-cell", "look")
TEXT = (  # markup of pages, and that of notebooks
    (CLAIM.pattern, ""),
    (r"^> \[!\w+\]\n", ""),
    (r"^<summary>(.*)</summary>$", r"**\1**"),
    (r"^</?details>\n?", ""),
    (r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1"),
)


def prose(text: str) -> str:
    """Return a part of a page as Markdown of notebooks.

    >>> prose("See [masks](masks.md).\\n\\n<details>\\n<summary>Solution</summary>\\n\\nNo.\\n\\n</details>\\n")
    'See masks.\\n\\n**Solution**\\n\\nNo.'
    """
    for pattern, new in TEXT:
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    return text.strip()


def code(name: str, text: str) -> str:
    """Return the code of a block; empty if it needs the site."""
    return text.rstrip() if name in CODE and "extensions" not in text else ""


def cells(text: str) -> Iterator[dict[str, Any]]:
    """Yield the cells of a page."""
    text, end = ELSEWHERE.sub("", text), 0
    for block in [*BLOCK.finditer(text), None]:
        between = prose(text[end : block.start() if block else len(text)])
        if between:
            yield {"cell_type": "markdown", "metadata": {}, "source": between}
        if block is not None:
            end = block.end()
            if source := code(block["name"], block["code"]):
                empty = {"outputs": [], "execution_count": None}
                yield {"cell_type": "code", "metadata": {}, "source": source, **empty}


def notebook(text: str) -> str:
    """Return a page as the text of a notebook (nbformat 4.4)."""
    install = "From the documentation of regard. It needs `pip install '.[look]'` in a checkout."
    first = {"cell_type": "markdown", "metadata": {}, "source": install}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    content = {"cells": [first, *cells(text)], "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, ensure_ascii=False, indent=1)


def offer(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Write the notebook of a chapter, and link to it below the title."""
    if not page.startswith(FOLDER) or page.endswith("/index") or "body" not in context:
        return
    target = Path(app.outdir, "_notebooks", f"{page.removeprefix(FOLDER)}.ipynb")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(notebook(Path(app.env.doc2path(page)).read_text("utf-8")), "utf-8")
    link = f'<p class="notebook"><a href="../_notebooks/{target.name}" download>Download as notebook</a></p>'
    context["body"] = context["body"].replace("</h1>", f"</h1>\n{link}", 1)


def setup(app: Any) -> dict[str, Any]:
    app.connect("html-page-context", offer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
