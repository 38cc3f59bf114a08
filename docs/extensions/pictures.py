"""Pictures of a page: what `{look}`, `{compare}` and `{film}` run. `site.js` moves them."""

import json
import os
import shutil
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from IPython.display import HTML

import regard
from regard.viewer.show.figure import Figure, maps

FOLDER = "REGARD_ISLANDS"
"""The environment variable that names the folder for pages of the viewer; the site has them in `_islands`."""


def image(figure: Figure) -> str:
    """Return a figure as an image of HTML, which holds it."""
    return f'<img class="drawn" src="{address(figure)}" alt="{escape(figure.title)}">'


def address(figure: Figure) -> str:
    """Return a figure as an address that holds it."""
    return f"data:image/svg+xml;base64,{b64encode(figure._repr_svg_().encode()).decode()}"


def look(root: str, name: str, title: str, *arguments: Any, **options: Any) -> HTML:
    """Save the viewer's page with these arguments, and link to it; a click opens it inside of the page."""
    path = Path(os.environ[FOLDER], f"{name}.html")
    regard.look(*arguments, save=path, **options)
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    link = f'<a href="{root}_islands/{path.name}">{escape(title)}</a>'
    return HTML(f'<p class="island">{link} <small>opens here, {size}</small></p>')


def compare(left: str, right: str, first: Any, second: Any) -> HTML:
    """Draw two maps of weights (n_q, n_k) over each other, the second one right of a line that a slider moves."""
    most = max(float(weights.max()) for weights in (first, second))
    pairs = ((left, first), (right, second))
    images = "".join(image(maps(f"{name}.", {name: weights}, columns=1, most=most)) for name, weights in pairs)
    return HTML(
        f'<figure class="compare" style="--at: 50%"><div>{images}</div>'
        f'<input type="range" value="50" aria-label="{escape(left)}, or {escape(right)}">'
        f"<figcaption><span>{escape(left)}</span><span>{escape(right)}</span></figcaption></figure>"
    )


def film(name: str, frames: Sequence[tuple[str, Sequence[Figure]]]) -> HTML:
    """Draw frames under a slider, the last one first; each is a caption and figures side by side."""
    caption, last = frames[-1]
    pairs = [[text, [address(x) for x in figures]] for text, figures in frames]
    told = json.dumps(pairs).replace("<", "\\u003c")
    return HTML(
        f'<figure class="film"><div>{"".join(map(image, last))}</div>'
        f'<input type="range" max="{len(frames) - 1}" value="{len(frames) - 1}" aria-label="{escape(name)}">'
        f"<figcaption>{escape(caption)}</figcaption>"
        f'<script type="application/json">{told}</script></figure>'
    )


def committed(path: str) -> Any:
    """Read a JSON file of the repository."""
    return json.loads(Path(__file__).parents[2].joinpath(path).read_text("utf-8"))


def collect(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        shutil.copytree(os.environ[FOLDER], Path(app.outdir, "_islands"), dirs_exist_ok=True)


def setup(app: Any) -> dict[str, Any]:
    folder = Path(app.doctreedir, "islands")  # pages that are not read again keep theirs
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = str(folder)
    app.connect("build-finished", collect)
    app.add_js_file("site.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
