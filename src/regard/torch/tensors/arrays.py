"""Tensors as NumPy arrays and back, without copies."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from regard.arguments.values import array_type
from regard.core.checks import FLOATS
from regard.core.tensors import NUMPY, array
from regard.rules import type_name
from regard.torch.tensors.modes import (
    fake,
    functions_overridden,
    no_torch_dispatch,
    no_torch_function,
    sizes,
    tracing,
    without_transforms,
    wrapped,
)

Array = np.ndarray[Any, np.dtype[Any]]
PLAIN = (torch.Tensor, torch.nn.Parameter)


def checked(name: str, x: Any) -> torch.Tensor:
    """Return `x` if an engine can read it, as a plain tensor; else raise TypeError or ValueError.

    Engines read strided tensors of any device. Subclasses must change no operation.
    """
    if type(x) in PLAIN and x.layout is torch.strided and x.is_cpu and x.dtype in NUMPY:
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor where others of the call are, got "
            + array_type(x, "; torch.from_numpy and x.numpy() convert without a copy")
        )
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor: give jagged ones to regard.torch.jagged_attention")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    if changes_nothing(x):
        x = x.as_subclass(torch.Tensor)
    if type(x) not in PLAIN and not fake(x):
        raise TypeError(f"{name} must be a plain torch.Tensor, got the subclass {type_name(x)}")
    if x.dtype not in NUMPY:
        raise TypeError(f"{name} must have a floating dtype ({', '.join(FLOATS)}), got {x.dtype}")
    return x


def changes_nothing(x: torch.Tensor) -> bool:
    """Return True for a tensor of a subclass that changes no operation: its numbers are those of a plain one."""
    return type(x) not in PLAIN and type(x).__torch_dispatch__ is no_torch_dispatch


def overriding(given: Iterable[Any]) -> list[torch.Tensor]:
    """Return those of such tensors whose class is to make the results its own, by `__torch_function__`."""
    tensors = [x for x in given if isinstance(x, torch.Tensor) and changes_nothing(x)]
    return [x for x in tensors if type(x).__torch_function__ is not no_torch_function] if functions_overridden() else []


def concrete(x: torch.Tensor) -> bool:
    """Return True if the values of `x` can be read now.

    False for a wrapper of a transform, a fake tensor, and any tensor while a graph is traced.
    """
    return type(x) in PLAIN and not wrapped(x) and not fake(x) and not tracing()


def values(x: torch.Tensor, there: bool = False) -> Array:
    """Read the values of a `concrete` tensor outside of any active transform.

    there: a tensor of a device stays there; else it is copied to the host.
    """
    with without_transforms():
        return array(x if there else x.cpu())


def together(given: Mapping[Any, torch.Tensor]) -> None:
    """Raise ValueError unless all tensors are on the device of `query`.

    given: tensors by name; those that rules read by any other key.
    """
    device = given["query"].device
    for name, x in given.items():
        if x.device != device:
            what = name if type(name) is str else "a tensor of the rules"
            raise ValueError(f"{what} must be on the device of query, {device}, got {x.device}")


def hollow(x: torch.Tensor, shape: tuple[int, ...] | None = None) -> Any:
    """Return a one-element array broadcast to a shape, to check a tensor by.

    The array has the dtype of the tensor, and by default its shape.
    """
    return np.broadcast_to(np.empty((), NUMPY[x.dtype]), sizes(x) if shape is None else shape)


def autocasting(x: torch.Tensor) -> bool:
    """Return True if autocast is on for the device of `x`; False for meta tensors.

    PyTorch itself raises for meta tensors.
    """
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast an operand as PyTorch's autocast does for its own attention.

    64-bit and integer tensors stay.
    """
    if x.is_floating_point() and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
