"""A problem as the arguments of kernels: strides, numbers, rules, and the `Form`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton.language as tl

from regard.core.problem import Problem, device_of
from regard.core.tensors import array, empty_on, tensor
from regard.engines.triton.kernels import addresses, tiles
from regard.engines.triton.launch.launching import Launch, pointer, strided
from regard.engines.triton.launch.tuning import TileConfig
from regard.engines.triton.rules import lowering
from regard.engines.triton.rules.bounds import bounds
from regard.rules import Program, Table
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]


def empty(p: Problem, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an empty array on the device of the call, or on the host."""
    return np.empty(shape, dtype) if p.device is None else empty_on(p.device, shape, dtype)


_uploaded: WeakKeyDictionary[Table, dict[Any, Array]] = WeakKeyDictionary()


def on_device(x: Array, device: Any) -> Array:
    """Copy a host array to a device, without waiting; None stands for the host."""
    return x if device is None else array(tensor(x.copy()).to(device, non_blocking=True))


def numbers(x: Sequence[int], device: Any) -> Array:
    """Return 64-bit integers on a device; a range is made there."""
    if device is None or not isinstance(x, range):
        return on_device(np.asarray(x, np.int64), device)
    return array(torch.arange(x.start, x.stop, x.step, device=device))


def table_on(table: Table, device: Any) -> Array:
    """Return a table's entries, contiguous on a device; a host table is copied once."""
    if device is None or device_of(table.array) is not None:
        x = table.array
        return x if x.flags.c_contiguous else array(tensor(x).contiguous())
    found = _uploaded.setdefault(table, {})
    if device not in found:
        found[device] = on_device(table.array, device)
    return found[device]


def number(x: Any, real: Any) -> Any:
    """Return a number of a rule or call in the form that `functions.real` reads."""
    if not isinstance(x, float):
        return int(x)
    if real == np.float32:
        return x
    return high_low(int(np.float64(x).view(np.int64)))


def high_low(x: int) -> tuple[int, int]:
    """Return the high and the low 32 bits of a 64-bit integer, signed."""
    high, low = (np.array([x >> 32 & 0xFFFFFFFF, x & 0xFFFFFFFF], np.uint32)).astype(np.int32).tolist()
    return high, low


def power_of_two(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length()) if n > 0 else least


