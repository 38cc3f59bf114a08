"""Tensors as NumPy arrays and back, without copies, and which tensors can be had so."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from regard.core.arguments import array_type
from regard.core.checks import FLOATS
from regard.core.problem import device_of
from regard.rules import type_name
from regard.torch.graph.modes import fake, sizes, tracing, without_transforms, wrapped

Array = np.ndarray[Any, np.dtype[Any]]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMPY = {torch.bfloat16: BFLOAT16} | {
    getattr(torch, name): np.dtype(name)
    for name in [
        "float16",
        "float32",
        "float64",
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "complex64",
        "complex128",
    ]
}
PLAIN = (torch.Tensor, torch.nn.Parameter)
DEVICES = ("cuda",)  # whose memory the host does not read


class Memory:
    """The memory of a tensor on a device; arrays that view it have shapes, strides and addresses, and are not read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.lies_on, self.address = tensor, tensor.device, tensor.data_ptr()
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}" if tensor.dtype is torch.bfloat16 else NUMPY[tensor.dtype].str,
            "data": (self.address or 1, False),  # that of nothing is never used
        }


def checked(name: str, x: Any) -> torch.Tensor:
    """`x` if an engine can read it: a strided tensor on the CPU, of no subclass that means more than its numbers."""
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
    if type(x) not in PLAIN and not fake(x):
        raise TypeError(f"{name} must be a plain torch.Tensor, got the subclass {type_name(x)}")
    if x.device.type not in ("cpu", *DEVICES) and not fake(x):
        raise ValueError(f"{name} is on the device {x.device}, and no engine serves {x.device.type!r} yet: give .cpu()")
    if x.dtype not in NUMPY:
        raise TypeError(f"{name} must have a floating dtype ({', '.join(FLOATS)}), got {x.dtype}")
    return x


def concrete(x: torch.Tensor) -> bool:
    """Whether the values of `x` can be read now: it is no stand-in of a transform, and no graph is being traced."""
    return type(x) in PLAIN and not wrapped(x) and not fake(x) and not tracing()


def array(x: torch.Tensor) -> Array:
    """A NumPy view of a tensor; bits that NumPy has no view for (a lazy conjugate) are resolved first.

    Of a tensor on a device, an array that lies there, which nothing may read.
    """
    if x.device.type in DEVICES:
        found = np.asarray(Memory(x.detach().resolve_conj().resolve_neg()))
        return found.view(BFLOAT16) if x.dtype is torch.bfloat16 else found
    if x.dtype is torch.bfloat16:
        x = x.detach().view(torch.uint16)
        return x.numpy(force=True).view(BFLOAT16)
    return x.numpy(force=True)


def values(x: torch.Tensor, there: bool = False) -> Array:
    """The values of a `concrete` tensor, which a transform that is active would wrap; there: where they lie."""
    with without_transforms():
        return array(x.cpu() if x.is_cuda and not there else x)


def together(given: Mapping[Any, torch.Tensor]) -> None:
    """ValueError unless all lie on one device; those that are named by no text are of rules."""
    device = given["query"].device
    for name, x in given.items():
        if x.device != device:
            what = name if type(name) is str else "a tensor of the rules"
            raise ValueError(f"{what} must be on the device of query, {device}, got {x.device}")


def tensor(x: Any) -> torch.Tensor:
    """A tensor that shares the memory of an array."""
    if device_of(x) is not None:
        return on_device(x)
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(x))  # a gradient of a single number may be a NumPy scalar


def on_device(x: Array) -> torch.Tensor:
    """The tensor of an array that lies on a device."""
    owner: Any = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    whole: torch.Tensor = owner.tensor
    size = x.itemsize
    begin = 0 if not x.size else (x.__array_interface__["data"][0] - owner.address) // size
    return whole.as_strided(x.shape, [step // size for step in x.strides], whole.storage_offset() + begin)


def converted(x: Array, dtype: Any) -> Array:
    """x in another dtype, where it lies."""
    if device_of(x) is None:
        return x.astype(dtype, copy=False)
    return array(on_device(x).to(next(kind for kind, same in NUMPY.items() if same == dtype)))


def hollow(x: torch.Tensor, shape: tuple[int, ...] | None = None) -> Any:
    """An array of the dtype of a tensor and, unless another is given, of its shape, to be checked in its place."""
    return np.broadcast_to(np.empty((), NUMPY[x.dtype]), sizes(x) if shape is None else shape)


def autocasting(x: torch.Tensor) -> bool:
    """Whether operands on the device of `x` are cast; PyTorch does not answer that for meta tensors."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def autocast(x: torch.Tensor) -> torch.Tensor:
    """What PyTorch's autocast makes of an operand of its own attention: 64 bits stay."""
    if x.is_floating_point() and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
