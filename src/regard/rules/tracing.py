"""Arguments of a rule while it is traced: indices, score, tables and their rows."""

from __future__ import annotations  # so that `help` shows the names of types

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, NoReturn, overload

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike

from regard.arguments.frameworks import adapter, constructor
from regard.arguments.values import accepts, array_type, choice, type_name
from regard.loaders import loaders
from regard.rules import tensors
from regard.rules.expression import _DEFINED, OPS, Array, Kind, Node, build, cast, literal, make, number

Bounds = Literal["clamp", "raise"] | None
BOUNDS = ("clamp", "raise", None)
BRANCHING = (
    "a rule is traced once for all indices, so a traced value has no truth value: use & | ~ for and, or, not; "
    "regard.where(condition, a, b) for if; np.maximum and np.minimum for max and min; "
    "(a <= x) & (x < b) for a <= x < b"
)
MOST_ELEMENTS = 4096  # of a row of a table that is computed with: each becomes operations of its own

# The tables of the tensors that the rule being traced looks up, by their ids, with the tensors themselves.
_captured: ContextVar[dict[int, tuple[Any, Table]] | None] = ContextVar("captured", default=None)


def as_array(what: str, value: Any) -> Array:
    """Return an array, or numbers in lists, as a NumPy array with its current values.

    Takes arrays of other frameworks; a traced one has no values, and is returned unchanged. Raises
    TypeError for other arrays, such as masked ones, which mean more than numbers.
    """
    framework = adapter(value)
    if framework is not None:
        value = framework.constant(what, value)
        if type(value) is not np.ndarray:
            return value  # type: ignore[no-any-return]
    if type(value) is not np.ndarray and not isinstance(value, list | tuple | range | bool | int | float | np.generic):
        raise TypeError(f"{what} must be a NumPy array, got {array_type(value)}")
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(f"{what} must be an array, got lists of different lengths") from None


