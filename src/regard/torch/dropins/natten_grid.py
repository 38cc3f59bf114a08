"""Grids of neighborhood attention on tensors: their windows, and the order of their rows.

The mask is that of `regard.neighborhood`. Large grids of two dimensions are walked in blocks of 4 × 4 places, whose 16
keys are what the cpu engine tests and skips together. In row-major order it visits 1.7 to 2.8 × the keys.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from regard.rules import Mask
from regard.rules.expression import MASK_LEAVES
from regard.rules.grids import Axis, grid_axes, grid_text, neighborhood_rule, row_major
from regard.rules.tracing import trace
from regard.torch.graph.modes import constant
from regard.torch.graph.traced import GraphRule, fixed, name_of_rule

BITS = 2  # of a place within a block
BLOCK = 1 << BITS
LEAST = 48  # of both sizes of a grid that is walked in blocks: in smaller ones the copies cost what it saves


class Grid(NamedTuple):
    """The axes of a grid, and the order in which its positions become rows of attention.

    blocked: blocks of `BLOCK` × `BLOCK`, after padding to whole ones, else row-major. No window has padding.
    """

    axes: tuple[Axis, ...]
    blocked: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple([axis.size for axis in self.axes])

    @property
    def blocks(self) -> tuple[int, int]:
        """The numbers of blocks along two axes."""
        height, width = self.sizes
        return -(-height // BLOCK), -(-width // BLOCK)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """Return (b, *shape, h, d) as rows (b, n, h, d)."""
        if not self.blocked:
            return x.flatten(1, -3)
        (height, width), (rows, columns) = self.sizes, self.blocks
        if (height, width) != (rows * BLOCK, columns * BLOCK):
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, columns * BLOCK - width, 0, rows * BLOCK - height))
        return x.unflatten(2, (columns, BLOCK)).unflatten(1, (rows, BLOCK)).transpose(2, 3).flatten(1, 4)

    def unflat(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows (b, n, h, d) as (b, *shape, h, d)."""
        if not self.blocked:
            return x.unflatten(1, self.sizes)
        (height, width), (rows, columns) = self.sizes, self.blocks
        x = x.unflatten(1, (rows, columns, BLOCK, BLOCK)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return x[:, :height, :width].contiguous()

    def places(self, index: Any) -> Sequence[Any]:
        """Return the place on each axis of a row; one after the last is beyond the first axis."""
        if not self.blocked:
            return row_major(index, self.sizes)
        block, columns, within = index >> 2 * BITS, self.blocks[1], BLOCK - 1
        y, x = index >> BITS & within, index & within
        return block // columns * BLOCK + y, block % columns * BLOCK + x


def grid_of(shape: Any, kernel_size: Any, stride: Any, dilation: Any, is_causal: Any) -> Grid:
    """Check the windows as NATTEN does, with ValueError alone."""
    names = ("shape", "kernel_size", "stride", "dilation", "is_causal")
    given = (stride, 1), (dilation, 1), (is_causal, False)
    values = shape, kernel_size, *(default if x is None else x for x, default in given)
    if torch.compiler.is_compiling():
        values = fixed(values)
    try:
        axes = tuple(grid_axes(*values, names))
    except TypeError as error:
        raise ValueError(str(error)) from None
    for axis in axes:
        if axis.kernel < 2:
            raise ValueError(f"kernel_size must be at least 2, got {axis.kernel}")
    return Grid(axes, len(axes) == 2 and all(axis.size >= LEAST and axis.dilation == 1 for axis in axes))


def mask_of(grid: Grid, additional: bool) -> Any:
    """Return the mask of a call; in a graph its text."""
    if torch.compiler.is_compiling():
        return GraphRule(_name_of_grid(tuple([tuple(axis) for axis in grid.axes]), grid.blocked, additional), ())
    return _cached_mask(grid, additional)


@constant
def _name_of_grid(axes: tuple[tuple[Any, ...], ...], blocked: bool, additional: bool) -> str:
    return name_of_rule(_cached_mask(Grid(tuple(Axis(*axis) for axis in axes), blocked), additional))


@functools.lru_cache(maxsize=256)
def _cached_mask(grid: Grid, additional: bool) -> Mask:
    """Return the mask of a grid; cached, so that equal calls find the cached plans of engines.

    additional: keys after the rows of the grid are visible to all.
    """
    rule = neighborhood_rule(grid.axes, grid.places)
    n = math.prod(grid.blocks) * BLOCK**2 if grid.blocked else math.prod(grid.sizes)
    whole = (lambda b, h, i, j: rule(b, h, i, j) | (j >= n)) if additional else rule
    return Mask(trace(whole, MASK_LEAVES), grid_text(grid.axes))
