"""Gradients of all inputs, or their tangents, on one rank: the tasks of a `GradientPipeline` in turn.

Results are those of one process to the bit, except for gradients of tables: those of ranks are added in their order.
Gradients of bias, sink and tables are whole on every rank, as these inputs are.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from regard.core.problem import CallPart, Carried, Differential, Outputs, Problem, collapse
from regard.engines import Engine
from regard.parallel.dealing import Deal
from regard.parallel.pipeline import GradientPipeline, Move, RankTask
from regard.parallel.programs import (
    Arriving,
    Exchange,
    Form,
    Program,
    Transfer,
    bias_part,
    columns,
    outputs_of,
    part_of,
)
from regard.parallel.unordered import UnorderedGradients

Array = np.ndarray[Any, np.dtype[Any]]


Transfers = Generator[Transfer, Callable[[], Mapping[int, Sequence[Array]]], Any]


@dataclass(frozen=True, eq=False)
class GradientDirection:
    """A direction of the inputs, along which gradients change.

    t: tangents of the inputs; those of query, key and value have the rows of a rank. outputs: the tangents of outputs
    along t. ct: those of the cotangents.
    """

    t: Differential
    outputs: Outputs
    ct: Outputs


@dataclass(frozen=True, eq=False)
class RankGradients:
    """The gradients on one rank.

    whole, engine, rank: as in `Rank`. rows, keys: this rank's arrays (..., h, n, width) by name, as `operands` makes
    them. along: the direction of their tangents, None for gradients.
    """

    whole: Problem
    engine: Engine
    plan: GradientPipeline
    rank: int
    rows: Mapping[str, Array]
    keys: Mapping[str, Array]
    along: GradientDirection | None = None

    @classmethod
    def of(
        cls, whole: Problem, engine: Engine, plan: GradientPipeline, rank: int, operands: Sequence[Array],
        outputs: Outputs, ct: Outputs, along: GradientDirection | None = None,
    ) -> "RankGradients":  # fmt: skip
        """Return the gradients of ⟨ct, outputs⟩, or their tangents along a direction.

        operands: query, key and value, the rows of this rank, as those of outputs and ct.
        """
        query, key, value = operands
        rows = {"query": query, **columns("", outputs), **columns("d", ct)}
        keys = {"key": key, "value": value}
        if along is not None:
            rows |= columns("t", along.outputs) | columns("dt", along.ct)
            direction = {name: getattr(along.t, name) for name in ("query", "key", "value")}
            rows |= {"tquery": direction["query"]} if direction["query"] is not None else {}
            keys |= {f"t{name}": direction[name] for name in keys if direction[name] is not None}
        return cls(whole, engine, plan, rank, rows, keys, along)

    def run(self, storage: Deal) -> Program:
        """Return a `Differential`.

        storage: the rows that this rank has, and is given the gradient of the query for.
        """
        plan = self.plan
        rows = yield from redealt(self.rows, self.rank, storage, plan.row_deal.runs)
        work = RankTasks(self, rows)
        yield from (work.unordered(plan) if isinstance(plan, UnorderedGradients) else work.in_order())
        work.compute_blind()
        dq = yield from redealt({"query": work.dq}, self.rank, plan.row_deal, storage.runs)
        bias, sink = yield from self._gathered(work)
        tables = yield from self._tables(work)
        return Differential(dq["query"], work.home["key"], work.home["value"], bias, sink, tables)

    def _gathered(self, work: "RankTasks") -> Transfers:
        """Return the gradients of bias and sink from the sums of all ranks."""
        p, plan = self.whole, self.plan
        everything = [(range(p.n_q),)] * plan.row_deal.ranks
        sums = yield from redealt(work.by_row, self.rank, plan.row_deal, everything)
        sink = p.sink_gradient(np.ascontiguousarray(sums["sink"][..., 0])) if "sink" in sums else None
        if "bias" in work.home:
            everything = [(range(p.n_k),)] * plan.row_deal.ranks
            every = yield from redealt({"bias": work.home["bias"]}, self.rank, plan.key_deal, everything)
            sums = {"bias": every["bias"].swapaxes(-1, -2)}
        if "bias" not in sums:
            return None, sink
        assert p.bias is not None
        with np.errstate(all="ignore"):
            return collapse(sums["bias"], p.bias.shape).astype(p.bias.dtype, copy=False), sink

    def _tables(self, work: "RankTasks") -> Transfers:
        """Return the gradients of tables: the sums of ranks, added in their order."""
        if not work.tables:
            return {}
        ranks = [rank for rank in range(self.plan.row_deal.ranks) if rank != self.rank]
        own = [*work.tables.values()]
        forms = [(x.shape, x.dtype) for x in own]
        arriving = yield Transfer(dict.fromkeys(ranks, own), dict.fromkeys(ranks, forms))
        by_rank = dict(arriving())
        by_rank[self.rank] = own
        sums = (sum(by_rank[rank][n] for rank in sorted(by_rank)) for n in range(len(own)))
        return {table: np.asarray(x, table.dtype) for table, x in zip(work.tables, sums, strict=True)}


class RankTasks:
    """The sums of one rank, and the keys that are with it.

    dq: of the rows that it computes. home: gradients of its own keys. by_row: sums of its rows for bias and sink.
    """

    def __init__(self, of: RankGradients, rows: Mapping[str, Array]):
        p, plan = of.whole, of.plan
        self.of, self.p, self.plan, self.rank, self.rows = of, p, plan, of.rank, rows
        n, keys = plan.row_deal.size(of.rank), plan.key_deal.size(of.rank)
        self.dq = np.zeros((*p.lead, p.heads, n, p.d), p.dtype)
        self.home = {name: np.zeros((*p.lead, p.kv_heads, keys, x), p.dtype) for name, x in self._widths().items()}
        self.by_row: dict[str, Array] = {}
        if p.sink is not None:
            self.by_row["sink"] = np.zeros(p.shape(n, 1), p.compute)
        if p.trained_bias is not None:
            if p.bias_axes[0]:
                shape = (*p.bias_sums[:-2], n, p.bias_sums[-1])
                self.by_row["bias"] = np.zeros(shape, p.compute)
            else:
                self.home["bias"] = np.zeros(p.shape(keys, 1), p.compute)
        self.tables = {table: np.zeros(table.shape, p.compute) for table in p.rules.tables}
        self.slices = dict(zip(plan.row_deal.runs[of.rank], plan.row_deal.locals(of.rank), strict=True))
        self.carried: dict[int, dict[str, Array]] = {}  # sums of each run of rows
        self.here: dict[int, dict[str, Array]] = {}  # keys by step
        self.sums: dict[int, dict[str, Array]] = {}  # those of the gradients of keys by step
        self.done: dict[int, dict[str, Array]] = {}  # gradients of keys by step

    def _widths(self) -> dict[str, int]:
        return {"key": self.p.d, "value": self.p.d_v}

    def in_order(self) -> Transfers:
        """Compute this rank's tasks, between moves of keys and their sums."""
        for moves, steps, tasks in zip(self.plan.moves, self.plan.resident, [*self.plan.slots, []], strict=True):
            yield from self.move(moves)
            self.keep(steps[self.rank])
            for task in tasks:
                if self.plan.owners[task.run] == self.rank:
                    self.compute(task)

    def unordered(self, plan: UnorderedGradients) -> Program:
        """Compute this rank's tasks while keys pass by, and add the sums of ranks for its own keys.

        The next keys, and the sums of the last, are sent while some are computed.
        """
        totals = {name: np.zeros(x.shape, self.p.compute) for name, x in self.home.items()}
        steps = [n for n, tasks in enumerate(plan.slots) if tasks]
        keys = [plan.key_steps[n] for n in steps]
        arriving: list[Arriving] = []
        returning: list[Callable[[], None]] = []
        for number, step in enumerate(steps):
            for later in keys[number + len(arriving) : number + 2]:
                arriving.append((yield Exchange(self.of.keys, plan.key_deal, later, plan.sight.wanted(later))))
            self.here[step] = arriving.pop(0)()
            own = [task for task in plan.slots[step] if plan.owners[task.run] == self.rank]
            for task in own:
                self.compute(task, Carried(task is own[0], False, self.sums.setdefault(step, {})))
            del self.here[step]
            returning.append((yield from self._returned(step, totals)))
            if number:
                returning.pop(0)()
        for add in returning:
            add()
        with np.errstate(all="ignore"):
            self.home = {name: x.astype(self.home[name].dtype, copy=False) for name, x in totals.items()}

    def _returned(self, step: int, totals: Mapping[str, Array]) -> Generator[Transfer, Any, Callable[[], None]]:
        """Send the sums of a step home; return what waits for those of others, and adds all to `totals`."""
        plan, keys, sums = self.plan, self.plan.key_steps[step], self.sums.pop(step, {})
        if "bias" in sums:
            sums["bias"] = sums["bias"].swapaxes(-1, -2)
        pieces = {rank: plan.key_deal.pieces(rank, keys) for rank in range(plan.key_deal.ranks)}
        adding = sorted({plan.owners[task.run] for task in plan.slots[step]})
        sent = {
            to: [sums[name][..., at, :] for _, at in own for name in totals if sums]
            for to, own in pieces.items() if to != self.rank
        }  # fmt: skip
        forms = [
            ((*x.shape[:-2], own.stop - own.start, x.shape[-1]), x.dtype)
            for own, _ in pieces[self.rank] for x in totals.values()
        ]  # fmt: skip
        arriving = yield Transfer(sent, {rank: forms for rank in adding if rank != self.rank})

        def add() -> None:
            every = {rank: iter(x) for rank, x in arriving().items()}
            with np.errstate(all="ignore"):
                for own, at in pieces[self.rank]:
                    for name, total in totals.items():
                        for rank in adding:
                            total[..., own, :] += sums[name][..., at, :] if rank == self.rank else next(every[rank])

        return add

    def move(self, moves: Sequence[Move]) -> Transfers:
        """Send and receive keys and their sums."""
        away = [x for x in moves if x.source != x.target]
        arriving: Mapping[int, Sequence[Array]] = {}
        if away:
            sent: dict[int, list[Array]] = {}
            expected: dict[int, list[Form]] = {}
            for x in away:
                if x.source == self.rank:
                    sent.setdefault(x.target, []).extend(self._leaving(x).values())
                if x.target == self.rank:
                    expected.setdefault(x.source, []).extend(self._forms(x).values())
            arriving = (yield Transfer(sent, expected))()
        arrays = {rank: iter(x) for rank, x in arriving.items()}
        for x in moves:
            if x.target == self.rank:
                local = self._leaving(x) if x.source == self.rank else None
                self._arrive(x, local or {name: next(arrays[x.source]) for name in self._forms(x)})
        for step in {x.step for x in moves if x.source == self.rank and x.kind == "end"}:
            del self.done[step]

    def keep(self, steps: AbstractSet[int]) -> None:
        """Keep the keys of some steps alone."""
        for step in self.here.keys() - steps:
            del self.here[step]

    def _pieces(self, x: Move) -> list[tuple[slice, slice]]:
        """Return the keys at home of a move that begins or ends: among those of their rank, and of the step."""
        home = x.source if x.kind == "begin" else x.target
        return self.plan.key_deal.pieces(home, self.plan.key_steps[x.step])

    def _leaving(self, x: Move) -> dict[Any, Array]:
        if x.kind in ("pass", "sums"):
            every = self.here[x.step] | {f"d{name}": a for name, a in self.sums.pop(x.step).items()}
            return {name: every[name] for name in self._forms(x)}
        arrays = self.of.keys if x.kind == "begin" else self.done[x.step]
        at = 0 if x.kind == "begin" else 1
        return {(name, n): a[..., pair[at], :] for n, pair in enumerate(self._pieces(x)) for name, a in arrays.items()}

    def _forms(self, x: Move) -> dict[Any, Form]:
        """Return shape and dtype of what a move brings, by name."""
        p, count = self.p, len(self.plan.key_steps[x.step])
        keys = {name: ((*p.lead, p.kv_heads, count, a.shape[-1]), a.dtype) for name, a in self.of.keys.items()}
        sums: dict[Any, Form] = {
            f"d{name}": ((*p.lead, p.kv_heads, count, width), p.compute) for name, width in self._widths().items()
        }
        if "bias" in self.home:
            sums["dbias"] = (p.shape(1, count), p.compute)
        if x.kind in ("pass", "sums"):
            return {**(keys if x.kind == "pass" else {}), **sums}
        every = keys if x.kind == "begin" else {name: (a.shape, a.dtype) for name, a in self.home.items()}
        return {
            (name, n): ((*shape[:-2], pair[0].stop - pair[0].start, shape[-1]), dtype)
            for n, pair in enumerate(self._pieces(x)) for name, (shape, dtype) in every.items()
        }  # fmt: skip

    def _arrive(self, x: Move, given: Mapping[Any, Array]) -> None:
        if x.kind in ("pass", "sums"):
            self.sums[x.step] = {name[1:]: given[name] for name in given if name not in self.of.keys}
            if x.kind == "pass":
                self.here[x.step] = {name: given[name] for name in self.of.keys}
            return
        pieces, count = self._pieces(x), len(self.plan.key_steps[x.step])
        if x.kind == "begin" and x.step not in self.here:
            self.here[x.step] = {
                name: np.empty((*a.shape[:-2], count, a.shape[-1]), a.dtype) for name, a in self.of.keys.items()
            }
        into, at = (self.here[x.step], 1) if x.kind == "begin" else (self.home, 0)
        for (name, n), a in given.items():
            into[name][..., pieces[n][at], :] = a

    def compute(self, task: RankTask, key: Carried | None = None) -> None:
        """Add the gradients of a task.

        key: its place among those with its keys, if it is not that among those of all ranks.
        """
        plan, block = self.plan, self.here[task.step]
        earlier, later = (plan.neighbour(task, steps=n) is None for n in (-1, 1))
        query = Carried(earlier, later, self.carried.setdefault(task.run, {}))
        if key is None:
            higher, lower = (plan.neighbour(task, runs=n) is None for n in (1, -1))
            key = Carried(higher, lower, self.sums.setdefault(task.step, {}))
        g = self._gradients(plan.runs[task.run], plan.key_steps[task.step], block, query, key)
        if key.last:
            assert g.key is not None
            assert g.value is not None
            self.done[task.step] = {"key": g.key, "value": g.value}
            if "bias" in self.home:
                self.done[task.step]["bias"] = key.sums["bias"].swapaxes(-1, -2)
            del self.sums[task.step]
        if query.last:
            del self.carried[task.run]

    def compute_blind(self) -> None:
        """Compute what rows without a key give: the gradient of the sink."""
        none = {name: x[..., :0, :] for name, x in self.of.keys.items()}
        for n in np.flatnonzero(~self.plan.live.any(axis=1)).tolist():
            if self.plan.owners[n] == self.rank:
                self._gradients(self.plan.runs[n], range(0), none, Carried(True, True, {}), None)

    def _gradients(
        self, rows: range, keys: range, block: Mapping[str, Array], query: Carried, key: Carried | None
    ) -> Differential:
        """Compute the gradients of some rows and keys; keep those of rows and tables."""
        p, own = self.p, self.slices[rows]
        part = CallPart(p.n_q, p.keys, query, key, p.bias_axes)
        mine = {name: x[..., own, :] for name, x in self.rows.items()}
        problem = part_of(p, part, rows, keys, mine["query"], block["key"], block["value"])
        outputs, ct = outputs_of("", mine), outputs_of("d", mine)
        if self.of.along is None:
            g = self.of.engine.backward(problem, outputs, ct)
        else:
            t = self._tangents(rows, keys, mine, block)
            g = self.of.engine.backward_jvp(problem, outputs, ct, t, outputs_of("t", mine), outputs_of("dt", mine))
        if query.last:
            self.dq[..., own, :] = g.query
            for name in self.by_row.keys() & query.sums.keys():
                into = self.by_row[name][..., own, :]
                into[...] = query.sums[name].reshape(into.shape)
        if g.bias is not None:
            self.by_row["bias"][..., own, keys.start : keys.stop] = g.bias
        for table, x in g.tables.items():
            self.tables[table] += x
        return g

    def _tangents(
        self, rows: range, keys: range, mine: Mapping[str, Array], block: Mapping[str, Array]
    ) -> Differential:
        """Return the tangents of a part's inputs."""
        assert self.of.along is not None
        t = self.of.along.t
        bias = None if t.bias is None else bias_part(t.bias, rows, keys)
        return replace(t, query=mine.get("tquery"), key=block.get("tkey"), value=block.get("tvalue"), bias=bias)


