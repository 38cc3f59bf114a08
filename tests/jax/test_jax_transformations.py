"""vmap, threads, and what happens when a program goes wrong."""

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import regard

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp

import jax


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32))


Q, K, V = (normal(3, 2, 4, 9, 8, seed=n) for n in range(3))
BIAS, SINK, SLOPES = normal(3, 4, 9, 9), normal(3, 4), normal(3, 4)
LENGTHS = jnp.asarray([[9, 4], [1, 9], [7, 0]])


def merged(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Elements of a vmap may be computed together."""
    return regard.attention(q, k, v, causal=True, bias=bias, observe=["lse", "entropy"])


def apart(q: Any, k: Any, v: Any, bias: Any, sink: Any, slopes: Any, lengths: Any) -> Any:
    """They may not: every option that makes elements differ in more than their arrays."""
    return regard.attention(
        q, k, v, mask=regard.padding(lengths), bias=bias, sink=sink, score=regard.alibi(slopes), dropout=0.2, seed=3,
        observe=["lse"],
    )  # fmt: skip


def one_by_one(function: Any, arrays: tuple[Any, ...], axes: tuple[int | None, ...]) -> Any:
    each = [
        function(*(x if a is None else jnp.take(x, n, a) for x, a in zip(arrays, axes, strict=True))) for n in range(3)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)


def equal(a: Any, b: Any, exact: bool = True) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if exact:
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (0, None, None, None), (None, 0, None, None), (None, None, 0, None), (None, None, None, 0),
             (1, -1, 2, -2), (3, None, 0, 1)], ids=str,
)  # fmt: skip
def test_vmap_in_every_argument(axes: tuple[int | None, ...]) -> None:
    arrays = tuple(x[0] if a is None else jnp.moveaxis(x, 0, a) for x, a in zip((Q, K, V, BIAS), axes, strict=True))
    equal(jax.vmap(merged, axes)(*arrays), one_by_one(merged, arrays, axes))


@pytest.mark.parametrize("which", range(7))
def test_vmap_of_what_elements_do_not_share(which: int) -> None:
    every = (Q, K, V, BIAS, SINK, SLOPES, LENGTHS)
    axes = tuple(0 if n == which else None for n in range(7))
    arrays = tuple(x if n == which else x[0] for n, x in enumerate(every))
    equal(jax.jit(jax.vmap(apart, axes))(*arrays), one_by_one(apart, arrays, axes))


def test_vmap_of_offsets_and_seeds() -> None:
    def call(offset: Any, seed: Any) -> Any:
        return regard.attention(Q[0], K[0], V[0], causal=True, offset=offset, dropout=0.1, seed=seed)

    arrays = jnp.arange(3), jax.random.split(jax.random.key(0), 3)
    for axes in ((0, None), (None, 0), (0, 0)):
        some = tuple(x if a == 0 else x[0] for x, a in zip(arrays, axes, strict=True))
        equal(jax.vmap(call, axes)(*some), one_by_one(call, some, axes))


def test_vmap_in_vmap() -> None:
    def scores(q: Any, k: Any) -> Any:
        return merged(q, k, V[0], None)[0]

    every = jax.vmap(jax.vmap(scores, (None, 0)), (0, None))(Q, K)
    for n in range(3):
        for m in range(3):
            equal(every[n, m], scores(Q[n], K[m]))


@pytest.mark.parametrize(("inner", "outer"), [(1, 0), (1, 3), (0, 0), (2, 1)])
def test_two_axes_of_one_argument(inner: int, outer: int) -> None:
    def call(x: Any) -> Any:
        return (regard.attention(x, x, x, causal=True) ** 2).sum()

    x = normal(2, 3, 4, 9, 8)  # outer, inner, heads, n, d
    moved = jnp.moveaxis(jnp.moveaxis(x, 1, inner + 1), 0, outer)
    found = jax.vmap(jax.vmap(jax.grad(call), inner, inner), outer, outer)(moved)
    expected = jnp.stack([jnp.stack([jax.grad(call)(x[n, m]) for m in range(3)]) for n in range(2)])
    equal(jnp.moveaxis(jnp.moveaxis(found, outer, 0), inner + 1, 1), expected, exact=False)


@pytest.mark.parametrize("function", [merged, apart], ids=["together", "apart"])
def test_derivatives_and_vmap_in_any_order(function: Any) -> None:
    shared = (K, V, BIAS) if function is merged else (K, V, BIAS, SINK, SLOPES, LENGTHS)
    shared = tuple(x[0] for x in shared)
    varying = 4 if function is merged else 6

    def loss(*x: Any) -> Any:
        return (function(*x)[0] ** 2).sum()

    of_each = jax.grad(loss, range(varying))
    axes = (0, *(None,) * len(shared))
    arrays = (Q, *shared)
    each = one_by_one(of_each, arrays, axes)
    equal(jax.vmap(of_each, axes)(*arrays), each, exact=False)
    total = jax.grad(lambda *x: jax.vmap(loss, axes)(*x).sum(), range(varying))(*arrays)
    equal(total, (each[0], *(x.sum(0) for x in each[1:])), exact=False)

    along = jax.vmap(lambda q, t: jax.jvp(lambda q: of_each(q, *shared), (q,), (t,))[1], (0, None))(Q, Q[1])
    equal(along, one_by_one(lambda q: jax.jvp(lambda q: of_each(q, *shared), (q,), (Q[1],))[1], (Q,), (0,)), False)
    reverse = jax.grad(lambda q: sum((x * Q[2, 0, 0, 0, 0]).sum() for x in jax.vmap(of_each, axes)(q, *shared)))(Q)
    expected = one_by_one(
        lambda q: jax.grad(lambda q: sum((x * Q[2, 0, 0, 0, 0]).sum() for x in of_each(q, *shared)))(q), (Q,), (0,)
    )
    equal(reverse, expected, exact=False)


def test_an_empty_vmap() -> None:
    def loss(k: Any, q: Any) -> Any:
        return jax.vmap(lambda q: merged(q, k, V[0], None)[0].sum())(q).sum()

    assert jax.vmap(merged, (0, None, None, None))(Q[:0], K[0], V[0], BIAS[0])[0].shape == (0, 2, 4, 9, 8)
    equal(jax.grad(loss)(K[0], Q[:0]), jnp.zeros_like(K[0]))


def test_many_threads() -> None:
    """Jitted and eager calls from many threads at once, some of them spread over the library's own threads."""
    regard.set_num_threads(2)
    large = normal(4, 300, 32)
    step = jax.jit(jax.value_and_grad(lambda x: (regard.attention(x, x, x, causal=True) ** 2).sum()))
    expected = step(large)
    eager = merged(Q[0], K[0], V[0], None)

    def work(n: int) -> None:
        if n % 2:
            equal(step(large), expected)
        else:
            equal(merged(Q[0], K[0], V[0], None), eager)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(64), timeout=300))


