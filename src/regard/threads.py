"""How many threads a call may use, and how work is spread over them without changing a bit of any result.

Helpers stand by, each asleep at a letter box of its own, so that waking one costs a few microseconds. There are at most
as many as one call has asked for beside its own thread; where others keep them busy, a call does its work alone.
"""

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from regard import checks, memory, system
from regard.forks import renewed

T = TypeVar("T")

WAIT = 0.5  # seconds after which Python answers signals where they do not end the wait for a lock

_chosen: int | None = None
_this = sys.modules[__name__]
_lock = renewed(_this, "_lock", threading.RLock)  # a signal's handler may call in between
_helpers = renewed(_this, "_helpers", int)  # a child process has none
_idle: list["SimpleQueue[_Pile]"] = renewed(_this, "_idle", list)
_mine = threading.local()
_inside = renewed(_this, "_inside", int)
_limit: Any = None


def set_num_threads(n: int) -> None:
    """Use at most n threads in every later call. Results have the same bits for any n.

    Until it is called, OMP_NUM_THREADS says how many; else as many as processors that this process may run on, but not
    more than the CPU quota of its control group is worth, rounded up and read once.

    >>> import regard
    >>> regard.set_num_threads(2)
    """
    global _chosen
    _chosen = checks.integer("set_num_threads: n", n, least=1, below=2**31)


def num_threads() -> int:
    """The number set by `set_num_threads`, else OMP_NUM_THREADS, else the processors this process may run on.

    A CPU quota of its control group, as containers have, is worth quota / period processors, rounded up: not more.
    """
    if _chosen is not None:
        return _chosen
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if text.strip().isdecimal() and int(text):
        return int(text)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = system.quota()
    return allowed if quota is None else min(allowed, quota)


def spread(work: Callable[[T], None], tasks: Sequence[T], threads: int) -> None:
    """work(task) for each task, begun in order, on at most so many threads, the calling one among them.

    Once a task has raised an error none is begun any more, and the first error is raised when those begun have ended.
    May be called from many threads at once, and by `work` itself.
    """
    threads = min(threads, len(tasks))
    if threads <= 1:
        for task in tasks:
            work(task)
        return
    pile = _Pile(work, tasks)
    try:
        for box in _wake(threads - 1):
            box.put(pile)
        pile.take()
    except BaseException as raised:  # by a signal's handler, between tasks or where helpers are woken
        pile.fail(raised)
    finally:
        pile.close()
    error, pile.error = pile.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # which holds this frame


def spread_numpy(work: Callable[[T], None], tasks: Iterable[T], threads: int) -> None:
    """`spread` for work that NumPy does: BLAS on one thread each, warnings off.

    −∞ and NaN are ordinary numbers to attention: a masked score, a value that must be seen.
    """

    def quietly(task: T) -> None:
        with np.errstate(all="ignore"):
            work(task)

    with one_blas_thread():
        spread(quietly, list(tasks), threads)


class _Pile:
    """Tasks that threads take one after the other, until none is left or one has failed."""

    def __init__(self, work: Callable[[Any], None], tasks: Sequence[Any]):
        self.work, self.tasks, self.numbers = work, tasks, itertools.count()
        self.lock, self.left = threading.Lock(), threading.Lock()
        self.left.acquire()
        self.helping, self.closed = 0, False
        self.error: BaseException | None = None

    def take(self) -> None:
        try:
            while self.error is None and (n := next(self.numbers)) < len(self.tasks):
                self.work(self.tasks[n])
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Begin no more tasks, and raise the first such error in the end."""
        if self.error is None:
            self.error = error

    def enter(self) -> bool:
        """Whether a helper may take tasks: not when all are done."""
        with self.lock:
            self.helping += not self.closed
            return not self.closed

    def leave(self) -> None:
        with self.lock:
            self.helping -= 1
            last = self.closed and not self.helping
        if last:
            self.left.release()

    def close(self) -> None:
        """Let no more helpers in, and wait until those inside have left.

        They use the caller's memory: what a signal's handler raises meanwhile is an error like any other, raised then.
        """
        while True:
            try:
                with self.lock:
                    self.closed = True
                    wait = self.helping > 0
                if wait and not self.left.acquire(timeout=WAIT):
                    continue
                return
            except BaseException as error:
                self.fail(error)


def _wake(count: int) -> Iterator[SimpleQueue[_Pile]]:
    """The letter boxes of at most `count` helpers that have nothing to do."""
    global _helpers
    for _ in range(count):
        try:
            yield _idle.pop()
        except IndexError:
            with _lock:
                if _helpers >= count:
                    return
                _helpers += 1
            box: SimpleQueue[_Pile] = SimpleQueue()
            try:
                threading.Thread(target=_stand_by, args=(box,), name="regard", daemon=True).start()
            except RuntimeError:  # the system has no more threads to give
                with _lock:
                    _helpers -= 1
                return
            yield box


def _stand_by(box: SimpleQueue[_Pile]) -> None:
    while True:
        _help(box.get(), box)


def _help(pile: _Pile, box: SimpleQueue[_Pile]) -> None:
    entered = pile.enter()
    if entered:
        pile.take()
    _idle.append(box)  # before the caller goes on, whose next call may be at once
    if entered:
        pile.leave()


class _Memory:
    def __init__(self, size: int):
        self.size, self.bytes = size, memory.empty((size,), np.uint8, aligned=True)
        self.address = int(self.bytes.ctypes.data)


class Scratch:
    """Memory for one call: `size` bytes on a cache line, for each thread that asks for its `address`.

    A thread keeps its memory for later calls, which find it mapped and in cache.
    """

    def __init__(self, size: int):
        self.size = size
        self.held: list[_Memory] = []  # a call that comes in between may need more, and replace it

    @property
    def address(self) -> int:
        mine: _Memory | None = getattr(_mine, "memory", None)
        if mine is None or mine.size < self.size:
            mine = _mine.memory = _Memory(self.size)
        self.held.append(mine)
        return mine.address


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS on one thread while any call is inside: how BLAS splits a product over threads changes its bits.

    The limit is the process's, so it is set by the first call to enter and lifted by the last one to leave. Without
    threadpoolctl there is none, and a call may use one thread: ModuleNotFoundError for more.
    """
    global _inside, _limit
    blas = _blas()
    if blas is None and num_threads() > 1:
        raise ModuleNotFoundError(
            f"{num_threads()} threads need threadpoolctl, which is missing: pip install threadpoolctl, or "
            "regard.set_num_threads(1)",
            name="threadpoolctl",
        )
    with _lock:
        _inside += 1
        if _inside == 1:
            if _limit is not None:  # a parent's, which another of its threads had set
                _limit.__exit__(None, None, None)
            _limit = nullcontext() if blas is None else blas.limit(limits=1)
            _limit.__enter__()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _limit.__exit__(None, None, None)
                _limit = None


@cache
def _blas() -> Any:
    """What limits the threads of BLAS; None without threadpoolctl, as in a browser."""
    try:
        from threadpoolctl import ThreadpoolController
    except ModuleNotFoundError:
        return None
    return ThreadpoolController().select(user_api="blas")
