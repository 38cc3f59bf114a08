"""Figures that are committed beside their page, so that the page has them wherever its source is read.

The block that computes such a figure stands folded below its image line. A build fails where the block gives another
figure than the file has; `python -m sphinx -E -t store docs docs/_build` writes the files anew.
"""

import re
from pathlib import Path
from typing import Any

from extensions.outputs import close

SVG = "image/svg+xml"
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)")


def difference(old: str, new: str) -> str:
    """Return the first place where two figures differ, empty if they agree. Fractions agree within 1 %.

    >>> difference('<path d="M7.04 12"/>', '<path d="M7.05 12"/>')
    ''
    >>> difference("<text>80 %</text>", "<text>79 %</text>")
    '<text>80 where the block gives <text>79'
    """
    before, after = NUMBER.split(old), NUMBER.split(new)  # texts, with numbers between them
    for at, (a, b) in enumerate(zip(before, after, strict=False)):
        if a != b and not (at % 2 and close(a, b)):
            was, is_now = ("".join(x[max(at - 1, 0) : at + 1]).rpartition("\n")[2] for x in (before, after))
            return f"{was} where the block gives {is_now}"
    return "" if len(before) == len(after) else "another number of elements than the block gives"


def check(path: Path, outputs: list[Any], writes: bool) -> None:
    """Compare the figure among a block's outputs with its file, or write the file. Raises ValueError."""
    new = next((x["data"][SVG] for x in outputs if SVG in x.get("data", {})), None)
    if new is None:
        raise ValueError(f"the block below {path.name} gives no figure")
    if writes:
        path.parent.mkdir(exist_ok=True)
        path.write_text(new, "utf-8")
    elif not path.exists():
        raise ValueError(f"there is no {path}; `sphinx -E -t store` writes it")
    elif found := difference(path.read_text("utf-8"), new):
        raise ValueError(f"{path} has {found}; `sphinx -E -t store` writes figures anew")
