"""One HTML file with the page and all that it shows.

It opens from disk, without a server and without a network. Answers of a server are embedded, except rows, columns and
tiles: the page computes these from queries, keys and lse, by a module of WebAssembly for the rules of the layer. Layers
with arrays of all pairs have the tiles of the exact level instead.
"""

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from html import escape
from typing import Any, Protocol

import numpy as np

from regard.engines import engines
from regard.examplemodel import ExampleModel
from regard.interpret.heads import NOTABLE
from regard.interpret.table import CAUTION
from regard.rules import Mask, Score
from regard.rules.outside import lookups
from regard.viewer.data import pyramid
from regard.viewer.data.questions import MOST_TOKENS, Answer, Query
from regard.viewer.scene.labels import encodable, readable
from regard.viewer.scene.scenes import Array, Head, Scene, SceneLayer
from regard.viewer.scene.sources import ABOUT_MODEL
from regard.viewer.serve import built

LARGEST = 64 * 2**20
"""Bytes of numbers, before they become text, that a file may hold."""

TITLE = "<title>regard</title>"
STYLE, SCRIPT = '<link rel="stylesheet" href="./page.css">', '<script type="module" src="./page.js"></script>'
KINDS = ("mass", "max")

ON_PAGE = 2048
"""Queries and keys of a tile that a page computes from queries and keys: some 0.2 s of work."""

FEW = 2**20
"""Pairs of a head up to which a page that holds a model makes its thumbnails."""

THUMB = 64
"""Pixels on a side of a thumbnail. Of no more pairs than it has pixels, the page makes it from the weights."""

DIGITS = 6
"""Digits of the numbers along a sequence."""


class Source(Protocol):
    """Source of a file: scenes by id, answers of a server about them, and their heads."""

    @property
    def scenes(self) -> Mapping[str, Scene]: ...
    def get(self, path: str, query: Query | None = None) -> Answer: ...
    def head(self, name: str, layer: int, head: int, b: int = 0) -> Head: ...


def page(answers: Source, name: str, limit: int = LARGEST, model: ExampleModel | None = None) -> str:
    """Return the file for the scene with this id: its first batch element.

    model: the one that made the scene; the file holds it, and reads texts that are typed.

    Raises ValueError, before any work, if what it needs is more than `limit` bytes.
    """
    scene = answers.scenes[name]
    layers = [SavedLayer(layer, module_of(layer)) for layer in scene.layers]
    half = sum(x.size(4) for x in layers) > limit
    size = sum(x.size(2 if half else 4) for x in layers)
    if size > limit:
        p = scene.layers[0].problem
        heads = sum(layer.heads for layer in scene.layers)
        raise ValueError(
            f"one file should hold at most {limit / 2**20:.0f} MiB of numbers; {heads} heads over {p.n_q} queries and "
            f"{p.n_k} keys are {size / 2**20:.0f}. Take a shorter text, or save .npz"
        )
    modules = list(dict.fromkeys(x.module for x in layers if x.module is not None))
    data: dict[str, Any] = {
        "answers": _answers(answers, name, layers, editable=model is not None),
        "exact": _exact(answers, name, layers, np.float16 if half else np.float32, modules),
        "modules": [b64encode(x).decode("ascii") for x in modules],
    }
    if model is not None:
        data["model"] = _model(model, compiled=bool(modules))
    files = built.page()
    text = files["index.html"]
    style, script = (inside(files[f"page.{kind}"], tag) for kind, tag in (("css", "style"), ("js", "script")))
    licences = f'<template id="licences"><pre>{escape(files["LICENSES.txt"])}</pre></template>'
    embedded = f'<script type="application/json" id="regard-data">{_json(data)}</script>'
    # Modules are compiled in a worker, whose code is in the script.
    compiling, worker = (" 'wasm-unsafe-eval'", "worker-src blob:; ") if modules else ("", "")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}{compiling}; {worker}style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    for old, new in (
        (TITLE, f"<title>regard look: {escape(encodable(readable(scene.name)))}</title>"),
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
        "weights": b64encode(model.to_safetensors()).decode("ascii"),
        "note": ABOUT_MODEL,
        "caution": {"text": CAUTION, "least": NOTABLE},
    }
    if compiled:
        from regard.engines.cpu.wasm.product import product

        stored["product"] = b64encode(product()).decode("ascii")
    return stored


def module_of(layer: SceneLayer) -> bytes | None:
    """Return the module that computes a layer's weights in a page.

    None without a compiler, and for layers with arrays of all pairs or rules that a module does not take.
    """
    p = layer.problem
    rules = [x for x in (p.mask, p.score) if x is not None]
    known = p.bias is None and not any(x.dense or x.foreign or lookups(x.node) for x in rules)
    shared = p.origin[2] == 0 and bool((p.offset == p.offset[0]).all())
    if not known or not shared or engines()["cpu"].state() is not None:
        return None
    return _module(p.mask, p.score)


@lru_cache(maxsize=16)
def _module(mask: Mask | None, score: Score | None) -> bytes | None:
    from regard.engines.cpu.wasm.module import module

    try:
        return module(mask, score, forward=False, maps=True)
    except ValueError:  # rules of the C library, or too long ones
        return None


