"""xFormers' `memory_efficient_attention`, with its biases as rules."""

from __future__ import annotations  # so that `help` shows the names of types

import importlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from regard import rules
from regard.rules import Mask
from regard.torch.adapter import positions_first
from regard.torch.dropins import xformers_biases
from regard.torch.dropins.packages import Attribute, Package

Intervals = tuple[tuple[int, int], ...]


class DiagonalBand(NamedTuple):
    """The keys that a query sees in its sequence: left before its own to right after it, None for all.

    last: the last query is aligned with the last key, else the first with the first.
    """

    last: bool = False
    left: int | None = None
    right: int | None = None


def _local(x: Any) -> DiagonalBand:
    return DiagonalBand(True, x.window_left, x.window_right)


def _causal(last: bool) -> Callable[[Any], DiagonalBand]:
    return lambda x: DiagonalBand(last, None, 0)


def _causal_local(last: bool) -> Callable[[Any], DiagonalBand]:
    return lambda x: DiagonalBand(last, x._window_size - 1, 0)


BANDS: dict[str, Callable[[Any], DiagonalBand]] = {
    "LowerTriangularMask": _causal(last=False),
    "LowerTriangularMaskWithTensorBias": _causal(last=False),
    "LowerTriangularFromBottomRightMask": _causal(last=True),
    "LowerTriangularFromBottomRightLocalAttentionMask": _causal_local(last=True),
    "LocalAttentionFromBottomRightMask": _local,
    "BlockDiagonalMask": lambda x: DiagonalBand(),
    "BlockDiagonalCausalMask": _causal(last=False),
    "BlockDiagonalCausalFromBottomRightMask": _causal(last=True),
    "BlockDiagonalCausalLocalAttentionMask": _causal_local(last=False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _causal_local(last=True),
    "BlockDiagonalPaddedKeysMask": lambda x: DiagonalBand(),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _causal(last=True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _local,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _causal_local(last=True),
    "BlockDiagonalGappyKeysMask": lambda x: DiagonalBand(),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _causal(last=True),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": _local,
}
"""By the name of the class, so that those of the package and ours are read alike."""


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `xformers.ops.memory_efficient_attention` in O(n) memory, on any device.

    Args:
        query: (batch, n_q, h, d); or (batch, n_q, d); or (batch, n_q, groups, h, d).
        key: (batch, n_k, h, d), of as many dimensions as query. Grouped heads that are expanded are
            read once.
        value: (batch, n_k, h, d_v).
        attn_bias: floats (batch, h, n_q, n_k) that are added to the scores, and have a gradient; or
            one of the classes of `xformers.ops.fmha.attn_bias`, except paged ones.
        p: share of the weights that is dropped.
        scale: factor of the products, by default 1/√d.
        op: no effect; there is one kernel.
        output_dtype: that of the result, by default of query.

    Returns out (batch, n_q, h, d_v), of as many dimensions as query, 0 where a query sees no key.

    Raises ValueError as xFormers does, NotImplementedError for a bias of another class.

    >>> import torch
    >>> from regard.torch.xformers import LowerTriangularMask, memory_efficient_attention
    >>> q = torch.randn(2, 10, 8, 16)
    >>> memory_efficient_attention(q, q, q, attn_bias=LowerTriangularMask()).shape
    torch.Size([2, 10, 8, 16])
    """
    _check(query, key, value, attn_bias, p)
    options: dict[str, Any] = {"scale": scale, "dropout": p if 0.0 < p < 1.0 else None}
    if isinstance(attn_bias, torch.Tensor):
        options["bias"] = _rank_4(attn_bias, query.ndim)
    elif attn_bias is not None:
        options |= rules_of(attn_bias, query.shape[1], key.shape[1])
    out: torch.Tensor = positions_first(*_heads(query, key, value), **options)
    out = torch.nn.functional.dropout(out, 1.0) if p == 1.0 else out
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    return out if output_dtype is None else out.to(output_dtype)


def rules_of(attn_bias: Any, n_q: int, n_k: int) -> dict[str, Any]:
    """Return the options of `regard.attention` that a bias of xFormers means, None where they are defaults.

    n_q, n_k: the rows of query and key.
    """
    name = type(attn_bias).__name__
    if name not in BANDS:
        raise NotImplementedError(f"attn_bias of the class {name} has no rule: give it as a tensor, by .materialize()")
    band = BANDS[name](attn_bias)
    if hasattr(attn_bias, "q_seqinfo"):
        q, k = (tuple(x.intervals()) for x in (attn_bias.q_seqinfo, attn_bias.k_seqinfo))
        for what, n, info in (("query", n_q, attn_bias.q_seqinfo), ("key", n_k, attn_bias.k_seqinfo)):
            if n != info.seqstart_py[-1]:
                raise ValueError(f"attn_bias is for {info.seqstart_py[-1]} rows of {what}, got {n}")
        return {"mask": _packed(q, k, n_k, band), "offset": 0} if n_q and n_k else {}
    options = {} if band.last else {"offset": 0}
    tensor = getattr(attn_bias, "_bias", None)
    if (band.left, band.right) == (None, 0):
        return options | {"causal": True, "bias": None if tensor is None else _rank_4(tensor, 4)}
    return options | {"mask": _window(band.left, band.right)}


_window = lru_cache(rules.window)


@lru_cache
def _packed(q: Intervals, k: Intervals, n_k: int, band: DiagonalBand) -> Mask:
    """Return the mask of sequences that follow each other, where keys may have gaps between them.

    q, k: the first row of each sequence, and the end. Equal masks are one, so that calls find their cached plans.
    """
    own = np.repeat(np.arange(len(q)), [end - first for first, end in q])
    keys = np.full(n_k, len(q))  # no query's sequence
    for sequence, (first, end) in enumerate(k):
        keys[first:end] = sequence
    mask = rules.documents(own, keys)
    if band.left is None and band.right is None:
        return mask
    at = int(band.last)
    shift = rules.Table(np.repeat([y[at] - x[at] for x, y in zip(q, k, strict=True)], np.diff(q)[:, 0]))
    if band.left is not None:
        mask &= rules.mask(lambda b, h, i, j: i + shift[i] - j <= band.left)
    if band.right is not None:
        mask &= rules.mask(lambda b, h, i, j: j - i - shift[i] <= band.right)
    return mask


def _heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return operands as (batch, n, h, d); expanded heads of keys and values are one."""
    if query.ndim == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    if query.ndim == 4:
        return query, key, value
    if key.stride(3) == value.stride(3) == 0:
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _rank_4(bias: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return a bias as (batch, h, n_q, n_k), for operands of `ndim` dimensions."""
    if ndim == 3:
        return bias.unsqueeze(1)
    return bias.flatten(1, 2) if bias.ndim == 5 else bias


def _check(query: Any, key: Any, value: Any, attn_bias: Any, p: float) -> None:
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {rules.type_name(x)}")
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
    if query.ndim not in (3, 4, 5) or not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"Query/Key/Value should all have BMGHK, BMHK or BMK shape, got {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"Query/Key/Value should all have the same dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    heads = query.shape[2:-1]
    if not (query.shape[0] == key.shape[0] == value.shape[0] and key.shape[1] == value.shape[1]) or not (
        query.shape[-1] == key.shape[-1] and heads == key.shape[2:-1] == value.shape[2:-1]
    ):
        raise ValueError(f"Incompatible shapes for attention inputs: {shapes}; use `expand` to broadcast")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"Invalid dropout probability: p={p}")
    tensor = attn_bias if isinstance(attn_bias, torch.Tensor) else getattr(attn_bias, "_bias", None)
    expected = (query.shape[0], *heads, query.shape[1], key.shape[1])
    if tensor is not None and tuple(tensor.shape) != expected:
        raise ValueError(f"Invalid shape for attention bias: {tuple(tensor.shape)} (expected {expected})")
    if hasattr(attn_bias, "q_seqinfo") and query.shape[0] != 1:
        raise ValueError(f"Expected batch_size=1 when using block-diagonal bias, got {shapes}")


def _replaced() -> Iterable[Attribute]:
    """Replace the function where models look it up."""
    name = "memory_efficient_attention"
    modules = [importlib.import_module(module) for module in ("xformers.ops", "xformers.ops.fmha")]
    return [(module, name, memory_efficient_attention) for module in modules]


FUNCTION = {"memory_efficient_attention": memory_efficient_attention}
PACKAGE = Package(
    name="xformers",
    distribution="xformers",
    version="0.0.35",
    modules=MappingProxyType(
        {
            "xformers": {},
            "xformers.ops": FUNCTION | {"unbind": torch.unbind} | xformers_biases.OF_OPS,
            "xformers.ops.fmha": FUNCTION | xformers_biases.CLASSES,
            "xformers.ops.fmha.attn_bias": xformers_biases.CLASSES,
        }
    ),
    replaced=_replaced,
)
