"""Schedules of forward: fields, query blocks, and the tiles that each may see.

A *schedule* is the work of a call without its addresses. Schedules are cached, because for short sequences making one
takes longer than attention. Long calls evaluate their rules for CHUNK_BLOCKS query blocks at a time and keep no result
of it, so that memory does not grow with n_q · n_k.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.language.types import BF16, F32, F64, I64, type_of
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.arguments import Arrays, check, layout_of, strides_of
from regard.engines.cpu.schedule.block_mask import BlockMask, dense_bounds, hides
from regard.engines.cpu.schedule.fields import address_of, base_of, pack_fields
from regard.engines.cpu.spec.operands import (
    BASES,
    BLOCKS,
    COUNT,
    FORWARD,
    SCRATCH,
    SEED,
    TAKEN,
    TILE_LIST,
    WORK_GROUPS,
    RuleArguments,
    block_fields_of,
    integer_type,
)
from regard.engines.cpu.spec.scratch import scratch_size, split_scratch
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import (
    KEYS,
    PART,
    TILE_BITS,
    TILE_WORD,
    WIDE_WORK_GROUP,
    WORK_GROUP,
    multiple,
    split_bits,
    tile_word,
)
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target, chosen
from regard.rules import EVERYTHING, NOTHING, Program, Ranges, Table, classify, reads, visible_tiles
from regard.rules.expression import Node, make
from regard.runtime.bounded import insert
from regard.runtime.forks import cached_property
from regard.runtime.threads import Scratch, ThreadTeam, num_threads, spread, team_for

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

Array = np.ndarray[Any, np.dtype[Any]]
K = TypeVar("K", bound="Cacheable")

CHUNK_BLOCKS = 64  # query blocks whose tiles are found together
DECODE_QUERIES = 8  # queries of a key head up to which lanes are keys
PACKED_ROWS = 64  # rows of a query block that covers several key heads
SMALL = 2**21  # products below which another thread would start too late,
SMALL_READ = 2**20  # unless as many bytes of keys and values are read
REPEATED_QUERIES = 2**16  # queries up to which a call can be repeated
MAX_CACHED = 256  # schedules in the cache
PORTION = 2**28  # products of a portion: about 0.1 s on a slow machine, between which Python answers signals
LONG_WORK_GROUP = 2**32  # products above which work groups are smaller, since a kernel is not interrupted within one
LEAST_WORK_GROUP = 4  # query blocks of a work group at least: they share what is read of K and V
SPREAD_BYTES = 2**19  # bytes that a head of keys or values may spread over, with others between them, and not be copied
HALVINGS = 4  # halvings of the work groups that start last
BEST = (1, 8, 32)  # numbers of the largest weights that kernels return
BLOCK_MASK = 2**26  # products of a batch element from which empty blocks of its dense mask are looked for
BLOCK_TILES = 2048  # pairs of block and tile, whose parts are classified together
_schedules: dict[Any, Any] = {}
_tables: WeakKeyDictionary[Table, dict[Any, Array]] = WeakKeyDictionary()


class HasArrays(Protocol):
    """Arrays of a call besides the problem's."""

    def own(self, p: Problem) -> Arrays:
        """Return them by the names of operands."""


