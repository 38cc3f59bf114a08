"""The operations that a traced graph holds: attention and its gradients, for any number of tensors and a named call.

They are defined with kernels of their own for autograd, because what `torch.library.custom_op` makes of a formula for
backward gives zeros, without a word, in forward mode and in a second backward. Here both are errors.
"""

from typing import Any

import torch

from regard import checks
from regard.torch.arrays import together
from regard.torch.autograd import INTEGERS, arrays, cotangents, none, parts, run, tensors, three
from regard.torch.calls import Ready
from regard.torch.texts import call_of

Tensors = list[torch.Tensor]
Given = list[torch.Tensor | None]
HOST = ("offset", "seed")  # numbers that checks and plans look at

_library = torch.library.Library("regard", "DEF")
_library.define("attention(Tensor[] inputs, str call) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
_library.define("attention_backward(Tensor?[] given, str call) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
forward = torch.ops.regard.attention.default
backward = torch.ops.regard.attention_backward.default


def _forward(inputs: Tensors, call: str) -> Tensors:
    known = call_of(call)
    together({name: x for name, x in zip(known.inputs, inputs, strict=True) if name not in HOST})
    return [x.contiguous() for x in run(known, *inputs)]


def _backward(given: Given, call: str) -> Tensors:
    known = call_of(call)
    inputs, outputs, ct = parts(known, given, 3, 3)
    ready = Ready.of(known, arrays(inputs))
    checks.fits(ready.problem, outputs=0, gradients=1)
    g = ready.engine.backward(ready.problem, ready.outputs(*arrays(outputs)), ready.outputs(*arrays(ct)))
    return [x.contiguous() for x in tensors(ready.gradients(g))]


def _forward_fake(inputs: list[Any], call: str) -> Tensors:
    known = call_of(call)
    named: dict[Any, Any] = dict(zip(known.inputs, inputs, strict=True))
    q, k = named["query"], named["key"]
    v: Any = named.get("value", k)
    first = known.options["layout"] == "bnhd"
    n, h = (-3, -2) if first else (-2, -3)
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    heads, n_q, n_k = q.shape[h], q.shape[n], k.shape[n]
    rows = (*lead, heads, n_q)
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    matrix = (n_q, heads) if first else (heads, n_q)
    results = [q.new_empty((*rows, n_k) if known.weights else (*lead, *matrix, v.shape[-1]))]
    shapes = {"received": (*lead, heads, n_k), "group_received": (*lead, k.shape[h], n_k)}
    shapes |= {"profile": (*lead, heads, n_q + n_k - 1), "distances": (*lead, 1, n_q + n_k - 1)}
    own: dict[str, list[Any]] = {}
    for s in known.observe:
        if s.name == "top":
            own.setdefault("values", []).append((*rows, s.of))
            own.setdefault("indices", []).append((*rows, s.of))
        elif s.name == "pooled":
            own.setdefault("pooled", []).append((*lead, heads, min(s.of[0], n_q), min(s.of[1], n_k)))
        elif s.name == "weights_of":
            own.setdefault("weights_of", []).append((*lead, heads, len(s.of), n_k))
    for name in known.results[1:]:
        shape = own[name].pop(0) if name in own else shapes.get(name, rows)
        results.append(q.new_empty(shape, dtype=torch.int64 if name in INTEGERS else real))
    return results


def _backward_fake(given: list[Any], call: str) -> Tensors:
    floats = given[: len(call_of(call).floats)]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in floats if x is not None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            output = tuple(forward(inputs, call))
        known = ctx.known = call_of(call)
        ctx.call = call
        ctx.save_for_backward(*inputs, *three(known, output))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))
        return output

    @staticmethod
    def backward(ctx: Any, *c: torch.Tensor | None) -> Any:
        known = ctx.known
        ct = cotangents(known, c)
        if none(ct):
            return None, *(None for _ in known.inputs)
        return None, *backward([*ctx.saved_tensors, *ct], ctx.call), *(None for _ in known.others)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: str, *given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(backward(given, call))

    @staticmethod
    def backward(ctx: Any, *u: torch.Tensor | None) -> Any:
        raise NotImplementedError("regard.attention: the double backward of a traced graph is not provided")


def _differentiable(function: type[torch.autograd.Function], operation: Any) -> Any:
    """The kernel for autograd of an operation."""

    def kernel(given: Any, call: str) -> Tensors:
        tracked = [x for x in given if x is not None]
        if any(torch.autograd.forward_ad.unpack_dual(x, level=0).tangent is not None for x in tracked):
            raise NotImplementedError("regard.attention: the forward mode of a traced graph is not provided")
        if torch.is_grad_enabled() and any(x.requires_grad for x in tracked):
            known = call_of(call)
            named = dict(zip(known.inputs, given, strict=False))
            if any(named[x].requires_grad for x in known.constants):
                raise NotImplementedError(
                    "regard.attention: this graph was traced when its bias or table required no grad; trace it again"
                )
            return list(function.apply(call, *given))
        with torch._C._AutoDispatchBelowAutograd():
            found: Tensors = operation(given, call)
            return found

    return kernel


_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
_library.impl("attention", _differentiable(_Attention, forward), "Autograd")
_library.impl("attention_backward", _differentiable(_Backward, backward), "Autograd")
torch.library.register_fake("regard::attention", _forward_fake, lib=_library)
torch.library.register_fake("regard::attention_backward", _backward_fake, lib=_library)
