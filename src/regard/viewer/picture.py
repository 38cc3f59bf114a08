"""The same view as a picture, for papers and slides."""

import warnings
from io import BytesIO
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle

from regard.figures import save

from .colour import INK, ramp, readable_on, tone
from .labels import encodable, printable
from .model_view import CAVEAT, Choice, LookData
from .scores import FEATURED

WIDTH, HEIGHT = 1950, 1200
"""Size of the picture in pixels."""

_DPI = 150
_MONO = ["DejaVu Sans Mono", "DejaVu Sans"]
_SOFT, _LINE, _ACCENT = "#5a6270", "#dcdfe4", "#1c5fb8"
_MAP = ListedColormap(ramp(np.linspace(0, 1, 256), INK) / 255.0).with_extremes(bad=(1, 1, 1, 0))


def picture(data: LookData, choice: Choice, form: Literal["png", "svg"] = "png") -> bytes:
    """A PNG file of 1950 × 1200 pixels, or an SVG file: heads, strongest heads, the chosen head's map, what its token
    attends to. Maps of more tokens than 1,000 are reduced by the largest weight of each block.
    """
    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, facecolor="white")
    _text(figure, 0.015, 0.975, "regard look", size=13, weight="bold", va="top")
    about = f"{data.model}; {data.about}"
    _text(figure, 0.115, 0.972, about, color=_SOFT, va="top")
    _text(figure, 0.015, 0.02, CAVEAT, color=_SOFT)
    left, middle, right = np.asarray(figure.subfigures(1, 3, width_ratios=(4, 8, 4)))
    _strongest(left, data, below=_overview(left, data, choice))
    _map(middle, data, choice)
    _attended(right, data, choice)
    content = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        save(figure, content, form, _DPI)
    return content.getvalue()


def _text(place: Figure | SubFigure | Axes, x: float, y: float, text: str, *, size: float = 9, **style: Any) -> None:
    place.text(x, y, encodable(text), size=size, parse_math=False, **style)


def _short(label: str, length: int) -> str:
    return encodable(label if len(label) <= length else label[: length - 1] + "…")


def _overview(figure: SubFigure, data: LookData, choice: Choice) -> float:
    _text(figure, 0.05, 0.93, "Heads", weight="bold")
    wide, tall = figure.bbox.width, figure.bbox.height
    side = min(0.84 * wide / data.heads, 0.37 * tall / data.layers)
    for layer in range(data.layers):
        for head in range(data.heads_of(layer)):
            x, y = 0.11 * wide + head * side, 0.89 * tall - (layer + 1) * side
            axes = figure.add_axes((x / wide, y / tall, 0.92 * side / wide, 0.92 * side / tall))
            axes.imshow(tone(data.pooled(layer, head, 48, 48)), cmap=_MAP, vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            chosen = (layer, head) == (choice.layer, choice.head)
            axes.spines[:].set(color=_ACCENT if chosen else _LINE, linewidth=2.5 if chosen else 0.8)
            if layer == 0 or data.number(layer, head) != data.number(
                layer - 1, min(head, data.heads_of(layer - 1) - 1)
            ):
                axes.set_title(f"H{data.number(layer, head)}", size=8, color=_SOFT, pad=3)
            if head == 0:
                axes.set_ylabel(f"L{data.number(layer)}", size=8, color=_SOFT, rotation=0, ha="right", va="center")
    return float(0.89 - data.layers * side / tall)


def _strongest(figure: SubFigure, data: LookData, below: float) -> None:
    axes = figure.add_axes((0.05, below - 0.43, 0.9, 0.38))
    axes.set(xlim=(0, 1), ylim=(15.5, -0.5))
    axes.axis("off")
    for k, kind in enumerate(FEATURED):
        top = 5.2 * k
        _text(axes, 0, top, kind.name, weight="bold", va="center")
        _text(axes, 0, top + 0.9, kind.meaning, size=7.5, color=_SOFT, va="center")
        heads = data.strongest(kind.name)
        for rank, (layer, head, score) in enumerate(heads):
            _bar(axes, top + 1.9 + rank, data.name(layer, head), score)
        if not heads:
            _text(axes, 0, top + 1.9, "nothing repeats", size=8, va="center")


def _bar(axes: Axes, y: float, label: str, fraction: float) -> None:
    axes.barh(y, 0.48, left=0.28, height=0.5, color=_LINE, alpha=0.7)
    axes.barh(y, 0.48 * fraction, left=0.28, height=0.5, color=_ACCENT)
    _text(axes, 0, y, label, size=8, va="center")
    _text(axes, 1, y, f"{fraction:.3f}", size=8, va="center", ha="right")


def _map(figure: SubFigure, data: LookData, choice: Choice) -> None:
    axes = figure.add_axes((0.13, 0.11, 0.85, 0.76))
    weights = data.pooled(choice.layer, choice.head, 1000, 1000)
    n, n_k = data.n, data.n_k
    image = axes.imshow(
        tone(weights), cmap=_MAP, vmin=0, vmax=1, extent=(-0.5, n_k - 0.5, n - 0.5, -0.5), interpolation="nearest",
        aspect="equal" if n == n_k else "auto",
    )  # fmt: skip
    row = choice.token
    axes.plot([-0.5, n_k - 0.5, n_k - 0.5, -0.5, -0.5], np.array([-1, -1, 1, 1, -1]) * 0.5 + row, color=_ACCENT, lw=1)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=3, colors=_SOFT)
    axes.spines[:].set_color(_LINE)
    axes.tick_params(labelsize=8)
    if max(n, n_k) <= 100:
        rows, columns = ([_short(label, 9) for label in labels] for labels in (data.labels, data.key_labels))
        rotation = 0 if max(map(len, columns)) == 1 else 90
        size = min(8.0, 330 / max(n, n_k))
        axes.set_xticks(range(n_k), columns, size=size, parse_math=False, rotation=rotation)
        axes.set_yticks(range(n), rows, size=size, parse_math=False)
    layer, head = data.number(choice.layer), data.number(choice.layer, choice.head)
    _text(figure, 0.13, 0.93, f"Layer {layer}, head {head}: rows attend to columns", weight="bold")
    scale = figure.colorbar(
        image, cax=figure.add_axes((0.13, 0.075, 0.3, 0.014)), orientation="horizontal", ticks=np.sqrt([0, 0.1, 0.5, 1])
    )
    scale.set_ticklabels(["0", "0.1", "0.5", "1"], size=7, color=_SOFT)
    scale.outline.set_visible(False)
    scale.ax.tick_params(length=2, pad=1, color=_SOFT)


