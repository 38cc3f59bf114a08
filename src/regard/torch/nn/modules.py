"""Multi-head attention, transformer blocks and stacks, as PyTorch modules."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from regard.arguments.signatures import named, named_beside, passing_on
from regard.core.types import MaskLike, ScoreLike
from regard.rules import Mask, Score, as_mask, as_score
from regard.torch.compiled.traced import in_graph
from regard.torch.nn.positions import Alibi, Relative, Rope
from regard.torch.public.attention import positions_first
from regard.torch.public.padding import real_keys

Positions = Rope | Alibi | Relative | Literal["rope", "alibi", "relative"] | None
Activation = Callable[[torch.Tensor], torch.Tensor] | Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu"]

_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,
}


class CopyOptions(TypedDict, total=False):
    """Options of `MultiHeadAttention` for `from_torch`.

    PyTorch's modules have no such options.
    """

    positions: Positions
    causal: bool
    mask: MaskLike
    score: ScoreLike
    scale: float | None


class HeadOptions(CopyOptions, total=False):
    """Options of `MultiHeadAttention` that blocks and stacks of them take too."""

    num_kv_heads: int | None
    key_dim: int | None
    value_dim: int | None
    head_dim: int | None
    value_head_dim: int | None
    sink: bool


class BlockOptions(HeadOptions, total=False):
    """Options of `TransformerBlock` that `Transformer` takes too."""

    activation: Activation
    dropout: float
    norm: Literal["layer", "rms"]
    norm_eps: float
    norm_first: bool
    bias: bool
    attention_bias: bool | str | None
    cross_attention: bool
    context_dim: int | None
    device: Any
    dtype: Any


# Options that `from_torch` takes from PyTorch's module.
OF_TORCH = ("bias", "dropout", "device", "dtype", *(HeadOptions.__annotations__.keys() - CopyOptions.__annotations__))


class KVCache:
    """Keys and values seen by a `MultiHeadAttention`, for decoding step by step.

    The cache doubles as needed, and is for inference: under `torch.no_grad()` or
    `torch.inference_mode()`. Position 0 is the first key that was ever appended.

    >>> cache = KVCache()
    >>> attention = MultiHeadAttention(16, 2, causal=True)
    >>> with torch.no_grad():
    ...     for token in torch.ones(3, 1, 16):
    ...         out = attention(token, cache=cache)
    >>> len(cache)
    3
    """

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; return all so far, (..., n, h_kv, d), as views."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError("a KVCache is for inference: call the module under torch.no_grad()")
        rows = [x.transpose(-2, -3) for x in (key, value)]  # a head's rows are one stretch of memory for decode steps
        begin, self._length = self._length, self._length + key.shape[-3]
        if not self._parts:
            self._parts = [x[..., :0, :] for x in rows]
        missing = self._length - self._parts[0].shape[-2]
        if missing > 0:
            self._parts = [F.pad(part, (0, 0, 0, max(missing, begin))) for part in self._parts]
        for part, x in zip(self._parts, rows, strict=True):
            part[..., begin : self._length, :] = x
        return self.parts()

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values so far, (..., n, h_kv, d), as views."""
        key, value = (part[..., : self._length, :].transpose(-2, -3) for part in self._parts)
        return key, value

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder or repeat batch entries, as beam search needs."""
        self._parts = [part.index_select(0, index) for part in self._parts]

    def __repr__(self) -> str:
        return f"KVCache of {self._length} keys"


@dataclass
class BlockCache:
    """Keys and values of a `TransformerBlock`, for its sequence and the context."""

    own: KVCache = field(default_factory=KVCache)
    context: KVCache = field(default_factory=KVCache)

    def reorder(self, index: torch.Tensor) -> None:
        """Reorder or repeat batch entries, as beam search needs."""
        for cache in (self.own, self.context):
            cache.reorder(index)


class MultiHeadAttention(nn.Module):
    """Multi-head attention, self or cross, batch first.

    Vaswani et al. 2017, section 3.2.2. The formula is that of `regard.multihead_attention`, with a
    `nn.Linear` for each projection: w_q, w_k, w_v, w_o.

    True means attend, in `mask` and in `key_padding_mask`. That is the reverse of
    `nn.MultiheadAttention`, where True hides. A query that sees nothing gives zeros (and then the
    bias of w_o), where PyTorch's can give NaN.

    Args:
        d_model: features of the queries and of the output.
        num_heads: h.
        num_kv_heads: h_kv, a divisor of h: groups of h / h_kv heads share a key and a value head.
            Default h.
        key_dim, value_dim: features of key and value, if they differ from d_model
            (cross-attention).
        head_dim: d, features of a head's queries and keys; default d_model / h.
        value_head_dim: d_v, features of a head's values; default d.
        bias: True for biases of all projections, or letters of "qkvo": "qk" is queries and keys
            alone.
        dropout: share of the attention weights to drop in training.
        positions: "rope", "alibi", "relative", or one of `Rope`, `Alibi`, `Relative`. The last two
            are added after `score`. Queries count from the end: the last query is at the position
            of the last key.
        causal: query i sees the keys j ≤ i.
        mask: a rule for every call, such as `regard.window(256)`; as `mask` of `regard.attention`.
        score: a rule that changes scores, such as `regard.softcap(50.0)`; as `score` of
            `regard.attention`.
        scale: factor of Q Kᵀ; default 1/√d.
        sink: each head learns a logit that takes weight and gives no value; initially 0.
        device, dtype: of the parameters.

    Raises TypeError or ValueError that names the argument, what was given and what was expected.

    >>> attention = MultiHeadAttention(64, 8, num_kv_heads=2, causal=True, positions="rope")
    >>> attention(torch.randn(3, 10, 64)).shape
    torch.Size([3, 10, 64])
    >>> out, weights = attention(torch.randn(3, 10, 64), return_weights=True)
    >>> weights.shape
    torch.Size([3, 8, 10, 10])
    """

    @named
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool | str = True,
        dropout: float = 0.0,
        positions: Positions = None,
        causal: bool = False,
        mask: MaskLike = None,
        score: ScoreLike = None,
        scale: float | None = None,
        sink: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        h, h_kv = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        if h < 1 or h_kv < 1 or h % h_kv:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {h} and {h_kv}")
        if head_dim is None and d_model % h:
            raise ValueError(f"num_heads={h} must divide d_model={d_model}, unless head_dim is given")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        biases = bias if isinstance(bias, str) else "qkvo" if bias else ""
        if set(biases) - set("qkvo"):
            raise ValueError(f"bias must be a bool or letters of 'qkvo', got {bias!r}")
        d = d_model // h if head_dim is None else head_dim
        d_v = d if value_head_dim is None else value_head_dim
        self.d_model, self.num_heads, self.num_kv_heads = d_model, h, h_kv
        self.head_dim, self.value_head_dim = d, d_v
        self.dropout, self.causal, self.scale = float(dropout), causal, scale
        self.mask: Mask | None = None if mask is None else as_mask(mask, frozen=True)
        self.score: Score | None = None if score is None else as_score(score)
        factory = {"device": device, "dtype": dtype}
        self.w_q = nn.Linear(d_model, h * d, bias="q" in biases, **factory)
        self.w_k = nn.Linear(d_model if key_dim is None else key_dim, h_kv * d, bias="k" in biases, **factory)
        self.w_v = nn.Linear(d_model if value_dim is None else value_dim, h_kv * d_v, bias="v" in biases, **factory)
        self.w_o = nn.Linear(h * d_v, d_model, bias="o" in biases, **factory)
        self.sink = nn.Parameter(torch.empty(h, **factory)) if sink else None
        self.positions = _positions(positions, h, d, factory)
        self.reset_parameters()

    @classmethod
    @named
    @passing_on(__init__, without=OF_TORCH)
    def from_torch(cls, module: nn.MultiheadAttention, **options: Unpack[CopyOptions]) -> Self:
        """Copy the weights of a `nn.MultiheadAttention`.

        Called batch first and with masks reversed (True = attend), it gives the same output.
        `options` are those of the constructor that PyTorch's module does not have, such as causal.
        Raises ValueError for `add_bias_kv`.
        """
        if module.bias_k is not None:
            raise ValueError("from_torch: add_bias_kv=True, a key and value of its own, has no counterpart here")
        weight = module.out_proj.weight
        new = cls(
            module.embed_dim, module.num_heads, key_dim=module.kdim, value_dim=module.vdim,
            bias=module.in_proj_bias is not None, dropout=module.dropout, sink=module.add_zero_attn,
            device=weight.device, dtype=weight.dtype, **options,
        )  # fmt: skip
        packed, linears = module.in_proj_weight, (new.w_q, new.w_k, new.w_v, new.w_o)
        apart = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        with torch.no_grad():
            for linear, w in zip(linears, (*(apart if packed is None else packed.chunk(3)), weight), strict=True):
                linear.weight.copy_(w)
            if module.in_proj_bias is not None:
                for linear, b in zip(linears, (*module.in_proj_bias.chunk(3), module.out_proj.bias), strict=True):
                    linear.bias.copy_(b)
        if new.sink is not None:  # a key and a value of zeros: a logit of 0, not learned
            new.sink.requires_grad_(False)
        return new.train(module.training)

    def reset_parameters(self) -> None:
        """Draw Xavier's uniform weights (Glorot and Bengio 2010); zero biases and sinks."""
        for linear in (self.w_q, self.w_k, self.w_v, self.w_o):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    @named_beside(__init__)
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        *,
        mask: Any = None,
        key_padding_mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
        return_weights: bool | Literal["heads", "mean"] = False,
    ) -> Any:
        """Attend.

        Args:
            query: (..., n_q, d_model), or (n_q, d_model).
            key: (..., n_k, key_dim); by default the query (self-attention).
            value: (..., n_k, value_dim); by default the key.
            mask: True = attend: a rule, or booleans or 0/1 that align right to (..., h, n_q, n_k).
                All masks must allow a pair.
            key_padding_mask: (..., n_k) booleans or 0/1, True = a real key, False = padding: the
                reverse of `nn.MultiheadAttention`. With a cache, for all keys in it.
            cache: in self-attention the keys of this call are appended to the cache, and all its
                keys are attended to. In cross-attention (key given) the keys of the first call are
                cached, and `key` is not read again.
            return_weights: also return the weights (..., h, n_q, n_k), "mean": averaged over heads
                (..., n_q, n_k).

        Returns:
            (..., n_q, d_model); with `return_weights` a tuple (out, weights).
        """
        if key is None and value is not None:
            raise ValueError("value is given without key: self-attention takes query alone, cross-attention both")
        if return_weights not in (False, True, "heads", "mean"):
            raise ValueError(f"return_weights must be a bool, 'heads' or 'mean', got {return_weights!r}")
        q = self.w_q(query).unflatten(-1, (self.num_heads, self.head_dim))
        if key is not None and cache is not None and len(cache):
            k, v = cache.parts()
        else:
            key = query if key is None else key
            k = self.w_k(key).unflatten(-1, (self.num_kv_heads, self.head_dim))
            v = self.w_v(key if value is None else value).unflatten(-1, (self.num_kv_heads, self.value_head_dim))
            if isinstance(self.positions, Rope):
                k = self.positions(k, 0 if cache is None else len(cache))
            if cache is not None:
                k, v = cache.append(k, v)
        if isinstance(self.positions, Rope):
            q = self.positions(q, k.shape[-3] - q.shape[-3])
        score: Any = self.score
        if isinstance(self.positions, Alibi | Relative):
            score = self.positions() if score is None else [score, self.positions()]
        visible = both(self.mask, with_padding(mask, key_padding_mask, (*q.shape[:-3], k.shape[-3])))
        rules = {"causal": self.causal or None, "mask": visible, "score": score}
        options = {"scale": self.scale, "sink": self.sink, "return_weights": bool(return_weights) or None}
        dropout = (self.dropout or None) if self.training else None
        out = positions_first(q, k, v, **rules, **options, dropout=dropout)
        if not return_weights:
            return self.w_o(out.flatten(-2))
        out, weights = out
        return self.w_o(out.flatten(-2)), weights.mean(-3) if return_weights == "mean" else weights

    def extra_repr(self) -> str:
        sizes = ["d_model", "num_heads", "num_kv_heads", "head_dim", "value_head_dim"]
        names = [*sizes, "dropout", "causal", "mask", "score", "scale"]
        usual = {"num_kv_heads": self.num_heads, "value_head_dim": self.head_dim, "dropout": 0.0, "causal": False}
        shown = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != usual.get(name)]
        return ", ".join([*shown, "sink=True"] if self.sink is not None else shown)


