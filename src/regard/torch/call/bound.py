"""The problem of a call once its tensors are arrays: checked and prepared here alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from regard.core import checks
from regard.core.layout import Layout
from regard.core.options import ARRAYS, RULES
from regard.core.problem import Differential, Outputs, Problem, device_of
from regard.core.statistics import ENTROPY, LSE, Mass, each_array
from regard.core.tensors import array, converted, on_device
from regard.engines import Engine, choose
from regard.ops.normalization import problem_from
from regard.rules import Score, Table, Traced, reads, tables_of
from regard.rules.expression import make, substitute
from regard.torch.call.record import TensorCall
from regard.torch.tensors.tables import TensorTable, bind

RESULTS = {
    "forward": {}, "backward": {"outputs": 0, "gradients": 1}, "jvp": {"entropies": 1},
    "backward_jvp": {"outputs": 0, "gradients": 1}, "jvp_jvp": {"entropies": 1},
}  # fmt: skip
"""The results of each function of an engine, as `checks.fits` counts it."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class ArrayCall:
    """A call with its arrays: the problem, its engine, and the tables by input."""

    call: TensorCall
    problem: Problem
    layout: Layout
    engine: Engine
    tables: dict[Any, Table] = field(default_factory=dict)

    @staticmethod
    def of(call: TensorCall, arrays: Sequence[Array], function: str) -> "ArrayCall":
        """Check a call of an engine's `function`, and prepare it; a cached call is checked."""
        if call.cached is not None and call.cached.fields is not None:
            return call.cached.on(call, arrays, function)
        if call.ranks is not None:
            return call.ranks.on(call, arrays, function)
        given = dict(zip(call.inputs, arrays, strict=True))
        options, tables = bound(call, given)
        query, key = given["query"], given["key"]
        value = identity(query, key, options["layout"]) if call.weights else given["value"]
        if call.folded:
            leads = (x.shape[:-3] for x in (query, key, value))
            options |= unfolded(options, np.broadcast_shapes(*leads), call.folded)
        p = problem_from(query, key, value, **options)
        if constants := constants_of(call, p.score, tables):
            p = replace(p, constants=constants)
        weights = p.pairs if call.before_weights and function == "forward" else 0
        engine = choose(p, call.engine, function)
        checks.fits(p, weights=weights, **RESULTS[function])
        return ArrayCall(call, p, Layout.of(query, options["layout"]), engine, tables)

    def forward(self) -> list[Array]:
        """Compute the results of the call."""
        p = self.problem
        outputs, found = self.engine.forward(p, None, p.new_low() if self.call.low else None)
        assert outputs.out is not None
        assert outputs.lse is not None
        if self.call.weights:
            tile = converted(self.engine.weights(p, outputs.lse, range(p.n_q), range(p.n_k)), p.dtype)
            return self.to_caller(Outputs(tile, outputs.lse, None))
        flat: list[Array] = []
        for s, x in self.layout.seen(found).items():
            if s not in (LSE, ENTROPY):
                each_array(x, flat.append)
        if self.call.low:
            low = np.zeros_like(outputs.out) if outputs.low is None else outputs.low
            flat.append(self.layout.from_bhnd(low))
        return [*self.to_caller(outputs), *flat]

    def to_caller(self, x: Outputs) -> list[Array]:
        """Return out, lse and, if observed, entropy in the caller's layout."""
        turned: Any = self.layout.outputs(x._replace(out=None) if self.call.weights else x)
        out: Any = x.out if self.call.weights else turned.out
        return [out, turned.lse, *([turned.entropy] if "entropy" in self.call.results else [])]

    def outputs(self, out: Array | None, lse: Array | None, entropy: Array | None, low: Array | None = None) -> Outputs:
        """Convert outputs, their cotangents or tangents to the layout of the problem."""
        rows = self.layout.rows_to_bhn
        turn = rows if self.call.weights else self.layout.to_bhnd
        lse, entropy = (None if x is None else rows(x) for x in (lse, entropy))
        out, low = (None if x is None else turn(x) for x in (out, low))
        return Outputs(out, lse, entropy, low)

    def differential(self, arrays: Sequence[Array | None]) -> Differential:
        """Return tangents, given in the order of `floats`, as a `Differential`."""
        given = dict(zip(self.call.floats, arrays, strict=True))
        q, k, v = (given.get(name) for name in ("query", "key", "value"))
        tables = {self.tables[x]: t for x, t in given.items() if isinstance(x, TensorTable) and t is not None}
        q, k, v = (None if x is None else self.layout.to_bhnd(x) for x in (q, k, v))
        return Differential(q, k, v, tables=tables, **{name: given.get(name) for name in ARRAYS})

    def gradients(self, g: Differential) -> list[Array | None]:
        """Return the arrays of a differential in the order of `floats`."""
        found: list[Array | None] = []
        for x in self.call.floats:
            if isinstance(x, TensorTable):
                found.append(g.tables.get(self.tables[x]))
            else:
                part = getattr(g, x)
                found.append(
                    self.layout.from_bhnd(part) if x in ("query", "key", "value") and part is not None else part
                )
        return found