class KernelCall(HasArrays, Protocol):
    """A call of a kernel: what is known besides the problem."""

    @property
    def name(self) -> str: ...

    def spec(self, p: Problem, target: Target, rows: int) -> KernelSpec:
        """Return the spec for `rows` rows."""

    def source(self, spec: KernelSpec, target: Target) -> str:
        """Return the kernel's IR."""

    def tables(self, p: Problem) -> Mapping[str, Array]:
        """Return the arrays of rules, by their fields, that differ from call to call."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """All that schedules depend on besides the problem and the layout of arrays."""


class KernelResults(NamedTuple):
    """The kernel's outputs.

    out is (..., h, n_q, d_v), the others (..., h, n_q); `values` and `indices` of the largest weights are
    (..., h, n_q, one of BEST).
    """

    out: Array
    lse: Array
    entropy: Array | None
    max: Array | None
    values: Array | None = None
    indices: Array | None = None

    @property
    def options(self) -> tuple[bool, int]:
        """True for the entropy, and the number of the largest weights."""
        return self.entropy is not None, 0 if self.values is None else self.values.shape[-1]

    @property
    def name(self) -> str:
        return "forward"

    def spec(self, p: Problem, target: Target, rows: int) -> KernelSpec:
        return spec_of(p, target, rows, *self.options)

    def source(self, spec: KernelSpec, target: Target) -> str:
        return source(spec, target)

    def own(self, p: Problem) -> Arrays:
        return {
            "out": self.out, "lse": self.lse, "entropy": self.entropy, "max": self.max, "values": self.values,
            "indices": self.indices,
        }  # fmt: skip

    def tables(self, p: Problem) -> Mapping[str, Array]:
        return {}

    @property
    def identity(self) -> tuple[Any, ...]:
        return ()


def run(p: Problem, target: Target, results: KernelCall, rows: range | None = None) -> None:
    """Fill the results, or at least those of some rows."""
    first, stop = (0, p.n_q) if not rows else (min(rows), max(rows) + 1)
    count = p.batch * p.heads * (stop - first)
    if count:
        schedule_for(p, target, results, range(first, stop), threads_for(p, count)).run(p, results)


def schedule_for(p: Problem, target: Target, results: KernelCall, rows: range, threads: int) -> "Schedule":
    """Return the schedule of a call, cached if nothing that it depends on has changed."""
    call = (results.name, target.name, rows, threads, *layout_of(results.own(p).values()), *results.identity)
    return cached(call, p, lambda: Schedule(p, target, results, rows, threads))


def signature(p: Problem) -> tuple[Any, ...]:
    """Return what a schedule depends on of a problem."""
    arrays = (p.query, p.key, p.value, p.bias, *dense_masks(p))
    # Tables never change, and a dead reference equals no other: the schedule of a rule is unused once the rule is gone.
    # Numbers are written out, because 0.0 equals −0.0 and 1 equals True.
    rules = tuple(
        (prefix, program.structure, str(program.numbers), tuple(ref(table) for table in program.tables))
        for prefix, program in programs(p)
    )
    return (
        p.lead, p.offset.tobytes(), p.origin, p.scale, p.dropout, p.sink is None, rules,
        *((None if x is None else (x.dtype, x.shape, x.strides)) for x in arrays),
    )  # fmt: skip


class Cacheable(Protocol):
    def materialize(self) -> bool:
        """Prepare for the cache, without arrays of a problem or its rules.

        False if that is too large.
        """


def cached(call: tuple[Any, ...], p: Problem, make: Callable[[], K]) -> K:
    """Return the cached schedule of a call, or a new one.

    It is found by `p.signature`, which names rules by identity, and by their structure.
    """
    by_signature = None if p.signature is None else (*call, p.signature)
    found: K | None = None if by_signature is None else _schedules.get(by_signature)
    if found is None:
        by_value = (*call, signature(p))
        found = _schedules.get(by_value)
        if found is None:
            found = make()
            if not found.materialize():
                return found
            insert(_schedules, by_value, found, MAX_CACHED)
        if by_signature is not None:
            insert(_schedules, by_signature, found, MAX_CACHED)
    return found


@dataclass(frozen=True, eq=False)
class LaunchStage:
    """Query blocks with offsets from each array's base, and their work groups.

    bounds: each work group's first block, and the one after its last. scratch: bytes for each thread. split_state:
    bytes of the key splits that its blocks write or merge. portions: the work groups, divided where signals are
    answered.
    """

    tiles: Array
    blocks: Array
    bounds: Array
    scratch: int
    split_state: int
    portions: list[Array]


class Schedule:
    """The work of a call, without addresses."""

    def __init__(self, p: Problem, target: Target, results: KernelCall, rows: range, threads: int):
        self.target, self.rows, self.threads = target, rows, threads
        spec = results.spec(p, target, len(rows))
        arrays = arrays_of(p, results)
        check(spec, arrays)
        self.key, self.names, self.has_masks = spec.key, spec.fields, bool(spec.dense)
        self.addresses = [name for name, x in spec.operands.items() if x.by_block and x.role != "state"]
        self.whole = [(self.names.index(name), name) for name, x in spec.operands.items() if not x.by_block]
        self.fields = pack_fields(self.names, field_values(p, spec, arrays))
        self.stages: Iterable[LaunchStage] = LaunchStages(spec, p, results, rows, threads)

    def materialize(self) -> bool:
        if not isinstance(self.stages, LaunchStages) or not self.stages.short:
            return False
        self.stages = tuple(self.stages)
        return True

    def run(self, p: Problem, results: KernelCall) -> None:
        def code() -> str:
            return results.source(results.spec(p, self.target, len(self.rows)), self.target)

        kernel = cache.kernel(self.key, results.name, self.target, code)
        fields, arrays = self.fields[:], arrays_of(p, results, self.has_masks)
        fields[SEED] = p.seed
        for at, name in self.whole:
            if name in arrays:
                fields[at] = base_of(arrays[name])
        for name, x in results.tables(p).items():
            fields[self.names.index(name)] = address_of(x)
        bases = [0 if x is None else address_of(x) for x in map(arrays.get, self.addresses)]
        split_state: Array | None = None
        for stage in self.stages:
            if not stage.split_state:
                split_state = None
            elif split_state is None:
                split_state = np.empty(stage.split_state, np.uint8)
            starts = array("Q", [*bases, base_of(split_state)])
            fields[BLOCKS], fields[BASES] = address_of(stage.blocks), starts.buffer_info()[0]
            fields[TILE_LIST] = address_of(stage.tiles)
            launch(kernel, fields, stage, self.threads)


def launch(kernel: Callable[[int], None], fields: "array[int]", stage: LaunchStage, threads: int) -> None:
    """Run the work groups of a stage.

    Its query blocks and tiles are set in the fields.
    """
    scratch, threads = Scratch(stage.scratch), min(threads, len(stage.bounds))
    team, members = team_for(threads)
    if team is not None and len(stage.portions) == 1:
        launch_on_team(kernel, fields, stage, scratch, team, members)
        return
    shared = [(bounds, array("q", [0])) for bounds in stage.portions]

    def some(portion: tuple[Array, "array[int]"]) -> None:
        run_work_groups(kernel, fields[:], portion[0], scratch, portion[1])

    # All threads work on a portion, and none waits there for the others.
    spread(some, [portion for portion in shared for _ in range(threads)], threads)


def launch_on_team(
    kernel: Any, fields: "array[int]", stage: LaunchStage, scratch: Scratch, team: ThreadTeam, members: int
) -> None:
    """Run the work groups of a stage on a team, without the GIL."""
    taken, every, data = array("q", [0]), [], array("Q", [0, members, kernel.address])
    for address in scratch.addresses(members):
        own = fields[:]
        own[WORK_GROUPS], own[COUNT], own[TAKEN] = address_of(stage.bounds), len(stage.bounds), taken.buffer_info()[0]
        own[SCRATCH] = address
        every.append(own)
        data.append(own.buffer_info()[0])
    team.call(member(chosen()).address, data.buffer_info()[0], members)


def member(target: Target) -> cache.Compiled:
    """Return the code of a team's members: each runs the kernel with the next fields.

    Its data: the number of fields that are taken, their total, the kernel, and the addresses of the fields.
    """
    return cache.kernel("member", "member", target, lambda: MEMBER.format(triple=target.triple))


MEMBER = """
target triple = "{triple}"

