"""Calls in a graph that PyTorch traces, as one operation with tensor inputs.

Everything but tensors is text, a constant of the graph. Two kinds of functions run while Dynamo traces. It traces into
the plain ones, which see tensors and texts. It calls those marked as constant with constants. They make rules and
calls, and return their texts.
"""

from dataclasses import replace
from typing import Any

import torch

import regard.rules
from regard.core.options import ARRAYS, RULES
from regard.core.statistics import of_engine, statistic
from regard.rules import Mask, Rule, Table, compose
from regard.rules.expression import make, rebuild
from regard.rules.masks import foreign
from regard.rules.outside import lookups
from regard.torch.call.record import keeps_low, seen_of
from regard.torch.call.text import call_text, named, text_of
from regard.torch.compiled.recorded import (
    Clamped,
    looked_up,
    numbers_alone,
    record,
    recordable,
    recorded,
    rule_of,
    run_outside,
)
from regard.torch.operators.registration import forward, seed_in_graph
from regard.torch.tensors.arrays import autocast, autocasting
from regard.torch.tensors.modes import constant, guard_scalar, transformed
from regard.torch.tensors.tables import TensorMask, TensorTable


class GraphRule:
    """A mask or score in a graph: its text (`name`), and the tensors that it reads."""

    def __init__(self, name: str, tensors: tuple[torch.Tensor, ...]) -> None:
        self.name = name
        self.tensors = tensors

    def __and__(self, other: Any) -> "GraphRule":
        return combined("__and__", self, in_graph("mask", other, frozen=True))

    def __rand__(self, other: Any) -> "GraphRule":
        return combined("__and__", in_graph("mask", other, frozen=True), self)

    def __or__(self, other: Any) -> "GraphRule":
        return combined("__or__", self, in_graph("mask", other, frozen=True))

    def __ror__(self, other: Any) -> "GraphRule":
        return combined("__or__", in_graph("mask", other, frozen=True), self)

    def __invert__(self) -> "GraphRule":
        return GraphRule(name_of_inverse(self.name), self.tensors)


def combined(operator: str, a: GraphRule, b: GraphRule) -> GraphRule:
    return GraphRule(name_of_both(operator, a.name, b.name), a.tensors + b.tensors)


def in_graph(argument: str, x: Any, frozen: bool = False) -> GraphRule:
    """Return a mask or score argument as a `GraphRule`.

    frozen: later changes of a tensor do not change it.
    """
    if isinstance(x, GraphRule):
        return x
    if isinstance(x, torch.Tensor):
        if argument != "mask":
            raise TypeError(f"{argument} must be a score rule, got a tensor")
        if x.is_floating_point():
            raise TypeError(f"mask must be booleans or 0/1 integers, got {x.dtype}; to add to scores, use bias=")
        return GraphRule(name_of_flags(x.ndim), (x if x.dtype is torch.bool and not frozen else x != 0,))
    if isinstance(x, Rule):
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            for table in x.foreign:
                if isinstance(table, TensorTable) and table.trains_outside:
                    raise NotImplementedError(
                        f"{argument}: {x} was made outside of the program, and torch.export takes a parameter that it "
                        "reads as a constant, without a gradient: make the rule with regard.table(module, name), or "
                        "where the program calls attention"
                    )
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            for table in x.foreign:
                if isinstance(table, TensorTable):
                    table.refuse_stale()  # Dynamo passes over a NotImplementedError of the property
            text, reads = x.in_graph
            if text:
                return GraphRule(text, reads)
        return GraphRule(name_of_rule(x), x.tensors)
    if isinstance(x, list | tuple):
        parts = [in_graph(argument, part) for part in x]
        tensors: tuple[torch.Tensor, ...] = ()
        for part in parts:
            tensors = tensors + part.tensors
        return GraphRule(name_of_sequence(tuple([part.name for part in parts])), tensors)
    if not torch.compiler.is_dynamo_compiling():
        return in_graph(argument, rule_of(argument, x))
    if recordable(x):
        recorded_rule = record(argument, x)
        if recordable(x):  # no number of its closure became a symbol of the graph as it was read
            return GraphRule(*recorded_rule)
    if numbers_alone(argument, x):
        return GraphRule(name_of_function(argument, x), ())
    return in_graph(argument, run_outside(argument, x))


def trained(x: torch.Tensor) -> bool:
    """Return True if a derivative of `x` may be needed.

    A compiled graph is traced again for tensors that require grad; an exported one is not.
    """
    followed = torch.compiler.is_exporting() or not torch.compiler.is_dynamo_compiling()
    return x.is_floating_point() and (x.requires_grad or followed)


