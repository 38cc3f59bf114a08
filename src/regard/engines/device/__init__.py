"""Attention by PyTorch's operations: O(n) memory and every option, on any device that PyTorch has.

| Module | Contents |
|---|---|
| `rules` | rules and dropout as tensors, with the derivatives that rules define |
| `products` | the softmax, and products over visible pairs, with derivatives of any order |
| `formula` | the outputs of a block of rows, by the formulas of the specification |
| `call` | a problem as tensors, its blocks of rows, and the results that they fill |
| `functions` | forward, weights and the derivatives of a call |
| `statistics` | statistics of the weights of a block |

Read `formula` and `functions` first. Derivatives are PyTorch's autograd on the formula of a block.
"""

from importlib.util import find_spec
from typing import Any

from regard.core.problem import KNOWS as KNOWS
from regard.core.problem import Problem

NAME = "device"
ABOUT = "PyTorch's operations on any device, O(n) memory"
DEVICES, NAMED_ONLY, SKIPS_TILES = True, False, True
FUNCTIONS = ("forward", "weights", "maps", "backward", "jvp", "backward_jvp", "jvp_jvp", "working_memory")


def state() -> str | None:
    """Return the reason why the engine cannot run here, or None."""
    return None if find_spec("torch") else "torch is missing: pip install torch"


def supports(p: Problem) -> str | None:
    """Return None: every valid problem is supported."""
    return None


def __getattr__(name: str) -> Any:
    """Return a function of the engine; PyTorch is loaded by the first call."""
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from regard.engines.device import call, functions

    return call.working_memory if name == "working_memory" else getattr(functions, name)
