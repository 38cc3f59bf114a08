"""A kernel's fields: numbers and addresses of arrays, packed into one array."""

import ctypes
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def address_of(x: Array) -> int:
    """Return the address of an array."""
    # The first word after the object's header, in NumPy's C interface; `x.ctypes` takes as long as a head of attention.
    return _word(id(x) + object.__basicsize__).value if IN_MEMORY else int(x.ctypes.data)


def base_of(x: Array | None) -> int:
    """Return the address of an array; 0 for None."""
    return 0 if x is None else address_of(x)


IN_MEMORY = sys.implementation.name == "cpython"  # id() is an address
_word = ctypes.c_size_t.from_address


def pack_fields(names: Sequence[str], values: Mapping[str, int | float]) -> "array[int]":
    """Pack the fields with these names; 0 for those without a value."""
    numbers = [values.get(name, 0) for name in names]
    layout = "".join("d" if isinstance(x, float) else "q" for x in numbers)
    return array("Q", struct.pack(layout, *numbers))
