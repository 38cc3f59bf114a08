"""One HTML file that holds everything it shows: no server, no network, no library."""

import json
import zlib
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .colour import INK, VIRIDIS, tone
from .labels import encodable, printable, readable
from .model_view import CAVEAT, FEATURED, KINDS, Choice, LookData, Weights, pooled

LARGEST = 64 * 2**20
"""Bytes of weights, before compression, that a report may hold: 64 heads over 1,000 tokens."""

_SIDE = 48


def check_fits(n: int, heads: int, causal: bool = True) -> None:
    """Raise ValueError if the weights (n, n) of so many heads are more than one file should hold."""
    size = 2 * heads * (n * (n + 1) // 2 if causal else n * n)
    if size > LARGEST:
        raise ValueError(
            f"a page holds every weight: {heads} heads over {n} tokens are {size / 2**20:.0f} MiB, "
            f"more than {LARGEST / 2**20:.0f}; shorten the text, or save a .png"
        )


def page(data: LookData, choice: Choice) -> str:
    """The page as text: heads, the chosen head's map, the text shaded by what a token attends to.

    Raises ValueError if the weights are more than 64 MiB in 16-bit steps.
    """
    check_fits(data.n, data.layers * data.heads, data.causal)
    css, js = (files(__package__).joinpath(f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    template = Template(files(__package__).joinpath("report.html").read_text("utf-8"))
    start = encodable(readable(" ".join(data.text.split())))[:60]
    return template.substitute(
        policy=f"default-src 'none'; script-src {_digest(js)}; style-src {_digest(css)}; base-uri 'none'; "
        "form-action 'none'",
        title=escape(f"regard look: {start}"),
        about=escape(f"{data.model} · {data.n} tokens, {data.layers} layers of {data.heads} heads"),
        css=css,
        js=js,
        strongest=_strongest(data),
        text=_text(data),
        following=_following(data),
        caveat=escape(CAVEAT),
        data=_json(_content(data, choice)),
    )


def packed(weights: Weights, causal: bool) -> tuple[bytes, float]:
    """Weights (n, n) in 16-bit steps, little-endian and deflated, and the size of a step: at most max / 65535.

    Causal weights are their lower triangle, row after row. A weight is its step count times the step, within half a
    step.
    """
    flat = weights[np.tril_indices(len(weights))] if causal else weights.ravel()
    top = float(flat.max(initial=0.0))
    step = top / 65535 if top > 0 else 1.0
    return zlib.compress(np.rint(flat.astype(np.float64) / step).astype("<u2").tobytes(), 6), step


def unpacked(content: bytes, step: float, n: int, causal: bool) -> NDArray[np.float64]:
    """What :func:`packed` packed: weights (n, n), 0 where a causal model does not see."""
    flat = np.frombuffer(zlib.decompress(content), "<u2") * step
    if not causal:
        return flat.reshape(n, n)
    weights = np.zeros((n, n))
    weights[np.tril_indices(n)] = flat
    return weights


def _content(data: LookData, choice: Choice) -> dict[str, Any]:
    weights, scales, thumbnails = [], [], []
    side = min(_SIDE, data.n)
    for layer in range(data.layers):
        for head in range(data.heads):
            seen = data.weights(layer, head)
            content, step = packed(np.nan_to_num(seen), data.causal)
            weights.append(b64encode(content).decode("ascii"))
            scales.append(step)
            thumbnails.append(_thumbnail(seen, side))
    return {
        "n": data.n,
        "layers": data.layers,
        "heads": data.heads,
        "causal": data.causal,
        "labels": [printable(token) for token in data.tokens],
        "kinds": [{"name": kind.name, "scores": _nullable(np.asarray(data.statistics[kind.name]))} for kind in KINDS],
        "choice": {"layer": choice.layer, "head": choice.head, "token": choice.token},
        "ramps": {"dark": VIRIDIS, "light": INK},
        "side": side,
        "thumbnails": thumbnails,
        "scales": scales,
        "weights": weights,
    }


def _thumbnail(weights: Weights, side: int) -> str:
    """The largest weight of every block as a step from 0 to 254 of the colour scale; 255 where nothing is visible."""
    level = tone(pooled(weights, side, side))
    steps = np.where(np.isnan(level), 255, np.rint(np.nan_to_num(level) * 254)).astype(np.uint8)
    return b64encode(steps.tobytes()).decode("ascii")


def _nullable(scores: NDArray[np.floating]) -> list[list[float | None]]:
    return [[None if np.isnan(score) else round(float(score), 6) for score in row] for row in scores]


def _json(content: dict[str, Any]) -> str:
    """JSON that cannot end the element around it, whatever the tokens are."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _digest(code: str) -> str:
    return f"'sha256-{b64encode(sha256(code.encode()).digest()).decode('ascii')}'"


def _text(data: LookData) -> str:
    spans = (
        f'<span role="option" id="t{k}">{escape(encodable(readable(token)))}</span>'
        for k, token in enumerate(data.tokens)
    )
    return escape(data.separator).join(spans)


def _following(data: LookData) -> str:
    guesses = ", ".join(f"“{escape(encodable(printable(token)))}” {share:.1%}" for token, share in data.following)
    return f"The model expects next: {guesses}" if guesses else ""


def _strongest(data: LookData) -> str:
    rows = []
    for kind in FEATURED:
        rows.append(
            f'<tbody><tr><th scope="rowgroup" colspan="3">{escape(kind.name)}'
            f"<small>{escape(kind.meaning)}</small></th></tr>"
        )
        for layer, head, score in data.strongest(kind.name):
            rows.append(
                f'<tr><td><button type="button" data-head="{layer} {head}">L{layer} H{head}</button></td>'
                f'<td>{score:.3f}</td><td><meter value="{score:.4f}">{score:.3f}</meter></td></tr>'
            )
        if not data.strongest(kind.name):
            rows.append('<tr><td colspan="3">nothing repeats</td></tr>')
        rows.append("</tbody>")
    return "\n".join(rows)
