"""From a problem to the kernel's memory: its fields, the items (blocks of queries) and the tiles that each may see.

What does not depend on addresses is a *plan*. It is kept, because for short sequences making it takes longer than
attention; but of a long call the rules are looked at for WAVE blocks of queries at once, and what is found is forgotten
when those are done, so that it does not grow with n_q · n_k.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.language.types import BF16, F32, F64, I64, type_of
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.block_mask import BlockMask, dense_bounds, hides
from regard.engines.cpu.schedule.fields import address_of, base_of, packed
from regard.engines.cpu.spec.forward import (
    BASES,
    COUNT,
    FIELDS,
    GROUP,
    GROUPS,
    ITEMS,
    KEYS,
    PART,
    SCRATCH,
    TAKEN,
    TILE_BITS,
    TILE_LIST,
    TILE_WORD,
    WIDE_GROUP,
    Arguments,
    Kind,
    integer_type,
    multiple,
    scratch_size,
    span_area,
    span_bits,
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
K = TypeVar("K", bound="Kept")

WAVE = 64  # blocks of queries whose tiles are found together
FEW = 8  # queries that share a key head up to which lanes are keys
JOINED = 64  # rows of an item that holds several key heads
SMALL = 2**21  # products below which another thread would begin too late,
SMALL_READ = 2**20  # unless so many bytes of keys and values are read
FEW_ROWS = 2**16  # queries of a call that is kept whole
KEPT = 256  # plans
PORTION = 2**28  # products of a portion: about 0.1 s on a slow machine, between which Python answers signals
LONG_GROUP = 2**32  # products above which groups are cut, since a kernel is not interrupted within one
LEAST_GROUP = 4  # items that groups are cut to: they share what is read of K and V
FAR = 2**19  # bytes that a head of keys or values may lie spread over, with others between them, to be read there
HALVINGS = 4  # of the groups that are begun last
BEST = (1, 8, 32)  # how many of the largest weights kernels keep
BLOCK_MASK = 2**26  # products of a batch element from which empty blocks of its dense mask are looked for
PAIRS = 2048  # of blocks and tiles, whose parts are looked at together
_plans: dict[Any, Any] = {}
_tables: WeakKeyDictionary[Table, dict[Any, Array]] = WeakKeyDictionary()


class Call(Protocol):
    """What is known of a call of a kernel beside the problem."""

    @property
    def name(self) -> str: ...

    def kind(self, p: Problem, target: Target, rows: int) -> Kind:
        """The kernel for so many rows."""

    def source(self, kind: Kind, target: Target) -> str:
        """The IR of the kernel."""

    def arrays(self, p: Problem) -> list[tuple[str, Array | None, int, bool]]:
        """Whatever an item has an address in: its name, the array, the dimensions behind the leading ones, and whether
        heads of a group share it, and all rows.
        """

    def words(self, p: Problem) -> dict[str, int | float]:
        """The fields that a plan keeps."""

    def vectors(self, p: Problem) -> dict[str, Array]:
        """The arrays with an address among the fields that a plan does not keep."""

    @property
    def lie(self) -> tuple[Any, ...]:
        """What plans depend on beside the problem."""


class Results(NamedTuple):
    """Where the kernel writes: out (..., h, n_q, d_v), the others (..., h, n_q); `values` and `indices` of the largest
    weights (..., h, n_q, one of BEST).
    """

    out: Array
    lse: Array
    entropy: Array | None
    max: Array | None
    values: Array | None = None
    indices: Array | None = None

    @property
    def wishes(self) -> tuple[bool, int]:
        """Whether the entropy is wanted, and how many of the largest weights."""
        return self.entropy is not None, 0 if self.values is None else self.values.shape[-1]

    @property
    def name(self) -> str:
        return "forward"

    def kind(self, p: Problem, target: Target, rows: int) -> Kind:
        return kind_of(p, target, rows, *self.wishes)

    def source(self, kind: Kind, target: Target) -> str:
        return source(kind, target)

    def arrays(self, p: Problem) -> list[tuple[str, Array | None, int, bool]]:
        return [
            ("q", p.query, 3, False), ("k", p.key, 3, True), ("v", p.value, 3, True), ("out", self.out, 3, False),
            ("lse", self.lse, 2, False), ("entropy", self.entropy, 2, False), ("max", self.max, 2, False),
            ("values", self.values, 3, False), ("indices", self.indices, 3, False),
            ("bias", None if p.bias is None else p.dense(p.bias), 3, False),
            *((f"dense{n}", x, 3, False) for n, x in enumerate(dense_masks(p))),
        ]  # fmt: skip

    def words(self, p: Problem) -> dict[str, int | float]:
        return self.words_with(p, programs(p))

    def words_with(self, p: Problem, rules: Sequence[tuple[str, Program]]) -> dict[str, int | float]:
        return shared_fields(p, rules) | {
            "span_bits": span_bits(p.d, p.dtype.itemsize),
            "q_head": p.query.strides[-3], "q_row": p.query.strides[-2], "q_feature": p.query.strides[-1],
            "out_head": self.out.strides[-3], "out_row": self.out.strides[-2],
        }  # fmt: skip

    def vectors(self, p: Problem) -> dict[str, Array]:
        return {} if p.sink is None else {"sink": by_head(p, p.sink)}

    @property
    def lie(self) -> tuple[Any, ...]:
        return tuple(None if x is None else x.strides for x in self)


def run(p: Problem, target: Target, results: Call, rows: range | None = None) -> None:
    """Fill the results, or those of some rows at least."""
    first, stop = (0, p.n_q) if not rows else (min(rows), max(rows) + 1)
    count = p.batch * p.heads * (stop - first)
    if count:
        plan(p, target, results, range(first, stop), threads_for(p, count)).run(p, results)


def plan(p: Problem, target: Target, results: Call, rows: range, threads: int) -> "Plan":
    """The plan for such a call: the one of an earlier call if nothing that it depends on has changed."""
    call = (results.name, target.name, rows, threads, *results.lie)
    return kept(call, p, lambda: Plan(p, target, results, rows, threads))


def signature(p: Problem) -> tuple[Any, ...]:
    """What a plan depends on of a problem."""
    arrays = (p.query, p.key, p.value, p.bias, *dense_masks(p))
    # Tables never change, and a reference that is dead equals no other: the plan of a rule goes unused when it is gone.
    # Numbers are written out, because 0.0 equals −0.0 and 1 equals True.
    rules = tuple(
        (prefix, program.structure, str(program.numbers), tuple(ref(table) for table in program.tables))
        for prefix, program in programs(p)
    )
    return (
        p.lead, p.offset.tobytes(), p.origin, p.scale, p.dropout, p.sink is None, rules,
        *((None if x is None else (x.dtype, x.shape, x.strides)) for x in arrays),
    )  # fmt: skip


class Kept(Protocol):
    def keep(self) -> bool:
        """Make ready to be kept, with no array of a problem or its rules; False if that would be too much."""


def kept(call: tuple[Any, ...], p: Problem, make: Callable[[], K]) -> K:
    """The plan of such a call, which may be kept: for the rules of `p.signature`, and for others that mean the same."""
    near = None if p.signature is None else (*call, p.signature)
    found: K | None = None if near is None else _plans.get(near)
    if found is None:
        alike = (*call, signature(p))
        found = _plans.get(alike)
        if found is None:
            found = make()
            if not found.keep():
                return found
            insert(_plans, alike, found, KEPT)
        if near is not None:
            insert(_plans, near, found, KEPT)
    return found


@dataclass(frozen=True, eq=False)
class Stage:
    """Items with addresses counted from where each array begins, and the groups they are worked on in.

    bounds: the first item of each group and the one after its last. scratch: bytes that each thread needs. partial:
    bytes that its items write to be merged, or merge. portions: the groups, cut where signals are answered.
    """

    tiles: Array
    items: Array
    bounds: Array
    scratch: int
    partial: int
    portions: list[Array]


class Plan:
    """What a call has to do, but for addresses."""

    def __init__(self, p: Problem, target: Target, results: Call, rows: range, threads: int):
        self.target, self.rows, self.threads = target, rows, threads
        kind = results.kind(p, target, len(rows))
        self.key, self.names = kind.key, kind.fields
        self.fields = packed(self.names, results.words(p))
        self.stages: Iterable[Stage] = Stages(kind, p, results, rows, threads)

    def keep(self) -> bool:
        if not isinstance(self.stages, Stages) or not self.stages.short:
            return False
        self.stages = tuple(self.stages)
        return True

    def run(self, p: Problem, results: Call) -> None:
        def code() -> str:
            return results.source(results.kind(p, self.target, len(self.rows)), self.target)

        kernel = cache.kernel(self.key, results.name, self.target, code)
        fields, vectors = self.fields[:], results.vectors(p)
        fields[SEED] = p.seed
        for name, x in vectors.items():
            fields[self.names.index(name)] = address_of(x)
        bases = [base_of(x) for _, x, _, _ in results.arrays(p)]
        partial: Array | None = None
        for stage in self.stages:
            if not stage.partial:
                partial = None
            elif partial is None:
                partial = np.empty(stage.partial, np.uint8)
            starts = array("Q", [*bases, base_of(partial)])
            fields[ITEMS], fields[BASES] = address_of(stage.items), starts.buffer_info()[0]
            fields[TILE_LIST] = address_of(stage.tiles)
            launch(kernel, fields, stage, self.threads)


def launch(kernel: Callable[[int], None], fields: "array[int]", stage: Stage, threads: int) -> None:
    """Run the groups of a stage, whose items and tiles lie where the fields say."""
    scratch, threads = Scratch(stage.scratch), min(threads, len(stage.bounds))
    team, members = team_for(threads)
    if team is not None and len(stage.portions) == 1:
        launch_on_team(kernel, fields, stage, scratch, team, members)
        return
    shared = [(bounds, array("q", [0])) for bounds in stage.portions]

    def some(portion: tuple[Array, "array[int]"]) -> None:
        run_groups(kernel, fields[:], portion[0], scratch, portion[1])

    # All threads work on a portion, and none waits there for the others.
    spread(some, [portion for portion in shared for _ in range(threads)], threads)


def launch_on_team(
    kernel: Any, fields: "array[int]", stage: Stage, scratch: Scratch, team: ThreadTeam, members: int
) -> None:
    """Run the groups of a stage without a word to Python, which its threads would wait for one after the other."""
    taken, every, words = array("q", [0]), [], array("Q", [0, members, kernel.address])
    for address in scratch.addresses(members):
        mine = fields[:]
        mine[GROUPS], mine[COUNT], mine[TAKEN] = address_of(stage.bounds), len(stage.bounds), taken.buffer_info()[0]
        mine[SCRATCH] = address
        every.append(mine)
        words.append(mine.buffer_info()[0])
    team.call(member(chosen()).address, words.buffer_info()[0], members)


def member(target: Target) -> cache.Compiled:
    """What each member of a team does: run the kernel with the next fields. Words: of fields that are taken, how many
    there are, the kernel, and the addresses of the fields.
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


