"""Tasks of primitives: the data in a compiled program that engines compute from.

Nothing here depends on JAX: operands and results are NumPy views of its buffers.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from regard.core.options import ARRAYS, RULES
from regard.core.problem import Differential, Outputs, Problem, collapse, compute_dtype
from regard.core.statistics import KINDS, Mass, Sizes, Statistic, statistic
from regard.engines import PreparedCall, choose
from regard.rules import Form, Mask, Node, Score, Table, form_of, reads, rule_from_text, tables_of
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
Axes = tuple[int | None, ...]
Shape = tuple[int, ...]
Arrays = Mapping[str, Array]
Function = Callable[["PrimitiveTask", Arrays, Arrays], Iterable[tuple[str, Array]]]

INPUTS = ("query", "key", "value", *ARRAYS)
OUTPUTS = ("out", "lse", "entropy")
MATRICES = ("query", "key", "value", "out", "low")  # arrays that depend on `layout`
SUM = "sum."  # before the names of sums that go on from step to step
CARRIED = frozenset({*RULES, *ARRAYS, "positions_first", "observe"})
"""The optional fields of a `Problem` that a compiled program carries besides numbers."""

CACHED_BYTES = 2**22  # maximum size of tables that are compared by content, so that a rule is made once


@dataclass(frozen=True)
class StaticCall:
    """A call of attention without its arrays.

    inputs: the names of its arrays in order; the first `varying` of them may be differentiated. mask, score: rules as
    text (see `rule_text`). Their tables and dense arrays are inputs named "mask.table0", "score.table1", "mask.dense0".
    numbers: names and values of those fields of its problem that are numbers and not 0, except the seed.
    offset, origin, seed: None if they are inputs; offset holds one number, or one for each batch element. observe:
    names and parameters of statistics. That of `mass` is a rule as text, with arrays named "mass2.table0" if it is the
    third. low: forward returns what rounding takes from out, too. spread: axes of a `shard_map` and the number of their
    devices, over which the sequence is sharded.
    """

    inputs: tuple[str, ...]
    varying: int
    mask: str | None
    score: str | None
    scale: float
    numbers: tuple[tuple[str, float], ...]
    seed: int | None
    offset: tuple[int, ...] | None
    origin: tuple[int, int, int] | None
    layout: str
    observe: tuple[tuple[str, Any], ...]
    engine: str | None
    low: bool = False
    spread: tuple[tuple[str, ...], int] | None = None

    @property
    def dropout(self) -> float:
        return dict(self.numbers).get("dropout", 0.0)

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The inputs that may vary."""
        return self.inputs[: self.varying]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that may carry a cotangent or a tangent."""
        return OUTPUTS if ("entropy", None) in self.observe else OUTPUTS[:2]

    @property
    def results(self) -> tuple[str, ...]:
        """The results of forward: outputs, then arrays of statistics, "0", "1.values", ..., and low."""
        others = [places(n, name) for n, (name, _) in enumerate(self.observe) if name not in OUTPUTS]
        last = ("low",) if self.low else ()
        return (*self.outputs, *(place for statistic in others for place in statistic), *last)

    def statistic(self, n: int, x: Mapping[str, Array]) -> Statistic:
        """Return the n-th observed statistic."""
        s = statistic(*self.observe[n])
        return type(s)(rule(Mask, f"{s.name}{n}", s.of, x)[0]) if isinstance(s, Mass) else s


@dataclass(frozen=True)
class SequenceStep:
    """A step of a call whose queries and keys lie on several devices, see `regard.jax.parts`.

    rows, keys: the numbers of the whole call. start, stop: the positions that pass by: keys, and rows where gradients
    of keys are computed. first, last: there is no step before, or after. gradients: "" in forward and its tangent,
    "query" or "key"; "check" before the first step of these, and "whole" after the last, from the sums of all devices.
    sums: the names of the arrays that go on to the next step. returns: those of the results of the task.
    """

    rows: int
    keys: int
    start: int
    stop: int
    first: bool
    last: bool
    gradients: str
    sums: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrimitiveTask:
    """The computation of a primitive, and its operands.

    kind: "forward", "weights", "backward", "jvp", "backward_jvp" or "jvp_jvp". operands: the inputs of the call, then
    outputs of forward ("out"), cotangents ("ct.out"), tangents ("t.query", "t.ct.out") and others ("s.query"). sizes:
    of the axes that `vmap` took away, outermost first. axes: for each operand, its dimension along each of those, None
    if it has none. wrt: the inputs to compute gradients of, with such axes; other results have them first. step: if it
    is one step of the computation on one device; other operands are then "rank" and "sum.query".
    """

    kind: str
    call: StaticCall
    operands: tuple[str, ...]
    axes: tuple[Axes, ...]
    sizes: Shape = ()
    wrt: tuple[tuple[str, Axes], ...] = ()
    step: SequenceStep | None = None

    @cached_property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> "PrimitiveTask":
        """Return the task that `text` describes."""
        fields = frozen(json.loads(text))
        call, step = StaticCall(**fields.pop("call")), fields.pop("step")
        return PrimitiveTask(call=call, step=step and SequenceStep(**step), **fields)

    @cached_property
    def results(self) -> tuple[str, ...]:
        if self.step is not None:
            return (*(f"{SUM}{name}" for name in self.step.sums), "turn", *self.step.returns)
        if self.kind == "forward":
            return self.call.results
        if self.kind == "weights":
            return ("weights",)
        return tuple(name for name, _ in self.wrt) or self.call.outputs

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.operands, values, strict=True))

    @cached_property
    def axes_of(self) -> dict[str, Axes]:
        return dict(zip(self.operands, self.axes, strict=True))

    @cached_property
    def merged(self) -> bool:
        """True if elements of a `vmap` may be computed together, along leading axes."""
        texts = (self.call.mask, self.call.score, *(of for name, of in self.call.observe if name == Mass.name))
        rules = [outline(text)[0] for text in texts if text is not None]

        def alone(name: str) -> bool:
            return ".table" in name or name.rpartition(".")[2] in ("sink", "seed", "origin")

        every = (*zip(self.operands, self.axes, strict=True), *self.wrt)
        same = all(axis is None for name, axes in every if alone(name) for axis in axes)
        return same and not self.call.dropout and "b" not in reads(*rules)

    def shapes(self, given: Mapping[str, tuple[Shape, Any]]) -> list[tuple[Shape, np.dtype[Any]]]:
        """Return the shape and dtype of each result, from those of the operands."""
        base = {name: without(given[name][0], self.axes_of[name]) for name in self.call.inputs}
        dtype = np.dtype(given["query"][1])
        swap = self.call.layout == "bnhd"
        q, k, v = (transposed(base[name], swap) for name in ("query", "key", "value"))
        lead = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
        rows = (*lead, *q[-3:-1])
        compute = compute_dtype(dtype)
        sizes = Sizes(lead, q[-3], k[-3], q[-2], k[-2])

        def of(name: str) -> tuple[Shape, np.dtype[Any]]:
            if name in ("out", "low"):
                return transposed((*rows, v[-1]), swap), dtype
            if name == "weights":
                return (*rows, k[-2]), dtype
            if name in OUTPUTS:
                return rows, compute
            number, _, part = name.partition(".")
            s = statistic(*self.call.observe[int(number)])
            shape = s.shapes(sizes)[s.parts.index(part)]
            return shape, np.dtype(np.int64) if part in s.integers else compute

        if self.wrt:
            return [(with_axes(base[n], self.sizes, axes), np.dtype(given[n][1])) for n, axes in self.wrt]
        return [((*self.sizes, *shape), kind) for shape, kind in map(of, self.results)]


def places(n: int, name: str) -> tuple[str, ...]:
    """Return the names of the arrays of the n-th statistic."""
    return tuple(f"{n}.{part}" if part else str(n) for part in KINDS[name].parts)


def frozen(x: Any) -> Any:
    """Return x with tuples for lists, at any depth."""
    if isinstance(x, dict):
        return {name: frozen(value) for name, value in x.items()}
    return tuple(map(frozen, x)) if isinstance(x, list) else x


def transposed(shape: Shape, swap: bool) -> Shape:
    return (*shape[:-3], shape[-2], shape[-3], shape[-1]) if swap else shape


def without(shape: Shape, axes: Axes) -> Shape:
    """Return a shape without the axes that `vmap` took away."""
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def with_axes(shape: Shape, sizes: Shape, axes: Axes) -> Shape:
    """Return a shape with the axes that `vmap` took away; the inverse of `without`."""
    rest = iter(shape)
    placed = {axis: size for axis, size in zip(axes, sizes, strict=True) if axis is not None}
    return tuple(placed[n] if n in placed else next(rest) for n in range(len(shape) + len(placed)))


def front(x: Array, axes: Axes) -> Array:
    """Return a view with the axes of `vmap` first, of size 1 if absent."""
    there = [axis for axis in axes if axis is not None]
    x = np.moveaxis(x, there, range(len(there)))
    return x[(*(None if axis is None else slice(None) for axis in axes), ...)]


# Rules as text


@lru_cache(maxsize=1024)
def outline(text: str) -> tuple[Node, tuple[Table, ...], tuple[Array, ...]]:
    """Return the expression of a rule over placeholders, its tables and dense arrays."""
    steps, _ = json.loads(text)
    count = 1 + max((slot for op, *_, slot in steps if op in ("gather", "dense")), default=0)
    tables, dense = tuple(Table([0.0]) for _ in range(count)), tuple(np.zeros((), bool) for _ in range(count))
    return rule_from_text(text, tables, dense), tables, dense


@lru_cache(maxsize=64)
def _cached_rule(kind: Any, text: str, contents: tuple[tuple[str, Shape, bytes], ...]) -> Any:
    tables = [Table(np.frombuffer(data, named(dtype)).reshape(shape)) for dtype, shape, data in contents]
    return kind(rule_from_text(text, tables, ()), "rule"), tuple(tables)


def named(dtype: str) -> np.dtype[Any]:
    """Return a dtype by name, bfloat16 included."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def rule(kind: Any, prefix: str, text: str | None, x: Mapping[str, Array]) -> tuple[Any, tuple[Table, ...]]:
    """Return a rule with the arrays of this call, and its tables.

    Small rules are cached by content.
    """
    if text is None:
        return None, ()
    arrays = series(x, f"{prefix}.table")
    dense = series(x, f"{prefix}.dense")
    if not dense and sum(a.nbytes for a in arrays) <= CACHED_BYTES:
        cached: tuple[Any, tuple[Table, ...]] = _cached_rule(
            kind, text, tuple((a.dtype.name, a.shape, a.tobytes()) for a in arrays)
        )
        return cached
    tables = tuple(map(Table, arrays))
    return kind(rule_from_text(text, tables, [a.astype(bool, copy=False) for a in dense]), "rule"), tables


