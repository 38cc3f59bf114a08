"""Neighborhood attention: windows around each position of a grid (Hassani et al. 2023).

Dilation splits the places x of an axis into groups, x mod dilation. A window is `kernel` places of one group, and
`stride` queries share one. With p = x // dilation among the n places of a query's group, p' that of a key in the same
group, and f = stride · (p // stride) the first query of the window,

    start = min(max(f + stride // 2 - kernel // 2, 0), n - kernel)
    visible = start ≤ p' < start + kernel                    windows shift at both ends
    visible = min(f + stride, n) - kernel ≤ p' ≤ p           causal

A pair is visible if it is along each axis.
"""

from __future__ import annotations  # so that `help` shows the names of types

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.arguments.frameworks import constructor
from regard.arguments.values import boolean
from regard.rules.expression import MASK_LEAVES
from regard.rules.masks import Mask, Requirement, whole
from regard.rules.tracing import trace

NAMES = tuple(f"{name} of neighborhood" for name in ("shape", "kernel_size", "stride", "dilation", "causal"))
Places = Callable[[Any], "Sequence[PlaceInGroup]"]  # the place on each axis of a grid that an index has


class PlaceInGroup(NamedTuple):
    """A place x on an axis: its group, x mod dilation, and its position there, x // dilation."""

    group: Any
    position: Any


class Axis(NamedTuple):
    """One axis of a grid and its windows."""

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False

    def place(self, x: Any) -> PlaceInGroup:
        return PlaceInGroup(0, x) if self.dilation == 1 else PlaceInGroup(x % self.dilation, x // self.dilation)

    def visible(self, query: PlaceInGroup, key: PlaceInGroup) -> Any:
        """Return the rule of a pair of places on this axis."""
        if self.dilation == 1:
            return self._in_window(query.position, key.position, self.size)
        length = (self.size - 1 - query.group) // self.dilation + 1
        return (query.group == key.group) & self._in_window(query.position, key.position, length)

    def _in_window(self, query: Any, key: Any, length: Any) -> Any:
        """Return the rule of positions in a group of `length`."""
        first = query if self.stride == 1 else query // self.stride * self.stride
        if self.causal:
            return (key <= query) & (key >= np.minimum(first + self.stride, length) - self.kernel)
        start = np.minimum(np.maximum(first + (self.stride // 2 - self.kernel // 2), 0), length - self.kernel)
        return (key >= start) & (key < start + self.kernel)


@constructor
def neighborhood(
    shape: int | Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
) -> Mask:
    """Let a query see a window of keys around it, on a grid of one to three dimensions.

    Index i is the row-major position in the grid. Windows shift at borders, so that each has
    `kernel_size` keys, as in NATTEN (Hassani et al. 2023); an even one has its extra key before the
    query.

    shape: the sizes of the grid. Other arguments are one value for all axes, or one for each.
    kernel_size: keys of a window. stride: queries that share a window. dilation: distance of a
    window's keys. causal: axes on which a query sees no place after its own.

    Raises ValueError where a window does not fit, kernel_size · dilation > size, or stride >
    kernel_size.

    >>> neighborhood(6, 3).show(6)
    █ █ █ · · ·
    █ █ █ · · ·
    · █ █ █ · ·
    · · █ █ █ ·
    · · · █ █ █
    · · · █ █ █
    >>> neighborhood((56, 56), 7, dilation=(8, 4))
    neighborhood((56, 56), 7, dilation=(8, 4))
    """
    axes = grid_axes(shape, kernel_size, stride, dilation, causal)
    n = whole("product of shape of neighborhood", math.prod(axis.size for axis in axes), least=1)
    node = trace(neighborhood_rule(axes, lambda index: row_major_places(index, axes)), MASK_LEAVES)
    requires = (Requirement("neighborhood", "shape", "i", n), Requirement("neighborhood", "shape", "j", n))
    return Mask(node, grid_text(axes), requires)


def neighborhood_rule(axes: Sequence[Axis], places: Places) -> Callable[..., Any]:
    """Return the function of a mask, for indices that lie in the grid as `places` says."""

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        first, *others = (axis.visible(y, x) for axis, y, x in zip(axes, places(i), places(j), strict=True))
        for other in others:
            first = first & other
        return first

    return rule


def row_major_places(index: Any, axes: Sequence[Axis]) -> list[PlaceInGroup]:
    digits = row_major(index, [axis.size for axis in axes])
    return [axis.place(x) for axis, x in zip(axes, digits, strict=True)]


def row_major(index: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the index on each axis of an array, of a row-major one.

    Nothing is divided by the first size: an index beyond the array is beyond it on the first axis.
    """
    digits = []
    for size in reversed(sizes[1:]):
        digits.append(index % size)
        index = index // size
    return [index, *reversed(digits)]


def grid_axes(
    shape: Any, kernel_size: Any, stride: Any, dilation: Any, causal: Any, names: Sequence[str] = NAMES
) -> list[Axis]:
    """Check the arguments of `neighborhood`, and return its axes.

    names: those of the arguments in errors.
    """
    shape = shape if _several(shape) else (shape,)
    if not 1 <= len(shape) <= 3:
        raise ValueError(f"{names[0]} must have 1 to 3 sizes, got {len(shape)}")
    arguments = zip(names, (shape, kernel_size, stride, dilation, causal), strict=True)
    *columns, flags = [_each(name, x, len(shape)) for name, x in arguments]
    integers = [[whole(name, x, least=1) for x in column] for name, column in zip(names, columns, strict=False)]
    axes = [Axis(*column) for column in zip(*integers, [boolean(names[-1], x) for x in flags], strict=True)]
    for number, axis in enumerate(axes):
        if axis.kernel * axis.dilation > axis.size:
            raise ValueError(
                f"{names[1]} times dilation must be at most shape, {axis.size} on axis {number}, "
                f"got {axis.kernel} · {axis.dilation}"
            )
        if axis.stride > axis.kernel:
            raise ValueError(
                f"{names[2]} must be at most kernel_size, {axis.kernel} on axis {number}, got {axis.stride}"
            )
    return axes


def _several(x: Any) -> bool:
    return isinstance(x, tuple | list)


def _each(name: str, x: Any, rank: int) -> Sequence[Any]:
    """Return one value for each of `rank` axes."""
    if not _several(x):
        return (x,) * rank
    if len(x) != rank:
        axes = "1 axis" if rank == 1 else f"{rank} axes"
        raise ValueError(f"{name} must be one value, or one for each of {axes}, got {len(x)}")
    values: Sequence[Any] = x
    return values


def grid_text(axes: Sequence[Axis]) -> str:
    sizes, kernels, strides, dilations, causals = zip(*axes, strict=True)
    options = (("stride", strides, 1), ("dilation", dilations, 1), ("causal", causals, False))
    settings = [f"{name}={_short(values)}" for name, values, default in options if set(values) != {default}]
    return f"neighborhood({', '.join([_short(sizes, len(sizes) == 1), _short(kernels), *settings])})"


def _short(values: tuple[Any, ...], single: bool | None = None) -> str:
    return repr(values[0]) if (len(set(values)) == 1 if single is None else single) else repr(values)
