"""A language for CPU kernels: Python runs once and leaves LLVM IR behind.

A kernel is a Python function over a `Kernel` k. `with k.loop(n) as i` is a loop of the kernel, a Python `for` an
unrolled one; `with k.when(condition)` a branch. A `Value` is a number in a register, one (`lanes == 0`) or a vector of
them; operators work on both, and a number or a single value meets a vector in every lane. A `Variable` can be set; a
`Pointer` loads and stores. Nothing is declared: types follow from the values. Products of a loop's number with what was
there before the loop, and addresses at them, cost an addition in each turn.

    k = Kernel("add", target, ("x", "y", "n"))
    x, y = k.pointer("x", F32), k.pointer("y", F32)
    with k.loop(k.integer("n")) as i:
        y[i] = x[i] + y[i]
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from regard.engines.cpu.language.types import BF16, BOOL, F32, F64, I8, I32, I64, Type
from regard.engines.cpu.language.values import Count, Loop, Pointer, Value, Variable
from regard.engines.cpu.target.instructions import Target

ARITHMETIC = 0x9F80  # of x86: round to nearest, no exceptions, results below the smallest normal number are 0


class Kernel:
    """A function `name(fields)` under construction; `fields` are 64-bit words in memory, read by name."""

    def __init__(self, name: str, target: Target, fields: Sequence[str]):
        self.name, self.target, self.fields = name, target, tuple(fields)
        self.module = ir.Module(name)
        self.module.triple = target.triple
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), name)
        self.entry = self.function.append_basic_block("entry")
        self.b = ir.IRBuilder(self.function.append_basic_block("start"))
        self.arguments = Pointer(self, I64, self.function.args[0])
        self.kept: Variable | None = None  # the caller's rounding

    def text(self) -> str:
        """The finished kernel as LLVM IR."""
        if self.kept is not None:
            self._control("ldmxcsr", self.kept)
        self.b.ret_void()
        with self.inside(self.entry):
            self.b.branch(self.function.basic_blocks[1])
        return str(self.module)

    def flush(self) -> None:
        """From here to the end, make 0 of results below the smallest normal number, and round to nearest, whatever the
        caller's thread does. Some processors take a hundred times as long for such numbers.
        """
        if self.target.control:
            self.kept, ours = (self.variable(self.constant(I32, x)) for x in (0, ARITHMETIC))
            self._control("stmxcsr", self.kept)
            self._control("ldmxcsr", ours)

    def flush_inputs(self) -> None:
        """From here to the end, numbers below the smallest normal one also count as 0."""
        if self.target.control:
            self._control("ldmxcsr", self.variable(self.constant(I32, ARITHMETIC | 0x40)))

    def _control(self, name: str, register: Variable) -> None:
        self.call_named(f"llvm.x86.sse.{name}", ir.VoidType(), [ir.PointerType()], [register.slot])

    # Numbers

    def raw(self, type: Type, lanes: int) -> Any:
        return ir.VectorType(type.raw, lanes) if lanes else type.raw

    def constant(self, type: Type, x: Any) -> Value:
        value = float(x) if type.kind == "float" else int(x)
        return Value(self, type, 0, ir.Constant(type.raw, value))

    def whole(self, x: Any) -> Value:
        """A Python number as a 64-bit integer; a value as it is."""
        return x if isinstance(x, Value) else self.constant(I64, x)

    def integer(self, name: str) -> Value:
        return self.arguments[self.fields.index(name)]

    def real(self, name: str, type: Type) -> Value:
        """The 64-bit float of that name, converted."""
        return self.arguments.of(F64)[self.fields.index(name)].to(type)

    def pointer(self, name: str, type: Type) -> Pointer:
        return self.pointer_at(self.arguments, self.fields.index(name), type)

    def pointer_at(self, words: Pointer, n: Any, type: Type) -> Pointer:
        """The address that lies in the n-th word."""
        return Pointer(self, type, self.b.load((words + n).raw, typ=ir.PointerType()))

    def at(self, address: Value, type: Type) -> Pointer:
        """What lies at an address that was computed."""
        return Pointer(self, type, self.b.inttoptr(address.raw, ir.PointerType()))

    def address_after(self, base: Any, count: Any, unit: Type = I8) -> Any:
        return self.b.gep(base, [count], source_etype=unit.raw)

    def words_on_stack(self, count: int) -> Pointer:
        """Memory for so many 64-bit words, as long as the kernel runs."""
        with self.inside(self.entry):
            return Pointer(self, I64, self.b.alloca(I64.raw, count))

    def variable(self, first: Value) -> Variable:
        return Variable(self, first)

    def lane_numbers(self, type: Type, lanes: int) -> Value:
        """0, 1, 2, ..."""
        return Value(self, type, lanes, ir.Constant(ir.VectorType(type.raw, lanes), list(range(lanes))))

    def flags(self, bits: Value, lanes: int) -> Value:
        """For each lane whether its bit of an integer is set."""
        if not self.target.flags:  # bits would be put into a vector one by one
            type = I64 if lanes * 8 == self.target.vector else I32
            places = self.constant(type, 1).spread(lanes) << self.lane_numbers(type, lanes)
            return (bits.to(type).spread(lanes) & places) != 0
        integer = self.b.trunc(bits.raw, ir.IntType(lanes))
        return Value(self, BOOL, lanes, self.b.bitcast(integer, self.raw(BOOL, lanes)))

    # Control

    @contextmanager
    def inside(self, block: Any) -> Iterator[None]:
        """What is written goes to the end of another block, before the jump if there is one."""
        here = self.b.block
        with self.b.goto_block(block):
            yield
        if here.is_terminated:
            self.b.position_before(here.terminator)

    @contextmanager
    def loop(self, stop: Any, start: Any = 0, step: Any = 1) -> Iterator[Value]:
        """Over start, start + step, ... below stop, which are taken when the loop begins."""
        stop, start, step = self.whole(stop), self.whole(start), self.whole(step)
        turns = Loop(self, start, step)
        b, i = self.b, Count(turns)
        b.cbranch(b.icmp_signed("<", start.raw, stop.raw), turns.enter, turns.done)
        b.position_at_end(turns.enter)
        b.branch(turns.body)
        b.position_at_end(turns.body)
        turns.grown()
        yield i
        following, *_ = turns.end()
        b.cbranch(b.icmp_signed("<", following, stop.raw), turns.body, turns.done)
        b.position_at_end(turns.done)

    @contextmanager
    def loop_while(self, condition: Callable[[], Value]) -> Iterator[None]:
        """As long as the condition, computed anew each time, holds."""
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
        """`with k.choice(c) as (yes, no)`, then `with yes:` and `with no:`."""
        with self.b.if_else(condition.raw) as branches:
            yield branches

    def weave(self, *pieces: Callable[[], None]) -> None:
        """What the pieces write down, in turns, so that the processor has something of each at hand: it looks ahead by
        less than a whole one. They neither branch nor need each other.
        """
        block, done = self.b.block, []

        def written() -> list[Any]:  # what a loop carries is put in front, whenever it is met
            return [x for x in block.instructions if x.opname != "phi"]

        for n, piece in enumerate(pieces):
            before = len(written())
            piece()
            if self.b.block is not block:
                raise ValueError("a piece that is woven branches")
            new = written()[before:]
            done += [((m + 1) / len(new), n, m, x) for m, x in enumerate(new)]
        first = len(block.instructions) - len(done)
        block.instructions[first:] = [x for *_, x in sorted(done, key=lambda found: found[:3])]

    # Functions of every machine

    def fence(self) -> None:
        """What was stored is seen by every thread that sees what is stored later."""
        self.b.fence("seq_cst")

    def stay(self) -> None:
        """Of what is read and written, what was written down before comes before what follows; not an instruction."""
        self.b.fence("seq_cst", targetscope="singlethread")

    def need(self, x: Value) -> None:
        """Compute x although nothing uses it."""
        kinds = [x.raw.type]
        self.b.asm(ir.FunctionType(ir.VoidType(), kinds), "", "r", [x.raw], side_effect=True)

    def call_named(self, name: str, result: Any, kinds: Sequence[Any], arguments: Sequence[Any]) -> Any:
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, list(kinds)), name)
        return self.b.call(function, list(arguments))

    def intrinsic(self, name: str, result: Type, *xs: Value) -> Value:
        """An LLVM intrinsic, elementwise."""
        lanes = max(x.lanes for x in xs)
        xs = tuple(x.spread(lanes) for x in xs)
        prefix = f"v{lanes}" if lanes else ""
        suffix = f".{prefix}{xs[0].type}" if result is xs[0].type else f".{prefix}{result}.{prefix}{xs[0].type}"
        raw = [x.raw for x in xs]
        made = self.call_named(f"llvm.{name}{suffix}", self.raw(result, lanes), [x.type for x in raw], raw)
        return Value(self, result, lanes, made)

    def library(self, name: str, x: Value) -> Value:
        """A function of the C library, such as "expm1", for each lane."""
        name = name + ("f" if x.type is F32 else "")
        if not x.lanes:
            return Value(self, x.type, 0, self.call_named(name, x.type.raw, [x.type.raw], [x.raw]))
        result = Value(self, x.type, x.lanes, ir.Constant(x.raw.type, ir.Undefined))
        for n in range(x.lanes):
            result = result.with_lane(n, self.library(name.removesuffix("f") if x.type is F32 else name, x.lane(n)))
        return result

    def frozen(self, x: Value) -> Value:
        """Return x through LLVM's `freeze`, which keeps it apart from its load.

        Otherwise `p[0] = where(c, p[0], y)` becomes a masked store. With AVX2 that is VMASKMOVPS, which takes a Zen 3
        some 20 cycles.
        """
        made = ir.Instruction(self.b.block, x.raw.type, "freeze", [x.raw])  # llvmlite's builder has none
        self.b._insert(made)
        result: Value = x._like(made)
        return result

    def where(self, condition: Value, x: Any, y: Any) -> Value:
        """x where the condition holds, elsewhere y; one of them at least is a value."""
        yes, no = x._meet(y) if isinstance(x, Value) else y._meet(x)[::-1]
        lanes = max(condition.lanes, yes.lanes)
        yes, no = yes.spread(lanes), no.spread(lanes)
        made: Value = yes._like(self.b.select(condition.raw, yes.raw, no.raw))
        return made

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Rows and lanes exchanged: as many vectors as they have lanes, or as 16 bytes have, in each 16 bytes."""
        n = len(rows)
        inside = min(n, 16 // rows[0].type.size)  # lanes in 16 bytes, within which moving them is cheapest
        made = list(rows)
        for first in range(0, n, inside):
            made[first : first + inside] = self._interleaved(made[first : first + inside])
        for column in range(inside):
            made[column::inside] = self._gathered(made[column::inside], inside)
        return made

    def _interleaved(self, rows: list[Value]) -> list[Value]:
        """Rows and lanes exchanged within every block of as many lanes as there are rows."""
        n, half = rows[0].lanes, len(rows) // 2
        for _ in range(half.bit_length()):
            made = []
            for x, y in zip(rows[:half], rows[half:], strict=True):
                for start in (0, half):
                    lanes = [
                        block + start + i // 2 + n * (i % 2) for block in range(0, n, 2 * half) for i in range(2 * half)
                    ]
                    made.append(self.shuffle(x, y, lanes))
            rows = made
        return rows

    def _gathered(self, rows: list[Value], block: int) -> list[Value]:
        """Vectors, and the blocks of lanes in them, exchanged."""
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
        made: list[Value] = [None] * len(rows)  # type: ignore[list-item]
        made[::2], made[1::2] = self._gathered(even, block), self._gathered(odd, block)
        return made

    def shuffle(self, x: Value, y: Value, lanes: Sequence[int]) -> Value:
        """The named lanes of x, and of y counted on from there."""
        mask = ir.Constant(ir.VectorType(I32.raw, len(lanes)), list(lanes))
        return Value(self, x.type, len(lanes), self.b.shuffle_vector(x.raw, y.raw, mask))

    def maximum(self, x: Value, y: Any) -> Value:
        """The greater one; of floats y if one is NaN."""
        return self.where(x > y, x, y)

    def minimum(self, x: Value, y: Any) -> Value:
        """The lesser one; of floats y if one is NaN."""
        return self.where(x < y, x, y)

    def fma(self, x: Value, y: Any, z: Any) -> Value:
        """x · y + z, rounded once where the target can."""
        x, y = x._meet(y)
        x, z = x._meet(z)
        return self.intrinsic("fma" if self.target.fma else "fmuladd", x.type, x, y.spread(x.lanes), z)

    def rint(self, x: Value) -> Value:
        """To the nearest integer, ties to even."""
        return self.intrinsic("rint", x.type, x)

    # Two numbers of 16 bits at once

    def dot_pairs(self, total: Value, x: Value, y: Value) -> Value:
        """total + x₀ y₀ + x₁ y₁ for words that hold two bfloat16 each; the target has `bf16_dot`."""
        halves = ir.VectorType(BF16.raw, 32)
        arguments = [total.raw, *(self.b.bitcast(v.raw, halves) for v in (x, y))]
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return total._like(self.call_named(name, total.raw.type, [a.type for a in arguments], arguments))

    def pair(self, x: Value, y: Value) -> Value:
        """Words of two bfloat16 each, from the lanes of x and of y, rounded to even; the target has `bf16_dot`."""
        name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BF16.raw, 32)
        both = Value(self, BF16, 32, self.call_named(name, kind, [y.raw.type, x.raw.type], [y.raw, x.raw]))
        turned = self.shuffle(both, both, [n // 2 + 16 * (n % 2) for n in range(32)])
        return Value(self, I32, 16, self.b.bitcast(turned.raw, self.raw(I32, 16)))

    def halves(self, words: Value) -> tuple[Value, Value]:
        """The two bfloat16 of each word as float32."""
        return (words << 16).bits(F32), (words & -0x10000).bits(F32)

    def rounded(self, x: Value) -> Value:
        """A float32 vector as bfloat16, rounded as `pair` rounds."""
        name, kind = "llvm.x86.avx512bf16.cvtneps2bf16.512", self.raw(BF16, 16)
        return Value(self, BF16, 16, self.call_named(name, kind, [x.raw.type], [x.raw]))

    # Whole vectors on AVX-512

    def scale_floor(self, x: Value, n: Value) -> Value:
        """x · 2^⌊n⌋, rounded once; 0 where n is −∞."""
        return self._avx512("mask.scalef", x, n, x, None, 4)

    def fraction(self, x: Value, bits: int) -> Value:
        """What lies beyond the first `bits` binary places: x − ⌊x · 2^bits⌋ / 2^bits; 0 of ±∞."""
        return self._avx512("mask.reduce", x, bits << 4 | 9, x, None, 4)

    def add_down(self, x: Value, y: Value) -> Value:
        """x + y, rounded down."""
        return self._avx512("add", x, y.spread(x.lanes), 9)

    def look_up(self, table: Sequence[float], index: Value, type: Type) -> Value:
        """Of a table of two vectors, the numbers that the last bits of an index name."""
        raw, half = self.raw(type, index.lanes), index.lanes
        low, high = (Value(self, type, half, ir.Constant(raw, list(x))) for x in (table[:half], table[half:]))
        return self._avx512("vpermi2var", low, index, high)

    def _avx512(self, name: str, x: Value, *others: Value | int | None) -> Value:
        """An instruction of a vector and others, numbers that are part of it, and a mask of all lanes (None)."""
        if x.lanes * x.type.size != 64:
            raise TypeError(f"{name} takes a whole vector, not {x.lanes} lanes of {x.type}")
        every = ir.Constant(ir.IntType(x.lanes), -1)
        arguments = [x.raw]
        for y in others:
            arguments.append(y.raw if isinstance(y, Value) else every if y is None else ir.Constant(I32.raw, y))
        name = f"llvm.x86.avx512.{name}.{'ps' if x.type is F32 else 'pd'}.512"
        return x._like(self.call_named(name, x.raw.type, [y.type for y in arguments], arguments))
