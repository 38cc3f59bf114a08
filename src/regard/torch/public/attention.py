"""The public functions of `regard` on tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch.overrides import handle_torch_function

from regard.arguments.frameworks import imported
from regard.core import checks
from regard.core.options import ARRAYS, RULES
from regard.core.problem import ROLE
from regard.core.statistics import Statistic, of_engine
from regard.core.tensors import tensor
from regard.loaders import loaders
from regard.ops import attention as calls_on_arrays
from regard.ops import planning, stepping
from regard.ops.normalization import problem_from
from regard.rules import Rule, as_mask, as_score
from regard.rules.masks import foreign
from regard.torch.autograd.functions import AttentionFunction
from regard.torch.call import fused
from regard.torch.call.prepared import cached
from regard.torch.call.record import DEFAULTS, HOST, TensorCall, keeps_low, seen_of
from regard.torch.call.text import rule_in_graph
from regard.torch.compiled import traced
from regard.torch.compiled.traced import construct
from regard.torch.operators.registration import execute, new_seed
from regard.torch.public.others import hopfield, linear_attention, merge, multihead_attention, query_times
from regard.torch.tensors import process_group
from regard.torch.tensors.arrays import (
    PLAIN,
    autocast,
    autocasting,
    checked,
    concrete,
    hollow,
    overriding,
    together,
    values,
)
from regard.torch.tensors.modes import fake, in_backward, jit_state, outside_of_graphs, symbolic, tracing, transformed
from regard.torch.tensors.tables import bind, constant, flags, module_table, table
from regard.warning import warn_once

_watching: ContextVar[tuple[Callable[..., Any], ...]] = ContextVar("watching", default=())

__all__ = [
    "attention", "constant", "construct", "flags", "hopfield", "linear_attention", "merge", "module_table",
    "multihead_attention", "plan", "rule_in_graph", "steps", "table", "weights",
]  # fmt: skip
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class TensorArguments:
    """The arguments of one call of `attention`.

    floats: tensors with a derivative; others: tensors without one. Their keys are names, or the tables and masks that
    stand for them in rules, in the order of `TensorCall`. options: those of `regard.attention` that are no tensors.
    matrices: operands are (n, d), and those of `floats` become (1, n, d).
    """

    floats: dict[Any, torch.Tensor]
    others: dict[Any, torch.Tensor]
    options: dict[str, Any]
    observe: tuple[Statistic, ...]
    matrices: bool

    @classmethod
    def of(cls, query: Any, key: Any, value: Any, given: dict[str, Any], observe: Any) -> Self:
        """Check the types of the arguments, and sort them.

        given: options of `regard.attention`.
        """
        unknown = given.keys() - DEFAULTS.keys()
        if unknown:
            raise TypeError(f"attention() got an unexpected keyword argument {min(unknown)!r}")
        operands = operands_of(query, key, value)
        observed = checks.observe(observe)
        weighing = {name: checked(name, given[name]) for name in ARRAYS if given.get(name) is not None}
        for name in ("mask", "offset"):
            if isinstance(given.get(name), np.ndarray):
                checked(name, given[name])
        mask = None if given.get("mask") is None else as_mask(given["mask"])
        score = None if given.get("score") is None else as_score(given["score"])
        scored, masked = (() if rule is None else foreign(rule.node) for rule in (score, mask))
        tables = {x: x.tensor for x in scored if x.kind == "float"}
        numbers = on_host("offset", given.get("offset")) | on_host("seed", given.get("seed"))
        if given.get("dropout") and given.get("seed") is None:
            numbers["seed"] = new_seed()
        return cls(
            floats=operands | weighing | tables,
            others={x: x.tensor for x in (*scored, *masked) if x not in tables} | numbers,
            options=DEFAULTS | given | {"mask": mask, "score": score, "observe": of_engine(observed)}
            | dict.fromkeys(ARRAYS) | dict.fromkeys(numbers),
            observe=observed,
            matrices=operands["query"].ndim == 2,
        )  # fmt: skip

    def ready(self) -> Self:
        """Return the arguments with a head axis, and with constants among `others`.

        Raises ValueError unless all tensors are on one device.
        """
        floats = self.floats
        if self.matrices:
            if not symbolic(*floats.values()):
                stand_in(floats, self.options)
            floats = floats | {name: floats[name][None] for name in ("query", "key", "value")}
        together(floats | {name: x for name, x in self.others.items() if type(name) is not str})
        fixed = constants(floats)
        floats = {name: x for name, x in floats.items() if name not in fixed}
        return replace(self, floats=floats, others=self.others | fixed)

    def outputs(self, engine: str | None, before_weights: bool) -> tuple[torch.Tensor, ...]:
        """Return out, lse and the observed statistics, as `TensorCall.results` names them."""
        low = keeps_low(*self.floats.values())
        call = TensorCall(
            self.options, tuple(self.floats), tuple(self.others), engine, before_weights=before_weights, low=low
        )
        found = applied(call, *self.floats.values(), *self.others.values())
        return tuple(x[0] for x in found) if self.matrices else found

    def weights(self, engine: str | None) -> torch.Tensor:
        """Return the weights (..., h, n_q, n_k), before dropout."""
        floats = {name: x for name, x in self.floats.items() if name != "value"}
        fixed = {name: x for name, x in self.others.items() if name != "seed"}
        after = {name: x for name, x in DEFAULTS.items() if ROLE.get(name) == "weights"}
        options = self.options | after | {"observe": ()}
        call = TensorCall(options, tuple(floats), tuple(fixed), engine, weights=True)
        tile = applied(call, *floats.values(), *fixed.values())[0]
        return tile[0] if self.matrices else tile


def operands_of(query: Any, key: Any, value: Any) -> dict[Any, torch.Tensor]:
    """Check and cast the operands; return them by name."""
    given = checked("query", query), checked("key", key), checked("value", value)
    if autocasting(given[0]):
        given = autocast(given[0]), autocast(given[1]), autocast(given[2])
    if tracing():
        traced.not_in_onnx()
    return dict(zip(("query", "key", "value"), given, strict=True))


def on_host(name: str, x: Any) -> dict[Any, torch.Tensor]:
    """Return {name: x on the host} for a tensor or a graph's symbol, else {}."""
    if isinstance(x, torch.Tensor):
        given = checked(name, x)
        return {name: given if fake(given) else given.cpu()}  # checks read it
    return {name: torch.full((), x, dtype=torch.int64, device="cpu")} if isinstance(x, torch.SymInt) else {}


