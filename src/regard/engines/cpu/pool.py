"""Threads that take work from a common pile. A kernel runs without Python's lock, so they run at once."""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
MOST = 64  # threads


def _pool() -> ThreadPoolExecutor:
    """The threads of this process: a process made by fork has none of its parent's."""
    with _lock:
        mine = _pools.get(os.getpid())
        if mine is None:
            _pools.clear()
            mine = _pools[os.getpid()] = ThreadPoolExecutor(MOST, "regard")
        return mine


if hasattr(os, "register_at_fork"):

    def _new_lock() -> None:
        global _lock
        _lock = threading.Lock()

    os.register_at_fork(after_in_child=_new_lock)


def spread(work: Callable[[int], None], count: int, threads: int) -> None:
    """work(0), ..., work(count − 1), begun in that order, on at most `threads` threads, the calling one among them."""
    threads = min(threads, count, MOST)
    if threads <= 1:
        for n in range(count):
            work(n)
        return
    numbers = itertools.count()

    def take() -> None:
        while (n := next(numbers)) < count:
            work(n)

    helpers = [_pool().submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:
        # One that has not begun, because others keep the threads busy, has nothing left to do.
        for helper in helpers:
            if not helper.cancel():
                helper.result()


class Scratch(threading.local):
    """Memory of one call, `size` bytes on a cache line for each thread that asks for its `address`."""

    def __init__(self, size: int):
        self.memory = np.empty(size + 64, np.uint8)
        first = int(self.memory.ctypes.data)
        self.address = first + -first % 64
