"""The public functions of `regard` on tensors."""

from typing import Any

import numpy as np
import torch

from regard import checks
from regard.api import problem_from
from regard.observing import Seen, Top
from regard.rules import as_mask, as_score
from regard.rules.masks import foreign
from regard.torch import graph
from regard.torch.arrays import NUMPY, autocast, checked
from regard.torch.autograd import Attention, run
from regard.torch.calls import DEFAULTS, Call, new_seed
from regard.torch.rules import constant, flags, table

__all__ = ["attention", "constant", "flags", "table"]


def attention(
    query: Any, key: Any, value: Any, *, return_weights: bool = False, observe: Any = (), engine: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """`regard.attention` on tensors."""
    if torch.compiler.is_compiling():
        return graph.attention(query, key, value, return_weights, observe, engine, options)
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"attention() got an unexpected keyword argument {min(unknown)!r}")
    q, k, v = checked("query", query), checked("key", key), checked("value", value)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = map(autocast, (q, k, v))
    given: dict[Any, torch.Tensor] = {"query": q, "key": k, "value": v}
    others: dict[Any, torch.Tensor] = {}
    options = DEFAULTS | options | {"observe": checks.observe(observe)}
    for name in ("bias", "sink"):
        if options[name] is not None:
            given[name], options[name] = checked(name, options[name]), None
    for name, rule in (("mask", as_mask), ("score", as_score)):
        if options[name] is not None:
            options[name] = rule(options[name])
    if options["score"] is not None:
        for x in foreign(options["score"].node):
            (given if x.kind == "float" else others)[x] = x.tensor
    if options["mask"] is not None:
        for x in foreign(options["mask"].node):
            if x not in given:
                others[x] = x.tensor
    if isinstance(options["offset"], torch.Tensor):
        others["offset"], options["offset"] = checked("offset", options["offset"]), None
    if options["dropout"] and options["seed"] is None:
        others["seed"] = new_seed()
    return_weights = checks.boolean("return_weights", return_weights)
    matrices = q.ndim == 2
    if matrices:
        stand_in(given, options)
        given |= {name: given[name][None] for name in ("query", "key", "value")}
    call = Call(options, tuple(given), tuple(others), engine)
    inputs = (*given.values(), *others.values())
    plain = not (torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0)
    plain = plain and not torch._C._are_functorch_transforms_active()
    found = run(call, *inputs) if plain else Attention.apply(call, *inputs)
    if matrices:
        found = tuple(x[0] for x in found)
    results: list[Any] = [found[0]]
    if return_weights:
        floats = {name: x for name, x in given.items() if name != "value"}
        fixed = {name: x for name, x in others.items() if name != "seed"}
        one = Call(options | {"dropout": 0.0, "observe": ()}, tuple(floats), tuple(fixed), engine, weights=True)
        tile = Attention.apply(one, *floats.values(), *fixed.values())[0]
        results.append(tile[0] if matrices else tile)
    if call.observe:
        results.append(seen(call, found))
    return results[0] if len(results) == 1 else tuple(results)


def seen(call: Call, found: tuple[torch.Tensor, ...]) -> Seen:
    rest = iter(found[3 if "entropy" in call.results else 2 :])
    named = {"lse": lambda: found[1], "entropy": lambda: found[2], "top": lambda: Top(next(rest), next(rest))}
    return Seen({s: named.get(s.name, lambda: next(rest))() for s in call.observe})


def stand_in(given: dict[Any, torch.Tensor], options: dict[str, Any]) -> None:
    """The checks of a call before its matrices become heads, so that messages show what was given."""
    arrays = {
        name: np.broadcast_to(np.empty((), NUMPY[x.dtype]), x.shape) for name, x in given.items() if type(name) is str
    }
    seed = 0 if options["seed"] is None else options["seed"]
    problem_from(**arrays, **{name: x for name, x in options.items() if name not in arrays} | {"seed": seed})
