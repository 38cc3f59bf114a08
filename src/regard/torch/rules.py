"""Rules that read tensors: what stands for a tensor in a rule, and the rule with the values that it has in a call.

While a rule is traced, composed and printed, a tensor has a shape and a dtype but no values: under a transform or a
trace there are none. Every call takes those tensors as inputs of their own and puts their arrays in the places.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from regard.core.problem import device_of
from regard.core.tensors import DEVICES, NUMPY
from regard.rules import Rule, Table
from regard.rules.expression import rebuild
from regard.rules.masks import foreign
from regard.rules.tracing import where
from regard.torch.arrays import checked, concrete, values
from regard.torch.graph.modes import sizes

Array = np.ndarray[Any, np.dtype[Any]]


class TensorTable(Table):
    """A table whose values are those of a tensor at the time of the call; without one, of what takes its place."""

    __slots__ = ("_dtype", "_shape", "last", "tensor")
    tensor: torch.Tensor | None
    last: Table | None
    _shape: tuple[int, ...]
    _dtype: torch.dtype

    def __init__(
        self, what: str, tensor: torch.Tensor | None, shape: tuple[int, ...] = (), dtype: Any = None,
        bounds: Any = "clamp",
    ) -> None:  # fmt: skip
        if tensor is not None:
            shape, dtype = tuple(map(int, sizes(tensor))), tensor.dtype
        if 0 in shape:
            raise ValueError(f"{what} must not be empty, got shape {shape}")
        if dtype not in NUMPY or dtype.is_complex:
            raise TypeError(f"{what} must be a tensor of booleans, integers or floats, got {dtype}")
        for name, value in (
            ("tensor", tensor),
            ("_shape", shape),
            ("_dtype", dtype),
            ("last", None),
            ("bounds", bounds),
        ):
            object.__setattr__(self, name, value)

    @property
    def array(self) -> Array:  # type: ignore[override]
        raise TypeError(f"a rule that reads the {self} serves calls on tensors, not on NumPy arrays")

    @property
    def known(self) -> Array | None:
        return None if self.tensor is None or not concrete(self.tensor) else values(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return NUMPY[self._dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def empty(self) -> "TensorTable":
        """The same without the tensor."""
        return TensorTable("table", None, self._shape, self._dtype, self.bounds)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorTable, ("table", self.tensor, self._shape, self._dtype, self.bounds)

    def __repr__(self) -> str:
        return f"table of shape {self.shape}, {self._dtype} tensor"

    def at(self, values: Array) -> Table:
        """A table of these values: the one of the last call if they are the same, for which plans are kept."""
        if device_of(values) is not None:
            return Table.lying(values, self.bounds)
        last = self.last
        if last is None or not same_bits(last.array, values):
            last = Table.of("table", values, self.bounds)
            object.__setattr__(self, "last", last)
        return last


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@dataclass(frozen=True, eq=False, slots=True)
class Flags:
    """A dense mask given as a tensor whose values are known in the call, aligned right to (..., h, n_q, n_k)."""

    tensor: torch.Tensor | None
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def empty(self) -> "Flags":
        """The same without the tensor."""
        return Flags(None, self.shape)


def table(what: str, x: torch.Tensor, bounds: Any = "clamp") -> Table:
    """The table of a tensor. Integers that can be read are kept as they are now; floats, which train, are followed."""
    x = checked(what, x)
    if x.is_floating_point() or not concrete(x):
        return TensorTable(what, x, bounds=bounds)
    return Table.of(what, values(x), bounds)


def constant(what: str, x: torch.Tensor) -> Array:
    """The values of a tensor, where a rule is made of them."""
    x = checked(what, x)
    if not concrete(x):
        raise TypeError(f"{what}: a rule is made of its values, which a tensor does not have while it is traced")
    return values(x)


def flags(argument: str, x: torch.Tensor, frozen: bool = False) -> Any:
    """A mask given as a tensor, as what a rule may hold; frozen: with the values that it has now."""
    x = checked(argument, x)
    if concrete(x) and x.device.type not in DEVICES:
        return values(x)
    if x.is_floating_point():
        raise TypeError(f"{argument} must be booleans or 0/1 integers, got {x.dtype}; to add to scores, use bias=")
    return Flags(x if x.dtype is torch.bool and not frozen else x != 0, sizes(x))


def divided(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """`torch.div` of values in a rule."""
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor":
        return a // b
    size = abs(a) // abs(b)
    return where((a < 0) == (b < 0), size, -size)


def clamped(x: Any, min: Any = None, max: Any = None) -> Any:
    """`torch.clamp` of a value in a rule."""
    x = x if min is None else np.maximum(x, min)
    return x if max is None else np.minimum(x, max)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "subtract": operator.sub,
    "mul": operator.mul, "multiply": operator.mul, "neg": operator.neg, "negative": operator.neg,
    "abs": abs, "absolute": abs, "sign": np.sign, "minimum": np.minimum, "maximum": np.maximum,
    "div": divided, "divide": divided, "true_divide": operator.truediv, "floor_divide": operator.floordiv,
    "remainder": operator.mod, "eq": operator.eq, "ne": operator.ne, "not_equal": operator.ne, "lt": operator.lt,
    "less": operator.lt, "le": operator.le, "less_equal": operator.le, "gt": operator.gt, "greater": operator.gt,
    "ge": operator.ge, "greater_equal": operator.ge, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor, "bitwise_not": operator.invert, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor, "logical_not": np.logical_not,
    "where": where, "clamp": clamped, "clip": clamped, "clamp_min": clamped,
    "clamp_max": lambda x, max: clamped(x, max=max),
}  # fmt: skip
"""PyTorch's functions of integers and booleans, by name, for the values that a rule is traced with."""


def arithmetic(name: str, *args: Any, **options: Any) -> Any:
    """One of them."""
    return ARITHMETIC[name](*args, **options)


class Bound(NamedTuple):
    """A rule with the arrays of a call in place of its tensors, and the tables that stand for them."""

    rule: Any
    tables: dict[TensorTable, Table]


_bound: WeakKeyDictionary[Rule, tuple[tuple[Any, ...], Bound]] = WeakKeyDictionary()


def bind(rule: Any, given: dict[int, Array]) -> Bound:
    """`rule` with arrays for its tensors: `given` maps the id of each to one."""
    reads = foreign(rule.node)
    if not reads:
        return Bound(rule, {})
    tables = {x: x.at(given[id(x)]) for x in reads if isinstance(x, TensorTable)}
    key = tuple(map(id, tables.values()))
    kept = _bound.get(rule)
    if kept is not None and kept[0] == key and len(tables) == len(reads):
        return kept[1]
    payloads: dict[int, Any] = {id(x): tables[x] if isinstance(x, TensorTable) else given[id(x)] for x in reads}
    bound = Bound(replace(rule, node=rebuild(rule.node, payloads)), tables)
    if len(tables) == len(reads):
        _bound[rule] = key, bound
    return bound
