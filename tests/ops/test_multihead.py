import importlib.util

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import multihead_attention
from support import softmax

pytestmark = pytest.mark.engine("tiled")


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def reference(query, key, value, h, h_kv, w, b, causal):
    """Head by head in float64, for matrices (n, features). Returns the output and the weights (h, n_q, n_k)."""
    x = {"q": query, "k": key, "v": value}
    q, k, v = (x[c] @ w[c] + b.get(c, 0) if c in w else x[c] for c in "qkv")
    d, d_v = q.shape[-1] // h, v.shape[-1] // h_kv
    outs, weights = [], []
    for head in range(h):
        g = head // (h // h_kv)
        s = q[:, head * d : (head + 1) * d] @ k[:, g * d : (g + 1) * d].T / np.sqrt(d)
        if causal:
            s[np.triu(np.ones(s.shape, bool), k=1 + len(k) - len(q))] = -np.inf
        p = softmax(s)
        weights.append(p)
        outs.append(p @ v[:, g * d_v : (g + 1) * d_v])
    out = np.concatenate(outs, axis=-1)
    return out @ w["o"] + b.get("o", 0) if "o" in w else out, np.stack(weights)


def options(w, b):
    return {f"w_{c}": x for c, x in w.items()} | {f"b_{c}": x for c, x in b.items()}


@st.composite
def calls(draw):
    h_kv, group, d, d_v, n_q = (draw(st.integers(1, 3)) for _ in range(5))
    h, n_k = h_kv * group, n_q + draw(st.integers(0, 3))
    joint, value, output = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    d_model, d_key, d_value = 5 if joint else h * d, 4 if joint else h_kv * d, 3 if value else h_kv * d_v
    shapes = {"q": (d_model, h * d), "k": (d_key, h_kv * d)} if joint else {}
    shapes |= {"v": (d_value, h_kv * d_v)} if value else {}
    shapes |= {"o": (h * d_v, 6)} if output else {}
    w = {c: normal(*shape, seed=3 + i) / 2 for i, (c, shape) in enumerate(shapes.items())}
    b = {c: normal(x.shape[1], seed=7 + i) for i, (c, x) in enumerate(w.items()) if draw(st.booleans())}
    return normal(n_q, d_model), normal(n_k, d_key, seed=1), normal(n_k, d_value, seed=2), h, h_kv, w, b


