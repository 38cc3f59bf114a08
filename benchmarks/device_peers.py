"""Attention on tensors of a device: calls, peers, and exact results.

An `Option` is written twice: as `regard` takes it, and as functions of PyTorch over indices. FlexAttention takes these.
`judge` evaluates them in float64 on all pairs of two key-value heads and their query heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import regard
from benchmarks.peers import Unable

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = tuple[torch.Tensor, ...]
Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]  # of FlexAttention: mask_mod and score_mod
Prepared = tuple[Callable[[], Any], Callable[[Any], dict[str, Array]]]
BLOCK = 2048  # rows that `judge` computes together


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes of a call: batch · h query heads over h_kv, n positions, d features."""

    batch: int
    h: int
    n: int
    d: int
    h_kv: int

    @property
    def facts(self) -> dict[str, Any]:
        return {"batch": self.batch, "h": self.h, "h_kv": self.h_kv, "n_q": self.n, "n_k": self.n, "d": self.d}


@dataclass(frozen=True)
class Option:
    """An option of a call, as `regard` and as PyTorch take it.

    options: those of `regard.attention`, for some sizes and a bias. mods: the same, on a device. visible: the share of
    visible pairs. sdpa: PyTorch's function has it.
    """

    name: str
    options: Callable[[DeviceSizes, Any], dict[str, Any]] = lambda s, bias: {}
    mods: Callable[[DeviceSizes, torch.device, Any], Mods] = lambda s, device, bias: (None, None)
    visible: Callable[[DeviceSizes], float] = lambda s: 1.0
    causal: bool = False
    biased: bool = False
    sdpa: bool = False


WINDOW, CAP, DOCUMENTS = 256, 50.0, 4


def earlier(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j <= WINDOW)


def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return CAP * torch.tanh(s / CAP)


def ids(s: DeviceSizes) -> Array:
    return np.arange(s.n) * DOCUMENTS // s.n


def same_document(s: DeviceSizes, device: torch.device) -> Callable[..., Any]:
    known = torch.from_numpy(ids(s)).to(device)
    return lambda b, h, i, j: (known[i] == known[j]) & (i >= j)


def added(bias: torch.Tensor) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s + bias[h, i, j]


PLAIN = Option("plain", sdpa=True)
CAUSAL = Option(
    "causal",
    lambda s, bias: {"causal": True},
    lambda s, device, bias: (earlier, None),
    lambda s: 0.5,
    causal=True,
    sdpa=True,
)
OPTIONS = (
    Option(
        f"window of {WINDOW}",
        lambda s, bias: {"mask": regard.window(WINDOW)},
        lambda s, device, bias: (near, None),
        lambda s: min(1.0, (WINDOW + 1) / s.n),
    ),
    Option(
        f"{DOCUMENTS} documents, causal",
        lambda s, bias: {"mask": regard.documents(ids(s)), "causal": True},
        lambda s, device, bias: (same_document(s, device), None),
        lambda s: 0.5 / DOCUMENTS,
    ),
    Option("softcap", lambda s, bias: {"score": regard.softcap(CAP)}, lambda s, device, bias: (None, capped)),
    Option(
        "bias of each pair",
        lambda s, bias: {"bias": bias},
        lambda s, device, bias: (None, added(bias)),
        biased=True,
    ),
)


@dataclass(frozen=True)
class DeviceCall:
    """Inputs, a cotangent of the output, and tangents of the inputs.

    bias: (h, n, n) in float32, or None.
    """

    sizes: DeviceSizes
    option: Option
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    dout: torch.Tensor
    tangents: Tensors
    engine: str | None = None

    @classmethod
    def of(
        cls, s: DeviceSizes, option: Option, dtype: torch.dtype, device: torch.device, engine: str | None
    ) -> "DeviceCall":
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)
        q, dout, dq = (normal(s.batch, s.h, s.n, s.d).to(dtype) for _ in range(3))
        k, v, dk, dv = (normal(s.batch, s.h_kv, s.n, s.d).to(dtype) for _ in range(4))
        bias = normal(s.h, s.n, s.n) if option.biased else None
        return cls(s, option, q, k, v, bias, dout, (dq, dk, dv), engine)

    @property
    def inputs(self) -> Tensors:
        return (self.q, self.k, self.v) if self.bias is None else (self.q, self.k, self.v, self.bias)

    def mods(self, bias: Any = None) -> Mods:
        return self.option.mods(self.sizes, self.q.device, bias)


# Libraries: functions of query, key, value and an optional bias

Attend = Callable[..., Any]


