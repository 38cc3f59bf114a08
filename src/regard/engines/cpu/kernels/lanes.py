"""Lanes: the vectors of a query block, and micro-tiles of sums in registers."""

from collections.abc import Callable

from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import I32, I64, Type
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.specs import KernelSpec

UNROLL = 4  # steps of a product in a turn of its loop: 87 % of the peak in float32, by 2 steps 83 %
BF16_ONES = 0x3F803F80  # 1 and 1 as a packed pair


class Lanes:
    """The kernel language, the spec and the vectors that every part is given.

    W: lanes of a vector. B: lanes of a query block. d, d_v: features of queries and of values. bases: addresses that
    the offsets of query blocks are counted from.
    """

    def __init__(self, k: Kernel, spec: KernelSpec):
        self.k, self.spec = k, spec
        self.real, self.W, self.B = spec.real, k.target.lanes(spec.real.size), spec.lanes
        self.d, self.d_v = k.integer("d"), k.integer("d_v")
        self.bases = k.pointer("bases", I64)

    def operand(self, name: str) -> Pointer:
        """Return the address of an operand that the spec takes, into which query blocks have no offsets."""
        return self.k.pointer(self.spec.operand(name).name, self.spec.type_of(name))

    def vectors(self) -> range:
        """Offsets of the vectors in a row of lanes."""
        return range(0, self.B, self.W)

    def load(self, p: Pointer, *offsets: object) -> Value:
        for x in offsets:
            p = p + x
        return p.load(0, self.W)

    def fill(self, p: Pointer, x: float, rows: object = 1) -> None:
        with self.k.loop(self.k.whole(rows) * self.B, step=self.W) as n:
            p[n] = self.k.constant(self.real, x).spread(self.W)

    def zero(self) -> Value:
        return self.k.constant(self.real, 0.0).spread(self.W)

    def remainder(self, x: Value, type: Type) -> Value:
        """Return x − x as `type`, in that type; 0 where x or that is not finite."""
        rest = x - x.to(type).to(x.type)
        return self.k.where(rest * 0.0 == 0.0, rest, self.k.constant(x.type, 0.0)).to(type)

    def add_packed(self, total: Value, packed: Value) -> Value:
        """Return total + x₀ + x₁ for packed bf16 pairs."""
        return self.k.dot_bf16(total, packed, self.k.constant(I32, BF16_ONES).spread(packed.lanes))

    # Micro-tiles

    def multiply_add(self, total: Value, x: Value, y: Value) -> Value:
        """Return total + x · y; for packed pairs, both products."""
        return self.k.dot_bf16(total, x, y) if self.spec.paired else self.k.fma(x, y, total)

    def sums(self, rows: int, columns: range | None = None) -> list[list[Variable]]:
        """Return zeroed sums for `rows` rows of vectors, at `columns` or in all lanes."""
        columns = self.vectors() if columns is None else columns
        return [[self.k.variable(self.zero()) for _ in columns] for _ in range(rows)]

    def add_product(
        self,
        sums: list[list[Variable]],
        start: Value,
        stop: Value,
        factor: Callable[[int, Value], Value],
        vector: Callable[..., Value],
        columns: range | None = None,
    ) -> None:
        """Compute sum[r][c] += Σ_x factor(r, x) · vector(x, c), each in one chain.

        Factors are broadcast. columns: offsets of the vectors, by default of all lanes.
        """
        k = self.k
        columns = self.vectors() if columns is None else columns
        unroll = UNROLL if len(sums) > 1 else 1
        whole = stop - (stop - start) % unroll
        with k.loop(whole, start=start, step=unroll) as x:
            self.add_steps(sums, x, unroll, factor, vector, columns)
        if unroll > 1:
            with k.loop(stop, start=whole) as x:
                self.add_steps(sums, x, 1, factor, vector, columns)

    def add_steps(
        self,
        sums: list[list[Variable]],
        start: Value,
        count: int,
        factor: Callable[[int, Value], Value],
        vector: Callable[..., Value],
        columns: range,
    ) -> None:
        """Unroll `count` steps of `add_product`."""
        for x in (start + u for u in range(count)):
            vectors = [vector(x, c) for c in columns]
            for r, row in enumerate(sums):
                f = factor(r, x).spread(self.W)
                for total, v in zip(row, vectors, strict=True):
                    total.value = self.multiply_add(total.value, f, v)

    def micro_tiles(self, start: Value, stop: Value, work: Callable[[int, Value], None], rows: int = 0) -> None:
        """Call `work` on micro-tiles of `rows` rows, by default the most, then on rows."""
        k, rows = self.k, rows or self.k.target.rows(self.B // self.W)
        whole = stop - (stop - start) % rows
        with k.loop(whole, start=start, step=rows) as n:
            work(rows, n)
        with k.loop(stop, start=whole) as n:
            work(1, n)
