"""Parts of the weights, by a second pass that stores them."""

from array import array
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.schedule.arguments import arrays_of, base_of, check, field_values, pack_fields
from regard.engines.cpu.schedule.launches import launch
from regard.engines.cpu.schedule.second_work import second_spec, source
from regard.engines.cpu.schedule.stages import LaunchStages
from regard.engines.cpu.schedule.work import SMALL
from regard.engines.cpu.spec.operands import BASES
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.runtime.memory import address_of
from regard.runtime.threads import num_threads

Array = np.ndarray[Any, np.dtype[Any]]

STRIP = 2**20  # weights of a strip, of which only some rows or columns are kept
APART = 16  # the distance of rows from which on those between are left out
IN_CACHE = 2**20  # bytes of weights that a work group stores before it divides them


def weights(p: Problem, target: Target, lse: Array, rows: range, cols: range) -> Array:
    """Return a part of the weights, P (..., h, rows, cols), in the dtype of sums.

    With every key, rows are divided by their sums. Else the error is that of the scores, and |lse| eps.
    """
    if rows.step < 0:
        return weights(p, target, lse, rows[::-1], cols)[..., ::-1, :]
    if cols.step < 0:
        return weights(p, target, lse, rows, cols[::-1])[..., ::-1]
    part = np.zeros(p.shape(len(rows), len(cols)), p.compute)
    if not part.size:
        return part
    lse = np.ascontiguousarray(np.broadcast_to(lse, p.shape(p.n_q)), p.compute)
    between = range(cols[0], cols[-1] + 1)
    if rows.step == cols.step == 1:
        store(p, target, lse, part, rows, between)
        return part
    each = p.all_heads * rows.step * len(between)
    count = 1 if rows.step >= APART else max(1, STRIP // each)
    for n in range(0, len(rows), count):
        some = rows[n : n + count]
        some = range(some[0], some[-1] + 1)
        strip = np.zeros(p.shape(len(some), len(between)), p.compute)
        store(p, target, lse, strip, some, between)
        part[..., n : n + count, :] = strip[..., :: rows.step, :: cols.step]
    return part


def store(p: Problem, target: Target, lse: Array, part: Array, rows: range, cols: range) -> None:
    """Store the weights of adjacent rows and columns in a part of zeros."""
    p = p.without("weights", "results", value=p.value[..., :0])
    work = p.all_heads * len(rows) * len(cols)
    threads = 1 if work * (p.d + 16) < SMALL else num_threads()
    spec = second_spec(p, target, (), len(rows))
    kernel = cache.kernel(spec.key, spec.kernel, target, lambda: source(spec, target, spec.kernel))
    arrays = arrays_of(p, {"lse": lse, "weights": part})
    check(spec, arrays)
    own = {"first_column": cols.start, "stop_column": cols.stop, "whole": int(len(cols) == p.n_k)}
    values = field_values(p, spec, arrays) | own
    if "sink" in arrays:
        values["sink"] = base_of(arrays["sink"])
    packed = pack_fields(spec.fields, values)
    bases = array("Q", [0] * len(spec.block_fields))
    for n, name in enumerate(spec.block_fields):
        bases[n] = base_of(arrays.get(name))
    # Kernels count rows and columns from those of the call.
    before = rows.start * part.strides[-2] + cols.start * part.strides[-1]
    bases[spec.block_fields.index("weights")] = (address_of(part) - before) % 2**64
    packed[BASES] = bases.buffer_info()[0]
    stages = LaunchStages(spec, p, arrays, rows, threads, cols)
    if work < p.pairs:
        stages.masks = []  # summaries of dense masks take a pass over them
    for tiles, blocks in stages.chunks():
        stored = spec.lanes * len(cols) * part.itemsize
        launch(kernel, packed, stages.stage(tiles, blocks, most=max(1, IN_CACHE // stored)), threads)
