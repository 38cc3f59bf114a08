"""Random calls against the specification: shapes, strides, dtypes, masks, NaN behind masks, rows that see nothing.

400 examples here, half of them on each engine; `REGARD_FUZZ=100000` runs as many others.
"""

import os
from collections.abc import Callable
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

import regard
from cases import curved, hiding, mixed_rule, recency, tabled
from regard.core.layout import Layout
from regard.core.problem import Differential, Outputs, Problem
from regard.ops.normalization import problem_from
from regard.reference import specification
from support import (
    assert_gradients,
    assert_outputs,
    assert_second,
    assert_tangents,
    assert_within,
    judge,
    to_bhnd,
    turned,
)

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
# Kinds of call that the compiled engine is tried on: each takes seconds to compile.
STRUCTURES = 24 if "REGARD_FUZZ" in os.environ else 4
EACH = settings(max_examples=settings().max_examples // (1 if "REGARD_FUZZ" in os.environ else 8))
LENGTHS = st.one_of(st.integers(0, 20), st.sampled_from([127, 128, 129, 257]))


def strided(draw: Any, x: Any) -> Any:
    """The same values, lying otherwise in memory: reversed, transposed, or every other element of more."""
    how = draw(st.sampled_from(["plain", "reversed", "transposed", "spread", "last axis spread"]))
    if how == "reversed":
        return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]
    if how == "transposed":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if how == "spread":
        return np.repeat(x, 2, axis=-2)[..., ::2, :]
    if how == "last axis spread":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    return x


Pick = Callable[[list[Any]], Any]


@st.composite
def masks(draw: Any, pick: Pick, lead: tuple[int, ...], h: int, n_q: int, n_k: int, rng: np.random.Generator) -> Any:
    batch = int(np.prod(lead))
    parts = {
        "window": lambda: regard.window(*(draw(st.integers(0, 30)) if pick([0, 1, 1]) else None for _ in range(2))),
        "prefix": lambda: regard.prefix(draw(st.integers(0, 12))),
        "padding": lambda: regard.padding(rng.integers(0, n_k + 1, batch) if batch else 1),
        "left": lambda: regard.padding(draw(st.integers(0, 9)), side="left"),
        "strided": lambda: regard.strided(draw(st.integers(1, 5))),
        "dilated": lambda: regard.dilated(draw(st.integers(0, 5)), draw(st.integers(1, 5))),
        "global": lambda: regard.global_tokens(draw(st.integers(0, 4))),
        "rule": lambda: regard.mask(mixed_rule),
        "array": lambda: rng.random((draw(st.sampled_from([1, h])), n_q, draw(st.sampled_from([1, n_k])))) < 0.5,
    }
    kinds = [pick(sorted(parts)) for _ in range(pick([1, 2, 3]))]
    mask = regard.causal() if pick([False, True]) else regard.window(None, None)
    for kind in kinds:
        part = parts[kind]()
        if pick([False, True]) and kind != "array":
            part = ~part
        mask = mask & part if pick([False, True]) else mask | part
    return mask


