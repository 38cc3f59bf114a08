"""A small byte-level decoder, written in NumPy on regard's own functions."""

from __future__ import annotations  # so that `help` shows the names of types

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.arguments.packages import require
from regard.arguments.values import integer
from regard.interpret.examplemodel import blocks
from regard.interpret.examplemodel.blocks import Floats
from regard.ops import attention
from regard.positions import rope

Integers = NDArray[np.integer[Any]]
Replacement = Literal["zero", "mean"]
"""The output of an ablated head: zeros, or everywhere its mean over the text."""

BOS = 0
VOCABULARY = 256
LONGEST = 16_384

_SHOWN = {BOS: "⟨bos⟩", 9: "⇥", 10: "⏎", 13: "␍", 32: "␣"}


@dataclass(frozen=True)
class Config:
    """Sizes of the model, as its weights file records them.

    `width` is that of the residual stream, `hidden` that inside a feed-forward block. `rotary` is
    the number of a head's features that RoPE rotates; the others match content at any distance.
    `context` is the length it was trained on.
    """

    layers: int
    heads: int
    width: int
    hidden: int
    rotary: int
    context: int
    base: float = 10_000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Trace:
    """One run of the model: its predictions, and the arrays of its attention maps.

    `ids` (..., n); `logits` (..., n, 256). `q`, `k`, `v` hold per layer an array (..., h, n, d), q
    and k after RoPE; `lse` per layer (..., h, n); `x` the residual stream before a layer (..., n,
    width), and `out` the outputs of its heads before any is ablated (..., h, n, d). `scale` and
    `causal` are those of the run. No map is stored: `weights` computes any part of one exactly.
    """

    ids: Integers
    logits: Floats
    q: tuple[Floats, ...]
    k: tuple[Floats, ...]
    v: tuple[Floats, ...]
    lse: tuple[Floats, ...]
    x: tuple[Floats, ...]
    out: tuple[Floats, ...]
    scale: float
    causal: bool

    @property
    def layers(self) -> int:
        return len(self.q)

    @property
    def heads(self) -> int:
        return int(self.q[0].shape[-3])

    def weights(self, layer: int, rows: slice = slice(None), cols: slice = slice(None)) -> Floats:
        """Compute the weights of a layer (..., h, n, n), or the tile of `rows` and `cols`."""
        q, k, lse = self.q[layer], self.k[layer], self.lse[layer]
        return attention.weights(q, k, lse=lse, rows=rows, cols=cols, causal=self.causal, scale=self.scale)

    def losses(self) -> NDArray[np.float64]:
        """Compute the loss of each byte after the first, in nats: (..., n - 1)."""
        logits = self.logits[..., :-1, :].astype(np.float64)
        top = logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, self.ids[..., 1:, None], -1)
        losses: NDArray[np.float64] = top + np.log(np.exp(logits - top).sum(-1, keepdims=True)) - chosen
        return losses[..., 0]


