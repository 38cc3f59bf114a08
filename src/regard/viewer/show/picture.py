"""The heads of a model as a picture, for papers and slides."""

import math
from textwrap import wrap
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from regard.interpret.formats import figure, score_text, weight_text
from regard.viewer.data import sentences
from regard.viewer.data.scores import FEATURED
from regard.viewer.data.summary import Choice, LookData, pooled
from regard.viewer.scene.labels import encodable, printable
from regard.viewer.show.colour import INK, ramp, readable_on, tone
from regard.viewer.show.drawing import Box, Canvas, Image, Text

WIDTH, HEIGHT = 1950, 1300
"""Size of the picture in pixels."""

_SOFT, _LINE, _ACCENT = "#5a6270", "#dcdfe4", "#1c5fb8"
_MAP = 800  # pixels of the map, and its maximum rows and columns, so that each has a pixel
_SINK = 32  # pixels of a learned sink's column and the gap after it
_SENTENCES = 7  # lines below the map, at most
_TOP = 84  # the baseline of headings
_LEFT, _MIDDLE, _RIGHT = 24, 600, 1487


def picture(data: LookData, choice: Choice, form: Literal["png", "svg"] = "svg") -> bytes:
    """Return an SVG or PNG file of 1950 × 1300 pixels.

    The picture shows all heads, the strongest ones, the chosen head's map, where its token looks, and sentences about
    it. Maps of more than 800 tokens are max-pooled.

    Raises ModuleNotFoundError for PNG if matplotlib is not installed.
    """
    drawing = Canvas(WIDTH, HEIGHT)
    drawing.shapes += [
        Text(_LEFT, 45, "regard look", size=27, bold=True),
        Text(224, 45, f"{data.model}; {data.about}", colour=_SOFT),
        *(Text(_LEFT, HEIGHT - 44 + 24 * k, line, colour=_SOFT) for k, line in enumerate(wrap(sentences.CAVEAT, 60))),
    ]
    below = _overview(drawing, data, choice)
    _strongest(drawing, data, below)
    _map(drawing, data, choice)
    _attended(drawing, data, choice)
    _shaded_text(drawing, data, choice)
    return drawing.svg() if form == "svg" else drawing.png()


def _short(label: str, length: int) -> str:
    return encodable(label if len(label) <= length else label[: length - 1] + "…")


