"""The cost and the engine of a call of attention, from shapes and rules."""

from __future__ import annotations  # so that `help` shows the names of types

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack, overload

import numpy as np

from regard.arguments.frameworks import dispatched
from regard.arguments.values import size_text
from regard.core import checks
from regard.core.options import ARRAYS, taking_options
from regard.core.problem import Problem
from regard.core.types import ArrayLike, Options
from regard.engines import choose, refusals
from regard.engines.tiled.tiles import BLOCK_K, BLOCK_Q
from regard.ops import metric as metrics
from regard.ops.normalization import problem_from
from regard.parallel.choosing import balance, choose_deal
from regard.rules import EVERYTHING, At, evaluate, key_tiles, reads

Array = np.ndarray[Any, np.dtype[Any]]

# Sizes of samples: query blocks to count tiles of, blocks to count visible pairs of, and mixed tiles of such a block.
BLOCKS, BLOCKS_LOOKED_INTO, TILES_LOOKED_INTO = 2048, 512, 8
TILES, SPLIT = 2**14, 64  # ranges of keys visited for one query block; parts of a mixed one


MOST = 2**60  # entries of an array


class Complexity(NamedTuple):
    """The order of time and memory of one operation, in naive attention and here."""

    operation: str
    time: str
    naive_memory: str
    memory: str


COMPLEXITY = (
    Complexity("Q Kᵀ", "O(n·m·d)", "O(n·m)", "O(1), a tile"),
    Complexity("softmax", "O(n·m)", "O(n·m)", "O(n)"),
    Complexity("P V", "O(n·m·d_v)", "O(n·d_v)", "O(n·d_v)"),
    Complexity("total", "O(n·m·(d + d_v))", "O(n·m)", "O(n·d_v)"),
)


@dataclass(frozen=True)
class Tiles:
    """Tiles of `rows` queries × `keys` keys of all heads, by the bounds of the rules.

    `skipped` tiles hold no visible pair, `full` ones nothing else, and `mixed` ones are masked pair
    by pair. `pairs` is the number of query-key pairs in the visited tiles, `visible` the share of
    all pairs that the mask allows. They are estimates from samples where `exact`, or
    `visible_exact`, is False.
    """

    rows: int
    keys: int
    total: int
    full: int
    mixed: int
    pairs: int
    visible: float
    exact: bool
    visible_exact: bool

    @property
    def skipped(self) -> int:
        """Tiles that are never computed."""
        return self.total - self.full - self.mixed


@dataclass(frozen=True)
class RanksPlan:
    """The ranks of a call that is spread over processes: who has which rows, and what each does.

    `deal` is "contiguous" or "stripes", for `reason`. `rows` are the ranges of queries of each rank;
    those of keys are alike. `tiles` are the tiles of 128 × 128 that its rows see, of all heads and
    batch elements together, `bytes` what it is sent of keys and values, forward.
    """

    deal: str
    reason: str
    rows: tuple[tuple[range, ...], ...]
    tiles: tuple[int, ...]
    bytes: tuple[int, ...]

    @property
    def balance(self) -> float:
        """The tiles of the rank with the most, over the mean."""
        return balance(self.tiles)

    def lines(self) -> list[tuple[str, str]]:
        """Return a line about the deal, and one for each rank, as labels and texts."""
        most = max(1, *self.tiles)
        lines = [("ranks", f"{len(self.rows)}, {self.deal}: {self.reason}")]
        for n, (rows, tiles, sent) in enumerate(zip(self.rows, self.tiles, self.bytes, strict=True)):
            share = f"{'█' * round(16 * tiles / most):16} {tiles:,} tiles"
            lines.append((f"rank {n}", f"{share}, {size_text(sent)} sent, rows {_runs(rows)}"))
        return lines


def _runs(rows: tuple[range, ...]) -> str:
    """Return ranges of rows as text."""
    if not rows:
        return "none"
    shown = ", ".join(f"{x.start:,} to {x.stop - 1:,}" for x in rows[:2])
    return shown + (f" and {len(rows) - 2} more" if len(rows) > 2 else "")


