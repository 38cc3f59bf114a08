"""Rules and dropout as tensors, with the derivatives that rules define."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.problem import device_of
from regard.core.tensors import tensor
from regard.reference.specification import GOLDEN
from regard.rules import Node, order, partials
from regard.rules.derivative import is_zero
from regard.rules.expression import INT64

WORD = 2**32 - 1


@dataclass(frozen=True, eq=False)
class TensorRule:
    """An expression of a rule, to be evaluated on tensors.

    arrays: its tables and dense arrays, in the order of their tensors. trained: those with a derivative. dtype: of
    float arithmetic. keys: the number of keys of the whole sequence.
    """

    node: Node
    arrays: tuple[Any, ...]
    trained: tuple[Any, ...]
    dtype: torch.dtype
    keys: int

    def slot(self, payload: Any) -> int:
        return next(n for n, x in enumerate(self.arrays) if x is payload)


def arrays_of(node: Node) -> tuple[Any, ...]:
    """Return the tables and dense arrays that an expression reads."""
    read = (x.payload for x in order([node]) if x.op in ("gather", "dense"))
    return tuple({id(x): x for x in read}.values())


def tensor_on(x: Any, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, integers as int64.

    PyTorch reads no unsigned integers, and no NumPy array that may not be written or runs backward.
    """
    if device_of(x) is None:
        x = x.astype(np.int64, copy=False) if x.dtype.kind in "iu" else x
        x = x if x.flags.writeable and min(x.strides, default=0) >= 0 and x.dtype.isnative else np.array(x)
    moved = tensor(x).to(device)
    return moved if moved.is_floating_point() or moved.dtype is torch.bool else moved.long()