define void @member(ptr %words) {{
  %taken = atomicrmw add ptr %words, i64 1 monotonic
  %count_at = getelementptr i64, ptr %words, i64 1
  %count = load i64, ptr %count_at
  %is_there = icmp ult i64 %taken, %count
  br i1 %is_there, label %run, label %done
run:
  %kernel_at = getelementptr i64, ptr %words, i64 2
  %kernel = load ptr, ptr %kernel_at
  %first_at = getelementptr i64, ptr %words, i64 3
  %fields_at = getelementptr i64, ptr %first_at, i64 %taken
  %fields = load ptr, ptr %fields_at
  call void %kernel(ptr %fields)
  br label %done
done:
  ret void
}}
"""


def run_work_groups(
    kernel: Callable[[int], None], fields: "array[int]", bounds: Array, scratch: Scratch, taken: "array[int]"
) -> None:
    """Run work groups with a thread's own fields.

    Threads share work groups by a common counter `taken`, 0 at first: each takes the next when it is done, without the
    GIL.
    """
    fields[WORK_GROUPS], fields[COUNT], fields[TAKEN] = address_of(bounds), len(bounds), taken.buffer_info()[0]
    fields[SCRATCH] = scratch.address
    kernel(fields.buffer_info()[0])


def in_portions(bounds: Array, tiles: Array, products: int) -> list[Array]:
    """Divide work groups, in their order, into portions of about PORTION products.

    Python answers signals only between launches. tiles: those of each query block. products: of a query block and a
    tile.
    """
    if len(bounds) < 2 or int(tiles.sum()) * products <= PORTION:
        return [bounds]
    before = np.append(0, np.cumsum(tiles)) * products
    total = np.cumsum(before[bounds[:, 1]] - before[bounds[:, 0]])
    return np.split(bounds, np.flatnonzero(np.diff(total // PORTION)) + 1)


class RepeatedStage:
    """A stage for repeated launches by one thread or a team, without allocation.

    fields: a copy for each member, in which the caller may change what differs from call to call.
    """

    def __init__(self, kernel: Any, fields: "array[int]", stage: LaunchStage, members: int):
        self.kernel, self.stage, self.scratch = kernel, stage, Scratch(stage.scratch)
        self.taken, self.members = array("q", [0]), min(members, len(stage.bounds))
        self.fields, self.data = [], array("Q", [0, self.members, kernel.address])
        for address in self.scratch.addresses(self.members):
            own = fields[:]
            own[BLOCKS], own[SCRATCH] = address_of(stage.blocks), address
            own[WORK_GROUPS], own[COUNT], own[TAKEN] = (
                address_of(stage.bounds),
                len(stage.bounds),
                address_in(self.taken),
            )
            self.fields.append(own)
            self.data.append(address_in(own))
        self.member, self.address = member(chosen()).address, address_in(self.data)

    def __call__(self, team: ThreadTeam | None) -> None:
        self.taken[0] = self.data[0] = 0
        if team is None or self.members == 1:
            self.kernel(self.data[3])
        else:
            team.call(self.member, self.address, self.members)


def address_in(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]


class RepeatedCall:
    """A schedule for repeated calls by one thread.

    Arrays have the same layout at other addresses.

    Checks and schedules take longer than attention itself where a call is short. They also do where keys come from
    memory and have evicted Python's own data from the caches.
    """

    def __init__(self, schedule: Schedule, kernel: Callable[[int], None], has_bias: bool):
        (stage,) = schedule.stages
        self.kernel, self.stage, self.threads = kernel, stage, schedule.threads
        self.fields, self.bases = schedule.fields[:], array("Q", [0] * stage.blocks.shape[1])
        self.fields[BLOCKS], self.fields[BASES] = address_of(stage.blocks), address_in(self.bases)
        self.fields[TILE_LIST] = address_of(stage.tiles)
        self.first_dense = NAMES.index("bias") + (not has_bias)
        self.repeated: Any = None
        self.members, self.busy = 0, False

    def __call__(self, *addresses: int) -> None:
        """Run the call.

        addresses: of query, key, value, out and lse, then of the bias and the dense masks that there are.
        """
        team, members = team_for(self.threads) if self.threads > 1 else (None, 1)
        waits = members < self.threads or len(self.stage.portions) > 1  # and a signal's handler may call meanwhile
        if self.busy or waits:
            fields, bases = self.fields[:], self.bases[:]
            fields[BASES] = address_in(bases)
            self.point(bases, addresses)
            launch(self.kernel, fields, self.stage, self.threads)
            return
        self.busy = True
        try:
            self.point(self.bases, addresses)
            if members != self.members:
                self.repeated = RepeatedStage(self.kernel, self.fields, self.stage, members)
                self.members = members
            self.repeated(team)
        finally:
            self.busy = False

    def point(self, bases: "array[int]", addresses: tuple[int, ...]) -> None:
        """Set the addresses of a call."""
        bases[:PLAIN] = array("Q", addresses[:PLAIN])
        if len(addresses) > PLAIN:
            dense = array("Q", addresses[PLAIN:])
            bases[self.first_dense : self.first_dense + len(dense)] = dense


def repeated_call(p: Problem, target: Target, dense: bool) -> RepeatedCall | None:
    """Return a repeatable call whose rules read no tables; None for others, and large ones.

    dense: it may have a bias and dense masks, whose blocks are not classified.
    """
    count = p.batch * p.heads * p.n_q
    plain = without_options(p) and not any(program.tables for _, program in programs(p))
    has_dense = p.bias is not None or bool(dense_masks(p))
    if not (0 < count <= REPEATED_QUERIES and p.n_k and plain) or (has_dense and not dense):
        return None
    results = KernelResults(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
    found = schedule_for(p, target, results, range(p.n_q), threads_for(p, count))
    if not isinstance(found.stages, tuple) or len(found.stages) != 1:
        return None
    if found.stages[0].split_state:
        return None
    spec = spec_of(p, target, p.n_q, *results.options)
    kernel = cache.kernel(found.key, "forward", target, lambda: source(spec, target))
    return RepeatedCall(found, kernel.call, has_bias=p.bias is not None)


def threads_for(p: Problem, count: int) -> int:
    """Return the number of threads for `count` queries."""
    small = count * p.n_k * (p.d + p.d_v + 16) < SMALL and p.key.nbytes + p.value.nbytes < SMALL_READ
    return 1 if small else num_threads()


def without_options(p: Problem) -> bool:
    """Test for a call without options other than rules and a bias."""
    return p.sink is None and not p.dropout and not p.observe


NAMES = block_fields_of(FORWARD)
PLAIN = NAMES.index("lse") + 1  # query, key, value, out and lse


class LaunchStages:
    """The stages of a schedule, computed anew by each iteration."""

    def __init__(self, spec: KernelSpec, p: Problem, results: HasArrays, rows: range, threads: int):
        self.spec, self.p, self.results, self.rows, self.threads = spec, p, results, rows, threads

    @cached_property
    def grid(self) -> tuple[Array, Array]:
        """Heads (first, count) and rows (first, count) of query blocks.

        Blocks have whole heads where they fit.
        """
        p, count, lanes, first = self.p, len(self.rows), self.spec.lanes, self.rows.start
        whole, step = p.group, min(p.group, lanes // count) if count <= lanes else 1
        if self.spec.packed_vectors:
            # Rows that are read whole are faster, but each thread should have two key splits.
            splits = -(-p.n_k // (KEYS << split_bits(p.d, p.dtype.itemsize)))
            most = p.heads * p.batch * splits // (2 * self.threads) if self.threads > 1 else p.heads
            whole, step = p.heads, max(1, min(lanes // count, most) // p.group) * p.group
        elif self.spec.decode_rows:
            step = min(p.group, self.spec.decode_rows // count)
        starts = (np.arange(0, p.heads, whole)[:, None] + np.arange(0, whole, step)).reshape(-1)
        heads = np.stack([starts, np.minimum(step, whole - starts % whole)], axis=1)
        rows = np.arange(first, self.rows.stop, lanes)
        return heads, np.stack([rows, np.minimum(lanes, self.rows.stop - rows)], axis=1)

    @cached_property
    def masks(self) -> list[tuple[Array, Array]]:
        """Return the dense masks, and a bias that hides, whose blocks are classified.

        Also as (..., h, n_q, n_k).

        Empty for calls that would not gain by it.
        """
        p = self.p
        if p.n_k <= KEYS or p.heads * p.n_q * p.n_k * (p.d + p.d_v) < BLOCK_MASK or p.origin[2] % PART:
            return []
        arrays = () if p.mask_node is None else Program.of([p.mask_node]).dense
        found = list(zip(arrays, dense_masks(p), strict=True))
        if p.bias is not None and hides(p.dense(p.bias)):
            found.append((p.bias, p.dense(p.bias)))
        return [(x, view) for x, view in found if view.strides[-1] == view.itemsize]

    @cached_property
    def mask(self) -> Node | None:
        """Return the mask that hides whole blocks, a hiding bias included."""
        mask, bias = self.p.mask_node, self.p.bias
        if not any(x is bias for x, _ in self.masks):
            return mask
        visible = make("dense", "bool", (), bias)
        return visible if mask is None else make("logical_and", "bool", (mask, visible))

    @cached_property
    def varying(self) -> frozenset[str]:
        """Return the indices, such as "b" and "h", that lists of tiles depend on."""
        views = [view for _, view in self.masks]
        found = {"h" for x in views if x.strides[-3]} | {"b" for x in views if any(x.strides[:-3])}
        return reads(*self.p.rules.hiding) | found

    @property
    def short(self) -> bool:
        """True if the stages are small enough to cache.

        Stages that depend on the contents of arrays are never cached.
        """
        p, (heads, rows) = self.p, self.grid
        if self.masks:
            return False
        tiles = p.batch * len(rows) * (p.n_k // KEYS + 1) if p.rules.hiding else 0
        return p.batch * len(heads) * len(rows) <= 2048 and tiles * len(heads) <= 2**15

    def __iter__(self) -> Iterator[LaunchStage]:
        for tiles, blocks in self.chunks():
            if self.threads > 1 and len(blocks) < 2 * self.threads:
                yield from self.split(tiles, blocks)
            else:
                yield self.stage(tiles, blocks)

    def field(self, name: str) -> int:
        return self.spec.block_fields.index(name)

    def stage(self, tiles: Array, blocks: Array, split_state: int = 0, most: int = WIDE_WORK_GROUP) -> LaunchStage:
        """Form work groups of query blocks, the longest first.

        Their blocks share keys and values, or pages of them.
        """
        heads_in_rows = self.spec.decode_rows and _heads_in_rows(self.p.key)
        # Under a window, only as many query blocks as one of them sees keys share any.
        tiles_of = blocks[:, self.field("count")]
        longest = int(tiles_of.max())
        by_signature = -(-longest * KEYS // self.spec.lanes)
        products = self.spec.lanes * KEYS * max(1, self.p.d + self.p.d_v)  # heads may have no features
        size = min(
            most, max(WORK_GROUP, by_signature), max(LEAST_WORK_GROUP, LONG_WORK_GROUP // (products * max(1, longest)))
        )
        if self.threads > 1:  # enough work groups that threads end at about the same time
            each = len(blocks) // self.threads
            size = max(1, min(size, each if heads_in_rows else each // 8))
        # Where rows hold several heads, all of them use some rows before the next.
        alike = [self.field(name) for name in (["b"] if heads_in_rows else ["k", "v"])]
        shared = (np.diff(blocks[:, alike], axis=0) == 0).all(axis=1)
        ends = np.append(np.flatnonzero(~shared) + 1, len(blocks)).tolist()
        starts = [n for first, end in zip([0, *ends], ends, strict=False) for n in range(first, end, size)]
        bounds = np.array([starts, [*starts[1:], len(blocks)]], np.int64).T.copy()
        if len(bounds) > 1:
            cost = np.add.reduceat(blocks[:, self.field("count")], bounds[:, 0])
            bounds = bounds[np.argsort(-cost, kind="stable")]
        if self.threads > 1 and not self.spec.decode_rows:
            # Halve the last work groups repeatedly, so that threads, which may differ in speed, end together.
            for _ in range(HALVINGS):
                last = bounds[-2 * self.threads :]
                middle = last.mean(axis=1, dtype=np.int64)
                halves = np.stack([last[:, 0], middle, middle, last[:, 1]], axis=1).reshape(-1, 2)
                bounds = np.concatenate([bounds[: -2 * self.threads], halves[halves[:, 0] < halves[:, 1]]])
        most = int((bounds[:, 1] - bounds[:, 0]).max())
        scratch = scratch_size(self.spec, most, self.p.d, self.p.d_v) * self.spec.real.size
        return LaunchStage(tiles, blocks, bounds, scratch, split_state, in_portions(bounds, tiles_of, products))

    def split(self, tiles: Array, blocks: Array) -> Iterator[LaunchStage]:
        """Yield stages for few query blocks with many keys.

        Each key split runs by itself; then they are merged.
        """
        spec, p = self.spec, self.p
        size = sum(split_scratch(spec, p.d_v).values()) * spec.real.size
        splits = ((tiles >> TILE_BITS) + p.origin[2] // KEYS) >> split_bits(p.d, p.dtype.itemsize)
        made, numbers = [], []
        for block in blocks:
            own = splits[block[self.field("tiles")] :][: block[self.field("count")]]
            starts = np.flatnonzero(np.diff(own, prepend=-1))
            part = np.repeat(block[None], len(starts), axis=0)
            part[:, self.field("tiles")] += starts
            part[:, self.field("count")] = np.diff(starts, append=len(own))
            made.append(part)
            numbers.append(len(starts))
        if max(numbers) < 2:
            yield self.stage(tiles, blocks)
            return
        each, merged = np.concatenate(made), blocks.copy()
        each[:, self.field("split_state")] = size * np.arange(len(each))
        merged[:, self.field("split_state")] = size * np.append(0, np.cumsum(numbers[:-1]))
        merged[:, self.field("splits")], merged[:, self.field("count")] = numbers, 0
        yield self.stage(tiles, each, size * len(each), most=1)
        yield self.stage(tiles, merged, size * len(each))

    def chunks(self, size: int = CHUNK_BLOCKS) -> Iterator[tuple[Array, Array]]:
        """Yield lists of tiles, and query blocks that index them.

        size: rows of blocks at a time.
        """
        p, (heads, rows) = self.p, self.grid
        shift = p.origin[2] % KEYS
        tiles = np.arange(-(-(p.n_k + shift) // KEYS) if p.n_k else 0, dtype=np.int64)
        everyone = range(p.batch)
        if (self.mask is None and p.rules.hiding_node is None) or len(tiles) <= 1:
            # One tile is not worth a look at what it hides.
            zero = np.zeros(len(rows), np.int64)
            mixed = KEYS if p.rules.hiding else 0
            word = tile_word(tiles, mixed_stop=mixed)
            yield word, self.block_table(everyone, heads, rows, zero, zero + len(tiles))
            return
        edges, reading = p.extents.key_edges(KEYS), self.varying
        height, target = max(1, self.spec.lanes // 2), chosen()
        masks = {id(x): BlockMask(view, self.rows.start, height, target, self.threads) for x, view in self.masks}
        dense = dense_bounds(masks, p.lead, p.origin, p.offset) if masks else None
        apart = heads if "h" in reading else np.array([[0, p.heads]])
        alike = "b" not in reading and len(set(p.offset.tolist())) == 1
        for batch in [everyone] if alike else [range(b, b + 1) for b in everyone]:
            # Later rows first: under a causal mask they see more.
            for stop in range(len(rows), 0, -size):
                band = rows[max(stop - size, 0) : stop][::-1]
                lists, parts, length = [], [], 0
                for first, count in apart.tolist():
                    ranges = p.extents.ranges(
                        batch[0], range(first, first + count), band[:, 0], band[:, 0] + band[:, 1] - 1
                    )
                    ranges = replace(ranges, dense=dense)
                    found, begin, number = self.visible(ranges, edges)
                    own = heads[heads[:, 0] == first] if "h" in reading else heads
                    parts.append(self.block_table(batch, own, band, begin + length, number))
                    lists.append(found)
                    length += len(found)
                yield np.concatenate(lists), np.concatenate(parts)

    def visible(self, ranges: Ranges, edges: Array) -> tuple[Array, Array, Array]:
        """Return the tiles of some query blocks.

        With them come where each block's begin, and their number.
        """
        p = self.p
        row, tile, visibility = visible_tiles(self.mask, p.rules.hiding_node, ranges, edges)
        fields = {name: np.full(len(tile), x) for name, x in TILE_WORD.items()}
        mixed = np.flatnonzero(visibility != EVERYTHING)
        if len(mixed):
            for some in np.split(mixed, range(BLOCK_TILES, len(mixed), BLOCK_TILES)):
                for name, x in self.parts(ranges, row[some], tile[some], edges).items():
                    fields[name][some] = x
            live = fields["stop"] > 0
            row, tile, fields = row[live], tile[live], {name: x[live] for name, x in fields.items()}
        begin = np.searchsorted(row, np.arange(len(ranges.i[0]) + 1))
        return tile_word(tile, **fields), begin[:-1], np.diff(begin)

    def parts(self, ranges: Ranges, row: Array, tile: Array, edges: Array) -> dict[str, Array]:
        """Classify the parts of tiles; return the fields of `tile_word`."""
        p = self.p
        start = tile[:, None] * KEYS - p.origin[2] % KEYS + p.origin[2] + np.arange(0, KEYS, PART)
        low, high = np.maximum(start, edges[tile, None]), np.minimum(start + PART, edges[tile + 1, None]) - 1
        outside = low > high
        # Each half of a full block by itself; in other blocks both halves are the block.
        least, greatest = ranges.i[0][row, None], ranges.i[1][row, None]
        full = greatest - least + 1 == self.spec.lanes
        middle = least + self.spec.lanes // 2
        halves = (least, np.where(full, middle - 1, greatest)), (np.where(full, middle, least), greatest)
        visibilities = [
            classify(self.mask, p.rules.hiding_node, replace(ranges, i=i, j=(low, np.maximum(low, high))))
            for i in halves[: 1 + full.any()]
        ]
        seen = [(x != NOTHING) & ~outside for x in visibilities]
        first, stop = _ends(seen[0] | seen[-1])
        number = np.arange(0, KEYS, PART)
        between = (number >= first[:, None]) & (number < stop[:, None]) & ~outside
        mixed_first, mixed_stop = _ends(((visibilities[0] != EVERYTHING) | (visibilities[-1] != EVERYTHING)) & between)
        (first_0, stop_0), (first_1, stop_1) = _ends(seen[0]), _ends(seen[-1])
        both_first, both_stop = np.maximum(first_0, first_1), np.minimum(stop_0, stop_1)
        # Where one half sees nothing, all is the other's; where they are disjoint, all is both's.
        nobody = (stop_0 == 0) | (stop_1 == 0)
        apart = ~nobody & (both_first > both_stop)
        return {
            "first": first,
            "stop": stop,
            "mixed_first": mixed_first,
            "mixed_stop": mixed_stop,
            "both_first": np.where(nobody, stop, np.where(apart, first, both_first)),
            "both_stop": np.where(nobody | apart, stop, both_stop),
            "early": np.where(nobody, stop_0 == 0, first_1 < first_0).astype(np.int64),
            "late": (stop_1 > stop_0).astype(np.int64),
        }

    def block_table(self, batch: range, heads: Array, rows: Array, begin: Array, number: Array) -> Array:
        """Return query blocks (batch × heads × rows, fields) of some batch elements."""
        p = self.p
        made = np.zeros((len(batch), len(heads), len(rows), len(self.spec.block_fields)), np.int64)
        column = {name: made[..., n] for n, name in enumerate(self.spec.block_fields)}
        h, first = heads[:, 0, None], rows[:, 0]
        b = np.arange(batch.start, batch.stop)[:, None, None]

        arrays = arrays_of(p, self.results)
        for name, operand in self.spec.operands.items():
            x, keep, shared = arrays.get(name), len(operand.axes), operand.shared
            if x is not None and operand.by_block:
                step, width = x.strides[-keep], 0 if shared else x.strides[1 - keep]
                place = (h // p.group if shared else h) * step + first * width
                column[name][...] = _batch_offsets(x, p.lead, keep)[b] + place
        column["b"][...] = p.origin[0] + b
        column["h"][...] = p.origin[1] + h
        column["head"][...] = h
        column["i"][...] = first + p.offset[b]
        column["rows"][...] = rows[:, 1]
        column["lanes"][...] = rows[:, 1] * heads[:, 1, None]
        column["tiles"][...] = begin
        column["count"][...] = number
        return made.reshape(-1, len(self.spec.block_fields))


def _batch_offsets(x: Array, lead: tuple[int, ...], keep: int) -> Array:
    """Return the byte offset of each batch element.

    The array broadcasts to the leading shape.
    """
    offsets = np.zeros(1, np.int64)
    given = x.ndim - keep
    for axis, size in enumerate(lead):
        own = axis - (len(lead) - given)
        step = x.strides[own] if own >= 0 and x.shape[own] != 1 else 0
        offsets = (offsets[:, None] + step * np.arange(size)).reshape(-1)
    return offsets


def by_head(p: Problem, x: Array) -> Array:
    """Return the sink of each query head."""
    return np.ascontiguousarray(np.broadcast_to(x.astype(p.compute), (p.heads,)))


def programs(p: Problem) -> list[tuple[str, Program]]:
    """Return the rules of a call, with the prefixes of their fields."""
    nodes = (("mask", p.mask_node), ("score", p.score_node))
    return [(prefix, Program.of([node])) for prefix, node in nodes if node is not None]


def arrays_of(p: Problem, call: HasArrays, masks: bool = True) -> Arrays:
    """Return the arrays of a call by the names of operands; masks: the call may have dense masks."""
    found = {"q": p.query, "k": p.key, "v": p.value, **call.own(p)}
    if p.bias is not None:
        found["bias"] = p.dense(p.bias)
    if p.sink is not None:
        found["sink"] = by_head(p, p.sink)
    for n, x in enumerate(dense_masks(p) if masks else ()):
        found[f"dense{n}"] = x
    return found


def field_values(p: Problem, spec: KernelSpec, arrays: Arrays) -> dict[str, int | float]:
    """Return the fields that a schedule stores: numbers, strides and rules, without addresses of arrays."""
    j0 = p.origin[2]
    values: dict[str, int | float] = {
        "d": p.d, "d_v": p.d_v, "n_k": p.n_k, "shift": j0 % KEYS, "first_tile": j0 // KEYS, "j": j0, "keys": p.keys,
        "scale": float(p.scale), "row_head": p.n_q, "split_bits": split_bits(p.d, p.dtype.itemsize),
        "threshold": int(p.dropout * 2**32), "keep_scale": float(p.compute.type(1 / (1 - p.dropout))),
        **strides_of(spec, arrays),
    }  # fmt: skip
    for rule in (spec.mask, spec.score):
        if rule is None:
            continue
        values |= {f"{rule.prefix}_number{n}": number for n, number in enumerate(rule.program.numbers)}
        for n, table in enumerate(rule.program.tables):
            name = f"{rule.prefix}_table{n}"
            values[name] = address_of(table_array(table, p.compute))
            values |= {f"{name}_size{axis}": length for axis, length in enumerate(table.shape)}
    return values


def table_array(table: Table, real: Any) -> Array:
    """Return the array of a table as kernels read it: the call's float type, or int64."""
    cached = _tables.setdefault(table, {})
    dtype = np.dtype(real if table.kind == "float" else np.int64)
    if dtype not in cached:
        cached.setdefault(
            dtype, np.ascontiguousarray(table.array, dtype)
        )  # one for all threads: schedules store its address
    return cached[dtype]


