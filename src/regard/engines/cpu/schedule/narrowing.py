"""Sums as results of 16 bits, by a kernel: NumPy takes a tenth of the time of backward to make bfloat16 of them."""

import math
from typing import Any

import numpy as np

from regard.engines.cpu.language.types import F32, Type, type_of
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.fields import address_of, packed
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.runtime import memory
from regard.runtime.threads import num_threads, spread

Array = np.ndarray[Any, np.dtype[Any]]

FIELDS = ("source", "into", "rows", "width", "row")
SMALL = 2**15  # numbers that NumPy has converted before a kernel is called
PART = 2**18  # numbers for a thread


def narrowed(x: Array, dtype: np.dtype[Any], target: Target) -> Array:
    """A float32 array of rows that are contiguous and equally far apart, as another dtype, rounded to even."""
    if x.size < SMALL or dtype.itemsize != 2:
        return np.asarray(x.astype(dtype, copy=False), order="C")  # `ascontiguousarray` adds an axis to a number
    element = type_of(dtype)
    kernel = cache.kernel(f"narrow {element}", "narrow", target, lambda: source(element, target))
    made = memory.empty(x.shape, dtype)
    rows, width, row = math.prod(x.shape[:-1]), x.shape[-1], x.strides[-2]
    step = max(1, PART // width)

    def part(first: int) -> None:
        words = {
            "source": address_of(x) + first * row,
            "into": address_of(made) + first * width * 2,
            "rows": min(step, rows - first),
            "width": width,
            "row": row,
        }
        fields = packed(FIELDS, words)
        kernel(fields.buffer_info()[0])

    spread(part, range(0, rows, step), num_threads())
    return made


def source(element: Type, target: Target) -> str:
    """The IR of the kernel."""

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
