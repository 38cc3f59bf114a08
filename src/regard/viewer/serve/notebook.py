"""The page as a widget of Jupyter, over the notebook's own connection.

anywidget is all that a host has to know: JupyterLab, Notebook, VS Code and Colab run one module and one style sheet,
which load nothing else.
"""

from base64 import b64encode
from html import escape
from secrets import token_hex
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

    A picture is shown before it, which the page hides when the kernel answers: for where none runs, as on a forge and
    in the HTML of nbconvert, which prefers a widget's state to pictures in the same output.
    """
    from anywidget import AnyWidget
    from IPython.display import publish_display_data
    from traitlets import Unicode

    files = built.page()

    class Page(AnyWidget):
        _esm = files["page.js"]
        _css = files["page.css"]
        still = Unicode().tag(sync=True)

        def _repr_mimebundle_(self, **options: Any) -> Any:
            shown = super()._repr_mimebundle_(**options)
            if shown is None:
                return None
            if drawn := still(next(iter(answers.scenes.values())), self.still):
                publish_display_data(drawn)
            return shown

    view = Page(still=token_hex(8))
    view.answers = answers

    def answer(page: Any, message: Any, buffers: Any) -> None:
        if message == {"leave": True}:
            answers.rest()
        else:
            page.send(*answered(answers, message))

    view.on_msg(answer)
    return view


def still(scene: Scene, name: str) -> dict[str, str]:
    """Return the picture of a scene by its types, or nothing for a long scene.

    name: that of the HTML element around it, which the page looks for.
    """
    if scene.pairs > PAIRS:
        return {}
    view = Still(scene)
    png = drawing.has_png()
    kind, drawn = "image/png" if png else "image/svg+xml", picture(view.data, view.choice, "png" if png else "svg")
    coded = b64encode(drawn).decode("ascii")
    says = escape(" ".join(view.data.says(view.choice)))
    html = f'<img data-regard-still="{name}" style="max-width: 100%" alt="{says}" src="data:{kind};base64,{coded}">'
    return {kind: coded if png else drawn.decode(), "text/html": html}


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
