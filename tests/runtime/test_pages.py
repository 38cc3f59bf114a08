"""Large arrays: where they begin, that no memory is given out twice, and what is kept of those that are dropped."""

import gc
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.runtime import memory
from support import traced_memory

pytestmark = pytest.mark.skipif(not hasattr(memory.mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
SIZES = (memory.LARGE, memory.PAGE, memory.PAGE + 1, 3 * memory.PAGE - 64, 5 * memory.LARGE)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Memory as it is given, not filled."""


@pytest.fixture(autouse=True)
def nothing_dropped_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_released", deque())
    monkeypatch.setattr(memory, "_warm", deque())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [memory.empty, memory.zeros])
def test_large_arrays_begin_on_a_huge_page_and_can_be_written_to_the_end(make, size):
    x = make((size // 4,), np.float32)
    assert x.ctypes.data % memory.PAGE == 0
    assert len(x.base) >= size + memory.PAGE - memory.mmap.PAGESIZE  # wherever the system puts it
    assert (x.shape, x.dtype, x.flags.writeable, x.flags.c_contiguous) == ((size // 4,), np.float32, True, True)
    if make is memory.zeros:
        assert not x.any()
    x[:] = np.arange(size // 4)
    np.testing.assert_array_equal(x, np.arange(size // 4, dtype=np.float32))


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (100, 1000)])
def test_small_arrays_come_from_numpy_and_begin_on_a_cache_line_where_they_must(shape):
    for make in (memory.empty, memory.zeros):
        assert make(shape, np.float32).flags.owndata
        x = make(shape, np.float64, aligned=True)
        assert x.shape == shape
        assert not x.size or x.ctypes.data % memory.CACHE_LINE == 0


def test_what_is_dropped_is_used_again_and_zeros_are_zeros():
    x = memory.empty((memory.PAGE,), np.uint8)
    x[:] = 7
    where = x.ctypes.data
    del x
    y = memory.zeros((memory.PAGE // 8,), np.float64)
    assert y.ctypes.data == where
    assert not y.any()
    z = memory.zeros((memory.PAGE // 8,), np.float64)
    assert not np.shares_memory(y, z)


def mapped(at):
    """Whether memory at an address is this process's: the system says of other memory that it is not."""
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= at < int(end, 16) for first, end in maps)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system has no /proc/self/maps")
@pytest.mark.parametrize("chosen", ["", "on", "off", "OFF"])
def test_the_pool_can_be_switched_off(monkeypatch, chosen):
    monkeypatch.setenv("REGARD_POOL", chosen)
    x = memory.empty((40 * memory.PAGE,), np.uint8)
    at = x.ctypes.data + 20 * memory.PAGE
    assert mapped(at)
    del x
    kept = chosen.lower() != "off"
    assert mapped(at) is kept
    assert len(memory._warm) + len(memory._released) == kept


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system has no /proc/self/maps")
def test_no_pool_has_what_is_made_inside_of_unpooled():
    with memory.unpooled():
        x = memory.empty((40 * memory.PAGE,), np.uint8)
    at = x.ctypes.data + 20 * memory.PAGE
    assert mapped(at)
    del x
    assert not mapped(at)
    assert len(memory._warm) + len(memory._released) == 0
    assert memory.pooled()


def test_the_switch_of_the_pool_is_checked(monkeypatch):
    monkeypatch.setenv("REGARD_POOL", "of")
    with pytest.raises(ValueError, match=r"^REGARD_POOL must be on or off, got 'of'$"):
        memory.empty((memory.PAGE,), np.uint8)


def test_a_view_holds_the_memory():
    x = memory.empty((4, memory.PAGE), np.uint8)
    view = x[2:, ::2].T
    view[...] = 3
    del x
    other = memory.empty((4, memory.PAGE), np.uint8)
    other[...] = 9
    assert (view == 3).all()
    del view
    gc.collect()
    assert len(memory._warm) == 1


def test_a_result_that_is_held_is_not_written_over():
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 1024, 64), np.float32)
    first = regard.attention(q, k, v)
    copy = first.copy()
    assert first.nbytes >= memory.LARGE
    for _ in range(3):
        assert not np.shares_memory(regard.attention(k, q, v), first)
    np.testing.assert_array_equal(first, copy)


def test_no_more_is_kept_than_the_limit_and_what_was_dropped_last_stays(monkeypatch):
    monkeypatch.setattr(memory, "WARM", 16 * memory.PAGE)
    monkeypatch.setattr(memory, "POOLED", 32 * memory.PAGE)
    sizes = [memory.PAGE * (n + 1) for n in range(8)]
    for size in sizes:
        memory.empty((size,), np.uint8)

    def lengths() -> tuple[list[int], list[int]]:
        released, warm = ([block.length - memory.PAGE for block in x] for x in (memory._released, memory._warm))
        return released, warm

    assert lengths() == (sizes[4:7], sizes[7:])
    before = lengths()
    memory.empty((memory.POOLED + memory.PAGE,), np.uint8)  # too large, and pushes nothing out
    assert lengths() == before


def test_threads_never_share_memory():
    wrong = []

    def work(number: int) -> None:
        for n in range(60):
            x = memory.empty((memory.PAGE // 8 + n % 3 * memory.PAGE,), np.int64)
            x[::512] = number
            other = memory.zeros((memory.PAGE // 8,), np.int64)
            other[::512] += number
            if (x[::512] != number).any() or (other[::512] != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_an_array_that_the_system_has_no_memory_for():
    with pytest.raises(MemoryError, match=f"no memory for an array of {2**60} bytes"):
        memory.empty((2**60,), np.uint8)


def test_tracemalloc_counts_what_is_held():
    size = 8 * memory.PAGE
    before = memory.empty((size,), np.uint8)
    with traced_memory() as held:
        x = memory.empty((size,), np.uint8)
        assert size <= held()[0] < size + memory.LARGE
        view = x[5:]
        del x, before
        assert size <= held()[0] < size + memory.LARGE
        del view
        assert held()[0] < memory.LARGE
        y = memory.zeros((size,), np.uint8)  # the same memory, used again
        assert size <= held()[0] < size + memory.LARGE
        del y
