"""Attention and four derivatives of tensors in memory, by an engine.

All are functions of (call, *tensors or None). Nothing is differentiated here, and no mode of PyTorch sees the work.
"""

from typing import Any

import torch

from regard.core.tensors import array, tensor
from regard.runtime.threads import on_team
from regard.torch.call.bound import ArrayCall
from regard.torch.call.record import TensorCall
from regard.torch.tensors.team import TEAM

Tensors = tuple[torch.Tensor | None, ...]
OUTPUTS = ("out", "lse", "entropy")
KNOWN = (*OUTPUTS, "low")
"""Results of forward that derivatives take: its outputs, and what rounding took from out."""


@on_team(TEAM)
def attention(call: TensorCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the outputs: (*inputs) → out, lse, the other observed statistics, and low."""
    if call.cached is not None:
        found: tuple[torch.Tensor, ...] = call.cached(call, *inputs)
        return found
    return tuple(map(tensor, ArrayCall.of(call, [array(x) for x in inputs], "forward").forward()))


@on_team(TEAM)
def backward(call: TensorCall, *given: torch.Tensor | None) -> Tensors:
    """Compute gradients: (*inputs, *outputs, *ct) → gradients of the floats.

    outputs: as in KNOWN. ct: cotangents of the outputs.
    """
    inputs, outputs, ct = parts(call, given, 4, 3)
    if call.cached is not None:
        gradients: Tensors | None = call.cached.gradients(call, inputs, outputs, ct)
        if gradients is not None:
            return gradients
    ready = ArrayCall.of(call, arrays(inputs), "backward")
    g = ready.engine.backward(ready.problem, ready.outputs(*arrays(outputs)), ready.outputs(*arrays(ct)))
    return tensors(ready.gradients(g))


@on_team(TEAM)
def tangent(call: TensorCall, *given: torch.Tensor | None) -> Tensors:
    """Compute tangents: (*inputs, *outputs, *t) → tangents of the outputs.

    t: tangents of the floats. The outputs are out, lse and, if observed, entropy.
    """
    inputs, outputs, t = parts(call, given, 4, len(call.floats))
    ready = ArrayCall.of(call, arrays(inputs), "jvp")
    _, d = ready.engine.jvp(ready.problem, ready.differential(arrays(t)), ready.outputs(*arrays(outputs)))
    return tensors(ready.to_caller(d))


@on_team(TEAM)
def backward_tangent(call: TensorCall, *given: torch.Tensor | None) -> Tensors:
    """Compute tangents of gradients: (*inputs, *outputs, *ct, *t, *d, *d_ct) → those.

    t, d, d_ct: tangents of the floats, of the outputs and of ct.
    """
    inputs, outputs, ct, t, d_outputs, d_ct = parts(call, given, 4, 3, len(call.floats), 3, 3)
    ready = ArrayCall.of(call, arrays(inputs), "backward_jvp")
    along = ready.differential(arrays(t))
    results, c, d, d_c = (ready.outputs(*arrays(x)) for x in (outputs, ct, d_outputs, d_ct))
    g = ready.engine.backward_jvp(ready.problem, results, c, along, d, d_c)
    return tensors(ready.gradients(g))


@on_team(TEAM)
def tangent_tangent(call: TensorCall, *given: torch.Tensor | None) -> Tensors:
    """Compute second tangents: (*inputs, *outputs, *t, *d_t, *u, *d_u) → those.

    t, u: tangents of the floats along two directions; d_t, d_u: those of the outputs.
    """
    n = len(call.floats)
    inputs, outputs, t, d_t, u, d_u = parts(call, given, 4, n, 3, n, 3)
    ready = ArrayCall.of(call, arrays(inputs), "jvp_jvp")
    first, second = (ready.differential(arrays(x)) for x in (t, u))
    results, d_first, d_second = (ready.outputs(*arrays(x)) for x in (outputs, d_t, d_u))
    return tensors(ready.to_caller(ready.engine.jvp_jvp(ready.problem, results, first, second, d_first, d_second)))


def parts(call: TensorCall, given: Any, *sizes: int) -> list[Any]:
    """Split `given` into the inputs of the call and parts of the given sizes."""
    found, at = [], 0
    for size in (len(call.inputs), *sizes):
        found.append(given[at : at + size])
        at += size
    assert at == len(given)
    return found


def arrays(given: Any) -> list[Any]:
    return [None if x is None else array(x) for x in given]


def tensors(given: Any) -> Tensors:
    return tuple(None if x is None else tensor(x) for x in given)
