"""The page as a widget of Jupyter: it asks over the notebook's own connection, and no server of ours is needed.

anywidget is all that a host has to know: JupyterLab, Notebook, VS Code and Colab run one module and one style sheet,
which load nothing else.
"""

from typing import Any

import numpy as np

from regard.viewer.serve import built
from regard.viewer.serve.answers import Answers

PATIENCE = 0.1
"""Seconds that a question may hold the kernel up, which runs cells and answers in turn."""


def widget(answers: Answers) -> Any:
    """An anywidget that shows the page. Raises ImportError where anywidget is missing."""
    try:
        from anywidget import AnyWidget
    except ImportError:
        raise ImportError("in a notebook look needs anywidget: pip install 'regard[notebook]'") from None
    files = built.page()

    class Page(AnyWidget):
        _esm = files["page.js"]
        _css = files["page.css"]

    made = Page()
    made.answers = answers

    def answer(page: Any, message: Any, buffers: Any) -> None:
        if message == {"leave": True}:
            answers.rest()
        else:
            page.send(*answered(answers, message))

    made.on_msg(answer)
    return made


def answered(answers: Answers, message: Any) -> tuple[dict[str, Any], list[bytes]]:
    """The message and the buffers that answer a message of the page, {id, path} or {id, path, method, body}."""
    if not isinstance(message, dict) or not isinstance(path := message.get("path"), str):
        return {"id": None, "status": 400, "json": {"error": "a question needs a path"}}, []
    path, _, query = path.removeprefix("api/").partition("?")
    if message.get("method") == "POST":
        found = answers.post(path, message.get("body"))
    else:
        found = answers.get(path, dict(part.partition("=")[::2] for part in query.split("&") if part))
    head = {"id": message.get("id"), "status": found.status}
    if isinstance(found.content, dict):
        return head | {"json": found.content}, []
    raw = np.ascontiguousarray(found.content)
    return head | {"type": f"f{8 * raw.itemsize}", "exact": found.exact}, [raw.tobytes()]
