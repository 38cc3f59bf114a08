"""What a head does along a sequence: how far it looks, how evenly, what its keys receive; binned to be drawn."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core.parts import part_of
from regard.core.statistics import Statistic
from regard.viewer.scene.scenes import BAND, BLOCK, Head

Floats = NDArray[np.float64]

MOST = 2048
"""Points of a profile."""

LABELS = {
    "offset": "mean weight at each distance i − j",
    "entropy": "entropy of a query's weights, in nats",
    "normalized_entropy": "entropy over the logarithm of how many keys the query sees",
    "received": "weight that a key receives from all queries",
    "sink": "weight of a query on the first key",
    "lse": "lse of a query",
}


@dataclass(frozen=True, eq=False)
class Profile:
    """Means of `step` values each, the first of those at `start`; the last may be of fewer."""

    start: int
    step: int
    values: Floats


def profiles(head: Head, progress: Callable[[float], object] = lambda done: None) -> Mapping[str, Profile]:
    """Every profile of `LABELS`, in O(n) memory; `progress` is told the share of queries that is done."""
    p, n_q, n_k = head.problem, head.n_q, head.n_k
    wanted = [Statistic(name) for name in ("entropy", "normalized_entropy", "received", "profile")]
    received, by_distance = np.zeros(n_k), np.zeros(n_q + n_k - 1)
    rows: dict[str, list[Floats]] = {"lse": [], "entropy": [], "normalized_entropy": []}
    band = max(1, BAND // (n_k * BLOCK)) * BLOCK
    for start in range(0, n_q, band):
        progress(start / n_q)
        part = part_of(p, rows=slice(start, start + band))
        part = replace(part, value=part.value[..., :0], observe=tuple(wanted))
        outputs, found = head.engine.forward(part)
        assert outputs.lse is not None
        rows["lse"].append(outputs.lse[0])
        head.learn(start, outputs.lse[0])
        for name in ("entropy", "normalized_entropy"):
            rows[name].append(found[Statistic(name)][0])
        received += found[Statistic("received")][0]
        values = found[Statistic("profile")].values[0]
        by_distance[start : start + len(values)] += values
    whole = {name: np.concatenate(parts) for name, parts in rows.items()}
    first = head.weights(range(n_q), range(1))[:, 0]
    # As many pairs lie at a distance as the shorter of the sides and the corners of the map allow.
    pairs = np.minimum.reduce([np.arange(1, n_q + n_k), np.arange(n_q + n_k - 1, 0, -1), np.full(n_q + n_k - 1, n_q)])
    pairs = np.minimum(pairs, n_k)
    lowest = int(p.extents.distances[0, 0])
    distance = by_distance / pairs
    if p.mask_node is not None:  # of a causal head only what is behind
        seen = np.flatnonzero(by_distance)
        begin, end = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
        distance, lowest = distance[begin:end], lowest + begin
    made = {"offset": binned(distance, lowest)}
    made |= {name: binned(x) for name, x in whole.items() if name != "lse"}
    return made | {"received": binned(received), "sink": binned(first), "lse": binned(whole["lse"])}


def binned(values: NDArray[Any], start: int = 0) -> Profile:
    """At most `MOST` means of equally many values; a bin that holds an infinite value is infinite.

    >>> binned(np.arange(4096.0)).values[:2]
    array([0.5, 2.5])
    """
    step = -(-len(values) // MOST)
    edges = np.arange(0, len(values), step)
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(values.astype(np.float64), edges) / np.diff(edges, append=len(values))
    return Profile(start, step, means)
