"""Derivatives of attention for PyTorch, as six autograd functions.

x are the inputs, F(x) the outputs and J(x) t their tangents. B(x, c) = J(x)ᵀ c are the gradients of ⟨c, F⟩. ∂B(x, c, t)
is the tangent of B along t, and ∂J(x, t, u) that of J(x) t along u:

    reverse of F along c:    B(x, c)
    forward of F along t:    J(x) t
    reverse of B along u:    ∂B(x, c, u) in x;  J(x) u in c
    forward of B along t, ċ: ∂B(x, c, t) + B(x, ċ)
    reverse of J along c:    ∂B(x, c, t) in x;  B(x, c) in t
    forward of J along u, ṫ: ∂J(x, t, u) + J(x) ṫ

for ⟨u, ∂B(x, c, t)⟩ is symmetric in u and t. So these five give the derivatives of F, B and J. Those of ∂B and ∂J are
the sixth, which computes derivatives of any order by PyTorch's operations (`composed/`). B, J, ∂B and ∂J also take the
outputs. These are functions of x, so their gradients are counted in x. With them comes low, what rounding took from
out: a constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from regard.core.statistics import INSTEAD, INTEGERS
from regard.torch.autograd.vmap import batched, legacy_batch
from regard.torch.call.kernels import KNOWN, OUTPUTS, Tensors, parts
from regard.torch.call.record import TensorCall
from regard.torch.call.text import call_of
from regard.torch.operators.registration import OPERATIONS, completed, execute, library, operate
from regard.torch.tensors.modes import (
    SingleLevelFunction,
    alive,
    at_one_level,
    below_autograd,
    in_legacy_vmap,
    jit_state,
    outside_of_graphs,
    transformed,
    transforms_active,
    with_forward_mode,
)

NONE: Tensors = (None,) * len(OUTPUTS)
UNVARIED: Tensors = (None,) * len(KNOWN)


class AttentionOperation(SingleLevelFunction):
    """Base of the six: a function of (call, *tensors or None).

    Without an active transform, `apply` reads nothing but the tensors.
    """

    operation = ""
    gives_gradients = False

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        """Return for each tensor its input or output, or that of its (co)tangent."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled autograd traces the code of backward
            return cls.untraced(*args)
        if cls is not AttentionFunction and jit_state() is not None:  # its traces cannot have lists with None
            raise NotImplementedError(
                "regard.attention: torch.jit.trace holds no derivatives: trace the function, then differentiate it"
            )
        if transforms_active() or jit_state() is not None:  # the dispatcher applies each of them
            return tuple(operate(cls.operation, args[0], args[1:]))
        args = args[0], *[None if x is None else alive(x) for x in args[1:]]
        batch = legacy_batch(args) if in_legacy_vmap() else None
        if batch is not None:
            return batch.map(partial(cls.over_batch, cls.apply), args[0])
        if not (torch.is_grad_enabled() or transformed()):  # a first backward
            return cls.forward(*args)
        return super().apply(*args)

    @classmethod
    def over_batch(cls, apply: Any, size: int, dims: Any, call: TensorCall, given: Any) -> Any:
        """Apply the function to a batch by `apply`; return the results and their batch axes."""
        return batched(apply, cls.roles(call), cls.gives_gradients, size, dims, call, given)

    @classmethod
    def at_level(cls, *args: Any) -> Any:
        """Apply the function at one level of the active transforms, for the dispatcher."""
        with at_one_level():
            return super().apply(*args)

    @classmethod
    @outside_of_graphs("compiled autograd cannot trace an engine")
    def untraced(cls, *args: Any) -> Any:
        """Apply the function between two graphs."""
        return super().apply(*args)