class ExampleModel:
    """Small trained byte-level decoder, with heads worth a look.

    Pre-norm (RMSNorm), RoPE on part of each head, GELU; attention is `regard.attention`. `load`
    reads the weights that come with regard. The model card next to them describes training data and
    abilities.

    >>> model = ExampleModel.load()
    >>> ids = model.encode("to be or not to be")
    >>> trace = model.run(ids)
    >>> trace.logits.shape, trace.weights(0).shape == (model.config.heads, 19, 19)
    ((19, 256), True)
    """

    def __init__(self, config: Config, weights: Mapping[str, Floats]):
        self.config = config
        self._weights = {name: np.asarray(array, np.float32) for name, array in weights.items()}

    @classmethod
    def load(cls) -> Self:
        """Load the float32 weights shipped in the package."""
        return cls.from_safetensors(files(__package__).joinpath("weights.safetensors").read_bytes())

    @classmethod
    def from_safetensors(cls, data: bytes) -> Self:
        """Load a model from the bytes of a safetensors file."""
        require("the example model", "safetensors")
        from safetensors.numpy import load

        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        return cls(Config(**json.loads(metadata["config"])), load(data))

    def to_safetensors(self) -> bytes:
        """Return the bytes of a safetensors file in float16.

        The configuration is in its metadata.
        """
        require("the example model", "safetensors")
        from safetensors.numpy import save

        weights = {name: array.astype(np.float16) for name, array in self._weights.items()}
        return save(weights, {"config": json.dumps(asdict(self.config))})

    @property
    def parameters(self) -> int:
        """Number of learned parameters."""
        return sum(array.size for array in self._weights.values())

    def encode(self, text: str) -> NDArray[np.int64]:
        """Encode `text` as ids: a beginning-of-sequence token (byte 0), then UTF-8 bytes."""
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        if not text:
            raise ValueError("text is empty: give at least one character")
        data = text.encode(errors="surrogateescape")  # arguments of a command that are not UTF-8 arrive escaped
        return np.frombuffer(bytes([BOS]) + data, np.uint8).astype(np.int64)

    def labels(self, ids: ArrayLike) -> list[str]:
        """Return a label for each of `ids` (n,): a character, or the byte in hexadecimal."""
        return [_label(byte) for byte in self._check(ids).tolist()]

    def run(
        self,
        ids: ArrayLike,
        *,
        temperature: float = 1.0,
        scale: bool = True,
        causal: bool = True,
        ablate: Mapping[tuple[int, int], Replacement] | None = None,
    ) -> Trace:
        """Run the model on `ids` (..., n), and record the arrays of its attention maps.

        Three options change the attention of every layer: scores are divided by `temperature`;
        `scale=False` leaves out 1/√d; `causal=False` lets each position see those after it.
        `ablate` replaces the output of heads: {(layer, head): "zero"} by zeros, "mean" by its mean
        over all positions. That mean knows the whole text, later positions too.

        >>> model = ExampleModel.load()
        >>> ids = model.encode("A rare name comes back. A rare na")
        >>> whole, without = model.run(ids), model.run(ids, ablate={(2, 2): "zero"})
        >>> bool(without.losses().mean() > whole.losses().mean() + 0.1)
        True
        """
        ids = self._check(ids)
        if not 0 < temperature < np.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        ablate = self._heads_to_ablate({} if ablate is None else ablate)
        factor = (self.config.head_width**-0.5 if scale else 1.0) / temperature
        return self._run(ids, factor, causal, ablate)

    def _run(
        self,
        ids: Integers,
        factor: float,
        causal: bool,
        ablate: Mapping[tuple[int, int], Replacement],
        whole: Trace | None = None,
    ) -> Trace:
        """Run the layers.

        whole: a run without ablation, to reuse the layers before the first ablated one.
        """
        weights, first, recorded = self._weights, 0, list[blocks.BlockRun]()
        if whole is not None:
            first = min(layer for layer, _ in ablate)
            arrays = zip(whole.q, whole.k, whole.v, whole.lse, whole.x, whole.out, strict=True)
            recorded = [blocks.BlockRun(*layer) for layer in arrays][: first + 1]
        x = weights["embedding"][ids] if whole is None else whole.x[first]
        for layer in range(first, self.config.layers):
            w = blocks.layer_weights(weights, layer)
            if layer == len(recorded):
                recorded.append(blocks.attended(x, w, self.config.heads, factor, causal, self._rotate))
            out = _ablated(recorded[layer].out, {head: how for (at, head), how in ablate.items() if at == layer})
            x = blocks.after(x, out, w)
        logits = blocks.rms_norm(x, weights["norm"]) @ weights["unembedding"]
        q, k, v, lse, xs, outs = zip(*recorded, strict=True)
        return Trace(ids, logits, q, k, v, lse, xs, outs, factor, causal)

    def projections(self, trace: Trace, layer: int) -> dict[str, Floats]:
        """Return the inputs and projection weights of a layer.

        `x` (..., n, width) is the normalized input. `q`, `k`, `v` (width, h·d) are weights,
        `q_bias`, `k_bias` (h·d) biases. `o` (h·d, width) projects the joined outputs of the heads
        to the residual stream.

        >>> model = ExampleModel.load()
        >>> trace = model.run(model.encode("to be"))
        >>> of = model.projections(trace, 0)
        >>> v = (of["x"] @ of["v"]).reshape(6, 4, 32).swapaxes(0, 1)
        >>> bool(np.allclose(v, trace.v[0], atol=1e-5))
        True
        """
        weights = {name: self._weights[f"{layer}.{name}"] for name in ("q", "q_bias", "k", "k_bias", "v", "o")}
        return {"x": blocks.rms_norm(trace.x[layer], self._weights[f"{layer}.norm1"]), **weights}

    def loss(self, ids: ArrayLike) -> float:
        """Compute the mean loss in nats per byte of `ids` (..., n), the first left out."""
        ids = self._check(ids)
        if ids.shape[-1] < 2:
            raise ValueError(f"ids must hold at least 2 tokens to have a loss, got {ids.shape[-1]}")
        return float(self.run(ids).losses().mean())

    def ablations(self, ids: ArrayLike, how: Replacement = "zero", **options: Any) -> Iterator[tuple[int, int, Trace]]:
        """Run the model without each of its heads in turn: layer, head and trace.

        `how` and `options` are those of `run`. Layers before the ablated one run only once.

        >>> model = ExampleModel.load()
        >>> ids = repeated_bytes(24)[0]
        >>> losses = {}
        >>> for layer, head, trace in model.ablations(ids):
        ...     losses[layer, head] = trace.losses().mean()
        >>> max(losses, key=losses.get)
        (1, 0)
        """
        whole = self.run(ids, ablate={}, **options)
        for layer in range(self.config.layers):
            for head in range(self.config.heads):
                ablate = self._heads_to_ablate({(layer, head): how})
                yield layer, head, self._run(whole.ids, whole.scale, whole.causal, ablate, whole)

    def _heads_to_ablate(self, ablate: Mapping[tuple[int, int], Replacement]) -> Mapping[tuple[int, int], Replacement]:
        if not isinstance(ablate, Mapping):
            raise TypeError(f"ablate must be a mapping of (layer, head), got {type(ablate).__name__}")
        heads = {(layer, head) for layer in range(self.config.layers) for head in range(self.config.heads)}
        for at, how in ablate.items():
            if at not in heads:
                sizes = f"{self.config.layers} layers of {self.config.heads} heads"
                raise ValueError(f"ablate names heads by (layer, head): there are {sizes}, got {at!r}")
            if how not in get_args(Replacement):
                raise ValueError(f"ablate must say zero or mean for each head, got {how!r}")
        return ablate

    def _rotate(self, x: Floats) -> Floats:
        rotated, plain = np.split(x, [self.config.rotary], axis=-1)
        return np.concatenate([rope(rotated, np.arange(x.shape[-2]), base=self.config.base), plain], axis=-1)

    @staticmethod
    def _check(ids: ArrayLike) -> Integers:
        ids = np.asarray(ids)
        if ids.ndim < 1 or ids.size == 0:
            raise ValueError(f"ids must hold at least one token, got shape {ids.shape}")
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"ids must be integers, got {ids.dtype}")
        if ids.min() < 0 or ids.max() >= VOCABULARY:
            raise ValueError(f"ids must lie in 0..{VOCABULARY - 1}, got {ids.min()} to {ids.max()}")
        if ids.shape[-1] > LONGEST:
            raise ValueError(f"text is too long: {ids.shape[-1]} tokens, at most {LONGEST}")
        return ids


