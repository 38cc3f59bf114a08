"""Rules as pytrees: their arrays are leaves, the rest is static."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax
import regard
import regard.jax

pytestmark = pytest.mark.engine("tiled")

X = jax.random.normal(jax.random.key(0), (2, 4, 6, 8))
SLOPES = jnp.array([0.1, 0.2, 0.3, 0.4])
MASK = regard.window(4) & regard.documents(np.arange(6) // 3) & np.tril(np.ones((6, 6), bool))


def loss(score: Any, mask: Any = MASK) -> Any:
    return (regard.attention(X, X, X, score=score, mask=mask) ** 2).sum()


def expected(slopes: Any = SLOPES) -> Any:
    """Return the derivative by the slopes, of a rule that is made in the differentiated function."""
    return jax.grad(lambda s: loss(regard.alibi(s)))(slopes)


def same(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=2e-6)


def test_leaves() -> None:
    score = regard.alibi(SLOPES)
    (leaf,) = jax.tree.leaves(score)
    assert leaf is SLOPES
    ids, dense = jax.tree.leaves(MASK)
    np.testing.assert_array_equal(ids[0], np.arange(6) // 3)
    assert dense.dtype == bool
    assert jax.tree.structure(score) == jax.tree.structure(regard.alibi(SLOPES + 1))
    assert jax.tree.structure(score) != jax.tree.structure(regard.relative(jnp.zeros(3)))
    assert jax.tree.structure(regard.window(3)) != jax.tree.structure(regard.window(4))
    documents = [regard.documents(np.array(ids)) for ids in ([0, 0, 1], [0, 0, 1], [0, 1, 1])]
    assert len(set(map(jax.tree.structure, documents))) == 1
    assert jax.tree.structure(documents[0]) != jax.tree.structure(regard.documents(np.array([0, 0, 1, 1])))


@pytest.mark.engine("cpu")
def test_gradient_of_a_rule() -> None:
    gradient = jax.grad(loss)(regard.alibi(SLOPES))
    same(jax.tree.leaves(gradient)[0], expected())


def test_a_rule_as_an_argument_of_jit_is_traced_once() -> None:
    traces = []

    @jax.jit
    def call(score: Any, mask: Any) -> Any:
        traces.append(score)
        return loss(score, mask)

    for n in range(4):
        same(call(regard.alibi(SLOPES + n), MASK), loss(regard.alibi(SLOPES + n)))
    assert len(traces) == 1


def not_before(ids: Any) -> Any:
    return regard.mask(lambda b, h, i, j: ids[i] >= ids[j])


MASKS: dict[str, Callable[[int], Any]] = {
    "documents": lambda n: regard.documents(jnp.arange(6) // (n + 1)),
    "padding": lambda n: regard.padding(jnp.array([3 + n, 5])),
    "padding, left": lambda n: regard.padding(np.array([3 + n, 5]), side="left"),
    "prefix": lambda n: regard.causal() & regard.prefix(np.array([n, 3])),
    "blocks": lambda n: regard.blocks(np.tri(3, k=n - 1, dtype=bool), 2),
    "array": lambda n: regard.causal() | np.tri(6, k=n, dtype=bool),
    "function": lambda n: not_before(regard.table(np.arange(6) // (n + 1))),
}


@pytest.mark.parametrize("engine", ["tiled", "xla"])
@pytest.mark.parametrize("name", MASKS)
def test_arrays_of_a_mask_are_data(name: str, engine: str) -> None:
    traces = []

    @jax.jit
    def call(x: Any, mask: Any) -> Any:
        traces.append(mask)
        return jax.value_and_grad(lambda q: (regard.attention(q, x, x, mask=mask, engine=engine) ** 2).sum())(x)

    for n in range(3):
        mask = MASKS[name](n)
        value, gradient = call(X, mask)
        expected, like = jax.value_and_grad(lambda q, m=mask: (regard.attention(q, X, X, mask=m) ** 2).sum())(X)
        same(value, expected)
        np.testing.assert_allclose(gradient, like, rtol=2e-5, atol=1e-5)
    assert len(traces) == 1


def test_leaves_that_were_mapped() -> None:
    for rule in (MASK, jax.tree.map(jnp.asarray, MASK), jax.jit(lambda m: m)(MASK)):
        assert loss(regard.alibi(SLOPES), rule) == loss(regard.alibi(SLOPES))
        x = np.asarray(X)
        same(regard.attention(x, x, x, mask=rule), regard.attention(X, X, X, mask=MASK))


def test_integers_beyond_32_bits() -> None:
    mask = not_before(regard.table(np.array([0, 1, 2**40])))
    with pytest.raises(ValueError, match="a table of int64 with values beyond 32 bits needs"):
        jax.jit(lambda m: 0)(mask)


def test_the_gradient_of_integers_is_refused() -> None:
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(lambda m: loss(None, m))(MASK)


def over_rules() -> Any:
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), regard.alibi(SLOPES))
    return jax.vmap(lambda score: loss(score))(both)


def in_scan() -> Any:
    def step(score: Any, _: Any) -> Any:
        return jax.tree.map(lambda x: 2 * x, score), loss(score)

    return jax.lax.scan(step, regard.alibi(SLOPES), None, length=2)[1]


def with_traced_ids() -> Any:
    """A rule of traced integers passes through an inner jit as an argument."""

    def outer(ids: Any) -> Any:
        mask = regard.documents(ids) & (ids[:, None] == ids[None])
        return jax.jit(lambda m: loss(regard.alibi(SLOPES), m))(mask)

    ids = jnp.arange(6) // 3
    return jax.jit(outer)(ids), loss(regard.alibi(2 * SLOPES), regard.documents(ids))


@pytest.mark.parametrize("call", [over_rules, in_scan])
def test_rules_in_transformations(call: Callable[[], Any]) -> None:
    same(call(), [loss(regard.alibi(SLOPES)), loss(regard.alibi(2 * SLOPES))])


def test_traced_integers_are_leaves() -> None:
    inside, outside = with_traced_ids()
    same(inside, loss(regard.alibi(SLOPES), regard.documents(np.arange(6) // 3)))
    same(outside, loss(regard.alibi(2 * SLOPES), regard.documents(np.arange(6) // 3)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rule: pickle.loads(pickle.dumps(rule))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    score, mask = copied(regard.alibi(SLOPES)), copied(MASK)
    assert isinstance(jax.tree.leaves(score)[0], jax.Array)
    assert loss(score, mask) == loss(regard.alibi(SLOPES))


def test_a_leaf_that_is_no_array() -> None:
    hollow = jax.tree.map(lambda x: None, regard.alibi(SLOPES))
    assert jax.tree.leaves(hollow) == []
    message = "a table of a rule must be an array, got NoneType as a leaf of the rule"
    with pytest.raises(TypeError, match=message):
        loss(hollow)


def test_numpy_reads_the_values_of_a_rule() -> None:
    x = np.asarray(X)
    for score in (regard.alibi(SLOPES), regard.alibi(np.asarray(SLOPES))):
        same(regard.attention(x, x, x, score=score), regard.attention(X, X, X, score=score))


def test_equinox() -> None:
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):  # type: ignore[misc]
        score: regard.Score
        mask: regard.Mask

        def __call__(self) -> Any:
            return loss(self.score, self.mask)

    model = Model(regard.alibi(SLOPES), MASK)
    gradient = eqx.filter_grad(lambda m: m())(model)
    same(jax.tree.leaves(gradient)[0], expected())
    assert eqx.filter_jit(model)() == pytest.approx(float(model()), rel=1e-6)
    trained, fixed = eqx.partition(model, eqx.is_inexact_array)
    assert eqx.combine(trained, fixed)() == model()
    stepped = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))
    same(stepped(), loss(regard.alibi(SLOPES - 0.1 * expected())))
    many = eqx.filter_vmap(lambda s: Model(regard.alibi(s), MASK))(jnp.stack([SLOPES, 2 * SLOPES]))
    same(eqx.filter_vmap(lambda m: m())(many), [model(), loss(regard.alibi(2 * SLOPES))])


def test_flax_makes_its_rule_in_the_call() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.slopes = nnx.Param(SLOPES)

        def __call__(self) -> Any:
            return loss(regard.alibi(self.slopes[...]))

    same(jax.tree.leaves(nnx.grad(lambda m: m())(Model()))[0], expected())
    with pytest.raises(TypeError, match=r"Param; arrays of Flax are not served: convert them with variable"):
        regard.alibi(Model().slopes)