class AttentionFunction(AttentionOperation):
    """F: (call, *inputs) → out, lse, the other observed statistics, and low."""

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
        low = output[-1] if call.low else None
        # A call of another process alone has no mark: so PyTorch refuses a checkpoint that is computed again outside.
        mark = () if call.ranks is None else (torch.empty(0),)
        save_for_both_modes(ctx, *given, *differentiable_results(call, output), low, *mark)
        constant = [x for x in output if x is not None and (x is low or not x.is_floating_point())]
        if constant:
            ctx.mark_non_differentiable(*constant)

    @staticmethod
    def backward(ctx: Any, *c: torch.Tensor | None) -> Any:
        call = ctx.call
        ct = cotangents(call, c)
        if all_none(ct):
            return None, *(None for _ in call.inputs)
        return None, *BackwardFunction.apply(call, *unmarked(ctx), *ct), *(None for _ in call.others)

    @staticmethod
    def jvp(ctx: Any, _: Any, *t: torch.Tensor | None) -> Any:
        call = ctx.call
        for name in call.results:
            if name not in (*KNOWN, *INTEGERS):
                raise not_provided(name)
        d = TangentFunction.apply(call, *unmarked(ctx), *t[: len(call.floats)])
        return *d, *(None for _ in call.results[len(d) :])


class BackwardFunction(AttentionOperation):
    """B: (call, *inputs, *outputs, *cotangents of outputs) → gradients of the floats."""

    operation = "attention_backward"
    gives_gradients = True

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return *call.inputs, *KNOWN, *OUTPUTS

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor | None) -> Tensors:
        found: Tensors = execute("attention_backward", call, given)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *given = inputs
        save_for_both_modes(ctx, *given)

    @staticmethod
    def backward(ctx: Any, *u: torch.Tensor | None) -> Any:
        call = ctx.call
        inputs, outputs, ct = parts(call, ctx.saved_tensors, 4, 3)
        if all_none(u):
            return None, *(None for _ in ctx.saved_tensors)
        d = differentiable_results(call, TangentFunction.apply(call, *inputs, *outputs, *u))
        g = BackwardTangentFunction.apply(call, *inputs, *outputs, *ct, *u, *d, *NONE)
        d_ct = (None if c is None else x for c, x in zip(ct, d, strict=True))
        return None, *g, *(None for _ in call.others), *UNVARIED, *d_ct

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        call = ctx.call
        inputs, outputs, ct = parts(call, ctx.saved_tensors, 4, 3)
        t, _, d_ct = parts(call, tangents, 4, 3)
        t = t[: len(call.floats)]
        if all_none(t):
            return BackwardFunction.apply(call, *inputs, *outputs, *d_ct)
        d = differentiable_results(call, TangentFunction.apply(call, *inputs, *outputs, *t))
        return BackwardTangentFunction.apply(call, *inputs, *outputs, *ct, *t, *d, *d_ct)


class TangentFunction(AttentionOperation):
    """J: (call, *inputs, *outputs, *tangents of the floats) → tangents of the outputs.

    The outputs are out, lse and, if observed, entropy.
    """

    operation = "attention_tangent"

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return *call.inputs, *KNOWN, *call.floats

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = execute("attention_tangent", call, given)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *given = inputs
        save_for_both_modes(ctx, *given, *differentiable_results(ctx.call, output))

    @staticmethod
    def backward(ctx: Any, *c: torch.Tensor | None) -> Any:
        call = ctx.call
        inputs, outputs, t, d = parts(call, ctx.saved_tensors, 4, len(call.floats), 3)
        ct = differentiable_results(call, c)
        if all_none(ct):
            return None, *(None for _ in ctx.saved_tensors[:-3])
        in_t = BackwardFunction.apply(call, *inputs, *outputs, *ct)
        g = BackwardTangentFunction.apply(call, *inputs, *outputs, *ct, *t, *d, *NONE)
        in_t = (None if x is None else gt for x, gt in zip(t, in_t, strict=True))
        return None, *g, *(None for _ in call.others), *UNVARIED, *in_t

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        call = ctx.call
        inputs, outputs, t, d = parts(call, ctx.saved_tensors, 4, len(call.floats), 3)
        u, _, d_t = parts(call, tangents, 4, len(call.floats))
        u = u[: len(call.floats)]
        if all_none(u):
            return TangentFunction.apply(call, *inputs, *outputs, *d_t)
        d_u = differentiable_results(call, TangentFunction.apply(call, *inputs, *outputs, *u))
        second = TangentTangentFunction.apply(call, *inputs, *outputs, *t, *d, *u, *d_u)
        if all_none(d_t):
            return second
        moved = TangentFunction.apply(call, *inputs, *outputs, *d_t)
        with with_forward_mode(True):
            return tuple(map(torch.add, second, moved))


