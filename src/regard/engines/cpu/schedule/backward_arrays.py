"""The arrays of backward, the score's derivatives, and the spec of a call."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from regard.core.problem import Carried, Differential, Outputs, Problem, collapse
from regard.engines.cpu.language.types import BF16
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.arguments import Arrays
from regard.engines.cpu.schedule.block_mask import hides
from regard.engines.cpu.schedule.forward_spec import prefill_spec
from regard.engines.cpu.schedule.narrowing import narrowed
from regard.engines.cpu.spec.operands import RuleArguments
from regard.engines.cpu.spec.scratch import padded
from regard.engines.cpu.spec.specs import PARTIAL_SUMS, BackwardSpec, TableRead
from regard.engines.cpu.spec.tiles import AMX_DEPTH, KEYS, multiple
from regard.engines.cpu.target.instructions import Target
from regard.rules import Node, Program, Table, tangent
from regard.runtime import memory
from regard.runtime.forks import cached_property

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

Array = np.ndarray[Any, np.dtype[Any]]
STREAMED = 2**25  # bytes of dbias above which it is stored past the caches
LANES = 64  # for AMX products


class BackwardArrays:
    """The arrays of one call of backward, and its spec.

    The kernel writes some of the arrays, and reads the others in addition to the inputs.
    """

    name = "backward"

    def __init__(self, p: Problem, outputs: Outputs, ct: Outputs, into: Differential | None = None):
        self.p, real = p, p.compute
        self.into = into or Differential()
        assert outputs.out is not None
        assert outputs.lse is not None
        self.out, self.low, self.lse = outputs.out, outputs.low, np.ascontiguousarray(outputs.lse)
        self.dout = np.broadcast_to(np.zeros((), p.dtype), self.out.shape) if ct.out is None else ct.out
        self.shares = p.shares(self.lse) if p.denominators else {}
        self.given = None if ct.lse is None else ct.lse.astype(real)
        self.d_entropy = None if ct.entropy is None else np.ascontiguousarray(ct.entropy, real)
        if self.d_entropy is not None:
            assert outputs.entropy is not None
            outside = sum(self.shares.values(), real.type(0))
            self.spread = np.where(self.lse == -np.inf, 0, 1 - outside) - outputs.entropy  # Σ P − H
            more = self.d_entropy * self.spread
            self.given = more if self.given is None else self.given + more
        if self.given is not None:
            self.given = np.ascontiguousarray(self.given, real)
        self.c = np.zeros(self.lse.shape, real) if self.shares else None
        self.dq: Array | None = None
        self.dk: Array | None = None
        self.dv: Array | None = None
        shapes = [(*p.lead, p.kv_heads, p.n_k, padded(real.itemsize, width)) for width in (p.d, p.d_v)]
        if p.part is None:
            self.dq = self.sums(self.into.query, p.shape(p.n_q, p.d))
            self.dk, self.dv = (
                self.sums(x, s, zero=True) for x, s in zip((self.into.key, self.into.value), shapes, strict=True)
            )
        else:
            if p.part.query is not None:
                self.dq = self.carried(p.part.query, "query", p.shape(p.n_q, p.d))
            if p.part.key is not None:
                self.dk = self.carried(p.part.key, "key", shapes[0])
                self.dv = self.carried(p.part.key, "value", shapes[1])
        self.dbias = None if p.trained_bias is None else self.bias_sums(p.trained_bias)
        self.dense_dbias = None if self.dbias is None else p.dense(self.dbias)
        self.dtables = {table: np.zeros((*PARTIAL_SUMS, *table.shape), real) for table in p.rules.tables}
        self.tables: Mapping[Table, Array] = {}  # tangents of some tables

    def carried(self, part: Carried, name: str, shape: tuple[int, ...]) -> Array:
        """Return sums that go on from part to part, padded to the kernel's shape."""
        if part.first:
            part.sums[name] = memory.zeros(*self.p.gradient_sums[name], aligned=True)
        sums = part.sums[name]
        if sums.shape == shape:
            return sums
        padded = memory.zeros(shape, self.p.compute, aligned=True)
        padded[..., : sums.shape[-1]] = sums
        return padded

    def bias_sums(self, bias: Array) -> Array:
        """Return an array for sums of dS, which go on from part to part unless they have rows and keys."""
        p, (rows, keys) = self.p, self.p.bias_axes
        along = None if p.part is None or (rows and keys) else p.part.query if rows else p.part.key
        if along is not None:
            return self.carried(along, "bias", p.bias_sums)
        # Without hidden pairs, every number of a single head's bias is written.
        every = rows and keys and not p.rules.hiding and not bias_shared(p, bias) and not hides(p.dense(bias))
        return (memory.empty if every else memory.zeros)(p.bias_sums, p.compute, aligned=True)

    def sums(self, into: Array | None, shape: tuple[int, ...], zero: bool = False) -> Array:
        """Return an array for sums of a shape: `into` if it fits, else a new one."""
        real = self.p.compute
        if into is None or (into.shape, into.dtype) != (shape, real) or into.strides[-1] != real.itemsize:
            return (memory.zeros if zero else memory.empty)(shape, real, aligned=True)
        if zero:
            into[...] = 0
        return into

    def own(self, p: Problem) -> Arrays:
        return {
            "out": self.out, "low": self.low, "lse": self.lse, "dout": self.dout, "given": self.given,
            "d_entropy": self.d_entropy, "c": self.c, "dq": self.dq, "dk": self.dk, "dv": self.dv,
            "dbias": self.dense_dbias,
        }  # fmt: skip

    @property
    def streams(self) -> bool:
        """True if dbias exceeds the caches and its vectors lie on cache lines."""
        if self.dbias is None or self.dbias.nbytes < STREAMED:
            return False
        shift = self.p.origin[2] % KEYS * self.dbias.itemsize
        return (shift | self.dbias.strides[-2]) % memory.CACHE_LINE == 0

    @property
    def identity(self) -> tuple[Any, ...]:
        """The dependencies of schedules besides the problem and the layout of arrays."""
        return tuple(map(ref, self.p.rules.tables))

    @cached_property
    def rule(self) -> "ScoreDerivatives":
        """Return the score and its derivatives."""
        return score_derivatives(self.p)

    def spec(self, target: Target) -> BackwardSpec:
        plain = spec_of(self.p, target, self.d_entropy is not None, self.rule)
        return replace(plain, low=self.low is not None)

    def source(self, spec: BackwardSpec, target: Target) -> str:
        """Return the kernel's IR."""

        def write(k: "Kernel") -> None:
            from regard.engines.cpu.kernels.backward import BACKWARD, BackwardKernel
            from regard.engines.cpu.kernels.backward_jvp import TANGENT

            BackwardKernel(k, spec, TANGENT if spec.tangent else BACKWARD).run()

        return written(self.name, spec.fields, target, write)

    def result(self, target: Target) -> Differential:
        p = self.p
        if p.part is not None:
            return self.of_part(target)

        def fit(x: Array | None, like: Array | None) -> Any:
            if x is None or like is None:
                return None
            if x.shape == like.shape and x.dtype == like.dtype and x.flags.c_contiguous:
                return x
            return narrowed(collapse(x, like.shape), like.dtype, target)

        dk, dv = (
            x if x is into or x is None else x[..., :width]
            for x, into, width in ((self.dk, self.into.key, p.d), (self.dv, self.into.value, p.d_v))
        )
        return Differential(
            query=fit(self.dq, p.query),
            key=fit(dk, p.key),
            value=fit(dv, p.value),
            bias=fit(self.dbias, p.bias),
            sink=None if p.sink is None else p.sink_gradient(self.sink_rows()),
            tables={table: np.asarray(x.sum(axis=(0, 1)), table.dtype) for table, x in self.dtables.items()},
        )

    def of_part(self, target: Target) -> Differential:
        """Store the sums that go on, and return the gradients that are whole."""
        p, part = self.p, self.p.part
        assert part is not None
        query = key = value = None
        if part.query is not None and self.dq is not None:
            if p.sink is not None:
                part.query.sums["sink"] = self.sink_rows()
            query = narrowed(self.dq, p.dtype, target) if part.query.last else None
        if part.key is not None and self.dk is not None and self.dv is not None:
            dk, dv = self.dk[..., : p.d], self.dv[..., : p.d_v]
            for name, x in (("key", dk), ("value", dv)):
                if not np.may_share_memory(part.key.sums[name], x):
                    part.key.sums[name] = np.ascontiguousarray(x)
            if part.key.last:
                key, value = (narrowed(x, p.dtype, target) for x in (dk, dv))
        bias = self.dbias if all(p.bias_axes) else None
        return Differential(query, key, value, bias, tables={x: y.sum(axis=(0, 1)) for x, y in self.dtables.items()})

    def sink_rows(self) -> Array:
        """Return the parts of the sink's gradient by query, (..., h, n_q)."""
        assert self.c is not None
        rows: Array = self.shares["sink"] * self.c
        return rows


