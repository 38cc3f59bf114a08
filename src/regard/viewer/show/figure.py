"""Figures as SVG: lines, points, bars, maps and arcs, in one file for light and dark.

Colours are CSS variables that a file defines for both schemes, so that it fits its page as an image too. A figure is
480 pixels wide, so that its letters can be read on a phone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.interpret.formats import POWERS, figure
from regard.viewer.show.drawing import SANS, Box, Text, element

WIDTH = 480
SIZE = 14  # of letters
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 12, 46  # around the axes
INK, FAINT = "var(--ink)", "var(--faint)"
SERIES = tuple(f"var(--series-{number})" for number in range(1, 6))
DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2")  # so that lines differ without their colours
SHADES = 16
STYLE = (
    "svg{--ink:#1f2328;--faint:#d0d7de;--series-1:#0072b2;--series-2:#c04f00;--series-3:#00795a;--series-4:#a8447e;"
    "--series-5:#6b6b6b}@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--faint:#3d444d;--series-1:#56b4e9;"
    "--series-2:#ff9d5c;--series-3:#3ccf9e;--series-4:#e8a0c8;--series-5:#a8a8a8}}"
)

Series = Mapping[str, tuple[Any, Any]]
"""The x and the y of each line, by its name."""


@dataclass(frozen=True)
class Figure:
    """A drawing with a sentence that says what it shows, for readers who do not see it."""

    title: str
    height: float
    parts: Sequence[str] = field(repr=False)

    def _repr_svg_(self) -> str:
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img" width="{WIDTH}" '
            f'height="{self.height:.6g}" viewBox="0 0 {WIDTH} {self.height:.6g}" font-family="{SANS}">'
        )
        about = f"<title>{escape(self.title)}</title><style>{STYLE}</style>"
        return "\n".join([opening, about, *self.parts, "</svg>\n"])

    def save(self, path: str | Path) -> None:
        """Write an SVG file."""
        Path(path).write_text(self._repr_svg_(), "utf-8")


@dataclass(frozen=True)
class PixelAxis:
    """Places values between two pixels, by their logarithms if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, values: Any) -> NDArray[np.float64]:
        """Return the pixels of values.

        >>> PixelAxis(1, 100, 0, 60, log=True).at([1, 10, 100])
        array([ 0., 30., 60.])
        """
        values, low, high = (np.asarray(x, np.float64) for x in (values, self.low, self.high))
        if self.log:
            values, low, high = np.log10(values), np.log10(low), np.log10(high)
        return np.asarray(self.start + (values - low) / (high - low) * (self.end - self.start))

    def ticks(self) -> list[float]:
        """Return three to seven round values.

        >>> PixelAxis(0, 1, 0, 100, log=False).ticks()
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        """
        if self.log:
            first, last = np.ceil(np.log10(self.low) - 1e-9), np.floor(np.log10(self.high) + 1e-9)
            if last - first < 2:  # too few powers of 10 to read a value off
                steps = [x * 10.0**power for power in np.arange(first - 1, last + 1) for x in (1, 2, 5)]
                return [float(f"{x:.6g}") for x in steps if self.low <= x <= self.high]
            return [float(10.0**x) for x in np.arange(first, last + 1, max(1, np.ceil((last - first) / 5)))]
        step = 10 ** np.floor(np.log10((self.high - self.low) / 3))
        step *= next(x for x in (1, 2, 5, 10) if (self.high - self.low) / (step * x) <= 6)
        multiples = np.arange(np.ceil(self.low / step - 1e-9) + 0.0, self.high / step + 1e-9)
        return [float(f"{x * step:.12g}") for x in multiples]


def axis(
    values: list[Any], start: float, end: float, log: bool, limits: tuple[float, float] | None = None
) -> PixelAxis:
    """Return an axis that holds all values."""
    every = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in values])
    low, high = limits or (float(np.nanmin(every)), float(np.nanmax(every)))
    return PixelAxis(low, high if high > low else low + 1, start, end, log)


def told(value: float) -> str:
    """Return a value of an axis, short.

    >>> told(0.25), told(100000.0), told(-3.0)
    ('0.25', '10⁵', '−3')
    """
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        power = round(float(np.log10(abs(value))))
        return "10" + str(power).translate(POWERS)
    return f"{value:,.6g}".replace("-", "−")


