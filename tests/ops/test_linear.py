import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from linear_cases import IDS, KEYS, MASKS, N_K, N_Q, B, H
from regard.ops.linear import RandomFeatures, linear_attention, linear_spec
from support import traced_memory


def squares(x):
    return np.concatenate([x * x, np.ones_like(x[..., :1])], axis=-1)


MAPS = ["elu", "relu", "softmax", "favor", RandomFeatures(5, seed=3), squares]


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@st.composite
def calls(draw):
    """Shapes (..., h, n, d) that fit, with groups of heads and leading dimensions that broadcast."""
    h_kv, group, n_q, n_k, d, d_v = (draw(st.integers(low, 4)) for low in (1, 1, 0, 0, 1, 0))
    n_q, n_k = n_q * draw(st.integers(1, 4)), n_k * draw(st.integers(1, 4))
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    leads = [[draw(st.sampled_from([1, m])) for m in lead][draw(st.integers(0, len(lead))) :] for _ in range(3)]
    sizes = [(h_kv * group, n_q, d), (h_kv, n_k, d), (h_kv, n_k, d_v)]
    return [normal(*a, *b, seed=seed) for seed, (a, b) in enumerate(zip(leads, sizes, strict=True))]


@settings(max_examples=settings().max_examples // 4)
@given(
    calls(), st.sampled_from(MAPS), st.booleans(), st.sampled_from([1, 2, 3, 128]), st.sampled_from(["bhnd", "bnhd"])
)
def test_linear_attention_is_its_specification(arrays, feature_map, causal, chunk, layout):
    expected, _ = linear_spec(*arrays, feature_map=feature_map, causal=causal)
    if layout == "bnhd":
        arrays = [x.swapaxes(-3, -2) for x in arrays]
    out = linear_attention(*arrays, feature_map=feature_map, causal=causal, chunk=chunk, layout=layout)
    out = out.swapaxes(-3, -2) if layout == "bnhd" else out
    assert out.shape == expected.shape
    # Weights are positive, so nothing cancels: a few eps for each of the at most 16 keys, times |v| < 5.
    np.testing.assert_allclose(out, expected, atol=2e-13)


@pytest.mark.parametrize("feature_map", MAPS)
def test_spec_weights_are_the_definition(feature_map):
    q, k, v = normal(1, 4, 3), normal(1, 5, 3, seed=1), normal(1, 5, 2, seed=2)
    for causal in (False, True):
        out, weights = linear_spec(q, k, v, feature_map=feature_map, causal=causal)
        assert weights.shape == (1, 4, 5)
        np.testing.assert_allclose(weights.sum(-1), 1)
        np.testing.assert_allclose(out, weights @ v, atol=1e-15)
        hidden = np.triu(np.ones((4, 5), bool), k=2)
        assert (weights[0][hidden] == 0).all() == causal
    if feature_map in ("elu", "relu"):
        phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(x)) if feature_map == "elu" else x * (x > 0) for x in (q, k))
        assert weights[0, 0, 1] == pytest.approx(phi_q[0, 0] @ phi_k[0, 1] / (phi_q[0, 0] @ phi_k[0, :2].sum(0)))
    if feature_map == "softmax":  # query 1 sees keys 0, 1 and 2
        rho_q = np.exp(q[0, 1]) / np.exp(q[0, 1]).sum()
        rho_k = np.exp(k[0, :3]) / np.exp(k[0, :3]).sum(0)
        np.testing.assert_allclose(weights[0, 1, :3], rho_k @ rho_q)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
def test_sums_are_float32(feature_map, causal, dtype):
    q, k, v = (normal(2, 700, 8, dtype=dtype, seed=seed) for seed in range(3))
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    assert out.dtype == dtype
    exact, _ = linear_spec(q, k, v, feature_map=feature_map, causal=causal)
    # One rounding to the dtype; before it float32 sums of 700 terms, in chunks, of exponentials of arguments up to 20.
    eps, wide = float(ml_dtypes.finfo(dtype).eps), np.finfo(np.float32).eps
    size = np.abs(v.astype(np.float64)).max()
    assert np.abs(out.astype(np.float64) - exact).max() <= (eps / 2 * np.abs(exact).max() + 60 * wide * size)


