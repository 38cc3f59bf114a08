"""Tensors as NumPy arrays and back, without copies.

The engine for GPUs and the adapter of PyTorch use it alike.
"""

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
        "complex64",
        "complex128",
    ]
}
DEVICES = ("cuda",)  # the host does not read their memory


class DeviceMemory:
    """The memory of a tensor on a device, for arrays that are never read.

    They have shapes, strides and addresses.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.lies_on, self.address = tensor, tensor.device, tensor.data_ptr()
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}" if tensor.dtype is torch.bfloat16 else NUMPY[tensor.dtype].str,
            "data": (self.address or 1, False),  # an empty array's address is never used
        }


def array(x: torch.Tensor) -> Array:
    """Return a NumPy view of a tensor; a lazy conjugate or negation is resolved first.

    The array of a tensor on a device has its address, and must not be read.
    """
    if x.device.type in DEVICES:
        found: Array = np.asarray(DeviceMemory(x.detach().resolve_conj().resolve_neg()))
        return found.view(BFLOAT16) if x.dtype is torch.bfloat16 else found
    if x.dtype is torch.bfloat16:
        x = x.detach().view(torch.uint16)
        return x.numpy(force=True).view(BFLOAT16)
    return x.numpy(force=True)


def tensor(x: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of an array."""
    if device_of(x) is not None:
        return on_device(x)
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(x))  # a gradient of a single number may be a NumPy scalar


def on_device(x: Array) -> torch.Tensor:
    """Return the tensor of an array on a device."""
    owner: Any = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    whole: torch.Tensor = owner.tensor
    size = x.itemsize
    begin = 0 if not x.size else (x.__array_interface__["data"][0] - owner.address) // size
    return whole.as_strided(x.shape, [step // size for step in x.strides], whole.storage_offset() + begin)


def converted(x: Array, dtype: Any) -> Array:
    """Return x in another dtype, on its device."""
    if device_of(x) is None:
        return x.astype(dtype, copy=False)
    return array(on_device(x).to(next(kind for kind, same in NUMPY.items() if same == dtype)))
