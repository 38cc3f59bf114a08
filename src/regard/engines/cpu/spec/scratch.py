"""Scratch memory: what a kernel stores besides its results, and its layouts.

A layout is the sizes of arrays by name, in elements of `real`; d and d_v may be numbers or values of the kernel. A
`ScratchArrays` has these arrays as typed attributes, each of which some kernels lack.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, Self

from regard.engines.cpu.language.types import I32, Type
from regard.engines.cpu.spec.specs import BackwardSpec, KernelSpec
from regard.engines.cpu.spec.tiles import AMX_DEPTH, AMX_SIDE, AMX_SUMS, KEYS, LANES, SPLIT_TILES, multiple

if TYPE_CHECKING:
    from regard.engines.cpu.language.values import Pointer


class ScratchArrays:
    """Consecutive arrays in memory; `end` is the address after the last."""

    end: "Pointer"

    def __init__(self, start: "Pointer", sizes: Mapping[str, Any], types: Mapping[str, Type] | None = None):
        names = self._names()
        for name, size in sizes.items():
            if name not in names and not name.startswith("dense"):
                raise TypeError(f"{type(self).__name__} has no array {name}")
            setattr(self, name, start.of((types or {}).get(name, start.type)))
            start = start + size
        self.end = start

    @classmethod
    def _names(cls) -> set[str]:
        return {name for x in cls.__mro__ for name in getattr(x, "__annotations__", ())}

    def __getitem__(self, name: str) -> "Pointer":
        """Return an array by name, such as that of an operand."""
        array: Pointer = getattr(self, name)
        return array

    def moved(self, offsets: Iterable[tuple[str, Any]]) -> Self:
        """Return a copy with the named arrays moved by offsets in elements."""
        arrays = copy(self)
        for name, offset in offsets:
            setattr(arrays, name, self[name] + offset)
        return arrays


class TileScratch(ScratchArrays):
    """Arrays of one tile, with a query in every lane, and of a work group's copies."""

    P: "Pointer"  # scores, then weights
    S_dot: "Pointer"  # in the JVP: tangents of scores, then of weights
    P_dot: "Pointer"
    dS: "Pointer"
    dS_dot: "Pointer"
    P_bf16: "Pointer"  # rounded, key by key
    dS_bf16: "Pointer"
    P_dot_bf16: "Pointer"
    dS_dot_bf16: "Pointer"
    dS_packed: "Pointer"  # in pairs of keys
    dS_dot_packed: "Pointer"
    bias: "Pointer"
    bias_dot: "Pointer"
    seen: "Pointer"  # 1 for a visible pair
    # Numbers of each lane
    top: "Pointer"  # the largest score of the tile; at the end, lse
    before: "Pointer"  # subtracted from scores before they are scaled
    shift: "Pointer"  # added after that
    rescale: "Pointer"  # the factor of earlier sums
    old: "Pointer"  # factors of merging
    new: "Pointer"
    l: "Pointer"  # sums of the tile, as in `SplitState`
    e: "Pointer"
    l_dot: "Pointer"
    e_dot: "Pointer"
    l_rounded: "Pointer"
    l_dot_rounded: "Pointer"
    l_partial: "Pointer"  # the same by keys that are W apart
    e_partial: "Pointer"
    l_dot_partial: "Pointer"
    e_dot_partial: "Pointer"
    l_rounded_partial: "Pointer"
    l_dot_rounded_partial: "Pointer"
    # Decode
    tops: "Pointer"  # `top` and `rescale` of each tile of a split
    rescales: "Pointer"
    key_block: "Pointer"  # padded rows of K
    total: "Pointer"  # O of the tile
    # Copies of K and V
    k_copy: "Pointer"
    v_copy: "Pointer"
    k_dot_copy: "Pointer"
    v_dot_copy: "Pointer"
    k_packed: "Pointer"  # in pairs of keys
    k_dot_packed: "Pointer"
    ready: "Pointer"  # 1 for a tile that is copied
    # Others
    candidates: "Pointer"  # keys that may be among the best
    product: "Pointer"  # sums of AMX tiles
    edge: "Pointer"  # those cut off by the ends of K
    O: "Pointer"  # in backward: the output, transposed
    O_low: "Pointer"
    O_dot: "Pointer"
    state: "Pointer"  # in backward: 1 if a copy is not finite


