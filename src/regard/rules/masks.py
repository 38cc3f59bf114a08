"""Masks: frozen rules over (b, h, i, j) that compose with ``& | ~``.

i is the absolute index of the query, j that of the key. h is the query head, b the row-major index of the leading
dimensions. True means attend.
"""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from regard.arguments.frameworks import adapter, constructor, plain
from regard.arguments.values import array_type, choice, integer
from regard.loaders import loaders
from regard.rules.expression import MASK_LEAVES, Array, At, Node, build, evaluate, has, make, once, order
from regard.rules.tracing import Table, Traced, as_array, as_table, trace

Axis = Literal["b", "h", "i", "j"]
AXES: dict[str, str] = {"b": "batch index", "h": "head", "i": "query index", "j": "key index"}
ATOM, NOT, AND, OR = 3, 2, 1, 0  # how tightly the text of a rule binds


@dataclass(frozen=True, slots=True)
class Requirement:
    """The range of absolute indices, [0, length) along `axis`, of an argument.

    Along "b" and "h" a length of 1 serves every index.
    """

    rule: str
    argument: str
    axis: Axis
    length: int

    def check(self, low: int, high: int) -> None:
        """Raise ValueError for a call with indices low, ..., high - 1 beyond the range."""
        if high <= low or (self.axis in "bh" and self.length == 1) or (low >= 0 and high <= self.length):
            return
        outside = low if low < 0 else high - 1
        raise ValueError(f"{self}, but this call reaches {AXES[self.axis]} {outside}")

    def check_end(self, high: int) -> None:
        """Raise ValueError for a whole call with indices 0, ..., high - 1, none of which is the last of the range."""
        if 0 < high < self.length:
            raise ValueError(
                f"{self}, but this call ends at {AXES[self.axis]} {high - 1}, and no origin= places it in a larger one"
            )

    def __str__(self) -> str:
        return f"{self.argument} of {self.rule} covers {AXES[self.axis]} 0 to {self.length - 1}"


@once
def foreign(node: Node) -> tuple[Any, ...]:
    """Return the tables and masks of tensors that an expression reads, in order of first use."""
    read: list[Any] = []
    # Parts of a combination have cached results, so that each link of a long chain does not walk it again.
    for x in order([node], ends=lambda x: has(x, foreign)):
        if has(x, foreign):
            read += foreign(x)
        elif x.op in ("gather", "dense") and getattr(x.payload, "from_tensor", False):
            read.append(x.payload)
    return tuple({id(x): x for x in read}.values())


@once
def _dense(node: Node) -> tuple[Array, ...]:
    return tuple(x.payload for x in order([node]) if x.op == "dense")


