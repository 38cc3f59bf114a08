"""Requests and answers as text and bytes: over HTTP, in a notebook's messages and in files."""

from base64 import b64encode
from typing import Any

import numpy as np

from regard.viewer.scene.scenes import Array

DIGITS = 5
"""Digits of the numbers along a sequence."""


def split_query(path: str) -> tuple[str, dict[str, str]]:
    """Return a path without its parameters, and these.

    >>> split_query("arrays/tile/0/0/0/0/0?kind=max")
    ('arrays/tile/0/0/0/0/0', {'kind': 'max'})
    """
    path, _, query = path.partition("?")
    return path, dict(part.partition("=")[::2] for part in query.split("&") if part)


def kind(x: Array | bytes) -> str:
    """Return the type of an answer's numbers, "f16" or "f32", or "bytes" of a file."""
    return "bytes" if isinstance(x, bytes) else f"f{8 * x.itemsize}"


def raw(x: Array | bytes) -> bytes:
    """Return an array's numbers in order, with the least significant byte first, or a file as it is."""
    if isinstance(x, bytes):
        return x
    return np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<"), copy=False).tobytes()


def base64(x: Array | bytes) -> str:
    """Return bytes, or the numbers of an array, as text."""
    return b64encode(raw(x)).decode("ascii")


def rounded(x: Any) -> Any:
    """JSON with as many digits as a drawing needs.

    >>> rounded({"values": [0.123456789, 12, None]})
    {'values': [0.12346, 12, None]}
    """
    if isinstance(x, dict):
        return {name: rounded(y) for name, y in x.items()}
    if isinstance(x, list):
        return [rounded(y) for y in x]
    return float(f"{x:.{DIGITS}g}") if isinstance(x, float) else x
