"""Rules as pytrees: their tables of floats are leaves, the rest is static."""

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
    assert jax.tree.leaves(MASK) == []
    assert jax.tree.structure(score) == jax.tree.structure(regard.alibi(SLOPES + 1))
    assert jax.tree.structure(score) != jax.tree.structure(regard.relative(jnp.zeros(3)))
    assert jax.tree.structure(regard.window(3)) != jax.tree.structure(regard.window(4))
    documents = [regard.documents(np.array(ids)) for ids in ([0, 0, 1], [0, 0, 1], [0, 1, 1])]
    same_ids, equal_ids, others = map(jax.tree.structure, documents)
    assert same_ids == equal_ids != others


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
