"""Targets with AVX-512, bf16 dot products and AMX, run on a processor that has AVX2 alone.

Kernels are written as for the real target, but each of its instructions is made of others with the same results, by
Intel's manual. LLVM splits vectors of 64 bytes into two of 32. VDPBF16PS sums the odd product, then the even one, by
FMA; it and TDPBF16PS take numbers below the smallest normal one as 0, and AMX tiles are in memory.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding as llvm

from regard.engines.cpu.language import amx
from regard.engines.cpu.language import kernel as emit
from regard.engines.cpu.language.types import BF16, F32, I16, I32, I64, Type
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import AMX_SIDE
from regard.engines.cpu.target import cache
from regard.engines.cpu.target import instructions as target
from regard.engines.cpu.target.instructions import AVX2, OWN, Target

TINY = 2.0**-126


@dataclass(frozen=True)
class Emulated(Target):
    """A target whose kernels this processor runs by other instructions."""

    @property
    def runs(self) -> bool:
        return self.triple == target.native_triple() and all(target.host_features().get(x) for x in AVX2)


def emulated(name: str, own: str = "") -> Emulated:
    """The emulation of a target, as on the processor `own` of `OWN`."""
    real = target.targets()[name]
    values = {x.name: getattr(real, x.name) for x in fields(Target)} | OWN.get(own, {})
    return Emulated(**values | {"name": f"{name} emulated", "swift": "none"})  # nothing chooses it but its name


EVERY = emulated("avx512bf16", "znver5"), emulated("amx"), emulated("avx512")
TARGETS = {x.name: x for x in EVERY if x.runs}


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the kernels of all calls for a target of `TARGETS`."""
    known, sources = target.targets(), cache._sources()

    def machine(chosen: Target) -> Any:
        """A code generator for this processor, which takes little time: kernels need not be fast."""
        here = known["avx2"]
        made = llvm.Target.from_triple(here.triple)
        return made.create_target_machine(cpu=here.cpu, features=here.features, opt=0, reloc="pic", codemodel="small")

    monkeypatch.setattr(target, "targets", lambda: known | TARGETS)
    monkeypatch.setattr(target, "_chosen", lambda name: target.targets()[name])
    monkeypatch.setattr(cache, "_machine", machine)
    monkeypatch.setattr(cache, "_sources", lambda: sources + Path(__file__).read_text())  # kernels on disk
    monkeypatch.setattr(emit, "Kernel", EmulatedKernel)
    monkeypatch.setattr(amx, "AmxTile", AmxTile)
    monkeypatch.setattr(amx.AmxRegisters, "configured", lambda registers: nullcontext())
    monkeypatch.setenv("REGARD_CPU", name)


class EmulatedKernel(emit.Kernel):
    """A kernel without the instructions that only the real target has."""

    def __init__(self, name: str, target: Target, fields: Sequence[str]):
        super().__init__(name, target, fields)
        self.tables: dict[tuple[float, ...], Pointer] = {}  # on the stack

    def _normal(self, x: Value) -> Value:
        """x, or 0 where it is below the smallest normal number."""
        return self.where(self.intrinsic("fabs", x.type, x) < TINY, self.constant(x.type, 0.0), x)

    def dot_bf16(self, total: Value, x: Value, y: Value) -> Value:
        for a, b in list(zip(self.unpack_bf16(x), self.unpack_bf16(y), strict=True))[::-1]:
            total = self.fma(self._normal(a), self._normal(b), total)
        return total

    def round_bf16(self, x: Value) -> Value:
        return self.intrinsic("copysign", x.type, self._normal(x), x).to(BF16)

    def pack_bf16(self, x: Value, y: Value) -> Value:
        low, high = (self.round_bf16(z).bits(I16).to(I32) for z in (x, y))
        return (low & 0xFFFF) | (high << 16)

    def scale_floor(self, x: Value, n: Value) -> Value:
        limit, bias = (480.0, 127) if x.type is F32 else (3000.0, 1023)
        word, mantissa = (I32, 23) if x.type is F32 else (I64, 52)
        whole = self.intrinsic("floor", x.type, self.maximum(self.constant(x.type, -limit), n))
        whole = self.minimum(self.constant(x.type, limit), whole)
        made = x
        for part in range(4):  # of a factor that is normal each
            some = self.intrinsic("floor", x.type, (whole + float(part)) * 0.25)
            made = made * ((some.to(word) + bias) << mantissa).bits(x.type)
        return self.where(n.is_nan(), n, made)

    def fraction(self, x: Value, bits: int) -> Value:
        rest = x - self.intrinsic("floor", x.type, x * 2.0**bits) * 2.0**-bits
        whole = self.intrinsic("fabs", x.type, x) >= 2.0**52
        return self.where(whole, self.constant(x.type, 0.0), rest)

    def add_down(self, x: Value, y: Value) -> Value:
        y = y.spread(x.lanes)
        total = x + y
        back = total - x
        rest = (x - (total - back)) + (y - back)  # what rounding took away
        word = I32 if x.type is F32 else I64
        step = self.where(total > 0.0, self.constant(word, -1), self.constant(word, 1))
        return self.where(rest < 0.0, (total.bits(word) + step).bits(x.type), total)

    def look_up(self, table: Sequence[float], index: Value, type: Type) -> Value:
        numbers = self.tables.get(tuple(table))
        if numbers is None:
            numbers64 = self.stack(len(table) * type.size // 8)
            with self.inside(self.entry):
                numbers = self.at(numbers64.address, type)
                for n, x in enumerate(table):
                    numbers[n] = self.constant(type, x)
            self.tables[tuple(table)] = numbers
        return numbers.gather((index & len(table) - 1).to(I64))


class AmxTile:
    """16 × 16 words in memory."""

    def __init__(self, k: EmulatedKernel, number: int):
        self.k, self.memory = k, k.at(k.stack(AMX_SIDE * AMX_SIDE // 2).address, I32)

    def _rows(self, work: Callable[[Value], None]) -> None:
        with self.k.loop(AMX_SIDE) as n:
            work(n)

    def row(self, n: Value) -> Value:
        """A row of words."""
        return self.memory.load(n * AMX_SIDE, AMX_SIDE)

    def clear(self) -> None:
        self._rows(lambda n: self._put(n, self.k.constant(I32, 0).spread(AMX_SIDE)))

    def _put(self, n: Value, x: Value) -> None:
        self.memory[n * AMX_SIDE] = x

    def load(self, p: Pointer, stride: Any) -> None:
        self._rows(lambda n: self._put(n, p.of(I32).bytes(n * stride).load(0, AMX_SIDE)))

    def store(self, p: Pointer, stride: Any) -> None:
        def row(n: Value) -> None:
            p.of(I32).bytes(n * stride)[0] = self.row(n)

        self._rows(row)

    def add_product(self, x: "AmxTile", y: "AmxTile") -> None:
        k, zero = self.k, self.k.constant(F32, 0.0).spread(AMX_SIDE)
        chains = [k.variable(zero) for _ in range(2)]

        def row(n: Value) -> None:
            for chain in chains:
                chain.value = zero
            with k.loop(AMX_SIDE) as m:
                factors = k.unpack_bf16(x.memory[n * AMX_SIDE + m].spread(AMX_SIDE)), k.unpack_bf16(y.row(m))
                for chain, a, b in zip(chains, *factors, strict=True):
                    chain.value = k.fma(k._normal(a), k._normal(b), chain.value)
            both = chains[0].value + chains[1].value
            self._put(n, (self.row(n).bits(F32) + both).bits(I32))

        self._rows(row)