def series(x: Mapping[str, Any], prefix: str) -> list[Any]:
    """Return the values named prefix0, prefix1, ..."""
    values: list[Any] = []
    while f"{prefix}{len(values)}" in x:
        values.append(x[f"{prefix}{len(values)}"])
    return values


# Running


def run(task: PrimitiveTask, operands: Sequence[Array], results: Sequence[Array]) -> None:
    """Compute a task into `results`, arrays with the caller's order of axes."""
    apply(compute, task, task.named(operands), dict(zip(task.results, results, strict=True)))


def apply(function: Function, task: PrimitiveTask, x: Arrays, y: Arrays) -> None:
    """Call a function on operands and results (..., h, n, d), and store what it returns by name.

    The function is called for all elements of a `vmap` together, or for one after the other.
    """
    x = as_called(task, x, task.axes_of)
    y = as_called(task, y, dict(task.wrt) or dict.fromkeys(y, tuple(range(len(task.sizes)))))
    if not task.sizes:
        for name, value in function(task, x, y):
            if value is not y[name]:
                y[name][...] = value
    elif task.merged:
        merge(function, task, x, y)
    else:
        one_by_one(function, task, x, y)


def as_called(task: PrimitiveTask, x: Arrays, axes: Mapping[str, Axes]) -> dict[str, Array]:
    """Return views (*sizes, ..., h, n, d) of arrays, of size 1 along axes of `vmap` that they lack.

    Sums of a step have that order already.
    """
    if not task.sizes and task.call.layout != "bnhd":
        return dict(x)

    def view(name: str, a: Array) -> Array:
        if name.startswith(SUM):
            return a
        a = front(a, axes.get(name, ())) if task.sizes else a
        return transpose(name, a) if task.call.layout == "bnhd" else a

    return {name: view(name, a) for name, a in x.items()}


