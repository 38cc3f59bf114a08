"""The table of cases as exported modules and calls of them, for tests in Node.js and in a browser."""

from typing import Any

import numpy as np

from cases import Case
from in_node import native, native_maps, same
from regard.core.parts import part_of
from regard.core.problem import Problem
from regard.engines import cpu
from regard.engines.cpu.schedule.second_work import second_spec
from regard.engines.cpu.target.instructions import chosen
from regard.ops.normalization import problem_from
from regard.rules import Mask

Array = np.ndarray[Any, np.dtype[Any]]

REFUSED = {
    "origin": "a page has no shards of a call: the loader takes no origin",
    "metric": "the metric is multiplied with the queries before the call",
    "one metric for all": "the metric is multiplied with the queries before the call",
    "no features": "the number of queries follows from the length of q",
    "empty batch": "the number of queries follows from the length of q",
}
"""Cases that a page cannot call, and why."""

SUMS = "received", "profile"
STATISTICS = "entropy", "max", "visible", *SUMS


def problem_of(case: Case) -> Problem:
    q, k, v, options = case.inputs_with_real_bias(np.float32)
    return problem_from(q, k, v, **options, observe=["lse", *STATISTICS])


def export_options(p: Problem) -> dict[str, Any]:
    """Arguments of `regard.export_wasm` for a problem."""
    rule, array = _rule_and_array(p.mask)
    given = {"bias": p.bias is not None, "sink": p.sink is not None, "dropout": bool(p.dropout)}
    return {
        "mask": rule,
        "score": p.score,
        "array_mask": array is not None,
        "maps": True,
        "statistics": STATISTICS,
        **given,
    }


def _rule_and_array(mask: Mask | None) -> tuple[Mask | None, Array | None]:
    """A mask as the rule of a module and the array of a call: rule & array."""
    if mask is None or not mask.dense:
        return mask, None
    if mask.node.op == "dense":
        return None, mask.node.payload
    rule, array = mask.node.args
    assert (mask.node.op, array.op) == ("bitwise_and", "dense")
    return Mask(rule, "a rule", mask.requires), array.payload


def whole_call(p: Problem) -> dict[str, Any]:
    """The call of all heads, batch elements in one axis."""
    flat = {name: p.leading(x, 3) for name, x in (("q", p.query), ("k", p.key), ("v", p.value))}
    sizes = {"d": p.d, "heads": p.heads, "kvHeads": p.kv_heads, "batch": p.batch}
    own: dict[str, Any] = {"scale": p.scale, "offset": p.offset.astype(np.int64)}
    if p.sink is not None:
        own["sink"] = p.sink.reshape(-1)
    if p.dropout:
        own |= {"dropout": p.dropout, "seed": p.seed}
    if p.n_k == 0:
        own["dV"] = p.d_v
    return {**flat, **sizes, **own, **_pairs(p)}


def head_call(p: Problem, b: int, h: int, lse: Array) -> dict[str, Any]:
    """The call about one head; without its rows and cols."""
    one = part_of(p, b, h)
    arrays = {"q": one.query, "k": one.key, "lse": lse}
    return {**arrays, "d": p.d, "scale": p.scale, "offset": int(one.offset[0]), "b": b, "h": h, **_pairs(one)}


def _pairs(p: Problem) -> dict[str, Any]:
    """The bias and the array mask of a call."""
    made = {"bias": p.bias, "mask": _rule_and_array(p.mask)[1]}
    return {name: {"data": x, "shape": list(x.shape)} for name, x in made.items() if x is not None}


def bins(n: int) -> Array:
    """Edges of uneven bins."""
    return np.array(sorted({0, n // 3, n // 2, n}))


def calls_of(p: Problem) -> list[dict[str, Any]]:
    """Calls of the module of a problem: all of it, then maps of its last head where there are pairs."""
    if not p.n_q * p.n_k:
        return [whole_call(p)]
    lse = cpu.forward(p)[0].lse
    assert lse is not None
    b, h = p.batch - 1, p.heads - 1
    own = head_call(p, b, h, lse.reshape(p.batch, p.heads, p.n_q)[b, h])
    return [whole_call(p), {**own, "rows": bins(p.n_q), "cols": bins(p.n_k)}]


def check(p: Problem, results: list[dict[str, Any]]) -> None:
    """Check that results of `calls_of` have the bits of the engine's target "baseline"."""
    for got in results:
        assert "error" not in got, got["error"]
    seen = {s.name: x for s, x in cpu.forward(p)[1].items()}
    expected = native(p) | {"visible": seen["visible"].astype(np.int32)}
    sums = {"received": seen["received"], "profile": seen["profile"].values}
    # Sums over queries depend on the rows of query blocks, which are fewer in some short calls of the engine.
    if p.n_q <= 8 or second_spec(p, chosen(), ()).lanes == 12:
        expected |= sums
    for name, x in sums.items():
        np.testing.assert_allclose(results[0][name], x.reshape(-1), rtol=1e-5, atol=1e-6, err_msg=name)
    same(results[0], expected)
    for got in results[1:]:
        one, lse = part_of(p, p.batch - 1, p.heads - 1), calls_of(p)[1]["lse"]
        same(got, native_maps(one, lse, bins(p.n_q), bins(p.n_k)))
