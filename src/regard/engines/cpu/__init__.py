"""Attention on the processor: kernels written in Python, compiled by LLVM for the instruction set at hand.

Forward is a kernel; its lse and entropy are exact, and the largest weight comes with it. Derivatives, weights and the
other statistics start from that lse and run on `regard.engines.tiled`, in O(n) memory as well.
"""

import functools
import platform
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from regard.engines import tiled
from regard.observing import Statistic
from regard.problem import Differential, Outputs, Problem

Array = np.ndarray[Any, np.dtype[Any]]

NAME = "cpu"
ABOUT = "compiled for this processor, O(n) memory"
WIDEST = 512
ENTROPY = Statistic("entropy")
MACHINES = ("x86_64", "amd64", "aarch64", "arm64")


@functools.cache
def state() -> str | None:
    """Why it cannot run here; found out without loading the compiler."""
    if platform.machine().lower() not in MACHINES:
        return f"no kernels for {platform.machine() or 'this processor'}"
    if find_spec("llvmlite") is None:
        return "llvmlite is missing: pip install llvmlite"
    return None


def supports(p: Problem) -> str | None:
    if max(p.d, p.d_v) > WIDEST:
        return f"heads of at most {WIDEST} features, got d = {p.d} and d_v = {p.d_v}"
    if p.dtype == np.float16 or (p.bias is not None and p.bias.dtype == np.float16):
        from regard.engines.cpu.target import chosen

        if chosen().name == "baseline":
            return "this processor does not convert float16"
    return None


def forward(p: Problem, rows: range | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    """Outputs (entropy only where it is observed) and what is observed, at least for `rows` if they are given."""
    from regard.engines.cpu.target import chosen
    from regard.engines.cpu.work import Results, run

    names = {s.name for s in p.observe}
    lse = np.empty(p.shape(p.n_q), p.compute)
    results = Results(
        p.new_output(),
        lse,
        np.empty_like(lse) if "entropy" in names else None,
        np.empty_like(lse) if "max" in names else None,
    )
    run(p, chosen(), results, rows)
    seen: dict[Statistic, Any] = {}
    others = tuple(s for s in p.observe if s.name in ("argmax", "top"))
    if others:
        seen |= tiled.forward(replace(p, observe=others, value=p.value[..., :0]), rows)[1]
    for s in p.observe:
        if s.name in ("lse", "entropy", "max"):
            seen[s] = getattr(results, s.name)
        elif s.name == "received":
            seen[s] = tiled.received(p, lse)
    return Outputs(results.out, lse, results.entropy), {s: seen[s] for s in p.observe}


def again(p: Problem) -> Any:
    """What runs a short call once more: a function of the addresses of query, key, value, out and lse, or None."""
    from regard.engines.cpu import work
    from regard.engines.cpu.target import chosen

    return work.again(p, chosen())


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    return tiled.weights(p, lse, rows, cols)


def backward(p: Problem, outputs: Outputs, ct: Outputs) -> Differential:
    return tiled.backward(p, outputs, ct)


def jvp(p: Problem, t: Differential, outputs: Outputs | None = None) -> tuple[Outputs, Outputs]:
    """The outputs are those of `forward`, to the bit."""
    return tiled.jvp(p, t, outputs or forward(replace(p, observe=(ENTROPY,)))[0])


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    return tiled.backward_jvp(p, outputs, ct, t, d_outputs, d_ct)