def test_an_error_in_the_handler_is_an_exception() -> None:
    """A seed that is no seed is seen only when the program runs."""
    call = jax.jit(lambda seed: regard.attention(Q, K, V, dropout=0.5, seed=seed))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ValueError: seed must be in \[0, 2\*\*64\), got -1"):
        call(-1).block_until_ready()
    assert call(1).shape == Q.shape


def test_errors_come_before_any_work() -> None:
    q, k, v = Q[0], K[0], V[0]
    with pytest.raises(TypeError, match=r"key must be a jax\.Array where others of the call are, got numpy\.ndarray"):
        regard.attention(q, np.asarray(k), v)
    with pytest.raises(ValueError, match="query and key must have the same number of features"):
        jax.jit(lambda q: regard.attention(q, k[..., :3], v))(q)
    with pytest.raises(ValueError, match=r"dropout=0\.5 needs seed="):
        regard.attention(q, k, v, dropout=0.5)
    with pytest.raises(TypeError, match=r"seed must be an int or one key of jax\.random, got float32"):
        regard.attention(q, k, v, dropout=0.5, seed=q[0, 0, 0, 0])
    with pytest.raises(ValueError, match="engine must be one of 'cpu', 'tiled', 'device', 'spec', 'xla', got 'cudnn'"):
        regard.attention(q, k, v, engine="cudnn")
    with pytest.raises(TypeError, match=r"mask must be booleans or 0/1 integers, got float32; to add to scores"):
        jax.jit(lambda m: regard.attention(q, k, v, mask=m))(jnp.ones((9, 9)))
    with pytest.raises(TypeError, match=r"on JAX arrays use jax\.vjp of regard\.attention"):
        regard.attention_vjp(q, k, v, q)
    x = np.ones((1, 3, 2), np.float32)
    with pytest.raises(TypeError, match="serves calls on JAX arrays, not on NumPy arrays"):
        jax.jit(lambda t: jnp.asarray(regard.attention(x, x, x, score=regard.alibi(t))))(jnp.ones(1))
    ids = np.array([0, 2**40])
    with pytest.raises(ValueError, match=r"with values beyond 32 bits needs jax\.config\.jax_enable_x64"):
        regard.attention(q, k, v, mask=lambda b, h, i, j: regard.table(ids)[i % 2] >= 0)


