"""Sequences that lie on several devices: the bits of one device, and none has all keys and values."""

import os
import socket
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
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
from regard.warning import warn_once

N = 2304  # three steps of keys, and three of rows, that begin within shards
SLOPES = np.array([0.1, 0.2, 0.0, 1.0], np.float32)
BIAS = np.random.default_rng(9).standard_normal((1, N, N), dtype=np.float32)
WAYS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "everything": {},
    "window": {"mask": regard.window(200)},
    "documents": {"mask": regard.documents(np.arange(N) // 300), "causal": True},
    "scores": {"causal": True, "score": [regard.softcap(9.0), regard.alibi(SLOPES)], "dropout": 0.1, "seed": 7},
    "bias and a place": {"bias": BIAS, "offset": 3, "origin": (2, 5, 100), "dropout": 0.2, "seed": 1},
    "one sees nothing": {"mask": regard.mask(lambda b, h, i, j: (i >= 600) & (j >= i))},
}  # fmt: skip


def mesh_of(kind: AxisType, **sizes: int) -> Any:
    count = int(np.prod(list(sizes.values())))
    if len(jax.devices()) < count:
        pytest.skip(f"jax was started with fewer than {count} devices")
    devices = np.array(jax.devices()[:count]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def operands(dtype: Any = np.float32, n_k: int = N, lead: tuple[int, ...] = ()) -> list[Any]:
    """query, key and value of grouped heads, and cotangents of out and lse."""
    rng = np.random.default_rng(0)
    shapes = [(*lead, h, n, 8) for h, n in ((4, N), (2, n_k), (2, n_k), (4, N))]
    return [jnp.asarray(rng.standard_normal(x), dtype) for x in (*shapes, (*lead, 4, N))]


def results(q: Any, k: Any, v: Any, dout: Any, dlse: Any, **options: Any) -> Any:
    """out, lse and entropy, and the gradients."""

    def call(q: Any, k: Any, v: Any) -> Any:
        out, seen = regard.attention(q, k, v, observe=["lse", "entropy"], **options)
        return out, seen.lse, seen.entropy

    outputs, back = jax.vjp(call, q, k, v)
    return outputs, back((dout, dlse.astype(outputs[1].dtype), dlse.astype(outputs[2].dtype)))


def same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


def check(mesh: Any, spec: P, arrays: list[Any], **options: Any) -> Any:
    """Compare a call on sharded arrays with one on a device; return its results, sharded."""
    specs = [spec] * 4 + [P(*spec[:-1])]
    spread = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    expected = results(*arrays, **options)
    found = jax.jit(lambda *x: results(*x, **options))(*spread)
    same(found, expected)
    for x in jax.tree.leaves(found):
        assert x.addressable_shards[0].data.size == x.size // mesh.size
    return found


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_of_one_device(way: str) -> None:
    check(mesh_of(AxisType.Auto, s=4), P(None, "s", None), operands(), **WAYS[way])


@pytest.mark.parametrize("way", ["causal", "window", "scores"])
def test_the_tiled_engine(way: str) -> None:
    check(mesh_of(AxisType.Auto, s=2), P(None, "s", None), operands(), engine="tiled", **WAYS[way])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounded_outputs(dtype: Any) -> None:
    check(mesh_of(AxisType.Auto, s=2), P(None, "s", None), operands(dtype), causal=True)


def test_keys_of_another_length() -> None:
    check(mesh_of(AxisType.Auto, s=2), P(None, "s", None), operands(n_k=3 * N // 2), mask=regard.window(300))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_too(kind: AxisType) -> None:
    """Three kinds of axes, of which the sequence has the last."""
    mesh = mesh_of(kind, b=2, s=2)
    with jax.set_mesh(mesh):
        check(mesh, P("b", None, "s", None), operands(lead=(2,)), causal=True, dropout=0.1, seed=3)
        check(mesh, P(None, "b", "s", None), operands(lead=(2,)), score=regard.alibi(SLOPES), causal=True)


def test_positions_first_and_a_sink() -> None:
    mesh = mesh_of(AxisType.Auto, s=2)
    arrays = [jnp.swapaxes(x, -2, -3) for x in operands()[:3]]
    spread = [jax.device_put(x, NamedSharding(mesh, P("s"))) for x in arrays]
    sink = jnp.asarray([0.5, -1.0, 2.0, 0.0])

    def loss(q: Any, k: Any, v: Any, sink: Any) -> Any:
        out = regard.attention(q, k, v, sink=sink, causal=True, layout="bnhd")
        return (out**2).sum(), out

    step = jax.value_and_grad(loss, range(4), has_aux=True)
    (_, out), found = jax.jit(step)(*spread, sink)
    (_, expected), gradients = step(*arrays, sink)
    same([out, *found], [expected, *gradients])
    assert {x.sharding.spec for x in (out, *found[:3])} == {P("s")}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_derivatives_in_other_layouts(dtype: Any) -> None:
    """Batch on another axis of the mesh, positions first, `vmap` along inner axes, and 16 bits."""
    mesh, rng = mesh_of(AxisType.Auto, b=2, s=2), np.random.default_rng(0)
    shapes = {"query": (2, N, 4, 2, 8), "key": (2, N, 2, 2, 8), "value": (2, N, 2, 2, 8), "bias": (N, 2), "sink": (4,)}
    x, t = ({n: jnp.asarray(rng.standard_normal(y), dtype) for n, y in shapes.items()} for _ in range(2))
    specs = {name: P("b", "s") if name in ("query", "key", "value") else P() for name in x}
    spread, moving = ({n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in y.items()} for y in (x, t))
    axes = {"query": 3, "key": 3, "value": 3, "bias": 1, "sink": None}

    def step(x: Any, t: Any) -> Any:
        def loss(x: Any) -> Any:
            call = jax.vmap(lambda x: regard.attention(**x, causal=True, layout="bnhd"), (axes,))
            return (call(x).astype(np.float32) ** 2).sum()

        return jax.jvp(jax.grad(loss), (x,), (t,))

    warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", regard.RegardWarning)
        found = jax.jit(step)(spread, moving)
    expected = jax.jit(step)(x, t)
    for got, exact in zip(found, expected, strict=True):
        same([got[name] for name in ("query", "key", "value")], [exact[name] for name in ("query", "key", "value")])
        for name in ("bias", "sink"):  # added over devices of another axis
            a, b = np.float32(got[name]), np.float32(exact[name])
            np.testing.assert_allclose(a, b, rtol=0.02, atol=(1e-5 if dtype == np.float32 else 0.02) * np.abs(b).max())


def test_masked_keys_of_another_device_may_be_anything() -> None:
    arrays = operands()
    arrays[1] = arrays[1].at[:, 700:1300].set(jnp.nan)
    arrays[2] = arrays[2].at[:, 700:1300].set(jnp.inf)
    rule = regard.mask(lambda b, h, i, j: (j < 700) | (j >= 1300))
    found = check(mesh_of(AxisType.Auto, s=4), P(None, "s", None), arrays, mask=rule)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_operands_that_lie_otherwise() -> None:
    """Keys that every device has, and keys along another axis: as the query lies."""
    mesh = mesh_of(AxisType.Auto, s=2, t=2)
    q, k, v = operands()[:3]
    expected = regard.attention(q, k, v, causal=True)
    for other in (P(), P(None, "t"), P(None, ("s", "t"))):
        spread = [jax.device_put(x, NamedSharding(mesh, y)) for x, y in ((q, P(None, "s")), (k, other), (v, other))]
        same(jax.jit(lambda *x: regard.attention(*x, causal=True))(*spread), expected)
        same(regard.attention(*spread, causal=True), expected)  # compiled, too


def test_what_needs_whole_sequences() -> None:
    """Weights, other statistics and XLA's own engine gather, and are right."""
    mesh = mesh_of(AxisType.Auto, s=4)
    arrays = [x[:, :256] for x in operands()[:3]]
    spread = [jax.device_put(x, NamedSharding(mesh, P(None, "s"))) for x in arrays]

    def weights(*x: Any) -> Any:
        return regard.attention(*x, causal=True, return_weights=True)

    def others(*x: Any) -> Any:
        return regard.attention(*x, causal=True, observe=["received"])[1]["received"]

    warns = "a sequence that is sharded is gathered on every device: {} needs it whole"
    warn_once.cache_clear()

    kinds = (weights, "return_weights"), (others, "the statistic 'received'")
    for function, reason in kinds:
        with pytest.warns(regard.RegardWarning, match=warns.format(f"{reason}.*")):
            found = jax.jit(function)(*spread)
        same(found, function(*arrays))
    xla = jax.jit(lambda *x: regard.attention(*x, causal=True, engine="xla"))
    np.testing.assert_allclose(xla(*spread), regard.attention(*arrays, causal=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "steps"), [(2**16, 8), (2**12, 4)])
def test_memory_of_a_device(n: int, steps: int) -> None:
    """Its sums and some steps of the keys, not all of them."""
    mesh, d = mesh_of(AxisType.Auto, s=4), 64
    x = jax.ShapeDtypeStruct((1, n, d), np.float32, sharding=NamedSharding(mesh, P(None, "s")))
    for mask in (None, regard.window(256)):
        program = jax.jit(lambda q, k, v, mask=mask: regard.attention(q, k, v, mask=mask)).lower(x, x, x).compile()
        assert "all-gather" not in program.as_text()
        whole, sums = 2 * n * d * 4, 1.2 * n // 4 * d * 4
        assert program.memory_analysis().temp_size_in_bytes < sums + 3 * whole / steps


def in_shard_map(mesh: Any, check_vma: bool, *arrays: Any, **options: Any) -> Any:
    """Outputs and gradients of `context_parallel_attention`, as `results` has them."""
    row, column = P(None, "s", None), P(None, "s")

    def call(q: Any, k: Any, v: Any) -> Any:
        out, seen = regard.jax.context_parallel_attention(q, k, v, axis_name="s", observe=["lse", "entropy"], **options)
        return out, seen.lse, seen.entropy

    spread = jax.shard_map(call, mesh=mesh, in_specs=(row,) * 3, out_specs=(row, column, column), check_vma=check_vma)

    def step(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> Any:
        outputs, back = jax.vjp(spread, q, k, v)
        return outputs, back((dout, dlse.astype(outputs[1].dtype), dlse.astype(outputs[2].dtype)))

    return jax.jit(step)(*arrays)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("devices", "way"), [(1, "causal"), (2, "scores"), (4, "documents"), (4, "one sees nothing")])
def test_inside_of_shard_map(devices: int, way: str, check_vma: bool) -> None:
    arrays = operands()
    mesh = mesh_of(AxisType.Auto, s=devices)
    same(in_shard_map(mesh, check_vma, *arrays, **WAYS[way]), results(*arrays, **WAYS[way]))


def test_shard_map_outside_of_jit() -> None:
    q, k, v = (x[:, :256] for x in operands()[:3])
    call = partial(regard.jax.context_parallel_attention, axis_name="s", causal=True)
    mesh, spec = mesh_of(AxisType.Auto, s=2), P(None, "s")
    same(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)(q, k, v), regard.attention(q, k, v, causal=True))


def test_rounded_outputs_inside_of_shard_map() -> None:
    arrays = operands(jnp.bfloat16)
    same(in_shard_map(mesh_of(AxisType.Auto, s=2), True, *arrays, causal=True), results(*arrays, causal=True))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sink_inside_of_shard_map(check_vma: bool) -> None:
    """Only out has a cotangent; heads lie on another axis, and a device says which."""
    mesh = mesh_of(AxisType.Auto, h=2, s=2)
    arrays, sink, spec = [x[:, :512] for x in operands()[:3]], jnp.asarray([0.5, -1.0, 2.0, 0.0]), P("h", "s")

    def call(q: Any, k: Any, v: Any, sink: Any) -> Any:
        place = (0, jax.lax.axis_index("h") * 2, 0)
        score = regard.alibi(SLOPES)
        return regard.jax.context_parallel_attention(q, k, v, axis_name="s", sink=sink, score=score, origin=place)

    spread = jax.shard_map(call, mesh=mesh, in_specs=(spec, spec, spec, P("h")), out_specs=spec, check_vma=check_vma)

    def step(call: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *x: (call(*x) ** 2).sum(), range(4)))(*arrays, sink)

    one = step(lambda q, k, v, sink: regard.attention(q, k, v, sink=sink, score=regard.alibi(SLOPES)))
    found = step(spread)
    same(found[1][:3], one[1][:3])
    np.testing.assert_allclose(found[1][3], one[1][3], rtol=1e-5)


def test_errors_inside_of_shard_map() -> None:
    mesh, (q, k, v) = mesh_of(AxisType.Auto, s=2), (x[:, :64] for x in operands()[:3])
    spec = P(None, "s")

    def of(**options: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return regard.jax.context_parallel_attention(q, k, v, **{"axis_name": "s", **options})

        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))

    with pytest.raises(ValueError, match=r"axis_name must name an axis of the jax.shard_map around the call, got 'cp'"):
        of(axis_name="cp")(q, k, v)
    with pytest.raises(ValueError, match="axis_name must name an axis"):
        regard.jax.context_parallel_attention(q, k, v, axis_name="s")
    with pytest.raises(ValueError, match="does not know the statistic 'received'"):
        of(observe=["received"])(q, k, v)
    with pytest.raises(ValueError, match="does not know engine='xla'"):
        of(engine="xla")(q, k, v)
    with pytest.raises(ValueError, match="has no return_weights"):
        of(return_weights=True)(q, k, v)
    with pytest.raises(ValueError, match=r"bias must align right to \(..., h, n_q, n_k\) = \(4, 64, 64\)"):
        of(bias=jnp.zeros((32, 32)))(q, k, v)
    second = jax.grad(lambda q: jax.grad(lambda q: (of()(q, k, v) ** 2).sum())(q).sum())
    with pytest.raises(ValueError, match="context_parallel_attention has no third derivative"):
        jax.grad(lambda q: second(q).sum())(q)
    with pytest.raises(ValueError, match="context_parallel_attention does not know forward over forward mode"):
        jax.jvp(lambda q: jax.jvp(of(), (q, k, v), (q, k, v))[1], (q,), (q,))


def test_scores_that_gradients_refuse() -> None:
    """One sentence under `jit` and inside of `shard_map`; the tangent has the bits of one device."""
    mesh, (q, k, v) = mesh_of(AxisType.Auto, s=2), (x[:, :512] for x in operands()[:3])
    q = q.at[:, -5:].multiply(4000)
    cp = partial(regard.jax.context_parallel_attention, axis_name="s")
    for call in (regard.attention, jax.shard_map(cp, mesh=mesh, in_specs=P(None, "s"), out_specs=P(None, "s"))):
        spread = [jax.device_put(x, NamedSharding(mesh, P(None, "s"))) for x in (q, k, v)]
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"need scores of at most 2.9e\+03, got an lse of [0-9.]+e\+04"
        ):
            jax.block_until_ready(jax.jit(jax.grad(lambda *x, call=call: call(*x).sum()))(*spread))
        tangent = jax.jit(lambda *x, call=call: jax.jvp(call, x, x))
        same(tangent(*spread), jax.jvp(regard.attention, (q, k, v), (q, k, v)))


def test_two_processes() -> None:
    """Each with two devices, by `jax.distributed` over gloo."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = Path(__file__).parent / "sequence_processes.py"
    environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    commands = [[sys.executable, str(script), str(port), "2", str(process)] for process in range(2)]
    started = [
        subprocess.Popen(x, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for x in commands
    ]
    try:
        for process in started:
            out, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-2000:]
            assert out.endswith("same\n")
    finally:
        for process in started:
            process.kill()
