"""From a problem and its lse to the second pass: the statistics that are sums over queries, and maps.

Sums over queries are made in one order, whatever the number of threads: the rows of every head are cut into *strands*,
how many depends on the problem alone, and a strand adds its items to sums of its own one after the other. The sums of
strands are added in order. Strands are cut where cells of a map are, so that no cell has two.
"""

from array import array
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.core.parts import scores_alone
from regard.core.problem import Problem
from regard.core.statistics import Profile, Statistic, bin_edges
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.fields import address_of, base_of, packed
from regard.engines.cpu.schedule.work import (
    SMALL,
    Results,
    Stages,
    in_portions,
    kind_of,
    programs,
    run_groups,
    shared_fields,
)
from regard.engines.cpu.spec.forward import BASES, GROUP, ITEMS, KEYS, TILE_LIST, Kind, scratch_size, span_bits
from regard.engines.cpu.spec.reductions import SecondKind
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.runtime.forks import cached_property
from regard.runtime.threads import Scratch, num_threads, spread

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

Array = np.ndarray[Any, np.dtype[Any]]

STRANDS = 16  # of all heads together, where there are fewer heads


def second_pass(p: Problem, target: Target, lse: Array, observe: tuple[Statistic, ...]) -> dict[Statistic, Any]:
    """`visible`, `received`, `profile` and `pooled`, for those that are observed: a pass for each shape of maps."""
    found: dict[Statistic, Any] = {}
    sums = tuple(s for s in observe if s.name != "pooled")
    for shape in dict.fromkeys(s.of[:2] for s in observe if s.name == "pooled") or [(1, 1)]:
        mine = tuple(s for s in observe if s.name == "pooled" and s.of[:2] == shape)
        found |= Pass(p, target, lse, mine if found else (*sums, *mine), shape).result()
    return found


class Strands(Stages):
    """Items of one head each, the strands of a head by turns."""

    def __init__(self, kind: Kind, p: Problem, results: Results, cuts: list[int], threads: int):
        super().__init__(kind, p, results, range(p.n_q), threads)
        self.cuts = cuts

    @cached_property
    def blocks(self) -> tuple[Array, Array]:
        """Heads (first, number) and rows (first, number) of blocks of queries: one head each."""
        lanes, made = self.kind.lanes, []
        for first, stop in zip(self.cuts, self.cuts[1:], strict=False):
            starts = np.arange(first, stop, lanes)
            made.append(np.stack([np.arange(len(starts)), starts, np.minimum(lanes, stop - starts)], axis=1))
        rows = np.concatenate(made)
        heads = np.arange(self.p.heads)
        return np.stack([heads, np.ones_like(heads)], axis=1), rows[np.argsort(rows[:, 0], kind="stable"), 1:]


