"""Memory of results, of sums that become results, and of threads: on huge pages, and used again.

The first thread to write to a new page waits for the system: for 4 KiB one to 16 µs, and longer while others wait for
theirs (seen: backward on two threads no faster than on one). So a large array begins on a page of 2 MiB where the
system has such, and up to KEPT bytes of what callers drop are kept for the next arrays of their size, lent to the
system, which takes back what it needs. `tracemalloc` counts what callers hold, as it does for NumPy.
"""

import mmap
from collections import deque
from contextlib import suppress
from ctypes import c_size_t, c_uint, pythonapi
from math import prod
from typing import Any
from weakref import finalize

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

CACHE_LINE = 64
PAGE = 2**21
LARGE = PAGE // 2  # bytes from which an array has pages of its own
KEPT = 2**28

_TRACED = np.lib.tracemalloc_domain
_track, _untrack = pythonapi.PyTraceMalloc_Track, pythonapi.PyTraceMalloc_Untrack
_track.argtypes, _untrack.argtypes = (c_uint, c_size_t, c_size_t), (c_uint, c_size_t)

# Lengths and memory, what was dropped last at the end. No lock: an array may be dropped at any time, and each method of
# a deque is done at once.
_kept: deque[tuple[int, mmap.mmap]] = deque()


def empty(shape: tuple[int, ...], dtype: Any, aligned: bool = False) -> Array:
    """An array as from `np.empty`; large ones, and all that are to be `aligned`, begin on a cache line."""
    return _array(np.empty, shape, np.dtype(dtype), aligned)


def zeros(shape: tuple[int, ...], dtype: Any, aligned: bool = False) -> Array:
    """Likewise as from `np.zeros`."""
    return _array(np.zeros, shape, np.dtype(dtype), aligned)


def _array(make: Any, shape: tuple[int, ...], dtype: np.dtype[Any], aligned: bool) -> Array:
    size = prod(shape) * dtype.itemsize
    raw: Array
    if size >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        raw, used = _pages(size)
        first = -raw.ctypes.data % PAGE
        if used and make is np.zeros:
            raw[first : first + size] = 0
    elif aligned:
        raw = make(size + CACHE_LINE, np.uint8)
        first = -raw.ctypes.data % CACHE_LINE
    else:
        small: Array = make(shape, dtype)
        return small
    return raw[first : first + size].view(dtype).reshape(shape)


def _pages(size: int) -> tuple[Array, bool]:
    """Memory with room for so many bytes from a huge page on, and whether it was used before."""
    whole = (size + PAGE // 2) // PAGE * PAGE  # of a huge page of which less than half is needed, small ones are taken
    length = PAGE + max(whole, size + -size % mmap.PAGESIZE)
    memory, used = _taken(length), True
    if memory is None:
        memory, used = _mapped(length), False
    raw = np.frombuffer(memory, np.uint8)
    address = raw.ctypes.data
    if not used:
        with suppress(OSError):  # of a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, -address % PAGE, whole)
    _track(_TRACED, address, size)
    # The views that callers get hold `raw`, and nothing else does.
    finalize(raw, _drop, length, memory, address).atexit = False
    return raw, used


def _mapped(length: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"the system gave no memory for an array of {length - PAGE} bytes: {e}") from e


def _taken(length: int) -> mmap.mmap | None:
    """Memory of this length that was kept."""
    for block in reversed(tuple(_kept)):
        if block[0] == length:
            with suppress(ValueError):  # another thread was first
                _kept.remove(block)
                return block[1]
    return None


def _drop(length: int, memory: mmap.mmap, address: int) -> None:
    _untrack(_TRACED, address)
    if length <= KEPT:
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_FREE)  # its pages are the system's, if it wants them
        _kept.append((length, memory))
        while sum(length for length, _ in tuple(_kept)) > KEPT:
            with suppress(IndexError):
                _kept.popleft()
