"""Tasks on the shards of a sequence inside of `shard_map`.

The primitives' tasks are used, with the axes in their calls (`StaticCall.spread`): derivatives and `vmap` follow.
"""

from typing import Any

import numpy as np

import jax
from regard.jax.spreading import Ranks, computed, dim_of, refusal
from regard.jax.task import PrimitiveTask, without
from regard.jax.xla.values import promotion

NAME = "context_parallel_attention"


def devices_along(axis_name: Any) -> tuple[tuple[str, ...], int]:
    """Return an axis, or several, of the `shard_map` around the call, and the number of devices along them."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        return axes, int(np.prod([jax.lax.axis_size(axis) for axis in axes], dtype=np.int64))
    except (NameError, TypeError, ValueError):
        raise ValueError(
            f"axis_name must name an axis of the jax.shard_map around the call, got {axis_name!r}"
        ) from None


def check(task: PrimitiveTask) -> None:
    """Raise ValueError for a task that needs the whole sequence."""
    reason = refusal(task)
    if reason is not None:
        raise ValueError(f"{NAME} does not know {reason}")


def compute(*operands: Any, task: PrimitiveTask) -> list[Any]:
    """Return the results of a task, from this device's shards of its operands."""
    assert task.call.spread is not None
    axes, count = task.call.spread
    x = task.named(operands)

    def whole(name: str) -> tuple[int, ...]:
        dim = dim_of(task, name, x[name])
        shape = tuple(n * count if axis == dim else n for axis, n in enumerate(x[name].shape))
        return without(shape, task.axes_of[name])

    with promotion():
        return computed(task, x, Ranks.of(task, whole("query"), whole("key"), axes, count))