@dataclass(frozen=True)
class ScoreDerivatives:
    """The program of a score with its derivatives, as in `BackwardSpec`.

    tangent_tables: the program's tables that are tangents, by number, and the tables they belong to.
    """

    score: RuleArguments | None = None
    nonlinear: bool = False
    table_reads: tuple[TableRead, ...] = ()
    tangent_tables: Mapping[int, Table] = field(default_factory=dict)


def spec_of(p: Problem, target: Target, entropy: bool, rule: ScoreDerivatives) -> BackwardSpec:
    """Return the spec of a call.

    entropy: it has a cotangent.
    """
    mask = None if p.mask_node is None else RuleArguments("mask", Program.of([p.mask_node]))
    n_q, gradients = (p.n_q, "all") if p.part is None else (p.part.rows, p.part.gradients)
    plain = prefill_spec(p, target, n_q, mask, rule.score, entropy)
    trained = p.trained_bias
    rows, keys = (True, False) if trained is None else p.bias_axes
    amx = plain.element is BF16 and target.amx
    if amx:
        plain = replace(plain, lanes=min(LANES, multiple(n_q, AMX_DEPTH)), paired=True, amx=True)
    elif plain.element is BF16:
        plain = replace(plain, paired=target.bf16_dot)
    return BackwardSpec(
        **vars(plain),
        nonlinear=rule.nonlinear,
        table_reads=rule.table_reads,
        trains_bias=trained is not None,
        bias_rows=rows,
        bias_keys=keys,
        bias_shared=trained is not None and bias_shared(p, trained),
        gradients=gradients,
    )


