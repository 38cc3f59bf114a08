"""JAX arrays give the bits of NumPy arrays on the same engine, eagerly and under jit."""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from cases import CASES, Case
from support import SAME_BITS, on_cpu

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp

import jax

pytestmark = pytest.mark.engine("tiled")

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
EVERYTHING = [
    "lse", "entropy", "visible", "normalized_entropy", "effective_states", "max", "argmax", "received",
    "group_received", "profile", regard.top(3), regard.mass(regard.window(1)),
    regard.mass(lambda b, h, i, j: i // 4 == j // 4), regard.pooled(3, 2), regard.pooled(4, 5, "max"),
    regard.renyi(2), regard.renyi(np.inf),
]  # fmt: skip


def same(got: Any, expected: Any) -> None:
    assert got.shape == expected.shape
    if expected.dtype == np.int64:
        expected = expected.astype(got.dtype)
    assert got.dtype == expected.dtype
    assert np.asarray(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("case", on_cpu(SAME_BITS, *SAME_BITS[::8]), ids=str)
def test_every_case_has_the_bits_of_numpy(case: Case, dtype: Any) -> None:
    with jax.enable_x64(True):
        q, k, v, options = case.inputs(dtype)
        expected = regard.attention(q, k, v, **options)
        arrays = [jnp.asarray(x) for x in (q, k, v)]
        same(regard.attention(*arrays, **options), expected)
        if dtype in (np.float32, ml_dtypes.bfloat16):
            same(jax.jit(lambda *x: regard.attention(*x, **options))(*arrays), expected)


def test_an_engine_may_be_named() -> None:
    q, k, v, options = CASES[-1].inputs(np.float32)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in (q, k, v)]
        for engine in ("cpu", "tiled", "spec"):
            expected = regard.attention(q, k, v, **options, engine=engine)
            same(regard.attention(*arrays, **options, engine=engine), expected)


@pytest.mark.parametrize("case", on_cpu(SAME_BITS[::4], *SAME_BITS[::16]), ids=str)
def test_statistics_and_weights(case: Case) -> None:
    q, k, v, options = case.inputs(np.float32)
    out, seen = regard.attention(q, k, v, **options, observe=EVERYTHING)

    weights = regard.attention(q, k, v, **options, return_weights=True)[1]

    @jax.jit
    def call(q: Any, k: Any, v: Any) -> Any:
        return regard.attention(q, k, v, **options, observe=EVERYTHING, return_weights=True)

    with jax.enable_x64(True):
        found_out, found_weights, found = call(*map(jnp.asarray, (q, k, v)))
    same(found_out, out)
    same(found_weights, weights)
    assert list(found) == list(seen)
    for s, x in seen.items():
        for got, expected in zip(jax.tree.leaves(found[s]), jax.tree.leaves(x), strict=True):
            if s.name == "effective_states":  # the exponential is JAX's
                np.testing.assert_array_max_ulp(np.asarray(got), expected, 4)
            else:
                same(got, expected)


def test_a_mass_of_traced_arrays() -> None:
    q, k, v, _ = CASES[0].inputs(np.float32)
    ids = np.arange(21) // 5

    def call(q: Any, k: Any, v: Any, ids: Any) -> Any:
        mass, rows = regard.mass(regard.documents(ids) | (ids[:, None] == 0)), regard.weights_of([2, 0])
        seen = regard.attention(q, k, v, observe=[mass, rows])[1]
        return seen[mass], seen[rows]

    for got, expected in zip(jax.jit(call)(*map(jnp.asarray, (q, k, v, ids))), call(q, k, v, ids), strict=True):
        same(got, expected)


def test_without_x64() -> None:
    """Where JAX has 32 bits alone, positions and wide integers still are what they are."""
    for case in SAME_BITS:
        q, k, v, options = case.inputs(np.float32)
        if options.get("bias") is not None:
            options["bias"] = options["bias"].astype(np.float32)
        got = regard.attention(*map(jnp.asarray, (q, k, v)), **options)
        same(got, regard.attention(q, k, v, **options))


def test_arrays_of_every_option_may_be_traced() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 12, 8), dtype=np.float32)
    arrays = {
        "lengths": np.array([12, 5, 9]), "ids": np.repeat(np.arange(4), 4), "flags": rng.random((12, 12)) < 0.8,
        "ones": rng.integers(0, 2, (4, 1, 12)), "table": rng.standard_normal((4, 7)).astype(np.float32),
        "slopes": rng.standard_normal(4).astype(np.float32), "pattern": np.tril(np.ones((4, 4), bool)),
        "bias": rng.standard_normal((4, 1, 12)).astype(np.float32), "sink": rng.standard_normal(4).astype(np.float32),
        "offset": np.array([1, 3]), "b": np.array(1), "seed": np.array(7),
    }  # fmt: skip

    def call(q: Any, k: Any, v: Any, a: Any) -> Any:
        mask = regard.padding(a["lengths"]) & regard.documents(a["ids"]) | regard.blocks(a["pattern"], 4)
        return regard.attention(
            q, k, v, mask=(mask | a["flags"]) & (regard.window(9, 9) | a["ones"]), bias=a["bias"], sink=a["sink"],
            score=[regard.relative(regard.table(a["table"])), regard.alibi(a["slopes"])], offset=a["offset"],
            origin=(a["b"], 0, 0) if isinstance(a["b"], jax.Array) else (int(a["b"]), 0, 0), dropout=0.2,
            seed=a["seed"] if isinstance(a["seed"], jax.Array) else int(a["seed"]),
        )  # fmt: skip

    plain = call(q, k, v, arrays)
    traced = jax.tree.map(jnp.asarray, arrays)
    same(jax.jit(call)(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), traced), plain)
    same(call(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), traced), plain)


