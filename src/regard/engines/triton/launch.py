"""Addresses, arguments and launches: on a device, on Triton's interpreter, and for a target that is not there.

An array of the call is a NumPy array whose memory may be a device's; nothing here reads it.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.errors import OutOfResources

from regard.engines.triton.place import Array as Lying
from regard.torch.arrays import NUMPY

Array = np.ndarray[Any, np.dtype[Any]]
INTERPRETED = bool(triton.knobs.runtime.interpret)
TORCH = {dtype: kind for kind, dtype in NUMPY.items()} | {np.dtype(bool): torch.uint8}
NAMES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Pointer:
    """What Triton takes for a tensor: an address and a dtype. `array` keeps the memory."""

    address: int
    dtype: torch.dtype
    array: Array

    def data_ptr(self) -> int:
        return self.address


def pointer(x: Array) -> Any:
    address, dtype = x.__array_interface__["data"][0], TORCH[x.dtype]
    if not INTERPRETED:
        return Pointer(address, dtype, x)
    if not x.size:
        return torch.empty(1, dtype=dtype)
    # The interpreter takes tensors alone; this one has the address and knows of a single element.
    memory = (ctypes.c_char * x.itemsize).from_address(address)
    tensor = torch.frombuffer(memory, dtype=dtype)
    tensor.array = x
    return tensor


def lying(x: Array, lead: int, tail: int) -> Lying:
    """x (*lead, h, ...) with up to two axes after the heads, of which `tail` are there."""
    steps = [0 if size == 1 else step // x.itemsize for size, step in zip(x.shape, x.strides, strict=True)]
    rest = [*steps[lead + 1 : lead + 1 + tail], 0, 0]
    return Lying(pointer(x), tuple(steps[:lead]), steps[lead], rest[0], rest[1])


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments, ready to run. options: warps and stages. then: what follows it. instead: what runs
    where this takes more memory than a block may share.
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
        """The compiled kernel for a device of this capability (80, 90, 100), which need not be there."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        given = dict(zip(names, self.arguments, strict=False))
        signature = {name: _type(x) for name, x in given.items()} | dict.fromkeys(self.forms, "constexpr")
        constants: dict[tuple[int, ...], Any] = {(names.index(name),): x for name, x in self.forms.items()}
        for n, x in enumerate(self.arguments):
            constants |= _nothing(x, (n,))
        source = ASTSource(self.kernel, signature, constants)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))


def _type(x: Any) -> Any:
    """The type of an argument as Triton names it."""
    if isinstance(x, tuple):
        found = tuple(map(_type, x))
        return type(x)(*found) if hasattr(x, "_fields") else found
    if x is None:
        return "constexpr"
    if isinstance(x, bool | int):
        return "i32" if -(2**31) <= x < 2**31 else "i64"
    return "fp32" if isinstance(x, float) else f"*{NAMES[x.dtype]}"


def _nothing(x: Any, path: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    """Where in an argument there is None."""
    if isinstance(x, tuple):
        return {place: None for n, y in enumerate(x) for place in _nothing(y, (*path, n))}
    return {path: None} if x is None else {}
