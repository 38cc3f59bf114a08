"""Tasks on the shards of a sequence inside of `shard_map`, with gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

import jax
from regard.jax.spreading import GRADIENTS, Ranks, computed, dim_of, refusal
from regard.jax.task import PrimitiveTask

TRAINED = tuple(name for names in GRADIENTS.values() for name in names)


@dataclass(frozen=True)
class ShardMapAxes:
    """The devices along axes of a `shard_map`.

    count: how many.
    """

    axes: tuple[str, ...]
    count: int

    @staticmethod
    def of(axis_name: Any) -> "ShardMapAxes":
        """Return the devices along an axis, or along several, of the `shard_map` around the call."""
        axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        try:
            return ShardMapAxes(axes, int(np.prod([jax.lax.axis_size(axis) for axis in axes], dtype=np.int64)))
        except (NameError, TypeError, ValueError):
            raise ValueError(
                f"axis_name must name an axis of the jax.shard_map around the call, got {axis_name!r}"
            ) from None

    def bind(self, task: PrimitiveTask, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a task on this device. Raises ValueError for one that needs the whole sequence."""
        reason = refusal(task)
        if reason is not None:
            raise ValueError(f"context_parallel_attention does not know {reason}")
        found: Sequence[Any] = spread_forward(self, task, *operands)
        return found

    def compute(self, task: PrimitiveTask, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results of a task, from this device's shards of its operands."""
        x = task.named(operands)
        q, k = (self.whole(task, name, x[name]) for name in ("query", "key"))
        return tuple(computed(task, x, Ranks.of(task, q, k, self.axes, self.count)))

    def whole(self, task: PrimitiveTask, name: str, x: Any) -> tuple[int, ...]:
        """Return the shape of the whole of an array."""
        dim = dim_of(task, name, x)
        return tuple(n * self.count if axis == dim else n for axis, n in enumerate(x.shape))


def primal(where: ShardMapAxes, task: PrimitiveTask, *operands: Any) -> tuple[Any, ...]:
    return where.compute(task, operands)


def forward(where: ShardMapAxes, task: PrimitiveTask, *primals: Any) -> Any:
    """Return the results, and what backward reads: operands and outputs."""
    for name, x in zip(task.operands, primals, strict=True):
        if x.perturbed and name not in TRAINED:
            raise ValueError(
                f"context_parallel_attention has gradients of {', '.join(TRAINED)}, not of {name}: "
                "jax.lax.stop_gradient of it"
            )
    operands = [x.value for x in primals]
    low = operands[0].dtype.itemsize == 2
    every = once(where, replace(task, call=replace(task.call, low=low)), *operands)
    return every[: len(task.results)], (operands, every)


def backward(where: ShardMapAxes, task: PrimitiveTask, saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """Return the gradients of this device's shards."""
    operands, every = saved
    names = (*task.results, "low")[: len(every)]
    zero = jax.custom_derivatives.SymbolicZero
    ct = {f"ct.{n}": x for n, x in zip(task.results, cotangents, strict=True) if not isinstance(x, zero)}
    if not ct:
        return (None,) * len(operands)
    x = {**task.named(operands), **dict(zip(names, every, strict=True)), **ct}
    wrt = tuple((name, ()) for name in task.operands if name in TRAINED)
    back = replace(task, kind="backward", operands=tuple(x), axes=((),) * len(x), wrt=wrt)
    gradients = dict(zip((name for name, _ in wrt), once(where, back, *x.values()), strict=True))
    return tuple(gradients.get(name) for name in task.operands)


def no_second_derivative(*_: Any) -> NoReturn:
    raise ValueError("context_parallel_attention has no second derivative; regard.attention of sharded arrays has")


differentiable = jax.custom_vjp(primal, nondiff_argnums=(0, 1))
differentiable.defvjp(forward, backward, symbolic_zeros=True)
spread_forward = jax.jit(differentiable, static_argnums=(0, 1))  # outside of jit shard_map has no symbolic zeros
once = jax.custom_jvp(primal, nondiff_argnums=(0, 1))  # inside of a derivative
once.defjvp(no_second_derivative)
