"""Decode: a key in every lane, for few queries.

Reading K and V is what takes the time.

Rows of K are transposed in registers, so that the scores of W keys grow in one chain over features. O is summed with
features in lanes. Every number meets the operations of `Prefill` in the same order, so the bits are the same.

For token-major K and V, one query block covers all heads of a token (`packed`). Some keys are used by each head before
the next keys, so that memory is read in order.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from regard.engines.cpu.kernels.blocks import RowBlock
from regard.engines.cpu.kernels.decode_products import DecodePV, DecodeQK, DecodeRows, TileSlot
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.rules import Dropout, Rules
from regard.engines.cpu.kernels.softmax import RunningSoftmax
from regard.engines.cpu.kernels.splits import KeySplits, LaneLayout, Loaded, Split
from regard.engines.cpu.kernels.tiles import KeyTile, read_keys
from regard.engines.cpu.language.prefetch import LINE
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import BF16, I32, I64, Type
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import KEYS

PREFETCHED_ROWS = KEYS // 16  # rows of V that are prefetched during a tile's softmax


class Decode(LaneLayout):
    """The tiles of few queries."""

    def __init__(self, lanes: Lanes, rules: Rules, softmax: RunningSoftmax, splits: KeySplits):
        self.k, self.spec, self.real, self.W, self.lanes = lanes.k, lanes.spec, lanes.real, lanes.W, lanes
        self.rules, self.softmax, self.splits, self.dropout = rules, softmax, splits, Dropout(lanes)
        self.rows = DecodeRows(lanes)
        self.qk, self.pv = DecodeQK(self.rows), DecodePV(self.rows)

    def compute(self, split: Split, first: Value) -> Value:
        """Compute all QK products, then all PV products: each array is one stream."""
        block = split.block

        def pv(tile: KeyTile) -> None:
            self.pv(split, tile, self.rows.slot(tile))

        def softmax_and_pv(tile: KeyTile) -> None:
            self.weights(split, tile)
            pv(tile)

        self.splits.each_tile(block, first, self.scores)
        if not self.rows.in_order:
            return self.splits.each_tile(block, first, softmax_and_pv)
        # Softmax between PV products would pause the stream of V, and hardware prefetch would have to restart.
        begin = read_keys(self.k, self.k.pointer("tiles", I64)[first]).start

        def softmax(tile: KeyTile) -> None:
            self._prefetch_values(block, begin + (tile.place - first) * PREFETCHED_ROWS)
            self.weights(split, tile)

        self.splits.each_tile(block, first, softmax)
        return self.splits.each_tile(block, first, pv)

    def _prefetch_values(self, block: RowBlock, key: Value) -> None:
        """Prefetch some rows of V from a key on, while the softmax leaves memory idle."""
        k, rows = self.k, self.k.integer("v_row") * PREFETCHED_ROWS
        with k.when(self.rows.gapless(block, "v", self.lanes.d_v)), k.loop(rows, step=LINE) as x:
            block.source("v", key).bytes(x).prefetch(self.rows.prefetcher.prefetch.level)

    def scores(self, tile: KeyTile) -> None:
        """Compute the scores of a tile and their maxima."""
        slot, top = self.rows.slot(tile), tile.scratch.top
        self.qk(tile, slot)
        self._apply_rules(tile, slot)
        self._maxima(tile, slot)
        for c in self.lanes.vectors():
            slot.tops[c] = self.lanes.load(top, c)

    def _apply_rules(self, tile: KeyTile, slot: TileSlot) -> None:
        """Compute S ← score(S) + bias, with −∞ where the mask hides the pair."""
        k, spec, W, load, scratch = self.k, self.spec, self.W, self.lanes.load, tile.scratch
        if not spec.ruled and not spec.mask:
            return
        nothing = k.constant(self.real, -math.inf).spread(W)
        with k.loop(self.rows.number(tile.block)) as r:
            if spec.bias:
                self._fetch_row("bias", r, tile)
            for name in spec.masks:
                self._fetch_row(name, r, tile)
            row = self.rules.rows(tile.block, r, 0)
            with self.rows.keys(tile) as p:
                at = r * KEYS + p
                s = self.softmax.natural(load(slot.scores, at))
                context = TileContext(
                    {**row.leaves, "j": k.lane_numbers(I64, W) + (tile.start + k.integer("j") + p), "s": s},
                    lambda n, p=p: load(scratch[f"dense{n}"], p) != 0.0,  # type: ignore[misc]
                )
                s = self.rules.scores(context, row)[0]
                if spec.bias:
                    s = s + load(scratch.bias, p)
                present, visible = self.rows.present(tile, p), self.rules.visible(context, row)
                slot.scores[at] = k.where(present if visible is None else present & visible, s, nothing)

    def _fetch_row(self, name: str, r: Value, tile: KeyTile) -> None:
        """Copy the keys of a tile from a row of a dense array."""
        k, into = self.k, tile.scratch[name]
        base, (head, row, key) = tile.block.dense_at(name, tile.start)
        source = tile.block.row(base, r, head, row)
        with k.loop(tile.stop, start=tile.first) as p:
            into[p] = source.bytes(p * key)[0].to(self.real)

    def _maxima(self, tile: KeyTile, slot: TileSlot) -> None:
        """Compute the maximum score of every row."""
        k = self.k
        with k.loop(self.rows.number(tile.block)) as r:
            top = k.variable(k.constant(self.real, -math.inf).spread(self.W))
            with self.rows.keys(tile) as p:
                top.value = k.maximum(self.lanes.load(slot.row(r), p), top.value)
            tile.scratch.top[r] = k.folded(top.value, k.maximum)

    def weights(self, split: Split, tile: KeyTile) -> None:
        """Compute the weights of a tile, and m and l of the split."""
        k, load, slot = self.k, self.lanes.load, self.rows.slot(tile)
        for c in self.lanes.vectors():
            tile.scratch.top[c] = load(slot.tops, c)
        with (
            k.when(split.exclude_hidden.value != 0),
            k.loop(self.rows.number(tile.block)) as r,
            self.rows.keys(tile) as p,
        ):
            hidden = load(slot.row(r), p) == -math.inf
            slot.seen[r * KEYS + p] = k.where(hidden, self.lanes.zero(), k.constant(self.real, 1.0))

        def subtract(tile: KeyTile) -> None:
            with k.loop(self.rows.number(tile.block)) as r:
                before = tile.scratch.before[r].spread(self.W)
                with self.rows.keys(tile) as p:
                    slot.row(r)[p] = load(slot.row(r), p) - before

        self.softmax.move_maximum(split.state, tile, subtract)
        for c in self.lanes.vectors():
            slot.rescale[c] = load(tile.scratch.rescale, c)
        self._exponentiate(tile, slot)
        self.softmax.add_sums(split.state, tile)

    def _exponentiate(self, tile: KeyTile, slot: TileSlot) -> None:
        """Compute P = exp(S − m) and its sums; keys that are W apart share a lane."""
        k, spec, W, block = self.k, self.spec, self.W, tile.block
        with k.loop(self.rows.number(block)) as r:
            shift = tile.scratch.shift[r].spread(W)
            sums = [k.variable(self.lanes.zero()) for _ in range(2 if spec.entropy else 1)]
            rounded = k.variable(k.constant(self.real, 0.0).spread(W // 2)) if spec.paired else None
            with self.rows.keys(tile) as p:
                weight, difference = self.softmax.weight(self.lanes.load(slot.row(r), p), shift)
                sums[0].value += weight
                if spec.entropy:
                    sums[1].value += self.softmax.entropy_term(weight, difference)
                if rounded is not None:
                    rounded.value = self.lanes.add_packed(rounded.value, k.round_bf16(weight).bits(I32))
                if spec.dropout:
                    j = k.lane_numbers(I64, W) + (tile.start + k.integer("j") + p)
                    weight = self.dropout.applied(weight, (block.state.first[r], block.state.second[r]), j)
                if spec.bf16_dot:
                    slot.row(r).of(BF16)[p] = k.round_bf16(weight)
                else:
                    slot.row(r)[p] = k.round_bf16(weight).to(self.real) if spec.amx else weight
            for name, total in zip(("l", "e"), sums, strict=False):
                tile.scratch[name][r] = self._total(total.value)
            if rounded is not None:
                tile.scratch.l_rounded[r] = self._total(rounded.value)

    def _total(self, x: Value) -> Value:
        """Sum the lanes of a vector, from the first to the last."""
        total = x.lane(0)
        for n in range(1, x.lanes):
            total = total + x.lane(n)
        return total

    # Query blocks

    def prepare_queries(self, block: RowBlock) -> None:
        """Copy the rows of Q with the scale; for packed pairs, with its sign alone."""
        k, rows, width = self.k, self.rows.number, self.rows.query_width
        head, row, feature = block.strides("q")
        with k.loop(width * rows(block), step=self.W) as n:
            block.state.q[n] = self.lanes.zero()
        with k.loop(rows(block)) as r:
            source = block.row(block.address("q"), r, head, row)
            q = (block.state.q + width * r).of(BF16 if self.spec.bf16_dot else self.real)
            with k.loop(self.lanes.d) as x:
                q[x] = (source.bytes(x * feature)[0].to(self.real) * self.softmax.query_scale).to(q.type)

    @contextmanager
    def outputs(self, block: RowBlock) -> Iterator[tuple[Value, Loaded]]:
        def of(p: Pointer) -> Value:
            return p[r].spread(self.W)

        with self.k.loop(self.rows.number(block)) as r, self.k.loop(self.rows.width, step=self.W) as a:
            yield r * self.rows.width + a, of

    def store_output(self, block: RowBlock) -> None:
        self._store_rows(block, "out", Value.to)
        if self.spec.low:
            self._store_rows(block, "low", self.lanes.remainder)

    def _store_rows(self, block: RowBlock, name: str, converted: Callable[[Value, Type], Value]) -> None:
        """Store the rows of O, converted to the type of the call's arrays."""
        k, W, d_v, element = self.k, self.W, self.lanes.d_v, self.spec.element
        base, strides = block.address(name), block.strides(name)
        whole = d_v & -W
        with k.loop(block.field("lanes")) as r:
            row, O = block.row(base, r, *strides), block.merged.O + r * self.rows.width
            with k.loop(whole, step=W) as a:
                row[a] = converted(O.load(a, W), element)
            with k.loop(d_v, start=whole) as a:
                row[a] = converted(O[a], element)
