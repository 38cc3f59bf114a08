import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.positions import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    YaRNScaling,
    alibi_slopes,
    rope,
    rope_frequencies,
    sinusoidal,
    t5_buckets,
)

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# --- sinusoidal ---


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 6), st.integers(1, 9), st.sampled_from([100.0, 10000.0]), st.integers(-3, 1000))
def test_sinusoidal_is_the_formula(n, d, base, offset):
    table = sinusoidal(n, d, base=base, offset=offset, dtype=np.float64)
    assert table.shape == (n, d)
    for i in range(n):
        for c in range(d):
            turn = math.sin if c % 2 == 0 else math.cos
            # One ulp of the frequency moves the angle by |p| ulps.
            assert table[i, c] == pytest.approx(turn((i + offset) / base ** ((c - c % 2) / d)), abs=1e-12)


def test_sinusoidal_angles_are_float64_in_any_dtype():
    p = 10**6
    exact = sinusoidal(1, 64, offset=p, dtype=np.float64)
    assert np.abs(sinusoidal(1, 64, offset=p) - exact).max() <= np.finfo(np.float32).eps / 2
    assert sinusoidal(2, 4, dtype=ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


# --- rope ---


def rotated(x, positions, frequencies, pairing):
    """Pairs as complex numbers, x (..., h, n, d) and positions (..., n), in float64."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    pairs = (
        x.reshape(*x.shape[:-1], 2, half).swapaxes(-1, -2) if pairing == "half" else x.reshape(*x.shape[:-1], half, 2)
    )
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * positions[..., None, :, None] * frequencies)
    turned = np.stack([z.real, z.imag], axis=-1)
    return (turned.swapaxes(-1, -2) if pairing == "half" else turned).reshape(x.shape)


@settings(max_examples=settings().max_examples // 4)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["half", "interleaved"]),
    st.sampled_from(["bhnd", "bnhd"]),
    st.data(),
)
def test_rope_is_a_complex_rotation(lead, n, half, rest, pairing, layout, data):
    dim, d = 2 * half, 2 * half + rest
    x = normal(*lead, n, d)
    shape = data.draw(st.sampled_from([(n,), (*lead[:-1], n), (*[1] * (len(lead) - 1), n)]))
    positions = np.random.default_rng(1).integers(-5, 1000, shape) + data.draw(st.sampled_from([0, 0.25]))
    given_x = x.swapaxes(-3, -2) if layout == "bnhd" else x
    before = given_x.copy()
    out = rope(given_x, positions, dim=dim, pairing=pairing, layout=layout)
    assert out.shape == given_x.shape
    np.testing.assert_array_equal(given_x, before)
    out = out.swapaxes(-3, -2) if layout == "bnhd" else out
    # Angles reach 1000, so float64 leaves about 1000 eps in each of the two computations.
    expected = rotated(x[..., :dim], positions, rope_frequencies(dim), pairing)
    np.testing.assert_allclose(out[..., :dim], expected, atol=2e-12)
    np.testing.assert_array_equal(out[..., dim:], x[..., dim:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_rounds_once_to_its_dtype(dtype):
    x = normal(2, 3, 50, 16, dtype=dtype)
    out = rope(x, np.arange(50) + 100_000)
    assert out.dtype == x.dtype
    exact = rope(x.astype(np.float64), np.arange(50) + 100_000)
    # Half an ulp of the result; before it cos, sin, two products and a sum in float32 (or float64).
    eps, wide = float(ml_dtypes.finfo(dtype).eps), np.finfo(np.result_type(dtype, np.float32)).eps
    size = np.abs(x.astype(np.float64)).max()
    np.testing.assert_array_less(np.abs(out.astype(np.float64) - exact), eps / 2 * np.abs(exact) + 4 * wide * size)


def test_rope_on_matrices_and_layouts_and_default_positions():
    x = normal(5, 8)
    np.testing.assert_array_equal(rope(x), rope(x[None])[0])
    np.testing.assert_array_equal(rope(x, layout="bnhd"), rope(x))
    np.testing.assert_array_equal(rope(x), rope(x, np.arange(5)))
    np.testing.assert_array_equal(rope(x)[0], x[0])


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, LinearScaling(4.0), YaRNScaling(4.0, 128, attention_factor=1.0)])
def test_rotated_dot_products_depend_on_the_difference_of_positions(pairing, scaling):
    q, k = normal(1, 1, 32), normal(1, 1, 32, seed=1)

    def dot(i, j):
        return (rope(q, [i], pairing=pairing, scaling=scaling) * rope(k, [j], pairing=pairing, scaling=scaling)).sum()

    assert dot(3, 10) == pytest.approx(dot(503, 510), abs=1e-11)
    assert abs(dot(3, 10) - dot(10, 3)) > 0.1
    back = rope(rope(q, [77], pairing=pairing, scaling=scaling), [-77], pairing=pairing, scaling=scaling)
    np.testing.assert_allclose(back, q, atol=1e-13)


def test_frequencies():
    np.testing.assert_allclose(rope_frequencies(6, base=1000.0), [1, 0.1, 0.01])
    plain = rope_frequencies(128)
    np.testing.assert_allclose(rope_frequencies(128, scaling=LinearScaling(8.0)), plain / 8)
    ntk = rope_frequencies(128, scaling=NTKScaling(8.0))
    np.testing.assert_allclose(ntk, rope_frequencies(128, base=10000.0 * 8 ** (128 / 126)))
    np.testing.assert_allclose(ntk[[0, -1]], [plain[0], plain[-1] / 8])
    np.testing.assert_array_equal(rope_frequencies(2, scaling=NTKScaling(8.0)), [1.0])


def test_linear_scaling_divides_positions():
    x = normal(2, 6, 8)
    np.testing.assert_allclose(rope(x, scaling=LinearScaling(4.0)), rope(x, np.arange(6) / 4), atol=1e-14)


def test_yarn():
    d, length, factor = 128, 4096, 16.0
    plain, scaled = rope_frequencies(d), rope_frequencies(d, scaling=YaRNScaling(factor, length))
    # Feature a turns 4096 ω[a] / 2π times: 32 turns fall at a = 20.9 and one at a = 45.03, rounded outwards.
    turns = length * plain / (2 * math.pi)
    assert turns[20] > 32 > turns[21]
    assert turns[45] > 1 > turns[46]
    np.testing.assert_array_equal(scaled[:21], plain[:21])
    np.testing.assert_allclose(scaled[46:], plain[46:] / factor)
    a = np.arange(20, 47)
    np.testing.assert_allclose(scaled[20:47] / plain[20:47], 1 - (a - 20) / 26 * (1 - 1 / factor))

    exact_ends = rope_frequencies(d, scaling=YaRNScaling(factor, length, truncate=False))
    assert exact_ends[21] < plain[21]
    assert exact_ends[45] > plain[45] / factor
    step = d * math.log(32) / (2 * math.log(10000))
    np.testing.assert_allclose(np.diff(exact_ends[21:46] / plain[21:46]), -(1 - 1 / factor) / step)

    x = normal(1, 3, d)
    gain = np.linalg.norm(rope(x, scaling=YaRNScaling(factor, length)), axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(gain, 0.1 * math.log(factor) + 1)
    gain = np.linalg.norm(rope(x, scaling=YaRNScaling(factor, length, attention_factor=0.5)), axis=-1)
    np.testing.assert_allclose(gain, 0.5 * np.linalg.norm(x, axis=-1))


def test_yarn_with_degenerate_ramps():
    plain = rope_frequencies(8)
    steep = rope_frequencies(8, scaling=YaRNScaling(4.0, 1000, beta_fast=2.0, beta_slow=2.0, truncate=False))
    turns = 1000 * plain / (2 * math.pi)
    np.testing.assert_allclose(steep, np.where(turns > 2, plain, plain / 4))
    # Within two positions nothing turns even once, so all but the fastest frequency is interpolated.
    short = rope_frequencies(128, scaling=YaRNScaling(4.0, 2))
    np.testing.assert_allclose(short[1:], rope_frequencies(128)[1:] / 4)


def test_llama3():
    scaling = Llama3Scaling(8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    for plain, scaled in zip(
        rope_frequencies(128, base=500000.0), rope_frequencies(128, base=500000.0, scaling=scaling), strict=True
    ):
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            assert scaled == plain
        elif wavelength > 8192 / 1:
            assert scaled == pytest.approx(plain / 8, rel=1e-15)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert scaled == pytest.approx((1 - smooth) * plain / 8 + smooth * plain, rel=1e-14)
            assert plain / 8 < scaled < plain


def test_any_function_is_a_scaling():
    x = normal(1, 4, 4)
    out = rope(x, scaling=lambda d, base: (np.zeros(d // 2), 3.0))
    np.testing.assert_array_equal(out, 3 * x)


# --- alibi ---


def test_alibi_slopes():
    np.testing.assert_array_equal(alibi_slopes(8), [2.0**-k for k in range(1, 9)])
    # 12 heads: eight as above, then every second one of sixteen.
    np.testing.assert_array_equal(alibi_slopes(12), np.float32([2.0**-k for k in (*range(1, 9), 0.5, 1.5, 2.5, 3.5)]))
    for h in range(1, 70):
        slopes = alibi_slopes(h)
        assert slopes.shape == (h,)
        assert slopes.dtype == np.float32
        assert len(set(slopes.tolist())) == h
        assert 0 < slopes.min() <= slopes.max() < 1
    np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])


# --- T5 ---


def buckets_float32(offset, num_buckets, max_distance, bidirectional):
    """The formula with correctly rounded float32 logarithms, as implementations compute it."""
    first = np.zeros_like(offset)
    if bidirectional:
        num_buckets //= 2
        first, distance = num_buckets * (offset > 0), np.abs(offset)
    else:
        distance = np.maximum(-offset, 0)
    own = num_buckets // 2
    log = np.log(np.maximum(distance, 1) / own).astype(np.float32) / np.float32(math.log(max_distance / own))
    shared = np.minimum(own + (log * np.float32(num_buckets - own)).astype(np.int64), num_buckets - 1)
    return first + np.where(distance < own, distance, shared)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [64, 100, 128, 256, 512, 800, 2048])
@pytest.mark.parametrize("num_buckets", [4, 8, 16, 32, 64, 128])
def test_t5_buckets_agree_with_float32_for_sizes_in_use(num_buckets, max_distance, bidirectional):
    if max_distance <= num_buckets // (4 if bidirectional else 2):
        with pytest.raises(ValueError, match="max_distance must be at least"):
            t5_buckets(0, num_buckets, max_distance, bidirectional)
        return
    offset = np.arange(-3000, 3000)
    buckets = t5_buckets(offset, num_buckets, max_distance, bidirectional)
    assert buckets.dtype == np.int64
    np.testing.assert_array_equal(buckets, buckets_float32(offset, num_buckets, max_distance, bidirectional))


def test_t5_buckets_begin_exactly_at_their_edges():
    # max_distance = 16 · 2^16 and 16 shared buckets: 16 · 2^13 begins bucket 16 + 13. PyTorch's float32 log says 28.
    edge = np.array([-(2**17) + 1, -(2**17)])
    np.testing.assert_array_equal(t5_buckets(edge, 32, 2**20, False), [28, 29])


def test_t5_buckets_take_any_integers():
    assert t5_buckets(np.int8(-128)) == 15
    assert t5_buckets(np.uint8(255)) == 31
    np.testing.assert_array_equal(t5_buckets([[2**62, -(2**62)], [1, -1]]), [[31, 15], [17, 1]])
    np.testing.assert_array_equal(t5_buckets([5, 2**62], bidirectional=False), [0, 0])
    assert t5_buckets(np.zeros((0, 3), int)).shape == (0, 3)
    sizes = np.array([32, 128])
    np.testing.assert_array_equal(t5_buckets([-100, 100], *sizes), [15, 31])
    # An odd number of buckets leaves its last one unused in two directions.
    assert t5_buckets(np.arange(-500, 500), 9).max() == 7


# --- bad input ---

X = np.zeros((2, 3, 4), np.float32)
BAD = {
    "n": (lambda: sinusoidal(-1, 4), ValueError, "n must be at least 0, got -1"),
    "d": (lambda: sinusoidal(3, 0), ValueError, "d must be at least 1, got 0"),
    "base": (lambda: sinusoidal(3, 4, base=1.0), ValueError, "base must be greater than 1 and finite, got 1.0"),
    "nan base": (lambda: rope(X, base=math.nan), ValueError, "base must be greater than 1 and finite, got nan"),
    "list": (lambda: rope([[1.0, 2.0]]), TypeError, "x must be a NumPy array, got list"),
    "integers": (lambda: rope(np.zeros((3, 4), int)), TypeError, "x must have a floating dtype .*, got int64"),
    "vector": (lambda: rope(X[0, 0]), ValueError, r"x must be \(..., h, n, d\) or \(n, d\), got shape \(4,\)"),
    "layout": (lambda: rope(X, layout="hnd"), ValueError, "layout must be 'bhnd' or 'bnhd', got 'hnd'"),
    "pairing": (lambda: rope(X, pairing="neox"), ValueError, "pairing must be 'half' or 'interleaved', got 'neox'"),
    "odd": (lambda: rope(X, dim=3), ValueError, "an even number from 2 to d = 4, got dim=3"),
    "wide": (lambda: rope(X, dim=6), ValueError, "an even number from 2 to d = 4, got dim=6"),
    "odd d": (lambda: rope(X[..., :3]), ValueError, "an even number from 2 to d = 3, got dim=3"),
    "odd frequencies": (lambda: rope_frequencies(5), ValueError, "expected an even d ≥ 2, got 5"),
    "positions": (lambda: rope(X, np.arange(4)), ValueError, r"broadcast to \(..., n\) = \(3,\), got shape \(4,\)"),
    "heads in positions": (lambda: rope(X, np.zeros((2, 3))), ValueError, r"got shape \(2, 3\)"),
    "scalar position": (lambda: rope(X, 3), ValueError, r"got shape \(\)"),
    "bool positions": (lambda: rope(X, np.ones(3, bool)), TypeError, "positions must be integers or floats, got bool"),
    "factor": (lambda: LinearScaling(0.0), ValueError, "LinearScaling: factor must be positive and finite, got 0.0"),
    "nan factor": (lambda: NTKScaling(math.nan), ValueError, "NTKScaling: factor must be positive and finite, got nan"),
    "length": (lambda: YaRNScaling(2.0, 0), ValueError, "YaRNScaling: original_length must be positive"),
    "betas": (lambda: YaRNScaling(2.0, 9, 1.0, 2.0), ValueError, "beta_fast=1.0 must be at least beta_slow=2.0"),
    "factors": (lambda: Llama3Scaling(8.0, 9, 4.0, 4.0), ValueError, "must be greater than low_freq_factor=4.0"),
    "float heads": (lambda: alibi_slopes(8.0), TypeError, "num_heads must be an int, got 8.0"),
    "float dim": (lambda: rope(X, dim=2.0), TypeError, "dim must be an int, got 2.0"),
    "heads": (lambda: alibi_slopes(0), ValueError, "num_heads must be at least 1, got 0"),
    "float offset": (lambda: t5_buckets([1.0]), TypeError, "offset must be integers, j - i, got float64"),
    "buckets": (lambda: t5_buckets(0, 3), ValueError, "num_buckets must be at least 4, got 3"),
    "buckets one way": (lambda: t5_buckets(0, 1, 9, False), ValueError, "num_buckets must be at least 2, got 1"),
    "distance": (lambda: t5_buckets(0, 32, 8), ValueError, "max_distance must be at least 9, got 8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, error, text = BAD[case]
    with pytest.raises(error, match=text):
        call()
