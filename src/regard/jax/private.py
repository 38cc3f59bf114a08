"""All undocumented names of JAX in this package, each with the reason for it.

Names are looked up on import: a version of JAX that lacks one fails there, and no call is wrong.
"""

from typing import Any

from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["ad", "batching", "given_devices", "manual_axes", "mlir", "on_a_mesh"]

# ad, batching, mlir: the derivatives, batching and lowering of primitives. jax.extend documents primitives alone;
# without these a call has no gradient, no vmap and no program.


def given_devices(primitive: Primitive) -> None:
    """Provide the lowering of a primitive with its devices.

    Without it arrays on several devices are gathered, and each device computes the whole call.
    """
    prim_requires_devices_during_lowering.add(primitive)


def manual_axes(aval: Any) -> Any:
    """Return the type of a value under `shard_map`.

    The value differs over its `varying` axes of the mesh. Without it JAX refuses operands that vary over different
    axes.
    """
    return aval.manual_axis_type


def on_a_mesh(context: Any) -> bool:
    """Return whether a program is lowered for several devices, with automatic axes.

    Without it arrays are gathered, too.
    """
    axes = context.module_context.axis_context
    return getattr(axes, "abstract_mesh", None) is not None and axes.num_devices > 1