def run_groups(
    kernel: Callable[[int], None], fields: "array[int]", bounds: Array, scratch: Scratch, taken: "array[int]"
) -> None:
    """Run groups of items, with fields that are the thread's own. Threads that have one `taken`, 0 at first, share the
    groups: each takes the next when it has done one, without a word to Python.
    """
    fields[GROUPS], fields[COUNT], fields[TAKEN] = address_of(bounds), len(bounds), taken.buffer_info()[0]
    fields[SCRATCH] = scratch.address
    kernel(fields.buffer_info()[0])


def in_portions(bounds: Array, tiles: Array, products: int) -> list[Array]:
    """Groups in their order, cut so that a portion ends once it has made PORTION products.

    A kernel does not return to Python before it has ended, and Python answers signals only then. tiles: how many each
    item has. products: of an item and a tile.
    """
    if len(bounds) < 2 or int(tiles.sum()) * products <= PORTION:
        return [bounds]
    before = np.append(0, np.cumsum(tiles)) * products
    total = np.cumsum(before[bounds[:, 1]] - before[bounds[:, 0]])
    return np.split(bounds, np.flatnonzero(np.diff(total // PORTION)) + 1)


class Repeated:
    """A stage that one thread, or a team, runs again and again: nothing is allocated or looked up.

    fields: those of each member, copies, of which the caller may change what differs from call to call.
    """

    def __init__(self, kernel: Any, fields: "array[int]", stage: Stage, members: int):
        self.kernel, self.stage, self.scratch = kernel, stage, Scratch(stage.scratch)
        self.taken, self.members = array("q", [0]), min(members, len(stage.bounds))
        self.fields, self.words = [], array("Q", [0, self.members, kernel.address])
        for address in self.scratch.addresses(self.members):
            mine = fields[:]
            mine[ITEMS], mine[SCRATCH] = address_of(stage.items), address
            mine[GROUPS], mine[COUNT], mine[TAKEN] = address_of(stage.bounds), len(stage.bounds), address_in(self.taken)
            self.fields.append(mine)
            self.words.append(address_in(mine))
        self.member, self.data = member(chosen()).address, address_in(self.words)

    def __call__(self, team: ThreadTeam | None) -> None:
        self.taken[0] = self.words[0] = 0
        if team is None or self.members == 1:
            self.kernel(self.words[3])
        else:
            team.call(self.member, self.data, self.members)


def address_in(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]


class Again:
    """A plan that is run again and again, by one thread at a time, for arrays of the same shapes and strides at other
    addresses.

    Checks and plans take longer than attention itself where a call is short, and where its keys come from memory, which
    Python's own have been thrown out of the caches for.
    """

    def __init__(self, plan: Plan, kernel: Callable[[int], None]):
        (stage,) = plan.stages
        self.kernel, self.stage, self.threads = kernel, stage, plan.threads
        self.fields, self.bases = plan.fields[:], array("Q", [0] * stage.items.shape[1])
        self.fields[ITEMS], self.fields[BASES] = address_of(stage.items), address_in(self.bases)
        self.fields[TILE_LIST] = address_of(stage.tiles)
        self.repeated: Any = None
        self.members, self.busy = 0, False

    def __call__(self, *addresses: int) -> None:
        """addresses: of query, key, value, out and lse."""
        team, members = team_for(self.threads) if self.threads > 1 else (None, 1)
        waits = members < self.threads or len(self.stage.portions) > 1  # and a signal's handler may call meanwhile
        if self.busy or waits:
            fields, bases = self.fields[:], self.bases[:]
            fields[BASES] = address_in(bases)
            bases[:5] = array("Q", addresses)
            launch(self.kernel, fields, self.stage, self.threads)
            return
        self.busy = True
        try:
            self.bases[:5] = array("Q", addresses)
            if members != self.members:
                self.repeated = Repeated(self.kernel, self.fields, self.stage, members)
                self.members = members
            self.repeated(team)
        finally:
            self.busy = False


def again(p: Problem, target: Target) -> Again | None:
    """What runs a call without wishes but rules that read no arrays once more; None for others, and large ones."""
    count = p.batch * p.heads * p.n_q
    plain = bare(p) and not any(program.tables for _, program in programs(p))
    if not (0 < count <= FEW_ROWS and p.n_k and plain) or dense_masks(p):
        return None
    results = Results(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
    found = plan(p, target, results, range(p.n_q), threads_for(p, count))
    if not isinstance(found.stages, tuple) or len(found.stages) != 1:
        return None
    if found.stages[0].partial:
        return None
    kind = kind_of(p, target, p.n_q, *results.wishes)
    return Again(found, cache.kernel(found.key, "forward", target, lambda: source(kind, target)).call)


def threads_for(p: Problem, count: int) -> int:
    """How many threads work on so many queries."""
    small = count * p.n_k * (p.d + p.d_v + 16) < SMALL and p.key.nbytes + p.value.nbytes < SMALL_READ
    return 1 if small else num_threads()


def bare(p: Problem) -> bool:
    """Whether a call has no wishes beside rules."""
    return p.bias is None and p.sink is None and not p.dropout and not p.observe


SEED = FIELDS.index("seed")


class Stages:
    """The stages of a plan, found one after the other each time they are asked for."""

    def __init__(self, kind: Kind, p: Problem, results: Call, rows: range, threads: int):
        self.kind, self.p, self.results, self.rows, self.threads = kind, p, results, rows, threads

    @cached_property
    def blocks(self) -> tuple[Array, Array]:
        """Heads (first, number) and rows (first, number) of blocks of queries: whole heads where they fit."""
        p, count, lanes, first = self.p, len(self.rows), self.kind.lanes, self.rows.start
        whole, step = p.group, min(p.group, lanes // count) if count <= lanes else 1
        if self.kind.joined:
            # Rows that are read whole are faster, but each thread should have two spans of some.
            spans = -(-p.n_k // (KEYS << span_bits(p.d, p.dtype.itemsize)))
            most = p.heads * p.batch * spans // (2 * self.threads) if self.threads > 1 else p.heads
            whole, step = p.heads, max(1, min(lanes // count, most) // p.group) * p.group
        elif self.kind.few:
            step = min(p.group, self.kind.few // count)
        starts = (np.arange(0, p.heads, whole)[:, None] + np.arange(0, whole, step)).reshape(-1)
        heads = np.stack([starts, np.minimum(step, whole - starts % whole)], axis=1)
        rows = np.arange(first, self.rows.stop, lanes)
        return heads, np.stack([rows, np.minimum(lanes, self.rows.stop - rows)], axis=1)

    @cached_property
    def masks(self) -> list[tuple[Array, Array]]:
        """The dense masks, and the bias if it hides, of which blocks are told apart; also as (..., h, n_q, n_k).

        None of calls that would not gain by it.
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
        """What hides whole blocks: the mask, and the bias where it does."""
        mask, bias = self.p.mask_node, self.p.bias
        if not any(x is bias for x, _ in self.masks):
            return mask
        visible = make("dense", "bool", (), bias)
        return visible if mask is None else make("logical_and", "bool", (mask, visible))

    @cached_property
    def varying(self) -> frozenset[str]:
        """What lists of tiles depend on, of "b" and "h" and the like."""
        views = [view for _, view in self.masks]
        found = {"h" for x in views if x.strides[-3]} | {"b" for x in views if any(x.strides[:-3])}
        return reads(*self.p.rules.hiding) | found

    @property
    def short(self) -> bool:
        """Whether the stages are few and small enough to keep, and do not depend on what arrays hold."""
        p, (heads, rows) = self.p, self.blocks
        if self.masks:
            return False
        tiles = p.batch * len(rows) * (p.n_k // KEYS + 1) if p.rules.hiding else 0
        return p.batch * len(heads) * len(rows) <= 2048 and tiles * len(heads) <= 2**15

    def __iter__(self) -> Iterator[Stage]:
        for tiles, items in self.waves():
            if self.threads > 1 and len(items) < 2 * self.threads:
                yield from self.apart(tiles, items)
            else:
                yield self.stage(tiles, items)

    def word(self, name: str) -> int:
        return self.kind.item.index(name)

    def stage(self, tiles: Array, items: Array, partial: int = 0, most: int = WIDE_GROUP) -> Stage:
        """Items in groups that share keys and values, or pages of them, the longest first."""
        heads_in_rows = self.kind.few and _heads_in_rows(self.p.key)
        # Under a window, those with as many queries as one of them sees keys are all that share any.
        tiles_of = items[:, self.word("count")]
        longest = int(tiles_of.max())
        near = -(-longest * KEYS // self.kind.lanes)
        products = self.kind.lanes * KEYS * max(1, self.p.d + self.p.d_v)  # heads may have no features
        size = min(most, max(GROUP, near), max(LEAST_GROUP, LONG_GROUP // (products * max(1, longest))))
        if self.threads > 1:  # enough groups that threads end at about the same time
            each = len(items) // self.threads
            size = max(1, min(size, each if heads_in_rows else each // 8))
        # Where a page of keys holds several heads, it is gone through by all of them before the next.
        alike = [self.word(name) for name in (["b"] if heads_in_rows else ["k", "v"])]
        shared = (np.diff(items[:, alike], axis=0) == 0).all(axis=1)
        ends = np.append(np.flatnonzero(~shared) + 1, len(items)).tolist()
        starts = [n for first, end in zip([0, *ends], ends, strict=False) for n in range(first, end, size)]
        bounds = np.array([starts, [*starts[1:], len(items)]], np.int64).T.copy()
        if len(bounds) > 1:
            cost = np.add.reduceat(items[:, self.word("count")], bounds[:, 0])
            bounds = bounds[np.argsort(-cost, kind="stable")]
        if self.threads > 1 and not self.kind.few:
            # The last halved again and again: threads, which may differ in speed, should end at about the same time.
            for _ in range(HALVINGS):
                last = bounds[-2 * self.threads :]
                middle = last.mean(axis=1, dtype=np.int64)
                halves = np.stack([last[:, 0], middle, middle, last[:, 1]], axis=1).reshape(-1, 2)
                bounds = np.concatenate([bounds[: -2 * self.threads], halves[halves[:, 0] < halves[:, 1]]])
        most = int((bounds[:, 1] - bounds[:, 0]).max())
        scratch = scratch_size(self.kind, most, self.p.d, self.p.d_v) * self.kind.real.size
        return Stage(tiles, items, bounds, scratch, partial, in_portions(bounds, tiles_of, products))

    def apart(self, tiles: Array, items: Array) -> Iterator[Stage]:
        """Few items with many keys: each span by itself, then what merges them, if there is anything to merge."""
        kind, p = self.kind, self.p
        size = sum(span_area(kind, p.d_v).values()) * kind.real.size
        spans = ((tiles >> TILE_BITS) + p.origin[2] // KEYS) >> span_bits(p.d, p.dtype.itemsize)
        made, numbers = [], []
        for item in items:
            mine = spans[item[self.word("tiles")] :][: item[self.word("count")]]
            starts = np.flatnonzero(np.diff(mine, prepend=-1))
            part = np.repeat(item[None], len(starts), axis=0)
            part[:, self.word("tiles")] += starts
            part[:, self.word("count")] = np.diff(starts, append=len(mine))
            made.append(part)
            numbers.append(len(starts))
        if max(numbers) < 2:
            yield self.stage(tiles, items)
            return
        each, merged = np.concatenate(made), items.copy()
        each[:, self.word("partial")] = size * np.arange(len(each))
        merged[:, self.word("partial")] = size * np.append(0, np.cumsum(numbers[:-1]))
        merged[:, self.word("spans")], merged[:, self.word("count")] = numbers, 0
        yield self.stage(tiles, each, size * len(each), most=1)
        yield self.stage(tiles, merged, size * len(each))

    def waves(self, size: int = WAVE) -> Iterator[tuple[Array, Array]]:
        """Lists of tiles, and the items that point into them, of so many blocks of queries at once."""
        p, (heads, rows) = self.p, self.blocks
        shift = p.origin[2] % KEYS
        tiles = np.arange(-(-(p.n_k + shift) // KEYS) if p.n_k else 0, dtype=np.int64)
        everyone = range(p.batch)
        if (self.mask is None and p.rules.hiding_node is None) or len(tiles) <= 1:
            # One tile is not worth a look at what it hides.
            zero = np.zeros(len(rows), np.int64)
            mixed = KEYS if p.rules.hiding else 0
            word = tile_word(tiles, mixed_stop=mixed)
            yield word, self.items(everyone, heads, rows, zero, zero + len(tiles))
            return
        edges, reading = p.extents.key_edges(KEYS), self.varying
        cell, target = max(1, self.kind.lanes // 2), chosen()
        masks = {id(x): BlockMask(view, self.rows.start, cell, target, self.threads) for x, view in self.masks}
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
                    mine = heads[heads[:, 0] == first] if "h" in reading else heads
                    parts.append(self.items(batch, mine, band, begin + length, number))
                    lists.append(found)
                    length += len(found)
                yield np.concatenate(lists), np.concatenate(parts)

    def visible(self, ranges: Ranges, edges: Array) -> tuple[Array, Array, Array]:
        """The tiles of some blocks of queries, where each block's begin, and how many there are."""
        p = self.p
        row, tile, kind = visible_tiles(self.mask, p.rules.hiding_node, ranges, edges)
        fields = {name: np.full(len(tile), x) for name, x in TILE_WORD.items()}
        mixed = np.flatnonzero(kind != EVERYTHING)
        if len(mixed):
            for some in np.split(mixed, range(PAIRS, len(mixed), PAIRS)):
                for name, x in self.parts(ranges, row[some], tile[some], edges).items():
                    fields[name][some] = x
            live = fields["stop"] > 0
            row, tile, fields = row[live], tile[live], {name: x[live] for name, x in fields.items()}
        begin = np.searchsorted(row, np.arange(len(ranges.i[0]) + 1))
        return tile_word(tile, **fields), begin[:-1], np.diff(begin)

    def parts(self, ranges: Ranges, row: Array, tile: Array, edges: Array) -> dict[str, Array]:
        """Of pairs of blocks and tiles: what `tile_word` says."""
        p = self.p
        start = tile[:, None] * KEYS - p.origin[2] % KEYS + p.origin[2] + np.arange(0, KEYS, PART)
        low, high = np.maximum(start, edges[tile, None]), np.minimum(start + PART, edges[tile + 1, None]) - 1
        outside = low > high
        # Of blocks that fill all lanes, each half by itself; of others both halves are the block.
        least, greatest = ranges.i[0][row, None], ranges.i[1][row, None]
        full = greatest - least + 1 == self.kind.lanes
        middle = least + self.kind.lanes // 2
        halves = (least, np.where(full, middle - 1, greatest)), (np.where(full, middle, least), greatest)
        kinds = [
            classify(self.mask, p.rules.hiding_node, replace(ranges, i=i, j=(low, np.maximum(low, high))))
            for i in halves[: 1 + full.any()]
        ]
        seen = [(kind != NOTHING) & ~outside for kind in kinds]
        first, stop = _ends(seen[0] | seen[-1])
        number = np.arange(0, KEYS, PART)
        between = (number >= first[:, None]) & (number < stop[:, None]) & ~outside
        mixed_first, mixed_stop = _ends(((kinds[0] != EVERYTHING) | (kinds[-1] != EVERYTHING)) & between)
        (first_0, stop_0), (first_1, stop_1) = _ends(seen[0]), _ends(seen[-1])
        both_first, both_stop = np.maximum(first_0, first_1), np.minimum(stop_0, stop_1)
        # Where one half sees nothing, all is the other's; where they are apart, all is both's.
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

    def arrays(self) -> Iterable[tuple[str, Array | None, int, bool]]:
        return self.results.arrays(self.p)

    def items(self, batch: range, heads: Array, rows: Array, begin: Array, number: Array) -> Array:
        """Items (batch × heads × rows, words) of some batch elements."""
        p = self.p
        made = np.zeros((len(batch), len(heads), len(rows), len(self.kind.item)), np.int64)
        column = {name: made[..., n] for n, name in enumerate(self.kind.item)}
        h, first = heads[:, 0, None], rows[:, 0]
        b = np.arange(batch.start, batch.stop)[:, None, None]

        for name, x, keep, shared in self.arrays():
            if x is not None:
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
        return made.reshape(-1, len(self.kind.item))


def _batch_offsets(x: Array, lead: tuple[int, ...], keep: int) -> Array:
    """How many bytes after the first each batch element begins, in an array that broadcasts to the leading shape."""
    offsets = np.zeros(1, np.int64)
    given = x.ndim - keep
    for axis, size in enumerate(lead):
        mine = axis - (len(lead) - given)
        step = x.strides[mine] if mine >= 0 and x.shape[mine] != 1 else 0
        offsets = (offsets[:, None] + step * np.arange(size)).reshape(-1)
    return offsets


def by_head(p: Problem, x: Array) -> Array:
    """What a sink says, for each query head."""
    return np.ascontiguousarray(np.broadcast_to(x.astype(p.compute), (p.heads,)))


def programs(p: Problem) -> list[tuple[str, Program]]:
    """The rules of a call, with what their fields' names begin with."""
    nodes = (("mask", p.mask_node), ("score", p.score_node))
    return [(prefix, Program.of([node])) for prefix, node in nodes if node is not None]


def shared_fields(p: Problem, rules: Sequence[tuple[str, Program]]) -> dict[str, int | float]:
    """The fields that every kernel has, but for addresses of arrays."""
    j0 = p.origin[2]
    words: dict[str, int | float] = {
        "d": p.d, "d_v": p.d_v, "n_k": p.n_k, "shift": j0 % KEYS, "first_tile": j0 // KEYS, "j": j0, "keys": p.keys,
        "scale": float(p.scale), "row_head": p.n_q,
        "k_head": p.key.strides[-3], "k_row": p.key.strides[-2], "k_feature": p.key.strides[-1],
        "v_head": p.value.strides[-3], "v_row": p.value.strides[-2], "v_feature": p.value.strides[-1],
        "threshold": int(p.dropout * 2**32), "kept": float(p.compute.type(1 / (1 - p.dropout))),
    }  # fmt: skip
    dense = {f"dense{n}": x for n, x in enumerate(dense_masks(p))}
    if p.bias is not None:
        dense["bias"] = p.dense(p.bias)
    for name, x in dense.items():
        words |= zip((f"{name}_head", f"{name}_row", f"{name}_key"), x.strides[-3:], strict=True)
    for prefix, program in rules:
        words |= {f"{prefix}_number{n}": number for n, number in enumerate(program.numbers)}
        for n, table in enumerate(program.tables):
            name = f"{prefix}_table{n}"
            words[name] = address_of(table_array(table, p.compute))
            words |= {f"{name}_size{axis}": length for axis, length in enumerate(table.shape)}
    return words


def table_array(table: Table, real: Any) -> Array:
    """The array of a table as kernels read it: the call's float type, or int64."""
    kept = _tables.setdefault(table, {})
    dtype = np.dtype(real if table.kind == "float" else np.int64)
    if dtype not in kept:
        kept.setdefault(dtype, np.ascontiguousarray(table.array, dtype))  # one for all threads: plans hold its address
    return kept[dtype]


def dense_masks(p: Problem) -> list[Array]:
    """The dense masks (..., h, n_q, n_k) as bytes; views."""
    return [] if p.mask_node is None else [p.dense(x.view(np.int8)) for x in Program.of([p.mask_node]).dense]


def _ends(marked: Array) -> tuple[Array, Array]:
    """Of rows of parts: the first key of the first that is marked and the one after the last; 0 and 0 if none is."""
    any_one, last = marked.any(axis=1), marked.shape[1] - marked[:, ::-1].argmax(axis=1)
    return np.where(any_one, marked.argmax(axis=1), 0) * PART, np.where(any_one, last, 0) * PART


def source(kind: Kind, target: Target) -> str:
    """The IR of a kernel."""

    def write(k: "Kernel") -> None:
        from regard.engines.cpu.kernels.decode import FewQueries
        from regard.engines.cpu.kernels.prefill import ManyQueries

        (FewQueries if kind.few else ManyQueries)(k, kind).run()

    return written("forward", kind.fields, target, write)


def kind_of(
    p: Problem,
    target: Target,
    rows: int,
    entropy: bool,
    best: int = 0,
    few: bool = True,
    rules: Sequence[tuple[str, Program]] | None = None,
    more: Sequence[Array] = (),
) -> Kind:
    """The kernel for so many rows of a call, that keeps so many of the largest weights.

    few: lanes may be keys. rules: instead of those of the call. more: arrays that are read as keys and values are.
    """
    found = {prefix: Arguments(prefix, program) for prefix, program in (programs(p) if rules is None else rules)}
    plain = with_queries_in_lanes(p, target, rows * p.group, found.get("mask"), found.get("score"), entropy)
    W = target.lanes(plain.real.size)
    straight = [x.strides[-1] == x.itemsize or x.shape[-1] <= 1 for x in (p.key, p.value, *more)]
    matrices = plain.element is BF16 and target.matrices and p.scale != 0
    pairs = matrices or (plain.element is BF16 and target.bf16_dot and p.scale != 0)
    few = few and rows * p.group <= min(FEW, W) and straight[1] and not best
    # A mask that differs by head would have each tile that one head sees worked on for all.
    beside = p.kv_heads > 1 and all(x.strides[-3] > 0 and _heads_in_rows(x) for x in (p.key, p.value))
    joined = few and beside and "h" not in reads(*p.rules.hiding)
    converted = plain.element is not plain.real and not pairs
    apart = rows * p.group > plain.lanes and any(_scattered(x) for x in (p.key, p.value, *more))
    vectors = -(-min(rows * p.heads, JOINED) // W) if joined else 0
    return replace(
        plain,
        lanes=(vectors or 1) * W if few else plain.lanes,
        few=0 if not few else rows * p.group if joined else 1 << (max(1, rows * p.group) - 1).bit_length(),
        joined=vectors,
        pairs=pairs,
        matrices=matrices,
        woven=target.weaves and not (few or matrices),
        copied=not few and (converted or apart or not all(straight) or matrices or (pairs and p.d % 2 != 0)),
        best=best,
    )


def with_queries_in_lanes(
    p: Problem, target: Target, queries: int, mask: Arguments | None, score: Arguments | None, entropy: bool
) -> Kind:
    """A kernel for a call with so many queries that share keys: of numbers one by one, and of copies of K and V."""
    real = F64 if p.compute == np.float64 else F32
    W = target.lanes(real.size)
    most = target.tile[1]
    # One vector less is slower by less than an eighth: 16 W queries fill 8 blocks of 2 W, eight ninths of 6 of 3 W.
    if 8 * multiple(queries, W * most) >= 9 * multiple(queries, W * (most - 1)):
        most -= 1
    lanes = max(1, min(queries, W * most))
    return Kind(
        element=type_of(p.dtype),
        real=real,
        integer=integer_type(p.rules.integers, mask, score) if mask or score else I64,
        lanes=multiple(lanes, W),
        few=0,
        joined=0,
        pairs=False,
        matrices=False,
        copied=True,
        woven=False,
        mask=mask,
        score=score,
        bias=None if p.bias is None else type_of(p.bias.dtype),
        dropout=bool(p.dropout),
        sink=p.sink is not None,
        entropy=entropy,
        best=0,
    )


def _heads_in_rows(x: Array) -> bool:
    """Whether rows of several heads lie within what is from row to row: heads inside of tokens."""
    return bool(x.strides[-3] < x.strides[-2])


def _scattered(x: Array) -> bool:
    """Whether a head's rows lie apart over more than FAR bytes: they share few sets of a cache and evict each other."""
    step = x.strides[-2]
    return bool(step > x.shape[-1] * x.itemsize and step * x.shape[-2] > FAR)


def working_memory(p: Problem) -> int:
    """About how many bytes a call takes beyond inputs and outputs: tiles, items, and lists of tiles."""
    kind = kind_of(p, chosen(), p.n_q, False)
    blocks = -(-p.heads * p.n_q // kind.lanes) if kind.joined else p.heads * -(-p.n_q // kind.lanes)
    items, lists = p.batch * blocks, 1
    if p.rules.hiding:
        items = min(blocks, WAVE * p.heads)
        lists = min(-(-p.n_q // kind.lanes), WAVE) * (p.heads if "h" in reads(*p.rules.hiding) else 1)
    words = 2 * items * len(kind.item) + 3 * lists * -(-p.n_k // KEYS)
    scratch = scratch_size(kind, min(WIDE_GROUP, items), p.d, p.d_v) * kind.real.size
    return min(num_threads(), p.batch * blocks) * scratch + 8 * words
