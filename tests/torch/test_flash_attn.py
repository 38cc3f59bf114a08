"""FlashAttention 2's functions against dense attention in float64, gradients included."""

import inspect
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense import attention, same
from regard.torch import flash_attn as fa

pytestmark = pytest.mark.engine("tiled")
ON_CPU = pytest.mark.engine("cpu")  # for each function a call on compiled kernels

ENDS_Q, ENDS_K = torch.tensor([0, 4, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 7, 13], dtype=torch.int32)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def dense(
    q: Any, k: Any, v: Any, *, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, keys: Any = None, kept: Any = None, at: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Out and lse of (batch, n, h, d).

    keys: booleans (batch, n_k). kept: factors of the weights. at: the position of each first query.
    """
    n_q, n_k = q.shape[1], k.shape[1]
    first = torch.full((q.shape[0],), n_k - n_q) if at is None else at
    i, j = first[:, None, None, None] + torch.arange(n_q)[:, None], torch.arange(n_k)

    def score(s: torch.Tensor) -> torch.Tensor:
        s = softcap * torch.tanh(s / softcap) if softcap else s
        return s if alibi_slopes is None else s - alibi_slopes.expand(len(q), -1)[..., None, None] * (i - j).abs()

    left, right = window_size[0], 0 if causal else window_size[1]
    visible = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    visible = visible if keys is None else visible & keys[:, None, None]
    factors = 1 if kept is None else kept
    out, lse = attention(
        q, k, v, scale=softmax_scale, score=score, visible=visible, factors=factors, layout="bnhd"
    )  # fmt: skip
    return out, lse.masked_fill(lse.isneginf(), torch.inf)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3, "softcap": 2.0},
    {"window_size": (2, 1)},
    {"window_size": (3, -1)},
    {"window_size": (-1, 0)},
    {"causal": True, "window_size": (2, 5), "softcap": 3.0},
    {"window_size": torch.tensor([40, 5])},
]


def with_slopes(batch: int) -> list[Any]:
    """Each of `OPTIONS` without slopes and with some, in turns for each head and for each batch entry too."""
    cases = [(x, None) for x in OPTIONS] + [(x, ((4,), (batch, 4))[n % 2]) for n, x in enumerate(OPTIONS)]
    return [pytest.param(*x, marks=ON_CPU if len(x[0]) == 3 and x[1] else ()) for x in cases]


@pytest.mark.parametrize("sizes", [(7, 7), (9, 5), (1, 6)], ids=str)
@pytest.mark.parametrize(("options", "slopes"), with_slopes(2), ids=str)
def test_batches(options: dict[str, Any], slopes: Any, sizes: tuple[int, int]) -> None:
    n_q, n_k = sizes
    q, k, v = randn(2, n_q, 4, 8), randn(2, n_k, 2, 8), randn(2, n_k, 2, 6)
    trained = [q, k, v]
    if slopes is not None:
        trained.append(torch.rand(slopes, dtype=torch.float64, requires_grad=True))
        options = options | {"alibi_slopes": trained[3]}
    out, lse, weights = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected, expected_lse = dense(q, k, v, **options)
    assert weights.shape == (0,)
    torch.testing.assert_close(lse, expected_lse)
    assert torch.equal(out, fa.flash_attn_func(q, k, v, **options))
    same(out, expected, trained)


def test_slopes_are_read_in_each_call() -> None:
    q, slopes = torch.randn(3, 10, 4, 8, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    ends, packed = torch.tensor([0, 10, 20, 30]), q.flatten(0, 1)
    for _ in range(2):
        expected = dense(q, q, q, alibi_slopes=slopes)[0]
        torch.testing.assert_close(fa.flash_attn_func(q, q, q, alibi_slopes=slopes), expected)
        out = fa.flash_attn_varlen_func(packed, packed, packed, ends, ends, 10, 10, alibi_slopes=slopes)
        torch.testing.assert_close(out.unflatten(0, (3, 10)), expected)
        slopes.mul_(3)


@pytest.mark.parametrize("options", [pytest.param(OPTIONS[1], marks=ON_CPU), *OPTIONS[2:]], ids=str)
def test_packed_operands(options: dict[str, Any]) -> None:
    qkv, q, kv = randn(2, 6, 3, 4, 8), randn(2, 5, 4, 8), randn(2, 7, 2, 2, 8)
    same(fa.flash_attn_qkvpacked_func(qkv, 0.0, **options), dense(*qkv.unbind(2), **options)[0], [qkv])
    same(fa.flash_attn_kvpacked_func(q, kv, **options), dense(q, *kv.unbind(2), **options)[0], [q, kv])


def each(q: Any, k: Any, v: Any, slopes: Any, **options: Any) -> torch.Tensor:
    """Out of packed sequences, each by itself."""
    parts = []
    for n, ((a, b), (c, d)) in enumerate(zip(pairwise(ENDS_Q.tolist()), pairwise(ENDS_K.tolist()), strict=True)):
        alibi = slopes[n] if slopes is not None and slopes.ndim == 2 else slopes
        parts.append(dense(q[None, a:b], k[None, c:d], v[None, c:d], alibi_slopes=alibi, **options)[0][0])
    return torch.cat(parts)


@pytest.mark.parametrize(("options", "slopes"), with_slopes(3), ids=str)
def test_sequences(options: dict[str, Any], slopes: Any) -> None:
    q, k, v = randn(10, 4, 8), randn(13, 2, 8), randn(13, 2, 6)
    alibi = None if slopes is None else torch.rand(slopes, dtype=torch.float64, requires_grad=True)
    trained = [q, k, v] + ([] if alibi is None else [alibi])
    out = fa.flash_attn_varlen_func(q, k, v, ENDS_Q, ENDS_K, 6, 6, alibi_slopes=alibi, **options)
    same(out, each(q, k, v, alibi, **options), trained)
    kv = torch.stack([k, v := randn(13, 2, 8)], 1).detach().requires_grad_()
    out = fa.flash_attn_varlen_kvpacked_func(q, kv, ENDS_Q, ENDS_K, 6, 6, alibi_slopes=alibi, **options)
    same(out, each(q, *kv.unbind(1), alibi, **options), [q, kv])


@ON_CPU
def test_sequences_of_one_tensor() -> None:
    qkv = randn(13, 3, 4, 8)
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, ENDS_K, 6, 0.0, None, True)
    parts = [dense(*x[None].unbind(2), causal=True)[0][0] for x in qkv.split([5, 2, 6])]
    same(out, torch.cat(parts), [qkv])


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}], ids=str)
def test_dropout(options: dict[str, Any]) -> None:
    q, k, v = randn(2, 5, 4, 8), randn(2, 9, 2, 8), randn(2, 9, 2, 8)
    torch.manual_seed(3)
    out, lse, weights = fa.flash_attn_func(q, k, v, 0.4, return_attn_probs=True, **options)
    torch.manual_seed(3)
    assert torch.equal(out, fa.flash_attn_func(q, k, v, 0.4, **options))
    assert weights.shape == (2, 4, 128, 128)
    assert not weights[..., 5:, :].any()
    assert not weights[..., 9:].any()
    weights = weights[..., :5, :9]
    expected, expected_lse = dense(q, k, v, kept=(weights >= 0) / 0.6, **options)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(weights.abs().sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    assert 0.2 < (weights < 0).sum() / (weights != 0).sum() < 0.6
    same(out, expected, [q, k, v])


def test_dropout_of_sequences() -> None:
    q, k, v = randn(10, 4, 8), randn(13, 2, 8), randn(13, 2, 8)
    out, lse, weights = fa.flash_attn_varlen_func(
        q, k, v, ENDS_Q, ENDS_K, 6, 6, 0.4, causal=True, return_attn_probs=True
    )
    assert weights.shape == (3, 4, 128, 128)
    assert lse.shape == (4, 10)
    kept = (weights >= 0) / 0.6
    parts = [
        dense(q[None, a:b], k[None, c:d], v[None, c:d], causal=True, kept=kept[n, None, :, : b - a, : d - c])
        for n, (a, b, c, d) in enumerate(((0, 4, 0, 5), (4, 4, 5, 7), (4, 10, 7, 13)))
    ]
    torch.testing.assert_close(lse, torch.cat([x[1][0] for x in parts], -1))
    same(out, torch.cat([x[0][0] for x in parts]), [q, k, v])


def test_lse_has_a_gradient() -> None:
    q, k = randn(1, 6, 2, 8), randn(1, 4, 2, 8)  # two queries see nothing
    lse = fa.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[1]
    expected = dense(q, k, k, causal=True)[1]
    assert torch.equal(lse.isposinf(), expected.isposinf())
    assert lse.isposinf().sum() == 4
    same(lse[..., 2:], expected[..., 2:], [q, k])


def test_no_keys() -> None:
    q, k = randn(2, 3, 4, 8), randn(2, 0, 4, 8)
    out, lse, _ = fa.flash_attn_func(q, k, k, return_attn_probs=True)
    assert not out.any()
    assert lse.isposinf().all()
    ends, slopes = torch.tensor([0, 3]), torch.rand(1, 4)
    assert not fa.flash_attn_varlen_func(q[0], k[0], k[0], ends, 0 * ends, 3, 0, alibi_slopes=slopes).any()


# Caches


@pytest.mark.parametrize("lengths", [5, [5, 5], [9, 4], [0, 7], None], ids=str)
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (2, 1)}, pytest.param({"causal": True, "softcap": 2.0, "window_size": (4, 0)}, marks=ON_CPU)],
    ids=str,
)
@pytest.mark.parametrize("queries", [1, 3])
def test_cache(queries: int, options: dict[str, Any], new: int, lengths: Any) -> None:
    if lengths is None and new:
        pytest.skip("all of the cache is in use")
    k_cache, v_cache = torch.randn(2, 2, 12, 2, 8, dtype=torch.float64)
    q, slopes = torch.randn(2, queries, 4, 8, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, new, 2, 8, dtype=torch.float64)
    used = torch.tensor([12, 12] if lengths is None else lengths).expand(2)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for b, n in enumerate(used.tolist()):
        expected_k[b, n : n + new], expected_v[b, n : n + new] = k[b], v[b]
    given = torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths
    out, lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, *((k, v) if new else ()), cache_seqlens=given, alibi_slopes=slopes,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)
    total = used + new
    keys = torch.arange(12) < total[:, None]
    expected, expected_lse = dense(q, k_cache, v_cache, keys=keys, at=total - queries, alibi_slopes=slopes, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_and_left_padding_of_a_cache(causal: bool) -> None:
    k_cache, v_cache = torch.randn(2, 4, 12, 2, 8, dtype=torch.float64)
    q = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    rows, lengths, first = torch.tensor([3, 1]), torch.tensor([9, 6]), torch.tensor([2, 5])
    out = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=rows.int(), cache_leftpad=first, causal=causal
    )
    j = torch.arange(12)
    keys = (j >= first[:, None]) & (j < lengths[:, None])
    expected, _ = dense(q, k_cache[rows], v_cache[rows], keys=keys, at=lengths - 3, causal=causal)
    torch.testing.assert_close(out, expected)


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`x` (b, n, h, d) as complex numbers times exp(i · angle), angles (b, n, pairs)."""
    pairs = angles.shape[-1]
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    z = rotated.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    z = z if interleaved else z.transpose(-1, -2)
    z = torch.view_as_real(torch.view_as_complex(z.contiguous()) * torch.exp(1j * angles[..., None, :]))
    return torch.cat([(z if interleaved else z.transpose(-1, -2)).flatten(-2), rest], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_embedding_in_a_cache(causal: bool, interleaved: bool) -> None:
    k_cache, v_cache = torch.randn(2, 2, 12, 2, 8, dtype=torch.float64)
    q, (k, v) = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.randn(2, 2, 3, 2, 8, dtype=torch.float64)
    angles, used = torch.rand(12, 3, dtype=torch.float64) * 6, torch.tensor([4, 7])
    at = used[:, None] + torch.arange(3)
    q_rotated = turned(q, angles[at if causal else used[:, None].expand(2, 3)], interleaved)
    out = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), cache_seqlens=used, causal=causal,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    written = torch.stack([k_cache[b, n : n + 3] for b, n in enumerate(used.tolist())])
    torch.testing.assert_close(written, turned(k, angles[at], interleaved))
    keys = torch.arange(12) < used[:, None] + 3
    torch.testing.assert_close(out, dense(q_rotated, k_cache, v_cache, keys=keys, at=used, causal=causal)[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved: bool) -> None:
    x, angles = randn(2, 5, 4, 8), torch.rand(9, 2, dtype=torch.float64) * 6
    given = angles.cos(), angles.sin(), interleaved
    offsets = torch.tensor([1, 4])
    at = offsets[:, None] + torch.arange(5)
    same(fa.apply_rotary_emb(x, *given, seqlen_offsets=offsets), turned(x, angles[at], interleaved), [x])
    packed, ends = x.flatten(0, 1), torch.tensor([0, 5, 10])
    out = fa.apply_rotary_emb(packed, *given, seqlen_offsets=offsets, cu_seqlens=ends, max_seqlen=5)
    torch.testing.assert_close(out.unflatten(0, (2, 5)), turned(x, angles[at], interleaved))
    y = x.detach().clone()
    assert fa.apply_rotary_emb(y, *given, inplace=True) is y
    torch.testing.assert_close(y, turned(x, angles[None, :5].expand(2, 5, 2), interleaved).detach())


# Padding


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4).filter(lambda x: any(map(any, x)))
)
def test_padding_returns(mask: list[list[bool]]) -> None:
    flags, x = torch.tensor(mask), randn(len(mask), 5, 2, 3)
    rows, indices, ends, longest, used = fa.unpad_input(x, flags)
    assert torch.equal(rows, x[flags])
    assert torch.equal(indices, flags.flatten().nonzero()[:, 0])
    assert ends.dtype == used.dtype == torch.int32
    assert torch.equal(ends.diff(), used)
    assert ends[0] == 0
    assert torch.equal(used, flags.sum(1))
    assert longest == used.max()
    same(fa.pad_input(rows, indices, len(mask), 5), x * flags[..., None, None], [x])


