"""`regard.jax.dot_product_attention` beside `jax.nn.dot_product_attention`, and inside Flax and Equinox."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp

import jax
import regard.jax

Options = dict[str, Any]
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(RNG.standard_normal(shape).astype(dtype))


def int32(*x: int) -> Any:
    return jnp.asarray(np.array(x, np.int32))


WISHES: dict[str, Options] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 2},
    "left and right window": {"local_window_size": (3, 0), "is_causal": True},
    "lengths": {"query_seq_lengths": int32(3, 7), "key_value_seq_lengths": int32(9, 2)},
    "a query that sees nothing": {"key_value_seq_lengths": int32(0, 2)},
    "mask": {"mask": jnp.asarray(RNG.random((2, 1, 7, 9)) < 0.3)},
    "mask for each head": {"mask": jnp.asarray(RNG.random((1, 4, 1, 9)) < 0.5), "scale": 0.2},
    "mask of two dimensions": {"mask": jnp.asarray(RNG.random((7, 9)) < 0.9)},
    "bias": {"bias": normal(1, 4, 7, 9)},
    "traced scale": {"scale": jnp.asarray(0.3)},
    "everything": {
        "bias": normal(2, 1, 1, 9), "mask": jnp.asarray(RNG.random((2, 4, 7, 9)) < 0.8), "is_causal": True,
        "local_window_size": (4, 4), "query_seq_lengths": int32(5, 6), "key_value_seq_lengths": int32(8, 9),
    },
}  # fmt: skip


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wish", WISHES)
def test_beside_jax_nn(wish: str) -> None:
    q, k, v = normal(2, 7, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    arrays = {n: x for n, x in WISHES[wish].items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in WISHES[wish].items() if n not in arrays}

    def results(function: Callable[..., Any]) -> Any:
        def call(q: Any, k: Any, v: Any, arrays: Options) -> Any:
            return function(q, k, v, **arrays, **static, return_residual=True)

        def loss(q: Any, k: Any, v: Any, floats: Options) -> Any:
            return (call(q, k, v, arrays | floats)[0] ** 2).sum()

        floats = {n: x for n, x in arrays.items() if x.dtype == np.float32}
        return jax.jit(call)(q, k, v, arrays), jax.jit(jax.grad(loss, range(4)))(q, k, v, floats)

    close(results(regard.jax.dot_product_attention), results(jax.nn.dot_product_attention))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_three_dimensions_and_16_bits(dtype: Any) -> None:
    q, k, v = (normal(n, 2, 8, dtype=dtype) for n in (5, 6, 6))
    for function in (lambda f: f(q, k, v), lambda f: f(q, k, v, is_causal=True, return_residual=True)):
        close(function(regard.jax.dot_product_attention), function(jax.nn.dot_product_attention), 2e-2)


def test_the_signature_begins_as_that_of_jax_nn() -> None:
    ours = list(inspect.signature(regard.jax.dot_product_attention).parameters.values())
    theirs = list(inspect.signature(jax.nn.dot_product_attention).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours][: len(theirs)] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize(
    "change", [{"mask": jnp.ones((1, 1, 7, 9))}, {"v": normal(2, 8, 2, 8)}, {"q": normal(2, 7, 3, 8)},
               {"k": normal(2, 9, 2, 8, dtype=np.float16)}, {"query_seq_lengths": int32(1)},
               {"implementation": "triton"},
               {"key_value_seq_lengths": jnp.ones(2)}, {"q": normal(7, 4, 8)}], ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_what_jax_nn_refuses_is_refused(change: Options) -> None:
    options = {"q": normal(2, 7, 4, 8), "k": normal(2, 9, 2, 8), "v": normal(2, 9, 2, 8)} | change
    arrays = [options.pop(n) for n in "qkv"]
    for function in (jax.nn.dot_product_attention, regard.jax.dot_product_attention):
        with pytest.raises(ValueError, match=r"."):
            function(*arrays, **options)


def test_as_the_attention_of_flax() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    x = normal(2, 7, 16)
    mask = nnx.make_causal_mask(x[..., 0])

    def module(**options: Any) -> Any:
        return nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), decode=False, **options)

    ours, theirs = module(attention_fn=regard.jax.dot_product_attention), module()

    def results(m: Any) -> Any:
        def loss(m: Any, x: Any) -> Any:
            return (m(x, mask=mask) ** 2).sum()

        return m(x), m(x, is_causal=True), jax.tree.leaves(nnx.jit(nnx.grad(loss, argnums=(0, 1)))(m, x))

    close(results(ours), results(theirs), 1e-4)

    dropping = module(
        attention_fn=regard.jax.dot_product_attention, dropout_rate=0.5, broadcast_dropout=False, deterministic=False
    )
    first, second = (dropping(x, rngs=nnx.Rngs(n)) for n in range(2))
    assert not np.allclose(first, second)
    close(dropping(x, rngs=nnx.Rngs(0)), first)
    with pytest.raises(ValueError, match="give broadcast_dropout=False"):
        module(attention_fn=regard.jax.dot_product_attention, dropout_rate=0.5, deterministic=False)(
            x, rngs=nnx.Rngs(0)
        )
    with pytest.raises(ValueError, match="give sow_weights=False"):
        ours(x, sow_weights=True)


def test_in_equinox() -> None:
    """A module that trains, with a table in its score; `eqx.filter_jit` and `eqx.filter_grad` see arrays alone."""
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")

    class SelfAttention(eqx.Module):
        qkv: Any
        slopes: Any

        def __init__(self, key: Any):
            self.qkv = eqx.nn.Linear(8, 24, use_bias=False, key=key)
            self.slopes = jnp.array([0.5, 0.1])

        def __call__(self, x: Any) -> Any:
            q, k, v = jax.vmap(self.qkv)(x).reshape(-1, 3, 2, 4).transpose(1, 2, 0, 3)
            out = regard.attention(q, k, v, causal=True, score=regard.alibi(self.slopes))
            return out.swapaxes(0, 1).reshape(x.shape)

    model, x = SelfAttention(jax.random.key(0)), normal(5, 8)

    @eqx.filter_jit
    def gradient(model: Any, x: Any) -> Any:
        return eqx.filter_grad(lambda model: (jax.vmap(model)(x[None]) ** 2).sum())(model)

    g = gradient(model, x)
    step = 1e-2
    up, down = (eqx.tree_at(lambda m: m.slopes, model, model.slopes + s * jnp.array([1.0, 0.0])) for s in (step, -step))
    numeric = ((up(x) ** 2).sum() - (down(x) ** 2).sum()) / (2 * step)
    np.testing.assert_allclose(g.slopes[0], numeric, rtol=1e-2)
    assert np.abs(g.qkv.weight).max() > 1e-3
