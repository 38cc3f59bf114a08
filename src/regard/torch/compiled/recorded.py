"""Functions of tensors that become rules while Dynamo traces a call.

Dynamo cannot run the tracer of `regard.rules`, which has locks and caches. It runs the function on `Recorded` values.
What is done to them is recorded as steps, of constants and of tensors by number. The steps are then done again outside
of the trace, on the tracer of `regard.rules`, and on tensors without values. So what a rule may do is written there.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from regard.rules import Table, Traced, as_mask, as_score, rebuild
from regard.rules.expression import MASK_LEAVES, SCORE_LEAVES
from regard.rules.masks import foreign
from regard.rules.tracing import as_table
from regard.torch.call.text import text_of
from regard.torch.compiled import opcodes
from regard.torch.tensors.modes import constant, guard_scalar, has_static_value, has_symbols, outside_of_graphs
from regard.torch.tensors.tables import reading
from regard.warning import warn_once

Operand = tuple[str, Any]
NUMBERS = (bool, int, float, str, type(None))
OUTSIDE = (
    "the {0} function {1!r} breaks the graph of torch.compile, which cannot run it: use PyTorch's functions and "
    "regard.where in it, not NumPy's, and compare with no changing number; or make the rule outside, with regard.{0}"
)
UNREAD = (
    "the {0} function {1!r} breaks the graph of torch.compile: regard does not read the bytecode of CPython {2}.{3}; "
    "make the rule outside, with regard.{0}"
)
UNKNOWN = 2**15  # stands for a size that is a symbol: more elements than a rule computes with, so that none reads it
Step = tuple[Any, tuple[Operand, ...], tuple[tuple[str, Operand], ...]]


class Tape:
    """Steps in order, with the tensors and tables that they read.

    A step is a function, or a method of its first operand by name, and its operands. The first values are `leaves`.
    """

    def __init__(self, leaves: int) -> None:
        self.steps: list[Step] = []
        self.tensors: list[torch.Tensor] = []
        self.tables: list[Table] = []
        self.leaves = tuple([Recorded(self, n) for n in range(leaves)])

    def add(self, function: Any, args: Any, kwargs: Any) -> "Recorded":
        """Record a step, and return its result."""
        operands = tuple([self.operand(x) for x in args])
        self.steps.append((function, operands, tuple([(key, self.operand(x)) for key, x in kwargs.items()])))
        return Recorded(self, len(self.leaves) + len(self.steps) - 1)

    def operand(self, x: Any) -> Operand:
        """Describe an operand by constants."""
        if isinstance(x, partial) and x.func is method:  # an attribute that is no method
            x = self.add(getattr, x.args, {})
        if isinstance(x, Recorded):
            return "value", x.number
        if isinstance(x, Table):
            if not x.from_tensor:
                return "table", place(self.tables, x)
            if x.bounds == "raise":
                raise TypeError("bounds='raise' of a table is not checked inside of a graph: give bounds='clamp'")
            return "tensor", place(self.tensors, x.tensor)  # type: ignore[attr-defined]
        if isinstance(x, int | float) and not has_static_value(x):
            # An input of the graph, so that its next value compiles nothing.
            x = torch.full((), x, dtype=torch.int64 if isinstance(x, int) else torch.float64)
        if isinstance(x, (np.ndarray, np.generic)):
            x = torch.as_tensor(x)
        if isinstance(x, torch.Tensor):
            return "tensor", place(self.tensors, x)
        if isinstance(x, tuple | list):
            return "tuple", tuple([self.operand(part) for part in x])
        return "constant", x


def place(held: list[Any], x: Any) -> int:
    """Return the place of `x` in a list, which it enters at the end if it is new."""
    for n, y in enumerate(held):
        if y is x:
            return n
    held.append(x)
    return len(held) - 1


class Recorded:
    """A value in a function that is recorded: a leaf, or the result of a step.

    Operators, attributes and methods are those of `Traced`, whatever they are.
    """

    def __init__(self, tape: Tape, number: int) -> None:
        self.tape = tape
        self.number = number

    def __getattr__(self, name: str) -> Any:
        return partial(method, self, name)

    def __getitem__(self, at: Any) -> Any:
        return self.tape.add("__getitem__", (self, at), {})

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return recorded(function, args, kwargs or {})


def method(x: Recorded, name: str, *args: Any, **kwargs: Any) -> Recorded:
    return x.tape.add(name, (x, *args), kwargs)


def operation(name: str) -> Callable[..., Recorded]:
    return lambda x, *args, **kwargs: x.tape.add(name, (x, *args), kwargs)


def attribute(name: str) -> property:
    return property(lambda x: x.tape.add(getattr, (x, name), {}))


for _name, _member in vars(Traced).items():
    if isinstance(_member, property):
        setattr(Recorded, _name, attribute(_name))
    elif _name.startswith("__") and callable(_member) and _name not in vars(Recorded):
        refuses = _member.__annotations__.get("return") == "NoReturn"  # such as `__bool__`
        setattr(Recorded, _name, _member if refuses else operation(_name))


def recorded(function: Any, args: Any, kwargs: Any) -> Any:
    """Record the call of a function if a `Recorded` value is among its arguments, else return None."""
    x = first_of((*args, *kwargs.values()))
    return None if x is None else x.tape.add(function, args, kwargs)


def first_of(values: Any) -> Recorded | None:
    for x in values:
        first = first_of(x) if isinstance(x, tuple | list) else x if isinstance(x, Recorded) else None
        if first is not None:
            return first
    return None


def looked_up(x: Any, at: Any, bounds: Any = None) -> Any:
    """Look up a table or a tensor."""
    return (x if isinstance(x, Table) else as_table("a tensor in a rule", x, bounds))[at]


@dataclass(frozen=True)
class Clamped:
    """A tensor as `regard.table(tensor, bounds="clamp")` inside of a graph."""

    tensor: torch.Tensor

    def __getitem__(self, at: Any) -> Any:
        step = recorded(looked_up, (self.tensor, at, "clamp"), {})
        return self.tensor[at] if step is None else step


class Lookups(TorchFunctionMode):
    """Function mode that records a tensor indexed with a `Recorded` value."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        step = recorded(looked_up, args, {}) if function is torch.Tensor.__getitem__ else None
        return function(*args, **(kwargs or {})) if step is None else step