def test_unused_rows_are_packed_too() -> None:
    x, mask, unused = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[0, 0, 1], [0, 0, 0]])
    rows, _, ends, longest, used = fa.unpad_input(x, mask, unused)
    assert torch.equal(rows, torch.cat([x[0], x[1, :1]]))
    assert ends.tolist() == [0, 3, 4]
    assert longest == 3
    assert used.tolist() == [2, 1]


def test_rows_of_several_sequences() -> None:
    x, lengths = torch.randn(3, 6, 2), torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, ends, longest = fa.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    assert ends.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6


def test_rows_by_index() -> None:
    x, at = randn(5, 2, 3), torch.tensor([3, 0])
    same(fa.index_first_axis(x, at), x[at], [x])
    rows, residual = fa.index_first_axis_residual(x, at)
    same(rows.sum() + (2 * residual).sum(), x[at].sum() + (2 * x).sum(), [x])
    assert torch.equal(rows, x[at])
    assert torch.equal(residual, x)


# Wrong use


def refused(error: Any, match: str, function: Any, *given: Any, **options: Any) -> None:
    with pytest.raises(error, match=match):
        function(*given, **options)


def test_wrong_use() -> None:
    q, ends = torch.randn(2, 5, 4, 8), torch.tensor([0, 2, 5])
    func, varlen = fa.flash_attn_func, fa.flash_attn_varlen_func
    refused(TypeError, "k must be a torch.Tensor, got list", func, q, [1], q)
    refused(RuntimeError, r"q must have shape \(batch, n, heads, d\), got \(5, 4, 8\)", func, q[0], q, q)
    refused(RuntimeError, "same batch size, positive, got 2, 1 and 1", func, q, q[:1], q[:1])
    refused(RuntimeError, "positive, got 0, 0 and 0", func, q[:0], q[:0], q[:0])
    refused(RuntimeError, "query and key must have the same dtype", func, q, q.half(), q)
    refused(RuntimeError, "query and value must have the same dtype", func, q, q, q.half())
    refused(RuntimeError, "must divide number of heads in query, got 3 for 4", func, q, q[:, :, :3], q[:, :, :3])
    refused(RuntimeError, "as many rows and heads", func, q, q, q[:, :4])
    refused(RuntimeError, "as many features, got 8 and 6", func, q, q[..., :6], q)
    refused(TypeError, r"window_size must be two integers \(left, right\), got 3", func, q, q, q, window_size=3)
    refused(TypeError, r"window_size must be two integers .*, got \(1, None\)", func, q, q, q, window_size=(1, None))
    refused(TypeError, "softcap must be a number, got '3'", func, q, q, q, softcap="3")
    refused(ValueError, "cap of softcap must be positive and finite, got nan", func, q, q, q, softcap=math.nan)
    refused(TypeError, "causal must be a bool, got 1", func, q, q, q, causal=1)
    refused(TypeError, "dropout_p must be a number, got None", func, q, q, q, None)
    refused(RuntimeError, "dropout_p must be at least 0 and less than 1, got 1.0", func, q, q, q, 1.0)
    refused(RuntimeError, r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(3,\)", func, q, q, q,
            alibi_slopes=torch.ones(3))  # fmt: skip
    refused(RuntimeError, r"\(batch, n, 3, heads, d\)", fa.flash_attn_qkvpacked_func, torch.randn(2, 5, 2, 4, 8))
    refused(RuntimeError, r"\(total, 2, heads, d\)", fa.flash_attn_varlen_kvpacked_func, q[0], q[0], ends, ends, 3, 3)
    refused(RuntimeError, "cu_seqlens_k must rise from 0 to 4", varlen, q[0], q[0, :4], q[0, :4], ends, ends, 3, 3)
    refused(RuntimeError, "max_seqlen_k must be at least 3", varlen, q[0], q[0], q[0], ends, ends, 3, 2)
    refused(RuntimeError, "batch size must be positive", varlen, q[0, :0], q[0, :0], q[0, :0], ends[:1], ends[:1], 0, 0)
    refused(NotImplementedError, "paged", varlen, q[0], q[0], q[0], ends, ends, 3, 3, block_table=ends)


