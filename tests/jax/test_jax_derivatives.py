"""Every derivative that JAX can ask for, over the table of cases."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard
from cases import CASES, Case, case
from regard.rules import as_score, order
from regard.rules.expression import rebuild
from support import SAME_BITS, on_cpu

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp
from jax.test_util import check_grads

import jax

pytestmark = pytest.mark.engine("tiled")

Inputs = dict[str, Any]
# Not those where nothing varies, and those with NaN among what is hidden, of which there are no differences.
SMOOTH = [c for c in CASES if c.poison is None and 0 not in (*c.lead, c.n_q, c.n_k, c.d, c.d_v)]
TWICE = ("plain", "grouped heads", "causal, rows that see nothing", "curved score", "score with a table", "everything")


def differentiable(c: Case, dtype: Any = np.float64) -> tuple[Inputs, Callable[[Inputs], Any]]:
    """All that varies in a case, and its outputs as a function of that."""
    q, k, v, options = c.inputs(dtype)
    inputs = {"query": q, "key": k, "value": v}
    for name in ("bias", "sink", "metric"):
        if name in options and np.isfinite(options[name]).all():
            inputs[name] = options.pop(name)
    rule = as_score(options.pop("score", []))
    read = dict.fromkeys(x.payload for x in order([rule.node]) if x.op == "gather")
    tables = [t for t in read if t.kind == "float"]
    for n, t in enumerate(tables):
        inputs[f"table{n}"] = t.array.astype(dtype)

    def call(inputs: Inputs) -> Any:
        given = dict(inputs)
        traced = {id(t): regard.table(given.pop(f"table{n}")) for n, t in enumerate(tables)}
        score = regard.Score(rebuild(rule.node, traced), rule.text, rule.requires)
        out, seen = regard.attention(**given, **options, score=score, observe=["lse", "entropy"])
        return out, jnp.where(jnp.isinf(seen.lse), 0, seen.lse), seen.entropy

    return jax.tree.map(jnp.asarray, inputs), call


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("c", "jitted"),
    [(c, (n % 2 == 0) == even) for n, c in enumerate(SMOOTH) for even in (True, False) if even or c.name in TWICE],
    ids=str,
)
def test_first_and_second_derivatives_in_every_mode(c: Case, jitted: bool) -> None:
    """Compiled or not by turns, some cases both."""
    inputs, call = differentiable(c)
    function = jax.jit(call) if jitted else call
    check_grads(function, (inputs,), order=2, modes=["fwd", "rev"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", on_cpu(TWICE, "everything"))
def test_the_ways_to_second_derivatives_agree(name: str) -> None:
    """Forward over reverse and reverse over reverse, and reverse over forward against both."""
    inputs, call = differentiable(case(name))
    rng = np.random.default_rng(0)

    def random(like: Any) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), like)

    ct, u = random(jax.eval_shape(call, inputs)), random(inputs)

    def loss(inputs: Inputs) -> Any:
        return jax.tree.reduce(jnp.add, jax.tree.map(lambda a, b: (jnp.sin(a) * b).sum(), call(inputs), ct))

    def inner(a: Any, b: Any) -> Any:
        return jax.tree.reduce(jnp.add, jax.tree.map(lambda x, y: (x * y).sum(), a, b))

    gradient = jax.grad(loss)
    forward = jax.jit(lambda x: jax.jvp(gradient, (x,), (u,))[1])(inputs)
    reverse = jax.jit(jax.grad(lambda x: inner(gradient(x), u)))(inputs)
    mixed = jax.jit(jax.grad(lambda x: jax.jvp(loss, (x,), (u,))[1]))(inputs)
    step = 1e-5
    moved = [gradient(jax.tree.map(lambda x, d, s=s: x + s * d, inputs, u)) for s in (step, -step)]
    numeric = jax.tree.map(lambda a, b: (a - b) / (2 * step), *moved)
    for name in inputs:
        for found in (forward, reverse, mixed):
            np.testing.assert_allclose(found[name], numeric[name], rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(forward[name], reverse[name], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(forward[name], mixed[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("c", on_cpu([c for c in SAME_BITS if c.poison is None], *map(case, TWICE)), ids=str)
def test_gradients_and_tangents_have_the_bits_of_numpy(c: Case) -> None:
    q, k, v, options = c.inputs(np.float32)
    rng = np.random.default_rng(1)

    def call(q: Any, k: Any, v: Any) -> Any:
        return regard.attention(q, k, v, **options)

    arrays = [jnp.asarray(x) for x in (q, k, v)]
    dots = [rng.standard_normal(x.shape).astype(np.float32) for x in (q, k, v)]
    dout = rng.standard_normal(call(q, k, v).shape).astype(np.float32)
    expected = regard.attention_vjp(q, k, v, dout, **options)
    found = jax.jit(lambda *x: jax.vjp(call, *x)[1](jnp.asarray(dout)))(*arrays)
    for name, x in zip(("query", "key", "value"), found, strict=True):
        assert np.asarray(x).tobytes() == getattr(expected, name).tobytes(), name
    _, tangent = regard.attention_jvp(q, k, v, *dots, **options)
    _, dot = jax.jvp(call, arrays, [jnp.asarray(x) for x in dots])
    assert np.asarray(dot).tobytes() == tangent.out.tobytes()


@pytest.fixture
def small() -> tuple[Any, Any, Any]:
    q, k, v = (jnp.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 2, 6, 4)))
    return q, k, v


def test_hessian_linearize_and_vjp(small: Any) -> None:
    q, k, v = small

    def loss(q: Any) -> Any:
        return (regard.attention(q, k, v, causal=True) ** 3).sum()

    exact = jax.hessian(lambda q: (plain(q, k, v) ** 3).sum())(q)
    np.testing.assert_allclose(jax.hessian(loss)(q), exact, atol=1e-10)
    np.testing.assert_allclose(jax.jit(jax.jacrev(jax.jacrev(loss)))(q), exact, atol=1e-10)
    np.testing.assert_allclose(jax.jacfwd(jax.jacfwd(loss))(q), exact, atol=1e-10)
    np.testing.assert_allclose(jax.jacrev(jax.jacfwd(loss))(q), exact, atol=1e-10)
    y, push = jax.linearize(lambda q: regard.attention(q, k, v, causal=True), q)
    tangent = jax.jvp(lambda q: plain(q, k, v), (q,), (k,))[1]
    np.testing.assert_allclose(push(k), tangent, atol=1e-12)
    pull = jax.linear_transpose(push, q)
    np.testing.assert_allclose((pull(y)[0] * k).sum(), (push(k) * y).sum(), rtol=1e-12)
    (transposed,) = jax.linear_transpose(lambda ct: pull(ct)[0], y)(k)
    np.testing.assert_allclose(transposed, tangent, atol=1e-12)


def plain(q: Any, k: Any, v: Any) -> Any:
    S = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q @ k.swapaxes(-1, -2) / 2, -1e30)
    return jax.nn.softmax(S) @ v


def test_third_derivatives_are_those_of_the_plain_form(small: Any) -> None:
    """No code of ours relies on promotion that the caller has switched off."""
    q, k, v = small
    i = jnp.arange(q.shape[-2])
    table = jnp.linspace(-1.0, 1.0, 22).reshape(2, 11)

    def scalar(t: Any, call: Any) -> Any:
        return (call(q * t, k * jnp.cos(t), v, table * t) ** 2).sum()

    def plain(q: Any, k: Any, v: Any, table: Any) -> Any:
        scores = 3.0 * jnp.tanh((q @ k.swapaxes(-1, -2) / 2 + table[:, i - i[:, None] + 5]) / 3)
        return jax.nn.softmax(jnp.where(i <= i[:, None], scores, -jnp.inf)) @ v

    def call(q: Any, k: Any, v: Any, table: Any) -> Any:
        return regard.attention(q, k, v, causal=True, score=[regard.relative(table), regard.softcap(3.0)])

    third = jax.grad(jax.grad(jax.grad(scalar)))
    mixed = jax.jit(
        lambda t, call: jax.jvp(jax.grad(jax.grad(lambda t: scalar(t, call))), (t,), (1.0,))[1], static_argnums=1
    )
    with jax.numpy_rank_promotion("allow"):
        expected = third(0.7, plain)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        strict = mixed(0.7, call), third(0.7, call)
    np.testing.assert_allclose(strict, (expected, expected), rtol=1e-9)


def test_attention_is_linear_in_value(small: Any) -> None:
    """`jax.linear_transpose` of attention along values alone is the gradient of value, to the bit."""
    q, k, v = small

    def call(v: Any) -> Any:
        return regard.attention(q, k, v, causal=True, dropout=0.3, seed=1, observe=["entropy"])[0]

    expected = jax.vjp(call, v)[1](v)[0]
    for function in (call, jax.jit(call)):
        np.testing.assert_array_equal(jax.linear_transpose(function, v)(v)[0], expected)
    many = jnp.stack([v, 2 * v])
    for axis in (0, 1):
        mapped = jax.vmap(lambda v: regard.attention(q, k, v), axis, axis)
        spread = jnp.moveaxis(many, 0, axis)
        (found,) = jax.linear_transpose(mapped, spread)(spread)
        np.testing.assert_allclose(found, jax.vjp(mapped, spread)[1](spread)[0], rtol=1e-12)
    with pytest.raises(NotImplementedError, match="attention is linear in value alone"):
        jax.linear_transpose(lambda q: regard.attention(q, k, v), q)(q)


def test_checkpoint_and_scan(small: Any) -> None:
    q, k, _ = small

    def layer(x: Any) -> Any:
        return x + regard.attention(x, x, x, causal=True)

    def stacked(x: Any, function: Any) -> Any:
        return jax.lax.scan(lambda x, _: (function(x), None), x, length=3)[0].sum()

    expected = jax.grad(lambda x: layer(layer(layer(x))).sum())(q)
    np.testing.assert_allclose(jax.grad(stacked)(q, layer), expected, rtol=1e-12)
    np.testing.assert_allclose(
        jax.jit(jax.grad(stacked), static_argnums=1)(q, jax.checkpoint(layer)), expected, rtol=1e-12
    )
    along = jax.jvp(jax.grad(lambda x: stacked(x, jax.checkpoint(layer))), (q,), (k,))[1]
    np.testing.assert_allclose(
        along, jax.jvp(jax.grad(lambda x: layer(layer(layer(x))).sum()), (q,), (k,))[1], rtol=1e-9
    )


def test_weights_differentiate(small: Any) -> None:
    q, k, v = small

    def weights(q: Any, k: Any) -> Any:
        return regard.attention(jnp.asarray(q), jnp.asarray(k), v, causal=True, return_weights=True)[1]

    check_grads(jax.jit(weights), (q, k), order=2, modes=["fwd", "rev"])


def test_mass_names_what_differentiates_in_its_place(small: Any) -> None:
    q, k, v = small
    rule = regard.mass(regard.window(1))
    with pytest.raises(TypeError) as told:
        jax.grad(lambda q: regard.attention(q, k, v, observe=[rule])[1][rule].sum())(q)
    assert str(told.value) == (
        "the statistic 'mass' has no derivative; observe it of jax.lax.stop_gradient(query), key and value, or "
        "differentiate its logarithm, part.lse - seen.lse, where _, part = regard.attention(..., mask=mask & rule, "
        "sink=None, observe=['lse'])"
    )

    def log_mass(q: Any) -> Any:
        _, seen = regard.attention(jnp.asarray(q), k, v, observe=["lse"])
        _, part = regard.attention(jnp.asarray(q), k, v, mask=regard.window(1), observe=["lse"])
        return part.lse - seen.lse

    check_grads(log_mass, (q,), order=2, modes=["fwd", "rev"])


@pytest.mark.parametrize("statistic", ["max", "received", regard.top(2)])
def test_no_derivative_is_silently_zero(small: Any, statistic: Any) -> None:
    q, k, v = small

    def observed(q: Any) -> Any:
        _, seen = regard.attention(q, k, v, observe=[statistic])
        x = seen[statistic]
        return (x.values if hasattr(x, "values") else x).sum()

    with pytest.raises(TypeError, match=r"has no derivative; observe it of jax\.lax\.stop_gradient\(query\)"):
        jax.grad(observed)(q)
    with pytest.raises(TypeError, match="has no derivative"):
        jax.jit(lambda q: jax.jvp(observed, (q,), (q,))[1])(q)

    def beside(q: Any) -> Any:
        out, seen = regard.attention(q, k, v, observe=["max", "argmax"])
        return out.sum(), seen.max

    gradient, seen = jax.jit(jax.grad(beside, has_aux=True))(q)
    np.testing.assert_allclose(gradient, jax.grad(lambda q: regard.attention(q, k, v).sum())(q))
    assert seen.shape == (2, 6)


@pytest.mark.engine("cpu")
def test_every_input_has_a_gradient_that_is_not_zero() -> None:
    inputs, call = differentiable(case("everything"))
    gradients = jax.grad(lambda x: sum((a**2).sum() for a in call(x)))(inputs)
    assert set(gradients) == {"query", "key", "value", "bias", "sink", "table0"}
    for name, x in gradients.items():
        assert np.abs(x).max() > 1e-3, name
