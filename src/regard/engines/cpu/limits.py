"""Limits of this processor, measured by four kernels.

Three do multiply-adds: in vector registers, in AMX tiles, and with vectors from cache. The fourth reads memory.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from regard.engines.cpu.kernels.lanes import UNROLL
from regard.engines.cpu.language.amx import REGISTERS, amx_tiles
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.prefetch import Prefetcher
from regard.engines.cpu.language.types import BF16, F32, F64, I32, Type
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE
from regard.engines.cpu.target.cache import Compiled, kernel
from regard.engines.cpu.target.instructions import Target, chosen
from regard.runtime import memory
from regard.runtime.threads import spread

Array = np.ndarray[Any, np.dtype[Any]]

STEPS = 2**22  # of the peak's loop: some 10 ms
MATRIX_STEPS = 2**18  # of the AMX loop: the same time
GROWING = REGISTERS - 2  # AMX tiles of sums; two more hold the factors
FEATURES = 64  # of products from cache: the numbers in each sum; the operands fit the first level
BUFFER = 2**28  # bytes to read: far more than a cache holds
STREAMS = 4, 2, 1  # streams that one thread reads
NEAR = 512  # distance of prefetches in a stream, in numbers
FAR = 2**14  # distance of prefetches in a single stream, in bytes


@dataclass(frozen=True)
class Limit:
    """A call and its work, in FLOPs or bytes.

    measured_in: the unit of its rate. means: the instructions used, if there are several kinds.
    """

    name: str
    measured_in: str
    work: float
    call: Callable[[], Any]
    means: str = ""

    def rate(self, seconds: float) -> float:
        """Return the rate in 10⁹ a second."""
        return self.work / seconds / 1e9


def peak(dtype: str, threads: int = 1, amx: bool = True) -> Limit:
    """Return the highest rate of multiply-adds for a dtype.

    float16 is computed in float32, and so is bfloat16 where nothing is faster. amx: use AMX tiles if the target
    has them.
    """
    target = chosen()
    if dtype == "bfloat16" and target.amx and amx:
        work = GROWING * 2.0 * AMX_SIDE * AMX_SIDE * AMX_DEPTH * MATRIX_STEPS * threads
        return Limit(
            "peak of bfloat16 matrix products",
            "GFLOP/s",
            work,
            lambda: _run(_matrix_peak(), _operands(), threads, MATRIX_STEPS),
            "matrix products",
        )
    element = F64 if dtype == "float64" else BF16 if dtype == "bfloat16" and target.bf16_dot else F32
    work = chains(target) * target.vector / element.size * 2 * STEPS * threads
    means = "" if dtype != "bfloat16" else "dot products" if element is BF16 else "converted to float32"
    return Limit(
        f"peak of {NAMES[element]}", "GFLOP/s", work, lambda: _run(_peak(element), _operands(), threads, STEPS), means
    )


NAMES = {F64: "float64", F32: "float32", BF16: "bfloat16 dot products"}


def product(dtype: str, threads: int = 1) -> Limit:
    """Return the rate of multiply-adds with operands loaded as in attention.

    dtype: float32 or float64.
    """
    target, element = chosen(), F64 if dtype == "float64" else F32
    rows, columns = target.tile
    work = rows * columns * target.lanes(element.size) * 2.0 * STEPS * threads
    return Limit(
        f"products of {NAMES[element]} from cache",
        "GFLOP/s",
        work,
        lambda: _run(_product(element), _operands(), threads, STEPS // FEATURES),
    )


def bandwidth(threads: int = 1) -> Limit:
    """Return the rate at which memory can be read, by the fastest of some kernels."""
    size = BUFFER
    count = size // 4 // threads
    return Limit(
        "read bandwidth", "GB/s", 4.0 * count * threads, lambda: _run(_read(), _buffer(size), threads, count, 4 * count)
    )


def chains(target: Target) -> int:
    """Return the number of independent sums: 24 of 32 registers.

    The others are for operands.
    """
    return target.registers * 3 // 4


def peak_kernel(element: Type, target: Target) -> str:
    """Write the IR of total ← total · x + y in every chain.

    For bf16 pairs it is total ← total + x · y. The source holds x, y, and the starts of the chains, one number apart:
    equal chains would be merged.
    """
    k = Kernel("peak", target, FIELDS)
    paired = element is BF16
    lanes = target.lanes(4 if paired else element.size)
    total = F32 if paired else element
    source = k.pointer("source", I32 if paired else element)
    x, y = source.load(0, lanes), source.load(lanes, lanes)
    begin = source.of(total) + 2 * lanes
    totals = [k.variable(begin.load(n, lanes)) for n in range(chains(target))]
    with k.loop(k.integer("count")):
        for t in totals:
            t.value = k.dot_bf16(t.value, x, y) if paired else k.fma(t.value, x, y)
    _store_sum(k, totals, lanes)
    return k.text()


def product_kernel(element: Type, target: Target) -> str:
    """Write the IR of a micro-tile.

    total[r][c] ← total[r][c] + Σ_x f[r, x] · v[x, c].

    The source holds v, whole vectors, then f.
    """
    k = Kernel("product", target, FIELDS)
    (rows, columns), lanes = target.tile, target.lanes(element.size)
    v = k.pointer("source", element)
    f = v + FEATURES * columns * lanes
    totals = [[k.variable(k.constant(element, 0).spread(lanes)) for _ in range(columns)] for _ in range(rows)]
    with k.loop(k.integer("count")), k.loop(FEATURES, step=UNROLL) as first:
        for x in (first + u for u in range(UNROLL)):
            vectors = [v.load((x * columns + c) * lanes, lanes) for c in range(columns)]
            for r, line in enumerate(totals):
                factor = f[x + r * FEATURES].spread(lanes)
                for total, vector in zip(line, vectors, strict=True):
                    total.value = k.fma(factor, vector, total.value)
    _store_sum(k, [total for line in totals for total in line], lanes)
    return k.text()


def matrix_peak_kernel(target: Target) -> str:
    """Write the IR of total ← total + x y for all AMX tiles except x and y.

    The source holds x, y, and the starts of the totals, one row apart. The result is all totals.
    """
    k = Kernel("peak", target, FIELDS)
    source, result = k.pointer("source", I32), k.pointer("result", I32)
    size, row = AMX_SIDE * AMX_SIDE, AMX_SIDE * 4
    with amx_tiles(k) as (x, y, *totals):
        x.load(source, row)
        y.load(source + size, row)
        for n, total in enumerate(totals):
            total.load(source + (2 * size + n * AMX_SIDE), row)
        with k.loop(k.integer("count")):
            for total in totals:
                total.add_product(x, y)
        for n, total in enumerate(totals):
            total.store(result + n * size, row)
    return k.text()


def read_kernel(target: Target, streams: int) -> str:
    """Write the IR of the sum of `count` float32 numbers, read in several streams.

    A single stream is prefetched out of order.
    """
    k = Kernel("read", target, FIELDS)
    lanes = target.lanes(4)
    source, length = k.pointer("source", F32), k.integer("count") // streams
    totals = [k.variable(k.constant(F32, 0).spread(lanes)) for _ in range(streams)]
    with k.loop(length // lanes) as n:
        for stream, t in enumerate(totals):
            at = source + (length * stream + n * lanes)
            (
                at + NEAR if streams > 1 else source.bytes(Prefetcher(target).interleaved(n * target.vector) + FAR)
            ).prefetch()
            t.value = t.value + at.load(0, lanes)
    _store_sum(k, totals, lanes)
    return k.text()


FIELDS = ("source", "result", "count")


def _store_sum(k: Kernel, totals: list[Any], lanes: int) -> None:
    """Store a result that depends on every chain, so that none is optimized away."""
    values = [t.value for t in totals]
    while len(values) > 1:
        values = [sum(values[n + 1 : n + 2], values[n]) for n in range(0, len(values), 2)]
    k.pointer("result", values[0].type)[0] = values[0]


@cache
def _peak(element: Type) -> Compiled:
    return _compiled("peak", peak_kernel(element, chosen()))


@cache
def _product(element: Type) -> Compiled:
    return _compiled("product", product_kernel(element, chosen()))


@cache
def _matrix_peak() -> Compiled:
    return _compiled("peak", matrix_peak_kernel(chosen()))


@cache
def _read() -> Compiled:
    """Return the fastest read kernel.

    Some processors read faster in several streams, others with prefetches out of order.
    """
    kernels = [_compiled("read", read_kernel(chosen(), streams)) for streams in STREAMS]
    source, seconds = _buffer(BUFFER), [math.inf] * len(kernels)
    for _ in range(4):
        for n, compiled in enumerate(kernels):
            begin = time.thread_time()
            _run(compiled, source, 1, BUFFER // 4)
            seconds[n] = min(seconds[n], time.thread_time() - begin)
    return kernels[seconds.index(min(seconds))]


def _compiled(name: str, text: str) -> Compiled:
    # Keyed by its text: the keys of cached objects hash the sources of the engine alone.
    return kernel(text, name, chosen(), lambda: text)


@cache
def _operands() -> Array:
    """Return zeros aligned to a cache line, so that no vector crosses two."""
    return memory.zeros((2**15,), np.uint8, aligned=True)


@cache
def _buffer(size: int) -> Array:
    return np.ones(size, np.uint8)


def _run(compiled: Compiled, source: Array, threads: int, count: int, share: int = 0) -> None:
    """Run a kernel on each thread, with sources `share` bytes apart."""
    results = np.zeros((threads, REGISTERS * 1024), np.uint8)

    def one(n: int) -> None:
        fields = np.array([source.ctypes.data + n * share, results[n].ctypes.data, count], np.uint64)
        compiled(fields.ctypes.data)

    spread(one, range(threads), threads)