@dataclass(frozen=True, eq=False)
class SavedLayer:
    """A layer in a file, with the module that computes its weights, or None."""

    layer: SceneLayer
    module: bytes | None

    @property
    def computed(self) -> bool:
        """True if the page computes weights of this layer from queries and keys."""
        return self.layer.plain or self.module is not None

    @property
    def all_levels(self) -> pyramid.Levels:
        """All levels of its maps."""
        return pyramid.Levels(self.layer.problem.n_q, self.layer.problem.n_k)

    @property
    def levels(self) -> tuple[range, tuple[str, ...]]:
        """The levels whose tiles are embedded, and their kinds; the page computes others."""
        levels = self.all_levels
        if not self.computed:
            return range(levels.finest, levels.finest + 1), KINDS[:1]  # in the exact level both kinds are the same
        return range(sum(levels.cell(level) * pyramid.TILE > ON_PAGE for level in range(levels.kept + 1))), KINDS

    @property
    def tiles(self) -> list[str]:
        """Paths of the tiles that are embedded."""
        levels, (embedded, kinds) = self.all_levels, self.levels
        found = []
        for level in embedded:
            height, width = (-(-size // pyramid.TILE) for size in levels.size(level))
            found += [f"{level}/{x}/{y}?kind={kind}" for y in range(height) for x in range(width) for kind in kinds]
        return found

    def size(self, itemsize: int) -> int:
        """Bytes of its numbers in the file, about."""
        p = self.layer.problem
        levels, (embedded, kinds) = self.all_levels, self.levels
        cells = len(kinds) * sum(int(np.prod(levels.size(level))) for level in embedded)
        arrays = p.n_q * (itemsize * p.d + 4) + p.n_k * itemsize * (p.d + p.d_v * self.layer.has_values)
        return self.layer.heads * (2 * cells + (arrays if self.computed else 0))


def _answers(answers: Source, name: str, layers: Sequence[SavedLayer], editable: bool) -> dict[str, Any]:
    scene = answers.scenes[name]
    paths = ["words", f"{name}/heads", f"{name}/finding", f"{name}/tour"]
    for axis, tokens in (("query", scene.query_tokens), ("key", scene.key_tokens)):
        for start in range(0, max(len(tokens), 1), MOST_TOKENS):
            paths.append(f"{name}/tokens?axis={axis}&start={start}&stop={start + MOST_TOKENS}")
    for number, saved in enumerate(layers):
        tiles, p = saved.tiles, saved.layer.problem
        for head in range(saved.layer.heads):
            paths += [f"{name}/{what}/{number}/{head}" for what in ("map", "profiles", "variance")]
            paths += [f"{name}/tile/{number}/{head}/{tile}" for tile in tiles]
        # Last, when the coarse levels are known, so that no thumbnail is an estimate.
        if p.n_q * p.n_k > (FEW if editable else THUMB**2):
            paths += [f"{name}/thumbs/{number}?size={THUMB}&kind={kind}" for kind in KINDS]
    listed = answers.get("scenes").content
    assert isinstance(listed, dict)
    mine = [scene | {"editable": editable} for scene in listed["scenes"] if scene["id"] == name]
    return {"api/scenes": listed | {"scenes": mine}} | {f"api/{path}": _plain(answers, path) for path in paths}


def _plain(answers: Source, path: str) -> dict[str, Any]:
    bare, _, query = path.partition("?")
    found = answers.get(bare, dict(part.partition("=")[::2] for part in query.split("&") if part))
    if found.status != 200:
        raise RuntimeError(f"{path}: {found.content}")
    if not isinstance(found.content, dict):
        return {f"f{8 * found.content.itemsize}": _base64(found.content)}
    return rounded(found.content) if "/profiles/" in path or "/variance/" in path else found.content


def rounded(x: Any) -> Any:
    """JSON with as many digits as a drawing needs.

    >>> rounded({"values": [0.123456789, 12, None]})
    {'values': [0.123457, 12, None]}
    """
    if isinstance(x, dict):
        return {name: rounded(y) for name, y in x.items()}
    if isinstance(x, list):
        return [rounded(y) for y in x]
    return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x


def _exact(
    answers: Source, name: str, layers: Sequence[SavedLayer], dtype: Any, modules: Sequence[bytes]
) -> dict[str, Any]:
    """Return queries, keys and lse of every head that the page can compute."""
    made = {}
    for number, saved in enumerate(layers):
        layer = saved.layer
        if not saved.computed:
            continue
        kernel = {} if saved.module is None else {"module": modules.index(saved.module)}
        for at in range(layer.heads):
            head = answers.head(name, number, at)
            v = {"v": _base64(head.problem.value[0].astype(dtype)), "d_v": head.problem.d_v}
            made[f"{name}/{number}/{at}"] = stored(layer, head, dtype) | kernel | (v if layer.has_values else {})
    return made


def stored(layer: SceneLayer, head: Head, dtype: Any) -> dict[str, Any]:
    """Return the queries, keys and lse of a head of this layer."""
    p = head.problem
    return {
        "n_q": p.n_q, "n_k": p.n_k, "d": p.d, "dtype": "f16" if dtype == np.float16 else "f32",
        "q": _base64(p.query[0].astype(dtype)), "k": _base64(p.key[0].astype(dtype)),
        "lse": _base64(head.lse.astype(np.float32)), "scale": p.scale,
        "causal": layer.plain and p.mask is not None,
        "mask": "" if p.mask is None else str(p.mask), "score": "" if p.score is None else str(p.score),
        "offset": int(p.offset[0]), "b": p.origin[0], "h": p.origin[1], "ruled": not layer.plain,
        "sink": p.sink is not None, "no_values": layer.no_values,
    }  # fmt: skip


def inside(code: str, tag: str) -> str:
    """Escape code so that it cannot end the element around it."""
    return re.sub(f"<(/{tag}|!--)", r"\\x3c\1" if tag == "script" else r"\\3c \1", code, flags=re.IGNORECASE)


def _base64(x: Array) -> str:
    return b64encode(np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<"), copy=False).tobytes()).decode("ascii")


def _json(content: dict[str, Any]) -> str:
    """JSON that cannot end the element around it, whatever the tokens are."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _digest(code: str) -> str:
    return f"'sha256-{b64encode(sha256(code.encode()).digest()).decode('ascii')}'"
