"""Tensors as NumPy arrays and back, without copies.

The engine `device` and the adapter of PyTorch use it alike.
"""

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from regard.core.problem import device_of

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
        "uint64",
        "complex64",
        "complex128",
    ]
}
UNREAD = 64  # the address of an empty array


class HostMemory(ctypes.Array[ctypes.c_char]):
    """The memory of a tensor, for an array of one call.

    The object keeps the tensor alive, but not its storage, which FSDP frees with `resize_(0)`. After `Tensor.numpy` a
    storage can never be resized. `np.from_dlpack` takes four times as long as this (1.1 µs), and no bfloat16.
    """

    _type_ = ctypes.c_char
    _length_ = sys.maxsize
    __slots__ = ("tensor",)
    tensor: torch.Tensor
    lies_on: Any = None


class DeviceMemory(HostMemory):
    """The memory of a tensor on a device, for arrays that are never read.

    Such arrays have shapes, strides and addresses.
    """

    __slots__ = ()

    @property
    def lies_on(self) -> torch.device:
        return self.tensor.device


def array(x: torch.Tensor) -> Array:
    """Return a NumPy view of a tensor; a lazy conjugate or negation is resolved first.

    The view is for one call: reading it after the tensor's storage was freed would crash. The array of a tensor on a
    device has its address, and must not be read.
    """
    address = x.data_ptr()
    if x.is_neg() or x.is_conj() or (not address and x.numel()):
        return array(stored(x))
    owner: Any = (HostMemory if x.is_cpu else DeviceMemory).from_address(address or UNREAD)  # a buffer, unlike its type
    owner.tensor = x
    shape, dtype = tuple(x.shape), NUMPY[x.dtype]  # NumPy reads a tuple in half the time of a torch.Size
    if x.is_contiguous():
        return np.ndarray(shape, dtype, owner)
    size = dtype.itemsize
    return np.ndarray(shape, dtype, owner, 0, [step * size for step in x.stride()])


def stored(x: torch.Tensor) -> torch.Tensor:
    """Store the numbers of a tensor that is lazily negated, conjugated or zero.

    Raises ValueError for a tensor without a storage.
    """
    if not x.untyped_storage().nbytes():
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} has no numbers: its storage was freed, as FSDP frees parameters "
            "outside of their module's forward and backward; give it inside, or call unshard() first"
        )
    return x.detach().resolve_conj().resolve_neg().clone()


def tensor(x: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of an array."""
    if device_of(x) is not None:
        return on_device(x)
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(x))  # a gradient of a single number may be a NumPy scalar


def empty_on(device: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an empty array on a device."""
    return array(torch.empty(shape, dtype=tensor(np.empty(0, dtype)).dtype, device=device))


def on_device(x: Array) -> torch.Tensor:
    """Return the tensor of an array on a device."""
    owner: Any = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    whole: torch.Tensor = owner.tensor.detach()
    size = x.itemsize
    begin = 0 if not x.size else (x.__array_interface__["data"][0] - whole.data_ptr()) // size
    return whole.as_strided(x.shape, [step // size for step in x.strides], whole.storage_offset() + begin)


def all_hold(x: torch.Tensor, conditions: Iterable[torch.Tensor]) -> bool:
    """Return True if all conditions hold, by one number that the host reads from the device of x.

    False while a CUDA graph is captured, where none can be read: the conditions are then not computed.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(torch.stack([*conditions]).all())


def converted(x: Array, dtype: Any) -> Array:
    """Return x in another dtype, on its device."""
    if device_of(x) is None:
        return x.astype(dtype, copy=False)
    return array(on_device(x).to(next(kind for kind, same in NUMPY.items() if same == dtype)))
