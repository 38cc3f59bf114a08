"""Attention of protein models, Boltz's and OpenFold-3's, replaced in a model."""

from __future__ import annotations  # so that `help` shows the names of types

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch

from regard.ops.attention import attention
from regard.rules import type_name
from regard.torch.dropins.triangle import attend, readable

LARGE = -1e4  # a bias of at most this hides a key


def adopt(model: torch.nn.Module) -> list[str]:
    """Replace the attention of Boltz's and OpenFold-3's modules, and return the modules' names.

    Boltz and OpenFold-3 take their fast kernels on CUDA devices only. The modules that are replaced
    compute triangle attention, attention with pair bias, MSA row and column attention and atom
    attention, by `regard.attention`, in training too. Parameters and their names stay. To undo it
    for a module, delete its attribute `forward`.

    Args:
        model: a module that contains such modules, or is one.

    A query that sees no key gives the mean of the values. OpenFold's biases that are the same for
    all heads and queries are masks: 0 attends; what is neither 0 nor at most −1e4 raises ValueError
    in the call.

    Raises TypeError if `model` is no module, ValueError if nothing in it can be replaced, or if a
    package's module has other parameters than expected.

    >>> import torch, regard.torch
    >>> regard.torch.adopt(torch.nn.ReLU())
    Traceback (most recent call last):
      ...
    ValueError: model has no attention of Boltz or OpenFold-3, got torch.nn.modules.activation.ReLU
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type_name(model)}")
    modules = {name: (module, replacement) for name, module in model.named_modules() if (replacement := _of(module))}
    if not modules:
        raise ValueError(f"model has no attention of Boltz or OpenFold-3, got {type_name(model)}")
    for module, replacement in modules.values():
        _check(module, replacement)
    for module, replacement in modules.values():
        module.forward = MethodType(replacement.forward, module)
    return list(modules)


class Replacement(NamedTuple):
    """A method in the place of a module's `forward`, and the parameters of that which it knows."""

    forward: Callable[..., torch.Tensor]
    parameters: frozenset[str]


def _triangle(
    self: Any,
    q_x: torch.Tensor,
    kv_x: torch.Tensor,
    tri_bias: torch.Tensor,
    mask_bias: torch.Tensor,
    mask: torch.Tensor,
    use_kernels: bool = False,
) -> torch.Tensor:
    """Compute Boltz's triangle attention."""
    q, k, v = self._prep_qkv(q_x, kv_x, apply_scale=False)
    out = attend(q, k, v, mask != 0, bias=tri_bias, scale=self.c_hidden**-0.5)
    return self._wrap_up(out.transpose(-2, -3), q_x)


def _openfold(
    self: Any, q_x: torch.Tensor, kv_x: torch.Tensor, biases: list[torch.Tensor] | None = None, **switches: Any
) -> torch.Tensor:
    """Compute OpenFold-3's multi-head attention with any number of biases."""
    q, k, v = self._prep_qkv(q_x, kv_x, apply_scale=False)
    masks, others = [], []
    for bias in biases or ():
        if bias.ndim >= 3 and bias.shape[-3] == bias.shape[-2] == 1:
            masks.append(_mask(bias))
        else:
            others.append(bias)
    bias = sum(others[1:], others[0]) if others else None
    scale = self.c_hidden**-0.5
    if masks:
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
        out = attend(q, k, v, mask, bias=bias, scale=scale)
    else:
        out = attention(q, k, v, bias=bias, scale=scale)
    return self._wrap_up(out.transpose(-2, -3), q_x)


def _mask(bias: torch.Tensor) -> torch.Tensor:
    """Return the keys that a bias without heads and queries leaves visible."""
    visible = bias == 0
    if readable(bias) and not bool((visible | (bias <= LARGE)).all()):
        raise ValueError(
            f"a bias of shape {tuple(bias.shape)} must be a mask: 0 where keys are visible, at most {LARGE:g} elsewhere"
        )
    return visible


def _pair_bias_1(
    self: Any,
    s: torch.Tensor,
    z: torch.Tensor,
    mask: torch.Tensor,
    multiplicity: int = 1,
    to_keys: Callable[[torch.Tensor], torch.Tensor] | None = None,
    model_cache: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute attention with pair bias of Boltz-1."""
    if self.initial_norm:
        s = self.norm_s(s)
    keys = s
    if to_keys is not None:
        keys, mask = to_keys(s), to_keys(mask[..., None])[..., 0]
    if model_cache is None:
        bias = self.proj_z(z)
    elif "z" in model_cache:
        bias = model_cache["z"]
    else:
        bias = model_cache["z"] = self.proj_z(z)
    return _pair_biased(self, s, keys, bias, mask, multiplicity)


def _pair_bias_2(
    self: Any, s: torch.Tensor, z: torch.Tensor, mask: torch.Tensor, k_in: torch.Tensor, multiplicity: int = 1
) -> torch.Tensor:
    """Compute attention with pair bias of Boltz-2."""
    return _pair_biased(self, s, k_in, self.proj_z(z), mask, multiplicity)


def _pair_biased(
    self: Any, s: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor, multiplicity: int
) -> torch.Tensor:
    """Return Boltz's attention of single representations; its samples of one structure share their bias."""

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, multiplicity)) if x.shape[0] != 1 else x[None]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return split(x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2).float())

    v = self.proj_v(keys)
    q, k = heads(self.proj_q(s)), heads(self.proj_k(keys))
    out = attend(q, k, heads(v), split(mask[:, None, None] != 0), bias=bias[:, None].float())
    out = out.flatten(0, 1).transpose(1, 2).flatten(2).to(v.dtype)
    return self.proj_o(self.proj_g(s).sigmoid() * out)


def _of(module: torch.nn.Module) -> Replacement | None:
    """Return the replacement of a module's `forward`, if its class has one and does not override it."""
    for cls in type(module).__mro__:
        if "forward" in vars(cls):
            return REPLACEMENTS.get(f"{cls.__module__}.{cls.__qualname__}")
    return None


def _check(module: torch.nn.Module, replacement: Replacement) -> None:
    """Raise ValueError if a module's `forward` has a parameter that its replacement does not know."""
    unknown = set(inspect.signature(type(module).forward).parameters) - replacement.parameters - {"self"}
    if unknown:
        raise ValueError(
            f"{type(module).__module__}.{type(module).__qualname__}.forward has parameters that regard does not know: "
            + ", ".join(sorted(unknown))
        )


def _replacement(forward: Callable[..., torch.Tensor], *switches: str) -> Replacement:
    """Return a replacement that knows its own parameters and the names of switches."""
    return Replacement(forward, frozenset(inspect.signature(forward).parameters) | set(switches))


REPLACEMENTS = {
    "boltz.model.layers.triangular_attention.primitives.Attention": _replacement(_triangle),
    "boltz.model.layers.attention.AttentionPairBias": _replacement(_pair_bias_1),
    "boltz.model.layers.attentionv2.AttentionPairBias": _replacement(_pair_bias_2),
    "openfold3.core.model.primitives.attention.Attention": _replacement(
        _openfold,
        "use_deepspeed_evo_attention",
        "use_cueq_triangle_kernels",
        "use_triton_triangle_kernels",
        "use_lma",
        "lma_q_chunk_size",
        "lma_kv_chunk_size",
        "use_high_precision",
    ),
}
