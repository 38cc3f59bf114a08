"""A problem as tensors: its blocks of rows, what varies in it, and results that blocks fill."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.problem import Differential, Outputs, Problem
from regard.core.tensors import all_hold, empty_on, tensor
from regard.engines.device.formula import Block, Formula, Tensors
from regard.engines.device.rules import arrays_of, signed, tensor_on
from regard.rules import reads, visible_tiles

Array = np.ndarray[Any, np.dtype[Any]]
ON_HOST = 2**19
"""Scores of a block on the host: fewer, and gradients of keys are added more often; more leave the caches."""

ON_DEVICE = 2**23
"""Scores of a block on a device, where an operation on fewer numbers takes as long to launch as to run."""

TILE = 64
"""Rows and keys of the tiles by whose bounds a block's keys are narrowed."""

BAND = 2**10
"""Tiles of rows whose bounds are evaluated together."""


def block_size(p: Problem) -> int:
    """Return the scores of a block: at least one row of all heads."""
    return max(p.all_heads * p.n_k, ON_HOST if p.device is None else ON_DEVICE)


def working_memory(p: Problem) -> int:
    """Estimate the bytes of the arrays that a block has at once."""
    return 8 * p.compute.itemsize * min(p.pairs, block_size(p))


@contextmanager
def computing(device: torch.device, derivatives: bool = False) -> Iterator[None]:
    """Compute as PyTorch does by default, whatever modes the caller is in.

    An operation of PyTorch's dispatcher runs below autograd, where nothing is recorded. Leaving inference mode enters
    autograd again.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(derivatives))
        if torch.amp.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite, the one number that the host reads of a device; False if it cannot."""
    return all_hold(tensors[0], (x.isfinite().all() for x in tensors))


