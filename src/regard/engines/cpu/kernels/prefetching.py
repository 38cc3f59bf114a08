"""Prefetches of what the next tiles and query blocks read."""

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.values import Pointer, Value
from regard.engines.cpu.spec.tiles import KEYS


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
