"""Calls on arrays of a device, copied to one, or on the host for the interpreter."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from regard.core.problem import Differential, Outputs, Problem, device_of
from regard.core.statistics import Argmax, Entropy, Largest, Statistic, Visible, each_array, pooled
from regard.core.tensors import array, converted, tensor
from regard.engines.observed import basic, complete
from regard.engines.triton.launch import derivatives, forward_launch, statistics
from regard.engines.triton.launch.launching import INTERPRETED
from regard.rules.expression import rebuild

Array = np.ndarray[Any, np.dtype[Any]]


def called(name: str, p: Problem, *given: Any) -> Any:
    """Call a function of the engine on arrays of a device or of the host."""
    function = FUNCTIONS[name]
    if p.device is not None or INTERPRETED:
        if p.device is None or p.device.type != "cuda":
            return function(p, *given)
        with torch.cuda.device(p.device):  # on the current stream
            return function(p, *given)
    device = torch.device("cuda", torch.cuda.current_device())
    up = lambda x: array(tensor(np.array(x)).to(device))  # noqa: E731
    there = problem_on(p, up)
    return each(function(there, *each(given, up)), host)


def each(x: Any, convert: Callable[[Array], Array]) -> Any:
    """Return x with `convert` applied to every array in it."""
    if isinstance(x, np.ndarray):
        return convert(x)
    if isinstance(x, Differential):
        tables = {table: convert(a) for table, a in x.tables.items()}
        arrays = {f.name: each(getattr(x, f.name), convert) for f in fields(x) if f.name != "tables"}
        return Differential(**arrays, tables=tables)
    if isinstance(x, dict):
        return {key: each(a, convert) for key, a in x.items()}
    if isinstance(x, tuple):
        found = [each(a, convert) for a in x]
        return type(x)(*found) if hasattr(x, "_fields") else tuple(found)
    if is_dataclass(x) and not isinstance(x, Problem | Statistic):
        return each_array(x, convert)
    return x


def host(x: Array) -> Array:
    """Return an array on the host."""
    return x if device_of(x) is None else array(tensor(x).cpu())


def problem_on(p: Problem, up: Callable[[Array], Array]) -> Problem:
    def rule(x: Any) -> Any:
        return None if x is None else replace(x, node=rebuild(x.node, {id(a): up(a) for a in x.dense}))

    q, k, v, bias, sink = (None if x is None else up(x) for x in (p.query, p.key, p.value, p.bias, p.sink))
    assert q is not None
    assert k is not None
    assert v is not None
    return replace(p, query=q, key=k, value=v, bias=bias, sink=sink, mask=rule(p.mask), score=rule(p.score))


def forward(p: Problem, into: Outputs | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    observe = basic(p.observe)
    names = frozenset(s.name for s in observe if isinstance(s, Entropy | Largest | Argmax | Visible))
    outputs, found = forward_launch.forward(p, names, into)
    assert outputs.lse is not None
    seen: dict[Statistic, Any] = {s: found[s.name] for s in observe if s.name in found}
    seen |= statistics.second_pass(p, outputs.lse, tuple(s for s in observe if s not in seen))
    if all(s in seen for s in p.observe):
        return outputs, {s: seen[s] for s in p.observe}
    # Statistics that follow from others have few numbers per query, and are computed on the host.
    made = complete(p, host(outputs.lse), each(seen, host), lambda p: each(forward(p), host))
    if p.device is not None:
        up = lambda x: array(tensor(x).to(p.device))  # noqa: E731
        made = {s: seen[s] if s in seen else each(x, up) for s, x in made.items()}
    return outputs, made


def weights(p: Problem, lse: Array, rows: Sequence[int], cols: range) -> Array:
    """Return weights, on a device in the call's dtype, else in that of sums.

    With every key, rows are a softmax of their own scores. Else the rounding of lse adds |lse| eps to the error.
    """
    whole = len(cols) == p.n_k and cols.step > 0
    found = statistics.whole_rows(p, rows) if whole else statistics.part(p, lse, rows, cols)
    return found if p.device is None else converted(found, p.dtype)


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    return derivatives.backward(p, outputs, ct, derivatives.Direction(t, d_outputs, d_ct))


def maps(p: Problem, lse: Array, rows: int, cols: int) -> tuple[Array, Array]:
    mass, largest = pooled(rows, cols), pooled(rows, cols, "max")
    found = statistics.second_pass(p, lse, (mass, largest))
    return found[mass], found[largest]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "weights": weights,
    "maps": maps,
    "backward": derivatives.backward,
    "jvp": derivatives.jvp,
    "backward_jvp": backward_jvp,
    "jvp_jvp": derivatives.jvp_jvp,
}
