"""Earlier heads of a model that wrote what a head reads at a key."""

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.interpret.paths import earlier_heads
from regard.viewer.data.ablation import value_norms
from regard.viewer.data.sentences import UNWRITTEN
from regard.viewer.scene.scenes import Array, Head, SceneLayer

LISTED = 12
"""Heads that are told."""

HeadOf = Callable[[int, int], Head]


def unwritten(layers: tuple[SceneLayer, ...], layer: int, j: int) -> str:
    """Return why no earlier head is known to have written at key j, empty if any is."""
    of = layers[layer]
    if of.cross:
        return UNWRITTEN["two_texts"]
    if not layer:
        return UNWRITTEN["first"]
    return "" if 0 <= query_at(of, j) < of.problem.n_q else UNWRITTEN["cached"]


def query_at(of: SceneLayer, j: int) -> int:
    """Return the query that stands at key j."""
    return j - int(of.problem.offset[0])


def described(layers: tuple[SceneLayer, ...], head_of: HeadOf, at: tuple[int, int, int, int], b: int) -> dict[str, Any]:
    """Return the earlier heads on the path to query i of a head through key j, as JSON.

    at: layer, head, i and j. b: the batch element. head_of: returns a head by layer and number.
    """
    layer, head, i, j = at
    weight = float(np.nan_to_num(head_of(layer, head).weights_of(np.array([i]))[0, j]))
    why = unwritten(layers, layer, j)
    if why:
        return {"weight": weight, "values": False, "heads": [], "why": why}
    before, query = layers[:layer], np.array([query_at(layers[layer], j)])
    values = all(of.has_values for of in before)

    def written(number: int, of: SceneLayer) -> tuple[Array, Array | None]:
        rows = [np.nan_to_num(head_of(number, g).weights_of(query)[0]) for g in range(of.heads)]
        return np.stack(rows), np.stack([_norms(of, g, b) for g in range(of.heads)]) if values else None

    ranked = earlier_heads(weight, j, [written(number, of) for number, of in enumerate(before)])
    return {"weight": weight, "values": values, "heads": [vars(x) for x in ranked[:LISTED]], "why": ""}


def _norms(of: SceneLayer, head: int, b: int) -> Array:
    """Return the norms (n_k,) of the values of a head that has them."""
    values = of.values_of(head, b)
    assert values is not None
    return value_norms(values)