def bias_shared(p: Problem, bias: Array) -> bool:
    """Return whether several heads add to the same sums over rows and keys."""
    return all(p.bias_axes) and bias.size != p.pairs


def score_derivatives(p: Problem, tangents: Mapping[Table, Table] | None = None) -> ScoreDerivatives:
    """Return the rule of a call with its derivatives.

    tangents: of tables; each derivative is then followed by its tangent.
    """
    if p.score_node is None:
        return ScoreDerivatives()
    d_ds, partials = p.rules.score_partials[0], p.rules.table_partials
    assert d_ds is not None

    def both(node: Node) -> list[Node]:
        return [node] if tangents is None else [node, tangent(node, tangents)]

    nonlinear = not (d_ds.op == "literal" and d_ds.payload == 1)
    nodes = both(p.score_node) + (both(d_ds) if nonlinear else [])
    leaves = [leaf for leaf, partial in partials.items() if not (partial.op == "literal" and partial.payload == 0)]
    for leaf in leaves:
        nodes += [*both(partials[leaf]), *leaf.args]
    program = Program.of(nodes)
    numbers = {table: n for n, table in enumerate(program.tables)}
    table_reads = tuple(TableRead(numbers[leaf.payload], len(leaf.args)) for leaf in leaves)
    tangent_tables = {numbers[x]: table for table, x in (tangents or {}).items() if x in numbers}
    return ScoreDerivatives(RuleArguments("score", program), nonlinear, table_reads, tangent_tables)
