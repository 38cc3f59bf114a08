"""The public functions of `regard` on tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from regard.core import checks
from regard.core.tensors import tensor
from regard.ops import attention as calls_on_arrays
from regard.ops import planning, stepping
from regard.ops.attention import problem_from
from regard.rules import Rule, as_mask, as_score
from regard.rules.masks import foreign
from regard.torch.arrays import autocast, autocasting, checked, concrete, hollow, together, values
from regard.torch.autograd import AttentionFunction
from regard.torch.calls import DEFAULTS, TensorCall, new_seed, seen_of
from regard.torch.fastpath import short
from regard.torch.functions import linear_attention, merge, multihead_attention
from regard.torch.graph import traced
from regard.torch.graph.modes import fake, jit_state, symbolic, tracing, transformed
from regard.torch.graph.operators import execute
from regard.torch.graph.traced import construct
from regard.torch.rules import bind, constant, flags, table

_watching: ContextVar[Callable[..., Any] | None] = ContextVar("watching", default=None)

__all__ = [
    "attention", "constant", "construct", "flags", "linear_attention", "merge", "multihead_attention", "plan", "steps",
    "table", "weights",
]  # fmt: skip
ALL = slice(None)


def attention(
    query: Any, key: Any, value: Any, *, return_weights: bool = False, observe: Any = (), engine: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """`regard.attention` on tensors."""
    if torch.compiler.is_compiling():
        return traced.attention(query, key, value, return_weights, observe, engine, options)
    watch = _watching.get()
    if watch is not None:
        with watched(None):
            return watch(query, key, value, return_weights=return_weights, observe=observe, engine=engine, **options)
    call = None if return_weights or observe or engine is not None else short(query, key, value, options)
    if call is not None:
        out: torch.Tensor = applied(call, query, key, value)[0]
        return out
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        raise TypeError(f"attention() got an unexpected keyword argument {min(unknown)!r}")
    q, k, v = checked("query", query), checked("key", key), checked("value", value)
    if autocasting(q):
        q, k, v = map(autocast, (q, k, v))
    if tracing():
        traced.not_in_onnx()
    given: dict[Any, torch.Tensor] = {"query": q, "key": k, "value": v}
    others: dict[Any, torch.Tensor] = {}
    options = DEFAULTS | options | {"observe": checks.observe(observe)}
    for name in ("bias", "sink"):
        if options[name] is not None:
            given[name], options[name] = checked(name, options[name]), None
    for name in ("mask", "offset"):
        if isinstance(options[name], np.ndarray):
            checked(name, options[name])
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
        given_offset = checked("offset", options["offset"])
        others["offset"] = given_offset if fake(given_offset) else given_offset.cpu()  # checks look at it
        options["offset"] = None
    elif isinstance(options["offset"], torch.SymInt):
        others["offset"], options["offset"] = torch.full((), options["offset"], dtype=torch.int64, device="cpu"), None
    if options["dropout"] and options["seed"] is None:
        others["seed"] = new_seed()
    return_weights = checks.boolean("return_weights", return_weights)
    matrices = q.ndim == 2
    if matrices:
        if not symbolic(*given.values()):
            stand_in(given, options)
        given |= {name: given[name][None] for name in ("query", "key", "value")}
    together(given | {name: x for name, x in others.items() if type(name) is not str})
    others |= constants(given)
    given = {name: x for name, x in given.items() if name not in others}
    call = TensorCall(options, tuple(given), tuple(others), engine, before_weights=return_weights)
    inputs = (*given.values(), *others.values())
    found = applied(call, *inputs)
    if matrices:
        found = tuple(x[0] for x in found)
    results: list[Any] = [found[0]]
    if return_weights:
        floats = {name: x for name, x in given.items() if name != "value"}
        fixed = {name: x for name, x in others.items() if name != "seed"}
        one = TensorCall(options | {"dropout": 0.0, "observe": ()}, tuple(floats), tuple(fixed), engine, weights=True)
        tile = applied(one, *floats.values(), *fixed.values())[0]
        results.append(tile[0] if matrices else tile)
    if call.observe:
        results.append(seen_of(call.observe, found))
    return results[0] if len(results) == 1 else tuple(results)


def watching() -> bool:
    """Whether calls of this thread go elsewhere: see `watched`."""
    return _watching.get() is not None


@contextmanager
def watched(watch: Callable[..., Any] | None) -> Iterator[None]:
    """Inside, calls of this thread go to `watch` instead, with the arguments of `attention`; to none within itself."""
    token = _watching.set(watch)
    try:
        yield
    finally:
        _watching.reset(token)


def applied(call: TensorCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of a call, with a derivative where one may be asked for."""
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    found: tuple[torch.Tensor, ...]
    if needed or transformed() or (call.again is None and jit_state() is not None):
        found = AttentionFunction.apply(call, *inputs)
    elif call.again is not None:  # as no mode was active when it was looked up
        found = call.again(*inputs)
    else:
        found = execute("attention", call, inputs)
    return found