@dataclass(frozen=True)
class Plan:
    """One call: its engine and the reason, its FLOPs, bytes, memory and tiles.

    FLOPs are those of the products, a multiplication and an addition each. Forward, `flops` are
    2·b·h·n_q·n_k·(d + d_v); `flops_backward` is 2.5 times that. `flops_visited` and
    `flops_visited_backward` leave out skipped tiles. `bytes_read` counts every input once,
    `bytes_written` output and lse. `working_memory` is about the engine's memory beyond inputs and
    outputs, in bytes; `naive_memory` is that of all scores. `engines` maps every engine to the
    reason why it was chosen or not. `ranks` is the plan of as many processes, if they are asked for.
    """

    engine: str
    engines: Mapping[str, str]
    rules: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    d: int
    d_v: int
    flops: int
    flops_visited: int
    bytes_read: int
    bytes_written: int
    working_memory: int
    naive_memory: int
    tiles: Tiles
    ranks: RanksPlan | Any = None  # as in `Outputs`

    complexity = COMPLEXITY

    @property
    def flops_backward(self) -> int:
        """FLOPs of the gradients: five products of the size of the two of forward."""
        return self.flops * 5 // 2

    @property
    def flops_visited_backward(self) -> int:
        """FLOPs of the gradients in the tiles that are not skipped."""
        return self.flops_visited * 5 // 2

    @property
    def naive_memory_per_head(self) -> int:
        """Bytes of one matrix of scores."""
        return self.naive_memory // (self.batch * self.heads or 1)

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines that `str` prints, as labels and texts."""
        t, about = self.tiles, "" if self.tiles.exact else "about "
        heads = f"{self.heads} heads" + (f" over {self.kv_heads}" if self.kv_heads != self.heads else "")
        lines = [
            (
                "call",
                f"batch {self.batch}, {heads}, {self.n_q} queries, {self.n_k} keys, {_features(self)}, {self.dtype}",
            ),
            ("rules", self.rules),
            ("engine", f"{self.engine}: {self.engines[self.engine]}"),
            *(("", f"not {name}: {why}") for name, why in self.engines.items() if name != self.engine),
            ("forward", f"{_si(self.flops)}FLOP, {about}{_si(self.flops_visited)}FLOP in the tiles visited"),
            (
                "backward",
                f"{_si(self.flops_backward)}FLOP, {about}{_si(self.flops_visited_backward)}FLOP in the tiles visited",
            ),
            ("bytes", f"{size_text(self.bytes_read)} read, {size_text(self.bytes_written)} written"),
            ("memory", f"about {size_text(self.working_memory)} beyond inputs and outputs"),
            ("naive", f"{size_text(self.naive_memory)} of scores, {size_text(self.naive_memory_per_head)} per head"),
            (
                "tiles",
                f"{t.total:,} of {t.rows} × {t.keys}: {about}{t.skipped:,} skipped, {t.full:,} full, {t.mixed:,} mixed",
            ),
            ("visible", f"{'' if t.visible_exact else 'about '}{t.visible:.4%} of the pairs"),
            *(self.ranks.lines() if self.ranks is not None else ()),
        ]
        return [line for line in lines if line[1]]

    def __str__(self) -> str:
        return "\n".join(f"{label:9} {text}" for label, text in self.rows())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print what `str` gives as the last line of a notebook's cell."""
        printer.text(str(self))


class Setup(Options, total=False):
    """The options of `plan`: those of a call, except arrays and sizes."""

    dtype: Any
    engine: str | None
    ranks: int | None


