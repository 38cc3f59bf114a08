"""Attention over a cache of keys and values, and rotary embedding, as flash-attn has them."""

from __future__ import annotations  # so that `help` shows the names of types

from functools import lru_cache, reduce
from operator import and_
from typing import Any

import numpy as np
import torch

from regard import rules
from regard.rules import Mask
from regard.torch.dropins.flash_attn import shown
from regard.torch.dropins.flash_options import (
    EVERYWHERE,
    HOST,
    PAGED,
    Window,
    alibi_of,
    check_heads,
    check_rank,
    computed,
    options_of,
    window_of,
)
from regard.torch.nn.positions import rotate
from regard.torch.public.attention import positions_first
from regard.torch.public.packed import ends_of
from regard.torch.tensors.modes import outside_of_graphs


@outside_of_graphs(HOST)
@torch.no_grad()
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write new keys and values into a cache, and attend to what it then holds.

    The last query is aligned with the last key of its sequence. There is no derivative, as in
    flash-attn.

    Args:
        q: (batch, n_q, h, d).
        k_cache: (batch_cache, n_cache, h_kv, d), written in place.
        v_cache: (batch_cache, n_cache, h_kv, d_v), written in place.
        k: (batch, n_new, h_kv, d), written behind the first cache_seqlens keys; or None.
        v: (batch, n_new, h_kv, d_v), given with k.
        rotary_cos: (n_cache or more, pairs), of the angles of each position, by which the first
            features of k and q are rotated; only with k. Queries are at the positions from
            cache_seqlens on with causal or a window, else all at cache_seqlens.
        rotary_sin: the same.
        cache_seqlens: the number of keys that each sequence has in the cache, one or (batch,). By
            default all of the cache.
        cache_batch_idx: (batch,), the row of the cache of each sequence; by default its own.
        cache_leftpad: (batch,), the first key of each sequence.
        block_table: None; there are no paged caches.
        rotary_interleaved: pairs are features 2m and 2m + 1; otherwise m and m + pairs.
        num_splits: no effect; splits have a fixed size.
        return_softmax_lse: return (out, softmax_lse), (batch, h, n_q), +∞ without a key.

    The others are those of `flash_attn_func`. Returns out (batch, n_q, h, d_v).

    Raises RuntimeError as flash-attn does, and where new keys do not fit into the cache.

    >>> import torch
    >>> from regard.torch.flash_attn import flash_attn_with_kvcache
    >>> q, k, v = torch.randn(3, 2, 1, 8, 16)
    >>> cache = torch.zeros(2, 2, 64, 8, 16)
    >>> flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=5, causal=True).shape
    torch.Size([2, 1, 8, 16])
    >>> torch.equal(cache[0, :, 5:6], k)
    True
    """
    if block_table is not None:
        raise NotImplementedError(PAGED)
    check_rank("(batch, n, heads, d)", 4, q=q, k_cache=k_cache, v_cache=v_cache)
    check_heads(q, k_cache, v_cache)
    (batch, n_q), n_cache = q.shape[:2], k_cache.shape[1]
    rows = _rows(cache_batch_idx, batch, k_cache.shape[0])
    lengths = _lengths(cache_seqlens, batch, n_cache)
    if rotary_cos is not None:
        moving = causal or max(window_of(window_size)) >= 0
        q, k = _rotated(q, k, rotary_cos, rotary_sin, lengths, moving, rotary_interleaved, n_cache)
    if k is not None:
        if cache_seqlens is None:
            raise RuntimeError("If key is supplied, cache_seqlens must also be passed in")
        _append(k_cache, v_cache, k, v, rows, lengths)
        lengths = lengths + k.shape[1]
    n_k = int(lengths.max())
    alibi = None if alibi_slopes is None else alibi_of(alibi_slopes, batch, q.shape[2])
    options = options_of(n_q, n_k, softmax_scale, causal, window_size, softcap, alibi)
    masks = [] if options["mask"] is None else [options["mask"]]
    if int(lengths.min()) < n_k:
        options["offset"] = lengths - n_q
        if options["causal"] or n_q == 1:
            options["causal"] = True
        else:
            masks.append(rules.padding(lengths.numpy()))
    if cache_leftpad is not None:
        masks.append(_from(tuple(_integers("cache_leftpad", cache_leftpad, batch).tolist())))
    options["mask"] = reduce(and_, masks) if masks else None
    keys, values = ((x if cache_batch_idx is None else x[rows])[:batch, :n_k] for x in (k_cache, v_cache))
    if not return_softmax_lse:
        return computed(positions_first, q, keys, values, **options)
    out, seen = computed(positions_first, q, keys, values, **options, observe=("lse",))
    return out, shown(seen.lse)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate the first features of `x` by position, as `flash_attn.layers.rotary` does.

    Args:
        x: (batch, n, h, d), or (total, h, d) with cu_seqlens.
        cos: (positions, pairs), of the angle of each pair.
        sin: the same.
        interleaved: pairs are features 2m and 2m + 1; otherwise m and m + pairs.
        inplace: write the result into `x`, and return it.
        seqlen_offsets: the position of the first row, one or (batch,).
        cu_seqlens: (batch + 1,), the ends of packed sequences.
        max_seqlen: no effect.
    """
    batch = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    first = torch.as_tensor(seqlen_offsets).cpu().expand(batch)
    if cu_seqlens is None:
        positions = first[:, None] + torch.arange(x.shape[1])
    else:
        ends = torch.tensor(ends_of("cu_seqlens", cu_seqlens, x.shape[0]))
        positions = torch.arange(x.shape[0]) + (first - ends[:-1]).repeat_interleave(ends.diff())
    positions = positions.to(x.device)
    cos, sin = cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)
    out = rotate(x, cos, sin, "interleaved" if interleaved else "half")
    return x.copy_(out) if inplace else out