class _InGraphs(dict[Any, Any]):
    """Rules as PyTorch's graphs have them.

    Dynamo guards a property that C code reads by its value, which may be another rule's. It would trace a function.
    """

    def __missing__(self, rule: Rule) -> tuple[str, tuple[Any, ...]]:
        in_graph: tuple[str, tuple[Any, ...]] = loaders["torch"]().rule_in_graph(rule)
        return in_graph


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class Rule:
    """A traced rule: its expression, text and requirements on a call.

    foreign: the tables and masks of tensors that it reads (see the function `foreign`).
    """

    node: Node
    text: str
    requires: tuple[Requirement, ...] = ()
    foreign: tuple[Any, ...] = field(init=False, repr=False)
    in_graph: ClassVar[property] = property(_InGraphs().__getitem__)

    def __post_init__(self) -> None:
        object.__setattr__(self, "foreign", foreign(self.node))

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The tensors that the next call reads."""
        return tuple([x.tensor for x in self.foreign])

    @property
    def dense(self) -> tuple[Array, ...]:
        """The dense arrays that it reads, each aligned right to (..., h, n_q, n_k)."""
        return _dense(self.node)

    def __repr__(self) -> str:
        return self.text


@plain
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mask(Rule):
    """A rule for the keys that each query may attend to.

    A mask composes with ``&``, ``|`` and ``~``, also with boolean or 0/1 integer arrays. Two masks
    that are built alike are not equal.

    >>> causal() & window(3) | ~prefix(4)
    causal() & window(3) | ~prefix(4)
    """

    binds: int = ATOM

    # Leaves the operators of ``array & mask`` to the mask.
    __array_ufunc__ = None

    def __and__(self, other: Any) -> Mask:
        return NotImplemented if _leaves_operators(other) else _combine(AND, self, other)

    def __rand__(self, other: Any) -> Mask:
        return _combine(AND, other, self)

    def __or__(self, other: Any) -> Mask:
        return NotImplemented if _leaves_operators(other) else _combine(OR, self, other)

    def __ror__(self, other: Any) -> Mask:
        return _combine(OR, other, self)

    def __invert__(self) -> Mask:
        return Mask(build("invert", self.node), f"~{self._within(NOT)}", self.requires, NOT)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with & | ~ instead of and, or, not")

    def _within(self, binds: int) -> str:
        return self.text if self.binds >= binds else f"({self.text})"

    def show(self, n: int, n_k: int | None = None) -> MaskText:
        """Draw the first head and batch entry for n queries and the last-aligned n_k keys.

        Raises ValueError if an array in the mask does not cover that many.

        >>> causal().show(3)
        █ · ·
        █ █ ·
        █ █ █
        """
        n = whole("n of show", n, least=0)
        n_k = n if n_k is None else whole("n_k of show", n_k, least=0)
        for requirement in self.requires:
            if requirement.axis in "ij":
                requirement.check(*((n_k - n, n_k) if requirement.axis == "i" else (0, n_k)))

        def first(array: Array) -> Array:
            values = array[(0,) * max(array.ndim - 2, 0)]
            try:
                return np.broadcast_to(values, (n, n_k))
            except ValueError:
                message = f"the mask holds an array of shape {array.shape}, which does not cover {n} by {n_k}"
                raise ValueError(message) from None

        zero = np.zeros((), np.int64)
        i, j = np.arange(n_k - n, n_k)[:, None], np.arange(n_k)
        (visible,) = evaluate([self.node], At(zero, zero, i, j, keys=n_k, dense=first))
        rows = np.where(np.broadcast_to(visible, (n, n_k)), "█", "·")
        return MaskText("\n".join(" ".join(row) for row in rows))


class MaskText(str):
    """Text that the prompt prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _leaves_operators(other: Any) -> bool:
    """Return True for a mask of a framework, which combines with rules itself."""
    return not isinstance(other, Mask) and getattr(other, "__array_ufunc__", True) is None


def _combine(binds: int, left: Any, right: Any) -> Mask:
    left, right = as_mask(left, frozen=True), as_mask(right, frozen=True)
    name, sign = ("bitwise_and", "&") if binds == AND else ("bitwise_or", "|")
    text = f"{left._within(binds)} {sign} {right._within(binds)}"
    return Mask(build(name, left.node, right.node), text, left.requires + right.requires, binds)


def as_mask(mask: Any, argument: str = "mask", frozen: bool = False) -> Mask:
    """Return `mask` as a `Mask`.

    mask: a mask, a function, or booleans or 0/1 integers aligned right to (..., h, n_q, n_k).
    frozen: copy an array, for a rule that outlives the call; a call reads its `mask=` once.

    Raises TypeError for anything else, ValueError for integers other than 0 and 1.

    >>> as_mask(np.array([[1, 0], [1, 1]]))
    array of shape (2, 2)
    """
    if isinstance(mask, Mask):
        return mask
    framework = adapter(mask)
    if framework is not None:
        mask = framework.flags(argument, mask, frozen)
        if type(mask) is not np.ndarray:
            return Mask(make("dense", "bool", (), mask), f"array of shape {mask.shape}")
    if callable(mask):
        return _traced(mask)
    if type(mask) is not np.ndarray:
        hint = "; give causal=True" if isinstance(mask, str) and mask == "causal" else ""
        raise TypeError(
            f"{argument} must be a mask, a function of (b, h, i, j), or an array of booleans or 0/1 integers, "
            f"got {array_type(mask)}{hint}"
        )
    if mask.dtype.kind == "f" or mask.dtype.name == "bfloat16":
        raise TypeError(f"{argument} must be booleans or 0/1 integers, got {mask.dtype}; to add to scores, use bias=")
    values = _booleans(argument, mask)
    if frozen:
        values = values.copy() if values is mask else values
        values.setflags(write=False)
    return Mask(make("dense", "bool", (), values), f"array of shape {values.shape}")


