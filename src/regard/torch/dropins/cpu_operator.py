"""PyTorch's CPU operation of attention, and its backward, which graphs hold.

Their five results have the strides of PyTorch's, for which code after them was compiled: out those of query, lse
(b, h, n) those of (b, n, h), gradients (b, h, n, d) those of (b, n, h, d). A query that sees nothing has lse 0, as
another graph of the same call may be PyTorch's.
"""

from typing import Any

import torch
from torch import Tensor

from regard.torch.call import kernels
from regard.torch.call.record import DEFAULTS, TensorCall
from regard.torch.operators.registration import COMPILE, GRAPH
from regard.torch.tensors.process_group import refuse


def forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `aten::_scaled_dot_product_flash_attention_for_cpu`: out and lse."""
    refuse(GRAPH, COMPILE)
    call, more = call_of(query, dropout_p, is_causal, attn_mask, scale)
    out, lse = kernels.attention(call, transposed(query), transposed(key), transposed(value), *more)
    lse = lse.masked_fill_(lse == -torch.inf, 0)
    like_query, rows = torch.empty_like(query), lse.transpose(1, 2).contiguous().transpose(1, 2)
    if like_query.stride() == transposed(out).stride():
        return transposed(out), rows
    return like_query.copy_(transposed(out)), rows


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of query, key and value; out and logsumexp may be PyTorch's.

    The operation has no place for `Outputs.low`, so δ is made of the rounded output.
    """
    call, more = call_of(query, dropout_p, is_causal, attn_mask, scale)
    heads_last = (transposed(x) for x in (query, key, value))
    gradients = kernels.backward(
        call, *heads_last, *more, transposed(out), logsumexp, None, None, transposed(grad_out.contiguous()), None, None
    )
    return tuple(transposed(g.contiguous()) for g in gradients if g is not None)


def call_of(
    query: Tensor, dropout_p: float, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> tuple[TensorCall, list[Tensor]]:
    """Return a call in the layout (b, n, h, d), and the tensors that it reads besides query, key and value."""
    if dropout_p:
        raise RuntimeError(f"PyTorch's CPU operation of attention has no dropout, but got dropout_p={dropout_p}")
    options: dict[str, Any] = DEFAULTS | {"observe": (), "scale": scale, "layout": "bnhd"}
    if is_causal:
        options |= {"causal": True, "offset": 0}
    others = () if attn_mask is None else ("bias",)
    return TensorCall(options, ("query", "key", "value"), others), [] if attn_mask is None else [attn_mask]


def transposed(x: Tensor) -> Tensor:
    """Transpose (b, h, n, d) to (b, n, h, d), or the reverse."""
    return x.transpose(1, 2)
