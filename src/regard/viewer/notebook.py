"""The page as a widget of Jupyter: it asks over the notebook's own connection, and no server of ours is needed."""

from typing import Any

import numpy as np

from . import built
from .answers import Answers


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
    made.on_msg(lambda page, message, buffers: page.send(*answered(answers, message)))
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
