"""A metric in the scores: its product, its derivatives, and what is bound to it."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from cases import case
from regard.interpret.capture.layers import Layer
from regard.ops import metric as metrics
from regard.ops.normalization import problem_from
from regard.reference import specification
from support import assert_within

RNG = np.random.default_rng(0)
TILED: dict[str, Any] = {"engine": "tiled"}


def normal(*shape: int, dtype: Any = np.float64) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["metric", "one metric for all"])
def test_the_product_is_within_the_bound(name: str, dtype: Any) -> None:
    q, k, v, options = case(name).inputs(dtype)
    p = problem_from(q, k, v, **options)
    assert p.factors is not None
    assert p.query.dtype == dtype
    x, M = (specification.flatten(p, p.factors[0], 3, np.longdouble), p.factors[1].astype(np.longdouble))
    exact = specification.projected(x, M)
    short = specification.projected(x.astype(p.compute), M.astype(p.compute)).astype(dtype)
    size = specification.projected(np.abs(x), np.abs(M))
    got = specification.flatten(p, p.query, 3, np.longdouble)
    assert_within("Q M", got, exact, short, size, p.dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("d", [1, 5, 64, 130])
@pytest.mark.parametrize("heads", [False, True])
def test_a_row_of_the_product_has_the_same_bits_alone_and_among_others(heads: bool, d: int, dtype: Any) -> None:
    q, M = normal(3, 2, 67, d, dtype=dtype), normal(*(2,) * heads, d, d)
    whole = metrics.product(q, M)
    for rows in (slice(0, 1), slice(3, 4), slice(66, 67), slice(5, 37), slice(1, 60, 7)):
        assert metrics.product(q[..., rows, :], M).tobytes() == whole[..., rows, :].tobytes()
        assert metrics.product(q[1, :, rows], M).tobytes() == whole[1, :, rows].tobytes()
    across = np.ascontiguousarray(q.swapaxes(-2, -3)).swapaxes(-2, -3)  # heads within tokens
    assert metrics.product(across, M).tobytes() == whole.tobytes()
    assert metrics.product(q, np.asfortranarray(M)).tobytes() == whole.tobytes()


def test_it_is_attention_of_the_product() -> None:
    """In outputs, weights, statistics, steps, and in any tile of the weights."""
    q, k, v, M = normal(2, 4, 9, 6), normal(2, 2, 11, 6), normal(2, 2, 11, 3), normal(4, 6, 6)
    product = np.einsum("bhia,hac->bhic", q, M)
    options: dict[str, Any] = {"causal": True, "score": regard.softcap(3.0)} | TILED
    observe = ["lse", "entropy", "received", regard.top(2), regard.renyi(2)]
    out, P, seen = regard.attention(q, k, v, metric=M, observe=observe, return_weights=True, **options)
    expected = regard.attention(product, k, v, observe=observe, return_weights=True, **options)
    np.testing.assert_allclose(out, expected[0], atol=1e-13)
    np.testing.assert_allclose(P, expected[1], atol=1e-13)
    for name in ("lse", "entropy", "received"):
        np.testing.assert_allclose(seen[name], expected[2][name], atol=1e-12)
    tile = regard.weights(q, k, metric=M, lse=seen.lse, rows=slice(2, 5), **options)
    np.testing.assert_array_equal(tile, P[:, :, 2:5])
    with pytest.raises(ValueError, match="lse does not belong to this query, key and options"):
        regard.weights(q, k, lse=seen.lse, **options)
    joined = regard.multihead_attention(
        q.swapaxes(1, 2).reshape(2, 9, 24), k[:, 0], k[:, 0], 4, num_kv_heads=1, metric=M
    )
    single = regard.attention(q, k[:, :1], k[:, :1], metric=M)
    np.testing.assert_allclose(joined, single.swapaxes(1, 2).reshape(2, 9, 24), atol=1e-14)


def test_matrices_take_one_metric_in_either_shape() -> None:
    x, M = normal(5, 4), normal(4, 4)
    expected = regard.attention(x @ M, x, x, **TILED)
    for given in (M, M[None]):
        np.testing.assert_allclose(regard.attention(x, x, x, metric=given, **TILED), expected, atol=1e-14)
        assert regard.attention_vjp(x, x, x, x, metric=given, **TILED).metric.shape == given.shape
    np.testing.assert_array_equal(
        regard.attention(x, x, x, metric=np.eye(4), **TILED), regard.attention(x, x, x, **TILED)
    )


def test_steps_show_the_product_and_its_gradients() -> None:
    q, k, v, dout = normal(4, 5, 6), normal(2, 7, 6), normal(2, 7, 3), normal(4, 5, 3)
    for M in (normal(4, 6, 6), normal(6, 6)):
        found = regard.steps(q, k, v, metric=M, dout=dout, causal=True)
        out, g = regard.attention(q, k, v, metric=M, causal=True), None
        g = regard.attention_vjp(q, k, v, dout, metric=M, causal=True)
        np.testing.assert_allclose(found["output"].value, out, atol=1e-13)
        for name in ("query", "key", "value", "metric"):
            np.testing.assert_allclose(found[f"{name} gradient"].value, getattr(g, name), atol=1e-12)
        for name, symbols in {
            "queries times metric": ("Q", "M"), "raw scores": ("Q'", "keys per head"), "metric gradient": ("Q", "dQ'"),
            "query gradient": ("dQ'", "M"), "gradient of queries times metric": ("dR", "keys per head"),
            "key gradient per head": ("dR", "Q'"),
        }.items():  # fmt: skip
            step = found[name]
            value = np.einsum(step.einsum, *(found[symbol].value for symbol in symbols))
            np.testing.assert_allclose(step.value, value, atol=1e-12, err_msg=name)
    assert found["queries times metric"].formula == "Q'[h,i,a] = Q[h,i,c] M[c,a]"
    assert found["metric gradient"].formula == "dM[c,a] = Q[h,i,c] dQ'[h,i,a]"


def test_outputs_that_are_known_serve_derivatives() -> None:
    q, k, v, M = normal(2, 9, 6), normal(2, 9, 6), normal(2, 9, 3), normal(6, 6)
    known = regard.attention(q, k, v, metric=M, observe=["lse"], **TILED)
    dout = normal(2, 9, 3)
    with_known = regard.attention_vjp(q, k, v, dout, metric=M, outputs=known, **TILED)
    fresh = regard.attention_vjp(q, k, v, dout, metric=M, **TILED)
    np.testing.assert_array_equal(with_known.metric, fresh.metric)
    with pytest.raises(ValueError, match=r"outputs\.lse does not belong"):
        regard.attention_vjp(q, k, v, dout, outputs=known, **TILED)


def test_a_query_that_sees_nothing_does_not_reach_the_metric() -> None:
    q, k, v, M = normal(2, 5, 6), normal(2, 5, 6), normal(2, 5, 3), normal(2, 6, 6)
    sees = np.ones((5, 5), bool)
    sees[2] = False
    clean = regard.attention_vjp(q, k, v, v, metric=M, mask=sees, **TILED)
    q[:, 2] = np.nan
    assert regard.attention_vjp(q, k, v, v, metric=M, mask=sees, **TILED).metric.tobytes() == clean.metric.tobytes()


def test_a_layer_keeps_the_product() -> None:
    q, k, M = normal(2, 5, 6), normal(2, 7, 6), normal(2, 6, 6)
    layer = Layer.of("first", q, k, metric=M, causal=True)
    P = regard.weights(q, k, metric=M, causal=True)
    np.testing.assert_allclose(layer.weights(1), P[1], atol=1e-14)


def test_a_plan_reads_no_metric_and_refuses_one_that_does_not_fit() -> None:
    shapes = (8, 10**9, 64), (8, 16, 64), (8, 16, 64)  # of queries whose product would take 2 TB
    assert regard.plan(*shapes, metric=np.eye(64)) == regard.plan(*shapes)
    with pytest.raises(ValueError, match="metric must have shape"):
        regard.plan(*[(8, 100, 64)] * 3, metric=np.eye(8))
