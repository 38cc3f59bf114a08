"""JAX arrays in rules: tables and masks that may be traced, and rules as pytrees.

The leaves of a rule are its arrays: tables, and dense masks. The rest of it is static: its expression and numbers.
"""

from typing import Any

import numpy as np

import jax
from regard.arguments.values import array_type
from regard.rules import Mask, Rule, RuleText, Score, Table

Array = np.ndarray[Any, np.dtype[Any]]


class JaxTable(Table):
    """A table with the values of a JAX array; those of a traced one exist when the program runs.

    source: the array, or what `jax.tree` puts in its place, which no call takes.
    """

    __slots__ = ("_values", "source")
    source: Any
    _values: Array | None

    def __init__(self, what: str, x: jax.Array, bounds: Any = None) -> None:
        sized(what, x)
        if 0 in x.shape:
            raise ValueError(f"{what} must not be empty, got shape {x.shape}")
        if not (x.dtype.kind in "biuf" or x.dtype.name == "bfloat16"):
            raise TypeError(f"{what} must be an array of booleans, integers or floats, got {x.dtype}")
        self._refer(x, bounds)

    @classmethod
    def leaf(cls, source: Any, bounds: Any) -> Table:
        """Return the table of a leaf of a rule, which may be anything."""
        table = object.__new__(cls)
        table._refer(source, bounds)
        return table

    def _refer(self, source: Any, bounds: Any) -> None:
        for name, value in (("source", source), ("bounds", bounds), ("on_device", False), ("_values", None)):
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return JaxTable.leaf, (self.source, self.bounds)

    @property
    def array(self) -> Array:  # type: ignore[override]
        if traced(self.source):
            raise TypeError(f"a rule that reads the {self} serves calls on JAX arrays, not on NumPy arrays")
        if self._values is None:
            values = np.array(self.operand)
            values.setflags(write=False)
            object.__setattr__(self, "_values", values)
        return self._values  # type: ignore[return-value]

    @property
    def known(self) -> Array | None:
        return None if traced(self.source) else self.array

    @property
    def operand(self) -> Any:
        """The array that a call reads. Raises TypeError for another leaf."""
        if not isinstance(self.source, jax.Array | np.ndarray):
            raise TypeError(f"a table of a rule must be an array, got {array_type(self.source)} as a leaf of the rule")
        return self.source

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.source, "shape", ())

    @property
    def dtype(self) -> np.dtype[Any]:
        return getattr(self.source, "dtype", np.dtype(np.float32))

    def __repr__(self) -> str:
        return f"{'traced ' if traced(self.source) else ''}table of shape {self.shape}, {self.dtype}"


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


def table(what: str, x: jax.Array, bounds: Any = None) -> Table:
    """Return a table over a JAX array; integers and booleans with values are constants."""
    if traced(x) or jax.numpy.issubdtype(x.dtype, np.floating):
        return JaxTable(what, x, bounds)
    return Table.of(what, np.asarray(x), bounds)


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


def narrow(values: Array) -> Array:
    """Return the integers of a table in 32 bits, unless JAX has 64.

    Raises ValueError for integers that do not fit.
    """
    if values.dtype.kind not in "iu" or jax.config.jax_enable_x64:
        return values
    limits = np.iinfo(np.int32)
    if values.min() < limits.min or values.max() > limits.max:
        raise ValueError(f"a table of {values.dtype} with values beyond 32 bits needs jax.config.jax_enable_x64")
    return values.astype(np.int32)


def flatten(rule: Rule) -> tuple[list[Any], tuple[RuleText, tuple[Any, ...]]]:
    """Return the arrays of a rule, in the order in which its expression reads them; its text, and bounds of tables."""
    text, tables, dense = RuleText.of(rule)
    leaves = [x.source if isinstance(x, JaxTable) else narrow(x.array) for x in tables]
    return [*leaves, *dense], (text, tuple(x.bounds for x in tables))


def unflatten(structure: tuple[RuleText, tuple[Any, ...]], leaves: Any) -> Any:
    """Return the rule with these leaves, which may be anything."""
    text, bounds = structure
    leaves, count = tuple(leaves), len(bounds)
    tables = [JaxTable.leaf(*pair) for pair in zip(leaves, bounds, strict=False)]
    return text.rule(tables, leaves[count:])


for kind in (Mask, Score):
    jax.tree_util.register_pytree_node(kind, flatten, unflatten)
