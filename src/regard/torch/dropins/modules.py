"""The modules of attention of `torch.nn`, while the function that they call is replaced."""

from __future__ import annotations  # so that `help` shows the names of types

from contextlib import ExitStack
from typing import Any

import torch

from regard.torch.dropins import nested
from regard.torch.dropins.packages import Shared
from regard.torch.tensors import modes

_shared = Shared()


def held() -> ExitStack:
    """Have modules call the function until the returned stack, and all others of this function, are closed.

    The fused inference path of modules, which does not call it, is off, and nested tensors, which PyTorch takes on that
    path alone, are attended to one sequence after the other.
    """
    return _shared.held(_replaced)


def _replaced() -> ExitStack:
    """Replace what modules do until the returned stack is closed."""
    stack = ExitStack()
    module: Any = torch.nn.MultiheadAttention
    stack.callback(setattr, module, "forward", module.forward)
    module.forward = nested.multihead(module.forward)
    module.__prepare_scriptable__ = refuse_script
    stack.callback(delattr, module, "__prepare_scriptable__")
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    return stack


def refuse_script(*_: Any) -> Any:
    """Raise RuntimeError before TorchScript compiles an owner of this attribute.

    The call also forgets the types of modules with methods yet to be compiled. TorchScript keeps
    them after an error, and would define their methods twice when the module is scripted again.
    """
    store = modes.script_types
    for types in store.type_store.values():
        types[:] = [x for x in types if x in store.methods_compiled]
    raise RuntimeError(
        "TorchScript cannot compile regard.torch.scaled_dot_product_attention: use torch.compile or torch.export, or "
        "script outside of `with regard.torch.sdpa()` and `regard.torch.activate()`"
    )
