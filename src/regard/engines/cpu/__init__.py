"""Attention on the processor.

Kernels are written in Python and compiled by LLVM for the instruction set at hand.

Forward, backward and the tangents of both are kernels. lse and entropy are exact, and the largest weight comes with
them. Weights and some statistics start from that lse, in a second pass that computes the same scores. Few weights, and
statistics of many keys, run on `regard.engines.tiled`.

Without a rule or a bias, scores of float32 are logarithms of base 2. So they are infinite beyond 2.36e38, and not from
3.4e38 on: keys with such scores give NaN, or count as hidden if all of a row are below −2.36e38.
"""

import functools
import platform
from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from regard.arguments.packages import remedy
from regard.core.problem import KNOWS_PARTS, Differential, Outputs, Problem, SumShapes
from regard.core.statistics import (
    ENTROPY,
    LSE,
    Argmax,
    Largest,
    Pooled,
    Received,
    Statistic,
    TopWeights,
    Visible,
    WeightByDistance,
    WeightsOf,
    pooled,
)
from regard.engines import engines
from regard.engines.normalized import is_small, normalized, of_whole_rows, too_large
from regard.engines.observed import ForwardSums, basic, complete
from regard.rules import Node, once, order

Array = np.ndarray[Any, np.dtype[Any]]

NAME = "cpu"
ABOUT = "compiled for this processor, O(n) memory"
DEVICES, NAMED_ONLY, SKIPS_TILES = False, False, True
WIDEST = 1024  # features; tested in every dtype up to here, and nothing in the kernels ends there
LONGEST = 1024  # instructions of rules; 2 to 15 ms of compiling each, once for each kernel
KNOWS = KNOWS_PARTS
MACHINES = ("x86_64", "amd64", "aarch64", "arm64")


@functools.cache
def state() -> str | None:
    """Return the reason why it cannot run here, or None."""
    if platform.machine().lower() not in MACHINES:
        return f"no kernels for {platform.machine() or 'this processor'}"
    if find_spec("llvmlite") is None:
        return f"llvmlite is missing: {remedy('llvmlite')}"
    from regard.engines.cpu.target.instructions import refused

    return refused()


def supports(p: Problem) -> str | None:
    if max(p.d, p.d_v) > WIDEST:
        return f"heads of at most {WIDEST} features, got d = {p.d} and d_v = {p.d_v}"
    if p.dtype == np.float16 or (p.bias is not None and p.bias.dtype == np.float16):
        from regard.engines.cpu.target.instructions import chosen

        if chosen().name == "baseline":
            return "this processor does not convert float16"
    length = sum(_length(rule.node) for rule in (p.mask, p.score) if rule is not None)
    if length > LONGEST:
        return f"rules of at most {LONGEST} instructions, those of derivatives included, got {length}"
    return None


@once
def _length(node: Node) -> int:
    """Return the number of instructions of a rule and of its derivatives.

    Derivatives are those in the score and in entries of tables. Each counts the operations that it passes through,
    except sums with constants.
    """
    varies: dict[Node, int] = {}  # a bit for each derivative that is not 0
    derivatives = derivative_count = 0
    for x in order([node]):
        bits = shared = 0
        if x.op == "s" or (x.op == "gather" and x.kind == "float"):
            bits, derivatives = 1 << derivatives, derivatives + 1
        elif x.kind == "float":
            for arg in x.args:
                bits, shared = bits | varies[arg], bits & varies[arg]
            derivative_count += (shared if x.op in ("add", "subtract") else bits).bit_count()
        varies[x] = bits
    return len(varies) + derivative_count


@functools.cache
def _work() -> Any:
    """Return the module that needs the compiler.

    An import statement in each call would take a microsecond.
    """
    from regard.engines.cpu.schedule import work

    return work


