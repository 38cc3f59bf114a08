"""The outputs of a block of rows, by the formulas of the specification.

All is PyTorch's operations on tensors (b, h, i, j), which PyTorch differentiates to any order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.engines.device.products import Softmax, VisibleScores, VisibleSum
from regard.engines.device.rules import RuleValue, TensorRule, arrays_of, evaluate, keep_mask
from regard.rules import Node, order

Tensors = tuple[Tensor, ...]
Inputs = Mapping[Any, Tensor]
"""Tensors by name ("query", "key", "value", "bias", "sink"), and by the table that they stand for."""


@dataclass(frozen=True, eq=False)
class Formula:
    """A call without its inputs.

    trained: tables with a derivative, which are inputs. constants: the tensors of all other arrays of rules, by id. b,
    h, offset: absolute indices (b, 1, 1, 1) and (h, 1, 1) and the offset of rows; of these, b and the offset may have
    one entry for all. first_key: the absolute index of key 0. keys: of the whole sequence. real: the dtype of sums.
    finite: query, key, value, and the (co)tangents of a derivative. entropy: it is an output.
    """

    lead: tuple[int, ...]
    heads: int
    kv_heads: int
    n_k: int
    scale: float
    mask: Node | None
    score: Node | None
    trained: tuple[Any, ...]
    constants: Mapping[int, Tensor]
    dropout: float
    seed: Tensor | None
    b: Tensor
    h: Tensor
    offset: Tensor
    first_key: int
    keys: int
    real: torch.dtype
    finite: bool
    entropy: bool


class RowOutputs(NamedTuple):
    """Outputs of a block: out (b, h, i, c), lse and entropy (b, h, i), None if it is not observed.

    P: the weights. S: the scores, −∞ where they are hidden.
    """

    out: Tensor
    lse: Tensor
    entropy: Tensor | None
    P: Tensor
    S: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of a call, and the keys that they may see."""

    formula: Formula
    rows: range
    keys: range

    @property
    def at(self) -> Tensors:
        """The absolute indices b, h, i and j, which broadcast to (b, h, i, j)."""
        f = self.formula
        i, j = (torch.arange(x.start, x.stop, x.step, device=f.b.device) for x in (self.rows, self.keys))
        return f.b, f.h, i[:, None] + f.offset, j + f.first_key

    # The part of each input that the block reads

    def part(self, name: Any, x: Tensor) -> Tensor:
        """Return a view of what the block reads of an input."""
        if name == "query":
            return x[..., self.slice(self.rows), :]
        if name in ("key", "value"):
            return x[..., self.slice(self.keys), :]
        return self.of_scores(x) if name == "bias" else x

    def of_scores(self, x: Tensor) -> Tensor:
        """Return the part of a dense mask or bias; axes of length 1 stay."""
        if x.ndim > 1 and x.shape[-2] != 1:
            x = x[..., self.slice(self.rows), :]
        return x[..., self.slice(self.keys)] if x.ndim and x.shape[-1] != 1 else x

    @staticmethod
    def slice(x: range) -> slice:
        return slice(x.start, x.stop, x.step)

    def flat(self, x: Tensor, keep: int = 3) -> Tensor:
        """Merge the leading dimensions of (..., *tail) to b; one entry stays if all are 1."""
        lead = self.formula.lead
        x = x.reshape((1,) * (len(lead) + keep - x.ndim) + tuple(x.shape))
        tail = x.shape[x.ndim - keep :]
        if all(n == 1 for n in x.shape[: x.ndim - keep]):
            return x.reshape(1, *tail)
        return x.expand(*lead, *tail).reshape(prod(lead), *tail)

    def grouped(self, x: Tensor) -> Tensor:
        """Return (b, h, i, x) as (b, h_kv, group · i, x): the rows that a key-value head serves."""
        f = self.formula
        if f.heads == f.kv_heads:
            return x
        return x.reshape(x.shape[0], f.kv_heads, f.heads // f.kv_heads * x.shape[2], x.shape[3])

    def ungrouped(self, x: Tensor) -> Tensor:
        """Return the transpose of `grouped`."""
        f = self.formula
        return x if f.heads == f.kv_heads else x.reshape(x.shape[0], f.heads, len(self.rows), x.shape[3])

    def every(self, visible: Tensor | None) -> Tensor:
        """Return the visible pairs as (b, h_kv, group · i, j)."""
        f = self.formula
        shape = prod(f.lead), f.heads, len(self.rows), len(self.keys)
        if visible is None:
            visible = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=f.b.device)
        return self.grouped(visible.expand(shape))

    # The formulas

    def outputs(self, x: Inputs) -> RowOutputs:
        """Compute the outputs from the parts of the inputs. Without a value, `out` is the weights."""
        f, at = self.formula, self.at
        S, visible = self.scores(x, at)
        sink = x["sink"] if "sink" in x else S.new_full((1,), -torch.inf)
        P, _, lse, log_P = Softmax.apply(S, sink.reshape(-1, 1), visible, not f.finite, f.entropy)
        H = None if log_P is None else -(P * log_P).sum(-1)
        out = self.attended(P, x["value"], visible, at) if "value" in x else P
        return RowOutputs(out, lse, H, P, S)

    def scores(self, x: Inputs, at: Tensors) -> tuple[Tensor, Tensor | None]:
        """Return S, −∞ where it is hidden, and the visible pairs, which broadcast; None if all are."""
        f = self.formula
        q, k = (self.expanded(x[name]) for name in ("query", "key"))
        q = self.grouped(f.scale * q)
        visible = None if f.mask is None else self.rule(f.mask, x, at)
        if f.finite:
            T = q @ k.mT
        else:
            with torch.no_grad():  # products need all that is hidden, which scores decide
                visible = self.ruled(self.ungrouped(q @ k.mT), visible, x, at)[1]
            T = VisibleScores.apply(q, k, self.every(visible))
        S, visible = self.ruled(self.ungrouped(T), visible, x, at)
        return (S if visible is None else S.masked_fill_(~visible, -torch.inf)), visible

    def expanded(self, x: Tensor) -> Tensor:
        """Return (b, heads, n, d) of an operand (..., heads, n, d)."""
        lead = self.formula.lead
        return x.expand(*lead, *x.shape[-3:]).reshape(prod(lead), *x.shape[-3:])

    def ruled(self, S: Tensor, visible: Tensor | None, x: Inputs, at: Tensors) -> tuple[Tensor, Tensor | None]:
        """Return scores after the score rule and the bias, and what is visible after them."""
        f = self.formula
        if f.score is not None:
            rule, arrays = self.tensor_rule(f.score, x)
            S = RuleValue.apply(rule, S.new_ones((), dtype=torch.bool) if visible is None else visible, *at, S, *arrays)
        if "bias" in x:
            bias = self.flat(x["bias"])
            S = S + (bias if visible is None else torch.where(visible, bias, 0))
        if f.score is not None or "bias" in x or not f.finite:
            seen = S != -torch.inf
            visible = seen if visible is None else visible & seen
        return S, visible

    def rule(self, node: Node, x: Inputs, at: Tensors) -> Tensor:
        """Return the values of a mask, or of another rule without scores."""
        rule, arrays = self.tensor_rule(node, x)
        (value,) = evaluate(rule, [node], at, None, arrays)
        return value

    def tensor_rule(self, node: Node, x: Inputs) -> tuple[TensorRule, list[Tensor]]:
        """Return a rule on tensors, and the tensors that it reads."""
        f, arrays = self.formula, arrays_of(node)
        dense = {id(y.payload) for y in order([node]) if y.op == "dense"}
        read = [f.constants[id(a)] if id(a) in f.constants else x[a] for a in arrays]
        parts = [self.flat(self.of_scores(y)) if id(a) in dense else y for a, y in zip(arrays, read, strict=True)]
        return TensorRule(node, arrays, f.trained, f.real, f.keys), parts

    def attended(self, P: Tensor, value: Tensor, visible: Tensor | None, at: Tensors) -> Tensor:
        """Return (P · D) V over visible pairs."""
        f, v = self.formula, self.expanded(value)
        if f.dropout:
            assert f.seed is not None
            P = P * keep_mask(f.dropout, f.seed, at).to(f.real).mul_(1 / (1 - f.dropout))
        W = self.grouped(P)
        return self.ungrouped(W @ v if f.finite else VisibleSum.apply(W, v, self.every(visible)))