class Table:
    """An array that rules look up: ``table[h, i - j]``, one integer index per axis.

    Fewer indices give a row, to index again or to reduce with ``any``, ``sum`` or ``dot``. Indices
    are clamped to its ends (see `table`). array: bool, integer or floating, of any rank, no
    axis empty; copied, so that a rule never changes. Float tables train: gradients are returned
    under the table itself.

    Raises TypeError for other arrays, ValueError for an empty one.

    >>> slopes = Table([0.5, 0.25])
    >>> slopes
    table of shape (2,), float64
    """

    __slots__ = ("__weakref__", "array", "bounds", "on_device")
    from_tensor: ClassVar[bool] = False  # whether each call binds it to the values of a tensor
    array: Array
    bounds: Bounds
    on_device: bool

    def __init__(self, array: ArrayLike, *, bounds: Bounds = None) -> None:
        self._hold("table", array, choice("bounds", bounds, BOUNDS))

    @classmethod
    def of(cls, what: str, array: ArrayLike, bounds: Bounds = None) -> Table:
        """Make the table of an array; `what` is its name in errors."""
        table = object.__new__(Table)
        table._hold(what, array, bounds)
        return table

    def _hold(self, what: str, array: ArrayLike, bounds: Bounds) -> None:
        values = as_array(what, array).copy()
        if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
            raise TypeError(f"{what} must be an array of booleans, integers or floats, got {values.dtype}")
        if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{what} must fit into 64-bit signed integers, got {values.max()}")
        if 0 in values.shape:
            raise ValueError(f"{what} must not be empty, got shape {values.shape}")
        values = values.astype(values.dtype.newbyteorder("="), order="C", copy=False)
        values.setflags(write=False)
        for name, value in (("array", values), ("bounds", bounds), ("on_device", False)):
            object.__setattr__(self, name, value)

    @classmethod
    def of_device(cls, array: Array, bounds: Bounds = None) -> Table:
        """Make a table of an array on a device, which is neither copied nor read."""
        table = object.__new__(Table)
        for name, value in (("array", array), ("bounds", bounds), ("on_device", True)):
            object.__setattr__(table, name, value)
        return table

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a table is frozen; make a new one with regard.table(array)")

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Table, bounds=self.bounds), (self.array,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def known(self) -> Array | None:
        """The values that can be read now; None for an array on a device."""
        return None if self.on_device else self.array

    @property
    def kind(self) -> Kind:
        """The kind of value that a lookup gives."""
        kinds: dict[str, Kind] = {"b": "bool", "i": "int", "u": "int"}
        return kinds.get(self.dtype.kind, "float")

    @constructor
    def __getitem__(self, indices: Any) -> Any:
        return TracedArray(self.shape, self._entry)[indices]

    def _entry(self, indices: tuple[Any, ...]) -> Traced:
        nodes = [_operand(index) for index in indices]
        for axis, node in enumerate(nodes):
            if node.kind != "int":
                raise TypeError(f"index {axis} of a table must be an int, not {node.kind}; cast with .astype(int)")
            if node.op == "number" and node.payload < 0:
                raise IndexError(
                    f"index {axis} of a table counts from 0, got {node.payload}; "
                    f"the last entry of shape {self.shape} is {self.shape[axis] - 1}"
                )
        return _kind(indices)(make("gather", self.kind, tuple(nodes), self))

    def __iter__(self) -> NoReturn:
        raise TypeError("a table cannot be iterated over; look it up, e.g. table[h, i - j]")

    def __repr__(self) -> str:
        return f"table of shape {self.shape}, {self.dtype}"


@overload
def table(array: ArrayLike, *, bounds: Bounds = None) -> Table: ...
@overload
def table(array: object, name: str, *, bounds: Bounds = None) -> Table: ...
@constructor
def table(array: Any, name: str | None = None, *, bounds: Bounds = None) -> Table:
    """Make an array a `Table`, to look up in rules and to receive a gradient.

    ``table(module, "slopes")`` reads the tensor ``module.slopes`` of a `torch.nn.Module` at each
    call. So a rule that is made once follows its parameter where a framework replaces it, as
    `torch.func.functional_call`, ``load_state_dict(assign=True)`` and FSDP2 do.

    bounds: "clamp" makes an index beyond an end take the end, and so does None, with exceptions.
    An axis read at ``i`` alone with an entry for each of n_q queries raises ValueError where
    n_q ≠ n_k and no `offset` is given. There i is row + n_k - n_q, which is no row of the table.
    An axis read at ``b`` or ``h`` alone raises where it is longer than the batch or the heads of a
    call without `origin`.
    "raise" refuses a call that would read an index beyond an end for a pair that its mask allows.
    The branch of a `regard.where` that is not taken is not read, nor is the right of ``&`` where
    the left is false. A negative number as an index raises IndexError. Calls are checked before any
    work, without n × n memory. If a check is too large for that, or an index depends on a score or
    on traced values, the error says so.

    For a `torch.Tensor` of floats, the table is the tensor itself, with its values at each call,
    and gradients go to the tensor. ``tensor[h, i - j]`` in a rule means
    ``table(tensor)[h, i - j]``. If a framework has replaced the parameter or buffer that a rule was
    made of, a call raises.

    >>> slopes = table(np.array([0.5, 0.25]))
    >>> def alibi(s, b, h, i, j):
    ...     return s - slopes[h] * abs(i - j)
    """
    bounds = choice("bounds of table", bounds, BOUNDS)
    if name is None:
        return as_table("table", array, bounds)
    if not isinstance(name, str):
        raise TypeError(f"name of table must be a string, got {type_name(name)}")
    module = getattr(sys.modules.get("torch"), "nn", None)
    if module is None or not isinstance(array, module.Module):
        raise TypeError(f"table takes the name of an attribute of a torch.nn.Module alone, got {array_type(array)}")
    of_module: Table = loaders["torch"]().module_table(array, name, bounds)
    return of_module


def as_table(what: str, value: Any, bounds: Bounds = None) -> Table:
    framework = adapter(value)
    lookup_table: Table = Table.of(what, value, bounds) if framework is None else framework.table(what, value, bounds)
    return lookup_table


def _operand(value: Any) -> Node:
    """Return the node for any operand of a rule."""
    if isinstance(value, Traced):
        return value.node
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 and value.dtype.kind in "biufV":
        value = value.item()
    if isinstance(value, bool | int | float | np.floating):
        return number(value)
    framework = adapter(value)
    if framework is not None and getattr(value, "ndim", None) == 0:
        return captured("a number of a rule", value)[()].node  # type: ignore[no-any-return]  # trained like a table
    if isinstance(value, TracedArray):
        raise TypeError(f"a rule computes one number for each pair, not a {value!r}; index it, or reduce it by .sum()")
    if isinstance(value, np.ndarray | list | tuple) or framework is not None:
        raise TypeError("arrays and lists cannot be used in a rule directly; use regard.table(array)[index]")
    if isinstance(value, Table):
        raise TypeError("a table must be looked up in a rule, e.g. table[h, i - j]")
    raise TypeError(f"a rule cannot use a {type(value).__name__}; use numbers, and regard.table(array)[index]")


def captured(what: str, x: Any) -> Table:
    """Return the table of an array that a rule looks up itself, one for all its look-ups."""
    tables = _captured.get()
    if tables is None:
        return as_table(what, x)
    if id(x) not in tables:
        tables[id(x)] = x, as_table(what, x)
    return tables[id(x)][1]


def _apply(name: str, *values: Any) -> Any:
    if any(isinstance(value, TracedArray) for value in values):
        return elementwise(functools.partial(_apply, name), *values)
    return _kind(values)(build(name, *(_operand(value) for value in values)))


def _kind(values: Iterable[Any]) -> type[Traced]:
    """Return the subclass of `Traced` for a result of these operands."""
    return next((type(value) for value in values if isinstance(value, Traced)), Traced)


def _binary(name: str) -> tuple[Callable[[Traced, Any], Traced], Callable[[Traced, Any], Traced]]:
    return lambda self, other: _apply(name, self, other), lambda self, other: _apply(name, other, self)


def _unary(name: str) -> Callable[[Traced], Traced]:
    return lambda self: _apply(name, self)


def _refuse(message: str) -> Callable[..., NoReturn]:
    def method(self: Traced, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(message)

    return method


class Traced:
    """A value in a rule.

    A value takes operators, NumPy's and PyTorch's elementwise functions, ``.astype(kind)``.
    """

    __slots__ = ("node",)
    node: Node
    device: ClassVar[None] = None  # PyTorch's default
    shape: ClassVar[tuple[()]] = ()

    def __init__(self, node: Node) -> None:
        self.node = node

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("subtract")
    __mul__, __rmul__ = _binary("multiply")
    __truediv__, __rtruediv__ = _binary("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide")
    __mod__, __rmod__ = _binary("remainder")
    __pow__, __rpow__ = _binary("power")
    __and__, __rand__ = _binary("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor")
    __lshift__, __rlshift__ = _binary("left_shift")
    __rshift__, __rrshift__ = _binary("right_shift")
    __lt__, __gt__ = _binary("less")
    __le__, __ge__ = _binary("less_equal")
    __eq__, _ = _binary("equal")  # type: ignore[assignment]
    __ne__, _ = _binary("not_equal")  # type: ignore[assignment]
    __neg__, __pos__, __abs__, __invert__ = map(_unary, ("negative", "positive", "absolute", "invert"))
    erf = _unary("erf")

    __bool__ = _refuse(BRANCHING)
    __contains__ = _refuse("in is not available in a rule; compare with ==, or use a boolean regard.table")
    __int__ = __float__ = __complex__ = __round__ = _refuse(
        "a traced value is not a number: use .astype(int) or .astype(float), np.rint, and NumPy's functions, not math's"
    )
    __index__ = __array__ = _refuse("a traced value cannot index a list or an array; use regard.table(array)[index]")
    __iter__ = __len__ = __getitem__ = _refuse("a traced value stands for one number; only a regard.table has elements")
    __setitem__ = _refuse("a rule cannot assign to elements; build the value with regard.where")

    def astype(self, kind: Any) -> Traced:
        """Cast the value to int, float or bool.

        Widths are the call's, so np.float32 means float.
        """
        target = tensors.kind_of(np.dtype(kind) if isinstance(kind, str) else kind)
        if target is None:
            raise TypeError(f"astype takes int, float or bool, got {kind!r}")
        return type(self)(cast(self.node, target))  # type: ignore[arg-type]

    @property
    def dtype(self) -> type:
        """The type of its kind of value, for ``.astype(x.dtype)``."""
        return {"bool": bool, "int": int, "float": float}[self.node.kind]

    def constant(self, value: Any, dtype: Any = None) -> Traced:
        """Return a value that is the same for all indices, of `dtype` or of this value's kind."""
        kind: Any = self.node.kind if dtype is None else tensors.kind_of(dtype)
        return type(self)(literal(value, kind))

    def unsqueeze(self, dim: int) -> TracedArray:
        """Return the value as an array of one element."""
        return TracedArray((1,), lambda place: self)

    def __getattr__(self, name: str) -> Any:
        method = tensors.METHODS.get(name)
        if method is None:
            raise AttributeError(f"a traced value has no {name!r}: use operators, and functions of NumPy or PyTorch")
        return functools.partial(method, self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _torch_function(function, args, kwargs)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__
        if name not in OPS and name not in _DEFINED:  # SciPy's erf is a ufunc too
            raise TypeError(f"np.{name} is not available in a rule; available: {', '.join(UFUNCS)}, where, clip")
        if method != "__call__":
            raise TypeError(f"np.{name}.{method} is not available in a rule, which computes one number at a time")
        if kwargs:
            raise TypeError(f"np.{name} takes no {', '.join(kwargs)} in a rule")
        return _apply(name, *inputs)

    def __array_function__(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is np.where:
            return where(*args, **kwargs)
        if function is np.clip:
            return _clip(*args, **kwargs)
        raise TypeError(
            f"np.{function.__name__} is not available in a rule, which computes one number at a time; "
            f"available: {', '.join(UFUNCS)}, where, clip"
        )

    def __repr__(self) -> str:
        return f"Traced({self.node!r})"


class TracedArray(NDArrayOperatorsMixin):
    """Several values in a rule: a row of a table, or what is computed of rows.

    shape: its axes. read: returns the value at a tuple of one index per axis.

    Operators and functions are elementwise and broadcast, also with arrays. ``any``, ``all``,
    ``sum``, ``mean``, ``prod``, ``amax``, ``amin`` and ``dot`` reduce, an index selects. Each
    element becomes operations of its own, so rows have to be short: at most 4,096 elements.

    >>> row = Table([[1.0, 2.0], [3.0, 5.0]])[0]
    >>> row
    traced array of shape (2,)
    >>> row.sum()
    Traced(add(table(2, 2)[0, 0], table(2, 2)[0, 1]))
    """

    __slots__ = ("read", "shape")
    device: ClassVar[None] = None

    def __init__(self, shape: tuple[int, ...], read: Callable[[tuple[Any, ...]], Any]) -> None:
        self.shape, self.read = shape, read

    @classmethod
    def of(cls, elements: Array) -> Any:
        """Return an array of elements; without axes, the element."""
        return cls(elements.shape, elements.__getitem__) if elements.ndim else elements[()]

    @property
    def elements(self) -> Array:
        """The values as a NumPy array of objects."""
        if math.prod(self.shape) > MOST_ELEMENTS:
            raise ValueError(f"a rule computes with at most {MOST_ELEMENTS:,} elements of a table, got a {self!r}")
        elements = np.empty(self.shape, object)
        for place in np.ndindex(self.shape):
            elements[place] = self.read(place)
        return elements

    def __getitem__(self, indices: Any) -> Any:
        indexed = list(indices) if isinstance(indices, tuple) else [indices]
        rank, every = len(self.shape), slice(None)
        dots = [n for n, index in enumerate(indexed) if index is Ellipsis]
        if len(indexed) - len(dots) > rank or len(dots) > 1:
            raise TypeError(f"a table of shape {self.shape} takes {rank} indices, got {len(indexed)}")
        at = dots[0] if dots else len(indexed)
        indexed[at : at + 1] = [every] * (rank - len(indexed) + len(dots))
        whole_axes = [axis for axis, index in enumerate(indexed) if isinstance(index, slice)]
        if any(indexed[axis] != every for axis in whole_axes):
            raise TypeError("a rule takes whole axes of a table with :, not parts; slice the array outside of the rule")
        if not whole_axes:
            return self.read(tuple(indexed))

        def read(place: tuple[Any, ...]) -> Any:
            whole = dict(zip(whole_axes, place, strict=True))
            return self.read(tuple(whole.get(axis, index) for axis, index in enumerate(indexed)))

        return TracedArray(tuple(self.shape[axis] for axis in whole_axes), read)

    def reduce(self, fold: Callable[[Any, Any], Any], dim: Any = None, keepdim: bool = False) -> Any:
        """Combine the elements along axes, all if `dim` is None, in order."""
        rank = len(self.shape)
        axes = range(rank) if dim is None else [axis % rank for axis in np.atleast_1d(dim)]
        rows = np.moveaxis(self.elements, axes, range(len(axes)))
        rows = rows.reshape(-1, *rows.shape[len(axes) :])
        out = np.empty(rows.shape[1:], object)
        for place in np.ndindex(out.shape):
            out[place] = functools.reduce(fold, rows[:, *place])
        return TracedArray.of(np.expand_dims(out, tuple(axes)) if keepdim else out)

    def astype(self, kind: Any) -> Any:
        """Cast the elements to int, float or bool."""
        return elementwise(lambda x: x.astype(kind), self)

    @property
    def dtype(self) -> type:
        """The type of the kind of value of its elements."""
        kind: type = self.read((0,) * len(self.shape)).dtype
        return kind

    def constant(self, value: Any, dtype: Any = None) -> Any:
        """Return a value that is the same for all indices, of `dtype` or of the elements' kind."""
        return self.read((0,) * len(self.shape)).constant(value, dtype)

    def unsqueeze(self, dim: int) -> TracedArray:
        """Return the array with a new axis of length 1."""
        elements = np.expand_dims(self.elements, dim)
        return TracedArray(elements.shape, elements.__getitem__)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter([self[n] for n in range(len(self))])

    erf: Any = _unary("erf")
    __bool__ = _refuse(BRANCHING)
    __array__ = _refuse("a row of a table has no values while a rule is traced")

    def __getattr__(self, name: str) -> Any:
        method = tensors.REDUCTIONS.get(name) or tensors.METHODS.get(name)
        if method is None:
            raise AttributeError(f"a row of a table has no {name!r}: use operators, and functions of NumPy or PyTorch")
        return functools.partial(method, self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _torch_function(function, args, kwargs)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc is np.matmul:
            return tensors.REDUCTIONS["dot"](*inputs)
        return elementwise(functools.partial(getattr(ufunc, method), **kwargs), *inputs)

    def __array_function__(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return elementwise(functools.partial(function, **kwargs), *args)

    def __repr__(self) -> str:
        return f"traced array of shape {self.shape}"


def _elements(value: Any) -> Array:
    if not isinstance(value, TracedArray) and getattr(value, "ndim", 0) > 0:
        value = captured("an array in a rule", value)[()]
    if isinstance(value, TracedArray):
        return value.elements
    element = np.empty((), object)
    element[()] = value
    return element


def elementwise(function: Callable[..., Any], *values: Any) -> Any:
    """Apply a function of single values to arrays in rules, which broadcast."""
    arrays = np.broadcast_arrays(*map(_elements, values))
    out = np.empty(arrays[0].shape, object)
    for place in np.ndindex(out.shape):
        out[place] = function(*(array[place] for array in arrays))
    return TracedArray.of(out)


def _torch_function(function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    if getattr(function, "__name__", "") == "__getitem__":
        return captured("a tensor in a rule", args[0])[args[1]]
    return tensors.call(function, args, dict(kwargs or {}))


UFUNCS = sorted(name for name in {*OPS, *_DEFINED} if isinstance(getattr(np, name, None), np.ufunc))


def _clip(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else _apply("maximum", x, low)
    return x if high is None else _apply("minimum", x, high)


@constructor
def where(condition: Any, a: Any, b: Any) -> Any:
    """Take `a` where the boolean `condition` holds, else `b`, inside of a rule.

    `where` replaces `if`. The other branch has no influence.

    >>> near = where(Traced(make("i", "int")) > 3, 1.0, 0.0)
    >>> near
    Traced(where(less(3, i), 1.0, 0.0))
    """
    return _apply("where", condition, a, b)


def trace(function: Callable[..., Any], leaves: Sequence[str]) -> Node:
    """Trace the expression that `function` computes from `leaves`.

    leaves: `MASK_LEAVES` or `SCORE_LEAVES`. Raises TypeError if a mask returns no boolean, a score
    no number, or if `function` takes other arguments. Of a function that Numba compiles, the Python
    function is traced. Errors of `function` itself get a note that names the rule.

    >>> trace(lambda b, h, i, j: i - j >= 0, ("b", "h", "i", "j"))
    less_equal(0, subtract(i, j))
    """
    what = "score" if "s" in leaves else "mask"
    rule = f"{what} rule {getattr(function, '__name__', type(function).__name__)!r}"
    function = getattr(function, "py_func", function)  # of Numba, whose compiled function takes no traced values
    if isinstance(function, type) or not callable(function):
        got = f"the class {function.__name__}" if isinstance(function, type) else type_name(function)
        raise TypeError(f"a {what} rule must be a function of ({', '.join(leaves)}), got {got}")
    accepts(function, leaves, f"{rule} must take ({', '.join(leaves)})")
    token = _captured.set({})
    try:
        result = function(*(Traced(make(leaf, "float" if leaf == "s" else "int")) for leaf in leaves))
    except Exception as error:
        error.add_note(f"while tracing {rule}")
        raise
    finally:
        _captured.reset(token)
    try:
        node = _operand(result)
    except TypeError:
        raise TypeError(f"{rule} returned a {type(result).__name__}; a {what} must return {_RESULT[what]}") from None
    if (node.kind == "bool") != (what == "mask"):
        article = "an" if node.kind == "int" else "a"
        raise TypeError(f"{rule} returned {article} {node.kind} expression; a {what} must return {_RESULT[what]}")
    return cast(node, "float") if what == "score" else node


_RESULT = {"mask": "a boolean one, e.g. i - j > 0", "score": "a float one, e.g. s - 0.5 * abs(i - j)"}
