"""Copies of tiles of K and V in the layout of the products.

A work group makes them once.
"""

from collections.abc import Callable

from regard.engines.cpu.kernels.blocks import BlockRecord
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.types import I16, I32, I64, Type
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE, KEYS, multiple


def copy_rows(
    lanes: Lanes,
    block: BlockRecord,
    name: str,
    start: Value,
    first: Value,
    stop: Value,
    copy: Pointer,
    width: Value,
    count: Value,
) -> None:
    """Copy `count` features of rows of K or V, padded to `width` for packed pairs.

    start: the column of the tile's first key, from which the keys `first` to `stop` are counted.
    """
    k, size = lanes.k, lanes.spec.element.size
    feature = k.integer(f"{name}_feature")
    with k.loop(stop, start=first) as p:
        source, into = block.source(name, start + p), copy + p * width
        whole = k.where(feature == size, count - count % lanes.W, k.whole(0))
        with k.loop(whole, step=lanes.W) as x:
            into[x] = source.bytes(x * size).load(0, lanes.W).to(copy.type)
        with k.loop(count, start=whole) as x:
            into[x] = source.bytes(x * feature)[0].to(copy.type)
        if lanes.spec.paired:
            with k.loop(width, start=count) as x:
                into[x] = k.constant(copy.type, 0.0)


def key_width(lanes: Lanes) -> Value:
    """Return the length of a copied row of K, in whole steps of the products."""
    step = AMX_DEPTH if lanes.spec.amx else 2 if lanes.spec.paired else 1
    width: Value = multiple(lanes.d, step)
    return width


def slot_of(tile: KeyTile) -> Value:
    """Return the index of a tile in its key split."""
    k = tile.block.k
    return tile.number & ((k.whole(1) << k.integer("split_bits")) - 1)


class Copies:
    """The rows of K and V of a tile: copies, or the call's own memory."""

    def __init__(self, lanes: Lanes):
        self.k, self.spec, self.lanes = lanes.k, lanes.spec, lanes
        self.d, self.d_v, self.W = lanes.d, lanes.d_v, lanes.W
        self.key_type: Type = self.spec.element if self.spec.paired else lanes.real  # of copies of K

    def make(self, tile: KeyTile) -> None:
        """Copy tiles of K and V, if no earlier query block of the work group did."""
        k, spec, d_v = self.k, self.spec, self.d_v
        if not spec.copies:
            return
        slot, block, start = slot_of(tile), tile.block, tile.start
        ready = tile.scratch.ready.of(I64) + slot
        with k.when(ready[0] == 0):
            ready[0] = k.constant(I64, 1)
            first, stop = k.maximum(-tile.start, 0), k.minimum(k.whole(KEYS), k.integer("n_k") - tile.start)
            for name in spec.keys if spec.copied else ():
                copy = self._key_copy(tile, slot, name)
                copy_rows(self.lanes, block, name, start, first, stop, copy, key_width(self.lanes), self.d)
            for name in spec.values:
                copy = self._value_copy(tile, slot, name)
                if spec.amx:
                    self._transpose(name, tile, first, stop, copy)
                elif spec.paired:
                    self._pack(name, tile, first, stop, copy)
                else:
                    copy_rows(self.lanes, block, name, start, first, stop, copy, d_v, d_v)

    def copied_keys(self, tile: KeyTile, name: str) -> Pointer:
        """Return the first copied row of K of a tile."""
        return self._key_copy(tile, slot_of(tile), name)

    def keys(self, tile: KeyTile, name: str) -> tuple[Pointer, Value]:
        """Return the first row of K of a tile, and the stride in bytes."""
        if self.spec.copied:
            return self.copied_keys(tile, name), key_width(self.lanes) * self.key_type.size
        return tile.block.source(name, tile.start), self.k.integer(f"{name}_row")

    def values(self, tile: KeyTile, name: str) -> tuple[Pointer, Value]:
        """Return the first row of V of a tile, or pair of rows, and the stride in bytes."""
        if self.spec.copies:
            width = 4 if self.spec.paired else self.lanes.real.size
            return self._value_copy(tile, slot_of(tile), name), self.d_v * width
        return tile.block.source(name, tile.start), self.k.integer(f"{name}_row")

    def _key_copy(self, tile: KeyTile, slot: Value, name: str) -> Pointer:
        return tile.scratch[f"{name}_copy"].of(self.key_type) + slot * KEYS * key_width(self.lanes)

    def _value_copy(self, tile: KeyTile, slot: Value, name: str) -> Pointer:
        copy = tile.scratch[f"{name}_copy"]
        if not self.spec.paired:
            return copy + slot * KEYS * self.d_v
        packed: Pointer = copy.of(I32) + slot * (KEYS // 2) * multiple(self.d_v, AMX_SIDE if self.spec.amx else 1)
        return packed

    def _pack(self, name: str, tile: KeyTile, first: Value, stop: Value, copy: Pointer) -> None:
        """Pack rows of V in pairs; an absent row is 0."""
        k = self.k
        feature, size = k.integer(f"{name}_feature"), self.spec.element.size
        with k.loop(stop, start=first - first % 2, step=2) as p:
            pair, into = self._packed_rows(name, tile, p, first, stop), copy + p // 2 * self.d_v
            whole = k.where(feature == size, self.d_v - self.d_v % self.W, k.whole(0))
            with k.loop(whole, step=self.W) as a:
                into[a] = pair(a * size, self.W)
            with k.loop(self.d_v, start=whole) as a:
                into[a] = pair(a * feature, 0)

    def _packed_rows(
        self, name: str, tile: KeyTile, p: Value, first: Value, stop: Value
    ) -> Callable[[Value, int], Value]:
        """Return a loader of rows p and p + 1 of V, packed in pairs; absent rows are 0.

        The loader takes a byte offset and the number of lanes.
        """
        k, rows = self.k, []
        for x in (p, p + 1):
            there = (x >= first) & (x < stop)
            nearest = k.minimum(k.maximum(x, first), stop - 1)
            mask = k.where(there, k.constant(I32, 0xFFFF), 0)
            rows.append((tile.block.source(name, tile.start + nearest).of(I16), mask))

        def load(offset: Value, lanes: int) -> Value:
            low, high = (row.bytes(offset).load(0, lanes).to(I32) & mask for row, mask in rows)
            return low | (high << 16)

        return load

    def _transpose(self, name: str, tile: KeyTile, first: Value, stop: Value, copy: Pointer) -> None:
        """Transpose V to columns of KEYS numbers; an absent row is 0."""
        k, W, half = self.k, self.W, KEYS // 2
        feature, size = k.integer(f"{name}_feature"), self.spec.element.size
        straight = k.where(feature == size, self.d_v & -W, k.whole(0))
        with k.loop(stop, start=first & -AMX_DEPTH, step=AMX_DEPTH) as p:
            packed = [self._packed_rows(name, tile, p + 2 * n, first, stop) for n in range(AMX_DEPTH // 2)]
            into = copy + p // 2
            with k.loop(straight, step=W) as a:
                for n, column in enumerate(k.transpose([pair(a * size, W) for pair in packed])):
                    into[(a + n) * half] = column
            with k.loop(self.d_v, start=straight) as a:
                for n, pair in enumerate(packed):
                    into[a * half + n] = pair(a * feature, 0)
