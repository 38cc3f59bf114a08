"""Statistics of the weights, of blocks of rows in order."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.statistics import (
    Argmax,
    Largest,
    Pooled,
    Received,
    Statistic,
    TopWeights,
    Visible,
    WeightByDistance,
    WeightsOf,
    bin_edges,
)
from regard.core.tensors import array, tensor
from regard.engines.device.call import DeviceCall
from regard.engines.device.formula import Block
from regard.engines.device.rules import tensor_on

Array = np.ndarray[Any, np.dtype[Any]]


def ranked(S: Tensor) -> Tensor:
    """Return scores as they are ranked: NaN counts as ∞."""
    return torch.where(S.isnan(), torch.inf, S)


def top(P: Tensor, S: Tensor, first: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest weights (b, h, i, k) and their keys; ties go to the lowest, absent ones are 0 at −1."""
    best, order = torch.sort(ranked(S), dim=-1, descending=True, stable=True)
    order, hidden = order[..., :k], best[..., :k] == -torch.inf
    absent = (0, k - order.shape[-1])
    values = torch.nn.functional.pad(torch.where(hidden, 0, P.gather(-1, order)), absent)
    return values, torch.nn.functional.pad(torch.where(hidden, -1, order + first), absent, value=-1)


def largest(P: Tensor, S: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the largest weight (b, h, i), and its key or −1."""
    if not S.shape[-1]:
        return P.sum(-1), torch.full(P.shape[:-1], -1, device=P.device)
    best, index = ranked(S).max(-1)
    return P.amax(-1), torch.where(best == -torch.inf, -1, index + first)


OF_ROWS: dict[type[Statistic], Callable[..., tuple[Tensor, ...]]] = {
    Visible: lambda s, P, S, first: ((S != -torch.inf).sum(-1),),
    Largest: lambda s, P, S, first: largest(P, S, first)[:1],
    Argmax: lambda s, P, S, first: largest(P, S, first)[1:],
    TopWeights: lambda s, P, S, first: top(P, S, first, s.of),
}
"""The statistics of each row: (b, h, i, ...), from its weights and scores, and the first key of these."""


def add_received(s: Statistic, total: Tensor, P: Tensor, block: Block, n: tuple[int, int]) -> None:
    """Add the weights that keys receive. P: (..., h, i, j). n: queries and keys of the call."""
    total[..., block.keys.start : block.keys.stop] += P.sum(-2)


def add_diagonals(s: Statistic, total: Tensor, P: Tensor, block: Block, n: tuple[int, int]) -> None:
    """Add the sums along diagonals: read as rows one number shorter, each padded row is shifted by one more."""
    rows, keys = P.shape[-2:]
    if not rows * keys:
        return
    width = rows + keys - 1
    skewed = torch.nn.functional.pad(P.flip(-1), (0, rows)).flatten(-2)[..., : rows * width]
    first = block.rows.start + n[1] - block.keys.stop
    total[..., first : first + width] += skewed.unflatten(-1, (rows, width)).sum(-2)


def add_bins(s: Pooled, total: Tensor, P: Tensor, block: Block, n: tuple[int, int]) -> None:
    """Add the weights to the bins of a map, or take the maximum."""
    columns, P = binned(P, -1, bin_edges(s.of[1], n[1]), block.keys, s.largest)
    rows, P = binned(P, -2, bin_edges(s.of[0], n[0]), block.rows, s.largest)
    part = total[..., rows, columns]
    part.copy_(torch.maximum(part, P) if s.largest else part + P)


def binned(P: Tensor, axis: int, edges: Array, part: range, most: bool) -> tuple[slice, Tensor]:
    """Return the bins that overlap positions `part`, and P with sums or maxima over them along an axis."""
    if not part:
        return slice(0, 0), P
    first, last = np.searchsorted(edges, [part.start, part.stop - 1], side="right") - 1
    inner = np.clip(edges[first : last + 2], part.start, part.stop) - part.start
    width = int(np.diff(inner).max())
    index = torch.from_numpy(inner[:-1, None] + np.arange(width)).to(P.device)
    inside = index < torch.from_numpy(inner[1:, None]).to(P.device)
    index = index.clamp(max=len(part) - 1).flatten()
    bins = P.transpose(axis, -1).index_select(-1, index).unflatten(-1, tuple(inside.shape))
    bins = torch.where(inside, bins, 0)  # no weight is less
    return slice(first, last + 1), (bins.amax(-1) if most else bins.sum(-1)).transpose(axis, -1)


def add_rows(s: WeightsOf, total: Tensor, P: Tensor, block: Block, n: tuple[int, int]) -> None:
    for at, row in enumerate(s.of):
        if row in block.rows:
            total[..., at, block.keys.start : block.keys.stop] = P[..., block.rows.index(row), :]


ADD: dict[type[Statistic], Callable[..., None]] = {
    Received: add_received,
    WeightByDistance: add_diagonals,
    Pooled: add_bins,
    WeightsOf: add_rows,
}
"""The statistics that are sums, or maxima, over rows, and those of a few rows."""


class Sums:
    """Statistics of a call, filled block by block."""

    def __init__(self, call: DeviceCall, observe: Sequence[Statistic]):
        self.call, self.found = call, {}
        for s in observe:
            whole = s.empty(call.p.sizes, call.p.compute, call.zeros)
            self.found[s] = s.split(whole)

    def add(self, block: Block, P: Tensor, S: Tensor) -> None:
        """Add the weights (b, h, i, j) of a block, and its scores."""
        p = self.call.p
        for s, arrays in self.found.items():
            if type(s) in OF_ROWS:
                for to, x in zip(arrays, OF_ROWS[type(s)](s, P, S, block.keys.start), strict=True):
                    self.call.write(to, block, x)
            else:
                ADD[type(s)](s, tensor(arrays[0]), P.reshape(*p.lead, *P.shape[1:]), block, (p.n_q, p.n_k))

    def results(self) -> dict[Statistic, Any]:
        p, device = self.call.p, self.call.device
        for s, arrays in self.found.items():
            if isinstance(s, Pooled) and not s.largest:
                sizes = torch.from_numpy(np.diff(bin_edges(s.of[0], p.n_q))).to(device)
                tensor(arrays[0]).div_(sizes[:, None])
            elif isinstance(s, WeightByDistance):
                distances = p.extents.distances
                self.found[s] = arrays[0], distances if p.device is None else array(tensor_on(distances, device))
        return {s: s.result(arrays) for s, arrays in self.found.items()}
