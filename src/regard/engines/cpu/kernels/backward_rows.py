"""Rows of query blocks and tiles, in the layout of backward's products."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from regard.engines.cpu.kernels.backward_terms import when_given
from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.copies import copy_rows
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.score_gradients import Scales
from regard.engines.cpu.kernels.softmax import finite, is_large
from regard.engines.cpu.kernels.transposes import Transposes
from regard.engines.cpu.language.types import I16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.scratch import TileScratch, copied, padded, transposed_rows
from regard.engines.cpu.spec.specs import BackwardSpec
from regard.engines.cpu.spec.tiles import KEYS


@dataclass(frozen=True)
class Rows:
    """An array of rows, stored transposed and scaled; with `rows` also as they are."""

    name: str
    count: Value
    transposed: Pointer
    rows: Pointer | None
    scale: Value


class QueryRows:
    """Q, dO, O and dQ of a query block, and its numbers.

    numbers: operands that are read for each row, by the array that stores them. rests: arrays (c, x, y), for
    c − Σ x · y.
    """

    def __init__(
        self,
        lanes: Lanes,
        spec: BackwardSpec,
        scratch: TileScratch,
        scales: Scales,
        numbers: Mapping[str, str],
        rests: Sequence[tuple[str, str, str]],
    ):
        self.k, self.lanes, self.spec, self.scratch, self.scales = lanes.k, lanes, spec, scratch, scales
        self.numbers, self.transposes = numbers, Transposes(lanes)
        self.rests = [*rests, *((c, x, "low") for c, x, y in rests if spec.low and y == "out")]

    def begin(self, block: RowBlock) -> None:
        """Store the numbers, the rows in both layouts, c, and dQ of earlier tiles."""
        block.each_lane(block.index_lane)
        block.each_lane(lambda lane, g, r: self._number(block, lane, g, r))
        k, arrays = self.k, self._arrays(block)
        with_rows = [x.rows for x in arrays if x.rows is not None]
        with k.loop(len(arrays)) as n:
            base = k.pick_pointer(n, [block.address(x.name) for x in arrays])
            axes = "head", "row", "feature"
            strides = [k.pick(n, [k.integer(f"{x.name}_{axis}") for x in arrays]) for axis in axes]
            count = k.pick(n, [x.count for x in arrays])
            with k.when(base.address != 0) if self.spec.varying else nullcontext():
                transposed = k.pick_pointer(n, [x.transposed for x in arrays])
                scale = k.pick(n, [x.scale for x in arrays])
                self.transposes.to_lanes(block, base, strides, count, transposed, scale)
                with k.when(n < len(with_rows)):
                    self._copy(block, base, strides, count, k.pick_pointer(n, with_rows))
        outputs = dict(zip(self.spec.names("output", "low"), self.spec.outputs, strict=True))
        for c, x, y in self.rests:
            with when_given(block, self.spec, x):
                self._subtract(block.state[c], block.state[x], self.scratch[outputs[y]], apart=y == "low")
        self._begin_dq(block)
        self._find_not_finite(block)
        if self.spec.paired:
            self._pack(block)

    def _arrays(self, block: RowBlock) -> list[Rows]:
        """Return the arrays of rows; those stored transposed alone come last."""
        spec, lanes, one = self.spec, self.lanes, self.k.constant(self.lanes.real, 1.0)
        inputs = [
            Rows(
                name,
                lanes.d if name in spec.queries else lanes.d_v,
                block.state[name],
                block.state[f"{name}_rows"],
                self.scales.query if name in spec.queries else one,
            )
            for name in spec.names("query", "cotangent")
        ]
        outputs = zip(spec.names("output", "low"), spec.outputs, strict=True)
        return inputs + [Rows(name, lanes.d_v, self.scratch[x], None, one) for name, x in outputs]

    def _number(self, block: RowBlock, lane: Value, g: Value, r: Value) -> None:
        k, state, real = self.k, block.state, self.lanes.real
        row = g * k.integer("row_head") + r
        lse = block.address("lse")[row]
        state.lse[lane] = finite(k, lse * self.scales.exponent)
        if not self.spec.ruled:
            large, none = is_large(k, lse, lse * self.scales.exponent), k.constant(real, 0.0)
            state.lse[lane], state.large[lane] = k.where(large, none, state.lse[lane]), k.where(large, lse, none)
        state.c[lane] = k.constant(real, 0.0)
        with k.when(block.has("given")):
            state.c[lane] = block.address("given")[row]
        for name, operand in self.numbers.items():
            if self.spec.entropy or not name.startswith("d_entropy"):
                state[name][lane] = block.address(operand)[row]

    def _copy(self, block: RowBlock, base: Pointer, strides: list[Value], count: Value, into: Pointer) -> None:
        """Copy the rows of the block's lanes, padded with zeros.

        Lanes without a row are zero.
        """
        k, W, real = self.k, self.lanes.W, self.lanes.real
        head, row, step = strides
        width = padded(real.size, count)
        whole = k.where(step == base.type.size, count - count % W, k.whole(0))
        with k.loop(self.lanes.B * width, step=W) as x:
            into[x] = self.lanes.zero()
        with k.loop(block.field("lanes")) as n:
            source, here = block.row(base, n, head, row), into + n * width
            with k.loop(whole, step=W) as x:
                here[x] = source.load(x, W).to(real)
            with k.loop(count, start=whole) as x:
                here[x] = source.bytes(x * step)[0].to(real)

    def _subtract(self, total: Pointer, x: Pointer, y: Pointer, apart: bool) -> None:
        """Compute total −= Σ x · y over the features of values, for each lane.

        apart: the sum is small, and keeps its digits if it is summed by itself.
        """
        k, lanes = self.k, self.lanes
        with k.loop(lanes.B, step=lanes.W) as c:
            rest = k.variable(lanes.zero() if apart else lanes.load(total, c))
            with k.loop(lanes.d_v) as a:
                at = a * lanes.B + c
                rest.value = k.fma(-lanes.load(x, at), lanes.load(y, at), rest.value)
            total[c] = lanes.load(total, c) + rest.value if apart else rest.value

    def _begin_dq(self, block: RowBlock) -> None:
        k, lanes, dq = self.k, self.lanes, block.state.dq
        if self.spec.gradients == "key":
            return
        fresh_at = 0 if self.spec.gradients == "all" else -1
        with k.choice(k.integer("from") == fresh_at) as (fresh, more):
            with fresh:
                lanes.fill(dq, 0.0, lanes.d)
            with more, k.loop(block.field("lanes")) as n:
                row = block.row(block.address("dq"), n, *block.strides("dq"))
                with k.loop(lanes.d) as x:
                    dq[x * lanes.B + n] = row[x]

    def _find_not_finite(self, block: RowBlock) -> None:
        """Store a flag for rows that are not finite."""
        k, lanes = self.k, self.lanes
        not_finite = k.variable(k.constant(I64, 0))
        for x in self._arrays(block):
            if x.rows is not None:
                with when_given(block, self.spec, x.name):
                    flag = is_not_finite(lanes, x.rows, lanes.B * padded(lanes.real.size, x.count))
                    not_finite.value = not_finite.value | flag.to(I64)
        block.state.state[1] = not_finite.value

    def _pack(self, block: RowBlock) -> None:
        """Pack transposed arrays in pairs of features, and their rows in pairs of rows."""
        k, lanes, B = self.k, self.lanes, self.lanes.B
        for x in self._arrays(block):
            if x.rows is None:
                continue
            with when_given(block, self.spec, x.name):
                features, width = transposed_rows(self.spec, x.count), padded(lanes.real.size, x.count)
                lanes.fill(x.transposed + x.count * B, 0.0, features - x.count)
                features_first = x.transposed, features // 2, k.whole(B)
                for p, lines, size in (features_first, (x.rows, k.whole(B // 2), width)):
                    with k.loop(lines) as n, k.loop(size, step=lanes.W) as at:
                        low, high = (lanes.load(p, (2 * n + m) * size, at) for m in range(2))
                        p.of(I32)[n * size + at] = k.pack_bf16(low, high)

    def end(self, block: RowBlock) -> None:
        """Store dQ, and what the gradient of a sink needs."""
        k, state = self.k, block.state
        if self.spec.gradients != "key":
            self.transposes.to_rows(block, state.dq, self.lanes.d, block.address("dq"), *block.strides("dq"))
        if self.spec.sink:

            def store(lane: Value, g: Value, r: Value) -> None:
                for name in self.spec.names("rest"):
                    block.address(name)[g * k.integer("row_head") + r] = state[name][lane]

            block.each_lane(store)


class KeyRows:
    """Tiles of K and V as contiguous rows."""

    def __init__(self, lanes: Lanes, spec: BackwardSpec, scratch: TileScratch):
        self.k, self.lanes, self.spec, self.scratch = lanes.k, lanes, spec, scratch

    def copy(self, block: RowBlock, number: Value) -> None:
        """Copy a tile of K and V, and store a flag if they are not finite."""
        k, spec, lanes = self.k, self.spec, self.lanes
        start = number * KEYS - k.integer("shift")
        first, stop = k.maximum(-start, 0), k.minimum(k.whole(KEYS), k.integer("n_k") - start)
        not_finite = k.variable(k.constant(I64, 0))
        for name in (*spec.keys, *spec.values):
            count = lanes.d if name in spec.keys else lanes.d_v
            with when_given(block, spec, name):
                width, copy = copied(spec, count), self.scratch[f"{name}_copy"]
                copy = copy.of(spec.element if spec.paired else lanes.real)
                with k.when((stop - first < KEYS) | (count < width)), k.loop(KEYS * width, step=lanes.W) as n:
                    copy[n] = k.constant(copy.type, 0.0).spread(lanes.W)
                copy_rows(lanes, block, name, start, first, stop, copy, width, count)
                not_finite.value = not_finite.value | is_not_finite(lanes, copy, KEYS * width).to(I64)
                if spec.paired and name in spec.keys:
                    self._pack(name)
        self.scratch.state.of(I64)[0] = not_finite.value

    def _pack(self, name: str) -> None:
        """Pack rows of K in pairs; for AMX, transpose the pairs."""
        k, lanes, size = self.k, self.lanes, copied(self.spec, self.lanes.d)
        keys, into = self.scratch[f"{name}_copy"].of(I16), self.scratch[f"{name}_packed"].of(I32)
        width = padded(lanes.real.size, lanes.d)

        def pair(n: Value, x: Value) -> Value:
            low, high = (lanes.load(keys, (2 * n + m) * size, x).to(I32) & 0xFFFF for m in range(2))
            return low | (high << 16)

        rows = lanes.W if self.spec.amx else 1
        with k.loop(KEYS // 2, step=rows) as n, k.loop(width, step=lanes.W) as x:
            if rows == 1:
                into[n * width + x] = pair(n, x)
            else:
                for m, column in enumerate(k.transpose([pair(n + m, x) for m in range(rows)])):
                    into[(x + m) * (KEYS // 2) + n] = column


def is_not_finite(lanes: Lanes, p: Pointer, count: Value) -> Value:
    """Test for infinity or NaN in `count` numbers of whole vectors."""
    k, W, real = lanes.k, lanes.W, lanes.real
    totals = [k.variable(lanes.zero()) for _ in range(4)]
    whole = count - count % (4 * W)
    with k.loop(whole, step=4 * W) as n:
        for x, total in enumerate(totals):
            total.value = k.fma(lanes.load(p, n + x * W).to(real), 0.0, total.value)
    with k.loop(count, start=whole, step=W) as n:
        totals[0].value = k.fma(lanes.load(p, n).to(real), 0.0, totals[0].value)
    return (totals[0].value + totals[1].value + (totals[2].value + totals[3].value)).is_nan().any()
