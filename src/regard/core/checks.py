"""Every validation of a call, with its message.

Nothing here computes. What passes is valid for every engine.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from regard.arguments.values import (
    BOOLS,
    FLOATS,
    array_type,
    boolean,
    choice,
    floating,
    function,
    integer,
    number,
    real,
    shown,
    size_text,
)
from regard.core.options import ARRAYS
from regard.core.problem import Problem
from regard.core.statistics import KINDS, NAMES, Statistic
from regard.rules import Mask, Rule, Score, as_mask, as_score, type_name
from regard.rules.outside import check as outside
from regard.rules.outside import ends, lookups, read_alone
from regard.runtime import system

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "BOOLS", "FARTHEST", "FLOATS", "aligned", "array", "bias", "boolean", "choice", "covers", "dropout", "fits",
    "floating", "function", "instance", "integer", "is_float", "layout", "mask", "number", "observable", "observe",
    "offset", "operands", "origin", "positions", "real", "room", "same_dtype", "scale", "score", "shaped",
    "shown", "sink", "sizes", "whole",
]  # fmt: skip
MADE = "regard.top(k), mass(rule), pooled(rows, cols), weights_of(rows), renyi(alpha)"
ELSEWHERE = {"bshd": "bnhd", "bhsd": "bhnd", "BSHD": "bnhd", "BHSD": "bhnd", "BNHD": "bnhd", "BHND": "bhnd"}
LARGE = 2**28  # bytes of results above which they are compared to the memory of the machine
FARTHEST = 2**62  # the farthest position: differences of two still fit into 64 bits


def is_float(x: Array) -> bool:
    """Return whether the dtype is a supported float of native byte order.

    These are float16, bfloat16 (of ml_dtypes), float32 and float64.
    """
    return x.dtype.type.__name__ in FLOATS and x.dtype.isnative


def array(name: str, x: object) -> Array:
    """Return a NumPy array of a floating dtype, or raise TypeError.

    A memory map is returned as a plain view.
    """
    if type(x) not in (np.ndarray, np.memmap):
        raise TypeError(f"{name} must be a NumPy array, got {array_type(x)}")
    x = np.asarray(x)
    if not is_float(x):
        order = "" if x.dtype.isnative else ", not in the byte order of this machine"
        raise TypeError(f"{name} must have a floating dtype ({', '.join(FLOATS)}), got {x.dtype}{order}")
    return x


def same_dtype(**arrays: Array) -> None:
    if len({x.dtype for x in arrays.values()}) > 1:
        given = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise TypeError(f"{_and(list(arrays))} must share one dtype, got {given}")


def operands(query: object, key: object, value: object) -> tuple[Array, Array, Array]:
    q, k, v = array("query", query), array("key", key), array("value", value)
    given = (q, k) if v is k else (q, k, v)
    same_dtype(query=q, key=k, **({} if v is k else {"value": v}))
    ranks = q.ndim, k.ndim, v.ndim
    if min(ranks) < 2 or (min(ranks) == 2 < max(ranks)):
        raise ValueError(
            f"query, key and value must all be matrices (n, d) or all have heads (..., h, n, d), got {_shapes(*given)}"
        )
    return q, k, v


def sizes(q: Array, k: Array, v: Array, given: tuple[Array, Array, Array] | None = None) -> tuple[int, ...]:
    """Return the common leading shape of query, key and value (..., h, n, d).

    Raises ValueError unless all sizes fit. given: the caller's arrays, for messages.
    """
    query, key, value = given or (q, k, v)
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"query and key must have the same number of features d, got {_shapes(query, key)}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"key and value must have the same number of keys n_k, got {_shapes(k=key, v=value)}")
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(f"key and value must have the same number of heads h_kv, got {_shapes(k=key, v=value)}")
    h, h_kv = q.shape[-3], k.shape[-3]
    if (h % h_kv if h_kv else h) != 0:
        shapes = _shapes(query, key)
        raise ValueError(f"the heads of query must be a multiple of those of key, got {h} and {h_kv} in {shapes}")
    leads = q.shape[:-3], k.shape[:-3], v.shape[:-3]
    try:
        return leads[0] if leads[0] == leads[1] == leads[2] else np.broadcast_shapes(*leads)
    except ValueError as error:
        if "too large" in str(error):  # they fit, with more elements than an array may have
            shapes = _shapes(query, key, value)
            raise MemoryError(
                f"the leading dimensions broadcast to more than an array can hold, got {shapes}"
            ) from None
        shapes = _shapes(query, key) if leads[1] == leads[2] else _shapes(query, key, value)
        raise ValueError(f"the leading dimensions must broadcast, got {shapes}") from None


def aligned(name: str, x: Array, lead: tuple[int, ...], h: int, n_q: int, n_k: int) -> Array:
    """Return a dense mask or bias that aligns right to (..., h, n_q, n_k)."""
    full = (*lead, h, n_q, n_k)
    fits = x.ndim <= len(full) and all(a in (1, b) for a, b in zip(x.shape[::-1], full[::-1], strict=False))
    if not fits:
        hint = ""
        if x.shape == (*lead, n_k) and len(lead) == 1:
            hint = f"; one row for each batch element? Then give {name}[:, None, None, :]"
        elif x.shape == (*lead, n_q, n_k) and len(lead) == 1:
            hint = f"; one matrix for each batch element? Then give {name}[:, None, :, :]"
        raise ValueError(f"{name} must align right to (..., h, n_q, n_k) = {full}, got shape {x.shape}{hint}")
    return x


def mask(x: object, lead: tuple[int, ...], h: int, n_q: int, n_k: int) -> Mask | None:
    """Return a mask from an argument.

    x: a rule, a function of (b, h, i, j), or an array of booleans or 0/1.
    """
    if x is None:
        return None
    if isinstance(x, Score):
        raise TypeError(f"mask must be a mask, got the score {x}; give score={x}")
    result = as_mask(x)
    for dense in result.dense:
        aligned("mask", dense, lead, h, n_q, n_k)
    return result


def score(x: object) -> Score | None:
    """Return a score from an argument.

    x: a rule, a function of (s, b, h, i, j), or a sequence of those.
    """
    if x is None:
        return None
    for rule in x if isinstance(x, Sequence) else (x,):
        if isinstance(rule, Mask):
            raise TypeError(f"score must be a score, got the mask {rule}; give mask={rule}")
    return as_score(x)


def bias(x: object, lead: tuple[int, ...], h: int, n_q: int, n_k: int) -> Array | None:
    if x is None:
        return None
    if type(x) is np.ndarray and x.dtype == bool:
        raise TypeError("bias must have a floating dtype, got bool; give a boolean array as mask=")
    return aligned("bias", array("bias", x), lead, h, n_q, n_k)


def sink(x: object, h: int) -> Array | None:
    if x is None:
        return None
    sink = array("sink", x)
    if sink.shape not in ((), (h,)):
        raise ValueError(f"sink must be one number for each head, shape ({h},), got shape {sink.shape}")
    return sink


def scale(x: object, d: int, dtype: np.dtype[Any]) -> float:
    if x is None:
        return 1.0 / math.sqrt(d) if d else 1.0
    value = number("scale", x)
    if abs(value) > float(np.finfo(dtype).max):
        raise ValueError(f"scale must be finite in {dtype}, got {value}")
    return value


def dropout(p: object, seed: object) -> tuple[float, int]:
    p = number("dropout", p)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {p}")
    if seed is None:
        if p:
            raise ValueError(f"dropout={p} needs seed=, an int: the same seed drops the same weights everywhere")
        return p, 0
    seed = integer("seed", seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {shown(seed)}")
    return p, seed


def offset(x: object, lead: tuple[int, ...], n_q: int, n_k: int) -> Array:
    """Return the absolute index of row 0 of each batch element: int64 (batch,)."""
    if type(x) is np.ndarray:
        if x.dtype.kind not in "iu":
            raise TypeError(f"offset must be an int or an integer array, got {x.dtype}")
        ends = (int(x.min()), int(x.max())) if x.size else (0, 0)
    else:
        x = n_k - n_q if x is None else integer("offset", x, "an int or an integer array")
        ends = x, x
    farthest = max(ends, key=abs)
    if abs(farthest) > FARTHEST:
        raise ValueError(f"offset must be within ±2**62, got {shown(farthest)}")
    if isinstance(x, int):  # a view with stride 0, for any number of batch elements
        return np.ndarray((math.prod(lead),), np.int64, np.array([x], np.int64), 0, (0,))
    room({"the offset of every batch element": 8 * math.prod(lead)})
    result = np.empty(lead, np.int64)
    try:
        result[...] = np.broadcast_to(x, lead)
    except ValueError:
        raise ValueError(f"offset must broadcast to the leading dimensions {lead}, got shape {np.shape(x)}") from None
    return result.reshape(-1)


def origin(x: object) -> tuple[int, int, int]:
    if x is None:
        return 0, 0, 0
    if not isinstance(x, tuple) or len(x) != 3:
        raise TypeError(f"origin must be a tuple (b, h, j) of integers, got {shown(x)}")
    b, h, j = integer("b of origin", x[0]), integer("h of origin", x[1]), integer("j of origin", x[2])
    if min(b, h, j) < 0 or max(b, h, j) > FARTHEST:
        raise ValueError(f"origin must be between 0 and 2**62, got {shown(x)}")
    return b, h, j


def layout(x: object) -> str:
    if isinstance(x, str) and x in ELSEWHERE:
        raise ValueError(f"layout must be 'bhnd' or 'bnhd', got {x!r}; what others call {x!r} is {ELSEWHERE[x]!r}")
    layout: str = choice("layout", x, ("bhnd", "bnhd"))
    return layout


def observe(x: object, name: str = "observe") -> tuple[Statistic, ...]:
    if isinstance(x, (str, Statistic)):
        raise TypeError(f"{name} must be a sequence of statistics, got {x!r}; give {name}=[{x!r}]")
    if not isinstance(x, Sequence):
        raise TypeError(f"{name} must be a sequence of statistics, got {type_name(x)}")
    for s in x:
        if not (isinstance(s, Statistic) or (isinstance(s, str) and s in NAMES)):
            known = ", ".join(map(repr, NAMES))
            raise ValueError(f"{name}: unknown statistic {shown(s)}; known are {known} and {MADE}")
    return tuple(dict.fromkeys(s if isinstance(s, Statistic) else KINDS[s]() for s in x))


def covers(p: Problem, rows_placed: bool, placed: bool) -> None:
    """Check that rules have an entry for every position, batch element and head, and none that a whole call leaves.

    rows_placed: whether `offset` says where the queries are. If not, a table with an entry for each query is refused
    where i, which is row + n_k - n_q, would read the entries of other queries. placed: whether `origin` says where the
    call is in a larger one. If not, it is whole.
    """
    apart = not rows_placed and 0 < p.n_k != p.n_q
    for rule in (p.mask, p.score, *(rule for s in p.observe for rule in s.rules)):
        if rule is None:
            continue
        if not placed:
            whole(rule, p.batch, p.heads)
        for need in rule.requires:
            need.check(*p.extents.indices[need.axis])
        if lookups(rule.node):
            _inside(p, rule)
        for table, axis, index in read_alone(rule.node) if apart else ():
            if index == "i" and table.shape[axis] == p.n_q:
                raise ValueError(
                    f"{rule.text} reads axis {axis} of a {table!r} at i, which is row + n_k - n_q = row + "
                    f"{p.n_k - p.n_q}, but it has an entry for each of the {p.n_q} rows: give offset=0, by which i is "
                    "the row, or table(..., bounds='clamp') to read its nearest entry"
                )


def whole(rule: Rule, batch: int, heads: int) -> None:
    """Check that no table has entries for batch elements or heads beyond those of a whole call."""
    for need in ends(rule):
        need.check_end(batch if need.axis == "b" else heads)


def _inside(p: Problem, rule: Any) -> None:
    """Check look-ups in tables with bounds="raise", where the mask allows the pair."""

    def boxes(read: frozenset[str]) -> Iterator[list[tuple[int, int]]]:
        """Yield the index ranges of each batch element that the rule can tell apart."""
        every, seen = read & {"b", "dense"}, set()
        for b, offset in enumerate(p.offset.tolist()):
            if p.heads and p.n_q and p.n_k and (every or offset not in seen):
                seen.add(offset)
                first = p.origin[0] + b, p.origin[1], offset, p.origin[2]
                sizes = 1, p.heads, p.n_q, p.n_k
                yield [(low, low + size - 1) for low, size in zip(first, sizes, strict=True)]

    def dense(x: Array, at: Any) -> Array:
        b, h, i, j = at
        row = b - p.origin[0]
        lead = np.unravel_index(row, p.lead) if p.lead else ()
        found: Array = p.dense(x)[(*lead, h - p.origin[1], i - p.offset[row], j - p.origin[2])]
        return found

    guard = None if rule is p.mask else p.mask_node
    outside(rule.text, rule.node, guard, boxes, dense, p.keys, p.compute.type)


def observable(p: Problem) -> None:
    """Check that the masks and rows of statistics fit the call."""
    for s in p.observe:
        for rule in s.rules:
            for dense in rule.dense:
                aligned(f"mask of {s.name}", dense, p.lead, p.heads, p.n_q, p.n_k)
        s.check(p.n_q)


def fits(
    p: Problem, *, outputs: int = 1, entropies: int = 0, weights: int = 0, gradients: int = 0, d_v: int | None = None
) -> None:
    """Raise MemoryError for results that are larger than all memory.

    Arrays on a device are not checked. outputs, entropies, gradients: the number of each. weights: the number of
    weights. d_v: features of the output.
    """
    if p.device is not None:
        return
    rows, real = p.all_heads * p.n_q, p.compute.itemsize
    if not (p.observe or weights or gradients) and outputs * rows * (p.d_v + 2) * 8 <= LARGE:
        return  # small whatever the dtype: most calls end here
    results = {"out": outputs * rows * (p.d_v if d_v is None else d_v) * p.dtype.itemsize, "lse": outputs * rows * real}
    if entropies:
        results["entropy"] = entropies * rows * real
    for s in p.observe if outputs else ():
        results[f"{s.name} of observe" if s.of is not None else s.name] = s.bytes(p.sizes, real)
    results["weights"] = weights * p.dtype.itemsize
    if gradients:
        inputs = {name: getattr(p, name) for name in ("query", "key", "value", *ARRAYS)} | {"bias": p.trained_bias}
        for name, x in inputs.items():
            results[f"gradient of {name}"] = 0 if x is None else gradients * x.size * x.itemsize
        results["gradients of tables"] = gradients * sum(math.prod(t.shape) for t in p.rules.tables) * real
    room(results)


def room(results: dict[str, int]) -> None:
    """Raise MemoryError for arrays that together are larger than all memory.

    results: their bytes by name.
    """
    total = sum(results.values())
    if total <= LARGE:
        return
    there = system.memory()
    if there is None or total <= there[0]:
        return
    largest = sorted((name for name in results if results[name]), key=lambda name: -results[name])
    each = ", ".join(f"{name} {size_text(results[name])}" for name in largest[:3])
    rest = ", ..." if len(largest) > 3 else ""
    raise MemoryError(
        f"the results of this call take {size_text(total)} ({each}{rest}), "
        f"more than the {size_text(there[0])} of memory of {there[1]}"
    )


def positions(name: str, part: object, n: int) -> range:
    """Return the positions of n that a slice selects."""
    if not isinstance(part, slice):
        raise TypeError(f"{name} must be a slice, got {shown(part)}")
    try:
        return range(n)[part]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a slice of integers with a step other than 0, got {shown(part)}") from None


def shaped(name: str, x: object, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> Array:
    """Return a cotangent or tangent with the required shape and dtype."""
    result = array(name, x)
    if result.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {result.shape}")
    if dtype is not None and result.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {result.dtype}")
    return result


def instance(name: str, x: object, kind: type[T]) -> T:
    if not isinstance(x, kind):
        raise TypeError(f"{name} must be a regard.{kind.__name__}, got {type_name(x)}")
    return x


def _shapes(*arrays: Array, **named: Array) -> str:
    names = dict(zip(("query", "key", "value"), arrays, strict=False)) | {
        {"k": "key", "v": "value"}[name]: x for name, x in named.items()
    }
    return ", ".join(f"{name} {x.shape}" for name, x in names.items())


def _and(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]
