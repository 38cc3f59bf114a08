"""Where arrays lie and which part of them a program works on: what every kernel begins with."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.language.functions import random_bits, row_key, word64


class Array(NamedTuple):
    """The first element of an array, and the distances between its elements: along each of the leading dimensions,
    heads, rows and columns (features). 0 where it broadcasts.
    """

    ptr: Any
    lead: Any
    head: Any
    row: Any
    column: Any


class Table(NamedTuple):
    """A table of a rule: its first element, its sizes, and its least and greatest entry as far as they are known."""

    ptr: Any
    sizes: Any
    least: Any
    greatest: Any


class Rule(NamedTuple):
    """What an expression reads beside the indices, by slot."""

    numbers: Any
    tables: Any


class Call(NamedTuple):
    """The numbers of a call, which no kernel is compiled for.

    lead: the sizes of its leading dimensions. group: query heads for each key-value head. offset: of all batch
    elements, or offsets: where those of each one lie. b, h, j: the origin. keep: 1 / (1 − dropout). threshold: ⌊dropout
    · 2³²⌋.
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


class Rows(NamedTuple):
    """A block of queries of one head: rows r of the call, which of them there are, and their absolute indices."""

    batch: Any
    head: Any
    b: Any
    h: Any
    r: Any
    inside: Any
    i: Any


class Keys(NamedTuple):
    """A tile of keys: columns c of the call, which of them there are, and their absolute indices."""

    c: Any
    inside: Any
    j: Any


@triton.jit
def at_batch(x, lead, b):
    """How far the batch element b (row-major over `lead`) of an array is from its first element."""
    distance = b * 0
    for n in tl.static_range(len(lead)):
        axis: tl.constexpr = len(lead) - 1 - n
        distance += (b % lead[axis]) * x.lead[axis]
        b = b // lead[axis]
    return distance


@triton.jit
def head_of(x, call, batch, head):
    """Where the matrix of a head begins."""
    return x.ptr + at_batch(x, call.lead, batch) + head * x.head


@triton.jit
def rows_of(call, batch, head, block, BLOCK: tl.constexpr):
    r = tl.full([], block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.full([], call.offset, tl.int64)
    if call.offsets is not None:
        offset = tl.load(call.offsets + batch)
    b, h = batch + tl.full([], call.b, tl.int64), head + tl.full([], call.h, tl.int64)
    return Rows(batch, head, b, h, r, r < call.n_q, r + offset)


@triton.jit
def rows_of_program(call, BLOCK: tl.constexpr):
    """The block of queries that this program works on: of every head the last one, which may see most, comes first."""
    blocks = tl.cdiv(call.n_q, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    block = blocks - 1 - tl.program_id(0) % blocks
    return rows_of(call, head // call.heads, head % call.heads, block, BLOCK)


@triton.jit
def keys_of(call, tile, BLOCK: tl.constexpr):
    c = tl.full([], tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return Keys(c, c < call.n_k, c + tl.full([], call.j, tl.int64))


@triton.jit
def load_matrix(ptr, x, rows, inside, size, BLOCK: tl.constexpr, REAL: tl.constexpr):
    """Rows of a matrix (BLOCK columns, of which `size` are there; 0 elsewhere); in REAL unless that is None."""
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
    """One number of each query, of an array without columns."""
    ptr = head_of(x, call, rows.batch, rows.head)
    return tl.load(ptr + rows.r * x.row, mask=rows.inside, other=0.0).to(REAL)


@triton.jit
def store_rows(x, call, rows, value):
    ptr = head_of(x, call, rows.batch, rows.head)
    tl.store(ptr + rows.r * x.row, value.to(x.ptr.dtype.element_ty), mask=rows.inside)


@triton.jit
def load_cell(x, cell):
    """A dense array (..., h, n_q, n_k) in a tile; cell: the call, the rows and the keys."""
    call, rows, keys = cell
    at = rows.r[:, None] * x.row + keys.c[None, :] * x.column
    inside = rows.inside[:, None] & keys.inside[None, :]
    return tl.load(head_of(x, call, rows.batch, rows.head) + at, mask=inside, other=0)


@triton.jit
def kept(call, rows, keys):
    """The pairs that dropout keeps."""
    key = row_key(word64(call.seed[0], call.seed[1]), rows.b, rows.h, rows.i)
    return random_bits(key[:, None], keys.j[None, :]) >= tl.full([], call.threshold, tl.int64).to(tl.uint32)
