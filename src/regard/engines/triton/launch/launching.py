"""Pointers, strides and launches, on a device or on Triton's interpreter.

An array of the call is a NumPy array on memory that may be a device's; nothing here reads it.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.errors import OutOfResources

from regard.core.tensors import NUMPY
from regard.engines.triton.kernels.addresses import StridedArray

Array = np.ndarray[Any, np.dtype[Any]]
INTERPRETED = bool(triton.knobs.runtime.interpret)
TORCH = {dtype: tensor_dtype for tensor_dtype, dtype in NUMPY.items()} | {np.dtype(bool): torch.uint8}


@dataclass(frozen=True)
class DevicePointer:
    """A tensor as Triton takes it: an address and a dtype; `array` owns the memory."""

    address: int
    dtype: torch.dtype
    array: Array

    def data_ptr(self) -> int:
        return self.address


def pointer(x: Array) -> Any:
    address, dtype = x.__array_interface__["data"][0], TORCH[x.dtype]
    if not INTERPRETED:
        # The launcher refuses an address outside of the device, even of an array without entries.
        return DevicePointer(address if x.size else 0, dtype, x)
    if not x.size:
        return torch.empty(1, dtype=dtype)
    # The interpreter takes tensors alone; this one has the address and a single element.
    memory = (ctypes.c_char * x.itemsize).from_address(address)
    tensor = torch.frombuffer(memory, dtype=dtype)
    tensor.array = x
    return tensor


def strided(x: Array, lead: int, tail: int) -> StridedArray:
    """Return address and strides of x (*lead, h, ...), `tail` axes after the heads."""
    steps = [0 if size == 1 else step // x.itemsize for size, step in zip(x.shape, x.strides, strict=True)]
    rest = [*steps[lead + 1 : lead + 1 + tail], 0, 0]
    return StridedArray(pointer(x), tuple(steps[:lead]), steps[lead], rest[0], rest[1])


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments, ready to run.

    options: warps and stages. then: launches that follow. instead: the launch for devices with too little shared
    memory.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    forms: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    then: "tuple[Launch, ...]" = ()
    instead: Callable[[], "Launch"] | None = None

    def run(self) -> None:
        if not all(self.grid):
            return
        try:
            if INTERPRETED:
                with np.errstate(all="ignore"):
                    self.kernel[self.grid](*self.arguments, **self.forms)
            else:
                self.kernel[self.grid](*self.arguments, **self.forms, **self.options)
        except OutOfResources:
            if self.instead is None:
                raise
            self.instead().run()
            return
        for one in self.then:
            one.run()

    def compile(self, capability: int) -> Any:
        """Compile the kernel for a compute capability (80, 90, 100), without a device.

        As in a launch, it is specialized for numbers that are 1 or multiples of 16.
        """
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.runtime.jit import create_function_from_signature

        kernel, target = self.kernel, GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, found, given = bind(*self.arguments, **self.forms, **self.options)
        options, signature, constants, attributes = kernel._pack_args(backend, given, bound, found, None)
        source = ASTSource(kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=options.__dict__)
