"""Attention on NVIDIA GPUs: kernels in Triton, for CUDA tensors of PyTorch; on Triton's interpreter without a GPU.

Rules become Triton functions that kernels call inside a tile. Which tiles hold something visible is decided on the
device by bounds of the rules, a chunk of tiles at a time, and never kept.
"""

import functools
import os
from importlib.util import find_spec
from typing import Any

import numpy as np

from regard.engines.observed import basic, complete
from regard.observing import Statistic
from regard.problem import Differential, Outputs, Problem

Array = np.ndarray[Any, np.dtype[Any]]

NAME = "triton"
ABOUT = "kernels for NVIDIA GPUs, O(n) memory"
WIDEST = 256


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def state() -> str | None:
    """Why it cannot run here."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"{package} is missing: pip install {package}"
    if interpreted():
        return None
    import torch

    return (
        None if torch.cuda.is_available() else "no CUDA device (TRITON_INTERPRET=1 runs the kernels on the processor)"
    )


def supports(p: Problem) -> str | None:
    if max(p.d, p.d_v) > WIDEST:
        return f"heads of at most {WIDEST} features, got d = {p.d} and d_v = {p.d_v}"
    if p.device is None and not interpreted():
        return "the arrays are not on a CUDA device"
    return None


def forward(p: Problem, rows: range | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    """Outputs (entropy only where it is observed), of all rows, and what is observed."""
    from regard.engines.triton import forward_work, statistics

    observe = basic(p.observe)
    names = frozenset(s.name for s in observe) & {"entropy", "max", "argmax", "visible"}
    outputs, found = forward_work.forward(p, names)
    assert outputs.lse is not None
    seen: dict[Statistic, Any] = {s: found[s.name] for s in observe if s.name in found}
    seen |= statistics.second_pass(p, outputs.lse, tuple(s for s in observe if s not in seen))
    return outputs, complete(p, outputs.lse, seen, forward)


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    from regard.engines.triton import statistics

    return statistics.part(p, lse, rows, cols)


def backward(p: Problem, outputs: Outputs, ct: Outputs) -> Differential:
    from regard.engines.triton import backward_work

    return backward_work.backward(p, outputs, ct)


def jvp(p: Problem, t: Differential, outputs: Outputs | None = None) -> tuple[Outputs, Outputs]:
    from regard.engines.triton import backward_work

    return backward_work.jvp(p, t, outputs)


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    from regard.engines.triton import backward_work

    return backward_work.backward(p, outputs, ct, backward_work.Way(t, d_outputs, d_ct))
