"""Threads of a call, and work spread over them with the same bits.

Each idle helper thread waits at a queue of its own, so that waking it costs a few microseconds.
There are at most as many helpers as one call has asked for. If others keep them busy, a call does
its work alone. Calls from a framework run on its own threads instead, which spin after an operation
on the cores that helpers would need.
"""

from __future__ import annotations  # so that `help` shows the names of types

import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, wraps
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np

from regard.arguments import values
from regard.runtime import memory, system
from regard.runtime.forks import renewed

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

WAIT = 0.5  # seconds between checks for signals, on systems where they do not interrupt the wait for a lock

_chosen: int | None = 1 if sys.platform == "emscripten" else None  # a browser's Python starts no threads
_this = sys.modules[__name__]
_lock = renewed(_this, "_lock", threading.RLock)  # a signal's handler may call too
_helpers = renewed(_this, "_helpers", int)  # a child process has none
_idle: list[_Helper] = renewed(_this, "_idle", list)
_local = threading.local()
_inside = renewed(_this, "_inside", int)
_limit: Any = None


def set_num_threads(n: int) -> None:
    """Use at most n threads in every later call. Results have the same bits for any n.

    Until it is called, OMP_NUM_THREADS sets the number. Its default is the number of processors
    that this process may run on. The CPU quota of its control group limits that, rounded up and
    read once.

    >>> import regard
    >>> regard.set_num_threads(2)
    """
    global _chosen
    _chosen = values.integer("set_num_threads: n", n, least=1, below=2**31)


def num_threads() -> int:
    """Return the number of threads that a call may use.

    `set_num_threads` sets the number, else OMP_NUM_THREADS, else the processors that this process
    may run on. A CPU quota of its control group, as containers have, limits that to quota / period,
    rounded up. In a browser it is 1.
    """
    if _chosen is not None:
        return _chosen
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if text.strip().isdecimal() and int(text):
        return int(text)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = system.quota()
    return allowed if quota is None else min(allowed, quota)


class ThreadTeam(Protocol):
    """Threads of a framework, which wait for its next operation."""

    def size(self) -> int:
        """Return the number of threads for a call from this thread, itself included."""

    def call(self, function: int, data: int, members: int) -> None:
        """Run function(data), compiled code at an address, on `members` threads.

        The calling thread is one of them. Returns when all have ended.
        """

    def run(self, work: Callable[[], None], members: int) -> None:
        """Run a Python function work() in the same way."""


def on_team(team: ThreadTeam) -> Callable[[F], F]:
    """Decorate a function to run the work that it spreads on a team."""

    def decorate(function: F) -> F:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = getattr(_local, "team", None)
            _local.team = team
            try:
                return function(*args, **kwargs)
            finally:
                _local.team = before

        return run  # type: ignore[return-value]

    return decorate


def team_for(threads: int) -> tuple[ThreadTeam | None, int]:
    """Return this thread's team and the members to use; (None, 1) for one thread."""
    team: ThreadTeam | None = getattr(_local, "team", None)
    if team is None or threads < 2:
        return None, 1
    members = min(threads, team.size())
    return (team, members) if members > 1 else (None, 1)


def spread(work: Callable[[T], None], tasks: Sequence[T], threads: int) -> None:
    """Call work(task) for each task, started in order, on at most `threads` threads.

    The calling thread is one of them. After an error no more tasks start. The first error is raised
    when the running ones have ended. May be called from many threads at once, and by `work` itself.
    """
    threads = min(threads, len(tasks))
    if threads <= 1:
        for task in tasks:
            work(task)
        return
    queue, (team, members) = _WorkQueue(work, tasks), team_for(threads)
    try:
        if team is not None:
            _take_on_team(queue, team, members)
        else:
            for helper in _wake(threads - 1):
                helper.box.put(queue)
            queue.take()
    except BaseException as raised:  # by a signal's handler
        queue.fail(raised)
    finally:
        queue.close()
    error, queue.error = queue.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # a traceback holds this frame


def spread_numpy(work: Callable[[T], None], tasks: Iterable[T], threads: int) -> None:
    """Spread work that NumPy does: BLAS on one thread each, warnings off.

    −∞ and NaN are ordinary numbers to attention: a masked score, a value that must be seen.
    """

    def quietly(task: T) -> None:
        with np.errstate(all="ignore"):
            work(task)

    with one_blas_thread():
        spread(quietly, list(tasks), threads)


