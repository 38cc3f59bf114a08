"""Prefill: a query in every lane, Sᵀ = K Qᵀ and Oᵀ += Vᵀ Pᵀ.

Softmax, mask, rule and dropout are vertical: one vector operation for each key. K and V are read by broadcasts, in
place or from a copy of the tile.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from regard.engines.cpu.kernels.amx_products import PVByAmx, QKByAmx
from regard.engines.cpu.kernels.best_keys import BestKeys
from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.copies import Copies
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.pipelining import Pipeline
from regard.engines.cpu.kernels.prefetching import NextTiles
from regard.engines.cpu.kernels.products import ForwardTerms, InFlight, PVByVectors, PVProducts, QKProduct
from regard.engines.cpu.kernels.rules import Rules
from regard.engines.cpu.kernels.scores import Scores, Weights
from regard.engines.cpu.kernels.softmax import RunningSoftmax
from regard.engines.cpu.kernels.splits import KeySplits, LaneLayout, Loaded, Split
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.kernels.transposes import Transposes
from regard.engines.cpu.language.amx import AmxRegisters
from regard.engines.cpu.language.types import I16, I32
from regard.engines.cpu.language.values import Value


class Prefill(LaneLayout):
    """The tiles of many queries; `terms` are forward's or its tangent's."""

    def __init__(
        self,
        lanes: Lanes,
        rules: Rules,
        softmax: RunningSoftmax,
        splits: KeySplits,
        terms: ForwardTerms,
        registers: AmxRegisters | None,
    ):
        self.k, self.spec, self.lanes, self.splits, self.softmax = lanes.k, lanes.spec, lanes, splits, softmax
        self.transposes, self.copies, self.best = Transposes(lanes), Copies(lanes), BestKeys(lanes)
        self.rules, self.weights = Scores(lanes, rules, softmax, terms, self.transposes), Weights(lanes, softmax, terms)
        self.qk: QKProduct | QKByAmx
        self.pv: PVProducts
        if registers:
            self.qk = QKByAmx(lanes, self.copies, terms, NextTiles(lanes), registers)
            self.pv = PVByAmx(lanes, self.copies, terms, registers)
        else:
            self.qk = QKProduct(lanes, self.copies, terms, NextTiles(lanes))
            self.pv = PVByVectors(lanes, self.copies, terms)

    def compute(self, split: Split, first: Value) -> Value:
        if self.spec.pipelined:
            return Pipeline(self, self.splits).each_tile(split, first)
        return self.splits.each_tile(split.block, first, lambda tile: self.tile(split, tile))

    def tile(self, split: Split, tile: KeyTile) -> None:
        """Compute m = max(m, S), P = exp(S − m), l += Σ P and O += V P of a split."""
        self.scores(tile)
        self.before_softmax(split, tile)
        self.weights(tile)
        self.softmax.add_sums(split.state, tile)
        self.pv(split, tile)

    def scores(self, tile: KeyTile, in_flight: InFlight | None = None) -> None:
        """Compute S = score(K Q) + bias with masks, and its maxima."""
        self.copies.make(tile)
        self.qk(tile, in_flight)
        self.rules(tile)

    def before_softmax(self, split: Split, tile: KeyTile) -> None:
        """Update best keys and maxima from the scores of a tile."""
        k, lanes = self.k, self.lanes
        if self.spec.best:
            with k.when(split.exclude_hidden.value == 0):
                self.best.choose(split.state, tile)
        with k.when(split.exclude_hidden.value != 0), k.loop(tile.stop * lanes.B, tile.first * lanes.B, lanes.W) as n:
            hidden = lanes.load(tile.scratch.P, n) == -math.inf
            tile.scratch.seen[n] = k.where(hidden, lanes.zero(), k.constant(lanes.real, 1.0))
        # Keys are taken in pairs, so a missing one must be present and have the weight 0.
        nothing = k.constant(lanes.real, -math.inf).spread(lanes.W)
        for c in lanes.vectors():
            with k.when(tile.first % 2 != 0):
                tile.scratch.P[(tile.first - 1) * lanes.B + c] = nothing
            with k.when(tile.stop % 2 != 0):
                tile.scratch.P[tile.stop * lanes.B + c] = nothing
        self.softmax.move_maximum(split.state, tile, self._subtract)

    def _subtract(self, tile: KeyTile) -> None:
        load, P = self.lanes.load, tile.scratch.P
        with self.k.loop(tile.stop, start=tile.first) as p:
            for c in self.lanes.vectors():
                at = p * self.lanes.B + c
                P[at] = load(P, at) - load(tile.scratch.before, c)

    # Query blocks

    def prepare_queries(self, block: RowBlock) -> None:
        """Store Qᵀ with the scale; where products take packed pairs, in pairs of features."""
        for name in self.spec.queries:
            strides, q, scale = block.strides(name), block.state[name], self.softmax.query_scale
            if self.spec.paired:
                rows = block.address(name).of(I16)
                self.transposes.to_packed_lanes(block, rows, strides, q.of(I32), scale)
            else:
                self.transposes.to_lanes(block, block.address(name), strides, self.lanes.d, q, scale)

    @contextmanager
    def outputs(self, block: RowBlock) -> Iterator[tuple[Value, Loaded]]:
        with self.k.loop(self.lanes.d_v) as a, self.k.loop(self.lanes.B, step=self.lanes.W) as c:
            yield a * self.lanes.B + c, lambda p: self.lanes.load(p, c)

    def store_output(self, block: RowBlock) -> None:
        head, row, *_ = block.strides("out")
        low = None
        if self.spec.low:
            low_head, low_row = block.strides("low")
            low = block.address("low"), low_head, low_row
        self.transposes.to_rows(block, block.merged.O, self.lanes.d_v, block.address("out"), head, row, low=low)
