"""Weights of captures, and those of eager runs of transformers' models."""

from typing import Any

import numpy as np
import torch

from regard.interpret.capture.captured import Capture
from regard.interpret.capture.layers import Layer


def weights_of(layer: Layer) -> Any:
    return np.stack([[layer.weights(h, batch=b) for h in layer.numbers] for b in range(layer.batch)])


def assert_weights(seen: Capture, expected: list[Any]) -> None:
    """Weights of every layer, up to rounding; what eager says of queries that see nothing is left out."""
    assert len(seen) == len(expected)
    for layer, attention in zip(seen, expected, strict=True):
        theirs = attention.detach().double().numpy()
        eps = 2.0**-52 if layer.lse.dtype == np.float64 else 2.0**-23
        alive = ~np.isneginf(layer.lse)
        ours = weights_of(layer)
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours[alive], theirs[alive], rtol=0, atol=32 * eps)


def eager(model: Any, **inputs: Any) -> list[Any]:
    """The weights of an eager run, in the order in which layers are called."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    if out.get("attentions") is not None:
        return list(out.attentions)
    pairs = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    return [*out.encoder_attentions, *(x for pair in pairs for x in pair)]


def detr() -> Any:
    """A small DETR, whose configuration says nothing of patches: its backbone makes one of 8 × 8 pixels."""
    import transformers as t

    backbone = t.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    return t.DetrModel(t.DetrConfig(
        d_model=32, **sides, num_queries=16, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone,
    ))  # fmt: skip