@constructor
def mask(function: Callable[..., Any] | Array) -> Mask:
    """Make a mask of a function of (b, h, i, j), which is traced once, here.

    `mask` is also a decorator. An array, aligned right to (..., h, n_q, n_k), becomes a mask with
    ``& | ~``. The array is copied, like an array in ``rule & array``, so later changes of the array
    do not change the mask.

    Raises TypeError if the function takes other arguments, does not return a boolean expression, or
    branches on a traced value.

    >>> @mask
    ... def band(b, h, i, j):
    ...     return abs(i - j) <= 1
    >>> band
    mask(band)
    """
    if type(function) is np.ndarray or adapter(function) is not None:
        return as_mask(function, frozen=True)
    node = trace(function, MASK_LEAVES)  # type: ignore[arg-type]
    return Mask(node, f"mask({getattr(function, '__name__', type(function).__name__)})")


_traced: Callable[..., Mask] = mask.__wrapped__  # type: ignore[attr-defined]  # where an argument is called mask


def _rule(text: str, function: Callable[..., Any], *requires: Requirement) -> Mask:
    return Mask(trace(function, MASK_LEAVES), text, requires)


@constructor
def causal() -> Mask:
    """Let a query see the keys up to itself: j ≤ i.

    >>> print(causal())
    causal()
    """
    return _rule("causal()", lambda b, h, i, j: j <= i)


@constructor
def window(left: int | None, right: int | None = 0) -> Mask:
    """Let a query see `left` keys before it and `right` after it.

    i - left ≤ j ≤ i + right; None is no bound on that side. Counts as flash-attention does: a
    sliding window of W keys is ``window(W - 1)``.

    >>> window(1).show(4)
    █ · · ·
    █ █ · ·
    · █ █ ·
    · · █ █
    """
    left = None if left is None else whole("left of window", left, least=0)
    right = None if right is None else whole("right of window", right, least=0)

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        inside = []
        if left is not None:
            inside.append(i - j <= left)
        if right is not None:
            inside.append(j - i <= right)
        return inside[0] & inside[-1] if inside else True

    return _rule(f"window({left})" if right == 0 else f"window({left}, {right})", rule)


@constructor
def prefix(length: int | ArrayLike | Table) -> Mask:
    """Let every query see the first `length` keys: j < length.

    length: an integer, or one for each batch entry.

    >>> (causal() | prefix(2)).show(3)
    █ █ ·
    █ █ ·
    █ █ █
    """
    rows, requires = _per_batch("prefix", "length", length)
    return _rule(f"prefix({_short(length)})", lambda b, h, i, j: j < rows(b), *requires)


@constructor
def padding(lengths: int | ArrayLike | Table, side: Literal["right", "left"] = "right") -> Mask:
    """Hide padding: each batch entry has `lengths` real keys.

    lengths: integers over the leading dimensions. side: that of the padding. On the right, keys j <
    length are real. On the left, the last ones are, j ≥ keys - length, of all keys of the sequence.

    >>> padding(np.array([2, 3]), side="left").show(1, 4)
    · · █ █
    """
    side = choice("side of padding", side, ("right", "left"))
    rows, requires = _per_batch("padding", "lengths", lengths)
    keys = Traced(make("keys", "int"))
    text = f"padding({_short(lengths)}" + (")" if side == "right" else ", side='left')")
    if side == "right":
        return _rule(text, lambda b, h, i, j: j < rows(b), *requires)
    return _rule(text, lambda b, h, i, j: j >= keys - rows(b), *requires)


