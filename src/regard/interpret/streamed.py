"""Statistics of heads from queries and keys, without n × n weights."""

from __future__ import annotations  # so that `help` shows the names of types

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.arguments.values import integer
from regard.core.statistics import mass
from regard.interpret.heads import DISTANCES, HeadStatistics, divide, most_back
from regard.ops.attention import attention
from regard.rules import Mask, mask, table

Integers = NDArray[np.integer[Any]]


def measure_heads(
    query: NDArray[Any],
    key: NDArray[Any],
    ids: ArrayLike | None = None,
    *,
    layer: int = 0,
    prefix: int = 1,
    engine: str | None = None,
    **options: Any,
) -> tuple[HeadStatistics, ...]:
    """Compute `head_statistics` of one layer in O(n) memory.

    query is (..., h, n_q, d), key (..., h_kv, n_k, d). `ids` (..., n_k) are the tokens of the keys;
    without them scores of copies are NaN. `options` are those of `regard.attention` that the layer
    has, such as `causal=True` and `scale`. Each score is the mean weight on a rule: a diagonal, the
    first token, the tokens after copies. Entropies are normalized by the number of keys that a
    query sees. `kv_head` is the key-value head of each of grouped heads. If there are fewer queries
    than keys, they are the last of the sequence.

    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 4, 300, 8))
    >>> heads = measure_heads(q, k[:2], np.arange(300) % 50, causal=True)
    >>> [head.kv_head for head in heads], heads[0].normalized_entropy < 1
    ([0, 0, 1, 1], True)
    """
    layer, prefix = integer("layer", layer), integer("prefix", prefix, least=1)
    if query.ndim < 3 or key.ndim < 3:
        raise ValueError(f"query and key must have shape (..., h, n, d) each, got {query.shape} and {key.shape}")
    lead, n_q, n_k = np.broadcast_shapes(query.shape[:-3], key.shape[:-3]), query.shape[-2], key.shape[-2]
    offset = options.get("offset")
    first = np.broadcast_to(n_k - n_q if offset is None else offset, lead)
    positions = (first[..., None] + np.arange(n_q))[..., None, :]  # (..., 1, n_q)
    rules = {
        "previous": on_diagonal(1),
        "sink": mask(lambda b, h, i, j: j == 0),
        "current": on_diagonal(0),
    } | {f"back {distance}": on_diagonal(distance) for distance in DISTANCES}
    repeated = {}
    if ids is not None:
        ids = np.asarray(ids)
        if ids.ndim < 1 or ids.shape[-1] != n_k:
            raise ValueError(f"ids must have shape (..., {n_k}) to fit key {key.shape}, got {ids.shape}")
        tokens = np.broadcast_to(ids, (*lead, n_k)).reshape(-1, n_k)
        for name, length, by in (("duplicate", 1, 0), ("induction", prefix, 1)):
            runs = run_numbers(tokens, length)
            rules[name] = after_copies(runs, by)
            before = came_before(runs).reshape(*lead, 1, n_k)
            inside = np.clip(positions, 0, max(n_k - 1, 0))
            repeated[name] = np.take_along_axis(before, inside, -1) & (positions == inside)
    masses = {name: mass(rule) for name, rule in rules.items()}
    observe: list[Any] = ["visible", "entropy", "normalized_entropy", *masses.values()]
    _, seen = attention(query, key, key[..., :0], observe=observe, engine=engine, **options)
    alive = seen.visible > 0

    def sums(name: str, rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the sum over the rows, and their number: (2, h)."""
        values = seen[masses.get(name, name)].astype(np.float64)
        others = tuple(axis for axis in range(values.ndim) if axis != values.ndim - 2)
        return np.stack([values.sum(others, where=rows), rows.sum(others)])

    def mean(name: str) -> list[float]:
        if name in ("duplicate", "induction") and ids is None:
            return [math.nan] * query.shape[-3]
        return [float(x) for x in divide(*sums(name, alive & repeated.get(name, positions > 0)))]

    names = ("previous", "duplicate", "induction", "sink", "current", "entropy", "normalized_entropy")
    means = {name: mean(name) for name in names}
    by_distance = np.stack([sums(f"back {d}", alive & (positions > d)) for d in DISTANCES], axis=1)
    back, distances = most_back(divide(*by_distance), by_distance[1])
    group = query.shape[-3] // key.shape[-3]
    return tuple(
        HeadStatistics(
            layer,
            head,
            kv_head=head // group,
            back=back[head],
            distance=distances[head],
            **{name: x[head] for name, x in means.items()},
        )
        for head in range(query.shape[-3])
    )


def on_diagonal(distance: int) -> Mask:
    return mask(lambda b, h, i, j: i - j == distance)


def run_numbers(tokens: Integers, length: int) -> Integers:
    """Return a number for the run of `length` tokens up to each token: (batch, n).

    Equal runs have equal numbers; −1, −2, ... where there are fewer tokens.
    """
    single = np.unique(tokens, return_inverse=True)[1].reshape(tokens.shape)
    runs, size = single, int(single.max(initial=0)) + 1
    for _ in range(min(length, tokens.shape[-1]) - 1):
        longer = np.roll(runs, 1, axis=-1) * size + single
        runs = np.unique(longer, return_inverse=True)[1].reshape(tokens.shape)
    few = np.arange(tokens.shape[-1]) < length - 1
    return np.where(few, -1 - np.arange(tokens.shape[-1]), runs)


def after_copies(runs: Integers, by: int) -> Mask:
    """Return a mask of the keys `by` places after an earlier copy of the query's run."""
    numbers = table(runs)
    return mask(lambda b, h, i, j: (numbers[b, j - by] == numbers[b, i]) & (j >= by) & (j - by < i))


def came_before(runs: Integers) -> NDArray[np.bool_]:
    """Return a flag for each run that occurred before: (batch, n)."""
    flags = np.ones(runs.shape, bool)
    for row, row_flags in zip(runs, flags, strict=True):
        row_flags[np.unique(row, return_index=True)[1]] = False
    return flags
