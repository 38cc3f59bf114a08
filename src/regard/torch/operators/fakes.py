"""Shapes and dtypes of the results of each operation, for tensors without values."""

from typing import Any

import torch

from regard.core.statistics import ENTROPY, INTEGERS, LSE, Sizes
from regard.ops.normalization import problem_from
from regard.torch.call.record import HOST, CallSizes, TensorCall
from regard.torch.call.text import call_of
from regard.torch.composed import higher
from regard.torch.tensors.arrays import hollow

Results = list[torch.Tensor]


def attention_fake(given: list[Any], text: str) -> Results:
    """Return empty results of attention."""
    call = call_of(text)
    size, q = CallSizes.of(call, [x.shape for x in given]), given[0]
    checked_shapes(call, given)
    lead, heads, n_q, n_k = size.lead, size.heads, size.n_q, size.n_k
    matrix = (n_q, heads) if size.positions_first else (heads, n_q)
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    result = (*lead, heads, n_q, n_k) if call.weights else (*lead, *matrix, size.value)
    rows = (*lead, heads, n_q)
    observed = Sizes(lead, heads, size.groups, n_q, n_k)
    others = [] if call.weights else [s for s in call.observe if s not in (LSE, ENTROPY)]
    first = ["lse", "entropy"] if "entropy" in call.results else ["lse"]
    shapes = [*([rows] * len(first)), *(shape for s in others for shape in s.shapes(observed))]
    results = [q.new_empty(result)]
    for name, shape in zip(call.results[1 : len(shapes) + 1], shapes, strict=True):
        results.append(q.new_empty(shape, dtype=torch.int64 if name in INTEGERS else real))
    return [*results, q.new_empty(result)] if call.low else results


def checked_shapes(call: TensorCall, given: list[Any]) -> None:
    """Check a call by its shapes, if all sizes are known."""
    named = {name: x for name, x in zip(call.inputs, given, strict=True) if type(name) is str and name not in HOST}
    if call.folded or not all(type(n) is int for x in named.values() for n in x.shape):
        return
    named.setdefault("value", named["key"])
    problem_from(**{name: hollow(x) for name, x in named.items()}, layout=call.options["layout"])


def outputs_fake(given: list[Any], text: str) -> Results:
    """Return empty tangents of the outputs, which follow the inputs in `given`."""
    n = len(call_of(text).inputs)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[n : n + 3] if x is not None]


def floats_fake(given: list[Any], text: str) -> Results:
    """Return empty gradients, in the shapes of the floats."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given[: len(call_of(text).floats)]]


def derivative_fake(given: list[Any], text: str) -> Results:
    """Return empty results of a derivative beyond the second."""
    call = call_of(text)
    return higher.empty_results(call, given, lambda inputs: attention_fake(inputs, text)[: len(call.outputs)])


FAKES = {
    "attention": attention_fake,
    "attention_backward": floats_fake,
    "attention_tangent": outputs_fake,
    "attention_backward_tangent": floats_fake,
    "attention_tangent_tangent": outputs_fake,
    "attention_derivative": derivative_fake,
}