def one_call(task: PrimitiveTask, x: Arrays) -> dict[str, Array]:
    """Return the operands of a function that `apply` calls, the first time."""
    x = as_called(task, x, task.axes_of)
    if not task.sizes:
        return x
    return leading(task, x) if task.merged else {name: pick(a, (0,) * len(task.sizes)) for name, a in x.items()}


def pick(a: Array, index: Shape) -> Array:
    """Return the part of an array for an element of a `vmap`."""
    at: Any = tuple(n if size > 1 else 0 for n, size in zip(index, a.shape, strict=False))
    part: Array = a[(*at, ...)]
    return part


def one_by_one(function: Function, task: PrimitiveTask, x: Arrays, y: Arrays) -> None:
    """Compute the elements of a `vmap` one after the other."""
    count = len(task.sizes)
    totals: dict[str, Array] = {}
    for index in np.ndindex(task.sizes):
        mine = {name: pick(a, index) for name, a in y.items() if a.shape[:count] == task.sizes}
        for name, value in function(task, {name: pick(a, index) for name, a in x.items()}, mine):
            if name in mine:
                if value is not mine[name]:
                    mine[name][...] = value
            else:  # summed over the elements that share it
                if name not in totals:
                    totals[name] = np.zeros(y[name].shape, compute_dtype(value.dtype))
                pick(totals[name], index)[...] += value
    for name, a in y.items():
        if name in totals:
            a[...] = totals[name]
        elif 0 in task.sizes:
            a[...] = 0