@pytest.mark.parametrize("feature_map", MAPS)
def test_chunks_do_not_matter(feature_map):
    q, k, v = normal(2, 300, 4), normal(1, 333, 4, seed=1), normal(1, 333, 3, seed=2)
    for causal in (False, True):
        whole = linear_attention(q, k, v, feature_map=feature_map, causal=causal, chunk=1000)
        for chunk in (1, 7, 128, 300):
            out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, chunk=chunk)
            np.testing.assert_allclose(out, whole, atol=1e-12)


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_seen_has_no_influence(feature_map, poison):
    q, k, v = (normal(2, 40, 4, seed=seed) for seed in range(3))
    clean = linear_attention(q, k, v, feature_map=feature_map, causal=True, chunk=16)
    for poisoned in (k, v):
        poisoned[:, 21:] = poison
    out = linear_attention(q, k, v, feature_map=feature_map, causal=True, chunk=16)
    np.testing.assert_allclose(out[:, :21], clean[:, :21], atol=1e-14)
    assert not np.isfinite(out[:, 21:]).any()

    v = normal(2, 40, 4, seed=2)
    v[0, 21] = np.nan
    out = linear_attention(q, normal(2, 40, 4, seed=1), v, feature_map=feature_map, causal=True, chunk=16)
    assert np.isnan(out[0, 21:]).all()
    assert np.isfinite(out[0, :21]).all()
    assert np.isfinite(out[1]).all()


def log_space(q, k, v, log_q, log_k, per_feature):
    """Causal attention with A[i,j] = Σ_r exp(log φ(q) + log φ(k)), with logarithms throughout: no range is too wide."""
    out = np.empty((len(q), v.shape[-1]))
    for i in range(len(q)):
        a = log_k[: i + 1]
        if per_feature:
            a = a - np.logaddexp.reduce(a, axis=0)
        a = np.logaddexp.reduce(log_q[i] + a, axis=-1)
        out[i] = np.exp(a - np.logaddexp.reduce(a)) @ v[: i + 1]
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", [1, -1])
def test_exponentials_of_any_range(dtype, order):
    # Keys whose norms reach 100: log φ reaches -5000, far below float64's range, rising or falling with j.
    n, d = 60, 4
    q, k, v = (normal(n, d, dtype=dtype, seed=seed) for seed in range(3))
    k = (k * np.linspace(0.1, 100, n)[::order, None]).astype(dtype)
    eps = np.finfo(dtype).eps

    w = RandomFeatures(32).projection(d)
    y_q, y_k = (x.astype(np.float64) / d**0.25 for x in (q, k))
    logs = [y @ w.T - (y * y).sum(-1, keepdims=True) / 2 for y in (y_q, y_k)]
    out = linear_attention(q, k, v, feature_map=RandomFeatures(32), causal=True)
    # A logarithm of size L is known to L eps, and so is the weight.
    np.testing.assert_allclose(out, log_space(q, k, v, *logs, False), atol=8 * eps * np.abs(logs[1]).max())

    out = linear_attention(q, k, v, feature_map="softmax", causal=True)
    expected = log_space(q, k, v, q.astype(np.float64), k.astype(np.float64), True)
    np.testing.assert_allclose(out, expected, atol=50 * eps)


def test_queries_without_weights_give_zero():
    q, k, v = normal(1, 5, 3), normal(1, 3, 3, seed=1), normal(1, 3, 2, seed=2)
    for feature_map in MAPS:
        out = linear_attention(q, k, v, feature_map=feature_map, causal=True)
        np.testing.assert_array_equal(out[0, :2], 0)
        assert (out[0, 2] != 0).any()
        assert (linear_attention(q, k[:, :0], v[:, :0], feature_map=feature_map) == 0).all()
    q[0, 1] = -1
    out = linear_attention(q, np.abs(k), v, feature_map="relu")
    np.testing.assert_array_equal(out[0, 1], 0)
    assert (out[0, 0] != 0).any()


def test_matrices_are_one_head():
    q, k, v = normal(6, 4), normal(5, 4, seed=1), normal(5, 2, seed=2)
    for layout in ("bhnd", "bnhd"):
        out = linear_attention(q, k, v, causal=True, layout=layout)
        np.testing.assert_array_equal(out, linear_attention(q[None], k[None], v[None], causal=True)[0])


def test_random_features_approximate_softmax_attention():
    n, d = 64, 16
    q, k, v = normal(1, n, d) / 2, normal(1, n, d, seed=1) / 2, normal(1, n, d, seed=2)
    p = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(d))
    exact = p @ v / p.sum(-1, keepdims=True)

    def error(m):
        outs = [linear_attention(q, k, v, feature_map=RandomFeatures(m, seed)) for seed in range(9)]
        return np.median([np.linalg.norm(out - exact) for out in outs])  # a mean would follow the estimator's long tail

    errors = [error(m) for m in (64, 256, 1024, 4096)]
    # 1/√m: a half for each factor of four.
    for more, fewer in zip(errors[1:], errors[:-1], strict=True):
        assert 0.4 < more / fewer < 0.65
    assert errors[-1] < 0.07 * np.linalg.norm(exact)


