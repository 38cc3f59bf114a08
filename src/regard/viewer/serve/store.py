"""A bounded cache of results, and long work in the background."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from queue import LifoQueue
from typing import Any, Protocol, TypeVar

from regard.runtime.forks import renewed

T = TypeVar("T")


class Store:
    """A cache of at most `limit` bytes that drops the least recently used values."""

    def __init__(self, limit: int):
        self.limit = limit
        self.nbytes = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = renewed(self, "_lock", threading.Lock)

    def get(self, key: Hashable) -> Any:
        """Return the value, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: Any, nbytes: int) -> None:
        """Cache a value of `nbytes` bytes, and drop old ones while the limit is exceeded."""
        with self._lock:
            self._drop(key)
            self._entries[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self.limit:
                self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Drop every value."""
        with self._lock:
            self._entries.clear()
            self.nbytes = 0

    def forget(self, group: Hashable) -> None:
        """Drop every value with a key that begins with `group`."""
        with self._lock:
            for key in [key for key in self._entries if isinstance(key, tuple) and key[0] == group]:
                self._drop(key)

    def _drop(self, key: Hashable) -> None:
        if key in self._entries:
            self.nbytes -= self._entries.pop(key)[1]


ASKED_FOR = 3.0
"""Seconds that a result keeps growing after the last request for it."""


class Unfinished(Exception):
    """Raised while work goes on in the background; `done` is its share, if known."""

    def __init__(self, done: float):
        super().__init__(f"{done:.0%} done")
        self.done = done


class Stopped(Exception):
    """Raised in work that no one waits for any more."""


class Job:
    """A piece of work, and its result, error or progress."""

    def __init__(self, work: Callable[[Callable[[float], object]], Any]):
        self.work = work
        self.done = 0.0
        self.ended = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None


class Worker:
    """A background thread that runs jobs, the last requested first.

    Requests with the same key share one job.
    """

    def __init__(self, patience: float | None):
        self.patience = patience
        # A forked child has no such thread, and starts without jobs.
        self._jobs: dict[Hashable, Job] = renewed(self, "_jobs", dict)
        self._queue: LifoQueue[tuple[Hashable, Job]] = renewed(self, "_queue", LifoQueue)
        self._lock = renewed(self, "_lock", threading.Lock)
        self._started = renewed(self, "_started", bool)
        self._closed = False

    def result(self, key: Hashable, work: Callable[[Callable[[float], object]], T]) -> T:
        """Return what `work(progress)` returns, or raise what it raises.

        Raises `Unfinished` after `patience` seconds. The next request with this key waits for the same job.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = Job(work)
                self._queue.put((key, job))
            if not self._started:
                # A daemon: a pass over all pairs must not delay the end of the program.
                threading.Thread(target=self._run, name="regard-viewer", daemon=True).start()
                self._started = True
        if not job.ended.wait(self.patience):
            raise Unfinished(job.done)
        with self._lock:
            self._jobs.pop(key, None)
        if job.error is not None:
            raise job.error
        value: T = job.value
        return value

    def close(self) -> None:
        """Start no further job, and stop the running one at its next report."""
        self._closed = True

    def _run(self) -> None:
        while not self._closed:
            _, job = self._queue.get()

            def progress(done: float, job: Job = job) -> None:
                if self._closed:
                    raise Stopped
                job.done = done

            try:
                job.value = job.work(progress)
            except Exception as error:
                job.error = error
            job.ended.set()


class Growing(Protocol):
    """A result that grows piece by piece; `error` is what stopped it."""

    error: Exception | None

    @property
    def whole(self) -> bool: ...

    def grow(self) -> None:
        """Compute one more piece."""


class Grower:
    """A background thread that grows results, the last requested first.

    A result grows for `ASKED_FOR` seconds after each request.
    """

    def __init__(self, patience: float | None):
        self.patience = patience
        self._asked: OrderedDict[Growing, float] = OrderedDict()
        self._changed = renewed(self, "_changed", threading.Condition)
        self._running = renewed(self, "_running", bool)

    def ask(self, growing: Growing, wait: bool = True) -> None:
        """Grow a result in the background, and wait up to `patience` seconds for its end.

        Without `patience` it is grown to its end here. Raises the error that stopped it.
        """
        if self.patience is None:
            while not growing.whole:
                growing.grow()
            return
        with self._changed:
            if not growing.whole and growing.error is None:
                self._asked[growing] = time.monotonic()
                self._asked.move_to_end(growing)
                if not self._running:
                    self._running = True
                    threading.Thread(target=self._run, name="regard-viewer-levels", daemon=True).start()
                if wait:
                    self._changed.wait_for(lambda: growing.whole or growing.error is not None, self.patience)
            if growing.error is not None:
                raise growing.error

    def close(self) -> None:
        """Stop growing all results after the current piece."""
        with self._changed:
            self._asked.clear()

    def _run(self) -> None:
        while (growing := self._next()) is not None:
            try:
                growing.grow()
            except Exception as error:
                growing.error = error
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> Growing | None:
        with self._changed:
            while self._asked:
                growing, asked = self._asked.popitem()
                if not growing.whole and growing.error is None and time.monotonic() - asked < ASKED_FOR:
                    self._asked[growing] = asked
                    return growing
            self._running = False
            return None