ADDRESSES = {
    "forward": ("out", "lse", "query", "key", "value", "low", "bias", "sink"),
    "backward": (
        "out", "lse", "ct.out", "query", "key", "value", "g.query", "g.key", "g.value", "low", "bias", "sink", "g.sink",
    ),
}  # fmt: skip
"""The arrays of an engine's prepared function in order (see `Guarded.prepare`); gradients are "g.query"."""


@dataclass(frozen=True)
class PreparedTask:
    """A small call of forward or backward that is run again at other addresses.

    order: the positions of its arrays among results and operands. read: those of operands whose values each run reads,
    the seed and the tables of rules. forms: of its rules.
    """

    task: PrimitiveTask
    run: PreparedCall
    order: tuple[int, ...]
    read: tuple[int, ...]
    forms: tuple[Form, ...]

    @staticmethod
    def of(task: PrimitiveTask, operands: Sequence[Array]) -> "PreparedTask | None":
        """Prepare a task, if its engine can run it again."""
        if task.kind not in ADDRESSES or task.sizes or task.step is not None:
            return None
        read = tuple(n for n, name in enumerate(task.operands) if name == "seed" or ".table" in name)
        results = task.results if task.kind == "forward" else [f"g.{name}" for name in task.results]
        names = (*results, *(name for n, name in enumerate(task.operands) if n not in read))
        order = [name for name in ADDRESSES[task.kind] if name in names]
        whole = {"query", "key", "value"} if task.kind == "forward" else {"ct.out", "g.query", "g.key", "g.value"}
        if len(order) < len(names) or not whole.issubset(order):
            return None
        swap = task.call.layout == "bnhd"
        if task.kind == "backward" and (swap or ("sink" in order) != ("g.sink" in order)):
            return None  # gradients are (..., h, n, d) without gaps
        p, _ = problem(task, {n: transpose(n, a) if swap else a for n, a in task.named(operands).items()})
        if p.sink is not None and p.sink.dtype != p.compute:
            return None
        run = choose(p, task.call.engine, task.kind).prepare(p, task.kind, ["low"] * ("low" in names))
        places = [[*results, *task.operands].index(name) for name in order]
        forms = tuple(form_of(node) for node in (p.mask_node, p.score_node) if node is not None)
        return None if run is None else PreparedTask(task, run, tuple(places), read, forms)

    def __call__(self, addresses: Sequence[int], values: Sequence[Array]) -> bool:
        """Run the task, and return True; False for numbers that only the task itself computes.

        addresses: of results and operands. values: of the operands that are read.
        """
        x = {self.task.operands[n]: a for n, a in zip(self.read, values, strict=True)}
        seed = seed_of(x.pop("seed")) if "seed" in x else None
        tables = None
        if x:
            call = self.task.call
            rules = rule(Mask, "mask", call.mask, x)[0], rule(Score, "score", call.score, x)[0]
            nodes = [each.node for each in rules if each is not None]
            if tuple(map(form_of, nodes)) != self.forms:
                return False
            tables = tables_of(*nodes)
        return self.run([addresses[n] for n in self.order], seed=seed, tables=tables)