def test_wrong_use_of_a_cache() -> None:
    cache, q, pair = torch.zeros(2, 2, 8, 4, 8), torch.randn(2, 1, 4, 8), (torch.ones(8, 4), torch.ones(8, 4))
    func = fa.flash_attn_with_kvcache
    refused(RuntimeError, "value must also be passed in", func, q, *cache, q, cache_seqlens=1)
    refused(RuntimeError, "cache_seqlens must also be passed in", func, q, *cache, q, q)
    refused(RuntimeError, "room for 8 keys, got 8 and 1 more", func, q, *cache, q, q, cache_seqlens=8)
    refused(RuntimeError, "from 0 to 8, the size of the cache", func, q, *cache, cache_seqlens=9)
    refused(RuntimeError, r"integers of shape \(2,\)", func, q, *cache, cache_seqlens=torch.tensor([1.0, 2.0]))
    refused(RuntimeError, "give cache_batch_idx", func, q[:1], *cache)
    refused(RuntimeError, "from 0 to 1, got", func, q, *cache, cache_batch_idx=torch.tensor([0, 2]))
    refused(
        RuntimeError, "to be appended must also be provided", func, q, *cache, rotary_cos=pair[0], rotary_sin=pair[1]
    )
    refused(RuntimeError, "rotary sin must also", func, q, *cache, q, q, rotary_cos=pair[0], cache_seqlens=1)
    refused(
        RuntimeError, "at least the seqlen of KV cache, 8, got 4", func, q, *cache, q, q, pair[0][:4], pair[1][:4], 1
    )
    refused(
        RuntimeError, r"k must be torch.float32 of shape \(2, 1, 4, 8\)", func, q, *cache, q.half(), q, cache_seqlens=1
    )
    refused(NotImplementedError, "paged", func, q, *cache, block_table=torch.zeros(2, 1))
    assert not cache.any()


