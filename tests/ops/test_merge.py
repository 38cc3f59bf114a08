"""Attention over parts of the keys, merged, is attention over all of them."""

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

Array = np.ndarray[Any, np.dtype[Any]]
Part = tuple[Array, Array]
N = 300
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "rules": {
        "mask": regard.window(40, 30) | regard.global_tokens(2),
        "score": [regard.softcap(2.0), regard.alibi(0.1)],
    },
    "dropout": {"dropout": 0.3, "seed": 5, "causal": True},
}


def inputs(dtype: Any = np.float64, seed: int = 0) -> tuple[Array, Array, Array]:
    q, k, v = np.random.default_rng(seed).standard_normal((3, 2, 4, N, 8))
    return q.astype(dtype), k[:, :2].astype(dtype), v[:, :2].astype(dtype)


def part(q: Array, k: Array, v: Array, first: int, last: int, **wishes: Any) -> Part:
    """Attention over the keys first, ..., last - 1 as a shard of all of them."""
    out, seen = regard.attention(
        q, k[..., first:last, :], v[..., first:last, :], offset=0, origin=(0, 0, first), observe=["lse"], **wishes
    )
    return out, seen.lse


def parts(q: Array, k: Array, v: Array, edges: list[int], **wishes: Any) -> list[Part]:
    return [part(q, k, v, first, last, **wishes) for first, last in pairwise(edges)]


def near(got: Part, whole: Part, dtype: Any = np.float64) -> None:
    """Within the rounding of the parts' outputs, of values that are below 8, and of exponentials of |lse| below 16."""
    eps, real = float(ml_dtypes.finfo(dtype).eps), np.float64 if dtype == np.float64 else np.float32
    assert got[0].dtype == whole[0].dtype == dtype
    assert got[1].dtype == whole[1].dtype == real
    np.testing.assert_allclose(got[0].astype(float), whole[0].astype(float), rtol=0, atol=8 * 8 * eps)
    np.testing.assert_allclose(got[1], whole[1], rtol=0, atol=8 * 16 * float(np.finfo(real).eps))


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("edges", [[0, N], [0, 100, N], [0, 1, 7, 7, 64, 200, 299, N]], ids=["one", "two", "many"])
def test_parts_make_the_whole(wishes: dict[str, Any], edges: list[int]) -> None:
    q, k, v = inputs()
    near(regard.merge(*parts(q, k, v, edges, **wishes)), part(q, k, v, 0, N, **wishes))


@pytest.mark.parametrize("dtype", on_cpu([np.float16, ml_dtypes.bfloat16, np.float32], np.float32))
def test_every_dtype(dtype: Any) -> None:
    q, k, v = inputs(dtype)
    near(regard.merge(*parts(q, k, v, [0, 50, 200, N], causal=True)), part(q, k, v, 0, N, causal=True), dtype)


def test_one_part_is_itself() -> None:
    q, k, v = inputs(np.float32)
    whole = part(q, k, v, 0, N, mask=regard.window(20) & ~regard.prefix(30))  # the first 30 queries see nothing
    assert np.isneginf(whole[1]).any()
    for got, given in zip(regard.merge(whole), whole, strict=True):
        assert got.tobytes() == given.tobytes()


def test_any_grouping() -> None:
    q, k, v = inputs()
    a, b, c, d = parts(q, k, v, [0, 10, 150, 151, N], causal=True)
    whole = regard.merge(a, b, c, d)
    near(regard.merge(regard.merge(a, b), regard.merge(c, d)), whole)
    near(regard.merge(d, b, a, c), whole)


def test_a_sink_counts_once() -> None:
    q, k, v = inputs()
    sink = np.array([-1.0, 0.5, 3.0, 6.0])
    whole = part(q, k, v, 0, N, causal=True, sink=sink)
    pieces = parts(q, k, v, [0, 100, 250, N], causal=True)
    near(regard.merge(*pieces, sink=sink), whole)
    near(regard.merge(regard.merge(*pieces[:2]), pieces[2], sink=sink), whole)
    near(regard.merge(part(q, k, v, 0, N, causal=True), sink=sink), whole)
    near(regard.merge(*pieces, sink=np.array(0.5)), part(q, k, v, 0, N, causal=True, sink=np.array(0.5)))
    twice = regard.merge(*parts(q, k, v, [0, 100, 250, N], causal=True, sink=sink))
    assert np.abs(twice[1] - whole[1]).max() > 0.1


