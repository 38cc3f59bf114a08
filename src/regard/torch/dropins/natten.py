"""NATTEN's functions and modules: neighborhood attention on grids of one to three dimensions."""

from __future__ import annotations  # so that `help` shows the names of types

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from regard.arguments.values import type_name
from regard.ops.attention import attention
from regard.torch.dropins.natten_grid import grid_of, mask_of
from regard.torch.dropins.packages import Attribute, Package
from regard.torch.tensors.process_group import refuse

VERSION = "0.21.7"
BACKENDS = ("cutlass-fna", "hopper-fna", "blackwell-fna", "flex-fna")
SCHEDULES = (None, "non", "coop", "pp")
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
    refuse("NATTEN's attention", "give regard.attention a mask of all positions, such as regard.neighborhood")
    _check_tensors(query, key, value)
    _check_additional(key, value, additional_keys, additional_values)
    if backend is not None and backend not in BACKENDS:
        raise NotImplementedError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if kernel_schedule not in SCHEDULES and type_name(kernel_schedule) != "KernelSchedule":
        raise ValueError(f"kernel_schedule must be None, 'non', 'coop' or 'pp', got {kernel_schedule!r}")
    grid = grid_of(tuple(query.shape[1:-2]), kernel_size, stride, dilation, is_causal)
    q, k, v = (grid.flat(x) for x in (query, key, value))
    rule = mask_of(grid, additional_keys is not None)
    if additional_keys is not None:
        k, v = torch.cat([k, additional_keys], 1), torch.cat([v, additional_values], 1)
    options = {"mask": rule, "offset": 0, "scale": scale or None, "layout": "bnhd"}
    if not return_lse:
        return grid.unflat(attention(q, k, v, **options))
    out, seen = attention(q, k, v, observe=["lse"], **options)
    return grid.unflat(out), grid.unflat(seen.lse.transpose(1, 2)[..., None])[..., 0]


na1d = na2d = na3d = neighborhood_attention_generic


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


class NeighborhoodAttention(torch.nn.Module):
    """Neighborhood attention over (b, *shape, embed_dim), with NATTEN's parameters and arguments.

    Args:
        embed_dim: features, a multiple of num_heads.
        num_heads: attention heads.
        kernel_size, stride, dilation, is_causal: as of `na1d`, `na2d` and `na3d`.
        qkv_bias: give the projection to query, key and value a bias.
        qk_scale: factor of the products, by default and for 0: 1/√d.
        proj_drop: dropout of the output.

    Raises ValueError where NATTEN does.

    >>> import torch
    >>> from regard.torch.natten import NeighborhoodAttention2D
    >>> NeighborhoodAttention2D(64, num_heads=4, kernel_size=7)(torch.randn(1, 14, 14, 64)).shape
    torch.Size([1, 14, 14, 64])
    """

    na_dim: ClassVar[int]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: PerAxis,
        stride: PerAxis = 1,
        dilation: PerAxis = 1,
        is_causal: bool | Sequence[bool] = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kernel_size, self.stride, self.dilation, self.is_causal = kernel_size, stride, dilation, is_causal
        self.scale = qk_scale or self.head_dim**-0.5
        self.qkv = torch.nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = torch.nn.Linear(embed_dim, embed_dim)
        self.proj_drop = torch.nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend from and to x (b, *shape, embed_dim); returns its shape."""
        if x.ndim != self.na_dim + 2 or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"x of NeighborhoodAttention{self.na_dim}D must be (b, *shape, {self.embed_dim}) "
                f"with {self.na_dim} sizes, got shape {tuple(x.shape)}"
            )
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        windows = self.kernel_size, self.stride, self.dilation, self.is_causal
        out = neighborhood_attention_generic(query, key, value, *windows, self.scale)
        projected: torch.Tensor = self.proj_drop(self.proj(out.flatten(-2)))
        return projected

    def extra_repr(self) -> str:
        names = ("head_dim", "num_heads", "kernel_size", "stride", "dilation", "is_causal")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class NeighborhoodAttention1D(NeighborhoodAttention):
    __doc__ = NeighborhoodAttention.__doc__
    na_dim = 1


class NeighborhoodAttention2D(NeighborhoodAttention):
    __doc__ = NeighborhoodAttention.__doc__
    na_dim = 2


class NeighborhoodAttention3D(NeighborhoodAttention):
    __doc__ = NeighborhoodAttention.__doc__
    na_dim = 3


FUNCTIONS = {
    "na1d": na1d,
    "na2d": na2d,
    "na3d": na3d,
    "neighborhood_attention_generic": neighborhood_attention_generic,
}
MODULES = {x.__name__: x for x in (NeighborhoodAttention1D, NeighborhoodAttention2D, NeighborhoodAttention3D)}


def _replaced() -> Iterable[Attribute]:
    """Replace the function that all of NATTEN's call, where they look it up."""
    name = "neighborhood_attention_generic"
    modules = [importlib.import_module(f"natten.{module}") for module in ("functional", "modules")]
    return [(module, name, neighborhood_attention_generic) for module in modules]


PACKAGE = Package(
    name="natten",
    distribution="natten",
    version=VERSION,
    modules={"natten": FUNCTIONS | MODULES, "natten.functional": FUNCTIONS, "natten.modules": MODULES},
    replaced=_replaced,
)
