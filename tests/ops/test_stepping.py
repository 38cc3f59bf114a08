"""Steps: every intermediate is what its formula says, and the last is what attention returns."""

import numpy as np
import pytest

import regard
from regard.ops.normalization import problem_from
from regard.ops.stepping import steps
from regard.reference import specification
from regard.rules import softcap, window
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.RandomState(seed).standard_normal(shape).astype(dtype)


def operands(q=(2, 5, 4), k=(2, 7, 4), v=(2, 7, 3), dtype=np.float64):
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate((q, k, v)))


def recency(s, b, h, i, j):
    return s - 0.25 * (i - j) * (h + 1)


FULL = {
    "mask": window(4),
    "causal": True,
    "score": [softcap(3.0), recency],
    "bias": normal(5, 7, seed=9),
    "scale": 0.3,
    "sink": np.array([0.5, -1.0]),
    "dropout": 0.25,
    "seed": 7,
}

CASES = {
    "matrices": (operands((5, 4), (7, 4), (7, 3)), {}),
    "heads": (operands(), {}),
    "causal": (operands(), {"causal": True}),
    "everything": (operands(), FULL),
    "grouped": (operands((4, 5, 4)), {"causal": True}),
    "leading dimensions broadcast": (operands((3, 1, 2, 5, 4), (2, 2, 7, 4), (1, 2, 7, 3)), {"causal": True}),
    "positions first": (operands((2, 5, 4, 4), (2, 7, 2, 4), (2, 7, 2, 3)), {"layout": "bnhd", "causal": True}),
    "offset": (operands(), {"causal": True, "offset": -3}),
    "float32": (operands(dtype=np.float32), {"causal": True}),
    "float16": (operands(dtype=np.float16), {"causal": True}),
    "no keys": (operands((2, 5, 4), (2, 0, 4), (2, 0, 3)), {}),
}


def test_the_weights_of_the_classic_example():
    rng = np.random.RandomState(42)
    found = steps(rng.randn(2, 4), rng.randn(3, 4), rng.randn(3, 4))
    assert found["softmax"].value.round(3).tolist() == [[0.445, 0.389, 0.166], [0.507, 0.221, 0.272]]


@pytest.mark.parametrize("case", on_cpu(CASES, "everything"))
def test_output_is_that_of_attention(case):
    (q, k, v), options = CASES[case]
    out, weights = regard.attention(q, k, v, return_weights=True, **options)
    found = steps(q, k, v, **options)
    assert found["output"].value.shape == out.shape
    assert found["output"].value.dtype == out.dtype
    # Two ways of rounding sums of n_k terms of size |P| |v|, in the dtype of sums and once more in that of the output.
    eps = np.finfo(found["softmax"].value.dtype).eps * 32 + np.finfo(q.dtype).eps
    size = max(1.0, float(np.abs(v).max(initial=0))) / (1 - options.get("dropout", 0))
    np.testing.assert_allclose(
        found["output"].value.astype(np.float64), out.astype(np.float64), rtol=0, atol=eps * size
    )
    np.testing.assert_allclose(found["softmax"].value, weights.astype(np.float64), rtol=0, atol=eps)


@pytest.mark.parametrize("case", CASES)
def test_einsum_computes_the_step_from_those_in_its_formula(case):
    (q, k, v), options = CASES[case]
    found = steps(q, k, v, **options)
    contractions = [step for step in found if step.einsum]
    assert [step.name for step in contractions] == ["raw scores", "output"]
    for step, names in zip(contractions, (("Q", "K"), ("P", "V")), strict=True):
        value = np.einsum(step.einsum, *(found[name].value for name in names))
        assert step.formula == f"{step.tensor} = {found[names[0]].tensor} {found[names[1]].tensor}"
        eps = np.finfo(step.value.dtype).eps
        np.testing.assert_allclose(step.value, value, rtol=0, atol=32 * eps * max(1, np.abs(value).max(initial=0)))