class FurtherOperation(AttentionOperation):
    """A second derivative or one beyond it, whose derivatives `Further` computes from its inputs alone."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *given = inputs
        save_for_both_modes(ctx, *given)
        ctx.set_materialize_grads(True)


class BackwardTangentFunction(FurtherOperation):
    """∂B: tangents of the gradients.

    (call, *inputs, *outputs, *ct, *tangents of the floats, of the outputs and of ct) → tangents of the gradients.
    """

    operation = "attention_backward_tangent"
    gives_gradients = True

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return *call.inputs, *KNOWN, *OUTPUTS, *call.floats, *OUTPUTS, *OUTPUTS

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor | None) -> Tensors:
        found: Tensors = execute("attention_backward_tangent", call, given)
        return found

    @staticmethod
    def backward(ctx: Any, *u: torch.Tensor | None) -> Any:
        further = Further.of_backward_tangent(ctx.call, ctx.saved_tensors)
        return None, *further.reverse(zeros_for(u, further.given[: len(u)]))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return Further.of_backward_tangent(ctx.call, ctx.saved_tensors).forward(tangents)


class TangentTangentFunction(FurtherOperation):
    """∂J: tangents of the tangents along a second direction.

    (call, *inputs, *outputs, *t, *d_t, *u, *d_u) → ∂J(x, t, u). t and u are tangents of the floats, d_t and d_u those
    of the outputs along them.
    """

    operation = "attention_tangent_tangent"

    @staticmethod
    def roles(call: TensorCall) -> tuple[Any, ...]:
        return *call.inputs, *KNOWN, *call.floats, *OUTPUTS, *call.floats, *OUTPUTS

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = execute("attention_tangent_tangent", call, given)
        return found

    @staticmethod
    def backward(ctx: Any, *u: torch.Tensor | None) -> Any:
        return None, *Further.of_tangent_tangent(ctx.call, ctx.saved_tensors).reverse(u)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return Further.of_tangent_tangent(ctx.call, ctx.saved_tensors).forward(tangents)


class FurtherDerivativeFunction(FurtherOperation):
    """A derivative beyond the second: (call with its steps, *inputs, *rest) → results.

    It varies with the floats of the call and with `rest`, and so do its derivatives: each has one step more.
    """

    operation = "attention_derivative"

    @classmethod
    def over_batch(cls, apply: Any, size: int, dims: Any, call: TensorCall, given: Any) -> Any:
        results = tuple(apply(replace(call, steps=(*call.steps, tuple(dims))), *given))
        return results, (0,) * len(results)

    @staticmethod
    def forward(call: TensorCall, *given: torch.Tensor) -> Tensors:
        found: Tensors = execute("attention_derivative", call, given)
        return found

    @staticmethod
    def backward(ctx: Any, *u: torch.Tensor | None) -> Any:
        return None, *Further.of(ctx.call, ctx.saved_tensors).reverse(u)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> Any:
        return Further.of(ctx.call, ctx.saved_tensors).forward(tangents)


@dataclass(frozen=True)
class Further:
    """∂B, ∂J or a derivative beyond them, to be differentiated once more.

    call: with the steps so far. given: the tensors of the autograd function. places: of those that vary among them, in
    addition to the floats of the call. rest: these tensors, zeros where None is given.
    """

    call: TensorCall
    given: Tensors
    places: Sequence[int]
    rest: Sequence[torch.Tensor]

    @staticmethod
    def of(call: TensorCall, given: Tensors) -> "Further":
        inputs = len(call.inputs)
        return Further(call, given, range(inputs, len(given)), given[inputs:])

    @staticmethod
    def of_backward_tangent(call: TensorCall, given: Tensors) -> "Further":
        n, m = len(call.floats), len(call.outputs)
        inputs, outputs, ct, t, _, d_ct = parts(call, range(len(given)), 4, 3, n, 3, 3)
        like = *outputs[:m], *inputs[:n], *outputs[:m]
        return Further.of_second("backward_tangent", call, given, (*ct[:m], *t, *d_ct[:m]), like)

    @staticmethod
    def of_tangent_tangent(call: TensorCall, given: Tensors) -> "Further":
        n = len(call.floats)
        inputs, _, t, _, u, _ = parts(call, range(len(given)), 4, n, 3, n, 3)
        return Further.of_second("tangent_tangent", call, given, (*u, *t), (*inputs[:n], *inputs[:n]))

    @staticmethod
    def of_second(name: str, call: TensorCall, given: Tensors, places: Sequence[int], like: Any) -> "Further":
        if call.ranks is not None:
            raise NotImplementedError("regard.attention inside of context_parallel has no third derivative")
        rest = zeros_for([given[n] for n in places], [given[n] for n in like])
        return Further(replace(call, steps=(name,), low=False, cached=None), given, places, rest)

    def derivative(self, step: str, *more: torch.Tensor) -> Tensors:
        call = replace(self.call, steps=(*self.call.steps, step))
        found: Tensors = FurtherDerivativeFunction.apply(call, *self.given[: len(call.inputs)], *self.rest, *more)
        return found

    def reverse(self, u: Sequence[Any]) -> list[torch.Tensor | None]:
        """Return the gradients of ⟨u, results⟩ in each tensor given, None in those that do not vary."""
        floats = range(len(self.call.floats))
        gradients: list[torch.Tensor | None] = [None] * len(self.given)
        for n, x in zip((*floats, *self.places), self.derivative("reverse", *u), strict=True):
            gradients[n] = None if self.given[n] is None else x
        return gradients

    def forward(self, t: Tensors) -> Tensors:
        """Return the tangents of the results along those of each tensor given."""
        floats = len(self.call.floats)
        along = zeros_for([*t[:floats], *(t[n] for n in self.places)], [*self.given[:floats], *self.rest])
        return self.derivative("forward", *along)


def zeros_for(given: Sequence[torch.Tensor | None], like: Sequence[Any]) -> list[torch.Tensor]:
    """Return tensors, with zeros in place of None."""
    return [torch.zeros_like(y) if x is None else x for x, y in zip(given, like, strict=True)]


def save_for_both_modes(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for both modes; cotangents that are zero stay None."""
    ctx.save_for_backward(*tensors)
    if transformed():
        ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def unmarked(ctx: Any) -> Tensors:
    """Return the inputs and outputs that `AttentionFunction` saved."""
    saved: Tensors = ctx.saved_tensors
    return saved if ctx.call.ranks is None else saved[:-1]


