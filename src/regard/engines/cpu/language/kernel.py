"""The builder of CPU kernels: Python runs once and leaves LLVM IR behind.

A kernel is a Python function over a `Kernel` k. `with k.loop(n) as i` is a loop of the kernel, a Python `for` an
unrolled one; `with k.when(condition)` is a branch. A `Value` is a number in a register: a scalar (`lanes == 0`) or a
vector. Operators work on both, and scalars broadcast. A `Variable` can be set; a `Pointer` loads and stores. Types
follow from the values. Products of a loop's index with loop invariants, and addresses at them, cost one addition per
iteration.

    k = Kernel("add", target, ("x", "y", "n"))
    x, y = k.pointer("x", F32), k.pointer("y", F32)
    with k.loop(k.integer("n")) as i:
        y[i] = x[i] + y[i]
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from regard.engines.cpu.language.types import BF16, BOOL, F32, F64, I8, I32, I64, Type
from regard.engines.cpu.language.values import Count, Loop, Pointer, Value, Variable
from regard.engines.cpu.target.instructions import Target

ARITHMETIC = 0x9F80  # x86's MXCSR: round to nearest, no exceptions, flush subnormal results


class Kernel:
    """A function `name(fields)` under construction.

    `fields` are 64-bit arguments in memory, read by name.
    """

    def __init__(self, name: str, target: Target, fields: Sequence[str]):
        self.name, self.target, self.fields = name, target, tuple(fields)
        self.module = ir.Module(name)
        self.module.triple = target.triple
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), name)
        self.entry = self.function.append_basic_block("entry")
        self.b = ir.IRBuilder(self.function.append_basic_block("start"))
        self.arguments = Pointer(self, I64, self.function.args[0])
        self.saved_control: Variable | None = None  # the caller's control register

    def text(self) -> str:
        """Return the finished kernel as LLVM IR."""
        if self.saved_control is not None:
            self._control("ldmxcsr", self.saved_control)
        self.b.ret_void()
        with self.inside(self.entry):
            self.b.branch(self.function.basic_blocks[1])
        return str(self.module)

    def flush(self) -> None:
        """Flush subnormal results to 0 and round to nearest from here to the end.

        Results do not depend on the caller's floating-point mode. Some processors take 100 times as long for
        subnormals.
        """
        if self.target.control:
            self.saved_control, ours = (self.variable(self.constant(I32, x)) for x in (0, ARITHMETIC))
            self._control("stmxcsr", self.saved_control)
            self._control("ldmxcsr", ours)

    def flush_inputs(self) -> None:
        """Treat subnormal inputs as 0 from here to the end."""
        if self.target.control:
            self._control("ldmxcsr", self.variable(self.constant(I32, ARITHMETIC | 0x40)))

    def _control(self, name: str, register: Variable) -> None:
        self.call_named(f"llvm.x86.sse.{name}", ir.VoidType(), [ir.PointerType()], [register.slot])

    # Scalars and constants

    def raw(self, type: Type, lanes: int) -> Any:
        return ir.VectorType(type.raw, lanes) if lanes else type.raw

    def constant(self, type: Type, x: Any) -> Value:
        value = float(x) if type.category == "float" else int(x)
        return Value(self, type, 0, ir.Constant(type.raw, value))

    def whole(self, x: Any) -> Value:
        """Return a Python number as a 64-bit integer, and a value as it is."""
        return x if isinstance(x, Value) else self.constant(I64, x)

    def integer(self, name: str) -> Value:
        return self.arguments[place(self.fields, name)]

    def real(self, name: str, type: Type) -> Value:
        """Return a 64-bit float argument, converted."""
        return self.arguments.of(F64)[place(self.fields, name)].to(type)

    def pointer(self, name: str, type: Type) -> Pointer:
        return self.pointer_at(self.arguments, place(self.fields, name), type)

    def pointer_at(self, base: Pointer, n: Any, type: Type) -> Pointer:
        """Return the address stored at index n of a table of addresses."""
        return Pointer(self, type, self.b.load((base + n).raw, typ=ir.PointerType()))

    def at(self, address: Value, type: Type) -> Pointer:
        """Return a pointer to a computed address."""
        return Pointer(self, type, self.b.inttoptr(address.raw, ir.PointerType()))

    def address_after(self, base: Any, count: Any, element: Type = I8) -> Any:
        return self.b.gep(base, [count], source_etype=element.raw)

    def stack(self, count: int) -> Pointer:
        """Allocate `count` 64-bit integers for the duration of the kernel."""
        with self.inside(self.entry):
            return Pointer(self, I64, self.b.alloca(I64.raw, count))

    def variable(self, first: Value) -> Variable:
        return Variable(self, first)

    def lane_numbers(self, type: Type, lanes: int) -> Value:
        """Return the vector 0, 1, 2, ..."""
        return Value(self, type, lanes, ir.Constant(ir.VectorType(type.raw, lanes), list(range(lanes))))

    def flags(self, bits: Value, lanes: int) -> Value:
        """Return a boolean vector from the bits of an integer."""
        if not self.target.flags:  # otherwise LLVM would insert the bits one by one
            type = I64 if lanes * 8 == self.target.vector else I32
            places = self.constant(type, 1).spread(lanes) << self.lane_numbers(type, lanes)
            return (bits.to(type).spread(lanes) & places) != 0
        integer = self.b.trunc(bits.raw, ir.IntType(lanes))
        return Value(self, BOOL, lanes, self.b.bitcast(integer, self.raw(BOOL, lanes)))

    # Control flow

    @contextmanager
    def inside(self, block: Any) -> Iterator[None]:
        """Append to another block, before its jump if it has one."""
        here = self.b.block
        with self.b.goto_block(block):
            yield
        if here.is_terminated:
            self.b.position_before(here.terminator)

    @contextmanager
    def loop(self, stop: Any, start: Any = 0, step: Any = 1) -> Iterator[Value]:
        """Loop over start, start + step, ... below stop.

        All three are fixed when the loop begins.
        """
        stop, start, step = self.whole(stop), self.whole(start), self.whole(step)
        loop = Loop(self, start, step)
        b, i = self.b, Count(loop)
        b.cbranch(b.icmp_signed("<", start.raw, stop.raw), loop.enter, loop.done)
        b.position_at_end(loop.enter)
        b.branch(loop.body)
        b.position_at_end(loop.body)
        loop.grown()
        yield i
        following, *_ = loop.end()
        b.cbranch(b.icmp_signed("<", following, stop.raw), loop.body, loop.done)
        b.position_at_end(loop.done)

    @contextmanager
    def loop_while(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Loop while the condition, evaluated before each iteration, holds."""
        body, done = (self.function.append_basic_block(x) for x in ("body", "done"))
        self.b.cbranch(condition().raw, body, done)
        self.b.position_at_end(body)
        yield
        self.b.cbranch(condition().raw, body, done)
        self.b.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition.raw):
            yield

    @contextmanager
    def choice(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """Branch two ways.

        Write `with k.choice(c) as (yes, no)`, then `with yes:` and `with no:`.
        """
        with self.b.if_else(condition.raw) as branches:
            yield branches

    def interleave(self, *pieces: Callable[[], None]) -> None:
        """Interleave the instructions of several pieces of straight-line code.

        The out-of-order window is shorter than one piece, so pieces in sequence would not overlap. Pieces must not
        branch, nor depend on each other.
        """
        block, done = self.b.block, []

        def written() -> list[Any]:  # phi nodes are put in front, whenever they are made
            return [x for x in block.instructions if x.opname != "phi"]

        for n, piece in enumerate(pieces):
            before = len(written())
            piece()
            if self.b.block is not block:
                raise ValueError("a piece that is pipelined branches")
            new = written()[before:]
            done += [((m + 1) / len(new), n, m, x) for m, x in enumerate(new)]
        first = len(block.instructions) - len(done)
        block.instructions[first:] = [x for *_, x in sorted(done, key=lambda found: found[:3])]

    # Functions of all targets

    def fence(self) -> None:
        """Make earlier stores visible to every thread that sees later ones."""
        self.b.fence("seq_cst")

    def stay(self) -> None:
        """Keep the compiler from moving loads and stores across this point.

        No instruction is written.
        """
        self.b.fence("seq_cst", targetscope="singlethread")

    def need(self, x: Value) -> None:
        """Keep the computation of x, although nothing uses it."""
        types = [x.raw.type]
        self.b.asm(ir.FunctionType(ir.VoidType(), types), "", "r", [x.raw], side_effect=True)

    def call_named(self, name: str, result: Any, types: Sequence[Any], arguments: Sequence[Any]) -> Any:
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, list(types)), name)
        return self.b.call(function, list(arguments))

    def intrinsic(self, name: str, result: Type, *xs: Value) -> Value:
        """Apply an LLVM intrinsic elementwise."""
        lanes = max(x.lanes for x in xs)
        xs = tuple(x.spread(lanes) for x in xs)
        prefix = f"v{lanes}" if lanes else ""
        suffix = f".{prefix}{xs[0].type}" if result is xs[0].type else f".{prefix}{result}.{prefix}{xs[0].type}"
        raw = [x.raw for x in xs]
        call = self.call_named(f"llvm.{name}{suffix}", self.raw(result, lanes), [x.type for x in raw], raw)
        return Value(self, result, lanes, call)

    def library(self, name: str, x: Value) -> Value:
        """Apply a function of the C library, such as "expm1", to each lane."""
        name = name + ("f" if x.type is F32 else "")
        if not x.lanes:
            return Value(self, x.type, 0, self.call_named(name, x.type.raw, [x.type.raw], [x.raw]))
        result = Value(self, x.type, x.lanes, ir.Constant(x.raw.type, ir.Undefined))
        for n in range(x.lanes):
            result = result.with_lane(n, self.library(name.removesuffix("f") if x.type is F32 else name, x.lane(n)))
        return result

    def frozen(self, x: Value) -> Value:
        """Return x through LLVM's `freeze`, which separates it from its load.

        Otherwise `p[0] = where(c, p[0], y)` becomes a masked store. With AVX2 that is VMASKMOVPS, which takes a Zen 3
        some 20 cycles.
        """
        instruction = ir.Instruction(self.b.block, x.raw.type, "freeze", [x.raw])  # llvmlite's builder has none
        self.b._insert(instruction)
        value: Value = x._like(instruction)
        return value

    def where(self, condition: Value, x: Any, y: Any) -> Value:
        """Select x where the condition holds, else y; at least one of them is a `Value`."""
        yes, no = x._meet(y) if isinstance(x, Value) else y._meet(x)[::-1]
        lanes = max(condition.lanes, yes.lanes)
        yes, no = yes.spread(lanes), no.spread(lanes)
        selected: Value = yes._like(self.b.select(condition.raw, yes.raw, no.raw))
        return selected

    def pick(self, n: Value, options: Sequence[Value]) -> Value:
        """Return the n-th of some values."""
        *others, chosen = options
        for m, x in reversed(list(enumerate(others))):
            chosen = self.where(n == m, x, chosen)
        return chosen

    def pick_pointer(self, n: Value, options: Sequence[Pointer]) -> Pointer:
        return self.at(self.pick(n, [x.address for x in options]), options[0].type)

    def folded(self, x: Value, operation: Callable[[Value, Value], Value]) -> Value:
        """Reduce the lanes of a vector by halves."""
        while x.lanes > 2:
            half = x.lanes // 2
            x = operation(*(self.shuffle(x, x, range(n, n + half)) for n in (0, half)))
        return operation(x.lane(0), x.lane(1))

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Transpose a square of vectors.

        With fewer rows than lanes, each 16 bytes of the rows are transposed separately.
        """
        n = len(rows)
        inside = min(n, 16 // rows[0].type.size)  # lanes in 16 bytes, within which a shuffle is cheapest
        columns = list(rows)
        for first in range(0, n, inside):
            columns[first : first + inside] = self._transpose_within(columns[first : first + inside])
        for column in range(inside):
            columns[column::inside] = self._transpose_across(columns[column::inside], inside)
        return columns

    def _transpose_within(self, rows: list[Value]) -> list[Value]:
        """Transpose every block of as many lanes as there are rows."""
        n, half = rows[0].lanes, len(rows) // 2
        for _ in range(half.bit_length()):
            shuffled = []
            for x, y in zip(rows[:half], rows[half:], strict=True):
                for start in (0, half):
                    lanes = [
                        block + start + i // 2 + n * (i % 2) for block in range(0, n, 2 * half) for i in range(2 * half)
                    ]
                    shuffled.append(self.shuffle(x, y, lanes))
            rows = shuffled
        return rows

    def _transpose_across(self, rows: list[Value], block: int) -> list[Value]:
        """Transpose a matrix of blocks of lanes."""
        if len(rows) == 1:
            return rows
        n = rows[0].lanes
        even, odd = (
            [
                self.shuffle(x, y, [i + b for b in range(start, 2 * n, 2 * block) for i in range(block)])
                for x, y in zip(rows[::2], rows[1::2], strict=True)
            ]
            for start in (0, block)
        )
        columns: list[Value] = [None] * len(rows)  # type: ignore[list-item]
        columns[::2], columns[1::2] = self._transpose_across(even, block), self._transpose_across(odd, block)
        return columns

    def shuffle(self, x: Value, y: Value, lanes: Sequence[int]) -> Value:
        """Return the numbered lanes of x and y.

        The lanes of y are numbered after those of x.
        """
        mask = ir.Constant(ir.VectorType(I32.raw, len(lanes)), list(lanes))
        return Value(self, x.type, len(lanes), self.b.shuffle_vector(x.raw, y.raw, mask))

    def maximum(self, x: Value, y: Any) -> Value:
        """Return the greater value; for floats y if either is NaN."""
        return self.where(x > y, x, y)

    def minimum(self, x: Value, y: Any) -> Value:
        """Return the lesser value; for floats y if either is NaN."""
        return self.where(x < y, x, y)

    def fma(self, x: Value, y: Any, z: Any) -> Value:
        """Return x · y + z, rounded once where the target has FMA.

        With `relaxed`, the browser's processor decides.
        """
        x, y = x._meet(y)
        x, z = x._meet(z)
        if self.target.relaxed and x.lanes * x.type.size == self.target.vector:
            return self.intrinsic("wasm.relaxed.madd", x.type, x, y.spread(x.lanes), z)
        return self.intrinsic("fma" if self.target.fma else "fmuladd", x.type, x, y.spread(x.lanes), z)

    def rint(self, x: Value) -> Value:
        """Round to the nearest integer, ties to even."""
        return self.intrinsic("rint", x.type, x)

    # bfloat16 in packed pairs

    def dot_bf16(self, total: Value, x: Value, y: Value) -> Value:
        """Return total + x₀ y₀ + x₁ y₁ for packed bf16 pairs.

        A whole vector of sums, or half of one. Needs a target with `bf16_dot`.
        """
        vector = ir.VectorType(BF16.raw, 2 * total.lanes)
        arguments = [total.raw, *(self.b.bitcast(v.raw, vector) for v in (x, y))]
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * total.lanes}"
        return total._like(self.call_named(name, total.raw.type, [a.type for a in arguments], arguments))

    def pack_bf16(self, x: Value, y: Value) -> Value:
        """Round x and y to bfloat16 and pack them in pairs, lane by lane.

        Needs `bf16_dot`.
        """
        name, type = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BF16.raw, 32)
        both = Value(self, BF16, 32, self.call_named(name, type, [y.raw.type, x.raw.type], [y.raw, x.raw]))
        interleaved = self.shuffle(both, both, [n // 2 + 16 * (n % 2) for n in range(32)])
        return Value(self, I32, 16, self.b.bitcast(interleaved.raw, self.raw(I32, 16)))

    def mask_bf16(self, packed: Value, visible: Iterable[Value]) -> Value:
        """Return packed pairs with 0 for hidden numbers.

        visible: flags of the low and of the high ones.
        """
        low, high = (self.where(x, self.constant(I32, 0xFFFF << 16 * n), 0) for n, x in enumerate(visible))
        return packed & (low | high)

    def unpack_bf16(self, packed: Value) -> tuple[Value, Value]:
        """Return both numbers of packed bf16 pairs as float32."""
        return (packed << 16).bits(F32), (packed & -0x10000).bits(F32)

    def round_bf16(self, x: Value) -> Value:
        """Round a float32 vector to bfloat16, as `pack_bf16` does."""
        name, type = "llvm.x86.avx512bf16.cvtneps2bf16.512", self.raw(BF16, 16)
        return Value(self, BF16, 16, self.call_named(name, type, [x.raw.type], [x.raw]))

    # Whole vectors of AVX-512

    def scale_floor(self, x: Value, n: Value) -> Value:
        """Return x · 2^⌊n⌋, rounded once; 0 where n is −∞."""
        return self._avx512("mask.scalef", x, n, x, None, 4)

    def fraction(self, x: Value, bits: int) -> Value:
        """Return x − ⌊x · 2^bits⌋ / 2^bits; 0 for ±∞."""
        return self._avx512("mask.reduce", x, bits << 4 | 9, x, None, 4)

    def add_down(self, x: Value, y: Value) -> Value:
        """Return x + y, rounded down."""
        return self._avx512("add", x, y.spread(x.lanes), 9)

    def look_up(self, table: Sequence[float], index: Value, type: Type) -> Value:
        """Look numbers up in a table of two vectors by the low bits of an index."""
        raw, half = self.raw(type, index.lanes), index.lanes
        low, high = (Value(self, type, half, ir.Constant(raw, list(x))) for x in (table[:half], table[half:]))
        return self._avx512("vpermi2var", low, index, high)

    def _avx512(self, name: str, x: Value, *others: Value | int | None) -> Value:
        """Call an AVX-512 instruction with a vector and other operands.

        others: vectors; integers, which are immediate; None for a mask of all lanes.
        """
        if x.lanes * x.type.size != 64:
            raise TypeError(f"{name} takes a whole vector, not {x.lanes} lanes of {x.type}")
        every = ir.Constant(ir.IntType(x.lanes), -1)
        arguments = [x.raw]
        for y in others:
            arguments.append(y.raw if isinstance(y, Value) else every if y is None else ir.Constant(I32.raw, y))
        name = f"llvm.x86.avx512.{name}.{'ps' if x.type is F32 else 'pd'}.512"
        return x._like(self.call_named(name, x.raw.type, [y.type for y in arguments], arguments))


def place(fields: Sequence[str], name: str) -> int:
    """Return the index of a field; raise ValueError for one that a kernel lacks."""
    if name not in fields:
        raise ValueError(f"{name} must be a field of the kernel, got none: it has {', '.join(fields)}")
    return fields.index(name)
