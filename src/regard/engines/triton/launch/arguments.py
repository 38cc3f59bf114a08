"""A problem as the arguments of kernels: where its arrays lie, its numbers, its rules, and what to compile for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton.language as tl

from regard.core.problem import Problem, device_of
from regard.core.tensors import array, tensor
from regard.engines.triton.kernels import addresses, tiles
from regard.engines.triton.launch.launching import Launch, lying, pointer
from regard.engines.triton.launch.tuning import Cut
from regard.engines.triton.rules import lowering
from regard.engines.triton.rules.bounds import bounds
from regard.rules import Program, Table
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]


def empty(p: Problem, shape: tuple[int, ...], dtype: Any) -> Array:
    """Fresh memory where the arrays of the call lie."""
    if p.device is None:
        return np.empty(shape, dtype)
    return array(torch.empty(shape, dtype=tensor(np.empty(0, dtype)).dtype, device=p.device))


def output(p: Problem, dtype: Any = None) -> Array:
    """An output (..., h, n_q, d_v), in the caller's order in memory."""
    if p.positions_first:
        return empty(p, (*p.lead, p.n_q, p.heads, p.d_v), dtype or p.dtype).swapaxes(-2, -3)
    return empty(p, p.shape(p.n_q, p.d_v), dtype or p.dtype)


_uploaded: WeakKeyDictionary[Table, dict[Any, Array]] = WeakKeyDictionary()


def on_device(x: Array, device: Any) -> Array:
    """A host array where a device reads it; the host does not wait for the device."""
    return x if device is None else array(tensor(x.copy()).to(device, non_blocking=True))


def numbers(x: Sequence[int], device: Any) -> Array:
    """Integers of 64 bits where a device reads them; those of a range are made there."""
    if device is None or not isinstance(x, range):
        return on_device(np.asarray(x, np.int64), device)
    return array(torch.arange(x.start, x.stop, x.step, device=device))


def table_on(table: Table, device: Any) -> Array:
    """The entries of a table, one after the other, where a device reads them; those of the host are copied once."""
    if device is None or device_of(table.array) is not None:
        x = table.array
        return x if x.flags.c_contiguous else array(tensor(x).contiguous())
    found = _uploaded.setdefault(table, {})
    if device not in found:
        found[device] = on_device(table.array, device)
    return found[device]


def number(x: Any, real: Any) -> Any:
    """A number of a rule or of the call, as `language.real` reads it."""
    if not isinstance(x, float):
        return int(x)
    if real == np.float32:
        return x
    return words(int(np.float64(x).view(np.int64)))


def words(x: int) -> tuple[int, int]:
    """The high and the low 32 bits of an integer of 64, signed."""
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

    def per_head(self, x: Array, tail: int) -> addresses.Array:
        """Where an input (..., h, *tail) lies; its leading dimensions may broadcast."""
        x = np.broadcast_to(x, (*self.lead, *x.shape[x.ndim - tail - 1 :]))
        return lying(x, len(self.lead), tail)

    def dense(self, x: Array) -> addresses.Array:
        """Where a dense mask or bias lies, aligned right to (..., h, n_q, n_k)."""
        return self.per_head(self.p.dense(x), 2)

    def rows(self, x: Array | None) -> addresses.Array | None:
        """Where numbers of queries lie, (..., h, n_q)."""
        return None if x is None else self.per_head(x, 1)

    def matrix(self, x: Array | None) -> addresses.Array | None:
        return None if x is None else self.per_head(x, 2)

    @cached_property
    def sink(self) -> addresses.Array | None:
        if self.p.sink is None:
            return None
        return lying(np.broadcast_to(self.p.sink, (self.p.heads,)), 0, 0)

    @cached_property
    def arrays(self) -> tiles.Arrays:
        p = self.p
        dense = [() if x is None else tuple(map(self.dense, x.dense)) for x in (self.mask_program, self.score_program)]
        bias = None if p.bias is None else self.dense(p.bias)
        return tiles.Arrays(
            self.matrix(p.query), self.matrix(p.key), self.matrix(p.value), bias, self.sink, dense[0], dense[1]
        )

    @cached_property
    def mask_program(self) -> Program | None:
        return None if self.p.mask_node is None else Program.of([self.p.mask_node])

    @cached_property
    def score_program(self) -> Program | None:
        """What the score rule is to give; the score comes first, so that bounds find its slots."""
        return None if self.p.score_node is None else Program.of([self.p.score_node])

    @cached_property
    def score_function(self) -> Any:
        return None if self.score_program is None else lowering.values(self.score_program)

    @cached_property
    def rules(self) -> tiles.Rules:
        return tiles.Rules(*(None if x is None else self.rule(x) for x in (self.mask_program, self.score_program)))

    def rule(self, program: Program) -> addresses.Rule:
        return addresses.Rule(
            tuple(number(x, self.p.compute) for x in program.numbers),
            tuple(self.table(table) for table in program.tables),
        )

    def table(self, table: Table) -> addresses.Table:
        """Of integers the extremes are known on the host; of others bounds do not ask."""
        least = greatest = 0
        if table.kind == "int" and device_of(table.array) is None:
            least, greatest = int(table.array.min()), int(table.array.max())
        entries = table_on(table, self.p.device)
        return addresses.Table(pointer(entries), tuple(map(int, table.shape)), least, greatest)

    @cached_property
    def call(self) -> addresses.Call:
        p = self.p
        same = bool(p.batch) and bool((p.offset == p.offset[0]).all())
        b, h, j = p.origin
        return addresses.Call(
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
            seed=words(p.seed),
        )

    @cached_property
    def offsets(self) -> Array:
        return on_device(self.p.offset, self.p.device)

    @cached_property
    def real(self) -> Any:
        return tl.float64 if self.p.compute == np.float64 else tl.float32

    @property
    def precision(self) -> str:
        """Of products of float32: "tf32" on a device where PyTorch was asked for it, which by default it is not."""
        wanted = self.p.device is not None and self.p.dtype == np.float32
        return "tf32" if wanted and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"

    def form(self, cut: Cut) -> tiles.Form:
        """What a kernel is compiled for; a block has no more queries than there are, and a tile no more keys."""
        p = self.p
        mask = None if self.mask_program is None else lowering.values(self.mask_program)
        score = self.score_function
        N = min(cut.N, power_of_two(p.n_k))
        chunk = min(64, power_of_two(-(-p.n_k // N), 2))
        return tiles.Form(
            REAL=self.real,
            INT=tl.int32 if p.rules.integers is np.int32 else tl.int64,
            M=min(cut.M, power_of_two(p.n_q)),
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

    def launch(self, kernel: Any, grid: tuple[int, ...], results: Any, cut: Cut, **forms: Any) -> Launch:
        whole = (forms["F"].M, forms["F"].N) == (cut.M, cut.N)
        warps = cut.warps if whole else min(cut.warps, 4)
        options = {"num_warps": warps, "num_stages": cut.stages}
        return Launch(kernel, grid, (self.arrays, self.rules, self.call, results), forms, options)
