"""What one rank computes, and the rows that it asks for.

Forward and the gradient of the query: a rank's queries stay, and the keys and values that they see pass by in ascending
steps of whole key splits. Gradients of key and value: a rank's keys stay, and the queries that see them pass by with
their outputs, in descending steps of whole query blocks. Both are the orders of one process, so the bits are too.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from regard.core.problem import KEY_STEP, ROW_STEP, CallPart, Differential, Outputs, Problem
from regard.engines import Engine
from regard.engines.normalized import too_large
from regard.parallel.dealing import Deal, steps
from regard.parallel.sight import TILE, Sight
from regard.rules import rebuild

Array = np.ndarray[Any, np.dtype[Any]]


class Exchange(NamedTuple):
    """A step in which each rank gives its part of some rows, and is sent those of others.

    local: this rank's own rows of each array, (..., n, width). deal: who has which rows. rows: those of this step.
    wanted: (ranks, tiles of the step), the tiles that each rank is sent; what it did not ask for is 0.
    """

    local: Mapping[str, Array]
    deal: Deal
    rows: range
    wanted: Array


Program = Generator[Exchange, dict[str, Array], Any]


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

        def compute(run: int, own: slice, part: Problem) -> None:
            into = None if rest is None else Outputs(None, None, None, part.new_output())
            found, _ = self.engine.forward(part, None, into)
            if part.part is not None and part.part.last:
                whole = Outputs(out, lse, entropy, rest)
                for name, width in (("out", 2), ("lse", 1), ("entropy", 1), ("low", 2)):
                    x = getattr(whole, name)
                    if x is not None:
                        x[(..., own, slice(None))[: width + 1]] = getattr(found, name)

        yield from self._queries(compute)
        return Outputs(out, lse, entropy, rest)

    def query_gradient(self, outputs: Outputs, ct: Outputs) -> Program:
        """Return the gradient of the query, and the rows (..., h, n) whose sum is that of the sink, if there is one."""
        p, n = self.whole, self.sight.row_deal.size(self.rank)
        dq = np.empty((*p.lead, p.heads, n, p.d), p.dtype)
        sink = None if p.sink is None else np.empty((*p.lead, p.heads, n), p.compute)
        check_lse(outputs.lse)

        def compute(run: int, own: slice, part: Problem) -> None:
            g = self.engine.backward(part, _rows(outputs, own), _rows(ct, own))
            if part.part is not None and part.part.last:
                dq[..., own, :] = g.query
                if sink is not None:
                    sink[..., own] = part.part.sums["sink"].reshape(*p.lead, p.heads, -1)

        yield from self._queries(compute, "query")
        return dq, sink

    def key_gradients(self, outputs: Outputs, ct: Outputs) -> Program:
        """Return a `Differential` with the gradients of this rank's keys and values."""
        p, sight = self.whole, self.sight
        local = {"query": self.query, **_columns("", outputs), **_columns("d", ct)}
        own_runs = np.flatnonzero(sight.key_deal.owners() == self.rank)
        live, key_slices = sight.row_runs[own_runs], sight.key_deal.locals(self.rank)
        n = sight.key_deal.size(self.rank)
        dk, dv = (np.zeros((*p.lead, p.kv_heads, n, width), p.dtype) for width in (p.d, p.d_v))
        sums: list[dict[str, Array]] = [{} for _ in own_runs]
        row_steps = steps(p.n_q, ROW_STEP)
        for number in range(len(row_steps) - 1, -1, -1):
            rows = row_steps[number]
            wanted = sight.rows[:, rows.start // TILE : -(-rows.stop // TILE)]
            if not wanted.any():
                continue
            given = yield Exchange(local, sight.row_deal, rows, wanted)
            for m in np.flatnonzero(live[:, number]).tolist():
                first, last = not live[m, number + 1 :].any(), not live[m, :number].any()
                part = CallPart(p.n_q, p.keys, first, last, "key", sums[m])
                own, run = key_slices[m], sight.key_deal.runs[self.rank][m]
                problem = part_of(p, part, rows, run, given["query"], self.key[..., own, :], self.value[..., own, :])
                g = self.engine.backward(problem, _outputs("", given), _outputs("d", given))
                if last:
                    dk[..., own, :], dv[..., own, :] = g.key, g.value
        return Differential(key=dk, value=dv)

    def _queries(self, compute: Any, gradients: str = "") -> Program:
        """Call `compute` with each run of queries and each step of keys that it sees, in order."""
        p, sight, deal = self.whole, self.sight, self.sight.row_deal
        runs, slices = deal.runs[self.rank], deal.locals(self.rank)
        live = sight.key_runs[deal.owners() == self.rank]
        sums: list[dict[str, Array]] = [{} for _ in runs]

        def one(m: int, keys: range, k: Array, v: Array, first: bool, last: bool) -> None:
            part = CallPart(p.n_q, p.keys, first, last, gradients, sums[m])
            compute(m, slices[m], part_of(p, part, runs[m], keys, self.query[..., slices[m], :], k, v))

        for number, keys in enumerate(steps(p.n_k, KEY_STEP)):
            wanted = sight.keys[:, keys.start // TILE : -(-keys.stop // TILE)]
            if not wanted.any():
                continue
            given = yield Exchange({"key": self.key, "value": self.value}, sight.key_deal, keys, wanted)
            for m in np.flatnonzero(live[:, number]).tolist():
                first, last = not live[m, :number].any(), not live[m, number + 1 :].any()
                one(m, keys, given["key"], given["value"], first, last)
        for m in np.flatnonzero(~live.any(axis=1)).tolist():
            one(m, range(0), self.key[..., :0, :], self.value[..., :0, :], True, True)


def part_of(p: Problem, part: CallPart, rows: range, keys: range, query: Array, key: Array, value: Array) -> Problem:
    """Return the problem of some rows and some keys of a whole call."""

    def pairs(x: Array) -> Array:
        return p.dense(x)[..., rows.start : rows.stop, keys.start : keys.stop]

    def rule(x: Any) -> Any:
        dense = {id(array): pairs(array) for array in x.dense} if x is not None else {}
        return replace(x, node=rebuild(x.node, dense)) if dense else x

    return replace(
        p,
        query=query,
        key=key,
        value=value,
        mask=rule(p.mask),
        score=rule(p.score),
        bias=None if p.bias is None else pairs(p.bias),
        offset=p.offset + rows.start,
        origin=(*p.origin[:2], p.origin[2] + keys.start),
        positions_first=False,
        factors=None,
        constants=p.constants | {"bias", *p.rules.tables},
        part=part,
    )


def _rows(x: Outputs, rows: slice) -> Outputs:
    """Return some rows of outputs or cotangents."""
    out, low = (None if a is None else a[..., rows, :] for a in (x.out, x.low))
    lse, entropy = (None if a is None else a[..., rows] for a in (x.lse, x.entropy))
    return Outputs(out, lse, entropy, low)


def _columns(prefix: str, x: Outputs) -> dict[str, Array]:
    """Return outputs as arrays (..., h, n, width) by name."""
    named = {"out": x.out, "low": x.low}
    named |= {name: None if a is None else a[..., None] for name, a in (("lse", x.lse), ("entropy", x.entropy))}
    return {prefix + name: a for name, a in named.items() if a is not None}


def _outputs(prefix: str, given: Mapping[str, Array]) -> Outputs:
    """Return the outputs that `_columns` named."""
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
