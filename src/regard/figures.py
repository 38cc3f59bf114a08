"""Pictures in files, the same bytes for the same picture."""

from pathlib import Path
from typing import IO

from matplotlib import rc_context
from matplotlib.figure import Figure


def save(figure: Figure, to: Path | IO[bytes], ending: str, dpi: int) -> None:
    """Write a figure as "svg", "png" or what else matplotlib knows."""
    # Without its date, and with names of parts that are not drawn by chance.
    with rc_context({"svg.hashsalt": "regard"}):
        figure.savefig(to, format=ending, dpi=dpi, metadata={"Date": None} if ending == "svg" else None)
