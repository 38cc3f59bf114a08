"""Operations of PyTorch's dispatcher: attention, its derivatives, and a seed.

Attention and its derivatives take a list of tensors and a call as text. Modes and traced graphs see these six and
nothing below them. A fake kernel gives the shapes of results. Their derivatives are the autograd functions of
`torch/autograd/functions.py`, which call them in turn.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from regard.torch.call import kernels
from regard.torch.call.record import HOST, TensorCall
from regard.torch.call.text import call_of, text_of_call
from regard.torch.composed import higher
from regard.torch.operators.fakes import FAKES, Results
from regard.torch.operators.flops import FLOPS
from regard.torch.tensors.arrays import together
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

Given = Sequence[torch.Tensor | None]
GRAPH, COMPILE = "a graph with attention", "compile it anew inside, and export or script it outside"

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


KERNELS: dict[str, Callable[..., Any]] = {
    "attention": kernels.attention,
    "attention_backward": kernels.backward,
    "attention_tangent": kernels.tangent,
    "attention_backward_tangent": kernels.backward_tangent,
    "attention_tangent_tangent": kernels.tangent_tangent,
    "attention_derivative": higher.derivative,
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
