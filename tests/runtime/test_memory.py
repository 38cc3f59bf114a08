"""Extra memory, beyond inputs and results, is O(n · d): a few tiles for each thread, and arrays as large as query.

NumPy and `regard.runtime.memory` report what they allocate to tracemalloc. An n × n array of one byte would break
each of these bounds.
"""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard
from regard.core.statistics import NAMES
from regard.runtime import threads
from support import traced_memory

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[Array, Array, Array, int], Any]
MB = 2**20
THREADS = 2


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_chosen", THREADS)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Memory as it is given, not filled."""


def arrays(n: int, d: int) -> tuple[Array, Array, Array]:
    q, k, v = np.random.default_rng(n).standard_normal((3, 1, n, d), dtype=np.float32)
    return q, k, v


def extra(call: Callable[[], Any]) -> int:
    """Bytes at the peak of a call beyond what was there before it and what it returns."""
    threads._local = threading.local()
    with traced_memory() as held:
        result = call()
        threads._local = threading.local()  # what threads keep for later calls counts as the call's
        kept, peak = held()
    del result
    return peak - kept


def test_a_long_causal_head() -> None:
    """n = 32,768 and d = 64: the scores alone would be 4 GiB."""
    q, k, v = arrays(32_768, 64)
    regard.attention(q[:, :64], k[:, :64], v[:, :64], causal=True)
    assert extra(lambda: regard.attention(q, k, v, causal=True)) <= 64 * MB


def documents(n: int) -> regard.Mask:
    return regard.documents(np.arange(n) // 700)


SLOPE = regard.table([0.1])

CALLS: dict[str, Call] = {
    "plain": lambda q, k, v, n: regard.attention(q, k, v),
    "statistics": lambda q, k, v, n: regard.attention(
        q, k, v, mask=documents(n),
        observe=[*NAMES, regard.top(4), regard.pooled(32, 32), regard.mass(regard.window(3))],
    ),
    "a tile of the weights": lambda q, k, v, n: regard.weights(
        q, k, causal=True, rows=slice(n // 2, n // 2 + 64), cols=slice(0, 64)
    ),
    "window": lambda q, k, v, n: regard.attention(q, k, v, mask=regard.window(100, 30)),
    "documents": lambda q, k, v, n: regard.attention(q, k, v, mask=documents(n), causal=True),
    "strided": lambda q, k, v, n: regard.attention(q, k, v, mask=regard.strided(64) | regard.global_tokens(3)),
    "neighborhood": lambda q, k, v, n: regard.attention(q, k, v, mask=regard.neighborhood((n // 20, 20), 5)),
    "keys masked by an array": lambda q, k, v, n: regard.attention(q, k, v, mask=np.arange(n) % 3 > 0, causal=True),
    "bias for each key": lambda q, k, v, n: regard.attention(q, k, v, bias=np.ones(n, np.float32), causal=True),
    "relative": lambda q, k, v, n: regard.attention(q, k, v, score=regard.relative(np.ones((1, 65))), causal=True),
    "dropout": lambda q, k, v, n: regard.attention(q, k, v, dropout=0.1, seed=1, causal=True),
    "NaN in a key": lambda q, k, v, n: regard.attention(
        q, np.where(np.arange(n)[:, None] == n - 1, np.float32(np.nan), k), v, causal=True
    ),
    "backward": lambda q, k, v, n: regard.attention_vjp(q, k, v, v, causal=True),
    "backward of everything": lambda q, k, v, n: regard.attention_vjp(
        q, k, v, v, dlse=np.ones((1, n)), dentropy=np.ones((1, n)), mask=documents(n), bias=np.ones((1, 1, n)),
        score=[regard.softcap(9.0), regard.alibi(regard.table([0.1]))], sink=np.ones(1), dropout=0.1, seed=1,
    ),
    "forward mode": lambda q, k, v, n: regard.attention_jvp(
        q, k, v, q, k, v, bias=np.ones(n), dbias=np.ones(n), mask=documents(n)
    ),
    "double backward": lambda q, k, v, n: regard.attention_vjp_jvp(
        q, k, v, v, regard.Differential(q, k, v, np.ones((1, 1, n)), tables={SLOPE: np.ones(1)}), causal=True,
        bias=np.ones((1, 1, n)), score=[regard.softcap(9.0), regard.alibi(SLOPE)], dropout=0.1, seed=1,
    ),
    "bfloat16": lambda q, k, v, n: regard.attention(*(x.astype(np.float16) for x in (q, k, v)), mask=documents(n)),
    "positions first": lambda q, k, v, n: regard.attention(
        *(x.swapaxes(0, 1) for x in (q, k, v)), layout="bnhd", mask=documents(n)
    ),
    "linear": lambda q, k, v, n: regard.linear_attention(q, k, v, causal=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_memory_is_linear(name: str) -> None:
    """At most 5 MiB for each thread and ten arrays of the size of query, and no steeper than that from n to 2 n."""
    call, d, used = CALLS[name], 16, []
    call(*arrays(200, d), 200)  # what is loaded or remembered once: kernels for many queries
    # In fewer blocks of queries, one more in a group weighs too much. On a busy machine one thread may compute all of a
    # short call, which then has the memory of one.
    for n, calls in ((4_000, 3), (8_000, 1)):
        q, k, v = arrays(n, d)
        used.append(max(extra(lambda q=q, k=k, v=v, n=n: call(q, k, v, n)) for _ in range(calls)))  # type: ignore[misc]
        bound = THREADS * 5 * MB + 10 * n * d * q.itemsize
        assert bound < 8_000**2 / 2
        assert used[-1] <= bound, f"{used[-1] / MB:.1f} MiB at n = {n}"
    assert used[1] < 2.6 * used[0]


def test_what_is_quadratic_is_seen() -> None:
    q, k, v = arrays(6_000, 16)
    assert extra(lambda: np.ones((6_000, 6_000), bool).any()) > 6_000**2 / 2
    assert extra(lambda: regard.attention(q, k, v, return_weights=True)[0]) > 6_000**2 / 2


@pytest.mark.parametrize("name", CALLS)
def test_a_call_keeps_nothing(name: str) -> None:
    """Arrays go when the caller lets go of them: no cycle holds them until the garbage collector runs."""
    n = 300
    q, k, v = (x.copy() for x in arrays(n, 16))  # views of them hold on to them
    alive = [weakref.ref(x) for x in (q, k, v)]
    gc.collect()
    gc.disable()
    try:
        CALLS[name](q, k, v, n)
        del q, k, v
        assert [x() is None for x in alive] == [True, True, True]
    finally:
        gc.enable()
