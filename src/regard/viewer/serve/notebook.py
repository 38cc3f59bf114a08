"""The page as a widget of Jupyter, over the notebook's own connection.

anywidget is all that a host has to know: JupyterLab, Notebook, VS Code and Colab run one module and one style sheet,
which load nothing else.
"""

from base64 import b64encode
from typing import Any

from regard.viewer.scene.scenes import Scene
from regard.viewer.serve import built
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.codecs import kind, raw, split_query
from regard.viewer.serve.saving import Still
from regard.viewer.show import drawing
from regard.viewer.show.picture import picture

PAIRS = 2**23
"""Pairs in all heads up to which a picture is beside the page: some 2 s of work, before the cell shows anything."""

PATIENCE = 0.1
"""Seconds that a question may hold the kernel up, which runs cells and answers in turn."""


def widget(answers: Answers) -> Any:
    """Return an anywidget that shows the page.

    Beside it in the cell's output is a picture, for where no kernel runs: on a forge, in a PDF.
    """
    from anywidget import AnyWidget

    files = built.page()

    class Page(AnyWidget):
        _esm = files["page.js"]
        _css = files["page.css"]

        def _repr_mimebundle_(self, **options: Any) -> Any:
            shown = super()._repr_mimebundle_(**options)
            if shown is None:
                return None
            data, metadata = shown
            return data | still(next(iter(answers.scenes.values()))), metadata

    made = Page()
    made.answers = answers

    def answer(page: Any, message: Any, buffers: Any) -> None:
        if message == {"leave": True}:
            answers.rest()
        else:
            page.send(*answered(answers, message))

    made.on_msg(answer)
    return made


def still(scene: Scene) -> dict[str, Any]:
    """Return the picture of a scene by its type, or nothing for a long scene."""
    if scene.pairs > PAIRS:
        return {}
    made = Still(scene)
    if drawing.has_png():
        return {"image/png": b64encode(picture(made.data, made.choice, "png")).decode("ascii")}
    return {"image/svg+xml": picture(made.data, made.choice, "svg").decode()}


def answered(answers: Answers, message: Any) -> tuple[dict[str, Any], list[bytes]]:
    """Return the message and the buffers that answer a page.

    message: {id, path} or {id, path, method, body}.
    """
    if not isinstance(message, dict) or not isinstance(path := message.get("path"), str):
        return {"id": None, "status": 400, "json": {"error": "a question needs a path"}}, []
    method = "POST" if message.get("method") == "POST" else "GET"
    answer = answers.ask(method, *split_query(path.removeprefix("api/")), message.get("body"))
    head = {"id": message.get("id"), "status": answer.status}
    if isinstance(answer.content, dict):
        return head | {"json": answer.content}, []
    return head | {"type": kind(answer.content), "exact": answer.exact}, [raw(answer.content)]
