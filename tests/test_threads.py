"""Work spread over threads: all of it once, errors, calls within calls and from many threads, after fork."""

import ctypes
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from regard.runtime import threads
from regard.runtime.threads import Scratch, spread

LONG = 60  # seconds, for what takes no time unless it hangs


class FreshThreads:
    """A team whose other threads are new ones each time, which have kept nothing."""

    def size(self) -> int:
        return 9

    def call(self, function: int, data: int, members: int) -> None:
        self.run(lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data), members)

    def run(self, work: Callable[[], None], members: int) -> None:
        others = [threading.Thread(target=work) for _ in range(members - 1)]
        for thread in others:
            thread.start()
        work()
        for thread in others:
            thread.join()


@pytest.fixture(autouse=True, params=["helpers", "team"])
def no_helpers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts without helpers and without memory that is kept; helpers of other tests sleep on."""
    monkeypatch.setattr(threads, "_local", threading.local())
    monkeypatch.setattr(threads, "_idle", [])
    monkeypatch.setattr(threads, "_helpers", 0)
    if request.param == "team":
        threads._local.team = FreshThreads()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


def meet(parties: int) -> Any:
    """Work that needs so many threads at once, and the set of those that did it."""
    barrier, met = threading.Barrier(parties), set()

    def work(_: int) -> None:
        met.add(threading.get_ident())
        barrier.wait(LONG)

    return work, met


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_task_once_and_begun_in_order(count: int) -> None:
    done: list[int] = []
    spread(done.append, range(1000), count)
    assert sorted(done) == list(range(1000))
    mine: dict[int, list[int]] = {}
    spread(lambda n: mine.setdefault(threading.get_ident(), []).append(n), range(1000), count)
    assert all(part == sorted(part) for part in mine.values())


@pytest.mark.parametrize("count", [2, 3, 5])
def test_so_many_threads_and_the_calling_one(count: int) -> None:
    for _ in range(3):
        work, met = meet(count)
        spread(work, range(count), count)
        assert len(met) == count
        assert threading.get_ident() in met
    assert threads._helpers <= count - 1  # those of the first call serve the others


def test_no_more_threads_than_tasks_or_than_asked_for() -> None:
    seen: set[int] = set()
    spread(lambda n: seen.add(threading.get_ident()), range(100), 1)
    spread(lambda n: seen.add(threading.get_ident()), range(1), 8)
    spread(lambda n: seen.add(threading.get_ident()), range(0), 8)
    assert seen == {threading.get_ident()}
    assert threads._helpers == 0


@pytest.fixture
def until_failed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until a task of the first call has failed."""
    piles: list[Any] = []

    class Queue(threads._WorkQueue):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            piles.append(self)

    monkeypatch.setattr(threads, "_WorkQueue", Queue)
    return lambda: until(lambda: piles[0].error is not None)


@pytest.mark.parametrize("who", ["caller", "helper"])
def test_an_error_is_raised_when_all_have_ended(who: str, until_failed: Callable[[], None]) -> None:
    caller, both, ended = threading.get_ident(), threading.Barrier(2), []

    def work(n: int) -> None:
        both.wait(LONG)
        if (threading.get_ident() == caller) == (who == "caller"):
            raise ZeroDivisionError(n)
        until_failed()
        ended.append(n)

    with pytest.raises(ZeroDivisionError) as raised:
        spread(work, range(1000), 2)
    assert {*ended, *raised.value.args} == {0, 1}  # no third task was begun


@pytest.mark.parametrize("first", ["caller", "helper"])
def test_of_two_errors_the_first(first: str, until_failed: Callable[[], None]) -> None:
    caller, both = threading.get_ident(), threading.Barrier(2)

    def work(n: int) -> None:
        both.wait(LONG)
        if (threading.get_ident() == caller) == (first == "caller"):
            raise ValueError("first")
        until_failed()
        raise KeyError("second")

    with pytest.raises(ValueError, match="first"):
        spread(work, range(2), 2)


def test_an_error_ends_work_on_one_thread() -> None:
    done: list[int] = []

    def work(n: int) -> None:
        done.append(n)
        if n == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spread(work, range(10), 1)
    assert done == [0, 1, 2, 3]


