"""xFormers' function against dense attention in float64, with every class of bias; gradients included."""

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard.torch
from regard.torch.dropins import xformers_biases as biases
from regard.torch.dropins.xformers import BANDS
from regard.torch.xformers import memory_efficient_attention

N_Q, N_K = 11, 15
Q, K = [4, 2, 5], [5, 4, 6]  # the lengths of sequences
STARTS = [1, 7, 12, 20]


def dense(q: Any, k: Any, v: Any, visible: torch.Tensor, bias: Any = 0.0, scale: Any = None) -> torch.Tensor:
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) + bias
    seen = visible.any(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(~visible, -torch.inf).masked_fill(~seen, 0.0), -1) * seen
    return torch.einsum("bhij,bjhd->bihd", p, v)


def band(n_q: int, n_k: int, last: bool, left: int = 99, right: int = 99) -> torch.Tensor:
    """The entries that a diagonal band allows, aligned at its last or its first entries."""
    shift = n_k - n_q if last else 0
    return torch.ones(n_q, n_k, dtype=torch.bool).triu(shift - left).tril(shift + right)


def placed(starts: list[int], lengths: list[int], **options: Any) -> torch.Tensor:
    """The bands of sequences: starts, the first keys, and the number of all; lengths of keys."""
    visible = torch.zeros(sum(Q), starts[-1], dtype=torch.bool)
    first = 0
    for n, a, m in zip(Q, starts, lengths, strict=False):
        visible[first : first + n, a : a + m] = band(n, m, **options)
        first += n
    return visible