def test_a_cache_has_no_derivative() -> None:
    q = randn(2, 1, 4, 8)
    assert not fa.flash_attn_with_kvcache(q, *torch.zeros(2, 2, 8, 4, 8, dtype=torch.float64)).requires_grad


# Graphs and signatures


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window_size": (2, 0), "softcap": 3.0, "alibi_slopes": torch.rand(2, 4)},
        {"window_size": (2, 1)},
    ],
    ids=["all", "window"],
)
def test_in_a_graph(options: dict[str, Any]) -> None:
    q = torch.randn(2, 6, 4, 8)
    compiled = torch.compile(fa.flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, q, q, **options), fa.flash_attn_func(q, q, q, **options))


def test_the_mask_of_dropout_breaks_a_graph() -> None:
    q = torch.randn(2, 6, 4, 8)
    out, lse, dropped = torch.compile(fa.flash_attn_func, backend="aot_eager")(q, q, q, 0.3, return_attn_probs=True)
    expected, expected_lse = dense(q, q, q, kept=(dropped[..., :6, :6] >= 0) / 0.7)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert dropped.signbit().any()


def test_sequences_break_a_graph() -> None:
    q = torch.randn(10, 4, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return fa.flash_attn_varlen_func(x * 2, x, x, ENDS_Q, ENDS_Q, 6, 6) + 1

    assert torch.equal(torch.compile(step, backend="aot_eager")(q), step(q))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="reads the lengths of sequences on the host"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(q)


COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{COMMON}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {COMMON}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    text = ", ".join(str(x.replace(annotation=x.empty)) for x in parameters)
    assert text.replace(" = ", "=") == SIGNATURES[name]
