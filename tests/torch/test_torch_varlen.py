"""Packed sequences and jagged tensors are each sequence by itself."""

from typing import Any

import pytest
import torch

import dense
import regard
import regard.torch
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

Q = torch.randn(10, 4, 8, dtype=torch.float64)
K = torch.randn(13, 2, 8, dtype=torch.float64)
ALIBI = {"score": "alibi", "causal": True}
ENDS_Q, ENDS_K = torch.tensor([0, 4, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 7, 13])


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(
    "options",
    on_cpu([{}, {"causal": True}, {"causal": True, "mask": regard.window(2)}, ALIBI], ALIBI),
    ids=str,
)
def test_each_sequence_by_itself(options: dict[str, Any], same: bool) -> None:
    q, k = (Q.clone(), Q[:, :2].clone()) if same else (Q.clone(), K.clone())
    ends_q, ends_k = (ENDS_Q, ENDS_Q) if same else (ENDS_Q, ENDS_K)
    trained = [q.requires_grad_(), k.requires_grad_()]
    if "score" in options:
        trained.append(torch.rand(4, dtype=torch.float64, requires_grad=True))
        options = options | {"score": regard.alibi(trained[2])}
    out = regard.torch.varlen_attention(q, k, k, ends_q, None if same else ends_k, **options)
    bounds = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
    parts = [regard.attention(q[a:b], k[c:d], k[c:d], layout="bnhd", **options) for a, b, c, d in bounds]
    dense.same(out, torch.cat(parts), trained)


def test_nothing_beside_the_sequences_is_computed() -> None:
    from regard.torch.public.packed import _packed

    ends = tuple(range(0, 8193, 512))
    mask, at = _packed(ends, ends, True)
    assert at is None
    shape = (1, 8192, 64)
    plan = regard.plan(shape, shape, shape, mask=mask)
    assert plan.tiles.pairs <= 16 * 10 * 128**2  # of 16 documents the lower triangles of 4 × 4 tiles
    assert _packed(ends, ends, True)[0] is mask


def test_jagged() -> None:
    parts = [torch.randn(n, 8, 16) for n in (4, 6)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    q = jagged.transpose(1, 2)
    for out in (regard.torch.jagged_attention(q, q, q, causal=True),
                regard.torch.scaled_dot_product_attention(q, q, q, is_causal=True)):  # fmt: skip
        for got, x in zip(out.unbind(), parts, strict=True):
            x = x.transpose(0, 1)
            torch.testing.assert_close(got, regard.attention(x, x, x, causal=True))
    out.transpose(1, 2).values().sum().backward()
    assert jagged.grad is not None
    assert jagged.grad.values().abs().sum() > 0


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"cu_seqlens_q must rise from 0 to 10, the rows of what it cuts, got \[0, 11\]", {"q": [0, 11]}),
        (r"cu_seqlens_q must rise from 0 to 10, the rows of what it cuts, got \[0, 7, 5, 10\]", {"q": [0, 7, 5, 10]}),
        ("cu_seqlens_q and cu_seqlens_k differ in length: 2 and 4", {"q": [0, 10]}),
        ("varlen_attention takes no layout", {"layout": "bhnd"}),
        ("cu_seqlens_q must be integers", {"q": [0.0, 10.0]}),
    ],
)
def test_messages(message: str, change: dict[str, Any]) -> None:
    ends = torch.tensor(change.pop("q")) if "q" in change else ENDS_Q
    with pytest.raises((TypeError, ValueError), match=message):
        regard.torch.varlen_attention(Q, K, K, ends, ENDS_K, **change)


def test_what_is_not_packed_or_jagged() -> None:
    with pytest.raises(ValueError, match=r"query must be packed as \(total, heads, d\), got shape \(1, 10, 4, 8\)"):
        regard.torch.varlen_attention(Q[None], K, K, ENDS_Q, ENDS_K)
    with pytest.raises(TypeError, match=r"query must be a nested tensor with layout torch.jagged, got torch.Tensor"):
        regard.torch.jagged_attention(Q, Q, Q)
