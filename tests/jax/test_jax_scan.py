"""The plain JAX form agrees with the specification, in its values and its derivatives."""

from typing import Any

import numpy as np
import pytest

import regard
from cases import CASES, Case, case
from regard.rules import OPS, At, evaluate, rule_text
from regard.rules.expression import build, cast, make

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp

import jax
from regard.jax.xla import scan
from regard.jax.xla.values import RuleIndices, settings
from regard.jax.xla.values import evaluate as values_of

pytestmark = pytest.mark.engine("tiled")


def close(got: Any, expected: Any, name: str = "") -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_every_case(c: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, in blocks so small that there are several."""
    monkeypatch.setattr(scan, "BLOCK", 8 if c.n_k < 100 else 128)
    q, k, v, options = c.inputs(np.float64)
    tiled: Any = {"engine": "tiled"}  # which has nothing to compile
    expected, seen = regard.attention(q, k, v, **options, observe=["lse", "entropy"], **tiled)
    dout = np.random.default_rng(0).standard_normal(expected.shape)
    gradients = regard.attention_vjp(q, k, v, dout, **options, **tiled)
    with jax.enable_x64(True):

        @jax.jit
        def call(q: Any, k: Any, v: Any) -> Any:
            def function(q: Any, k: Any, v: Any) -> Any:
                out, found = regard.attention(q, k, v, **options, observe=["lse", "entropy"], engine="xla")
                return out, found

            out, pull, found = jax.vjp(function, q, k, v, has_aux=True)
            return out, found, pull(jnp.asarray(dout))

        out, found, pulled = call(*map(jnp.asarray, (q, k, v)))
    close(out, expected)
    close(found.lse, seen.lse)
    close(found.entropy, seen.entropy)
    if c.poison is None:
        for name, x in zip(("query", "key", "value"), pulled, strict=True):
            close(x, getattr(gradients, name), name)


@pytest.mark.parametrize("name", ["everything", "causal over tiles", "NaN behind the mask", "no keys", "origin"])
def test_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(name)
    monkeypatch.setattr(scan, "BLOCK", 8 if c.n_k < 100 else 128)
    q, k, v, options = c.inputs(np.float64)
    out, weights = regard.attention(q, k, v, **options, return_weights=True)
    with jax.enable_x64(True):
        call = jax.jit(lambda *x: regard.attention(*x, **options, return_weights=True, engine="xla"))
        found_out, found_weights = call(*map(jnp.asarray, (q, k, v)))
    close(found_out, out)
    close(found_weights, weights)


STATISTICS = [
    "visible", "normalized_entropy", "max", "argmax", "received", "group_received", "profile",
    regard.top(3), regard.pooled(3, 2), regard.mass(regard.window(1)), regard.weights_of([0, 2]), regard.renyi(2),
]  # fmt: skip


@pytest.mark.parametrize("statistic", STATISTICS, ids=str)
def test_other_statistics_are_refused(statistic: Any) -> None:
    """On XLA alone: eagerly, compiled, and in a program for another device."""
    x = jnp.ones((2, 9, 8))
    name = statistic if isinstance(statistic, str) else statistic.name
    message = f"XLA observes lse and entropy, not '{name}': call an engine of the CPU, or take return_weights=True"

    def call(x: Any, engine: Any = "xla") -> Any:
        return regard.attention(x, x, x, observe=["lse", statistic], engine=engine)

    assert len(call(x, None)[1]) == 2  # a CPU engine has it
    for function in (call, jax.jit(call)):
        with pytest.raises(NotImplementedError) as error:
            function(x)
        assert str(error.value) == message
    with pytest.raises(NotImplementedError, match="not '" + name):
        jax.export.export(jax.jit(lambda x: call(x, None)), platforms=["cuda"])(jax.ShapeDtypeStruct(x.shape, x.dtype))


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.rule != "leaf"])
def test_every_operation(name: str) -> None:
    """Its value in JAX is that in NumPy, also at zeros, ties, NaN and the ends of the 64-bit range."""
    s, i, j = make("s", "float"), make("i", "int"), make("j", "int")
    some = {"bits": [(i, j)], "int": [(i, j)], "where": [(build("less", i, j), s, cast(j, "float"))]}
    operands = some.get(OPS[name].rule, [(s, cast(j, "float")), (i, j)])
    if OPS[name].rule == "cast":
        nodes = [cast(s if name == "int" else i, name)]
    else:
        count = {"where": 3, "erf": 1}.get(name) or getattr(np, name).nin
        nodes = [build(name, *given[:count]) for given in operands]
    values = np.array([-(2.0**70), -3.5, -1.0, -0.0, 0.25, 1.0, 2.0, 7.0, 2.0**70, np.inf, np.nan])
    rows, columns = np.arange(-3, 8), np.array([-2, 0, 1, 3])
    grid = np.broadcast_to(values[:, None], (11, 4))
    zero = np.zeros((), np.int64)
    expected = evaluate(nodes, At(zero, zero, rows[:, None], columns, s=grid))
    with settings():
        place = RuleIndices(zero, zero, jnp.asarray(rows[:, None]), jnp.asarray(columns), None, (), ())
        texts = rule_text(nodes[0])[0]
        found = values_of(texts, nodes, jnp.asarray(grid), (), place, np.float64)
    for got, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, right.dtype), right, rtol=1e-12, atol=1e-300)


def test_all_inputs_and_vmap() -> None:
    """Gradients of bias, sink and tables, tangents, and elements of a vmap, beside those of an engine."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        shapes = {
            "q": (3, 2, 4, 9, 4),
            "k": (2, 2, 9, 4),
            "v": (2, 2, 9, 5),
            "bias": (4, 1, 9),
            "sink": (4,),
            "table": (4, 7),
        }
        x = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}

        def call(q: Any, x: Any, engine: Any) -> Any:
            rule = regard.relative(regard.table(x["table"]))
            return regard.attention(
                q, x["k"], x["v"], score=[rule, regard.softcap(3.0)], bias=x["bias"], sink=x["sink"], causal=True,
                dropout=0.2, seed=1, engine=engine, observe=["entropy"],
            )  # fmt: skip

        def results(engine: Any) -> Any:
            def loss(x: Any) -> Any:
                out, seen = jax.vmap(lambda q: call(q, x, engine))(x["q"])
                return (out**2).sum() + (seen.entropy**3).sum()

            along = jax.jvp(jax.grad(loss), (x,), (x,))
            return jax.tree.leaves(along)

        for a, b in zip(jax.jit(results, static_argnums=0)("xla"), results(None), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


def test_slopes_of_hidden_pairs_do_not_count() -> None:
    """A rule whose slopes are NaN and −∞ where the mask hides: gradients of scores and of its table."""
    rng = np.random.default_rng(0)

    def loss(q: Any, table: Any, engine: str) -> Any:
        def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s * np.sqrt(i - j + 1) + regard.table(table)[h] * np.log(i - j + 1)

        return (regard.attention(q, q, q, causal=True, score=rule, engine=engine) ** 2).sum()

    with jax.enable_x64(True):
        x = jnp.asarray(rng.standard_normal((2, 9, 4))), jnp.asarray([0.5, -0.25])
        found, expected = (jax.grad(loss, (0, 1))(*x, engine) for engine in ("xla", "tiled"))
    for got, right in zip(found, expected, strict=True):
        assert np.isfinite(right).all()
        close(got, right)


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("position", [2, 8])
def test_gradients_of_what_is_not_finite(name: str, position: int) -> None:
    """A NaN that some queries see, or the last one alone, makes the gradients NaN that it makes on an engine."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = {n: jnp.asarray(rng.standard_normal((2, 9, 4))) for n in ("query", "key", "value")}
        x[name] = x[name].at[:, position, 1].set(jnp.nan)

        def loss(x: Any, engine: str) -> Any:
            return (regard.attention(**x, causal=True, engine=engine) ** 2).sum()

        found, expected = (jax.grad(loss)(x, engine) for engine in ("xla", "tiled"))
    for n in x:
        assert np.isnan(expected[n]).any()
        close(found[n], expected[n], n)


def test_without_x64() -> None:
    q, k, v, options = case("everything").inputs(np.float32)
    got = regard.attention(*map(jnp.asarray, (q, k, v)), **options, engine="xla")
    np.testing.assert_allclose(got, regard.attention(q, k, v, **options), rtol=1e-4, atol=1e-5)
    large = case("mask rule with large integers")
    q, k, v, options = large.inputs(np.float32)
    got = regard.attention(*map(jnp.asarray, (q, k, v)), **options, engine="xla")
    np.testing.assert_allclose(got, regard.attention(q, k, v, **options), rtol=1e-4, atol=1e-5)


def test_memory_is_linear() -> None:
    """Of a gradient at twice the length, XLA's own count of temporary memory at most doubles."""

    def temporary(n: int) -> int:
        x = jax.ShapeDtypeStruct((1, n, 16), np.float32)
        step = jax.jit(jax.grad(lambda x: regard.attention(x, x, x, causal=True, engine="xla").sum()))
        return int(step.lower(x).compile().memory_analysis().temp_size_in_bytes)

    assert temporary(16384) < 2.1 * temporary(8192)
    assert temporary(16384) < 16384**2
