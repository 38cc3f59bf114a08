"""Strides of arrays, and the rows and keys of a program."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.language.functions import random_bits, row_key, word64


class StridedArray(NamedTuple):
    """The address and strides of an array.

    Strides are in elements: along each leading dimension, heads, rows and columns (features). 0 where it broadcasts.
    """

    ptr: Any
    lead: Any
    head: Any
    row: Any
    column: Any


class TableArguments(NamedTuple):
    """A table of a rule: its address, sizes, and least and greatest entries.

    Only tables of integers on the host have known extremes.
    """

    ptr: Any
    sizes: Any
    least: Any
    greatest: Any


class RuleOperands(NamedTuple):
    """The numbers and tables that a rule reads, by slot."""

    numbers: Any
    tables: Any


class CallArguments(NamedTuple):
    """The numbers of a call, which are run-time arguments.

    lead: the sizes of its leading dimensions. group: query heads for each key-value head. offset: that of all batch
    elements; offsets: the address of one for each. b, h, j: the origin. keep: 1 / (1 − dropout). threshold: ⌊dropout ·
    2³²⌋.
    """

    lead: Any
    heads: Any
    group: Any
    n_q: Any
    n_k: Any
    d: Any
    d_v: Any
    scale: Any
    offset: Any
    offsets: Any
    b: Any
    h: Any
    j: Any
    keys: Any
    threshold: Any
    keep: Any
    seed: Any


class RowAddresses(NamedTuple):
    """A query block of one head: rows r, flags of existing ones, absolute indices i."""

    batch: Any
    head: Any
    b: Any
    h: Any
    r: Any
    inside: Any
    i: Any


class KeyAddresses(NamedTuple):
    """A tile of keys: columns c, flags of existing ones, and absolute indices j."""

    c: Any
    inside: Any
    j: Any


class TileAddresses(NamedTuple):
    """The pairs of a tile: rows r and columns c, which broadcast to it, and flags of existing ones."""

    call: Any
    rows: Any
    r: Any
    c: Any
    inside: Any


@triton.jit
def at_batch(x, lead, b):
    """Return the offset of batch element b (row-major over `lead`) of an array."""
    distance = b * 0
    for n in tl.static_range(len(lead)):
        size = lead[len(lead) - 1 - n]
        distance += (b % size) * x.lead[len(lead) - 1 - n]
        b = b // size
    return distance


@triton.jit
def head_of(x, call, batch, head):
    """Return the address of a head's matrix."""
    return x.ptr + at_batch(x, call.lead, batch) + head * x.head


@triton.jit
def rows_of(call, batch, head, block, BLOCK: tl.constexpr):
    r = tl.full([], block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.full([], call.offset, tl.int64)
    if call.offsets is not None:
        offset = tl.load(call.offsets + batch)
    b, h = batch + tl.full([], call.b, tl.int64), head + tl.full([], call.h, tl.int64)
    return RowAddresses(batch, head, b, h, r, r < call.n_q, r + offset)


@triton.jit
def rows_of_program(call, BLOCK: tl.constexpr):
    """Return the query block of this program.

    The last block of a head, which may see most, comes first.
    """
    blocks = tl.cdiv(call.n_q, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    block = blocks - 1 - tl.program_id(0) % blocks
    return rows_of(call, head // call.heads, head % call.heads, block, BLOCK)


@triton.jit
def keys_of(call, tile, BLOCK: tl.constexpr):
    c = tl.full([], tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return KeyAddresses(c, c < call.n_k, c + tl.full([], call.j, tl.int64))


@triton.jit
def load_matrix(ptr, x, rows, inside, size, BLOCK: tl.constexpr, REAL: tl.constexpr):
    """Load rows of a matrix: BLOCK columns, 0 from `size` on; in REAL unless None."""
    f = tl.arange(0, BLOCK)
    at = rows[:, None] * x.row + f[None, :] * x.column
    made = tl.load(ptr + at, mask=inside[:, None] & (f[None, :] < size), other=0.0)
    if REAL is not None:
        made = made.to(REAL)
    return made


@triton.jit
def store_matrix(ptr, x, rows, inside, size, value, BLOCK: tl.constexpr):
    f = tl.arange(0, BLOCK)
    at = rows[:, None] * x.row + f[None, :] * x.column
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=inside[:, None] & (f[None, :] < size))


@triton.jit
def load_rows(x, call, rows, REAL: tl.constexpr):
    """Load one number of each query from an array without columns."""
    ptr = head_of(x, call, rows.batch, rows.head)
    return tl.load(ptr + rows.r * x.row, mask=rows.inside, other=0.0).to(REAL)


@triton.jit
def load_head(x, rows, REAL: tl.constexpr):
    """Load one number of the head of some rows."""
    return tl.load(x.ptr + rows.head * x.head).to(REAL)


@triton.jit
def store_rows(x, call, rows, value):
    ptr = head_of(x, call, rows.batch, rows.head)
    tl.store(ptr + rows.r * x.row, value.to(x.ptr.dtype.element_ty), mask=rows.inside)


@triton.jit
def of_queries(x, KEYS_FIRST: tl.constexpr):
    """Return a number of each query so that it broadcasts to a tile (queries, keys), or (keys, queries)."""
    if KEYS_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def of_keys(x, KEYS_FIRST: tl.constexpr):
    """Return a number of each key so that it broadcasts to a tile (queries, keys), or (keys, queries)."""
    if KEYS_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def tile_of(call, rows, keys, KEYS_FIRST: tl.constexpr):
    inside = of_queries(rows.inside, KEYS_FIRST) & of_keys(keys.inside, KEYS_FIRST)
    return TileAddresses(call, rows, of_queries(rows.r, KEYS_FIRST), of_keys(keys.c, KEYS_FIRST), inside)


@triton.jit
def load_dense(x, tile):
    """Load a tile of a dense array (..., h, n_q, n_k)."""
    at = tile.r * x.row + tile.c * x.column
    return tl.load(head_of(x, tile.call, tile.rows.batch, tile.rows.head) + at, mask=tile.inside, other=0)


@triton.jit
def dropout_mask(call, rows, keys, KEYS_FIRST: tl.constexpr):
    """Return the mask of the pairs that dropout keeps."""
    key = row_key(word64(call.seed[0], call.seed[1]), rows.b, rows.h, rows.i)
    bits = random_bits(of_queries(key, KEYS_FIRST), of_keys(keys.j, KEYS_FIRST))
    return bits >= tl.full([], call.threshold, tl.int64).to(tl.uint32)
