"""Small calls of compiled programs are prepared, forward and backward, with the bits of NumPy's."""

from typing import Any

import numpy as np
import pytest

import regard
from regard.engines import cpu

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp

import jax

RNG = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "bias": RNG.standard_normal((9, 7)).astype(np.float32), "sink": RNG.standard_normal(4).astype(np.float32),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "rules": {"mask": regard.window(3), "score": regard.softcap(2.0)},
    "dropout": {"dropout": 0.3, "seed": 5},
    "bias, sink": {"causal": True},
    "all": {"mask": regard.window(3), "dropout": 0.3, "seed": 5},
}
WITH = {"bias, sink": ("bias", "sink"), "all": ("bias", "sink")}


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of the engine that get a problem."""
    monkeypatch.setattr("regard.runtime.threads._chosen", 1)
    names: list[str] = []
    for name in ("forward", "backward"):
        run = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *x, name=name, run=run: names.append(name) or run(*x))
    return names


def operands(layout: str, dtype: Any) -> list[Any]:
    """Query, key, value, and a cotangent of the output."""
    shapes = (2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 5), (2, 4, 9, 5)
    made = [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [jnp.asarray(x.swapaxes(1, 2) if layout == "bnhd" else x, dtype) for x in made]


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("options", OPTIONS)
def test_known_calls(options: str, layout: str, entered: list[str]) -> None:
    arrays = {name: ARRAYS[name] for name in WITH.get(options, ())}
    given = OPTIONS[options] | {"layout": layout}
    trained = [name for name in arrays if name == "sink"]

    def call(q: Any, k: Any, v: Any, dout: Any, arrays: Any) -> Any:
        def f(q: Any, k: Any, v: Any, sink: Any) -> Any:
            return regard.attention(q, k, v, **given, **arrays | dict(zip(trained, sink, strict=True)))

        out, pull = jax.vjp(f, q, k, v, [arrays[name] for name in trained])
        return out, *pull(dout)[:3], *pull(dout)[3]

    compiled = jax.jit(call)
    for _ in range(3):  # memory of the one before is dirty
        x = operands(layout, jnp.float32)
        found = compiled(*x, {name: jnp.asarray(a) for name, a in arrays.items()})
        assert entered == ["backward"] * (layout == "bnhd")  # whose gradients have another order in memory
        plain = [np.asarray(a) for a in x]
        expected = [regard.attention(*plain[:3], engine="cpu", **given, **arrays)]
        g = regard.attention_vjp(*plain, engine="cpu", **given, **arrays)
        expected += [g.query, g.key, g.value, *(getattr(g, name) for name in trained)]
        for a, b in zip(found, expected, strict=True):
            assert np.asarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
        entered.clear()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_in_16_bits(dtype: Any, entered: list[str]) -> None:
    gradients = jax.jit(lambda q, k, v, dout: jax.vjp(regard.attention, q, k, v)[1](dout))
    first = [gradients(*operands("bhnd", dtype)) for _ in range(2)]
    assert not entered
    jax.block_until_ready(first)


def test_a_seed_that_is_traced(entered: list[str]) -> None:
    x = operands("bhnd", jnp.float32)[:3]
    compiled = jax.jit(lambda q, k, v, seed: regard.attention(q, k, v, dropout=0.4, seed=seed))
    for seed in (0, 7, 8, 7):
        found = compiled(*x, seed)
        assert not entered
        expected = regard.attention(*map(np.asarray, x), engine="cpu", dropout=0.4, seed=seed)
        assert np.asarray(found).tobytes() == expected.tobytes()
        entered.clear()


@pytest.mark.parametrize("n", [7, 200])
def test_tables_that_are_traced(n: int, entered: list[str]) -> None:
    """A prepared call reads them in each run; calls of several tiles, and wider integers, are computed as a whole."""
    q, k, v, dout = operands("bhnd", jnp.float32)
    k, v = (jnp.asarray(RNG.standard_normal((2, 2, n, x.shape[-1])), jnp.float32) for x in (k, v))

    def call(lengths: Any, slopes: Any) -> Any:
        def f(q: Any, k: Any, v: Any) -> Any:
            return regard.attention(q, k, v, mask=regard.padding(lengths), score=regard.alibi(slopes))

        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(dout)

    compiled = jax.jit(call)
    many = 2**30
    for lengths, slopes in (
        ([5, 3], 0.1),
        ([1, n], 2.0),
        ([0, 2], 0.0),
        ([many, 4], 1.0),
        ([n, 1], np.inf),
        ([2, 2], 0.5),
    ):
        given = jnp.array(lengths, jnp.int32), jnp.full(4, slopes, jnp.float32)
        found = compiled(*given)
        assert bool(entered) == (n > 128 or many in lengths or slopes == np.inf)
        mask, score = (regard.padding(np.array(lengths)), regard.alibi(np.array(given[1])))
        plain = [np.asarray(a) for a in (q, k, v)]
        expected = [regard.attention(*plain, engine="cpu", mask=mask, score=score)]
        g = regard.attention_vjp(*plain, np.asarray(dout), engine="cpu", mask=mask, score=score)
        for a, b in zip(found, [*expected, g.query, g.key, g.value], strict=True):
            assert np.asarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
        entered.clear()
