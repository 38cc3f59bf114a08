"""Calls on arrays that lie on several devices: each computes its part, with the bits of one that has everything."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
import regard.jax

pytestmark = pytest.mark.filterwarnings("ignore:a sequence that is sharded is gathered")

EVERYTHING = [
    "lse", "entropy", "visible", "max", "argmax", "received", "group_received", "profile", regard.top(3),
    regard.mass(regard.window(1)), regard.pooled(3, 2), regard.weights_of([2, 0]),
]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32))


SLOPES = normal(4)


def same(a: Any, b: Any, exact: bool = True) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if exact:
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.fixture
def mesh() -> Any:
    if len(jax.devices()) < 4:
        pytest.skip("jax was started with fewer than four devices")
    return jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)


OPTIONS: dict[str, Any] = {"causal": True, "dropout": 0.3, "seed": 5}


def whole(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    return regard.attention(q, k, v, score=regard.alibi(slopes), **OPTIONS)


@pytest.mark.parametrize("check", [True, False])
def test_shards_over_batch_and_heads(mesh: Any, check: bool) -> None:
    """Each shard says where it lies, so rules and dropout are those of the whole."""

    def shard(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        origin = (jax.lax.axis_index("b") * 2, jax.lax.axis_index("h") * 2, 0)
        return regard.attention(q, k, v, score=regard.alibi(slopes), origin=origin, **OPTIONS)

    specs = (P("b", "h"),) * 3
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(*specs, P()), out_specs=P("b", "h"), check_vma=check)
    q, k, v = (normal(4, 4, 16, 8, seed=n) for n in range(3))
    arrays = (q, k, v, SLOPES)
    same(np.asarray(jax.jit(sharded)(*arrays)), whole(*arrays))

    def gradients(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), range(4)))(*arrays)

    same(jax.tree.map(np.asarray, gradients(sharded)), gradients(whole), False)


Function = Callable[..., Any]


def grouped(kv_heads: int) -> tuple[list[Any], list[P], Function]:
    """Eight heads, positions first, and every option that knows a batch element or a head by its place."""
    q, k, v = (normal(4, 16, h, 8, seed=n) for n, h in enumerate((8, kv_heads, kv_heads)))
    cut = P("b", None, "h")
    shared = P("b", None, "h" if kv_heads > 1 else None)

    def call(q: Any, k: Any, v: Any, bias: Any, sink: Any, table: Any) -> Any:
        rule = regard.mask(lambda b, h, i, j: (i + j + b) % (h + 2) != 0) & (np.arange(256).reshape(16, 16) % 7 > 0)
        return regard.attention(
            q, k, v, mask=rule, score=regard.relative(table), bias=bias, sink=sink, dropout=0.2, seed=5,
            offset=np.array([0, 3, 1, 2]), origin=(5, 7, 20), layout="bnhd", observe=EVERYTHING, return_weights=True,
        )  # fmt: skip

    arrays = [q, k, v, normal(4, 1, 1, 16), normal(8), normal(15, 9)]
    return arrays, [cut, shared, shared, P("b"), P("h"), P()], call


def mapped() -> tuple[list[Any], list[P], Function]:
    """The axis of a vmap is cut, and one that some arrays do not have."""
    q, k, v = normal(2, 4, 2, 9, 8), normal(2, 9, 8, seed=1), normal(4, 2, 9, 8, seed=2)

    def call(q: Any, k: Any, v: Any) -> Any:
        each = jax.vmap(lambda q, v: regard.attention(q, k, v, causal=True), (1, 0))
        return each(q, v)

    return [q, k, v], [P("b", "h"), P(), P("h")], call


def placed() -> tuple[list[Any], list[P], Function]:
    """A part of a larger whole whose place is traced, and a random key; three heads, which two devices cannot share."""
    q, k, v = (normal(4, 3, 9, 8, seed=n) for n in range(3))

    def call(q: Any, k: Any, v: Any, place: Any) -> Any:
        return regard.attention(
            q, k, v, score=lambda s, b, h, i, j: s / (1 + b + h), origin=(place, place + 1, 0), offset=place,
            dropout=0.5, seed=jax.random.key(3),
        )  # fmt: skip

    return [q, k, v, jnp.asarray(2)], [P("b", None), P("b"), P("b"), P()], call


CALLS: dict[str, Callable[[], tuple[list[Any], list[P], Function]]] = {
    "grouped heads": lambda: grouped(4),
    "one key head": lambda: grouped(1),
    "vmap": mapped,
    "origin": placed,
}


@pytest.fixture(params=CALLS)
def cut(mesh: Any, request: pytest.FixtureRequest) -> tuple[list[Any], list[Any], Function]:
    """Arrays, the same on the mesh, and a call."""
    arrays, specs, call = CALLS[request.param]()
    return arrays, [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)], call


def gathers(function: Function, *arrays: Any) -> int:
    """How often a compiled program puts an array together."""
    return sum("all-gather" in line for line in jax.jit(function).lower(*arrays).compile().as_text().splitlines())


def test_jit_of_sharded_arrays(cut: Any) -> None:
    """Every result has the bits of the whole, no device has seen more than its part, and so lies the output."""
    arrays, spread, call = cut
    found, expected = jax.jit(call)(*spread), call(*arrays)
    out, *more = expected if isinstance(expected, tuple) else (expected,)
    if more:
        same(found[1], more[0])
        for s, x in more[1].items():
            # Heads that share a key head lie apart, so they are not added in the same order.
            same(found[2][s], x, s.name != "group_received" or arrays[1].shape[2] > 1)
    same(jax.tree.leaves(found)[0], out)
    assert gathers(call, *spread) == 0
    out = jax.tree.leaves(found)[0]
    assert out.addressable_shards[0].data.size <= out.size // 2


def test_derivatives_of_sharded_arrays(cut: Any) -> None:
    """Gradients, tangents and the tangents of gradients; what devices share is summed over them."""
    arrays, spread, call = cut
    number = sum(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays)

    def loss(*x: Any) -> Any:
        return (jax.tree.leaves(call(*x))[0] ** 2).sum()

    def every(*x: Any) -> Any:
        gradient = jax.grad(loss, range(number))
        dots = [*x[:number], *(np.zeros((), jax.dtypes.float0) for _ in x[number:])]
        return jax.jvp(lambda *x: (loss(*x), gradient(*x)), x, tuple(dots))

    same(jax.tree.map(np.asarray, jax.jit(every)(*spread)), jax.jit(every)(*arrays), False)


def test_other_axes_are_put_together(mesh: Any) -> None:
    """Positions that lie on several devices, and a batch that they cannot share."""
    for shape, spec in (((4, 4, 16, 8), P(None, None, "b")), ((4, 4, 16, 8), P(None, "b", "h")), ((4, 16, 8), P("b"))):
        arrays = [normal(*shape, seed=n) for n in range(3)]
        spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        same(np.asarray(jax.jit(whole)(*spread, SLOPES)), whole(*arrays, SLOPES))
        same(np.asarray(whole(*spread, SLOPES)), whole(*arrays, SLOPES))
    uneven = [normal(3, 6, 9, 8, seed=n) for n in range(3)]
    spread = [jax.device_put(x, NamedSharding(mesh, P(None, "b"))) for x in uneven]
    call = jax.jit(lambda *x: regard.attention(*x, causal=True))
    same(np.asarray(call(*spread)), call(*uneven))


def test_explicit_axes() -> None:
    """Where types say how arrays lie, those of results and gradients do."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    arrays = [normal(4, 4, 16, 8, seed=n) for n in range(3)]

    def step(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return whole(q, k, v, slopes), jax.grad(lambda *x: (whole(*x) ** 2).sum(), range(4))(q, k, v, slopes)

    expected = step(*arrays, SLOPES)
    with jax.set_mesh(mesh):
        spread = [jax.device_put(x, P("b", "h")) for x in arrays]
        out, gradients = jax.jit(step)(*spread, jax.device_put(SLOPES, P()))
        assert [jax.typeof(x).sharding.spec for x in (out, *gradients)] == [P("b", "h", None, None)] * 4 + [P(None)]
        same(np.asarray(out), expected[0])
        same([np.asarray(x) for x in gradients], expected[1], False)


LIES = {
    "query alone": (P("b", "h"), P(), P()),
    "key alone": (P(), P("b", "h"), P()),
    "positions": (P(None, None, "b"), P(None, None, "h"), P()),
    "features": (P(None, None, None, "b"),) * 3,
    "each its own": (P("h", "b"), P("b", "h"), P("b", None, "h")),
}


@pytest.mark.parametrize("engine", [None, "xla"])
@pytest.mark.parametrize("lies", LIES)
def test_gradients_on_explicit_axes_lie_as_their_operands(lies: str, engine: str | None) -> None:
    """However operands lie, and not only as the engine would cut them."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    arrays = [normal(4, 4, 16, 8, seed=n) for n in range(3)]

    def loss(*x: Any) -> Any:
        return (regard.attention(*x, causal=True, engine=engine) ** 2).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    mixed = lambda x: jax.jvp(gradient, x, x)[1]  # noqa: E731
    expected, along = gradient(*arrays), jax.jit(mixed)(tuple(arrays))
    with jax.set_mesh(mesh):
        spread = tuple(jax.device_put(x, spec) for x, spec in zip(arrays, LIES[lies], strict=True))
        for found in (gradient(*spread), jax.jit(gradient)(*spread)):
            assert [jax.typeof(x).sharding for x in found] == [jax.typeof(x).sharding for x in spread]
            same([np.asarray(x) for x in found], expected, False)
        same([np.asarray(x) for x in jax.jit(mixed)(spread)], along, False)


def test_higher_derivatives_on_explicit_axes() -> None:
    """What has no kernel, such as the gradient of weights and third derivatives, by plain JAX on whole arrays."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    q, k = normal(2, 2, 6, 4), normal(2, 2, 6, 4, seed=1)

    def weights(q: Any, k: Any) -> Any:
        return (regard.attention(q, k, k, return_weights=True)[1] ** 2).sum()

    def third(q: Any, k: Any) -> Any:
        at = jax.grad(jax.grad(jax.grad(lambda t: (regard.attention(q * t, k, k) ** 2).sum())))
        return at(0.5)

    for function in (jax.grad(weights, (0, 1)), third):
        expected = function(q, k)
        with jax.set_mesh(mesh):
            found = jax.jit(function)(jax.device_put(q, P("b", "h")), jax.device_put(k, P(None, "h")))
        same(jax.tree.map(np.asarray, found), expected, False)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_drop_in_on_explicit_axes(kv_heads: int) -> None:
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    arrays = [normal(4, 16, 4, 8), normal(4, 16, kv_heads, 8, seed=1), normal(4, 16, kv_heads, 8, seed=2)]
    lengths = jnp.array([3, 0, 16, 5], np.int32)

    def loss(*x: Any) -> Any:
        return (regard.jax.dot_product_attention(*x, key_value_seq_lengths=lengths) ** 2).sum()

    expected = jax.grad(loss, (0, 1, 2))(*arrays)
    shared = P("b", None, "h" if kv_heads > 1 else None)
    with jax.set_mesh(mesh):
        spread = [jax.device_put(x, spec) for x, spec in zip(arrays, (P("b", None, "h"), shared, shared), strict=True)]
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(*spread)
    same([np.asarray(x) for x in found], expected, False)
