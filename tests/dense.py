"""Attention over whole matrices of scores in PyTorch's operations, which tests compare outputs and gradients with."""

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Q Kᵀ · scale of (..., h, n, d), where 1/√d is the default; each head of `k` serves a group of heads of `q`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return q @ k.repeat_interleave(q.shape[-3] // k.shape[-3], -3).mT * scale


def attend(s: Tensor, v: Tensor, sink: Tensor | None = None, factors: Any = 1) -> tuple[Tensor, Tensor]:
    """Out and lse of scores, 0 and -inf in a row of -inf. factors: what dropout multiplies weights with."""
    s = s if sink is None else torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
    seen = (s > -torch.inf).any(-1, keepdim=True)
    finite = s.where(seen, 0)
    p = finite.softmax(-1).where(seen, 0)[..., : v.shape[-2]] * factors
    out = p @ v.repeat_interleave(s.shape[-3] // v.shape[-3], -3)
    return out, finite.logsumexp(-1).where(seen[..., 0], -torch.inf)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, score: Callable[[Tensor], Tensor] | None = None,
    visible: Tensor | None = None, sink: Tensor | None = None, factors: Any = 1, layout: str = "bhnd",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out and lse. score: a function of all scores. visible: booleans that broadcast with them."""
    q, k, v = (x.transpose(-3, -2) if layout == "bnhd" else x for x in (q, k, v))
    s = scores(q, k, scale)
    s = s if score is None else score(s)
    out, lse = attend(s if visible is None else s.masked_fill(~visible, -torch.inf), v, sink, factors)
    return out.transpose(-3, -2) if layout == "bnhd" else out, lse


def same(ours: Any, theirs: Any, inputs: list[Tensor], **tolerance: float) -> None:
    """Compare results and, for random cotangents, their gradients in all inputs."""
    ours, theirs = (x if isinstance(x, tuple) else (x,) for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs)
    cotangents = [torch.randn_like(x) for x in theirs]
    gradients = (torch.autograd.grad(x, inputs, cotangents, materialize_grads=True) for x in (ours, theirs))
    torch.testing.assert_close(*gradients, **tolerance)
