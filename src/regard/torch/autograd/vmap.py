"""`vmap` of calls: its axis becomes the first leading axis of every tensor.

Examples run one by one if they differ in a sink, table or seed, which engines have once per batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from regard.core import checks
from regard.core.options import RULES
from regard.core.problem import of_kind
from regard.torch.call.record import CallSizes, TensorCall
from regard.torch.tensors.modes import legacy_vmap_enter, legacy_vmap_leave, legacy_vmap_unwrap, legacy_vmap_wrap
from regard.torch.tensors.tables import TensorMask

Given = Sequence[torch.Tensor | None]
HEADS = of_kind("heads")
SHARED = (*HEADS, "seed")
"""Inputs besides tables that engines have once for a batch."""


def batched(
    apply: Callable[..., Any], roles: Sequence[Any], sums: bool, size: int, dims: Sequence[int | None], call:
    TensorCall, given: Given,
) -> Any:  # fmt: skip
    """Apply an operation to a batch; return its results and their batch axes, all 0.

    roles: the input or output behind each tensor, which may be its tangent. sums: the results are gradients, summed
    over the batch for inputs without leading axes. Engines share one sink, table and seed over a batch. So calls run
    one by one if these, or their gradients, differ. So do calls with dropout, which depends on the batch index.
    """
    front: list[Any] = [
        None if x is None else x if d is None else x.movedim(d, 0) for x, d in zip(given, dims, strict=True)
    ]
    mapped = [d is not None for d in dims]
    one_for_all = [role in SHARED or not isinstance(role, str | TensorMask) for role in roles]
    differ = [
        one and (m or (sums and role in call.floats)) for one, m, role in zip(one_for_all, mapped, roles, strict=True)
    ]
    if any(differ) or call.options["dropout"]:
        each = [apply(call, *(x[n] if m else x for x, m in zip(front, mapped, strict=True))) for n in range(size)]
        results = tuple(None if xs[0] is None else torch.stack(xs) for xs in zip(*each, strict=True))
    else:
        results = folded(apply, roles, sums, size, mapped, call, front)
    return results, tuple(None if x is None else 0 for x in results)


def folded(
    apply: Callable[..., Any], roles: Sequence[Any], sums: bool, size: int, mapped: Sequence[bool], call: TensorCall,
    given: Sequence[Any],
) -> tuple[Any, ...]:  # fmt: skip
    """Apply an operation once, with the batch axis as the first leading axis."""
    shapes: list[Any] = [
        None if x is None else x.shape[1:] if m else x.shape for x, m in zip(given, mapped, strict=True)
    ]
    operands = (shape for role, shape in zip(roles, shapes, strict=True) if role in ("query", "key", "value") and shape)
    lead = max(map(len, operands)) - 3
    ranks = {"offset": lead, "lse": lead + 2, "entropy": lead + 2}

    def with_batch_axis(x: torch.Tensor | None, role: Any, m: bool) -> torch.Tensor | None:
        if x is None or role in HEADS or not isinstance(role, str | TensorMask) or not (m or isinstance(role, str)):
            return x
        pad = (1,) * (ranks.get(str(role), lead + 3) - (x.ndim - m))
        return x.reshape(size, *pad, *x.shape[1:]) if m else x.expand(size, *pad, *x.shape)

    options = call.options
    if options["origin"] is None:
        whole(call, {role: s for role, s in zip(roles, shapes, strict=True) if s is not None})
        options = options | {"origin": (0, 0, 0)}  # rules see a part of the folded call
    inner = replace(call, options=options, folded=call.folded + 1, cached=None)
    results = apply(inner, *map(with_batch_axis, given, roles, mapped))
    if not sums:
        return tuple(results)
    shapes = shapes[: len(results)]
    return tuple(None if x is None else x.reshape(size, *s) for x, s in zip(results, shapes, strict=True))


def whole(call: TensorCall, shapes: dict[Any, Any]) -> None:
    """Check that rules end with the batch elements and heads of a call, without the axes of `vmap`."""
    rules = [*map(call.options.get, RULES), *(rule for s in call.observe for rule in s.rules)]
    if any(rule is not None for rule in rules):
        size = CallSizes.of(call, [shapes.get(x) for x in call.inputs])
        for rule in rules:
            if rule is not None:
                checks.whole(rule, math.prod(size.lead), size.heads)


@dataclass(frozen=True)
class LegacyBatch:
    """Tensors batched by the vmap before `torch.func`, at one of its levels.

    tensors: those that are `mapped` have the batch axis in front.
    """

    tensors: Given
    mapped: Sequence[bool]
    level: int
    depth: int

    def map(self, over_batch: Callable[..., Any], call: TensorCall) -> tuple[Any, ...]:
        """Apply an operation to the batch, outside of its level."""
        size = next(len(x) for x, m in zip(self.tensors, self.mapped, strict=True) if x is not None and m)
        inside = range(self.level, self.depth + 1)
        for _ in inside:
            legacy_vmap_leave()
        try:
            dims = [0 if m else None for m in self.mapped]
            results, _ = over_batch(size, dims, call, self.tensors)
        finally:
            for _ in inside:
                legacy_vmap_enter()
        return tuple(None if x is None else legacy_vmap_wrap(x, 0, self.level) for x in results)


def legacy_batch(args: Sequence[Any]) -> LegacyBatch | None:
    """Return the batch of the innermost level with a batched tensor, or None.

    args: (call, *tensors or None).
    """
    depth = legacy_vmap_enter() - 1
    legacy_vmap_leave()
    for level in range(depth, 0, -1):
        # A tensor without this level comes back with a new axis of size 0, which no batch has.
        whole = [None if x is None else legacy_vmap_unwrap(x, level, 0, 0) for x in args[1:]]
        mapped = [x is not None and len(x) > 0 for x in whole]
        if any(mapped):
            unwrapped = [x if m else y for x, y, m in zip(whole, args[1:], mapped, strict=True)]
            return LegacyBatch(unwrapped, mapped, level, depth)
    return None