@overload
def plan(
    query: ArrayLike | Sequence[int],
    key: ArrayLike | Sequence[int],
    value: ArrayLike | Sequence[int],
    **options: Unpack[Setup],
) -> Plan: ...
@overload
def plan(
    *,
    n: int,
    d: int,
    n_keys: int | None = None,
    d_value: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    batch: int | None = None,
    **options: Unpack[Setup],
) -> Plan: ...
@dispatched
@taking_options()
def plan(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    n: int | None = None,
    d: int | None = None,
    n_keys: int | None = None,
    d_value: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    batch: int | None = None,
    dtype: Any = np.float32,
    engine: str | None = None,
    ranks: int | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Return what `regard.attention` with these arguments costs, and its engine.

    Nothing of the size of the scores is computed. The other options are those of
    `regard.attention`. The product of a metric is not counted.

    Args:
        query, key, value: arrays, or shapes, which then have `dtype`.
        n, d: sizes instead of those three: queries, and features of a query and a key.
        n_keys: keys, by default n.
        d_value: features of a value, by default d.
        heads: query heads; by default one, without an axis of its own.
        kv_heads: key and value heads, by default as many as query heads.
        batch: batch entries; by default one, without an axis of its own.
        dtype: of shapes and sizes.
        ranks: also plan for so many processes, as `regard.torch.context_parallel` deals the rows.

    Raises:
        TypeError: for arrays and sizes together, for neither, and for a size that is no int.
        ValueError: for a size below 1, and for 2**60 entries or more.

        And what `regard.attention` raises.

    >>> import regard
    >>> plan = regard.plan(n=8192, d=64, heads=8, causal=True)
    >>> plan.engine, plan.naive_memory_per_head // 2**20
    ('cpu', 256)
    >>> plan.flops == 4 * 8 * 8192 * 8192 * 64
    True
    >>> 0.4 < plan.tiles.skipped / plan.tiles.total < 0.5
    True
    >>> plan == regard.plan(*[(8, 8192, 64)] * 3, causal=True)
    True
    >>> ranks = regard.plan(n=8192, d=64, heads=8, mask=regard.window(256), ranks=4).ranks
    >>> ranks.deal, ranks.bytes
    ('contiguous', (0, 1048576, 1048576, 1048576))
    """
    count = None if ranks is None else checks.integer("ranks", ranks, least=1, below=2**16)
    sizes = {"n": n, "d": d, "n_keys": n_keys, "d_value": d_value, "heads": heads, "kv_heads": kv_heads, "batch": batch}
    numbers = {name: size for name, size in sizes.items() if size is not None}
    operands = {"query": query, "key": key, "value": value}
    if numbers:
        if names := [name for name, x in operands.items() if x is not None]:
            raise TypeError(
                f"plan takes query, key and value, or sizes, not both: got {names[0]} and {next(iter(numbers))}"
            )
        positions_first = checks.layout(options.get("layout", "bhnd")) == "bnhd"
        operands = dict(zip(operands, shapes(numbers, positions_first=positions_first), strict=True))
    elif all(x is None for x in operands.values()):
        raise TypeError("plan takes query, key and value, or sizes such as n=1024, d=64: got neither")
    q, k, v = (_array(name, x, dtype) for name, x in operands.items())
    metric = options.pop("metric", None)  # whose product is not computed
    p = problem_from(q, k, v, **options)
    if metric is not None:
        metrics.fits(checks.array("metric", metric).shape, p.query.shape)
    chosen = choose(p, engine)
    tiles, inputs = _tiles(p), [getattr(p, name) for name in ("query", "key", "value", *ARRAYS)]
    pairs = p.pairs
    return Plan(
        engine=chosen.NAME,
        engines=_reasons(p, chosen.NAME, engine is not None),
        rules=", ".join(str(rule) for rule in (p.mask, p.score) if rule is not None),
        dtype=p.dtype.name,
        batch=p.batch,
        heads=p.heads,
        kv_heads=p.kv_heads,
        n_q=p.n_q,
        n_k=p.n_k,
        d=p.d,
        d_v=p.d_v,
        flops=2 * pairs * (p.d + p.d_v),
        flops_visited=2 * (tiles.pairs if chosen.SKIPS_TILES else pairs) * (p.d + p.d_v),
        bytes_read=sum(x.nbytes for x in inputs if x is not None),
        bytes_written=p.all_heads * p.n_q * (p.d_v * p.dtype.itemsize + p.compute.itemsize),
        working_memory=chosen.working_memory(p),
        naive_memory=pairs * p.dtype.itemsize,
        tiles=tiles,
        ranks=None if count is None else _ranks(p, count),
    )


def _ranks(p: Problem, count: int) -> RanksPlan:
    chosen = choose_deal(p, count)
    return RanksPlan(chosen.deal.name, chosen.reason, chosen.deal.runs, chosen.tiles, chosen.bytes)


def shapes(
    sizes: Mapping[str, Any], *, positions_first: bool = False, label: Callable[[str], str] = str
) -> list[tuple[int, ...]]:
    """Return the shapes of query, key and value from sizes named as in `plan`.

    label: maps the name of a size to its name in an error.
    """
    checked = {name: checks.integer(label(name), size, least=1, below=MOST) for name, size in sizes.items()}
    if not checked.keys() >= {"n", "d"}:
        missing = label("n") if "n" not in checked else label("d")
        raise TypeError(f"{missing} is missing: sizes are {label('n')}, {label('d')} and others as needed")
    n, d, heads = checked["n"], checked["d"], checked.get("heads", 1)
    lead = (checked["batch"],) if "batch" in checked else ()
    has_heads = bool(checked.keys() & {"heads", "kv_heads", "batch"})

    def shape(rows: int, features: int, h: int) -> tuple[int, ...]:
        return (*lead, *((rows, h) if positions_first else (h, rows)), features) if has_heads else (rows, features)

    keys, kv_heads = checked.get("n_keys", n), checked.get("kv_heads", heads)
    return [shape(n, d, heads), shape(keys, d, kv_heads), shape(keys, checked.get("d_value", d), kv_heads)]


def _array(name: str, x: Any, dtype: Any) -> Array:
    """Return an array, or an array of a given shape that takes no memory."""
    if not isinstance(x, tuple | list):
        array: Array = x
        return array
    if not all(isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0 for size in x):
        raise TypeError(f"{name} must be an array or a shape of non-negative integers, got {checks.shown(x)}")
    if math.prod(max(size, 1) for size in x) >= MOST:
        raise ValueError(f"{name} must have fewer than 2**60 entries, got shape {checks.shown(tuple(x))}")
    one = np.zeros(1, checks.floating("dtype", dtype))
    # The strides of a real array, without its memory: nothing is read.
    strides = [math.prod(x[n + 1 :]) * one.itemsize for n in range(len(x))]
    return np.lib.stride_tricks.as_strided(one, tuple(x), strides, writeable=False)


def _reasons(p: Problem, chosen: str, named: bool) -> dict[str, str]:
    reasons = {name: why or "supports this call too, but comes later" for name, why in refusals(p).items()}
    return reasons | {chosen: "named" if named else "the first that supports this call"}


@dataclass(frozen=True)
class _Alike:
    """Batch elements and heads that see the same: the first, and their number."""

    b: int
    h: int
    count: int


def _alike(p: Problem, leaves: frozenset[str]) -> list[_Alike]:
    """Group batch elements and heads that rules cannot tell apart.

    leaves: the indices that the rules read.
    """
    if leaves & {"b", "dense"}:
        elements = [(b, 1) for b in range(p.batch)]
    elif any(p.offset.strides):
        _, first, counts = np.unique(p.offset, return_index=True, return_counts=True)
        elements = sorted(zip(first.tolist(), counts.tolist(), strict=True))
    else:  # one offset for all
        elements = [(0, p.batch)] if p.batch else []
    if leaves & {"h", "dense"}:
        return [_Alike(b, h, count) for b, count in elements for h in range(p.heads)]
    return [_Alike(b, 0, count * p.heads) for b, count in elements] if p.heads else []


def _tiles(p: Problem) -> Tiles:
    """Count the tiles by the bounds of the rules.

    Tiles begin at multiples from i = 0 and j = 0, as in the tiled engine.
    """
    alike = _alike(p, reads(*p.rules.hiding))
    starts = [range(-(int(p.offset[same.b]) % BLOCK_Q), p.n_q, BLOCK_Q) for same in alike]
    ends = np.cumsum([len(blocks) for blocks in starts], dtype=np.int64)  # where each one's blocks end in all blocks
    count = int(ends[-1]) if len(ends) else 0
    counted = _sample(count, BLOCKS)
    looked_into = set(_sample(len(counted), BLOCKS_LOOKED_INTO))
    counts, inside, exact = np.zeros(3), np.zeros(2), True
    tiles_exact = len(counted) == count
    for number, k in enumerate(counted):
        n = int(np.searchsorted(ends, k, "right"))
        same, start = alike[n], starts[n][k - int(ends[n])]  # counted from the end
        first, last = max(start, 0), min(start + BLOCK_Q, p.n_q)
        seen_tiles = _visited(p, same, first, last)
        left, right, times = seen_tiles.left, seen_tiles.right, seen_tiles.times
        tiles_exact &= seen_tiles.exact
        areas = (right - left) * times * (last - first)
        mixed = np.flatnonzero(seen_tiles.kinds != EVERYTHING)
        tiles = (_tile_count(left, right) * times).sum()
        partly_seen = times[mixed].sum()
        counts += same.count * np.array([tiles - partly_seen, partly_seen, areas.sum()])
        if number in looked_into:
            some = _sample(len(mixed), TILES_LOOKED_INTO)
            exact &= len(some) == len(mixed)
            partly = sum(
                times[mixed[k]] * _visible(p, same, first, last, left[mixed[k]], right[mixed[k]]) for k in some
            )
            seen = areas.sum() - areas[mixed].sum() + partly * len(mixed) / max(len(some), 1)
            inside += same.count * np.array([areas.sum(), seen])
    full, mixed_tiles, pairs = (round(x * count / max(len(counted), 1)) for x in counts)
    every = p.pairs
    return Tiles(
        rows=BLOCK_Q,
        keys=BLOCK_K,
        total=sum(same.count * len(blocks) for same, blocks in zip(alike, starts, strict=True))
        * (int(_tile_count(p.origin[2], p.keys)) if p.n_k else 0),
        full=full,
        mixed=mixed_tiles,
        pairs=pairs,
        visible=float(pairs * inside[1] / inside[0] / every) if every and inside[0] else 0.0,
        exact=tiles_exact,
        visible_exact=exact and tiles_exact and len(looked_into) == count,
    )


def _sample(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`.

    All are returned, or one from each of equal stretches. The choice is random but reproducible,
    since even spacing could match the period of the tiles.
    """
    if count <= most:
        return list(range(count))
    starts = np.arange(most + 1) * count // most
    return [int(k) for k in np.random.default_rng(0).integers(starts[:-1], starts[1:])]


class _Seen(NamedTuple):
    """Ranges of absolute keys that some rows may see.

    times: the number of tiles or ranges that each one represents, an estimate unless `exact`.
    """

    left: Array
    right: Array
    kinds: Array
    times: Array
    exact: bool


def _tile_count(left: Any, right: Any) -> Any:
    """Return the number of tiles with the keys from left to before right."""
    return -(-right // BLOCK_K) - left // BLOCK_K


def _visited(p: Problem, same: _Alike, first: int, last: int) -> _Seen:
    """Return the keys that some rows may see.

    Keys are whole ranges of tiles where all is visible, single tiles where some is. At most TILES
    ranges are visited. With more tiles, several are visited together, and then a sample of the
    mixed ones.
    """
    size = BLOCK_K
    while p.n_k > size * TILES:
        size *= 2
    edges = p.extents.key_edges(size)
    if not p.rules.hiding:
        return _Seen(edges[:-1], edges[1:], np.full(len(edges) - 1, EVERYTHING), np.ones(len(edges) - 1), True)
    ranges = p.extents.ranges(same.b, (same.h, same.h), first, last - 1)

    parts: list[tuple[Array, Array, Array, Array]] = []
    pieces, times, exact = [edges], 1.0, True
    while True:
        mixed: list[tuple[int, int]] = []
        for edges in pieces:
            tiles, kinds = key_tiles(p.mask_node, p.rules.hiding_node, ranges, edges)
            left, right = edges[tiles], edges[tiles + 1]
            taken = kinds == EVERYTHING if size > BLOCK_K else np.ones(len(kinds), bool)
            parts.append((left[taken], right[taken], kinds[taken], np.full(taken.sum(), times)))
            mixed += zip(left[~taken].tolist(), right[~taken].tolist(), strict=True)
        if not mixed:
            left, right, kinds, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
            return _Seen(left, right, kinds, counts, exact)
        some = _sample(len(mixed), TILES_LOOKED_INTO)
        times, exact = times * len(mixed) / len(some), exact and len(some) == len(mixed)
        size = max(size // SPLIT, BLOCK_K)
        pieces = [
            np.array([left, *range(left - left % size + size, right, size), right])
            for left, right in map(mixed.__getitem__, some)
        ]


def _visible(p: Problem, same: _Alike, first: int, last: int, left: int, right: int) -> int:
    """Return the number of these query-key pairs that the mask allows.

    left, right: a range of absolute keys.
    """
    if p.mask_node is None:
        return int((last - first) * (right - left))
    j0 = p.origin[2]
    where: Any = (*np.unravel_index(same.b, p.lead), same.h, slice(first, last), slice(left - j0, right - j0))
    at = At(
        b=np.int64(p.origin[0] + same.b),
        h=np.int64(p.origin[1] + same.h),
        i=np.arange(first, last)[:, None] + p.offset[same.b],
        j=np.arange(left, right),
        dtype=p.compute.type,
        keys=p.keys,
        dense=lambda x: p.dense(x)[where],
    )
    return int(np.broadcast_to(evaluate([p.mask_node], at)[0], (last - first, right - left)).sum())


def _features(p: Plan) -> str:
    return f"d = {p.d}" if p.d == p.d_v else f"d = {p.d}, d_v = {p.d_v}"


def _si(x: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if x < 1000:
            return f"{x:.4g} {unit}"
        x /= 1000
    return f"{x:.4g} P"
