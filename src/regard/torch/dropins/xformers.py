"""xFormers' `memory_efficient_attention`, with its causal and block-diagonal masks as rules."""

from __future__ import annotations  # so that `help` shows the names of types

import importlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Self

import torch

from regard.torch.dropins.packages import Attribute, Package
from regard.torch.public.attention import positions_first
from regard.torch.public.packed import packed_rules
from regard.torch.tensors.arrays import checked


class LowerTriangularMask:
    """Query i sees the keys j ≤ i."""

    def __init__(self, device: Any = None) -> None:
        pass


class BlockDiagonalMask:
    """Each query sees the keys of its sequence; sequences follow each other."""

    def __init__(self, q_seqinfo: Any, k_seqinfo: Any) -> None:
        self.q_seqinfo, self.k_seqinfo = q_seqinfo, k_seqinfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Self:
        lengths = (q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen)
        return cls(*(SimpleNamespace(seqstart_py=[0, *accumulate(x)]) for x in lengths))

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """The same, and causal from the first query and the first key of each sequence on."""


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

    query (B, M, H, K), key (B, N, H, K), value (B, N, H, V); or without H; or with G, H in its place.
    attn_bias: a tensor (B, H, M, N), or a mask, ours or xFormers' of the same name. p: the share of
    weights that is dropped. op: no effect. Returns (B, M, H, V), 0 where a query sees no key.
    """
    tensors = {"query": query, "key": key, "value": value}
    q, k, v = (tuple(checked(name, x).shape) for name, x in tensors.items())
    if len(q) not in (3, 4, 5) or any((len(x), x[0], x[2:-1]) != (len(q), q[0], q[2:-1]) for x in (k, v)):
        raise ValueError(f"query, key and value must be (B, M, H, K), (B, M, K) or (B, M, G, H, K), got {q}, {k}, {v}")
    options = _options(attn_bias, (q[0], *q[2:-1], q[1], k[1]))
    if len(q) == 5 and key.stride(3) == value.stride(3) == 0:  # expanded heads are read once
        key, value = key[:, :, :, :1], value[:, :, :, :1]
    heads = (x.unsqueeze(2).flatten(2, -2) for x in (query, key, value))
    out: torch.Tensor = positions_first(*heads, scale=scale, dropout=p or None, **options)
    out = out.reshape(*q[:-1], v[-1])
    return out if output_dtype is None else out.to(output_dtype)


def _options(attn_bias: Any, scores: tuple[int, ...]) -> dict[str, Any]:
    """Return the options of `regard.attention` that a bias means, for scores of shape (B, H, M, N)."""
    name = type(attn_bias).__name__  # xFormers' masks and ours are read alike
    if attn_bias is None:
        return {}
    if isinstance(attn_bias, torch.Tensor):
        if attn_bias.shape != scores:
            raise ValueError(f"attn_bias must have shape {scores}, got {tuple(attn_bias.shape)}")
        return {"bias": attn_bias.unsqueeze(1).flatten(1, -3)}
    if name == "LowerTriangularMask":
        return {"causal": True, "offset": 0}
    if name in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        q, k = (tuple(x.seqstart_py) for x in (attn_bias.q_seqinfo, attn_bias.k_seqinfo))
        if (1, q[-1], k[-1], len(k)) != (scores[0], *scores[-2:], len(q)):
            raise ValueError(f"attn_bias has sequences at {q} and {k}, which does not fit scores of shape {scores}")
        return packed_rules(q, k, None, None, name == "BlockDiagonalCausalMask", from_first=True) | {"offset": 0}
    masks = ", ".join(x.__name__ for x in MASKS)
    raise NotImplementedError(f"attn_bias must be None, a tensor or one of {masks}, got {name}")


def missing(name: str) -> Any:
    """Raise ImportError for a name that is not provided, as the `__getattr__` of a module."""
    if name.startswith("_"):
        raise AttributeError(name)
    raise ImportError(f"no {name} here: after regard.torch.stand_in('xformers'), xformers.ops has {', '.join(NAMES)}")


def _replaced() -> Iterable[Attribute]:
    """Replace the function where models look it up."""
    modules = [importlib.import_module(module) for module in MODULES[:2]]
    return [(module, "memory_efficient_attention", memory_efficient_attention) for module in modules]


MASKS = (LowerTriangularMask, BlockDiagonalMask, BlockDiagonalCausalMask)
NAMES = {x.__name__: x for x in (memory_efficient_attention, torch.unbind, *MASKS)}
MODULES = ("xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
PACKAGE = Package(
    name="xformers",
    distribution="xformers",
    version="0.0.35",
    modules={"xformers": {}, **dict.fromkeys(MODULES, NAMES | {"__getattr__": missing})},
    replaced=_replaced,
)
