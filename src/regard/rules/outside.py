"""Indices outside of a table, found before any work: one made with ``bounds="raise"``, or one read at an index alone.

A lookup counts only where its value can matter. That is for pairs that the mask allows, and in the branch of a `where`
that is taken. On the right of ``&`` (``|``) it is where the left is true (false), as in Python's ``and`` (``or``).
Intervals over the indices of a call bound its index. Where they do not decide, ranges are halved until they do, or
until they are small enough to evaluate every pair. So there is no false alarm, and no index is missed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.rules.expression import Array, At, Node, build, evaluate, literal, once, order, reads
from regard.rules.intervals import Ranges, interval
from regard.rules.masks import Requirement, Rule

SIDE = 16  # boxes with at most this many indices on each axis are evaluated pair by pair
MOST = 2**17  # maximum open boxes: beyond, a search ends without an answer

Box = Sequence[tuple[int, int]]  # least and greatest index, both included: of b, h, i and j


class Lookup(NamedTuple):
    """One axis of a lookup in a table.

    outside: true where its index is not in the table. needed: true where it is read (None: everywhere).
    """

    table: Any
    axis: int
    entry: Node
    outside: Node
    needed: Node | None


@once
def lookups(node: Node) -> tuple[Lookup, ...]:
    """Return the lookups of an expression in tables with ``bounds="raise"``."""
    steps = order([node])
    if not any(x.op == "gather" and x.payload.bounds == "raise" for x in steps):
        return ()
    needed: dict[Node, Node | None] = {node: None}
    leaving = []
    for x in reversed(steps):
        here = needed[x]
        for n, arg in enumerate(x.args):
            there = here
            if n and x.op == "where":
                there = _both(here, x.args[0] if n == 1 else build("invert", x.args[0]))
            elif n and x.op in ("bitwise_and", "bitwise_or") and x.kind == "bool":
                there = _both(here, x.args[0] if x.op == "bitwise_and" else build("invert", x.args[0]))
            if arg in needed:
                other = needed[arg]
                there = None if there is None or other is None else build("bitwise_or", there, other)
            needed[arg] = there
        if x.op == "gather" and x.payload.bounds == "raise":
            for axis, (index, length) in enumerate(zip(x.args, x.payload.shape, strict=True)):
                below, beyond = (
                    build("less", index, literal(0, "int")),
                    build("less", literal(length - 1, "int"), index),
                )
                leaving.append(Lookup(x.payload, axis, index, build("bitwise_or", below, beyond), here))
    return tuple(leaving)


@once
def read_alone(node: Node) -> tuple[tuple[Any, int, Any], ...]:
    """Return the tables without `bounds`, each with an axis of several entries that is read at b, h or i alone."""
    return tuple(
        (x.payload, axis, index.op)
        for x in order([node])
        if x.op == "gather" and x.payload.bounds is None
        for axis, (index, length) in enumerate(zip(x.args, x.payload.shape, strict=False))  # a leaf of JAX may be any
        if index.op in ("b", "h", "i") and length > 1
    )


def ends(rule: Rule) -> Iterator[Requirement]:
    """Yield the ranges along "b" and "h" that a whole call has to fill: a longer table belongs to a larger call."""
    yield from (need for need in rule.requires if need.axis in "bh" and need.length > 1)
    for table, axis, index in read_alone(rule.node):
        if index in "bh":
            yield Requirement(rule.text, f"axis {axis} of a {table!r}", index, table.shape[axis])


def _both(a: Node | None, b: Node | None) -> Node | None:
    return b if a is None else a if b is None else build("bitwise_and", a, b)


def check(
    text: str,
    node: Node,
    guard: Node | None,
    boxes: Callable[[frozenset[str]], Iterator[Box]],
    dense: Callable[[Array, Sequence[Any]], Array],
    keys: int,
    dtype: Any,
) -> None:
    """Raise ValueError if a lookup leaves its table for a visible pair of a call.

    Raises TypeError if that cannot be known. guard: the pairs that count, None for all. boxes: maps the leaves that an
    expression reads to boxes of the call's indices, each taken as a whole. dense: returns the values of a dense array
    at indices.
    """
    for lookup in lookups(node):
        what = f"{text}, which looks up a {lookup.table!r} with bounds='raise'"
        fault = _both(_both(guard, lookup.needed), lookup.outside)
        assert fault is not None
        for box in boxes(reads(lookup.outside, fault)):
            if not _unknown(lookup.outside) and not interval(lookup.outside, _ranges(box, keys, dtype)).hi:
                continue
            for x in order([fault]):
                if _unknown_here(x):
                    raise TypeError(f"{what}: its index depends on values that are not known before the call; {CLAMP}")
            at = _search(what, fault, box, dense, keys, dtype)
            if at is not None:
                b, h, i, j = (int(x) for x in at)
                indices = At(*at, dtype=dtype, keys=keys, dense=lambda x, at=at: dense(x, at))  # type: ignore[misc]
                entry = int(evaluate([lookup.entry], indices)[0])
                raise ValueError(
                    f"{what}: axis {lookup.axis} is read at {entry}, outside of 0 to "
                    f"{lookup.table.shape[lookup.axis] - 1}, for b = {b}, h = {h}, i = {i}, j = {j}"
                )


CLAMP = "give bounds='clamp', or keep the index inside with np.clip"


def _unknown_here(x: Node) -> bool:
    """Return True if a node has no value before the call: a score, or a traced array."""
    if x.op in ("s", "ds"):
        return True
    if x.op == "gather":
        return x.payload.known is None
    return x.op == "dense" and type(x.payload) is not np.ndarray


def _unknown(node: Node) -> bool:
    return any(map(_unknown_here, order([node])))


def _ranges(box: Any, keys: int, dtype: Any) -> Ranges:
    b, h, i, j = (tuple(bound) for bound in box)
    return Ranges(b=b, h=h, i=i, j=j, keys=keys, dtype=dtype)


def _search(
    what: str, fault: Node, box: Box, dense: Callable[[Array, Sequence[Any]], Array], keys: int, dtype: Any
) -> Any:
    """Return indices (b, h, i, j) in a box at which `fault` is true, or None."""
    read = reads(fault)
    whole = "dense" in read
    # Along an axis that is not read one index represents all.
    ends = [(low, high if whole or axis in read else low) for axis, (low, high) in zip("bhij", box, strict=True)]
    boxes = np.array(ends, np.int64)[..., None]  # (4, 2, boxes)
    while boxes.shape[-1]:
        if boxes.shape[-1] > MOST:
            raise ValueError(f"{what}: this call is too large to find out whether its index leaves the table; {CLAMP}")
        bounds = interval(fault, _ranges(boxes, keys, dtype))
        lo, hi = (np.broadcast_to(x, boxes.shape[-1:]) for x in bounds[:2])
        if lo.any():
            return boxes[:, 0, int(lo.argmax())]
        boxes = boxes[..., hi != 0]
        sizes = boxes[:, 1] - boxes[:, 0] + 1
        small = (sizes <= SIDE).all(0)
        at = _look(fault, boxes[..., small], dense, keys, dtype)
        if at is not None:
            return at
        boxes, sizes = boxes[..., ~small], sizes[:, ~small]
        axis, n = sizes.argmax(0), np.arange(boxes.shape[-1])
        middle = boxes[axis, 0, n] + sizes[axis, n] // 2
        left, right = boxes.copy(), boxes.copy()
        left[axis, 1, n], right[axis, 0, n] = middle - 1, middle
        boxes = np.concatenate([left, right], -1)
    return None


def _look(fault: Node, boxes: Array, dense: Any, keys: int, dtype: Any) -> Any:
    """Return indices in small boxes where `fault` is true, or None.

    Every pair is evaluated.
    """
    for start in range(0, boxes.shape[-1], 256):
        some = boxes[..., start : start + 256]
        at = []
        for axis in range(4):
            width = int((some[axis, 1] - some[axis, 0]).max()) + 1
            indices = np.minimum(
                some[axis, 0] + np.arange(width)[:, None], some[axis, 1]
            )  # clamped: the last index repeats
            at.append(indices.T.reshape(-1, *(width if n == axis else 1 for n in range(4))))
        grid = At(*at, dtype=dtype, keys=keys, dense=lambda x, at=at: dense(x, at))  # type: ignore[misc]
        wrong = np.broadcast_to(evaluate([fault], grid)[0], grid.shape)
        if wrong.any():
            place = np.unravel_index(int(wrong.argmax()), wrong.shape)
            return [np.broadcast_to(x, wrong.shape)[place] for x in at]
    return None
