"""AMX tiles and their products, on targets with `amx`.

A tile is 16 rows of 64 bytes: 16 × 16 numbers of 32 bits, or 16 × 32 of bfloat16.

    with amx_tiles(k) as (total, x, y, *_):
        total.clear()
        x.load(rows, stride)
        y.load(columns, stride)
        total.add_product(x, y)
        total.store(result, stride)

`add_product` takes 16 rows of 32 bfloat16, and 16 rows of 16 packed pairs of bfloat16, both numbers of one column:

    total[r, c] ← total[r, c] + (Σ_n x[r, 2n] y[2n, c] + Σ_n x[r, 2n + 1] y[2n + 1, c])

Sums are float32, in the order of n, with one rounding for a product and its sum. Subnormal inputs count as 0, and
subnormal results become 0 (Intel's manual, TDPBF16PS). Vectors can therefore sum in the same way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import I8, I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE, AMX_SUMS

REGISTERS = 8


class AmxTile:
    """One AMX tile register."""

    def __init__(self, k: Kernel, number: int):
        self.k, self.number = k, ir.Constant(I8.raw, number)

    def clear(self) -> None:
        self._do("tilezero", self.number)

    def load(self, p: Pointer, stride: Any) -> None:
        """Load 16 rows of 64 bytes, `stride` bytes apart."""
        self._do("tileloadd64", self.number, p.raw, self.k.whole(stride).raw)

    def store(self, p: Pointer, stride: Any) -> None:
        self._do("tilestored64", self.number, p.raw, self.k.whole(stride).raw)

    def add_product(self, x: "AmxTile", y: "AmxTile") -> None:
        self._do("tdpbf16ps", self.number, x.number, y.number)

    def _do(self, name: str, *arguments: Any) -> None:
        _do(self.k, name, *arguments)


Totals = Sequence[Sequence[AmxTile]]  # totals[r][c], one tile for each row block and column block


class AmxRegisters:
    """All tile registers."""

    def __init__(self, k: Kernel):
        self.k, self.tiles = k, [AmxTile(k, n) for n in range(REGISTERS)]

    @contextmanager
    def configured(self) -> Iterator[None]:
        """Configure the registers; their contents are lost at the end."""
        shape = self.k.stack(8)
        low = 1 | 0  # palette 1, start row 0
        config = [low, 0] + [AMX_SIDE * 4 * 0x0001000100010001] * 2 + [0, 0] + [AMX_SIDE * 0x0101010101010101] + [0]
        for n, x in enumerate(config):
            shape[n] = self.k.constant(I64, x)
        _do(self.k, "ldtilecfg", shape.raw)
        yield
        _do(self.k, "tilerelease")

    def totals(self, lanes: int) -> Totals:
        """Return the tiles of sums: a few row blocks by all lanes."""
        across = lanes // AMX_SIDE
        return [self.tiles[n * across : (n + 1) * across] for n in range(max(1, AMX_SUMS // across))]


@contextmanager
def amx_tiles(k: Kernel) -> Iterator[list[AmxTile]]:
    """Configure and yield all tile registers."""
    registers = AmxRegisters(k)
    with registers.configured():
        yield registers.tiles


def add_products(
    registers: Sequence[AmxTile],
    totals: Totals,
    steps: tuple[Value, Value],
    row: Callable[[int, Value], Pointer],
    width: Value | int,
    column: Callable[[int, Value], Pointer],
    pitch: Value | int,
) -> None:
    """Add rows times columns to totals[r][c].

    Each step sums AMX_DEPTH products, through the last two registers.

    row(r, n): the start of the r-th row block in step n; its rows are `width` bytes apart.
    column(c, n): the start of the c-th column block in step n; its rows are `pitch` bytes apart.
    """
    x, y = registers[-2:]
    with x.k.loop(steps[1], start=steps[0]) as n:
        for r, line in enumerate(totals):
            x.load(row(r, n), width)
            for c, total in enumerate(line):
                y.load(column(c, n), pitch)
                total.add_product(x, y)


def add_products_by_vectors(
    k: Kernel, total: Variable, ends: tuple[Value, Value], halves: Callable[[Value], Iterable[tuple[Value, Value]]]
) -> None:
    """Add products to a vector in the same order as AMX tiles.

    ends: the first packed pair and the one after the last; AMX steps are counted from pair 0. halves(n): the factors of
    the n-th pairs, first of their even numbers, then of their odd ones.
    """
    zero = k.constant(total.type, 0.0).spread(total.lanes)
    chains = [k.variable(zero) for _ in range(2)]
    with k.loop(ends[1], start=ends[0] & -(AMX_DEPTH // 2), step=AMX_DEPTH // 2) as block:
        for chain in chains:
            chain.value = zero
        with k.loop(k.minimum(ends[1], block + AMX_DEPTH // 2), start=k.maximum(ends[0], block)) as n:
            for chain, (x, y) in zip(chains, halves(n), strict=True):
                chain.value = k.fma(x, y, chain.value)
        total.value += chains[0].value + chains[1].value


def _do(k: Kernel, name: str, *arguments: Any) -> None:
    k.call_named(f"llvm.x86.{name}", ir.VoidType(), [x.type for x in arguments], arguments)