def frame(across: PixelAxis, up: PixelAxis, x: str, y: str) -> list[str]:
    """Return lines of the grid, values and names of two axes."""
    parts = []
    for value, place in zip(across.ticks(), across.at(across.ticks()), strict=True):
        parts.append(stroke([(place, up.start), (place, up.end)], FAINT, 1))
        parts.append(element(Text(place, up.start + 18, told(value), SIZE, INK, anchor="middle")))
    for value, place in zip(up.ticks(), up.at(up.ticks()), strict=True):
        parts.append(stroke([(across.start, place), (across.end, place)], FAINT, 1))
        parts.append(element(Text(across.start - 6, place + 5, told(value), SIZE, INK, anchor="end")))
    middle = (across.start + across.end) / 2
    parts.append(element(Text(middle, up.start + 38, x, SIZE, INK, anchor="middle")))
    parts.append(element(Text(15, (up.start + up.end) / 2, y, SIZE, INK, anchor="middle", upward=True)))
    return parts


def stroke(points: Any, colour: str, width: float = 2, dash: str = "") -> str:
    """Return a line through points."""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def key(names: Sequence[str], dots: Sequence[str] = ()) -> tuple[list[str], float]:
    """Return the names of lines beside their colours, in rows, and the height that these take."""
    parts, x, y = list[str](), float(LEFT), TOP + 6.0
    for number, name in enumerate(names):
        width = 34 + 0.56 * SIZE * len(name) + 14
        if x > LEFT and x + width > WIDTH:
            x, y = float(LEFT), y + 20
        colour = SERIES[number % len(SERIES)]
        line = stroke([(x, y), (x + 28, y)], colour, 2.5, DASHES[number % 5])
        parts.append(dot(x + 14, y, colour) if name in dots else line)
        parts.append(element(Text(x + 34, y + 5, name, SIZE, INK)))
        x += width
    return parts, y + 14


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>'


def lines(
    title: str,
    series: Series,
    x: str,
    y: str,
    *,
    log: str = "",
    dots: Sequence[str] = (),
    limits: tuple[float, float] | None = None,
    height: float = 300,
) -> Figure:
    """Draw lines, or points, over two axes.

    title: a sentence that says what is seen.
    log: the axes that are logarithmic, `"x"`, `"y"` or `"xy"`.
    dots: the series that are drawn as points.
    limits: the ends of the axis y; its values' own unless given.

    >>> figure = lines("A line that rises.", {"rising": ([0, 1], [0, 1])}, "time", "size")
    >>> figure._repr_svg_().count("<path")
    14
    """
    parts, top = key(list(series), dots)
    across = axis([a for a, _ in series.values()], LEFT, WIDTH - RIGHT, "x" in log)
    up = axis([b for _, b in series.values()], height - BOTTOM, top, "y" in log, limits)
    parts += frame(across, up, x, y)
    for number, (name, (a, b)) in enumerate(series.items()):
        points = list(zip(across.at(a), up.at(b), strict=True))
        colour = SERIES[number % len(SERIES)]
        if name in dots:
            parts += [dot(*point, colour) for point in points]
        else:
            parts.append(stroke(points, colour, 2.5, DASHES[number % 5]))
    return Figure(title, height, parts)


def bars(title: str, values: Mapping[str, float], unit: str) -> Figure:
    """Draw a bar for each value, with its name and its number above it.

    >>> bars("Two bars.", {"one": 1, "two": 2}, "kB")._repr_svg_().count("<rect")
    2
    """
    parts, most = list[str](), max(values.values())
    for number, (name, value) in enumerate(values.items()):
        y = 18 + 46 * number
        parts.append(element(Text(4, y, name, SIZE, INK)))
        parts.append(element(Text(WIDTH - 4, y, f"{told(value)} {unit}", SIZE, INK, anchor="end")))
        parts.append(element(Box(4, y + 7, max(1, (WIDTH - 8) * value / most), 14, SERIES[0])))
    return Figure(title, 46 * len(values) + 4, parts)


def shaded(values: NDArray[np.float64], most: float, x: float, y: float, size: float) -> list[str]:
    """Return a map (rows, columns) as one path for each of its shades, `size` pixels wide."""
    rows, columns = values.shape
    step = size / columns
    shades = np.rint(np.clip(np.nan_to_num(values) / most, 0, 1) * SHADES).astype(int)
    parts = [element(Box(x, y, size, step * rows, "none", FAINT))]
    for shade in np.unique(shades[shades > 0]):
        runs = "".join(f"M{j} {i}h{length}" for i, j, length in stretches(shades == shade))
        place = f'transform="translate({x:.1f} {y + step / 2:.1f}) scale({step:.4g})"'  # a line is as wide as a row
        parts.append(f'<path {place} d="{runs}" stroke="{SERIES[0]}" stroke-opacity="{shade / SHADES:.3g}"/>')
    return parts


