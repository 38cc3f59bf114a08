"""A small U-Net of latent diffusion, with self-attention and attention to a text."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import regard.torch


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention as in a textbook, n × n in memory."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eager": eager,
    "sdpa": lambda *given: nn.functional.scaled_dot_product_attention(*given),
    "regard": lambda *given: regard.torch.scaled_dot_product_attention(*given),
}
"""Implementations of attention by transformers' names; ours is the drop-in."""


class UNetAttention(nn.Module):
    """Multi-head attention of x (b, n, width) over a context (b, m, from_width)."""

    implementation = "sdpa"

    def __init__(self, width: int, from_width: int, d: int):
        super().__init__()
        self.d = d
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(from_width, width, bias=False)
        self.v = nn.Linear(from_width, width, bias=False)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.d)).transpose(1, 2) for y in (self.q(x), self.k(context), self.v(context)))
        return self.o(FUNCTIONS[self.implementation](q, k, v).transpose(1, 2).flatten(2))


class UNetStage(nn.Module):
    """A residual block of convolutions with time, and a transformer block with text."""

    def __init__(self, channels: int, width: int, time: int, text: int, d: int):
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, width, 3, padding=1))
        self.time = nn.Linear(time, width)
        self.after = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.skip = nn.Conv2d(channels, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself, self.text = UNetAttention(width, width, d), UNetAttention(width, text, d)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.skip(x) + self.after(self.before(x) + self.time(time)[:, :, None, None])
        size, x = x.shape[2:], x.flatten(2).transpose(1, 2)
        y = self.norms[0](x)
        x = x + self.itself(y, y)
        x = x + self.text(self.norms[1](x), text)
        x = x + self.mlp(self.norms[2](x))
        return x.transpose(1, 2).unflatten(2, size)


class UNet(nn.Module):
    """A network that predicts noise in latents (b, 4, s, s) from time and a text.

    time: (b, 1) in 0 to 1. text: (b, m, text). Returns a tuple of (b, 4, s, s). It attends over s² places with heads of
    d features, over (s / 2)² with twice as many heads, and over s² again.
    """

    def __init__(self, width: int = 160, text: int = 256, d: int = 40):
        super().__init__()
        more = 4 * width, text, d
        self.time = nn.Sequential(nn.Linear(1, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down = UNetStage(width, width, *more)
        self.smaller = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = UNetStage(2 * width, 2 * width, *more)
        self.larger = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1))
        self.up = UNetStage(2 * width, width, *more)
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

    def set_attn_implementation(self, name: str) -> None:
        for module in self.modules():
            if isinstance(module, UNetAttention):
                module.implementation = name

    def forward(self, latents: Tensor, time: Tensor, text: Tensor) -> tuple[Tensor]:
        told = self.time(time), text
        large = self.down(self.first(latents), *told)
        small = self.middle(self.smaller(large), *told)
        return (self.last(self.up(torch.cat([large, self.larger(small)], 1), *told)),)