@constructor
def documents(ids: ArrayLike | Table, key_ids: ArrayLike | Table | None = None) -> Mask:
    """Let a query see only its own document, in sequences packed from several.

    ids: (n,) or (..., n), the document of each position over the leading dimensions; any integers.
    key_ids: those of the keys, if keys are other positions than queries.

    >>> documents(np.array([7, 7, 2])).show(3)
    █ █ ·
    █ █ ·
    · · █
    """
    query = _document_ids("ids", ids)
    key = query if key_ids is None else _document_ids("key_ids", key_ids)
    sizes, key_sizes = (1, *query.shape)[-2:], (1, *key.shape)[-2:]
    if sizes[0] != key_sizes[0]:
        raise ValueError(f"ids and key_ids of documents differ in leading size: {sizes[0]} and {key_sizes[0]}")
    if type(query) is type(key) is np.ndarray:
        labels = _relabel(np.concatenate([key, query], axis=1))
        query, key = labels[:, key.shape[1] :], labels[:, : key.shape[1]]
    of_key = _looked_up("ids of documents", key)
    of_query = of_key if key_ids is None else _looked_up("ids of documents", query)
    argument = "ids" if key_ids is None else "key_ids"
    text = f"documents({_short(ids)}" + (")" if key_ids is None else f", {_short(key_ids)})")
    return _rule(
        text,
        lambda b, h, i, j: of_query[(b, i)[-len(query.shape) :]] == of_key[(b, j)[-len(key.shape) :]],
        Requirement("documents", "ids", "b", sizes[0]),
        Requirement("documents", "ids", "i", sizes[1]),
        Requirement("documents", argument, "j", key_sizes[1]),
    )


def _relabel(ids: Array) -> Array:
    """Rename `ids` (rows, n) 0, 1, ... by first appearance in each row.

    Packed ids are then sorted.
    """
    values, inverse = np.unique(ids, return_inverse=True)
    pairs = inverse.reshape(ids.shape) + np.arange(len(ids))[:, None] * len(values)
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    labels = np.argsort(np.argsort(first))[inverse].reshape(ids.shape)
    return np.asarray(labels - labels.min(axis=1, keepdims=True))


@constructor
def strided(step: int) -> Mask:
    """Let a query see every `step`-th key: (i - j) mod step = 0 (Child et al. 2019).

    >>> strided(2).show(3)
    █ · █
    · █ ·
    █ · █
    """
    step = whole("step of strided", step, least=1)
    return _rule(f"strided({step})", lambda b, h, i, j: (i - j) % step == 0)


@constructor
def dilated(left: int, step: int) -> Mask:
    """Let a query see `left` keys before it, `step` apart.

    i - j = 0, step, ..., left · step (Beltagy et al. 2020).

    >>> dilated(1, 2).show(4)
    █ · · ·
    · █ · ·
    █ · █ ·
    · █ · █
    """
    left, step = whole("left of dilated", left, least=0), whole("step of dilated", step, least=1)
    reach = whole("left · step of dilated", left * step, least=0)
    return _rule(f"dilated({left}, {step})", lambda b, h, i, j: (j <= i) & (i - j <= reach) & ((i - j) % step == 0))