def test_gradients_go_through_the_parts() -> None:
    """With w = exp(lse_part − lse): dout_part = w · dout, and dlse_part = w · (dout · (out_part − out) + dlse)."""
    q, k, v = inputs()
    rng, edges = np.random.default_rng(1), [0, 100, 101, N]
    sink = np.array([-1.0, 0.5, 3.0, 6.0])
    dout, dlse = rng.standard_normal(q.shape), rng.standard_normal(q.shape[:-1])
    whole = regard.attention_vjp(q, k, v, dout, dlse=dlse, sink=sink, causal=True, offset=0)
    out, lse = regard.merge(*parts(q, k, v, edges, causal=True), sink=sink)
    dq, dk, dv = np.zeros_like(q), [], []
    for first, last in pairwise(edges):
        shard = {"offset": 0, "origin": (0, 0, first), "causal": True}
        keys, values = k[..., first:last, :], v[..., first:last, :]
        mine, seen = regard.attention(q, keys, values, observe=["lse"], **shard)
        w = np.exp(seen.lse - lse)
        g = regard.attention_vjp(
            q, keys, values, w[..., None] * dout,
            dlse=w * ((dout * (mine - out)).sum(-1) + dlse), outputs=regard.Outputs(mine, seen.lse, None), **shard,
        )  # fmt: skip
        dq += g.query
        dk.append(g.key)
        dv.append(g.value)
    for got, expected in (
        (dq, whole.query),
        (np.concatenate(dk, -2), whole.key),
        (np.concatenate(dv, -2), whole.value),
    ):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    d_sink = (np.exp(sink[:, None] - lse) * (dlse - (dout * out).sum(-1))).sum(axis=(0, 2))
    np.testing.assert_allclose(d_sink, whole.sink, rtol=1e-12)


def test_matrices() -> None:
    q, k, v = (x[0, 0] for x in inputs())
    near(regard.merge(*parts(q, k, v, [0, 100, N])), part(q, k, v, 0, N))
    sink = np.array([2.0])
    near(regard.merge(*parts(q, k, v, [0, 100, N]), sink=sink), part(q, k, v, 0, N, sink=sink))


def test_parts_that_see_nothing_weigh_nothing() -> None:
    q, k, v = inputs(np.float32)
    live = part(q, k, v, 0, 100)
    dead = part(q, k, v, 0, 0)
    assert np.isneginf(dead[1]).all()
    for merged in (regard.merge(live, dead), regard.merge(dead, live, dead)):
        assert merged[0].tobytes() == live[0].tobytes()
        assert merged[1].tobytes() == live[1].tobytes()

    out, lse = regard.merge(dead, dead)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    out, lse = regard.merge(dead, dead, sink=np.array([1.0, 2.0, 3.0, 4.0]))
    assert (out == 0).all()
    np.testing.assert_array_equal(lse, np.broadcast_to([[[1.0], [2.0], [3.0], [4.0]]], lse.shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_a_dead_part_holds_has_no_influence(bad: float) -> None:
    q, k, v = inputs()
    a, b = parts(q, k, v, [0, 100, N], causal=True)  # the queries before 100 see nothing of b
    expected = regard.merge(a, b)
    b[0][:, :, :100] = bad
    for got, whole in zip(regard.merge(a, b), expected, strict=True):
        assert got.tobytes() == whole.tobytes()


def test_a_visible_nan_stays_visible() -> None:
    q, k, v = inputs()
    a, b = parts(q, k, v, [0, 100, N])
    b[0][0, 1, 5], b[1][0, 2, 7] = np.nan, np.nan
    out, lse = regard.merge(a, b)
    wild = np.zeros(lse.shape, bool)
    wild[0, 2, 7] = True
    np.testing.assert_array_equal(np.isnan(lse), wild)
    wild[0, 1, 5] = True
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(wild[..., None], out.shape))


def test_far_scores_do_not_overflow() -> None:
    q, k, v = inputs(np.float32)
    a, b = parts(300 * q, k, v, [0, 100, N])
    assert max(np.abs(a[1]).max(), np.abs(b[1]).max()) > 700  # exp of it is no float32
    out, lse = regard.merge(a, b)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(lse >= np.maximum(a[1], b[1]), True)


def test_the_parts_are_left_as_they_are() -> None:
    q, k, v = inputs()
    pieces = parts(q, k, v, [0, 100, N], causal=True)
    before = [(out.tobytes(), lse.tobytes()) for out, lse in pieces]
    regard.merge(*pieces, sink=np.zeros(4))
    assert [(out.tobytes(), lse.tobytes()) for out, lse in pieces] == before