def dense_masks(p: Problem) -> list[Array]:
    """Return the dense masks (..., h, n_q, n_k) as bytes; views."""
    return [] if p.mask_node is None else [p.dense(x.view(np.int8)) for x in Program.of([p.mask_node]).dense]


def _ends(marked: Array) -> tuple[Array, Array]:
    """Return the first key of the first marked part, and the key after the last.

    Both are 0 for rows without a marked part.
    """
    any_one, last = marked.any(axis=1), marked.shape[1] - marked[:, ::-1].argmax(axis=1)
    return np.where(any_one, marked.argmax(axis=1), 0) * PART, np.where(any_one, last, 0) * PART


def source(spec: KernelSpec, target: Target, name: str = "forward") -> str:
    """Return the kernel's IR."""

    def write(k: "Kernel") -> None:
        from regard.engines.cpu.kernels.forward import ForwardKernel

        ForwardKernel(k, spec).run()

    return written(name, spec.fields, target, write)


def spec_of(
    p: Problem,
    target: Target,
    rows: int,
    entropy: bool,
    best: int = 0,
    decode: bool = True,
    rules: Sequence[tuple[str, Program]] | None = None,
    more: Sequence[Array] = (),
) -> KernelSpec:
    """Return the spec for `rows` rows of a call, with `best` of the largest weights.

    decode: lanes may be keys. rules: instead of those of the call. more: arrays that are read like keys and values.
    """
    found = {prefix: RuleArguments(prefix, program) for prefix, program in (programs(p) if rules is None else rules)}
    plain = prefill_spec(p, target, rows * p.group, found.get("mask"), found.get("score"), entropy)
    W = target.lanes(plain.real.size)
    straight = [x.strides[-1] == x.itemsize or x.shape[-1] <= 1 for x in (p.key, p.value, *more)]
    amx = plain.element is BF16 and target.amx and p.scale != 0
    paired = amx or (plain.element is BF16 and target.bf16_dot and p.scale != 0)
    decode = decode and rows * p.group <= min(DECODE_QUERIES, W) and straight[1] and not best
    # A mask that differs by head would compute each tile that one head sees for all.
    adjacent = p.kv_heads > 1 and all(x.strides[-3] > 0 and _heads_in_rows(x) for x in (p.key, p.value))
    packed_heads = decode and adjacent and "h" not in reads(*p.rules.hiding)
    converted = plain.element is not plain.real and not paired
    scattered = rows * p.group > plain.lanes and any(_scattered(x) for x in (p.key, p.value, *more))
    vectors = -(-min(rows * p.heads, PACKED_ROWS) // W) if packed_heads else 0
    return replace(
        plain,
        lanes=(vectors or 1) * W if decode else plain.lanes,
        decode_rows=0
        if not decode
        else rows * p.group
        if packed_heads
        else 1 << (max(1, rows * p.group) - 1).bit_length(),
        packed_vectors=vectors,
        paired=paired,
        amx=amx,
        pipelined=target.pipelines and not (decode or amx),
        copied=not decode and (converted or scattered or not all(straight) or amx or (paired and p.d % 2 != 0)),
        best=best,
    )


def prefill_spec(
    p: Problem, target: Target, queries: int, mask: RuleArguments | None, score: RuleArguments | None, entropy: bool
) -> KernelSpec:
    """Return the spec for `queries` queries that share keys.

    Lanes are queries, products are of scalars, and tiles are copied.
    """
    real = F64 if p.compute == np.float64 else F32
    W = target.lanes(real.size)
    most = target.tile[1]
    # One vector less costs less than an eighth: 16 W queries fill 8 blocks of 2 W, eight ninths of 6 of 3 W.
    if 8 * multiple(queries, W * most) >= 9 * multiple(queries, W * (most - 1)):
        most -= 1
    lanes = max(1, min(queries, W * most))
    return KernelSpec(
        element=type_of(p.dtype),
        real=real,
        integer=integer_type(p.rules.integers, mask, score) if mask or score else I64,
        lanes=multiple(lanes, W),
        decode_rows=0,
        packed_vectors=0,
        paired=False,
        amx=False,
        copied=True,
        pipelined=False,
        mask=mask,
        score=score,
        bias=None if p.bias is None else type_of(p.bias.dtype),
        dropout=bool(p.dropout),
        sink=p.sink is not None,
        entropy=entropy,
        best=0,
    )


def _heads_in_rows(x: Array) -> bool:
    """Test for a token-major layout: heads are closer than rows."""
    return bool(x.strides[-3] < x.strides[-2])


def _scattered(x: Array) -> bool:
    """Test if a head's rows spread over SPREAD_BYTES.

    They then share few sets of a cache, and evict each other.
    """
    step = x.strides[-2]
    return bool(step > x.shape[-1] * x.itemsize and step * x.shape[-2] > SPREAD_BYTES)


def working_memory(p: Problem) -> int:
    """Estimate the bytes of a call besides inputs and outputs.

    Counted are scratch, query blocks, and lists of tiles.
    """
    spec = spec_of(p, chosen(), p.n_q, False)
    blocks = -(-p.heads * p.n_q // spec.lanes) if spec.packed_vectors else p.heads * -(-p.n_q // spec.lanes)
    records, lists = p.batch * blocks, 1
    if p.rules.hiding:
        records = min(blocks, CHUNK_BLOCKS * p.heads)
        lists = min(-(-p.n_q // spec.lanes), CHUNK_BLOCKS) * (p.heads if "h" in reads(*p.rules.hiding) else 1)
    size = 2 * records * len(spec.block_fields) + 3 * lists * -(-p.n_k // KEYS)
    scratch = scratch_size(spec, min(WIDE_WORK_GROUP, records), p.d, p.d_v) * spec.real.size
    return min(num_threads(), p.batch * blocks) * scratch + 8 * size
