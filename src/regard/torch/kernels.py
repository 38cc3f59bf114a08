"""What an engine computes of a call on tensors: attention and four derivatives, on tensors that lie in memory.

All are functions of (call, *tensors or None). Nothing is differentiated here, and no mode of PyTorch sees what is done.
"""

from typing import Any

import torch

from regard.core import checks
from regard.core.tensors import array, tensor
from regard.runtime.threads import on_team
from regard.torch.calls import Call, Ready
from regard.torch.team import TEAM

Tensors = tuple[torch.Tensor | None, ...]
OUTPUTS = ("out", "lse", "entropy")
INTEGERS = ("argmax", "indices", "visible", "distances")


@on_team(TEAM)
def attention(call: Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(*inputs) → out, lse and the other statistics observed."""
    if call.again is not None:
        found: tuple[torch.Tensor, ...] = call.again(*inputs)
        return found
    return tuple(map(tensor, Ready.of(call, [array(x) for x in inputs]).forward()))


@on_team(TEAM)
def backward(call: Call, *given: torch.Tensor | None) -> Tensors:
    """(*inputs, *outputs, *cotangents of outputs) → gradients of the floats."""
    inputs, outputs, ct = parts(call, given, 3, 3)
    ready = Ready.of(call, arrays(inputs))
    checks.fits(ready.problem, outputs=0, gradients=1)
    g = ready.engine.backward(ready.problem, ready.outputs(*arrays(outputs)), ready.outputs(*arrays(ct)))
    return tensors(ready.gradients(g))


@on_team(TEAM)
def tangent(call: Call, *given: torch.Tensor | None) -> Tensors:
    """(*inputs, *outputs, *tangents of the floats) → tangents of out, lse and, if it is observed, entropy."""
    inputs, outputs, t = parts(call, given, 3, len(call.floats))
    ready = Ready.of(call, arrays(inputs))
    checks.fits(ready.problem, entropies=1)
    _, d = ready.engine.jvp(ready.problem, ready.differential(arrays(t)), ready.outputs(*arrays(outputs)))
    return tensors(ready.outward(d))


@on_team(TEAM)
def backward_tangent(call: Call, *given: torch.Tensor | None) -> Tensors:
    """(*inputs, *outputs, *ct, *tangents of the floats, of the outputs and of ct) → tangents of the gradients."""
    inputs, outputs, ct, t, d_outputs, d_ct = parts(call, given, 3, 3, len(call.floats), 3, 3)
    ready = Ready.of(call, arrays(inputs))
    along = ready.differential(arrays(t))
    known, c, d, d_c = (ready.outputs(*arrays(x)) for x in (outputs, ct, d_outputs, d_ct))
    checks.fits(ready.problem, outputs=0, gradients=1)
    g = ready.engine.backward_jvp(ready.problem, known, c, along, d, d_c)
    return tensors(ready.gradients(g))


@on_team(TEAM)
def tangent_tangent(call: Call, *given: torch.Tensor | None) -> Tensors:
    """(*inputs, *outputs, *tangents of floats and outputs, *others of both) → tangents of the first tangents."""
    n = len(call.floats)
    inputs, outputs, t, d_t, u, d_u = parts(call, given, 3, n, 3, n, 3)
    ready = Ready.of(call, arrays(inputs))
    first, second = (ready.differential(arrays(x)) for x in (t, u))
    known, d_first, d_second = (ready.outputs(*arrays(x)) for x in (outputs, d_t, d_u))
    return tensors(ready.outward(ready.engine.jvp_jvp(ready.problem, known, first, second, d_first, d_second)))


def parts(call: Call, given: Any, *sizes: int) -> list[Any]:
    """`given` cut into the inputs of the call and parts of those sizes."""
    cut, at = [], 0
    for size in (len(call.inputs), *sizes):
        cut.append(given[at : at + size])
        at += size
    assert at == len(given)
    return cut


def arrays(given: Any) -> list[Any]:
    return [None if x is None else array(x) for x in given]


def tensors(given: Any) -> Tensors:
    return tuple(None if x is None else tensor(x) for x in given)
