"""Peak memory of one call beyond inputs and outputs, in a process of its own."""

import contextlib
import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

import regard
from benchmarks import naive
from benchmarks.measure import Call, fresh
from cases import case
from regard.core.statistics import NAMES, Profile, Top

Array = np.ndarray[Any, np.dtype[Any]]

WINDOW = 256
SMALL = 256  # positions of a first call, so that compiling and loading do not count
D = 64


def inputs(n: int) -> tuple[Array, Array, Array, dict[str, Any]]:
    """Return query, key and value, (2, 1, n, 64) each, and every option."""
    return case("everything", h=1, h_kv=1, n_q=n, n_k=n, d=D, d_v=D).inputs(np.float32)


def regard_everything(n: int, engine: str | None) -> Call:
    q, k, v, options = inputs(n)
    observe: list[Any] = [*NAMES, regard.top(8), regard.pooled(64, 64)]
    return lambda: regard.attention(q, k, v, engine=engine, observe=observe, **options)


def regard_window(n: int, engine: str | None) -> Call:
    """Prepare a causal window with statistics of queries and of keys."""
    q, k, v, _ = inputs(n)
    options: dict[str, Any] = {"causal": True, "mask": regard.window(WINDOW), "engine": engine}
    return lambda: regard.attention(q, k, v, observe=["entropy", "received", regard.top(4)], **options)


def regard_causal(n: int, engine: str | None) -> Call:
    q, k, v, _ = inputs(n)
    return lambda: regard.attention(q, k, v, engine=engine, causal=True)


def numpy_causal(n: int, engine: str | None) -> Call:
    q, k, v, _ = inputs(n)
    return lambda: naive.attention(q, k, v, causal=True)


def torch_causal(n: int, engine: str | None) -> Call:
    import torch

    tensors = [torch.from_numpy(x) for x in inputs(n)[:3]]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)


def torch_window(n: int, engine: str | None) -> Call:
    """Prepare a causal window; PyTorch needs an n × n mask for it."""
    import torch

    tensors = [torch.from_numpy(x) for x in inputs(n)[:3]]

    def call() -> Any:
        i = torch.arange(n)
        mask = (i[:, None] >= i) & (i[:, None] - i <= WINDOW)
        return torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask)

    return call


def training(n: int) -> tuple[Array, ...]:
    """Return query, key, value, dO and a trained bias.

    (1, 2, n, 64) each, the bias (1, 2, 1, n).
    """
    rng = np.random.default_rng(0)
    arrays = (rng.standard_normal((1, 2, n, D), np.float32) for _ in range(4))
    return (*arrays, rng.standard_normal((1, 2, 1, n), np.float32))


def regard_training(n: int, engine: str | None) -> Call:
    """Prepare forward and backward."""
    q, k, v, dout, bias = training(n)
    options: dict[str, Any] = {"causal": True, "bias": bias, "dropout": 0.1, "seed": 1, "engine": engine}

    def call() -> Any:
        out, seen = regard.attention(q, k, v, observe=["lse"], **options)
        return out, regard.attention_vjp(q, k, v, dout, outputs=regard.Outputs(out, seen.lse, None), **options)

    return call


def torch_training(n: int, engine: str | None) -> Call:
    """Prepare the same in PyTorch, with causal mask and bias as one n × n bias."""
    import torch

    q, k, v, dout, bias = (torch.from_numpy(x).requires_grad_() for x in training(n))

    def call() -> Any:
        i = torch.arange(n)
        mask = torch.where(i[:, None] >= i, bias, -torch.inf)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)
        return out, *torch.autograd.grad(out, (q, k, v, bias), dout)

    return call


CALLS: dict[str, Callable[[int, str | None], Call]] = {
    "regard": regard_everything,
    "regard, causal": regard_causal,
    "PyTorch, causal": torch_causal,
    "PyTorch, window": torch_window,
    "NumPy, causal": numpy_causal,
}
FORWARD = tuple(CALLS)
"""Options of forward; only `regard` has "every option"."""
CALLS |= {
    "regard, window and statistics": regard_window,
    "regard, training with bias and dropout": regard_training,
    "PyTorch, training with bias and dropout": torch_training,
}


def extra(name: str, n: int, engine: str | None = None, threads: int = 1) -> float:
    """Return the peak bytes of a call beyond those before it and its result.

    Raises RuntimeError if its process does not survive.
    """
    code = "from benchmarks.memory import main; main()"
    return float(fresh(code, name, n, engine or "", threads))


def main() -> None:
    name, n, engine, threads = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None, int(sys.argv[4])
    if not Path("/proc/self/status").exists():
        raise SystemExit("the peak of memory is known on Linux alone")
    regard.set_num_threads(threads)
    CALLS[name](SMALL, engine)()
    call = CALLS[name](n, engine)
    with contextlib.suppress(AttributeError):  # a call must not reuse freed memory unseen
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # without a reset, the peak is at least that of a small call
        Path("/proc/self/clear_refs").write_text("5")
    stay_within_memory()
    before = memory("VmRSS")
    try:
        result = call()
    except (MemoryError, RuntimeError) as error:
        raise SystemExit("out of memory" if "alloc" in str(error) else str(error)) from None
    print(json.dumps(max(memory("VmHWM") - before - size(result), 0)))


def size(result: Any) -> int:
    """Return the bytes of all results of a call."""
    if isinstance(result, tuple | list):
        return sum(map(size, result))
    if isinstance(result, regard.Seen):
        return sum(map(size, result.values()))
    if isinstance(result, regard.Differential):
        arrays = result.query, result.key, result.value, result.bias, result.sink, *result.tables.values()
        return sum(x.nbytes for x in arrays if x is not None)
    if isinstance(result, (Top, Profile)):
        return sum(getattr(result, field.name).nbytes for field in fields(result))
    return int(result.nbytes)


def memory(name: str, file: str = "/proc/self/status") -> int:
    """Return VmRSS, VmHWM and MemAvailable in bytes.

    The first two are of this process, the third of the machine.
    """
    for line in Path(file).read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def stay_within_memory() -> None:
    """Limit this process to the memory of the machine.

    A call that needs more then fails alone.
    """
    import resource

    limit = memory("VmSize") + int(memory("MemAvailable", "/proc/meminfo") * 0.9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
