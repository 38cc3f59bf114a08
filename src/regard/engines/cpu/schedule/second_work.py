"""The second pass: from lse to statistics that are sums over queries, and to maps.

Sums over queries have one order for any number of threads. The rows of every head are divided into parts; their number
depends on the problem alone. A part adds its query blocks one after the other to a partial sum of its own, and partial
sums are added in order. Parts end at edges of a map's bins, so that no bin has two.
"""

from array import array
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.core.parts import scores_alone
from regard.core.problem import Problem
from regard.core.statistics import Pooled, Received, Statistic, WeightByDistance, bin_edges
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.arguments import Arrays, arrays_of, base_of, check, field_values, pack_fields
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.launches import in_portions, run_work_groups
from regard.engines.cpu.schedule.stages import LaunchStages
from regard.engines.cpu.schedule.work import SMALL, KernelResults
from regard.engines.cpu.spec.operands import BASES, BLOCKS, TILE_LIST
from regard.engines.cpu.spec.scratch import scratch_size
from regard.engines.cpu.spec.specs import KernelSpec, SecondPassSpec
from regard.engines.cpu.spec.tiles import KEYS, WORK_GROUP
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.runtime.forks import cached_property
from regard.runtime.memory import address_of
from regard.runtime.threads import Scratch, num_threads, spread

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

Array = np.ndarray[Any, np.dtype[Any]]

PARTIAL_SUMS = 16  # parts of all heads together, if there are fewer heads


def second_pass(
    p: Problem, target: Target, lse: Array, observe: tuple[Statistic, ...], factor: Array | None = None
) -> dict[Statistic, Any]:
    """Return the observed statistics among `visible`, `received`, `profile`, `pooled`.

    Each shape of maps takes a pass. factor: of each query's weights.
    """
    rest = None if factor is None else -np.log(factor)
    statistics: dict[Statistic, Any] = {}
    maps = [s for s in observe if isinstance(s, Pooled)]
    sums = tuple(s for s in observe if not isinstance(s, Pooled))
    for shape in dict.fromkeys(s.of[:2] for s in maps) or [(1, 1)]:
        mine = tuple(s for s in maps if s.of[:2] == shape)
        statistics |= Pass(p, target, lse, mine if statistics else (*sums, *mine), shape, rest).result()
    return statistics


class PartialStages(LaunchStages):
    """Stages with query blocks of one head each, within the parts of a head."""

    def __init__(self, spec: KernelSpec, p: Problem, arrays: Arrays, edges: list[int], threads: int):
        super().__init__(spec, p, arrays, range(p.n_q), threads)
        self.part_edges = edges

    @cached_property
    def grid(self) -> tuple[Array, Array]:
        """Heads (first, count) and rows (first, count) of query blocks, one head each."""
        lanes, blocks = self.spec.lanes, []
        for first, stop in zip(self.part_edges, self.part_edges[1:], strict=False):
            starts = np.arange(first, stop, lanes)
            blocks.append(np.stack([np.arange(len(starts)), starts, np.minimum(lanes, stop - starts)], axis=1))
        rows = np.concatenate(blocks)
        heads = np.arange(self.p.heads)
        return np.stack([heads, np.ones_like(heads)], axis=1), rows[np.argsort(rows[:, 0], kind="stable"), 1:]