def redealt(local: Mapping[str, Array], rank: int, source: Deal, targets: Sequence[tuple[range, ...]]) -> Transfers:
    """Return the rows of this rank's target runs, in their order, of arrays whose rows are dealt otherwise."""
    if not local or all(positions(runs) == positions(x) for runs, x in zip(source.runs, targets, strict=True)):
        return local
    away = partial(pieces_of, source=source)
    sent = {
        to: [a[..., own, :] for own, _ in away(rank, runs) for a in local.values()]
        for to, runs in enumerate(targets) if to != rank
    }  # fmt: skip
    expected = {
        owner: [
            ((*a.shape[:-2], own.stop - own.start, a.shape[-1]), a.dtype)
            for own, _ in away(owner, targets[rank]) for a in local.values()
        ]
        for owner in range(source.ranks) if owner != rank
    }  # fmt: skip
    arriving = yield Transfer(sent, expected)
    received = arriving()
    n = sum(map(len, targets[rank]))
    results = {name: np.empty((*a.shape[:-2], n, a.shape[-1]), a.dtype) for name, a in local.items()}
    for owner in range(source.ranks):
        arrays = iter(received.get(owner, ()))
        for own, into in away(owner, targets[rank]):
            for name, a in local.items():
                results[name][..., into, :] = a[..., own, :] if owner == rank else next(arrays)
    return results


def pieces_of(rank: int, runs: Sequence[range], source: Deal) -> Iterator[tuple[slice, slice]]:
    """Yield a rank's parts of some runs: where each lies among its own rows, and among those of the runs together."""
    first = 0
    for run in runs:
        for own, into in source.pieces(rank, run):
            yield own, slice(first + into.start, first + into.stop)
        first += len(run)


def positions(runs: Sequence[range]) -> list[int]:
    """Return the edges of runs, adjacent ones joined."""
    edges: list[int] = []
    for run in runs:
        if edges and edges[-1] == run.start:
            edges.pop()
        else:
            edges.append(run.start)
        edges.append(run.stop)
    return edges
