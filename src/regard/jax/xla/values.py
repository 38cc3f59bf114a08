"""Rules and dropout as JAX values, with the derivatives that rules define."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

import jax
from regard.jax.task import outline
from regard.reference.specification import GOLDEN, mix64
from regard.rules import Node, order, partials

Tables = tuple[Any, ...]


@contextmanager
def promotion() -> Iterator[None]:
    """Set NumPy's promotion of ranks and dtypes, regardless of the caller's settings."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@contextmanager
def settings() -> Iterator[None]:
    """Set `promotion`, and 64-bit indices."""
    with promotion(), jax.enable_x64(True):
        yield


class RuleIndices(NamedTuple):
    """The absolute indices of a rule, int64, which broadcast together, and its arrays.

    others: integer and boolean tables by slot, None for a float table. dense: the block of each dense array.
    """

    b: Any
    h: Any
    i: Any
    j: Any
    keys: Any
    others: tuple[Any, ...]
    dense: tuple[Any, ...]


def _integer(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an integer division that gives 0 for a zero divisor."""
    return lambda a, b: jnp.where(b == 0, 0, function(a, jnp.where(b == 0, 1, b)))


def _truncate(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int64)
    limits = jnp.iinfo(jnp.int64)
    below, above = x < limits.min, x >= 2.0**63
    inside = jnp.where(below | above | jnp.isnan(x), 0, x).astype(jnp.int64)
    return jnp.where(below, limits.min, jnp.where(above, limits.max, inside))


SPECIAL: dict[str, Callable[..., Any]] = {
    "floor_divide": _integer(jnp.floor_divide),
    "remainder": _integer(jnp.remainder),
    "int": _truncate,
    "erf": erf,
}


def flat_index(shape: Sequence[int], indices: Sequence[Any]) -> Any:
    """Return row-major positions of clamped indices in an array of a shape."""
    flat: Any = jnp.zeros((), jnp.int64)
    for length, index in zip(shape, indices, strict=True):
        flat = flat * length + jnp.clip(index, 0, length - 1)
    return flat


def evaluate(text: str, nodes: Sequence[Node], s: Any, tables: Tables, at: RuleIndices, dtype: Any) -> list[Any]:
    """Evaluate expressions over the tables and dense arrays of the rule `text`."""
    _, marks, places = outline(text)
    dtypes = {"bool": jnp.bool_, "int": jnp.int64, "float": dtype}
    values: dict[Node, Any] = {}
    for node in order(nodes):
        args = [values[arg] for arg in node.args]
        if node.op in ("number", "literal"):
            value = jnp.asarray(node.payload, dtypes[node.kind])
        elif node.op == "s":
            value = s
        elif node.op in ("b", "h", "i", "j", "keys"):
            value = getattr(at, node.op)
        elif node.op == "dense":
            value = at.dense[next(n for n, x in enumerate(places) if x is node.payload)]
        elif node.op == "gather":
            slot = marks.index(node.payload)
            table = tables[slot] if tables[slot] is not None else at.others[slot]
            value = table.reshape(-1)[flat_index(table.shape, args)].astype(dtypes[node.kind])
        elif node.op == "float":
            value = args[0].astype(dtype)
        else:
            operation = SPECIAL.get(node.op) or getattr(jnp, node.op)
            value = operation(*args)
        values[node] = value
    return [values[node] for node in nodes]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@settings()
def value(text: str, node: Node, s: Any, tables: Tables, at: RuleIndices, visible: Any) -> Any:
    """Evaluate an expression in the score s, broadcast to its shape.

    The value is differentiable in s and in float tables. Derivatives are 0 where `visible` is not set or the value is
    −∞, whatever those of the rule are.
    """
    return jnp.broadcast_to(evaluate(text, [node], s, tables, at, s.dtype)[0], s.shape)


@settings()
def _value_jvp(text: str, node: Node, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (s, tables, at, visible), (ds, d_tables, *_) = primals, tangents
    primal = value(text, node, s, tables, at, visible)
    visible &= primal != -jnp.inf

    def slope(node: Node) -> Any:
        return jnp.where(visible, value(text, node, s, tables, at, visible), 0)

    d_ds, parts = partials(node)
    dot = slope(d_ds) * ds
    for leaf, part in parts.items():
        d_table = d_tables[outline(text)[1].index(leaf.payload)]
        indices = evaluate(text, leaf.args, s, tables, at, s.dtype)
        dot += slope(part) * d_table.reshape(-1)[flat_index(d_table.shape, indices)].astype(s.dtype)
    return primal, dot


value.defjvp(_value_jvp)


def keep_mask(p: float, seed: Any, at: RuleIndices) -> Any:
    """Return the mask of dropout, by the bits of `specification.random_bits`."""
    golden = jnp.uint64(GOLDEN)
    key = mix64(seed + golden)
    for index in (at.b, at.h, at.i):
        key = mix64((key ^ index.astype(jnp.uint64)) + golden)
    first, second = key.astype(jnp.uint32), (key >> jnp.uint64(32)).astype(jnp.uint32)
    j = at.j.astype(jnp.uint32) ^ (at.j >> 32).astype(jnp.uint32) * jnp.uint32(GOLDEN & 0xFFFFFFFF)
    x = j + first
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D) + second
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return (x ^ (x >> jnp.uint32(16))) >= jnp.uint32(int(p * 2**32))


def seed_of(static: int | None, x: Any) -> Any:
    """Return the seed as uint64.

    static: the seed, or None for an operand x of one integer, or of two 32-bit ones.
    """
    if static is not None:
        return jnp.asarray(np.uint64(static))
    if x.ndim:
        return x[0].astype(jnp.uint64) << jnp.uint64(32) | x[1].astype(jnp.uint64)
    return x.astype(jnp.uint64)