@st.composite
def calls(draw: Any, structures: int | None = None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Any call; with `structures`, dtype, rules and wishes are one of so many combinations."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    random = None if structures is None else Random(draw(st.integers(0, structures - 1)))

    def pick(options: list[Any]) -> Any:
        return draw(st.sampled_from(options)) if random is None else random.choice(options)

    dtype = pick(DTYPES)
    lead = draw(st.sampled_from([(), (1,), (2,), (2, 2), (0,)]))
    h_kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    h = h_kv * group
    n_q, n_k = draw(LENGTHS), draw(LENGTHS)
    d, d_v = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    size = draw(st.sampled_from([0.1, 1.0, 1.0, 4.0]))
    q = (size * rng.standard_normal((*lead, h, n_q, d))).astype(dtype)
    k = rng.standard_normal((*draw(st.sampled_from([lead, ()])), h_kv, n_k, d)).astype(dtype)
    v = rng.standard_normal((*k.shape[:-1], d_v)).astype(dtype)
    wish: dict[str, Any] = {}
    if pick([False, True]):
        wish["mask"] = draw(masks(pick, lead, h, n_q, n_k, rng))
    if pick([False, True]):
        wish["causal"] = True
    if pick([False, True]):
        table = regard.table(rng.standard_normal((h, 9)))
        rules = [
            regard.softcap(2.0),
            recency,
            curved,
            hiding,
            tabled(table),
            regard.alibi(regard.table(table.array[:, 0])),
        ]
        # What hides comes last: a rule may well make something else of −∞.
        chosen = [rules[pick(list(range(len(rules))))] for _ in range(pick([0, 1, 2]))]
        wish["score"] = sorted(chosen, key=lambda rule: rule is hiding)
    if pick([False, True]):
        shape = draw(st.sampled_from([(n_k,), (n_q, 1), (h, 1, n_k), (1, n_q, n_k)]))
        bias = rng.standard_normal(shape)
        wish["bias"] = np.where(rng.random(shape) < 0.2, -np.inf, bias) if draw(st.booleans()) else bias
    if pick([False, True]):
        wish["sink"] = rng.standard_normal(h)
    if pick([False, True]):
        wish |= {"dropout": pick([0.0, 0.1, 0.5, 0.9]), "seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.booleans()) and dtype in (np.float32, np.float64):
        # Not in 16 bits. Of one query, the rounding of the tangent of Q M may exceed twice the naive error, where the
        # roundings of S and P happen to cancel it: one call of some 1,000, by 0.5 %.
        shape = draw(st.sampled_from([(d, d), (h, d, d)]))
        size = max(d, 1) ** -0.5  # so that Q M is as large as Q
        wish["metric"] = strided(draw, (size * rng.standard_normal(shape)).astype(dtype))
    if draw(st.booleans()):
        wish["scale"] = draw(st.sampled_from([0.0, -0.5, 1.0]))
    if draw(st.booleans()):
        wish["offset"] = draw(st.one_of(st.integers(-20, 300), st.just(rng.integers(-9, 9, lead))))
    if draw(st.booleans()):
        wish["origin"] = (0, 0, draw(st.integers(0, 300)))
    if pick([False, True]) and wish.get("mask") is not None and n_k:
        hidden = draw(st.integers(0, n_k - 1))
        wish["mask"] = wish["mask"] & (np.arange(n_k) != hidden)
        k[..., hidden, :] = np.nan
        v[..., hidden, :] = draw(st.sampled_from([np.nan, np.inf]))
    if draw(st.booleans()) and n_k:
        v[..., draw(st.integers(0, n_k - 1)), :] = np.nan  # often visible to some rows only
    arrays = [strided(draw, x) for x in (q, k, v)]
    if draw(st.booleans()):
        arrays = [np.ascontiguousarray(x.swapaxes(-2, -3)) for x in arrays]
        wish["layout"] = "bnhd"
    return (*arrays, wish)


def check_forward(engine: str, p: Problem, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """out, lse and entropy; and what a row that sees nothing gives."""
    frame = Layout.of(q, options.get("layout", "bhnd"))
    out, seen = regard.attention(q, k, v, **options, observe=["lse", "entropy"], engine=engine)
    assert_outputs(p, Outputs(frame.to_bhnd(out), seen.lse, seen.entropy), any_scores=True)
    with np.errstate(all="ignore"):
        alone = specification.terms(p).visible.any(axis=-1).reshape(p.shape(p.n_q))
    assert (frame.to_bhnd(out)[~alone] == 0).all()
    assert (seen.entropy[~alone] == 0).all()


def check_statistics(engine: str, p: Problem, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """Sums over keys, queries and diagonals, maps, and the largest weights; scores may be large, so that a weight is
    known to eps / 2 of them alone.
    """
    per_head = Layout.of(q, options.get("layout", "bhnd")).per_head
    maps = [regard.pooled(3, 4), regard.pooled(3, 4, "max")]
    observe = ["visible", "received", "group_received", "profile", "max", "argmax", regard.top(2), *maps]
    _, seen = regard.attention(q, k, v, **options, observe=observe, engine=engine)
    exact, plain = specification.statistics(p, judge(p)), specification.statistics(p, p.compute.type)
    P, naive = specification.weights(p, judge(p)), specification.weights(p, p.compute.type)
    with np.errstate(all="ignore"):
        f = specification.terms(p)
        a, b = (np.nan_to_num(np.abs(x), posinf=0) for x in (f.q, f.k))
        S = np.where(f.visible, np.abs(f.S), 0) + abs(p.scale) * specification.einsum("bhia,bhja->bhij", a, b)
        lse = np.nan_to_num(np.abs(f.lse), posinf=0, neginf=0)
    share = 4 + (S + lse[..., None]).reshape(P.shape) / 8  # of a weight: the size of what is lost
    sizes = P * share
    np.testing.assert_array_equal(seen.visible, per_head(exact["visible"]))
    by_group = (*p.lead, p.kv_heads, p.group, p.n_k)
    for name, size in (
        ("max", sizes.max(-1, initial=0)),
        ("received", sizes.sum(-2)),
        ("group_received", sizes.sum(-2).reshape(by_group).sum(-2)),
        ("profile", None),
    ):
        got = seen.profile.values if name == "profile" else seen[name]
        bound = exact[name] * share.max(initial=0) if size is None else size
        assert_within(name, got, per_head(exact[name]), per_head(plain[name]), per_head(bound), p.compute)
    for s in maps:
        parts = [per_head(specification.pooled(x, *s.of)) for x in (P, naive, sizes)]
        assert_within(repr(s), seen[s], *parts, p.compute)
    top = seen[regard.top(2)]
    np.testing.assert_array_equal(top.indices[..., 0], seen.argmax)
    sane = ~np.isnan(seen.max)
    apart = 8 * np.finfo(p.compute).eps * per_head(share.max(-1, initial=0)) * seen.max
    assert (np.abs(top.values[..., 0] - seen.max) <= apart)[sane].all()
    assert (top.values[..., 0] >= top.values[..., 1])[sane].all()


def check_gradients(engine: str, p: Problem, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    frame = Layout.of(q, options.get("layout", "bhnd"))
    rng = np.random.default_rng(0)
    dout = rng.standard_normal(frame.out_shape(p)).astype(q.dtype)
    dlse, dentropy = rng.standard_normal((2, *frame.per_head_shape(p.shape(p.n_q))))
    g = regard.attention_vjp(q, k, v, dout, dlse=dlse, dentropy=dentropy, **options, engine=engine)
    assert_gradients(p, to_bhnd(frame, Outputs(dout, dlse, dentropy)), turned(frame, g), any_scores=True)


def check_second(engine: str, p: Problem, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """The tangents of the gradients and those of the outputs, along everything that may vary."""
    frame = Layout.of(q, options.get("layout", "bhnd"))
    rng = np.random.default_rng(1)

    def like(x: Any) -> Any:
        return None if x is None else rng.standard_normal(x.shape).astype(x.dtype)

    def cotangents() -> Outputs:
        dlse, dentropy = rng.standard_normal((2, *frame.per_head_shape(p.shape(p.n_q))))
        return Outputs(rng.standard_normal(frame.out_shape(p)).astype(q.dtype), dlse, dentropy)

    tables = {x: like(x) for x in p.rules.tables}
    t = Differential(like(q), like(k), like(v), like(p.bias), like(p.sink), tables, like(p.metric))
    ct, moving = cotangents(), cotangents()
    got, tangent = regard.attention_vjp_jvp(
        q, k, v, ct.out, t, dlse=ct.lse, dentropy=ct.entropy, cotangent_tangents=moving, **options, engine=engine
    )
    t, got = (turned(frame, x) for x in (t, got))
    assert_second(p, t, to_bhnd(frame, ct), to_bhnd(frame, moving), got, any_scores=True)
    assert_tangents(p, t, to_bhnd(frame, tangent))


def check(engine: str, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    note(f"{q.dtype} query {q.shape}, key {k.shape}, value {v.shape}, {options}")
    p = problem_from(q, k, v, **options)
    for part in (check_forward, check_statistics, check_gradients, check_second):
        part(engine, p, q, k, v, options)


@EACH
@given(calls(STRUCTURES))
def test_any_call_on_compiled_kernels(call: tuple[Any, Any, Any, dict[str, Any]]) -> None:
    check("cpu", *call)


@EACH
@given(calls())
def test_any_call_agrees_with_the_specification(call: tuple[Any, Any, Any, dict[str, Any]]) -> None:
    check("tiled", *call)