def _rotated(
    q: torch.Tensor, k: Any, cos: torch.Tensor, sin: Any, lengths: torch.Tensor, moving: bool, interleaved: bool, n: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotate queries and new keys by their positions in a cache of n.

    moving: each query has its own position, else all of a sequence have that of the first new key.
    """
    if k is None:
        raise RuntimeError("If rotary cos/sin are provided, new key / value to be appended must also be provided")
    if sin is None:
        raise RuntimeError("If rotary cos is provided, rotary sin must also be provided")
    if cos.shape != sin.shape or cos.ndim != 2 or 2 * cos.shape[1] > q.shape[-1]:
        raise RuntimeError(
            f"rotary_cos and rotary_sin must have shape (positions, pairs), pairs at most {q.shape[-1] // 2}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if cos.shape[0] < n:
        raise RuntimeError(f"cos/sin seqlen must be at least the seqlen of KV cache, {n}, got {cos.shape[0]}")
    lengths = lengths.to(q.device)
    k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=lengths)
    if moving:
        return apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=lengths), k
    at = lengths[:, None, None]
    return rotate(q, cos[at], sin[at], "interleaved" if interleaved else "half"), k


def _append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: Any, rows: torch.Tensor, lengths: torch.Tensor
) -> None:  # fmt: skip
    """Write new keys and values behind those of each sequence."""
    if v is None:
        raise RuntimeError("If key is supplied, value must also be passed in")
    check_rank("(batch, n, heads, d)", 4, k=k, v=v)
    batch, n = len(rows), k.shape[1]
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.shape != (batch, n, *cache.shape[2:]) or x.dtype != cache.dtype:
            raise RuntimeError(
                f"{name} must be {cache.dtype} of shape ({batch}, {n}, {cache.shape[2]}, {cache.shape[3]}), "
                f"got {x.dtype} of shape {tuple(x.shape)}"
            )
    if int(lengths.max()) + n > k_cache.shape[1]:
        raise RuntimeError(f"the cache has room for {k_cache.shape[1]} keys, got {int(lengths.max())} and {n} more")
    places = rows[:, None].to(k.device), (lengths[:, None] + torch.arange(n)).to(k.device)
    k_cache[places], v_cache[places] = k, v


def _rows(index: Any, batch: int, batch_cache: int) -> torch.Tensor:
    """Return the row of the cache of each sequence."""
    if index is None:
        if batch != batch_cache:
            raise RuntimeError(f"q has the batch size {batch}, the cache {batch_cache}: give cache_batch_idx")
        return torch.arange(batch)
    rows = _integers("cache_batch_idx", index, batch)
    if not 0 <= int(rows.min()) <= int(rows.max()) < batch_cache:
        raise RuntimeError(f"cache_batch_idx must be from 0 to {batch_cache - 1}, got {rows.tolist()}")
    return rows


def _lengths(cache_seqlens: Any, batch: int, n_cache: int) -> torch.Tensor:
    """Return the number of keys of each sequence, on the host."""
    given = n_cache if cache_seqlens is None else cache_seqlens
    lengths = torch.full((batch,), given) if isinstance(given, int) else _integers("cache_seqlens", given, batch)
    if not 0 <= int(lengths.min()) <= int(lengths.max()) <= n_cache:
        raise RuntimeError(f"cache_seqlens must be from 0 to {n_cache}, the size of the cache, got {lengths.tolist()}")
    return lengths


def _integers(name: str, x: Any, batch: int) -> torch.Tensor:
    """Check integers (batch,); return them as int64 on the host."""
    if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.dtype == torch.bool or x.shape != (batch,):
        what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else rules.type_name(x)
        raise RuntimeError(f"{name} must be integers of shape ({batch},), got {what}")
    return x.to("cpu", torch.int64)


@lru_cache
def _from(first: tuple[int, ...]) -> Mask:
    """Return the mask of the keys from `first` on, of each sequence."""
    table = rules.Table(np.array(first))
    return rules.mask(lambda b, h, i, j: j >= table[b])