def construct(name: str, args: Any, kwargs: Any) -> Any:
    """Return the `GraphRule` of a constructor of rules called in a graph."""
    if name == "table":
        bounds = kwargs.get("bounds")
        if bounds not in (None, "clamp"):
            raise TypeError("regard.table: bounds='raise' is not checked inside of a graph: give bounds='clamp'")
        arguments = dict(zip(("array", "name"), args, strict=False)) | kwargs
        attribute = arguments.get("name")
        x = arguments["array"] if attribute is None else getattr(arguments["array"], attribute)
        return x if bounds is None else Clamped(x)
    if name in ("where", "__getitem__"):
        step = recorded(regard.rules.where if name == "where" else looked_up, args, kwargs)
        plain: Any = regard.rules.where if name == "where" else Table.__getitem__
        return plain.__wrapped__(*args, **kwargs) if step is None else step
    if name in RULES:
        return in_graph(name, args[0] if args else kwargs["function"], frozen=True)
    args = [shaped(name, x) for x in args]
    kwargs = {key: shaped(name, x) for key, x in kwargs.items()}
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    values = tuple([described(x) for x in args])
    named = tuple([(key, described(x)) for key, x in kwargs.items()])
    return GraphRule(name_of_constructed(name, values, named), tuple(tensors))


def shaped(name: str, x: Any) -> Any:
    """Return a tensor argument in the shape in which its rule reads it.

    Leading axes become one; tables of `regard.blocks` become booleans.
    """
    if isinstance(x, Clamped):
        x = x.tensor
    if not isinstance(x, torch.Tensor) or x.is_floating_point():
        return x
    if name in ("padding", "prefix"):
        return x.reshape(-1)
    if name == "documents" and x.ndim:
        return x.reshape(-1, x.shape[-1])
    return x != 0 if name == "blocks" else x


def described(x: Any) -> Any:
    """Describe an argument by constants."""
    return ("tensor", fixed(tuple(x.shape)), str(x.dtype)) if isinstance(x, torch.Tensor) else ("value", fixed(x))


def fixed(x: Any) -> Any:
    """Return numbers as constants of the graph; other values trace it again."""
    if isinstance(x, tuple):
        return tuple([fixed(part) for part in x])
    return guard_scalar(x) if isinstance(x, int | float) else x


@constant
def name_of_constructed(name: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str:
    slots: list[Any] = []

    def argument(x: tuple[Any, ...]) -> Any:
        if x[0] == "value":
            return x[1]
        slots.append(TensorTable(name, None, x[1], getattr(torch, x[2].removeprefix("torch."))))
        return slots[-1]

    function = getattr(regard.rules, name).__wrapped__
    rule = function(*map(argument, args), **{key: argument(x) for key, x in kwargs})
    return text_of(rule, tuple(slots))


@constant
def name_of_function(argument: str, function: Any) -> str:
    return name_of_rule(rule_of(argument, function))


@constant
def name_of_rule(rule: Rule) -> str:
    if any(x.table.bounds == "raise" for x in lookups(rule.node)):
        raise TypeError(f"{rule}: bounds='raise' of a table is not checked inside of a graph: give bounds='clamp'")
    slots = foreign(rule.node)
    empty = {id(x): x.empty for x in slots}
    return text_of(replace(rule, node=rebuild(rule.node, empty)), tuple(empty.values()))


@constant
def name_of_flags(ndim: int) -> str:
    slot = TensorMask(None, (1,) * ndim)
    return text_of(Mask(make("dense", "bool", (), slot), "array"), (slot,))


@constant
def name_of_inverse(name: str) -> str:
    rule = named(name)
    return text_of(~rule.rule, rule.slots)


@constant
def name_of_both(operator: str, a: str, b: str) -> str:
    first, second = named(a), named(b).fresh
    return text_of(getattr(first.rule, operator)(second.rule), first.slots + second.slots)


@constant
def name_of_sequence(names: tuple[str, ...]) -> str:
    parts = [named(name).fresh for name in names]
    return text_of(compose([part.rule for part in parts]), tuple(slot for part in parts for slot in part.slots))


@constant
def name_of_call(
    mask: str | None, score: str | None, floats: tuple[bool, ...], tensors: tuple[str, ...], engine: str | None,
    weights: bool, observe: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...],
    constants: tuple[str, ...], low: bool = False,
) -> str:  # fmt: skip
    """Write a call as text.

    mask, score: rules as text. floats: for each tensor of the score, whether it has a derivative. tensors: the other
    given inputs. constants: those of them that could have a derivative, but have none. low: as in `TensorCall`.
    """
    slots = [0 if rule is None else len(named(rule).slots) for rule in (score, mask)]
    scored, masked = range(slots[0]), range(slots[0], sum(slots))
    fixed = [x for x in tensors if x in ("offset", "seed", *constants)]
    return call_text(
        mask=mask, score=score, slots=[[*scored], [*masked]], engine=engine, weights=weights, observe=observe, folded=0,
        floats=[
            *(("query", "key") if weights else ("query", "key", "value")), *(x for x in tensors if x not in fixed),
            *(n for n, trains in zip(scored, floats, strict=True) if trains),
        ],
        others=[*(n for n, trains in zip(scored, floats, strict=True) if not trains), *masked, *fixed],
        options=dict(options), low=low,
    )  # fmt: skip


