"""Signals during a call: their handlers run between portions of the work, and what they raise leaves nothing broken."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import regard
from regard.engines.cpu.schedule import backward_work, launches, second_work, stages, work
from regard.ops import callcache
from regard.runtime import threads

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="the system has no SIGALRM")
LONG = 60


class Stop(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[threading.Event]:
    """Set when the handler of SIGALRM, which raises Stop, has run."""
    ran = threading.Event()

    def handler(*_: Any) -> None:
        ran.set()
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield ran
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = threads._chosen
    yield
    threads._chosen = before


def arrays() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(27)
    return [rng.standard_normal((1, 2, 2000, 16), dtype=np.float32) for _ in range(4)]


def forward() -> list[Any]:
    q, k, v, _ = arrays()
    return [regard.attention(q, k, v, engine="cpu")]


def hidden() -> list[Any]:
    q, k, v, _ = arrays()
    return [regard.attention(q, k, v, causal=True, engine="cpu")]


def observed() -> list[Any]:
    q, k, v, _ = arrays()
    out, seen = regard.attention(q, k, v, observe=["received"], engine="cpu")
    return [out, seen.received]


def backward() -> list[Any]:
    d = regard.attention_vjp(*arrays(), engine="cpu")
    return [d.query, d.key, d.value]


CALLS = [forward, hidden, observed, backward]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_a_handler_runs_between_portions(
    call: Callable[[], list[Any]],
    count: int,
    handled: threading.Event,
    threads_restored: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    regard.set_num_threads(count)
    expected = call()
    caller, runs, fire = threading.get_ident(), 0, 0
    run_work_groups = launches.run_work_groups

    def counted(*args: Any) -> None:
        nonlocal runs
        if threading.get_ident() != caller:
            assert not fire or handled.wait(LONG)  # so that the caller has a portion
        else:
            runs += 1
            if runs == fire:
                signal.raise_signal(signal.SIGALRM)
        run_work_groups(*args)

    monkeypatch.setattr(work, "_schedules", {})
    monkeypatch.setattr(callcache, "_thread", threading.local())
    for module in (launches, backward_work, second_work):
        monkeypatch.setattr(module, "run_work_groups", counted)
    for module in (launches, backward_work):
        monkeypatch.setattr(module, "PORTION", 2**20)
    monkeypatch.setattr(stages, "LONG_WORK_GROUP", 2**20)
    if count == 1:
        same(call(), expected)
        assert runs >= 8  # in which the handler may run
        runs = 0
    for fire in (1, 2) if count == 1 else (1,):
        runs = 0
        handled.clear()
        with pytest.raises(Stop):
            call()
        assert runs == fire  # no portion was begun after it
    fire = 0
    same(call(), expected)


def same(found: list[Any], expected: list[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_all_threads_share_each_portion(monkeypatch: pytest.MonkeyPatch, threads_restored: None) -> None:
    """Two of three portions would leave one thread without work for a third of the time."""
    both, met = threading.Barrier(2), []
    run_work_groups = launches.run_work_groups

    def together(kernel: Any, fields: Any, bounds: Any, *rest: Any) -> None:
        if len(bounds) > 1:
            both.wait(LONG)
        met.append((threading.get_ident(), int(bounds[0, 0])))
        run_work_groups(kernel, fields, bounds, *rest)

    monkeypatch.setattr(launches, "run_work_groups", together)
    monkeypatch.setattr(launches, "PORTION", 2**22)
    monkeypatch.setattr(work, "_schedules", {})
    regard.set_num_threads(2)
    q = np.random.default_rng(0).standard_normal((3, 64, 128, 16), dtype=np.float32)
    regard.attention(*q)
    portions = [first for _, first in met]
    assert len(set(portions)) > 2
    assert all(portions.count(first) == 2 for first in portions)
    assert len({thread for thread, _ in met}) == 2


def test_portions_are_bounded_and_in_order() -> None:
    rng = np.random.default_rng(1)
    starts = np.arange(0, 3000, 3)
    bounds, tiles = np.stack([starts, starts + 3], axis=1)[::-1], rng.integers(0, 100, 3000)
    products = 2**17
    portions = launches.in_portions(bounds, tiles, products)
    np.testing.assert_array_equal(np.concatenate(portions), bounds)
    made = [sum(int(tiles[a:b].sum()) for a, b in portion) * products for portion in portions]
    assert len(portions) > 10
    assert max(made) <= launches.PORTION + 300 * products  # and at most one group more
    short = launches.in_portions(bounds, np.ones(3000, np.int64), 1)
    assert [len(x) for x in short] == [1000]  # a short call is not cut


def test_what_a_handler_raises_waits_for_helpers(handled: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, both, ended = threading.get_ident(), threading.Barrier(2), []
    piles: list[Any] = []

    class Pile(threads._WorkQueue):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            piles.append(self)

    monkeypatch.setattr(threads, "_WorkQueue", Pile)

    def task(_: int) -> None:
        both.wait(LONG)
        if threading.get_ident() == caller:
            return
        while not piles[0].closed:
            time.sleep(0.001)
        signal.pthread_kill(caller, signal.SIGALRM)
        assert handled.wait(LONG)
        time.sleep(0.2)  # in which the caller would go on if it did not wait
        ended.append(True)

    with pytest.raises(Stop):
        threads.spread(task, range(2), 2)
    assert ended == [True]
