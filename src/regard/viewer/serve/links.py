"""Links to views of the page: the fragment after # in its address."""

from collections.abc import Sequence
from urllib.parse import urlencode

from regard.viewer.scene.labels import place_of
from regard.viewer.scene.scenes import Scene

VIEWS = (
    "overview", "heads", "map", "text", "token", "compare", "profiles", "scale", "steps", "ablation", "arcs", "picture",
)  # fmt: skip


def fragment(
    scene: Scene,
    view: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    token: int | str | None = None,
    key: int | str | None = None,
) -> str:
    """Return "#view=…" for a view of a scene, empty if nothing is chosen.

    layer, head: the model's numbers. token, key: of the query and the key. Each is an index, from the end if negative,
    or a token's text (its last occurrence).

    Raises ValueError for a layer, head or token that does not exist, and for a head without its layer.
    """
    chosen: dict[str, str | int] = {}
    if head is not None and layer is None:
        raise ValueError("on the page --head goes with --layer")
    of = scene.layers[0]
    if layer is not None:
        chosen["layer"] = place = _among(layer, [x.number for x in scene.layers], "layer", "this model")
        of = scene.layers[place]
        if head is not None:
            chosen["head"] = _among(head, of.numbers, "head", f"layer {layer}")
    if token is not None:
        chosen["i"] = place_of(token, scene.query_tokens, of.problem.n_q)
    if key is not None:
        chosen["j"] = place_of(key, scene.key_tokens, of.problem.n_k)
    if view is not None or chosen:
        chosen["view"] = view or "map"
    return f"#{urlencode(chosen)}" if chosen else ""


def _among(number: int, numbers: Sequence[int], what: str, of: str) -> int:
    if number not in numbers:
        raise ValueError(f"{what} {number} does not exist: {of} has {', '.join(map(str, numbers))}")
    return list(numbers).index(number)
