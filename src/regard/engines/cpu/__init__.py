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
from regard.engines.observed import basic, complete
from regard.observing import Profile, Statistic, Top
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
    from regard.engines.cpu.work import BEST, Results, run

    observe = basic(p.observe)
    names = {s.name for s in observe}
    lse = np.empty(p.shape(p.n_q), p.compute)
    results = Results(
        p.new_output(),
        lse,
        np.empty_like(lse) if "entropy" in names else None,
        np.empty_like(lse) if "max" in names else None,
    )
    k = max((s.of if s.name == "top" else 1 for s in observe if s.name in ("top", "argmax")), default=0)
    width = next((n for n in BEST if n >= k), 0) if k else 0
    if width:
        shape = p.shape(p.n_q, width)
        results = results._replace(values=np.empty(shape, p.compute), indices=np.empty(shape, np.int64))
    run(p, chosen(), results, rows)
    seen: dict[Statistic, Any] = {s: getattr(results, s.name) for s in observe if s.name in ("lse", "entropy", "max")}
    if results.values is not None and results.indices is not None:
        for s in observe:
            if s.name == "argmax":
                seen[s] = np.ascontiguousarray(results.indices[..., 0])
            elif s.name == "top":
                best = (results.values, results.indices)
                seen[s] = Top(*(np.ascontiguousarray(x[..., : s.of]) for x in best))
    seen |= passed(p, lse, tuple(s for s in observe if s.name in ("visible", "received", "profile", "pooled")))
    others = tuple(s for s in observe if s.name == "top" and s not in seen)
    if others:
        seen |= tiled.forward(replace(p, observe=others, value=p.value[..., :0]), rows)[1]
    seen |= tiled.second_pass(p, lse, tuple(s for s in observe if s not in seen))
    return Outputs(results.out, lse, results.entropy), complete(p, lse, seen, lambda p: forward(p, rows))


def passed(p: Problem, lse: Array, observe: tuple[Statistic, ...]) -> dict[Statistic, Any]:
    """What a second pass finds, given lse."""
    if not observe:
        return {}
    from regard.engines.cpu.second_work import second_pass
    from regard.engines.cpu.target import chosen

    found: dict[Statistic, Any] = dict(second_pass(p, chosen(), lse, observe))
    profile = Statistic("profile")
    return found | ({profile: Profile(found[profile], p.distances)} if profile in found else {})


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    return tiled.weights(p, lse, rows, cols)


def backward(p: Problem, outputs: Outputs, ct: Outputs) -> Differential:
    from regard.engines.cpu.backward_work import backward as run
    from regard.engines.cpu.target import chosen

    return run(p, chosen(), outputs, ct)


def jvp(p: Problem, t: Differential) -> tuple[Outputs, Outputs]:
    """The outputs are those of `forward`, to the bit."""
    _, tangent = tiled.jvp(p, t)
    return forward(replace(p, observe=(ENTROPY,)))[0], tangent
