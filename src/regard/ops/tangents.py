"""Outputs, cotangents and tangents that a caller gives: checked, and converted to (..., h, n, d) and back."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core import checks, rowsums
from regard.core.layout import Layout
from regard.core.options import ARRAYS
from regard.core.problem import Differential, Outputs, Problem
from regard.core.statistics import Seen
from regard.rules import Table, type_name

NDArray = np.ndarray[Any, np.dtype[Any]]


def outputs_in(p: Problem, arranged: Layout, label: str, x: Outputs, lse_dtype: np.dtype[Any] | None = None) -> Outputs:
    """Check outputs, cotangents or their tangents, and convert their layout.

    label: how messages name one of them, such as "d{}". lse_dtype: the required dtype of lse and
    entropy, if any.
    """
    if x.low is not None:
        raise ValueError(f"{label.format('low')} must be None: only outputs= have what rounding took")
    rows = arranged.per_head_shape(p.shape(p.n_q))
    out = None if x.out is None else checks.shaped(label.format("out"), x.out, arranged.out_shape(p), p.dtype)
    lse, entropy = (
        None if a is None else arranged.rows_to_bhn(checks.shaped(label.format(name), a, rows, lse_dtype))
        for name, a in (("lse", x.lse), ("entropy", x.entropy))
    )
    return Outputs(None if out is None else arranged.to_bhnd(out), lse, entropy)


def low_in(p: Problem, arranged: Layout, x: NDArray | None) -> NDArray | None:
    """Check what rounding took from the output that the caller gives, and convert its layout."""
    return None if x is None else arranged.to_bhnd(checks.shaped("outputs.low", x, arranged.out_shape(p), p.dtype))


def known_outputs(
    p: Problem, arranged: Layout, outputs: Outputs | tuple[Any, ...] | None, entropy_for: str | None = None
) -> Outputs | None:
    """Check the outputs that the caller gives.

    entropy_for: the argument that needs the entropy, if any. Derivatives take the weights from lse,
    so it is compared with the scores. Of the output and the entropy only shape and dtype are
    checked.
    """
    if outputs is None:
        return None
    if type(outputs) is tuple and len(outputs) in (2, 3) and isinstance(outputs[-1], Seen):
        seen = outputs[-1]
        outputs = Outputs(outputs[0], seen.get("lse"), seen.get("entropy"))
    elif not isinstance(outputs, Outputs):
        expected = 'a regard.Outputs, or the (out, seen) of attention(..., observe=["lse"])'
        raise TypeError(f"outputs must be {expected}, got {type_name(outputs)}")
    for name, needs in (("out", "a derivative"), ("lse", "a derivative"), ("entropy", entropy_for)):
        if needs is not None and getattr(outputs, name) is None:
            raise ValueError(f"outputs.{name} is None, but {needs} needs it")
    low = low_in(p, arranged, outputs.low)
    known = outputs_in(p, arranged, "outputs.{}", outputs._replace(low=None), p.compute)._replace(low=low)
    assert known.lse is not None
    rowsums.require("outputs.lse", p, known.lse, pairs=p.pairs)
    return known


def tangents_in(
    p: Problem, arranged: Layout, tangents: Differential | None, dquery: NDArray | None, dkey: NDArray | None,
    dvalue: NDArray | None, dbias: NDArray | None, dsink: NDArray | None, dtables: Mapping[Table, NDArray] | None,
    dmetric: NDArray | None,
) -> Differential:  # fmt: skip
    """Check the tangents of inputs, given together or one by one."""
    single = {
        "query": dquery, "key": dkey, "value": dvalue, "bias": dbias, "sink": dsink, "tables": dtables,
        "metric": dmetric,
    }  # fmt: skip
    given: dict[str, Any] = {name: x for name, x in single.items() if x is not None}
    if tangents is None:
        return differential_in(p, arranged, "d{}", Differential(**given))
    if given:
        names = ", ".join(f"d{name}" for name in given)
        raise TypeError(f"tangents holds the tangents of all inputs: give it or {names}, not both")
    return differential_in(p, arranged, "tangents.{}", checks.instance("tangents", tangents, Differential))


def differential_in(p: Problem, arranged: Layout, label: str, t: Differential) -> Differential:
    """Check the caller's tangents, and convert their layout.

    label: as in `outputs_in`.
    """
    turned: dict[str, NDArray | None] = {}
    for name in ("query", "key", "value"):
        x, shape = getattr(t, name), arranged.from_bhnd(getattr(p, name)).shape
        turned[name] = None if x is None else arranged.to_bhnd(checks.shaped(label.format(name), x, shape, p.dtype))
    for name in (*ARRAYS, "metric"):
        x, like = getattr(t, name), getattr(p, name)
        if x is not None and like is None:
            raise ValueError(f"{label.format(name)} is given, but this call has no {name}")
        turned[name] = None if x is None else checks.shaped(label.format(name), x, like.shape)
    tables = label.format("tables")
    if not isinstance(t.tables, Mapping):
        raise TypeError(f"{tables} must map tables to their tangents, got {type_name(t.tables)}")
    for table, x in t.tables.items():
        if table not in p.rules.tables:
            raise ValueError(f"{tables}: {table!r} is not a float table of this call's score")
        checks.shaped(f"{tables}[{table!r}]", x, table.shape)
    return Differential(**turned, tables=dict(t.tables))


def differential_out(arranged: Layout, g: Differential) -> Differential:
    """Convert gradients, or their tangents, to the caller's layout."""
    q, k, v = (None if x is None else arranged.from_bhnd(x) for x in (g.query, g.key, g.value))
    return replace(g, query=q, key=k, value=v)