def record(argument: str, function: Callable[..., Any]) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Return the rule of a function as text, and the tensors that it reads."""
    tape = Tape(len(MASK_LEAVES if argument == "mask" else SCORE_LEAVES))
    with Lookups():
        result = tape.operand(function(*tape.leaves))
    forms = tuple([(tuple([n if has_static_value(n) else UNKNOWN for n in x.shape]), x.dtype) for x in tape.tensors])
    text, reads = name_of_steps(argument, name_of(function), tuple(tape.steps), result, forms, *tape.tables)
    return text, tuple([tape.tensors[n] for n in reads])


@constant
def name_of_steps(
    argument: str, name: str, steps: tuple[Step, ...], result: Operand, forms: tuple[Any, ...], *tables: Table
) -> tuple[str, tuple[int, ...]]:
    """Return the rule of recorded steps as text, and the numbers of the tensors that it reads.

    forms: shapes and dtypes of the tensors.
    """
    if not torch.compiler.is_compiling():
        warn_of(argument, name)
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in forms]
    function = again(steps, result, {"tensor": tensors, "table": tables})
    function.__name__ = name
    rule = rule_of(argument, function)
    slots: dict[int, Any] = {}
    payloads: dict[int, Any] = {}
    for x in foreign(rule.node):
        payloads[id(x)] = slots.setdefault(number_of(x.tensor, tensors), x.empty)
    return text_of(replace(rule, node=rebuild(rule.node, payloads)), tuple(slots.values())), tuple(slots)


def number_of(x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of a tensor, which may be a view of one that has the same shape."""
    for n, y in enumerate(tensors):
        if x is y or (x._base is y and x.shape == y.shape):
            return n
    raise NotImplementedError("a function computes a tensor of another one inside of a rule: compute it outside")


