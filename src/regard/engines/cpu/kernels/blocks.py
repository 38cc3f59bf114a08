"""Query blocks, their rows in operands, and the loop over work groups."""

from collections.abc import Callable
from contextlib import nullcontext

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.amx import AmxRegisters
from regard.engines.cpu.language.kernel import Kernel, place
from regard.engines.cpu.language.types import I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.scratch import BlockState, SplitState, query_block_scratch, split_scratch

NONE = 2**62  # the number after the last step


def each_work_group(lanes: Lanes, registers: AmxRegisters | None, work: Callable[[Value, Value, Value], None]) -> None:
    """Compute work groups until all threads that share the counter have taken all.

    work(first, stop, following): computes the query blocks from `first` to before `stop`. `following` is the first of
    the next work group, or of the last.
    """
    k = lanes.k
    groups, taken, count = k.pointer("work_groups", I64), k.pointer("taken", I64), k.integer("count")
    if lanes.spec.amx:
        k.flush_inputs()
    one = k.whole(1)
    n = k.variable(taken.fetch_add(one))
    with registers.configured() if registers else nullcontext(), k.loop_while(lambda: n.value < count):
        following = groups[k.minimum(n.value + 1, count - 1) * 2]
        work(groups[n.value * 2], groups[n.value * 2 + 1], following)
        n.value = taken.fetch_add(one)


def each_step(
    k: Kernel,
    each: Callable[[Callable[["RowBlock"], None]], None],
    number: Callable[["RowBlock"], Value],
    begin: Callable[[Value], None],
    work: Callable[["RowBlock"], None],
) -> None:
    """Take the query blocks of a work group through numbered steps together.

    each: calls a function with every block. number: the number of a block's next step, or NONE. begin: called with the
    number of a step, before `work` is with all blocks that have this step.
    """
    none = k.constant(I64, NONE)
    current = k.variable(none)

    def find(block: RowBlock) -> None:
        current.value = k.minimum(current.value, number(block))

    def pass_over(block: RowBlock) -> None:
        with k.when(number(block) == current.value):
            work(block)

    each(find)
    with k.loop_while(lambda: current.value != none):
        begin(current.value)
        each(pass_over)
        current.value = none
        each(find)


class BlockRecord:
    """The fields of the n-th query block, and its rows of operands."""

    def __init__(self, lanes: Lanes, n: Value):
        self.k, self.spec, self.lanes = lanes.k, lanes.spec, lanes
        self.record = self.k.pointer("blocks", I64) + n * len(self.spec.block_fields)

    def field(self, name: str) -> Value:
        return self.record[place(self.spec.block_fields, name)]

    def address(self, name: str) -> Pointer:
        """Return the address of the block's first row in an operand that the spec takes."""
        name = self.spec.operand(name).name
        base = self.k.pointer_at(self.lanes.bases, place(self.spec.block_fields, name), self.spec.type_of(name))
        return base.bytes(self.field(name))

    def strides(self, name: str) -> list[Value]:
        """Return the strides of an operand's axes in bytes, in their order."""
        return [self.k.integer(field) for field in self.spec.operand(name).strides]

    def has(self, name: str) -> Value:
        """Test if the call has an array that it may lack."""
        assert self.spec.operand(name).tested or name in self.spec.varying, name
        return self.lanes.bases[place(self.spec.block_fields, name)] != 0

    def source(self, name: str, row: Value) -> Pointer:
        """Return a row of K or V by its column."""
        return self.address(name).bytes(row * self.k.integer(f"{name}_row"))

    def dense_at(self, name: str, column: Value) -> tuple[Pointer, list[Value]]:
        """Return the address of a dense array's key, and its strides by head, row, key."""
        strides = self.strides(name)
        return self.address(name).bytes(column * strides[2]), strides


class RowBlock(BlockRecord):
    """The query block that a kernel computes, with its scratch memory in `state`.

    Forward gives its work group, as `each_work_group` does. Then `leading` is true for the first block of that,
    `following` is the next block, and `merged` the state of the splits so far.
    """

    merged: SplitState
    leading: Value
    following: BlockRecord

    def __init__(self, lanes: Lanes, n: Value, state: Pointer, group: tuple[Value, Value, Value] | None = None):
        super().__init__(lanes, n)
        integer = self.spec.integer
        types = {"i": integer, "h": integer, "first": I32, "second": I32}
        types |= dict.fromkeys(("g", "r", "cursor", "state"), I64)
        self.state = BlockState(state, query_block_scratch(self.spec, lanes.d, lanes.d_v), types)
        if group:
            first, stop, following = group
            self.merged = SplitState(self.state.end, split_scratch(self.spec, lanes.d_v))
            self.leading = n == first
            self.following = BlockRecord(lanes, self.k.where(n + 1 < stop, n + 1, following))

    def each_lane(self, work: Callable[[Value, Value, Value], None]) -> None:
        """Call `work` with every lane's number, head in the block and row.

        Lanes without a row repeat the last.
        """
        k, last, rows = self.k, self.field("lanes") - 1, self.field("rows")
        with k.loop(self.lanes.B) as lane:
            n = k.minimum(lane, last)
            work(lane, n // rows, n % rows)

    def row(self, base: Pointer, lane: Value, head: Value, row: Value) -> Pointer:
        """Return the row of a lane, in an array whose base is the block's first row."""
        return base.bytes(self.state.g[lane] * head + self.state.r[lane] * row)

    def index_lane(self, lane: Value, g: Value, r: Value) -> None:
        """Store the row's indices and dropout keys."""
        k, state = self.k, self.state
        i, h = self.field("i") + r, self.field("h") + g
        state.i[lane], state.h[lane] = i.to(self.spec.integer), h.to(self.spec.integer)
        state.g[lane], state.r[lane] = g, r
        if self.spec.dropout:
            first, second = mathematics.row_key(k, k.integer("seed"), self.field("b"), h, i)
            state.first[lane], state.second[lane] = first, second
