"""Derivatives beyond the second, by PyTorch's autograd on the outputs of a block of rows.

F are the outputs of a block, and B(x, c) the gradients of ⟨c, F⟩. The second derivatives of `autograd/functions.py` are

    ∂B(x, c, t, ċ) = ∇ₓ (⟨B(x, c), t⟩ + ⟨ċ, F⟩)
    ∂J(x, t, u)    = ∇_w ⟨∇ₓ ⟨B(x, w), t⟩, u⟩      linear in w, so for any w

A further derivative is described by its steps from one of these: "reverse", "forward", or the axes of a `vmap`. All are
sums over blocks of rows. So a derivative of any order needs the tensors of its call, and the memory of one block.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from regard.engines.device.call import all_finite, computing
from regard.engines.device.functions import backward_tangent, gradients, tangent, tangent_tangent
from regard.torch.call.record import CallSizes, TensorCall
from regard.torch.composed.rows import outputs
from regard.warning import RegardWarning, level_of_caller

Tensors = tuple[Tensor, ...]
Function = Callable[[Tensors, Tensors], Tensors]
"""(varying, fixed) → results. What varies is the floats of a call, and what its derivative has in addition."""

PAIRS = 2**18  # scores of a block
ARRAYS = 50  # arrays of as many numbers that a block has at once, twice as many for each step
_warned: set[str] = set()


def derivative(call: TensorCall, *given: Tensor) -> Tensors:
    """Compute the derivative `call.steps`: (*inputs, *rest) → results, where the floats of the call and `rest` vary."""
    total: Tensors | None = None
    with computing(given[0].device, derivatives=True):
        varying, fixed = split(call, [x.detach() for x in given])
        unread = [n for n, name in enumerate(call.floats) if name not in ("query", "key", "value")]
        finite = all_finite([x for n, x in enumerate(varying) if n not in unread])
        varying = tuple(x.requires_grad_() for x in varying)
        for rows in blocks(call, given):
            f = differentiated(call, partial(outputs, call, finite, rows))
            part = tuple(x.detach() for x in f(varying, fixed))
            total = part if total is None else tuple(map(torch.add, total, part))
    assert total is not None
    return total


def differentiated(call: TensorCall, f: Function) -> Function:
    """Return the derivative `call.steps` of the outputs f of a block."""
    second, *steps = call.steps
    f = SECOND[second](f, len(call.floats), len(call.outputs), bool(steps))
    for left, step, (n, _) in zip(reversed(range(len(steps))), steps, sizes(call), strict=False):
        f = STEPS[step](f, n, left > 0) if isinstance(step, str) else one_by_one(call, f, step)
    return f


def sizes(call: TensorCall) -> Iterator[tuple[int, int]]:
    """Yield after each step how many tensors vary, and how many results there are."""
    n, m = len(call.floats), len(call.outputs)
    second, *steps = call.steps
    n, m = (2 * (n + m), n) if second == "backward_tangent" else (3 * n, m)
    yield n, m
    for step in steps:
        n, m = (n + m, n) if step == "reverse" else (2 * n, m) if step == "forward" else (n, m)
        yield n, m


def split(call: TensorCall, given: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what belongs to tensors that vary, and to those that do not."""
    floats, inputs = len(call.floats), len(call.inputs)
    return (*given[:floats], *given[inputs:]), tuple(given[floats:inputs])


def one_example(call: TensorCall, given: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Return tensors without the axes of any `vmap`, and the number of examples. Inputs of the call come first."""
    one, examples = list(given), 1
    for step in reversed(call.steps):
        if not isinstance(step, str):
            examples *= next(x.shape[d] for x, d in zip(one, step, strict=False) if d is not None)
            one = unbatched(one, step)
    return one, examples


def unbatched(given: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Return an example of a batch; of tensors that later steps add, `dims` knows nothing."""
    return [x if d is None else x.select(d, 0) for x, d in zip(given, dims, strict=False)]


def empty_results(call: TensorCall, given: Sequence[Tensor], outputs: Callable[[Any], Any], steps: Any = None) -> Any:
    """Return empty results of some first steps, by default all. outputs: the same for the outputs of the call."""
    n = len(call.steps) if steps is None else steps
    step, counts = call.steps[n - 1], list(sizes(call))
    if n == 1:
        like = given[: len(call.floats)] if step == "backward_tangent" else outputs(list(given[: len(call.inputs)]))
    elif step == "reverse":
        like = split(call, given)[0][: counts[n - 2][0]]
    elif step == "forward":
        return empty_results(call, given, outputs, n - 1)
    else:
        size = next(x.shape[d] for x, d in zip(given, step, strict=False) if d is not None)
        inner = empty_results(call, unbatched(given, step), outputs, n - 1)
        return [x.new_empty((size, *x.shape)) for x in inner]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like]


