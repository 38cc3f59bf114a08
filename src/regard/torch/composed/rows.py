"""The outputs of a block of rows of a call on tensors, by the formula of the engine `device`."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from regard.core import checks
from regard.core.problem import compute_dtype
from regard.core.tensors import NUMPY
from regard.engines.device.formula import Block, Formula, Tensors
from regard.engines.device.rules import arrays_of, signed, tensor_on
from regard.ops.normalization import causally
from regard.torch.call.record import DEFAULTS, CallSizes, TensorCall

KNOWS = frozenset({
    "query", "key", "value", "mask", "causal", "score", "bias", "scale", "sink", "dropout", "seed", "offset", "origin",
    "layout", "observe",
})  # fmt: skip
"""The operands and options of a call that the formula has."""


def outputs(call: TensorCall, finite: bool, rows: range, floats: Tensors, others: Tensors) -> Tensors:
    """Return out, lse and, if observed, entropy of some rows, with zeros in all others.

    The outputs of a call, and all their derivatives, are therefore sums over blocks of rows.
    """
    inputs = dict(zip(call.inputs, floats + others, strict=True))
    size = CallSizes.of(call, [x.shape for x in inputs.values()])
    f = formula(call, size, inputs, finite)
    block = Block(f, rows, range(size.n_k))
    first = size.positions_first
    x = {n: a.transpose(-2, -3) if first and n in ("query", "key", "value") else a for n, a in inputs.items()}
    y = block.outputs({n: block.part(n, a).to(f.real) for n, a in x.items() if n in call.floats or n in call.constants})
    results = [whole(size, rows, y.out, 1).to(inputs["query"].dtype), whole(size, rows, y.lse)]
    if y.entropy is not None:
        results.append(whole(size, rows, y.entropy))
    if first and not call.weights:
        results[0] = results[0].transpose(-2, -3)
    return tuple(results)


def formula(call: TensorCall, size: CallSizes, given: dict[Any, Tensor], finite: bool) -> Formula:
    """Return a call without its inputs; axes that `vmap` added in front do not count for b.

    Raises NotImplementedError for an option that is not in `KNOWS`.
    """
    more = {name for name, x in call.options.items() if x is not DEFAULTS.get(name)}
    if lost := more.union(x for x in call.inputs if isinstance(x, str)) - KNOWS:
        named = ", ".join(map(repr, sorted(lost)))
        raise NotImplementedError(f"derivatives of regard.attention beyond the second do not know {named}")
    query, options = given["query"], call.options
    device, batch = query.device, prod(size.lead)
    real = torch.float64 if query.dtype is torch.float64 else torch.float32
    mask = causally(options["mask"]) if options["causal"] else options["mask"]
    masking, scoring = (None if rule is None else rule.node for rule in (mask, options["score"]))
    read = {id(a): a for node in (masking, scoring) if node is not None for a in arrays_of(node)}
    varying = {id(a) for a in (*call.floats, *call.constants)}
    b, h, first_key = checks.origin(options["origin"])
    offset = given.get("offset", options["offset"])
    offset = torch.as_tensor(size.n_k - size.n_q if offset is None else offset, device=device)
    axis = torch.arange(batch, device=device) % max(1, prod(size.lead[call.folded :])) + b
    return Formula(
        size.lead, size.heads, size.groups, size.n_k,
        checks.scale(options["scale"], size.d, compute_dtype(NUMPY[query.dtype])), masking, scoring,
        trained=tuple(a for a in read.values() if id(a) in {id(x) for x in call.floats}),
        constants={i: constant(a, given, real, device) for i, a in read.items() if i not in varying},
        dropout=options["dropout"], seed=seed_of(call, given, device) if options["dropout"] else None,
        b=axis[:, None, None, None], h=torch.arange(h, h + size.heads, device=device)[:, None, None],
        offset=offset.expand(size.lead).reshape(-1)[:, None, None, None], first_key=first_key,
        keys=first_key + size.n_k, real=real, finite=finite, entropy="entropy" in call.outputs,
    )  # fmt: skip


def constant(x: Any, given: dict[Any, Tensor], real: torch.dtype, device: torch.device) -> Tensor:
    """Return the tensor of an array of a rule, which may be one of the call's."""
    moved = next((a for y, a in given.items() if y is x), None)
    moved = tensor_on(getattr(x, "array", x), device) if moved is None else moved
    return moved.to(real) if moved.is_floating_point() else moved


def seed_of(call: TensorCall, given: dict[Any, Tensor], device: torch.device) -> Tensor:
    """Return the 64 bits of the seed as int64."""
    if "seed" in given:
        return given["seed"].reshape(()).to(device, torch.int64)
    return torch.tensor(signed(int(call.options["seed"])), device=device)


def whole(size: CallSizes, rows: range, x: Tensor, tail: int = 0) -> Tensor:
    """Return (b, h, i, *tail) of a block as (..., h, n_q, *tail), with zeros in other rows."""
    x = torch.nn.functional.pad(x, (0, 0) * tail + (rows.start, size.n_q - rows.stop))
    return x.reshape(*size.lead, *x.shape[1:])