@settings(max_examples=settings().max_examples // 4)
@given(calls(), st.booleans())
def test_multihead_attention_is_the_reference(call, causal):
    *arrays, h, h_kv, w, b = call
    expected, p = reference(*call, causal)
    out, weights = multihead_attention(
        *arrays, h, num_kv_heads=h_kv, causal=causal, return_weights=True, **options(w, b)
    )
    np.testing.assert_allclose(weights, p, atol=1e-13)
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_self_attention_in_a_batch():
    x = normal(2, 3, 7, 12)
    w = {c: normal(12, 12, seed=i) / 3 for i, c in enumerate("qkvo")}
    b = {c: normal(12, seed=4 + i) for i, c in enumerate("qkvo")}
    out = multihead_attention(x, x, x, 4, **options(w, b))
    assert out.shape == x.shape
    np.testing.assert_array_equal(multihead_attention(x, x, x, 4, return_weights=True, **options(w, b))[0], out)
    for i in np.ndindex(2, 3):
        np.testing.assert_allclose(out[i], reference(x[i], x[i], x[i], 4, 4, w, b, False)[0], atol=1e-12)


def test_leading_dimensions_broadcast():
    query, memory = normal(3, 1, 5, 8), normal(2, 6, 8, seed=1)
    out = multihead_attention(query, memory, memory, 2)
    assert out.shape == (3, 2, 5, 8)
    np.testing.assert_array_equal(multihead_attention(query[2, 0], memory, memory, 2), out[2])
    np.testing.assert_allclose(
        out[2, 1], reference(query[2, 0], memory[1], memory[1], 2, 2, {}, {}, False)[0], atol=1e-13
    )


@pytest.mark.engine("cpu")
def test_options_reach_attention():
    x = normal(2, 6, 8)
    mask = normal(2, 6, 6, seed=1) > 0
    out, weights, seen = multihead_attention(x, x, x, 2, mask=mask[:, None], return_weights=True, observe=["lse"])
    assert weights.shape == (2, 2, 6, 6)
    assert (weights[~np.broadcast_to(mask[:, None], weights.shape)] == 0).all()
    assert seen.lse.shape == (2, 2, 6)
    split = x.reshape(2, 6, 2, 4).swapaxes(1, 2)
    expected = regard.attention(split, split, split, mask=mask[:, None])
    np.testing.assert_array_equal(out, expected.swapaxes(1, 2).reshape(2, 6, 8))
    alone = multihead_attention(x, x, x, 2, mask=regard.window(0))
    np.testing.assert_array_equal(alone, x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_projections_of_16_bits_round_once(dtype):
    # 1 + 61 · eps/4 - 1: each term is lost if the sum has 16 bits, and a quarter if the product is rounded before b.
    eps = float(ml_dtypes.finfo(dtype).eps)
    x = np.array([[1.0] + [eps / 4] * 61], dtype)
    w, b = np.ones((62, 2), dtype), np.full(2, -1, dtype)
    out = multihead_attention(x, x, x, 1, w_q=w, w_k=w, w_v=w, b_v=b)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out.astype(np.float64), np.full((1, 2), 61 / 4 * eps))


def test_cross_attention_as_in_pytorch():
    x, y = normal(2, 5, 12), normal(2, 7, 12, seed=1)
    w = {c: normal(12, 12, seed=2 + i) / 3 for i, c in enumerate("qkvo")}
    b = {c: normal(12, seed=6 + i) for i, c in enumerate("qkvo")}
    out, weights = multihead_attention(x, y, y, 3, return_weights=True, **options(w, b))
    peers = [tuple(map(np.stack, zip(*(reference(x[i], y[i], y[i], 3, 3, w, b, False) for i in (0, 1)), strict=True)))]
    if importlib.util.find_spec("torch"):
        import torch

        module = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
        state = {
            "in_proj_weight": np.concatenate([w[c].T for c in "qkv"]),
            "in_proj_bias": np.concatenate([b[c] for c in "qkv"]),
            "out_proj.weight": w["o"].T.copy(),
            "out_proj.bias": b["o"],
        }
        module.load_state_dict({name: torch.from_numpy(a) for name, a in state.items()})
        with torch.no_grad():
            result = module(*(torch.from_numpy(a) for a in (x, y, y)), average_attn_weights=False)
        peers.append(tuple(a.numpy() for a in result))
    for expected, p in peers:
        np.testing.assert_allclose(out, expected, atol=1e-13)
        np.testing.assert_allclose(weights, p, atol=1e-14)


def test_no_keys_and_no_queries():
    x, w, b = normal(4, 6), normal(6, 6, seed=1), normal(6, seed=2)
    out = multihead_attention(x, x[:0], x[:0], 2, w_o=w, b_o=b)
    np.testing.assert_array_equal(out, np.broadcast_to(b, (4, 6)))
    assert multihead_attention(x[:0], x, x, 2).shape == (0, 6)


X = np.zeros((5, 12), np.float32)
W = np.zeros((12, 12), np.float32)
B = np.zeros(12, np.float32)
BAD = {
    "heads": ((X, X, X, 5), {}, ValueError, r"num_heads=5 must divide the 12 features of query \(5, 12\)"),
    "projected heads": (
        (X, X, X, 4),
        {"w_q": W[:, :10], "w_k": W},
        ValueError,
        r"num_heads=4 must divide the 10 features of w_q \(12, 10\)",
    ),
    "kv heads": (
        (X, X, X[:, :9], 4),
        {"num_kv_heads": 2},
        ValueError,
        r"num_kv_heads=2 must divide the 9 features of value \(5, 9\)",
    ),
    "groups": ((X, X, X, 4), {"num_kv_heads": 3}, ValueError, "multiple of num_kv_heads, got 4 and 3"),
    "no heads": ((X, X, X, 0), {}, ValueError, "multiple of num_kv_heads, got 0 and 0"),
    "float heads": ((X, X, X, 2.0), {}, TypeError, "num_heads must be an int, got 2.0"),
    "d": ((X, X, X, 4), {"num_kv_heads": 2}, ValueError, "same number of features d in a head, got 3 and 6"),
    "pair": ((X, X, X, 4), {"w_q": W}, ValueError, "w_q and w_k come together, got w_q alone"),
    "other of the pair": ((X, X, X, 4), {"w_k": W}, ValueError, "w_q and w_k come together, got w_k alone"),
    "bias alone": ((X, X, X, 4), {"b_v": B}, ValueError, "b_v needs w_v"),
    "output bias alone": ((X, X, X, 4), {"b_o": B}, ValueError, "b_o needs w_o"),
    "w_v": (
        (X, X, X, 4),
        {"w_v": W[:11]},
        ValueError,
        r"w_v must be a matrix with a row for each feature of value \(5, 12\), got \(11, 12\)",
    ),
    "w_v rank": ((X, X, X, 4), {"w_v": W[None]}, ValueError, r"w_v must be a matrix .*, got \(1, 12, 12\)"),
    "w_o": (
        (X, X, X, 4),
        {"w_o": W[:8]},
        ValueError,
        r"each feature of the joined heads \(5, 12\), got \(8, 12\)",
    ),
    "bias": (
        (X, X, X, 4),
        {"w_o": W, "b_o": B[:3]},
        ValueError,
        r"b_o must have a number for each column of w_o \(12, 12\), got \(3,\)",
    ),
    "n_k": ((X, X, X[:4], 4), {}, ValueError, r"n_k, got query \(5, 12\), key \(5, 12\), value \(4, 12\)"),
    "vector": ((X[0], X, X, 4), {}, ValueError, r"must be \(..., n, features\), got query \(12,\)"),
    "lead": (
        (np.zeros((2, 5, 12)), np.zeros((3, 5, 12)), np.zeros((3, 5, 12)), 4),
        {},
        ValueError,
        r"the leading dimensions must broadcast, got query \(2, 5, 12\), key \(3, 5, 12\)",
    ),
    "dtype": ((X, X, X, 4), {"w_v": W.astype(np.float64)}, TypeError, "got query float32, .*, w_v float64"),
    "none": ((X, None, X, 4), {}, TypeError, "key must be a NumPy array, got NoneType"),
    "layout": (
        (X, X, X, 4),
        {"layout": "bnhd"},
        TypeError,
        "'layout'; here it is not needed",
    ),
    "unknown": ((X, X, X, 4), {"window": 3}, TypeError, "unexpected keyword argument 'window'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    arguments, named, error, text = BAD[case]
    with pytest.raises(error, match=text):
        multihead_attention(*arguments, **named)
