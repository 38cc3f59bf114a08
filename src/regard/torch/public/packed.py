"""Sequences of different lengths without padding, packed or jagged."""

from __future__ import annotations  # so that `help` shows the names of types

import functools
import itertools
from typing import Any

import numpy as np
import torch

from regard.ops.attention import attention
from regard.rules import Mask, Traced, as_mask, as_score, causal, documents, table, type_name
from regard.rules.expression import make, substitute
from regard.torch.tensors.arrays import checked, concrete, values
from regard.torch.tensors.process_group import refuse

I = Traced(make("i", "int"))


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    mask: Any = None,
    score: Any = None,
    causal: bool = False,
    **options: Any,
) -> Any:
    """Attend within packed sequences without padding, as flash-attention does.

    Args:
        query: (total_q, h, d), the sequences one after the other.
        key: (total_k, h_kv, d), h a multiple of h_kv.
        value: (total_k, h_kv, d_v).
        cu_seqlens_q: (sequences + 1,) integers from 0 to total_q: the first row of each sequence of
            queries, and the end.
        cu_seqlens_k: the same for keys, by default that of the queries.
        mask, score: rules, as of `regard.attention`. j is the row of a key. i is the row of the key
            that is aligned with the query: the last query of a sequence is aligned with its last
            key. i − j is the distance within a sequence.
        causal: query i sees the keys j ≤ i, aligned at the ends of sequences (bottom right).
        options: others of `regard.attention`, except `layout`, `offset` and `origin`; arrays have
            no leading dimensions.

    Returns out (total_q, h, d_v), or what `regard.attention` returns. Each call reads cu_seqlens on
    the host.

    >>> import torch, regard.torch
    >>> q = torch.randn(10, 8, 16)
    >>> out = regard.torch.varlen_attention(q, q, q, torch.tensor([0, 4, 10]), causal=True)
    >>> one = regard.attention(q[4:], q[4:], q[4:], causal=True, layout="bnhd")
    >>> torch.allclose(out[4:], one, atol=1e-6)
    True
    """
    for name in ("layout", "offset", "origin"):
        if name in options:
            raise TypeError(f"varlen_attention takes no {name}: packed arrays are (total, heads, d)")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if checked(name, x).ndim != 3:
            raise ValueError(f"{name} must be packed as (total, heads, d), got shape {tuple(x.shape)}")
    ends_q = ends_of("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    ends_k = ends_of("cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, key.shape[0])
    if len(ends_q) != len(ends_k):
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k differ in length: {len(ends_q)} and {len(ends_k)}")
    rules = packed_rules(ends_q, ends_k, mask, score, causal)
    return attention(query, key, value, **rules, **options, offset=0, layout="bnhd")


def jagged_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attend within the sequences of jagged nested tensors.

    The tensors are of `torch.nested`, with layout=torch.jagged. query (sequences, h, n_q*, d), key
    (sequences, h_kv, n_k*, d), value (sequences, h_kv, n_k*, d_v), where the starred lengths
    differ. For (n, h, d) each, it is `torch.nested.nested_tensor([...], layout=torch.jagged)` with
    dimensions 1 and 2 transposed. The options are those of `varlen_attention`, except those that
    return more than the output. Returns (sequences, h, n_q*, d_v), with the offsets and lengths of
    query: there may be holes between sequences.

    >>> import torch, regard.torch
    >>> parts = [torch.randn(n, 8, 16) for n in (4, 6)]
    >>> q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    >>> out = regard.torch.jagged_attention(q, q, q, causal=True)
    >>> [tuple(x.shape) for x in out.unbind()]
    [(8, 4, 16), (8, 6, 16)]
    """
    for name in ("return_weights", "observe"):
        if options.get(name):
            raise TypeError(f"jagged_attention returns the output alone: for {name}, use varlen_attention")
    packed, ends = zip(
        *(_packed_values(n, x) for n, x in (("query", query), ("key", key), ("value", value))), strict=True
    )
    if not torch.equal(ends[1], ends[2]):
        raise ValueError("key and value must have the same lengths")
    out = varlen_attention(packed[0], packed[1], packed[2], ends[0], ends[1], **options)
    nested: Any = query
    if nested.lengths() is not None:
        out = _with_holes(out, nested)
    jagged: torch.Tensor = torch.nested.nested_tensor_from_jagged(out, nested.offsets(), nested.lengths())
    return jagged.transpose(1, 2)


def _packed_values(name: str, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all sequences one after the other, and their ends."""
    if not isinstance(x, torch.Tensor) or not x.is_nested or x.layout is not torch.jagged:
        raise TypeError(f"{name} must be a nested tensor with layout torch.jagged, got {type_name(x)}")
    if x.dim() != 4 or x._ragged_idx != 2:
        raise ValueError(f"{name} must be (sequences, heads, n*, d) with lengths in dimension 2, got {tuple(x.shape)}")
    rows: torch.Tensor = x.transpose(1, 2).values()
    if x.lengths() is None:
        return rows, x.offsets()
    lengths = x.lengths()
    return rows[_rows(x)], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _rows(x: Any) -> torch.Tensor:
    """Return the indices of rows that belong to a sequence, without the holes."""
    begins, lengths = x.offsets()[:-1].tolist(), x.lengths().tolist()
    return torch.cat([torch.arange(a, a + n) for a, n in zip(begins, lengths, strict=True)]).to(x.device)


