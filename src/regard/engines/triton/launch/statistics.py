"""Statistics that need the weights: chunks of rows, in O(n) memory and in order."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from regard.core.problem import Problem
from regard.core.statistics import (
    Pooled,
    Received,
    Statistic,
    Top,
    TopWeights,
    WeightByDistance,
    WeightsOf,
    bin_edges,
)
from regard.core.tensors import array, converted, tensor
from regard.engines.triton.kernels import weights
from regard.engines.triton.launch import tuning
from regard.engines.triton.launch.arguments import Work, empty, numbers
from regard.engines.triton.launch.launching import Launch, pointer
from regard.engines.triton.launch.tuning import TileConfig

Array = np.ndarray[Any, np.dtype[Any]]
AT_ONCE = 2**24  # weights in memory


def part(p: Problem, lse: Array | None, rows: Sequence[int], cols: range) -> Array:
    """Return weights (..., h, rows, cols) of a part; without lse, scores."""
    out = empty(p, p.shape(len(rows), len(cols)), p.compute)
    if not out.size:
        return out
    work = Work(p)
    chosen = numbers(rows, p.device)
    asked = weights.Part(work.rows(lse), pointer(chosen), cols.start, cols.step, len(rows), len(cols), work.matrix(out))

    def launch(config: TileConfig) -> Launch:
        form = work.form(config)
        grid = (-(-len(rows) // form.M) * p.batch * p.heads, -(-len(cols) // form.N))
        return work.launch(weights.part, grid, asked, config, F=form)

    tuning.chosen("part", work, launch).run()
    return out


def whole_rows(p: Problem, rows: Sequence[int]) -> Array:
    """Return all weights (..., h, rows, n_k) of some rows, without an lse."""
    return array(softmax(p, tensor(part(p, None, rows, range(p.n_k)))))


def softmax(p: Problem, S: torch.Tensor) -> torch.Tensor:
    """Overwrite scores (..., h, rows, n_k) with their softmax, 0 for masked ones."""
    if not S.numel():
        return S
    m = S.amax(-1, keepdim=True)
    sink = None if p.sink is None else tensor(converted(p.sink, p.compute)).expand(p.heads)[:, None, None]
    m = m if sink is None else torch.maximum(m, sink)
    m = torch.where(m == torch.inf, torch.nan, m.clamp(min=torch.finfo(m.dtype).min))
    hidden = S == -torch.inf  # next to a NaN too; to ask whether there is one, the host would wait
    P = S.sub_(m).exp_().masked_fill_(hidden, 0)
    total = P.sum(-1, keepdim=True) + (0 if sink is None else torch.exp(sink - m))
    return P.mul_(torch.where(total > 0, 1 / total, 1))


def chunks(p: Problem, lse: Array | None) -> Iterator[tuple[range, torch.Tensor]]:
    """Yield chunks of rows, as large as memory allows, with their weights or scores."""
    size = max(1, AT_ONCE // max(1, p.n_k * p.batch * p.heads))
    for first in range(0, p.n_q, size):
        rows = range(first, min(first + size, p.n_q))
        yield rows, tensor(part(p, lse, rows, range(p.n_k)))


def second_pass(p: Problem, lse: Array, observe: Sequence[Statistic]) -> dict[Statistic, Any]:
    seen: dict[Statistic, Any] = {s: whole_rows(p, s.of) for s in observe if isinstance(s, WeightsOf)}
    sums = {
        s: torch.zeros(s.shapes(p.sizes)[0], dtype=tensor(lse).dtype, device=tensor(lse).device)
        for s in observe
        if type(s) in ADD
    }
    for rows, P in chunks(p, lse) if sums else ():
        for s, total in sums.items():
            ADD[type(s)](p, s, rows, P, total)
    for s, total in sums.items():
        if isinstance(s, Pooled) and not s.largest:
            total /= torch.from_numpy(np.diff(bin_edges(s.of[0], p.n_q)))[:, None].to(total)
        seen[s] = s.result([array(total), p.extents.distances][: len(s.parts)])
    return seen | {s: top(p, s.of) for s in observe if isinstance(s, TopWeights)}


def add_received(p: Problem, s: Statistic, rows: range, P: torch.Tensor, total: torch.Tensor) -> None:
    total += P.sum(-2)


def add_diagonals(p: Problem, s: Statistic, rows: range, P: torch.Tensor, total: torch.Tensor) -> None:
    """Add sums along diagonals, which are columns of reversed and shifted rows."""
    if not p.n_k:
        return
    n, width = len(rows), p.n_k + len(rows) - 1
    moved = torch.nn.functional.pad(P.flip(-1), (0, n)).flatten(-2)[..., : n * width].unflatten(-1, (n, width))
    total[..., rows.start : rows.start + width] += moved.sum(-2)


def add_pooled(p: Problem, s: Pooled, rows: range, P: torch.Tensor, total: torch.Tensor) -> None:
    edges, columns = bin_edges(s.of[0], p.n_q).tolist(), bin_edges(s.of[1], p.n_k).tolist()
    if not p.n_k:
        return
    largest = s.largest
    for r, (first, last) in enumerate(pairwise(edges)):
        mine = P[..., max(first - rows.start, 0) : max(last - rows.start, 0), :]
        if mine.shape[-2] and first < rows.stop:
            mine = mine.amax(-2) if largest else mine.sum(-2)
            parts = (mine[..., a:b] for a, b in pairwise(columns))
            found = torch.stack([x.amax(-1) if largest else x.sum(-1) for x in parts], -1)
            total[..., r, :] = torch.maximum(total[..., r, :], found) if largest else total[..., r, :] + found


ADD: dict[type[Statistic], Callable[..., None]] = {
    Received: add_received,
    WeightByDistance: add_diagonals,
    Pooled: add_pooled,
}


def top(p: Problem, k: int) -> Top:
    """Return the k largest weights, ties to the lowest key; absent ones are 0 at −1."""
    values = tensor(empty(p, p.shape(p.n_q, k), p.compute)).fill_(0)
    indices = tensor(empty(p, p.shape(p.n_q, k), np.int64)).fill_(-1)
    for rows, S in chunks(p, None) if p.n_k else ():
        best, order = torch.sort(S, dim=-1, descending=True, stable=True)
        mine, width = slice(rows.start, rows.stop), min(k, p.n_k)
        indices[..., mine, :width] = torch.where(best == -torch.inf, -1, order)[..., :width]
        values[..., mine, :width] = softmax(p, best)[..., :width]
    return Top(array(values), array(indices))