def of_backward_tangent(f: Function, n: int, m: int, again: bool) -> Function:
    """Return ∂B of f, which has n varying tensors and m results: (*x, *c, *t, *ċ)."""

    def tangents(varying: Tensors, fixed: Tensors) -> Tensors:
        x, c, t, d_c = pieces(varying, n, m, n, m)
        return backward_tangent(f(x, fixed), x, c, t, d_c, again)

    return tangents


def of_tangent_tangent(f: Function, n: int, m: int, again: bool) -> Function:
    """Return ∂J of f: (*x, *u, *t)."""

    def tangents(varying: Tensors, fixed: Tensors) -> Tensors:
        x, u, t = pieces(varying, n, n, n)
        return tangent_tangent(f(x, fixed), x, t, u, again)

    return tangents


def reverse(f: Function, n: int, again: bool) -> Function:
    """Return the gradients of f in its n varying tensors: (*x, *ct) → n gradients."""
    return lambda varying, fixed: gradients(f(varying[:n], fixed), varying[:n], varying[n:], again)


def forward(f: Function, n: int, again: bool) -> Function:
    """Return the tangents of f along its n varying tensors: (*x, *t), as the gradient of its gradients in their ct."""

    def tangents(varying: Tensors, fixed: Tensors) -> Tensors:
        x, t = pieces(varying, n, n)
        return tangent(f(x, fixed), x, t, again)

    return tangents


SECOND = {"backward_tangent": of_backward_tangent, "tangent_tangent": of_tangent_tangent}
STEPS = {"reverse": reverse, "forward": forward}


def one_by_one(call: TensorCall, f: Function, dims: Sequence[int | None]) -> Function:
    """Return f of one example after the other. dims: the axis of each tensor that the derivative is given."""
    varying_dims, fixed_dims = split(call, dims)

    def batch(varying: Tensors, fixed: Tensors) -> Tensors:
        tensors, axes = (*varying, *fixed), (*varying_dims, *fixed_dims)
        size = next(x.shape[d] for x, d in zip(tensors, axes, strict=True) if d is not None)
        each = []
        for n in range(size):
            one = [x if d is None else x.select(d, n) for x, d in zip(tensors, axes, strict=True)]
            each.append(f(tuple(one[: len(varying)]), tuple(one[len(varying) :])))
        return tuple(map(torch.stack, zip(*each, strict=True)))

    return batch


def pieces(given: Tensors, *sizes: int) -> Iterator[Tensors]:
    """Yield parts of the given sizes."""
    at = 0
    for size in sizes:
        yield given[at : at + size]
        at += size


def blocks(call: TensorCall, given: Sequence[Tensor]) -> Iterator[range]:
    """Return the blocks of rows of a call, and warn once of the memory that each takes."""
    one, examples = one_example(call, given)
    size = CallSizes.of(call, [x.shape for x in one])
    row = max(1, examples * prod(size.lead) * size.heads * size.n_k)
    step = max(1, PAIRS // row)
    numbers = ARRAYS * 2 ** (len(call.steps) - 1) * min(step, size.n_q) * row
    tell_memory(numbers * max(4, given[0].element_size()))
    return (range(n, min(n + step, size.n_q)) for n in range(0, max(1, size.n_q), step))


def tell_memory(size: int) -> None:
    """Warn once of a size in bytes."""
    text = (
        "derivatives of regard.attention beyond the second are computed by PyTorch's operations, for one block of rows "
        f"after the other: many times slower than the second, and in {size:,} bytes"
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RegardWarning, stacklevel=level_of_caller())
