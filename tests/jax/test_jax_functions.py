"""`merge`, `multihead_attention`, `linear_attention`, `steps` and `plan` on JAX arrays, beside NumPy's."""

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

import regard
from linear_cases import MASKS as LINEAR_MASKS
from linear_cases import N_K, N_Q
from regard.ops.linear import RandomFeatures

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp
from jax.test_util import check_grads

import jax

pytestmark = pytest.mark.engine("tiled")

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def wide() -> Any:
    """In float64, and with the same numbers whichever tests ran before."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state
    with jax.enable_x64(True):
        yield


def normal(*shape: int, dtype: Any = np.float64) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(x, jax.Array)
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, float), np.asarray(y, float), rtol=tolerance, atol=tolerance)


def test_merge() -> None:
    """Parts make the whole in every mode, a part and rows that see nothing among them."""
    q, k, v, sink = normal(2, 3, 5, 4), normal(2, 3, 6, 4), normal(2, 3, 6, 4), normal(3)

    def merged(q: Any, k: Any, v: Any, sink: Any) -> Any:
        parts = []
        for first, last in ((0, 2), (2, 6)):
            keys = slice(first, last)
            out, seen = regard.attention(
                q, k[:, :, keys], v[:, :, keys], causal=True, offset=0, origin=(0, 0, first), observe=["lse"]
            )
            parts.append((out, seen.lse))
        return regard.merge(*parts, sink=sink)

    arrays = tuple(map(jnp.asarray, (q, k, v, sink)))
    close(merged(*arrays), merged(q, k, v, sink))
    close(jax.jit(merged)(*arrays), merged(q, k, v, sink))
    close(jax.vmap(merged, (0, 0, 0, None))(*(x[:, None] for x in arrays[:3]), arrays[3])[0][:, 0], merged(*arrays)[0])
    check_grads(jax.jit(merged), arrays, order=2, modes=["fwd", "rev"])
    nothing = jnp.full((2, 3, 5), -jnp.inf)
    out, lse = regard.merge((arrays[0], nothing))
    assert (out == 0).all()
    assert (lse == -jnp.inf).all()
    assert (jax.grad(lambda x: regard.merge((x, nothing))[0].sum())(arrays[0]) == 0).all()


def test_merge_names_what_is_wrong() -> None:
    x = jnp.ones((2, 5, 4))
    cases = {
        "merge: lse of part 0 must be a jax.Array where others of the call are, got numpy.ndarray": (
            (x, np.ones((2, 5))),
        ),
        "merge: part 1 must be a tuple (out, lse), got a tuple of 3": ((x, x[..., 0]), (x, x[..., 0], x)),
    }
    for message, parts in cases.items():
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            regard.merge(*parts)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, jnp.bfloat16])
def test_multihead_attention(dtype: Any) -> None:
    x, y = normal(2, 5, 12, dtype=dtype), normal(2, 7, 10, dtype=dtype)
    weights = {"w_q": normal(12, 8), "w_k": normal(10, 4), "w_v": normal(10, 6), "w_o": normal(12, 3)}
    weights |= {"b_q": normal(8), "b_v": normal(6), "b_o": normal(3)}
    weights = {name: w.astype(dtype) for name, w in weights.items()}

    def call(x: Any, y: Any, weights: Any) -> Any:
        return regard.multihead_attention(
            x, y, y, 4, num_kv_heads=2, **weights, mask=regard.window(3, 3), return_weights=True
        )

    arrays = jax.tree.map(jnp.asarray, (x, y, weights))
    tolerance = {np.float64: 1e-10, np.float32: 1e-4}.get(dtype, 0.05)
    close(call(*arrays), call(x, y, weights), tolerance)
    close(jax.jit(call)(*arrays), call(x, y, weights), tolerance)
    if dtype is np.float64:
        close(jax.vmap(call, (0, 0, None))(*arrays)[0], call(x, y, weights)[0])
        check_grads(jax.jit(call), arrays, order=1, modes=["fwd", "rev"])


def test_hopfield() -> None:
    state, patterns = normal(3, 2, 6), normal(5, 6)

    def call(state: Any, patterns: Any) -> Any:
        return regard.hopfield(state, patterns, beta=1.3, steps=2)

    arrays = tuple(map(jnp.asarray, (state, patterns)))
    expected = call(state, patterns)
    close(call(*arrays), expected)
    close(jax.jit(call)(*arrays), expected)
    close(jax.vmap(call, (0, None), 1)(*arrays), expected)

    def plain(state: Any, patterns: Any) -> Any:
        scores = 1.3 * state @ patterns.T
        squares = (state**2).sum(-1) / 2 + (patterns**2).sum(-1).max() / 2
        return jax.nn.softmax(scores) @ patterns, squares + (np.log(5) - jax.nn.logsumexp(scores, axis=-1)) / 1.3

    def plainly(state: Any, patterns: Any) -> Any:
        once, first = plain(state, patterns)
        twice, second = plain(once, patterns)
        return jnp.stack([state, once, twice]), jnp.stack([first, second, plain(twice, patterns)[1]])

    for derivative in (jax.jacfwd, jax.jacrev):
        close(derivative(call, (0, 1))(*arrays), derivative(plainly, (0, 1))(*arrays))


def test_a_metric() -> None:
    """In values, jit, vmap, and first and second derivatives, on an engine and in plain JAX."""
    for shape, layout in (((4, 6, 6), "bnhd"), ((6, 6), "bhnd")):
        q, k, v, M = normal(2, 4, 4, 6), normal(2, 4, 4, 6), normal(2, 4, 4, 3), normal(*shape)
        arrays = tuple(map(jnp.asarray, (q, k, v, M)))

        def call(q: Any, k: Any, v: Any, M: Any, engine: Any = None, layout: Any = layout) -> Any:
            return regard.attention(q, k, v, metric=M, causal=True, layout=layout, observe=["lse"], engine=engine)

        expected = call(q, k, v, M)
        close(call(*arrays), expected)
        close(jax.jit(call)(*arrays), expected)
        close(call(*arrays, "xla"), expected)
        close(regard.attention(*arrays[:3], metric=M, causal=True, layout=layout), expected[0])
        many = jax.vmap(lambda M: call(*arrays[:3], M)[0])(jnp.stack([arrays[3]] * 2))  # noqa: B023
        close(many[1], expected[0])
        check_grads(jax.jit(lambda *x: call(*x)[0]), arrays, order=2, modes=["fwd", "rev"])
    plan = regard.plan(*arrays[:3], metric=arrays[3])
    assert plan == regard.plan(*arrays[:3])
    message = "metric must have shape (d, d) = (6, 6) or (h, d, d) = (4, 6, 6), got shape (6,)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.attention(*arrays[:3], metric=arrays[3][0])


MAPS = ["elu", "relu", "softmax", "favor", RandomFeatures(6, 1)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", MAPS, ids=str)
def test_linear_attention(feature_map: Any, causal: bool) -> None:
    """Also where keys are so large that exponentials relative to another key's would all underflow."""
    q, k, v = normal(2, 4, 11, 3), normal(1, 2, 19, 3), normal(2, 2, 19, 5)
    options = {"feature_map": feature_map, "causal": causal}
    call = jax.jit(lambda q, k, v: regard.linear_attention(q, k, v, **options, chunk=4))
    for scale in (1, 30):
        arrays = tuple(map(jnp.asarray, (scale * q, scale * k, v)))
        close(call(*arrays), regard.linear_attention(scale * q, scale * k, v, **options))
    arrays = tuple(map(jnp.asarray, (q[:1, :2], k[:, :1], v[:1, :1])))
    many = jax.vmap(call, (1, None, None), 1)(arrays[0][:, :, None], arrays[1], arrays[2])
    close(many[:, :, 0], call(*arrays))
    if feature_map != "relu":  # which has kinks
        check_grads(call, arrays, order=1, modes=["fwd", "rev"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["keys", "padding", "documents of each", "all of them"])
def test_masks_of_linear_attention(mask: str, causal: bool) -> None:
    """Arrays may be traced."""
    q, k, v = normal(2, 4, N_Q, 3), normal(2, 2, N_K, 3), normal(2, 2, N_K, 5)
    rule = LINEAR_MASKS[mask]
    feature_map = "favor" if mask == "keys" else "softmax"
    options: Any = {"feature_map": feature_map, "causal": causal, "chunk": 32}
    arrays = tuple(map(jnp.asarray, (q, k, v)))
    expected = regard.linear_attention(q, k, v, mask=rule, **options)
    if isinstance(rule, np.ndarray):
        close(jax.jit(partial(regard.linear_attention, **options))(*arrays, mask=jnp.asarray(rule)), expected)
        return
    call = jax.jit(partial(regard.linear_attention, mask=rule, **options))
    close(call(*arrays), expected)
    check_grads(call, arrays, order=1, modes=["rev"])


def test_traced_values_in_a_rule_of_linear_attention_are_refused() -> None:
    x = jnp.asarray(normal(2, 2, 5, 3))
    with pytest.raises(TypeError, match="mask of linear_attention reads values that are traced"):
        jax.jit(lambda n: regard.linear_attention(x, x, x, mask=regard.padding(n)))(jnp.asarray([2, 3]))


def test_linear_attention_of_other_shapes() -> None:
    for n_q, n_k in ((5, 2), (1, 9), (3, 3), (2, 0), (0, 4)):
        q, k, v = normal(2, n_q, 3), normal(2, n_k, 3), normal(2, n_k, 4)
        for causal in (False, True):
            expected = regard.linear_attention(q, k, v, causal=causal)
            call = jax.jit(lambda *x, causal=causal: regard.linear_attention(*x, causal=causal))
            close(call(*map(jnp.asarray, (q, k, v))), expected)
    x = normal(7, 3, dtype=np.float32)
    close(regard.linear_attention(*[jnp.asarray(x)] * 3), regard.linear_attention(x, x, x), 1e-5)
    x = normal(2, 7, 4, 3, dtype=np.float16)
    options: dict[str, Any] = {"layout": "bnhd", "causal": True}
    close(regard.linear_attention(*[jnp.asarray(x)] * 3, **options), regard.linear_attention(x, x, x, **options), 2e-3)
    squared = {"feature_map": lambda x: x * x, "causal": True}
    close(regard.linear_attention(*[jnp.asarray(x)] * 3, **squared), regard.linear_attention(x, x, x, **squared), 2e-3)


@pytest.mark.parametrize("feature_map", ["elu", "favor"])
def test_later_keys_have_no_influence(feature_map: str) -> None:
    """Neither on results nor on gradients, not even where they are NaN."""
    q, k, v = (jnp.asarray(normal(1, 9, 3)) for _ in range(3))

    @jax.jit
    def early(q: Any, k: Any, v: Any) -> Any:
        return regard.linear_attention(q, k, v, feature_map=feature_map, causal=True)[:, :5]

    wild = k.at[:, 5:].set(jnp.nan), v.at[:, 5:].set(jnp.inf)
    np.testing.assert_array_equal(early(q, *wild), early(q, k, v))
    found = jax.grad(lambda *x: early(*x).sum(), (0, 1, 2))(q, k, v)
    for x in found[1:]:
        assert (x[:, 5:] == 0).all()


def test_steps() -> None:
    q, k, v, slopes = normal(2, 5, 4), normal(2, 7, 4), normal(2, 7, 4), np.array([0.5, 0.25])
    options: dict[str, Any] = {"causal": True, "bias": normal(5, 7), "sink": normal(2), "offset": np.array(1)}

    def values(q: Any, k: Any, v: Any, slopes: Any, **options: Any) -> Any:
        steps = regard.steps(q, k, v, score=regard.alibi(slopes), mask=regard.padding(6), dropout=0.5, **options)
        return [step.value for step in steps]

    expected = values(q, k, v, slopes, seed=7, **options)
    given = [jnp.asarray(x) for x in (q, k, v, slopes)]
    found = values(
        *given, seed=jnp.asarray(7), **{n: x if n == "causal" else jnp.asarray(x) for n, x in options.items()}
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    key = jax.random.key(3)
    out = regard.attention(*given[:3], dropout=0.5, seed=key)
    np.testing.assert_allclose(regard.steps(*given[:3], dropout=0.5, seed=key)["output"].value, out, rtol=1e-12)
    message = "regard.steps reads the values of query, which has none while it is traced"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        jax.jit(lambda q: regard.steps(q, k, v)["lse"].value)(given[0])


def test_plan() -> None:
    """Shapes are enough, but what rules read has to be there."""
    q, k, v = normal(2, 5, 4), normal(2, 7, 4), normal(2, 7, 4)
    arrays = tuple(map(jnp.asarray, (q, k, v)))
    expected = str(regard.plan(q, k, v, mask=regard.padding([6]), bias=np.zeros((5, 7))))
    assert str(regard.plan(*arrays, mask=regard.padding(jnp.array([6])), bias=jnp.zeros((5, 7)))) == expected
    plans: list[str] = []
    jax.jit(lambda *x: plans.append(str(regard.plan(*x[:3], mask=regard.padding([6]), bias=x[3]))))(
        *arrays, jnp.zeros((5, 7))
    )
    assert plans == [expected]
    message = "regard.plan reads the values of mask, which has none while it is traced"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        jax.jit(lambda n: regard.plan(*arrays, mask=regard.padding(n)).flops)(jnp.array([6]))


@pytest.mark.parametrize("engine", [None, "xla"])
def test_effective_states_differentiate(engine: Any) -> None:
    """Backward and forward, by the exponential of the entropy."""
    q, k = normal(2, 5, 4), normal(2, 7, 4)

    def call(q: Any, k: Any) -> Any:
        return regard.attention(q, k, k, observe=["lse", "effective_states"], engine=engine)[1].effective_states

    def by_hand(q: Any, k: Any) -> Any:
        p = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2)
        return jnp.exp(-(p * jnp.log(p)).sum(-1))

    for mode in (jax.jacrev, jax.jacfwd):
        for found, expected in zip(mode(call, (0, 1))(q, k), mode(by_hand, (0, 1))(q, k), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
