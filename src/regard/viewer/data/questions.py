"""What a question of the page is about: a scene, a head, queries and keys; what does not exist is refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from regard.viewer.data import pyramid
from regard.viewer.scene.scenes import Scene, SceneLayer

Query = Mapping[str, str]


class Refused(Exception):
    """A question without an answer: a status and one sentence for people."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class At:
    """What a question is about: a scene and a batch element, and where it names them a layer and a head."""

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
        """What tells this head from every other."""
        return self.name, self.layer, self.head, self.b

    @property
    def kind(self) -> pyramid.Kind:
        """Which of the two kinds of maps is asked for."""
        kind = self.query.get("kind", "mass")
        if kind not in ("mass", "max"):
            raise Refused(422, f"kind must be mass or max, got {kind}")
        return kind  # type: ignore[return-value]


def within(number: int, size: int, name: str) -> int:
    """Return the number. Raises `Refused` unless it is one of `size`."""
    if not 0 <= number < size:
        raise Refused(404, f"{name} {number} does not exist: there are {size}")
    return number


def integer(query: Query, name: str, default: int, least: int, most: int | None = None, what: str | None = None) -> int:
    """Return a parameter as a number. Raises `Refused` for one out of its bounds, which is called `what`."""
    text = query.get(name, str(default))
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise Refused(422, f"{what or name} must be a number {bounds}, got {text}")
    return int(text)


def span(query: Query, name: str, size: int) -> range:
    """Return a parameter first:end, all of `size` unless given. Raises `Refused` for one that is not there."""
    found = re.fullmatch(r"(\d+):(\d+)", query.get(name, f"0:{size}"))
    if found is None or not int(found[1]) < int(found[2]) <= size:
        raise Refused(422, f"{name} must be first:end with 0 ≤ first < end ≤ {size}, got {query.get(name)}")
    return range(int(found[1]), int(found[2]))
