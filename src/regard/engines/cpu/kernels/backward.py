"""Backward: gradients of Q, K, V, the bias and tables, from lse and cotangents.

    P = exp(S − lse)        dP = D · (dO Vᵀ)        dS = P · (dP + c − dH (log P + 1))        dT = scale · dS · ∂score
    dQ = dT K               dK = dTᵀ Q              dV = (P · D)ᵀ dO

with one c = dlse + dH (Σ P − H) − Σ dO · O for each row. Each query block and tile of keys costs five products.
Sᵀ = K Qᵀ, dPᵀ = V dOᵀ and dQᵀ += Kᵀ dTᵀ have a query in every lane, like forward. dK and dV have features in lanes, and
read P and dT by broadcasts.

A work group is some query blocks that share K and V: all of them use a tile before the next. dQ is summed over tiles in
the order of keys, dK and dV over query blocks in their order. The schedule keeps this order between work groups.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from regard.engines.cpu.kernels.backward_products import BackwardProducts
from regard.engines.cpu.kernels.blocks import RowBlock, each_work_group
from regard.engines.cpu.kernels.copies import copy_rows
from regard.engines.cpu.kernels.softmax import finite, is_large, subtract_lse
from regard.engines.cpu.kernels.tiles import Halves, KeyTile, read_tile
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import I16, I32, I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.scratch import backward_block_scratch, copied, padded, transposed_rows
from regard.engines.cpu.spec.specs import TableRead
from regard.engines.cpu.spec.tiles import KEYS, TILE_BITS

NONE = 2**62
T = TypeVar("T")


@dataclass(frozen=True)
class QueryRows:
    """An array whose rows a query block stores.

    They are stored transposed and, unless `rows` is None, as they are.
    """

    name: str
    count: Value
    transposed: Pointer
    rows: Pointer | None
    scale: Value


class BackwardKernel(BackwardProducts):
    """The backward kernel; a query is in every lane."""

    # Query blocks

    def run(self) -> None:
        registers = self.registers if self.spec.amx else None
        each_work_group(self.lanes, registers, lambda first, stop, _: self._work_group(first, stop))

    def _open(self, n: Value, state: Pointer) -> None:
        self.current = RowBlock(self.lanes, n, state)

    @property
    def cursor(self) -> Pointer:
        """The next of the block's tiles, as an index into the list of tiles."""
        return self.block.state

    def _work_group(self, first: Value, stop: Value) -> None:
        k = self.k
        size = sum(backward_block_scratch(self.spec, self.d, self.d_v).values(), k.whole(0))
        tiles = k.pointer("tiles", I64)
        none, current = k.constant(I64, NONE), k.variable(k.constant(I64, NONE))

        def each(work: Callable[[], None]) -> None:
            with k.loop(stop, start=first) as n:
                self._open(n, self.rest + (n - first) * size)
                work()

        def next_tile() -> Value:
            found, end = k.variable(none), self.current.field("tiles") + self.current.field("count")
            with k.when(self.cursor[0] < end):
                number = tiles[self.cursor[0]] >> TILE_BITS
                found.value = k.where(number < k.integer("to"), number, none)
            return found.value

        def find() -> None:
            current.value = k.minimum(current.value, next_tile())

        def pass_over() -> None:
            with k.when(next_tile() == current.value):
                place = self.cursor[0]
                word = tiles[place]
                self.cursor[0] = self.cursor[0] + 1
                self._work(read_tile(self.current, self.tile, place, word))

        each(self._begin)
        each(find)
        with k.loop_while(lambda: current.value != none):
            self._open(first, self.rest)
            self._copies(current.value)
            each(pass_over)
            current.value = none
            each(find)
        each(self._end)
        if self.spec.trains_bias:
            k.fence()

    def _begin(self) -> None:
        k, spec, block = self.k, self.spec, self.block
        tiles, end = k.pointer("tiles", I64), self.current.field("tiles") + self.current.field("count")
        at = k.variable(self.current.field("tiles"))
        with k.loop_while(lambda: at.value < end):
            with k.when((tiles[at.value] >> TILE_BITS) >= k.integer("from")):
                block.state[1] = at.value
                at.value = k.constant(I64, NONE)
            at.value = at.value + 1
        self.cursor[0] = k.where(at.value > NONE, block.state[1], end)
        self.current.each_lane(self.current.index_lane)
        self.current.each_lane(self._begin_row)
        self._begin_rows()
        self._begin_rest()
        with k.choice(k.integer("from") == 0) as (fresh, more):
            with fresh:
                self.lanes.fill(block.dq, 0.0, self.d)
            with more, k.loop(self.current.field("lanes")) as n:
                row = self.current.row(self.current.address("dq"), n, *self.current.strides("dq"))
                with k.loop(self.d) as x:
                    block.dq[x * self.B + n] = row[x]
        self._check_finite()
        if spec.paired:
            self._pack_rows()

    def _arrays_of_rows(self) -> list[QueryRows]:
        """Return the arrays of rows; those stored transposed alone come last."""
        block, one = self.block, self.k.constant(self.real, 1.0)
        return [
            QueryRows("q", self.d, block.q, block.q_rows, self.query_scale),
            QueryRows("dout", self.d_v, block.dout, block.dout_rows, one),
            QueryRows("out", self.d_v, self.tile.O, None, one),
        ]

    def _begin_rows(self) -> None:
        """Store Q, dO and O transposed, Q with the scale; Q and dO also as rows."""
        k = self.k
        arrays = self._arrays_of_rows()
        with_rows = [x.rows for x in arrays if x.rows is not None]
        with k.loop(len(arrays)) as n:
            base = self.k.pick_pointer(n, [self.current.address(x.name) for x in arrays])
            strides = [
                self.k.pick(n, [k.integer(f"{x.name}_{axis}") for x in arrays]) for axis in ("head", "row", "feature")
            ]
            count = self.k.pick(n, [x.count for x in arrays])
            with k.when(base.address != 0) if self.spec.varying else nullcontext():
                transposed = self.k.pick_pointer(n, [x.transposed for x in arrays])
                self.transposes.to_lanes(
                    self.current, base, strides, count, transposed, self.k.pick(n, [x.scale for x in arrays])
                )
                with k.when(n < len(with_rows)):
                    self._rows(base, strides, count, self.k.pick_pointer(n, with_rows))

    def _begin_rest(self) -> None:
        """Compute c − Σ dO · O."""
        self._subtract(self.block.c, self.block.dout, self.tile.O)

    def _subtract(self, total: Pointer, x: Pointer, y: Pointer) -> None:
        """Compute total −= Σ x · y over the features of values, for each lane."""
        k = self.k
        with k.loop(self.B, step=self.W) as c:
            rest = k.variable(self.lanes.load(total, c))
            with k.loop(self.d_v) as a:
                at = a * self.B + c
                rest.value = k.fma(-self.lanes.load(x, at), self.lanes.load(y, at), rest.value)
            total[c] = rest.value

    def _if_there(self, name: str) -> Any:
        """Return a branch for an optional array, and a null context for others."""
        return self.k.when(self.current.has(name)) if name in self.spec.varying else nullcontext()

    def _check_finite(self) -> None:
        """Store a flag for rows that are not finite."""
        k = self.k
        not_finite = k.variable(k.constant(I64, 0))
        for x in self._arrays_of_rows():
            if x.rows is not None:
                with self._if_there(x.name):
                    found = self._not_finite(x.rows, self.B * padded(self.real.size, x.count))
                    not_finite.value = not_finite.value | found.to(I64)
        self.block.state[1] = not_finite.value

    def _pack_rows(self) -> None:
        """Pack Q and dO.

        The transposed arrays are packed in pairs of features, their rows in pairs of rows.
        """
        k = self.k
        for x in self._arrays_of_rows():
            if x.rows is None:
                continue
            with self._if_there(x.name):
                features, width = transposed_rows(self.spec, x.count), padded(self.real.size, x.count)
                self.lanes.fill(x.transposed + x.count * self.B, 0.0, features - x.count)
                features_first = x.transposed, features // 2, k.whole(self.B)
                for p, lines, size in (features_first, (x.rows, k.whole(self.B // 2), width)):
                    with k.loop(lines) as n, k.loop(size, step=self.W) as at:
                        low, high = (self.lanes.load(p, (2 * n + m) * size, at) for m in range(2))
                        p.of(I32)[n * size + at] = k.pack_bf16(low, high)

    def _begin_row(self, lane: Value, g: Value, r: Value) -> None:
        k, block, real = self.k, self.block, self.real
        row = g * k.integer("row_head") + r
        lse = self.current.address("lse")[row]
        block.lse[lane] = finite(self.k, lse * self.exponent_scale)
        if not self.spec.ruled:
            large, none = is_large(self.k, lse, lse * self.exponent_scale), k.constant(real, 0.0)
            block.lse[lane], block.large[lane] = k.where(large, none, block.lse[lane]), k.where(large, lse, none)
        block.c[lane] = k.constant(real, 0.0)
        with k.when(self.current.has("given")):
            block.c[lane] = self.current.address("given")[row]
        if self.spec.entropy:
            block.d_entropy[lane] = self.current.address("d_entropy")[row]

    def _rows(self, base: Pointer, strides: list[Value], count: Value, into: Pointer) -> None:
        """Copy the rows of the block's lanes, padded with zeros.

        Lanes without a row are zero.
        """
        k, W = self.k, self.W
        head, row, step = strides
        width = padded(self.real.size, count)
        whole = k.where(step == base.type.size, count - count % W, k.whole(0))
        with k.loop(self.B * width, step=W) as x:
            into[x] = self.lanes.zero()
        with k.loop(self.current.field("lanes")) as n:
            source, here = self.current.row(base, n, head, row), into + n * width
            with k.loop(whole, step=W) as x:
                here[x] = source.load(x, W).to(self.real)
            with k.loop(count, start=whole) as x:
                here[x] = source.bytes(x * step)[0].to(self.real)

    def _not_finite(self, p: Pointer, count: Value) -> Value:
        """Test for infinity or NaN in `count` numbers of whole vectors."""
        k = self.k
        totals = [k.variable(self.lanes.zero()) for _ in range(4)]
        whole = count - count % (4 * self.W)
        with k.loop(whole, step=4 * self.W) as n:
            for x, total in enumerate(totals):
                total.value = k.fma(self.lanes.load(p, n + x * self.W).to(self.real), 0.0, total.value)
        with k.loop(count, start=whole, step=self.W) as n:
            totals[0].value = k.fma(self.lanes.load(p, n).to(self.real), 0.0, totals[0].value)
        return (totals[0].value + totals[1].value + (totals[2].value + totals[3].value)).is_nan().any()

    def _end(self) -> None:
        k = self.k
        self.transposes.to_rows(
            self.current, self.block.dq, self.d, self.current.address("dq"), *self.current.strides("dq")
        )
        if self.spec.sink:

            def write(lane: Value, g: Value, r: Value) -> None:
                for name in self.spec.rests:
                    self.current.address(name)[g * k.integer("row_head") + r] = self.block[name][lane]

            self.current.each_lane(write)

    # Tiles

    def _copies(self, number: Value) -> None:
        """Copy a tile of K and V to contiguous rows, and test if they are finite."""
        k = self.k
        start = number * KEYS - k.integer("shift")
        first, stop = k.maximum(-start, 0), k.minimum(k.whole(KEYS), k.integer("n_k") - start)
        none = k.whole(0)
        tile = KeyTile(
            number, start, first, stop, (first, stop), Halves(first, stop, none, none), none, self.current, self.tile
        )
        not_finite = k.variable(k.constant(I64, 0))
        for name, count in (*((x, self.d) for x in self.spec.keys), *((x, self.d_v) for x in self.spec.values)):
            with self._if_there(name):
                width, copy = copied(self.spec, count), self.tile[f"{name}_copy"]
                copy = copy.of(self.spec.element if self.spec.paired else self.real)
                with k.when((stop - first < KEYS) | (count < width)), k.loop(KEYS * width, step=self.W) as n:
                    copy[n] = k.constant(copy.type, 0.0).spread(self.W)
                copy_rows(self.lanes, tile, name, first, stop, copy, width, count)
                not_finite.value = not_finite.value | self._not_finite(copy, KEYS * width).to(I64)
                if self.spec.paired and name in self.spec.keys:
                    self._pack_keys(name)
        self.state[0] = not_finite.value

    def _pack_keys(self, name: str) -> None:
        """Pack rows of K in pairs; for AMX, transpose the pairs."""
        k, size, keys = self.k, copied(self.spec, self.d), self.tile[f"{name}_copy"].of(I16)
        width, into = padded(self.real.size, self.d), self.tile[f"{name}_packed"].of(I32)

        def pair(n: Value, x: Value) -> Value:
            low, high = (self.lanes.load(keys, (2 * n + m) * size, x).to(I32) & 0xFFFF for m in range(2))
            return low | (high << 16)

        rows = self.W if self.spec.amx else 1
        with k.loop(KEYS // 2, step=rows) as n, k.loop(width, step=self.W) as x:
            if rows == 1:
                into[n * width + x] = pair(n, x)
            else:
                for m, column in enumerate(k.transpose([pair(n + m, x) for m in range(rows)])):
                    into[(x + m) * (KEYS // 2) + n] = column

    def _work(self, tile: KeyTile) -> None:
        k = self.k
        self._scores(tile)
        if self.spec.amx:
            self._hide_beyond(tile)
        self._fetch_dense(tile)
        if not self.spec.ruled:
            subtract_lse(self.lanes, tile, self.block.large, self.score_scale if self.spec.paired else None)
        self._score_gradients(tile)
        if self.spec.trains_bias:
            self._add_bias(tile)
        with k.choice((self.state[0] | self.block.state[1]) != 0) as (not_finite, finite):
            with not_finite:
                self._add_queries(tile, exclude_hidden=True)
                self._add_keys(tile, exclude_hidden=True)
            with finite:
                self._add_queries(tile, exclude_hidden=False)
                self._add_keys(tile, exclude_hidden=False)

    # Weights

    def _fetch_dense(self, tile: KeyTile) -> None:
        if self.spec.bias:
            self.transposes.fetch("bias", self.tile.bias, tile, tile.first, tile.stop)
        for n, name in enumerate(self.spec.masks):
            self.transposes.fetch(name, self.tile[f"dense{n}"], tile, *tile.mixed)

    def _score_gradients(self, tile: KeyTile) -> None:
        """Compute P · D and dT for all keys.

        Those that a mask may hide come first, then those on both sides.
        """
        k = self.k
        if not self.spec.mask:
            self._score_gradients_in(tile, tile.first, tile.stop, False)
            return
        self._score_gradients_in(tile, *tile.mixed, True)
        with k.loop(2) as part:
            before = part == 0
            start = k.where(before, tile.first, tile.mixed[1])
            self._score_gradients_in(tile, start, k.where(before, tile.mixed[0], tile.stop), False)

    def _score_gradients_in(self, tile: KeyTile, start: Value, stop: Value, masked: bool) -> None:
        k, spec, block = self.k, self.spec, self.block
        with k.loop(self.B, step=self.W) as c:
            row = {"b": self.current.field("b"), "keys": k.integer("keys")}
            row |= {"i": block.i.load(c, self.W), "h": block.h.load(c, self.W)}
            prepared = [None if rule is None else rule.prepare(TileContext(row)) for rule in (self.score, self.mask)]
            lanes = Lane(
                c,
                row,
                prepared,
                present=(k.whole(1) << k.minimum(k.maximum(self.current.field("lanes") - c, 0), self.W)) - 1,
                rows={name: self.lanes.load(block[name], c) for name in self.spec.numbers},
                keys=(block.first.load(c, self.W), block.second.load(c, self.W)),
                sums=_TableGradients(self, tile, prepared[0]),
            )
            if not spec.paired:
                with k.loop(stop, start=start) as p:
                    made = self._score_gradient(tile, p, lanes, lanes.present, masked)
                    for name, x in zip(spec.weights, made, strict=True):
                        self.tile[name][p * self.B + c] = x
            else:
                # A missing key next to one that is present is hidden.
                with k.when(start < stop), k.loop(stop, start=start - start % 2, step=2) as p:
                    both = []
                    for n in range(2):
                        there = (p + n >= tile.first) & (p + n < tile.stop)
                        made = self._score_gradient(tile, p + n, lanes, k.where(there, lanes.present, 0), masked)
                        both.append(dict(zip(spec.weights, made, strict=True)))
                        for name, x in both[n].items():
                            self._bf16(name)[(p + n) * self.B + c] = k.round_bf16(x)
                    for name in spec.score_gradients:
                        self._gradient_tile(name).of(I32)[p // 2 * self.B + c] = k.pack_bf16(
                            both[0][name], both[1][name]
                        )
            lanes.sums.end()

    def _score_gradient(
        self, tile: KeyTile, p: Value, lanes: "Lane", present: Value, masked: bool
    ) -> tuple[Value, ...]:
        """Compute P · D and dT of key p in the lanes that are `present`.

        Add dS to the bias's and tables' gradients.
        """
        k, spec, zero = self.k, self.spec, self.lanes.zero()
        at, rows = p * self.B + lanes.c, lanes.rows
        (s, *results), seen = self._ruled(tile, p, lanes, present, masked, {})
        difference = s - rows["lse"]
        P = mathematics.weight2(k, difference * (mathematics.LOG2_E / self.exponent_scale))
        dP, PD = self.lanes.load(self.tile.dS, at), P
        if spec.dropout:
            D = self._dropout_scale(lanes.keys, self._key(tile, p))
            dP, PD = dP * D, P * D
        G = dP + rows["c"]
        if spec.entropy:
            G = G - rows["d_entropy"] * (difference * (1 / self.exponent_scale) + 1.0)
        dS = k.where(seen, P * G, zero)
        dT = dS * self.gradient_scale
        if spec.nonlinear:
            dT = k.where(seen, dT * results[0], zero)
        if spec.trains_bias:
            self.tile.bias[at] = dS
        lanes.sums.add(results[spec.nonlinear :], [dS], seen)
        return k.where(seen, PD, k.constant(self.real, -0.0)), dT

    def _key(self, tile: KeyTile, p: Value) -> Value:
        """Return the absolute index of a key of a tile."""
        return tile.start + self.k.integer("j") + p

    def _ruled(
        self, tile: KeyTile, p: Value, lanes: "Lane", present: Value, masked: bool, more: Mapping[str, Value]
    ) -> tuple[list[Value], Value]:
        """Return the results of the rule for key p, and visibility.

        The first result is the score with the bias.

        more: additional leaves of the rule.
        """
        at, s = p * self.B + lanes.c, self.lanes.load(self.tile.P, p * self.B + lanes.c)
        if self.spec.paired:
            s = s * self.score_scale
        leaves = {**lanes.leaves, "j": self._key(tile, p), "s": s, **more}
        context = TileContext(leaves, lambda n: self.lanes.load(self.tile[f"dense{n}"], at) != 0.0)
        results = [s] if self.score is None else [x.spread(self.W) for x in self.score.at(context, lanes.prepared[0])]
        if self.spec.bias:
            results[0] = results[0] + self.lanes.load(self.tile.bias, at)
        seen = self.k.flags(present, self.W) & (results[0] != -math.inf)
        if masked and self.mask is not None:
            seen = seen & self.mask.at(context, lanes.prepared[1])[0].spread(self.W)
        return results, seen

    def _dropout_scale(self, keys: tuple[Value, Value], j: Value) -> Value:
        k = self.k
        dropped = mathematics.random_bits(k, keys, j).below(k.integer("threshold").to(I32))
        return k.where(dropped, self.lanes.zero(), k.real("keep_scale", self.real))


@dataclass(frozen=True)
class Lane:
    """The data of some lanes, before their keys."""

    c: Value  # the first of them
    leaves: Mapping[str, Value]
    prepared: Sequence[list[Value | None] | None]  # of the score and of the mask
    present: Value  # a bit for each lane that has a row
    rows: Mapping[str, Value]  # by the names of `BackwardSpec.numbers`
    keys: tuple[Value, Value]  # of dropout
    sums: "_TableGradients"


class _TableGradients:
    """Gradients of tables over some keys.

    Entries that the row alone determines are summed first.
    """

    def __init__(self, kernel: BackwardKernel, tile: KeyTile, prepared: list[Value | None] | None):
        self.kernel, self.spec, self.k, self.tile = kernel, kernel.spec, kernel.k, tile
        self.fixed: list[list[Value] | None] = []
        self.totals: list[Variable | None] = []
        if kernel.score is None or prepared is None:
            return
        results: Sequence[int] = kernel.score.program.results[self.spec.before :]
        for read in self.spec.table_reads:
            _, numbers, results = self._partition(read, results)
            indices = [prepared[m] for m in numbers]
            determined = [x.spread(kernel.W) for x in indices if x is not None]
            once = len(determined) == len(indices)
            self.fixed.append(determined if once else None)
            self.totals.append(self.k.variable(kernel.lanes.zero()) if once else None)

    def _partition(self, read: TableRead, results: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Split off a read's derivatives and indices from the results."""
        count = self.spec.derivatives
        end = count + read.indices
        return results[:count], results[count:end], results[end:]

    def add(self, results: Sequence[Value], dS: Sequence[Value], seen: Value) -> None:
        """Add dS · derivative, or a sum of such products."""
        for read, total in zip(self.spec.table_reads, self.totals, strict=True):
            derivatives, indices, results = self._partition(read, results)
            first, *others = (x * derivative for x, derivative in zip(dS, derivatives, strict=True))
            part = self.k.where(seen, sum(others, first), self.kernel.lanes.zero())
            if total is None:
                self._scatter(read, indices, part)
            else:
                total.value += part

    def end(self) -> None:
        for read, indices, total in zip(self.spec.table_reads, self.fixed, self.totals, strict=True):
            if indices is not None and total is not None:
                self._scatter(read, indices, total.value)

    def _scatter(self, read: TableRead, indices: Sequence[Value], part: Value) -> None:
        """Add to the gradient of a table where it was read, lane by lane."""
        kernel = self.kernel
        assert kernel.score is not None
        k, name = self.k, f"dtable{read.table}"
        partial_sum = (self.tile.number - k.integer("first_tile")) // k.integer("partial_tiles")
        into = k.pointer(name, kernel.real).bytes(partial_sum * k.integer(f"{name}_step"))
        position = kernel.score.position(read.table, indices).spread(kernel.W).to(I64)
        for n in range(kernel.W):
            at = position.lane(n)
            into[at] = into[at] + part.lane(n)