def stretches(chosen: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Yield the row, the first column and the length of each stretch of true values in a row.

    >>> list(stretches(np.array([[True, True, False, True]])))
    [(0, 0, 2), (0, 3, 1)]
    """
    for i, row in enumerate(chosen):
        ends = np.flatnonzero(np.diff(row, prepend=False, append=False))
        yield from ((i, int(a), int(b - a)) for a, b in zip(ends[::2], ends[1::2], strict=True))


def maps(
    title: str,
    values: Mapping[str, Any],
    *,
    columns: int = 2,
    each: bool = False,
    most: float | None = None,
    axes: tuple[str, str] | None = None,
) -> Figure:
    """Draw maps of weights (n_q, n_k) side by side: a row is a query, and a stronger colour is more.

    each: shade each map by its own largest value; else all by the largest of all.
    most: the value of the strongest shade, instead of the largest.
    axes: what rows and columns are; they are then numbered.

    >>> maps("Two maps.", {"even": np.ones((2, 2)), "first": np.eye(2)})._repr_svg_().count("<path")
    2
    """
    arrays = {name: np.asarray(value, np.float64) for name, value in values.items()}
    most = most or max(float(np.nanmax(x)) for x in arrays.values()) or 1.0
    gap, side, below = (14, 44, 40) if axes else (14, 0, 0)
    size = (WIDTH - gap * (columns - 1) - 2) / columns - side
    parts, y = list[str](), 0.0
    for start in range(0, len(arrays), columns):
        row = list(arrays.items())[start : start + columns]
        for number, (name, value) in enumerate(row):
            x = 1 + side + number * (side + size + gap)
            parts.append(element(Text(x, y + 16, name, SIZE, INK)))
            parts += shaded(value, (float(np.nanmax(value)) or 1.0) if each else most, x, y + 23, size)
            parts += numbered(value, axes, x, y + 23, size) if axes else []
        y += 23 + max(size / value.shape[1] * len(value) for _, value in row) + below + 12
    return Figure(title, y + 24, [*parts, *scale(y, "the largest of each map" if each else figure(most, 2))])


def numbered(values: NDArray[np.float64], axes: tuple[str, str], x: float, y: float, size: float) -> list[str]:
    """Return the numbers of a map's rows and columns from 0, and what they are."""
    rows, columns = values.shape
    step = size / columns
    bottom = y + step * rows
    texts = [Text(x - 6, y + (i + 0.5) * step + 5, str(i), SIZE, INK, anchor="end") for i in range(rows)]
    texts += [Text(x + (j + 0.5) * step, bottom + 18, str(j), SIZE, INK, anchor="middle") for j in range(columns)]
    texts.append(Text(x - 28, (y + bottom) / 2, axes[0], SIZE, INK, anchor="middle", upward=True))
    texts.append(Text(x + size / 2, bottom + 36, axes[1], SIZE, INK, anchor="middle"))
    return [element(text) for text in texts]


def flow(title: str, steps: Sequence[tuple[str, str]]) -> Figure:
    """Draw steps below each other, with arrows: each is what is done, and the shape of what it gives.

    >>> flow("Two steps.", [("embed", "(n, D)"), ("norm", "(n, D)")])._repr_svg_().count("<rect")
    2
    """
    parts, left, width = list[str](), 6.0, 300.0
    for number, (name, shape) in enumerate(steps):
        y = 4 + 52.0 * number
        parts.append(element(Box(left, y, width, 30, "none", SERIES[0], 1.5)))
        parts.append(element(Text(left + width / 2, y + 20, name, SIZE, INK, anchor="middle")))
        middle, tip = left + width / 2, y + 50
        parts.append(stroke([(middle, y + 30), (middle, tip)], INK, 1.5))
        parts.append(stroke([(middle - 5, tip - 6), (middle, tip), (middle + 5, tip - 6)], INK, 1.5))
        parts.append(element(Text(middle + 14, y + 45, shape, SIZE, INK)))
    return Figure(title, 52 * len(steps) + 6, parts)


def matrices(title: str, values: Mapping[str, Any], signs: Sequence[str]) -> Figure:
    """Draw matrices with their numbers side by side, and a sign between each two; darker is more.

    >>> matrices("A product.", {"P": np.eye(2), "V": np.ones((2, 1))}, ["×"])._repr_svg_().count("<rect")
    6
    """
    arrays = {name: np.asarray(value, np.float64) for name, value in values.items()}
    between = 30.0
    cell = min(44.0, (WIDTH - 2 - between * len(signs)) / sum(x.shape[1] for x in arrays.values()))
    height = 24 + cell * max(len(x) for x in arrays.values()) + 2
    parts, x = list[str](), 1.0
    for (name, array), sign in zip(arrays.items(), [*signs, ""], strict=True):
        parts.append(element(Text(x, 16, name, SIZE, INK, bold=True)))
        for (i, j), value in np.ndenumerate(array):
            parts += entry(x + j * cell, 24 + i * cell, cell, value, abs(value) / (np.abs(array).max() or 1))
        x += cell * array.shape[1] + between
        parts.append(element(Text(x - between / 2, (24 + height) / 2 + 5, sign, SIZE, INK, anchor="middle")))
    return Figure(title, height, parts)


def entry(x: float, y: float, size: float, value: float, share: float) -> list[str]:
    """Return a number of a matrix in its square, which is the darker the larger its share of the largest is."""
    square = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{size:.1f}" stroke="{FAINT}" fill="{SERIES[0]}" '
    )
    number = f"{value:.2f}".rstrip("0").rstrip(".").replace("-", "−")
    middle = Text(x + size / 2, y + size / 2 + 5, number, SIZE, INK, anchor="middle")
    return [f'{square}fill-opacity="{0.35 * share:.2f}"/>', element(middle)]


