"""Schedules of forward: cached, and run with the addresses of a call.

A *schedule* is the work of a call without its addresses. Schedules are cached, because for short sequences making one
takes longer than attention.
"""

import functools
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import ref

import numpy as np

from regard.core.problem import KIND, CallPart, Problem, SumShapes, of_role
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.arguments import (
    Arrays,
    arrays_of,
    base_of,
    check,
    field_values,
    layout_of,
    pack_fields,
)
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.launches import LaunchStage, launch
from regard.engines.cpu.schedule.stages import CHUNK_BLOCKS, LIST_TILES, LaunchStages, summarized
from regard.engines.cpu.spec.operands import BASES, SEED
from regard.engines.cpu.spec.scratch import scratch_size
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import KEYS, WIDE_WORK_GROUP
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target, chosen
from regard.rules import Node, Program, once, reads
from regard.runtime.bounded import insert, make_room
from regard.runtime.memory import address_of
from regard.runtime.threads import num_threads

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

Array = np.ndarray[Any, np.dtype[Any]]
K = TypeVar("K", bound="Cacheable")

SMALL = 2**21  # products below which another thread would start too late,
SMALL_READ = 2**20  # unless as many bytes of keys and values are read
BEST = (1, 8, 32)  # numbers of the largest weights that kernels return
MAX_CACHED = 256  # schedules in the cache
CACHE_BYTES = 2**26  # of all cached schedules
_schedules: dict[Any, Any] = {}


