"""Parts of a call whose sequence lies on several devices: what one device computes in one step.

Nothing here depends on JAX. A device's queries stay while keys and values pass by, in ascending order. For the
gradients of key and value its keys stay while queries and their outputs pass by, in descending order. Both are the
orders of one process (`regard.parallel.programs`), so the bits are too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.core.problem import CallPart, Carried, Outputs, Problem, SumShapes, collapse
from regard.engines import Engine, choose
from regard.jax.task import PrimitiveTask, SequenceStep, Shape, problem, transpose
from regard.parallel.programs import check_lse, part_of, untrained

Array = np.ndarray[Any, np.dtype[Any]]
SUM = "sum."


def carried(task: PrimitiveTask, operands: Mapping[str, tuple[Shape, np.dtype[Any]]]) -> SumShapes:
    """Return the shapes and dtypes of the sums that go on from a step, from those of its operands."""
    assert task.step is not None
    hollow = {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (shape, dtype) in operands.items()}
    p, engine = part(task, as_called(task, hollow), {})
    if not task.step.gradients:
        return engine.carried(p, task.call.low)
    names = ("query",) if task.step.gradients == "query" else ("key", "value")
    return {name: p.gradient_sums[name] for name in names}


def run(task: PrimitiveTask, operands: Sequence[Array], results: Sequence[Array]) -> None:
    """Compute a step into `results`; the last has those of the task."""
    assert task.step is not None
    x = as_called(task, task.named(operands))
    y = as_called(task, dict(zip(task.results, results, strict=True)))
    sums: dict[str, Array] = {}
    for name in () if task.step.first else task.step.sums:
        sums[name] = y[SUM + name]
        if sums[name].ctypes.data != x[SUM + name].ctypes.data:
            sums[name][...] = x[SUM + name]
    p, engine = part(task, x, sums)
    found = forward(p, engine, task) if task.kind == "forward" else backward(p, engine, task.step, x)
    for name in task.step.sums:
        if sums.get(name) is not y[SUM + name] and y[SUM + name].size:
            y[SUM + name][...] = sums[name]
    y["turn"][...] = 0
    for name in task.results[len(task.step.sums) + 1 :]:
        y[name][...] = found[name]


def as_called(task: PrimitiveTask, x: Mapping[str, Array]) -> dict[str, Array]:
    """Return views (..., h, n, d) of arrays; sums have that order already."""
    if task.call.layout != "bnhd":
        return dict(x)
    return {name: a if name.startswith(SUM) else transpose(name, a) for name, a in x.items()}


def part(task: PrimitiveTask, x: Mapping[str, Array], sums: dict[str, Array]) -> tuple[Problem, Engine]:
    """Return the part of the call that a step computes on this device, and its engine."""
    step, rank = task.step, int(x["rank"])
    assert step is not None
    names = ("query", "key", "value")
    sizes = zip(names, (step.rows, step.keys, step.keys), strict=True)
    hollow = {
        name: np.broadcast_to(x[name][..., :1, :], (*x[name].shape[:-2], n, x[name].shape[-1])) for name, n in sizes
    }
    p, _ = problem(task, {**x, **hollow})
    passing, stays = range(step.start, step.stop), x["key" if step.gradients == "key" else "query"].shape[-2]
    own = range(rank * stays, (rank + 1) * stays)
    rows, keys = (passing, own) if step.gradients == "key" else (own, passing)
    moving, p = Carried(step.first, step.last, sums), untrained(p)
    query, key = (None, moving) if step.gradients == "key" else (moving, None)
    place = CallPart(p.n_q, p.keys, query, key, p.bias_axes)
    p = part_of(p, place, rows, keys, *(x[name] for name in names))
    return p, choose(p, task.call.engine, task.kind)


def forward(p: Problem, engine: Engine, task: PrimitiveTask) -> dict[str, Any]:
    """Return the outputs by name, of the last step alone."""
    into = Outputs(None, None, None, p.new_output()) if task.call.low else None
    outputs, _ = engine.forward(p, None, into)
    return outputs._asdict()


def backward(p: Problem, engine: Engine, step: SequenceStep, x: Mapping[str, Array]) -> dict[str, Any]:
    """Return the gradients by name, of the last step alone."""

    def outputs(prefix: str) -> Outputs:
        out, lse, entropy, low = (x.get(prefix + name) for name in Outputs._fields)
        return Outputs(out, lse, entropy, low)

    known = outputs("")
    check_lse(known.lse)
    g = engine.backward(p, known, outputs("ct."))
    assert p.part is not None

    def own(name: str, part: Carried | None) -> Any:
        """Return a gradient, summed in the dtype of sums over axes along which its input was broadcast."""
        whole = getattr(g, name)
        if part is None or whole is None or whole.shape == x[name].shape:
            return whole
        return collapse(part.sums[name], x[name].shape).astype(whole.dtype)

    found = {"query": own("query", p.part.query), "key": own("key", p.part.key), "value": own("value", p.part.key)}
    if step.last and p.sink is not None and step.gradients == "query":
        assert p.part.query is not None
        found["sink"] = p.sink_gradient(p.part.query.sums["sink"])
    return found
