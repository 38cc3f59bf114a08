"""Statistics that follow from other statistics, on every engine."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regard.core.parts import scores_alone, scores_times
from regard.core.problem import Outputs, Problem
from regard.core.statistics import Statistic

Array = np.ndarray[Any, np.dtype[Any]]
Found = dict[Statistic, Any]

NEEDS = {
    "normalized_entropy": ("entropy", "visible"),
    "effective_states": ("entropy",),
    "group_received": ("received",),
    "mass": (),
}
RENYI: dict[float, tuple[str, ...]] = {0: ("visible",), 1: ("entropy",), np.inf: ("max",)}  # of other orders: ()


def needs(s: Statistic) -> tuple[str, ...] | None:
    """Return the names of the statistics from which one follows.

    None for one that an engine computes itself.
    """
    return RENYI.get(s.of, ()) if s.name == "renyi" else NEEDS.get(s.name)


def basic(observe: tuple[Statistic, ...]) -> tuple[Statistic, ...]:
    """Return the statistics that an engine has to compute itself for those observed."""
    own = (s for s in observe if needs(s) is None)
    return tuple(dict.fromkeys((*own, *(Statistic(name) for s in observe for name in needs(s) or ()))))


def complete(
    p: Problem, lse: Array, found: Mapping[Statistic, Any], forward: Callable[[Problem], tuple[Outputs, Found]]
) -> Found:
    """Return every statistic observed, given those of `basic`."""

    def value(s: Statistic) -> Any:
        if s.name == "mass":
            return mass(p, s, lse, forward)
        if s.name == "normalized_entropy":
            return normalized(found[Statistic("entropy")], found[Statistic("visible")])
        if s.name == "effective_states":
            return np.exp(found[Statistic("entropy")])
        if s.name == "renyi":
            return renyi(p, s.of, lse, [found[Statistic(name)] for name in needs(s) or ()], forward)
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


def renyi(
    p: Problem, alpha: float, lse: Array, found: list[Array], forward: Callable[[Problem], tuple[Outputs, Found]]
) -> Array:
    """Return log(Σ_j P^alpha / Σ_j P) / (1 − alpha).

    With L(a) = log Σ_j exp(a S), Σ_j P^alpha is exp(L(alpha) − alpha lse) and Σ_j P is exp(L(1) − lse).
    """

    def log_sum(p: Problem) -> Array:
        x = forward(p)[0].lse
        assert x is not None
        return x

    sees = log_sum(scores_alone(p)) if p.sink is not None else lse
    with np.errstate(all="ignore"):
        left = sees - lse
        if alpha == 0:
            entropy = np.log(found[0].astype(lse.dtype)) - left
        elif alpha == 1:
            entropy = found[0] / np.exp(left)
        elif alpha == np.inf:
            entropy = -np.log(found[0])
        else:
            order = lse.dtype.type(alpha)
            entropy = (log_sum(scores_times(p, alpha)) - order * lse - left) / (1 - order)
    return np.asarray(np.where(sees == -np.inf, lse.dtype.type(0), entropy))


def mass(p: Problem, s: Statistic, lse: Array, forward: Callable[[Problem], tuple[Outputs, Found]]) -> Array:
    """Return Σ_j P where a rule holds, as exp(lse of those keys alone − lse).

    Only tiles that the rule may reach are visited: the weight on a diagonal costs O(n).
    """
    part = forward(scores_alone(p, s.of if p.mask is None else p.mask & s.of))[0].lse
    assert part is not None
    least = np.finfo(lse.dtype).min
    return np.where(part == -np.inf, 0, np.exp(part - np.maximum(lse, least))).astype(lse.dtype, copy=False)
