"""Triangle attention of protein models, by the signature of cuequivariance."""

from __future__ import annotations  # so that `help` shows the names of types

from typing import Any

import torch

from regard.ops.attention import attention
from regard.rules import padding, type_name
from regard.torch.dropins.flex import max_scores
from regard.torch.dropins.packages import Package
from regard.torch.tensors.arrays import concrete

HIDDEN = -1e9  # the score that cuequivariance gives to a hidden key


def triangle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute attention within each row of a pair representation, with one bias for all rows.

    out = softmax(scale · q kᵀ + bias) v, by the signature and with the meaning of
    `cuequivariance_torch.triangle_attention`. Scores are never stored. It is differentiable twice
    in q, k, v and bias; the gradient of bias has its shape, and the same bits in every run.

    Args:
        q: (B, N, H, Q, D), or (N, H, Q, D) for B = 1.
        k, v: (B, N, H, K, D), or (N, H, K, D).
        bias: (B, 1, H, Q, K), or (1, H, Q, K), of the dtype of q or float32.
        mask: (B, N, 1, 1, K), or (N, 1, 1, K); nonzero = attend. A row without keys gives the mean
            of its values, as in the package, where its scores are all −1e9.
        scale: factor of q kᵀ, by default 1/√D.
        return_aux: also return lse and the largest score of each query, without derivatives.
        kv_lengths: (B, N, 1, 1, 1) integers in place of mask: the number of leading keys that each
            row sees. More than K means K. A row of length 0 gives 0, also as lse and largest score.

    Returns out (B, N, H, Q, D); with return_aux (out, lse, largest score), the last two
    (B, N, H, Q) in float32.

    Raises TypeError for what is no tensor, ValueError where shapes do not fit, and for mask
    together with kv_lengths.

    Source: Jumper et al. 2021, "Highly accurate protein structure prediction with AlphaFold",
    algorithms 13 and 14 of its supplement.

    >>> import torch, regard.torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 6, 8)
    >>> bias = torch.randn(1, 1, 2, 6, 6)
    >>> out = regard.torch.triangle_attention(q, k, v, bias)
    >>> expected = (q @ k.mT / 8**0.5 + bias).softmax(-1) @ v
    >>> torch.allclose(out, expected, atol=1e-5)
    True
    """
    q, k, v, bias = (_batched(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)))
    batch, rows, heads, n_q, d = q.shape
    n_k = k.shape[3]
    _check("k", k, (batch, rows, heads, n_k, d))
    _check("v", v, (batch, rows, heads, n_k, d))
    _check("bias", bias, (batch, 1, heads, n_q, n_k))
    if mask is not None and kv_lengths is not None:
        raise ValueError("triangle_attention takes mask or kv_lengths, got both")
    options: dict[str, Any] = {"bias": bias, "scale": scale, "observe": ("lse", "max") if return_aux else ()}
    empty, score = None, HIDDEN
    if mask is not None:
        mask = _batched("mask", mask).detach() != 0
        _check("mask", mask, (batch, rows, 1, 1, n_k))
        empty = ~mask.any(-1)
        result = attend(q, k, v, mask=mask, **options)
    elif kv_lengths is not None:
        lengths = _batched("kv_lengths", kv_lengths)
        _check("kv_lengths", lengths, (batch, rows, 1, 1, 1))
        empty, score = lengths[..., 0] == 0, 0.0
        result = attention(q, k, v, mask=padding(lengths.flatten().clamp(max=n_k)), **options)
    else:
        result = attention(q, k, v, **options)
    if not return_aux:
        return result
    out, seen = result
    return _with_scores(out, seen, empty, score)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    """Return attention under a mask of keys (..., 1, 1, n_k), where a row without keys gives the mean of its values."""
    result = attention(q, k, v, mask=mask, **options)
    empty = ~mask.any(-1, keepdim=True)
    if not v.shape[-2] or (readable(empty) and not bool(empty.any())):
        return result
    mean = v.mean(-2, keepdim=True)
    if isinstance(result, tuple):
        return torch.where(empty, mean, result[0]), result[1]
    return torch.where(empty, mean, result)


def readable(x: torch.Tensor) -> bool:
    """Return True if the values of `x` can be read now, also while Dynamo traces the caller."""
    return not torch.compiler.is_compiling() and concrete(x)


def _with_scores(
    out: torch.Tensor, seen: Any, empty: torch.Tensor | None, score: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, lse and the largest scores; rows without keys have the score that is given."""
    lse, largest = seen.lse.detach().float(), max_scores(seen).float()
    if empty is None:
        return out, lse, largest
    return out, lse.masked_fill(empty, score), largest.masked_fill(empty, score)


def _batched(name: str, x: Any) -> torch.Tensor:
    """Return a tensor with the axis of the batch that four dimensions leave out."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type_name(x)}")
    if x.ndim not in (4, 5):
        raise ValueError(f"{name} must have 5 dimensions, or 4 for a batch of one, got shape {tuple(x.shape)}")
    return x[None] if x.ndim == 4 else x


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a tensor has another shape than the one that is expected."""
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")


PACKAGE = Package(
    name="cuequivariance_ops_torch",
    distribution="cuequivariance-ops-torch",
    version="0.13.0",
    modules={"cuequivariance_ops_torch": {"triangle_attention": triangle_attention}},
)