class FeedForward(nn.Module):
    """The feed-forward half of a block: w_down(activation(w_up(x))), or SwiGLU.

    SwiGLU is w_down(silu(w_gate(x)) · w_up(x)). activation: "gelu", "gelu_tanh", "relu", "silu",
    "swiglu" (Shazeer 2020), or a function of a tensor. dropout: after the activation, in training.

    >>> FeedForward(8, 32)(torch.ones(2, 8)).shape
    torch.Size([2, 8])
    """

    @named
    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be a function or one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        factory = {"bias": bias, "device": device, "dtype": dtype}
        self.activation = activation
        self.w_up = nn.Linear(d_model, d_ff, **factory)
        self.w_gate = nn.Linear(d_model, d_ff, **factory) if activation == "swiglu" else None
        self.w_down = nn.Linear(d_ff, d_model, **factory)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = _ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        y = self.w_up(x)
        y = activation(y) if self.w_gate is None else activation(self.w_gate(x)) * y
        return self.w_down(self.dropout(y))

    def extra_repr(self) -> str:
        name = self.activation if isinstance(self.activation, str) else getattr(self.activation, "__name__", None)
        return f"activation={name!r}" if name else ""


class TransformerBlock(nn.Module):
    """Attention and feed-forward network with residuals, norms, maybe cross-attention.

    Post-norm, x ← norm(x + f(x)), is that of Vaswani et al. 2017. Pre-norm, x ← x + f(norm(x)),
    trains deeper stacks.

    Args:
        d_model: features of x.
        num_heads: of both attentions.
        d_ff: features inside the feed-forward network; default 4 · d_model.
        activation: of the feed-forward network, as in `FeedForward`: "gelu", "relu", "swiglu", ...
        dropout: in training, of attention weights, inside the feed-forward network, and of what
            each half adds to x.
        norm: "layer" or "rms"; norm_eps is its ε.
        norm_first: pre-norm.
        bias: of feed-forward network and layer norms; and of attention, unless `attention_bias`
            is given.
        attention_bias: as `bias` of `MultiHeadAttention`.
        cross_attention: add a second attention, to a context, as in a decoder.
        context_dim: features of the context; default d_model.
        device, dtype: of the parameters.
        attention: options of `MultiHeadAttention` for the attention to x itself: causal, positions,
            num_kv_heads, ...

    Raises TypeError or ValueError that names the argument, what was given and what was expected.

    >>> block = TransformerBlock(d_model=512, num_heads=8, d_ff=2048)
    >>> block(torch.randn(2, 100, 512)).shape
    torch.Size([2, 100, 512])
    """

    @named
    @passing_on(MultiHeadAttention.__init__)
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int | None = None,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        norm: Literal["layer", "rms"] = "layer",
        norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
        attention_bias: bool | str | None = None,
        cross_attention: bool = False,
        context_dim: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **attention: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        heads = {"dropout": dropout, "bias": bias if attention_bias is None else attention_bias, **factory}
        if norm not in ("layer", "rms"):
            raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}")
        layer_norm = partial(nn.LayerNorm, bias=bias)
        normal = partial(layer_norm if norm == "layer" else nn.RMSNorm, d_model, eps=norm_eps, **factory)
        self.norm_first = norm_first
        self.attention = MultiHeadAttention(d_model, num_heads, **heads, **attention)
        self.attention_norm = normal()
        self.cross_attention = self.cross_attention_norm = None
        if cross_attention:
            self.cross_attention = MultiHeadAttention(
                d_model, num_heads, key_dim=context_dim, value_dim=context_dim, **heads
            )
            self.cross_attention_norm = normal()
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.feed_forward = FeedForward(d_model, d_ff, activation=activation, dropout=dropout, bias=bias, **factory)
        self.feed_forward_norm = normal()
        self.dropout = nn.Dropout(dropout)

    @classmethod
    @named
    @passing_on(MultiHeadAttention.__init__, without=OF_TORCH)
    def from_torch(
        cls, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, **attention: Unpack[CopyOptions]
    ) -> Self:
        """Copy the weights of PyTorch's encoder or decoder layer.

        Called batch first and with masks reversed (True = attend), it gives the same output.
        `attention` are options of `MultiHeadAttention`. A decoder is made causal here, by
        `causal=True`, instead of by a mask in every call.
        """
        decoder = isinstance(layer, nn.TransformerDecoderLayer)
        if not decoder and not isinstance(layer, nn.TransformerEncoderLayer):
            layers = "a nn.TransformerEncoderLayer or nn.TransformerDecoderLayer"
            raise TypeError(f"from_torch takes {layers}, got {type(layer).__name__}")
        heads, up = layer.self_attn, layer.linear1
        new = cls(
            heads.embed_dim, heads.num_heads, up.out_features, activation=layer.activation, dropout=layer.dropout.p,
            norm_eps=layer.norm1.eps, norm_first=layer.norm_first, bias=up.bias is not None, cross_attention=decoder,
            device=up.weight.device, dtype=up.weight.dtype, **attention,
        )  # fmt: skip
        new.attention = MultiHeadAttention.from_torch(heads, **attention)
        ours = [new.attention_norm, new.feed_forward.w_up, new.feed_forward.w_down, new.feed_forward_norm]
        theirs = [layer.norm1, up, layer.linear2, layer.norm3 if decoder else layer.norm2]
        if decoder:
            new.cross_attention = MultiHeadAttention.from_torch(layer.multihead_attn)
            ours, theirs = [*ours, new.cross_attention_norm], [*theirs, layer.norm2]
        for module, source in zip(ours, theirs, strict=True):
            module.load_state_dict(source.state_dict())
        return new.train(layer.training)

    @named_beside(__init__)
    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        mask: Any = None,
        key_padding_mask: torch.Tensor | None = None,
        context_mask: Any = None,
        context_padding_mask: torch.Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> torch.Tensor:
        """Return (..., n, d_model) from x of that shape and, if it has one, a context.

        context: (..., n_k, context_dim). Masks are as in `MultiHeadAttention`: True = attend, in
        padding masks too. With a cache, x follows the tokens of earlier calls; the context of the
        first call is cached.
        """
        if (context is None) != (self.cross_attention is None):
            need = "takes no context" if self.cross_attention is None else "has cross-attention: give it a context"
            raise ValueError(f"this block {need}")
        own, other = (None, None) if cache is None else (cache.own, cache.context)
        x = self._add(x, self.attention_norm, self.attention, mask=mask, key_padding_mask=key_padding_mask, cache=own)
        if self.cross_attention is not None:
            masks = {"mask": context_mask, "key_padding_mask": context_padding_mask}
            x = self._add(x, self.cross_attention_norm, self.cross_attention, context, **masks, cache=other)
        return self._add(x, self.feed_forward_norm, self.feed_forward)

    def _add(self, x: torch.Tensor, norm: Any, f: nn.Module, *context: Any, **options: Any) -> torch.Tensor:
        if self.norm_first:
            return x + self.dropout(f(norm(x), *context, **options))
        return norm(x + self.dropout(f(x, *context, **options)))

    def new_cache(self) -> BlockCache:
        """Make an empty cache for decoding."""
        return BlockCache()

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


