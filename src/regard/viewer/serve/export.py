"""One HTML file with the page and all that it shows, which opens without a server and without a network.

Format 3: `answers` are JSON that is deflated (zlib), in base64. `exact` has a head's shape, rules and `dtype`. "f32"
means float32, "u16" the codes of `packed`, with their scales. Query heads that share keys and values name the first of
them as `keys_of`. Format 2 has the answers as they are. Format 1, without a number, has the keys of every head, in
float32 or float16 ("f16"); pages read all three.

A file of format 3 with `rows` has no heads, but rows of words over pictures (`wordrows`).
"""

import json
import re
import zlib
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from typing import Any

from regard.examplemodel import ExampleModel
from regard.interpret.heads import NOTABLE
from regard.interpret.table import CAUTION
from regard.viewer.data.questions import Answer
from regard.viewer.scene.labels import encodable, readable
from regard.viewer.scene.scenes import Head
from regard.viewer.scene.sources import ABOUT_MODEL
from regard.viewer.serve import built
from regard.viewer.serve.codecs import base64, kind, rounded
from regard.viewer.serve.contents import Contents
from regard.viewer.serve.kernels import product

FORMAT = 3
"""The version of the data in a file."""

DRAWN = re.compile("/(profiles|variance)/|/heads$")
"""The answers whose numbers need no more digits than a drawing shows."""

TITLE = "<title>regard</title>"
STYLE, SCRIPT = '<link rel="stylesheet" href="./page.css">', '<script type="module" src="./page.js"></script>'


def page(
    contents: Contents,
    scenes: dict[str, Any],
    answers: Mapping[str, Answer],
    heads: Mapping[tuple[int, int], Head],
    model: ExampleModel | None = None,
    rows: dict[str, Any] | None = None,
) -> str:
    """Return the file of a scene.

    scenes: the answer that lists it. answers: those at `contents.paths`. heads: those of `contents.computed`. model:
    the one that made the scene; the file holds it, and reads texts that are typed. rows: those of words, as
    `WordRows.stored` returns them.
    """
    name = contents.name
    more = {"editable": contents.editable} | ({} if rows is None else {"held": rows["held"]})
    mine = [scene | more for scene in scenes["scenes"] if scene["id"] == name]
    data: dict[str, Any] = {
        "format": FORMAT,
        "answers": _deflated(
            {"api/scenes": scenes | {"scenes": mine}}
            | {f"api/{path}": _plain(path, answer) for path, answer in answers.items()}
            | ({} if rows is None else {f"api/{name}/finding": rows["finding"]})
        ),
        "exact": contents.exact(heads),
        "modules": [base64(x) for x in contents.modules],
    }
    if rows is not None:
        data["rows"] = {part: rows[part] for part in ("cells", "layers")}
    if model is not None:
        data["model"] = _model(model, compiled=bool(contents.modules))
    return _html(contents, data)


def _html(contents: Contents, data: dict[str, Any]) -> str:
    """Return the built page with the data inside."""
    files = built.page()
    text = files["index.html"]
    style, script = (inside(files[f"page.{ending}"], tag) for ending, tag in (("css", "style"), ("js", "script")))
    licences = f'<template id="licences"><pre>{escape(files["LICENSES.txt"])}</pre></template>'
    embedded = f'<script type="application/json" id="regard-data">{_json(data)}</script>'
    # Modules are compiled in a worker, whose code is in the script.
    compiling, worker = (" 'wasm-unsafe-eval'", "worker-src blob:; ") if contents.modules else ("", "")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}{compiling}; {worker}style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    for old, new in (
        (TITLE, f"<title>regard look: {escape(encodable(readable(contents.scene.name)))}</title>"),
        (STYLE, f"{meta}<style>{style}</style>"),
        (SCRIPT, f'{licences}{embedded}<script type="module">{script}</script>'),
    ):
        if text.count(old) != 1:
            raise RuntimeError(f"the built page must hold {old} once")
        text = text.replace(old, new)
    return text


def _model(model: ExampleModel, compiled: bool) -> dict[str, Any]:
    """Return what a page needs to run the model.

    compiled: add the kernel of its products.
    """
    stored = {
        "weights": base64(model.to_safetensors()),
        "note": ABOUT_MODEL,
        "caution": {"text": CAUTION, "least": NOTABLE},
    }
    return stored | ({"product": base64(product())} if compiled else {})


def _plain(path: str, answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON."""
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.content!r}")
    if not isinstance(answer.content, dict):
        return {kind(answer.content): base64(answer.content)}
    return rounded(answer.content) if DRAWN.search(path) else answer.content


def _deflated(content: dict[str, Any]) -> str:
    """Return JSON as text of a third of its size: names and labels are the same for every head."""
    return base64(zlib.compress(_json(content).encode()))


def inside(code: str, tag: str) -> str:
    """Escape code so that it cannot end the element around it."""
    return re.sub(f"<(/{tag}|!--)", r"\\x3c\1" if tag == "script" else r"\\3c \1", code, flags=re.IGNORECASE)


def _json(content: dict[str, Any]) -> str:
    """JSON that cannot end the element around it, whatever the tokens are."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _digest(code: str) -> str:
    return f"'sha256-{base64(sha256(code.encode()).digest())}'"