class Pass:
    """One pass over the weights, for some statistics and maps of one shape."""

    def __init__(
        self,
        p: Problem,
        target: Target,
        lse: Array,
        observe: tuple[Statistic, ...],
        shape: tuple[int, int],
        rest: Array | None,
    ):
        self.p = p = scores_alone(p)
        self.target, self.observe = target, observe
        self.threads = 1 if p.pairs * (p.d + 16) < SMALL else num_threads()
        self.spec = replace(second_spec(p, target, observe), rest=rest is not None)
        self.own = {**KernelResults(p.new_output(), lse, None, None).own(p), "rest": rest}
        self.row_edges, self.col_edges = bin_edges(shape[0], p.n_q), bin_edges(shape[1], p.n_k)
        self.part_edges = self._part_edges()

    def _part_edges(self) -> list[int]:
        """Return the edges of the parts of a head's rows."""
        p = self.p
        number = max(1, min(PARTIAL_SUMS // max(1, p.all_heads), p.n_q // (8 * self.spec.lanes)))
        even = np.linspace(0, p.n_q, number + 1).astype(np.int64)
        if any(isinstance(s, Pooled) for s in self.observe):
            even = self.row_edges[np.searchsorted(self.row_edges, even)]
        return list(dict.fromkeys(even.tolist()))

    @cached_property
    def totals(self) -> dict[str, Array]:
        """Return the kernel's outputs (batch · heads, ...), by field."""
        p, c = self.p, self.p.compute
        heads, partials = p.all_heads, len(self.part_edges) - 1
        tiles = -(-(p.n_k + p.origin[2] % KEYS) // KEYS)
        width = p.n_q + p.n_k + 2 * KEYS + self.spec.lanes
        totals: dict[str, Array] = {}
        for s in self.observe:
            field = field_of(s)
            if field == "visible":
                totals[field] = np.zeros((heads, p.n_q), np.int64)
            elif field == "received":
                totals[field] = np.zeros((heads, partials, tiles * KEYS), c)
            elif field == "profile":
                totals[field] = np.zeros((heads, partials, width), c)
            else:
                totals[field] = np.zeros((heads, len(self.row_edges) - 1, len(self.col_edges) - 1), c)
        return totals

    def result(self) -> dict[Statistic, Any]:
        """Run the pass and return the statistics."""
        p, totals = self.p, self.totals
        if p.pairs:
            self._run()

        def value(s: Statistic) -> Any:
            x = totals[field_of(s)]
            if isinstance(s, Received):
                first = p.origin[2] % KEYS
                x = x.sum(axis=1)[:, first : first + p.n_k]
            elif isinstance(s, WeightByDistance):
                x = x.sum(axis=1)[:, KEYS : KEYS + p.extents.diagonals]
            elif field_of(s) == "mass":
                x /= np.diff(self.row_edges).astype(x.dtype)[:, None]
            total = np.ascontiguousarray(x).reshape(p.shape(*x.shape[1:]))
            return s.result([total, p.extents.distances][: len(s.parts)])

        return {s: value(s) for s in self.observe}

    def _run(self) -> None:
        p, spec = self.p, self.spec
        kernel = cache.kernel(spec.key, "second", self.target, lambda: source(spec, self.target))
        width = len(self.col_edges) - 1
        of_row = np.append((np.searchsorted(self.row_edges, np.arange(p.n_q), side="right") - 1) * width, -1)
        firsts = np.maximum(np.arange(-(p.origin[2] % KEYS), p.n_k, KEYS), 0)
        of_tile = np.searchsorted(self.col_edges, firsts, side="right") - 1
        arrays = arrays_of(p, self.own)
        bins = {"row_bins": of_row, "tile_bins": of_tile, "edges": self.col_edges}
        check(spec, {**arrays, **self.totals, **bins})
        values = field_values(p, spec, arrays) | {name: address_of(x) for name, x in bins.items()}
        fields = pack_fields(spec.fields, values)
        scratch = Scratch(scratch_size(self.spec, WORK_GROUP, p.d, 0) * self.spec.real.size)
        stages = PartialStages(spec, p, arrays, self.part_edges, self.threads)
        bases = array("Q", [0] * len(spec.block_fields))
        for name, x in {**arrays, **self.totals}.items():
            if name in spec.block_fields:
                bases[spec.block_fields.index(name)] = base_of(x)
        fields[BASES] = bases.buffer_info()[0]
        products = spec.lanes * KEYS * (p.d + 16)
        for tiles, blocks in stages.chunks():
            partials = self._set_addresses(stages, blocks)
            fields[TILE_LIST] = address_of(tiles)

            def work(mine: Array) -> None:
                bounds = [[n, min(n + WORK_GROUP, len(mine))] for n in range(0, len(mine), WORK_GROUP)]
                groups, own = np.array(bounds, np.int64), fields[:]
                own[BLOCKS] = address_of(mine)
                for portion in in_portions(groups, mine[:, stages.field("count")], products):
                    run_work_groups(kernel, own, portion, scratch, array("q", [0]))

            spread(work, partials, self.threads)

    def _set_addresses(self, stages: PartialStages, blocks: Array) -> list[Array]:
        """Set the offsets of query blocks into the sums.

        Returns the query blocks of each part.
        """
        p, field, size = self.p, self.spec.block_fields.index, self.spec.real.size
        b = blocks[:, field("b")] - p.origin[0]
        head, row = b * p.heads + blocks[:, field("head")], blocks[:, field("i")] - p.offset[b]
        number = len(self.part_edges) - 1
        partial = head * number + np.searchsorted(self.part_edges, row, side="right") - 1
        blocks[:, field("row")] = row
        for name, x in self.totals.items():
            if name in ("received", "profile"):
                place = partial * x.shape[-1] + (row + p.n_k - 1 + KEYS if name == "profile" else 0)
            else:
                place = head * (x.size // len(x)) + (row if name == "visible" else 0)
            blocks[:, field(name)] = place * (8 if name == "visible" else size)
        order = np.argsort(partial, kind="stable")
        # The last first: under a causal mask they see more.
        return np.split(blocks[order], np.flatnonzero(np.diff(partial[order])) + 1)[::-1]


def second_spec(p: Problem, target: Target, observe: tuple[Statistic, ...], rows: int | None = None) -> SecondPassSpec:
    """Return the spec for some statistics of a call.

    Without any it is the spec for the weights of `rows` rows.
    """
    spec = spec_of(p, target, p.n_q if rows is None else rows, False, decode=False)
    statistics = tuple(sorted({field_of(s) for s in observe}))
    return SecondPassSpec(
        **{x.name: getattr(spec, x.name) for x in fields(KernelSpec)} | {"pipelined": False}, statistics=statistics
    )


def field_of(s: Statistic) -> str:
    """Return the operand of the kernel that holds a statistic."""
    return s.name if not isinstance(s, Pooled) else "max_map" if s.largest else "mass"


def source(spec: SecondPassSpec, target: Target, name: str = "second") -> str:
    """Return the kernel's IR."""

    def write(k: "Kernel") -> None:
        from regard.engines.cpu.kernels.reductions import SecondPassKernel

        SecondPassKernel(k, spec).run()

    return written(name, spec.fields, target, write)
