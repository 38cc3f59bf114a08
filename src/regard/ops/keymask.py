"""Masks of linear attention: the visible keys, and the documents of packed sequences.

A document has one sum over keys for all queries. So a mask may hide a key from all queries, or from those of other
documents, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import numpy as np

from regard.arguments.frameworks import Namespace
from regard.core import checks
from regard.rules import At, Mask, Node, evaluate, order, reads

Array = np.ndarray[Any, np.dtype[Any]]


class KeyMask(NamedTuple):
    """The visible keys and the documents of a mask of linear attention.

    keys: arrays of booleans that broadcast to (..., h, n_k), True where a key is visible. documents: ids of the queries
    (b, n_q) and of the keys (b, n_k), which have to be equal; b is the size of the leading dimensions. Rows share none.
    """

    keys: tuple[Any, ...] = ()
    documents: tuple[Array, Array] | None = None

    @classmethod
    def of(cls, mask: Any, lead: tuple[int, ...], h: int, n_q: int, n_k: int) -> KeyMask:
        """Read a mask, given as `regard.attention` takes it.

        Raises ValueError for one that hides a key from some queries of a document, and for ids that are not contiguous.
        """
        rule = checks.mask(mask, lead, h, n_q, n_k)
        if rule is None:
            return cls()
        batch, offset = math.prod(lead), n_k - n_q
        checks.whole(rule, batch, h)
        for need in rule.requires:
            need.check(*{"b": (0, batch), "h": (0, h), "i": (offset, n_k), "j": (0, n_k)}[need.axis])
        b, h_, i, j = (np.arange(n) for n in (batch, h, n_q, n_k))

        def dense(x: Array) -> Array:
            heads = x.shape[-3] if x.ndim > 2 else 1
            return np.broadcast_to(x, (*lead, heads, 1, n_k)).reshape(batch, heads, n_k)

        keys, ids = [], []
        for node in conjuncts(rule.node):
            if node.op == "dense" and _values(node) is None and _one_row(node):
                keys.append(getattr(node.payload, "tensor", node.payload)[..., 0, :])  # of a framework, maybe traced
                continue
            if any(_values(x) is None for x in order([node]) if x.op in ("gather", "dense")):
                raise TypeError(
                    "mask of linear_attention reads values that are traced or trained: give booleans (..., 1, n_k), or "
                    "make the rule of values"
                )
            if "i" not in reads(node) and _one_row(node):
                (seen,) = evaluate([node], At(b[:, None, None], h_[:, None], 0, j, keys=n_k, dense=dense))
                heads = seen.shape[-2] if seen.ndim > 1 else 1  # 1: key-value heads need no copy for each query head
                keys.append(np.array(np.broadcast_to(seen, (batch, heads, n_k))).reshape(*lead, heads, n_k))
            elif sides := _sides(node):
                at = At(b[:, None], 0, i + offset, j, keys=n_k)
                sizes = (batch, n_q), (batch, n_k)
                ids.append([np.broadcast_to(evaluate([x], at)[0], n) for x, n in zip(sides, sizes, strict=True)])
            else:
                raise ValueError(f"mask of linear_attention {REMEDY}; got {rule}")
        return cls(tuple(keys), _contiguous(rule, ids) if ids else None)

    def visible(self, like: Callable[[Array], Any]) -> Any:
        """Return the visible keys as one array that broadcasts to (..., h, n_k), or None for all."""
        keys = [like(x) if isinstance(x, np.ndarray) else x for x in self.keys]
        return reduce(and_, keys) if keys else None


REMEDY = (
    "may hide a key from all queries, as arrays (..., 1, n_k) and padding do, or from those of other documents of "
    "contiguous ids; any other mask takes regard.attention"
)


def conjuncts(node: Node) -> Iterator[Node]:
    """Yield the masks that all have to allow a pair."""
    if node.op == "bitwise_and":
        for x in node.args:
            yield from conjuncts(x)
    else:
        yield node


def _values(node: Node) -> Array | None:
    """Return the array that an expression reads at a leaf; None for one of a framework that has no values yet."""
    array = node.payload.known if node.op == "gather" else node.payload
    return array if isinstance(array, np.ndarray) else None


def _one_row(node: Node) -> bool:
    """Return True if the arrays of an expression have one row for all queries."""
    return all(x.payload.ndim < 2 or x.payload.shape[-2] == 1 for x in order([node]) if x.op == "dense")


def _sides(node: Node) -> tuple[Node, Node] | None:
    """Return the ids of queries and of keys that an expression compares, or None."""
    if node.op != "equal":
        return None
    for query, key in (node.args, node.args[::-1]):
        if reads(query).isdisjoint({"h", "j", "dense"}) and reads(key).isdisjoint({"h", "i", "dense"}):
            return query, key
    return None


def _contiguous(rule: Mask, ids: list[list[Array]]) -> tuple[Array, Array]:
    """Return ids of queries and keys, equal in a batch element where all of `ids` are."""
    both = np.stack([np.concatenate(x, axis=1) for x in ids], axis=-1)  # (b, n_q + n_k, number of rules)
    _, flat = np.unique(both.reshape(-1, len(ids)), axis=0, return_inverse=True)
    labels = flat.reshape(both.shape[:-1]) + np.arange(len(both))[:, None] * flat.size
    query, key = np.split(labels, [ids[0][0].shape[1]], axis=1)
    for x in (query, key):
        ids_of_runs = _runs(x).id
        if len(np.unique(ids_of_runs)) < len(ids_of_runs):
            raise ValueError(f"mask of linear_attention {REMEDY}; the ids of {rule} are not contiguous")
    return query, key


class _Runs(NamedTuple):
    """Runs of equal ids: their rows, first positions, ends, and ids."""

    row: Array
    start: Array
    stop: Array
    id: Array


def _runs(ids: Array) -> _Runs:
    rows, n = ids.shape
    begins = np.concatenate([np.ones((rows, min(n, 1)), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    row, start = np.nonzero(begins)
    last = np.append(row[1:] != row[:-1], True)[: len(row)]
    stop = np.where(last, n, np.append(start[1:], n)[: len(row)])
    return _Runs(row, start, stop, ids[row, start])


def by_documents(
    attend: Callable[[Any, Any, Any, Any], Any], space: Namespace, q: Any, k: Any, v: Any, keep: Any,
    documents: tuple[Array, Array], causal: bool,
) -> Any:  # fmt: skip
    """Attend within documents, which become a batch for each power of two of their lengths.

    attend: takes queries, keys and values (b, h, n, d), and the visible keys (b, h or 1, n). q (..., h, n_q, d), k and
    v (..., h_kv, n_k, d), keep (..., h or 1, n_k) or None. causal: positions count, so that both begin at the same.
    """
    xp, lead = space.xp, np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    batch, h, (n_q, n_k) = math.prod(lead), q.shape[-3], (q.shape[-2], k.shape[-2])

    def rows_first(x: Any) -> Any:
        """Return (rows of all batch elements, h, d)."""
        x = xp.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(batch, *x.shape[-3:])
        return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])

    rows = [rows_first(x) for x in (q, k, v)]
    if keep is not None:
        rows.append(rows_first(xp.broadcast_to(keep, (*keep.shape[:-1], n_k))[..., None]))
    query, key = (_runs(x) for x in documents)
    ordered = np.argsort(key.id)
    of_key = ordered[np.searchsorted(key.id, query.id, sorter=ordered).clip(max=len(ordered) - 1)]
    matched = key.id[of_key] == query.id
    k_start, k_stop = (np.where(matched, x[of_key], 0) for x in (key.start, key.stop))
    q_base, k_base = query.start, k_start
    if causal:  # by position
        k_base = np.where(matched, np.minimum(query.start + n_k - n_q, k_start), query.start + n_k - n_q)
        q_base = k_base - (n_k - n_q)
    length = np.maximum(query.stop - q_base, k_stop - k_base)
    parts, places, total = [], np.zeros(batch * n_q, np.int64), 0
    for size in np.unique(power := 1 << np.ceil(np.log2(length)).astype(np.int64)).tolist():
        some, t = power == size, np.arange(size)
        row, of_q, of_k = query.row[some, None], q_base[some, None] + t, k_base[some, None] + t
        real = (of_q >= query.start[some, None]) & (of_q < query.stop[some, None])
        there = (of_k >= k_start[some, None]) & (of_k < k_stop[some, None])
        index = [row * n + np.clip(x, 0, n - 1) for x, n in ((of_q, n_q), (of_k, n_k))]
        places[index[0][real]] = total + np.flatnonzero(real)
        total += real.size
        q, k, v, *more = (x[space.like(index[n > 0], x)].swapaxes(1, 2) for n, x in enumerate(rows))
        seen = space.like(there[:, None], rows[0])
        out = attend(q, k, v, seen & more[0][..., 0] if more else seen)
        parts.append(out.swapaxes(1, 2).reshape(-1, h, out.shape[-1]))
    out = xp.concatenate(parts, 0)[space.like(places, rows[0])]
    return out.reshape(batch, n_q, h, -1).swapaxes(1, 2).reshape(*lead, h, n_q, out.shape[-1])
