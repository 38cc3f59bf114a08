"""Derivatives of attention for PyTorch: five functions, of which three have derivatives that are made of the others.

With x the inputs, F(x) the outputs, J(x) t their tangents, B(x, c) = J(x)ᵀ c the gradients of ⟨c, F⟩, ∂B(x, c, t) the
tangent of B along t, and ∂J(x, t, u) that of J(x) t along u:

    reverse of F along c:    B(x, c)
    forward of F along t:    J(x) t
    reverse of B along u:    ∂B(x, c, u) in x;  J(x) u in c
    forward of B along t, ċ: ∂B(x, c, t) + B(x, ċ)
    reverse of J along c:    ∂B(x, c, t) in x;  B(x, c) in t
    forward of J along u, ṫ: ∂J(x, t, u) + J(x) ṫ

for ⟨u, ∂B(x, c, t)⟩ is symmetric in u and t. Derivatives of ∂B and ∂J, third ones, are an error. All but F are given
the outputs too, which are functions of x: what comes back through them is counted in x.
"""

from typing import Any

import torch

from regard.torch.batching import batched, legacy_batch
from regard.torch.calls import TensorCall
from regard.torch.graph.modes import (
    alive,
    at_one_level,
    below_autograd,
    in_legacy_vmap,
    jit_state,
    outside_of_graphs,
    transformed,
    transforms_active,
)
from regard.torch.graph.operators import OPERATIONS, completed, execute, library, operate
from regard.torch.graph.texts import call_of
from regard.torch.kernels import INTEGERS, OUTPUTS, Tensors, parts

NONE: Tensors = (None, None, None)


class Operation(torch.autograd.Function):
    """A function of (call, *tensors or None). Where no transform is active, nothing but the tensors is looked at."""

    operation = ""
    gives_gradients = False

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        """Which input or output each tensor is, or is a cotangent or tangent of."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled autograd, which follows backward
            return untraced(cls, args)
        if cls is not Attention and jit_state() is not None:  # which takes no lists with None
            raise NotImplementedError(
                "regard.attention: torch.jit.trace holds no derivatives: trace the function, then differentiate it"
            )
        if transforms_active() or jit_state() is not None:  # the dispatcher knows what each of them does
            return tuple(operate(cls.operation, args[0], args[1:]))
        args = args[0], *(None if x is None else alive(x) for x in args[1:])
        batch = legacy_batch(args) if in_legacy_vmap() else None
        if batch is not None:
            return batch.map(cls.apply, cls.roles(args[0]), cls.gives_gradients, args[0])
        return super(torch.autograd.Function, cls).apply(*args)

    @classmethod
    def at_level(cls, *args: Any) -> Any:
        """`apply` for one level of the transforms that are active, as the dispatcher goes through them."""
        with at_one_level():
            return super(torch.autograd.Function, cls).apply(*args)


@outside_of_graphs
def untraced(function: type[Operation], args: tuple[Any, ...]) -> Any:
    """`apply` between two graphs."""
    return super(torch.autograd.Function, function).apply(*args)


class Attention(Operation):
    """(call, *inputs) → out, lse and the other statistics observed."""

    operation = "attention"

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return call.inputs

    @staticmethod
    def forward(call: TensorCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = execute("attention", call, inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        call, *given = inputs
        ctx.call = call
        keep(ctx, *given, *three(call, output))
        integers = [x for x in output if x is not None and not x.is_floating_point()]
        if integers:
            ctx.mark_non_differentiable(*integers)

    @staticmethod
    def backward(ctx: Any, *c: torch.Tensor | None) -> Any:
        call = ctx.call
        ct = cotangents(call, c)
        if none(ct):
            return None, *(None for _ in call.inputs)
        return None, *Backward.apply(call, *ctx.saved_tensors, *ct), *(None for _ in call.others)

    @staticmethod
    def jvp(ctx: Any, _: Any, *t: torch.Tensor | None) -> Any:
        call = ctx.call
        for name in call.results:
            if name not in (*OUTPUTS, *INTEGERS):
                raise not_provided(name)
        d = Tangent.apply(call, *ctx.saved_tensors, *t[: len(call.floats)])
        return *d, *(None for _ in call.results[len(d) :])


class Backward(Operation):
    """(call, *inputs, *outputs, *cotangents of outputs) → gradients of the floats."""

    operation = "attention_backward"
    gives_gradients = True

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return *call.inputs, *OUTPUTS, *OUTPUTS

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor | None) -> Tensors:
        found: Tensors = execute("attention_backward", call, given)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *given = inputs
        keep(ctx, *given)

    @staticmethod
    def backward(ctx: Any, *u: torch.Tensor | None) -> Any:
        call = ctx.call
        inputs, outputs, ct = parts(call, ctx.saved_tensors, 3, 3)
        if none(u):
            return None, *(None for _ in ctx.saved_tensors)
        d = three(call, Tangent.apply(call, *inputs, *outputs, *u))
        g = BackwardTangent.apply(call, *inputs, *outputs, *ct, *u, *d, *NONE)
        d_ct = (None if c is None else x for c, x in zip(ct, d, strict=True))
        return None, *g, *(None for _ in call.others), *NONE, *d_ct

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        call = ctx.call
        inputs, outputs, ct = parts(call, ctx.saved_tensors, 3, 3)
        t, _, d_ct = parts(call, tangents, 3, 3)
        t = t[: len(call.floats)]
        if none(t):
            return Backward.apply(call, *inputs, *outputs, *d_ct)
        d = three(call, Tangent.apply(call, *inputs, *outputs, *t))
        return BackwardTangent.apply(call, *inputs, *outputs, *ct, *t, *d, *d_ct)


class Tangent(Operation):
    """(call, *inputs, *outputs, *tangents of the floats) → tangents of out, lse and, if it is observed, entropy."""

    operation = "attention_tangent"

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return *call.inputs, *OUTPUTS, *call.floats

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = execute("attention_tangent", call, given)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *given = inputs
        keep(ctx, *given, *three(ctx.call, output))

    @staticmethod
    def backward(ctx: Any, *c: torch.Tensor | None) -> Any:
        call = ctx.call
        inputs, outputs, t, d = parts(call, ctx.saved_tensors, 3, len(call.floats), 3)
        ct = three(call, c)
        if none(ct):
            return None, *(None for _ in ctx.saved_tensors[:-3])
        in_t = Backward.apply(call, *inputs, *outputs, *ct)
        g = BackwardTangent.apply(call, *inputs, *outputs, *ct, *t, *d, *NONE)
        in_t = (None if x is None else gt for x, gt in zip(t, in_t, strict=True))
        return None, *g, *(None for _ in call.others), *NONE, *in_t

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        call = ctx.call
        inputs, outputs, t, d = parts(call, ctx.saved_tensors, 3, len(call.floats), 3)
        u, _, moving = parts(call, tangents, 3, len(call.floats))
        u = u[: len(call.floats)]
        if none(u):
            return Tangent.apply(call, *inputs, *outputs, *moving)
        d_u = three(call, Tangent.apply(call, *inputs, *outputs, *u))
        bend = TangentTangent.apply(call, *inputs, *outputs, *t, *d, *u, *d_u)
        if none(moving):
            return bend
        return tuple(x + y for x, y in zip(bend, Tangent.apply(call, *inputs, *outputs, *moving), strict=True))


class Last(Operation):
    """A second derivative, which has none itself."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *u: torch.Tensor | None) -> Any:
        raise NotImplementedError("regard.attention: third derivatives are not provided")

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        raise NotImplementedError("regard.attention: third derivatives are not provided")


