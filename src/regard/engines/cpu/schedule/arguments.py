"""The arguments of kernels, from a call's arrays and the table of operands."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from regard.engines.cpu.spec.specs import KernelSpec

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array | None]
"""Arrays by the names of operands; None, or no entry, where a call lacks one."""


def strides_of(spec: KernelSpec, arrays: Arrays) -> dict[str, int]:
    """Return the fields for the strides of the arrays that a call has."""
    values: dict[str, int] = {}
    for x in spec.operands.values():
        array = arrays.get(x.name)
        if array is not None and x.by_block:
            values |= zip(x.strides, array.strides[-len(x.axes) :], strict=False)
    return values


def layout_of(arrays: Iterable[Array | None]) -> tuple[Any, ...]:
    """Return dtypes, shapes and strides of arrays, as part of a cache key."""
    return tuple([None if x is None else (x.dtype, x.shape, x.strides) for x in arrays])  # faster than a generator


def check(spec: KernelSpec, arrays: Arrays) -> None:
    """Raise ValueError for an array that does not fit its operand.

    A kernel would not read or write it as declared.
    """
    for name, x in spec.operands.items():
        array = arrays.get(name)
        if array is None:
            continue
        step, size = array.itemsize, spec.type_of(name).size
        if array.ndim < len(x.axes) or step != size:
            raise ValueError(
                f"{name} must have the axes {', '.join(x.axes)} and {size} bytes for a number, "
                f"got shape {array.shape} of {array.dtype}"
            )
        for axis in range(-1, -1 - x.contiguous, -1):
            if array.shape[axis] > 1 and array.strides[axis] != step:
                raise ValueError(f"{name} must be contiguous along {x.axes[axis]}, got strides {array.strides}")
            step *= array.shape[axis]
