"""Transposes between rows in memory and rows of lanes, in registers."""

from typing import Any

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.copies import key_width
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.types import I16, I32
from regard.engines.cpu.language.values import Pointer, Value


class Transposes:
    """Transposes of rows of a query block."""

    def __init__(self, lanes: Lanes):
        self.k, self.lanes, self.real, self.W, self.B = lanes.k, lanes, lanes.real, lanes.W, lanes.B

    def to_lanes(
        self,
        block: RowBlock,
        base: Pointer,
        strides: list[Value],
        count: Value,
        transposed: Pointer,
        scale: Value | float,
    ) -> None:
        """Transpose rows, scaled, so that lanes are queries.

        transposed[x, lane] = scale · base[head, row, x] for each lane and x below `count`.
        """
        k, W = self.k, self.W
        whole = k.where(strides[2] == base.type.size, count - count % W, k.whole(0))
        with k.loop(self.B, step=W) as c:
            rows = self.rows(block, base, strides, c)
            with k.loop(whole, step=W) as x:
                self.store(rows, x, transposed + (x * self.B + c), scale)
            self.singly(block, base, strides, c, whole, count, transposed, scale)

    def rows(self, block: RowBlock, base: Pointer, strides: list[Value], c: Value) -> list[Pointer]:
        """Return the rows of the lanes of one vector."""
        return [block.row(base, c + r, *strides[:2]) for r in range(self.W)]

    def store(self, rows: list[Pointer], x: Value, into: Pointer, scale: Value | float) -> None:
        """Store the vectors of `square` in consecutive rows of lanes."""
        for n, vector in enumerate(self.square(rows, x, scale)):
            into[n * self.B] = vector

    def square(self, rows: list[Pointer], x: Value, scale: Value | float) -> list[Value]:
        """Load a vector of each row from x on, scaled and transposed."""
        return self.k.transpose([p.load(x, self.W).to(self.real) * scale for p in rows])

    def singly(
        self,
        block: RowBlock,
        base: Pointer,
        strides: list[Value],
        c: Value,
        start: Value,
        stop: Value,
        transposed: Pointer,
        scale: Any,
    ) -> None:
        """Transpose x from `start` to before `stop` one by one, for the vector at c."""
        k = self.k
        with k.loop(self.W) as r:
            p = block.row(base, c + r, *strides[:2])
            with k.loop(stop, start=start) as x:
                transposed[x * self.B + c + r] = p.bytes(x * strides[2])[0].to(self.real) * scale

    def to_packed_lanes(
        self, block: RowBlock, base: Pointer, strides: list[Value], transposed: Pointer, scale: Value
    ) -> None:
        """Transpose rows of bf16 to packed pairs of features, a row of lanes for each.

        The pairs take the sign of the scale; pairs after the last feature are 0.
        """
        k, W, B, d = self.k, self.W, self.B, self.lanes.d
        head, row, feature = strides
        whole, negative = k.where(feature == base.type.size, d // 2 & -W, 0), scale < 0.0
        signs = {type: k.where(negative, k.constant(type, x), 0) for type, x in ((I32, -0x7FFF8000), (I16, -0x8000))}
        with k.loop(key_width(self.lanes) // 2 * B, start=whole * B, step=W) as n:
            transposed[n] = k.constant(I32, 0).spread(W)
        with k.loop(B, step=W) as c:
            rows = [block.row(base, c + r, head, row).of(I32) for r in range(W)]
            with k.loop(whole, step=W) as x:
                for m, packed in enumerate(k.transpose([p.load(x, W) for p in rows])):
                    transposed[(x + m) * B + c] = packed ^ signs[I32]
            with k.loop(W) as r:
                p, into = block.row(base, c + r, head, row), transposed.of(I16)
                with k.loop(d, start=whole * 2) as x:
                    into[(x // 2 * B + c + r) * 2 + x % 2] = p.bytes(x * feature)[0] ^ signs[I16]

    def to_rows(
        self,
        block: RowBlock,
        transposed: Pointer,
        count: Value,
        base: Pointer,
        head: Value,
        row: Value,
        *,
        low: tuple[Pointer, Value, Value] | None = None,
    ) -> None:
        """Transpose lanes back to rows.

        base[head, row, x] = transposed[x, lane] for each lane and x below `count`. low: base and strides of what
        rounding takes, if that is stored too.
        """
        k, W, B = self.k, self.W, self.B
        lanes, whole = block.field("lanes"), count - count % W
        with k.loop(lanes, step=W) as c:
            with k.loop(whole, step=W) as a:
                vectors = k.transpose([self.lanes.load(transposed, (a + x) * B, c) for x in range(W)])
                for r in range(W):
                    with k.when(c + r < lanes):
                        block.row(base, c + r, head, row)[a] = vectors[r].to(base.type)
                        if low:
                            block.row(low[0], c + r, *low[1:])[a] = self.lanes.remainder(vectors[r], base.type)
            with k.loop(k.minimum(lanes, c + W), start=c) as n:
                into = block.row(base, n, head, row)
                with k.loop(count, start=whole) as a:
                    into[a] = transposed[a * B + n].to(base.type)
                    if low:
                        rest = self.lanes.remainder(transposed[a * B + n], base.type)
                        block.row(low[0], n, *low[1:])[a] = rest

    def fetch(self, name: str, into: Pointer, tile: KeyTile, start: Value, stop: Value) -> None:
        """Transpose some keys of a dense array, so that lanes are queries."""
        base, strides = tile.block.dense_at(name, tile.start + start)
        self.to_lanes(tile.block, base, strides, stop - start, into + start * self.B, 1.0)
