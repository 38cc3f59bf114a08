"""Empty and full blocks of a dense mask or bias.

Empty blocks are skipped and full ones need no mask, as under a rule. In a bias −∞ hides, and a large negative number is
skipped where its weight is proven to be 0. FlexAttention calls such a summary a block mask.
One pass over the array finds them in each call, since arrays may change.
"""

import math
from functools import reduce
from itertools import pairwise
from operator import and_, or_
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.language.types import I8, I16, I32, I64, Type
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.arguments import pack_fields
from regard.engines.cpu.spec.tiles import PART
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.rules import Ranges
from regard.runtime.memory import address_of
from regard.runtime.threads import spread

Array = np.ndarray[Any, np.dtype[Any]]

FIELDS = ("source", "row", "rows", "width", "parts", "each", "some", "every", "seen", "full", "least")
THREAD_BYTES = 2**20  # bytes that a thread takes at a time
SAMPLES = 32  # rows, and keys of each, that are sampled in a bias
TYPES = {1: I8, 2: I16, 4: I32, 8: I64}
USUAL = -1024.0  # a bias that is as large may be the largest of its row
UNDERFLOW = {4: 105, 8: 750}  # by the bytes of sums: exp of less than −this is 0
LOW = USUAL - min(UNDERFLOW.values())  # a larger bias never has weight 0 by `least_visible`
ALIVE, FAR, ODD = 1, 2, 4  # flags: a row has a bias of at least USUAL, a finite one up to `least`, and NaN or ∞


