"""The public functions of `regard` on tensors."""

from typing import Any

import numpy as np
import torch

from regard import checks
from regard.api import problem_from
from regard.observing import Seen, Top
from regard.rules import as_mask, as_score
from regard.torch import rules
from regard.torch.arrays import NUMPY, checked
from regard.torch.autograd import Attention, run
from regard.torch.calls import Call
from regard.torch.rules import constant, flags, table

__all__ = ["attention", "constant", "flags", "table"]
SEEDS = 2**63 - 1


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    score: Any = None,
    bias: Any = None,
    scale: float | None = None,
    sink: Any = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: Any = None,
    origin: tuple[int, int, int] = (0, 0, 0),
    layout: Any = "bhnd",
    return_weights: bool = False,
    observe: Any = (),
    engine: str | None = None,
) -> Any:
    """`regard.attention` on tensors."""
    q, k, v = checked("query", query), checked("key", key), checked("value", value)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = map(autocast, (q, k, v))
    given: dict[Any, torch.Tensor] = {"query": q, "key": k, "value": v}
    for name, x in (("bias", bias), ("sink", sink)):
        if x is not None:
            given[name] = checked(name, x)
    others: dict[Any, torch.Tensor] = {}
    options = {
        "mask": None if mask is None else as_mask(mask),
        "score": None if score is None else as_score(score),
        "causal": causal, "scale": scale, "dropout": dropout, "seed": seed, "offset": offset, "origin": origin,
        "layout": layout, "observe": checks.observe(observe),
    }  # fmt: skip
    if options["score"] is not None:
        for x in rules.inputs(options["score"].node):
            (given if x.kind == "float" else others)[x] = x.tensor
    if options["mask"] is not None:
        for x in rules.inputs(options["mask"].node):
            if x not in given:
                others[x] = x.tensor
    if isinstance(offset, torch.Tensor):
        others["offset"], options["offset"] = checked("offset", offset), None
    if dropout and seed is None:
        others["seed"] = torch.randint(0, SEEDS, ())
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


def autocast(x: torch.Tensor) -> torch.Tensor:
    """What PyTorch's autocast makes of an operand of its own attention: 64 bits stay."""
    if x.is_floating_point() and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype("cpu"))
    return x


def stand_in(given: dict[Any, torch.Tensor], options: dict[str, Any]) -> None:
    """The checks of a call before its matrices become heads, so that messages show what was given."""
    arrays = {
        name: np.broadcast_to(np.empty((), NUMPY[x.dtype]), x.shape) for name, x in given.items() if type(name) is str
    }
    seed = 0 if options["seed"] is None else options["seed"]
    problem_from(**arrays, **{name: x for name, x in options.items() if name not in arrays} | {"seed": seed})
