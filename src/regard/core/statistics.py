"""Statistics that `observe=` requests, each a type, and the object that holds them.

To add one, write its class here and its reference in `reference.engine`. If it follows from others, that is all. Else
each engine computes it in `forward`, and says so in its table of statistics.
"""

from __future__ import annotations  # so that `help` shows the names of types

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from regard.arguments.values import choice, integer, real, shown
from regard.rules import Mask, as_mask

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[Any, ...]


class Sizes(NamedTuple):
    """The sizes of a call that the shapes of its statistics depend on; symbols in a traced graph."""

    lead: Shape
    heads: Any
    kv_heads: Any
    n_q: Any
    n_k: Any

    @property
    def rows(self) -> Shape:
        """The shape of one number for each query."""
        return (*self.lead, self.heads, self.n_q)


class LogSums(Protocol):
    """Logarithms of sums of exp(S − x) over the keys of each query, (..., h, n_q).

    x is 0, but near lse where that is too large to hold a logarithm. lse: over all visible keys and the sink.
    """

    @property
    def lse(self) -> Array: ...
    def alone(self) -> Array:
        """Sum without the sink."""
        ...

    def where(self, mask: Mask) -> Array:
        """Sum over the keys that a rule allows, without the sink."""
        ...

    def times(self, factor: float) -> Array:
        """Sum exp(factor · (S − x)), without the sink."""
        ...


@dataclass(frozen=True)
class Top:
    """The largest weights of every query and their keys, in falling order.

    `values` and `indices` (int64, rows of key) are (..., h, n_q, k). Ties go to the lowest key.
    Where a query sees fewer than k keys, the weight is 0 and the index −1.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> _, seen = regard.attention(x, x, x, causal=True, observe=[regard.top(2)])
    >>> seen[regard.top(2)].indices
    array([[ 0, -1],
           [ 1,  0],
           [ 2,  0]])
    """

    values: Array
    indices: Array


@dataclass(frozen=True)
class Profile:
    """The weight on every distance i − j of absolute positions, summed over queries.

    `values` is (..., h, n_q + n_k − 1). `distances` is (..., 1, n_q + n_k − 1), int64, rising by
    one.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> _, seen = regard.attention(x, x, x, causal=True, observe=["profile"])
    >>> seen.profile.distances
    array([-2, -1,  0,  1,  2])
    >>> float(seen.profile.values.sum().round(6))  # one for each query
    3.0
    """

    values: Array
    distances: Array


KINDS: dict[str, type[Statistic]] = {}


@dataclass(frozen=True)
class Statistic:
    """A statistic to observe.

    of: its parameters, None if it has none. name: in `observe=` and in `Seen`. holder: the class of its result, if that
    has several arrays. parts: their names. integers: those of int64; others have the dtype of sums. instead: what the
    error of a framework that lacks its derivative adds.
    """

    of: Any = None
    name: ClassVar[str]
    holder: ClassVar[type[Top] | type[Profile] | None] = None
    parts: ClassVar[tuple[str, ...]] = ("",)
    integers: ClassVar[frozenset[str]] = frozenset()
    instead: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        KINDS[cls.name] = cls

    def __hash__(self) -> int:
        return hash((self.name, self.of))

    def __repr__(self) -> str:
        return repr(self.name) if self.of is None else f"regard.{self.name}({self.parameters})"

    @property
    def parameters(self) -> str:
        """The parameters as they are written in a call."""
        return repr(self.of)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of its arrays: its own name, or those of its parts."""
        return tuple(part or self.name for part in self.parts)

    @property
    def rules(self) -> tuple[Mask, ...]:
        """The masks among its parameters."""
        return ()

    def shapes(self, size: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each part."""
        return (size.rows,)

    def bytes(self, size: Sizes, real: int) -> int:
        """Return the bytes of all its arrays, with numbers of `real` bytes."""
        each = zip(self.parts, self.shapes(size), strict=True)
        return sum(math.prod(shape) * (8 if part in self.integers else real) for part, shape in each)

    def check(self, n_q: int) -> None:
        """Raise ValueError if it does not fit a call of n_q queries."""

    def result(self, arrays: Sequence[Any]) -> Any:
        """Return its result, made of its parts."""
        return arrays[0] if self.holder is None else self.holder(*arrays)

    def split(self, result: Any) -> tuple[Any, ...]:
        """Return the parts of its result."""
        return (result,) if self.holder is None else tuple(getattr(result, x.name) for x in fields(self.holder))

    def empty(self, size: Sizes, dtype: Any, make: Callable[..., Any] = np.empty) -> Any:
        """Return a result to be filled."""
        each = zip(self.parts, self.shapes(size), strict=True)
        return self.result([make(shape, np.int64 if part in self.integers else dtype) for part, shape in each])

    @property
    def needs(self) -> tuple[Statistic, ...] | None:
        """The statistics from which it follows; None if an engine computes it itself."""
        return None

    def follow(self, found: Sequence[Array], sums: LogSums, size: Sizes) -> Array:
        """Return it, from those that it needs."""
        raise NotImplementedError

    @property
    def of_engine(self) -> Statistic:
        """The statistic of which a framework makes this one, so that it differentiates."""
        return self

    def in_framework(self, found: Any, exp: Callable[[Any], Any]) -> Any:
        """Return it, from `of_engine`; exp is the exponential of the framework."""
        return found