def differentiable_results(call: TensorCall, given: Tensors) -> Tensors:
    """Select out, lse, and entropy or None, from values in the order of the results."""
    return given[0], given[1], given[2] if "entropy" in call.results else None


def cotangents(call: TensorCall, given: Tensors) -> Tensors:
    """Return `differentiable_results` of the cotangents of all results.

    Raises NotImplementedError for the cotangent of a result without a derivative.
    """
    for name, x in zip(call.results, given, strict=True):
        if x is not None and name not in OUTPUTS:
            raise not_provided(name)
    return differentiable_results(call, given)


def all_none(given: Any) -> bool:
    return all(x is None for x in given)


def not_provided(name: str) -> NotImplementedError:
    instead = INSTEAD.get(name, "")
    return NotImplementedError(f"regard.attention: the derivative of {name!r} is not provided; .detach() it{instead}")


def differentiable(function: type[AttentionOperation]) -> None:
    """Register an autograd function as the derivative of its dispatcher operation."""
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

        results, dims = function.over_batch(apply, info.batch_size, in_dims[0], call_of(text), given)
        return list(results), list(dims)

    library.impl(name, kernel, "Autograd")
    torch.library.register_vmap(f"regard::{name}", over_batch, lib=library)


for _function in (
    AttentionFunction,
    BackwardFunction,
    TangentFunction,
    BackwardTangentFunction,
    TangentTangentFunction,
    FurtherDerivativeFunction,
):
    differentiable(_function)