def _attended(figure: SubFigure, data: LookData, choice: Choice) -> None:
    title = f"{choice.token} “{_short(data.labels[choice.token], 12)}” attends most to"
    _text(figure, 0.05, 0.93, title, weight="bold")
    axes = figure.add_axes((0.05, 0.6, 0.9, 0.31))
    axes.set(xlim=(0, 1), ylim=(7.5, -0.5))
    axes.axis("off")
    for rank, (index, weight) in enumerate(data.attended(choice)):
        _bar(axes, rank, f"{_short(data.key_labels[index], 9)} {index}", weight)
    _shaded_text(figure, data, choice)
    if data.following:
        guesses = ",  ".join(f"“{_short(printable(token), 9)}” {share:.1%}" for token, share in data.following[:3])
        _text(figure, 0.05, 0.12, "The model expects next", weight="bold")
        _text(figure, 0.05, 0.095, guesses, size=8, color=_SOFT)


def _shaded_text(figure: SubFigure, data: LookData, choice: Choice) -> None:
    """The text around the chosen token in a fixed grid of characters, shaded by what the token attends to."""
    columns, lines = 36, 17
    row = data.weights(choice.layer, choice.head, slice(choice.token, choice.token + 1))[0]
    places, at = [], 0
    for label in (_short(label, columns) for label in data.key_labels):
        at += (columns - at % columns) if at % columns + len(label) > columns else 0
        places.append((at // columns, at % columns, label))
        at += len(label) + len(data.separator)
    own = choice.token if data.n == data.n_k else None  # where the query is one of the keys
    middle = int(np.nanargmax(np.nan_to_num(row))) if own is None else own
    first = max(0, places[middle][0] - lines + 1)
    _text(figure, 0.05, 0.565, "Text, shaded by its attention", weight="bold")
    axes = figure.add_axes((0.05, 0.16, 0.9, 0.39))
    axes.set(xlim=(0, columns), ylim=(lines, 0))
    axes.axis("off")
    for k, (line, column, label) in enumerate(places):
        if not first <= line < first + lines:
            continue
        y, weight = line - first, float(np.nan_to_num(row[k]))
        ground = ramp(tone(weight), INK)
        if weight >= 0.002 or k == own:
            edge = _ACCENT if k == own else "none"
            face = ground / 255.0 if weight >= 0.002 else "none"
            axes.add_patch(Rectangle((column, y + 0.06), len(label), 0.88, facecolor=face, edgecolor=edge, lw=1.2))
        for c, character in enumerate(label):
            style = {"color": readable_on(ground), "family": _MONO, "ha": "center", "va": "center_baseline"}
            _text(axes, column + c + 0.5, y + 0.52, character, size=8, **style)
