"""The base of all tile kernels: memory, lanes, tiles, copies, products.

A kernel computes *query blocks*, which share a key and a value head, against *tiles* of keys.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from regard.engines.cpu.kernels.tiles import Halves, KeyTile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.amx import AmxRegisters, Totals
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import Lowering
from regard.engines.cpu.language.types import I32, I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.scratch import BlockState, TileScratch
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import AMX_SIDE, AMX_SUMS, KEYS, PART, TILE_BITS, TILE_WORD, TILE_WORD_BITS

LARGEST = {"f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308}
UNROLL = 4
LARGE = 2.0**10  # of scores as logarithms of base 2: their rounding changes weights by 2^-15 and more


class LanesTower(ABC):
    """The base of tile kernels."""

    block: BlockState
    tile: TileScratch
    record: Pointer
    next_work_group: Value  # the first query block of the next work group, or of the last

    def __init__(self, k: Kernel, spec: KernelSpec):
        self.k, self.spec = k, spec
        self.real, self.W, self.B = spec.real, k.target.lanes(spec.real.size), spec.lanes
        self.d, self.d_v = k.integer("d"), k.integer("d_v")
        self.bases = k.pointer("bases", I64)
        self.mask = Lowering(k, spec.mask, spec.real, spec.integer) if spec.mask else None
        self.score = Lowering(k, spec.score, spec.real, spec.integer) if spec.score else None

    def run(self) -> None:
        """Compute work groups until all threads that share the counter have taken all."""
        k = self.k
        groups, taken, count = k.pointer("work_groups", I64), k.pointer("taken", I64), k.integer("count")
        if self.spec.amx:
            k.flush_inputs()
        one = k.whole(1)
        n = k.variable(taken.fetch_add(one))
        with self._registers(), k.loop_while(lambda: n.value < count):
            self.next_work_group = groups[k.minimum(n.value + 1, count - 1) * 2]
            self._work_group(groups[n.value * 2], groups[n.value * 2 + 1])
            n.value = taken.fetch_add(one)

    @contextmanager
    def _registers(self) -> Iterator[None]:
        """Hold the AMX tile registers in `amx_tiles`, while products use them."""
        if self.spec.amx and not self.spec.decode_rows:
            registers = AmxRegisters(self.k)
            self.amx_tiles = registers.tiles
            with registers.configured():
                yield
        else:
            yield

    def _totals(self) -> Totals:
        """Return the AMX tiles of sums: a few row blocks by all lanes."""
        across = self.B // AMX_SIDE
        return [self.amx_tiles[n * across : (n + 1) * across] for n in range(max(1, AMX_SUMS // across))]

    @abstractmethod
    def _work_group(self, first: Value, stop: Value) -> None:
        """Compute the query blocks from `first` to before `stop`."""

    # Query blocks

    @abstractmethod
    def _block_scratch(self) -> Mapping[str, Any]:
        """Return the scratch layout of a query block, in elements of `real`.

        `cursor` and `state` are 64-bit integers.
        """

    def _open(self, n: Value, state: Pointer) -> None:
        """Make the n-th query block the current one; `state` is its scratch memory."""
        self.record = self.k.pointer("blocks", I64) + n * len(self.spec.block_fields)
        integer = self.spec.integer
        types = {"i": integer, "h": integer, "first": I32, "second": I32}
        types |= dict.fromkeys(("g", "r", "cursor", "state"), I64)
        self.block = BlockState(state, self._block_scratch(), types)

    # Memory

    def _pick(self, n: Value, options: Sequence[Value]) -> Value:
        """Return the n-th of some values."""
        *others, chosen = options
        for m, x in reversed(list(enumerate(others))):
            chosen = self.k.where(n == m, x, chosen)
        return chosen

    def _pick_pointer(self, n: Value, options: Sequence[Pointer]) -> Pointer:
        return self.k.at(self._pick(n, [x.address for x in options]), options[0].type)

    # Fields of the current query block, or of the one with this record.

    def field(self, name: str, record: Pointer | None = None) -> Value:
        return (record or self.record)[self.spec.block_fields.index(name)]

    def address(self, name: str, record: Pointer | None = None) -> Pointer:
        """Return the address of a query block's first row in an operand."""
        base = self.k.pointer_at(self.bases, self.spec.block_fields.index(name), self.spec.type_of(name))
        return base.bytes(self.field(name, record))

    def strides(self, name: str) -> list[Value]:
        """Return the strides of an operand's axes in bytes, in their order."""
        return [self.k.integer(field) for field in self.spec.operands[name].strides]

    def has(self, name: str) -> Value:
        """Test if the call has an array."""
        return self.bases[self.spec.block_fields.index(name)] != 0

    # Lanes

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

    def each_lane(self, work: Callable[[Value, Value, Value], None]) -> None:
        """Call `work` with every lane's number, head in the block and row.

        Lanes without a row repeat the last.
        """
        k, last, rows = self.k, self.field("lanes") - 1, self.field("rows")
        with k.loop(self.B) as lane:
            n = k.minimum(lane, last)
            work(lane, n // rows, n % rows)

    def _row(self, base: Pointer, lane: Value, head: Value, row: Value) -> Pointer:
        """Return the row of a lane, in an array whose base is the block's first row."""
        return base.bytes(self.block.g[lane] * head + self.block.r[lane] * row)

    def _begin_lane(self, lane: Value, g: Value, r: Value) -> None:
        """Store the row's indices and dropout keys."""
        k, block = self.k, self.block
        i, h = self.field("i") + r, self.field("h") + g
        block.i[lane], block.h[lane] = i.to(self.spec.integer), h.to(self.spec.integer)
        block.g[lane], block.r[lane] = g, r
        if self.spec.dropout:
            first, second = mathematics.row_key(k, k.integer("seed"), self.field("b"), h, i)
            block.first[lane], block.second[lane] = first, second

    # Tiles

    def _tile(self, word: Value, scratch: TileScratch | None = None) -> KeyTile:
        """Return the tile of an entry of the list; scratch: its memory, unless it is the only one in flight."""
        k = self.k
        number = word >> TILE_BITS
        start = number * KEYS - k.integer("shift")
        entry = {name: word >> n * TILE_WORD_BITS & (1 << TILE_WORD_BITS) - 1 for n, name in enumerate(TILE_WORD)}
        first = k.maximum(entry["first"] * PART, -start)
        stop = k.minimum(entry["stop"] * PART, k.integer("n_k") - start)
        mixed = k.minimum(k.maximum(entry["mixed_first"] * PART, first), stop)
        both_first = k.maximum(k.minimum(entry["both_first"] * PART, stop), first)
        both_first = k.where((first | both_first) % PART == 0, both_first, first)
        both_stop = k.maximum(k.minimum(entry["both_stop"] * PART, stop), both_first)
        both_stop = k.where((both_stop | stop) % PART == 0, both_stop, stop)
        return KeyTile(
            number + k.integer("first_tile"),
            start,
            first,
            stop,
            (mixed, k.minimum(k.maximum(entry["mixed_stop"] * PART, mixed), stop)),
            Halves(both_first, both_stop, entry["early"], entry["late"]),
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            scratch or self.tile,
        )

    def _finite(self, m: Value) -> Value:
        """Replace −∞ by the least number, so that −∞ − m is not NaN."""
        return self.k.maximum(self.k.constant(self.real, -LARGEST[self.real.name]), m)

    def _is_large(self, m: Value, scaled: Value) -> Value:
        """Test for a maximum or an lse whose rounding changes weights.

        scaled: m in the scale of exponents.
        """
        return (self.k.intrinsic("fabs", self.real, scaled) > LARGE) & (m > -math.inf)

    def _subtract_lse(self, tile: KeyTile, lse: Pointer, scale: Value | None) -> None:
        """Compute S ← S − lse where `lse`, of each query, is not 0.

        scale: from products to exponents.

        The natural score is the one from which forward computed lse. So a lone key has the weight 1, and none has more.
        """
        k, P = self.k, tile.scratch.P
        for c in self.vectors():
            natural = self.load(lse, c)
            far = natural != 0.0
            with k.when(far.any()), k.loop(tile.stop, start=tile.first) as p:
                s = self.load(P, p * self.B, c)
                score = (s if scale is None else s * scale) * mathematics.LN_2
                below = k.minimum(self.zero(), score - natural) * mathematics.LOG2_E
                P[p * self.B + c] = k.where(far, below if scale is None else below / scale, s)

    def _source(self, name: str, row: Value, record: Pointer | None = None) -> Pointer:
        """Return a row of K or V by its column."""
        return self.address(name, record).bytes(row * self.k.integer(f"{name}_row"))

    def _copy(
        self, name: str, tile: KeyTile, first: Value, stop: Value, copy: Pointer, width: Value, count: Value
    ) -> None:
        k, size = self.k, self.spec.element.size
        feature = k.integer(f"{name}_feature")
        with k.loop(stop, start=first) as p:
            source, into = self._source(name, tile.start + p), copy + p * width
            whole = k.where(feature == size, count - count % self.W, k.whole(0))
            with k.loop(whole, step=self.W) as x:
                into[x] = source.bytes(x * size).load(0, self.W).to(copy.type)
            with k.loop(count, start=whole) as x:
                into[x] = source.bytes(x * feature)[0].to(copy.type)
            if self.spec.paired:
                with k.loop(width, start=count) as x:
                    into[x] = k.constant(copy.type, 0.0)

    def _transpose(
        self, base: Pointer, strides: list[Value], count: Value, transposed: Pointer, scale: Value | float
    ) -> None:
        """Transpose rows, scaled, so that lanes are queries.

        transposed[x, lane] = scale · base[head, row, x] for each lane and x below `count`.
        """
        k, W = self.k, self.W
        whole = k.where(strides[2] == base.type.size, count - count % W, k.whole(0))
        with k.loop(self.B, step=W) as c:
            rows = self._lane_rows(base, strides, c)
            with k.loop(whole, step=W) as x:
                self._store_transposed(rows, x, transposed + (x * self.B + c), scale)
            self._transpose_singly(base, strides, c, whole, count, transposed, scale)

    def _lane_rows(self, base: Pointer, strides: list[Value], c: Value) -> list[Pointer]:
        """Return the rows of the lanes of one vector."""
        return [self._row(base, c + r, *strides[:2]) for r in range(self.W)]

    def _store_transposed(self, rows: list[Pointer], x: Value, into: Pointer, scale: Value | float) -> None:
        """Store the vectors of `_transposed_block` in consecutive rows of lanes."""
        for n, vector in enumerate(self._transposed_block(rows, x, scale)):
            into[n * self.B] = vector

    def _transposed_block(self, rows: list[Pointer], x: Value, scale: Value | float) -> list[Value]:
        """Load a vector of each row from x on, scaled and transposed."""
        return self.k.transpose([p.load(x, self.W).to(self.real) * scale for p in rows])

    def _transpose_singly(
        self, base: Pointer, strides: list[Value], c: Value, start: Value, stop: Value, transposed: Pointer, scale: Any
    ) -> None:
        """Transpose one by one.

        That is x from `start` to before `stop`, for the vector of lanes at c.
        """
        k = self.k
        with k.loop(self.W) as r:
            p = self._row(base, c + r, *strides[:2])
            with k.loop(stop, start=start) as x:
                transposed[x * self.B + c + r] = p.bytes(x * strides[2])[0].to(self.real) * scale

    def _transpose_back(self, transposed: Pointer, count: Value, base: Pointer, head: Value, row: Value) -> None:
        """Transpose lanes back to rows.

        base[head, row, x] = transposed[x, lane] for each lane and x below `count`.
        """
        k, W, B = self.k, self.W, self.B
        lanes, whole = self.field("lanes"), count - count % W
        with k.loop(lanes, step=W) as c:
            with k.loop(whole, step=W) as a:
                vectors = k.transpose([self.load(transposed, (a + x) * B, c) for x in range(W)])
                for r in range(W):
                    with k.when(c + r < lanes):
                        self._row(base, c + r, head, row)[a] = vectors[r].to(base.type)
            with k.loop(k.minimum(lanes, c + W), start=c) as n:
                into = self._row(base, n, head, row)
                with k.loop(count, start=whole) as a:
                    into[a] = transposed[a * B + n].to(base.type)

    def _folded(self, x: Value, operation: Callable[[Value, Value], Value]) -> Value:
        """Reduce the lanes of a vector by halves."""
        while x.lanes > 2:
            half = x.lanes // 2
            x = operation(*(self.k.shuffle(x, x, range(n, n + half)) for n in (0, half)))
        return operation(x.lane(0), x.lane(1))

    # Products

    def multiply_add(self, total: Value, x: Value, y: Value) -> Value:
        """Return total + x · y; for packed pairs, both products."""
        return self.k.dot_bf16(total, x, y) if self.spec.paired else self.k.fma(x, y, total)

    def _sums(self, rows: int, columns: range | None = None) -> list[list[Variable]]:
        """Return zeroed sums for `rows` rows of vectors, at `columns` or in all lanes."""
        columns = self.vectors() if columns is None else columns
        return [[self.k.variable(self.zero()) for _ in columns] for _ in range(rows)]

    def _add_product(
        self,
        sums: list[list[Variable]],
        start: Value,
        stop: Value,
        factor: Callable[[int, Value], Value],
        vector: Callable[..., Value],
        columns: range | None = None,
    ) -> None:
        """Compute sum[r][c] += Σ_x factor(r, x) · vector(x, c), each in one chain.

        Factors are broadcast.

        columns: offsets of the vectors, by default of all lanes.
        """
        k = self.k
        columns = self.vectors() if columns is None else columns
        unroll = UNROLL if len(sums) > 1 else 1
        whole = stop - (stop - start) % unroll
        with k.loop(whole, start=start, step=unroll) as x:
            self._add_steps(sums, x, unroll, factor, vector, columns)
        if unroll > 1:
            with k.loop(stop, start=whole) as x:
                self._add_steps(sums, x, 1, factor, vector, columns)

    def _add_steps(
        self,
        sums: list[list[Variable]],
        start: Value,
        count: int,
        factor: Callable[[int, Value], Value],
        vector: Callable[..., Value],
        columns: range,
    ) -> None:
        """Unroll `count` steps of `_add_product`."""
        for x in (start + u for u in range(count)):
            vectors = [vector(x, c) for c in columns]
            for r, row in enumerate(sums):
                f = factor(r, x).spread(self.W)
                for total, v in zip(row, vectors, strict=True):
                    total.value = self.multiply_add(total.value, f, v)

    def _micro_tiles(self, start: Value, stop: Value, work: Callable[[int, Value], None], rows: int = 0) -> None:
        """Call `work` on micro-tiles of `rows` rows, then on single rows.

        By default a micro-tile has as many rows as registers hold.
        """
        k, rows = self.k, rows or self.k.target.rows(self.B // self.W)
        whole = stop - (stop - start) % rows
        with k.loop(whole, start=start, step=rows) as n:
            work(rows, n)
        with k.loop(stop, start=whole) as n:
            work(1, n)

    # Dense arrays

    def _dense(self, n: int) -> Pointer:
        return self.tile[f"dense{n}"]

    def _dense_at(self, name: str, column: Value) -> tuple[Pointer, list[Value]]:
        """Return the address of a key in a dense array, and the array's strides.

        The strides are by head, row and key.
        """
        strides = self.strides(name)
        return self.address(name).bytes(column * strides[2]), strides

    def _fetch(self, name: str, into: Pointer, tile: KeyTile, start: Value, stop: Value) -> None:
        """Transpose some keys of a dense array, so that lanes are queries."""
        base, strides = self._dense_at(name, tile.start + start)
        self._transpose(base, strides, stop - start, into + start * self.B, 1.0)

    def _prefetch_bias(self, tile: KeyTile, p: Value, count: int) -> None:
        """Prefetch the bias, some rows of it in every micro-tile of keys."""
        k, lanes, type = self.k, -(-self.B * count // KEYS), self.spec.type_of("bias")
        base, (head, row, _) = self._dense_at("bias", tile.start + tile.first)
        for n in range(lanes):
            lane = k.minimum(p // count * lanes + n, self.field("lanes") - 1)
            line = self._row(base, lane, head, row)
            for x in (*range(0, KEYS * type.size, 64), KEYS * type.size - 1):  # the row may begin within a line
                line.bytes(x).prefetch()

    def _prefetch_row(self, line: Pointer, size: Value) -> None:
        """Prefetch `size` bytes to the second level of caches."""
        with self.k.loop(size, step=64) as at:
            line.bytes(at).prefetch(2)