class SplitState(ScratchArrays):
    """The state of a key split, or of several that are merged."""

    m: "Pointer"  # the largest score
    l: "Pointer"  # Σ w
    e: "Pointer"  # Σ w (S − m)
    l_dot: "Pointer"  # Σ w Ṡ
    e_dot: "Pointer"  # Σ w Ṡ (S − m)
    l_rounded: "Pointer"  # Σ w and Σ w Ṡ as they multiply V, rounded to bfloat16
    l_dot_rounded: "Pointer"
    O: "Pointer"  # Σ w V
    O_dot: "Pointer"
    values: "Pointer"  # the best keys
    indices: "Pointer"


class BlockState(ScratchArrays):
    """The state of a query block: its rows, and where it is."""

    cursor: "Pointer"  # of forward: the next tile, as an index into the list
    state: "Pointer"  # of backward: the same, and 1 if a row is not finite
    g: "Pointer"  # head and row of each lane, counted from the block's
    r: "Pointer"
    i: "Pointer"  # absolute indices of each lane
    h: "Pointer"
    first: "Pointer"  # dropout keys
    second: "Pointer"
    # Rows, transposed; `rows`: as they are
    q: "Pointer"
    q_dot: "Pointer"
    q_rows: "Pointer"
    q_dot_rows: "Pointer"
    dout: "Pointer"
    dout_dot: "Pointer"
    dout_rows: "Pointer"
    dout_dot_rows: "Pointer"
    dq: "Pointer"
    # Numbers of each row, by operand; `large`: an lse that is subtracted before scaling, or 0
    lse: "Pointer"
    lse_dot: "Pointer"
    d_entropy: "Pointer"
    d_entropy_dot: "Pointer"
    c: "Pointer"
    c_dot: "Pointer"
    large: "Pointer"


# Layouts of forward


