"""Copies of tiles of K and V in the layout of the products.

A work group makes them once.
"""

from collections.abc import Callable

from regard.engines.cpu.kernels.base import LanesTower
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.types import I16, I32, I64, Type
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE, KEYS, multiple


def copy_rows(
    lanes: Lanes, tile: KeyTile, name: str, first: Value, stop: Value, copy: Pointer, width: Value, count: Value
) -> None:
    """Copy `count` features of rows of K or V to rows of `width`, which are padded for packed pairs."""
    k, size = lanes.k, lanes.spec.element.size
    feature = k.integer(f"{name}_feature")
    with k.loop(stop, start=first) as p:
        source, into = tile.block.source(name, tile.start + p), copy + p * width
        whole = k.where(feature == size, count - count % lanes.W, k.whole(0))
        with k.loop(whole, step=lanes.W) as x:
            into[x] = source.bytes(x * size).load(0, lanes.W).to(copy.type)
        with k.loop(count, start=whole) as x:
            into[x] = source.bytes(x * feature)[0].to(copy.type)
        if lanes.spec.paired:
            with k.loop(width, start=count) as x:
                into[x] = k.constant(copy.type, 0.0)


class Copies(LanesTower):
    """Copies of tiles of K and V."""

    def _copies(self, tile: KeyTile) -> None:
        """Copy tiles of K and V, if no earlier query block of the work group did."""
        k, spec = self.k, self.spec
        if not spec.copies:
            return
        slot = self._slot(tile)
        ready = self.tile.ready.of(I64) + slot
        with k.when(ready[0] == 0):
            ready[0] = k.constant(I64, 1)
            first, stop = k.maximum(-tile.start, 0), k.minimum(k.whole(KEYS), k.integer("n_k") - tile.start)
            for name in spec.keys if spec.copied else ():
                self._copy(name, tile, first, stop, self.k_copy(slot, name), self.key_width, self.d)
            for name in spec.values:
                if spec.amx:
                    self._copy_transposed(name, tile, first, stop, self.v_copy(slot, name))
                elif spec.paired:
                    self._copy_packed(name, tile, first, stop, self.v_copy(slot, name))
                else:
                    self._copy(name, tile, first, stop, self.v_copy(slot, name), self.d_v, self.d_v)

    def _slot(self, tile: KeyTile) -> Value:
        """Return the index of a tile in its key split."""
        k = self.k
        return tile.number & ((k.whole(1) << k.integer("split_bits")) - 1)

    @property
    def key_type(self) -> Type:
        """The type of copied tiles of K."""
        return self.spec.element if self.spec.paired else self.real

    @property
    def key_width(self) -> Value:
        """The length of a copied row of K, in whole steps of the products."""
        step = AMX_DEPTH if self.spec.amx else 2 if self.spec.paired else 1
        width: Value = multiple(self.d, step)
        return width

    def k_copy(self, slot: Value, name: str) -> Pointer:
        copy: Pointer = self.tile[f"{name}_copy"].of(self.key_type) + slot * KEYS * self.key_width
        return copy

    def v_copy(self, slot: Value, name: str) -> Pointer:
        copy = self.tile[f"{name}_copy"]
        if not self.spec.paired:
            return copy + slot * KEYS * self.d_v
        packed: Pointer = copy.of(I32) + slot * (KEYS // 2) * multiple(self.d_v, AMX_SIDE if self.spec.amx else 1)
        return packed

    def _copy_packed(self, name: str, tile: KeyTile, first: Value, stop: Value, copy: Pointer) -> None:
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
        """Return a function that loads rows p and p + 1 of V, packed in pairs.

        It takes a byte offset and the number of lanes.

        Rows before `first` and from `stop` on are 0.
        """
        k, rows = self.k, []
        for x in (p, p + 1):
            there = (x >= first) & (x < stop)
            nearest = k.minimum(k.maximum(x, first), stop - 1)
            mask = k.where(there, k.constant(I32, 0xFFFF), 0)
            rows.append((self._source(name, tile.start + nearest).of(I16), mask))

        def load(offset: Value, lanes: int) -> Value:
            low, high = (row.bytes(offset).load(0, lanes).to(I32) & mask for row, mask in rows)
            return low | (high << 16)

        return load

    def _copy_transposed(self, name: str, tile: KeyTile, first: Value, stop: Value, copy: Pointer) -> None:
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
