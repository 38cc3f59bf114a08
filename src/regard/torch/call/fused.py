"""Calls on a device that PyTorch's fused functions compute: plain ones, and those whose meaning is the same there.

The fused functions of `F.scaled_dot_product_attention` are several times faster than operations of ours. They have no
tangents and no second derivatives, so those are ours. They give NaN to rows that see nothing, and to all rows where a
hidden key is NaN: calls that hide something ask in one number whether there is any. Bits are those of the library.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.core.options import DEFAULTS
from regard.core.tensors import all_hold
from regard.torch.call.record import SHORT
from regard.torch.tensors.arrays import PLAIN, autocasting
from regard.torch.tensors.modes import in_legacy_vmap, transformed, watched

REASON = (
    "PyTorch's scaled_dot_product_attention runs this call, unless numbers or derivatives prevent it; bits are its own"
)

HANDED = ("mask", "bias", "causal", "scale", "layout", "seed")
"""The options that a call may have."""

DTYPES = (*SHORT, torch.float32, torch.float64)


on_host = attrgetter("is_cpu")
"""A function of C that returns True for a tensor of the host; tests replace it by one that returns False."""


def attention(query: Any, key: Any, value: Any, options: Mapping[str, Any], ours: Any) -> Tensor | None:
    """Return the output of a fused function, or None if the call stays ours.

    query: on a device. ours: `regard.attention` by an engine.
    """
    if not fits(query, key, value, options):
        return None
    first, few = options.get("layout") == "bnhd", query.ndim == 3  # fused functions take four axes
    operands = [x.transpose(-2, -3) if first else x for x in (query, key, value)]
    operands = [x[None] if few else x for x in operands]
    mask, bias, causal = options.get("mask"), options.get("bias"), bool(options.get("causal"))
    if (causal or mask is not None or bias is not None) and not answers(operands, mask, bias):
        return None
    settings: dict[str, Any] = {
        "is_causal": causal,
        "scale": options.get("scale"),
        "enable_gqa": operands[0].shape[-3] != operands[1].shape[-3],
    }
    inputs = *operands, bias, mask
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        out: Tensor = FusedFunction.apply(settings, ours, *inputs)
    else:
        q, k, v = operands
        out = scaled_dot_product_attention(q, k, v, mask if bias is None else bias, **settings)
    out = out[0] if few else out
    return out.transpose(-2, -3) if first else out


def fits(query: Any, key: Any, value: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a fused function has the meaning of a call, unless its numbers prevent that.

    Only by types and shapes; what may be an error stays ours, which says so.
    """
    if any(name not in HANDED and name in DEFAULTS and not same(x, DEFAULTS[name]) for name, x in options.items()):
        return False
    mask, bias, causal = (options.get(name) for name in ("mask", "bias", "causal"))
    tensors = [query, key, value, *(x for x in (mask, bias) if x is not None)]
    if any(type(x) not in PLAIN or x.device != query.device or x.layout is not torch.strided for x in tensors):
        return False
    if transformed() or watched() or in_legacy_vmap() or autocasting(query) or query.is_meta:
        return False
    if causal not in (None, False, True) or (mask is not None) + (bias is not None) + bool(causal) > 1:
        return False
    if not isinstance(options.get("scale"), float | None) or options.get("layout", "bhnd") not in ("bhnd", "bnhd"):
        return False
    n, h = (-3, -2) if options.get("layout") == "bnhd" else (-2, -3)
    shapes = [tuple(x.shape) for x in (query, key, value)]
    q, k, v = shapes
    if not 3 <= len(q) == len(k) == len(v) <= 4 or not all(map(all, shapes)) or query.dtype not in DTYPES:
        return False
    if any(x.dtype != query.dtype for x in (key, value)) or q[:-3] != k[:-3] or k[:-1] != v[:-1] or q[-1] != k[-1]:
        return False
    if q[h] % k[h] or (causal and q[n] != k[n]):
        return False
    if mask is not None and mask.dtype is not torch.bool:
        return False
    if bias is not None and bias.dtype != query.dtype:
        return False
    whole = (*q[:-3], q[h], q[n], k[n])
    return all(2 <= x.ndim <= len(whole) and broadcasts(x.shape, whole) for x in (mask, bias) if x is not None)


def same(x: Any, default: Any) -> bool:
    return x is default or (not isinstance(x, Tensor) and type(x) is type(default) and bool(x == default))


def broadcasts(shape: Any, whole: Any) -> bool:
    """Return whether a shape, aligned right, broadcasts to a whole one."""
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))


def answers(operands: list[Tensor], mask: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether nothing is NaN or infinite and each row sees a key, in one number; False if none can be read."""

    def conditions() -> Iterator[Tensor]:
        yield from (x.isfinite().all() for x in operands)
        if mask is not None:
            yield mask.any(-1).all()
        if bias is not None:
            yield from ((bias < torch.inf).all(), (bias > -torch.inf).any(-1).all())

    return all_hold(operands[0], conditions())


class FusedFunction(torch.autograd.Function):
    """A fused function: (settings, ours, query, key, value, bias, mask) → out (..., h, n_q, d_v).

    The backward is the library's. Where that is to be differentiated, it is the backward of ours.
    """

    @staticmethod
    def forward(ctx: Any, settings: Any, ours: Any, *given: Tensor | None) -> Tensor:
        ctx.settings, ctx.ours = settings, ours
        ctx.save_for_backward(*given)
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            ctx.inner = [
                None if x is None else x.detach().requires_grad_(need) for x, need in zip(given, needed, strict=True)
            ]
            q, k, v, bias, mask = ctx.inner
            ctx.out = scaled_dot_product_attention(q, k, v, mask if bias is None else bias, **settings)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, *ct: Any) -> Any:
        operands, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        again = torch.is_grad_enabled()
        inner, out = ctx.inner, ctx.out
        if again:
            inner = operands
            q, k, v, bias, mask = operands
            options = {"causal": ctx.settings["is_causal"], "scale": ctx.settings["scale"], "bias": bias, "mask": mask}
            out = ctx.ours(q, k, v, **options)
        varying = [x for x, need in zip(inner, needed, strict=True) if need]
        gradients = iter(torch.autograd.grad(out, varying, ct[0], create_graph=again, retain_graph=True))
        return None, None, *(next(gradients) if need else None for need in needed)