class _WorkQueue:
    """Tasks that threads take in order, until none is left or one has failed."""

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
        """Start no more tasks; `spread` raises the first such error."""
        if self.error is None:
            self.error = error

    def enter(self) -> bool:
        """Register a helper; return False when all tasks are done."""
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

        Helpers use the caller's memory. An exception from a signal's handler meanwhile is recorded,
        and raised afterwards.
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


def _take_on_team(queue: _WorkQueue, team: ThreadTeam, members: int) -> None:
    """Run tasks on a team; the caller keeps the scratch memory of its threads.

    Thread-local memory of the members is lost after each call.
    """
    cached: list[_ScratchMemory] = _local.__dict__.setdefault("cached", [])
    caller = threading.get_ident()

    def take() -> None:
        if threading.get_ident() == caller:
            queue.take()
            return
        with suppress(IndexError):
            _local.memory = cached.pop()
        queue.take()
        if hasattr(_local, "memory"):
            cached.append(_local.memory)

    team.run(take, members)


class _Helper:
    """A waiting thread, and the core that it avoids."""

    def __init__(self) -> None:
        self.box: SimpleQueue[_WorkQueue] = SimpleQueue()
        self.number: int | None = None  # the system's thread id
        self.avoided_core = -1
        threading.Thread(target=self._stand_by, name="regard", daemon=True).start()

    def _stand_by(self) -> None:
        self.number = threading.get_native_id()
        while True:
            self._help(self.box.get())

    def _help(self, queue: _WorkQueue) -> None:
        entered = queue.enter()
        if entered:
            queue.take()
        _idle.append(self)  # before the caller continues, since its next call may follow at once
        if entered:
            queue.leave()

    def avoid(self, core: int) -> None:
        """Run on other cores than the caller's.

        While another library's threads spin on those, Linux wakes helpers on the caller's core, and
        leaves them there.
        """
        if core != self.avoided_core and self.number is not None:
            others = os.sched_getaffinity(0) - {core}
            if others:
                with suppress(OSError):  # some systems do not let a process place its threads
                    os.sched_setaffinity(self.number, others)
                self.avoided_core = core


def _wake(count: int) -> Iterator[_Helper]:
    """Iterate over at most `count` idle helpers."""
    global _helpers
    core = _core()
    for _ in range(count):
        try:
            helper = _idle.pop()
        except IndexError:
            with _lock:
                if _helpers >= count:
                    return
                _helpers += 1
            try:
                helper = _Helper()
            except RuntimeError:  # the system has no more threads to give
                with _lock:
                    _helpers -= 1
                return
        if core is not None:
            helper.avoid(core)
        yield helper


@cache
def _core_function() -> Any:
    """Return the C library's sched_getcpu, where threads can be placed."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        return ctypes.PyDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None


def _core() -> int | None:
    """Return the core that this thread runs on; None where threads cannot be placed."""
    function = _core_function()
    core = -1 if function is None else int(function())
    return None if core < 0 else core


class _ScratchMemory:
    def __init__(self, size: int):
        self.size, self.bytes = size, memory.empty((size,), np.uint8, aligned=True)
        self.address = int(self.bytes.ctypes.data)


class Scratch:
    """Memory of one call, `size` bytes for each thread that requests its `address`.

    Each address begins on a cache line. A thread caches its memory for later calls, which find it
    mapped and in cache.
    """

    def __init__(self, size: int):
        self.size = size
        self.held: list[_ScratchMemory] = []  # keeps memory alive if a nested call replaces it

    @property
    def address(self) -> int:
        own: _ScratchMemory | None = getattr(_local, "memory", None)
        if own is None or own.size < self.size:
            own = _local.memory = _ScratchMemory(self.size)
        self.held.append(own)
        return own.address

    def addresses(self, members: int) -> list[int]:
        """Return an address for the calling thread and for each other member of its team."""
        cached: list[_ScratchMemory] = _local.__dict__.setdefault("cached", [])
        cached[:] = [x for x in cached if x.size >= self.size]
        cached += [_ScratchMemory(self.size) for _ in range(members - 1 - len(cached))]
        self.held += cached
        return [self.address, *(x.address for x in cached[: members - 1])]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread while any call is inside.

    Bits depend on how BLAS splits a product over threads. The limit is the process's, so the first
    call to enter sets it, and the last to leave lifts it. Without threadpoolctl there is no limit,
    and a call may use one thread only: ModuleNotFoundError for more.
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
            if _limit is not None:  # set by another thread of a forked parent
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
    """Return the controller of BLAS threads, or None without threadpoolctl, as in a browser."""
    try:
        from threadpoolctl import ThreadpoolController
    except ModuleNotFoundError:
        return None
    return ThreadpoolController().select(user_api="blas")
