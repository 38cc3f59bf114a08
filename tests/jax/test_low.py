"""Gradients of saturated rows in 16 bits, by every way in which JAX asks for them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax
import regard
from regard.core.problem import Differential, Outputs
from regard.ops.normalization import problem_from
from support import assert_saturated

N, D = 256, 32
FACTORS = 1.6, 4.0  # those of bfloat16 by pairs, and of less
RNG = np.random.default_rng(0)
Q, K = 3 * RNG.standard_normal((2, 2, N, D))
V, DOUT = RNG.standard_normal((2, 2, N, D))


def by_vjp(*given: Any, **options: Any) -> Any:
    *inputs, dout = given
    return jax.vjp(lambda q, k, v: regard.attention(q, k, v, causal=True, **options), *inputs)[1](dout)


def in_layout(*given: Any) -> Any:
    turned = by_vjp(*(x.swapaxes(0, 1) for x in given), layout="bnhd")
    return [x.swapaxes(0, 1) for x in turned]


WAYS: dict[str, Callable[..., Any]] = {
    "at once": by_vjp,
    "layout": in_layout,
    "jit": jax.jit(by_vjp),
    "vmap": lambda *x: [g[:, 0] for g in jax.vmap(by_vjp)(*(a[:, None] for a in x))],
    "plain JAX": jax.jit(lambda *x: by_vjp(*x, engine="xla")),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_saturated_rows(way: str, dtype: Any) -> None:
    given = [jnp.asarray(x, dtype) for x in (Q, K, V, DOUT)]
    q, k, v, dout = map(np.asarray, given)
    found = [np.asarray(x) for x in WAYS[way](*given)]
    assert_saturated(problem_from(q, k, v, causal=True), Outputs(dout, None, None), Differential(*found), *FACTORS)


def test_second_derivatives_take_low_as_a_constant() -> None:
    given = [jnp.asarray(x[:, :48], jnp.float16) for x in (Q, K, V, DOUT)]
    wide = [x.astype(jnp.float32) for x in given]

    def squares(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return sum((g.astype(jnp.float32) ** 2).sum() for g in by_vjp(q, k, v, dout))

    for got, right in zip(*(jax.grad(squares, range(4))(*x) for x in (given, wide)), strict=True):
        assert float(jnp.linalg.norm(got - right) / jnp.linalg.norm(right)) < 0.02
