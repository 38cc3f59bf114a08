"""Operations of PyTorch's dispatcher: attention, its derivatives, and a seed.

Attention and its derivatives take a list of tensors and a call as text. Modes and traced graphs see these six and
nothing below them. A fake kernel gives the shapes of results. Their derivatives are the autograd functions of
`torch/autograd/functions.py`, which call them in turn.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from regard.core.statistics import ENTROPY, INTEGERS, LSE, Sizes
from regard.ops.normalization import problem_from
from regard.torch.call import kernels
from regard.torch.call.record import CallSizes, TensorCall
from regard.torch.call.text import call_of, text_of_call
from regard.torch.composed import higher
from regard.torch.tensors.arrays import hollow, together
from regard.torch.tensors.modes import (
    below_autograd,
    dispatch_modes,
    drawn_once,
    fake,
    jit_state,
    profiled,
    tracing,
    transforms_active,
    watched,
    with_forward_mode,
    wrapped,
)
from regard.torch.tensors.process_group import refuse

Results = list[torch.Tensor]
Given = Sequence[torch.Tensor | None]
GRAPH, COMPILE = "a graph with attention", "compile it anew inside, and export or script it outside"
HOST = ("offset", "seed")  # numbers that checks and plans read on the host

library = torch.library.Library("regard", "DEF")


def execute(name: str, call: TensorCall, given: Given) -> Any:
    """Run an operation by its kernel, or by the dispatcher if a mode or a profile must see it.

    The dispatcher also serves tensors without values.
    """
    if transforms_active() and any(x is not None and wrapped(x) for x in given):  # one level of several
        with torch.enable_grad(), with_forward_mode(True), below_autograd():
            return tuple(operate(name, call, given))
    if watched() or profiled() or (call.cached is None and fake(given[0])):  # if query is, all are
        with below_autograd():
            return tuple(operate(name, call, given))
    return KERNELS[name](call, *given)


def operate(name: str, call: TensorCall, given: Given) -> Results:
    """Run an operation by the dispatcher."""
    if "torch.utils.flop_counter" in sys.modules:
        be_counted()
    results: Results = OPERATIONS[name](list(given), text_of_call(call))
    return results


def attention_fake(given: list[Any], text: str) -> Results:
    """Return empty results of attention."""
    call = call_of(text)
    size, q = CallSizes.of(call, [x.shape for x in given]), given[0]
    checked_shapes(call, given)
    lead, heads, n_q, n_k = size.lead, size.heads, size.n_q, size.n_k
    matrix = (n_q, heads) if size.positions_first else (heads, n_q)
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    result = (*lead, heads, n_q, n_k) if call.weights else (*lead, *matrix, size.value)
    rows = (*lead, heads, n_q)
    observed = Sizes(lead, heads, size.groups, n_q, n_k)
    others = [] if call.weights else [s for s in call.observe if s not in (LSE, ENTROPY)]
    first = ["lse", "entropy"] if "entropy" in call.results else ["lse"]
    shapes = [*([rows] * len(first)), *(shape for s in others for shape in s.shapes(observed))]
    results = [q.new_empty(result)]
    for name, shape in zip(call.results[1 : len(shapes) + 1], shapes, strict=True):
        results.append(q.new_empty(shape, dtype=torch.int64 if name in INTEGERS else real))
    return [*results, q.new_empty(result)] if call.low else results


def checked_shapes(call: TensorCall, given: list[Any]) -> None:
    """Check a call by its shapes, if all sizes are known."""
    named = {name: x for name, x in zip(call.inputs, given, strict=True) if type(name) is str and name not in HOST}
    if call.folded or not all(type(n) is int for x in named.values() for n in x.shape):
        return
    named.setdefault("value", named["key"])
    problem_from(**{name: hollow(x) for name, x in named.items()}, layout=call.options["layout"])


def outputs_fake(given: list[Any], text: str) -> Results:
    """Return empty tangents of the outputs, which follow the inputs in `given`."""
    n = len(call_of(text).inputs)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[n : n + 3] if x is not None]


def floats_fake(given: list[Any], text: str) -> Results:
    """Return empty gradients, in the shapes of the floats."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[: len(call_of(text).floats)]]


