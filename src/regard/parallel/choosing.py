"""Stripes or contiguous shards: the deal of a call, by what each rank computes and is sent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from regard.core.problem import ROW_BLOCK, Problem
from regard.parallel.dealing import Deal
from regard.parallel.sight import TILE, Sight, sight_of

EVEN = 1.05  # the largest rank over the mean, up to which ranks are as good as even
STRIPES = 20  # of all ranks but one; under a causal mask the rank with the most then has 1 + 1 / 20 of the mean
LONGEST = 1024  # positions of a stripe: its calls are long enough
DEALS = ("contiguous", "stripes")


@dataclass(frozen=True)
class DealChoice:
    """A deal of a call, with what follows from it.

    tiles: visible tiles of the rows of each rank. bytes: of keys and values that each is sent, forward. reason: why
    this deal and no other.
    """

    sight: Sight
    tiles: tuple[int, ...]
    bytes: tuple[int, ...]
    reason: str

    @property
    def deal(self) -> Deal:
        return self.sight.row_deal

    @property
    def balance(self) -> float:
        return balance(self.tiles)


def balance(tiles: Sequence[int]) -> float:
    """Return the tiles of the rank with the most, over the mean of all ranks."""
    return max(tiles) * len(tiles) / max(1, sum(tiles))


def stripe_size(n: int, ranks: int) -> int:
    """Return the positions of a stripe.

    >>> stripe_size(16384, 2), stripe_size(65536, 8), stripe_size(300, 8)
    (768, 384, 128)
    """
    size = min(LONGEST, n // max(1, (ranks - 1) * STRIPES))
    whole = ROW_BLOCK if size >= ROW_BLOCK else TILE  # blocks of rows are not divided in backward
    return max(TILE, size // whole * whole)


def choice_of(p: Problem, ranks: int, name: str) -> DealChoice:
    """Return what a deal means for a call, whose rows and keys are dealt alike."""
    row_deal, key_deal = [
        Deal.contiguous(n, ranks) if name == "contiguous" else Deal.stripes(n, ranks, stripe_size(n, ranks))
        for n in (p.n_q, p.n_k)
    ]
    sight = sight_of(p, row_deal, key_deal)
    row = p.batch * p.kv_heads * (p.d + p.d_v) * p.dtype.itemsize
    rows = np.zeros((ranks, sight.keys.shape[1]), np.int64)
    for rank in range(ranks):
        own = np.zeros(sight.keys.shape[1] * TILE, bool)
        own[: p.n_k] = True
        own[key_deal.positions(rank)] = False
        rows[rank] = own.reshape(-1, TILE).sum(axis=1)
    sent = (rows * sight.keys).sum(axis=1) * row
    return DealChoice(sight, tuple(sight.tiles.sum(axis=1).tolist()), tuple(sent.tolist()), "named")


def choose_deal(p: Problem, ranks: int, name: str | None = None) -> DealChoice:
    """Return the deal of a call: contiguous shards where they are even, else stripes, unless one is named."""
    if name is not None:
        return choice_of(p, ranks, name)
    contiguous, stripes = (choice_of(p, ranks, x) for x in DEALS)
    good = contiguous.balance <= EVEN and sum(contiguous.bytes) <= sum(stripes.bytes)
    stay = good or contiguous.balance <= stripes.balance
    chosen, other = (contiguous, stripes) if stay else (stripes, contiguous)
    sizes = f"{sum(chosen.bytes):,} bytes instead of {sum(other.bytes):,}"
    reason = f"{chosen.balance:.2f} of the mean on the largest rank instead of {other.balance:.2f}, {sizes}"
    return replace(chosen, reason=reason)
