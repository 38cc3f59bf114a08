"""NATTEN's functions: neighborhood attention on grids of one to three dimensions.

The mask is `regard.neighborhood`. Large grids of two dimensions are walked in blocks of 4 × 4 positions, whose 16 keys
are what the cpu engine tests and skips together. In row-major order it visits 1.4 to 2.7 × the keys.
"""

from __future__ import annotations  # so that `help` shows the names of types

import functools
import importlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from regard.arguments.values import type_name
from regard.ops.attention import attention
from regard.rules import Mask
from regard.rules.expression import MASK_LEAVES
from regard.rules.grids import Axis, grid_axes, grid_text, neighborhood_rule, row_major
from regard.rules.tracing import trace
from regard.torch.dropins.packages import Attribute, Package
from regard.torch.graph.modes import constant
from regard.torch.graph.traced import GraphRule, fixed, name_of_rule

VERSION = "0.21.7"
BACKENDS = ("cutlass-fna", "hopper-fna", "blackwell-fna", "flex-fna")
SCHEDULES = (None, "non", "coop", "pp")
BITS = 2  # of a place within a block
BLOCK = 1 << BITS
LEAST = 48  # of both sizes of a grid that is walked in blocks: below, it costs what copies do

PerAxis = int | Sequence[int]


def neighborhood_attention_generic(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: bool | Sequence[bool] | None = False,
    scale: float | None = None,
    additional_keys: torch.Tensor | None = None,
    additional_values: torch.Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Sequence[int] | None = None,
    kv_tile_shape: Sequence[int] | None = None,
    backward_q_tile_shape: Sequence[int] | None = None,
    backward_kv_tile_shape: Sequence[int] | None = None,
    backward_kv_splits: Sequence[int] | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute NATTEN's `na1d`, `na2d` and `na3d`, which are this function, exactly and in O(n) memory.

    The rank of query is that of the grid and 3. Arguments, meaning and the types of errors are those
    of NATTEN 0.21. `regard.neighborhood` says what a query sees.

    Args:
        query: (b, *shape, h, d), a grid of one to three sizes.
        key: (b, *shape, h_kv, d), h a multiple of h_kv.
        value: (b, *shape, h_kv, d_v).
        kernel_size: keys of a window, at least 2; kernel_size · dilation ≤ size. This and the next
            three are one value, or one for each axis.
        stride: queries that share a window, at most kernel_size.
        dilation: distance of the keys of a window.
        is_causal: axes on which a query sees no place after its own.
        scale: factor of the products, by default and for 0: 1/√d.
        additional_keys: (b, m, h_kv, d), which every query sees, with additional_values.
        additional_values: (b, m, h_kv, d_v).
        return_lse: return lse (b, *shape, h) too, float32, or float64 for float64.

    The others choose and tune NATTEN's kernels: they are accepted, and change nothing here.

    Returns out (b, *shape, h, d_v). Raises ValueError or NotImplementedError where NATTEN does.

    >>> import torch
    >>> from regard.torch.natten import na2d
    >>> q, k, v = torch.randn(3, 1, 14, 14, 4, 32)
    >>> na2d(q, k, v, kernel_size=7).shape
    torch.Size([1, 14, 14, 4, 32])
    """
    _check_tensors(query, key, value)
    _check_additional(key, value, additional_keys, additional_values)
    if backend is not None and backend not in BACKENDS:
        raise NotImplementedError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if kernel_schedule not in SCHEDULES and type_name(kernel_schedule) != "KernelSchedule":
        raise ValueError(f"kernel_schedule must be None, 'non', 'coop' or 'pp', got {kernel_schedule!r}")
    grid = _grid(tuple(query.shape[1:-2]), kernel_size, stride, dilation, is_causal)
    q, k, v = (grid.flat(x) for x in (query, key, value))
    rule = _rule(grid, additional_keys is not None)
    if additional_keys is not None:
        k, v = torch.cat([k, additional_keys], 1), torch.cat([v, additional_values], 1)
    options = {"mask": rule, "offset": 0, "scale": scale or None, "layout": "bnhd"}
    if not return_lse:
        return grid.unflat(attention(q, k, v, **options))
    out, seen = attention(q, k, v, observe=["lse"], **options)
    return grid.unflat(out), grid.unflat(seen.lse.transpose(1, 2)[..., None])[..., 0]


na1d = na2d = na3d = neighborhood_attention_generic


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


def _grid(shape: Any, kernel_size: Any, stride: Any, dilation: Any, is_causal: Any) -> Grid:
    """Check the windows as NATTEN does, with ValueError alone."""
    names = ("shape", "kernel_size", "stride", "dilation", "is_causal")
    given = (stride, 1), (dilation, 1), (is_causal, False)
    values = shape, kernel_size, *(default if x is None else x for x, default in given)
    if torch.compiler.is_compiling():
        values = fixed(values)
    try:
        axes = tuple(grid_axes(*values, names=names))
    except TypeError as error:
        raise ValueError(str(error)) from None
    for axis in axes:
        if axis.kernel < 2:
            raise ValueError(f"kernel_size must be at least 2, got {axis.kernel}")
    return Grid(axes, len(axes) == 2 and all(axis.size >= LEAST and axis.dilation == 1 for axis in axes))


def _rule(grid: Grid, additional: bool) -> Any:
    """Return the mask of a call; in a graph its text."""
    if torch.compiler.is_compiling():
        return GraphRule(_name_of_grid(tuple([tuple(axis) for axis in grid.axes]), grid.blocked, additional), ())
    return _mask_of(grid, additional)


@constant
def _name_of_grid(axes: tuple[tuple[Any, ...], ...], blocked: bool, additional: bool) -> str:
    return name_of_rule(_mask_of(Grid(tuple(Axis(*axis) for axis in axes), blocked), additional))


@functools.lru_cache(maxsize=256)
def _mask_of(grid: Grid, additional: bool) -> Mask:
    """Return the mask of a grid; cached, so that equal calls find the cached plans of engines.

    additional: keys after the rows of the grid are visible to all.
    """
    rule = neighborhood_rule(grid.axes, grid.places)
    n = math.prod(grid.blocks) * BLOCK**2 if grid.blocked else math.prod(grid.sizes)
    whole = (lambda b, h, i, j: rule(b, h, i, j) | (j >= n)) if additional else rule
    return Mask(trace(whole, MASK_LEAVES), grid_text(grid.axes))


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    """Refuse tensors that do not fit together, as NATTEN does."""
    _check_kind(query=query, key=key, value=value)
    shapes = tuple([tuple(x.shape) for x in (query, key, value)])
    got = f"got query, key and value of shapes {shapes[0]}, {shapes[1]} and {shapes[2]}"
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (4, 5, 6):
        raise ValueError(f"query, key and value must be (b, *shape, heads, d) with 1 to 3 sizes, {got}")
    q, k, v = shapes
    if not q[:-2] == k[:-2] == v[:-2]:
        raise ValueError(f"query, key and value must have the same batch and grid, {got}")
    if q[-1] != k[-1]:
        raise ValueError(f"query and key must have the same head size, {got}")
    if k[-2] != v[-2] or not k[-2] or q[-2] % k[-2] or q[-2] < k[-2]:
        raise ValueError(f"key and value must have the same heads, a divisor of those of query, {got}")


def _check_additional(key: Any, value: Any, keys: Any, values: Any) -> None:
    """Refuse additional keys and values that do not fit, as NATTEN does."""
    if (keys is None) != (values is None):
        raise ValueError("additional_keys and additional_values must be both given, or none")
    if keys is None:
        return
    _check_kind(key=key, additional_keys=keys, additional_values=values)
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            "additional_keys and additional_values must be (b, m, heads, d) of the same b, m and heads, "
            f"got shapes {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    for name, x, like in (("keys", keys, key), ("values", values, value)):
        if (x.shape[0], *x.shape[2:]) != (like.shape[0], *like.shape[-2:]):
            raise ValueError(
                f"additional_{name} must have the batch, heads and head size of {name[:-1]}, "
                f"got shapes {tuple(x.shape)} and {tuple(like.shape)}"
            )


def _check_kind(**tensors: Any) -> None:
    """Refuse what is no dense tensor, and tensors of different devices or dtypes."""
    (first, like), *_ = tensors.items()
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type_name(x)}")
        if x.is_nested or x.layout is not torch.strided:
            raise NotImplementedError(
                f"{name} must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}"
            )
        if (x.device, x.dtype) != (like.device, like.dtype):
            raise ValueError(
                f"{name} must have the device and dtype of {first}, "
                f"got {x.device} and {x.dtype}, {like.device} and {like.dtype}"
            )


FUNCTIONS = {
    "na1d": na1d,
    "na2d": na2d,
    "na3d": na3d,
    "neighborhood_attention_generic": neighborhood_attention_generic,
}


def _replaced() -> Iterable[Attribute]:
    """Replace the function that all of NATTEN's call, where they look it up."""
    name = "neighborhood_attention_generic"
    modules = [importlib.import_module(f"natten.{module}") for module in ("functional", "modules")]
    return [(module, name, neighborhood_attention_generic) for module in modules]


PACKAGE = Package(
    name="natten",
    distribution="natten",
    version=VERSION,
    modules={"natten": FUNCTIONS, "natten.functional": FUNCTIONS},
    replaced=_replaced,
)