def derivative_fake(given: list[Any], text: str) -> Results:
    """Return empty results of a derivative beyond the second."""
    call = call_of(text)
    return higher.empty_results(call, given, lambda inputs: attention_fake(inputs, text)[: len(call.outputs)])


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


KERNELS: dict[str, Callable[..., Any]] = {
    "attention": kernels.attention,
    "attention_backward": kernels.backward,
    "attention_tangent": kernels.tangent,
    "attention_backward_tangent": kernels.backward_tangent,
    "attention_tangent_tangent": kernels.tangent_tangent,
    "attention_derivative": higher.derivative,
}
FAKES = {
    "attention": attention_fake,
    "attention_backward": floats_fake,
    "attention_tangent": outputs_fake,
    "attention_backward_tangent": floats_fake,
    "attention_tangent_tangent": outputs_fake,
    "attention_derivative": derivative_fake,
}
FLOPS = {
    "attention": attention_flops,
    "attention_backward": backward_flops,
    "attention_tangent": tangent_flops,
    "attention_backward_tangent": backward_tangent_flops,
    "attention_tangent_tangent": tangent_tangent_flops,
    "attention_derivative": derivative_flops,
}


def compute(name: str, given: list[Any], text: str) -> Results:
    """Compute the results of an operation on tensors of one device."""
    call = call_of(text)
    if name == "attention" and call.ranks is None:
        refuse(GRAPH, COMPILE)
    together({n: x for n, x in zip(call.inputs, given, strict=False) if n not in HOST})
    return [x.contiguous() for x in completed(name, KERNELS[name](call, *given), given, text)]


def define(name: str) -> Any:
    """Define the operation of a kernel in PyTorch's dispatcher."""
    first = "Tensor[] inputs" if name == "attention" else "Tensor?[] given"
    library.define(f"{name}({first}, str call) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)

    def kernel(given: list[Any], text: str) -> Results:
        return compute(name, given, text)

    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"regard::{name}", FAKES[name], lib=library)
    return getattr(torch.ops.regard, name).default


def completed(name: str, found: Any, given: Any, text: str) -> Results:
    """Replace the results that are None by zeros."""
    if all(x is not None for x in found):
        return list(found)
    like = FAKES[name](given, text)
    return [torch.zeros_like(y) if x is None else x for x, y in zip(found, like, strict=True)]


OPERATIONS = {name: define(name) for name in KERNELS}
forward = OPERATIONS["attention"]


def drawn_seed(device: Any) -> torch.Tensor:
    return torch.randint(0, 2**63 - 1, (), device=device)


def traced_seed(mode: Any, operation: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace the operation, marked."""
    with drawn_once():
        return mode.__torch_dispatch__(operation, types, args, kwargs)


# Partitioners find the generator by the device. Random operations that Inductor knows have generators of its own.
library.define(
    "seed(*, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
)
library.impl("seed", drawn_seed, "CompositeExplicitAutograd")
torch.library.register_fake("regard::seed", drawn_seed, lib=library)
torch.library.register_torch_dispatch("regard::seed", ProxyTorchDispatchMode, traced_seed, lib=library)
seed_in_graph = partial(torch.ops.regard.seed.default, device=torch.device("cpu"))


def new_seed() -> torch.Tensor:
    """Draw a seed for dropout from PyTorch's default generator.

    `torch.manual_seed` therefore repeats it.
    """
    # vmap decides by its `randomness` on operations that it knows, and torch.jit.trace takes no device.
    graph = tracing() and jit_state() is None and not transforms_active()
    return seed_in_graph() if graph else drawn_seed("cpu")


def be_counted() -> None:
    """Register FLOP formulas with PyTorch's counters, including those already active."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    formulas = {getattr(torch.ops.regard, name): flops for name, flops in FLOPS.items()}
    if forward.overloadpacket not in flop_registry:
        for operation, flops in formulas.items():
            register_flop_formula(operation)(flops)
    for mode in dispatch_modes():
        counts = getattr(getattr(mode, "counter", None), "flop_registry", None)  # a copy of the registry as it was
        if counts is not None and forward.overloadpacket not in counts:
            counts.update({operation: flop_registry[operation] for operation in formulas})
