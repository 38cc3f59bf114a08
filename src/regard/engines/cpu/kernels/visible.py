"""The list of tiles of a query block, found by looking at every pair.

For callers that have no bounds of rules, such as a web page. It evaluates the mask once for each pair of query and key,
and for all heads together if the mask does not depend on them.
"""

from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import Lowering, TileContext
from regard.engines.cpu.language.types import BOOL, I64
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import KEYS, PART, TILE_BITS, TILE_WORD, TILE_WORD_BITS

Queries = list[tuple[dict[str, Value], list[Value | None]]]
FIELDS = ("b", "h", "i", "rows", "n_k", "keys", "tiles", "count")


class VisibleTilesKernel:
    """A kernel that appends a query block's tiles to `tiles`, and sets `count`.

    b, h: absolute indices. i: that of the first query. rows: queries, at most the lanes of a query block. n_k: keys,
    which begin with j = 0.
    """

    def __init__(self, k: Kernel, spec: KernelSpec):
        assert spec.mask is not None
        self.k, self.spec, self.W = k, spec, k.target.lanes(spec.real.size)
        self.mask = Lowering(k, spec.mask, spec.real, spec.integer)

    def run(self) -> None:
        k, tiles = self.k, self.k.pointer("tiles", I64)
        leaves = {name: k.integer(name) for name in ("b", "h", "keys")}
        last = (k.integer("rows") - 1).to(self.spec.integer)
        queries: Queries = []  # vectors of them: their leaves, and what follows from these
        for c in range(0, self.spec.lanes, self.W):
            row = k.lane_numbers(self.spec.integer, self.W) + c
            mine = {**leaves, "i": k.minimum(row, last) + k.integer("i").to(self.spec.integer)}
            queries.append((mine, self.mask.prepare(TileContext(mine))))
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
            for leaves, prepared in queries:
                (visible,) = self.mask.at(TileContext({**leaves, "j": j}), prepared)
                some.value = some.value | visible.spread(self.W)
                every.value = every.value & visible.spread(self.W)
        return some.value.any(), ~(~every.value).any()


def fields_of(spec: KernelSpec) -> tuple[str, ...]:
    """Return the kernel's fields."""
    assert spec.mask is not None
    return (*FIELDS, *spec.mask.fields)
