"""What textbooks say of attention, in numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from support import softmax

pytestmark = pytest.mark.engine("tiled")

Array = np.ndarray[Any, np.dtype[Any]]
EPS = float(np.finfo(np.float64).eps)


def formula(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """softmax(Q Kᵀ / √d) V, and the weights."""
    weights = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    return weights @ v, weights


def close(got: Array, expected: Array, size: float = 8.0) -> None:
    """Equal but for the rounding of a sum of a few hundred terms that together are below `size`."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=64 * EPS * size)


def test_two_queries_and_three_keys() -> None:
    rng = np.random.RandomState(42)
    q, k, v = rng.randn(2, 4), rng.randn(3, 4), rng.randn(3, 4)
    out, weights = regard.attention(q, k, v, return_weights=True)
    assert str(weights.round(3)) == "[[0.445 0.389 0.166]\n [0.507 0.221 0.272]]"
    assert out.shape == (2, 4)
    close(out, formula(q, k, v)[0])
    close(weights, formula(q, k, v)[1])


def test_self_attention_of_random_vectors() -> None:
    q, k, v = np.random.default_rng(0).random((3, 2, 3))
    close(regard.attention(q, k, v), formula(q, k, v)[0])


def test_shapes() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((10, 64)), rng.standard_normal((20, 64)), rng.standard_normal((20, 48))
    out, weights = regard.attention(q, k, v, return_weights=True)  # cross-attention: n_q ≠ n_k, d_v ≠ d
    assert out.shape == (10, 48)
    assert weights.shape == (10, 20)
    assert regard.attention(q, q, q).shape == (10, 64)  # self-attention
    assert regard.multihead_attention(q, k, k, num_heads=8).shape == (10, 64)


def test_weights_are_probabilities_and_outputs_means() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 50, 16))
    out, weights = regard.attention(q, k, v, return_weights=True)
    assert (weights > 0).all()
    close(weights.sum(axis=-1), np.ones((4, 50)), 1)
    assert (out <= v.max(axis=-2, keepdims=True)).all()
    assert (out >= v.min(axis=-2, keepdims=True)).all()
    close(regard.attention(q, k, np.ones_like(v)), np.ones_like(v), 1)
    close(regard.attention(q, np.zeros_like(k), v), np.broadcast_to(v.mean(axis=-2, keepdims=True), v.shape))


def test_a_soft_dictionary() -> None:
    """Keys are looked up: exactly in the limit of large scores, and in no order."""
    rng = np.random.default_rng(0)
    keys, _ = np.linalg.qr(rng.standard_normal((16, 16)))
    v = rng.standard_normal((16, 5))
    wanted = np.array([3, 3, 0, 15, 7])
    close(regard.attention(keys[wanted], keys, v, scale=100.0), v[wanted])
    order = rng.permutation(16)
    q = rng.standard_normal((9, 16))
    close(regard.attention(q, keys[order], v[order]), regard.attention(q, keys, v))


@pytest.mark.parametrize("d", [4, 64, 256])
def test_the_variance_of_a_dot_product_is_its_dimension(d: int) -> None:
    """Var(q · k) = d for unit normal q and k, and 1 after the scaling by 1/√d.

    The score of a query that sees one key is its lse. q · k is a sum of d independent terms of variance 1 and fourth
    moment 9, so the estimate of its variance from n samples varies by √((2 d² + 6 d) / n).
    """
    n = 10_000
    q, k = np.random.default_rng(d).standard_normal((2, n, d))
    own = regard.window(0)

    def scores(scale: float | None) -> Array:
        lse: Array = regard.attention(q, k, k[:, :1], mask=own, scale=scale, observe=["lse"])[1].lse
        return lse

    close(scores(1.0), (q * k).sum(axis=-1), 10 * d)
    deviation = np.sqrt((2 * d**2 + 6 * d) / n)
    assert abs(scores(1.0).var() - d) < 5 * deviation
    assert abs(scores(None).var() - 1) < 5 * deviation / d
    assert abs(scores(1.0).mean()) < 5 * np.sqrt(d / n)


