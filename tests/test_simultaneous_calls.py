"""Eight threads that call regard at once get the bits of one thread, as docs/promises.md says.

Tensors and JAX arrays: tests/torch/test_torch_team.py, tests/jax/test_jax_transformations.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import regard

THREADS = 8
LONG = 300
rng = np.random.default_rng(0)
Q, K, V, DO = rng.standard_normal((4, 2, 300, 32), dtype=np.float32)
BIAS = rng.standard_normal((2, 300, 300), dtype=np.float32)
SLOPES = np.array([0.5, 0.25], dtype=np.float32)


def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s - 0.1 * abs(i - j)


def observed() -> Any:
    out, seen = regard.attention(Q, K, V, causal=True, observe=["lse", "entropy", "received", regard.top(3)])
    return out, seen.lse, seen.entropy, seen.received, seen[regard.top(3)]


def merged() -> Any:
    halves = [slice(0, 150), slice(150, 300)]
    parts = [regard.attention(Q, K[:, half], V[:, half], observe=["lse"]) for half in halves]
    return regard.merge(*[(out, seen.lse) for out, seen in parts])


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: regard.attention(Q, K, V, causal=True),
    "a decode step": lambda: regard.attention(Q[:, -1:], K, V),
    "a small call": lambda: regard.attention(Q[:, :16], K[:, :16], V[:, :16]),
    "float16": lambda: regard.attention(*(x.astype(np.float16) for x in (Q, K, V))),
    "a rule that each call traces": lambda: regard.attention(Q, K, V, score=lambda *x: rule(*x)),
    "masks": lambda: regard.attention(Q, K, V, mask=regard.window(40) & regard.documents(np.arange(300) // 90)),
    "a bias and dropout": lambda: regard.attention(Q, K, V, bias=BIAS, dropout=0.3, seed=5),
    "statistics": observed,
    "gradients": lambda: regard.attention_vjp(Q, K, V, DO, causal=True, score=regard.alibi(SLOPES)),
    "a tangent": lambda: regard.attention_jvp(Q, K, V, DO, causal=True),
    "second derivatives": lambda: regard.attention_vjp_jvp(Q, K, V, DO, dquery=DO),
    "weights": lambda: regard.weights(Q, K, rows=slice(100, 120), causal=True),
    "parts merged": merged,
    "heads": lambda: regard.multihead_attention(Q, K, V, num_heads=4),
    "linear attention": lambda: regard.linear_attention(Q, K, V, causal=True),
    "scores of heads": lambda: regard.insight.measure_heads(Q, K),
    "a plan": lambda: regard.plan(Q, K, V, causal=True),
}


def digest(result: Any) -> str:
    """Return the hash of all bits of a result."""
    if isinstance(result, np.ndarray):
        return sha256(result.tobytes()).hexdigest()
    if is_dataclass(result):
        return digest([getattr(result, field.name) for field in fields(result)])
    if isinstance(result, tuple | list):
        return sha256("".join(map(digest, result)).encode()).hexdigest()
    return sha256(repr(result).encode()).hexdigest()


def digests(names: list[str]) -> dict[str, str]:
    return {name: digest(CALLS[name]()) for name in names}


def in_threads(names: list[str], rounds: int) -> list[dict[str, str]]:
    """Return the digests of each thread; all begin at once, each with another call."""
    start = Barrier(THREADS)

    def work(n: int) -> list[dict[str, str]]:
        start.wait(LONG)
        return [digests(names[n % len(names) :] + names[: n % len(names)]) for _ in range(rounds)]

    with ThreadPoolExecutor(THREADS) as pool:
        return [found for each in pool.map(work, range(THREADS), timeout=LONG) for found in each]


def test_threads_that_call_at_once_get_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.runtime.threads._chosen", 2)
    expected = digests([*CALLS])
    for found in in_threads([*CALLS], rounds=3):
        assert found == expected


FIRST = ["attention", "gradients", "masks", "weights"]


def test_threads_that_compile_at_once_get_the_bits_of_one(tmp_path: Path) -> None:
    """In two processes with one empty cache, so that two threads of each want the same kernel first."""
    code = "import json, test_simultaneous_calls as x; print(json.dumps(x.in_threads(x.FIRST, rounds=1)))"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"REGARD_CACHE": str(tmp_path / "empty"), "PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    expected = [digests(FIRST)] * THREADS
    for process in both:
        out, _ = process.communicate(timeout=LONG)
        assert json.loads(out) == expected
