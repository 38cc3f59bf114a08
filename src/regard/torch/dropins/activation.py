"""`F.scaled_dot_product_attention` on the CPU replaced in PyTorch's dispatcher, for the whole process."""

from __future__ import annotations  # so that `help` shows the names of types

import sys
import threading
import warnings
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from regard.runtime.forks import renewed
from regard.torch.dropins import cpu_operator, modules
from regard.torch.dropins.functional import attended
from regard.torch.tensors.modes import destroyed, fake

COMPOSITE = "scaled_dot_product_attention"
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_lock = renewed(sys.modules[__name__], "_lock", threading.Lock)
_ATEN = torch.ops.aten.scaled_dot_product_attention.default
_library: Any = None
_modules = ExitStack()  # holds what they do meanwhile


class Activation:
    """The result of `activate`: a context manager, which may be ignored. `remove` deactivates."""

    def __init__(self, first: bool) -> None:
        self._first = first

    def __enter__(self) -> Activation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._first:
            deactivate()

    def remove(self) -> None:
        deactivate()


def activate() -> Activation:
    """Have regard compute PyTorch's `F.scaled_dot_product_attention` on the CPU, in the whole process.

    Everything that reaches PyTorch's operation is served, however it was imported: models of any
    library, modules of `torch.nn`, and graphs that were compiled, exported or scripted before. In
    graphs PyTorch's operation stays, so that they run without regard too. `deactivate` undoes it,
    and so does leaving a `with`, unless it was active before.

    Conventions and errors are those of `regard.torch.scaled_dot_product_attention`. PyTorch keeps
    nested tensors, tensors inside of `torch.func.vmap` and on other devices, and in graphs that are
    compiled what its fused kernel does not take: dropout, trained masks, values of another size
    than keys. The fused inference path of `nn.MultiheadAttention` and `nn.TransformerEncoder`,
    which does not call the function, is off meanwhile. PyTorch's operation hands out and lse alone
    to its backward, so gradients in 16 bits from graphs that hold it are as exact as PyTorch's.

    >>> import torch, regard.torch
    >>> q = torch.randn(2, 8, 10, 16)
    >>> with regard.torch.activate():
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> torch.equal(out, regard.attention(q, q, q))
    True
    """
    global _library, _modules
    with _lock:
        first = _library is None
        if first:
            _library = _registered()
            _forget_dispatch()
            _modules = modules.held()
    return Activation(first)


def deactivate() -> None:
    """Give `F.scaled_dot_product_attention` on the CPU back to PyTorch; see `activate`."""
    global _library
    with _lock:
        if _library is not None:
            destroyed(_library)
            _library = None
            _forget_dispatch()
            _modules.close()


def active() -> bool:
    """Return whether `activate` is in force."""
    return _library is not None


def _registered() -> Any:
    """Register kernels in PyTorch's dispatcher, until the library returned is destroyed.

    The composite operation has one for calls with autograd and one for inference mode. Its parts in graphs have one
    for the values and one for the gradients, below autograd.
    """
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "CPU"):
        library.impl(COMPOSITE, composite, key)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # it is meant to replace
        library.impl(FLASH, cpu_operator.forward, "CPU", allow_override=True)
        library.impl(f"{FLASH}_backward", cpu_operator.backward, "CPU", allow_override=True)
    return library


def _forget_dispatch() -> None:
    """Have graphs that are traced from now on ask the dispatcher anew.

    An operation keeps which kernel serves a key while a graph is traced, and no registration clears it.
    """
    _ATEN._dispatch_cache.clear()


def composite(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if fake(query):  # of a graph that is compiled, in which PyTorch's operation stays
        return _ATEN.decompose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return attended(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def register() -> None:
    """Give `torch.nn.attention.activate_flash_attention_impl` the name "regard", where PyTorch has it."""
    make_known = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if make_known is not None:
        make_known("regard", register_fn=activate)
