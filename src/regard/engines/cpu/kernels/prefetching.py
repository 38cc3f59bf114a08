"""Prefetches of what the next tiles and query blocks of prefill read."""

from typing import Any

from regard.engines.cpu.kernels.blocks import BlockRecord
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile, read_keys
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import KEYS


class NextTiles:
    """Prefetches of the bias, of the next tile and of the next query block."""

    def __init__(self, lanes: Lanes):
        self.k, self.spec, self.lanes = lanes.k, lanes.spec, lanes

    def __call__(self, tile: KeyTile, p: Value, count: int) -> None:
        """Prefetch a share in a micro-tile of `count` keys.

        Each share has lines of the bias. A block's first tiles add the next block's queries; its last tiles add the
        rows of its outputs and, under a mask, the first keys of the next block. In a work group's first block also the
        next tile.
        """
        k, spec, block, d, d_v = self.k, self.spec, tile.block, self.lanes.d, self.lanes.d_v
        if spec.bias:
            prefetch_bias(self.lanes, tile, p, count)
        done, tiles = tile.place - block.field("tiles"), block.field("count")
        some = k.minimum(tiles, k.whole(2))
        last = done - (tiles - some)
        blocks = k.maximum((tile.stop - tile.first) // count, k.whole(1))

        def share(n: Value, rows: Value | int) -> Any:
            """Loop over a share of rows that `some` tiles prefetch, of which this is the n-th."""
            part, whole = n * blocks + (p - tile.first) // count, some * blocks
            return k.loop((part + 1) * rows // whole, start=part * rows // whole)

        def row_of(name: str, base: Pointer, lane: Value, features: Value) -> None:
            row = block.row(base, lane, k.integer(f"{name}_head"), k.integer(f"{name}_row"))
            prefetch_row(k, row, features * spec.element.size)

        def key(of: BlockRecord, row: Value) -> None:
            for names, features in ((spec.keys, d), (spec.values, d_v)):
                for name in names:
                    prefetch_row(k, of.source(name, row), features * spec.element.size)

        with k.when(done < some), share(done, block.field("lanes")) as lane:
            for name in spec.queries:
                row_of(name, block.following.address(name), lane, d)
        with k.when(last >= 0):
            with share(last, block.field("lanes")) as lane:
                for name in spec.stored:
                    row_of(name, block.address(name), lane, d_v)
            if spec.mask:
                with k.when(block.following.field("count") != 0):
                    begin = read_keys(k, k.pointer("tiles", I64)[block.following.field("tiles")])
                    with share(last, self.lanes.B) as row:
                        key(block.following, begin.start + begin.first + row)
        with k.when(block.leading & (done + 1 < tiles)):
            first = read_keys(k, k.pointer("tiles", I64)[tile.place + 1]).start + p
            with k.loop(first + count, start=first) as row:
                key(block, row)


def prefetch_bias(lanes: Lanes, tile: KeyTile, p: Value, count: int) -> None:
    """Prefetch the bias, some rows of it in every micro-tile of keys."""
    k, block, rows, type = lanes.k, tile.block, -(-lanes.B * count // KEYS), lanes.spec.type_of("bias")
    base, (head, row, _) = block.dense_at("bias", tile.start + tile.first)
    for n in range(rows):
        lane = k.minimum(p // count * rows + n, block.field("lanes") - 1)
        line = block.row(base, lane, head, row)
        for x in (*range(0, KEYS * type.size, 64), KEYS * type.size - 1):  # the row may begin within a line
            line.bytes(x).prefetch()


def prefetch_row(k: Kernel, line: Pointer, size: Value) -> None:
    """Prefetch `size` bytes to the second level of caches."""
    with k.loop(size, step=64) as at:
        line.bytes(at).prefetch(2)