def not_in_onnx() -> None:
    """Raise NotImplementedError while a model is exported to ONNX."""
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "regard.attention has no ONNX operator: export the model with PyTorch's F.scaled_dot_product_attention, "
            "outside of regard.torch.sdpa()"
        )


def attention(
    query: Any, key: Any, value: Any, return_weights: bool, observe: Any, engine: str | None, options: dict[str, Any]
) -> Any:  # fmt: skip
    """Compute `regard.attention` in a graph."""
    not_in_onnx()
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor where others of the call are, got {type(x).__name__}")
    if transformed():
        raise NotImplementedError("regard.attention: a transform inside of a compiled region is not provided")
    if autocasting(query):
        query, key, value = autocast(query), autocast(key), autocast(value)
    mask = None if options.get("mask") is None else in_graph("mask", options["mask"])
    score = None if options.get("score") is None else in_graph("score", options["score"])
    matrices = query.ndim == 2
    if matrices:
        query, key, value = query[None], key[None], value[None]
    names: list[str] = []
    floats: list[Any] = []
    others: list[Any] = []
    tail: list[Any] = []
    bias = options.get("bias")
    constants = ("bias",) if isinstance(bias, torch.Tensor) and not trained(bias) else ()
    for name, into in (*((name, tail if name in constants else floats) for name in ARRAYS), ("offset", tail)):
        argument = options.get(name)
        if name == "offset" and isinstance(argument, int):
            # An input, because it changes from one decode step to the next.
            argument = torch.full((), argument, dtype=torch.int64, device="cpu")
        elif name == "offset" and isinstance(argument, torch.Tensor):
            argument = argument.cpu()  # checks read it
        if argument is not None:
            names.append(name)
            into.append(argument)
    trains = []
    if score is not None:
        for x in score.tensors:
            trains.append(trained(x))
            (floats if trains[-1] else others).append(x)
    if mask is not None:
        others += mask.tensors
    seeds: list[Any] = []
    if isinstance(options.get("seed"), torch.Tensor):
        seeds = [options["seed"].cpu()]  # kernels read it
    elif options.get("dropout") and options.get("seed") is None:
        seeds = [seed_in_graph()]
    seeded = [*names, "seed"] if seeds else names
    numbers = {name: fixed(x) for name, x in options.items() if name not in (*RULES, *seeded)}
    seen = [(s, None) if isinstance(s, str) else (s.name, fixed(s.of)) for s in observe]
    observed = [statistic(*s) for s in seen]
    for s in observed:
        if s.rules:
            raise NotImplementedError(f"regard.{s.name} is not observed in a graph that is traced{s.instead}")
    computed = tuple([(s.name, s.of) for s in of_engine(observed)])
    masked, scored = None if mask is None else mask.name, None if score is None else score.name

    low = keeps_low(query, key, value, *floats)
    call = name_of_call(
        masked, scored, tuple(trains), tuple(seeded), engine, False, computed, tuple(numbers.items()), constants, low
    )
    results = forward([query, key, value, *floats, *others, *tail, *seeds], call)
    if matrices:
        results = [x[0] for x in results]
    out = [results[0]]
    if return_weights:
        numbers = {name: x for name, x in numbers.items() if name not in ("dropout", "seed")}
        call = name_of_call(
            masked, scored, tuple(trains), tuple(names), engine, True, (), tuple(numbers.items()), constants
        )
        tile = forward([query, key, *floats, *others, *tail], call)[0]
        out.append(tile[0] if matrices else tile)
    if seen:
        out.append(seen_of(observed, results))
    return out[0] if len(out) == 1 else tuple(out)
