"""Arrays on huge pages, pooled for later calls.

The first thread to write to a new page waits for the system: 1 to 16 µs for 4 KiB, and longer while other threads wait
too. (Backward on two threads was no faster than on one.) So a large array begins on a page of 2 MiB where the system
has such. Up to POOLED bytes of dropped arrays are reused for arrays of their size. All but the last WARM of them are
released lazily (MADV_FREE): the system may take their pages. `tracemalloc` counts arrays that callers hold, as it does
for NumPy. REGARD_POOL=off returns dropped memory to the system at once, and so does `unpooled`.
"""

from __future__ import annotations  # so that `help` shows the names of types

import mmap
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import c_size_t, c_uint, pythonapi
from math import prod
from typing import Any
from weakref import ref

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

CACHE_LINE = 64
PAGE = 2**21
LARGE = PAGE // 2  # arrays of this many bytes have pages of their own
WARM, POOLED = 2**25, 2**28
HUGE = hasattr(mmap, "MADV_HUGEPAGE")

_TRACED = np.lib.tracemalloc_domain
_track, _untrack = pythonapi.PyTraceMalloc_Track, pythonapi.PyTraceMalloc_Untrack
_track.argtypes, _untrack.argtypes = (c_uint, c_size_t, c_size_t), (c_uint, c_size_t)


class PoolBlock:
    """Pages for an array.

    length: bytes. first: offset of the first huge page from the address. whole: bytes from there on to put on huge
    pages.
    """

    __slots__ = ("address", "first", "length", "pages")

    def __init__(self, length: int, whole: int):
        self.length, self.pages = length, _mapped(length)
        self.address = int(np.frombuffer(self.pages, np.uint8).ctypes.data)
        self.first = -self.address % PAGE
        with suppress(OSError):  # systems without huge pages
            self.pages.madvise(mmap.MADV_HUGEPAGE, self.first, whole)


class _Lease(ref[Array]):
    """A reference that owns an array's block until the array and its views are gone."""

    __slots__ = ("block", "pooled")
    block: PoolBlock
    pooled: bool


# Blocks in the order in which they were dropped. No lock: an array may be dropped at any time, and each method of a
# deque or a dict is atomic.
_warm: deque[PoolBlock] = deque()
_released: deque[PoolBlock] = deque()
_leases: dict[int, _Lease] = {}
_unpooled: set[object] = set()  # one for each `unpooled` that runs, in any thread


def empty(shape: tuple[int, ...], dtype: Any, aligned: bool = False) -> Array:
    """Return an array as from `np.empty`.

    Large arrays begin on a cache line, and with `aligned` all do.
    """
    return _array(np.empty, shape, np.dtype(dtype), aligned)


def zeros(shape: tuple[int, ...], dtype: Any, aligned: bool = False) -> Array:
    """Return an array as from `np.zeros`, aligned as by `empty`."""
    return _array(np.zeros, shape, np.dtype(dtype), aligned)


def _array(make: Any, shape: tuple[int, ...], dtype: np.dtype[Any], aligned: bool) -> Array:
    size = prod(shape) * dtype.itemsize
    if size >= LARGE and HUGE:
        return _on_pages(shape, dtype, size, make is np.zeros)
    if aligned:
        raw: Array = make(size + CACHE_LINE, np.uint8)
        first = -raw.ctypes.data % CACHE_LINE
        return raw[first : first + size].view(dtype).reshape(shape)
    small: Array = make(shape, dtype)
    return small


def _on_pages(shape: tuple[int, ...], dtype: np.dtype[Any], size: int, zero: bool) -> Array:
    """Return an array that begins on a huge page."""
    keep = pooled()
    whole = (size + PAGE // 2) // PAGE * PAGE  # a last huge page less than half full becomes small ones
    length = PAGE + max(whole, size + -size % mmap.PAGESIZE)
    block, used = _taken(length), True
    if block is None:
        block, used = PoolBlock(length, whole), False
    array: Array = np.ndarray(shape, dtype, block.pages, block.first)
    if used and zero:
        np.ndarray(size, np.uint8, block.pages, block.first)[:] = 0
    _track(_TRACED, block.address, size)
    lease = _leases[block.address] = _Lease(array, _returned)
    lease.block, lease.pooled = block, keep
    return array


def pooled() -> bool:
    """Return True if dropped arrays are pooled.

    Raises ValueError for a REGARD_POOL that is neither on nor off.
    """
    chosen = os.environ.get("REGARD_POOL") or "on"
    if chosen.lower() not in ("on", "off"):
        raise ValueError(f"REGARD_POOL must be on or off, got {chosen!r}")
    return chosen.lower() == "on" and not _unpooled


@contextmanager
def unpooled() -> Iterator[None]:
    """Return arrays that are made inside of a `with` to the system as soon as they are dropped."""
    mark = object()
    _unpooled.add(mark)
    try:
        yield
    finally:
        _unpooled.remove(mark)


def _mapped(length: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"the system gave no memory for an array of {length - PAGE} bytes: {e}") from e


def _taken(length: int) -> PoolBlock | None:
    """Take a block of this length out of the pool, if there is one."""
    for blocks in (_warm, _released):
        for block in reversed(tuple(blocks)):
            if block.length == length:
                with suppress(ValueError):  # another thread took it
                    blocks.remove(block)
                    return block
    return None


def _returned(lease: _Lease) -> None:
    block = lease.block
    _untrack(_TRACED, block.address)
    del _leases[block.address]
    if lease.pooled and block.length <= POOLED:
        _warm.append(block)
        _release()


def _release() -> None:
    """Release the blocks beyond WARM lazily, and drop those beyond POOLED bytes."""
    while sum(block.length for block in tuple(_warm)) > WARM:
        with suppress(IndexError):
            block = _warm.popleft()  # first, so that no other thread takes it
            with suppress(AttributeError, OSError):
                block.pages.madvise(mmap.MADV_FREE)
            _released.append(block)
    while sum(block.length for blocks in (_released, _warm) for block in tuple(blocks)) > POOLED:
        with suppress(IndexError):
            (_released or _warm).popleft()


def address_of(x: Array) -> int:
    """Return the address of an array."""
    # The first word after the object's header, in NumPy's C interface; `x.ctypes` takes as long as a head of attention.
    return _word(id(x) + object.__basicsize__).value if IN_MEMORY else int(x.ctypes.data)


IN_MEMORY = sys.implementation.name == "cpython"  # id() is an address
_word = c_size_t.from_address