class Lse(Statistic):
    """log Σ_j exp S, the sink included."""

    name = "lse"


class Entropy(Statistic):
    """−Σ_j P log P, in nats."""

    name = "entropy"


class Visible(Statistic):
    """The number of keys that a query sees."""

    name = "visible"
    integers = frozenset({""})


LSE, ENTROPY, VISIBLE = Lse(), Entropy(), Visible()


class NormalizedEntropy(Statistic):
    """The entropy over the logarithm of the number of visible keys; 0 for one key or none."""

    name = "normalized_entropy"
    needs = (ENTROPY, VISIBLE)

    def follow(self, found: Sequence[Array], sums: LogSums, size: Sizes) -> Array:
        entropy, visible = found
        most = np.log(np.maximum(visible, 2).astype(entropy.dtype))
        return np.asarray(np.where(visible > 1, entropy / most, entropy.dtype.type(0)))


class EffectiveStates(Statistic):
    """exp(entropy), the number of equally weighted keys with the same entropy."""

    name = "effective_states"
    needs = (ENTROPY,)
    of_engine = ENTROPY

    def follow(self, found: Sequence[Array], sums: LogSums, size: Sizes) -> Array:
        return np.asarray(np.exp(found[0]))

    def in_framework(self, found: Any, exp: Callable[[Any], Any]) -> Any:
        return exp(found)


class Largest(Statistic):
    """The largest weight of a query."""

    name = "max"


class Argmax(Statistic):
    """The row in key of the largest weight, −1 if there is none."""

    name = "argmax"
    integers = frozenset({""})


class Received(Statistic):
    """The weight of a key from all queries."""

    name = "received"

    def shapes(self, size: Sizes) -> tuple[Shape, ...]:
        return ((*size.lead, size.heads, size.n_k),)


class GroupReceived(Statistic):
    """The weight of a key from all queries of the heads that share it."""

    name = "group_received"
    needs = (Received(),)

    def shapes(self, size: Sizes) -> tuple[Shape, ...]:
        return ((*size.lead, size.kv_heads, size.n_k),)

    def follow(self, found: Sequence[Array], sums: LogSums, size: Sizes) -> Array:
        group = size.heads // size.kv_heads if size.kv_heads else 1
        total: Array = found[0].reshape(*size.lead, size.kv_heads, group, size.n_k).sum(axis=-2)
        return total


class WeightByDistance(Statistic):
    """The weight on every distance, summed over queries."""

    name = "profile"
    holder = Profile
    parts = ("profile", "distances")
    integers = frozenset({"distances"})

    def shapes(self, size: Sizes) -> tuple[Shape, ...]:
        diagonals = size.n_q + size.n_k - 1 if size.n_q and size.n_k else 0
        return (*size.lead, size.heads, diagonals), (*size.lead, 1, diagonals)


