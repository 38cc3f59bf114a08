"""How many threads a call may use, and how work is spread over them without changing a bit of any result.

Helpers stand by, each asleep at a letter box of its own, so that waking one costs a few microseconds. There are at most
as many as one call has asked for beside its own thread; where others keep them busy, a call does its work alone. Calls
from a framework run on its own team instead: its threads spin after an operation, on cores that helpers need.
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

WAIT = 0.5  # seconds after which Python answers signals where they do not end the wait for a lock

_chosen: int | None = None
_this = sys.modules[__name__]
_lock = renewed(_this, "_lock", threading.RLock)  # a signal's handler may call in between
_helpers = renewed(_this, "_helpers", int)  # a child process has none
_idle: list[_Helper] = renewed(_this, "_idle", list)
_mine = threading.local()
_inside = renewed(_this, "_inside", int)
_limit: Any = None


def set_num_threads(n: int) -> None:
    """Use at most n threads in every later call. Results have the same bits for any n.

    Until it is called, OMP_NUM_THREADS says how many; else as many as processors that this process
    may run on, but not more than the CPU quota of its control group is worth, rounded up and read
    once.

    >>> import regard
    >>> regard.set_num_threads(2)
    """
    global _chosen
    _chosen = values.integer("set_num_threads: n", n, least=1, below=2**31)


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


class Team(Protocol):
    """Threads of a framework, which wait for its next operation."""

    def size(self) -> int:
        """How many there are for a call from this thread, itself among them; 1 if they cannot be used."""

    def call(self, function: int, data: int, members: int) -> None:
        """function(data), compiled code at an address, on so many at once, the calling thread among them.

        Returns when all have ended.
        """

    def run(self, work: Callable[[], None], members: int) -> None:
        """Likewise work(), a function in Python."""


def on_team(team: Team) -> Callable[[F], F]:
    """Decorate a function so that work which is spread inside of it runs on this team."""

    def decorate(function: F) -> F:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = getattr(_mine, "team", None)
            _mine.team = team
            try:
                return function(*args, **kwargs)
            finally:
                _mine.team = before

        return run  # type: ignore[return-value]

    return decorate


def team_for(threads: int) -> tuple[Team | None, int]:
    """The team that this thread's work runs on, if it is to use several threads, and how many of its members."""
    team: Team | None = getattr(_mine, "team", None)
    if team is None or threads < 2:
        return None, 1
    members = min(threads, team.size())
    return (team, members) if members > 1 else (None, 1)


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
    pile, (team, members) = _Pile(work, tasks), team_for(threads)
    try:
        if team is not None:
            _take_on_team(pile, team, members)
        else:
            for helper in _wake(threads - 1):
                helper.box.put(pile)
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


def _take_on_team(pile: _Pile, team: Team, members: int) -> None:
    """Take tasks on a team. What its threads keep for themselves is lost after each call, so the caller keeps it."""
    kept: list[_Memory] = _mine.__dict__.setdefault("kept", [])
    caller = threading.get_ident()

    def take() -> None:
        if threading.get_ident() == caller:
            pile.take()
            return
        with suppress(IndexError):
            _mine.memory = kept.pop()
        pile.take()
        if hasattr(_mine, "memory"):
            kept.append(_mine.memory)

    team.run(take, members)


class _Helper:
    """A thread that stands by, and the core that it keeps off."""

    def __init__(self) -> None:
        self.box: SimpleQueue[_Pile] = SimpleQueue()
        self.number: int | None = None  # of the thread, by the system
        self.avoided = -1
        threading.Thread(target=self._stand_by, name="regard", daemon=True).start()

    def _stand_by(self) -> None:
        self.number = threading.get_native_id()
        while True:
            self._help(self.box.get())

    def _help(self, pile: _Pile) -> None:
        entered = pile.enter()
        if entered:
            pile.take()
        _idle.append(self)  # before the caller goes on, whose next call may be at once
        if entered:
            pile.leave()

    def keep_off(self, core: int) -> None:
        """Run on other cores than the caller's.

        Where another library's threads spin on theirs, Linux wakes helpers on the caller's, and leaves them there.
        """
        if core != self.avoided and self.number is not None:
            others = os.sched_getaffinity(0) - {core}
            if others:
                with suppress(OSError):  # of a system that does not let a process place its threads
                    os.sched_setaffinity(self.number, others)
                self.avoided = core


def _wake(count: int) -> Iterator[_Helper]:
    """At most `count` helpers that have nothing to do."""
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
            helper.keep_off(core)
        yield helper


@cache
def _core_function() -> Any:
    """The C library's sched_getcpu, where threads can be placed."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        return ctypes.PyDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None


def _core() -> int | None:
    """The core that this thread runs on; None where that cannot be known, or helpers cannot be placed."""
    function = _core_function()
    core = -1 if function is None else int(function())
    return None if core < 0 else core


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

    def addresses(self, members: int) -> list[int]:
        """One for the calling thread and each other member of its team, whose memory it keeps."""
        kept: list[_Memory] = _mine.__dict__.setdefault("kept", [])
        kept[:] = [x for x in kept if x.size >= self.size]
        kept += [_Memory(self.size) for _ in range(members - 1 - len(kept))]
        self.held += kept
        return [self.address, *(x.address for x in kept[: members - 1])]


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
