"""Conversion of sums to 16-bit results.

NumPy's conversion to float16 takes up to a fifth of the time of backward.
"""

import math
from typing import Any

import numpy as np

from regard.engines.cpu.language.types import F32, Type, type_of
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.arguments import pack_fields
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.runtime import memory
from regard.runtime.memory import address_of
from regard.runtime.threads import num_threads, spread

Array = np.ndarray[Any, np.dtype[Any]]

FIELDS = ("source", "into", "rows", "width", "row")
INTO = FIELDS.index("into")
SMALL = 2**15  # numbers that NumPy converts before a kernel would start
PART = 2**18  # numbers for a thread


def narrowed(x: Array, dtype: np.dtype[Any], target: Target) -> Array:
    """Convert a float32 array to another dtype, rounded to even.

    x: its rows are contiguous and equally far apart.
    """
    if x.size < SMALL or dtype.itemsize != 2:
        return np.asarray(x.astype(dtype, copy=False), order="C")  # `ascontiguousarray` adds an axis to a scalar
    rounded = memory.empty(x.shape, dtype)
    rows = x.reshape(-1, x.shape[-1])
    step = max(1, PART // x.shape[-1])

    def part(first: int) -> None:
        Narrowing(rows[first : first + step], dtype, target)(address_of(rounded) + first * x.shape[-1] * 2)

    spread(part, range(0, len(rows), step), num_threads())
    return rounded


class Narrowing:
    """A conversion of a float32 or float64 array that stays where it is, as `narrowed` takes it."""

    def __init__(self, x: Array, dtype: np.dtype[Any], target: Target):
        element, real = type_of(dtype), type_of(x.dtype)
        name = f"narrow {element}" if real is F32 else f"narrow {real} {element}"
        self.kernel = cache.kernel(name, "narrow", target, lambda: source(real, element, target))
        sizes = {"rows": math.prod(x.shape[:-1]), "width": x.shape[-1], "row": x.strides[-2]}
        self.fields = pack_fields(FIELDS, {"source": address_of(x), **sizes})
        self.source, self.address = x, self.fields.buffer_info()[0]

    def __call__(self, into: int) -> None:
        """Convert the numbers to the array at an address, whose rows are adjacent."""
        self.fields[INTO] = into
        self.kernel(self.address)


def source(real: Type, element: Type, target: Target) -> str:
    """Return the kernel's IR."""

    def write(k: Any) -> None:
        W = target.lanes(real.size)
        x, into, width = k.pointer("source", real), k.pointer("into", element), k.integer("width")
        whole = width - width % W
        with k.loop(k.integer("rows")) as n:
            line, home = x.bytes(n * k.integer("row")), into + n * width
            with k.loop(whole, step=W) as a:
                home[a] = line.load(a, W).to(element)
            with k.loop(width, start=whole) as a:
                home[a] = line[a].to(element)

    return written("narrow", FIELDS, target, write)