def tile_scratch(spec: KernelSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """Return the scratch layout of one tile, and of the copied tiles of a key split."""
    tile, slots = KEYS * spec.rows, SPLIT_TILES if spec.decode_rows else 1 + spec.pipelined
    sizes = dict.fromkeys(("top", "shift", "rescale", "old", "new", *spec.row_sums), spec.lanes)
    if spec.paired and not spec.ruled:
        sizes["before"] = spec.lanes
    sizes |= dict.fromkeys(spec.weights, tile * slots)
    sizes |= dict.fromkeys(spec.fetched, tile) | {"seen": tile * slots}
    if spec.amx and not spec.decode_rows:
        sizes["product"] = AMX_SIDE * spec.lanes
    if spec.decode_rows:
        sizes |= dict.fromkeys(("tops", "rescales"), spec.lanes * slots)
        sizes["key_block"] = spec.key_vectors * spec.vector * (d + 2 * spec.vector)
        sizes["total"] = output_size(spec, d_v)
    if spec.pipelined:
        sizes["rescale"] *= 2
        sizes |= {f"{name}_partial": LANES * spec.lanes for name in spec.row_sums}
    if spec.best:
        sizes["candidates"] = KEYS * 8 // spec.real.size
    if spec.copied:
        sizes |= {f"{name}_copy": SPLIT_TILES * KEYS * feature_rows(spec, d, 1) for name in spec.keys}
    if spec.copies:
        rows = multiple(d_v, AMX_SIDE) if spec.amx else d_v
        sizes |= {f"{name}_copy": SPLIT_TILES * KEYS * rows for name in spec.values} | {"ready": SPLIT_TILES * 2}
    return sizes


def feature_rows(spec: KernelSpec, d: Any, more: int) -> Any:
    """Return the elements of d features and some more; AMX takes whole steps."""
    return multiple(d, AMX_DEPTH) if spec.amx else d + more


def output_size(spec: KernelSpec, d_v: Any) -> Any:
    """Return the elements of O.

    Prefill has a row of lanes for each feature. Decode has a row of features, in whole vectors, for each query.
    """
    if not spec.decode_rows:
        return spec.lanes * d_v
    step = spec.vector * (2 if spec.paired else 1)
    return multiple(d_v, step) * spec.rows


def split_scratch(spec: KernelSpec, d_v: Any) -> Mapping[str, Any]:
    """Return the layout of a key split's state: maximum, sums, outputs, best keys.

    Merged splits have the same layout.
    """
    rows = ("m", *spec.row_sums)
    best = dict.fromkeys(("values", "indices"), spec.best * spec.lanes)
    return dict.fromkeys(rows, spec.lanes) | dict.fromkeys(spec.outputs, output_size(spec, d_v)) | best


def block_scratch(spec: KernelSpec, d: Any) -> Mapping[str, Any]:
    """Return the scratch layout of a query block, from split to split.

    The scratch of the block's merged splits follows in memory.
    """
    integers = spec.lanes * (1 if spec.integer is I32 else 8 // spec.real.size)
    integers64 = dict.fromkeys(("g", "r"), spec.lanes * 8 // spec.real.size)
    lanes = {"i": integers, "h": integers, "first": spec.lanes, "second": spec.lanes}
    q = spec.rows * feature_rows(spec, d, 2 * spec.vector if spec.decode_rows else 1)
    return {"cursor": 16, **integers64, **lanes, **dict.fromkeys(spec.queries, q)}


def scratch_size(spec: KernelSpec, blocks: int, d: int, d_v: int) -> int:
    """Return the size of a work group's scratch memory, in elements of `real`."""
    split = sum(split_scratch(spec, d_v).values())
    each = sum(block_scratch(spec, d).values()) + split
    return int(sum(tile_scratch(spec, d, d_v).values()) + split + blocks * each)


# Layouts of backward


def padded(size: int, d: Any) -> Any:
    """Return the length of a row of d features, in whole vectors of 64 bytes."""
    return multiple(d, 64 // size)


def copied(spec: KernelSpec, d: Any) -> Any:
    """Return the length of a row of d features in the copy of a tile."""
    return multiple(d, AMX_DEPTH) if spec.amx else padded(spec.real.size, d) if spec.paired else d


def transposed_rows(spec: KernelSpec, d: Any) -> Any:
    """Return the number of rows of a transposed query block.

    The d features are padded with zeros to whole products.
    """
    return multiple(d, AMX_DEPTH if spec.amx else 2)


def backward_tile_scratch(spec: BackwardSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """Return the scratch layout of one tile: P and dS with a query in every lane, copies of K and V."""
    tile = KEYS * spec.lanes
    sizes = dict.fromkeys((*spec.weights, *spec.fetched), tile)
    if spec.paired:
        sizes |= dict.fromkeys((f"{name}_bf16" for name in spec.weights), tile // 2)
        sizes |= dict.fromkeys((f"{name}_packed" for name in spec.score_gradients), tile // 2)
        sizes |= dict.fromkeys((f"{name}_packed" for name in spec.keys), KEYS // 2 * padded(spec.real.size, d))
    for names, width in ((spec.keys, d), (spec.values, d_v)):
        sizes |= dict.fromkeys((f"{name}_copy" for name in names), KEYS * padded(spec.real.size, width))
    if spec.amx:
        sizes["edge"] = AMX_SIDE * AMX_SIDE * AMX_SUMS
    return sizes | dict.fromkeys(spec.outputs, spec.lanes * d_v) | {"state": 16}


def backward_block_scratch(spec: BackwardSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """Return the scratch layout of a query block: its rows as read and transposed, and dQ."""
    B = spec.lanes
    integers64 = dict.fromkeys(("g", "r"), B * 8 // spec.real.size)
    integers = B * (1 if spec.integer is I32 else 8 // spec.real.size)
    lanes = {"i": integers, "h": integers, "first": B, "second": B, **dict.fromkeys(spec.numbers, B)}
    if not spec.ruled:
        lanes["large"] = B
    rows = {"dq": B * (multiple(d, AMX_SIDE) if spec.amx else d)}
    for names, width in ((spec.queries, d), (spec.cotangents, d_v)):
        rows |= dict.fromkeys((f"{name}_rows" for name in names), B * padded(spec.real.size, width))
        rows |= dict.fromkeys(names, B * transposed_rows(spec, width))
    return {"state": 16, **integers64, **lanes, **rows}


def query_block_scratch(spec: KernelSpec, d: Any, d_v: Any) -> Mapping[str, Any]:
    """Return the scratch layout of a query block of any kernel."""
    if isinstance(spec, BackwardSpec):
        return backward_block_scratch(spec, d, d_v)
    return block_scratch(spec, d)


def backward_scratch_size(spec: BackwardSpec, blocks: int, d: int, d_v: int) -> int:
    """Return the size of a work group's scratch memory, in elements of `real`."""
    tile, block = backward_tile_scratch(spec, d, d_v), backward_block_scratch(spec, d, d_v)
    return int(sum(tile.values()) + blocks * sum(block.values()))
