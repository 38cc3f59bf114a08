"""Profiles of a head along a sequence: distances, entropy, attention received."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.core.parts import part_of
from regard.core.statistics import Received, WeightByDistance, statistic
from regard.viewer.data.numbers import all_finite
from regard.viewer.scene.scenes import BAND, BLOCK, Head

Floats = NDArray[np.float64]

MOST = 2048
"""Maximum points of a profile."""

EXACT = 64
"""Distances in each direction that always have a bin of their own."""

LABELS = {
    "offset": "mean weight at each distance i − j",
    "entropy": "entropy of a query's weights, in nats",
    "normalized_entropy": "entropy over the logarithm of how many keys the query sees",
    "received": "weight that a key receives from all queries",
    "sink": "weight of a query on the first key",
    "learned_sink": "weight of a query on the learned sink",
    "lse": "lse of a query",
}


@dataclass(frozen=True, eq=False)
class BinnedProfile:
    """Means over bins of `step` values, the first bin at `start`.

    The last bin may have fewer values. edges: int64 (m + 1,), for unequal bins: mean k covers [edges[k], edges[k + 1]).
    pairs: int64 (m,), the number of query-key pairs in each mean.
    """

    start: int
    step: int
    values: Floats
    edges: NDArray[np.int64] | None = None
    pairs: NDArray[np.int64] | None = None

    def described(self, label: str) -> dict[str, Any]:
        """Return the profile as JSON."""
        bins = {"edges": self.edges, "pairs": self.pairs}
        return {
            "start": self.start, "step": self.step, "label": label, "values": all_finite(self.values.tolist()),
            **{name: x.tolist() for name, x in bins.items() if x is not None},
        }  # fmt: skip


def profiles(head: Head, progress: Callable[[float], object] = lambda done: None) -> Mapping[str, BinnedProfile]:
    """Compute every profile of `LABELS`, in O(n) memory.

    Heads with a learned sink have its profile too.

    progress: called with the share of queries that is done.
    """
    p, n_q, n_k = head.problem, head.n_q, head.n_k
    wanted = [statistic(name) for name in ("entropy", "normalized_entropy", "received", "profile")]
    received, by_distance = np.zeros(n_k), np.zeros(n_q + n_k - 1)
    rows: dict[str, list[Floats]] = {"lse": [], "entropy": [], "normalized_entropy": []}
    band = max(1, BAND // (n_k * BLOCK)) * BLOCK
    for start in range(0, n_q, band):
        progress(start / n_q)
        part = part_of(p, rows=slice(start, start + band))
        part = replace(part, value=part.value[..., :0], observe=tuple(wanted))
        outputs, statistics = head.engine.forward(part)
        assert outputs.lse is not None
        rows["lse"].append(outputs.lse[0])
        head.learn(start, outputs.lse[0])
        for name in ("entropy", "normalized_entropy"):
            rows[name].append(statistics[statistic(name)][0])
        received += statistics[Received()][0]
        values = statistics[WeightByDistance()].values[0]
        by_distance[start : start + len(values)] += values
    whole = {name: np.concatenate(parts) for name, parts in rows.items()}
    first = head.weights(range(n_q), range(1))[:, 0]
    # Pairs at each distance: the length of that diagonal of the map.
    pairs = np.minimum.reduce([np.arange(1, n_q + n_k), np.arange(n_q + n_k - 1, 0, -1), np.full(n_q + n_k - 1, n_q)])
    pairs = np.minimum(pairs, n_k)
    lowest = int(p.extents.distances[0, 0])
    if p.mask_node is not None:  # only distances with weight: in a causal head, none ahead
        seen = np.flatnonzero(by_distance)
        begin, end = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
        by_distance, pairs, lowest = by_distance[begin:end], pairs[begin:end], lowest + begin
    curves = {"offset": along_distances(by_distance, pairs, lowest)}
    curves |= {name: binned(x) for name, x in whole.items() if name != "lse"}
    learned = {} if p.sink is None else {"learned_sink": binned(head.sinks())}
    return curves | {"received": binned(received), "sink": binned(first), **learned, "lse": binned(whole["lse"])}


def along_distances(totals: Floats, pairs: NDArray[np.int64], lowest: int) -> BinnedProfile:
    """Return the mean weight per pair over bins of distances.

    totals, pairs: (m,), the sum of weights and the number of pairs at each distance from `lowest` on.

    >>> made = along_distances(np.full(10_000, 3.0), np.full(10_000, 6), 0)
    >>> len(made.values) <= MOST, made.edges[:3].tolist(), made.pairs[:3].tolist(), made.values[[0, -1]].tolist()
    (True, [0, 1, 2], [6, 6, 6], [0.5, 0.5])
    """
    edges = distance_edges(lowest, lowest + len(totals))
    totals, pairs = (np.add.reduceat(x, (edges[:-1] - lowest).astype(np.intp)) for x in (totals, pairs))
    return BinnedProfile(lowest, 1, totals / pairs, edges, pairs)


def distance_edges(start: int, stop: int) -> NDArray[np.int64]:
    """Return the edges of at most `MOST` bins of the distances [start, stop).

    Up to `MOST` distances have a bin each. Of more, |distance| < `EXACT` has a bin each, and bins beyond grow by one
    ratio.

    >>> distance_edges(-3, 2).tolist(), np.diff(distance_edges(0, 100_000))[-3:].tolist()
    ([-3, -2, -1, 0, 1, 2], [379, 381, 382])
    """
    if stop - start <= MOST:
        return np.arange(start, stop + 1, dtype=np.int64)
    sides = (start < -EXACT) + (stop > EXACT)
    each = (MOST - 2 * EXACT) // sides  # bins beyond, on either side
    beyond = np.unique(np.ceil(np.geomspace(EXACT, max(1 - start, stop, EXACT + 1), each + 1)).astype(np.int64))
    edges = np.concatenate([-beyond[::-1] + 1, np.arange(-EXACT + 2, EXACT), beyond])
    return np.unique(np.clip(edges, start, stop))


def binned(values: NDArray[Any], start: int = 0) -> BinnedProfile:
    """Return at most `MOST` means over bins of equal size.

    A bin with an infinite value has an infinite mean.

    >>> binned(np.arange(4096.0)).values[:2]
    array([0.5, 2.5])
    """
    step = -(-len(values) // MOST)
    edges = np.arange(0, len(values), step)
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(values.astype(np.float64), edges) / np.diff(edges, append=len(values))
    return BinnedProfile(start, step, means)
