"""The operations that a traced graph holds: attention and its gradients, for any number of tensors and a named call."""

from typing import Any

import torch

from regard.torch.autograd import INTEGERS, OUTPUTS, arrays, not_provided, parts, run, tensors, three
from regard.torch.calls import Ready
from regard.torch.graph import call_of



@torch.library.custom_op("regard::attention", mutates_args=())
def forward(inputs: list[torch.Tensor], call: str) -> list[torch.Tensor]:
    refuse_tangents(inputs)
    return [laid(x) for x in run(call_of(call), *inputs)]


@torch.library.custom_op("regard::attention_backward", mutates_args=())
def backward(given: list[torch.Tensor | None], call: str) -> list[torch.Tensor]:
    refuse_tangents(given)
    known = call_of(call)
    inputs, outputs, ct = parts(known, given, 3, 3)
    ready = Ready.of(known, arrays(inputs))
    g = ready.engine.backward(ready.problem, ready.outputs(*arrays(outputs)), ready.outputs(*arrays(ct)))
    return [laid(x) for x in tensors(ready.gradients(g))]


def laid(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def refuse_tangents(given: Any) -> None:
    """A graph has no forward mode, and a tangent must not be lost in it."""
    for x in given:
        if x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("regard.attention: forward mode through a compiled graph is not provided")


@forward.register_fake
def _(inputs: list[torch.Tensor], call: str) -> list[torch.Tensor]:
    known = call_of(call)
    named = dict(zip(known.inputs, inputs, strict=True))
    q, k = named["query"], named["key"]
    v = named.get("value", k)
    n, h = (-3, -2) if known.options["layout"] == "bnhd" else (-2, -3)
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    rows = (*lead, q.shape[h], q.shape[n])
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    if known.weights:
        out = q.new_empty((*rows, k.shape[n]))
    else:
        out = q.new_empty((*lead, *((rows[-1], rows[-2]) if n == -3 else rows[-2:]), v.shape[-1]))
    shapes = {"received": (*lead, q.shape[h], k.shape[n])}
    tops = [s.k for s in known.observe if s.name == "top"]
    shown = iter([k for k in tops for _ in range(2)])
    results = [out]
    for name in known.results[1:]:
        shape = (*rows, next(shown)) if name in ("values", "indices") else shapes.get(name, rows)
        results.append(q.new_empty(shape, dtype=torch.int64 if name in INTEGERS else real))
    return results


@backward.register_fake
def _(given: list[torch.Tensor | None], call: str) -> list[torch.Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[: len(call_of(call).floats)]]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    given, ctx.call = inputs
    known = call_of(ctx.call)
    ctx.save_for_backward(*given, *three(known, output))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[torch.Tensor | None]) -> Any:
    known = call_of(ctx.call)
    for name, x in zip(known.results, grads, strict=True):
        if x is not None and name not in (*OUTPUTS, *INTEGERS):
            raise not_provided(name)
    found = backward([*ctx.saved_tensors, *three(known, grads)], ctx.call)
    return [*found, *(None for _ in known.others)], None


def _third(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("regard.attention: the double backward of a compiled graph is not provided")


forward.register_autograd(_backward, setup_context=_keep)
backward.register_autograd(_third)
