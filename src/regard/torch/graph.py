"""Calls in a graph that PyTorch traces (`torch.compile`, `torch.export`): one operation each, tensors as its inputs.

All that is no tensor is known under a name, a digest of what it says, which is a constant of the graph. What runs while
Dynamo traces comes in two kinds: functions that it follows, which see tensors and names, and functions marked as
constant, which it calls with constants, and which make rules and calls and give back their names.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

import regard.rules
from regard.observing import Statistic
from regard.rules import Mask, Program, Rule, as_mask, as_score, compose
from regard.rules.expression import make, rebuild
from regard.rules.masks import foreign
from regard.torch.arrays import autocast
from regard.torch.calls import DEFAULTS, Call, new_seed, seen_of
from regard.torch.rules import Flags, TensorTable

F = TypeVar("F", bound=Callable[..., Any])


class Named(NamedTuple):
    """A rule by name: its tensors are `slots` here."""

    rule: Any
    slots: tuple[Any, ...]


_rules: dict[str, Named] = {}
_calls: dict[str, Call] = {}


def constant(function: F) -> F:
    """A function that Dynamo calls while it traces, with constants, and whose result is one."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def call_of(name: str) -> Call:
    if name not in _calls:
        raise RuntimeError(f"the call {name} of this graph was traced in another process: trace it again in this one")
    return _calls[name]


class InGraph:
    """A mask or a score in a graph: the name of what it says, and the tensors that it reads."""

    def __init__(self, name: str, tensors: tuple[torch.Tensor, ...]) -> None:
        self.name = name
        self.tensors = tensors

    def __and__(self, other: Any) -> "InGraph":
        return combined("__and__", self, in_graph("mask", other))

    def __rand__(self, other: Any) -> "InGraph":
        return combined("__and__", in_graph("mask", other), self)

    def __or__(self, other: Any) -> "InGraph":
        return combined("__or__", self, in_graph("mask", other))

    def __ror__(self, other: Any) -> "InGraph":
        return combined("__or__", in_graph("mask", other), self)

    def __invert__(self) -> "InGraph":
        return InGraph(name_of_inverse(self.name), self.tensors)


def combined(operator: str, a: InGraph, b: InGraph) -> InGraph:
    return InGraph(name_of_both(operator, a.name, b.name), a.tensors + b.tensors)


def in_graph(argument: str, x: Any) -> InGraph:
    """Anything that may be given as a mask or a score."""
    if isinstance(x, InGraph):
        return x
    if isinstance(x, torch.Tensor):
        if argument != "mask":
            raise TypeError(f"{argument} must be a score rule, got a tensor")
        if x.is_floating_point():
            raise TypeError(f"mask must be booleans or 0/1 integers, got {x.dtype}; to add to scores, use bias=")
        return InGraph(name_of_flags(x.ndim), (x if x.dtype is torch.bool else x != 0,))
    if isinstance(x, Rule):
        return InGraph(name_of_rule(x), x.tensors)
    if isinstance(x, list | tuple):
        parts = [in_graph(argument, part) for part in x]
        tensors: tuple[torch.Tensor, ...] = ()
        for part in parts:
            tensors = tensors + part.tensors
        return InGraph(name_of_sequence(tuple([part.name for part in parts])), tensors)
    return InGraph(name_of_function(argument, x), ())


def construct(name: str, args: Any, kwargs: Any) -> Any:
    """What a function that makes rules gives in a graph."""
    if name == "table":
        return args[0] if args else kwargs["array"]
    if name in ("mask", "score"):
        return in_graph(name, args[0] if args else kwargs["function"])
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    values = tuple([described(x) for x in args])
    named = tuple([(key, described(x)) for key, x in kwargs.items()])
    return InGraph(name_of_constructed(name, values, named), tuple(tensors))