def test_random_features_are_orthogonal_and_unbiased():
    w = RandomFeatures(20, seed=1).projection(8)
    assert w.shape == (20, 8)
    for block in (w[:8], w[8:16], w[16:]):
        gram = block @ block.T
        np.testing.assert_allclose(gram - np.diag(np.diagonal(gram)), 0, atol=1e-13)
    np.testing.assert_array_equal(w, RandomFeatures(20, seed=1).projection(8))
    assert (w != RandomFeatures(20, seed=2).projection(8)).any()

    # Rows are standard normal: means of m samples of variance 1, or 2 for squares, within five standard deviations.
    w = RandomFeatures(4096).projection(8)
    assert abs(w.mean()) < 5 / np.sqrt(w.size)
    np.testing.assert_allclose(w.T @ w / len(w), np.eye(8), atol=5 * np.sqrt(2 / len(w)))


@pytest.mark.parametrize("feature_map", ["elu", "softmax", "favor"])
def test_memory_is_linear(feature_map):
    n, d = 16384, 16
    q, k, v = (normal(1, n, d, dtype=np.float32, seed=seed) for seed in range(3))
    with traced_memory() as held:
        out = linear_attention(q, k, v, feature_map=feature_map, causal=True)
        _, peak = held()
    # A few chunks of 128 rows and 256 features in float32; n × n would be 1 GiB.
    assert peak - out.nbytes < 4 * 2**20


