"""Pictures of a page: what `{look}`, `{compare}` and `{film}` run. `site.js` moves them."""

import json
import os
import shutil
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from IPython.display import HTML

import regard
from regard.viewer.show.drawing import png
from regard.viewer.show.figure import Figure
from regard.viewer.show.picture import coloured

FOLDER = "REGARD_ISLANDS"
"""The environment variable that names the folder for pages of the viewer; the site has them in `_islands`."""


def address(picture: Any) -> str:
    """Return a picture as an address that holds it: a figure, a path of an SVG file, or a map (n_q, n_k) of weights.

    >>> address([[1.0, 0.0]])[:22]
    'data:image/png;base64,'
    """
    if isinstance(picture, Figure):
        return f"data:image/svg+xml;base64,{b64encode(picture._repr_svg_().encode()).decode()}"
    if isinstance(picture, str | Path):
        return f"data:image/svg+xml;base64,{b64encode(Path(picture).read_bytes()).decode()}"
    pixels = coloured(np.asarray(picture, dtype=np.float64))
    return f"data:image/png;base64,{b64encode(png(pixels)).decode()}"


def look(root: str, name: str, title: str, *arguments: Any, **options: Any) -> HTML:
    """Save the viewer's page with these arguments, and link to it; a click opens it inside of the page."""
    path = Path(os.environ[FOLDER], f"{name}.html")
    regard.look(*arguments, save=path, **options)
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    link = f'<a href="{root}_islands/{path.name}">{escape(title)}</a>'
    return HTML(f'<p class="island">{link} <small>opens here, {size}</small></p>')


def compare(left: str, right: str, first: Any, second: Any) -> HTML:
    """Draw two pictures of one size over each other, the second one right of a line that a slider moves."""
    images = "".join(f'<img src="{address(x)}" alt="{escape(name)}">' for name, x in ((left, first), (right, second)))
    return HTML(
        f'<figure class="compare" style="--at: 50%"><div>{images}</div>'
        f'<input type="range" value="50" aria-label="{escape(left)}, or {escape(right)}">'
        f"<figcaption><span>{escape(left)}</span><span>{escape(right)}</span></figcaption></figure>"
    )


def still(title: str, picture: Any) -> str:
    """Return a picture of a film, described by its own title if it is a figure."""
    kind, about = (' class="drawn"', picture.title) if isinstance(picture, Figure) else ("", title)
    return f'<div><img{kind} src="{address(picture)}" alt="{escape(about)}"><span>{escape(title)}</span></div>'


def film(name: str, frames: Sequence[tuple[str, Mapping[str, Any]]]) -> HTML:
    """Draw frames under a slider, the last one first; each is a caption and figures or maps by their titles."""
    caption, last = frames[-1]
    images = "".join(still(title, x) for title, x in last.items())
    told = json.dumps([[text, [address(x) for x in maps.values()]] for text, maps in frames]).replace("<", "\\u003c")
    return HTML(
        f'<figure class="film"><div>{images}</div>'
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
