"""The softmax of scores, and products over visible pairs: autograd functions whose derivatives are made of each other.

PyTorch differentiates the functions to any order. The products are for calls whose operands are not all finite, where 0
· NaN must not reach a result; other calls multiply matrices. w: (..., i, j), y: (..., i, c), x: (..., j, c).
"""

import math
from typing import Any

import torch
from torch import Tensor


class Softmax(torch.autograd.Function):
    """Weights P, the weight of the sink, lse, and log P or None: (S, sink, visible, careful, logs) → four tensors.

    S: −∞ where it is hidden. visible: None for everything. careful: cotangents may not be finite. Rows that see nothing
    have weights 0. With c_row = dlse − Σ_j P dP − p_sink dp_sink − Σ_j dlogP, dS = P (dP + c_row) + dlogP.
    """

    @staticmethod
    def forward(
        S: Tensor, sink: Tensor, visible: Tensor | None, careful: bool, logs: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        largest = S.amax(-1) if S.shape[-1] else S.new_full(S.shape[:-1], -torch.inf)
        m = torch.maximum(largest, sink)
        alone = (largest == -torch.inf) & (sink == torch.inf)  # ∞ − ∞ is NaN
        m = torch.where(m == -torch.inf, 0, m)
        p_sink = torch.exp(torch.where(alone, 0, sink - m))
        shifted = torch.sub(S, m[..., None])
        P = torch.exp(shifted) if logs else shifted.exp_()
        total = P.sum(-1).add_(p_sink)
        log_total = torch.log(total)
        total = torch.where(total == 0, 1, total)
        P.div_(total[..., None])
        if visible is not None:
            P.masked_fill_(~visible, 0)  # also where a row is NaN
        log_P = None
        if logs:  # finite where P is 0: 0 · ∞ is NaN
            least = 2 * math.log(torch.finfo(S.dtype).tiny)
            log_P = shifted.sub_(log_total[..., None]).clamp_(min=least).masked_fill_(S == -torch.inf, 0)
        return P, p_sink.div_(total), m + log_total, log_P

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, sink, ctx.visible, ctx.careful, _ = inputs
        ctx.shape = sink.shape
        ctx.save_for_backward(output[0], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *ct: Tensor | None) -> Any:
        P, p_sink = ctx.saved_tensors
        dP, dp_sink, dlse, dlog_P = ct
        c_row = torch.zeros_like(p_sink) if dlse is None else dlse
        if dP is not None:
            c_row = c_row - (P * dP).sum(-1)
        if dp_sink is not None:
            c_row = c_row - p_sink * dp_sink
        if dlog_P is not None:
            c_row = c_row - dlog_P.sum(-1)
        dS = P * (c_row[..., None] if dP is None else dP + c_row[..., None])
        dS = dS if dlog_P is None else dS + dlog_P
        if ctx.careful and ctx.visible is not None:
            dS = torch.where(ctx.visible, dS, 0)
        d_sink = None
        if ctx.needs_input_grad[1]:
            d_sink = p_sink * (c_row if dp_sink is None else c_row + dp_sink)
            d_sink = d_sink.sum_to_size(ctx.shape)
        return dS, d_sink, None, None, None


class VisibleScores(torch.autograd.Function):
    """Σ_c y[i, c] x[j, c] of visible pairs, 0 elsewhere: (y, x, visible) → (..., i, j)."""

    @staticmethod
    def forward(y: Tensor, x: Tensor, visible: Tensor) -> Tensor:
        return torch.where(visible, y @ x.mT, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *ct: Any) -> Any:
        y, x, visible = ctx.saved_tensors
        return VisibleSum.apply(ct[0], x, visible), VisibleSum.apply(ct[0].mT, y, visible.mT), None


class VisibleSum(torch.autograd.Function):
    """Σ_j w[i, j] x[j, c] over visible pairs: (w, x, visible) → (..., i, c).

    What is not finite in x is left out of the product. Its effect on rows that see it is counted by products of zeros
    and ones, since a product of matrices would add 0 · NaN.
    """

    @staticmethod
    def forward(w: Tensor, x: Tensor, visible: Tensor) -> Tensor:
        w = torch.where(visible, w, 0)
        total = w @ torch.where(x.isfinite(), x, 0)
        up, down = (x == torch.inf).to(x), (x == -torch.inf).to(x)
        plus, minus, zero = (w > 0).to(x), (w < 0).to(x), (visible & (w == 0)).to(x)
        unknown = visible.to(x) @ x.isnan().to(x) + zero @ (up + down)
        for count, value in (
            (plus @ up + minus @ down, torch.inf),
            (plus @ down + minus @ up, -torch.inf),
            (unknown, torch.nan),
        ):
            total = total + torch.where(count > 0, value, 0).to(x)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *ct: Any) -> Any:
        w, x, visible = ctx.saved_tensors
        return VisibleScores.apply(ct[0], x, visible), VisibleSum.apply(w.mT, ct[0], visible.mT), None
