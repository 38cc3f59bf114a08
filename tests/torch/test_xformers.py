"""xFormers' function against dense attention in float64, with every mask; gradients included."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard.torch
from dense import attention, same
from regard.torch.dropins.xformers import (
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
    LowerTriangularMask,
    memory_efficient_attention,
)

pytestmark = pytest.mark.engine("tiled")

Q, K = [4, 2, 5], [5, 4, 6]  # the lengths of sequences
N_Q, N_K = sum(Q), sum(K)


def dense(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
    return attention(*qkv, layout="bnhd", **options)[0]


def every(n_q: int, n_k: int) -> torch.Tensor:
    return torch.ones(n_q, n_k, dtype=torch.bool)


def blocks(causal: bool) -> torch.Tensor:
    """The entries of the sequences, each from its first query and its first key on."""
    parts = (every(n, m) for n, m in zip(Q, K, strict=True))
    return torch.block_diag(*(x.tril() if causal else x for x in parts)).bool()


CASES = {
    "LowerTriangularMask": (LowerTriangularMask(), every(N_Q, N_K).tril()),
    "BlockDiagonalMask": (BlockDiagonalMask.from_seqlens(Q, K), blocks(causal=False)),
    "BlockDiagonalCausalMask": (BlockDiagonalMask.from_seqlens(Q, K).make_causal(), blocks(causal=True)),
}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", CASES)
def test_biases(name: str) -> None:
    mask, visible = CASES[name]
    theirs = type(name, (), vars(mask))()  # xFormers' classes of these names are read alike
    q, k, v = randn(1, N_Q, 2, 8), randn(1, N_K, 2, 8), randn(1, N_K, 2, 6)
    for bias in (mask, theirs):
        out = memory_efficient_attention(q, k, v, bias, scale=0.4)
        same(out, dense(q, k, v, visible=visible, scale=0.4), [q, k, v])


@pytest.mark.engine("cpu")
def test_tensors() -> None:
    q, k, v, bias = randn(2, 5, 3, 8), randn(2, 6, 3, 8), randn(2, 6, 3, 6), randn(2, 3, 5, 6)
    same(memory_efficient_attention(q, k, v, bias), dense(q, k, v, score=bias.add), [q, k, v, bias])


def test_one_head() -> None:
    q, bias = randn(2, 5, 8), randn(2, 5, 5)
    x = q[:, :, None]
    same(memory_efficient_attention(q, q, q, bias), dense(x, x, x, score=bias[:, None].add)[:, :, 0], [q, bias])


@pytest.mark.parametrize("expanded", [False, True])
def test_groups_of_heads(expanded: bool) -> None:
    q, bias = randn(2, 5, 2, 3, 8), randn(2, 2, 3, 5, 6)
    k, v = (randn(2, 6, 2, 1 if expanded else 3, 8) for _ in range(2))
    out = memory_efficient_attention(q, k.expand(-1, -1, -1, 3, -1), v.expand(-1, -1, -1, 3, -1), bias)
    heads = [x.expand(-1, -1, -1, 3, -1).flatten(2, 3) for x in (q, k, v)]
    same(out, dense(*heads, score=bias.flatten(1, 2).add).unflatten(2, (2, 3)), [q, k, v, bias])


def test_dropout_and_dtype() -> None:
    x = torch.randn(1, 64, 2, 8)
    torch.manual_seed(1)
    out = memory_efficient_attention(x, x, x, p=0.5)
    torch.manual_seed(1)
    assert torch.equal(out, regard.attention(x, x, x, dropout=0.5, layout="bnhd"))
    assert memory_efficient_attention(x, x, x, output_dtype=torch.float64).dtype == torch.float64


def test_equal_biases_are_one_rule() -> None:
    from regard.torch.dropins.xformers import _options

    first, second = (_options(BlockDiagonalCausalMask.from_seqlens([3, 4], [4, 4]), (1, 2, 7, 8)) for _ in range(2))
    assert first["mask"] is second["mask"]


def refused(error: Any, message: str, *call: Any, **options: Any) -> None:
    with pytest.raises(error) as raised:
        memory_efficient_attention(*call, **options)
    assert message in str(raised.value)


def test_wrong_use() -> None:
    q, one = torch.randn(2, 5, 4, 8), torch.randn(1, 5, 4, 8)
    shapes = "query, key and value must be (B, M, H, K), (B, M, K) or (B, M, G, H, K), got (2, 5, 4, 8), "
    refused(TypeError, "key must be a torch.Tensor where others of the call are, got int", q, 3, q)
    refused(ValueError, f"{shapes}(5, 4, 8), (2, 5, 4, 8)", q, q[0], q)
    refused(ValueError, f"{shapes}(2, 5, 2, 8), (2, 5, 2, 8)", q, q[:, :, :2], q[:, :, :2])
    refused(ValueError, f"{shapes}(1, 5, 4, 8), (1, 5, 4, 8)", q, one, one)
    refused(TypeError, "query, key and value must share one dtype", q, q.half(), q)
    refused(ValueError, "dropout must be in [0, 1), got 2.0", q, q, q, p=2.0)
    refused(ValueError, "attn_bias must have shape (2, 4, 5, 5), got (5, 5)", q, q, q, torch.zeros(5, 5))
    for x, lengths in ((q, ([5],)), (one, ([6],)), (one, ([5], [6])), (one, ([5], [2, 3]))):
        refused(ValueError, "attn_bias has sequences at (0, ", x, x, x, BlockDiagonalMask.from_seqlens(*lengths))
    masks = "LowerTriangularMask, BlockDiagonalMask, BlockDiagonalCausalMask"
    other = type("LocalAttentionFromBottomRightMask", (), {})()
    refused(NotImplementedError, f"a tensor or one of {masks}, got LocalAttentionFromBottomRightMask", q, q, q, other)


@pytest.mark.parametrize(
    "code",
    [
        "from regard.torch.xformers import memory_efficient_attention",
        "from regard.torch import xformers; xformers.LowerTriangularMask",
        "from xformers.ops.fmha.attn_bias import BlockDiagonalGappyKeysMask",
        "import xformers.ops as xops; xops.swiglu",
    ],
)
def test_other_names_are_answered(code: str) -> None:
    name = code.replace(".", " ").split()[-1]
    has = "memory_efficient_attention, unbind, LowerTriangularMask, BlockDiagonalMask, BlockDiagonalCausalMask"
    with regard.torch.stand_in("xformers"), pytest.raises(ImportError) as raised:
        exec(code)
    assert str(raised.value) == f"no {name} here: after regard.torch.stand_in('xformers'), xformers.ops has {has}"


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