def described(x: Any) -> Any:
    """An argument as a constant."""
    return ("tensor", tuple(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else ("value", fixed(x))


def fixed(x: Any) -> Any:
    """Numbers as constants of the graph, which is traced again for others."""
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
    return register(rule, tuple(slots))


@constant
def name_of_function(argument: str, function: Any) -> str:
    return name_of_rule((as_mask if argument == "mask" else as_score)(function))


@constant
def name_of_rule(rule: Rule) -> str:
    slots = foreign(rule.node)
    empty = {id(x): x.empty for x in slots}
    return register(replace(rule, node=rebuild(rule.node, empty)), tuple(empty.values()))


@constant
def name_of_flags(ndim: int) -> str:
    slot = Flags(None, (1,) * ndim)
    return register(Mask(make("dense", "bool", (), slot), "array"), (slot,))


@constant
def name_of_inverse(name: str) -> str:
    found = _rules[name]
    return register(~found.rule, found.slots)


@constant
def name_of_both(operator: str, a: str, b: str) -> str:
    first, second = _rules[a], fresh(_rules[b])
    return register(getattr(first.rule, operator)(second.rule), first.slots + second.slots)


@constant
def name_of_sequence(names: tuple[str, ...]) -> str:
    parts = [fresh(_rules[name]) for name in names]
    return register(compose([part.rule for part in parts]), tuple(slot for part in parts for slot in part.slots))


def fresh(named: Named) -> Named:
    """The same rule with slots of its own, so that it can stand beside itself."""
    slots = {id(x): x.empty for x in named.slots}
    return Named(replace(named.rule, node=rebuild(named.rule.node, slots)), tuple(slots.values()))


def register(rule: Any, slots: tuple[Any, ...]) -> str:
    program = Program.of([rule.node])
    order = {id(x): n for n, x in enumerate(slots)}
    arrays = []
    read: tuple[Any, ...] = (*program.tables, *program.dense)
    for x in read:
        values = (order[id(x)], x.shape) if id(x) in order else (x.shape, digest(getattr(x, "array", x)))
        arrays.append(values)
    numbers = [repr(x) for x in program.numbers]
    name = digest((type(rule).__name__, rule.text, program.structure, numbers, arrays, rule.requires))
    _rules.setdefault(name, Named(rule, slots))
    return name


def digest(x: Any) -> str:
    data = x.tobytes() + str(x.dtype).encode() if hasattr(x, "tobytes") else repr(x).encode()
    return hashlib.sha256(data).hexdigest()


@constant
def name_of_call(
    mask: str | None, score: str | None, floats: tuple[bool, ...], tensors: tuple[str, ...], engine: str | None,
    weights: bool, observe: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...],
) -> str:  # fmt: skip
    """floats: which tensors of the score have a derivative. tensors: which other inputs are given."""
    masks, scores = (Named(None, ()) if name is None else fresh(_rules[name]) for name in (mask, score))
    differentiable = tuple(x for x, f in zip(scores.slots, floats, strict=True) if f)
    others = tuple(x for x, f in zip(scores.slots, floats, strict=True) if not f)
    whole = DEFAULTS | dict(options)
    given = tuple(name for name in ("bias", "sink") if name in tensors)
    fixed = tuple(name for name in ("offset", "seed") if name in tensors)
    call = Call(
        whole | {"mask": masks.rule, "score": scores.rule, "observe": [Statistic(*s) for s in observe]},
        ("query", "key", *(() if weights else ("value",)), *given, *differentiable),
        (*others, *masks.slots, *fixed), engine, weights=weights,
    )  # fmt: skip
    name = digest((mask, score, floats, tensors, engine, weights, observe, options))
    _calls.setdefault(name, call)
    return name


def attention(
    query: Any, key: Any, value: Any, return_weights: bool, observe: Any, engine: str | None, options: dict[str, Any]
) -> Any:  # fmt: skip
    """`regard.attention` in a graph."""
    from regard.torch.operators import forward

    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor where others of the call are, got {type(x).__name__}")
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError("regard.attention: a transform inside of a compiled region is not provided")
    if torch.is_autocast_enabled("cpu"):
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
    for name, into in (("bias", floats), ("sink", floats), ("offset", tail)):
        given = options.get(name)
        if name == "offset" and isinstance(given, int):
            given = torch.full((), given, dtype=torch.int64)  # an input, because it changes from step to step
        if given is not None:
            names.append(name)
            into.append(given)
    trains = []
    if score is not None:
        for x in score.tensors:
            trains.append(x.is_floating_point())
            (floats if x.is_floating_point() else others).append(x)
    if mask is not None:
        others += mask.tensors
    numbers = {name: fixed(x) for name, x in options.items() if name not in ("mask", "score", *names)}
    seeded = bool(options.get("dropout")) and options.get("seed") is None
    seen = [(s, None) if isinstance(s, str) else (s.name, fixed(s.of)) for s in observe]
    for name, _ in seen:
        if name == "mass":
            raise NotImplementedError("regard.mass is not observed in a graph that is traced")
    masked, scored = None if mask is None else mask.name, None if score is None else score.name

    call = name_of_call(
        masked, scored, tuple(trains), tuple([*names, "seed"] if seeded else names), engine, False, tuple(seen),
        tuple(numbers.items()),
    )  # fmt: skip
    seeds = [new_seed()] if seeded else []
    results = forward([query, key, value, *floats, *others, *tail, *seeds], call)
    if matrices:
        results = [x[0] for x in results]
    out = [results[0]]
    if return_weights:
        numbers = {name: x for name, x in numbers.items() if name not in ("dropout", "seed")}
        call = name_of_call(masked, scored, tuple(trains), tuple(names), engine, True, (), tuple(numbers.items()))
        tile = forward([query, key, *floats, *others, *tail], call)[0]
        out.append(tile[0] if matrices else tile)
    if seen:
        out.append(seen_of([Statistic(*s) for s in seen], results))
    return out[0] if len(out) == 1 else tuple(out)