NAMES = tuple(KINDS)
"""The statistics without parameters."""

StatisticName = Literal[
    "lse", "entropy", "visible", "normalized_entropy", "effective_states", "max", "argmax", "received",
    "group_received", "profile",
]  # fmt: skip
"""`NAMES`, for type checkers."""


class TopWeights(Statistic):
    """The k largest weights of a query, and their keys."""

    name = "top"
    holder = Top
    parts = ("values", "indices")
    integers = frozenset({"indices"})

    def shapes(self, size: Sizes) -> tuple[Shape, ...]:
        return (*size.rows, self.of), (*size.rows, self.of)


class Mass(Statistic):
    """The weight of a query on the pairs that a rule allows.

    Mass is exp(lse of those keys alone − lse). Only tiles that the rule may reach are visited: the weight on a diagonal
    costs O(n).
    """

    name = "mass"
    needs = ()
    instead = (
        ", or differentiate its logarithm, part.lse - seen.lse, where _, part = regard.attention(..., "
        "mask=mask & rule, sink=None, observe=['lse'])"
    )

    @property
    def rules(self) -> tuple[Mask, ...]:
        return (self.of,)

    def follow(self, found: Sequence[Array], sums: LogSums, size: Sizes) -> Array:
        part, lse = sums.where(self.of), sums.lse
        least = np.finfo(lse.dtype).min
        return np.where(part == -np.inf, 0, np.exp(part - np.maximum(lse, least))).astype(lse.dtype, copy=False)


class Pooled(Statistic):
    """The weights as a coarse map: of = (rows, cols, kind)."""

    name = "pooled"

    @property
    def parameters(self) -> str:
        return ", ".join(map(repr, self.of))

    @property
    def largest(self) -> bool:
        """True if a cell holds its largest weight, not its mass."""
        return bool(self.of[2] == "max")

    def shapes(self, size: Sizes) -> tuple[Shape, ...]:
        return ((*size.lead, size.heads, min(self.of[0], size.n_q), min(self.of[1], size.n_k)),)


class WeightsOf(Statistic):
    """All weights of a few queries."""

    name = "weights_of"

    @property
    def parameters(self) -> str:
        return repr(list(self.of))

    def check(self, n_q: int) -> None:
        for row in self.of:
            if not 0 <= row < n_q:
                raise ValueError(f"rows of weights_of must be from 0 to {n_q - 1}, got {row}")

    def shapes(self, size: Sizes) -> tuple[Shape, ...]:
        return ((*size.lead, size.heads, len(self.of), size.n_k),)


class Renyi(Statistic):
    """log(Σ_j P^alpha / Σ_j P) / (1 − alpha), in nats.

    With L(a) = log Σ_j exp(a S), Σ_j P^alpha is exp(L(alpha) − alpha lse) and Σ_j P is exp(L(1) − lse).
    """

    name = "renyi"

    @property
    def needs(self) -> tuple[Statistic, ...]:
        limits: dict[float, tuple[Statistic, ...]] = {0: (VISIBLE,), 1: (ENTROPY,), math.inf: (Largest(),)}
        return limits.get(self.of, ())

    def follow(self, found: Sequence[Array], sums: LogSums, size: Sizes) -> Array:
        alpha, lse, sees = self.of, sums.lse, sums.alone()
        with np.errstate(all="ignore"):
            left = sees - lse
            if alpha == 0:
                entropy = np.log(found[0].astype(lse.dtype)) - left
            elif alpha == 1:
                entropy = found[0] / np.exp(left)
            elif alpha == np.inf:
                entropy = -np.log(found[0])
            else:
                order = lse.dtype.type(alpha)
                entropy = (sums.times(alpha) - order * lse - left) / (1 - order)
        return np.asarray(np.where(sees == -np.inf, lse.dtype.type(0), entropy))


INTEGERS = frozenset(part or kind.name for kind in KINDS.values() for part in kind.integers)
"""The names of arrays of int64."""

