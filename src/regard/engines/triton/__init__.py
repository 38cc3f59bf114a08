"""Attention on NVIDIA GPUs: Triton kernels for PyTorch's CUDA tensors.

Without a GPU they run on Triton's interpreter. Rules become Triton functions that kernels call inside a tile. Bounds of
the rules decide on the device which tiles hold something visible, a chunk of tiles at a time. They are never stored.
For tests, and for callers who name the engine, arrays of the host are copied to the device, and results back.
"""

import functools
import os
from importlib.util import find_spec
from typing import Any

import numpy as np

from regard.core.problem import KNOWS as KNOWS
from regard.core.problem import Differential, Outputs, Problem
from regard.core.statistics import Statistic
from regard.engines.tiled.tiles import working_memory as working_memory

Array = np.ndarray[Any, np.dtype[Any]]

NAME = "triton"
ABOUT = "kernels for NVIDIA GPUs, O(n) memory"
DEVICES, NAMED_ONLY, SKIPS_TILES = True, False, True
WIDEST = 256
LEAST = (3, 8)  # the first Triton that compiles the kernels


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def state() -> str | None:
    """Return the reason why the engine cannot run here, or None."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"{package} is missing: pip install {package}"
    if interpreted():
        return None
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on the processor)"
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < LEAST:
        return f"Triton {triton.__version__} compiles no function that returns None: pip install 'triton>=3.8'"
    return None


def supports(p: Problem) -> str | None:
    if max(p.d, p.d_v) > WIDEST:
        return f"heads of at most {WIDEST} features, got d = {p.d} and d_v = {p.d_v}"
    return None


def forward(p: Problem, rows: range | None = None, into: Outputs | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    """Return the outputs of all rows and the statistics; entropy only if observed."""
    from regard.engines.triton.launch import devices

    return devices.called("forward", p, into)


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    from regard.engines.triton.launch import devices

    return devices.called("weights", p, lse, rows, cols)


def maps(p: Problem, lse: Array, rows: int, cols: int) -> tuple[Array, Array]:
    from regard.engines.triton.launch import devices

    return devices.called("maps", p, lse, rows, cols)


def backward(p: Problem, outputs: Outputs, ct: Outputs, into: Differential | None = None) -> Differential:
    from regard.engines.triton.launch import devices

    return devices.called("backward", p, outputs, ct)


def jvp(
    p: Problem, t: Differential, outputs: Outputs | None = None, into: Outputs | None = None
) -> tuple[Outputs, Outputs]:
    from regard.engines.triton.launch import devices

    return devices.called("jvp", p, t, outputs)


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    from regard.engines.triton.launch import devices

    return devices.called("backward_jvp", p, outputs, ct, t, d_outputs, d_ct)


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    from regard.engines.triton.launch import devices

    return devices.called("jvp_jvp", p, outputs, t, u, d_t, d_u)
