"""The functions of the engine: forward, weights, and derivatives by PyTorch's autograd on the formula of a block.

F are the outputs of a block as functions of what varies, and B(x, c) = ∇ₓ ⟨c, F(x)⟩. For any w, in which B is linear:

    jvp along t                   ∇_w ⟨B(x, w), t⟩
    backward_jvp along t and ċ    ∇ₓ (⟨B(x, c), t⟩ + ⟨ċ, F⟩)
    jvp_jvp along t and u         ∇_w ⟨∇ₓ ⟨B(x, w), t⟩, u⟩
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.problem import Differential, Outputs, Problem, device_of
from regard.core.statistics import ENTROPY, LSE, Statistic, each_array, pooled
from regard.core.tensors import array, tensor
from regard.engines import engines
from regard.engines.device.call import DeviceCall, GradientSums, computing, rows_of
from regard.engines.device.formula import Tensors
from regard.engines.device.statistics import Sums
from regard.engines.observed import ForwardSums, basic, complete

Array = np.ndarray[Any, np.dtype[Any]]
Given = Sequence[Tensor | None]


def gradients(y: Tensors, x: Tensors, ct: Given, again: bool = True) -> Tensors:
    """Return the gradients of ⟨ct, y⟩ in x; None in ct is 0. again: they will be differentiated."""
    wanted = [(a, c) for a, c in zip(y, ct, strict=True) if c is not None and a.requires_grad]
    if not wanted:
        return zeros(x)
    y, ct = zip(*wanted, strict=True)
    derived: Tensors = torch.autograd.grad(y, x, ct, create_graph=again, allow_unused=True, materialize_grads=True)
    return derived


def zeros(like: Tensors) -> Tensors:
    """Return zeros to differentiate in."""
    return tuple(torch.zeros_like(x, requires_grad=True) for x in like)


def backward_tangent(y: Tensors, x: Tensors, c: Given, t: Given, d_c: Given, again: bool = False) -> Tensors:
    """Return ∇ₓ (⟨B(x, c), t⟩ + ⟨ċ, y⟩)."""
    return gradients((*gradients(y, x, c), *y), x, (*t, *d_c), again)


def tangent(y: Tensors, x: Tensors, t: Given, again: bool = False) -> Tensors:
    """Return ∇_w ⟨B(x, w), t⟩."""
    w = zeros(y)
    return gradients(gradients(y, x, w), w, t, again)


def tangent_tangent(y: Tensors, x: Tensors, t: Given, u: Given, again: bool = False) -> Tensors:
    """Return ∇_w ⟨∇ₓ ⟨B(x, w), t⟩, u⟩."""
    w = zeros(y)
    return gradients(gradients(gradients(y, x, w), x, t), w, u, again)


def forward(p: Problem, rows: range | None = None, into: Outputs | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    """Return the outputs and every observed statistic; entropy only if it is observed."""
    observe = basic(p.observe)
    call = DeviceCall(p, ENTROPY in observe)
    lse = call.empty(p.shape(p.n_q), p.compute)
    outputs = Outputs(p.new_output(), lse, call.empty(p.shape(p.n_q), p.compute) if ENTROPY in observe else None)
    sums = Sums(call, [s for s in observe if s not in (LSE, ENTROPY)])
    with computing(call.device):
        for block in call.blocks(rows):
            y = block.outputs(call.parts(block))
            write(call, outputs, block, y[:3])
            sums.add(block, y.P, y.S)
        seen = {LSE: outputs.lse, ENTROPY: outputs.entropy} | sums.results()
    if any(s not in seen for s in p.observe):
        seen |= following(p, lse, seen, rows)
    return outputs, {s: seen[s] for s in p.observe}


def following(p: Problem, lse: Array, seen: dict[Any, Any], rows: range | None) -> dict[Any, Any]:
    """Return the statistics that follow from others: few numbers for each query, computed on the host."""

    def host(x: Array) -> Array:
        return x if device_of(x) is None else tensor(x).cpu().numpy()

    basics = {s: each_array(x, host) for s, x in seen.items() if x is not None}
    device = engines()["device"]

    def again(q: Problem) -> tuple[Outputs, Any]:
        of_rows = device.forward(q, rows)[0].lse
        assert of_rows is not None
        return Outputs(None, host(of_rows), None), {}

    def coarse(q: Problem, given: Array, rows: int, cols: int) -> tuple[Array, Array]:
        mass, largest = device.maps(q, lse, rows, cols)
        return host(mass), host(largest)

    def part(q: Problem, given: Array, rows: range, cols: range) -> Array:
        return host(device.weights(q, lse, rows, cols))

    sums = ForwardSums(p, host(lse), again, coarse, part)
    statistics = {s: x for s, x in complete(basics, sums).items() if s not in seen}
    if p.device is None:
        return statistics
    return {s: each_array(x, lambda y: array(torch.from_numpy(y).to(p.device))) for s, x in statistics.items()}


def write(call: DeviceCall, outputs: Outputs, block: Any, parts: Given) -> None:
    """Write the outputs of a block, or their tangents, to their rows."""
    for to, part in zip(outputs[:3], parts, strict=False):
        if to is not None and part is not None:
            call.write(to, block, part)


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    """Return any part of the weights, on a device in the dtype of the call.

    Whole rows are computed, so that they sum to 1, and lse is not read.
    """
    if rows.step < 0:
        last_first = weights(p, lse, rows[::-1], cols)
        return last_first[..., ::-1, :] if p.device is None else array(tensor(last_first).flip(-2))
    call = DeviceCall(p, entropy=False)
    dtype = p.compute if p.device is None else p.dtype
    tile, done = call.zeros(p.shape(len(rows), len(cols)), dtype), 0
    with computing(call.device):
        at = torch.arange(cols.start, cols.stop, cols.step, device=call.device)
        for block in call.blocks(rows):
            P = block.outputs(call.parts(block)).P
            n = len(block.rows)
            whole = torch.nn.functional.pad(P, (block.keys.start, p.n_k - block.keys.stop))
            part = whole.index_select(-1, at).reshape(*p.lead, p.heads, n, len(cols))
            tensor(tile)[..., done : done + n, :] = part
            done += n
    return tile


def maps(p: Problem, lse: Array, rows: int, cols: int) -> tuple[Array, Array]:
    """Return the maps of mass and largest weight, of weights by the given lse."""
    mass, largest = pooled(rows, cols), pooled(rows, cols, "max")
    call = DeviceCall(p, entropy=False)
    sums = Sums(call, [mass, largest])
    with computing(call.device):
        of_rows = rows_of(p, tensor(lse))
        for block in call.blocks():
            S = block.scores(call.parts(block), block.at)[0]
            P = torch.exp(S - of_rows[..., block.slice(block.rows), None])
            sums.add(block, torch.where(S == -torch.inf, 0, P), S)
        statistics = sums.results()
    return statistics[mass], statistics[largest]


def backward(p: Problem, outputs: Outputs, ct: Outputs, into: Differential | None = None) -> Differential:
    """Return the gradients of ⟨ct, outputs⟩ in the inputs."""
    call = DeviceCall(p, ct.entropy is not None, ct[:3])
    total = GradientSums(call)
    with computing(call.device, derivatives=True):
        for block in call.blocks():
            x = call.leaves(block)
            total.add(block, gradients(call.outputs(block, x), x, call.cotangents(block, ct), again=False))
    return total.result()


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    """Return the tangents of `backward` along t and d_ct."""
    entropy = ct.entropy is not None or d_ct.entropy is not None
    call = DeviceCall(p, entropy, [*ct[:3], *d_ct[:3], t.query, t.key, t.value])
    total = GradientSums(call)
    with computing(call.device, derivatives=True):
        for block in call.blocks():
            x = call.leaves(block)
            c, d_c = call.cotangents(block, ct), call.cotangents(block, d_ct)
            total.add(block, backward_tangent(call.outputs(block, x), x, c, call.tangents(block, t), d_c))
    return total.result()


def jvp(
    p: Problem, t: Differential, outputs: Outputs | None = None, into: Outputs | None = None
) -> tuple[Outputs, Outputs]:
    """Return the outputs, which may be given, and their tangents along t."""
    outputs = outputs or engines()["device"].forward(replace(p, observe=(ENTROPY,)))[0]
    return outputs, along(p, outputs, t)


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    """Return the tangents along u of the tangents along t."""
    return along(p, outputs, t, u)


def along(p: Problem, outputs: Outputs, t: Differential, u: Differential | None = None) -> Outputs:
    """Return the tangents of the outputs along t, or the tangents along u of those."""
    tangents_in = [x for d in (t, u) if d is not None for x in (d.query, d.key, d.value)]
    call = DeviceCall(p, outputs.entropy is not None, tangents_in)
    entropy = None if outputs.entropy is None else call.empty(p.shape(p.n_q), p.compute)
    tangents = Outputs(p.new_output(), call.empty(p.shape(p.n_q), p.compute), entropy)
    with computing(call.device, derivatives=True):
        for block in call.blocks():
            x = call.leaves(block)
            y, first = call.outputs(block, x), call.tangents(block, t)
            second = None if u is None else call.tangents(block, u)
            write(
                call, tangents, block, tangent(y, x, first) if second is None else tangent_tangent(y, x, first, second)
            )
    return tangents