def _with_holes(packed: torch.Tensor, x: Any) -> torch.Tensor:
    """Scatter packed rows to the rows of `x`, with zeros in its holes."""
    whole = packed.new_zeros(x.transpose(1, 2).values().shape[0], *packed.shape[1:])
    return whole.index_copy(0, _rows(x), packed)


def ends_of(name: str, x: Any, total: int) -> tuple[int, ...]:
    """Read and check cumulative lengths: (sequences + 1,) integers from 0 to `total`."""
    refuse("attention of packed sequences", "give regard.attention mask=regard.documents(ids) of all positions")
    x = checked(name, x)
    if not concrete(x):
        raise NotImplementedError(f"{name} has no values that can be read while it is transformed or traced")
    if x.is_floating_point() or x.dtype is torch.bool or x.ndim != 1 or x.numel() == 0:
        raise TypeError(f"{name} must be integers (sequences + 1,), got {x.dtype} of shape {tuple(x.shape)}")
    ends = tuple(values(x).tolist())
    if ends[0] != 0 or ends[-1] != total or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"{name} must rise from 0 to {total}, the rows of what it cuts, got {_few(ends)}")
    return ends


def _few(ends: tuple[int, ...]) -> str:
    return str(list(ends)) if len(ends) <= 8 else f"{list(ends[:4])} ... {list(ends[-4:])}"


def packed_rules(
    ends_q: tuple[int, ...], ends_k: tuple[int, ...], mask: Any, score: Any, causal: bool, *, from_first: bool = False
) -> dict[str, Any]:
    """Return the mask and the score of packed rows, of those of each sequence by itself.

    from_first: the first query of a sequence is aligned with its first key, else the last with the last.
    """
    same_sequence, at = _packed(ends_q, ends_k, causal, from_first)
    rules: dict[str, Any] = {
        "mask": None if mask is None else as_mask(mask),
        "score": None if score is None else as_score(score),
    }
    if at is not None:
        for name, rule in rules.items():
            if rule is not None:
                rules[name] = type(rule)(substitute(rule.node, {I.node: at}), rule.text, rule.requires)
    if same_sequence is not None:
        rules["mask"] = same_sequence if rules["mask"] is None else same_sequence & rules["mask"]
    return rules


@functools.lru_cache(maxsize=64)
def _packed(
    ends_q: tuple[int, ...], ends_k: tuple[int, ...], ends_at_query: bool, from_first: bool = False
) -> tuple[Mask | None, Any]:
    """Return the mask of packed sequences, and the node that replaces i in rules.

    The node is the key that a query is aligned with; None for its own row. The result is cached, so
    that equal lengths find the cached plans of engines.
    """
    if not ends_q[-1] or not ends_k[-1]:
        return None, None
    lengths, key_lengths = np.diff(ends_q), np.diff(ends_k)
    numbers = np.arange(len(lengths))
    same_sequence = documents(np.repeat(numbers, lengths), np.repeat(numbers, key_lengths))
    at = I
    if ends_q != ends_k:
        shifts = np.subtract(ends_k, ends_q)
        shift = table(np.repeat(shifts[:-1] if from_first else shifts[1:], lengths))
        at = I + shift[I]
    if ends_at_query:
        rule = causal()
        same_sequence = same_sequence & Mask(substitute(rule.node, {I.node: at.node}), rule.text)
    return same_sequence, None if at is I else at.node