def test_a_cache_step_is_compiled_once() -> None:
    """Decoding into a static cache: the position is traced, and each step has the bits of the whole."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(x) for x in rng.standard_normal((3, 2, 16, 8), dtype=np.float32))
    whole = regard.attention(q, k, v, causal=True)
    traces = 0

    @jax.jit
    def step(q: Any, position: Any) -> Any:
        nonlocal traces
        traces += 1
        return regard.attention(q, k, v, causal=True, offset=position)

    for n in range(16):
        same(step(q[:, n : n + 1], n), np.asarray(whole[:, n : n + 1]))
    assert traces == 1


def test_seeds_and_keys() -> None:
    q, k, v = (jnp.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 2, 30, 4), dtype=np.float32))

    def drop(seed: Any) -> Any:
        return regard.attention(q, k, v, dropout=0.5, seed=seed)

    expected = np.asarray(drop(12))
    same(jax.jit(drop)(12), expected)
    same(drop(jnp.asarray(12)), expected)
    key = jax.random.key(3)
    same(jax.jit(drop)(key), np.asarray(drop(key)))
    same(drop(jax.random.key_data(key)), np.asarray(drop(key)))
    assert not np.array_equal(drop(key), drop(jax.random.key(4)))
    words = [int(x) for x in jax.random.bits(key, (2,), np.uint32)]
    same(drop(words[0] << 32 | words[1]), np.asarray(drop(key)))


@pytest.mark.parametrize("engine", [None, "xla"])
def test_a_table_with_an_entry_for_each_query(engine):
    x = jnp.ones((2, 8, 4))

    def call(values, x, bounds=None, **options):
        table = regard.table(values, bounds=bounds)
        score = regard.score(lambda s, b, h, i, j: s + table[i])
        return regard.attention(x[:, :5], x, x, score=score, engine=engine, **options)

    for wrapped in (call, jax.jit(call)):
        with pytest.raises(ValueError, match="has an entry for each of the 5 rows: give offset=0"):
            wrapped(jnp.arange(5.0), x)
    jax.jit(lambda values: call(values, x, offset=0))(jnp.arange(5.0))
    jax.jit(lambda values: call(values, x, bounds="clamp"))(jnp.arange(5.0))


@pytest.mark.parametrize("engine", [None, "xla"])
def test_a_table_that_is_longer_than_a_whole_call(engine):
    x = jnp.ones((1, 2, 8, 4))

    def call(lengths, slopes, x, **options):
        rules = {"mask": regard.padding(lengths), "score": regard.alibi(slopes)}
        return regard.attention(x, x, x, engine=engine, **rules, **options)

    lengths, slopes = (jnp.array([4, 6]), jnp.array([4])), (jnp.ones(3), jnp.ones(2))
    for wrapped in (call, jax.jit(call), lambda n, s, x: jax.vmap(partial(call, n, s))(x[None])):
        for n, s in ((lengths[0], slopes[1]), (lengths[1], slopes[0])):
            with pytest.raises(ValueError, match=r"but this call ends at .*, and no origin= places it in a larger one"):
                wrapped(n, s, x)
        wrapped(lengths[1], slopes[1], x)
    jax.jit(lambda b: call(lengths[0], slopes[0], x, origin=(b, 0, 0)))(1)


def test_tables_raise_where_they_are_left():
    x = jnp.ones((2, 8, 4))

    def call(values, x, mask=None, **options):
        table = regard.table(values, bounds="raise")
        return regard.attention(x, x, x, score=lambda s, b, h, i, j: s + table[h, i - j], mask=mask, **options)

    values = jnp.arange(16.0).reshape(2, 8)
    jax.jit(lambda values, x: call(values, x, causal=True))(values, x)  # the table is traced, its shape is known
    jax.grad(lambda values: call(values, x, causal=True).sum())(values)
    for wrapped in (call, jax.jit(call)):
        with pytest.raises(ValueError, match="axis 1 is read at -1, outside of 0 to 7"):
            wrapped(values, x)
    with pytest.raises(TypeError, match="its index depends on values that are not known before the call"):
        jax.jit(lambda flags: call(values, x, flags))(jnp.tril(jnp.ones((8, 8), bool)))
    with pytest.raises(TypeError, match="bounds='raise' of a table is not checked where offset or origin are traced"):
        jax.jit(lambda offset: call(values, x, causal=True, offset=offset))(0)
