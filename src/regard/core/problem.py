"""One call of attention, normalized and frozen: the input of every engine."""

from __future__ import annotations  # so that `help` shows the names of types

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from regard.core.callrules import CallRules
from regard.core.extents import Extents
from regard.core.statistics import Sizes, Statistic
from regard.rules import Mask, Node, Score, Table
from regard.runtime import memory
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class Outputs(NamedTuple):
    """The outputs of attention, or their cotangents or tangents.

    `out` (..., h, n_q, d_v) has the dtype of the inputs; `lse` and `entropy` (..., h, n_q) are
    float32 (float64 for float64). As cotangents, None means zero. `low`, of outputs in 16 bits
    alone, is what rounding took from `out`, rounded itself; gradients are more exact with it.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> primal, tangent = regard.attention_jvp(x, x, x, dquery=x)
    >>> primal.out.shape, primal.lse.shape, tangent.entropy.shape
    ((3, 3), (3,), (3,))
    """

    # "| Any", since a type checker does not know which are None: those that were not asked for.
    out: Array | Any
    lse: Array | Any
    entropy: Array | Any
    low: Array | None = None


@dataclass(frozen=True, eq=False)
class Differential:
    """One array for each input that may vary: gradients or tangents.

    Every array has the shape of its input; None stands for inputs that are missing or do not vary.
    `tables` maps each float `regard.table` of the call's rules to its array.

    >>> import numpy as np, regard
    >>> x, slope = np.eye(3), regard.table([0.5])
    >>> g = regard.attention_vjp(x, x, x, np.ones((3, 3)), score=regard.alibi(slope))
    >>> g.key.shape, g.tables[slope].shape, g.bias
    ((3, 3), (1,), None)
    """

    query: Array | Any = None  # as in `Outputs`
    key: Array | Any = None
    value: Array | Any = None
    bias: Array | Any = None
    sink: Array | Any = None
    tables: Mapping[Table, Array] = field(default_factory=dict)
    metric: Array | Any = None


ROW_BLOCK, ROW_STEP, KEY_STEP = 384, 768, 1024
"""Positions at multiples of which a `CallPart` may begin: rows, rows of long parts, and keys.

They are whole query blocks and key splits of every engine.
"""


SumShapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""The shapes and dtypes of sums, by name."""


@dataclass(frozen=True, eq=False)
class Carried:
    """Sums that go on from part to part.

    first, last: there is no part before, or after. sums: what goes on, by name; an engine writes it, and returns
    results for the last part alone.
    """

    first: bool
    last: bool
    sums: dict[str, Array]


@dataclass(frozen=True, eq=False)
class CallPart:
    """The place of a call in a whole one, of which it has some rows and some keys.

    Only `regard.parallel` makes them. Sums go on from part to part, so that the last has the bits of the whole: those
    of forward, and the gradient of the query, over parts of the keys in ascending order; the gradients of key and value
    over parts of the rows in descending order. rows, keys: the numbers of the whole. query: the sums of forward, or of
    the gradient of the query; key: those of the gradients of key and value; None for gradients that are not computed.
    bias_axes: those of the whole call. The weights are those of an lse over all keys.

    A bias with rows and keys, and tables, get the sums of the part's own pairs, in the dtype of sums.
    """

    rows: int
    keys: int
    query: Carried | None
    key: Carried | None
    bias_axes: tuple[bool, bool]

    @property
    def gradients(self) -> str:
        """The gradients that are computed: "query", "key" or "both"."""
        return "both" if self.query and self.key else "query" if self.query else "key"

    @property
    def identity(self) -> tuple[Any, ...]:
        """All that distinguishes parts of equal shapes."""
        ends = [None if x is None else (x.first, x.last) for x in (self.query, self.key)]
        return self.rows, self.keys, *ends, self.bias_axes


ROLES = {
    "operands": "query, key and value",
    "indices": "the absolute indices of rows and keys",
    "scores": "what scores follow from, besides the operands",
    "denominators": "logits that a row's sum has besides those of its keys",
    "weights": "what is done to weights after the softmax",
    "results": "which results there are, and how they are stored",
    "gradients": "which gradients there are",
    "part": "the place in a larger call",
}
"""Roles of the fields of a `Problem`: what each is for."""

KINDS = {
    "rows": "an array (..., h, n_q, features)",
    "keys": "an array (..., h_kv, n_k, features)",
    "batch": "an array with a number for each batch element",
    "pairs": "an array that aligns right to (..., h, n_q, n_k)",
    "heads": "an array that aligns right to (h,)",
    "rule": "a mask or a score",
    "value": "a number, or another value that parts of a call share",
}
"""Kinds of the fields of a `Problem`: what each holds."""


def declared(role: str, kind: str, default: Any = MISSING) -> Any:
    """Return a field of a `Problem`.

    Derived problems, the keys of caches, headers of ranks and programs of JAX follow from its role and its kind.
    """
    assert role in ROLES
    assert kind in (("heads", "value") if role == "denominators" else KINDS)
    return field(default=default, metadata={"role": role, "kind": kind})


@dataclass(frozen=True, eq=False)
class Problem:
    """A valid call as data: its arrays, not copied, and its options.

    query (..., h, n_q, d), key (..., h_kv, n_k, d), value (..., h_kv, n_k, d_v). Leading dimensions may still
    broadcast; `lead` is their common shape. `offset` holds one integer for each of the `batch` row-major indices of
    `lead`. `positions_first` requests an output stored as (..., n, h, d). `factors` are the query and the metric, if
    there is a metric; `query` is then their product. `constants` are inputs without a gradient, which engines leave
    out: "bias", and tables of the score. `part`: what is carried from and to other parts of a larger call.
    """

    query: Array = declared("operands", "rows")
    key: Array = declared("operands", "keys")
    value: Array = declared("operands", "keys")
    lead: tuple[int, ...] = declared("indices", "value")
    scale: float = declared("scores", "value")
    seed: int = declared("weights", "value")
    offset: Array = declared("indices", "batch")
    origin: tuple[int, int, int] = declared("indices", "value")
    mask: Mask | None = declared("scores", "rule", None)
    score: Score | None = declared("scores", "rule", None)
    bias: Array | None = declared("scores", "pairs", None)
    sink: Array | None = declared("denominators", "heads", None)
    dropout: float = declared("weights", "value", 0.0)
    positions_first: bool = declared("results", "value", False)
    observe: tuple[Statistic, ...] = declared("results", "value", ())
    constants: frozenset[Any] = declared("gradients", "value", frozenset())
    factors: tuple[Array, Array] | None = declared("operands", "value", None)
    part: CallPart | None = declared("part", "value", None)

    @property
    def used(self) -> frozenset[str]:
        """The names of the optional fields that this call uses: those that differ from their defaults."""
        names = []
        for name, default in OPTIONAL.items():
            x = getattr(self, name)
            if x is not default and (isinstance(x, np.ndarray) or x != default):
                names.append(name)
        return frozenset(names)

    def without(self, *roles: str, **changes: Any) -> Problem:
        """Return the problem with changes, and with the defaults of the optional fields of some roles."""
        defaults = {name: OPTIONAL[name] for name in of_role(*roles) if name in OPTIONAL}
        return replace(self, **(defaults | changes))

    @cached_property
    def device(self) -> Any:
        """The device of the arrays if NumPy cannot read its memory, else None."""
        return device_of(self.query)

    @cached_property
    def batch(self) -> int:
        return math.prod(self.lead)

    @cached_property
    def all_heads(self) -> int:
        """The number of heads of all batch elements."""
        return self.batch * self.heads

    @property
    def pairs(self) -> int:
        """The number of query-key pairs of all heads, masked or not."""
        return self.all_heads * self.n_q * self.n_k

    @property
    def heads(self) -> int:
        return int(self.query.shape[-3])

    @property
    def kv_heads(self) -> int:
        return int(self.key.shape[-3])

    @property
    def group(self) -> int:
        """The number of query heads for each key-value head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def n_q(self) -> int:
        return int(self.query.shape[-2])

    @property
    def n_k(self) -> int:
        return int(self.key.shape[-2])

    @property
    def d(self) -> int:
        return int(self.query.shape[-1])

    @property
    def d_v(self) -> int:
        return int(self.value.shape[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.query.dtype

    @property
    def compute(self) -> np.dtype[Any]:
        """The dtype of sums, rules and statistics: float64 for float64, else float32."""
        return compute_dtype(self.dtype)

    @property
    def keys(self) -> int:
        """The number of keys of the whole sequence, see `Extents.keys`."""
        return self.extents.keys

    @property
    def sizes(self) -> Sizes:
        """The sizes on which the shapes of statistics depend."""
        return Sizes(self.lead, self.heads, self.kv_heads, self.n_q, self.n_k)

    @cached_property
    def extents(self) -> Extents:
        """The absolute indices of the call."""
        x = self
        keys = x.origin[2] + x.n_k if x.part is None else x.part.keys
        return Extents(x.lead, x.heads, x.n_q, x.n_k, x.offset, x.origin, x.compute.type, keys)

    @cached_property
    def rules(self) -> CallRules:
        """The mask and the score, and what follows from them."""
        return CallRules(self.mask, self.score, self.constants, self.extents)

    @property
    def mask_node(self) -> Node | None:
        return self.mask.node if self.mask is not None else None

    @property
    def score_node(self) -> Node | None:
        return self.score.node if self.score is not None else None

    @property
    def metric(self) -> Array | None:
        return None if self.factors is None else self.factors[1]

    @property
    def trained_bias(self) -> Array | None:
        """The bias if it needs a gradient, else None."""
        return None if "bias" in self.constants else self.bias

    @property
    def bias_axes(self) -> tuple[bool, bool]:
        """Two flags: the sums of dS for a bias have rows, and they have keys. At least one is True."""
        if self.part is not None:
            return self.part.bias_axes
        rows, keys = (1, 1, *(() if self.bias is None else self.bias.shape))[-2:]
        return rows != 1 or keys == 1, keys != 1

    @property
    def bias_sums(self) -> tuple[int, ...]:
        """The shape of the sums of dS for a bias.

        Sums have the bias's shape if it has rows and keys; else there is one array for each batch element and head.
        """
        rows, keys = self.bias_axes
        if rows and keys:
            assert self.bias is not None
            return tuple(self.bias.shape)
        return self.shape(self.n_q if rows else 1, self.n_k if keys else 1)

    @property
    def gradient_sums(self) -> SumShapes:
        """The sums of gradients, as those of parts go on from part to part."""
        keys = (*self.lead, self.kv_heads, self.n_k)
        shapes = {"query": self.shape(self.n_q, self.d), "key": (*keys, self.d), "value": (*keys, self.d_v)}
        if self.trained_bias is not None:
            shapes["bias"] = self.bias_sums
        return {name: (shape, self.compute) for name, shape in shapes.items()}

    @cached_property
    def denominators(self) -> dict[str, Any]:
        """The logits that each row's sum has besides those of its keys, by field: arrays or numbers."""
        return {name: x for name in of_role("denominators") if (x := getattr(self, name)) is not None}

    @cached_property
    def outside(self) -> Array | None:
        """The logarithm of what each row's sum has besides its keys, (h,) in the dtype of sums; None for nothing."""
        logits = [self.per_head(x) for x in self.denominators.values()]
        return np.logaddexp.reduce(logits) if len(logits) > 1 else logits[0] if logits else None

    def shares(self, lse: Array) -> dict[str, Array]:
        """Return the shares (..., h, n_q) that `denominators` have in the sums of rows."""
        return {name: share(self.per_head(x)[:, None], lse) for name, x in self.denominators.items()}

    def per_head(self, x: Any) -> Array:
        """Return an array that aligns right to (h,), or a number, as (h,) in the dtype of sums."""
        x = np.ascontiguousarray(read(np.asarray(x)), self.compute)
        return x if x.shape == (self.heads,) else np.ascontiguousarray(np.broadcast_to(x, (self.heads,)))

    def sink_gradient(self, rows: Array) -> Any:
        """Return the gradient of the sink from its parts by query, (..., h, n_q)."""
        assert self.sink is not None
        sums = rows.reshape(self.batch, self.heads, rows.shape[-1]).sum(axis=(0, 2))
        return collapse(sums, self.sink.shape).astype(self.sink.dtype, copy=False)

    def shape(self, *tail: int) -> tuple[int, ...]:
        """Return the shape (..., h, *tail) of an output."""
        return (*self.lead, self.heads, *tail)

    def new_output(self) -> Array:
        """Allocate an output (..., h, n_q, d_v) in the caller's memory layout."""
        empty: Callable[..., Array] = memory.empty
        if self.device is not None:
            from regard.core.tensors import empty_on

            empty = partial(empty_on, self.device)
        if self.positions_first:
            return empty((*self.lead, self.n_q, self.heads, self.d_v), self.dtype).swapaxes(-2, -3)
        return empty((*self.lead, *self.query.shape[-3:-1], self.value.shape[-1]), self.query.dtype)

    def new_low(self) -> Outputs | None:
        """Return memory for `Outputs.low`, as `forward` takes it; None where `out` is not rounded."""
        if self.dtype == self.compute:
            return None
        return Outputs(None, None, None, self.new_output())

    @property
    def shared_fields(self) -> dict[str, Any]:
        """The fields that calls of one signature share, for `from_fields`: all but query, key, value and rules."""
        varying = of_kind("rows", "keys", "rule")
        own = {name: getattr(self, name) for name in KIND if name not in varying}
        return own | {"batch": self.batch, "denominators": self.denominators, "outside": self.outside}

    @classmethod
    def from_fields(cls, given: dict[str, Any], **varying: Any) -> Problem:
        """Return a problem from shared fields and its own operands and rules.

        Neither checks nor `__init__` run, for speed.
        """
        problem = object.__new__(cls)
        problem.__dict__.update(given, **varying)
        return problem

    def leading(self, x: Array, keep: int) -> Array:
        """Return a view of `x` with its leading dimensions broadcast to `lead`.

        keep: the number of last dimensions that stay.
        """
        tail = x.shape[x.ndim - keep :]
        return np.broadcast_to(x, (*self.lead, *tail))

    def dense(self, x: Array) -> Array:
        """Return a dense mask or bias as a view of shape (..., h, n_q, n_k).

        x: aligned right.
        """
        return np.broadcast_to(x, self.shape(self.n_q, self.n_k))


ROLE = {x.name: x.metadata["role"] for x in fields(Problem)}
KIND = {x.name: x.metadata["kind"] for x in fields(Problem)}
OPTIONAL = {x.name: x.default for x in fields(Problem) if x.default is not MISSING}


@cache
def of_role(*roles: str) -> tuple[str, ...]:
    """Return the names of the fields of some roles."""
    return tuple(name for name, role in ROLE.items() if role in roles)


@cache
def of_kind(*kinds: str) -> tuple[str, ...]:
    """Return the names of the fields of some kinds."""
    return tuple(name for name, kind in KIND.items() if kind in kinds)


FUNCTIONS = ("forward", "weights", "maps", "backward", "jvp", "backward_jvp", "jvp_jvp")
FIELDS = frozenset({"mask", "score", "bias", "sink", "dropout", "positions_first", "observe", "constants", "factors"})
KNOWS = dict.fromkeys(FUNCTIONS, FIELDS)
"""The optional fields that each function of every engine knows; an engine adds its own."""
KNOWS_PARTS = KNOWS | {name: FIELDS | {"part"} for name in ("forward", "backward", "jvp", "backward_jvp")}
"""The same of an engine that computes parts."""
INTERNAL = frozenset({"part"})
"""Optional fields that no caller can ask for."""


def device_of(x: Array) -> Any:
    """Return the device of an array's memory, None for the host.

    See `regard.core.tensors.DeviceMemory`.
    """
    owner: Any = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return getattr(owner, "lies_on", None)


def read(x: Array, rows: Any = None) -> Array:
    """Return an array, or some rows of it, in memory that NumPy can read."""
    if device_of(x) is None:
        return x if rows is None else x[rows]
    from regard.core.tensors import array, tensor

    there = tensor(x)
    return array((there if rows is None else there[list(rows)]).cpu())


def share(logit: Array, lse: Array) -> Array:
    """Return exp(logit − lse), 0 in a row that sees nothing, and 1 where both are infinite."""
    with np.errstate(all="ignore"):
        below = np.where(lse == np.inf, 0, logit - lse)
        ratio: Array = np.where(lse == -np.inf, 0, np.exp(below))
    return ratio


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def collapse(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum `x` over the axes along which an array of `shape` was broadcast to it."""
    extra = x.ndim - len(shape)
    x = x.sum(axis=tuple(range(extra))) if extra else x
    x = np.asarray(x) if isinstance(x, np.generic) else x  # NumPy returns a scalar for a single number; JAX does not
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(axis=axes, keepdims=True) if axes else x
