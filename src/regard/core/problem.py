"""One call of attention, normalized and frozen: what every engine is given."""

from __future__ import annotations  # so that `help` shows the names of types

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from regard.core.statistics import Statistic
from regard.rules import Mask, Node, Ranges, Reading, Score, Table, intervals, once, order, partials, rebuild
from regard.runtime import memory
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class Outputs(NamedTuple):
    """What attention computes and what may carry a cotangent or a tangent.

    `out` (..., h, n_q, d_v) has the dtype of the inputs; `lse` and `entropy` (..., h, n_q) are
    float32 (float64 for float64). As cotangents, None means zero.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> (out, lse, entropy), tangent = regard.attention_jvp(x, x, x, dquery=x)
    >>> out.shape, lse.shape, tangent.entropy.shape
    ((3, 3), (3,), (3,))
    """

    out: Array | None
    lse: Array | None
    entropy: Array | None


@dataclass(frozen=True, eq=False)
class Differential:
    """One array for each input that may vary: gradients or tangents.

    Every array has the shape of its input; what a call did not have, or what does not vary, is
    None. `tables` maps each float `regard.table` that a rule of the call reads to its array.

    >>> import numpy as np, regard
    >>> x, slope = np.eye(3), regard.table([0.5])
    >>> g = regard.attention_vjp(x, x, x, np.ones((3, 3)), score=regard.alibi(slope))
    >>> g.key.shape, g.tables[slope].shape, g.bias
    ((3, 3), (1,), None)
    """

    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    bias: Array | None = None
    sink: Array | None = None
    tables: Mapping[Table, Array] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Problem:
    """A valid call: query (..., h, n_q, d), key (..., h_kv, n_k, d), value (..., h_kv, n_k, d_v) and the wishes.

    Leading dimensions may still broadcast against each other (`lead` is their common shape); nothing was copied.
    `offset` holds one integer for each of the `batch` row-major indices of `lead`. `positions_first` asks for an
    output that lies as (..., n, h, d) in memory. `constants` are those of "bias" and the tables of the score whose
    gradient nobody wants, and which engines leave out. Calls with the same `signature`, where there is one, differ in
    nothing but the contents and the addresses of query, key and value.
    """

    query: Array
    key: Array
    value: Array
    lead: tuple[int, ...]
    mask: Mask | None
    score: Score | None
    bias: Array | None
    scale: float
    sink: Array | None
    dropout: float
    seed: int
    offset: Array
    origin: tuple[int, int, int]
    positions_first: bool = False
    observe: tuple[Statistic, ...] = ()
    constants: frozenset[Any] = frozenset()
    signature: Any = field(default=None, init=False)  # `replace` leaves it out

    @cached_property
    def device(self) -> Any:
        """Where the memory of the arrays is, if NumPy cannot read it; else None."""
        return device_of(self.query)

    @cached_property
    def batch(self) -> int:
        return math.prod(self.lead)

    @property
    def heads(self) -> int:
        return int(self.query.shape[-3])

    @property
    def kv_heads(self) -> int:
        return int(self.key.shape[-3])

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
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
        """The dtype of sums, of rules and of statistics: float64 for float64, else float32."""
        return compute_dtype(self.dtype)

    @property
    def keys(self) -> int:
        """Keys of the whole sequence, as far as this call can know: its last key is the last one."""
        return self.origin[2] + self.n_k

    @cached_property
    def hiding_node(self) -> Node | None:
        """The score rule if its bounds can ever say that it hides a whole tile."""
        return self.score.node if self.score is not None and _chooses(self.score.node) else None

    @property
    def hiding(self) -> tuple[Node, ...]:
        """The rules by which a tile may hold nothing visible; without any, each holds nothing else."""
        return tuple(node for node in (self.mask_node, self.hiding_node) if node is not None)

    def ranges(self, b: int, heads: range, first: Any, last: Any) -> Ranges:
        """The absolute indices of a batch element, of some heads, and of the queries from first to last (integers or
        arrays), all counted from those of the call; of no keys.
        """
        offset, first_head = int(self.offset[b]), self.origin[1]
        return Ranges(
            b=(self.origin[0] + b,) * 2,
            h=(first_head + heads.start, first_head + heads.stop - 1),
            i=(first + offset, last + offset),
            keys=self.keys,
            dtype=self.compute.type,
        )

    def key_edges(self, size: int) -> Array:
        """The absolute first key of each tile, and the end: int64 (tiles + 1,). Tiles are cut at multiples of `size`
        from j = 0; the first and the last may be smaller.
        """
        first, end = self.origin[2], self.keys
        starts = np.arange(first - first % size if self.n_k else end, end, size, dtype=np.int64)
        return np.append(np.maximum(starts, first), end)

    @cached_property
    def extent(self) -> dict[str, tuple[int, int]]:
        """The absolute indices of the call, from the first to before the last: of "b", "h", "i" and "j"."""
        b, h, j = self.origin
        offsets = (self.offset if any(self.offset.strides) else self.offset[:1]).tolist()  # one for all: stride 0
        first, last = (min(offsets), max(offsets)) if offsets else (0, -self.n_q)
        i = (first, last + self.n_q if self.n_q else first)
        return {"b": (b, b + self.batch), "h": (h, h + self.heads), "i": i, "j": (j, j + self.n_k)}

    @property
    def diagonals(self) -> int:
        """The number of differences between a query and a key."""
        return self.n_q + self.n_k - 1 if self.n_q and self.n_k else 0

    @cached_property
    def distances(self) -> Array:
        """i − j on each of them, from the lowest: (..., 1, diagonals)."""
        first = self.offset - self.origin[2] - (self.n_k - 1)
        return (first[:, None] + np.arange(self.diagonals, dtype=np.int64)).reshape(*self.lead, 1, self.diagonals)

    @property
    def mask_node(self) -> Node | None:
        return self.mask.node if self.mask is not None else None

    @property
    def score_node(self) -> Node | None:
        return self.score.node if self.score is not None else None

    @cached_property
    def score_partials(self) -> tuple[Node | None, Mapping[Node, Node]]:
        """∂score/∂s (None: no rule, so 1), and the derivative with respect to each reading of a float table."""
        return (None, {}) if self.score is None else partials(self.score.node)

    @cached_property
    def mask_reading(self) -> Reading | None:
        """The mask, ready to be evaluated tile by tile."""
        return None if self.mask is None else Reading([self.mask.node])

    @cached_property
    def score_reading(self) -> Reading | None:
        return None if self.score is None else Reading([self.score.node])

    @cached_property
    def integers(self) -> type[np.signedinteger[Any]]:
        """int32 where the bounds of the rules prove that no integer in them leaves it, else int64."""
        nodes = [rule.node for rule in (self.mask, self.score) if rule is not None]
        integers = [node for node in order(nodes) if node.kind == "int"]
        near = 2**16  # a tile may reach beyond the call, by less than this
        ranges = Ranges(**{axis: (a - near, b + near) for axis, (a, b) in self.extent.items()}, keys=self.keys)
        limit = 2**31
        small = all(np.all((x.lo >= -limit) & (x.hi < limit)) for x in intervals(integers, ranges))
        return np.int32 if small else np.int64

    @cached_property
    def table_partials(self) -> Mapping[Node, Node]:
        """Of `score_partials` those in readings of tables whose gradient is wanted."""
        return {leaf: x for leaf, x in self.score_partials[1].items() if leaf.payload not in self.constants}

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The float tables of the score rules whose gradient is wanted."""
        return tuple(dict.fromkeys(leaf.payload for leaf in self.table_partials))

    @property
    def trained_bias(self) -> Array | None:
        """The bias if there is one and its gradient is wanted."""
        return None if "bias" in self.constants else self.bias

    def shape(self, *tail: int) -> tuple[int, ...]:
        """(..., h, *tail) of an output."""
        return (*self.lead, self.heads, *tail)

    def new_output(self) -> Array:
        """An output (..., h, n_q, d_v) to be filled, in the caller's order in memory."""
        if self.positions_first:
            return memory.empty((*self.lead, self.n_q, self.heads, self.d_v), self.dtype).swapaxes(-2, -3)
        return memory.empty((*self.lead, *self.query.shape[-3:-1], self.value.shape[-1]), self.query.dtype)

    @property
    def form(self) -> dict[str, Any]:
        """All but arrays and rules: what `again` needs for the same call with others."""
        varying = ("query", "key", "value", "mask", "score")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in varying} | {"batch": self.batch}

    @classmethod
    def again(cls, form: dict[str, Any], **varying: Any) -> Problem:
        """The call of a `form` with query, key, value, mask and score; its fields are set at once, for speed."""
        problem = object.__new__(cls)
        problem.__dict__.update(form, **varying)
        return problem

    def scores_alone(self, mask: Mask | None = None) -> Problem:
        """The same weights but for the sink, no values and no statistics; with another mask if one is given."""
        return replace(
            self,
            mask=self.mask if mask is None else mask,
            value=self.value[..., :0],
            sink=None,
            dropout=0.0,
            positions_first=False,
            observe=(),
        )

    def part(self, b: int = 0, h: int | None = 0, rows: slice = slice(None), cols: slice = slice(None)) -> Problem:
        """The scores of one head (None: of all) of one batch element (row-major), or of adjacent rows and keys of it,
        at the places that they have in the whole; views. A rule that reads how many keys there are (`keys`) counts
        those to the end of the part. No dropout and no statistics.
        """
        at = tuple(int(x) for x in np.unravel_index(b, self.lead)) if self.lead else ()
        head, kv = slice(None), slice(None)
        if h is not None:
            head, kv = slice(h, h + 1), slice(h // self.group, h // self.group + 1)
        first, first_key = range(self.n_q)[rows].start, range(self.n_k)[cols].start

        def pairs(x: Array) -> Array:
            found: Array = self.dense(x)[at][head, rows, cols]
            return found

        def rule(x: Any) -> Any:
            dense = {id(array): pairs(array) for array in x.dense} if x is not None else {}
            return replace(x, node=rebuild(x.node, dense)) if dense else x

        return replace(
            self,
            query=self.leading(self.query, 3)[at][head, rows],
            key=self.leading(self.key, 3)[at][kv, cols],
            value=self.leading(self.value, 3)[at][kv, cols],
            lead=(),
            mask=rule(self.mask),
            score=rule(self.score),
            bias=None if self.bias is None else pairs(self.bias),
            sink=None if self.sink is None else np.broadcast_to(self.sink, (self.heads,))[head],
            dropout=0.0,
            offset=self.offset[b : b + 1] + first,
            origin=(self.origin[0] + b, self.origin[1] + (h or 0), self.origin[2] + first_key),
            positions_first=False,
            observe=(),
        )

    def leading(self, x: Array, keep: int) -> Array:
        """`x` with its leading dimensions broadcast to `lead`, its last `keep` as they are; a view."""
        tail = x.shape[x.ndim - keep :]
        return np.broadcast_to(x, (*self.lead, *tail))

    def dense(self, x: Array) -> Array:
        """A dense mask or bias, aligned right, as a view of shape (..., h, n_q, n_k)."""
        return np.broadcast_to(x, self.shape(self.n_q, self.n_k))


def device_of(x: Array) -> Any:
    """The device whose memory an array views (`regard.core.tensors.DeviceMemory`); None for arrays of the host."""
    owner: Any = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return getattr(owner, "lies_on", None)


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


@once
def _chooses(node: Node) -> bool:
    """Whether an expression chooses between values, without which its bounds never say that it is −∞ for all."""
    return any(x.op in ("where", "minimum") for x in order([node]))


def remember(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Keep a value for later calls; of more than `most` the oldest go. Any thread may be reading."""
    for oldest in list(kept)[: max(0, len(kept) - most + 1)]:
        kept.pop(oldest, None)
    kept[key] = value


def collapse(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes along which an array of `shape` was broadcast to make it."""
    extra = x.ndim - len(shape)
    x = x.sum(axis=tuple(range(extra))) if extra else x
    x = np.asarray(x) if isinstance(x, np.generic) else x  # NumPy makes a scalar of a single number; JAX does not
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(axis=axes, keepdims=True) if axes else x
