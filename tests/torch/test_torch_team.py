"""Calls on tensors run on the threads of PyTorch: the same bits, errors, several callers, and never after a fork."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch

import regard
import regard.torch
from regard.runtime import threads
from regard.torch.tensors import team
from regard.torch.tensors.team import TEAM

pytestmark = pytest.mark.skipif(team._begin() is None, reason="this PyTorch has no OpenMP threads that others can use")
LONG = 60


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(threads, "_chosen", 2)
    monkeypatch.setattr(threads, "_idle", [])
    monkeypatch.setattr(threads, "_helpers", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensors(n: int, heads: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(2, heads, n, 32, generator=generator).requires_grad_() for _ in range(3)]


def results(n: int) -> list[torch.Tensor]:
    """Output, gradients and a statistic of the second pass."""
    q, k, v = tensors(n)
    out, seen = regard.attention(q, k, v, causal=True, observe=["received"])
    return [out, seen.received, *torch.autograd.grad(out.square().sum(), (q, k, v))]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def test_results_have_the_same_bits_on_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(300)
    assert threads._helpers == 0, "a helper of ours was started"
    monkeypatch.setattr(threads, "_chosen", 1)
    assert same(found, results(300))


def test_short_calls_and_steps_of_decoding_run_on_the_team() -> None:
    with torch.no_grad():
        for n in (128, 1):
            q, k, v = tensors(2048)
            for _ in range(3):
                regard.attention(q[..., :n, :], k, v)
    assert threads._helpers == 0


def test_work_runs_on_the_threads_that_pytorch_has() -> None:
    """Both are busy at once, and the other one is the same thread each time."""
    met: list[set[int]] = []
    for _ in range(3):
        both, seen = threading.Barrier(2), set()

        def work(both: threading.Barrier = both, seen: set[int] = seen) -> None:
            seen.add(threading.get_native_id())
            both.wait(LONG)

        TEAM.run(work, 2)
        met.append(seen)
    assert met[0] == met[1] == met[2]
    assert len(met[0]) == 2


def test_the_smaller_number_of_threads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = team.OpenMPTeam.run

    def counted(self: team.OpenMPTeam, work: Any, members: int) -> None:
        sizes.append(members)
        run(self, work, members)

    monkeypatch.setattr(team.OpenMPTeam, "run", counted)
    monkeypatch.setattr(threads, "_chosen", 7)
    results(300)
    assert set(sizes) == {2}
    sizes.clear()
    asked = helpers_asked(monkeypatch)
    torch.set_num_threads(1)  # of which no other thread spins: helpers do it
    results(300)
    assert sizes == []
    assert asked


def helpers_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many helpers each call asks for. How many were started is no sign: one of an earlier test may come back."""
    asked: list[int] = []
    wake = threads._wake
    monkeypatch.setattr(threads, "_wake", lambda count: asked.append(count) or wake(count))
    return asked


def test_arrays_of_numpy_are_not_given_to_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = helpers_asked(monkeypatch)
    q = np.ones((8, 500, 32), np.float32)
    regard.attention(q, q, q)
    assert asked == [1]


def test_an_error_on_the_team_is_raised() -> None:
    both = threading.Barrier(2)

    def work(n: int) -> None:
        both.wait(LONG)
        raise ZeroDivisionError(n)

    with pytest.raises(ZeroDivisionError):
        threads.on_team(TEAM)(threads.spread)(work, range(2), 2)
    assert same(results(200), results(200))


def test_calls_from_many_threads_at_once() -> None:
    expected = results(200)
    with ThreadPoolExecutor(4) as pool:
        assert all(same(found, expected) for found in pool.map(lambda _: results(200), range(12)))


def tensors_in_child(queue: Any) -> None:
    with torch.no_grad():
        q, k, v = tensors(300)
        queue.put((TEAM.size(), regard.attention(q, k, v, causal=True).numpy()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:os.fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_does_not_wait_for_a_team_that_it_has_not() -> None:
    expected = results(300)[0]
    context = get_context("fork")
    queue = context.Queue()
    child = context.Process(target=tensors_in_child, args=(queue,))
    child.start()
    size, found = queue.get(timeout=LONG)
    child.join()
    assert size == 1
    assert np.array_equal(found, expected.detach().numpy())