class BackwardTangent(Last):
    """(call, *inputs, *outputs, *ct, *tangents of the floats, of the outputs and of ct) → tangents of the gradients."""

    operation = "attention_backward_tangent"
    gives_gradients = True

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return *call.inputs, *OUTPUTS, *OUTPUTS, *call.floats, *OUTPUTS, *OUTPUTS

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor | None) -> Tensors:
        found: Tensors = execute("attention_backward_tangent", call, given)
        return found


class TangentTangent(Last):
    """(call, *inputs, *outputs, *tangents of floats and outputs, *others of both) → tangents of the first tangents."""

    operation = "attention_tangent_tangent"

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return *call.inputs, *OUTPUTS, *call.floats, *OUTPUTS, *call.floats, *OUTPUTS

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = execute("attention_tangent_tangent", call, given)
        return found


def keep(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """For both modes; cotangents that are zero stay None."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def three(call: TensorCall, given: Tensors) -> Tensors:
    """out, lse, and entropy or None, of what belongs to the results of the call."""
    return given[0], given[1], given[2] if "entropy" in call.results else None


def cotangents(call: TensorCall, given: Tensors) -> Tensors:
    """`three` of the cotangents of all results; NotImplementedError if one belongs to a result without a derivative."""
    for name, x in zip(call.results, given, strict=True):
        if x is not None and name not in OUTPUTS:
            raise not_provided(name)
    return three(call, given)


def none(given: Any) -> bool:
    return all(x is None for x in given)


def not_provided(name: str) -> NotImplementedError:
    return NotImplementedError(f"regard.attention: the derivative of {name!r} is not provided; .detach() it")


def differentiable(function: type[Operation]) -> None:
    """Let an operation of the dispatcher, such as one in a graph, have the derivatives of its function."""
    name = function.operation
    operation = OPERATIONS[name]

    def kernel(given: Any, text: str) -> list[torch.Tensor]:
        tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        if not tracked and not transformed():
            with below_autograd():
                found: list[torch.Tensor] = operation(given, text)
                return found
        call = call_of(text)
        named = dict(zip(call.inputs, given, strict=False))
        if any(named[x].requires_grad for x in call.constants):
            raise NotImplementedError(
                "regard.attention: this graph was traced when its bias or table required no grad; trace it again"
            )
        return completed(name, function.at_level(call, *given), given, text)

    def over_batch(info: Any, in_dims: Any, given: Any, text: str) -> Any:
        def apply(call: TensorCall, *given: torch.Tensor | None) -> list[torch.Tensor]:
            return operate(name, call, given)

        call = call_of(text)
        roles, sums = function.roles(call), function.gives_gradients
        results, dims = batched(apply, roles, sums, info.batch_size, in_dims[0], call, given)
        return list(results), list(dims)

    library.impl(name, kernel, "Autograd")
    torch.library.register_vmap(f"regard::{name}", over_batch, lib=library)


for _function in (Attention, Backward, Tangent, BackwardTangent, TangentTangent):
    differentiable(_function)
