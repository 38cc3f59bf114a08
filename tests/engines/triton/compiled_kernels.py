"""Compiles the kernels of the triton engine for devices that are not there, and prints a line for each.

python tests/engines/triton/compiled_kernels.py dtype capability:kernel,kernel capability: (all of them)
"""

import sys
from typing import Any

import ml_dtypes
import numpy as np

from cases import case
from regard.core.problem import Differential, Outputs
from regard.engines.triton.launch import derivatives, forward_launch, statistics
from regard.engines.triton.launch.launching import Launch
from regard.ops.normalization import problem_from

DTYPES = {"bfloat16": ml_dtypes.bfloat16} | {name: np.dtype(name) for name in ("float16", "float32", "float64")}


LARGE: set[int] = set()  # launches of a plain causal call, whose tiles are as large as they are in practice
DEEP: set[int] = set()  # launches of a call with two leading dimensions


def launches(dtype: Any) -> list[Launch]:
    """Every kernel of a call that has every option, with the arguments it would be run with."""
    made: list[Launch] = []
    run, scatter = Launch.run, derivatives.scatter
    Launch.run = lambda launch: made.extend([launch, *launch.then])  # type: ignore[method-assign]
    derivatives.scatter = lambda *args: None
    try:
        q, k, v, options = case("everything").inputs(dtype)
        p = problem_from(q, k, v, **options)
        rows = np.zeros(p.shape(p.n_q), p.compute)
        outputs = Outputs(p.new_output(), rows, rows)
        t = Differential(p.query, p.key, p.value, p.bias, p.sink, {x: x.array for x in p.rules.tables})
        forward_launch.forward(p, frozenset(["entropy", "argmax", "visible"]))
        statistics.part(p, rows, range(p.n_q), range(p.n_k))
        derivatives.jvp(p, t, outputs)
        derivatives.jvp_jvp(p, outputs, t, t, outputs, outputs)
        derivatives.backward(p, outputs, outputs)
        derivatives.backward(p, outputs, outputs, derivatives.Direction(t, outputs, outputs))
        long = problem_from(q[..., :1, :], *(np.repeat(x, 400, axis=-2) for x in (k, v)))
        forward_launch.forward(long)  # keys are split
        first = len(made)
        x = np.zeros((2, 2, 2, 20, 16), dtype)
        p = problem_from(x, x, x, bias=np.zeros((2, 2, 2, 1, 20), dtype))  # two leading dimensions
        rows = np.zeros(p.shape(p.n_q), p.compute)
        forward_launch.forward(p)
        derivatives.backward(p, Outputs(x, rows, None), Outputs(x, None, None))
        DEEP.update(map(id, made[first:]))
        first = len(made)
        x = np.zeros((1, 512, 64), dtype)
        p = problem_from(x, x, x, causal=True)
        rows = np.zeros(p.shape(p.n_q), p.compute)
        forward_launch.forward(p)
        derivatives.backward(p, Outputs(x, rows, None), Outputs(x, None, None))
        LARGE.update(map(id, made[first:]))
    finally:
        Launch.run, derivatives.scatter = run, scatter  # type: ignore[method-assign]
    return made


def name_of(launch: Launch) -> str:
    along = "tangent of " if launch.forms.get("ALONG") else ""
    split = "split " if launch.kernel.__name__ == "forward" and launch.forms["W"].SPLITS > 1 else ""
    size = "large " if id(launch) in LARGE else "deep " if id(launch) in DEEP else ""
    return size + along + split + str(launch.kernel.__name__)


if __name__ == "__main__":
    dtype, *wanted = sys.argv[1:]
    every = launches(DTYPES[dtype])
    for capability, names in (part.split(":") for part in wanted):
        for launch in (x for x in every if not names or name_of(x) in names.split(",")):
            made = launch.compile(int(capability))
            assert made.asm["cubin"]
            copies = made.asm["ptx"].count("cp.async.")
            print(f"{name_of(launch)}: sm_{capability}, {made.metadata.shared} bytes shared, {copies} copies behind")
