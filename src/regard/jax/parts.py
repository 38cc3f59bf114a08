"""Parts of a call whose sequence lies on several devices: what one device computes in one step.

Nothing here depends on JAX. A device's queries stay while keys and values pass by, in ascending order. For the
gradients of key and value its keys stay while queries and their outputs pass by, in descending order. Both are the
orders of one process (`regard.parallel.programs`), so the bits are too. Gradients of bias, sink and tables follow from
the sums of all devices in a step of their own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.core.problem import CallPart, Carried, Differential, Outputs, Problem, SumShapes, collapse
from regard.engines import Engine, choose
from regard.jax.task import (
    SUM,
    Arrays,
    Function,
    PrimitiveTask,
    SequenceStep,
    Shape,
    apply,
    one_call,
    outputs_of,
    problem,
    tangents_of,
)
from regard.parallel.programs import bias_part, check_lse, part_of, untrained
from regard.rules import Table

Array = np.ndarray[Any, np.dtype[Any]]
OPERANDS = ("query", "key", "value")


def carried(task: PrimitiveTask, operands: Mapping[str, tuple[Shape, np.dtype[Any]]]) -> SumShapes:
    """Return the shapes and dtypes of the sums that go on from a step, from those of its operands."""
    assert task.step is not None
    if task.step.gradients in FUNCTIONS:
        return {}
    hollow = {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (shape, dtype) in operands.items()}
    shapes = DevicePart.of(task, one_call(task, hollow), {}).carried()
    before = () if task.merged else task.sizes  # sums of elements that are computed one after the other
    return {name: ((*before, *shape), dtype) for name, (shape, dtype) in shapes.items()}


def run(task: PrimitiveTask, operands: Sequence[Array], results: Sequence[Array]) -> None:
    """Compute a step into `results`."""
    assert task.step is not None
    y = dict(zip(task.results, results, strict=True))
    y.pop("turn")[...] = 0
    apply(FUNCTIONS.get(task.step.gradients, of_part), task, task.named(operands), y)


def of_part(task: PrimitiveTask, x: Arrays, y: Arrays) -> list[tuple[str, Array]]:
    """Return the results of a part by name, and store the sums that go on."""
    step = task.step
    assert step is not None
    sums: dict[str, Array] = {}
    for name in () if step.first else step.sums:
        sums[name] = y[SUM + name]
        if sums[name].ctypes.data != x[SUM + name].ctypes.data:
            sums[name][...] = x[SUM + name]
    values = DevicePart.of(task, x, sums).compute()
    for name in step.sums:
        if sums.get(name) is not y[SUM + name] and y[SUM + name].size:
            y[SUM + name][...] = sums[name]
    return [(name, values[name]) for name in step.returns]


def whole_call(task: PrimitiveTask, x: Arrays) -> tuple[Problem, dict[str, Table]]:
    """Return the call of all devices, whose query, key and value have but a shape, and its trained tables by name."""
    step = task.step
    assert step is not None
    sizes = zip(OPERANDS, (step.rows, step.keys, step.keys), strict=True)
    hollow = {
        name: np.broadcast_to(x[name][..., :1, :], (*x[name].shape[:-2], n, x[name].shape[-1])) for name, n in sizes
    }
    p, tables = problem(task, {**x, **hollow})
    return (p if task.wrt else untrained(p)), tables


def own_rows(step: SequenceStep, x: Arrays) -> range:
    """Return the positions of a device's own rows, or keys where rows pass by."""
    count = x["key" if step.gradients == "key" else "query"].shape[-2]
    return range(int(x["rank"]) * count, (int(x["rank"]) + 1) * count)


