"""The one cache of calls, by their signatures.

A call with the signature of an earlier one skips its checks, the choice of an engine and the plan. CPU time of a call
of 16 queries, 8 heads, d = 64, float32, in µs (`lab/fast-path.md` says how it was measured):

| Cached by an earlier call | NumPy, plain | causal | PyTorch, plain | causal |
|---|---|---|---|---|
| nothing | 651 | | | |
| the plan | 123 | 136 | 307 | 279 |
| and the checks | 98 | 103 | 240 | 215 |
| the whole call | 23 | 25 | 36 | 40 |

A signature is everything about a call except the contents and addresses of query, key and value. It includes the number
of threads and REGARD_CPU. A call without a signature is not cached: its checks read an array. Each thread has a store
of its own, because a cached call has scratch memory. NumPy arrays and PyTorch tensors share the signature and the
store. They differ in how operands are described, how addresses are read and how outputs are allocated. A dense mask, a
bias or a sink that is a tensor counts among the operands.

Of a rule its form counts (`regard.rules.forms`): a padding mask of other lengths has the same signature. A call enters
the store when rules of these forms were in an earlier call. So rules with other numbers in each call do not fill it.
"""

import math
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.core.layout import Layout
from regard.core.options import DEFAULTS, RULES
from regard.core.problem import Problem
from regard.engines import PreparedCall
from regard.rules import Mask, Score, Table, form_of, tables_of
from regard.rules.masks import Rule
from regard.runtime import memory
from regard.runtime.bounded import insert
from regard.runtime.memory import address_of
from regard.runtime.threads import num_threads

Array = np.ndarray[Any, np.dtype[Any]]
Signature = tuple[Any, ...]
NOTHING = object()
CACHED = {
    "mask": Mask, "score": Score, "causal": bool, "scale": float, "dropout": float, "offset": int, "origin": tuple,
    "layout": str,
}  # fmt: skip
"""The options that signatures may have, with the type of their values."""
VARYING = ("bias", "mask", "sink")
"""The options that may be arrays of each call, in the order of a prepared call's addresses."""
SIZE = 192  # entries of a thread; a call on tensors with a derivative takes three
_thread = threading.local()
# The mapping inside of os.environ: a missing name raises no exception, which takes 30 µs in cold caches.
_environment: Any = getattr(os.environ, "_data", os.environ)
_name = os.environ.encodekey("REGARD_CPU") if hasattr(os.environ, "_data") else "REGARD_CPU"


@dataclass(slots=True)
class Entry:
    """The checked problem of one signature, and the call itself.

    layout, fields: of the problem (see `Problem.from_fields`). call: runs the call at other addresses; None if it was
    not `tried`, or cannot be cached.
    """

    layout: Layout | None = None
    fields: dict[str, Any] | None = None
    call: Any = None
    tried: bool = False


def signature(operands: tuple[Any, ...] | None, options: Mapping[str, Any]) -> Signature | None:
    """Return the signature of a call; None if its checks or results depend on more.

    operands: dtypes, shapes and strides, as of `array_operands`. options: those given, in the order in which they are
    given. One that `CACHED` lacks must have its default.
    """
    if operands is None:
        return None
    parts: tuple[Any, ...] = ()
    for name, x in options.items():
        kind, default = type(x), DEFAULTS.get(name, NOTHING)
        if x is default or (kind is float and x == default):
            continue
        if kind is not CACHED.get(name):
            return None
        if kind is Mask or kind is Score:
            if x.foreign or x.dense:
                return None
            x = form_of(x.node), x.requires
        elif (kind is float and not x) or (kind is tuple and not all(type(n) is int for n in x)):  # 0.0 equals −0.0
            return None
        parts += name, x
    return operands, parts, num_threads(), _environment.get(_name)


def array_operands(query: Any, key: Any, value: Any) -> tuple[Any, ...] | None:
    """Return dtypes, shapes and strides of NumPy arrays; None for other types."""
    if not type(query) is type(key) is type(value) is np.ndarray:
        return None
    return (
        query.dtype, query.shape, query.strides, key.dtype, key.shape, key.strides,
        value.dtype, value.shape, value.strides,
    )  # fmt: skip


