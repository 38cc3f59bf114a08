"""From a problem and tangents of its inputs to the tangent kernel: forward's plans, with more arrays."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from regard.core.problem import Differential, Outputs, Problem
from regard.engines.cpu.language.types import type_of
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule.work import Results, by_head, kind_of, programs, run, table_array
from regard.engines.cpu.spec.forward import Kind
from regard.engines.cpu.spec.jvp import TangentKind
from regard.engines.cpu.target.instructions import Target
from regard.rules import Program, Table, tangent

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Tangents:
    """The outputs, tangents of the inputs, and where those of the outputs go.

    score: the rule and its tangent, None if that is 0. tables: the tables in it that are tangents. given: whether the
    output is there already.
    """

    results: Results
    t: Differential
    score: Program | None
    tables: frozenset[Table]
    d_outputs: Outputs
    given: bool

    @property
    def name(self) -> str:
        return "tangent"

    def kind(self, p: Problem, target: Target, rows: int) -> TangentKind:
        t = self.t
        more = [x for x in (t.key, t.value) if x is not None]
        plain = replace(kind_of(p, target, rows, entropy=True, few=False, rules=self.rules(p), more=more), woven=False)
        inputs = {"q": t.query, "k": t.key, "v": t.value, "sink": t.sink}
        return TangentKind(
            **vars(plain),
            varies=frozenset(name for name, x in inputs.items() if x is not None),
            bias_dot=None if t.bias is None else type_of(t.bias.dtype),
            bent=self.score is not None,
            given=self.given,
        )

    def source(self, kind: Kind, target: Target) -> str:
        def write(k: "Kernel") -> None:
            from regard.engines.cpu.kernels.jvp import Tangent

            assert isinstance(kind, TangentKind)
            Tangent(k, kind).run()

        return written(self.name, kind.fields, target, write)

    def rules(self, p: Problem) -> list[tuple[str, Program]]:
        found = dict(programs(p))
        return list((found if self.score is None else found | {"score": self.score}).items())

    def arrays(self, p: Problem) -> list[tuple[str, Array | None, int, bool]]:
        t, d = self.t, self.d_outputs
        return [
            *self.results.arrays(p),
            ("q_dot", t.query, 3, False), ("k_dot", t.key, 3, True), ("v_dot", t.value, 3, True),
            ("bias_dot", None if t.bias is None else p.dense(t.bias), 3, False),
            ("out_dot", d.out, 3, False), ("lse_dot", d.lse, 2, False), ("entropy_dot", d.entropy, 2, False),
        ]  # fmt: skip

    def words(self, p: Problem) -> dict[str, int | float]:
        words = self.results.words_with(p, self.rules(p)) | {"out_feature": self.results.out.strides[-1]}
        for name, x, keep, _ in self.arrays(p):
            if x is not None and keep == 3 and name.endswith("_dot"):
                axes = ("head", "row", "key" if name == "bias_dot" else "feature")
                words |= {f"{name}_{axis}": step for axis, step in zip(axes, x.strides[-3:], strict=True)}
        return words

    def vectors(self, p: Problem) -> dict[str, Array]:
        found = self.results.vectors(p)
        if self.t.sink is not None:
            found["sink_dot"] = by_head(p, self.t.sink)
        tables = () if self.score is None else self.score.tables
        return found | {f"score_table{n}": table_array(x, p.compute) for n, x in enumerate(tables) if x in self.tables}

    @property
    def lie(self) -> tuple[Any, ...]:
        t = self.t
        arrays = (*self.d_outputs, t.query, t.key, t.value, t.bias)
        return (
            self.given, t.sink is None, tuple(ref(table) for table in t.tables), self.results.lie,
            *((None if x is None else (x.dtype, x.shape, x.strides)) for x in arrays),
        )  # fmt: skip


def jvp(
    p: Problem, target: Target, t: Differential, outputs: Outputs | None, into: Outputs | None = None
) -> tuple[Outputs, Outputs]:
    """Outputs, and their tangents along tangents of the inputs; outputs that are given are not made again."""
    call = tangents(p, t, outputs, into)
    run(p, target, call)
    made, d = call.results, call.d_outputs
    if outputs is None:
        return Outputs(made.out, made.lse, made.entropy), d
    return outputs, d if outputs.entropy is not None else d._replace(entropy=None)


def tangents(p: Problem, t: Differential, outputs: Outputs | None, into: Outputs | None = None) -> Tangents:
    score, tables = None, {table: Table(x) for table, x in t.tables.items()}
    if p.score_node is not None and (t.query is not None or t.key is not None or tables):
        score = Program.of([p.score_node, tangent(p.score_node, tables)])
    if p.bias is not None and t.bias is not None and t.bias.dtype not in (p.compute, p.bias.dtype):
        t = replace(t, bias=t.bias.astype(p.compute))
    known = outputs or new_outputs(p)
    assert known.out is not None
    assert known.lse is not None
    results = Results(known.out, known.lse, known.entropy, None)
    return Tangents(results, t, score, frozenset(tables.values()), new_outputs(p, into), outputs is not None)


def new_outputs(p: Problem, into: Outputs | None = None) -> Outputs:
    out, *rows = into or Outputs(None, None, None)
    made = (np.empty(p.shape(p.n_q), p.compute) if x is None else x for x in rows)
    return Outputs(p.new_output() if out is None else out, *made)
