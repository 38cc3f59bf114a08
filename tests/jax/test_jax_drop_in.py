"""`regard.jax.dot_product_attention` beside `jax.nn.dot_product_attention`, and inside Flax and Equinox."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp
from jax.test_util import check_grads

import jax
import regard.jax
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

Options = dict[str, Any]
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(RNG.standard_normal(shape).astype(dtype))


def int32(*x: int) -> Any:
    return jnp.asarray(np.array(x, np.int32))


OPTIONS: dict[str, Options] = {
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
    "scale of each batch element": {"scale": normal(2, 1, 1, 1)},
    "scale of each group of heads": {"scale": normal(1, 2, 1, 1)},
    "scale of each pair": {"scale": normal(2, 2, 7, 9)},
    "scale in one dimension": {"scale": np.array([0.3], np.float32)},
    "integer bias": {"bias": jnp.arange(9).reshape(1, 1, 1, 9)},
    "boolean bias": {"bias": jnp.arange(9).reshape(1, 1, 1, 9) > 4},
    "negative lengths": {"query_seq_lengths": int32(-3, 7), "key_value_seq_lengths": int32(-1, 3)},
    "negative window": {"local_window_size": -1},
    "negative window on the left": {"local_window_size": (-1, 3)},
    "negative window on the right": {"local_window_size": (3, -1)},
    "window of a float": {"local_window_size": (1.5, 2)},
    "truth of an int": {"is_causal": 1},
    "everything": {
        "bias": normal(2, 1, 1, 9), "mask": jnp.asarray(RNG.random((2, 4, 7, 9)) < 0.8), "is_causal": True,
        "local_window_size": (4, 4), "query_seq_lengths": int32(5, 6), "key_value_seq_lengths": int32(8, 9),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state


def close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    """Differences are judged by the largest element, as rounding errors of a sum are."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        largest = max(1.0, float(np.abs(np.where(np.isfinite(y), y, 0).astype(np.float32)).max(initial=0)))
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("option", OPTIONS)
def test_beside_jax_nn(option: str) -> None:
    q, k, v = normal(2, 7, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    arrays = {n: x for n, x in OPTIONS[option].items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in OPTIONS[option].items() if n not in arrays}

    def results(function: Callable[..., Any]) -> Any:
        def call(q: Any, k: Any, v: Any, arrays: Options) -> Any:
            return function(q, k, v, **arrays, **static, return_residual=True)

        def loss(q: Any, k: Any, v: Any, floats: Options) -> Any:
            return (call(q, k, v, arrays | floats)[0] ** 2).sum()

        floats = {n: x for n, x in arrays.items() if x.dtype == np.float32}
        return jax.jit(call)(q, k, v, arrays), jax.jit(jax.grad(loss, range(4)))(q, k, v, floats)

    ours = results(regard.jax.dot_product_attention)
    with jax.numpy_rank_promotion("allow"):
        close(ours, results(jax.nn.dot_product_attention))


@pytest.mark.parametrize("concrete", ["negative lengths", "scale of each pair", "scale of each batch element"])
def test_values_that_are_there(concrete: str) -> None:
    """Where nothing is traced, too."""
    q, k, v = normal(2, 7, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    close(*(f(q, k, v, **OPTIONS[concrete]) for f in (regard.jax.dot_product_attention, jax.nn.dot_product_attention)))


def test_a_traced_window() -> None:
    q, k, v = normal(2, 7, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    results = [
        jax.jit(lambda left, f=f: f(q, k, v, local_window_size=(left, 1)))(2)
        for f in (regard.jax.dot_product_attention, jax.nn.dot_product_attention)
    ]
    close(*results)


def test_arguments_that_do_not_fit_are_named() -> None:
    q, k, v = normal(2, 7, 4, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    expected = "scale must be a number, or broadcast to (B, K, T, S) = (2, 2, 7, 9), got shape (4, 1, 1)"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        regard.jax.dot_product_attention(q, k, v, scale=normal(4, 1, 1))
    expected = "local_window_size must be an int or two numbers (left, right), got ([1, 2], 3)"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        regard.jax.dot_product_attention(q, k, v, local_window_size=([1, 2], 3))


@pytest.mark.parametrize("dtype", on_cpu([jnp.bfloat16, jnp.float16], jnp.bfloat16))
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

    for broadcast in ({}, {"broadcast_dropout": False}):
        dropping = module(
            attention_fn=regard.jax.dot_product_attention, dropout_rate=0.5, deterministic=False, **broadcast
        )
        first, second = (dropping(x, rngs=nnx.Rngs(n)) for n in range(2))
        assert not np.allclose(first, second)
        close(dropping(x, rngs=nnx.Rngs(0)), first)
    with pytest.raises(ValueError, match="give sow_weights=False"):
        ours(x, sow_weights=True)


def test_as_the_attention_of_linen_with_dropout() -> None:
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    x = normal(2, 7, 16)
    module = linen.MultiHeadDotProductAttention(
        4, attention_fn=regard.jax.dot_product_attention, dropout_rate=0.5, deterministic=False
    )
    parameters = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def out(seed: int) -> Any:
        return module.apply(parameters, x, rngs={"dropout": jax.random.key(seed)})

    close(out(0), out(0))
    assert not np.allclose(out(0), out(1))


def weights_with(q: Any, k: Any, **options: Any) -> Any:
    """What is left of the weights (B, T, N, S) after dropout: values are unit vectors."""
    B, S, K, _ = k.shape
    unit = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, K, S))
    return np.asarray(regard.jax.dot_product_attention(q, k, unit, **options))


def test_broadcast_dropout_drops_the_same_everywhere() -> None:
    """Flax's default: one pattern (T, S) for all batch elements and heads, beside every other option."""
    q, k = normal(3, 7, 6, 8), normal(3, 9, 2, 8)
    options: Options = {
        "bias": normal(3, 1, 1, 9), "mask": jnp.asarray(RNG.random((1, 6, 7, 9)) < 0.7), "scale": normal(3, 2, 1, 1),
        "key_value_seq_lengths": int32(4, 9, 7), "query_seq_lengths": int32(7, 2, 7), "local_window_size": (4, 2),
    }  # fmt: skip
    dropout: Options = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(3)}
    pattern = weights_with(q, k, **dropout) != 0
    assert (pattern == pattern[:1, :, :1]).all()
    assert 0.3 < pattern[0, :, 0].mean() < 0.9
    plain, dropped = (weights_with(q, k, **options, **o) for o in ({}, dropout))
    sees_nothing = np.isclose(plain, 1 / 9, rtol=1e-5).all(-1, keepdims=True)  # the mean of all values
    np.testing.assert_allclose(
        dropped, np.where(sees_nothing, plain, np.where(pattern, plain / 0.6, 0)), rtol=1e-5, atol=1e-7
    )
    alone = weights_with(q, k, **dropout, broadcast_dropout=False) != 0
    assert (alone != alone[:1, :, :1]).any()


def test_broadcast_dropout_has_gradients() -> None:
    with jax.enable_x64(True):
        q, k, v = (normal(2, 5, n, 4, dtype=np.float64) for n in (4, 2, 2))
        bias = normal(1, 4, 5, 5, dtype=np.float64)

        def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return regard.jax.dot_product_attention(
                q, k, v, bias, dropout_rate=0.4, dropout_rng=jax.random.key(3), is_causal=True
            )

        check_grads(jax.jit(call), (q, k, v, bias), order=1, modes=["fwd", "rev"])


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
