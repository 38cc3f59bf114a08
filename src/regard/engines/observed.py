"""Statistics that follow from other statistics, on every engine."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regard.core.parts import scores_alone
from regard.core.problem import Outputs, Problem
from regard.core.statistics import Statistic

Array = np.ndarray[Any, np.dtype[Any]]
Found = dict[Statistic, Any]

NEEDS = {"normalized_entropy": ("entropy", "visible"), "group_received": ("received",)}


def basic(observe: tuple[Statistic, ...]) -> tuple[Statistic, ...]:
    """Return the statistics that an engine has to compute itself for those observed."""
    needed = (Statistic(name) for s in observe for name in NEEDS.get(s.name, ()))
    own = (s for s in observe if s.name not in NEEDS and s.name != "mass")
    return tuple(dict.fromkeys((*own, *needed)))


def complete(
    p: Problem, lse: Array, found: Mapping[Statistic, Any], forward: Callable[[Problem], tuple[Outputs, Found]]
) -> Found:
    """Return every statistic observed, given those of `basic`."""

    def value(s: Statistic) -> Any:
        if s.name == "mass":
            return mass(p, s, lse, forward)
        if s.name == "normalized_entropy":
            return normalized(found[Statistic("entropy")], found[Statistic("visible")])
        if s.name == "group_received":
            received = found[Statistic("received")]
            return received.reshape(*p.lead, p.kv_heads, p.group, p.n_k).sum(axis=-2)
        return found[s]

    return {s: value(s) for s in p.observe}


def normalized(entropy: Array, visible: Array) -> Array:
    """Divide entropy by the logarithm of the number of visible keys.

    0 for one key or none.
    """
    most = np.log(np.maximum(visible, 2).astype(entropy.dtype))
    return np.asarray(np.where(visible > 1, entropy / most, entropy.dtype.type(0)))


def mass(p: Problem, s: Statistic, lse: Array, forward: Callable[[Problem], tuple[Outputs, Found]]) -> Array:
    """Return Σ_j P where a rule holds, as exp(lse of those keys alone − lse).

    Only tiles that the rule may reach are visited: the weight on a diagonal costs O(n).
    """
    part = forward(scores_alone(p, s.of if p.mask is None else p.mask & s.of))[0].lse
    assert part is not None
    least = np.finfo(lse.dtype).min
    return np.where(part == -np.inf, 0, np.exp(part - np.maximum(lse, least))).astype(lse.dtype, copy=False)
