"""Problems derived from a problem: its scores alone, or a part of it."""

from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import FIELDS, Problem
from regard.rules import Mask, as_score, compose, rebuild

Array = np.ndarray[Any, np.dtype[Any]]


def scores_alone(p: Problem, mask: Mask | None = None) -> Problem:
    """Return the problem without sink, dropout, values and statistics.

    mask: replaces the problem's mask.
    """
    return replace(
        p,
        mask=p.mask if mask is None else mask,
        value=p.value[..., :0],
        sink=None,
        dropout=0.0,
        positions_first=False,
        observe=(),
    )


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
        found: Array = x.astype(p.compute) * p.compute.type(factor)
        return found
    from regard.core.tensors import array, converted, tensor

    return array(tensor(converted(x, p.compute)) * factor)


def part_of(p: Problem, b: int = 0, h: int | None = 0, rows: slice = slice(None), cols: slice = slice(None)) -> Problem:
    """Return the scores of one head, or all, over adjacent rows and keys, as views.

    b: row-major index of a batch element. h: a head, None for all. Rows and keys keep their positions in the whole. A
    rule that reads the number of keys counts those to the end of the part. Dropout and statistics are left out.

    Raises ValueError for a call with an optional field that is not known here: it could be an array, to be sliced.
    """
    if unknown := p.used - FIELDS:
        raise ValueError(f"a part of a call does not know {', '.join(map(repr, sorted(unknown)))}")
    at = tuple(int(x) for x in np.unravel_index(b, p.lead)) if p.lead else ()
    head, kv = slice(None), slice(None)
    if h is not None:
        head, kv = slice(h, h + 1), slice(h // p.group, h // p.group + 1)
    first, first_key = range(p.n_q)[rows].start, range(p.n_k)[cols].start

    def pairs(x: Array) -> Array:
        found: Array = p.dense(x)[at][head, rows, cols]
        return found

    def rule(x: Any) -> Any:
        dense = {id(array): pairs(array) for array in x.dense} if x is not None else {}
        return replace(x, node=rebuild(x.node, dense)) if dense else x

    return replace(
        p,
        query=p.leading(p.query, 3)[at][head, rows],
        key=p.leading(p.key, 3)[at][kv, cols],
        value=p.leading(p.value, 3)[at][kv, cols],
        lead=(),
        mask=rule(p.mask),
        score=rule(p.score),
        bias=None if p.bias is None else pairs(p.bias),
        sink=None if p.sink is None else np.broadcast_to(p.sink, (p.heads,))[head],
        dropout=0.0,
        offset=p.offset[b : b + 1] + first,
        origin=(p.origin[0] + b, p.origin[1] + (h or 0), p.origin[2] + first_key),
        positions_first=False,
        factors=None,
        observe=(),
    )
