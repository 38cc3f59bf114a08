"""The spec of forward's kernel for a call.

The spec says whether lanes are keys or queries, and how products and copies are made.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.language.types import BF16, F32, F64, I64, type_of
from regard.engines.cpu.schedule.arguments import programs
from regard.engines.cpu.spec.operands import RuleArguments, integer_type
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import multiple
from regard.engines.cpu.target.instructions import Target
from regard.rules import Program, reads

Array = np.ndarray[Any, np.dtype[Any]]

DECODE_QUERIES = 8  # queries of a key head up to which lanes are keys
PACKED_ROWS = 64  # rows of a query block that covers several key heads
SPREAD_BYTES = 2**19  # bytes that a head of keys or values may spread over, with others between them, and not be copied


def spec_of(
    p: Problem,
    target: Target,
    rows: int,
    entropy: bool,
    best: int = 0,
    decode: bool = True,
    rules: Sequence[tuple[str, Program]] | None = None,
    more: Sequence[Array] = (),
) -> KernelSpec:
    """Return the spec for `rows` rows of a call, with `best` of the largest weights.

    decode: lanes may be keys. rules: instead of those of the call. more: arrays that are read like keys and values.
    """
    lowered = {prefix: RuleArguments(prefix, program) for prefix, program in (programs(p) if rules is None else rules)}
    plain = prefill_spec(p, target, rows * p.group, lowered.get("mask"), lowered.get("score"), entropy)
    W = target.lanes(plain.real.size)
    straight = [x.strides[-1] == x.itemsize or x.shape[-1] <= 1 for x in (p.key, p.value, *more)]
    amx = plain.element is BF16 and target.amx and p.scale != 0
    paired = amx or (plain.element is BF16 and target.bf16_dot and p.scale != 0)
    # States of parts have the layout of prefill, whatever the number of keys.
    decode = decode and p.part is None and rows * p.group <= min(DECODE_QUERIES, W) and straight[1] and not best
    # A mask that differs by head would compute each tile that one head sees for all.
    adjacent = p.kv_heads > 1 and all(x.strides[-3] > 0 and heads_in_rows(x) for x in (p.key, p.value))
    packed_heads = decode and adjacent and "h" not in reads(*p.rules.hiding)
    converted = plain.element is not plain.real and not paired
    scattered = rows * p.group > plain.lanes and any(_scattered(x) for x in (p.key, p.value, *more))
    vectors = -(-min(rows * p.heads, PACKED_ROWS) // W) if packed_heads else 0
    return replace(
        plain,
        lanes=(vectors or 1) * W if decode else plain.lanes,
        decode_rows=0
        if not decode
        else rows * p.group
        if packed_heads
        else 1 << (max(1, rows * p.group) - 1).bit_length(),
        packed_vectors=vectors,
        paired=paired,
        amx=amx,
        pipelined=target.pipelines and not (decode or amx),
        copied=not decode and (converted or scattered or not all(straight) or amx or (paired and p.d % 2 != 0)),
        best=best,
    )


def prefill_spec(
    p: Problem, target: Target, queries: int, mask: RuleArguments | None, score: RuleArguments | None, entropy: bool
) -> KernelSpec:
    """Return the spec for `queries` queries that share keys.

    Lanes are queries, products are of scalars, and tiles are copied.
    """
    real = F64 if p.compute == np.float64 else F32
    W = target.lanes(real.size)
    most = target.tile[1]
    # One vector less costs less than an eighth: 16 W queries fill 8 blocks of 2 W, eight ninths of 6 of 3 W.
    if 8 * multiple(queries, W * most) >= 9 * multiple(queries, W * (most - 1)):
        most -= 1
    lanes = max(1, min(queries, W * most))
    return KernelSpec(
        element=type_of(p.dtype),
        real=real,
        integer=integer_type(p.rules.integers, mask, score) if mask or score else I64,
        lanes=multiple(lanes, W),
        decode_rows=0,
        packed_vectors=0,
        paired=False,
        amx=False,
        copied=True,
        pipelined=False,
        mask=mask,
        score=score,
        bias=None if p.bias is None else type_of(p.bias.dtype),
        dropout=bool(p.dropout),
        sink=bool(p.denominators),
        entropy=entropy,
        best=0,
        low=False,
        carried=False,
    )


def heads_in_rows(x: Array) -> bool:
    """Test for a token-major layout: heads are closer than rows."""
    return bool(x.strides[-3] < x.strides[-2])


def _scattered(x: Array) -> bool:
    """Test if a head's rows spread over SPREAD_BYTES.

    Such rows share few sets of a cache, and evict each other.
    """
    step = x.strides[-2]
    return bool(step > x.shape[-1] * x.itemsize and step * x.shape[-2] > SPREAD_BYTES)