INSTEAD = {kind.name: kind.instead for kind in KINDS.values()}


def statistic(name: str, of: Any = None) -> Statistic:
    """Return the statistic with a name and parameters."""
    return KINDS[name](of)


def of_engine(observe: Iterable[Statistic]) -> tuple[Statistic, ...]:
    """Return the statistics that a framework asks an engine for."""
    return tuple(dict.fromkeys(s.of_engine for s in observe))


def asked_for(observe: Iterable[Statistic], found: Mapping[Statistic, Any], exp: Callable[[Any], Any]) -> Seen:
    """Return the statistics observed, from those of `of_engine`.

    exp: the exponential of the framework.
    """
    return Seen({s: s.in_framework(found[s.of_engine], exp) for s in observe})


def each_array(found: Any, turn: Callable[[Array], Any]) -> Any:
    """Apply `turn` to the array or arrays of a statistic."""
    if isinstance(found, Top | Profile):
        return type(found)(*(turn(getattr(found, field.name)) for field in fields(found)))
    return turn(found)


def top(k: int) -> Statistic:
    """Observe the k largest weights of every query.

    For `observe=`: `seen[regard.top(k)]` is a `Top`.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> out, seen = regard.attention(x, x, x, scale=10.0, observe=[regard.top(1)])
    >>> seen[regard.top(1)].indices[:, 0]
    array([0, 1, 2])
    """
    return TopWeights(_count("k of top", k))


def mass(mask: Mask | Array | Callable[..., Any]) -> Statistic:
    """Observe the weight of every query on the pairs that a rule allows.

    For `observe=`: (..., h, n_q). The rule is given like a mask, but hides nothing:
    `regard.mass(regard.window(1) & ~regard.window(0))` is the weight on the previous token, and
    `regard.mass(regard.documents(ids))` that on the query's own document. Keep the statistic to
    look it up: masks that are built alike differ as keys. An array is copied. PyTorch and JAX have
    no derivative of it, but of its logarithm: the lse of a call with mask=mask & rule and no sink,
    less the lse of the call.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> itself = regard.mass(lambda b, h, i, j: i == j)
    >>> out, seen = regard.attention(x, x, x, scale=0.0, observe=[itself])
    >>> seen[itself].round(3)
    array([0.333, 0.333, 0.333])
    """
    return Mass(as_mask(mask, "mask of mass", frozen=True))


def pooled(rows: int, cols: int, kind: Literal["mass", "max"] = "mass") -> Statistic:
    """Observe the weights as a coarse map of cells, (..., h, rows, cols).

    For `observe=`. Of n queries, cell r holds those from ⌊r n / rows⌋ to before ⌊(r + 1) n / rows⌋,
    and likewise for keys. There are no more cells than queries or keys. "mass" sums over the keys
    of a cell and averages over its queries, so that rows still sum to 1. "max" is the largest
    weight of a cell, so that a single one stays visible.

    >>> import numpy as np, regard
    >>> x = np.eye(4)
    >>> out, seen = regard.attention(x, x, x, causal=True, scale=0.0, observe=[regard.pooled(2, 2)])
    >>> seen[regard.pooled(2, 2)].round(3)
    array([[1.   , 0.   ],
           [0.583, 0.417]])
    """
    choice("kind of pooled", kind, ("mass", "max"))
    return Pooled((_count("rows of pooled", rows), _count("cols of pooled", cols), kind))


def weights_of(rows: Sequence[int]) -> Statistic:
    """Observe all weights of a few queries: (..., h, len(rows), n_k).

    For `observe=`. Rows count from the first row of query.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> wanted = [regard.weights_of([1])]
    >>> out, seen = regard.attention(x, x, x, causal=True, scale=0.0, observe=wanted)
    >>> seen[regard.weights_of([1])]
    array([[0.5, 0.5, 0. ]])
    """
    sequence: Any = rows
    several = sequence.ndim > 0 if type(sequence) is np.ndarray else isinstance(sequence, Sequence)
    if not several or isinstance(sequence, str | bytes):
        raise TypeError(f"rows of weights_of must be a sequence of ints, got {shown(rows)}")
    return WeightsOf(tuple(integer("rows of weights_of", row) for row in rows))


