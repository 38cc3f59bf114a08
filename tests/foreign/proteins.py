"""Modules of Boltz and OpenFold-3 with their attention replaced, beside the packages themselves; run by hand.

`pip install --no-deps boltz openfold3` and what their imports miss, then `python tests/foreign/proteins.py`. It prints
the largest difference of outputs and of gradients, over the largest number of the package.
"""

from collections.abc import Callable

import torch
from boltz.model.layers.attention import AttentionPairBias as PairBias1
from boltz.model.layers.attentionv2 import AttentionPairBias as PairBias2
from boltz.model.layers.pairformer import PairformerLayer
from openfold3.core.model.layers.attention_pair_bias import AttentionPairBias
from openfold3.core.model.layers.triangular_attention import TriangleAttention

import regard.torch

N = 24
single, pair = torch.randn(6, N, 32), torch.randn(2, N, N, 16)
mask = (torch.arange(N) < 18).float().expand(2, -1)
samples = mask.repeat_interleave(3, 0)
real = mask[:, :, None] * mask[:, None] > 0


def pairformer(layer: torch.nn.Module) -> torch.Tensor:
    s, z = layer(single[:2], pair, mask, real.float())
    return torch.cat([s[mask > 0].flatten(), z[real].flatten()])


CASES: list[tuple[str, torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]] = [
    ("Boltz-2, a layer of the pairformer", PairformerLayer(32, 16, v2=True), pairformer),
    ("Boltz-1, pair bias, 3 samples", PairBias1(32, 16, 4), lambda m: m(single, pair, samples, 3)[samples > 0]),
    ("Boltz-2, pair bias, 3 samples", PairBias2(32, 16, 4), lambda m: m(single, pair, samples, single, 3)[samples > 0]),
    ("OpenFold-3, triangle attention", TriangleAttention(16, 8, 2), lambda m: m(pair, mask=real.float())[real]),
    (
        "OpenFold-3, triangle attention in pieces of 4",
        TriangleAttention(16, 8, 2),
        lambda m: m(pair, mask=real.float(), chunk_size=4)[real],
    ),
    (
        "OpenFold-3, pair bias",
        AttentionPairBias(32, 32, 32, 32, 16, 8, 4),
        lambda m: m(single[:2], pair, mask=mask)[mask > 0],
    ),
]


def run(layer: torch.nn.Module, call: Callable[[torch.nn.Module], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's output and the gradients of its parameters."""
    out = call(layer)
    gradients = torch.autograd.grad(out.square().mean(), list(layer.parameters()), allow_unused=True)
    return out, torch.cat([g.flatten() for g in gradients if g is not None])


if __name__ == "__main__":
    for name, layer, call in CASES:
        layer.eval()
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.3)
        theirs = run(layer, call)
        replaced = regard.torch.adopt(layer)
        differences = (
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(run(layer, call), theirs, strict=True)
        )
        print(f"{name} ({', '.join(n or 'itself' for n in replaced)}):", *(f"{d:.1e}" for d in differences))