def again(steps: Sequence[Step], result: Operand, arrays: dict[str, Sequence[Any]]) -> Callable[..., Any]:
    """Return a function of the leaves that does the steps."""

    def function(*leaves: Any) -> Any:
        values = [*leaves]
        by_kind = arrays | {"value": values}

        def read(x: Operand) -> Any:
            kind, at = x
            return tuple(map(read, at)) if kind == "tuple" else by_kind[kind][at] if kind in by_kind else at

        for step, operands, named in steps:
            args = [read(x) for x in operands]
            values.append(done(step, args, {key: read(x) for key, x in named}))
        return read(result)

    return function


def done(step: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Do a step; a reflected operator of a tensor, by which Dynamo names ``value - tensor``, as the operator."""
    if isinstance(step, str):
        return getattr(args[0], step)(*args[1:], **kwargs)
    name = step.__name__.replace("__rdiv__", "__rtruediv__")
    plain = getattr(operator, f"__{name[3:]}", None) if name.startswith("__r") else None
    return step(*args, **kwargs) if plain is None else plain(*args[::-1])


def recordable(function: Any) -> bool:
    """Return False for a function that Dynamo would run wrongly, or not at all, with `Recorded` values."""
    if not isinstance(function, FunctionType):
        return True
    code = function.__code__
    if torch.compiler.is_exporting() and not code.co_freevars:  # PyTorch warns of what is recorded in an export
        return reads_tensors("mask" if code.co_argcount == len(MASK_LEAVES) else "score", function, ())
    return not (unrecordable(code) or symbols_in(code))


@constant
def unrecordable(code: CodeType) -> bool:
    """Return True if Dynamo cannot run code on `Recorded` values, or if the bytecode of this CPython is unknown."""
    return opcodes.version() not in opcodes.VERSIONS or opcodes.calls_numpy_or_inverts(code)


@constant
def symbols_in(code: CodeType) -> bool:
    """Return True if code may compare an index with a symbol of the graph, which Dynamo takes for another type."""
    return has_symbols() and opcodes.compares_others(code)


def numbers_alone(argument: str, function: Any) -> bool:
    """Return True if a function reads no tensor, so that it can be called outside of the trace."""
    try:
        cells = function.__closure__ or ()
    except AttributeError:  # made in the graph
        cells = ()
        repr(function)  # breaks the graph if it reads a tensor: a constant function of it raises
    numbers = []
    for cell in cells:
        x = cell.cell_contents
        if not isinstance(x, NUMBERS):
            return False
        numbers.append(guard_scalar(x) if isinstance(x, int | float) else x)
    return not reads_tensors(argument, function, tuple(numbers))


@constant
def reads_tensors(argument: str, function: Any, numbers: tuple[Any, ...]) -> bool:
    """Return True if a function reads a tensor; other numbers of its closure trace the graph again."""
    with reading() as constants:
        rule = rule_of(argument, function)
    return bool(rule.foreign or constants)


@outside_of_graphs("Dynamo cannot run the function of a mask or a score")
def run_outside(argument: str, function: Any) -> Any:
    """Return the rule of a function that Dynamo cannot run."""
    warn_of(argument, name_of(function))
    return rule_of(argument, function)


def warn_of(argument: str, name: str) -> None:
    """Warn that a function breaks the graph."""
    version = opcodes.version()
    text = OUTSIDE if version in opcodes.VERSIONS else UNREAD
    warn_once(text.format(argument, name, *version))


def rule_of(argument: str, function: Any) -> Any:
    return (as_mask if argument == "mask" else as_score)(function)


def name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
