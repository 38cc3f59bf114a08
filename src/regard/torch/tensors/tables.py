"""Rules that read tensors.

While a rule is traced, composed or printed, a tensor has a shape and a dtype but no values. Every call takes those
tensors as inputs of its own and binds their arrays to the rule.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch

from regard.core.problem import device_of
from regard.core.tensors import NUMPY
from regard.rules import Mask, Rule, Table, type_name
from regard.rules.expression import make, rebuild
from regard.rules.masks import foreign
from regard.torch.tensors.arrays import checked, concrete, values
from regard.torch.tensors.modes import fake, sizes
from regard.torch.tensors.parameters import Place, held, place_of, stale

Array = np.ndarray[Any, np.dtype[Any]]


class TensorTable(Table):
    """A table with the values that a tensor has at the time of the call.

    tensor: None in a rule that was read from text; an input of the graph takes its place.
    """

    __slots__ = ("_dtype", "_place", "_shape", "_tensor", "_used", "last")
    from_tensor = True
    _used: bool  # whether a call has read it
    last: Table | None
    _tensor: torch.Tensor | None
    _place: Place | None
    _shape: tuple[int, ...]
    _dtype: torch.dtype

    def __init__(
        self, what: str, tensor: torch.Tensor | None, shape: tuple[int, ...] = (), dtype: Any = None,
        bounds: Any = None, place: Place | None = None,
    ) -> None:  # fmt: skip
        if tensor is not None:
            shape, dtype = tuple(map(int, sizes(tensor))), tensor.dtype
        if 0 in shape:
            raise ValueError(f"{what} must not be empty, got shape {shape}")
        if dtype not in NUMPY or dtype.is_complex:
            raise TypeError(f"{what} must be a tensor of booleans, integers or floats, got {dtype}")
        for name, value in (
            ("_tensor", tensor),
            ("_place", place),
            ("_shape", shape),
            ("_dtype", dtype),
            ("_used", False),
            ("last", None),
            ("bounds", bounds),
        ):
            object.__setattr__(self, name, value)

    @property
    def tensor(self) -> Any:
        """The tensor that the next call reads; None in a rule that was read from text."""
        self.refuse_stale()
        return self._tensor

    def refuse_stale(self) -> None:
        """Raise NotImplementedError if the tensor is a parameter that its module has replaced."""
        x = self._tensor
        if x is None:
            return
        if not (self._used or torch.compiler.is_dynamo_compiling()):
            object.__setattr__(self, "_used", True)
            if self._place is None:  # a module may have it since the rule was made
                object.__setattr__(self, "_place", place_of(x))
        if not held(x, self._place):
            stale("the parameter of a module" if self._place is None else self._place.text)

    @property
    def trains_outside(self) -> bool:
        """True if it holds a tensor with a gradient that a graph would take for a constant."""
        return self._tensor is not None and self._tensor.requires_grad and not fake(self._tensor)

    @property
    def array(self) -> Array:  # type: ignore[override]
        raise TypeError(f"a rule that reads the {self} serves calls on tensors, not on NumPy arrays")

    @property
    def known(self) -> Array | None:
        x = self._tensor
        if x is None or not concrete(x):
            return None
        array = values(x, there=True)
        return array if device_of(array) is None else None  # to read those of a device, the host would wait

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
        """The same table without the tensor."""
        return TensorTable("table", None, self._shape, self.torch_dtype, self.bounds)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorTable, ("table", self._tensor, self._shape, self._dtype, self.bounds)

    def __deepcopy__(self, copied: dict[int, Any]) -> "TensorTable":
        place = None if self._place is None else self._place.copied(copied)
        return TensorTable("table", deepcopy(self._tensor, copied), self._shape, self._dtype, self.bounds, place)

    def __repr__(self) -> str:
        return f"table of shape {self.shape}, {self._dtype} tensor"

    def at(self, values: Array) -> Table:
        """Return a table of these values, cached while they are the same to the bit.

        Plans are cached by table.
        """
        if device_of(values) is not None:
            return Table.of_device(values, self.bounds)
        last = self.last
        if last is None or not same_bits(last.array, values):
            last = Table.of("table", values, self.bounds)
            object.__setattr__(self, "last", last)
        return last


class ModuleTable(TensorTable):
    """A table with the values that an attribute of a module has at the time of the call (see `regard.table`).

    The table has the shape of the attribute when the table was made.
    """

    __slots__ = ()
    _place: Place

    def __init__(self, module: torch.nn.Module, name: str, bounds: Any, shape: tuple[int, ...], dtype: Any) -> None:
        super().__init__("table", None, shape, dtype, bounds, Place(ref(module), name))

    @property
    def known(self) -> None:
        """None: the values of the next call are not known."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that the next call reads."""
        x: torch.Tensor = self._place.tensor
        if x.shape != self._shape or x.is_floating_point() != self._dtype.is_floating_point:
            now, then = f"{x.dtype} of shape {tuple(x.shape)}", f"{self._dtype} of shape {self._shape}"
            raise ValueError(f"{self._place.text} is {now}, but was {then} when a table was made of it")
        return x

    @property
    def dtype(self) -> np.dtype[Any]:
        return NUMPY[self.torch_dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleTable, (self._place.owner, self._place.name, self.bounds, self._shape, self._dtype)

    def __deepcopy__(self, copied: dict[int, Any]) -> "ModuleTable":
        place = self._place.copied(copied) or self._place
        return ModuleTable(place.owner, place.name, self.bounds, self._shape, self._dtype)

    def __repr__(self) -> str:
        return f"table of shape {self.shape}, {self._place.text}"


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@dataclass(frozen=True, eq=False, slots=True)
class TensorMask:
    """A dense mask given as a tensor, aligned right to (..., h, n_q, n_k).

    Values are known only in the call.
    """

    from_tensor: ClassVar[bool] = True
    tensor: torch.Tensor | None
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def empty(self) -> "TensorMask":
        """The same mask without the tensor."""
        return TensorMask(None, self.shape)


def table(what: str, x: torch.Tensor, bounds: Any = None) -> Table:
    """Make a table of a tensor.

    Integers that can be read keep their current values. Floats, which train, are read in each call.
    """
    x = checked(what, x)
    if x.is_floating_point() or not concrete(x):
        return TensorTable(what, x, bounds=bounds, place=place_of(x))
    return Table.of(what, constant(what, x), bounds)


def module_table(module: Any, name: Any, bounds: Any) -> Table:
    """Make a table of an attribute of a module, looked up in each call."""
    x = getattr(module, name, None)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"table({type_name(module)}, {name!r}): {name!r} must name a tensor, got {type_name(x)}")
    return ModuleTable(module, name, bounds, tuple(map(int, sizes(x))), x.dtype)


