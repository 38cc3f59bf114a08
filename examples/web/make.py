"""Attention with a rule of your own on a web page.

    python examples/web/make.py && python -m http.server --directory examples/web

writes three files beside `index.html`, which then computes in the browser: no server, no framework, nothing to install.
"""

from pathlib import Path
from typing import Any

import numpy as np

import regard

BAR = 4  # tokens of a bar


def bars(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Let a token see its own bar, and the first token of each bar before."""
    return (j <= i) & ((j // BAR == i // BAR) | (j % BAR == 0))


def nearer_first(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Lower a score with the distance, in each head more than in the one before."""
    return s - 0.5 * h * np.sqrt(1.0 * (i - j))


path = regard.export_wasm(Path(__file__).with_name("bars"), mask=bars, score=nearer_first, statistics=["entropy"])
for file in (path, path.with_suffix(".js")):
    print(f"{file.name}: {file.stat().st_size / 1024:.0f} KiB")
