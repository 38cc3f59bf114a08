"""The tiles that each rank sees, by the bounds of the rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.core.problem import KEY_STEP, Problem
from regard.parallel.dealing import PASSES, Deal, steps
from regard.rules import visible_tiles

Array = np.ndarray[Any, np.dtype[Any]]
TILE = 128  # positions that are sent together; divides the steps of rows and keys
BAND = 16  # row tiles that are classified together


@dataclass(frozen=True)
class Sight:
    """The visible tiles of a call whose rows and keys are dealt to ranks.

    Tiles are TILE rows by TILE keys, cut at the ends of runs and of key steps too; for all batch elements and heads
    together. key_steps: the keys that pass by together. keys: (ranks, key tiles), those that a rank's rows see. rows:
    (ranks, row tiles), those that see a rank's keys. key_runs: (runs of rows, key steps), True where there is something
    to compute. tiles: (ranks, key steps), the visible tiles of a rank's rows in each step.
    """

    row_deal: Deal
    key_deal: Deal
    key_steps: tuple[range, ...]
    keys: Array
    rows: Array
    key_runs: Array
    tiles: Array

    def wanted(self, keys: range) -> Array:
        """Return the tiles of some keys that each rank's rows see."""
        return self.keys[:, keys.start // TILE : -(-keys.stop // TILE)]


def edges_of(deal: Deal, cuts: Sequence[int] = ()) -> tuple[Array, Array]:
    """Return the edges of tiles, cut at the ends of runs and at some positions, and the run of each tile."""
    starts, run = [], []
    for number, x in enumerate(deal.all_runs()):
        own = sorted(
            {x.start, *range(x.start + TILE - x.start % TILE, x.stop, TILE), *(cut for cut in cuts if cut in x)}
        )
        starts += own
        run += [number] * len(own)
    order = np.argsort(starts)
    return np.append(np.array(starts, np.int64)[order], deal.n), np.array(run, np.int64)[order]


def sight_of(p: Problem, row_deal: Deal, key_deal: Deal, passes: int = PASSES) -> Sight:
    """Return the tiles that each rank sees of a whole call.

    passes: least steps of keys.
    """
    key_steps = tuple(steps(p.n_k, KEY_STEP, passes, p.origin[2]))
    key_starts = [x.start for x in key_steps]
    (row_edges, row_run), (key_edges, key_run) = edges_of(row_deal), edges_of(key_deal, key_starts)
    ranks, row_tile, key_tile = row_deal.ranks, row_edges[:-1] // TILE, key_edges[:-1] // TILE
    key_step = np.searchsorted(key_starts, key_edges[:-1], "right") - 1
    row_owner, key_owner = row_deal.owners(), key_deal.owners()
    sight = Sight(
        row_deal,
        key_deal,
        key_steps,
        keys=np.zeros((ranks, -(-p.n_k // TILE)), bool),
        rows=np.zeros((ranks, -(-p.n_q // TILE)), bool),
        key_runs=np.zeros((len(row_owner), len(key_starts)), bool),
        tiles=np.zeros((ranks, len(key_starts)), np.int64),
    )
    if not len(row_run) or not len(key_run) or not p.batch or not p.heads:
        return sight
    for band in (range(a, min(a + BAND, len(row_run))) for a in range(0, len(row_run), BAND)):
        r, c = _visible(p, row_edges[band.start : band.stop + 1], key_edges)
        r = r + band.start
        mine, theirs = row_owner[row_run[r]], key_owner[key_run[c]]
        sight.keys[mine, key_tile[c]] = True
        sight.rows[theirs, row_tile[r]] = True
        sight.key_runs[row_run[r], key_step[c]] = True
        np.add.at(sight.tiles, (mine, key_step[c]), 1)
    return sight


def _visible(p: Problem, rows: Array, keys: Array) -> tuple[Array, Array]:
    """Return the visible pairs of row tiles and key tiles, for any batch element and head."""
    count = len(rows) - 1
    if not p.rules.hiding:
        return np.repeat(np.arange(count), len(keys) - 1), np.tile(np.arange(len(keys) - 1), count)
    pairs: list[Array] = []
    for b in range(p.batch):
        ranges = p.extents.ranges(b, (0, p.heads - 1), rows[:-1], rows[1:] - 1)
        row, tile, _ = visible_tiles(p.mask_node, p.rules.hiding_node, ranges, keys + p.origin[2])
        pairs.append(row * (len(keys) - 1) + tile)
    both = np.unique(np.concatenate(pairs))
    return both // (len(keys) - 1), both % (len(keys) - 1)
