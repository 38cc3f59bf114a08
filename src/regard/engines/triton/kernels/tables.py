"""Gradients of tables: for each pair dS ∂S/∂entry, or its tangent, and the entry."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.engines.triton.kernels.addresses import head_of, keys_of, rows_of
from regard.engines.triton.kernels.tile_derivatives import key_operands, query_operands, tile_gradients


class TableGradientArguments(NamedTuple):
    """The arguments of `table`.

    first: the first row, a multiple of the query block. parts, entries: arrays to write, for each reading.
    """

    given: Any
    direction: Any
    first: Any
    parts: Any
    entries: Any


@triton.jit
def table(arrays, rules, call, task, FIRST: tl.constexpr, LAST: tl.constexpr, ALONG: tl.constexpr, F: tl.constexpr):
    """Write the parts and entries of the pairs of a tile.

    The rule returns slopes from its result FIRST on, ALONG a direction their tangents, and entries from LAST on.
    """
    READINGS: tl.constexpr = len(task.parts)
    head = tl.program_id(2).to(tl.int64)
    batch, head = head // call.heads, head % call.heads
    rows = rows_of(call, batch, head, task.first // F.M + tl.program_id(0), F.M)
    keys = keys_of(call, tl.program_id(1), F.N)
    x = query_operands(arrays, call, task.given, task.direction, rows, F)
    y = key_operands(arrays, call, task.direction, batch, head // call.group, keys, F)
    z = tile_gradients(call, arrays, rules, task.direction, x, y, rows, keys, True, ALONG, F)
    inside = rows.inside[:, None] & keys.inside[None, :]
    for n in tl.static_range(READINGS):
        value = z.dS_dot if ALONG else z.dS
        value = value * z.found[FIRST + n].to(F.REAL)
        if ALONG:
            value += z.dS * z.found[FIRST + READINGS + n].to(F.REAL)
        entry = tl.broadcast_to(z.found[LAST + n], z.dS.shape)
        at = (rows.r - task.first)[:, None] * task.parts[n].row + keys.c[None, :] * task.parts[n].column
        to = head_of(task.parts[n], call, batch, head) + at
        tl.store(to, tl.where(z.visible, value, 0.0), mask=inside)
        tl.store(head_of(task.entries[n], call, batch, head) + at, entry.to(tl.int64), mask=inside)
