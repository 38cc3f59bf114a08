"""Position encodings for modules: RoPE, and scores by distance."""

from __future__ import annotations  # so that `help` shows the names of types

from typing import Any, Literal

import torch
from torch import nn

from regard.positions import Scaling, alibi_slopes, rope_frequencies
from regard.rules import Score, alibi, relative, table
from regard.torch.tensors import process_group


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: Literal["half", "interleaved"]
) -> torch.Tensor:  # fmt: skip
    """Rotate the first features of `x` (..., d), pair by pair, in float32 or wider.

    cos, sin: of the angle of each pair; they broadcast to (..., pairs), and 2 · pairs ≤ d.
    """
    wide, dim = torch.promote_types(x.dtype, torch.float32), 2 * cos.shape[-1]
    cos, sin, rotated, rest = cos.to(wide), sin.to(wide), x[..., :dim].to(wide), x[..., dim:]
    a, b = rotated.chunk(2, -1) if pairing == "half" else rotated.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    if pairing == "half":
        return torch.cat([*pairs, rest], -1)
    return torch.cat([torch.stack(pairs, -1).flatten(-2), rest], -1)


class Rope(nn.Module):
    """Rotary position embedding on tensors, as `regard.positions.rope`.

    Su et al. 2021. dim: the number of rotated features of a head, even; the others match content at
    any distance. base, pairing, scaling: those of `regard.positions.rope`. It has no parameters.

    >>> Rope(8)(torch.ones(3, 2, 8), first=0).shape
    torch.Size([3, 2, 8])
    """

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10000.0,
        pairing: Literal["half", "interleaved"] = "half",
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        if pairing not in ("half", "interleaved"):
            raise ValueError(f"pairing must be 'half' or 'interleaved', got {pairing!r}")
        frequencies = rope_frequencies(dim, base=base)
        self.dim, self.base, self.pairing, self.scaling = dim, base, pairing, scaling
        self.factor = 1.0
        if scaling is not None:
            frequencies, self.factor = scaling(dim, base)
        self.frequencies = frequencies.tolist()  # no buffer: it would follow the dtype of the module

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Rotate `x` (..., n, h, d) by the positions first, first + 1, ... of its rows.

        Inside of `context_parallel` they are those of the process.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        own = process_group.positions(first, x.shape[-3]) if process_group.active else None
        wanted = {"dtype": torch.float64, "device": x.device}
        rows = torch.arange(first, first + x.shape[-3], **wanted) if own is None else torch.as_tensor(own, **wanted)
        angles = torch.outer(rows, torch.tensor(self.frequencies, **wanted))[:, None]
        cos, sin = ((f(angles) * self.factor).to(wide) for f in (torch.cos, torch.sin))
        return rotate(x, cos, sin, self.pairing)

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return f"dim={self.dim}, base={self.base:g}, pairing={self.pairing!r}{scaling}"


class Alibi(nn.Module):
    """Scores lowered in proportion to distance (Press et al. 2022), not learned."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.rule = alibi(alibi_slopes(num_heads))

    def forward(self) -> Score:
        return self.rule

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class Relative(nn.Module):
    """Learned bias by relative position: `regard.relative` of a parameter.

    table: (num_heads, 2 · max_distance + 1) for offsets j - i from -max_distance to max_distance.
    Offsets beyond that take the ends (Shaw et al. 2018). With `num_buckets` it is (num_heads,
    num_buckets), by T5's buckets (Raffel et al. 2020). Initially zero.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        max_distance: int = 128,
        num_buckets: int | None = None,
        bidirectional: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.max_distance, self.num_buckets, self.bidirectional = max_distance, num_buckets, bidirectional
        size = 2 * max_distance + 1 if num_buckets is None else num_buckets
        self.table = nn.Parameter(torch.empty(num_heads, size, device=device, dtype=dtype))
        here = table(self, "table")
        if num_buckets is None:
            self.rule = relative(here)
        else:
            self.rule = relative(here, buckets="t5", bidirectional=bidirectional, max_distance=max_distance)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def forward(self) -> Score:
        return self.rule

    def extra_repr(self) -> str:
        buckets = "" if self.num_buckets is None else f", num_buckets={self.num_buckets}"
        one_way = "" if self.bidirectional else ", bidirectional=False"
        return f"num_heads={len(self.table)}, max_distance={self.max_distance}{buckets}{one_way}"
