"""JAX arrays in rules: tables and masks that may be traced."""

from typing import Any

import numpy as np

import jax
from regard.rules import Table

Array = np.ndarray[Any, np.dtype[Any]]


class TracedTable(Table):
    """A table with the values that a traced array has when the program runs."""

    __slots__ = ("source",)
    source: jax.Array

    def __init__(self, what: str, x: jax.Array, bounds: Any = "clamp") -> None:
        sized(what, x)
        if 0 in x.shape:
            raise ValueError(f"{what} must not be empty, got shape {x.shape}")
        if not (x.dtype.kind in "biuf" or x.dtype.name == "bfloat16"):
            raise TypeError(f"{what} must be an array of booleans, integers or floats, got {x.dtype}")
        object.__setattr__(self, "source", x)
        object.__setattr__(self, "bounds", bounds)

    @property
    def array(self) -> Array:  # type: ignore[override]
        raise TypeError(f"a rule that reads the {self} serves calls on JAX arrays, not on NumPy arrays")

    @property
    def known(self) -> Array | None:
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.source.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.source.dtype
        return dtype

    def __repr__(self) -> str:
        return f"traced table of shape {self.shape}, {self.dtype}"


def traced(x: object) -> bool:
    """Return whether a JAX array is traced, or stands for another in a transformation."""
    return isinstance(x, jax.core.Tracer)


def sized(what: str, x: jax.Array) -> jax.Array:
    """Return x. Raises TypeError for symbolic dimensions of `jax.export`."""
    if all(type(n) is int for n in x.shape):
        return x
    raise TypeError(
        f"{what} must have a shape of integers, got {x.shape}: attention is compiled for its shapes, so export a "
        "program for each, not one with symbolic dimensions"
    )


def table(what: str, x: jax.Array, bounds: Any = "clamp") -> Table:
    """Return a table over a JAX array, constant unless it is traced."""
    return TracedTable(what, x, bounds) if traced(x) else Table.of(what, np.asarray(x), bounds)


def constant(what: str, x: jax.Array) -> Any:
    """Return the values of a JAX array, or a traced array itself."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{what} must be an array of numbers, got a random key")
    return sized(what, x) if traced(x) else np.asarray(x)


def flags(argument: str, x: jax.Array, frozen: bool = False) -> Any:
    """Return a mask given as a JAX array of booleans or integers.

    Traced integers allow a pair where they are not 0.
    """
    if not traced(x):
        return np.array(x) if frozen else np.asarray(x)
    sized(argument, x)
    if x.dtype.kind not in "biu":
        kind = f"{x.dtype}; to add to scores, use bias=" if jax.numpy.issubdtype(x.dtype, np.floating) else x.dtype
        raise TypeError(f"{argument} must be booleans or 0/1 integers, got {kind}")
    return x if x.dtype == bool else x != 0