def repeated_bytes(period: int, *, copies: int = 2, count: int = 1, seed: int = 0) -> NDArray[np.int64]:
    """Make random printable bytes that repeat: (count, 1 + period·copies).

    Each row is a beginning-of-sequence token and `copies` copies of its own random block. This is
    the usual probe for induction heads (Olsson et al. 2022): only the first copy helps to predict
    the next.

    >>> ids = repeated_bytes(5, copies=2)
    >>> ids.shape, bool((ids[0, 1:6] == ids[0, 6:]).all())
    ((1, 11), True)
    """
    period, copies = integer("period", period, least=0, below=2**31), integer("copies", copies, least=0, below=2**31)
    count, seed = integer("count", count, least=0, below=2**31), integer("seed", seed, least=0)
    block = np.random.default_rng([seed, period]).integers(33, 127, (count, period))
    return np.concatenate([np.full((count, 1), BOS), np.tile(block, copies)], axis=-1)


def _ablated(out: Floats, heads: Mapping[int, Replacement]) -> Floats:
    """Return outputs (..., h, n, d) with those of some heads replaced."""
    if not heads:
        return out
    out = out.copy()
    for head, how in heads.items():
        own = out[..., head, :, :]
        own[...] = own.mean(axis=-2, keepdims=True) if how == "mean" else 0
    return out


def _label(byte: int) -> str:
    return _SHOWN.get(byte) or (chr(byte) if 32 < byte < 127 else f"\\x{byte:02x}")