class KernelCall(Protocol):
    """A call of a kernel: what is known besides the problem."""

    @property
    def name(self) -> str: ...

    def spec(self, p: Problem, target: Target, rows: int) -> KernelSpec:
        """Return the spec for `rows` rows."""

    def source(self, spec: KernelSpec, target: Target) -> str:
        """Return the kernel's IR."""

    def own(self, p: Problem) -> Arrays:
        """Return the call's arrays besides the problem's, by the names of operands."""

    def tables(self, p: Problem) -> Mapping[str, Array]:
        """Return the arrays of rules, by their fields, that differ from call to call."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """All that schedules depend on besides the problem and the layout of arrays."""


class KernelResults(NamedTuple):
    """The kernel's outputs.

    out and low are (..., h, n_q, d_v), the others (..., h, n_q); `values` and `indices` of the largest weights are
    (..., h, n_q, one of BEST).
    """

    out: Array
    lse: Array
    entropy: Array | None
    max: Array | None
    values: Array | None = None
    indices: Array | None = None
    low: Array | None = None

    @property
    def options(self) -> tuple[bool, int]:
        """True for the entropy, and the number of the largest weights."""
        return self.entropy is not None, 0 if self.values is None else self.values.shape[-1]

    @property
    def name(self) -> str:
        return "forward"

    def spec(self, p: Problem, target: Target, rows: int) -> KernelSpec:
        return replace(spec_of(p, target, rows, *self.options), low=self.low is not None, carried=p.part is not None)

    def source(self, spec: KernelSpec, target: Target) -> str:
        return source(spec, target)

    def own(self, p: Problem) -> Arrays:
        return {
            "out": self.out, "lse": self.lse, "entropy": self.entropy, "max": self.max, "values": self.values,
            "indices": self.indices, "low": self.low,
        }  # fmt: skip

    def tables(self, p: Problem) -> Mapping[str, Array]:
        return {}

    @property
    def identity(self) -> tuple[Any, ...]:
        return ()


def run(p: Problem, target: Target, results: KernelCall, rows: range | None = None) -> None:
    """Fill the results, or at least those of some rows."""
    first, stop = (0, p.n_q) if not rows else (min(rows), max(rows) + 1)
    count = p.all_heads * (stop - first)
    if count:
        arrays = arrays_of(p, results.own(p))
        schedule = schedule_for(p, target, results, arrays, range(first, stop), threads_for(p, count))
        schedule.run(p, results, arrays)


def schedule_for(
    p: Problem, target: Target, results: KernelCall, arrays: Arrays, rows: range, threads: int
) -> "Schedule":
    """Return the schedule of a call, cached if nothing that it depends on has changed."""
    call = (results.name, target.name, rows, threads, *layout_of(arrays.values()), *results.identity)
    return cached(call, p, lambda: Schedule(p, target, results, arrays, rows, threads))


def signature(p: Problem) -> tuple[Any, ...]:
    """Return what a schedule depends on of a problem, besides the layout of arrays."""
    values, others = identified()
    return *values(p), *[None if (x := getattr(p, name)) is None else identity(x) for name, identity in others]


@functools.cache
def identified() -> tuple[Callable[[Problem], tuple[Any, ...]], list[tuple[str, Callable[[Any], Any]]]]:
    """Return a function to the values that schedules depend on, and what identifies each of the other fields."""
    names = [name for name in of_role("indices", "scores", "denominators", "weights") if name not in GIVEN]
    values = [name for name in names if KIND[name] == "value"]
    others = [(name, IDENTITY[KIND[name]]) for name in names if name not in values]
    return attrgetter(*values), [*others, ("part", lambda x: x.identity)]


@once
def rule_signature(node: Node) -> tuple[Any, ...]:
    """Return what a schedule depends on of a rule: equal for rules that are made anew and mean the same."""
    # Tables never change, and a dead reference equals no other: the schedule of a rule is unused once the rule is gone.
    # Numbers are written out, because 0.0 equals −0.0 and 1 equals True.
    program = Program.of([node])
    return program.structure, str(program.numbers), tuple(ref(table) for table in program.tables)


IDENTITY: dict[str, Callable[[Any], Any]] = {
    "batch": np.ndarray.tobytes,
    "pairs": np.shape,
    "heads": lambda x: True,
    "rule": lambda x: rule_signature(x.node),
}
"""Functions to what a schedule depends on of a field that holds no value, by its kind."""

GIVEN = ("seed",)
"""Fields that are arguments of each run of a schedule."""


class Cacheable(Protocol):
    @property
    def nbytes(self) -> int:
        """The bytes of what was prepared for the cache."""

    def materialize(self) -> bool:
        """Prepare for the cache, without arrays of a problem or its rules.

        False if that is too large.
        """


def cached(call: tuple[Any, ...], p: Problem, make: Callable[[], K]) -> K:
    """Return the cached schedule of a call, or a new one; always a new one where it depends on contents of arrays."""
    if (p.mask_node is not None or p.bias is not None) and summarized(p):
        return make()
    key = *call, signature(p)
    schedule: K | None = _schedules.get(key)
    if schedule is None:
        schedule = make()
        if schedule.materialize():
            make_room(_schedules, schedule.nbytes, CACHE_BYTES)
            insert(_schedules, key, schedule, MAX_CACHED)
    return schedule


class Schedule:
    """The work of a call, without addresses."""

    def __init__(self, p: Problem, target: Target, results: KernelCall, arrays: Arrays, rows: range, threads: int):
        self.target, self.rows, self.threads = target, rows, threads
        spec = results.spec(p, target, len(rows))
        check(spec, arrays)
        self.key, self.names = spec.key, spec.fields
        self.addresses = [name for name, x in spec.operands.items() if x.by_block]
        self.split_state = self.addresses.index("split_state")
        self.whole = [(self.names.index(name), name) for name, x in spec.operands.items() if not x.by_block]
        self.fields = pack_fields(self.names, field_values(p, spec, arrays))
        self.nbytes = 0
        stages = LaunchStages(spec, p, arrays, rows, threads)
        self.carried = stages.carried
        self.stages: Iterable[LaunchStage] = stages

    def materialize(self) -> bool:
        if not isinstance(self.stages, LaunchStages) or not self.stages.short:
            return False
        self.nbytes = self.stages.nbytes
        self.stages = tuple(self.stages)
        return True

    def kernel(self, p: Problem, results: KernelCall) -> cache.Compiled:
        def code() -> str:
            return results.source(results.spec(p, self.target, len(self.rows)), self.target)

        return cache.kernel(self.key, results.name, self.target, code)

    def run(self, p: Problem, results: KernelCall, arrays: Arrays) -> None:
        kernel, fields = self.kernel(p, results), self.fields[:]
        fields[SEED] = p.seed
        for at, name in self.whole:
            if name in arrays:
                fields[at] = base_of(arrays[name])
        for name, x in results.tables(p).items():
            fields[self.names.index(name)] = address_of(x)
        bases = array("Q", [0 if x is None else address_of(x) for x in map(arrays.get, self.addresses)])
        fields[BASES] = bases.buffer_info()[0]
        split_state: Array | None = None
        carry = None if p.part is None else carried_state(p.part, self.carried)
        for stage in self.stages:
            if carry is not None:
                split_state = carry
            elif not stage.split_state:
                split_state = None
            elif split_state is None:
                split_state = np.empty(stage.split_state, np.uint8)
            bases[self.split_state] = base_of(split_state)
            launch(kernel, fields, stage, self.threads)


def carried_state(part: CallPart, size: int) -> Array:
    """Return the memory for merged splits of every query block, which goes on from part to part."""
    assert part.query is not None
    if part.query.first:
        part.query.sums["state"] = np.empty(size, np.uint8)
    return part.query.sums["state"]


def carried(p: Problem, spec: KernelSpec) -> SumShapes:
    """Return the shape and dtype of `carried_state`."""
    return {"state": ((LaunchStages(spec, p, {}, range(p.n_q), 1).carried,), np.dtype(np.uint8))}


def carried_forward(p: Problem, target: Target, low: bool) -> SumShapes:
    """Return those of forward."""
    return carried(p, replace(spec_of(p, target, p.n_q, bool(p.observe), 0), low=low, carried=True))


def threads_for(p: Problem, count: int) -> int:
    """Return the number of threads for `count` queries."""
    small = count * p.n_k * (p.d + p.d_v + 16) < SMALL and p.key.nbytes + p.value.nbytes < SMALL_READ
    return 1 if small else num_threads()


def source(spec: KernelSpec, target: Target, name: str = "forward") -> str:
    """Return the kernel's IR."""

    def write(k: "Kernel") -> None:
        from regard.engines.cpu.kernels.forward import ForwardKernel

        ForwardKernel(k, spec).run()

    return written(name, spec.fields, target, write)


def working_memory(p: Problem) -> int:
    """Estimate the bytes of a call besides inputs and outputs.

    Counted are scratch, query blocks, and lists of tiles.
    """
    spec = spec_of(p, chosen(), p.n_q, False)
    blocks = -(-p.heads * p.n_q // spec.lanes) if spec.packed_vectors else p.heads * -(-p.n_q // spec.lanes)
    records, lists = p.batch * blocks, 1
    if p.rules.hiding:
        reading = reads(*p.rules.hiding)
        lists = min(-(-p.n_q // spec.lanes), CHUNK_BLOCKS) * (p.heads if "h" in reading else 1)
        together = max(1, LIST_TILES // (lists * max(1, -(-p.n_k // KEYS))))
        elements = min(p.batch, together if "b" in reading else p.batch)
        records, lists = elements * min(blocks, CHUNK_BLOCKS * p.heads), lists * (elements if "b" in reading else 1)
    size = 2 * records * len(spec.block_fields) + 3 * lists * -(-p.n_k // KEYS)
    scratch = scratch_size(spec, min(WIDE_WORK_GROUP, records), p.d, p.d_v) * spec.real.size
    return min(num_threads(), p.batch * blocks) * scratch + 8 * size