def test_every_step_follows_from_the_one_before():
    (q, k, v), options = CASES["everything"]
    found = steps(q, k, v, **options)
    assert found.names == (
        "queries", "keys", "values", "raw scores", "scaled", "score 1", "score 2", "bias", "masked", "lse", "softmax",
        "dropout", "output",
    )  # fmt: skip
    h, i, j = np.arange(2)[:, None, None], np.arange(5)[:, None] + 2, np.arange(7)
    scaled = 0.3 * found["raw scores"].value
    capped = 3.0 * np.tanh(scaled / 3.0)
    recent = capped - 0.25 * (i - j) * (h + 1)
    biased = recent + options["bias"]
    visible = (j <= i) & (i - 4 <= j)
    masked = np.where(visible, biased, -np.inf)
    lse = np.log(np.exp(masked).sum(-1) + np.exp(options["sink"])[:, None])
    softmax = np.exp(masked - lse[..., None])
    kept = specification.dropout_mask(0.25, 7, np.zeros((1, 1, 1), int), h, i, j)
    expected = {
        "scaled": scaled,
        "score 1": capped,
        "score 2": recent,
        "bias": biased,
        "masked": masked,
        "lse": lse,
        "softmax": softmax,
        "dropout": softmax * kept / 0.75,
        "output": np.einsum("hij,hjb->hib", softmax * kept / 0.75, v),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].value, value, rtol=1e-13, atol=1e-14, err_msg=name)
    assert 0 < kept[visible[None] & (h >= 0)].mean() < 1


def test_only_the_steps_that_happen_appear():
    q, k, v = operands()
    always = ("queries", "keys", "values", "raw scores", "scaled", "lse", "softmax", "output")
    assert steps(q, k, v).names == always
    assert steps(q, k, v, scale=1.0).names == tuple(name for name in always if name != "scaled")
    assert steps(q, k, v, scale=1.0)["raw scores"].symbol == "S"
    assert steps(q, k, v, score=softcap(2.0)).names == (*always[:5], "score", *always[5:])
    assert steps(q[:1].repeat(4, 0), k, v).names == (*always[:3], "keys per head", "values per head", *always[3:])


def test_grouped_keys_are_repeated_for_their_query_heads():
    (q, k, v), options = CASES["grouped"]
    found = steps(q, k, v, **options)
    assert found["keys per head"].formula == "K[h,j,a] = K[h // 2,j,a]"
    np.testing.assert_array_equal(found["keys per head"].value, k[[0, 0, 1, 1]])
    np.testing.assert_array_equal(found["values per head"].value, v[[0, 0, 1, 1]])


def test_rows_that_see_nothing():
    q, k, v = operands()
    found = steps(q, k, v, mask=np.zeros((5, 7), bool))
    assert (found["lse"].value == -np.inf).all()
    assert (found["softmax"].value == 0).all()
    assert (found["output"].value == 0).all()


def test_nan_behind_the_mask_has_no_influence():
    q, k, v = operands()
    clean = steps(q, k, v, causal=True, offset=0)
    k, v = k.copy(), v.copy()
    k[:, 6], v[:, 6] = np.nan, np.nan
    found = steps(q, k, v, causal=True, offset=0)
    np.testing.assert_array_equal(found["output"].value, clean["output"].value)


def test_access():
    q, k, v = operands()
    found = steps(q, k, v, causal=True)
    assert found["P"] is found["softmax"] is found[-2]
    assert found["S"] is found["masked"]
    assert [step.name for step in found[:3]] == ["queries", "keys", "values"]
    assert "masked" in found
    assert "dropout" not in found
    with pytest.raises(KeyError, match="no step 'mask'; there are queries, keys, values, raw scores, scaled, masked"):
        found["mask"]
    with pytest.raises(ValueError, match="read-only"):
        found["Q"].value[0] = 0
    with pytest.raises(AttributeError):
        found["Q"].name = "other"  # type: ignore[misc]
    assert q.flags.writeable


