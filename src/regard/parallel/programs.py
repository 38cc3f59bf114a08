"""One rank's forward, and the rows that it asks for.

Queries stay, and the keys and values that they see arrive in ascending steps of whole key splits. One process has the
same order, so bits are equal. Gradients are in `gradients`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from regard.core.parts import sliced
from regard.core.problem import CallPart, Carried, Differential, Outputs, Problem
from regard.engines import Engine
from regard.engines.normalized import too_large
from regard.parallel.dealing import Deal
from regard.parallel.sight import TILE, Sight

Array = np.ndarray[Any, np.dtype[Any]]
Form = tuple[tuple[int, ...], Any]


class Exchange(NamedTuple):
    """A step in which each rank gives its part of some rows, and is sent those of others.

    Like a `Transfer`, it is answered by a function, which waits for what was sent.

    local: this rank's own rows of each array, (..., n, width). deal: who has which rows. rows: those of this step.
    wanted: (ranks, tiles of the step), the tiles that each rank is sent; what it did not ask for is 0.
    """

    local: Mapping[str, Array]
    deal: Deal
    rows: range
    wanted: Array

    def rows_for(self, rank: int) -> Array:
        """Return True for the rows of this step that a rank is sent."""
        first = self.rows.start % TILE
        return np.repeat(self.wanted[rank], TILE)[first : first + len(self.rows)]


class Transfer(NamedTuple):
    """Arrays that ranks send each other: those for each other rank, and shape and dtype of those from each."""

    sent: Mapping[int, Sequence[Array]]
    expected: Mapping[int, Sequence[Form]]


Arriving = Callable[[], Any]
Program = Generator[Exchange | Transfer, Any, Any]


@dataclass(frozen=True, eq=False)
class Rank:
    """One rank of a call.

    whole: the call as one process would have it; its query, key and value are only asked for shapes. query, key, value:
    the rows of this rank, (..., h, n, d).
    """

    whole: Problem
    engine: Engine
    sight: Sight
    rank: int
    query: Array
    key: Array
    value: Array

    def forward(self, low: bool = False) -> Program:
        """Return `Outputs` of this rank's queries.

        low: with what rounding takes from the output.
        """
        p, deal = self.whole, self.sight.row_deal
        n = deal.size(self.rank)
        shape = (*p.lead, p.heads, n)
        out, lse = np.empty((*shape, p.d_v), p.dtype), np.empty(shape, p.compute)
        entropy = np.empty(shape, p.compute) if p.observe else None
        rest = np.empty_like(out) if low else None

        def compute(run: int, own: slice, part: Problem, keys: Mapping[str, Array]) -> None:
            into = None if rest is None else Outputs(None, None, None, part.new_output())
            outputs, _ = self.engine.forward(part, None, into)
            if ends(part):
                whole = Outputs(out, lse, entropy, rest)
                for name, width in (("out", 2), ("lse", 1), ("entropy", 1), ("low", 2)):
                    x = getattr(whole, name)
                    if x is not None:
                        x[(..., own, slice(None))[: width + 1]] = getattr(outputs, name)

        yield from self._queries(compute)
        return Outputs(out, lse, entropy, rest)

    def tangent(self, outputs: Outputs, t: Differential) -> Program:
        """Return the tangents of the outputs of this rank's queries.

        t: tangents of the inputs; those of query, key and value have the rows of this rank.
        """
        p, n = self.whole, self.sight.row_deal.size(self.rank)
        shape = (*p.lead, p.heads, n)
        out, lse = np.empty((*shape, p.d_v), p.dtype), np.empty(shape, p.compute)
        d = Outputs(out, lse, None if outputs.entropy is None else np.empty_like(lse))

        def compute(run: int, own: slice, part: Problem, keys: Mapping[str, Array]) -> None:
            first = self.sight.row_deal.runs[self.rank][run].start, part.origin[2] - p.origin[2]
            some = (range(a, a + size) for a, size in zip(first, (part.n_q, part.n_k), strict=True))
            bias = None if t.bias is None else bias_part(t.bias, *some)
            query = None if t.query is None else t.query[..., own, :]
            along = replace(t, query=query, key=keys.get("tkey"), value=keys.get("tvalue"), bias=bias)
            tangents = self.engine.jvp(part, along, _rows(outputs, own))[1]
            if ends(part):
                for name, width in (("out", 2), ("lse", 1), ("entropy", 1)):
                    x = getattr(d, name)
                    if x is not None:
                        x[(..., own, slice(None))[: width + 1]] = getattr(tangents, name)

        moving = {f"t{name}": x for name in ("key", "value") if (x := getattr(t, name)) is not None}
        yield from self._queries(compute, moving)
        return d

    def _queries(self, compute: Any, moving: Mapping[str, Array] | None = None) -> Program:
        """Call `compute` with each run of queries and each step of keys that it sees, in order.

        moving: more arrays of this rank's keys, (..., h, n, width).
        """
        p, sight, deal = untrained(self.whole), self.sight, self.sight.row_deal
        runs, slices = deal.runs[self.rank], deal.locals(self.rank)
        live = sight.key_runs[deal.owners() == self.rank]
        sums: list[dict[str, Array]] = [{} for _ in runs]

        local = {"key": self.key, "value": self.value, **(moving or {})}

        def one(m: int, keys: range, x: Mapping[str, Array], first: bool, last: bool) -> None:
            part = CallPart(p.n_q, p.keys, Carried(first, last, sums[m]), None, p.bias_axes)
            rows = self.query[..., slices[m], :]
            compute(m, slices[m], part_of(p, part, runs[m], keys, rows, x["key"], x["value"]), x)

        seen = [(number, keys, sight.wanted(keys)) for number, keys in enumerate(sight.key_steps)]
        seen = [x for x in seen if x[-1].any()]
        arriving: list[Arriving] = []
        for n, (number, keys, _) in enumerate(seen):
            for _, later, wanted in seen[n + len(arriving) : n + 2]:  # the next keys are sent while some are computed
                arriving.append((yield Exchange(local, sight.key_deal, later, wanted)))
            arrays = arriving.pop(0)()
            for m in np.flatnonzero(live[:, number]).tolist():
                first, last = not live[m, :number].any(), not live[m, number + 1 :].any()
                one(m, keys, arrays, first, last)
        for m in np.flatnonzero(~live.any(axis=1)).tolist():
            one(m, range(0), {name: x[..., :0, :] for name, x in local.items()}, True, True)


def part_of(p: Problem, part: CallPart, rows: range, keys: range, query: Array, key: Array, value: Array) -> Problem:
    """Return the problem of some rows and some keys of a whole call."""
    return replace(
        p,
        query=query,
        key=key,
        value=value,
        offset=p.offset + rows.start,
        origin=(*p.origin[:2], p.origin[2] + keys.start),
        positions_first=False,
        factors=None,
        part=part,
        **sliced(p, {"pairs": lambda x: bias_part(x, rows, keys)}),
    )


def bias_part(x: Array, rows: range, keys: range) -> Array:
    """Return the entries of a bias or mask for some rows and keys; axes along which it broadcasts stay."""
    sizes = (1, 1, *x.shape)[-2:]
    some = [slice(y.start, y.stop) if n > 1 else slice(None) for y, n in zip((rows, keys), sizes, strict=True)]
    return x[(..., *some[2 - min(2, x.ndim) :])]


def untrained(p: Problem) -> Problem:
    """Return a call whose bias and tables get no gradient."""
    return replace(p, constants=p.constants | {"bias", *p.rules.tables})


def ends(p: Problem) -> bool:
    """Return whether a part of a call is the last of its rows."""
    return p.part is not None and p.part.query is not None and p.part.query.last


def _rows(x: Outputs, rows: slice) -> Outputs:
    """Return some rows of outputs or cotangents."""
    out, low = (None if a is None else a[..., rows, :] for a in (x.out, x.low))
    lse, entropy = (None if a is None else np.ascontiguousarray(a[..., rows]) for a in (x.lse, x.entropy))
    return Outputs(out, lse, entropy, low)


def columns(prefix: str, x: Outputs) -> dict[str, Array]:
    """Return outputs as arrays (..., h, n, width) by name."""
    named = {"out": x.out, "low": x.low}
    named |= {name: None if a is None else a[..., None] for name, a in (("lse", x.lse), ("entropy", x.entropy))}
    return {prefix + name: a for name, a in named.items() if a is not None}


def outputs_of(prefix: str, given: Mapping[str, Array]) -> Outputs:
    """Return the outputs that `columns` named."""
    out, low = (given.get(prefix + name) for name in ("out", "low"))
    columns = (given.get(prefix + name) for name in ("lse", "entropy"))
    lse, entropy = (None if x is None else np.ascontiguousarray(x[..., 0]) for x in columns)
    return Outputs(out, lse, entropy, low)


def check_lse(lse: Array | None) -> None:
    """Raise for an lse next to which weights have lost half of their digits: a part cannot correct them."""
    assert lse is not None
    large = too_large(lse)
    if large.any():
        raise ValueError(
            f"gradients over several ranks need scores of at most {np.finfo(lse.dtype).eps ** -0.5:.3g}, got an lse of "
            f"{float(np.abs(lse[large]).max()):.3g}: "
            "hide keys with a mask instead of large negative scores"
        )
