"""Drawings of boxes, text and images, written as SVG or PNG.

Coordinates are pixels from the top left. matplotlib writes PNG.
"""

import struct
import warnings
import zlib
from base64 import b64encode
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.arguments.packages import remedy
from regard.viewer.scene.labels import encodable, readable

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', 'Cascadia Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
NEEDS = f"PNG needs matplotlib: {remedy('matplotlib')}"


def has_png() -> bool:
    """Return whether matplotlib is installed, which draws PNG files."""
    return find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Box:
    """A rectangle, filled or with a border of `line` pixels."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    stroke: str = "none"
    line: float = 1


@dataclass(frozen=True)
class Text:
    """A line of text at x, on the baseline y.

    anchor: whether it starts at x, is centred on x, or ends there. upward: rotated, to be read from below. advance:
    pixels per character, in a monospaced font.
    """

    x: float
    y: float
    text: str
    size: float = 18
    colour: str = "#1f2328"
    bold: bool = False
    anchor: str = "start"
    upward: bool = False
    advance: float | None = None


@dataclass(frozen=True)
class Image:
    """RGBA pixels (rows, columns, 4), stretched over a rectangle with sharp edges."""

    x: float
    y: float
    width: float
    height: float
    pixels: NDArray[np.uint8]


@dataclass
class Canvas:
    """Shapes on white; later ones cover earlier ones."""

    width: int
    height: int
    shapes: list[Box | Text | Image] = field(default_factory=list)

    def svg(self) -> bytes:
        """Return an SVG file, with text as text in the reader's fonts.

        >>> Canvas(20, 10, [Box(1, 2, 3, 4, "red")]).svg().decode().splitlines()[2]
        '<rect x="1" y="2" width="3" height="4" fill="red" stroke="none" stroke-width="1"/>'
        """
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="{SANS}">',
            '<rect width="100%" height="100%" fill="white"/>',
            *map(element, self.shapes),
            "</svg>\n",
        ]
        return "\n".join(lines).encode()

    def png(self) -> bytes:
        """Return a PNG file, with text in matplotlib's fonts.

        Raises ModuleNotFoundError if matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width / 72, self.height / 72), dpi=72, facecolor="white")  # a point is a pixel
        axes = figure.add_axes((0, 0, 1, 1))
        for order, shape in enumerate(self.shapes):
            _draw(axes, shape, order)
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        content = BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            figure.savefig(content, format="png")
        return content.getvalue()


def element(shape: Box | Text | Image) -> str:
    """Return the element of SVG that draws a shape."""
    x, y = f"{shape.x:.6g}", f"{shape.y:.6g}"
    if isinstance(shape, Text):
        content = escape(encodable(readable(shape.text)))  # XML holds no controls
        style = f'x="{x}" y="{y}" font-size="{shape.size:.6g}" fill="{shape.colour}" text-anchor="{shape.anchor}"'
        style += ' font-weight="bold"' * shape.bold + f' transform="rotate(-90 {x} {y})"' * shape.upward
        if shape.advance is not None:
            style += f' font-family="{MONO}" textLength="{shape.advance * len(shape.text):.6g}"'
        return f'<text {style} xml:space="preserve">{content}</text>'
    place = f'x="{x}" y="{y}" width="{shape.width:.6g}" height="{shape.height:.6g}"'
    if isinstance(shape, Box):
        return f'<rect {place} fill="{shape.fill}" stroke="{shape.stroke}" stroke-width="{shape.line:.6g}"/>'
    content = b64encode(png(shape.pixels)).decode("ascii")
    style = 'preserveAspectRatio="none" style="image-rendering:pixelated"'
    return f'<image {place} {style} href="data:image/png;base64,{content}"/>'


def _draw(axes: Any, shape: Box | Text | Image, order: int) -> None:
    from matplotlib.patches import Rectangle

    if isinstance(shape, Text):
        parts = [(shape.x, encodable(readable(shape.text)))]
        style: dict[str, Any] = {"ha": {"start": "left", "middle": "center", "end": "right"}[shape.anchor]}
        if shape.advance is not None:
            parts = [(shape.x + (n + 0.5) * shape.advance, encodable(c)) for n, c in enumerate(shape.text)]
            style = {"ha": "center", "family": ["DejaVu Sans Mono", "DejaVu Sans"]}
        style |= {"va": "baseline", "size": shape.size, "color": shape.colour, "zorder": order, "parse_math": False}
        style |= {"weight": "bold" if shape.bold else "normal"}
        style |= {"rotation": 90, "rotation_mode": "anchor"} if shape.upward else {}
        for x, part in parts:
            axes.text(x, shape.y, part, **style)
        return
    if isinstance(shape, Image):
        extent = (shape.x, shape.x + shape.width, shape.y + shape.height, shape.y)
        axes.imshow(shape.pixels, extent=extent, aspect="auto", interpolation="nearest", zorder=order)
        return
    look: dict[str, Any] = {"facecolor": shape.fill, "edgecolor": shape.stroke, "linewidth": shape.line}
    axes.add_patch(Rectangle((shape.x, shape.y), shape.width, shape.height, zorder=order, **look))


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG file (RFC 2083) of RGBA pixels (rows, columns, 4), 8 bits each.

    >>> png(np.zeros((1, 1, 4), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    rows, columns, _ = pixels.shape
    lines = np.zeros((rows, 1 + 4 * columns), np.uint8)  # each begins with its filter, none
    lines[:, 1:] = pixels.reshape(rows, -1)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