class DeviceCall:
    """The tensors of a problem.

    x: its inputs in the dtype of sums, by name or table. trained: the names of those with a derivative. given: arrays
    beside the operands that products read: cotangents and tangents.
    """

    def __init__(self, p: Problem, entropy: bool, given: Sequence[Array | None] = ()):
        self.p = p = replace(p, factors=None, observe=())
        self.device = torch.device("cpu") if p.device is None else p.device
        self.real = torch.float64 if p.compute == np.float64 else torch.float32
        nodes = [node for node in (p.mask_node, p.score_node) if node is not None]
        varying = set(map(id, p.rules.tables))
        fixed = {id(a): a for node in nodes for a in arrays_of(node) if id(a) not in varying}
        named = {n: getattr(p, n) for n in ("query", "key", "value", "bias", "sink")}
        self.x: dict[Any, Tensor] = {n: self.of_sums(a) for n, a in named.items() if a is not None}
        self.x |= {table: self.of_sums(table.array) for table in p.rules.tables}
        self.trained = tuple(n for n in self.x if n not in p.constants)
        operands = [tensor_on(a, self.device) for a in given if a is not None]
        b, h, first_key = p.origin
        same = p.batch > 0 and bool((p.offset == p.offset[0]).all())
        offset = tensor_on(p.offset[:1] if same else p.offset, self.device)
        self.formula = Formula(
            p.lead, p.heads, p.kv_heads, p.n_k, float(p.scale), p.mask_node, p.score_node, p.rules.tables,
            {i: self.constant(a) for i, a in fixed.items()},
            p.dropout, torch.tensor(signed(int(p.seed)), device=self.device) if p.dropout else None,
            b=torch.arange(b, b + p.batch, device=self.device)[:, None, None, None],
            h=torch.arange(h, h + p.heads, device=self.device)[:, None, None],
            offset=offset[:, None, None, None], first_key=first_key, keys=p.keys, real=self.real,
            finite=all_finite([self.x[n] for n in ("query", "key", "value")] + operands), entropy=entropy,
        )  # fmt: skip

    def of_sums(self, x: Array) -> Tensor:
        return tensor_on(x, self.device).to(self.real)

    def constant(self, x: Any) -> Tensor:
        """Return the tensor of a table without a derivative, or of a dense array."""
        on_device = tensor_on(getattr(x, "array", x), self.device)
        return on_device.to(self.real) if on_device.is_floating_point() else on_device

    def blocks(self, rows: range | None = None) -> Iterator[Block]:
        """Yield blocks of rows in ascending order, by default of all.

        Tiles of rows are joined as long as rows × keys are no more scores than a block may have.
        """
        p = self.p
        rows = range(p.n_q) if rows is None else rows
        rows = rows if rows.step > 0 else rows[::-1]
        size = block_size(p) // max(1, p.all_heads)
        block: Block | None = None
        for first in range(0, len(rows), TILE * BAND):
            tiles = [rows[n : n + TILE] for n in range(first, min(first + TILE * BAND, len(rows)), TILE)]
            for tile, keys in zip(tiles, self.visible(tiles), strict=True):
                step = max(1, size // max(1, len(keys)))
                for part in (tile[n : n + step] for n in range(0, len(tile), step)):
                    if block is not None:
                        joined = union(block.keys, keys)
                        if (len(block.rows) + len(part)) * len(joined) <= size:
                            at = range(block.rows.start, part.stop, part.step)
                            block = Block(self.formula, at, joined)
                            continue
                        yield block
                    block = Block(self.formula, part, keys)
        if block is not None:
            yield block

    def visible(self, tiles: Sequence[range]) -> list[range]:
        """Return for some rows the keys from the first tile that some of them may see to the last.

        Only bounds that the host can read narrow them: a table or a mask on a device hides no tile.
        """
        p, count = self.p, len(tiles)
        if not p.rules.hiding or not p.all_heads * p.n_k:
            return [range(p.n_k)] * count
        alike = "b" not in reads(*p.rules.hiding) and len(self.formula.offset) == 1
        batch = np.arange(1 if alike else p.batch)
        first, last = np.array([x[0] for x in tiles]), np.array([x[-1] for x in tiles])
        each = (np.repeat(batch, count), (0, p.heads - 1), np.tile(first, len(batch)), np.tile(last, len(batch)))
        edges = p.extents.key_edges(TILE)
        row, tile, _ = visible_tiles(p.mask_node, p.rules.hiding_node, p.extents.ranges(*each), edges)
        edges = edges - p.origin[2]
        low, high = np.full(count, p.n_k), np.zeros(count, np.int64)
        np.minimum.at(low, row % count, edges[tile])
        np.maximum.at(high, row % count, edges[tile + 1])
        return [range(a, b) if a < b else range(0) for a, b in zip(low.tolist(), high.tolist(), strict=True)]

    def parts(self, block: Block) -> dict[Any, Tensor]:
        return {n: block.part(n, x) for n, x in self.x.items()}

    # Derivatives of a block

    def leaves(self, block: Block) -> Tensors:
        """Return the parts of what varies, to be differentiated in."""
        parts = self.parts(block)
        return tuple(parts[n].detach().requires_grad_() for n in self.trained)

    def outputs(self, block: Block, leaves: Tensors) -> Tensors:
        """Return out, lse and, if observed, entropy as functions of the leaves.

        Raises RuntimeError if PyTorch records nothing: gradients would be 0 without a word.
        """
        y = block.outputs(self.parts(block) | dict(zip(self.trained, leaves, strict=True)))
        if not (y.out.requires_grad and y.lse.requires_grad):
            raise RuntimeError("engine 'device': PyTorch's autograd recorded nothing here, so no derivative is known")
        return (y.out, y.lse) if y.entropy is None else (y.out, y.lse, y.entropy)

    def tangents(self, block: Block, t: Differential) -> list[Tensor | None]:
        """Return the parts of tangents in the order of `trained`; zeros for None where 0 · NaN counts."""
        along = [getattr(t, n) if isinstance(n, str) else t.tables.get(n) for n in self.trained]
        missing = {n: None if self.formula.finite else torch.zeros_like(self.x[n]) for n in self.trained}
        whole = [missing[n] if x is None else self.of_sums(x) for n, x in zip(self.trained, along, strict=True)]
        return [None if x is None else block.part(n, x) for n, x in zip(self.trained, whole, strict=True)]

    def cotangents(self, block: Block, ct: Outputs) -> list[Tensor | None]:
        """Return the parts of cotangents of `outputs`."""
        p, rows = self.p, block.slice(block.rows)
        shape = p.batch, p.heads, len(block.rows)
        parts = [None if ct.out is None else self.of_sums(ct.out)[..., rows, :].reshape(*shape, p.d_v)]
        rest = ct[1:3] if self.formula.entropy else ct[1:2]
        return parts + [None if x is None else self.of_sums(x)[..., rows].reshape(shape) for x in rest]

    # Results

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype) if self.p.device is None else empty_on(self.p.device, shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        array = self.empty(shape, dtype)
        tensor(array).zero_()
        return array

    def write(self, to: Array, block: Block, x: Tensor) -> None:
        """Write (b, h, i, *tail) of a block to its rows of (..., h, n_q, *tail)."""
        tail = (slice(None),) * (x.ndim - 3)
        tensor(to)[(..., block.slice(block.rows), *tail)] = x.detach().reshape(*self.p.lead, *x.shape[1:])


class GradientSums:
    """Sums of gradients over the blocks of a call, in the dtype of sums."""

    def __init__(self, call: DeviceCall):
        self.call = call
        self.sums = {n: torch.zeros_like(call.x[n], memory_format=torch.contiguous_format) for n in call.trained}

    def add(self, block: Block, parts: Sequence[Tensor]) -> None:
        for n, part in zip(self.sums, parts, strict=True):
            block.part(n, self.sums[n]).add_(part.detach())

    def result(self) -> Differential:
        """Return each sum in the dtype of its input."""
        p, gradients = self.call.p, {}
        for n, total in self.sums.items():
            like = n if not isinstance(n, str) else getattr(p, n)
            gradients[n] = self.call.empty(tuple(like.shape), like.dtype)
            tensor(gradients[n]).copy_(total)
        named = {n: x for n, x in gradients.items() if isinstance(n, str)}
        return Differential(**named, tables={n: x for n, x in gradients.items() if not isinstance(n, str)})


def union(a: range, b: range) -> range:
    """Return the range from the first to the last of two."""
    if not a or not b:
        return a or b
    return range(min(a.start, b.start), max(a.stop, b.stop))


def rows_of(p: Problem, x: Tensor) -> Tensor:
    """Return (..., h, n) as (b, h, n)."""
    return x.expand(*p.lead, *x.shape[-2:]).reshape(prod(p.lead), *x.shape[-2:])
