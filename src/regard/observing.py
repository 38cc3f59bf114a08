"""Statistics of attention that `observe=` asks for, and the object they come back in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Statistic:
    """What to observe, by name; statistics with parameters are made by functions such as `top`."""

    name: str
    k: int = 0

    def __repr__(self) -> str:
        return f"regard.{self.name}({self.k})" if self.k else repr(self.name)


NAMES = ("lse", "entropy", "max", "argmax", "received")


@dataclass(frozen=True)
class Top:
    """The largest weights of every query and the keys they fall on, in falling order.

    `values` and `indices` (int64, rows of key) are (..., h, n_q, k). Ties go to the lowest key. Where fewer than k keys
    may be seen, the weight is 0 and the index −1.
    """

    values: Array
    indices: Array


def top(k: int) -> Statistic:
    """The k largest weights of every query, for `observe=`; they come back as `seen[regard.top(k)]`, a `Top`.

    >>> import numpy as np, regard
    >>> x = np.eye(3)
    >>> out, seen = regard.attention(x, x, x, scale=10.0, observe=[regard.top(1)])
    >>> seen[regard.top(1)].indices[:, 0]
    array([0, 1, 2])
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise TypeError(f"top: k must be an int, got {k!r}")
    if k < 1:
        raise ValueError(f"top: k must be at least 1, got {k}")
    return Statistic("top", int(k))


class Seen(Mapping[Statistic | str, Any]):
    """The statistics that were asked for: `seen.entropy`, `seen["entropy"]`, `seen[regard.top(8)]`; frozen.

    `lse`, `entropy`, `max` (the largest weight) and `argmax` (its row in key, −1 for a query that sees nothing) are
    (..., h, n_q); `received`, the weight that each key gets from all queries, is (..., h, n_k). float32, for float64
    inputs float64, indices int64. All are taken before dropout.

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
        shapes = ((k, v.values if isinstance(v, Top) else v) for k, v in self._values.items())
        return f"Seen({', '.join(f'{k}: {tuple(v.shape)}' for k, v in shapes)})"
