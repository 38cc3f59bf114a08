"""The weights of a second pass as its result: a part of P, stored.

Where the part has all keys, rows are divided by their sums and the sink's share. That cancels the error of a rounded
lse, which is the same in all weights of a row.
"""

import math
from collections.abc import Callable

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.softmax import RunningSoftmax
from regard.engines.cpu.kernels.tiles import KeyTile, read_keys
from regard.engines.cpu.kernels.transposes import Transposes
from regard.engines.cpu.language import mathematics
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value


class StoredWeights:
    """The weights of query blocks, and the sums of their rows.

    In a query block `l` holds the sums. `split_sums` are those of a key split, so that no chain of sums is long. sink:
    returns the sinks of a vector of lanes.
    """

    def __init__(
        self, lanes: Lanes, softmax: RunningSoftmax, split_sums: Pointer, sink: Callable[[RowBlock, Value], Value]
    ):
        self.k, self.spec, self.lanes, self.softmax, self.sink = lanes.k, lanes.spec, lanes, softmax, sink
        self.split_sums, self.transposes = split_sums, Transposes(lanes)

    def begin(self, block: RowBlock) -> None:
        """Start the sums of rows with the weight of the sink."""
        if not self.spec.sink:
            return
        k, lanes, state = self.k, self.lanes, block.merged
        exponent_scale = 1.0 if self.spec.ruled else mathematics.LOG2_E
        with k.loop(lanes.B, step=lanes.W) as c:
            sink, shift, large = self.sink(block, c), lanes.load(state.m, c), lanes.load(state.e, c)
            below = k.where(large != 0.0, (sink - large) * exponent_scale, sink * exponent_scale + shift)
            share = self.softmax.power(k.minimum(lanes.zero(), below))
            state.l[c] = k.where(sink == -math.inf, lanes.zero(), share)

    def begin_split(self) -> None:
        self.lanes.fill(self.split_sums, 0.0)

    def end_split(self, block: RowBlock) -> None:
        sums = block.merged.l
        for c in self.lanes.vectors():
            sums[c] = self.lanes.load(sums, c) + self.lanes.load(self.split_sums, c)

    def add(self, tile: KeyTile) -> None:
        """Add the weights of a tile to the sums, and store those that the part has."""
        k, lanes, vectors, P = self.k, self.lanes, self.lanes.vectors(), tile.scratch.P
        totals = [k.variable(lanes.zero()) for _ in vectors]
        with k.loop(tile.stop, start=tile.first) as p:
            for c, total in zip(vectors, totals, strict=True):
                total.value = total.value + lanes.load(P, p * lanes.B, c)
        for c, total in zip(vectors, totals, strict=True):
            self.split_sums[c] = lanes.load(self.split_sums, c) + total.value
        first = k.maximum(tile.first, k.integer("first_column") - tile.start)
        stop = k.maximum(k.minimum(tile.stop, k.integer("stop_column") - tile.start), first)
        head, row = tile.block.strides("weights")
        part = tile.block.address("weights") + (tile.start + first)
        self.transposes.to_rows(tile.block, P + first * lanes.B, stop - first, part, head, row)

    def end(self, block: RowBlock) -> None:
        """Divide the rows of a part with all keys by their sums."""
        k, W, sums = self.k, self.lanes.W, block.merged.l
        head, row = block.strides("weights")
        tiles, first = k.pointer("tiles", I64), block.field("tiles")
        with k.when(k.integer("whole") != 0), k.loop(block.field("lanes")) as n:
            total, one = sums[n], k.constant(self.lanes.real, 1.0)
            valid = (total > 0.0) & (total < math.inf)  # else the row sees nothing, or has NaN where it sees something
            factor = k.where(valid, one / total, one)
            weights = block.row(block.address("weights"), n, head, row)
            with k.loop(first + block.field("count"), start=first) as t:
                keys = read_keys(k, tiles[t])
                start, stop = keys.start + keys.first, keys.start + keys.stop
                last = start + ((stop - start) & -W)
                with k.loop(last, start=start, step=W) as j:
                    weights[j] = weights.load(j, W) * factor.spread(W)
                with k.loop(stop, start=last) as j:
                    weights[j] = weights[j] * factor
