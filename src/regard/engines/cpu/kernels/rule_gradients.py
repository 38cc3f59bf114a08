"""Gradients of what changes scores: of a bias, and of the tables of rules."""

import operator
from collections.abc import Sequence
from typing import TypeVar

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.rules import Prepared
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.rules import Lowering
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value, Variable
from regard.engines.cpu.spec.specs import BackwardSpec, TableRead

T = TypeVar("T")


class TableGradients:
    """Gradients of tables over the keys of some lanes.

    Entries that the row alone determines are summed first.
    """

    def __init__(self, lanes: Lanes, spec: BackwardSpec, score: Lowering | None, tile: KeyTile, prepared: Prepared):
        self.lanes, self.spec, self.k, self.score, self.tile = lanes, spec, lanes.k, score, tile
        self.fixed: list[list[Value] | None] = []
        self.totals: list[Variable | None] = []
        if score is None or prepared is None:
            return
        results: Sequence[int] = score.program.results[spec.before :]
        for read in spec.table_reads:
            _, numbers, results = self._partition(read, results)
            indices = [prepared[m] for m in numbers]
            determined = [x.spread(lanes.W) for x in indices if x is not None]
            once = len(determined) == len(indices)
            self.fixed.append(determined if once else None)
            self.totals.append(self.k.variable(lanes.zero()) if once else None)

    def _partition(self, read: TableRead, results: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Split off a read's derivatives and indices from the results."""
        count = self.spec.derivatives
        end = count + read.indices
        return results[:count], results[count:end], results[end:]

    def add(self, dS: Sequence[Value], results: Sequence[Value], seen: Value) -> None:
        """Add dS · derivative, or a sum of such products."""
        for read, total in zip(self.spec.table_reads, self.totals, strict=True):
            derivatives, indices, results = self._partition(read, results)
            first, *others = (x * derivative for x, derivative in zip(dS, derivatives, strict=True))
            part = self.k.where(seen, sum(others, first), self.lanes.zero())
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
        assert self.score is not None
        k, W, name = self.k, self.lanes.W, f"dtable{read.table}"
        partial_sum = (self.tile.number - k.integer("first_tile")) // k.integer("partial_tiles")
        partial_sum += self.tile.block.field("partial_sum")
        into = k.pointer(name, self.lanes.real).bytes(partial_sum * k.integer(f"{name}_step"))
        position = self.score.position(read.table, indices).spread(W).to(I64)
        for n in range(W):
            at = position.lane(n)
            into[at] = into[at] + part.lane(n)


def add_bias_gradient(lanes: Lanes, spec: BackwardSpec, tile: KeyTile) -> None:
    """Compute dbias += dS, summed over the axes that the bias lacks.

    dS is in the place of the bias.
    """
    k, W, B, dS = lanes.k, lanes.W, lanes.B, tile.scratch.bias
    base, count = tile.block.address("dbias"), tile.block.field("lanes")
    row, key = k.integer("dbias_row"), k.integer("dbias_key")
    if not spec.bias_rows:
        with k.loop(tile.stop, start=tile.first) as p:
            total = k.variable(lanes.zero())
            with k.loop(B, step=W) as c:
                total.value += lanes.load(dS, p * B + c)
            into = base.bytes((tile.start + p) * key)
            into[0] = into[0] + k.folded(total.value, operator.add)
        return
    if not spec.bias_keys:
        with k.loop(B, step=W) as c:
            total = k.variable(lanes.zero())
            with k.loop(tile.stop, start=tile.first) as p:
                total.value += lanes.load(dS, p * B + c)
            dS[tile.first * B + c] = total.value
        with k.loop(count) as n:
            into = base.bytes(n * row)
            into[0] = into[0] + dS[tile.first * B + n]
        return

    def store(into: Pointer, x: Value) -> None:
        """Store a vector; past the caches where all of dbias would not fit."""
        if spec.bias_shared:
            into[0] = lanes.load(into) + x
            return
        with k.choice(k.integer("dbias_streams") != 0) as (streams, stays):
            with streams:
                into.stream(x)
            with stays:
                into[0] = x

    whole = tile.stop - (tile.stop - tile.first) % W
    here = base.bytes(tile.start * key)
    with k.loop(count, step=W) as c:
        with k.loop(whole, start=tile.first, step=W) as p:
            transposed = k.transpose([lanes.load(dS, (p + x) * B, c) for x in range(W)])
            for r in range(W):
                with k.when(c + r < count):
                    store(here.bytes((c + r) * row) + p, transposed[r])
        with k.loop(tile.stop, start=whole) as p, k.loop(k.minimum(count, c + W), start=c) as n:
            into, x = here.bytes(n * row) + p, dS[p * B + n]
            into[0] = into[0] + x if spec.bias_shared else x