FOLLOWING = [0, 5, 9, 15]
PADDED = [0, 7, 14, 21]
LAST = {"last": True, "right": 0}
CASES: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
    "LowerTriangularMask": (biases.LowerTriangularMask, band(N_Q, N_K, last=False, right=0)),
    "LowerTriangularFromBottomRightMask": (biases.LowerTriangularFromBottomRightMask, band(N_Q, N_K, **LAST)),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        lambda: biases.LowerTriangularFromBottomRightMask().make_local_attention(3),
        band(N_Q, N_K, left=2, **LAST),
    ),
    "LocalAttentionFromBottomRightMask": (
        lambda: biases.LocalAttentionFromBottomRightMask(2, 1),
        band(N_Q, N_K, last=True, left=2, right=1),
    ),
    "BlockDiagonalMask": (lambda: biases.BlockDiagonalMask.from_seqlens(Q, K), placed(FOLLOWING, K, last=True)),
    "BlockDiagonalCausalMask": (
        lambda: biases.BlockDiagonalMask.from_seqlens(Q, K).make_causal(),
        placed(FOLLOWING, K, last=False, right=0),
    ),
    "BlockDiagonalCausalFromBottomRightMask": (
        lambda: biases.BlockDiagonalMask.from_seqlens(Q, K).make_causal_from_bottomright(),
        placed(FOLLOWING, K, **LAST),
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        lambda: biases.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention(2),
        placed(FOLLOWING, K, last=False, left=1, right=0),
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        lambda: biases.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention_from_bottomright(2),
        placed(FOLLOWING, K, left=1, **LAST),
    ),
    "BlockDiagonalPaddedKeysMask": (
        lambda: biases.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 7, K),
        placed(PADDED, K, last=True),
    ),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        lambda: biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 7, K),
        placed(PADDED, K, **LAST),
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        lambda: biases.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 7, K).make_local_attention(2, 1),
        placed(PADDED, K, last=True, left=2, right=1),
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        lambda: biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 7, K, 2),
        placed(PADDED, K, left=1, **LAST),
    ),
    "BlockDiagonalGappyKeysMask": (
        lambda: biases.BlockDiagonalGappyKeysMask.from_seqlens(Q, STARTS, K),
        placed(STARTS, K, last=True),
    ),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        lambda: biases.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, STARTS, K),
        placed(STARTS, K, **LAST),
    ),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": (
        lambda: biases.BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask.from_seqlens_local_gappy(
            Q, STARTS, K, 2, 1
        ),
        placed(STARTS, K, last=True, left=2, right=1),
    ),
}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def same(got: Any, expected: Any, trained: Any) -> None:
    torch.testing.assert_close(got, expected)
    dout = torch.randn_like(expected)
    for x, y in zip(torch.autograd.grad(got, trained, dout), torch.autograd.grad(expected, trained, dout), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", CASES)
def test_biases(name: str) -> None:
    make, visible = CASES[name]
    assert type(make()).__name__ == name
    n_q, n_k = visible.shape
    q, k, v = randn(1, n_q, 2, 8), randn(1, n_k, 2, 8), randn(1, n_k, 2, 6)
    same(memory_efficient_attention(q, k, v, make(), scale=0.4), dense(q, k, v, visible, scale=0.4), [q, k, v])


def test_every_bias_is_tested() -> None:
    assert {*CASES, "LowerTriangularMaskWithTensorBias"} == BANDS.keys() == biases.CLASSES.keys() - {"AttentionBias"}


@pytest.mark.parametrize("lower", [False, True])
def test_tensors(lower: bool) -> None:
    q, k, v, bias = randn(2, 5, 3, 8), randn(2, 6, 3, 8), randn(2, 6, 3, 6), randn(2, 3, 5, 6)
    given = biases.LowerTriangularMask().add_bias(bias) if lower else bias
    visible = band(5, 6, last=False, right=0 if lower else 99)
    same(memory_efficient_attention(q, k, v, given), dense(q, k, v, visible, bias), [q, k, v, bias])


def test_one_head() -> None:
    q, bias = randn(2, 5, 8), randn(2, 5, 5)
    x = q[:, :, None]
    expected = dense(x, x, x, band(5, 5, last=True), bias[:, None])[:, :, 0]
    same(memory_efficient_attention(q, q, q, bias), expected, [q, bias])


@pytest.mark.parametrize("expanded", [False, True])
def test_groups_of_heads(expanded: bool) -> None:
    q = randn(2, 5, 2, 3, 8)
    k, v = (randn(2, 6, 2, 1 if expanded else 3, 8) for _ in range(2))
    out = memory_efficient_attention(q, k.expand(-1, -1, -1, 3, -1), v.expand(-1, -1, -1, 3, -1))
    heads = [x.expand(-1, -1, -1, 3, -1).flatten(2, 3) for x in (q, k, v)]
    same(out, dense(*heads, band(5, 6, last=True)).unflatten(2, (2, 3)), [q, k, v])


def test_dropout_and_dtype() -> None:
    x = torch.randn(1, 64, 2, 8)
    torch.manual_seed(1)
    out = memory_efficient_attention(x, x, x, p=0.5)
    torch.manual_seed(1)
    assert torch.equal(out, regard.attention(x, x, x, dropout=0.5, layout="bnhd"))
    assert not memory_efficient_attention(x, x, x, p=1.0).any()
    assert memory_efficient_attention(x, x, x, output_dtype=torch.float64).dtype == torch.float64


def test_sequences_are_joined_and_split() -> None:
    parts = [torch.randn(b, n, 2, 8) for b, n in ((2, 3), (1, 5))]
    bias, x = biases.BlockDiagonalMask.from_tensor_list(parts)
    out = bias.split(memory_efficient_attention(x, x, x, bias))
    for part, got in zip(parts, out, strict=True):
        torch.testing.assert_close(got, memory_efficient_attention(part, part, part))
    bias, q, k, v = biases.BlockDiagonalMask.from_tensor_lists_qkv(parts, [part[:, 1:] for part in parts])
    assert v is None
    assert [x.shape[1] for x in (q, k)] == [11, 8]
    assert [tuple(x.shape[:2]) for x in bias.split_kv(k)] == [(2, 2), (1, 4)]
    info = bias.k_seqinfo
    assert info.seqstart.tolist() == info.seqstart_py == [0, 2, 4, 8]
    assert (info.min_seqlen, info.max_seqlen, info.seqlen.tolist()) == (2, 4, [2, 2, 4])


def test_equal_biases_are_one_rule() -> None:
    from regard.torch.dropins.xformers import rules_of

    first, second = (rules_of(biases.BlockDiagonalCausalMask.from_seqlens([3, 4]), 7, 7)["mask"] for _ in range(2))
    assert first is second


def refused(error: Any, match: str, *given: Any, **options: Any) -> None:
    with pytest.raises(error, match=match):
        memory_efficient_attention(*given, **options)


def test_wrong_use() -> None:
    class PagedBlockDiagonalPaddedKeysMask(biases.AttentionBias):
        pass

    q = torch.randn(2, 5, 4, 8)
    refused(TypeError, "key must be a torch.Tensor, got int", q, 3, q)
    refused(ValueError, "BMGHK, BMHK or BMK shape", q, q[0], q)
    refused(ValueError, "should all have the same dtype", q, q.half(), q)
    refused(ValueError, "Incompatible shapes for attention inputs", q, q[:, :, :2], q[:, :, :2])
    refused(ValueError, "Invalid dropout probability: p=2.0", q, q, q, p=2.0)
    refused(ValueError, r"Invalid shape for attention bias: \(5, 5\)", q, q, q, torch.zeros(5, 5))
    refused(ValueError, "Expected batch_size=1", q, q, q, biases.BlockDiagonalMask.from_seqlens([5]))
    refused(
        ValueError, "is for 6 rows of query, got 5", q[:1], q[:1], q[:1], biases.BlockDiagonalMask.from_seqlens([6])
    )
    refused(NotImplementedError, "PagedBlockDiagonalPaddedKeysMask has no rule", q, q, q,
            PagedBlockDiagonalPaddedKeysMask())  # fmt: skip


def test_wrong_biases() -> None:
    for error, make in (
        (ValueError, lambda: biases.LowerTriangularFromBottomRightMask().make_local_attention(0)),
        (ValueError, lambda: biases.LocalAttentionFromBottomRightMask(-1, 2)),
        (ValueError, lambda: biases.BlockDiagonalMask.from_seqlens([3], [2]).make_causal_from_bottomright()),
        (RuntimeError, lambda: biases.BlockDiagonalMask.from_seqlens([5], [2]).make_local_attention(2)),
        (ValueError, lambda: biases.BlockDiagonalGappyKeysMask.from_seqlens([3], [0], [2])),
        (AssertionError, lambda: biases.BlockDiagonalMask.from_seqlens([3], [2, 1])),
        (AssertionError, lambda: biases.BlockDiagonalPaddedKeysMask.from_seqlens([3], 2, [3])),
    ):
        with pytest.raises(error):
            make()


def test_a_file_that_imports_xformers() -> None:
    code = """
from xformers.ops import LowerTriangularMask, fmha, memory_efficient_attention, unbind
import xformers.ops as xops
from xformers.ops.fmha.attn_bias import BlockDiagonalMask
q, k, v = unbind(qkv, 2)
out = xops.memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask())
packed = memory_efficient_attention(q[:1], k[:1], v[:1], fmha.BlockDiagonalMask.from_seqlens([2, 3]))
"""
    qkv = torch.randn(2, 5, 3, 4, 8)
    with regard.torch.stand_in("xformers"):
        exec(code, names := {"qkv": qkv})
    out = regard.attention(*qkv.unbind(2), causal=True, layout="bnhd")
    assert torch.equal(names["out"], out)
    one = regard.attention(*qkv[:1, :2].unbind(2), layout="bnhd")
    torch.testing.assert_close(names["packed"][:, :2], one)


def test_signature() -> None:
    parameters = inspect.signature(memory_efficient_attention).parameters.values()
    assert ", ".join(str(x.replace(annotation=x.empty)) for x in parameters) == (
        "query, key, value, attn_bias=None, p=0.0, scale=None, op=None, output_dtype=None"
    )


def test_the_function_of_an_installed_package_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xformers/ops/fmha").mkdir(parents=True)
    (tmp_path / "xformers/__init__.py").touch()
    (tmp_path / "xformers/ops/__init__.py").write_text("from .fmha import memory_efficient_attention, Bias\n")
    (tmp_path / "xformers/ops/fmha/__init__.py").write_text("class Bias: ...\ndef memory_efficient_attention(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    ops = importlib.import_module("xformers.ops")
    theirs = ops.memory_efficient_attention
    with regard.torch.stand_in("xformers"):
        assert ops.memory_efficient_attention is ops.fmha.memory_efficient_attention is memory_efficient_attention
        assert importlib.import_module("xformers.ops").Bias is ops.fmha.Bias
    assert ops.memory_efficient_attention is ops.fmha.memory_efficient_attention is theirs
    for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
        del sys.modules[name]
