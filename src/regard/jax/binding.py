"""The primitives of attention by kind; `primitives` defines them."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive

from regard.jax.task import PrimitiveTask

KINDS = ("forward", "weights", "backward", "jvp", "backward_jvp", "jvp_jvp")
PRIMITIVES = {kind: Primitive("attention" if kind == "forward" else f"attention_{kind}") for kind in KINDS}


def bind(task: PrimitiveTask, operands: Sequence[Any]) -> list[Any]:
    """Bind the primitive of a task to operands, and return its results."""
    found: list[Any] = PRIMITIVES[task.kind].bind(*operands, task=task)
    return found
