"""The fields that a kernel is called with: numbers and addresses of arrays, packed into one array."""

import ctypes
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def address_of(x: Array) -> int:
    """Where an array begins."""
    # The word behind the head of the object, in NumPy's C interface: `x.ctypes` takes as long as a head of attention.
    return _word(id(x) + object.__basicsize__).value if IN_MEMORY else int(x.ctypes.data)


def base_of(x: Array | None) -> int:
    """Likewise; 0 for an array that a call does not have."""
    return 0 if x is None else address_of(x)


IN_MEMORY = sys.implementation.name == "cpython"  # what id() gives is an address
_word = ctypes.c_size_t.from_address


def packed(names: Sequence[str], words: Mapping[str, int | float]) -> "array[int]":
    """The fields with these names, 0 where there is no word."""
    values = [words.get(name, 0) for name in names]
    layout = "".join("d" if isinstance(x, float) else "q" for x in values)
    return array("Q", struct.pack(layout, *values))
