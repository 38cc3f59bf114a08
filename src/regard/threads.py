"""How many threads a call may use, and how work is spread over them without changing a bit of any result."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

from regard import checks

_chosen: int | None = None
_lock = Lock()
_inside = 0
_limit: Any = None


def set_num_threads(n: int) -> None:
    """Use at most n threads in every later call. Results have the same bits for any n.

    >>> import regard
    >>> regard.set_num_threads(2)
    """
    global _chosen
    n = checks.integer("set_num_threads: n", n)
    if n < 1:
        raise ValueError(f"set_num_threads: n must be at least 1, got {n}")
    _chosen = n


def num_threads() -> int:
    """The number set by `set_num_threads`, else OMP_NUM_THREADS, else the processors this process may run on."""
    if _chosen is not None:
        return _chosen
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if text.strip().isdecimal() and int(text):
        return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread(work: Callable[[Any], None], tasks: Iterable[Any], threads: int) -> None:
    """Run independent tasks, on the calling thread alone if one is all there is, NumPy's warnings off.

    −∞ and NaN are ordinary numbers to attention: a masked score, a value that must be seen.
    """
    tasks = list(tasks)

    def quietly(task: Any) -> None:
        with np.errstate(all="ignore"):
            work(task)

    with one_blas_thread():
        if min(threads, len(tasks)) <= 1:
            for task in tasks:
                quietly(task)
        else:
            with ThreadPoolExecutor(min(threads, len(tasks)), "regard") as pool:
                for future in [pool.submit(quietly, task) for task in tasks]:
                    future.result()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS on one thread while any call is inside: how BLAS splits a product over threads changes its bits.

    The limit is the process's, so it is set by the first call to enter and lifted by the last one to leave.
    """
    global _inside, _limit
    with _lock:
        _inside += 1
        if _inside == 1:
            _limit = _blas().limit(limits=1)
            _limit.__enter__()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _limit.__exit__(None, None, None)


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")
