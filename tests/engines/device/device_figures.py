"""Compare `device` with SDPA's math path and with `tiled`, in turns: taskset -c 0 python device_figures.py [ROUNDS].

8 heads, n = 1,024, d = 64, float32, one thread; processor time. Ratios are medians over the rounds.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard

Q, K, V, DOUT = np.random.default_rng(0).standard_normal((4, 8, 1024, 64), np.float32)


def math(causal: bool, backward: bool) -> Any:
    q, k, v = (torch.from_numpy(x)[None].requires_grad_(backward) for x in (Q, K, V))
    with sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(backward):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.autograd.grad(out, (q, k, v), torch.from_numpy(DOUT)[None]) if backward else out


def plain(causal: bool, backward: bool) -> Any:
    if backward:
        return regard.attention_vjp(Q, K, V, DOUT, causal=causal, engine="device")
    return regard.attention(Q, K, V, causal=causal, engine="device")


def observed(engine: str) -> Any:
    options: dict[str, Any] = {"causal": True, "score": regard.alibi(np.geomspace(0.5, 1 / 256, 8)), "engine": engine}
    out, seen = regard.attention(Q, K, V, observe=["lse", "entropy"], **options)
    outputs = regard.Outputs(out, seen.lse, seen.entropy)
    return regard.attention_vjp(Q, K, V, DOUT, dentropy=np.ones_like(seen.entropy), outputs=outputs, **options)


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def compare(what: str, call: Callable[[], Any], other: Callable[[], Any], rounds: int) -> None:
    call(), other()
    times = [(seconds(call), seconds(other)) for _ in range(rounds)]
    ours, theirs = (median(x) for x in zip(*times, strict=True))
    print(f"{what}: {ours * 1e3:.0f} ms, {median(a / b for a, b in times):.2f} × {theirs * 1e3:.0f} ms", flush=True)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    regard.set_num_threads(1)
    for causal in (False, True):
        for backward in (False, True):
            what = f"{'causal, ' if causal else ''}{'forward and backward' if backward else 'forward'}"
            compare(what, lambda: plain(causal, backward), lambda: math(causal, backward), rounds)  # noqa: B023
    compare("ALiBi, entropy, gradients, × tiled", lambda: observed("device"), lambda: observed("tiled"), rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