def attention(
    query: Any, key: Any, value: Any, *, return_weights: bool = False, observe: Any = (), engine: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """`regard.attention` on tensors."""
    if options.get("metric") is not None:
        query = query_times(options.pop("metric"), query, options.get("layout"))
    if torch.compiler.is_compiling():
        if process_group.active:
            return attention_outside(
                query, key, value, return_weights=return_weights, observe=observe, engine=engine, **options
            )
        return traced.attention(query, key, value, return_weights, observe, engine, options)
    if type(query) not in PLAIN and type(query) is imported("torch.distributed.tensor", "DTensor"):
        return loaders["torch.dtensors"]().distributed(
            query, key, value, return_weights=return_weights, observe=observe, engine=engine, **options
        )
    watches = _watching.get()
    if watches:
        with _redirected(watches[:-1]):
            return watches[-1](
                query, key, value, return_weights=return_weights, observe=observe, engine=engine, **options
            )
    if process_group.left and in_backward():
        warn_once(process_group.AGAIN)
    if not (return_weights or observe or engine is not None):
        if type(query) in PLAIN and not fused.on_host(query):
            out = fused.attention(query, key, value, options, by_engine)
            if out is not None:
                return out
        known = cached(query, key, value, options)
        if known is not None:
            call, seed = known.cached, options.get("seed")
            if seed is None and call.seeded:
                seed = new_seed()
            out = call.result(known, (query, key, value, *map(options.get, call.more)), seed, AttentionFunction.apply)
            if out is not None:
                return out
    if theirs := overriding((query, key, value, *options.values())):
        return handle_torch_function(
            attention, theirs, query, key, value, return_weights=return_weights, observe=observe, engine=engine,
            **options,
        )  # fmt: skip
    sorted_arguments = TensorArguments.of(query, key, value, options, observe)
    return_weights = checks.boolean("return_weights", return_weights)
    arguments = sorted_arguments.ready()
    found = arguments.outputs(engine, before_weights=return_weights)
    results: list[Any] = [found[0]]
    if return_weights:
        results.append(arguments.weights(engine))
    if arguments.observe:
        results.append(seen_of(arguments.observe, found))
    return results[0] if len(results) == 1 else tuple(results)


attention_outside = outside_of_graphs("context_parallel sends keys between the processes, which no graph holds")(
    attention
)


def by_engine(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Compute `attention` by the engine of devices, whose derivatives have derivatives."""
    return attention(query, key, value, engine="device", **options)


def positions_first(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Compute `regard.attention` of (..., n, h, d).

    Options that are None are left out.
    """
    if query.shape[-3] > 1:
        given = {name: x for name, x in options.items() if x is not None}
        return attention(query, key, value, layout="bnhd", **given)
    return heads_first(*(x.transpose(-2, -3) for x in (query, key, value)), **options)


def heads_first(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Compute `regard.attention` of (..., h, n, d), and return (..., n, h, d).

    Options that are None are left out.
    """
    if query.shape[-2] > 1:
        return positions_first(*(x.transpose(-2, -3) for x in (query, key, value)), **options)
    # One row has the same strides in both layouts, and calls without options are faster.
    found = attention(query, key, value, **{name: x for name, x in options.items() if x is not None})
    if isinstance(found, tuple):
        return found[0].transpose(-2, -3), *found[1:]
    return found.transpose(-2, -3)


def watching() -> bool:
    """Return whether this thread is inside of `watched`."""
    return bool(_watching.get())


@contextmanager
def watched(watch: Callable[..., Any]) -> Iterator[None]:
    """Redirect this thread's calls of `attention` to `watch` inside of a `with`.

    `watch` has the arguments of `attention`. Calls that it makes go to the one around it.
    """
    process_group.refuse("a recorder of attention", "record one process")
    around = _watching.get()
    if watch in around:  # a thread may begin with a copied context
        yield
        return
    _watching.set((*around, watch))
    try:
        yield
    finally:  # hooks of nested captures end in the order in which they began
        _watching.set(tuple(x for x in _watching.get() if x != watch))


@contextmanager
def _redirected(watches: tuple[Callable[..., Any], ...]) -> Iterator[None]:
    token = _watching.set(watches)
    try:
        yield
    finally:
        _watching.reset(token)


def applied(call: TensorCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the results of a call, with a derivative if one may be needed."""
    needed = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    found: tuple[torch.Tensor, ...]
    if needed or transformed() or jit_state() is not None:
        found = AttentionFunction.apply(call, *inputs)
    else:
        found = execute("attention", call, inputs)
    return found


def constants(given: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Return the bias and tables that need no gradient.

    Such a gradient may be as large as all scores.
    """
    tables = {name: x for name, x in given.items() if name == "bias" or type(name) is not str}
    if not tables or transformed() or tracing():
        return {}
    return {name: x for name, x in tables.items() if not x.requires_grad}


def stand_in(given: dict[Any, torch.Tensor], options: dict[str, Any]) -> None:
    """Check a call before its matrices get a head axis.

    So messages show the shapes that were given.
    """
    arrays = {name: hollow(x) for name, x in given.items() if type(name) is str}
    seed = 0 if options["seed"] is None else options["seed"]
    problem_from(**arrays, **{name: x for name, x in options.items() if name not in arrays} | {"seed": seed})


def weights(query: Any, key: Any, *, lse: Any = None, rows: Any = ALL, cols: Any = ALL, **options: Any) -> torch.Tensor:
    """`regard.weights` on tensors, without a derivative.

    On a device it is computed there.
    """
    process_group.refuse("regard.weights", "give it whole tensors outside")
    if theirs := overriding((query, key)):
        return handle_torch_function(weights, theirs, query, key, lse=lse, rows=rows, cols=cols, **options)
    if options.get("metric") is not None:
        query = query_times(options.pop("metric"), query, options.get("layout"))
    given = in_numpy({"query": query, "key": key, "lse": lse} | options, constant=False, there=True)
    return tensor(calls_on_arrays.weights(**given, rows=rows, cols=cols))


def steps(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """`regard.steps` on copies of tensors, since its NumPy arrays outlive the call."""
    process_group.refuse("regard.steps", "give it whole tensors outside")
    given = {"query": query, "key": key, "value": value} | options
    copies = {name: x.detach().clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return stepping.steps(**in_numpy(copies))


def plan(query: Any = None, key: Any = None, value: Any = None, **options: Any) -> Any:
    """`regard.plan` on tensors; on a device, of the engine that computes there or of PyTorch's function."""
    given = {"query": query, "key": key, "value": value} | options
    device = isinstance(query, torch.Tensor) and not fused.on_host(query) and not query.is_meta
    if not device or options.get("engine") is not None:
        return planning.plan(**in_numpy(given))
    found = planning.plan(**in_numpy(given | {"engine": "device"}))
    handed = fused.fits(query, key, value, {name: x for name, x in options.items() if name != "engine"})
    return replace(found, engines={**found.engines, "device": fused.REASON}) if handed else found


def elsewhere(name: str, instead: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{name} takes NumPy arrays; on tensors, {instead}")

    return refuse


attention_vjp = elsewhere("attention_vjp", "differentiate regard.attention with .backward() or torch.func.vjp")
attention_jvp = elsewhere("attention_jvp", "differentiate regard.attention with torch.func.jvp")
attention_vjp_jvp = elsewhere("attention_vjp_jvp", "differentiate regard.attention twice, e.g. with torch.func.hessian")


def in_numpy(given: dict[str, Any], constant: bool = True, there: bool = False) -> dict[str, Any]:
    """Return arguments with arrays for tensors, also for those that rules read.

    there: tensors stay on their device, except the offset, which checks read.
    """
    found = {}
    if there:
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and name not in HOST}
        rules = (given.get(name) for name in RULES)
        tensors |= {y: y.tensor for x in rules if isinstance(x, Rule) for y in foreign(x.node)}
        together(tensors)
    for name, x in given.items():
        if name in RULES and x is not None:
            rule = (as_mask if name == "mask" else as_score)(x)
            reads = {id(y): y.tensor for y in foreign(rule.node)}
            found[name] = bind(rule, {n: readable(name, y, constant, there) for n, y in reads.items()}).rule
        else:
            stays = there and name not in HOST
            found[name] = readable(name, x, constant, stays) if isinstance(x, torch.Tensor) else x
    for name in ("query", "key", "value"):
        if name in given:
            checked(name, given[name])
    return found


def readable(name: str, x: torch.Tensor, constant: bool, there: bool) -> Any:
    """Return the values of a tensor, or raise NotImplementedError.

    constant: the result is no tensor, so no derivative is expected.
    """
    x = checked(name, x)
    if not concrete(x):
        raise NotImplementedError(f"{name} has no values that can be read while it is transformed or traced")
    if x.requires_grad and torch.is_grad_enabled() and not constant:
        raise NotImplementedError(
            f"regard.weights does not differentiate, and {name} requires grad: call it under torch.no_grad(), or take "
            "return_weights=True of regard.attention"
        )
    return values(x, there)