def test_export_says_what_it_needs() -> None:
    exported = jax.export.export(jax.jit(lambda q: regard.attention(q, q, q)))
    with pytest.raises(ValueError, match=r"(?s)custom calls whose targets have no compatibility guarantees.*@regard"):
        exported(Q[0])
    allowed = [jax.export.DisabledSafetyCheck.custom_call("regard")]
    program = jax.export.export(jax.jit(lambda q: regard.attention(q, q, q)), disabled_checks=allowed)(Q[0])
    again = jax.export.deserialize(program.serialize())
    equal(again.call(Q[0]), regard.attention(Q[0], Q[0], Q[0]))


def test_export_of_symbolic_shapes_is_refused() -> None:
    message = (
        "must have a shape of integers, got (b, 4): attention is compiled for its shapes, so export a program for "
        "each, not one with symbolic dimensions"
    )

    def export(function: Any, dtype: Any) -> None:
        shape = jax.export.symbolic_shape("b, 4")
        with pytest.raises(TypeError) as error:
            jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct(shape, dtype))
        assert str(error.value).endswith(message)

    q = Q[0]
    export(lambda x: regard.attention(x, x, x), np.float32)
    export(lambda x: regard.attention(q, q, q, bias=x), np.float32)
    export(lambda x: regard.attention(q, q, q, mask=x), bool)
    export(lambda x: regard.attention(q, q, q, mask=regard.documents(x)), np.int32)
    export(lambda x: regard.attention(q, q, q, score=lambda s, b, h, i, j: s * regard.table(x)[i, j]), np.float32)


@pytest.mark.parametrize("rule", [regard.padding, regard.prefix, lambda n: regard.padding(n, side="left")])
def test_lengths_may_be_traced_numbers(rule: Any) -> None:
    call = jax.jit(lambda n: regard.attention(Q[0], Q[0], Q[0], mask=rule(n)))
    equal(call(3), regard.attention(Q[0], Q[0], Q[0], mask=rule(3)))
    names: list[str] = []
    jax.jit(lambda n: names.append(str(rule(n))))(3)
    assert names[0].partition("(")[2].startswith("array of shape ()")


def test_results_may_move_where_arguments_may() -> None:
    """Arrays that are committed to no device give a result that is not, so that it joins arrays on other devices."""
    x = Q[0]
    assert not x.committed
    assert not regard.attention(x, x, x).committed
    there = jax.device_put(x, jax.devices()[-1])
    out = regard.attention(there, there, there)
    assert out.committed
    assert out.devices() == there.devices()


def test_other_devices_take_the_plain_form() -> None:
    """What is lowered for a GPU calls no foreign function of ours."""
    q = jax.ShapeDtypeStruct((2, 9, 8), np.float32)
    lowered = jax.export.export(jax.jit(lambda q: regard.attention(q, q, q, causal=True)), platforms=["cuda"])(q)
    assert "custom_call @regard" not in str(lowered.mlir_module())
    with pytest.raises(ValueError, match="engine 'cpu' runs on the CPU"):
        jax.export.export(jax.jit(lambda q: regard.attention(q, q, q, engine="cpu")), platforms=["cuda"])(q)


def test_a_process_ends_while_calls_are_under_way() -> None:
    program = """
        import jax, jax.numpy as jnp, regard
        f = jax.jit(lambda x: regard.attention(x, x, x))
        x = jnp.ones((4, 400, 32))
        for _ in range(20):
            x = f(x)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_weights_under_vmap(layout: str) -> None:
    """Also where a leading axis and one that only the keys have stay behind."""

    def weights(q: Any, k: Any) -> Any:
        return regard.attention(q, k, k, causal=True, return_weights=True, layout=layout)[1]

    q, k = Q[:2, :, :4], Q[:2, :, :4] + 1
    many = jax.vmap(weights, (0, None))(jnp.stack([q, 2 * q]), k)
    equal(many, jnp.stack([weights(q, k), weights(2 * q, k)]))
    equal(jax.jit(jax.vmap(weights))(jnp.stack([q, 2 * q]), jnp.stack([k, k])), many)