def forward(p: Problem, rows: range | None = None, into: Outputs | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    """Return the outputs and the observed statistics, at least for `rows`.

    The entropy is None unless it is observed, and low unless `into` has it.
    """
    work, out = _work(), p.new_output() if into is None or into.out is None else into.out
    lse = np.empty(out.shape[:-1], p.compute) if into is None or into.lse is None else into.lse
    low = None if into is None else into.low
    if not p.observe:
        results = work.KernelResults(out, lse, None, None, low=low)
        work.run(p, work.chosen(), results, rows)
        return Outputs(out, lse, None, low), {}
    observe = basic(p.observe)
    best = [s for s in observe if isinstance(s, Argmax) or (isinstance(s, TopWeights) and s.of <= work.BEST[-1])]
    k = max((s.of or 1 for s in best), default=0)
    width = min(n for n in (0, *work.BEST) if n >= k)
    shape = p.shape(p.n_q, width)
    entropy = None if into is None else into.entropy
    results = work.KernelResults(
        out,
        lse,
        None if ENTROPY not in observe else np.empty_like(lse) if entropy is None else entropy,
        np.empty_like(lse) if Largest() in observe else None,
        np.empty(shape, p.compute) if best else None,
        np.empty(shape, np.int64) if best else None,
        low,
    )
    work.run(p, work.chosen(), results, rows)
    seen: dict[Statistic, Any] = {s: getattr(results, s.name) for s in observe if s in (LSE, ENTROPY, Largest())}
    for s in best:
        assert results.values is not None
        assert results.indices is not None
        values, indices = (np.ascontiguousarray(x[..., : s.of or 1]) for x in (results.values, results.indices))
        seen[s] = indices[..., 0] if isinstance(s, Argmax) else s.result([values, indices])
    passed = tuple(s for s in observe if isinstance(s, Visible | Received | WeightByDistance | Pooled))
    engine = engines()[NAME]
    sums = ForwardSums(p, lse, lambda p: engine.forward(p, rows), engine.maps, engine.weights)
    if passed:
        engine.require("maps", p)
        from regard.engines.cpu.schedule.second_work import second_pass

        seen |= second_pass(p, work.chosen(), lse, passed, sums.factor)
    tiled = engines()["tiled"]
    many = tuple(s for s in observe if isinstance(s, TopWeights) and s not in seen)
    if many:
        seen |= tiled.forward(replace(p, observe=many, value=p.value[..., :0]), rows)[1]
    seen |= {s: tiled.weights(p, lse, s.of, range(p.n_k)) for s in observe if isinstance(s, WeightsOf)}
    return Outputs(results.out, lse, results.entropy, low), complete(seen, sums)


def prepare(p: Problem, function: str = "forward", vary: Collection[str] = ()) -> Any:
    """Return forward or backward of a problem for other arrays, None if it takes too long to gain by that."""
    if function == "backward":
        from regard.engines.cpu.schedule import prepared_backward

        return prepared_backward.prepare(p, _work().chosen(), vary)
    from regard.engines.cpu.schedule import prepared

    return prepared.prepare(p, _work().chosen(), vary) if function == "forward" else None


def working_memory(p: Problem) -> int:
    """Estimate the bytes of scratch, query blocks and lists of tiles."""
    return int(_work().working_memory(p))


def carried(p: Problem, low: bool, t: Differential | None = None) -> SumShapes:
    """Return the shapes and dtypes of the sums that go on from a part of forward, or of its tangent along t."""
    from regard.engines.cpu.schedule import tangent_work, work
    from regard.engines.cpu.target.instructions import chosen

    return work.carried_forward(p, chosen(), low) if t is None else tangent_work.carried_tangents(p, chosen(), t, low)


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    """Return a part of the weights, of small problems by NumPy: a kernel takes longer to compile.

    Rows whose lse is too large take the part from whole rows.
    """
    if is_small(p):
        return engines()["tiled"].weights(p, lse, rows, cols)
    if len(cols) < p.n_k and too_large(lse[..., np.asarray(rows, int)]).any():
        return of_whole_rows(engines()[NAME].weights, p, lse, rows, cols)
    from regard.engines.cpu.schedule import weights_work
    from regard.engines.cpu.target.instructions import chosen

    return weights_work.weights(p, chosen(), lse, rows, cols)


def maps(p: Problem, lse: Array, rows: int, cols: int) -> tuple[Array, Array]:
    from regard.engines.cpu.schedule.second_work import second_pass
    from regard.engines.cpu.target.instructions import chosen

    mass, largest = pooled(rows, cols), pooled(rows, cols, "max")
    pooled_maps = second_pass(p, chosen(), lse, (mass, largest))
    return pooled_maps[mass], pooled_maps[largest]


def backward(p: Problem, outputs: Outputs, ct: Outputs, into: Differential | None = None) -> Differential:
    from regard.engines.cpu.schedule.backward_work import backward as run
    from regard.engines.cpu.target.instructions import chosen

    return run(p, chosen(), outputs, normalized(p, outputs, ct, lambda *x: engines()[NAME].maps(*x)), into)


def jvp(
    p: Problem, t: Differential, outputs: Outputs | None = None, into: Outputs | None = None
) -> tuple[Outputs, Outputs]:
    """Return forward's outputs, to the bit, and their tangents.

    Given outputs are not computed again.
    """
    from regard.engines.cpu.schedule import tangent_work
    from regard.engines.cpu.target.instructions import chosen

    return tangent_work.jvp(p, chosen(), t, outputs, into)


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    from regard.engines.cpu.schedule import backward_tangent_work
    from regard.engines.cpu.target.instructions import chosen

    return backward_tangent_work.backward_jvp(p, chosen(), outputs, ct, t, d_outputs, d_ct)


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    return engines()["tiled"].jvp_jvp(p, outputs, t, u, d_t, d_u)
