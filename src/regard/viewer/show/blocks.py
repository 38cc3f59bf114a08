"""Matrices drawn with a terminal's characters and colours."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from regard.viewer.show.colour import VIRIDIS, ramp, readable_on

Levels = NDArray[np.floating]
_STEPS = 63


@dataclass(frozen=True)
class Screen:
    """The abilities of a console: colours, Unicode and width."""

    colour: bool
    unicode: bool
    width: int

    @classmethod
    def of(cls, console: Console) -> "Screen":
        """Return the abilities of a Rich console; NO_COLOR and pipes have no colours."""
        colour = not console.no_color and console.color_system in ("truecolor", "256")
        return cls(colour, not console.options.ascii_only, console.width)

    @property
    def shades(self) -> str:
        """Characters from nothing to everything, for consoles without colours."""
        return " ░▒▓█" if self.unicode else " .:+#@"

    @property
    def rows_per_line(self) -> int:
        """Rows of a matrix in one line of text, with one character per column."""
        return 2 if self.colour and self.unicode else 1

    @property
    def pointer(self) -> str:
        """The mark of a row, two columns wide."""
        return "▸ " if self.unicode else "> "

    def legend(self) -> str:
        """Describe the scale of colours or characters, in words."""
        return (
            "purple 0, yellow 1, by square root" if self.colour else f"0 {self.quoted(self.shades)} 1, by square root"
        )

    def quoted(self, text: str) -> str:
        """Return the text in quotation marks."""
        return f"“{text}”" if self.unicode else f'"{text}"'

    def dense(self, levels: Levels, anchors: tuple[str, ...] = VIRIDIS) -> list[Text]:
        """Return lines of one character per column.

        Two rows share a line where half blocks and colours allow it.
        """
        if self.rows_per_line == 1:
            return self.cells(levels, 1, anchors)
        rows = np.concatenate([levels, np.full((levels.shape[0] % 2, levels.shape[1]), np.nan)])
        lines = []
        for top, bottom in zip(_codes(rows[0::2]), _codes(rows[1::2]), strict=True):
            line = Text(no_wrap=True)
            for upper, lower in zip(top, bottom, strict=True):
                if upper < 0 <= lower:
                    line.append("▄", _style(lower, None, anchors))
                elif upper < 0:
                    line.append(" ")
                else:
                    line.append("▀", _style(upper, None if lower < 0 else lower, anchors))
            lines.append(line)
        return lines

    def cells(
        self,
        levels: Levels,
        width: int,
        anchors: tuple[str, ...] = VIRIDIS,
        texts: list[list[str]] | None = None,
    ) -> list[Text]:
        """Return a line for each row, with every column ``width`` characters wide.

        texts: contents of the cells.
        """
        lines = []
        for r, codes in enumerate(_codes(levels)):
            line = Text(no_wrap=True)
            for c, code in enumerate(codes):
                text = set_cell_size(texts[r][c], width) if texts else " " * width
                if code < 0:
                    line.append(text)
                elif self.colour:
                    line.append(text, _cell_style(code, anchors))
                elif texts:
                    line.append(text)
                else:
                    line.append(self.shades[round(code * (len(self.shades) - 1) / _STEPS)] * width)
            lines.append(line)
        return lines

    def bar(self, fraction: float, width: int) -> str:
        """Return a bar that fills a fraction of the width.

        In Unicode it is exact to an eighth of a character.
        """
        eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
        if not self.unicode:
            return "#" * round(eighths / 8)
        return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()

    def plain(self, text: str) -> str:
        """Return the text without characters that this console lacks."""
        return text if self.unicode else text.translate(str.maketrans("“”−√", '""-v'))

    def fit(self, text: str, width: int) -> str:
        """Return the text cut to at most ``width`` columns."""
        if cell_len(text) <= width:
            return text
        return set_cell_size(text, max(width - 1, 0)) + ("…" if self.unicode else "~")[:width]

    def right(self, text: str, width: int) -> str:
        """Return the text right-aligned in ``width`` columns."""
        text = self.fit(text, width)
        return " " * (width - cell_len(text)) + text

    def upright(self, labels: Sequence[str], height: int) -> list[str]:
        """Return labels written downwards, one column each, aligned at the bottom.

        Labels have at most ``height`` lines.
        """
        single = [
            [c if cell_len(c) == 1 else "□" if self.unicode else "?" for c in label if cell_len(c)] for label in labels
        ]
        cut = [c if len(c) <= height else [*c[: height - 1], "⋮" if self.unicode else ":"] for c in single]
        tall = max(map(len, cut), default=0)
        return ["".join((c[k - tall + len(c)] if k >= tall - len(c) else " ") for c in cut) for k in range(tall)]


def _codes(levels: Levels) -> list[list[int]]:
    """Return levels in [0, 1] as steps of the colour scale, −1 for NaN."""
    seen = np.isfinite(levels)
    steps = np.clip(np.where(seen, levels, 0.0), 0.0, 1.0) * _STEPS
    codes: list[list[int]] = np.where(seen, steps.round(), -1).astype(int).tolist()
    return codes


@lru_cache(maxsize=8192)
def _style(fore: int, back: int | None, anchors: tuple[str, ...]) -> Style:
    colours = [None if code is None else Color.from_rgb(*ramp(code / _STEPS, anchors)) for code in (fore, back)]
    return Style.from_color(*colours)


@lru_cache(maxsize=512)
def _cell_style(code: int, anchors: tuple[str, ...]) -> Style:
    ground = ramp(code / _STEPS, anchors)
    return Style.from_color(Color.parse(readable_on(ground)), Color.from_rgb(*ground))
