"""The subject of a request of the page (a scene, a head, queries and keys), and its answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.viewer.data import pyramid
from regard.viewer.scene.labels import brief
from regard.viewer.scene.scenes import Scene, SceneLayer

Query = Mapping[str, str]

DIGITS = 18
"""Maximum digits of a number: more may not fit 64 bits."""

MOST_TOKENS = 4096
"""Tokens in one answer."""


@dataclass(frozen=True, eq=False)
class Answer:
    """An HTTP status, with JSON, an array of float16 or float32, or the bytes of a PNG file.

    exact: False for incomplete arrays, and for estimates from a sample.
    """

    status: int
    content: dict[str, Any] | np.ndarray[Any, np.dtype[Any]] | bytes
    exact: bool = True


class Refused(Exception):
    """Raised for a request without an answer: an HTTP status and a sentence for users."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Question:
    """The subject of a request: a scene, a batch element, and perhaps a head."""

    named: tuple[str, Scene]
    b: int
    query: Query
    layer: int = 0
    head: int = 0

    @property
    def name(self) -> str:
        """The id of the scene."""
        return self.named[0]

    @property
    def scene(self) -> Scene:
        """The scene."""
        return self.named[1]

    @property
    def of(self) -> SceneLayer:
        """The layer."""
        return self.scene.layers[self.layer]

    @property
    def key(self) -> tuple[str, int, int, int]:
        """The key of this head in caches."""
        return self.name, self.layer, self.head, self.b

    @property
    def kind(self) -> pyramid.Kind:
        """The requested kind of map."""
        kind = self.query.get("kind", "mass")
        if kind not in ("mass", "max"):
            raise Refused(422, f"kind must be mass or max, got {brief(kind)}")
        return kind  # type: ignore[return-value]


def whole(text: str, name: str) -> int:
    """Return a number from its digits in a path.

    Raises `Refused` for other texts, and for more than `DIGITS` digits.
    """
    if re.fullmatch(f"[0-9]{{1,{DIGITS}}}", text) is None:
        raise Refused(404, f"{name} {brief(text)} does not exist")
    return int(text)


def within(number: int, size: int, name: str) -> int:
    """Return the number if 0 ≤ number < size.

    Raises `Refused` otherwise.
    """
    if not 0 <= number < size:
        raise Refused(404, f"{name} {number} does not exist: there are {size}")
    return number


def integer(query: Query, name: str, default: int, least: int, most: int | None = None, what: str | None = None) -> int:
    """Return a parameter as an integer from `least` to `most`.

    what: its name in errors. Raises `Refused` for anything else.
    """
    text = query.get(name, str(default))
    number = int(text) if re.fullmatch(f"[0-9]{{1,{DIGITS}}}", text) else -1
    if number < least or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise Refused(422, f"{what or name} must be a number {bounds}, got {brief(text)}")
    return number


def span(query: Query, name: str, size: int) -> range:
    """Return a parameter first:end as a range, by default all of `size`.

    Raises `Refused` unless 0 ≤ first < end ≤ size.
    """
    text = query.get(name, f"0:{size}")
    ends = re.fullmatch(f"([0-9]{{1,{DIGITS}}}):([0-9]{{1,{DIGITS}}})", text)
    if ends is None or not int(ends[1]) < int(ends[2]) <= size:
        raise Refused(422, f"{name} must be first:end with 0 ≤ first < end ≤ {size}, got {brief(text)}")
    return range(int(ends[1]), int(ends[2]))