class BlockMask:
    """A summary of a mask or bias (..., h, n_q, n_k).

    Blocks have `each` queries, from `first` on, and PART keys. Hidden is False, or in a bias −∞ and all numbers up to
    `least`, which must be finite only by `least_visible`. Blocks with something visible, and blocks with all visible,
    are counted in 2-D prefix sums, so four numbers answer for any rectangle.
    """

    def __init__(self, mask: Array, first: int, each: int, target: Target, threads: int, least: float = -np.inf):
        lead = mask.shape[:-2]
        planes = mask[tuple(slice(1 if step == 0 else None) for step in mask.strides[:-1])]
        self.one_row = planes.shape[-2] == 1
        planes = planes if self.one_row else planes[..., first:, :]
        self.first, self.each = first, each
        seen, full = _summed_up(planes, each, target, threads, least)
        self.seen, self.full = (np.broadcast_to(_counted(x), (*lead, *(n + 1 for n in x.shape[-2:])))
                                for x in (seen, full))  # fmt: skip

    def bounds(self, at: tuple[Any, ...], rows: tuple[Any, Any], keys: tuple[Any, Any]) -> tuple[Array, Array]:
        """Return the least and the greatest value in rectangles.

        rows, keys: both ends included; keys after the last are allowed. at: (..., h), their heads. All broadcast.
        """
        top, bottom = (np.zeros_like(x) if self.one_row else (x - self.first) // self.each for x in rows)
        left, right = (np.minimum(x // PART, self.seen.shape[-1] - 2) for x in keys)

        def count(total: Array) -> Any:
            ends = (bottom + 1, right + 1), (top, right + 1), (bottom + 1, left), (top, left)
            whole, above, before, both = (total[(*at, *end)] for end in ends)
            return whole - above - before + both

        area = (bottom - top + 1) * (right - left + 1)
        return (count(self.full) == area).astype(np.int64), (count(self.seen) > 0).astype(np.int64)


def hides(bias: Array, least: float = LOW) -> bool:
    """Return whether samples of a bias (..., h, n_q, n_k) are at most `least`."""
    rows, keys = (max(1, n // SAMPLES) for n in bias.shape[-2:])
    some = bias[tuple(slice(1 if step == 0 else None) for step in bias.strides[:-2])][..., ::rows, ::keys]
    return bool((some <= least).any())


def least_visible(p: Problem) -> float:
    """Return a bias such that a pair with that or less has weight 0 in a row with a bias of at least USUAL.

    Scores differ from biases by at most c = |scale| · max |q| · max |k|. So such a pair is below the row's largest
    score by USUAL − bias − 2 c, and its weight is 0 where that is UNDERFLOW. −∞ if a number of query, key or value is
    not finite: 0 · ∞ is not 0.
    """
    q, k, v = (float(_largest_square(x)) for x in (p.query, p.key, p.value))
    if not all(x < np.inf for x in (q, k, v)):
        return -np.inf
    spread = 2 * abs(p.scale) * math.sqrt(q * k)
    return 1.01 * (USUAL - spread - UNDERFLOW[p.compute.itemsize])  # rounding of scores is far below 1 %


def _largest_square(x: Array) -> Any:
    """Return the largest Σ_c x² of rows (..., c); NaN or infinite if that cannot be known."""
    x = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    return np.einsum("...c,...c", x, x).max(initial=0)


def _counted(x: Array) -> Array:
    """Return 2-D prefix sums, with a row and a column of 0 in front."""
    sums = np.zeros((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 1), np.int32)
    np.cumsum(x, axis=-2, dtype=np.int32, out=sums[..., 1:, 1:])
    return np.cumsum(sums, axis=-1, dtype=np.int32, out=sums)


def _is_one(planes: Array) -> bool:
    """Return whether the rows of all planes are evenly spaced in memory."""
    axes = [(n, step) for n, step in zip(planes.shape[:-1], planes.strides[:-1], strict=True) if n > 1]
    return all(step == n * inner for (_, step), (n, inner) in pairwise(axes))


def _summed_up(planes: Array, each: int, target: Target, threads: int, least: float) -> tuple[Array, Array]:
    """Return for each block whether something, and whether all is visible, as bytes."""
    *lead, n_q, n_k = planes.shape
    each = min(each, n_q)
    if lead and n_q % each == 0 and _is_one(planes):  # a launch for each plane would take longer than a short one
        joined = _summed_up(planes.reshape(-1, n_k), each, target, threads, least)
        seen, full = (x.reshape(*lead, n_q // each, -1) for x in joined)
        return seen, full
    size, bounds = planes.dtype.itemsize, None
    if planes.dtype.kind not in "ib":
        # The bits of negative numbers, as integers, are the greater the less they are.
        with np.errstate(over="ignore"):
            most, last, usual = (int(np.array(x, planes.dtype).view(f"i{size}")) for x in (least, -np.inf, USUAL))
        bounds = (last, usual) if most < last else (last, None)
    key = f"block mask {size} {bounds}"
    parts, blocks = -(-n_k // PART), -(-n_q // each)
    seen, full = np.empty((2, *lead, blocks, parts), np.int8)
    kernel = cache.kernel(key, "block_mask", target, lambda: source(target, TYPES[size], bounds))
    step = max(1, THREAD_BYTES // (each * n_k * size))

    def look(start: tuple[tuple[int, ...], int]) -> None:
        at, block = start
        some, every = np.zeros(parts * PART, f"i{size}"), np.ones(parts * PART, f"i{size}")
        row = block * each
        values = {
            "source": address_of(planes[at]) + row * planes.strides[-2], "row": planes.strides[-2],
            "rows": min(step * each, n_q - row), "width": n_k, "parts": parts, "each": each,
            "some": address_of(some), "every": address_of(every),
            "seen": address_of(seen[at][block:]), "full": address_of(full[at][block:]),
            "least": 0 if bounds is None else most,
        }  # fmt: skip
        fields = pack_fields(FIELDS, values)
        kernel(fields.buffer_info()[0])

    spread(look, [(at, block) for at in np.ndindex(*lead) for block in range(0, blocks, step)], threads)
    return seen, full


def source(target: Target, element: Type, bounds: tuple[int, int | None] | None) -> str:
    """Return the kernel's IR.

    Rows are combined by *or* and by *and*, then the keys of each part. element: an integer of the array's size. bounds:
    the bits of −∞ and, where finite numbers hide too, of USUAL; None for booleans. A block in which they hide keys of a
    row without a usual number, or with NaN or ∞, is visible as a whole.
    """

    count = PART * element.size // 8
    true = int.from_bytes((1).to_bytes(element.size, "little") * (8 // element.size), "little")
    last, usual = (None, None) if bounds is None else bounds

    def write(k: Any) -> None:
        W, zero, one = target.lanes(element.size), k.constant(element, 0), k.constant(element, 1)
        no, yes = k.constant(I8, 0), k.constant(I8, 1)
        some, every = k.pointer("some", element), k.pointer("every", element)
        seen, full = k.pointer("seen", I8), k.pointer("full", I8)
        width, parts, rows, each = (k.integer(name) for name in ("width", "parts", "rows", "each"))
        least = k.integer("least").to(element)
        line, block, proven = k.variable(k.integer("source")), k.variable(k.whole(0)), k.variable(k.whole(1))
        whole = width - width % W

        def gather(begin: bool) -> None:
            """Combine a row with the block's earlier ones, or start from it."""
            x, row_flags = k.at(line.value, element), k.whole(0)
            for lanes, first, stop in ((W, 0, whole), (0, whole, width)):
                flags = k.variable(zero.spread(lanes))
                with k.loop(stop, start=first, step=lanes or 1) as a:
                    bits = x.load(a, lanes)
                    visible = bits
                    if last is not None:
                        shown = bits != last if usual is None else (bits < least) | (bits > last)
                        visible = k.where(shown, one, zero)
                    if usual is not None:
                        alive = (bits >= zero) | (bits <= usual)
                        far = (bits >= least) & (bits < last)
                        odd = (bits >= last + 2 ** (8 * element.size - 1)) | ((bits > last) & (bits < zero))
                        for holds, flag in ((alive, ALIVE), (far, FAR), (odd, ODD)):
                            flags.value = flags.value | k.where(holds, k.constant(element, flag), zero)
                    some[a] = visible if begin else some.load(a, lanes) | visible
                    every[a] = visible if begin else every.load(a, lanes) & visible
                row_flags = row_flags | (k.folded(flags.value, or_) if lanes else flags.value).to(I64)
            if usual is not None:
                unproven = (row_flags & (ALIVE | FAR) == FAR) | (row_flags & ODD != 0)
                proven.value = k.where(unproven, k.whole(0), proven.value)
            line.value = line.value + k.integer("row")

        with k.loop(rows, step=each) as first:
            proven.value = k.whole(1)
            gather(begin=True)
            with k.loop(k.minimum(first + each, rows), start=first + 1):
                gather(begin=False)
            with k.loop(parts) as p:
                any_one, all_ones = ([x.of(I64).load(count * p + n) for n in range(count)] for x in (some, every))
                shown = reduce(or_, any_one) != 0
                seen[block.value + p] = k.where(shown | (proven.value == 0), yes, no)
                full[block.value + p] = k.where(reduce(and_, all_ones) == true, yes, no)
            block.value = block.value + parts

    return written("block_mask", FIELDS, target, write)


def dense_bounds(masks: dict[int, BlockMask], lead: tuple[int, ...], origin: tuple[int, ...], offset: Array) -> Any:
    """Return `Ranges.dense` for some block masks.

    Arrays without one have the bounds 0 and 1.
    """

    def bounds(array: Array, ranges: Ranges) -> tuple[Any, Any]:
        mask = masks.get(id(array))
        h, h_last = (x - origin[1] for x in ranges.h)
        if mask is None or (np.any(h != h_last) and any(mask.seen.strides[-3:-2])):
            return np.asarray(0), np.asarray(1)
        b = ranges.b[0] - origin[0]
        at = (*np.unravel_index(b, lead), h) if lead else (h,)
        return mask.bounds(at, tuple(x - offset[b] for x in ranges.i), tuple(x - origin[2] for x in ranges.j))

    return bounds
