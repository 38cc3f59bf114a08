"""Floating-point operations of each operation, for PyTorch's counters."""

from math import prod
from typing import Any

import torch

from regard.torch.call.record import CallSizes
from regard.torch.call.text import call_of
from regard.torch.composed import higher


def attention_flops(shapes: Any, text: str, *args: Any, **kwargs: Any) -> int:
    """Count Q Kᵀ and P V over all pairs, masked or not, as PyTorch does for its own."""
    return products(shapes, text, 1, 1)


def backward_flops(shapes: Any, text: str, *args: Any, **kwargs: Any) -> int:
    """Count the recomputed Q Kᵀ, and dO Vᵀ, Pᵀ dO, dS K and dSᵀ Q."""
    return products(shapes, text, 3, 2)


def tangent_flops(shapes: Any, text: str, *args: Any, **kwargs: Any) -> int:
    """Count the recomputed Q Kᵀ, its tangents in Q and K, those of P V in P and V."""
    return products(shapes, text, 3, 2)


def backward_tangent_flops(shapes: Any, text: str, *args: Any, **kwargs: Any) -> int:
    """Count the recomputed Q Kᵀ and dO Vᵀ, and two tangents of each backward product."""
    return products(shapes, text, 7, 5)


def tangent_tangent_flops(shapes: Any, text: str, *args: Any, **kwargs: Any) -> int:
    """Count Q Kᵀ with its first and second tangents, and those of P V.

    Over d: Q Kᵀ, two tangents along each direction and two along both. Over d_v: P V in V, in V along each, and in P.
    """
    return products(shapes, text, 7, 3)


def derivative_flops(shapes: Any, text: str, *args: Any, **kwargs: Any) -> int:
    """Count twice as much for each forward step, three times as much for each reverse one."""
    call = call_of(text)
    tensors = [torch.empty(x, device="meta") for x in shapes]
    one, examples = higher.one_example(call, tensors)
    second, *steps = call.steps
    forward, reverse = (1, 1) if second == "backward_tangent" else (2, 0)
    factor = 2 ** (forward + steps.count("forward")) * 3 ** (reverse + steps.count("reverse"))
    return examples * factor * products([x.shape for x in one], text, 1, 1)


def products(shapes: Any, text: str, over_d: int, over_value: int) -> int:
    """Return the floating-point operations of some products over d and d_v.

    over_d, over_value: how many products are over the features of keys, and of values.
    """
    call = call_of(text)
    size = CallSizes.of(call, shapes)
    return 2 * prod(size.lead) * size.heads * size.n_q * size.n_k * (over_d * size.d + over_value * size.value)


FLOPS = {
    "attention": attention_flops,
    "attention_backward": backward_flops,
    "attention_tangent": tangent_flops,
    "attention_backward_tangent": backward_tangent_flops,
    "attention_tangent_tangent": tangent_tangent_flops,
    "attention_derivative": derivative_flops,
}