LEAST_ARC = 0.02
"""A weight that `arcs` leaves out: its arc would be thinner than 0.2 pixels."""


def arcs(title: str, tokens: Sequence[str], weights: Any, row: int) -> Figure:
    """Draw weights (n, n) as arcs above a line of tokens, from each that looks to what it looks at; thicker is more.

    row: the token whose arcs have a colour and its weights in percent below the others. Long texts leave the figure.

    >>> arcs("One looks back.", ["a", "b"], [[1, 0], [0.75, 0.25]], row=1)._repr_svg_().count("<path")
    1
    """
    P, words = np.asarray(weights, np.float64), [token.strip() for token in tokens]
    widths = 0.56 * SIZE * np.array([max(2, len(word)) for word in words])
    gap = min(16.0, (WIDTH - 4 - widths.sum()) / max(1, len(words) - 1))
    middles = 2 + np.cumsum(widths + gap) - gap - widths / 2
    top = float(np.ptp(middles)) / 2.6 + 10
    ordered = sorted(np.argwhere(np.tril(P, -1) + np.triu(P, 1) >= LEAST_ARC).tolist(), key=lambda at: at[0] == row)
    parts = [arc(middles[i], middles[j], top, P[i, j], i == row) for i, j in ordered]
    for j, word in enumerate(words):
        parts.append(element(Text(middles[j], top + 18, word, SIZE, INK, bold=j == row, anchor="middle")))
        if P[row, j] >= LEAST_ARC:
            share = f"{100 * P[row, j]:.0f}"
            parts.append(element(Text(middles[j], top + 38, share, SIZE, SERIES[0], bold=True, anchor="middle")))
    parts.append(element(Text(2, top + 60, f"% of the weight of “{words[row]}”", SIZE, SERIES[0])))
    return Figure(title, top + 68, parts)


def arc(start: float, end: float, ground: float, weight: float, chosen: bool) -> str:
    """Return a half ellipse over the ground, at most 9 pixels thick."""
    rx, ry = abs(start - end) / 2, abs(start - end) / 2.6
    colour, opacity = (SERIES[0], 1) if chosen else (SERIES[4], 0.45)
    path = f"M{start:.1f} {ground:.1f}A{rx:.1f} {ry:.1f} 0 0 {int(end > start)} {end:.1f} {ground:.1f}"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-opacity="{opacity}" stroke-width="{9 * weight:.2f}"/>'
    )


def tokens_map(title: str, tokens: Sequence[str], weights: Any) -> Figure:
    """Draw weights (n, n) with their tokens, in percent; a row is a token that looks. For up to twelve tokens.

    >>> tokens_map("One looks back.", ["a", "b"], [[1, 0], [0.75, 0.25]])._repr_svg_().count("<rect")
    3
    """
    P, words = np.asarray(weights, np.float64), [token.strip() for token in tokens]
    side = 0.56 * SIZE * max(map(len, words)) + 10
    cell = min(44.0, (WIDTH - side - 2) / len(words))
    parts = list[str]()
    for number, word in enumerate(words):
        middle = side + (number + 0.5) * cell
        parts.append(element(Text(side - 6, middle + 5, word, SIZE, INK, anchor="end")))
        parts.append(element(Text(middle + 5, side - 6, word, SIZE, INK, upward=True)))
    for i, j in np.argwhere(P > 0):
        parts += entry(side + j * cell, side + i * cell, cell, round(100 * P[i, j]), P[i, j])
    return Figure(title, side + cell * len(words) + 2, parts)


def scale(y: float, most: str) -> list[str]:
    """Return a key of the shades, from nothing to the most."""
    parts = [element(Text(1, y + 13, "0", SIZE, INK))]
    for number in range(1, 9):
        place = f'x="{2 + 14 * number}" y="{y + 2:.6g}" width="14" height="14"'
        parts.append(f'<rect {place} fill="{SERIES[0]}" fill-opacity="{number / 8:.3g}"/>')
    return [*parts, element(Text(138, y + 13, most, SIZE, INK))]
