"""The metric of scores: a product before engines, and the chain rule after them.

Scores are S = scale · Q M K. Engines are given Q M as their query. With G the gradient of Q M:

    dQ = G Mᵀ        dM = Qᵀ G summed over queries        tangent of Q M: Q̇ M + Q Ṁ

Every sum over features has one order, so that a row of Q M depends on its query and M alone. Products are computed in
the dtype of sums and rounded to that of the query; sums over queries are float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import Differential, Problem, compute_dtype

Array = np.ndarray[Any, np.dtype[Any]]


def fits(metric: Sequence[int], query: Sequence[int], layout: object = "bhnd") -> None:
    """Raise ValueError unless a metric has shape (d, d) or (h, d, d).

    metric, query: their shapes.
    """
    d, shape = query[-1], tuple(metric)
    heads = 1 if len(query) == 2 else query[-2 if layout == "bnhd" else -3]
    if shape not in ((d, d), (heads, d, d)):
        raise ValueError(
            f"metric must have shape (d, d) = ({d}, {d}) or (h, d, d) = ({heads}, {d}, {d}), got shape {shape}"
        )


def product(x: Array, metric: Array, transposed: bool = False) -> Array:
    """Return x M, or x Mᵀ, in the dtype of x (..., h, n, d)."""
    wide = compute_dtype(x.dtype)
    return _cast(_rows(x, metric, wide, transposed), x.dtype)


def _rows(x: Array, metric: Array, wide: np.dtype[Any], transposed: bool = False) -> Array:
    M = metric.swapaxes(-1, -2) if transposed else metric
    heads = "h" if M.ndim == 3 else ""
    # Unoptimized, einsum adds products one by one. In BLAS the order of sums depends on the number of rows.
    left, right = np.ascontiguousarray(x, wide), np.ascontiguousarray(M, wide)
    product: Array = np.einsum(f"...{heads}ia,{heads}ab->...{heads}ib", left, right, optimize=False)
    return product


def framework_product(query: Any, metric: Any, layout: object, cast: Callable[[Any], Any]) -> Any:
    """Return Q M by a framework's own product, in the query's layout.

    cast: converts to the dtype of sums.
    """
    q, M = cast(query), cast(metric)
    if M.ndim == 2:
        return q @ M
    if q.ndim == 2:
        return q @ M[0]
    M = M[(None,) * (q.ndim - 3)]
    return (q.swapaxes(-2, -3) @ M).swapaxes(-2, -3) if layout == "bnhd" else q @ M


def gradients(p: Problem, g: Differential) -> Differential:
    """Return the gradients in query and metric.

    g: the gradients for engines; that of the query is in Q M.
    """
    if p.factors is None or g.query is None:
        return g
    query, metric = p.factors
    return replace(g, query=product(g.query, metric, True), metric=_outer(p, query, g.query))


def tangents(p: Problem, t: Differential) -> Differential:
    """Return the tangents for engines: that of Q M in place of the query's."""
    if p.factors is None:
        return t
    query, metric = p.factors
    parts = [(x, M) for x, M in ((t.query, metric), (query, t.metric)) if x is not None and M is not None]
    total = sum(_rows(x, M, p.compute) for x, M in parts)
    return replace(t, query=_cast(np.asarray(total), p.dtype) if parts else None, metric=None)


def gradient_tangents(p: Problem, t: Differential, g: Differential, dg: Differential) -> Differential:
    """Return the tangents of `gradients` along t.

    g: the gradients for engines; dg: their tangents.
    """
    if p.factors is None or dg.query is None:
        return dg
    assert g.query is not None
    (query, metric), rows = p.factors, _rows(dg.query, p.factors[1], p.compute, True)
    total = _outer(p, query, dg.query, np.float64)
    if t.metric is not None:
        rows = rows + _rows(g.query, t.metric, p.compute, True)
    if t.query is not None:
        total = total + _outer(p, t.query, g.query, np.float64)
    return replace(dg, query=_cast(rows, p.dtype), metric=_cast(total, metric.dtype))


def _outer(p: Problem, x: Array, g: Array, dtype: Any = None) -> Array:
    """Return Σ_i x[i,a] g[i,b] in the shape of the metric.

    Rows with zero gradient are left out: a query that sees nothing has none, and may be NaN.
    """
    assert p.factors is not None
    metric = p.factors[1]
    if not x.size:
        return np.zeros(metric.shape, dtype or metric.dtype)
    x = np.where((g != 0).any(axis=-1, keepdims=True), x, x.dtype.type(0))
    left, right = (np.ascontiguousarray(y, np.float64).reshape(-1, *y.shape[-3:]) for y in (x, g))
    total: Array = np.einsum("bhia,bhic->hac" if metric.ndim == 3 else "bhia,bhic->ac", left, right, optimize=False)
    return _cast(total, dtype or metric.dtype)


def _cast(x: Array, dtype: Any) -> Array:
    """Return x in a dtype, infinite beyond its range."""
    with np.errstate(over="ignore"):
        return x.astype(dtype, copy=False)