def test_softmax_saturates_without_scaling() -> None:
    """As d grows, most queries give one key all their weight and the gradient of their scores vanishes."""
    n = 64
    gradient: dict[float | None, list[float]] = {None: [], 1.0: []}
    for d in (8, 64, 512):
        q, k, v, dout = np.random.default_rng(d).standard_normal((4, n, d))
        for scale, norms in gradient.items():
            _, seen = regard.attention(q, k, v, scale=scale, observe=["max", "entropy"])
            g = regard.attention_vjp(q, k, v, dout / np.sqrt(d), scale=scale, bias=np.zeros((n, n)))
            norms.append(float(np.median(np.linalg.norm(g.bias, axis=-1))))
            if scale is None:
                # Of n independent scores of variance 1 the weights have an entropy of about log n − 1/2.
                assert abs(np.median(seen.entropy) - (np.log(n) - 0.5)) < 0.25
                assert np.median(seen.max) < 0.2
    assert np.median(seen.max) > 0.98  # d = 512 and no scaling
    assert np.median(seen.entropy) < 0.1
    scaled, plain = gradient.values()
    assert max(scaled) < 1.5 * min(scaled)
    assert plain[0] > plain[1] > plain[2]
    assert plain[2] < scaled[2] / 10


def test_the_jacobian_of_softmax() -> None:
    """∂P_j/∂S_l = P_j (δ_jl − P_l), by way of a value that is the identity."""
    n = 12
    q, k = np.random.default_rng(0).standard_normal((2, n, 4))
    weights = regard.weights(q, k)
    for j in (0, 5):
        dout = np.zeros((n, n))
        dout[:, j] = 1
        g = regard.attention_vjp(q, k, np.eye(n), dout, bias=np.zeros((n, n)))
        close(g.bias, weights[:, j : j + 1] * (np.eye(n)[j] - weights), 1)


def test_causal_attention_sees_no_later_position() -> None:
    n = 40
    q, k, v = np.random.default_rng(0).standard_normal((3, n, 8))
    out, weights = regard.attention(q, k, v, causal=True, return_weights=True)
    later = np.triu(np.ones((n, n), bool), 1)
    assert (weights[later] == 0).all()
    assert (weights[~later] > 0).all()
    close(out, softmax(np.where(later, -np.inf, q @ k.T / np.sqrt(8))) @ v)
    close(out[0], v[0])
    changed = k.copy()
    changed[20:] = 1e9
    np.testing.assert_array_equal(regard.attention(q, changed, v, causal=True)[:20], out[:20])


def test_masks_are_scores_of_minus_infinity() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 30, 8))
    keep = rng.random((30, 30)) < 0.5
    keep[7] = False  # a query that may see nothing
    expected, weights = regard.attention(q, k, v, mask=keep, return_weights=True)
    alive = keep.any(axis=-1)
    close(expected[alive], (softmax(np.where(keep, q @ k.T / np.sqrt(8), -np.inf)[alive])) @ v)
    assert (expected[7] == 0).all()
    assert (weights[7] == 0).all()
    hidden = np.where(keep, 0.0, -np.inf)
    close(regard.attention(q, k, v, bias=hidden), expected)
    close(regard.attention(q, k, v, mask=keep.astype(int)), expected, 0)
    table = regard.table(hidden)
    close(regard.attention(q, k, v, score=lambda s, b, h, i, j: s + table[i, j]), expected)


def test_multihead_attention_is_heads_side_by_side() -> None:
    """Concat(head_1, ..., head_h) W_o with head_i = Attention(Q W_q[i], K W_k[i], V W_v[i]); batch 2, 8 heads of 64."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 100, 512))
    w_q, w_k, w_v, w_o = rng.standard_normal((4, 512, 512)) / np.sqrt(512)
    out, weights = regard.multihead_attention(x, x, x, 8, w_q=w_q, w_k=w_k, w_v=w_v, w_o=w_o, return_weights=True)
    assert out.shape == x.shape == (2, 100, 512)
    assert weights.shape == (2, 8, 100, 100)
    heads = []
    for h in range(8):
        columns = slice(64 * h, 64 * h + 64)
        head, expected = formula(x @ w_q[:, columns], x @ w_k[:, columns], x @ w_v[:, columns])
        close(weights[:, h], expected)
        heads.append(head)
    close(out, np.concatenate(heads, axis=-1) @ w_o, 64)


def test_arrays_mapped_from_a_file(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 9, 4), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    out = regard.attention(mapped, mapped, mapped, causal=True)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, regard.attention(x, x, x, causal=True))