_read: ContextVar[list[torch.Tensor] | None] = ContextVar("read", default=None)


@contextmanager
def reading() -> Iterator[list[torch.Tensor]]:
    """Collect the tensors whose values rules are made of meanwhile, and whose later values they do not follow."""
    tensors: list[torch.Tensor] = []
    token = _read.set(tensors)
    try:
        yield tensors
    finally:
        _read.reset(token)


def constant(what: str, x: torch.Tensor) -> Array:
    """Read the values of a tensor that a rule is made of."""
    tensors = _read.get()
    if tensors is not None:
        tensors.append(x)
    x = checked(what, x)
    if not concrete(x):
        raise TypeError(f"{what}: a rule is made of its values, which a tensor does not have while it is traced")
    return values(x)


def flags(argument: str, x: torch.Tensor, frozen: bool = False) -> Any:
    """Return a tensor mask as a `TensorMask`, an input of the call, or as an array.

    A mask becomes an array if its values are read now: integers, and frozen masks, which later changes do not change.
    """
    x = checked(argument, x)
    if (frozen or x.dtype is not torch.bool) and concrete(x) and x.is_cpu:
        return values(x)
    if x.is_floating_point():
        raise TypeError(f"{argument} must be booleans or 0/1 integers, got {x.dtype}; to add to scores, use bias=")
    return TensorMask(x if x.dtype is torch.bool and not frozen else x != 0, sizes(x))


class BoundRule(NamedTuple):
    """A rule with the arrays of a call, and the tables that stand for its tensors."""

    rule: Any
    tables: dict[TensorTable, Table]


_bound: WeakKeyDictionary[Rule, tuple[tuple[Any, ...], BoundRule]] = WeakKeyDictionary()


def bind(rule: Any, given: dict[int, Array]) -> BoundRule:
    """Replace the tensors of a rule by arrays.

    given: the arrays, by the ids of the tensors' tables and masks.
    """
    reads = foreign(rule.node)
    if not reads:
        return BoundRule(rule, {})
    if rule.node.op == "dense":  # a mask that is a tensor, without a rule around it
        array = given[id(rule.node.payload)]
        return BoundRule(Mask(make("dense", "bool", (), array), rule.text), {})
    tables = {x: x.at(given[id(x)]) for x in reads if isinstance(x, TensorTable)}
    key = tuple(map(id, tables.values()))
    cached = _bound.get(rule)
    if cached is not None and cached[0] == key and len(tables) == len(reads):
        return cached[1]
    payloads: dict[int, Any] = {id(x): tables[x] if isinstance(x, TensorTable) else given[id(x)] for x in reads}
    bound = BoundRule(replace(rule, node=rebuild(rule.node, payloads)), tables)
    if len(tables) == len(reads) and not any(x.on_device for x in tables.values()):  # those are new in each call
        _bound[rule] = key, bound
    return bound