X = np.zeros((2, 3, 4), np.float32)
BAD = {
    "dtypes": (lambda: linear_attention(X, X, X.astype(np.float64)), TypeError, "must share one dtype"),
    "integers": (lambda: linear_attention(*[np.zeros((2, 3), int)] * 3), TypeError, "query must have a floating dtype"),
    "features": (lambda: linear_attention(X, X[..., :3], X), ValueError, r"d, got query \(2, 3, 4\), key \(2, 3, 3\)"),
    "heads": (lambda: linear_attention(X[:1], X, X), ValueError, "must be a multiple of those of key, got 1 and 2"),
    "no features": (lambda: linear_attention(X[..., :0], X[..., :0], X), ValueError, "needs at least one feature"),
    "chunk": (lambda: linear_attention(X, X, X, chunk=0), ValueError, "chunk must be at least 1, got 0"),
    "layout": (lambda: linear_attention(X, X, X, layout="nhd"), ValueError, "layout must be 'bhnd' or 'bnhd'"),
    "map": (lambda: linear_attention(X, X, X, feature_map="gelu"), ValueError, "'favor', .*, got 'gelu'"),
    "map shape": (
        lambda: linear_attention(X, X, X, feature_map=lambda x: x.sum(-1)),
        ValueError,
        "feature_map must keep all but the last axis",
    ),
    "num_features": (lambda: RandomFeatures(0), ValueError, "num_features must be at least 1, got 0"),
    "negative seed": (lambda: RandomFeatures(4, -1), ValueError, "seed must not be negative, got -1"),
    "seed": (lambda: RandomFeatures(4, 0.5), TypeError, "seed must be an int, got 0.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, error, text = BAD[case]
    with pytest.raises(error, match=text):
        call()


# Masks


def arrays(dtype=np.float64, lead=(B,)):
    sizes = (H, N_Q, 3), (2, N_K, 3), (2, N_K, 5)
    return [normal(*lead, *size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_their_specification(mask, feature_map, causal):
    q, k, v = arrays()
    options = {"feature_map": feature_map, "causal": causal, "mask": MASKS[mask]}
    expected, weights = linear_spec(q, k, v, **options)
    assert weights.shape == (B, H, N_Q, N_K)
    for chunk in (1, 4, 128):
        np.testing.assert_allclose(linear_attention(q, k, v, **options, chunk=chunk), expected, atol=2e-13)
    turned = linear_attention(*(x.swapaxes(-3, -2) for x in (q, k, v)), **options, layout="bnhd")
    np.testing.assert_allclose(turned.swapaxes(-3, -2), expected, atol=2e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", ["softmax", "favor"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_exponentials_of_any_range(mask, feature_map, causal):
    """A row is a call of its visible keys alone."""
    q, k, v = (scale * x for scale, x in zip((30, 30, 1), arrays(), strict=True))
    _, weights = linear_spec(*arrays(), mask=MASKS[mask], causal=causal)
    for chunk in (4, 128):
        out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, mask=MASKS[mask], chunk=chunk)
        for b, h, i in np.ndindex(B, H, N_Q):
            seen = weights[b, h, i] > 0
            row = linear_attention(q[b, h, i : i + 1], k[b, h // 2, seen], v[b, h // 2, seen], feature_map=feature_map)
            np.testing.assert_allclose(out[b, h, i], row[0], atol=1e-11)


@pytest.mark.parametrize("mask", MASKS)
def test_spec_hides_what_attention_hides(mask):
    q, k, v = arrays()
    for causal in (False, True):
        _, weights = linear_spec(q, k, v, mask=MASKS[mask], causal=causal)
        _, of_attention = regard.attention(q, k, v, mask=MASKS[mask], causal=causal, return_weights=True)
        np.testing.assert_array_equal(weights > 0, of_attention > 0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("mask", ["keys", "padding and documents"])
def test_masks_in_short_dtypes(mask, dtype):
    q, k, v = arrays(dtype)
    out = linear_attention(q, k, v, mask=MASKS[mask], feature_map="favor")
    exact, _ = linear_spec(q, k, v, mask=MASKS[mask], feature_map="favor")
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(float), exact, atol=2 * float(ml_dtypes.finfo(dtype).eps) + 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_keys_have_no_influence(feature_map, causal, poison):
    q, k, v = arrays()
    options = {"feature_map": feature_map, "causal": causal, "mask": KEYS}
    clean = linear_attention(q, k, v, **options)
    for x in (k, v):
        x[np.broadcast_to(~KEYS[:, :, 0, :, None], x.shape)] = poison
    np.testing.assert_array_equal(linear_attention(q, k, v, **options), clean)


@pytest.mark.parametrize("feature_map", MAPS)
def test_rows_that_see_nothing_give_zero(feature_map):
    q, k, v = arrays()
    for causal in (False, True):
        out = linear_attention(q, k, v, feature_map=feature_map, causal=causal, mask=MASKS["nothing"])
        np.testing.assert_array_equal(out[0], 0)
        assert np.isfinite(out).all()
        assert (out[1] != 0).any()
    out = linear_attention(
        q, k, v, feature_map=feature_map, mask=regard.documents(np.r_[[0] * 8, IDS[8:]], np.r_[[5] * 8, IDS[8:]])
    )
    assert np.isfinite(out).all()


def test_a_padded_batch_is_its_sequences():
    q, k, v = (normal(2, 4, 20, 8, seed=seed) for seed in range(3))
    for causal in (False, True):
        out = linear_attention(q, k, v, mask=regard.padding(np.array([20, 12])), causal=causal)
        for n, x in ((20, 0), (12, 1)):
            alone = linear_attention(*(y[x, :, :n] for y in (q, k, v)), causal=causal)
            np.testing.assert_allclose(out[x, :, :n], alone, atol=1e-12)


def test_many_documents_take_linear_memory():
    n, rng = 20_000, np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 4000, n))
    x = normal(1, n, 8, dtype=np.float32)
    with traced_memory() as used:
        out = linear_attention(x, x, x, mask=regard.documents(ids), causal=True)
        assert used()[1] < 60 * x.nbytes
    np.testing.assert_allclose(out[0, ids == 7], linear_attention(*[x[:, ids == 7]] * 3, causal=True)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (regard.window(3), ValueError, r"any other mask takes regard.attention; got window\(3\)"),
        (np.ones((N_Q, N_K), bool), ValueError, "any other mask takes regard.attention; got array"),
        (
            regard.documents(np.arange(N_K) % 3),
            ValueError,
            "takes regard.attention; the ids of documents.* not contiguous",
        ),
        (~regard.documents(IDS), ValueError, "any other mask takes regard.attention"),
        (regard.padding(3) | regard.documents(IDS), ValueError, "any other mask takes regard.attention"),
        (KEYS[:, 0, 0], ValueError, r"must align right .*\[:, None, None, :\]"),
        (np.ones((1, N_K)), TypeError, "must be booleans or 0/1 integers, got float64"),
        (regard.documents(IDS[:5]), ValueError, "ids of documents covers query index 0 to 4"),
        (regard.padding([3] * 9), ValueError, "lengths of padding covers batch index 0 to 8, but this call ends at"),
        (regard.softcap(3.0), TypeError, "mask must be a mask, got the score"),
    ],
)
def test_other_masks_are_refused(mask, error, message):
    with pytest.raises(error, match=message):
        linear_attention(*arrays(), mask=mask)
