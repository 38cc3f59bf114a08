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
SMALL = 2**15  # numbers that NumPy converts before a kernel would start
PART = 2**18  # numbers for a thread


def narrowed(x: Array, dtype: np.dtype[Any], target: Target) -> Array:
    """Convert a float32 array to another dtype, rounded to even.

    x: its rows are contiguous and equally far apart.
    """
    if x.size < SMALL or dtype.itemsize != 2:
        return np.asarray(x.astype(dtype, copy=False), order="C")  # `ascontiguousarray` adds an axis to a scalar
    element = type_of(dtype)
    kernel = cache.kernel(f"narrow {element}", "narrow", target, lambda: source(element, target))
    rounded = memory.empty(x.shape, dtype)
    rows, width, row = math.prod(x.shape[:-1]), x.shape[-1], x.strides[-2]
    step = max(1, PART // width)

    def part(first: int) -> None:
        values = {
            "source": address_of(x) + first * row,
            "into": address_of(rounded) + first * width * 2,
            "rows": min(step, rows - first),
            "width": width,
            "row": row,
        }
        fields = pack_fields(FIELDS, values)
        kernel(fields.buffer_info()[0])

    spread(part, range(0, rows, step), num_threads())
    return rounded


def source(element: Type, target: Target) -> str:
    """Return the kernel's IR."""

    def write(k: Any) -> None:
        W = target.lanes(F32.size)
        x, into, width = k.pointer("source", F32), k.pointer("into", element), k.integer("width")
        whole = width - width % W
        with k.loop(k.integer("rows")) as n:
            line, home = x.bytes(n * k.integer("row")), into + n * width
            with k.loop(whole, step=W) as a:
                home[a] = line.load(a, W).to(element)
            with k.loop(width, start=whole) as a:
                home[a] = line[a].to(element)

    return written("narrow", FIELDS, target, write)
