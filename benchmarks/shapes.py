"""Attention in the shapes of real models, by PyTorch's function and by ours.

Sizes are those of published configurations. Padding and windows are boolean arrays, as transformers makes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import derivatives, row_types
from benchmarks.derivatives import DerivativeCall, torch_names
from benchmarks.measure import SUBJECT, Array
from benchmarks.peers import tensor
from cases import Case

OptionsOf = Callable[[np.random.Generator, Case], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A case of a model, with the name of its option.

    trains: backward is measured too.
    """

    case: Case
    option: str = ""
    trains: bool = False

    @property
    def name(self) -> str:
        c = self.case
        heads = f"{c.lead[0]} × {c.h} heads" + (f" over {c.h_kv}" if c.h_kv else "")
        n = f"n = {c.n_q:,}" + (f" over {c.n_k:,}" if c.n_k != c.n_q else "")
        return f"{c.name}: {heads}, {n}, d = {c.d}" + (f", {self.option}" if self.option else "")


def plain(rng: np.random.Generator, c: Case) -> dict[str, Any]:
    return {}


def causal(rng: np.random.Generator, c: Case) -> dict[str, Any]:
    return {"causal": True}


def padding(rng: np.random.Generator, c: Case) -> dict[str, Any]:
    lengths = np.linspace(c.n_k // 2, c.n_k, c.lead[0]).astype(int)
    keys = np.arange(c.n_k) < lengths[:, None, None, None]
    return {"mask": np.broadcast_to(keys, (*c.lead, 1, c.n_q, c.n_k)).copy()}


def window(width: int) -> OptionsOf:
    def options(rng: np.random.Generator, c: Case) -> dict[str, Any]:
        i, j = np.arange(c.n_q)[:, None], np.arange(c.n_k)
        return {"mask": ((j <= i) & (i - j < width))[None, None]}

    return options


def bias(rng: np.random.Generator, c: Case, batch: int = 1) -> dict[str, Any]:
    return {"bias": rng.standard_normal((batch, c.h, c.n_q, c.n_k)).astype(ml_dtypes.bfloat16)}


def biases(rng: np.random.Generator, c: Case) -> dict[str, Any]:
    return bias(rng, c, *c.lead)


def shape(
    model: str,
    batch: int,
    heads: int,
    n: int,
    d: int = 64,
    option: str = "",
    options: OptionsOf = plain,
    *,
    over: int | None = None,
    n_k: int | None = None,
    trains: bool = False,
) -> Shape:
    """Make a shape, token-major except for keys from a cache.

    over: the number of key-value heads.
    """
    cached = n == 1
    sizes: Any = {"lead": (batch,), "h": heads, "h_kv": over, "n_q": n, "n_k": n_k or n, "d": d, "d_v": d}
    return Shape(Case(model, options, token_major=not cached, **sizes), option, trains)


SHAPES = (
    shape("BERT-base", 32, 12, 128, option="padded", options=padding),
    shape("BERT-base", 8, 12, 512, option="padded", options=padding),
    shape("BERT-base, training", 8, 12, 128, option="padded", options=padding, trains=True),
    shape("BERT-large", 4, 16, 384, option="padded", options=padding),
    shape("MiniLM-L6", 32, 12, 128, 32, "padded", padding),
    shape("T5-small, encoder, training", 2, 8, 512, option="bias", options=bias, trains=True),
    shape("ViT-B/16", 16, 12, 197),
    shape("ViT-B/16, training", 8, 12, 197, trains=True),
    shape("ViT-L/14 at 336", 4, 16, 577),
    shape("DINOv2-S/14 at 518", 1, 6, 1_370),
    shape("CLIP-L, text", 16, 12, 77, option="causal", options=causal),
    shape("SAM-B, windows", 25, 12, 196),
    shape("Swin-T, stage 1", 64, 3, 49, 32, "bias", bias),
    shape("Swin-T, stage 1, shifted", 64, 3, 49, 32, "bias of each window", biases),
    shape("Swin-B, stage 3, training", 32, 16, 49, 32, "bias", bias, trains=True),
    shape("Whisper-tiny, encoder", 1, 6, 1_500),
    shape("Whisper-small, encoder", 1, 12, 1_500),
    shape("Whisper-small, decoding over the encoder", 5, 12, 1, n_k=1_500),
    shape("SDXL, 64 × 64", 2, 10, 4_096),
    shape("SDXL, 32 × 32", 2, 20, 1_024),
    shape("SDXL, 32 × 32 over text", 2, 20, 1_024, n_k=77),
    shape("Stable Diffusion 1.5, 32 × 32", 2, 8, 1_024, 80),
    shape("GPT-2", 1, 12, 1_024, option="causal", options=causal),
    shape("GPT-2, training", 2, 12, 1_024, option="causal", options=causal, trains=True),
    shape("GPT-2, decoding", 1, 12, 1, n_k=1_024),
    shape("Llama 3.2 1B", 1, 32, 1_024, option="causal", options=causal, over=8),
    shape("Llama 3.1 8B", 1, 32, 1_024, 128, "causal", causal, over=8),
    shape("Qwen3 0.6B, training", 1, 16, 512, 128, "causal", causal, over=8, trains=True),
    shape("Llama 3.1 8B, decoding", 1, 32, 1, 128, over=8, n_k=4_096),
    shape("Gemma 3 4B, global layer", 1, 8, 1_024, 256, "causal", causal, over=4),
    shape("Gemma 3 1B, local layer", 1, 4, 2_048, 256, "window of 512", window(512), over=1),
    shape("Gemma 3 4B, decoding", 1, 8, 1, 256, over=4, n_k=2_048),
)


@lru_cache(maxsize=1)  # the rows of a shape follow each other
def expected(shape: Shape) -> tuple[DerivativeCall, dict[str, Array]]:
    """Return inputs in bfloat16, and the exact output or gradients in float64."""
    g = DerivativeCall.of(shape.case, np.dtype(ml_dtypes.bfloat16))
    if shape.trains:
        return g, derivatives.exact("backward", g)
    return g, row_types.exact(g.q, g.k, g.v, g.options)


def adapter(who: str, shape: Shape, g: DerivativeCall, dtype: np.dtype[Any]) -> row_types.Prepared:
    """Prepare a shape's call of PyTorch's function or of ours.

    It is forward, and backward if it trains.
    """
    import torch

    import regard.torch

    function = regard.torch if who == SUBJECT else torch.nn.functional
    attention, options = function.scaled_dot_product_attention, g.options
    q, k, v, dout = (tensor(x.astype(dtype)) for x in (g.q, g.k, g.v, g.dout))
    more = {"is_causal": "causal" in options, "enable_gqa": shape.case.h_kv is not None}
    if "mask" in options:
        more["attn_mask"] = torch.from_numpy(options["mask"])
    if "bias" in options:
        more["attn_mask"] = tensor(options["bias"].astype(dtype))
    if not shape.trains:

        def call() -> Any:
            with torch.inference_mode():
                return attention(q, k, v, **more)

        return call, lambda out: {"out": out.float().numpy()}

    inputs = [x.requires_grad_() for x in (q, k, v, *([more["attn_mask"]] if "bias" in options else []))]
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)  # in a model, positions come first
    return lambda: torch.autograd.grad(attention(q, k, v, **more), inputs, dout), torch_names


ADAPTERS = {who: partial(adapter, who) for who in (SUBJECT, "PyTorch")}