def test_table_of_shapes():
    """Names, symbols, indices and shapes as the field writes them."""
    q, k, v = operands((10, 64), (20, 64), (20, 64))
    text = str(steps(q, k, v))
    expected = {
        "queries": ("Q[i,a]", "(10, 64)"),
        "keys": ("K[j,a]", "(20, 64)"),
        "values": ("V[j,b]", "(20, 64)"),
        "scaled": ("S[i,j]", "(10, 20)"),
        "softmax": ("P[i,j]", "(10, 20)"),
        "output": ("O[i,b]", "(10, 64)"),
    }
    for name, (tensor, shape) in expected.items():
        (line,) = (line for line in text.splitlines() if line.startswith(name))
        assert line.split()[1] == tensor
        assert line.endswith(shape)
    assert "ia,ja->ij" in text
    assert "ij,jb->ib" in text


def test_bad_input_is_refused_as_by_attention():
    q, k, v = operands()
    with pytest.raises(ValueError, match="same number of features d"):
        steps(q[..., :3], k, v)
    with pytest.raises(TypeError, match="bias="):
        steps(q, k, v, mask=np.zeros((5, 7)))


def test_variance_of_scores_is_d_and_after_scaling_one():
    """Var(q · k) = d for standard normal entries (Vaswani et al. 2017, footnote 4)."""
    for d in (16, 64, 256):
        n = 400
        found = steps(normal(n, d, seed=d), normal(n, d, seed=d + 1), normal(n, 1))
        # n² products, of which 2n are independent: their variance is known to about √(2 / 2n) + √(2 / nd) < 0.1.
        assert found["raw scores"].value.var() == pytest.approx(d, rel=0.1)
        assert found["scaled"].value.var() == pytest.approx(1, rel=0.1)


def test_softmax_saturates_without_scaling():
    """The largest entry of the softmax's Jacobian diagonal, P (1 − P), all but vanishes where scores are not scaled."""
    q, k = normal(64, 512, seed=1), normal(64, 512, seed=2)

    def slope(scale):
        p = steps(q, k, k, scale=scale)["softmax"].value
        return float((p * (1 - p)).sum(-1).mean())

    assert slope(None) > 0.9
    assert slope(1.0) < 0.15


def test_intermediates_are_those_of_the_specification():
    (q, k, v), options = CASES["everything"]
    terms = specification.terms(problem_from(q, k, v, **options))
    found = steps(q, k, v, **options)
    np.testing.assert_array_equal(found["S"].value, terms.S[0])
    np.testing.assert_array_equal(found["P"].value, (terms.P * terms.D)[0])


