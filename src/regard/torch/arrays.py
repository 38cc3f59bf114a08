"""Tensors as NumPy arrays and back, without copies, and which tensors can be had so."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from regard.checks import FLOATS
from regard.rules import type_name

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


def checked(name: str, x: Any) -> torch.Tensor:
    """`x` if an engine can read it: a strided tensor on the CPU, of no subclass that means more than its numbers."""
    if type(x) in PLAIN and x.layout is torch.strided and x.is_cpu and x.dtype in NUMPY:
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor where others of the call are, got {type_name(x)}; "
            "torch.from_numpy and x.numpy() convert without a copy"
        )
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor: give jagged ones to regard.torch.jagged_attention")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    if type(x) not in PLAIN and not fake(x):
        raise TypeError(f"{name} must be a plain torch.Tensor, got the subclass {type_name(x)}")
    if x.device.type != "cpu" and not fake(x):
        raise ValueError(f"{name} is on the device {x.device}, and no engine serves {x.device.type!r} yet: give .cpu()")
    if x.dtype not in NUMPY:
        raise TypeError(f"{name} must have a floating dtype ({', '.join(FLOATS)}), got {x.dtype}")
    return x


def fake(x: torch.Tensor) -> bool:
    """Whether `x` only stands for a tensor, while a graph is being traced."""
    return isinstance(x, torch._subclasses.FakeTensor) or torch._is_functional_tensor(x)


def concrete(x: torch.Tensor) -> bool:
    """Whether the values of `x` can be read now: it is no stand-in of a transform or of a trace."""
    return type(x) in PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x) and not fake(x)


def array(x: torch.Tensor) -> Array:
    """A NumPy view of a tensor; bits that NumPy has no view for (a lazy conjugate) are resolved first."""
    if x.dtype is torch.bfloat16:
        view: Array = x.detach().view(torch.uint16).numpy(force=True).view(BFLOAT16)
        return view
    found: Array = x.numpy(force=True)
    return found


def values(x: torch.Tensor) -> Array:
    """The values of a `concrete` tensor, which a transform that is active would wrap."""
    with torch._C._DisableFuncTorch():
        return array(x)


def tensor(x: Any) -> torch.Tensor:
    """A tensor that shares the memory of an array."""
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(x))  # a gradient of a single number may be a NumPy scalar


def autocast(x: torch.Tensor) -> torch.Tensor:
    """What PyTorch's autocast makes of an operand of its own attention: 64 bits stay."""
    if x.is_floating_point() and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype("cpu"))
    return x