class Pass:
    """One pass over the weights, for some statistics and maps of one shape."""

    def __init__(self, p: Problem, target: Target, lse: Array, observe: tuple[Statistic, ...], shape: tuple[int, int]):
        self.p = p = scores_alone(p)
        self.target, self.observe = target, observe
        self.threads = 1 if p.batch * p.heads * p.n_q * p.n_k * (p.d + 16) < SMALL else num_threads()
        self.kind = second_kind(p, target, observe)
        self.results = Results(p.new_output(), lse, None, None)
        self.row_edges, self.col_edges = bin_edges(shape[0], p.n_q), bin_edges(shape[1], p.n_k)
        self.cuts = self._cuts()

    def _cuts(self) -> list[int]:
        """Where the rows of a head are cut."""
        p = self.p
        number = max(1, min(STRANDS // max(1, p.batch * p.heads), p.n_q // (8 * self.kind.lanes)))
        even = np.linspace(0, p.n_q, number + 1).astype(np.int64)
        if any(s.name == "pooled" for s in self.observe):
            even = self.row_edges[np.searchsorted(self.row_edges, even)]
        return list(dict.fromkeys(even.tolist()))

    @cached_property
    def totals(self) -> dict[str, Array]:
        """What the kernel writes, (batch · heads, ...), by word."""
        p, c = self.p, self.p.compute
        units, strands = p.batch * p.heads, len(self.cuts) - 1
        tiles = -(-(p.n_k + p.origin[2] % KEYS) // KEYS)
        width = p.n_q + p.n_k + 2 * KEYS + self.kind.lanes
        made: dict[str, Array] = {}
        for s in self.observe:
            word = word_of(s)
            if word == "visible":
                made[word] = np.zeros((units, p.n_q), np.int64)
            elif word == "received":
                made[word] = np.zeros((units, strands, tiles * KEYS), c)
            elif word == "profile":
                made[word] = np.zeros((units, strands, width), c)
            else:
                made[word] = np.zeros((units, len(self.row_edges) - 1, len(self.col_edges) - 1), c)
        return made

    def result(self) -> dict[Statistic, Any]:
        """What is observed."""
        p, totals = self.p, self.totals
        if p.batch * p.heads * p.n_q * p.n_k:
            self._run()

        def value(s: Statistic) -> Any:
            x = totals[word_of(s)]
            if s.name == "received":
                first = p.origin[2] % KEYS
                x = x.sum(axis=1)[:, first : first + p.n_k]
            elif s.name == "profile":
                x = x.sum(axis=1)[:, KEYS : KEYS + p.extents.diagonals]
            elif word_of(s) == "mass":
                x /= np.diff(self.row_edges).astype(x.dtype)[:, None]
            made = np.ascontiguousarray(x).reshape(p.shape(*x.shape[1:]))
            return Profile(made, p.extents.distances) if s.name == "profile" else made

        return {s: value(s) for s in self.observe}

    def _run(self) -> None:
        p, kind = self.p, self.kind
        kernel = cache.kernel(kind.key, "second", self.target, lambda: source(kind, self.target))
        width = len(self.col_edges) - 1
        of_row = np.append((np.searchsorted(self.row_edges, np.arange(p.n_q), side="right") - 1) * width, -1)
        firsts = np.maximum(np.arange(-(p.origin[2] % KEYS), p.n_k, KEYS), 0)
        of_tile = np.searchsorted(self.col_edges, firsts, side="right") - 1
        words = shared_fields(p, programs(p)) | {
            "span_bits": span_bits(p.d, p.dtype.itemsize),
            "q_head": p.query.strides[-3], "q_row": p.query.strides[-2], "q_feature": p.query.strides[-1],
            "row_cells": address_of(of_row), "tile_cells": address_of(of_tile), "edges": address_of(self.col_edges),
        }  # fmt: skip
        fields = packed(kind.fields, words)
        scratch = Scratch(scratch_size(self.kind, GROUP, p.d, 0) * self.kind.real.size)
        stages = Strands(kind, p, self.results, self.cuts, self.threads)
        bases = array("Q", [0] * len(kind.item))
        for name, x in ({name: x for name, x, _, _ in stages.arrays()} | self.totals).items():
            bases[kind.item.index(name)] = base_of(x)
        fields[BASES] = bases.buffer_info()[0]
        products = kind.lanes * KEYS * (p.d + 16)
        for tiles, items in stages.waves():
            strands = self._place(stages, items)
            fields[TILE_LIST] = address_of(tiles)

            def work(mine: Array) -> None:
                bounds = [[n, min(n + GROUP, len(mine))] for n in range(0, len(mine), GROUP)]
                groups, own = np.array(bounds, np.int64), fields[:]
                own[ITEMS] = address_of(mine)
                for portion in in_portions(groups, mine[:, stages.word("count")], products):
                    run_groups(kernel, own, portion, scratch, array("q", [0]))

            spread(work, strands, self.threads)

    def _place(self, stages: Strands, items: Array) -> list[Array]:
        """Where items write to, counted from the sums; the items of each strand."""
        p, word, size = self.p, self.kind.item.index, self.kind.real.size
        b = items[:, word("b")] - p.origin[0]
        unit, row = b * p.heads + items[:, word("head")], items[:, word("i")] - p.offset[b]
        number = len(self.cuts) - 1
        strand = unit * number + np.searchsorted(self.cuts, row, side="right") - 1
        items[:, word("row")] = row
        for name, x in self.totals.items():
            if name in ("received", "profile"):
                place = strand * x.shape[-1] + (row + p.n_k - 1 + KEYS if name == "profile" else 0)
            else:
                place = unit * (x.size // len(x)) + (row if name == "visible" else 0)
            items[:, word(name)] = place * (8 if name == "visible" else size)
        order = np.argsort(strand, kind="stable")
        # The last first: under a causal mask they see more.
        return np.split(items[order], np.flatnonzero(np.diff(strand[order])) + 1)[::-1]


def second_kind(p: Problem, target: Target, observe: tuple[Statistic, ...]) -> SecondKind:
    """The kernel for some statistics of a call."""
    kind = kind_of(p, target, p.n_q, False, few=False)
    wants = tuple(sorted({word_of(s) for s in observe}))
    return SecondKind(**{x.name: getattr(kind, x.name) for x in fields(Kind)} | {"woven": False}, wants=wants)


def word_of(s: Statistic) -> str:
    return s.name if s.name != "pooled" else {"mass": "mass", "max": "max_map"}[s.of[2]]


def source(kind: SecondKind, target: Target) -> str:
    """The IR of a kernel."""

    def write(k: "Kernel") -> None:
        from regard.engines.cpu.kernels.reductions import SecondPass

        SecondPass(k, kind).run()

    return written("second", kind.fields, target, write)
