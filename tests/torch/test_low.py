"""Gradients of saturated rows in 16 bits, by every way in which PyTorch asks for them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import regard
import regard.torch
from regard.core.problem import Differential, Outputs
from regard.core.tensors import array
from regard.ops.normalization import problem_from
from support import assert_saturated

torch.manual_seed(0)

pytestmark = pytest.mark.engine("tiled")

N, D = 256, 32
FACTORS = 1.6, 4.0  # those of bfloat16 by pairs, and of less
Q, K = 3 * torch.randn(2, 4, N, D)
V, DOUT = torch.randn(2, 4, N, D)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = regard.attention(q, k, v, causal=True)
    return found


def by_backward(function: Callable[..., Any], *given: torch.Tensor) -> Any:
    *inputs, dout = given
    inputs = [x.requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs), inputs, dout)


def in_layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    turned = (x.transpose(-2, -3) for x in (q, k, v))
    found: torch.Tensor = regard.attention(*turned, causal=True, layout="bnhd")
    return found.transpose(-2, -3)


def by_vjp(*given: torch.Tensor) -> Any:
    *inputs, dout = given
    return torch.func.vjp(attention, *inputs)[1](dout)


def by_heads(*given: torch.Tensor) -> Any:
    return torch.func.vmap(by_vjp, randomness="error")(*(x[:, None] for x in given))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def activated(*given: torch.Tensor) -> Any:
    with regard.torch.activate():
        return by_backward(sdpa, *given)


def by_flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    turned = (x.transpose(0, 1)[None] for x in (q, k, v))
    found: torch.Tensor = regard.torch.flash_attn.flash_attn_func(*turned, causal=True, return_attn_probs=True)[0]
    return found[0].transpose(0, 1)


def in_a_graph(*given: torch.Tensor) -> Any:
    """By PyTorch's operation, which a graph from before the activation holds."""
    function = torch.compile(sdpa, backend="aot_eager", fullgraph=True)
    by_backward(function, *(x.clone() for x in given))
    with regard.torch.activate():
        return by_backward(function, *given)


def by_merge(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = []
    for keys in (slice(0, N // 2), slice(N // 2, N)):
        out, seen = regard.attention(q, k[:, keys], v[:, keys], causal=True, offset=-keys.start, observe=["lse"])
        parts.append((out, seen.lse))
    return regard.merge(*parts)[0]


WAYS: dict[str, Callable[..., Any]] = {
    "backward": lambda *x: by_backward(attention, *x),
    "layout": lambda *x: by_backward(in_layout, *x),
    "a graph": lambda *x: by_backward(torch.compile(attention, backend="aot_eager", fullgraph=True), *x),
    "vjp": by_vjp,
    "vmap": lambda *x: tuple(g[:, 0] for g in by_heads(*x)),
    "activate": activated,
    "flash_attn": lambda *x: by_backward(by_flash_attn, *x),
}
ROUNDED: dict[str, Callable[..., Any]] = {
    "a graph with PyTorch's operation": in_a_graph,
    "merge": lambda *x: by_backward(by_merge, *x),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_saturated_rows(way: str, dtype: torch.dtype) -> None:
    q, k, v, dout = (x.to(dtype) for x in (Q, K, V, DOUT))
    p = problem_from(*(array(x) for x in (q, k, v)), causal=True)
    found = [array(x) for x in WAYS[way](q, k, v, dout)]
    assert_saturated(p, Outputs(array(dout), None, None), Differential(*found), *FACTORS)


@pytest.mark.parametrize("way", ROUNDED)
def test_what_the_documents_except_has_the_rounded_output(way: str) -> None:
    q, k, v, dout = (x.to(torch.float16) for x in (Q, K, V, DOUT))
    p = problem_from(*(array(x) for x in (q, k, v)), causal=True)
    found = Differential(*(array(x) for x in ROUNDED[way](q, k, v, dout)))
    assert_saturated(p, Outputs(array(dout), None, None), found, 4.0, np.inf)
    with pytest.raises(AssertionError, match="dquery: error"):
        assert_saturated(p, Outputs(array(dout), None, None), found, 1.1, np.inf)


@pytest.mark.engine("cpu")
def test_backward_has_the_bits_of_numpy() -> None:
    given = [x.to(torch.float16) for x in (Q, K, V, DOUT)]
    found = by_backward(attention, *(x.clone() for x in given))
    g = regard.attention_vjp(*(x.numpy() for x in given), causal=True)
    for x, y in zip(found, (g.query, g.key, g.value), strict=True):
        assert y is not None
        np.testing.assert_array_equal(x.numpy(), y)


def test_double_backward_takes_low_as_a_constant() -> None:
    q, k, v, dout = (x[:, :48].to(torch.float16).requires_grad_() for x in (Q, K, V, DOUT))
    first = torch.autograd.grad(attention(q, k, v), (q, k, v), dout, create_graph=True)
    second = torch.autograd.grad(sum((g.float() ** 2).sum() for g in first), (q, k, v, dout))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, dout)]
    first = torch.autograd.grad(attention(*wide[:3]), wide[:3], wide[3], create_graph=True)
    exact = torch.autograd.grad(sum((g**2).sum() for g in first), wide)
    for got, right in zip(second, exact, strict=True):
        assert float((got.double() - right).norm() / right.norm()) < 0.02