def arrays_in(options: Mapping[str, Any]) -> dict[str, Array]:
    """Return the options of `VARYING` that are NumPy arrays."""
    return {name: x for name in VARYING if type(x := options.get(name)) is np.ndarray}


def with_arrays(operands: tuple[Any, ...] | None, options: Mapping[str, Any]) -> Signature | None:
    """Return the signature of a call with arrays or a seed among its options; None for other calls.

    operands: as of `array_operands`. The entry has no problem, which would hold arrays and seed.
    """
    arrays = arrays_in(options)
    if operands is None or not (arrays or options.get("dropout")):
        return None
    for name, x in arrays.items():
        if x.dtype != (bool if name == "mask" else operands[0]) or (name == "sink" and x.ndim != 1):
            return None
        operands += name, x.shape, x.strides
    return signature_beside(arrays, operands, options)


def signature_beside(
    arrays: Collection[str], operands: tuple[Any, ...] | None, options: Mapping[str, Any]
) -> Signature | None:
    """Return the signature of a call if its rules have forms that were met, None for other calls.

    arrays: the options that count among the operands. The seed is given to each run, too.
    """
    seed = options.get("seed")
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**63):
        return None
    others = options
    if arrays or "seed" in options:
        others = {name: x for name, x in options.items() if name not in arrays and name != "seed"}
    signed, mask, score = signature(operands, others), others.get("mask"), others.get("score")
    if signed is None or (mask is None and score is None):
        return signed
    unchecked = bool(arrays or options.get("dropout"))  # the checks record rules of other calls
    return signed if met(mask, score, record=unchecked) else None


def entries() -> dict[Signature | None, Entry]:
    """Return the store of this thread."""
    try:
        found: dict[Signature | None, Entry] = _thread.entries
    except AttributeError:
        found = _thread.entries = {}
    return found


def find(signature: Signature | None) -> Entry | None:
    """Return the entry of a signature in this thread, if there is one."""
    try:
        found: Entry | None = _thread.entries.get(signature)
    except AttributeError:
        found = None
    return found


def store(signature: Signature, entry: Entry) -> None:
    """Add an entry, and drop the oldest of more than SIZE."""
    insert(entries(), signature, entry, SIZE)


def met(*rules: Rule | None, record: bool = False) -> bool:
    """Return whether rules of these forms were in an earlier call, and record them if asked to."""
    forms = [form_of(rule.node) for rule in rules if rule is not None]
    earlier = all(form.met for form in forms)
    if record:
        for form in forms:
            form.met = True
    return earlier


class CachedCall:
    """A call of one signature on NumPy arrays, which computes the output.

    run: the engine's prepared call. shape: of the output, as the caller sees it. arrays: the names of `arrays_in` its
    options.
    """

    def __init__(self, run: PreparedCall, p: Problem, shape: tuple[int, ...], arrays: Collection[str]):
        self.run, self.shape, self.dtype, self.compute, self.arrays = run, shape, p.dtype, p.compute, tuple(arrays)
        self.new = memory.empty if math.prod(shape) * p.dtype.itemsize >= memory.LARGE else np.empty
        self.lse = np.empty(p.shape(p.n_q), p.compute)  # never returned
        self.lse_address = address_of(self.lse)

    def __call__(self, query: Array, key: Array, value: Array, options: Mapping[str, Any]) -> Array:
        out = self.new(self.shape, self.dtype)
        addresses = [address_of(out), self.lse_address, address_of(query), address_of(key), address_of(value)]
        if not self.arrays:
            self.run(addresses, seed=options.get("seed"), tables=tables_in(options))
            return out
        arrays = {name: options[name] for name in self.arrays}
        if "sink" in arrays:
            arrays["sink"] = np.ascontiguousarray(arrays["sink"], self.compute)
        self.run([*addresses, *map(address_of, arrays.values())], seed=options.get("seed"), tables=tables_in(options))
        return out


def tables_in(options: Mapping[str, Any]) -> tuple[Table, ...]:
    """Return the tables that the rules of a call read."""
    nodes = [x.node for name in RULES if isinstance(x := options.get(name), Rule)]
    return tables_of(*nodes) if nodes else ()
