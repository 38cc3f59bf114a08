"""The outputs of a block of rows, by the formulas of the specification.

All is PyTorch's operations on (b, h, i, j), which PyTorch differentiates to any order. What is not finite in an operand
counts as NaN where it is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from regard.core import checks
from regard.core.problem import compute_dtype
from regard.core.tensors import NUMPY
from regard.ops.normalization import causally
from regard.rules import Rule, Table
from regard.torch.calls import CallSizes, TensorCall
from regard.torch.composed.rules import RuleValue, TensorRule, arrays_of, constant_tensor, evaluate, keep_mask, signed

Tensors = tuple[Tensor, ...]


def outputs(call: TensorCall, rows: range, floats: Tensors, others: Tensors) -> Tensors:
    """Return out, lse and, if observed, entropy of some rows, with zeros in all others.

    So the outputs, and all their derivatives, are sums over blocks of rows.
    """
    inputs = floats + others
    with torch.autocast(inputs[0].device.type, enabled=False):
        block = Block.of(call, rows, inputs)
        out, lse, entropy = block.outputs()
        results = [block.whole(out, 1).to(inputs[0].dtype), block.whole(lse), block.whole(entropy)]
    if block.size.positions_first and not call.weights:
        results[0] = results[0].transpose(-2, -3)
    return tuple(results[: len(call.outputs)])


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of a call. x: its tensors, by input. at: the absolute indices b, h, i and j, which broadcast."""

    call: TensorCall
    size: CallSizes
    rows: range
    x: dict[Any, Tensor]
    real: torch.dtype
    at: tuple[Tensor, ...]

    @staticmethod
    def of(call: TensorCall, rows: range, inputs: Sequence[Tensor]) -> "Block":
        x = dict(zip(call.inputs, inputs, strict=True))
        size = CallSizes.of(call, [a.shape for a in inputs])
        real = torch.float64 if inputs[0].dtype is torch.float64 else torch.float32
        return Block(call, size, rows, x, real, indices(call, size, rows, x))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (b, h, i, j) of scores."""
        return prod(self.size.lead), self.size.heads, len(self.rows), self.size.n_k

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute out (b, h, i, c), lse and entropy (b, h, i)."""
        S, visible = self.scores()
        sink = self.x.get("sink", S.new_full((), -torch.inf)).to(self.real)
        sink = sink.expand(self.size.heads)[:, None]
        ends = sink[..., None].expand(*self.shape[:3], 1)
        m = torch.cat([torch.where(visible, S, -torch.inf), ends], -1).amax(-1).detach()
        m = torch.where(m == -torch.inf, 0, m)  # a query that sees nothing: all weights are 0
        shifted = torch.where(visible, S - m[..., None], 0)
        E = torch.where(visible, torch.exp(shifted), 0)
        total = E.sum(-1) + torch.exp(sink - m)
        empty = total == 0
        log_total = torch.log(torch.where(empty, 1, total))
        P = E / torch.where(empty, 1, total)[..., None]
        H = -(P * torch.where(visible, shifted - log_total[..., None], 0)).sum(-1)
        out = P if self.call.weights else self.attended(P, visible)
        return out, torch.where(empty, -torch.inf, m + log_total), H

    def scores(self) -> tuple[Tensor, Tensor]:
        """Return the scores S, 0 where they are hidden, and the visible pairs."""
        q, k = self.operand("query"), self.operand("key")
        S = checked_scale(self.call, q) * (Finite.apply(q) @ Finite.apply(k).mT)
        whole = q.isfinite().all(-1)[..., None] & k.isfinite().all(-1)[..., None, :]
        S = S + torch.where(whole, 0, torch.nan).to(self.real)
        visible = self.visible(S.detach())
        bias = self.aligned(self.x["bias"]).to(self.real) if "bias" in self.x else None
        if bias is not None:
            visible = visible & (bias != -torch.inf)
        if self.call.options["score"] is not None:
            rule, arrays = self.rule(self.call.options["score"])
            S = RuleValue.apply(rule, visible, *self.at, S, *arrays)
        if bias is not None:
            S = S + torch.where(visible, bias, 0)
        visible = visible & (S != -torch.inf)
        return torch.where(visible, S, 0), visible

    def visible(self, S: Tensor) -> Tensor:
        """Return the pairs that the mask allows."""
        mask = self.call.options["mask"]
        mask = causally(mask) if self.call.options["causal"] else mask
        if mask is None:
            return torch.ones_like(S, dtype=torch.bool)
        rule, arrays = self.rule(mask)
        return evaluate(rule, [rule.node], self.at, S, arrays)[0].expand(S.shape)

    def attended(self, P: Tensor, visible: Tensor) -> Tensor:
        """Return (P · D) V over visible pairs."""
        v = self.operand("value")
        p = self.call.options["dropout"]
        if p:
            keep = keep_mask(p, seed_of(self.call, self.x, P.device), self.at)
            P = torch.where(keep, P / (1 - p), 0)
        wild = visible.to(self.real) @ v.isfinite().logical_not().to(self.real) > 0
        return P @ Finite.apply(v) * torch.where(wild, torch.nan, 1).to(self.real)

    def operand(self, name: str) -> Tensor:
        """Return query, key or value as (b, h, n, d), with the rows of the block alone if it is the query."""
        x = self.x[name].transpose(-2, -3) if self.size.positions_first else self.x[name]
        if name == "query":
            x = x.narrow(-2, self.rows.start, len(self.rows))
        x = x.to(self.real).expand(*self.size.lead, *x.shape[-3:]).reshape(-1 if self.size.lead else 1, *x.shape[-3:])
        return x if x.shape[1] == self.size.heads else x.repeat_interleave(self.size.heads // x.shape[1], 1)

    def aligned(self, x: Tensor) -> Tensor:
        """Return the rows of a dense mask or bias, aligned right, as (b, h, i, j)."""
        size = self.size
        x = x.reshape((1,) * (len(size.lead) + 3 - x.ndim) + tuple(x.shape))
        if x.shape[-2] != 1:
            x = x.narrow(-2, self.rows.start, len(self.rows))
        return x.expand(*size.lead, size.heads, len(self.rows), size.n_k).reshape(self.shape)

    def rule(self, rule: Rule) -> tuple[TensorRule, list[Tensor]]:
        """Return a rule on tensors, and the tensors that it reads."""
        arrays = arrays_of(rule.node)
        trained = tuple(x for x in arrays if isinstance(x, Table) and x in self.call.floats)

        def read(x: Any) -> Tensor:
            tensor = next((a for y, a in self.x.items() if y is x), None)
            if isinstance(x, Table):
                tensor = constant_tensor(x.array, self.at[0].device) if tensor is None else tensor
                return tensor.to(self.real) if tensor.is_floating_point() else tensor
            return self.aligned(constant_tensor(x, self.at[0].device) if tensor is None else tensor)

        keys = checks.origin(self.call.options["origin"])[2] + self.size.n_k
        return TensorRule(rule.node, arrays, trained, self.real, keys), [read(x) for x in arrays]

    def whole(self, x: Tensor, tail: int = 0) -> Tensor:
        """Return (b, h, i, *tail) of the block as (..., h, n_q, *tail), with zeros in other rows."""
        before, after = self.rows.start, self.size.n_q - self.rows.stop
        x = torch.nn.functional.pad(x, (0, 0) * tail + (before, after))
        return x.reshape(*self.size.lead, *x.shape[1:])


def indices(call: TensorCall, size: CallSizes, rows: range, x: dict[Any, Tensor]) -> tuple[Tensor, ...]:
    """Return the absolute indices of a block of rows; axes that `vmap` added in front do not count for b."""
    batch, axis = prod(size.lead), partial(torch.arange, device=x["query"].device)
    offset = x.get("offset", call.options["offset"])
    if offset is None:
        offset = size.n_k - size.n_q
    b0, h0, j0 = checks.origin(call.options["origin"])
    offset = torch.as_tensor(offset, device=x["query"].device).expand(size.lead).reshape(-1)
    return (
        axis(batch)[:, None, None, None] % max(1, prod(size.lead[call.folded :])) + b0,
        axis(size.heads)[:, None, None] + h0,
        axis(rows.start, rows.stop)[:, None] + offset[:, None, None, None],
        axis(size.n_k) + j0,
    )


def checked_scale(call: TensorCall, q: Tensor) -> float:
    return checks.scale(call.options["scale"], q.shape[-1], compute_dtype(NUMPY[q.dtype]))


def seed_of(call: TensorCall, x: dict[Any, Tensor], device: torch.device) -> Tensor:
    """Return the 64 bits of the seed as int64."""
    if "seed" in x:
        return x["seed"].reshape(()).to(device, torch.int64)
    return torch.tensor(signed(int(call.options["seed"])), device=device)


class Finite(torch.autograd.Function):
    """Replace what is not finite by 0, with the derivative 1: the gradient of a NaN that is seen is NaN."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.where(x.isfinite(), x, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *ct: Any) -> Any:
        return ct[0]
