"""Arguments of flash-attn's functions: their checks, and the rules that they mean."""

from __future__ import annotations  # so that `help` shows the names of types

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from regard import rules
from regard.arguments.values import boolean, number
from regard.rules import Mask, Score
from regard.torch.public.packed import ends_of
from regard.torch.tensors.arrays import concrete

Window = tuple[int, int]
EVERYWHERE = (-1, -1)
HOST = "regard reads the lengths of sequences on the host"
PAGED = "regard has no paged cache yet: give a cache in one piece, without block_table"


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


def packed_alibi(slopes: Any, ends_k: tuple[int, ...], heads: int) -> Score | None:
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


def check_packed(
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


def unpacked(name: str, x: Any, parts: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Return views of the parts that a tensor packs along `dim`; their gradients are packed in one copy."""
    axes = ("(batch, n, {}, heads, d)" if dim == 2 else "(total, {}, heads, d)").format(parts)
    check_rank(axes, dim + 3, **{name: x})
    if x.shape[dim] != parts:
        raise RuntimeError(f"{name} must have shape {axes}, got {tuple(x.shape)}")
    parts_of_x: tuple[torch.Tensor, ...] = x.unbind(dim)
    return parts_of_x