def ours(g: DeviceCall) -> Attend:
    def attend(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return regard.attention(q, k, v, engine=g.engine, **g.option.options(g.sizes, bias))

    return attend


def sdpa(backend: str, g: DeviceCall) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not g.option.sdpa:
        raise Unable(f"has no {g.option.name}")
    options = {"is_causal": g.option.causal, "enable_gqa": g.sizes.h_kv != g.sizes.h}

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return attend


def flex(g: DeviceCall) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s = g.sizes
    mask, _ = g.mods(g.bias)
    blocks = None if mask is None else create_block_mask(mask, None, None, s.n, s.n, g.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return compiled(q, k, v, score_mod=g.mods(bias)[1], block_mask=blocks, enable_gqa=s.h_kv != s.h)

    return attend


WHO: dict[str, Callable[[DeviceCall], Attend]] = {
    "regard": ours,
    "cuDNN": partial(sdpa, "CUDNN_ATTENTION"),
    "Flash": partial(sdpa, "FLASH_ATTENTION"),
    "FlexAttention": flex,
    "PyTorch, math": partial(sdpa, "MATH"),
}


# Calls: each prepares its inputs and returns the function to time

NAMES = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv", "dbias"),
    "JVP": ("out", "tangent of out"),
    "double backward": ("dq", "dk", "dv", "ddout"),
}


def leaves(inputs: Sequence[torch.Tensor]) -> Tensors:
    return tuple(x.detach().requires_grad_() for x in inputs)


def forward(attend: Attend, g: DeviceCall, inputs: Tensors, dout: torch.Tensor, tangents: Tensors) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return (attend(*inputs),)

    return call


def backward(
    attend: Attend, g: DeviceCall, inputs: Tensors, dout: torch.Tensor, tangents: Tensors
) -> Callable[[], Any]:
    x = leaves(inputs)
    return partial(torch.autograd.grad, attend(*x), x, dout, retain_graph=True)


def jvp(attend: Attend, g: DeviceCall, inputs: Tensors, dout: torch.Tensor, tangents: Tensors) -> Callable[[], Any]:
    return partial(torch.func.jvp, attend, inputs, tangents)


def double_backward(
    attend: Attend, g: DeviceCall, inputs: Tensors, dout: torch.Tensor, tangents: Tensors
) -> Callable[[], Any]:
    x, d = leaves(inputs), dout.detach().requires_grad_()
    gradients = torch.autograd.grad(attend(*x), x, d, create_graph=True)
    return partial(torch.autograd.grad, gradients, (*x, d), tangents, retain_graph=True)


KINDS = {"forward": forward, "backward": backward, "JVP": jvp, "double backward": double_backward}


def prepared(who: str, kind: str, g: DeviceCall) -> Prepared:
    """Return a call, and a function that reads the sampled heads of its result."""
    call = KINDS[kind](WHO[who](g), g, g.inputs, g.dout, g.tangents)
    return call, lambda found: read(kind, [sampled(x, g) for x in found])


def read(kind: str, found: Sequence[torch.Tensor]) -> dict[str, Array]:
    arrays = (np.asarray(x.detach().double().cpu().numpy()) for x in found)
    return dict(zip(NAMES[kind], arrays, strict=False))


# The judge


def samples(s: DeviceSizes) -> list[tuple[int, int]]:
    """Return the first and the last pair of a batch element and a key-value head."""
    return list(dict.fromkeys([(0, 0), (s.batch - 1, s.h_kv - 1)]))


def part(x: torch.Tensor, s: DeviceSizes, b: int, kv: int) -> torch.Tensor:
    """Return the part of a bias, of queries, or of keys for one key-value head."""
    group = s.h // s.h_kv
    heads = slice(kv * group, (kv + 1) * group)
    if x.ndim == 3:
        return x[heads]
    return x[b : b + 1, heads] if x.shape[1] == s.h else x[b : b + 1, kv : kv + 1]


def sampled(x: torch.Tensor, g: DeviceCall) -> torch.Tensor:
    return torch.cat([part(x, g.sizes, b, kv).flatten() for b, kv in samples(g.sizes)])


def exact(kind: str, g: DeviceCall) -> dict[str, Array]:
    """Compute the exact result of the sampled heads, in float64."""
    found = []
    for b, kv in samples(g.sizes):
        inputs, (dout,), tangents = (
            tuple(part(x, g.sizes, b, kv).double() for x in xs) for xs in (g.inputs, (g.dout,), g.tangents)
        )
        call = KINDS[kind](partial(judge, g, kv), g, inputs, dout, tangents)
        found.append([x.detach().flatten() for x in call()])
    return read(kind, [torch.cat(parts) for parts in zip(*found, strict=True)])


def judge(g: DeviceCall, kv: int, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    """Attend from the query heads of one key-value head over all pairs.

    It computes in the dtype of the inputs.
    """
    mask, score = g.mods(bias)
    n, group = g.sizes.n, q.shape[1]
    j = torch.arange(n, device=q.device)
    made = []
    for h in range(group):
        blocks = []
        for first in range(0, n, BLOCK):
            i = torch.arange(first, min(first + BLOCK, n), device=q.device)[:, None]
            S = q[0, h, first : first + BLOCK] @ k[0, 0].mT * g.sizes.d**-0.5
            if score is not None:
                S = score(S, 0, h if bias is not None else kv * group + h, i, j)
            if mask is not None:
                S = S.masked_fill(~mask(0, kv * group + h, i, j), -torch.inf)
            blocks.append(S.softmax(-1) @ v[0, 0])
        made.append(torch.cat(blocks))
    return torch.stack(made)[None]