@dataclass(frozen=True, eq=False)
class DevicePart:
    """The part of a call that a step computes on one device.

    whole: the call of all devices. part: the problem of some rows and keys. tables: the trained ones by name.
    """

    task: PrimitiveTask
    step: SequenceStep
    x: Arrays
    whole: Problem
    part: Problem
    tables: Mapping[str, Table]
    rows: range
    keys: range
    engine: Engine

    @classmethod
    def of(cls, task: PrimitiveTask, x: Arrays, sums: dict[str, Array]) -> "DevicePart":
        step = task.step
        assert step is not None
        p, tables = whole_call(task, x)
        own, passing = own_rows(step, x), range(step.start, step.stop)
        rows, keys = (passing, own) if step.gradients == "key" else (own, passing)
        moving = Carried(step.first, step.last, sums)
        query, key = (None, moving) if step.gradients == "key" else (moving, None)
        place = CallPart(p.n_q, p.keys, query, key, p.bias_axes)
        part = part_of(p, place, rows, keys, *(x[name] for name in OPERANDS))
        return cls(task, step, x, p, part, tables, rows, keys, choose(part, task.call.engine, task.kind))

    @property
    def sums(self) -> dict[str, Array]:
        """The sums that go on."""
        assert self.part.part is not None
        carried = self.part.part.query or self.part.part.key
        assert carried is not None
        return carried.sums

    def carried(self) -> SumShapes:
        """Return the shapes and dtypes of the sums that go on."""
        if self.task.kind == "forward":
            return self.engine.carried(self.part, self.task.call.low)
        if self.task.kind == "jvp":
            return self.engine.carried(self.part, "low" in self.x, self.tangents())
        p, names = self.part, ("query",) if self.step.gradients == "query" else ("key", "value")
        shapes = {name: p.gradient_sums[name] for name in names}
        for name, _ in self.task.wrt:
            if name not in OPERANDS:
                shapes[name] = self.shared_sums(name), p.compute
        return shapes

    def shared_sums(self, name: str) -> Shape:
        """Return the shape of the sums for the gradient of a bias, a sink or a table."""
        if name in self.tables:
            return self.tables[name].shape
        if name == "sink":
            return self.part.shape(self.part.n_q)
        shape = self.part.bias_sums
        return (*shape[:-1], self.step.keys) if all(self.whole.bias_axes) else shape

    def compute(self) -> Mapping[str, Any]:
        """Compute the part, and return its results by name, which are whole in the last step alone."""
        p = self.part
        if self.task.kind == "forward":
            into = Outputs(None, None, None, p.new_output()) if self.task.call.low else None
            return self.engine.forward(p, None, into)[0]._asdict()
        outputs, ct, d, d_ct = (outputs_of(self.x, prefix, p) for prefix in ("", "ct.", "t.", "t.ct."))
        if self.task.kind == "jvp":
            return self.engine.jvp(p, self.tangents(), outputs)[1]._asdict()
        if self.task.kind == "backward":
            return self.gradients(self.engine.backward(p, outputs, ct))
        return self.gradients(self.engine.backward_jvp(p, outputs, ct, self.tangents(), d, d_ct))

    def tangents(self) -> Differential:
        """Return the tangents of the part's inputs."""
        t = tangents_of(self.x, "t.", self.tables)
        return t if t.bias is None else replace(t, bias=bias_part(t.bias, self.rows, self.keys))

    def gradients(self, g: Differential) -> Mapping[str, Any]:
        """Return the gradients that have a sequence; sum those of others."""
        for name, _ in self.task.wrt:
            if name in self.tables or (name == "bias" and all(self.whole.bias_axes)):
                self.add(name, g)
        return {name: self.collapsed(name, getattr(g, name)) for name in OPERANDS}

    def add(self, name: str, g: Differential) -> None:
        """Add the gradient of a table to its sums, or store that of a bias with rows and keys."""
        if self.step.first:
            self.sums[name] = np.zeros(self.shared_sums(name), self.part.compute)
        if name in self.tables:
            self.sums[name] += g.tables[self.tables[name]]
        else:
            self.sums[name][..., self.keys.start : self.keys.stop] = g.bias

    def collapsed(self, name: str, gradient: Array | None) -> Any:
        """Return a gradient, summed in the dtype of sums over axes along which its input was broadcast."""
        if gradient is None or gradient.shape == self.x[name].shape:
            return gradient
        return collapse(self.sums[name], self.x[name].shape).astype(gradient.dtype)


def whole(task: PrimitiveTask, x: Arrays, y: Arrays) -> Iterable[tuple[str, Array]]:
    """Return gradients of bias, sink and tables on one device, from the sums of all.

    Devices' gradients are added: so the first has them, and others have 0. A bias with rows and keys has a device's own
    rows alone.
    """
    step = task.step
    assert step is not None
    p, tables = whole_call(task, x)
    gradients = {name: np.zeros(x[name].shape, x[name].dtype) for name in step.returns}
    with np.errstate(all="ignore"):
        for name, into in gradients.items():
            if name == "bias" and all(p.bias_axes):
                rows = own_rows(step, x)
                into[..., rows.start : rows.stop, :] = x[SUM + name]
            elif int(x["rank"]) == 0:
                into[...] = gradient_of(name, x[SUM + name], p, tables)
    return gradients.items()


def check(task: PrimitiveTask, x: Arrays, y: Arrays) -> Iterable[tuple[str, Array]]:
    """Raise ValueError if an lse of any device is too large, and return nothing."""
    check_lse(np.atleast_1d(x["largest"]))
    return ()


FUNCTIONS: dict[str, Function] = {"whole": whole, "check": check}
"""Functions of the steps that are no part of a call."""


def gradient_of(name: str, sums: Array, p: Problem, tables: Mapping[str, Table]) -> Any:
    """Return the gradient of a bias, a sink or a table from the sums of all devices; those of tables are by device."""
    if name in tables:
        return sum(sums[1:], sums[0])
    if name == "sink":
        return p.sink_gradient(sums)
    assert p.bias is not None
    return collapse(sums, p.bias.shape)