def transpose(name: str, a: Array) -> Array:
    return a.swapaxes(-2, -3) if name.rpartition(".")[2] in MATRICES else a


TRAILING = {
    "query": 3, "key": 3, "value": 3, "bias": 3, "offset": 0, "out": 3, "low": 3, "lse": 2, "entropy": 2, "weights": 3,
}  # fmt: skip
"""The dimensions of arrays behind the call's leading ones."""


def pad(task: PrimitiveTask, lead: int, name: str, a: Array) -> Array:
    """Return a view with the axes of `vmap` before `lead` leading dimensions; of one without those, without both."""
    count, last = len(task.sizes), name.rpartition(".")[2]
    keep = 3 if last.startswith("dense") else TRAILING.get(last)
    if name.startswith(SUM):
        return a
    if keep is None:
        return a.reshape(a.shape[count:])
    return a.reshape(*a.shape[:count], *(1,) * (lead + keep + count - a.ndim), *a.shape[count:])


def lead_of(task: PrimitiveTask, x: Arrays) -> int:
    """Return the number of leading dimensions of one element."""
    return max(x[name].ndim - len(task.sizes) - 3 for name in ("query", "key", "value"))


def leading(task: PrimitiveTask, x: Arrays) -> dict[str, Array]:
    """Return operands whose axes of `vmap` are leading dimensions of the call.

    An input gets every one of its tangents and its gradient.
    """
    x, count, lead = dict(x), len(task.sizes), lead_of(task, x)
    wanted = {
        name: [1 if axis is None else n for axis, n in zip(axes, task.sizes, strict=True)] for name, axes in task.wrt
    }
    alike = np.broadcast_shapes(*(x[name].shape[:count] for name in ("query", "key", "value"))) == task.sizes
    for name in task.call.differentiable:
        kin = [n for n in (name, f"t.{name}", f"s.{name}") if n in x]
        shape = np.broadcast_shapes(wanted.get(name, ()), *(x[n].shape[:count] for n in kin))
        if name == "query" and not alike:
            shape = task.sizes
        for n in kin:
            x[n] = np.broadcast_to(x[n], (*shape, *x[n].shape[count:]))
    return {name: pad(task, lead, name, a) for name, a in x.items()}


def merge(function: Function, task: PrimitiveTask, x: Arrays, y: Arrays) -> None:
    """Compute all elements of a `vmap` in one call, as leading dimensions."""
    into = {name: pad(task, lead_of(task, x), name, a) for name, a in y.items()}
    for name, value in function(task, leading(task, x), into):
        target = into[name]
        if value is not target:
            target[...] = collapse(value.reshape((1,) * (target.ndim - value.ndim) + value.shape), target.shape)


