"""Grids of neighborhood attention on tensors: their windows, and the order of their rows.

The mask is that of `regard.neighborhood`. An order in which a window's keys lie together lets engines skip the others:

| Order | Grids | Rows of attention |
|---|---|---|
| "rows" | others | row-major |
| "blocks" | two large sizes, no dilation | blocks of 4 × 4 places; the cpu engine tests and skips 16 keys together |
| "groups" | large dilated windows | one group of dilation after the other |

Sizes are padded to whole blocks or groups of one length. No window has padding.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from regard.rules import Mask
from regard.rules.expression import MASK_LEAVES
from regard.rules.grids import Axis, PlaceInGroup, grid_axes, grid_text, neighborhood_rule, row_major, row_major_places
from regard.rules.tracing import trace
from regard.torch.compiled.traced import GraphRule, fixed, name_of_rule
from regard.torch.tensors.modes import constant

BITS = 2  # of a place within a block
BLOCK = 1 << BITS
# Below these, copies into another order and back cost what it saves.
LEAST = 48  # of both sizes of a grid that is walked in blocks
SPREAD = 192  # places in the box around a dilated window, kernel · dilation on each axis, of a grid walked in groups


class Grid(NamedTuple):
    """The axes of a grid, and the order of its rows.

    With x = outer · inner + rest on each axis, rows are ordered by all outers, then by all rests; groups the other way.
    """

    axes: tuple[Axis, ...]
    order: Literal["rows", "blocks", "groups"]

    @property
    def inner(self) -> list[int]:
        """The number of rests of each axis."""
        return [axis.dilation if self.order == "groups" else BLOCK for axis in self.axes]

    @property
    def outer(self) -> list[int]:
        return [-(-axis.size // inner) for axis, inner in zip(self.axes, self.inner, strict=True)]

    @property
    def rows(self) -> int:
        """The number of rows, padding included."""
        whole = self.order == "rows"
        return math.prod([axis.size for axis in self.axes] if whole else [*self.inner, *self.outer])

    @property
    def parts(self) -> tuple[list[int], list[int]]:
        """The sizes (outer, inner, ...) of the axes, and the order in which rows have them."""
        sizes = [n for pair in zip(self.outer, self.inner, strict=True) for n in pair]
        first = 1 if self.order == "groups" else 0
        return sizes, [*range(first, len(sizes), 2), *range(1 - first, len(sizes), 2)]

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """Return (b, *shape, h, d) as rows (b, n, h, d)."""
        if self.order == "rows":
            return x.flatten(1, -3)
        missing = [-axis.size % inner for axis, inner in zip(self.axes, self.inner, strict=True)]
        if any(missing):
            x = torch.nn.functional.pad(x, [0, 0, 0, 0, *(end for n in reversed(missing) for end in (0, n))])
        sizes, order = self.parts
        x = x.reshape(x.shape[0], *sizes, *x.shape[-2:])
        return x.permute(0, *(1 + n for n in order), -2, -1).flatten(1, -3)

    def unflat(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows (b, n, h, d) as (b, *shape, h, d)."""
        if self.order == "rows":
            return x.unflatten(1, [axis.size for axis in self.axes])
        sizes, order = self.parts
        x = x.unflatten(1, [sizes[n] for n in order])
        x = x.permute(0, *(1 + order.index(n) for n in range(len(order))), -2, -1)
        whole = [outer * inner for outer, inner in zip(self.outer, self.inner, strict=True)]
        x = x.reshape(x.shape[0], *whole, *x.shape[-2:])
        for n, axis in enumerate(self.axes):
            x = x.narrow(1 + n, 0, axis.size)
        return x.contiguous()

    def places(self, index: Any) -> Sequence[PlaceInGroup]:
        """Return the place on each axis of a row; one after the last is in no window."""
        if self.order == "rows":
            return row_major_places(index, self.axes)
        rank = len(self.axes)
        if self.order == "groups":
            digits = row_major(index, [*self.inner, *self.outer])
            return [PlaceInGroup(*pair) for pair in zip(digits[:rank], digits[rank:], strict=True)]
        blocks = row_major(index >> rank * BITS, self.outer)
        rests = [index >> n * BITS & BLOCK - 1 for n in reversed(range(rank))]
        return [PlaceInGroup(0, block * BLOCK + rest) for block, rest in zip(blocks, rests, strict=True)]


def grid_of(shape: Any, kernel_size: Any, stride: Any, dilation: Any, is_causal: Any) -> Grid:
    """Check the windows as NATTEN does, with ValueError alone."""
    names = ("shape", "kernel_size", "stride", "dilation", "is_causal")
    stride, dilation = 1 if stride is None else stride, 1 if dilation is None else dilation
    values = shape, kernel_size, stride, dilation, False if is_causal is None else is_causal
    if torch.compiler.is_compiling():
        values = fixed(values)
    try:
        axes = tuple(grid_axes(*values, names))
    except TypeError as error:
        raise ValueError(str(error)) from None
    for axis in axes:
        if axis.kernel < 2:
            raise ValueError(f"kernel_size must be at least 2, got {axis.kernel}")
    return Grid(axes, _order(axes))


def _order(axes: tuple[Axis, ...]) -> Literal["rows", "blocks", "groups"]:
    if any(axis.dilation > 1 for axis in axes):
        return "groups" if math.prod([axis.kernel * axis.dilation for axis in axes]) >= SPREAD else "rows"
    return "blocks" if len(axes) == 2 and min([axis.size for axis in axes]) >= LEAST else "rows"


def mask_of(grid: Grid, additional: bool) -> Any:
    """Return the mask of a call; in a graph its text."""
    if torch.compiler.is_compiling():
        return GraphRule(_name_of_grid(tuple([tuple(axis) for axis in grid.axes]), grid.order, additional), ())
    return _cached_mask(grid, additional)


@constant
def _name_of_grid(axes: tuple[tuple[Any, ...], ...], order: Any, additional: bool) -> str:
    return name_of_rule(_cached_mask(Grid(tuple(Axis(*axis) for axis in axes), order), additional))


@functools.lru_cache(maxsize=256)
def _cached_mask(grid: Grid, additional: bool) -> Mask:
    """Return the mask of a grid; cached, so that equal calls find the cached plans of engines.

    additional: keys after the rows of the grid are visible to all.
    """
    rule = neighborhood_rule(grid.axes, grid.places)
    whole = (lambda b, h, i, j: rule(b, h, i, j) | (j >= grid.rows)) if additional else rule
    return Mask(trace(whole, MASK_LEAVES), grid_text(grid.axes))