def backward(case, seed=7):
    (q, k, v), options = CASES[case]
    dout = normal(*regard.attention(q, k, v, **options).shape, seed=seed, dtype=q.dtype)
    return steps(q, k, v, dout=dout, **options), regard.attention_vjp(q, k, v, dout, **options)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_attention_vjp(case):
    found, g = backward(case)
    forward = steps(*CASES[case][0], **CASES[case][1])
    assert found.names[: len(forward)] == forward.names
    for name in ("query", "key", "value"):
        step, expected = found[f"{name} gradient"], getattr(g, name)
        assert step.value.dtype == expected.dtype
        # Sums of n terms of a few units each, in the dtype of sums and once more in that of the inputs.
        eps = np.finfo(found["softmax"].value.dtype).eps * 256 + np.finfo(expected.dtype).eps
        size = max(1.0, float(np.abs(expected.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(
            step.value.astype(np.float64), expected.astype(np.float64), rtol=0, atol=4 * eps * size, err_msg=name
        )


@pytest.mark.parametrize("case", ["heads", "everything", "grouped", "positions first", "matrices"])
def test_every_step_of_backward_follows_from_those_in_its_formula(case):
    found, _ = backward(case)
    visible, P = found["softmax"].value > 0, found["softmax"].value
    J = found["softmax Jacobian"]
    np.testing.assert_allclose(J.value, P[..., :, None] * (np.eye(P.shape[-1]) - P[..., None, :]), atol=1e-15)
    operands = {
        "weight gradient": ("dO", "values per head" if "values per head" in found else "V"),
        "row sums": ("O", "dO"),
        "score gradient": ("J", "dP"),
        "value gradient": ("P", "dO"),
        "query gradient": ("dR", "keys per head" if "keys per head" in found else "K"),
        "key gradient": ("dR", "Q"),
    }
    for name, symbols in operands.items():
        step = found[f"{name} per head" if f"{name} per head" in found else name]
        value = np.einsum(step.einsum, *(found[symbol].value for symbol in symbols))
        np.testing.assert_allclose(step.value, value, rtol=0, atol=1e-12, err_msg=name)
    for name in ("key", "value"):
        if f"{name} gradient per head" in found:
            per_head, axis = found[f"{name} gradient per head"], -2 if case == "positions first" else -3
            pairs = np.stack([per_head.value.take((h, h + 1), axis).sum(axis) for h in (0, 2)], axis)
            np.testing.assert_allclose(found[f"{name} gradient"].value, pairs, atol=1e-14)
            assert "over h // 2 = g" in found[f"{name} gradient"].formula
    D, dP, dS = (found[name].value for name in ("row sums", "dP", "score gradient"))
    np.testing.assert_allclose(D, np.where(visible, P * dP, 0).sum(-1), atol=1e-13)
    np.testing.assert_allclose(dS, np.where(visible, P * (dP - D[..., None]), 0), atol=1e-14)
    np.testing.assert_allclose(np.einsum("...jk,...k->...j", J.value, dP), dS, atol=1e-13)
    if "rule gradient" in found:  # the slope of softcap(3.0) in the scores that it is given; recency has slope 1
        slope = 1 - np.tanh(found["scaled"].value / 3.0) ** 2
        np.testing.assert_allclose(found["rule gradient"].value, dS * slope, atol=1e-14)
        np.testing.assert_allclose(found["scaled gradient"].value, 0.3 * dS * slope, atol=1e-14)


def test_only_the_steps_of_backward_that_happen_appear():
    (q, k, v), _ = CASES["heads"]
    n = len(steps(q, k, v))
    always = (
        "output gradient", "value gradient", "weight gradient", "softmax Jacobian", "row sums", "score gradient",
        "scaled gradient", "query gradient", "key gradient",
    )  # fmt: skip
    assert steps(q, k, v, dout=normal(2, 5, 3)).names[n:] == always
    assert "scaled gradient" not in steps(q, k, v, dout=normal(2, 5, 3), scale=1.0)
    more = steps(q, k, v, dout=normal(2, 5, 3), score=softcap(2.0), dropout=0.5, seed=1)
    assert set(more.names) - set(always) >= {"dropout gradient", "rule gradient"}
    assert more["score gradient"].formula == (
        "dS[h,i,j] = exp(S[h,i,j] − lse[h,i]) (dP[h,i,j] − D[h,i]) = J[h,i,j,k] dP[h,i,k]"
    )


def test_the_jacobian_is_not_built_for_the_table():
    x = np.zeros((3000, 1), np.float32)  # whose Jacobian takes 100 GB
    found = steps(x, x, x, dout=x)
    assert "(3000, 3000, 3000)" in str(found)
    with pytest.raises(ValueError, match="read-only"):
        backward("matrices")[0]["J"].value[0, 0, 0] = 0


def test_nan_behind_the_mask_has_no_influence_on_gradients():
    (q, k, v), _ = CASES["heads"]
    dout = normal(2, 5, 3)
    clean = steps(q, k, v, causal=True, offset=0, dout=dout)
    k, v = k.copy(), v.copy()
    k[:, 6], v[:, 6] = np.nan, np.nan
    found = steps(q, k, v, causal=True, offset=0, dout=dout)
    for name in ("query gradient", "key gradient", "value gradient"):
        np.testing.assert_array_equal(found[name].value, clean[name].value)
