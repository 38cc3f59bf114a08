"""FlashAttention 2's functions on any device, with its names, arguments and conventions."""

from __future__ import annotations  # so that `help` shows the names of types

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from regard.arguments.signatures import passing_on
from regard.arguments.values import number
from regard.core.tensors import tensor
from regard.reference.specification import dropout_mask
from regard.torch.dropins.flash_options import (
    EVERYWHERE,
    HOST,
    PAGED,
    Window,
    alibi_of,
    check_batch,
    check_packed,
    computed,
    options_of,
    packed_alibi,
    unpacked,
)
from regard.torch.operators.registration import new_seed
from regard.torch.public.attention import positions_first, weights
from regard.torch.public.packed import packed_rules, varlen_attention
from regard.torch.tensors.arrays import values
from regard.torch.tensors.modes import outside_of_graphs

ROUND = 128  # to a multiple of which flash-attn rounds the sizes of S_dmask


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn.flash_attn_func` in O(n) memory, on any device and in any dtype.

    Query i is at position p = i + n_k − n_q, so that the last query is aligned with the last key.

    Args:
        q: (batch, n_q, h, d).
        k: (batch, n_k, h_kv, d), h a multiple of h_kv.
        v: (batch, n_k, h_kv, d_v).
        dropout_p: share of the weights that is dropped, always: pass 0 in evaluation.
        softmax_scale: factor of the products, by default 1/√d.
        causal: query i sees the keys j ≤ p.
        window_size: (left, right), query i sees p − left ≤ j ≤ p + right; −1 is no bound.
        softcap: scores become softcap · tanh(s / softcap); 0 or less is none.
        alibi_slopes: (h,) or (batch, h); scores are lowered by slope · |p − j|.
        deterministic: no effect, since every gradient has the same bits in every run.
        return_attn_probs: return (out, softmax_lse, S_dmask).

    Returns out (batch, n_q, h, d_v), 0 where a query sees no key. softmax_lse (batch, h, n_q) is
    float32, +∞ where a query sees no key, and differentiates. S_dmask has the weights (batch, h,
    n_q, n_k) with both sizes rounded up to multiples of 128, negative where dropout took them. It
    is empty without dropout, and has no gradient.

    Raises RuntimeError as flash-attn does, where shapes, dtypes or values do not fit.

    >>> import torch
    >>> from regard.torch.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 10, 8, 16)
    >>> out = flash_attn_func(q, k, v, causal=True, window_size=(4, 0))
    >>> out.shape
    torch.Size([2, 10, 8, 16])
    """
    if return_attn_probs and dropout_p and torch.compiler.is_compiling():
        return _outside(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, True
        )  # fmt: skip
    check_batch(q, k, v)
    alibi = None if alibi_slopes is None else alibi_of(alibi_slopes, q.shape[0], q.shape[2])
    options = options_of(q.shape[1], k.shape[1], softmax_scale, causal, window_size, softcap, alibi)
    dropout = _dropout(dropout_p, return_attn_probs)
    if not return_attn_probs:
        return computed(positions_first, q, k, v, **options, **dropout)
    out, seen = computed(positions_first, q, k, v, **options, **dropout, observe=("lse",))
    dropped = _dropped(q, k, options, dropout) if dropout else q.new_empty(0)
    return out, shown(seen.lse), dropped


_outside = outside_of_graphs("NumPy makes the mask of dropout that S_dmask shows")(flash_attn_func)


_passing_on = passing_on(flash_attn_func, without=("q", "k", "v"))


@_passing_on
def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Compute `flash_attn_func` of queries, keys and values packed as (batch, n, 3, h, d)."""
    return flash_attn_func(*unpacked("qkv", qkv, 3, 2), *args, **options)


@_passing_on
def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Compute `flash_attn_func` of keys and values packed as (batch, n_k, 2, h_kv, d)."""
    return flash_attn_func(q, *unpacked("kv", kv, 2, 2), *args, **options)


@outside_of_graphs(HOST)
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Compute `flash_attn_func` of each of several packed sequences.

    Args:
        q: (total_q, h, d), the sequences one after the other.
        k: (total_k, h_kv, d).
        v: (total_k, h_kv, d_v).
        cu_seqlens_q: (batch + 1,) integers from 0 to total_q, the ends of the sequences of queries.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: at least the length of each sequence of queries.
        max_seqlen_k: the same for keys.
        block_table: None; there are no paged caches.

    The others are those of `flash_attn_func`. Returns out (total_q, h, d_v). With return_attn_probs
    softmax_lse is (h, total_q), and S_dmask (batch, h, max_seqlen_q, max_seqlen_k), both sizes
    rounded up. The lengths are read on the host, which breaks a compiled graph.

    >>> import torch
    >>> from regard.torch.flash_attn import flash_attn_varlen_func
    >>> q, ends = torch.randn(10, 8, 16), torch.tensor([0, 4, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, ends, ends, 6, 6, causal=True).shape
    torch.Size([10, 8, 16])
    """
    if block_table is not None:
        raise NotImplementedError(PAGED)
    ends_q, ends_k = check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    alibi = None if alibi_slopes is None else packed_alibi(alibi_slopes, ends_k, q.shape[1])
    options = options_of(max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap, alibi)
    options["causal"] = bool(options["causal"])
    dropout = _dropout(dropout_p, return_attn_probs)
    packed = q, k, v, cu_seqlens_q, cu_seqlens_k
    if not return_attn_probs:
        return computed(varlen_attention, *packed, **options, **dropout)
    out, seen = computed(varlen_attention, *packed, **options, **dropout, observe=("lse",))
    if not dropout_p:
        return out, shown(seen.lse), q.new_empty(0)
    with torch.no_grad():
        options |= packed_rules(ends_q, ends_k, options["mask"], options["score"], options.pop("causal"))
        tiles = []
        for rows, cols in zip(_slices(ends_q), _slices(ends_k), strict=True):
            tile = weights(q, k, lse=seen.lse, rows=rows, cols=cols, offset=0, layout="bnhd", **options)
            signed = _signed(tile, **dropout, first=rows.start, first_key=cols.start)
            tiles.append(_rounded(signed, max_seqlen_q, max_seqlen_k))
        return out, shown(seen.lse), torch.stack(tiles)


@_passing_on
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """Compute `flash_attn_varlen_func` of queries, keys and values packed as (total, 3, h, d)."""
    q, k, v = unpacked("qkv", qkv, 3, 1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


@_passing_on
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Any:
    """Compute `flash_attn_varlen_func` of keys and values packed as (total_k, 2, h_kv, d)."""
    k, v = unpacked("kv", kv, 2, 1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **options)


# Results


def _dropout(p: float, probabilities: bool) -> dict[str, Any]:
    """Return the options of dropout, with a seed where its mask is returned too."""
    if type(p) is not float:
        p = number("dropout_p", p)
    if not 0.0 <= p < 1.0:
        raise RuntimeError(f"dropout_p must be at least 0 and less than 1, got {p}")
    return {} if not p else {"dropout": p} | ({"seed": new_seed()} if probabilities else {})


@torch.no_grad()
def _dropped(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any], dropout: dict[str, Any]) -> torch.Tensor:
    """Return S_dmask of (batch, n, h, d)."""
    n_q, n_k = q.shape[1], k.shape[1]
    tile = weights(q, k, layout="bnhd", **{name: x for name, x in options.items() if x is not None})
    return _rounded(_signed(tile, **dropout, first=n_k - n_q), n_q, n_k)


def _signed(tile: torch.Tensor, dropout: float, seed: torch.Tensor, first: int, first_key: int = 0) -> torch.Tensor:
    """Negate the weights (..., h, n_q, n_k) that dropout takes.

    first, first_key: positions of the first query and key of the tile.
    """
    leading, (h, n_q, n_k) = tile.shape[:-3], tile.shape[-3:]
    b, h, i, j = np.ix_(*(np.arange(n) for n in (leading.numel(), h, n_q, n_k)))
    kept = dropout_mask(dropout, int(values(seed)), b, h, i + first, j + first_key)
    return torch.where(tensor(kept.reshape(tile.shape)).to(tile.device), tile, -tile)


def _rounded(x: torch.Tensor, n_q: int, n_k: int) -> torch.Tensor:
    """Pad the last two dimensions with zeros to multiples of 128."""
    n_q, n_k = (-(-n // ROUND) * ROUND for n in (n_q, n_k))
    return torch.nn.functional.pad(x, (0, n_k - x.shape[-1], 0, n_q - x.shape[-2]))


def shown(lse: torch.Tensor) -> torch.Tensor:
    """Return lse as flash-attn does: +∞ where a query sees no key."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _slices(ends: tuple[int, ...]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(ends)]