def _integer(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an integer division that gives 0 for a zero divisor."""
    return lambda a, b: torch.where(b == 0, 0, function(a, torch.where(b == 0, 1, b)))


def _truncate(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x.long()
    below, above = x < INT64.min, x >= 2.0**63
    inside = torch.where(below | above | x.isnan(), 0, x).long()
    return torch.where(below, INT64.min, torch.where(above, INT64.max, inside))


SPECIAL: dict[str, Callable[..., Tensor]] = {
    "equal": torch.eq,
    "rint": torch.round,
    "invert": torch.bitwise_not,
    "left_shift": torch.bitwise_left_shift,
    "right_shift": torch.bitwise_right_shift,
    "floor_divide": _integer(torch.floor_divide),
    "remainder": _integer(torch.remainder),
    "int": _truncate,
}


def flat_index(table: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Return row-major positions in a table of clamped indices."""
    flat = torch.zeros((), dtype=torch.int64, device=table.device)
    for length, index in zip(table.shape, indices, strict=True):
        flat = flat * length + index.clamp(0, length - 1)
    return flat


def evaluate(
    rule: TensorRule, nodes: Sequence[Node], at: Sequence[Tensor], s: Tensor | None, arrays: Sequence[Tensor]
) -> list[Tensor]:
    """Evaluate expressions at absolute indices (b, h, i, j) and scores s, which masks do not read."""
    dtypes = {"bool": torch.bool, "int": torch.int64, "float": rule.dtype}
    leaves: dict[str, Any] = dict(zip("bhij", at, strict=True)) | {"s": s}
    values: dict[Node, Tensor] = {}
    for node in order(nodes):
        args = [values[arg] for arg in node.args]
        if node.op in leaves:
            value = leaves[node.op]
        elif node.op in ("number", "literal", "keys"):
            number = rule.keys if node.op == "keys" else node.payload
            value = torch.full((), number, dtype=dtypes[node.kind], device=at[0].device)
        elif node.op == "dense":
            value = arrays[rule.slot(node.payload)]
        elif node.op == "gather":
            table = arrays[rule.slot(node.payload)]
            value = table.reshape(-1)[flat_index(table, args)].to(dtypes[node.kind])
        elif node.op == "float":
            value = args[0].to(rule.dtype)
        else:
            operation = SPECIAL.get(node.op) or getattr(torch, node.op)
            value = operation(*args)
        values[node] = value
    return [values[node] for node in nodes]


class RuleValue(torch.autograd.Function):
    """The value of a rule in the shape of s: (rule, visible, b, h, i, j, s, *arrays) → (b, h, i, j).

    The value is differentiable in s and in the tables that train. Derivatives are 0 where `visible` is not set or the
    value is −∞, whatever those of the rule are. They are rules themselves, so all orders follow.
    """

    @staticmethod
    def forward(rule: TensorRule, visible: Tensor, *given: Tensor) -> Tensor:
        s = given[4]
        (value,) = evaluate(rule, [rule.node], given[:4], s, given[5:])
        return value if value.shape == s.shape and value is not s else value.expand(s.shape).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rule, visible, *operands = inputs
        visible = visible & (output != -torch.inf)
        ctx.save_for_backward(visible, *operands)

    @staticmethod
    def backward(ctx: Any, *ct: Any) -> Any:
        visible, *operands = ctx.saved_tensors
        d_s, readings = slopes(ctx.rule, visible, operands)
        gradients: list[Tensor | None] = [None] * len(operands)
        gradients[4] = None if d_s is None else ct[0] * d_s
        for leaf, slope in readings.items():
            n = 5 + ctx.rule.slot(leaf.payload)
            part = scattered(ctx.rule, leaf, ct[0] * slope, operands)
            before = gradients[n]
            gradients[n] = part if before is None else before + part
        return None, None, *gradients


def slopes(rule: TensorRule, visible: Tensor, given: Sequence[Tensor]) -> tuple[Tensor | None, dict[Node, Tensor]]:
    """Return the derivatives of a rule in s, None for 0, and in each reading of a table that trains."""

    def slope(node: Node) -> Tensor:
        return torch.where(visible, RuleValue.apply(replace(rule, node=node), visible, *given), 0)

    d_s, readings = partials(rule.node)
    trained = {leaf: x for leaf, x in readings.items() if any(leaf.payload is y for y in rule.trained)}
    return None if is_zero(d_s) else slope(d_s), {leaf: slope(x) for leaf, x in trained.items() if not is_zero(x)}


def index_of(rule: TensorRule, leaf: Node, given: Sequence[Tensor]) -> Tensor:
    """Return the positions in its table that a reading reads."""
    indices = evaluate(rule, leaf.args, given[:4], given[4], given[5:])
    return flat_index(given[5 + rule.slot(leaf.payload)], indices)


def scattered(rule: TensorRule, leaf: Node, values: Tensor, given: Sequence[Tensor]) -> Tensor:
    """Sum values (b, h, i, j) into the table that a reading reads: the transpose of reading it."""
    table, flat = given[5 + rule.slot(leaf.payload)], index_of(rule, leaf, given)
    flat = flat.reshape((1,) * (values.ndim - flat.ndim) + flat.shape)
    shared = [axis for axis, length in enumerate(flat.shape) if length == 1 != values.shape[axis]]
    values = values.sum(shared, keepdim=True) if shared else values  # an axis along which one entry is read
    total = torch.zeros(table.numel(), dtype=values.dtype, device=values.device)
    flat, values = flat.expand(values.shape).reshape(-1), values.reshape(-1)
    if total.is_cpu:
        return total.index_add(0, flat, values).reshape(table.shape)
    return total.index_put((flat,), values, accumulate=True).reshape(table.shape)  # CUDA's index_add has no fixed order


# Dropout


def keep_mask(p: float, seed: Tensor, at: Sequence[Tensor]) -> Tensor:
    """Return the mask of dropout, by the bits of `specification.random_bits`.

    seed: its 64 bits as int64. PyTorch shifts no unsigned integers, so bits that a shift brings in are cleared.
    """
    key, (*rows, j) = _mix64(seed + signed(GOLDEN)), at
    for index in rows:
        key = _mix64((key ^ index) + signed(GOLDEN))
    first, second = key & WORD, _shifted(key, 32)
    x = ((j & WORD) ^ ((j >> 32) * (GOLDEN & WORD) & WORD)) + first & WORD
    x = (x ^ (x >> 16)) * 0x7FEB352D + second & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return (x ^ (x >> 16)) >= int(p * 2**32)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, n: int) -> Tensor:
    """Return the bits of int64 shifted to the right, with zeros on the left."""
    return (x >> n) & (2 ** (64 - n) - 1)


def signed(x: int) -> int:
    """Return the int64 of 64 bits."""
    return x - 2**64 if x >= 2**63 else x
