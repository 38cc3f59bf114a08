"""The specification as the engine "spec", in float64 and O(n²)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import KNOWS as KNOWS
from regard.core.problem import Differential, Outputs, Problem
from regard.core.statistics import Mass, Pooled, Renyi, Statistic, TopWeights, WeightsOf
from regard.reference import specification

Array = np.ndarray[Any, np.dtype[Any]]

NAME = "spec"
ABOUT = "the specification, O(n²) memory, slow; runs only when named"
DEVICES, NAMED_ONLY, SKIPS_TILES = False, True, False


def state() -> str | None:
    return None


def supports(p: Problem) -> str | None:
    return None


def working_memory(p: Problem) -> int:
    """Return the bytes of eight (n_q, n_k) arrays of float64 for each head."""
    return 8 * 8 * p.pairs


@np.errstate(all="ignore")
def rounded(p: Problem, x: Outputs) -> Outputs:
    """Round outputs to the dtypes of a call."""
    dtypes = (p.dtype, p.compute, p.compute)
    return Outputs(*(None if a is None else a.astype(dtype) for a, dtype in zip(x[:3], dtypes, strict=True)))


def remainder(exact: Any, out: Any) -> Array:
    """Return what rounding took from an output, in the output's dtype; 0 where that is not finite."""
    with np.errstate(all="ignore"):
        rest = exact - out.astype(exact.dtype)
        return np.where(np.isfinite(rest), rest, 0).astype(out.dtype)


def of_product(p: Problem) -> Problem:
    """Return the problem with the product of query and metric as its query."""
    return replace(p, factors=None)


def forward(p: Problem, rows: range | None = None, into: Outputs | None = None) -> tuple[Outputs, dict[Statistic, Any]]:
    p = of_product(p)
    exact = specification.forward(p)
    outputs = rounded(p, exact)
    if into is not None and into.low is not None:
        outputs = outputs._replace(low=remainder(exact.out, outputs.out))
    named: dict[str, Any] = {"lse": outputs.lse, "entropy": outputs.entropy}
    if any(s.name not in named for s in p.observe):
        P, named = specification.weights(p), specification.statistics(p) | named

    def value(s: Statistic) -> Any:
        arrays = (
            OF_WEIGHTS[type(s)](p, P, named, s.of) if type(s) in OF_WEIGHTS else (named[s.name], p.extents.distances)
        )
        rounded = [
            x.astype(np.int64 if part in s.integers else p.compute) for part, x in zip(s.parts, arrays, strict=False)
        ]
        return s.result(rounded)

    return outputs, {s: value(s) for s in p.observe}


def _top(p: Problem, P: Array, found: dict[str, Any], k: int) -> tuple[Array, Array]:
    index = np.full((*P.shape[:-1], k), -1, np.int64)
    index[..., : p.n_k] = found["order"][..., :k]
    padded = np.concatenate([P, np.zeros((*P.shape[:-1], 1))], axis=-1)
    return np.take_along_axis(padded, index, -1), index


OF_WEIGHTS: dict[type[Statistic], Callable[..., tuple[Array, ...]]] = {
    TopWeights: _top,
    Mass: lambda p, P, found, rule: (specification.mass(p, P, rule),),
    Renyi: lambda p, P, found, alpha: (specification.renyi(p, alpha),),
    Pooled: lambda p, P, found, of: (specification.pooled(P, *of),),
    WeightsOf: lambda p, P, found, rows: (P[..., rows, :],),
}
"""The references of statistics with parameters; `specification.statistics` has the others."""


def weights(p: Problem, lse: Array, rows: range, cols: range) -> Array:
    return specification.weights(of_product(p))[
        ..., np.asarray(rows, dtype=int)[:, None], np.asarray(cols, dtype=int)
    ].astype(p.compute)


def maps(p: Problem, lse: Array, rows: int, cols: int) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        f = specification.terms(of_product(p))
        P = np.where(f.visible, np.exp(f.S.reshape(f.P.shape) - lse.reshape(f.lse.shape)[..., None]), 0)
    P = P.reshape(p.shape(p.n_q, p.n_k))
    mass, largest = (specification.pooled(P, rows, cols, reduce).astype(p.compute) for reduce in ("mass", "max"))
    return mass, largest


@np.errstate(all="ignore")
def fitted(p: Problem, g: Differential) -> Differential:
    """Round each gradient to the dtype of its input."""

    def fit(x: Array | None, like: Array | None) -> Array | None:
        return None if x is None or like is None else x.astype(like.dtype)

    return Differential(
        query=fit(g.query, p.query),
        key=fit(g.key, p.key),
        value=fit(g.value, p.value),
        bias=fit(g.bias, p.bias),
        sink=fit(g.sink, p.sink),
        tables={table: x.astype(table.dtype) for table, x in g.tables.items()},
    )


def backward(p: Problem, outputs: Outputs, ct: Outputs, into: Differential | None = None) -> Differential:
    return fitted(p, specification.gradients(of_product(p), ct))


def jvp(
    p: Problem, t: Differential, outputs: Outputs | None = None, into: Outputs | None = None
) -> tuple[Outputs, Outputs]:
    primal, tangent = specification.jvp(of_product(p), t)
    return outputs or rounded(p, primal), rounded(p, tangent)


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    return fitted(p, specification.gradients_jvp(of_product(p), t, ct, d_ct))


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    return rounded(p, specification.jvp_jvp(of_product(p), t, u))