class Transformer(nn.Module):
    """A stack of `TransformerBlock`s, with a norm at its end if they are pre-norm.

    Embeddings and the head are the model's own: `nn.Embedding` before, `nn.Linear` after it.

    Args:
        num_layers: the number of blocks.
        d_model, num_heads, d_ff: of each block.
        final_norm: whether a norm follows the last block; default norm_first.
        block: the other options of `TransformerBlock` and `MultiHeadAttention`.

    Raises TypeError or ValueError that names the argument, what was given and what was expected.

    >>> llama = {"norm": "rms", "norm_first": True, "activation": "swiglu", "positions": "rope"}
    >>> decoder = Transformer(2, 64, 4, causal=True, **llama)
    >>> decoder(torch.randn(3, 10, 64)).shape
    torch.Size([3, 10, 64])
    """

    @named
    @passing_on(TransformerBlock.__init__)
    def __init__(
        self, num_layers: int, d_model: int, num_heads: int, d_ff: int | None = None, *,
        final_norm: bool | None = None, **block: Unpack[BlockOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}")
        self.blocks = nn.ModuleList(TransformerBlock(d_model, num_heads, d_ff, **block) for _ in range(num_layers))
        final_norm = block.get("norm_first", False) if final_norm is None else final_norm
        self.norm = deepcopy(self.blocks[0].attention_norm) if final_norm else None

    @classmethod
    @named
    @passing_on(MultiHeadAttention.__init__, without=OF_TORCH)
    def from_torch(cls, stack: nn.TransformerEncoder | nn.TransformerDecoder, **attention: Unpack[CopyOptions]) -> Self:
        """Copy the weights of a `nn.TransformerEncoder` or `nn.TransformerDecoder`."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.blocks = nn.ModuleList(TransformerBlock.from_torch(layer, **attention) for layer in stack.layers)
        new.norm = deepcopy(stack.norm)
        return new.train(stack.training)

    @named_beside(__init__)
    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        mask: Any = None,
        key_padding_mask: torch.Tensor | None = None,
        context_mask: Any = None,
        context_padding_mask: torch.Tensor | None = None,
        cache: Sequence[BlockCache] | None = None,
    ) -> torch.Tensor:
        """Return (..., n, d_model); the arguments are those of `TransformerBlock`."""
        caches: Sequence[BlockCache | None] = [None] * len(self.blocks) if cache is None else cache
        seen = 0 if caches[0] is None else len(caches[0].own)
        mask = with_padding(mask, key_padding_mask, (*x.shape[:-2], seen + x.shape[-2]))
        if context is not None:
            context_mask = with_padding(context_mask, context_padding_mask, tuple(context.shape[:-1]))
        for block, block_cache in zip(self.blocks, caches, strict=True):
            x = block(x, context, mask=mask, context_mask=context_mask, cache=block_cache)
        return x if self.norm is None else self.norm(x)

    def new_cache(self) -> tuple[BlockCache, ...]:
        """Make an empty cache for every block, for decoding."""
        return tuple(block.new_cache() for block in self.blocks)


def with_padding(mask: Any, key_padding_mask: torch.Tensor | None, shape: tuple[int, ...]) -> Any:
    """Combine a mask and a padding mask (..., n_k), which must have `shape`.

    The padding mask becomes a rule, O(n), which hides keys from all queries alike (see
    `real_keys`). In a graph that is being compiled it stays a tensor, as an input of the graph.
    """
    if key_padding_mask is None:
        return mask
    sizes = tuple(key_padding_mask.shape)
    if sizes[-1:] != shape[-1:] or sizes[:-1] not in (shape[:-1], (1,) * len(sizes[:-1])):
        raise ValueError(f"key_padding_mask must be (..., n_k) = {shape}, got {sizes}")
    if key_padding_mask.is_floating_point():
        raise TypeError(
            f"key_padding_mask must be booleans or 0/1 integers, True = attend, got {key_padding_mask.dtype}"
        )
    real: Any = key_padding_mask != 0
    graph = torch.compiler.is_compiling()
    return both(mask, real[..., None, None, :] if graph else real_keys(real.reshape(-1, shape[-1])))


def both(a: Any, b: Any) -> Any:
    """Combine two masks of any type that `regard.attention` takes; None allows all."""
    if a is None or b is None:
        return b if a is None else a
    if torch.compiler.is_compiling():
        return in_graph("mask", a) & in_graph("mask", b)
    return as_mask(a) & as_mask(b)  # for one call, so nothing is copied


def _positions(positions: Any, h: int, d: int, made: dict[str, Any]) -> Rope | Alibi | Relative | None:
    if positions is None or isinstance(positions, Rope | Alibi | Relative):
        return positions
    if positions == "rope":
        return Rope(d)
    if positions == "alibi":
        return Alibi(h)
    if positions == "relative":
        return Relative(h, **made)
    raise ValueError(f"positions must be 'rope', 'alibi', 'relative', or a Rope, Alibi or Relative, got {positions!r}")