def constants(given: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """A bias and tables of the score that nobody can ask a derivative of: theirs may be as large as all scores."""
    tables = {name: x for name, x in given.items() if name == "bias" or type(name) is not str}
    if not tables or transformed() or tracing():
        return {}
    return {name: x for name, x in tables.items() if not x.requires_grad}


def stand_in(given: dict[Any, torch.Tensor], options: dict[str, Any]) -> None:
    """The checks of a call before its matrices become heads, so that messages show what was given."""
    arrays = {name: hollow(x) for name, x in given.items() if type(name) is str}
    seed = 0 if options["seed"] is None else options["seed"]
    problem_from(**arrays, **{name: x for name, x in options.items() if name not in arrays} | {"seed": seed})


def weights(query: Any, key: Any, *, lse: Any = None, rows: Any = ALL, cols: Any = ALL, **options: Any) -> torch.Tensor:
    """`regard.weights` on tensors, without a derivative; those of a device are computed there."""
    given = in_numpy({"query": query, "key": key, "lse": lse} | options, constant=False, there=True)
    return tensor(calls_on_arrays.weights(**given, rows=rows, cols=cols))


def steps(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """`regard.steps` on tensors; what it shows are NumPy arrays."""
    return stepping.steps(**in_numpy({"query": query, "key": key, "value": value} | options))


def plan(query: Any = None, key: Any = None, value: Any = None, **options: Any) -> Any:
    """`regard.plan` on tensors."""
    return planning.plan(**in_numpy({"query": query, "key": key, "value": value} | options))


def elsewhere(name: str, instead: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{name} takes NumPy arrays; on tensors, {instead}")

    return refuse


attention_vjp = elsewhere("attention_vjp", "differentiate regard.attention with .backward() or torch.func.vjp")
attention_jvp = elsewhere("attention_jvp", "differentiate regard.attention with torch.func.jvp")
attention_vjp_jvp = elsewhere("attention_vjp_jvp", "differentiate regard.attention twice, e.g. with torch.func.hessian")


def in_numpy(given: dict[str, Any], constant: bool = True, there: bool = False) -> dict[str, Any]:
    """Arguments with arrays for tensors, and rules with the values of the tensors that they read.

    there: tensors of a device stay where they are, but the offset, which checks look at.
    """
    found = {}
    if there:
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and name != "offset"}
        rules = (given.get(name) for name in ("mask", "score"))
        tensors |= {y: y.tensor for x in rules if isinstance(x, Rule) for y in foreign(x.node)}
        together(tensors)
    for name, x in given.items():
        if name in ("mask", "score") and x is not None:
            rule = (as_mask if name == "mask" else as_score)(x)
            reads = {id(y): y.tensor for y in foreign(rule.node)}
            found[name] = bind(rule, {n: readable(name, y, constant, there) for n, y in reads.items()}).rule
        else:
            stays = there and name != "offset"
            found[name] = readable(name, x, constant, stays) if isinstance(x, torch.Tensor) else x
    for name in ("query", "key", "value"):
        if name in given:
            checked(name, given[name])
    return found


def readable(name: str, x: torch.Tensor, constant: bool, there: bool) -> Any:
    """constant: the result is no tensor, so that nobody expects a derivative of it."""
    if not concrete(checked(name, x)):
        raise NotImplementedError(f"{name} has no values that can be read while it is transformed or traced")
    if x.requires_grad and torch.is_grad_enabled() and not constant:
        raise NotImplementedError(
            f"regard.weights does not differentiate, and {name} requires grad: call it under torch.no_grad(), or take "
            "return_weights=True of regard.attention"
        )
    return values(x, there)
