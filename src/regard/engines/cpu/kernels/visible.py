"""The list of tiles of a query block, found by looking at every pair.

For callers that have no bounds of rules, such as a web page. It evaluates the mask once for each pair of query and key,
and for all heads together if the mask does not depend on them.
"""

from functools import partial

from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import Lowering, TileContext
from regard.engines.cpu.language.types import BOOL, I8, I64
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import KEYS, PART, TILE_BITS, TILE_WORD, TILE_WORD_BITS

Queries = list[tuple[Value, dict[str, Value], list[Value | None]]]
FIELDS = ("b", "h", "i", "rows", "n_k", "keys", "tiles", "count")


class VisibleTilesKernel:
    """A kernel that appends a query block's tiles to `tiles`, and sets `count`.

    b, h: absolute indices. i: that of the first query. rows: queries, at most the lanes of a query block. n_k: keys,
    which begin with j = 0. dense0, …: dense masks from the first query on, with the strides of their rows and keys.
    """

    def __init__(self, k: Kernel, spec: KernelSpec):
        assert spec.mask is not None
        self.k, self.spec, self.W = k, spec, k.target.lanes(spec.real.size)
        self.mask = Lowering(k, spec.mask, spec.real, spec.integer)

    def run(self) -> None:
        k, tiles = self.k, self.k.pointer("tiles", I64)
        leaves = {name: k.integer(name) for name in ("b", "h", "keys")}
        last = (k.integer("rows") - 1).to(self.spec.integer)
        queries: Queries = []  # vectors of them: their rows, their leaves, and what follows from these
        for c in range(0, self.spec.lanes, self.W):
            row = k.minimum(k.lane_numbers(self.spec.integer, self.W) + c, last)
            mine = {**leaves, "i": row + k.integer("i").to(self.spec.integer)}
            queries.append((row.to(I64), mine, self.mask.prepare(TileContext(mine))))
        count = k.variable(k.whole(0))
        with k.loop((k.integer("n_k") + (KEYS - 1)) // KEYS) as tile:
            start = tile * KEYS
            none = k.whole(0)
            first, stop, mixed_first, mixed_stop = (k.variable(none) for _ in range(4))
            with k.loop(KEYS // PART) as part:
                seen, whole = self._part(start + part * PART, queries)
                with k.when(seen):
                    first.value = k.where(stop.value == 0, part, first.value)
                    stop.value = part + 1
                with k.when(~whole & (stop.value != 0)):
                    mixed_first.value = k.where(mixed_stop.value == 0, part, mixed_first.value)
                    mixed_stop.value = part + 1
            with k.when(stop.value != 0):
                fields = {
                    "first": first.value, "stop": stop.value,
                    "mixed_first": mixed_first.value, "mixed_stop": k.minimum(mixed_stop.value, stop.value),
                    "both_first": first.value, "both_stop": stop.value,
                }  # fmt: skip
                entry = tile << TILE_BITS
                for n, name in enumerate(TILE_WORD):
                    if name in fields:
                        entry = entry | fields[name] << n * TILE_WORD_BITS
                tiles[count.value] = entry
                count.value = count.value + 1
        k.arguments[FIELDS.index("count")] = count.value

    def _part(self, start: Value, queries: Queries) -> tuple[Value, Value]:
        """Test some keys: if any query sees any of them, and if every query sees all."""
        k = self.k
        some, every = (k.variable(k.constant(BOOL, x).spread(self.W)) for x in (False, True))
        with k.loop(k.minimum(start + PART, k.integer("n_k")), start=start) as j:
            for row, leaves, prepared in queries:
                context = TileContext({**leaves, "j": j}, partial(self._dense, row, j))
                (visible,) = self.mask.at(context, prepared)
                some.value = some.value | visible.spread(self.W)
                every.value = every.value & visible.spread(self.W)
        return some.value.any(), ~(~every.value).any()

    def _dense(self, row: Value, j: Value, n: int) -> Value:
        """Return the n-th dense mask of a vector of rows at one key."""
        name, k = f"dense{n}", self.k
        return k.pointer(name, I8).gather(row * k.integer(f"{name}_row") + j * k.integer(f"{name}_key")) != 0


def fields_of(spec: KernelSpec) -> tuple[str, ...]:
    """Return the kernel's fields."""
    assert spec.mask is not None
    dense = (f"dense{n}{part}" for n in range(spec.dense) for part in ("", "_row", "_key"))
    return (*FIELDS, *dense, *spec.mask.fields)
