"""`python -m regard.bench`: an engine beside naive NumPy, as ratios of times taken in turns.

One thread each on one pinned core unless --threads says otherwise; medians with their spread; nothing is reported
for a call whose result is wrong.
"""

import argparse
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import regard
from regard.bench import naive
from regard.threads import one_blas_thread

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], Any]


def in_turns(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, the calls taken one after the other in every round; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
        print(f"\r  round {turn}/{rounds}", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 20 + "\r", end="", file=sys.stderr)
    return times


def agree(got: Array, expected: Array) -> None:
    error = np.linalg.norm((got - expected).ravel()) / np.linalg.norm(expected.ravel())
    if not error < 1e-5:
        raise SystemExit(f"the results differ by {error:.1e}: no time is reported")


def row(name: str, times: list[float], reference: list[float]) -> None:
    ratios = [a / b for a, b in zip(times, reference, strict=True)]
    print(
        f"  {name:34s} {statistics.median(ratios):7.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        f"   {statistics.median(times) * 1e3:9.2f} ms"
    )


def against_naive(h: int, n: int, d: int, rounds: int, engine: str | None) -> None:
    """Every wish, as a ratio to the naive plain call of the same size."""
    attention = partial(regard.attention, engine=engine)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, h, n, d), dtype=np.float32)
    agree(attention(q, k, v), naive.attention(q, k, v))
    agree(attention(q, k, v, causal=True), naive.attention(q, k, v, causal=True))
    g = regard.attention_vjp(q, k, v, q, engine=engine)
    for got, expected in zip((g.query, g.key, g.value), naive.gradients(q, k, v, q), strict=True):
        assert got is not None
        agree(got, expected)
    slopes = regard.positions.alibi_slopes(h)
    bias = rng.standard_normal((h, 1, n), dtype=np.float32)
    wishes: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window of 64": {"mask": regard.window(64)},
        "4 documents": {"mask": regard.documents(np.arange(n) * 4 // n)},
        "softcap": {"score": regard.softcap(30.0)},
        "alibi, causal": {"score": regard.alibi(slopes), "causal": True},
        "bias (h, 1, n)": {"bias": bias},
        "dropout": {"dropout": 0.1, "seed": 0},
        "lse and entropy": {"observe": ["lse", "entropy"]},
        "top 8": {"observe": [regard.top(8)]},
        "received": {"observe": ["received"]},
    }
    calls: dict[str, Call] = {"naive": lambda: naive.attention(q, k, v)}
    calls |= {name: partial(attention, q, k, v, **options) for name, options in wishes.items()}
    calls["one query (decode)"] = lambda: attention(q[:, -1:], k, v)
    calls["naive gradients"] = lambda: naive.gradients(q, k, v, q)
    calls["vjp (forward and backward)"] = lambda: regard.attention_vjp(q, k, v, q, engine=engine)
    calls["jvp (forward and tangent)"] = lambda: regard.attention_jvp(q, k, v, q, k, v, engine=engine)
    times = in_turns(calls, rounds)
    print(f"{h} heads, n = {n}, d = {d}, float32: time / time of naive NumPy's plain forward (least to most)")
    for name in list(calls)[1:]:
        row(name, times[name], times["naive"])


def long(n: int, d: int, rounds: int, engine: str | None) -> None:
    """One long head: what a window saves, and the memory beyond the output."""
    attention = partial(regard.attention, engine=engine)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, n, d), dtype=np.float32)
    times = in_turns(
        {
            "causal": lambda: attention(q, k, v, causal=True),
            "window": lambda: attention(q, k, v, mask=regard.window(256)),
        },
        rounds,
    )
    tracemalloc.start()
    out = attention(q, k, v, causal=True)
    extra = tracemalloc.get_traced_memory()[1] - out.nbytes
    tracemalloc.stop()
    ratios = [a / b for a, b in zip(times["causal"], times["window"], strict=True)]
    print(f"1 head, n = {n}, d = {d}, float32, causal")
    print(f"  full / window of 256: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")
    print(f"  full: {statistics.median(times['causal']):.2f} s; peak memory beyond the output {extra / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m regard.bench", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--n", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--long", type=int, default=32768, help="length of the one long head; 0 leaves it out")
    parser.add_argument("--engine", help="the first that supports the calls unless it is named")
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-given.threads :])
    regard.set_num_threads(given.threads)
    with one_blas_thread():
        for n in given.n:
            against_naive(8, n, 64, given.rounds, given.engine)
        if given.long:
            long(given.long, 64, 3, given.engine)


if __name__ == "__main__":
    main()
