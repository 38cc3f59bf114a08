"""FlashAttention 2's functions on any device, with its names, arguments and conventions."""

from __future__ import annotations  # so that `help` shows the names of types

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from regard import rules
from regard.arguments.values import boolean, number
from regard.core.tensors import tensor
from regard.reference.specification import dropout_mask
from regard.rules import Mask, Score
from regard.torch.adapter import positions_first, weights
from regard.torch.arrays import concrete, values
from regard.torch.graph.operators import new_seed
from regard.torch.varlen import ends_of, packed_rules, varlen_attention

Window = tuple[int, int]
EVERYWHERE = (-1, -1)
HOST = "regard reads the lengths of sequences on the host"
PAGED = "regard has no paged cache yet: give a cache in one piece, without block_table"
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


_outside = torch.compiler.disable(flash_attn_func, reason="NumPy makes the mask of dropout that S_dmask shows")


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_func` of queries, keys and values packed as (batch, n, 3, h, d)."""
    q, k, v = _unpacked("qkv", qkv, 3, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_func` of keys and values packed as (batch, n_k, 2, h_kv, d)."""
    k, v = _unpacked("kv", kv, 2, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@torch.compiler.disable(reason=HOST)
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
    ends_q, ends_k = _check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    alibi = None if alibi_slopes is None else _packed_alibi(alibi_slopes, ends_k, q.shape[1])
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


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute `flash_attn_varlen_func` of queries, keys and values packed as (total, 3, h, d)."""
    q, k, v = _unpacked("qkv", qkv, 3, 1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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
) -> Any:
    """Compute `flash_attn_varlen_func` of keys and values packed as (total_k, 2, h_kv, d)."""
    k, v = _unpacked("kv", kv, 2, 1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


# Options and rules


def options_of(
    n_q: int, n_k: int, softmax_scale: float | None, causal: bool, window_size: Window, softcap: float, alibi: Any
) -> dict[str, Any]:  # fmt: skip
    """Return the options of `regard.attention`, None where they are its defaults.

    n_q, n_k: of the longest sequences; a window that reaches their ends is none.
    """
    left, right = window_of(window_size)
    right = 0 if boolean("causal", causal) else right
    bounds = None if left < 0 or left >= n_k - 1 else left, None if right < 0 or right >= n_q - 1 else right
    causal = bounds[1] == 0
    if type(softcap) is not float:  # one that a graph makes a symbol of is a float
        softcap = number("softcap", softcap)
    scores = [] if softcap <= 0.0 else [_softcap(softcap)]  # which refuses NaN
    scores += [] if alibi is None else [alibi]
    return {
        "causal": causal or None,
        "mask": None if bounds in ((None, 0), (None, None)) else _window(*bounds),
        "score": scores[0] if len(scores) == 1 else scores or None,
        "scale": softmax_scale,
    }


def window_of(window_size: Any) -> Window:
    """Check the window's two sides, which may be tensors without axes."""
    try:
        left, right = map(int, window_size)
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two integers (left, right), got {window_size!r}") from None
    return left, right


def _softcap(cap: float) -> Score:
    return rules.softcap(cap) if torch.compiler.is_compiling() else _softcap_once(cap)


def _window(left: int | None, right: int | None) -> Mask:
    return rules.window(left, right) if torch.compiler.is_compiling() else _window_once(left, right)


_softcap_once = lru_cache(rules.softcap)  # the same rule, so that a call finds its cached plan
_window_once = lru_cache(rules.window)


def alibi_of(slopes: Any, batch: int, heads: int) -> Score:
    """Return the rule of slopes (h,) or (batch, h)."""
    _check_slopes(slopes, batch, heads)
    return _alibi_once(slopes) if _is_buffer(slopes) else rules.alibi(slopes)


def _packed_alibi(slopes: Any, ends_k: tuple[int, ...], heads: int) -> Score | None:
    """Return the rule of slopes (h,) or (batch, h) for packed sequences, whose keys tell them apart."""
    batch = len(ends_k) - 1
    _check_slopes(slopes, batch, heads)
    if slopes.ndim == 1:
        return alibi_of(slopes, batch, heads)
    if not ends_k[-1]:
        return None  # no scores
    return (_alibi_of_rows_once if _is_buffer(slopes) else _alibi_of_rows)(slopes, ends_k)


def _alibi_of_rows(slopes: torch.Tensor, ends_k: tuple[int, ...]) -> Score:
    table, sequence = rules.table(slopes), _sequence_of(ends_k)
    return rules.score(lambda s, b, h, i, j: s - table[sequence[j], h] * abs(i - j))


def _is_buffer(slopes: torch.Tensor) -> bool:
    """Return True for a tensor that models keep, whose rule is made once; each call reads its values."""
    return not torch.compiler.is_compiling() and concrete(slopes) and not slopes.requires_grad


_alibi_once = lru_cache(rules.alibi)
_alibi_of_rows_once = lru_cache(_alibi_of_rows)


@lru_cache
def _sequence_of(ends: tuple[int, ...]) -> rules.Table:
    """Return the table of the sequence that each row belongs to."""
    return rules.Table(np.repeat(np.arange(len(ends) - 1), np.diff(ends)))


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


# Arguments


def computed(function: Any, *operands: Any, **options: Any) -> Any:
    """Call a function of regard; RuntimeError instead of its TypeError and ValueError."""
    try:
        return function(*operands, **options)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from None


def check_batch(q: Any, k: Any, v: Any) -> None:
    """Check the types and shapes of (batch, n, h, d)."""
    check_rank("(batch, n, heads, d)", 4, q=q, k=k, v=v)
    if not q.shape[0] == k.shape[0] == v.shape[0] > 0:
        raise RuntimeError(
            f"q, k and v must have the same batch size, positive, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}"
        )
    check_heads(q, k, v)


def check_rank(axes: str, rank: int, **given: Any) -> None:
    """Check that each is a tensor of `rank` dimensions."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {rules.type_name(x)}")
        if x.ndim != rank:
            raise RuntimeError(f"{name} must have shape {axes}, got {tuple(x.shape)}")


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check heads, features and dtypes."""
    if q.dtype != k.dtype:
        raise RuntimeError(f"query and key must have the same dtype, got {q.dtype} and {k.dtype}")
    if q.dtype != v.dtype:
        raise RuntimeError(f"query and value must have the same dtype, got {q.dtype} and {v.dtype}")
    if k.shape[:-1] != v.shape[:-1]:
        raise RuntimeError(f"k and v must have as many rows and heads, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[-1] != k.shape[-1]:
        raise RuntimeError(f"q and k must have as many features, got {q.shape[-1]} and {k.shape[-1]}")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise RuntimeError(
            f"Number of heads in key/value must divide number of heads in query, got {k.shape[-2]} for {q.shape[-2]}"
        )


def _check_slopes(slopes: Any, batch: int, heads: int) -> None:
    if not isinstance(slopes, torch.Tensor):
        raise TypeError(f"alibi_slopes must be a torch.Tensor, got {rules.type_name(slopes)}")
    if slopes.shape not in ((heads,), (batch, heads)):
        raise RuntimeError(f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}")


def _check_packed(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Check packed operands, and return the ends of their sequences."""
    check_rank("(total, heads, d)", 3, q=q, k=k, v=v)
    check_heads(q, k, v)
    ends_q = computed(ends_of, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    ends_k = computed(ends_of, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if len(ends_q) < 2:
        raise RuntimeError("batch size must be positive, got cu_seqlens_q of one entry")
    for name, longest, ends in (("max_seqlen_q", max_seqlen_q, ends_q), ("max_seqlen_k", max_seqlen_k, ends_k)):
        if longest < (most := int(np.diff(ends).max())):
            raise RuntimeError(f"{name} must be at least {most}, the longest sequence, got {longest}")
    return ends_q, ends_k


def _unpacked(name: str, x: Any, parts: int, dim: int) -> tuple[torch.Tensor, ...]:
    axes = ("(batch, n, {}, heads, d)" if dim == 2 else "(total, {}, heads, d)").format(parts)
    check_rank(axes, dim + 3, **{name: x})
    if x.shape[dim] != parts:
        raise RuntimeError(f"{name} must have shape {axes}, got {tuple(x.shape)}")
    unpacked: tuple[torch.Tensor, ...] = x.unbind(dim)
    return unpacked
