"""Modern Hopfield networks, and the entropies that count what they hold."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

RNG = np.random.default_rng(0)


def energy(state: Any, patterns: Any, beta: float) -> tuple[Any, Any]:
    """Ramsauer et al. 2020, equation 2, in float64, and the sum of its terms' sizes, which rounding is relative to."""
    s, x = state.astype(np.float64), patterns.astype(np.float64)
    scores = beta * np.einsum("...ia,...ja->...ij", s, x)
    top = scores.max(-1)
    lse = (top + np.log(np.exp(scores - top[..., None]).sum(-1))) / beta
    largest = (x**2).sum(-1).max(-1)[..., None]
    terms = [-lse, (s**2).sum(-1) / 2, np.log(x.shape[-2]) / beta + largest / 2]
    return sum(terms), sum(map(np.abs, terms))


@pytest.mark.parametrize("dtype", on_cpu([np.float64, np.float32, np.float16, ml_dtypes.bfloat16], np.float32))
def test_a_step_is_attention_and_lowers_the_energy(dtype: Any) -> None:
    patterns, state = RNG.standard_normal((2, 1, 9, 6)).astype(dtype), RNG.standard_normal((3, 5, 6)).astype(dtype)
    found = regard.hopfield(state, patterns, beta=1.5, steps=4)
    assert found.states.shape == (5, 2, 3, 5, 6)
    assert found.states.dtype == dtype
    assert found.energies.dtype == (np.float64 if dtype == np.float64 else np.float32)
    np.testing.assert_array_equal(found.states[0], np.broadcast_to(state, (2, 3, 5, 6)))
    keys = np.broadcast_to(patterns, (2, 3, 9, 6))
    for before, after in zip(found.states[:-1], found.states[1:], strict=True):
        np.testing.assert_array_equal(after, regard.attention(before, keys, keys, scale=1.5))
    exact, sizes = map(np.stack, zip(*[energy(x, keys, 1.5) for x in found.states], strict=True))
    precision = 4 * float(ml_dtypes.finfo(found.energies.dtype).eps)
    assert (np.abs(found.energies - exact) <= precision * sizes).all()
    rounding = 4 * float(ml_dtypes.finfo(dtype).eps) * sizes.max()  # of the state, and here of float64
    assert (np.diff(exact, axis=0) <= rounding).all()
    assert (found.energies[0] - found.energies[-1]).mean() > 1
    assert (found.energies >= 0).all()


def test_the_energy_falls_at_every_step_down_to_a_fixed_point() -> None:
    patterns, state = RNG.standard_normal((20, 12)), RNG.standard_normal((30, 12))
    for beta in (0.05, 0.3, 2.0):
        found = regard.hopfield(state, patterns, beta=beta, steps=300)
        change = np.diff(found.energies, axis=0)
        assert (change <= 1e-13).all()
        np.testing.assert_allclose(found.states[-1], found.states[-2], atol=1e-9)  # a fixed point
        moved = np.abs(np.diff(found.states, axis=0)).max(-1) > 1e-6
        assert (change[moved] < 0).all()
        norms = np.linalg.norm(found.states[1:], axis=-1)
        assert (found.energies[1:] <= 2 * (patterns**2).sum(-1).max() + 1e-12).all()
        assert (norms <= np.sqrt((patterns**2).sum(-1).max()) + 1e-12).all()


def test_a_damaged_pattern_is_retrieved_in_one_step() -> None:
    patterns = np.where(RNG.standard_normal((40, 64)) > 0, 1.0, -1.0)
    damaged = patterns.copy()
    damaged[:, :16] = 0.0
    found = regard.hopfield(damaged, patterns, beta=1.0)
    np.testing.assert_allclose(found.states[-1], patterns, atol=1e-3)
    np.testing.assert_array_equal(regard.hopfield(patterns, patterns, steps=0).states[0], patterns)
    mean = regard.hopfield(damaged, patterns, beta=1e-9).states[-1]  # all are averaged where it is hot
    np.testing.assert_allclose(mean, np.broadcast_to(patterns.mean(0), mean.shape), atol=1e-6)


def test_beta_is_that_of_attention_unless_given() -> None:
    state, patterns = RNG.standard_normal((2, 5, 6))
    np.testing.assert_array_equal(
        regard.hopfield(state, patterns).states[1], regard.attention(state, patterns, patterns)
    )


def test_effective_states_count_equal_weights() -> None:
    k = np.zeros((7, 4))
    q = np.zeros((3, 4))
    mask = np.arange(7) < np.array([[1], [4], [7]])
    observe = ["effective_states", *(regard.renyi(alpha) for alpha in (0, 0.5, 1, 3, np.inf))]
    _, seen = regard.attention(q, k, k, mask=mask, observe=observe)
    np.testing.assert_allclose(seen.effective_states, [1, 4, 7], rtol=1e-14)
    for s in observe[1:]:
        np.testing.assert_allclose(np.exp(seen[s]), [1, 4, 7], rtol=1e-13, err_msg=repr(s))


RULED = {"bias": RNG.standard_normal((2, 1, 50)).astype(np.float16), "score": regard.alibi(0.1), "causal": True}


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({}, "tiled"),
        ({"score": regard.softcap(2.0)}, "tiled"),
        (RULED, "tiled"),
        (RULED, "cpu"),
        ({"sink": np.array([0.3, 2.0])}, "tiled"),
        ({"mask": np.arange(50) < np.arange(9)[:, None]}, "tiled"),
    ],
)
def test_renyi_entropies_are_those_of_the_weights(options: dict[str, Any], engine: str) -> None:
    """Written out from the weights; they fall with alpha, and meet the entropy at 1."""
    q, k = RNG.standard_normal((2, 9, 8)), RNG.standard_normal((2, 50, 8))
    orders = (0, 0.2, 0.999, 1, 1.001, 2, 30, np.inf)
    observe = ["entropy", *(regard.renyi(alpha) for alpha in orders)]
    _, P, seen = regard.attention(q, k, k, **options, observe=observe, return_weights=True, engine=engine)
    visible = P > 0
    total = np.maximum(P.sum(-1), 1e-300)
    last = np.full(total.shape, np.inf)
    for alpha in orders:
        with np.errstate(divide="ignore"):
            if alpha == 1:
                expected = seen.entropy / total
            elif alpha == np.inf:
                expected = -np.log(P.max(-1))
            else:
                expected = np.log((np.where(visible, P, 0) ** alpha * visible).sum(-1) / total) / (1 - alpha)
        expected = np.where(visible.any(-1), expected, 0)
        got = seen[regard.renyi(alpha)]
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9 if alpha in (0.999, 1.001) else 1e-12)
        assert (got <= last + 1e-9).all()
        last = got
    near = (seen[regard.renyi(0.999)] + seen[regard.renyi(1.001)]) / 2
    np.testing.assert_allclose(near, seen[regard.renyi(1)], atol=1e-4)
