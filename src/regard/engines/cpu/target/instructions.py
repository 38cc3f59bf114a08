"""Targets of compilation: instruction set, vector width, registers, dot products."""

import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import binding as llvm

from regard.engines.cpu.target import permission
from regard.runtime import forks

_one_at_a_time = getattr(llvm.ffi.lib, "_lock", None)  # llvmlite's lock around all calls of LLVM
if _one_at_a_time is not None:
    forks.held(_one_at_a_time)


@cache
def refused() -> str | None:
    """Return the reason why compiled code may not run, or None.

    LLVM ends the process where the system refuses memory for code, so llvmlite is asked before the first kernel, cached
    or not.
    """
    try:
        llvm.check_jit_execution()
    except OSError as error:
        return f"the system refuses memory for compiled code ({error.strerror})"
    return None


@dataclass(frozen=True)
class Prefetch:
    """The prefetch pattern of data that is read once.

    distance: bytes ahead. block: bytes of a block, a power of two. several: consecutive lines of it in one request.
    level: of the caches. in_order: reads in order are faster than software prefetch.
    """

    distance: int = 2**14
    block: int = 2**14
    several: int = 4
    level: int = 1
    in_order: bool = False


@dataclass(frozen=True)
class Target:
    """An instruction set.

    vector: bytes of a vector register. registers: their number. fma: x · y + z in one instruction. needs: CPU features.
    flags: mask registers. scalef: x · 2ⁿ in one instruction. permute: lookup in a table of two vectors.
    bf16_dot: products of packed bf16 pairs. amx: products of AMX tiles. control: x86's MXCSR. swift: the prefix of
    LLVM's processor names on which it beats the targets after it. wide: the micro-tile with 32 registers. narrow: that
    with 16. relaxed: WebAssembly's relaxed multiply-add, which may or may not round twice.
    """

    name: str
    triple: str
    cpu: str
    features: str
    vector: int
    registers: int
    fma: bool
    needs: tuple[str, ...] = ()
    flags: bool = False
    scalef: bool = False
    permute: bool = False
    bf16_dot: bool = False
    amx: bool = False
    control: bool = False
    swift: str = ""
    wide: tuple[int, int] = (8, 3)
    narrow: tuple[int, int] = (4, 3)
    relaxed: bool = False
    prefetch: Prefetch = Prefetch()

    def lanes(self, size: int) -> int:
        """Return the number of elements of `size` bytes in a vector."""
        return self.vector // size

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and vectors of the micro-tile.

        The sums, one row of vectors and a factor fit the registers.
        """
        return self.wide if self.registers >= 32 else self.narrow

    def rows(self, vectors: int) -> int:
        """Return the rows, a power of two, of a micro-tile with `vectors` vectors."""
        most = math.prod(self.tile) // vectors
        return min(self.registers // 4, 1 << most.bit_length() - 1)

    @property
    def pipelines(self) -> bool:
        """True if a micro-tile leaves registers for interleaved work."""
        return self.registers >= 32 and math.prod(self.tile) <= self.registers // 2

    @property
    def wasm(self) -> bool:
        """True for WebAssembly, with 32-bit addresses."""
        return self.triple.startswith("wasm32")

    @property
    def runs(self) -> bool:
        """True if this processor can execute it."""
        there = self.triple == native_triple() and all(host_features().get(x, False) for x in self.needs)
        return there and not (self.amx and permission.refused())


def x86(name: str, cpu: str, vector: int, registers: int, needs: tuple[str, ...], **more: Any) -> Target:
    features = ",".join("+" + x for x in needs)
    triple = native_triple() if native_triple().startswith("x86_64") else "x86_64-unknown-linux-gnu"
    more |= OWN.get(host_cpu(), {})
    return Target(name, triple, cpu, features, vector, registers, bool(needs), needs, control=True, **more)


AVX2 = ("avx2", "fma", "f16c", "bmi2")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
EVERY = {
    "flags": True,
    "scalef": True,
    "permute": True,
    "prefetch": Prefetch(12 * 2**10, 2**12, 8),
}  # options that all AVX-512 targets share
# Processors, by LLVM's names, that differ from others with the same instructions.
OWN = {
    "znver4": {"wide": (4, 4), "prefetch": Prefetch(2**14, 2**6, 1, level=2, in_order=True)},
    "znver5": {"wide": (4, 4), "prefetch": Prefetch(19 * 2**9, 2**6, 1)},
}


@cache
def targets() -> dict[str, Target]:
    """Return every target, the fastest first."""
    arm = native_triple() if native_triple().startswith(("aarch64", "arm64")) else "aarch64-unknown-linux-gnu"
    ordered = (
        # Elsewhere (seen: Granite Rapids) such a dot product takes two cycles: FMAs of float32 do twice as much.
        x86("avx512bf16", "znver4", 64, 32, (*AVX512, "avx512bf16"), **EVERY, bf16_dot=True, swift="znver"),
        x86("amx", "skylake-avx512", 64, 32, (*AVX512, "avx512bf16", "amx-tile", "amx-bf16"), **EVERY, amx=True),
        x86("avx512", "skylake-avx512", 64, 32, AVX512, **EVERY),
        x86("avx2", "haswell", 32, 16, AVX2),
        x86("baseline", "x86-64", 16, 16, ()),
        Target("neon", arm, "generic", "+neon", 16, 32, True),
    )
    return {target.name: target for target in ordered}


def webassembly(relaxed: bool = False) -> Target:
    """Return the target of web pages, which no Python process runs.

    The target rounds as "baseline" does, unless `relaxed`. V8 keeps 15 vectors in registers, so 4 × 3 sums would be
    spilled.
    """
    features = "+simd128,+bulk-memory" + ",+relaxed-simd" * relaxed
    name = "wasm-relaxed" if relaxed else "wasm"
    return Target(name, "wasm32-unknown-unknown", "generic", features, 16, 16, False, narrow=(4, 2), relaxed=relaxed)


@cache
def native_triple() -> str:
    """Return the triple of this process, on Windows for objects in Linux's format.

    Windows objects need symbols of the C runtime (`_fltused`) and an image base, which JIT memory lacks.
    """
    triple = str(llvm.get_process_triple())
    return f"{triple}-elf" if "windows" in triple else triple


@cache
def host_features() -> dict[str, bool]:
    return dict(llvm.get_host_cpu_features())


@cache
def host_cpu() -> str:
    return str(llvm.get_host_cpu_name())


def chosen() -> Target:
    """Return the target that REGARD_CPU names, else the fastest here.

    Raises ValueError for a name that is unknown or that this processor cannot run, RuntimeError if none runs.
    """
    return _chosen(os.environ.get("REGARD_CPU", ""))


@cache
def _chosen(name: str) -> Target:
    by_name = targets()
    if name:
        if name not in by_name:
            raise ValueError(f"REGARD_CPU must be one of {', '.join(by_name)}, got {name!r}")
        if not by_name[name].runs:
            raise ValueError(f"REGARD_CPU={name}: this processor cannot run it")
        return by_name[name]
    for target in by_name.values():
        if target.runs and host_cpu().startswith(target.swift):
            return target
    raise RuntimeError(f"no kernels for {native_triple()}")
