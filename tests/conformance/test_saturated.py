"""Gradients of rows that saturate, in 16 bits: about as exact as float32 arithmetic with results rounded once.

There dS = P (dP − δ) cancels, so δ = Σ dout · out needs more digits than an output in 16 bits has.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.core.problem import Differential, Outputs, Problem
from regard.engines import engines
from regard.engines.cpu.target.instructions import chosen
from regard.ops.normalization import problem_from
from regard.reference import specification
from support import assert_rows_near, assert_saturated, eps

ARRAY = np.ndarray[Any, np.dtype[Any]]
AMPLITUDES = (1, 2, 3, 4)
DTYPES = (np.float16, ml_dtypes.bfloat16)


def saturated(amplitude: float, dtype: Any) -> tuple[Problem, ARRAY]:
    """A causal call whose scores have this standard deviation squared, and its dout."""
    rng = np.random.default_rng(0)
    q, k = (amplitude * rng.standard_normal((2, 2, 512, 64))).astype(dtype)
    v, dout = rng.standard_normal((2, 2, 512, 64)).astype(dtype)
    return problem_from(q, k, v, causal=True), dout


def factors(engine: str, dtype: Any) -> tuple[float, float]:
    """The bound over float32 arithmetic: of the total, and at the 99th percentile of rows.

    Pairs of bfloat16 round the gradient of scores, and no output can mend that.
    """
    pairs = engine == "cpu" and dtype is ml_dtypes.bfloat16 and (chosen().bf16_dot or chosen().amx)
    return (1.6, 4.0) if pairs else (1.1, 2.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("engine", ["tiled", "cpu", "device"])
@pytest.mark.parametrize("amplitude", AMPLITUDES)
def test_gradients_of_saturated_rows(amplitude: float, engine: str, dtype: Any) -> None:
    p, dout = saturated(amplitude, dtype)
    found = regard.attention_vjp(p.query, p.key, p.value, dout, causal=True, engine=engine)
    assert_saturated(p, Outputs(dout, None, None), found, *factors(engine, dtype))


@pytest.mark.parametrize("given", [False, True], ids=["alone", "of known outputs"])
@pytest.mark.parametrize("engine", ["tiled", "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("amplitude", AMPLITUDES)
def test_tangents_of_saturated_rows(amplitude: float, dtype: Any, engine: str, given: bool) -> None:
    """Σ P S˙ V − lse˙ · O cancels as gradients do, so engines take O with its remainder.

    Pairs of bfloat16 round P S˙, whose sum is that of the rounded terms; so keys with all the weight cancel.
    """
    bound = factors(engine, dtype)
    if bound != (1.1, 2.5):
        bound = 2.0, 25.0
    p, _ = saturated(amplitude, dtype)
    rng = np.random.default_rng(1)
    t = Differential(*(amplitude * rng.standard_normal((2, 2, 512, 64))).astype(dtype), None)
    known = {"outputs": engines()[engine].forward(p, None, p.new_low())[0]} if given else {}
    found = regard.attention_jvp(p.query, p.key, p.value, t.query, t.key, causal=True, engine=engine, **known)[1]
    exact, plain = specification.jvp(p, t)[1].out, specification.jvp(p, t, np.float32)[1].out
    assert_rows_near("out tangent", found.out, exact, plain.astype(dtype), *bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("engine", ["tiled", "cpu"])
def test_a_lone_key_has_no_gradient_under_dropout(engine: str, dtype: Any) -> None:
    """The output is 1 / (1 − p) of a value, as exact as two numbers of the dtype are."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 128, 64)).astype(dtype)
    alone = {"mask": regard.window(0, 0), "scale": 1.0, "dropout": 0.1, "seed": 3, "engine": engine}
    g = regard.attention_vjp(q, k, v, dout, **alone)
    assert g.query is not None
    size = magnitude(v, dout) * np.abs(k.astype(np.float64)) / 0.9
    assert (np.abs(g.query.astype(np.float64)) <= size * two_numbers(dtype)).all()


@pytest.mark.parametrize("rows", [4, 300], ids=["decode", "prefill"])
@pytest.mark.parametrize("sink", [None, 0.5], ids=["", "sink"])
def test_scores_have_no_gradient_where_values_are_alike(rows: int, sink: float | None) -> None:
    check_values_alike(rows, sink)


def check_values_alike(rows: int, sink: float | None) -> None:
    """Rounded weights have to sum to what the output is divided by, or δ is off by as much as they are.

    Σ dS of a row, the gradient of its bias, is minus that error: 0 without a sink, else −p_sink δ.
    """
    dtype = ml_dtypes.bfloat16
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, rows, 64)).astype(dtype)
    k, bias = rng.standard_normal((2, 400, 64)).astype(dtype), np.zeros((2, rows, 1), np.float32)
    v = np.broadcast_to(rng.standard_normal((2, 1, 64)), k.shape).astype(dtype)
    sinks = {} if sink is None else {"sink": np.full(2, sink, np.float32)}
    g = regard.attention_vjp(q, k, v, dout, bias=bias, **sinks, engine="cpu")
    assert g.bias is not None
    right: Any = 0.0
    if sink is not None:
        lse = regard.attention(q, k, v, bias=bias, **sinks, observe=["lse"], engine="tiled")[1].lse
        p_sink = np.exp(sink - lse)
        delta = (dout.astype(np.float64) * v[:, :1]).sum(-1) * (1 - p_sink)
        right = (p_sink * delta)[..., None]
    assert (np.abs(g.bias - right) <= magnitude(v[:, :1], dout) * two_numbers(dtype)).all()


def magnitude(v: ARRAY, dout: ARRAY) -> ARRAY:
    """Σ |v| |dout| over features, with an axis of length 1 for these."""
    size: ARRAY = (np.abs(v.astype(np.float64)) * np.abs(dout.astype(np.float64))).sum(-1, keepdims=True)
    return size


def two_numbers(dtype: Any) -> float:
    """The rounding of an output that is kept as two numbers, and of float32."""
    return float((eps(np.dtype(dtype)) / 2) ** 2 + 2 * eps(np.dtype(np.float32)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("engine", ["tiled", "cpu", "device", "spec"])
def test_entropy_has_gradients_beside_the_least_bias(engine: str, dtype: Any) -> None:
    """Of a pair with the weight 0, P · log P · dH is 0: log P · dH alone may be infinite."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 40, 8)).astype(dtype)
    hidden = abs(np.arange(40)[:, None] - np.arange(40)) > 8
    given = {"dentropy": 3 * rng.standard_normal((2, 40)).astype(dtype), "engine": engine}
    for low in (1e-3, 1):
        bias = np.where(hidden, low * np.finfo(dtype).min, 0).astype(dtype)
        found = regard.attention_vjp(q, k, v, dout, bias=bias, **given)
        expected = regard.attention_vjp(q, k, v, dout, bias=np.where(hidden, -np.inf, bias), **given)
        for name in ("query", "key", "value", "bias"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
