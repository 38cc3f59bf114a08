"""Statistics that `observe=` requests, and the object that holds them."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from regard.arguments.values import choice, integer, real, shown
from regard.rules import Mask, as_mask

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Statistic:
    """A statistic to observe, by name.

    of: the parameters of a statistic made by a function such as `top`.
    """

    name: str
    of: Any = None

    def __repr__(self) -> str:
        if self.of is None:
            return repr(self.name)
        if self.name == "pooled":
            rows, cols, kind = self.of
            return f"regard.pooled({rows}, {cols}, {kind!r})"
        return f"regard.{self.name}({list(self.of) if isinstance(self.of, tuple) else self.of})"


NAMES = (
    "lse", "entropy", "visible", "normalized_entropy", "effective_states", "max", "argmax", "received",
    "group_received", "profile",
)  # fmt: skip


INSTEAD = {
    "mass": ", or differentiate its logarithm, part.lse - seen.lse, where _, part = regard.attention(..., "
    "mask=mask & rule, sink=None, observe=['lse'])",
}
"""What an error names in place of the derivative of a statistic, which frameworks lack."""


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


ENTROPY, EFFECTIVE_STATES = Statistic("entropy"), Statistic("effective_states")


def of_engine(observe: Iterable[Statistic]) -> tuple[Statistic, ...]:
    """Return the statistics that a framework asks an engine for.

    Entropy stands for `effective_states`: the framework takes its exponential, so that it differentiates.
    """
    return tuple(dict.fromkeys(ENTROPY if s == EFFECTIVE_STATES else s for s in observe))


def asked_for(observe: Iterable[Statistic], found: Mapping[Statistic, Any], exp: Callable[[Any], Any]) -> Seen:
    """Return the statistics observed, from those of `of_engine`.

    exp: the exponential of the framework.
    """
    return Seen({s: exp(found[ENTROPY]) if s == EFFECTIVE_STATES else found[s] for s in observe})


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
    return Statistic("top", _count("k of top", k))


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
    return Statistic("mass", as_mask(mask, "mask of mass", frozen=True))


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
    return Statistic("pooled", (_count("rows of pooled", rows), _count("cols of pooled", cols), kind))


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
    given: Any = rows
    several = given.ndim > 0 if type(given) is np.ndarray else isinstance(given, Sequence)
    if not several or isinstance(given, str | bytes):
        raise TypeError(f"rows of weights_of must be a sequence of ints, got {shown(rows)}")
    return Statistic("weights_of", tuple(integer("rows of weights_of", row) for row in rows))


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
    return Statistic("renyi", order)


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
            return self._values[Statistic(key) if isinstance(key, str) else key]
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