def coloured(weights: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Return RGBA pixels (..., 4) of weights, transparent where hidden."""
    seen = np.where(np.isnan(weights), 0, 255).astype(np.uint8)
    return np.concatenate([ramp(tone(weights), INK), seen[..., None]], axis=-1)


def _overview(drawing: Canvas, data: LookData, choice: Choice) -> float:
    """Draw every head's map in a grid, and return its lower edge."""
    drawing.shapes.append(Text(_LEFT, _TOP, "Heads", bold=True))
    left, top = _LEFT + 36, _TOP + 42
    side = min(408 / data.heads, 440 / data.layers)
    cells, every = min(48, max(1, int(0.92 * side))), math.ceil(30 / side)
    for layer in range(data.layers):
        for head in range(data.heads_of(layer)):
            x, y, size = left + head * side, top + layer * side, 0.92 * side
            chosen = (layer, head) == (choice.layer, choice.head)
            drawing.shapes.append(Image(x, y, size, size, coloured(data.small(layer, head, cells, cells))))
            edge, line = (_ACCENT, 5.0) if chosen else (_LINE, 1.6)
            drawing.shapes.append(Box(x, y, size, size, stroke=edge, line=line))
            above = layer and data.number(layer - 1, min(head, data.heads_of(layer - 1) - 1))
            if head % every == 0 and (layer == 0 or data.number(layer, head) != above):
                label = f"H{data.number(layer, head)}"
                drawing.shapes.append(Text(x + size / 2, y - 7, label, 16, _SOFT, anchor="middle"))
        if layer % every == 0:
            y = top + (layer + 0.46) * side + 6
            drawing.shapes.append(Text(left - 9, y, f"L{data.number(layer)}", 16, _SOFT, anchor="end"))
    return top + data.layers * side


def _strongest(drawing: Canvas, data: LookData, top: float) -> None:
    """Draw the strongest heads of each kind."""
    step = 28.5
    for k, kind in enumerate(FEATURED):
        y = top + 50 + 5.2 * step * k
        drawing.shapes.append(Text(_LEFT, y, kind.name, bold=True))
        drawing.shapes.append(Text(_LEFT, y + 25, kind.meaning, 15.5, _SOFT))
        heads = data.strongest(kind.name)
        for rank, (layer, head, score) in enumerate(heads):
            _bar(drawing, _LEFT, y + (1.95 + rank) * step, data.name(layer, head), score, score_text(score))
        if not heads:
            drawing.shapes.append(Text(_LEFT, y + 1.95 * step, sentences.unscored(cross=data.cross), 16.5))


def _bar(drawing: Canvas, x: float, y: float, label: str, fraction: float, value: str) -> None:
    drawing.shapes += [
        Text(x, y, label, 16.5),
        Box(x + 123, y - 13, 211, 14, _LINE),
        Box(x + 123, y - 13, 211 * fraction, 14, _ACCENT),
        Text(x + 439, y, value, 16.5, anchor="end"),
    ]


def _map(drawing: Canvas, data: LookData, choice: Choice) -> None:
    """Draw the chosen head's map, its tokens or their numbers, and its colour scale."""
    n, n_k, at = data.n, data.n_k, (choice.layer, choice.head)
    before = _SINK * data.has_sink(*at)
    left, wide = _MIDDLE + before, _MAP - before
    named = max(n, n_k) <= 100
    columns = {j: _short(data.key_labels[j], 9) if named else f"{j:,}" for j in (range(n_k) if named else _ticks(n_k))}
    upward = named and max(map(len, columns.values())) > 1
    top = _TOP + (120 if upward else 50)
    layer, head = data.number(choice.layer), data.number(choice.layer, choice.head)
    drawing.shapes += [
        Text(_MIDDLE, _TOP, f"Layer {layer}, head {head}", bold=True),
        Image(left, top, wide, _MAP, coloured(data.pooled(*at, _MAP, _MAP))),
        Box(left, top, wide, _MAP, stroke=_LINE, line=1.6),
        *_sink_column(data, choice, top),
        Box(_MIDDLE, top + choice.token * _MAP / n, _MAP, _MAP / n, stroke=_ACCENT, line=2),
    ]
    size = min(16.5, 0.83 * _MAP / max(n, n_k)) if named else 16.5
    for i in range(n) if named else _ticks(n):
        y = top + (i + 0.5) * _MAP / n + 0.35 * size
        label = _short(data.labels[i], 9) if named else f"{i:,}"
        drawing.shapes.append(Text(_MIDDLE - 8, y, label, size, _SOFT, anchor="end"))
    for j, label in columns.items():
        x = left + (j + 0.5) * wide / n_k
        if upward:
            drawing.shapes.append(Text(x + 0.35 * size, top - 8, label, size, _SOFT, upward=True))
        else:
            drawing.shapes.append(Text(x, top - 8, label, size, _SOFT, anchor="middle"))
    y = top + _MAP + 30
    drawing.shapes.append(Image(_MIDDLE, y, 300, 16, coloured(np.linspace(0, 1, 300)[None] ** 2)))
    for weight in (0, 0.1, 0.5, 1):
        x = _MIDDLE + 300 * math.sqrt(weight)
        drawing.shapes.append(Text(x, y + 36, figure(weight), 14.5, _SOFT, anchor="middle"))
    said = [
        line for text in (*data.says(choice), sentences.view("map", sink=data.has_sink(*at))) for line in wrap(text, 96)
    ]
    lines, first = said[:_SENTENCES], y + 72
    step = min(24, (HEIGHT - 14 - first) / max(1, len(lines) - 1))
    for k, line in enumerate(lines):
        drawing.shapes.append(Text(_MIDDLE, first + step * k, line, min(17, 0.8 * step)))


def _sink_column(data: LookData, choice: Choice, top: float) -> list[Box | Image | Text]:
    """Return the column of the chosen head's learned sink, beside its map; nothing without a sink."""
    sinks = data.sinks_of(choice.layer, choice.head)
    if sinks is None:
        return []
    wide = 0.75 * _SINK
    return [
        Text(_MIDDLE + wide / 2 + 5, top - 8, "sink", 14.5, _SOFT, upward=True),
        Image(_MIDDLE, top, wide, _MAP, coloured(pooled(sinks[:, None], _MAP, 1))),
        Box(_MIDDLE, top, wide, _MAP, stroke=_LINE, line=1.6),
    ]


def _ticks(n: int) -> range:
    """Return at most eleven round numbers below n.

    >>> list(_ticks(450))
    [0, 50, 100, 150, 200, 250, 300, 350, 400]
    """
    power = 10 ** max(len(str(n)) - 2, 0)
    return range(0, n, next(step for step in (power, 2 * power, 5 * power, 10 * power) if n <= 10 * step))


def _attended(drawing: Canvas, data: LookData, choice: Choice) -> None:
    """Draw where the chosen token looks, and what the model expects next."""
    token = f" “{_short(data.labels[choice.token], 12)}”" if data.named else ""
    drawing.shapes.append(Text(_RIGHT, _TOP, f"{choice.token}{token} attends most to", bold=True))
    for rank, (index, weight) in enumerate(data.attended(choice)):
        key = f"{_short(data.key_labels[index], 9)} " if data.named and index is not None else ""
        label = "sink" if index is None else f"{key}{index}"
        _bar(drawing, _RIGHT, _TOP + 50 + 46 * rank, label, weight, weight_text(weight))
    if data.following:
        guesses = ",  ".join(f"“{_short(printable(token), 9)}” {share:.1%}" for token, share in data.following[:3])
        drawing.shapes.append(Text(_RIGHT, 1060, "The model expects next", bold=True))
        drawing.shapes.append(Text(_RIGHT, 1090, guesses, 16.5, _SOFT))


def _shaded_text(drawing: Canvas, data: LookData, choice: Choice) -> None:
    """Draw the text around the chosen token, shaded by what the token attends to."""
    columns, lines = 36, 17
    advance, step = 439 / columns, 27.5
    row = data.weights(choice.layer, choice.head, slice(choice.token, choice.token + 1))[0]
    places, at = [], 0
    for label in (_short(label, columns) for label in data.key_labels):
        at += (columns - at % columns) if at % columns + len(label) > columns else 0
        places.append((at // columns, at % columns, label))
        at += len(label) + len(data.separator)
    own = choice.token if data.labels == data.key_labels else None  # if the query is one of the keys
    middle = int(np.nanargmax(np.nan_to_num(row))) if own is None else own
    first = max(0, places[middle][0] - lines + 1)
    drawing.shapes.append(Text(_RIGHT, 530, "Text, shaded by its attention", bold=True))
    for k, (line, column, label) in enumerate(places):
        if not first <= line < first + lines:
            continue
        x, y, weight = _RIGHT + column * advance, 546 + (line - first) * step, float(np.nan_to_num(row[k]))
        ground = ramp(tone(weight), INK)
        if weight >= 0.002 or k == own:
            edge = _ACCENT if k == own else "none"
            face = "#{:02x}{:02x}{:02x}".format(*ground) if weight >= 0.002 else "none"
            drawing.shapes.append(Box(x, y + 1.5, len(label) * advance, step - 3, face, edge, 2.5))
        drawing.shapes.append(Text(x, y + 0.7 * step, label, 17, readable_on(ground), advance=advance))