def test_work_may_spread_work() -> None:
    done: list[tuple[int, ...]] = []

    def work(*path: int) -> None:
        done.append(path)
        if len(path) < 3:
            spread(lambda n: work(*path, n), range(4), 3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8), timeout=LONG))
    assert sorted(done) == sorted(
        path for length in (1, 2, 3) for path in itertools.product(range(8), *[range(4)] * (length - 1))
    )
    assert threads._helpers <= 2


@pytest.mark.parametrize("no_helpers", ["helpers"], indirect=True)
def test_a_call_whose_helpers_are_busy_does_its_work_alone() -> None:
    busy, free = threading.Barrier(3), threading.Event()

    def wait(_: int) -> None:
        busy.wait(LONG)
        free.wait(LONG)

    other = threading.Thread(target=spread, args=(wait, range(2), 2))
    other.start()
    busy.wait(LONG)
    seen: set[int] = set()
    spread(lambda n: seen.add(threading.get_ident()), range(100), 2)
    free.set()
    other.join(LONG)
    assert seen == {threading.get_ident()}


@pytest.mark.parametrize("no_helpers", ["helpers"], indirect=True)
def test_without_another_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        spread(done.append, range(10), 3)
    assert done == list(range(10))
    work, met = meet(3)
    spread(work, range(3), 3)
    assert len(met) == 3


def test_nothing_is_kept_of_a_call() -> None:
    class Work:
        def __call__(self, n: int) -> None:
            pass

    work = Work()
    alive = weakref.ref(work)
    for _ in range(20):
        spread(work, range(4), 2)
    del work
    until(lambda: alive() is None)  # a helper may be late, and find nothing left to do
    assert alive() is None


def in_child(queue: Any) -> None:
    work, met = meet(2)
    spread(work, range(2), 2)
    queue.put(len(met))


@pytest.mark.parametrize("no_helpers", ["helpers"], indirect=True)
def test_a_helper_keeps_off_the_core_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, set[int]]] = []
    allowed, core = {3, 5, 8}, 5
    monkeypatch.setattr(threads, "_core", lambda: core)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: asked.append(given), raising=False)
    helpers: set[int] = set()

    def call() -> None:
        both = threading.Barrier(2)

        def work(_: int) -> None:
            helpers.add(threading.get_native_id())
            both.wait(LONG)

        spread(work, range(2), 2)

    call()  # which starts the helper, perhaps before its number is known
    asked.clear()
    core = 8
    call()
    call()  # from the same core
    (helper,) = helpers - {threading.get_native_id()}
    assert asked == [(helper, {3, 5})]
    allowed, core = {3}, 3
    call()  # there is no other
    assert len(asked) == 1


@pytest.mark.skipif(threads._core_function() is None, reason="the core of a thread cannot be known here")
def test_the_core_is_one_that_this_thread_may_run_on() -> None:
    assert threads._core() in os.sched_getaffinity(0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:os.fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    spread(meet(2)[0], range(2), 2)
    context = get_context("fork")
    queue = context.Queue()
    with threads._lock:  # as another thread may
        child = context.Process(target=in_child, args=(queue,))
        child.start()
    assert queue.get(timeout=LONG) == 2
    child.join()


def addresses(size: int, count: int) -> Iterator[int]:
    both = threading.Barrier(count)
    scratch, found = Scratch(size), []

    def work(_: int) -> None:
        found.append(scratch.address)
        both.wait(LONG)

    spread(work, range(count), count)
    return iter(sorted(found))


def test_each_thread_has_its_own_scratch_and_keeps_it() -> None:
    first, second = addresses(1000, 2)
    assert second - first >= 1000
    assert first % 64 == second % 64 == 0
    assert list(addresses(500, 2)) == [first, second]


def test_scratch_outlives_a_call_that_needs_more() -> None:
    def work() -> None:
        small = Scratch(1000)
        before, memory = small.address, weakref.ref(small.held[-1])
        large = Scratch(100_000)
        assert large.address != before
        assert memory() is not None
        del small
        assert memory() is None
        assert large.held[-1].size == 100_000

    with ThreadPoolExecutor(1) as fresh:  # a thread that has no memory yet
        fresh.submit(work).result()
