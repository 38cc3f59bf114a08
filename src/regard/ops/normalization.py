"""A call made one frozen `Problem`: its arguments checked once, and normalized to (..., h, n, d)."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from regard.core import checks
from regard.core.layout import Layout
from regard.core.options import CallOptions
from regard.core.problem import Problem, compute_dtype
from regard.engines import Engine, choose
from regard.ops import callcache
from regard.ops import metric as metrics
from regard.ops.callcache import array_operands, signature
from regard.rules import Mask
from regard.rules import causal as causal_rule


def problem_from(query: Any, key: Any, value: Any, **options: Any) -> Problem:
    """Check a call (arguments as in `attention`) and normalize it to (..., h, n, d).

    Nothing is copied. With a metric, the problem's query is the product of both.
    """
    return checked(signature(array_operands(query, key, value), options), query, key, value, options)


def checked(
    signature: callcache.Signature | None, query: Any, key: Any, value: Any, options: Mapping[str, Any]
) -> Problem:
    """Return the problem of a call; calls of a known signature are not checked."""
    mask, score, entry = options.get("mask"), options.get("score"), callcache.find(signature)
    if entry is not None and entry.fields is not None and entry.layout is not None:
        to_bhnd = entry.layout.to_bhnd
        return Problem.from_fields(
            entry.fields, query=to_bhnd(query), key=to_bhnd(key), value=to_bhnd(value),
            mask=causally(mask) if options.get("causal") else mask, score=score,
        )  # fmt: skip
    call_options = CallOptions(**options)
    query, key, value = checks.operands(query, key, value)
    arranged = Layout.of(query, call_options.layout)
    q, k, v = (arranged.to_bhnd(x) for x in (query, key, value))
    lead = checks.sizes(q, k, v, (query, key, value))
    h, n_q, n_k = q.shape[-3], q.shape[-2], k.shape[-2]
    rule = checks.mask(mask, lead, h, n_q, n_k)
    if checks.boolean("causal", call_options.causal):
        rule = causally(rule)
    p_drop, seed_int = checks.dropout(call_options.dropout, call_options.seed)
    factors = None
    if call_options.metric is not None:
        factors = q, checks.array("metric", call_options.metric)
        metrics.fits(factors[1].shape, q.shape)
    problem = Problem(
        query=q if factors is None else metrics.product(*factors),
        key=k,
        value=v,
        lead=lead,
        mask=rule,
        score=checks.score(score),
        bias=checks.bias(call_options.bias, lead, h, n_q, n_k),
        scale=checks.scale(call_options.scale, q.shape[-1], compute_dtype(q.dtype)),
        sink=checks.sink(call_options.sink, h),
        dropout=p_drop,
        seed=seed_int,
        offset=checks.offset(call_options.offset, lead, n_q, n_k),
        origin=checks.origin(call_options.origin),
        positions_first=arranged.positions_first,
        observe=checks.observe(call_options.observe),
        factors=factors,
    )
    checks.covers(problem, call_options.offset is not None, call_options.origin is not None)
    checks.observable(problem)
    if signature is None:
        return problem
    problem.offset.setflags(write=False)
    fields = problem.shared_fields
    if callcache.met(mask, score, record=True):
        callcache.store(signature, callcache.Entry(arranged, fields))
    return Problem.from_fields(fields, query=q, key=k, value=v, mask=problem.mask, score=problem.score)


_causal: Mask = causal_rule.__wrapped__()  # type: ignore[attr-defined]
_causally: WeakKeyDictionary[Mask, Mask] = WeakKeyDictionary()


def causally(mask: Mask | None) -> Mask:
    """Return `causal() & mask`, the same object for the same mask."""
    if mask is None:
        return _causal
    combined = _causally.get(mask)
    if combined is None:
        combined = _causally[mask] = _causal & mask
    return combined


def prepare(
    query: Any, key: Any, value: Any, engine: str | None, options: Mapping[str, Any], function: str
) -> tuple[Problem, Layout, Engine]:
    """Check a call, and choose the engine whose `function` computes it."""
    p = problem_from(query, key, value, **options)
    return p, Layout.of(query, options.get("layout", "bhnd")), choose(p, engine, function)