def renyi(alpha: float) -> Statistic:
    """Observe the Rényi entropy of every query.

    For `observe=`: log(Σ_j P[j]^alpha / Σ_j P[j]) / (1 − alpha), (..., h, n_q), in nats. At 0 it is
    the logarithm of the number of visible keys, at 1 the entropy (its limit), at infinity −log max
    P. It never rises with alpha. Σ_j P is 1 unless a sink takes weight: then this is Rényi's
    entropy of an incomplete distribution, at 1 entropy / Σ_j P.

    Computed in O(n) memory from the lse of the scores and that of the scores times alpha. Rounding
    grows as 1 / |1 − alpha|: near 1, take 1. PyTorch and JAX have no derivative of it, as the
    second lse is that of another forward pass, which is no output of the call. Without biases and
    rules of scores take `lse` of two calls, scale and alpha · scale: they differentiate.

    alpha: at least 0; may be infinite. Rényi 1961, "On measures of entropy and information".

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> pair = regard.renyi(2)  # −log of the chance that two draws are the same key
    >>> out, seen = regard.attention(x, x, x, causal=True, scale=0.0, observe=[pair])
    >>> np.exp(seen[pair]).round(3)
    array([1., 2., 3.])
    """
    order = real("alpha of renyi", alpha)
    if not order >= 0:
        raise ValueError(f"alpha of renyi must be at least 0, got {order}")
    return Renyi(order)


def bin_edges(number: int, n: int) -> Array:
    """Return the edges of `pooled`'s bins of n positions, int64 (bins + 1,)."""
    number = min(number, n)
    return np.arange(number + 1, dtype=np.int64) * n // max(number, 1)


def _count(name: str, x: object) -> int:
    return integer(name, x, least=1, below=2**62)


class Seen(Mapping[Statistic | str, Any]):
    """Observed statistics: `seen.entropy`, `seen["entropy"]`, `seen[regard.top(8)]`.

    For every query, (..., h, n_q): `lse`; `entropy` in nats; `visible`, the number of keys it sees;
    `normalized_entropy`, its entropy over the logarithm of that; `effective_states`, exp(entropy),
    the number of equally weighted keys with the same entropy; `max`, the largest weight, and
    `argmax`, its row in key. For every key: `received`, its weight from all queries, (..., h, n_k),
    and `group_received`, summed over the query heads that share it, (..., h_kv, n_k). `profile` is
    a `Profile`, weight by distance. `top`, `mass`, `pooled`, `weights_of` and `renyi` have
    parameters.

    float32, for float64 inputs float64; indices and counts int64. All are taken before dropout. A
    query that sees nothing has weights and entropies 0, lse −∞, argmax −1 and effective_states 1. A
    query with a visible NaN has NaN for weights; its `argmax` and `top` begin at the first NaN. A
    query that sees a single key has normalized entropy 0. With a sink, the weights of a query and
    the cells of a map sum to what it leaves.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> out, seen = regard.attention(x, x, x, causal=True, observe=["argmax", "received"])
    >>> seen
    Seen('argmax': (3,), 'received': (3,))
    >>> seen.argmax
    array([0, 1, 2])
    """

    def __init__(self, values: Mapping[Statistic, Any]):
        object.__setattr__(self, "_values", dict(values))

    _values: dict[Statistic, Any]

    def __getitem__(self, key: Statistic | str) -> Any:
        try:
            return self._values[KINDS[key]() if isinstance(key, str) else key]
        except KeyError:
            raise KeyError(f"{key!r} was not observed; observed: {list(self._values)}") from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Seen is frozen")

    def __iter__(self) -> Iterator[Statistic | str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        shapes = ((k, v.values if isinstance(v, Top | Profile) else v) for k, v in self._values.items())
        return f"Seen({', '.join(f'{k}: {tuple(v.shape)}' for k, v in shapes)})"