@constructor
def blocks(table: ArrayLike | Table, size: int) -> Mask:
    """Allow whole blocks: (i, j) where ``table[..., i // size, j // size]`` is True.

    table: booleans or 0/1 integers, (rows, columns), (h, rows, columns) or (b, h, rows, columns).

    >>> blocks(np.array([[1, 0], [1, 1]]), 2).show(4)
    █ █ · ·
    █ █ · ·
    █ █ █ █
    █ █ █ █
    """
    values = table if isinstance(table, Table) else as_array("table of blocks", table)
    rank = len(values.shape)
    if not 2 <= rank <= 4:
        raise ValueError(f"table of blocks must have 2, 3 or 4 dimensions, got shape {values.shape}")
    size = whole("size of blocks", size, least=1)
    look = _looked_up("table of blocks", _booleans("table of blocks", values))
    axes: tuple[Axis, ...] = ("b", "h", "i", "j")
    requires = [
        Requirement("blocks", "table", axis, length * (size if axis in "ij" else 1))
        for axis, length in zip(axes[-rank:], values.shape, strict=True)
    ]
    return _rule(
        f"blocks({_short(table)}, {size})",
        lambda b, h, i, j: look[(b, h, i // size, j // size)[-rank:]],
        *requires,
    )


@constructor
def global_tokens(n: int) -> Mask:
    """Let the first `n` positions see and be seen by everything: i < n or j < n.

    Beltagy et al. 2020.

    >>> global_tokens(1).show(3)
    █ █ █
    █ · ·
    █ · ·
    """
    n = whole("n of global_tokens", n, least=0)
    return _rule(f"global_tokens({n})", lambda b, h, i, j: (i < n) | (j < n))


# Arguments


def whole(what: str, value: Any, least: int) -> int:
    """Return `value` as an int of at least `least`.

    what: the argument's name in TypeError and ValueError.
    """
    return integer(what, value, "an integer", least=least, below=2**62)


def _looked_up(what: str, values: Array | Table) -> Table:
    return values if isinstance(values, Table) else as_table(what, values)


def _integers(what: str, value: Any) -> Any:
    """Return an array or a `Table` of integers, or raise TypeError or ValueError."""
    values = value if isinstance(value, Table) else as_array(what, value)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, got {values.dtype}")
    if type(values) is np.ndarray and values.dtype == np.uint64 and values.size and values.max() >= 2**63:
        raise ValueError(f"{what} must fit into 64-bit signed integers, got {values.max()}")
    return values.astype(np.int64) if type(values) is np.ndarray else values


def _booleans(what: str, values: Any) -> Any:
    if values.dtype.kind == "b":
        return values
    if values.dtype.kind not in "iu":
        raise TypeError(f"{what} must be booleans or 0/1 integers, got {values.dtype}")
    if type(values) is not np.ndarray:  # a traced array has no values yet
        traced: Array = values != 0
        return traced
    wrong = values[(values != 0) & (values != 1)]
    if wrong.size:
        raise ValueError(f"{what} must be booleans or 0/1 integers, got {wrong[0]}")
    return values.astype(bool)


def _per_batch(rule: str, argument: str, value: Any) -> tuple[Callable[[Any], Any], tuple[Requirement, ...]]:
    """Return a function of b that gives an argument's length, and its requirements.

    value: one length for all batch entries, or one for each.
    """
    if not (isinstance(value, list | tuple | Table) or getattr(value, "ndim", 0) > 0 or adapter(value)):
        length = whole(f"{argument} of {rule}", value.item() if isinstance(value, np.ndarray) else value, least=0)
        return lambda b: length, ()
    lengths = _integers(f"{argument} of {rule}", value)
    lengths = lengths if isinstance(lengths, Table) else lengths.reshape(-1)
    if len(lengths.shape) > 1:
        raise ValueError(f"{argument} of {rule} must be a table of one dimension or none, got shape {lengths.shape}")
    if type(lengths) is np.ndarray and lengths.size and lengths.min() < 0:
        raise ValueError(f"{argument} of {rule} must be at least 0, got {lengths.min()}")
    table = _looked_up(f"{argument} of {rule}", lengths)
    requires = tuple(Requirement(rule, argument, "b", length) for length in table.shape)
    return lambda b: table[(b,) * len(table.shape)], requires


def _document_ids(argument: str, ids: Any) -> Any:
    values = _integers(f"{argument} of documents", ids)
    if values.shape == () or 0 in values.shape:
        raise ValueError(f"{argument} of documents must be (n,) or (..., n) and not empty, got shape {values.shape}")
    if not isinstance(values, Table):
        return values.reshape(-1, values.shape[-1])
    if len(values.shape) > 2:
        raise ValueError(f"{argument} of documents must be a table (n,) or (b, n), got shape {values.shape}")
    return values


def _short(value: Any) -> str:
    if isinstance(value, Table):
        return f"array of shape {value.shape}"
    concrete = np.ndim(value) == 0 and type(as_array("a number", value)) is np.ndarray  # else it may be traced
    return repr(int(value)) if concrete else f"array of shape {tuple(np.shape(value))}"
