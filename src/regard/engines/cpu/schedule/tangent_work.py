"""The tangent of forward: its arrays and spec; forward's schedules."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from regard.core.problem import Differential, Outputs, Problem, SumShapes
from regard.engines.cpu.language.types import type_of
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.arguments import Arrays, programs, table_array
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.work import KernelResults, carried, run
from regard.engines.cpu.spec.specs import KernelSpec, TangentSpec
from regard.engines.cpu.target.instructions import Target
from regard.rules import Program, Table, tangent

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TangentCall:
    """The outputs, tangents of the inputs, and arrays for those of the outputs.

    score: the rule and its tangent, None if that is 0. moving: the tables in it that are tangents. reads_output:
    the output is not computed.
    """

    results: KernelResults
    t: Differential
    score: Program | None
    moving: frozenset[Table]
    d_outputs: Outputs
    reads_output: bool

    @property
    def name(self) -> str:
        return "tangent"

    def spec(self, p: Problem, target: Target, rows: int) -> TangentSpec:
        t = self.t
        more = [x for x in (t.key, t.value) if x is not None]
        plain = replace(
            spec_of(p, target, rows, entropy=True, decode=False, rules=self.rules(p), more=more),
            pipelined=False,
            low=self.results.low is not None,
            carried=p.part is not None,
        )
        inputs = {"q": t.query, "k": t.key, "v": t.value, "sink": t.sink}
        return TangentSpec(
            **vars(plain),
            varies=frozenset(name for name, x in inputs.items() if x is not None),
            bias_dot=None if t.bias is None else type_of(t.bias.dtype),
            nonlinear=self.score is not None,
            reads_output=self.reads_output,
        )

    def source(self, spec: KernelSpec, target: Target) -> str:
        def write(k: "Kernel") -> None:
            from regard.engines.cpu.kernels.jvp import TangentKernel

            assert isinstance(spec, TangentSpec)
            TangentKernel(k, spec).run()

        return written(self.name, spec.fields, target, write)

    def rules(self, p: Problem) -> list[tuple[str, Program]]:
        by_prefix = dict(programs(p))
        return list((by_prefix if self.score is None else by_prefix | {"score": self.score}).items())

    def own(self, p: Problem) -> Arrays:
        t, d = self.t, self.d_outputs
        return {
            **self.results.own(p), "out_dot": d.out, "lse_dot": d.lse, "entropy_dot": d.entropy,
            "q_dot": t.query, "k_dot": t.key, "v_dot": t.value,
            "bias_dot": None if t.bias is None else p.dense(t.bias),
            "sink_dot": None if t.sink is None else p.per_head(t.sink),
        }  # fmt: skip

    def tables(self, p: Problem) -> Mapping[str, Array]:
        tables = () if self.score is None else self.score.tables
        return {f"score_table{n}": table_array(x, p.compute) for n, x in enumerate(tables) if x in self.moving}

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.reads_output, tuple(ref(table) for table in self.t.tables)


def jvp(
    p: Problem, target: Target, t: Differential, outputs: Outputs | None, into: Outputs | None = None
) -> tuple[Outputs, Outputs]:
    """Return the outputs, and their tangents along tangents of the inputs.

    Given outputs are not computed again.
    """
    call = tangents(p, t, outputs, into)
    run(p, target, call)
    results, d = call.results, call.d_outputs
    if outputs is None:
        return Outputs(results.out, results.lse, results.entropy), d
    return outputs, d if outputs.entropy is not None else d._replace(entropy=None)


def carried_tangents(p: Problem, target: Target, t: Differential, low: bool) -> SumShapes:
    """Return the shape and dtype of what goes on from a part of `jvp`."""
    column = np.broadcast_to(p.compute.type(0), p.shape(p.n_q))
    out = np.broadcast_to(p.dtype.type(0), p.shape(p.n_q, p.d_v))
    outputs = Outputs(out, column, column, out if low else None)
    return carried(p, tangents(p, t, outputs, outputs).spec(p, target, p.n_q))


def tangents(p: Problem, t: Differential, outputs: Outputs | None, into: Outputs | None = None) -> TangentCall:
    score, tables = None, {table: Table(x) for table, x in t.tables.items()}
    if p.score_node is not None and (t.query is not None or t.key is not None or tables):
        score = Program.of([p.score_node, tangent(p.score_node, tables)])
    if p.bias is not None and t.bias is not None and t.bias.dtype not in (p.compute, p.bias.dtype):
        t = replace(t, bias=t.bias.astype(p.compute))
    primal = outputs or new_outputs(p)
    assert primal.out is not None
    assert primal.lse is not None
    results = KernelResults(primal.out, primal.lse, primal.entropy, None, low=primal.low)
    return TangentCall(results, t, score, frozenset(tables.values()), new_outputs(p, into), outputs is not None)


def new_outputs(p: Problem, into: Outputs | None = None) -> Outputs:
    outputs = into or Outputs(None, None, None)
    rows = (np.empty(p.shape(p.n_q), p.compute) if x is None else x for x in (outputs.lse, outputs.entropy))
    return Outputs(p.new_output() if outputs.out is None else outputs.out, *rows)