@dataclass(frozen=True, eq=False)
class Work:
    """The arguments that all kernels of a call share."""

    p: Problem

    @cached_property
    def lead(self) -> tuple[int, ...]:
        return self.p.lead or (1,)

    def per_head(self, x: Array, tail: int) -> addresses.StridedArray:
        """Return address and strides of an input (..., h, *tail); lead may broadcast."""
        x = np.broadcast_to(x, (*self.lead, *x.shape[x.ndim - tail - 1 :]))
        return strided(x, len(self.lead), tail)

    def dense(self, x: Array) -> addresses.StridedArray:
        """Return address and strides of a mask or bias (..., h, n_q, n_k)."""
        return self.per_head(self.p.dense(x), 2)

    def rows(self, x: Array | None) -> addresses.StridedArray | None:
        """Return address and strides of per-query numbers, (..., h, n_q)."""
        return None if x is None else self.per_head(x, 1)

    def matrix(self, x: Array | None) -> addresses.StridedArray | None:
        return None if x is None else self.per_head(x, 2)

    @cached_property
    def sink(self) -> addresses.StridedArray | None:
        if self.p.sink is None:
            return None
        return strided(np.broadcast_to(self.p.sink, (self.p.heads,)), 0, 0)

    @cached_property
    def arrays(self) -> tiles.CallArrays:
        p = self.p
        dense = [() if x is None else tuple(map(self.dense, x.dense)) for x in (self.mask_program, self.score_program)]
        bias = None if p.bias is None else self.dense(p.bias)
        return tiles.CallArrays(
            self.matrix(p.query), self.matrix(p.key), self.matrix(p.value), bias, self.sink, dense[0], dense[1]
        )

    @cached_property
    def mask_program(self) -> Program | None:
        return None if self.p.mask_node is None else Program.of([self.p.mask_node])

    @cached_property
    def score_program(self) -> Program | None:
        """Return the score rule's program; the score is first, so bounds find its slots."""
        return None if self.p.score_node is None else Program.of([self.p.score_node])

    @cached_property
    def score_function(self) -> Any:
        return None if self.score_program is None else lowering.values(self.score_program)

    @cached_property
    def rules(self) -> tiles.MaskAndScore:
        return tiles.MaskAndScore(
            *(None if x is None else self.rule(x) for x in (self.mask_program, self.score_program))
        )

    def rule(self, program: Program) -> addresses.RuleOperands:
        return addresses.RuleOperands(
            tuple(number(x, self.p.compute) for x in program.numbers),
            tuple(self.table(table) for table in program.tables),
        )

    def table(self, table: Table) -> addresses.TableArguments:
        """Return a table's arguments, with extremes for host integers alone."""
        least = greatest = 0
        if table.kind == "int" and device_of(table.array) is None:
            least, greatest = int(table.array.min()), int(table.array.max())
        entries = table_on(table, self.p.device)
        return addresses.TableArguments(pointer(entries), tuple(map(int, table.shape)), least, greatest)

    @cached_property
    def call(self) -> addresses.CallArguments:
        p = self.p
        same = bool(p.batch) and bool((p.offset == p.offset[0]).all())
        b, h, j = p.origin
        return addresses.CallArguments(
            lead=self.lead,
            heads=p.heads,
            group=p.group,
            n_q=p.n_q,
            n_k=p.n_k,
            d=p.d,
            d_v=p.d_v,
            scale=number(float(p.scale), p.compute),
            offset=int(p.offset[0]) if same else 0,
            offsets=None if same or not p.batch else pointer(self.offsets),
            b=b,
            h=h,
            j=j,
            keys=p.keys,
            threshold=int(p.dropout * 2**32),
            keep=number(1.0 / (1.0 - p.dropout), p.compute),
            seed=high_low(p.seed),
        )

    @cached_property
    def offsets(self) -> Array:
        return on_device(self.p.offset, self.p.device)

    @cached_property
    def real(self) -> Any:
        return tl.float64 if self.p.compute == np.float64 else tl.float32

    @property
    def precision(self) -> str:
        """The precision of float32 products: "tf32" if PyTorch is set to it, else "ieee"."""
        wanted = self.p.device is not None and self.p.dtype == np.float32
        return "tf32" if wanted and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"

    def form(self, config: TileConfig) -> tiles.Form:
        """Return the form of a kernel; blocks and tiles are no larger than the call."""
        p = self.p
        mask = None if self.mask_program is None else lowering.values(self.mask_program)
        score = self.score_function
        N = min(config.N, power_of_two(p.n_k))
        chunk = min(64, power_of_two(-(-p.n_k // N), 2))
        return tiles.Form(
            REAL=self.real,
            INT=tl.int32 if p.rules.integers is np.int32 else tl.int64,
            M=min(config.M, power_of_two(p.n_q)),
            N=N,
            T=chunk,
            D=power_of_two(p.d),
            V=power_of_two(p.d_v),
            SCORE=score,
            MASK=mask,
            BOUNDS=bounds(p),
            BIAS=p.bias is not None,
            DROPOUT=p.dropout > 0,
            HIDES=score is not None or p.bias is not None,
            PRECISION=self.precision,
        )

    def launch(self, kernel: Any, grid: tuple[int, ...], results: Any, config: TileConfig, **forms: Any) -> Launch:
        whole = (forms["F"].M, forms["F"].N) == (config.M, config.N)
        warps = config.warps if whole else min(config.warps, 4)
        # Contraction is asked for by name: from Triton 3.10 on it is no default.
        options = {"num_warps": warps, "num_stages": config.stages, "enable_fp_fusion": True}
        return Launch(kernel, grid, (self.arrays, self.rules, self.call, results), forms, options)
