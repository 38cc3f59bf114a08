"""The same statistics from queries and keys, at any length: no weights of size n × n are made."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import regard
from regard.insight.heads import HeadStatistics, divide

Integers = NDArray[np.integer[Any]]


def measure_heads(
    query: NDArray[Any],
    key: NDArray[Any],
    ids: ArrayLike,
    *,
    layer: int = 0,
    prefix: int = 1,
    engine: str | None = None,
    **options: Any,
) -> tuple[HeadStatistics, ...]:
    """`head_statistics` of one layer in O(n) memory, from its queries (..., h, n, d) and keys (..., h_kv, n, d).

    `ids` (..., n) are the tokens, `options` those of `regard.attention` that the layer has, such as `causal=True` and
    `scale`. Each score is the mean weight that falls on a rule: a diagonal, the first token, the tokens after copies.
    Entropies are normalized by how many keys a query sees. Of grouped heads, each says whose keys it reads (`kv_head`).

    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 4, 300, 8))
    >>> heads = measure_heads(q, k[:2], np.arange(300) % 50, causal=True)
    >>> [head.kv_head for head in heads], heads[0].normalized_entropy < 1
    ([0, 0, 1, 1], True)
    """
    if prefix < 1:
        raise ValueError(f"prefix must be at least 1, got {prefix}")
    ids = np.asarray(ids)
    if query.ndim < 3 or key.ndim < 3 or query.shape[-2] != key.shape[-2]:
        raise ValueError(f"query and key must have shape (..., h, n, d) each, got {query.shape} and {key.shape}")
    lead, n = np.broadcast_shapes(query.shape[:-3], key.shape[:-3]), query.shape[-2]
    if ids.ndim < 1 or ids.shape[-1] != n:
        raise ValueError(f"ids must have shape (..., {n}) to fit query {query.shape}, got {ids.shape}")
    tokens = np.broadcast_to(ids, (*lead, n)).reshape(-1, n)
    whole, runs = run_numbers(tokens, 1), run_numbers(tokens, prefix)
    rules = {
        "previous": on_diagonal(1),
        "duplicate": after_copies(whole, 0),
        "induction": after_copies(runs, 1),
        "sink": regard.mask(lambda b, h, i, j: j == 0),
        "current": on_diagonal(0),
    }
    mass = {name: regard.mass(rule) for name, rule in rules.items()}
    observe: list[Any] = ["visible", "entropy", "normalized_entropy", *mass.values()]
    _, seen = regard.attention(query, key, key[..., :0], observe=observe, engine=engine, **options)
    later = (seen.visible > 0) & (np.arange(n) > 0)
    says = {
        "duplicate": (seen.visible > 0) & came_before(whole).reshape(*lead, 1, n),
        "induction": (seen.visible > 0) & came_before(runs).reshape(*lead, 1, n),
    }

    def mean(name: str) -> list[float]:
        values, rows = seen[mass.get(name, name)].astype(np.float64), says.get(name, later)
        others = tuple(axis for axis in range(values.ndim) if axis != values.ndim - 2)
        return [float(x) for x in divide(values.sum(others, where=rows), rows.sum(others))]

    means = {name: mean(name) for name in (*rules, "entropy", "normalized_entropy")}
    group = query.shape[-3] // key.shape[-3]
    return tuple(
        HeadStatistics(layer, head, kv_head=head // group, **{name: x[head] for name, x in means.items()})
        for head in range(query.shape[-3])
    )


def on_diagonal(distance: int) -> regard.Mask:
    return regard.mask(lambda b, h, i, j: i - j == distance)


def run_numbers(tokens: Integers, length: int) -> Integers:
    """For each token (batch, n), a number that stands for the last `length` of them; −1, −2, ... where there are
    fewer.
    """
    single = np.unique(tokens, return_inverse=True)[1].reshape(tokens.shape)
    runs, size = single, int(single.max(initial=0)) + 1
    for _ in range(length - 1):
        longer = np.roll(runs, 1, axis=-1) * size + single
        runs = np.unique(longer, return_inverse=True)[1].reshape(tokens.shape)
    few = np.arange(tokens.shape[-1]) < length - 1
    return np.where(few, -1 - np.arange(tokens.shape[-1]), runs)


def after_copies(runs: Integers, by: int) -> regard.Mask:
    """The keys that lie `by` after an earlier place with the run of the query."""
    table = regard.table(runs)
    return regard.mask(lambda b, h, i, j: (table[b, j - by] == table[b, i]) & (j >= by) & (j - by < i))


def came_before(runs: Integers) -> NDArray[np.bool_]:
    """Where a run was met before: (batch, n)."""
    made = np.ones(runs.shape, bool)
    for row, found in zip(runs, made, strict=True):
        found[np.unique(row, return_index=True)[1]] = False
    return made
