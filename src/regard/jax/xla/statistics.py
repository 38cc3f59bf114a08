"""Statistics in plain JAX, block by block: none takes more memory than its result and a band of blocks."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from regard.core.statistics import bin_edges
from regard.jax.task import OUTPUTS, places
from regard.runtime.forks import cached_property

if TYPE_CHECKING:
    from regard.jax.xla.scan import Blocks

Arrays = dict[str, Any]


class Shared:
    """What several statistics of a call are read from, found once and outside of every loop."""

    def __init__(self, x: "Blocks", lse: Any):
        self.x, self.lse = x, lse

    @cached_property
    def best(self) -> tuple[Any, Any]:
        k = max([1, *(k for name, k in self.x.call.observe if name == "top")])
        P, index = (self.x.per_query(a, "top") for a in self.x.each_band(partial(best, self.x, k)))
        return P, index

    @cached_property
    def visible(self) -> Any:
        return self.x.per_query(self.x.each_band(partial(visible, self.x)), "visible")

    @cached_property
    def entropy(self) -> Any:
        return self.x.per_query(self.x.each_band(lambda r: self.x.running(r)[2]), "entropy")

    @cached_property
    def received(self) -> Any:
        return received(self.x, self.lse)


# The arrays of a statistic, from what is shared, its number among those of the call, and its parameter.
FOUND: dict[str, Callable[[Shared, int, Any], tuple[Any, ...]]] = {
    "max": lambda s, n, of: (s.best[0][..., 0],),
    "argmax": lambda s, n, of: (s.best[1][..., 0],),
    "top": lambda s, n, of: (s.best[0][..., :of], s.best[1][..., :of]),
    "visible": lambda s, n, of: (s.visible,),
    "normalized_entropy": lambda s, n, of: (normalized(s.entropy, s.visible),),
    "received": lambda s, n, of: (s.received,),
    "group_received": lambda s, n, of: (by_group(s.x, s.received),),
    "profile": lambda s, n, of: (profile(s.x, s.lse), distances(s.x)),
    "mass": lambda s, n, of: (s.x.per_query(s.x.each_band(partial(mass, s.x, s.lse, f"mass{n}")), "mass"),),
    "pooled": lambda s, n, of: (pooled(s.x, s.lse, *of),),
    "weights_of": lambda s, n, of: (weights_of(s.x, s.lse, of),),
}


def statistics(x: "Blocks", lse: Any) -> Arrays:
    """Every statistic that a call observes beside its outputs, by the names of `Call.results`."""
    shared = Shared(x, lse)
    found: Arrays = {}
    for n, (name, of) in enumerate(x.call.observe):
        if name not in OUTPUTS:
            found |= zip(places(n, name), FOUND[name](shared, n, of), strict=True)
    return found


def normalized(entropy: Any, count: Any) -> Any:
    return jnp.where(count > 1, entropy / jnp.log(jnp.maximum(count, 2).astype(entropy.dtype)), 0)


def visible(x: "Blocks", r: Any) -> Any:
    """How many keys each query of a band sees."""
    return lax.map(lambda t: x.scores(r, t)[2].sum(-1, dtype=jnp.int64), jnp.arange(x.tiles)).sum(0)


def best(x: "Blocks", k: int, r: Any) -> tuple[Any, Any]:
    """The k largest weights of a band and their columns, in falling order; ties to the lowest."""
    shape = (x.B, x.kv, x.group, x.rows, k)
    start = jnp.full(shape, -jnp.inf, x.real), jnp.full(shape, -1, jnp.int64)

    def step(carry: Any, t: Any) -> tuple[Any, None]:
        _, S, visible, at = x.scores(r, t)
        S = jnp.where(visible, S, -jnp.inf)
        index = jnp.where(visible, at.j - x.j0, -1)
        both = [jnp.concatenate(pair, -1) for pair in ((carry[0], S), (carry[1], index))]
        chosen = jnp.argsort(both[0], axis=-1, descending=True, stable=True)[..., :k]
        S, index = (jnp.take_along_axis(a, chosen, -1) for a in both)
        return (S, index), None

    (S, index), _ = lax.scan(step, start, jnp.arange(x.tiles))
    _, lse, _, _ = x.running(r)
    return jnp.where(index < 0, 0, jnp.exp(S - jnp.where(index < 0, 0, lse[..., None]))), index


def mass(x: "Blocks", lse: Any, name: str, r: Any) -> Any:
    """The weight of each query of a band on the pairs that a rule allows."""
    rows = x.band(x.heads(lse), r, 3)

    def part(t: Any) -> Any:
        T, _, P, _, _ = x.known(r, t, rows)
        return jnp.where(x.allowed(name, T, r, t), P, 0).sum(-1)

    return lax.map(part, jnp.arange(x.tiles)).sum(0)


def over_blocks(x: "Blocks", lse: Any, total: Any, add: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """add(total, P, r, t) for the weights P of every block in order, (b, kv head, group, ROWS, KEYS)."""
    lse = x.heads(lse)

    def band(r: Any, total: Any) -> Any:
        rows = x.band(lse, r, 3)
        return lax.fori_loop(0, x.tiles, lambda t, total: add(total, x.known(r, t, rows)[2], r, t), total)

    return lax.fori_loop(0, x.bands, band, total)


def received(x: "Blocks", lse: Any) -> Any:
    def add(total: Any, P: Any, r: Any, t: Any) -> Any:
        return total.at[t].add(P.sum(3))

    total = over_blocks(x, lse, jnp.zeros((x.tiles, x.B, x.kv, x.group, x.keys), x.real), add)
    return jnp.moveaxis(total, 0, 3).reshape(*x.lead, x.h, x.tiles * x.keys)[..., : x.n_k]


def by_group(x: "Blocks", received: Any) -> Any:
    return received.reshape(*x.lead, x.kv, x.group, x.n_k).sum(-2)


def profile(x: "Blocks", lse: Any) -> Any:
    """The weights summed along diagonals, from the lowest difference of a query and a key."""
    size, before = x.rows + x.keys - 1, x.tiles * x.keys - x.n_k  # differences in a block; in padding, below the lowest

    def add(total: Any, P: Any, r: Any, t: Any) -> Any:
        # Rows that begin one later each: a row of the padded array with one number less.
        skewed = jnp.pad(P[..., ::-1], [(0, 0)] * 4 + [(0, x.rows)]).reshape(*P.shape[:3], -1)
        sums = skewed[..., : -x.rows].reshape(*P.shape[:3], x.rows, size).sum(-2)
        at = r * x.rows + (x.tiles - 1 - t) * x.keys
        part = lax.dynamic_slice_in_dim(total, at, size, -1)
        return lax.dynamic_update_slice_in_dim(total, part + sums, at, -1)

    shape = (x.B, x.kv, x.group, x.bands * x.rows + x.tiles * x.keys - 1)
    total = over_blocks(x, lse, jnp.zeros(shape, x.real), add)
    return total[..., before:][..., : diagonals(x)].reshape(*x.lead, x.h, diagonals(x))


def diagonals(x: "Blocks") -> int:
    return x.n_q + x.n_k - 1 if x.n_q and x.n_k else 0


def distances(x: "Blocks") -> Any:
    first = x.offset - x.j0 - (x.n_k - 1)
    return (first[:, None] + jnp.arange(diagonals(x), dtype=jnp.int64)).reshape(*x.lead, 1, diagonals(x))


def pooled(x: "Blocks", lse: Any, rows: int, cols: int, kind: str) -> Any:
    """A map of cells: sums over keys and means over queries, or maxima."""
    edges = [bin_edges(number, n) for number, n in ((rows, x.n_q), (cols, x.n_k))]
    rows, cols = (len(e) - 1 for e in edges)
    if not rows or not cols:
        return jnp.zeros((*x.lead, x.h, rows, cols), x.real)
    lengths = x.bands * x.rows, x.tiles * x.keys
    # The cell of every query and key; padding, which weighs nothing, in the last.
    row, col = (
        jnp.asarray(np.minimum(np.searchsorted(e, np.arange(n), side="right") - 1, len(e) - 2))
        for e, n in zip(edges, lengths, strict=True)
    )
    combine, pool = (jnp.maximum, jax.ops.segment_max) if kind == "max" else (jnp.add, jax.ops.segment_sum)

    def add(total: Any, P: Any, r: Any, t: Any) -> Any:
        P = pool(jnp.moveaxis(P, -1, 0), x.tile(col, t, 0), cols)
        P = pool(jnp.moveaxis(P, -1, 0), x.band(row, r, 0), rows)
        return combine(total, P)  # cells that the block does not touch are 0, or as small as can be

    total = over_blocks(x, lse, jnp.zeros((rows, cols, x.B, x.kv, x.group), x.real), add)
    if kind == "mass":
        total = total / np.diff(edges[0]).astype(x.real)[:, None, None, None, None]
    return jnp.moveaxis(total, (0, 1), (-2, -1)).reshape(*x.lead, x.h, rows, cols)


def weights_of(x: "Blocks", lse: Any, rows: tuple[int, ...]) -> Any:
    """All weights of some queries, each from the band that it is in."""
    lse = x.heads(lse)
    found: dict[int, Any] = {}
    for r in sorted({row // x.rows for row in rows}):
        mine = [row for row in dict.fromkeys(rows) if row // x.rows == r]
        places = np.array(mine) - r * x.rows

        def some(t: Any, r: int = r, places: Any = places) -> Any:
            return x.known(r, t, x.band(lse, r, 3))[2][..., places, :]

        P = jnp.moveaxis(lax.map(some, jnp.arange(x.tiles)), 0, 4)
        P = P.reshape(*P.shape[:4], x.tiles * x.keys)[..., : x.n_k]
        found |= {row: P[:, :, :, n] for n, row in enumerate(mine)}
    if not rows:
        return jnp.zeros((*x.lead, x.h, 0, x.n_k), x.real)
    return jnp.stack([found[row] for row in rows], 3).reshape(*x.lead, x.h, len(rows), x.n_k)