def bound(call: TensorCall, given: dict[Any, Array]) -> tuple[dict[str, Any], dict[Any, Table]]:
    """Return the options of a call with its arrays, and its tables by input."""
    options = dict(call.options)
    tables: dict[Any, Table] = {}
    values = {id(x): array for x, array in given.items() if not isinstance(x, str)}
    for name in RULES:
        if options[name] is not None and values:
            options[name], found = bind(options[name], values)
            tables |= found
    for name in (*ARRAYS, "offset"):
        if name in given:
            options[name] = given[name]
    if "seed" in given:
        seed = given["seed"]
        options["seed"] = seed.item() if seed.size == 1 else seed
    return options, tables


def constants_of(call: TensorCall, score: Score | None, tables: dict[Any, Table]) -> frozenset[Any]:
    """Return what needs no gradient of a problem: a bias, and tables of the score.

    tables: those of tensors, by input. Other tables are constants.
    """
    every = () if score is None else tables_of(score.node)
    return frozenset(x for x in every if x not in tables.values()).union(tables.get(x, x) for x in call.constants)


class RankCallMaker(Protocol):
    """Makes calls of one rank of several."""

    def on(self, call: TensorCall, arrays: Sequence[Array], function: str) -> ArrayCall: ...


def identity(query: Array, key: Array, layout: str) -> Array:
    """Return the identity over keys as a value; the output is then the weights.

    It has the layout of the key.
    """
    first, device = layout == "bnhd", device_of(query)
    n = key.shape[-3] if first else key.shape[-2]
    if device is None:
        same = np.eye(n, dtype=query.dtype)
    else:
        same = array(torch.eye(n, dtype=on_device(query).dtype, device=device))
    return np.broadcast_to(same[:, None] if first else same, (*key.shape[:-1], n))


def unfolded(options: dict[str, Any], lead: tuple[int, ...], folded: int) -> dict[str, Any]:
    """Return the rules for a batch with leading axes that `vmap` added.

    b becomes its remainder by the size of the other axes, counted from the origin.
    """
    first, size = options["origin"][0], math.prod(lead[folded:])

    def inner(rule: Any) -> Any:
        if rule is None or "b" not in reads(rule.node):
            return rule
        for need in rule.requires:
            if need.axis == "b":
                need.check(first, first + size)
        b = Traced(make("b", "int"))
        remainder = (b - first) % size + first
        rest = tuple(need for need in rule.requires if need.axis != "b")
        return replace(rule, node=substitute(rule.node, {b.node: remainder.node}), requires=rest)

    observe = tuple([type(s)(inner(s.of)) if isinstance(s, Mass) else s for s in options["observe"]])
    return {name: inner(options[name]) for name in RULES} | {"observe": observe}
