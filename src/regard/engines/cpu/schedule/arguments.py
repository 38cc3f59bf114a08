"""The arguments of kernels, from a call's arrays and the table of operands."""

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.spec.tiles import KEYS, split_bits
from regard.rules import Program, Table
from regard.runtime.memory import address_of

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array | None]
"""Arrays by the names of operands; None, or no entry, where a call lacks one."""


def strides_of(spec: KernelSpec, arrays: Arrays) -> dict[str, int]:
    """Return the fields for the strides of the arrays that a call has."""
    values: dict[str, int] = {}
    for x in spec.operands.values():
        array = arrays.get(x.name)
        if array is not None and x.by_block:
            values |= zip(x.strides, array.strides[-len(x.axes) :], strict=False)
    return values


def layout_of(arrays: Iterable[Array | None]) -> tuple[Any, ...]:
    """Return dtypes, shapes and strides of arrays, as part of a cache key."""
    return tuple([None if x is None else (x.dtype, x.shape, x.strides) for x in arrays])  # faster than a generator


OWN_AXES = ("sum", "bins", "state")  # roles whose axes have lengths of their own


def check(spec: KernelSpec, arrays: Arrays) -> None:
    """Raise ValueError for an array that is missing, or does not fit its operand.

    A kernel would not read or write it as declared.
    """
    lengths: dict[tuple[str, bool], tuple[str, int]] = {}
    for name, x in spec.operands.items():
        array = arrays.get(name)
        if array is None:
            if spec.takes(x) and not (x.tested or name in spec.varying):
                raise ValueError(f"{name} must be an array with the axes {', '.join(x.axes)}, got none")
            continue
        step, size = array.itemsize, spec.type_of(name).size
        if array.ndim < len(x.axes) or step != size:
            raise ValueError(
                f"{name} must have the axes {', '.join(x.axes)} and {size} bytes for a number, "
                f"got shape {array.shape} of {array.dtype}"
            )
        for axis in range(-1, -1 - x.contiguous, -1):
            if array.shape[axis] > 1 and array.strides[axis] != step:
                raise ValueError(f"{name} must be contiguous along {x.axes[axis]}, got strides {array.strides}")
            step *= array.shape[axis]
        for length, measured in zip(array.shape[-len(x.axes) :], x.axes, strict=True):
            if x.role in OWN_AXES or measured not in ("head", "row", "key"):
                continue
            # Rows of shared operands are keys, and heads of theirs those of K and V.
            of = ("key", False) if measured == "row" and x.shared else (measured, x.shared and measured == "head")
            other, expected = lengths.setdefault(of, (name, length))
            if length != expected:
                raise ValueError(f"{name} must have {measured} {expected}, as {other}, got shape {array.shape}")


_tables: WeakKeyDictionary[Table, dict[Any, Array]] = WeakKeyDictionary()


def programs(p: Problem) -> list[tuple[str, Program]]:
    """Return the rules of a call, with the prefixes of their fields."""
    nodes = (("mask", p.mask_node), ("score", p.score_node))
    return [(prefix, Program.of([node])) for prefix, node in nodes if node is not None]


def arrays_of(p: Problem, own: Arrays) -> Arrays:
    """Return arrays by the names of operands: the problem's, and a call's own."""
    arrays = {"q": p.query, "k": p.key, "v": p.value, **own}
    if p.bias is not None:
        arrays["bias"] = p.dense(p.bias)
    if p.outside is not None:
        arrays["sink"] = p.outside
    for n, x in enumerate(dense_masks(p)):
        arrays[f"dense{n}"] = x
    return arrays


def field_values(p: Problem, spec: KernelSpec, arrays: Arrays) -> dict[str, int | float]:
    """Return the fields that a schedule stores: numbers, strides and rules."""
    j0 = p.origin[2]
    values: dict[str, int | float] = {
        "d": p.d, "d_v": p.d_v, "n_k": p.n_k, "shift": j0 % KEYS, "first_tile": j0 // KEYS, "j": j0, "keys": p.keys,
        "scale": float(p.scale), "row_head": p.n_q, "split_bits": split_bits(p.d, p.dtype.itemsize),
        "threshold": int(p.dropout * 2**32), "keep_scale": float(p.compute.type(1 / (1 - p.dropout))),
        **strides_of(spec, arrays),
    }  # fmt: skip
    for rule in (spec.mask, spec.score):
        if rule is None:
            continue
        values |= {f"{rule.prefix}_number{n}": number for n, number in enumerate(rule.program.numbers)}
        for n, table in enumerate(rule.program.tables):
            name = f"{rule.prefix}_table{n}"
            values[name] = address_of(table_array(table, p.compute))
            values |= {f"{name}_size{axis}": length for axis, length in enumerate(table.shape)}
    return values


def pack_fields(names: Sequence[str], values: Mapping[str, int | float]) -> "array[int]":
    """Pack the fields with these names into one array of words; 0 for those without a value."""
    numbers = [values.get(name, 0) for name in names]
    layout = "".join("d" if isinstance(x, float) else "q" for x in numbers)
    return array("Q", struct.pack(layout, *numbers))


def base_of(x: Array | None) -> int:
    """Return the address of an array; 0 for None."""
    return 0 if x is None else address_of(x)


def table_array(table: Table, real: Any) -> Array:
    """Return the array of a table as kernels read it: the call's float type, or int64."""
    cached = _tables.setdefault(table, {})
    dtype = np.dtype(real if table.kind == "float" else np.int64)
    if dtype not in cached:  # one for all threads: schedules store its address
        cached.setdefault(dtype, np.ascontiguousarray(table.array, dtype))
    return cached[dtype]


def dense_masks(p: Problem) -> list[Array]:
    """Return the dense masks (..., h, n_q, n_k) as bytes; views."""
    return [] if p.mask_node is None else [p.dense(x.view(np.int8)) for x in Program.of([p.mask_node]).dense]
