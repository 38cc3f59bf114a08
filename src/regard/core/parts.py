"""Problems derived from a problem: its scores alone, or a part of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import Problem, of_kind
from regard.rules import Mask, as_score, compose, rebuild

Array = np.ndarray[Any, np.dtype[Any]]


def scores_alone(p: Problem, mask: Mask | None = None) -> Problem:
    """Return the problem without values, and without what follows its scores: sinks, dropout and statistics.

    mask: replaces the problem's mask.
    """
    mask = p.mask if mask is None else mask
    return p.without("denominators", "weights", "results", mask=mask, value=p.value[..., :0])


def scores_times(p: Problem, factor: float) -> Problem:
    """Return `scores_alone` with all scores times a positive factor.

    A bias is copied.
    """
    p = scores_alone(p)
    if p.score is not None:
        p = replace(p, score=compose([p.score, as_score(lambda s, b, h, i, j: s * factor)]))
    else:
        p = replace(p, scale=p.scale * factor)
    return p if p.bias is None else replace(p, bias=_times(p, p.bias, factor))


def _times(p: Problem, x: Array, factor: float) -> Array:
    """Return x times a factor in the dtype of sums, on the device of x."""
    if p.device is None:
        product: Array = x.astype(p.compute) * p.compute.type(factor)
        return product
    from regard.core.tensors import array, converted, tensor

    return array(tensor(converted(x, p.compute)) * factor)


def part_of(p: Problem, b: int = 0, h: int | None = 0, rows: slice = slice(None), cols: slice = slice(None)) -> Problem:
    """Return the scores of one head, or all, over adjacent rows and keys, as views.

    b: row-major index of a batch element. h: a head, None for all. Rows and keys keep their positions in the whole. A
    rule that reads the number of keys counts those to the end of the part. Dropout and statistics are left out.
    """
    assert p.part is None
    at = tuple(int(x) for x in np.unravel_index(b, p.lead)) if p.lead else ()
    head, kv = slice(None), slice(None)
    if h is not None:
        head, kv = slice(h, h + 1), slice(h // p.group, h // p.group + 1)
    first, first_key = range(p.n_q)[rows].start, range(p.n_k)[cols].start
    slices: dict[str, Callable[[Array], Array]] = {
        "rows": lambda x: p.leading(x, 3)[at][head, rows],
        "keys": lambda x: p.leading(x, 3)[at][kv, cols],
        "batch": lambda x: x[b : b + 1],
        "pairs": lambda x: p.dense(x)[at][head, rows, cols],
        "heads": lambda x: np.broadcast_to(x, (p.heads,))[head],
    }
    part = p.without("weights", "results", lead=(), factors=None, **sliced(p, slices))
    origin = (p.origin[0] + b, p.origin[1] + (h or 0), p.origin[2] + first_key)
    return replace(part, offset=part.offset + first, origin=origin)


def sliced(p: Problem, slices: dict[str, Callable[[Array], Array]]) -> dict[str, Any]:
    """Return the parts of a problem's arrays by field, and its rules with parts of their dense arrays.

    slices: for each kind of fields, a function from an array to its part. That of "pairs" slices dense arrays too.
    """

    def rule(x: Any) -> Any:
        dense = {id(array): slices["pairs"](array) for array in x.dense}
        return replace(x, node=rebuild(x.node, dense)) if dense else x

    of_kinds = (slices | {"rule": rule}).items()
    fields = {name: (part, getattr(p, name)) for kind, part in of_kinds for name in of_kind(kind)}
    return {name: part(x) for name, (part, x) in fields.items() if x is not None}
