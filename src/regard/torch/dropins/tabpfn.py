"""TabPFN's registry of attention backends."""

from __future__ import annotations  # so that `help` shows the names of types

from typing import Any

import torch

from regard.core.tensors import NUMPY
from regard.ops.attention import attention

FLOATS = {dtype for dtype in NUMPY if dtype.is_floating_point}


def register_tabpfn() -> None:
    """Register regard as the attention backend of TabPFN for calls on the CPU.

    Models made before and after use it, in training too. TabPFN asks its backends in turn, the one
    registered last first. To register again changes nothing. The name is "regard", by which
    TabPFN's `unregister_attention_backend` ends it.

    Raises ImportError if tabpfn is not installed, or has no such registry.

    >>> import regard.torch
    >>> regard.torch.register_tabpfn()  # doctest: +SKIP
    """
    try:
        # The import of the first registers TabPFN's own backends, which are then asked after ours.
        import tabpfn.architectures.shared.scaled_dot_product_attention  # noqa: F401
        from tabpfn.architectures.shared.attention_backends import register_attention_backend
    except ImportError as error:
        raise ImportError(
            f"register_tabpfn needs tabpfn with a registry of attention backends, as of version 9: {error}"
        ) from None
    register_attention_backend(BACKEND)


class Backend:
    """An attention backend by TabPFN's protocol."""

    name = "regard"

    def is_preferred(self, spec: Any) -> bool:
        """Return True for calls with keys on the CPU in a dtype that an engine reads."""
        return spec.device.type == "cpu" and spec.seq_len_kv is not None and spec.dtype in FLOATS

    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **context: Any) -> torch.Tensor:
        """Return attention of token-major tensors (batch, n, heads, d)."""
        return attention(query, key, value, layout="bnhd")


BACKEND = Backend()
