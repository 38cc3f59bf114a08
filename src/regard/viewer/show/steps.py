"""The steps of attention in a terminal: a table of shapes, then every matrix."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.interpret.formats import figure, score_text, weight_text
from regard.ops.stepping import Step, Steps
from regard.viewer.data.summary import block_starts
from regard.viewer.show.blocks import Screen
from regard.viewer.show.colour import SIGNED, VIRIDIS, tone

LARGEST_IN_NUMBERS = (12, 8)
LARGEST = (24, 38)
GAP = 3
_WEIGHTS = ("softmax", "dropout")


def show_steps(steps: Steps, console: Console) -> None:
    """Print the table of shapes, then every step's first head and batch entry."""
    screen = Screen.of(console)
    console.print(Padding(_shapes(steps), (0, 0, 1, 0)))
    output = steps["output"].value
    if output.ndim > 2:
        which = "the first head" + (" of the first batch entry" if output.ndim > 3 else "")
        console.print(Text(f"Below: {which} of every array.", style="dim"))
    legend = "blue positive, orange negative; weights from purple 0 to yellow 1"
    if not screen.colour:
        legend = f"matrices that are too large for numbers: {screen.quoted(screen.shades)}, from nothing to the largest"
    console.print(Text(legend, style="dim"))
    console.print()
    hidden = first_matrix(steps["S"]) == -np.inf
    matrices = (step for step in steps if step.symbol != "J")  # J has a matrix for each query
    for line in _flowed([_drawing(step, hidden, screen) for step in matrices], screen.width):
        console.print(line)


def _shapes(steps: Steps) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("step", "formula", "einsum", "shape"):
        table.add_column(title, overflow="fold")
    for name, tensor, formula, einsum, shape in steps.rows():
        table.add_row(Text(name), Text(formula or tensor), Text(einsum, style="cyan"), Text(shape, style="dim"))
    return table


def _flowed(drawings: list[list[Text]], width: int) -> Iterator[RenderableType]:
    """Yield the drawings side by side, as many on a line as fit."""
    line: list[list[Text]] = []
    room = width
    for drawing in [*drawings, None]:
        own = width if drawing is None else max(text.cell_len for text in drawing)
        if line and own > room:
            grid = Table.grid(padding=(0, GAP, 0, 0))
            grid.add_row(*(Group(*texts, Text()) for texts in line))
            yield grid
            line, room = [], width
        if drawing is not None:
            line.append(drawing)
            room -= own + GAP


def _drawing(step: Step, hidden: NDArray[np.bool_], screen: Screen) -> list[Text]:
    return [Text.assemble((step.name, "bold"), f" {step.tensor}"), *_matrix(step, hidden, screen)]


def first_matrix(step: Step) -> NDArray[np.float64]:
    """Return a step's matrix of the first batch entry and head.

    A vector becomes a column.
    """
    value, letters = step.value, step.indices.removeprefix("...")
    while value.ndim > len(letters):
        value = value[0]
    for head in "hg":
        if head in letters:
            value = value.take(0, axis=letters.index(head))
            letters = letters.replace(head, "")
    matrix = np.asarray(value, dtype=np.float64)
    return matrix[:, None] if matrix.ndim == 1 else matrix


def _matrix(step: Step, hidden: NDArray[np.bool_], screen: Screen) -> list[Text]:
    matrix = first_matrix(step)
    if 0 in matrix.shape:
        return [Text("empty", style="dim")]
    weights = step.name in _WEIGHTS
    if weights:
        matrix = np.where(hidden, -np.inf, matrix)
    small = matrix.shape[0] <= LARGEST_IN_NUMBERS[0] and matrix.shape[1] <= LARGEST_IN_NUMBERS[1]
    if not small:
        matrix = _reduced(matrix, LARGEST[0], min(LARGEST[1], screen.width))
    levels, anchors = (tone(matrix), VIRIDIS) if weights else (_signed(matrix), SIGNED)
    levels = np.where(np.isfinite(matrix), levels, np.nan)
    if not small:
        return screen.dense(levels if weights or screen.colour else np.abs(2 * levels - 1), anchors)
    texts = [[_number(x, weights) for x in row] for row in matrix]
    width = 1 + max(len(text) for row in texts for text in row)
    return screen.cells(levels, width, anchors, [[text.rjust(width - 1) for text in row] for row in texts])


def _signed(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale values to [0, 1]: 0 the most negative, 0.5 zero, 1 the most positive."""
    finite = np.where(np.isfinite(matrix), matrix, 0.0)
    return 0.5 + 0.5 * finite / max(float(np.abs(finite).max()), 1e-300)


def _reduced(matrix: NDArray[np.float64], rows: int, cols: int) -> NDArray[np.float64]:
    """Reduce a matrix to at most (rows, cols).

    Each result is the finite entry of its block that is farthest from zero.
    """
    matrix = np.where(np.isfinite(matrix), matrix, np.nan)
    for axis, size in ((0, rows), (1, cols)):
        if matrix.shape[axis] > size:
            starts = block_starts(matrix.shape[axis], size)
            high, low = (f.reduceat(matrix, starts, axis=axis) for f in (np.fmax, np.fmin))
            matrix = np.where(np.abs(high) >= np.abs(low), high, low)
    return matrix


def _number(x: float, weight: bool) -> str:
    if not np.isfinite(x):
        return "·" if weight and x < 0 else {np.inf: "+∞", -np.inf: "−∞"}.get(x, "NaN")
    if weight:
        return weight_text(x)
    return ("−" if x < 0 else "+") + (score_text if abs(x) < 1000 else figure)(abs(x))
