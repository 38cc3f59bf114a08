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

from regard import checks
from regard.torch.arrays import array, tensor
from regard.torch.batching import batched, in_legacy_vmap, legacy_batch
from regard.torch.calls import Call, Ready

Tensors = tuple[torch.Tensor | None, ...]
OUTPUTS = ("out", "lse", "entropy")
INTEGERS = ("argmax", "indices", "visible", "distances")
NONE: Tensors = (None, None, None)


class Operation(torch.autograd.Function):
    """A function of (call, *tensors or None). Where no transform is active, nothing but the tensors is looked at."""

    gives_gradients = False

    @staticmethod
    def roles(call: Call) -> tuple[Any, ...]:
        """Which input or output each tensor is, or is a cotangent or tangent of."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        batch = legacy_batch(args) if in_legacy_vmap() else None
        if batch is not None:
            return batch.map(cls.apply, cls.roles(args[0]), cls.gives_gradients, args[0])
        return super(torch.autograd.Function, cls).apply(*args)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], call: Call, *given: torch.Tensor | None) -> Any:
        return batched(cls.apply, cls.roles(call), cls.gives_gradients, info.batch_size, in_dims[1:], call, given)


class Attention(Operation):
    """(call, *inputs) → out, lse and the other statistics observed."""

    @staticmethod
    def roles(call: Call) -> tuple[Any, ...]:
        return call.inputs

    @staticmethod
    def forward(call: Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return run(call, *inputs)

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

    gives_gradients = True

    @staticmethod
    def roles(call: Call) -> tuple[Any, ...]:
        return *call.inputs, *OUTPUTS, *OUTPUTS

    @staticmethod
    def forward(call: Call, *given: torch.Tensor | None) -> Tensors:
        inputs, outputs, ct = parts(call, given, 3, 3)
        ready = Ready.of(call, arrays(inputs))
        checks.fits(ready.problem, outputs=0, gradients=1)
        g = ready.engine.backward(ready.problem, ready.outputs(*arrays(outputs)), ready.outputs(*arrays(ct)))
        return tensors(ready.gradients(g))

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

    @staticmethod
    def roles(call: Call) -> tuple[Any, ...]:
        return *call.inputs, *OUTPUTS, *call.floats

    @staticmethod
    def forward(call: Call, *given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        inputs, outputs, t = parts(call, given, 3, len(call.floats))
        ready = Ready.of(call, arrays(inputs))
        checks.fits(ready.problem, entropies=1)
        _, d = ready.engine.jvp(ready.problem, ready.differential(arrays(t)), ready.outputs(*arrays(outputs)))
        return tensors(ready.outward(d))

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

    gives_gradients = True

    @staticmethod
    def roles(call: Call) -> tuple[Any, ...]:
        return *call.inputs, *OUTPUTS, *OUTPUTS, *call.floats, *OUTPUTS, *OUTPUTS

    @staticmethod
    def forward(call: Call, *given: torch.Tensor | None) -> Tensors:
        inputs, outputs, ct, t, d_outputs, d_ct = parts(call, given, 3, 3, len(call.floats), 3, 3)
        ready = Ready.of(call, arrays(inputs))
        along = ready.differential(arrays(t))
        known, c, d, d_c = (ready.outputs(*arrays(x)) for x in (outputs, ct, d_outputs, d_ct))
        checks.fits(ready.problem, outputs=0, gradients=1)
        g = ready.engine.backward_jvp(ready.problem, known, c, along, d, d_c)
        return tensors(ready.gradients(g))


class TangentTangent(Last):
    """(call, *inputs, *outputs, *tangents of floats and outputs, *others of both) → tangents of the first tangents."""

    @staticmethod
    def roles(call: Call) -> tuple[Any, ...]:
        return *call.inputs, *OUTPUTS, *call.floats, *OUTPUTS, *call.floats, *OUTPUTS

    @staticmethod
    def forward(call: Call, *given: torch.Tensor | None) -> Tensors:
        n = len(call.floats)
        inputs, outputs, t, d_t, u, d_u = parts(call, given, 3, n, 3, n, 3)
        ready = Ready.of(call, arrays(inputs))
        first, second = (ready.differential(arrays(x)) for x in (t, u))
        known, d_first, d_second = (ready.outputs(*arrays(x)) for x in (outputs, d_t, d_u))
        return tensors(ready.outward(ready.engine.jvp_jvp(ready.problem, known, first, second, d_first, d_second)))


def run(call: Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Attention without a derivative."""
    if call.again is not None:
        found: tuple[torch.Tensor, ...] = call.again(*inputs)
        return found
    return tuple(map(tensor, Ready.of(call, [array(x) for x in inputs]).forward()))


def keep(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """For both modes; cotangents that are zero stay None."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def parts(call: Call, given: Any, *sizes: int) -> list[Any]:
    """`given` cut into the inputs of the call and parts of those sizes."""
    cut, at = [], 0
    for size in (len(call.inputs), *sizes):
        cut.append(given[at : at + size])
        at += size
    assert at == len(given)
    return cut


def three(call: Call, given: Tensors) -> Tensors:
    """out, lse, and entropy or None, of what belongs to the results of the call."""
    return given[0], given[1], given[2] if "entropy" in call.results else None


def cotangents(call: Call, given: Tensors) -> Tensors:
    """`three` of the cotangents of all results; NotImplementedError if one belongs to a result without a derivative."""
    for name, x in zip(call.results, given, strict=True):
        if x is not None and name not in OUTPUTS:
            raise not_provided(name)
    return three(call, given)


def none(given: Any) -> bool:
    return all(x is None for x in given)


def arrays(given: Any) -> list[Any]:
    return [None if x is None else array(x) for x in given]


def tensors(given: Any) -> Any:
    return tuple(None if x is None else tensor(x) for x in given)


def not_provided(name: str) -> NotImplementedError:
    return NotImplementedError(f"regard.attention: the derivative of {name!r} is not provided; .detach() it")
