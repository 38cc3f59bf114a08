"""The primitives of attention by kind; `primitives` defines them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import jax
from regard.jax.private import manual_axes
from regard.jax.task import PrimitiveTask, Shape

KINDS = ("forward", "weights", "backward", "jvp", "backward_jvp", "jvp_jvp")
PRIMITIVES = {kind: Primitive("attention" if kind == "forward" else f"attention_{kind}") for kind in KINDS}


def bind(task: PrimitiveTask, operands: Sequence[Any]) -> list[Any]:
    """Bind the primitive of a task to operands, and return its results."""
    results: list[Any] = PRIMITIVES[task.kind].bind(*operands, task=task)
    return results


def result_type(like: Any, shape: Shape, dtype: Any, spec: P | None = None) -> Any:
    """Return the type of a result on the mesh of an operand's type, which it varies over alike."""
    if like.sharding.mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    spec = P(*(None for _ in shape)) if spec is None else spec
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=like.sharding.update(spec=spec))


def varying_alike(operands: list[Any]) -> list[Any]:
    """Make operands vary over the same mesh axes, as `shard_map` demands."""
    each = [frozenset() if type(x) is np.ndarray else manual_axes(jax.typeof(x)).varying for x in operands]
    every = frozenset().union(*each)
    if not every:
        return operands
    return [
        x if mine == every else jax.lax.pcast(x, tuple(every - mine), to="varying")
        for x, mine in zip(operands, each, strict=True)
    ]