def compute(task: PrimitiveTask, x: Mapping[str, Array], y: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """Return the results of a task for one element, by name.

    Results are the arrays of `y` if the engine could write into them.
    """
    call = task.call
    p, tables = problem(task, x)
    engine = choose(p, call.engine, task.kind)
    shapes = dict(zip(OUTPUTS, (p.shape(p.n_q, p.d_v), p.shape(p.n_q), p.shape(p.n_q)), strict=True))
    into = Outputs(*(y[name] if name in y and y[name].shape == shape else None for name, shape in shapes.items()))

    def gradients(g: Differential) -> list[tuple[str, Array]]:
        gradients_of = {name: getattr(g, name) for name in INPUTS}
        gradients_of |= {name: g.tables[t] for name, t in tables.items() if t in g.tables}
        return [(name, gradients_of[name]) for name, _ in task.wrt]

    if task.kind == "forward":
        if call.low:
            here = y["low"].shape == shapes["out"]
            into = into._replace(low=y["low"] if here else p.new_output())
        outputs, seen = engine.forward(p, None, into)
        values: dict[str, Any] = outputs._asdict()
        for n, s in enumerate(p.observe):
            values |= zip(places(n, s.name), s.split(seen[s]), strict=True)
        return [(name, values[name]) for name in task.results]
    if task.kind == "weights":
        return [("weights", engine.weights(p, x["lse"], range(p.n_q), range(p.n_k)))]
    primal, into_gradients = outputs_of(x, "", p), Differential(y.get("query"), y.get("key"), y.get("value"))
    if task.kind == "backward":
        return gradients(engine.backward(p, primal, outputs_of(x, "ct.", p), into_gradients))
    t = tangents_of(x, "t.", tables)
    if task.kind == "jvp":
        outputs = engine.jvp(p, t, primal, into)[1]
        return [(name, a) for name, a in outputs._asdict().items() if name in task.results and a is not None]
    d_ct = outputs_of(x, "t.ct.", p)
    if not any(name.startswith("t.") and not name.startswith("t.ct.") for name in x):
        return gradients(engine.backward(p, primal, d_ct, into_gradients))  # linear in the cotangents
    d_outputs = engine.jvp(p, t, primal)[1]
    return gradients(engine.backward_jvp(p, primal, outputs_of(x, "ct.", p), t, d_outputs, d_ct))


def outputs_of(x: Mapping[str, Array], prefix: str, p: Problem) -> Outputs:
    """Return the outputs of a call among arrays, their cotangents or tangents."""
    rows, matrix = p.shape(p.n_q), p.shape(p.n_q, p.d_v)
    arrays = zip((x.get(prefix + name) for name in Outputs._fields), (matrix, rows, rows, matrix), strict=True)
    return Outputs(*(None if a is None else np.broadcast_to(a, shape) for a, shape in arrays))


def tangents_of(x: Mapping[str, Array], prefix: str, tables: Mapping[str, Table]) -> Differential:
    """Return the tangents of inputs among arrays."""
    of_tables = {table: x[prefix + name] for name, table in tables.items() if prefix + name in x}
    return Differential(**{name: x.get(prefix + name) for name in INPUTS}, tables=of_tables)


def problem(task: PrimitiveTask, x: Mapping[str, Array]) -> tuple[Problem, dict[str, Table]]:
    """Return the call on these arrays (..., h, n, d), and its trained tables by name."""
    call = task.call
    mask, _ = rule(Mask, "mask", call.mask, x)
    score, tables = rule(Score, "score", call.score, x)
    q, k, v = x["query"], x["key"], x["value"]
    leads = q.shape[:-3], k.shape[:-3], v.shape[:-3]
    lead = leads[0] if leads[0] == leads[1] == leads[2] else np.broadcast_shapes(*leads)
    batch = math.prod(lead)
    if call.offset is None:
        offset: Array = np.broadcast_to(x["offset"].astype(np.int64), lead).reshape(-1)
    else:  # the axes of vmap come first and share the offset
        offset = np.array(call.offset * (batch // len(call.offset)), np.int64)
    b, h, j = call.origin if call.origin is not None else x["origin"].tolist()
    seed = call.seed if call.seed is not None else seed_of(x["seed"])
    trained = {f"score.table{n}": t for n, t in enumerate(tables) if t.kind == "float"}
    wanted = {name for name, _ in task.wrt} or {"bias", *trained}
    fields: dict[str, Any] = {name: x.get(name) for name in ARRAYS} | dict(call.numbers)
    p = Problem(
        query=q,
        key=k,
        value=v,
        lead=lead,
        mask=mask,
        score=score,
        scale=call.scale,
        **fields,
        seed=seed,
        offset=offset,
        origin=(b, h, j),
        positions_first=call.layout == "bnhd",
        observe=tuple(call.statistic(n, x) for n in range(len(call.observe))),
        constants=frozenset(x for n, x in {"bias": "bias", **trained}.items() if n not in wanted),
    )
    return p, trained


def seed_of(x: Array) -> int:
    """Return a seed from two 32-bit integers, the higher first, or from one integer."""
    if x.ndim:
        return int(x[0]) << 32 | int(x[1])
    if int(x) < 0:
        raise ValueError(f"seed must be in [0, 2**64), got {int(x)}")
    return int(x)
