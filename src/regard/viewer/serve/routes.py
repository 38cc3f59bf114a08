"""Routes of the page: a path's form, and the subject that its names and parameters mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regard.viewer.data.questions import Answer, Query, Question, integer, whole, within
from regard.viewer.serve.registry import Registry
from regard.viewer.serve.results import Results

NAMES = {"i": "query", "j": "key"}
"""Names in errors for the numbers of a path, where they differ."""


@dataclass(frozen=True)
class Route:
    """A method, a path with names in braces, and the function that answers.

    answer: called with the results, and for a path with {scene} with a `Question`. A GET adds the numbers of the path
    by name, except {layer} and {head}, which the question has; a POST adds its JSON body.

    >>> route = Route("GET", "{scene}/row/{layer}/{head}/{i}", lambda results, at, i: Answer(200, {}))
    >>> route.named("arrays/row/0/1/3")
    {'scene': 'arrays', 'layer': '0', 'head': '1', 'i': '3'}
    >>> route.named("arrays/column/0/1/3")
    """

    method: str
    path: str
    answer: Callable[..., Answer]

    def named(self, path: str) -> dict[str, str] | None:
        """Return the names in this route's path with their texts in another path, None if it has another form."""
        parts, texts = self.path.split("/"), path.split("/")
        if len(parts) != len(texts):
            return None
        if any(part != text for part, text in zip(parts, texts, strict=True) if not part.startswith("{")):
            return None
        return {part[1:-1]: text for part, text in zip(parts, texts, strict=True) if part.startswith("{")}


def find(routes: Sequence[Route], method: str, path: str) -> tuple[Route, dict[str, str]] | None:
    """Return the route of a path with the texts of its names, or None."""
    for route in routes:
        if route.method == method and (named := route.named(path)) is not None:
            return route, named
    return None


def question(registry: Registry, named: Mapping[str, str], query: Query) -> tuple[Question, dict[str, int]]:
    """Return the subject of a request, and the other numbers of its path.

    Raises `Refused` for a scene, batch element, layer or head that does not exist.
    """
    scene = registry[named["scene"]]
    numbers = {name: whole(text, NAMES.get(name, name)) for name, text in named.items() if name != "scene"}
    batch = integer(query, "b", 0, 0, scene.batch - 1, "batch element")
    at = Question((named["scene"], scene), batch, query)
    if "layer" in numbers:
        at = replace(at, layer=within(numbers.pop("layer"), len(scene.layers), "layer"))
    if "head" in numbers:
        at = replace(at, head=within(numbers.pop("head"), at.of.heads, "head"))
    return at, numbers


def answer(route: Route, results: Results, named: Mapping[str, str], query: Query, body: Any) -> Answer:
    """Return the answer of a route."""
    if "scene" not in named:
        return route.answer(results)
    at, numbers = question(results.registry, named, query)
    return route.answer(results, at, body) if route.method == "POST" else route.answer(results, at, **numbers)
