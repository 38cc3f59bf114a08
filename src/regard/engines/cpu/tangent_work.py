"""From a problem and tangents of its inputs to the tangent kernel: forward's plans, with more arrays."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.engines.cpu.element import type_of
from regard.engines.cpu.layout import Kind
from regard.engines.cpu.tangent_layout import TangentKind
from regard.engines.cpu.target import Target
from regard.engines.cpu.work import Results, by_head, kind_of, run, written
from regard.problem import Differential, Outputs, Problem
from regard.rules import Program, Table, tangent

if TYPE_CHECKING:
    from regard.engines.cpu.emit import Kernel

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Tangents(Results):
    """Tangents of the inputs, and where those of the outputs go.

    score: the rule and its tangent, None if that is 0. given: whether the output is there already.
    """

    t: Differential
    score: Program | None
    d_outputs: Outputs
    given: bool
    name = "tangent"

    def kind(self, p: Problem, target: Target, rows: int) -> TangentKind:
        t = self.t
        more = [x for x in (t.key, t.value) if x is not None]
        plain = kind_of(p, target, rows, self.rules(p), entropy=True, few=False, more=more)
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
            from regard.engines.cpu.tangent_kernel import Tangent

            assert isinstance(kind, TangentKind)
            Tangent(k, kind).run()

        return written(self.name, kind.fields, target, write)

    def wishes(self, p: Problem) -> tuple[Any, ...]:
        return self.t.sink is None, self.given, *(table in self.t.tables for table in p.tables)

    def rules(self, p: Problem) -> list[tuple[str, Program]]:
        found = dict(super().rules(p))
        return list((found if self.score is None else found | {"score": self.score}).items())

    def arrays(self, p: Problem) -> list[tuple[str, Array | None, int, bool]]:
        t = self.t
        return [
            *super().arrays(p),
            ("q_dot", t.query, 3, False),
            ("k_dot", t.key, 3, True),
            ("v_dot", t.value, 3, True),
            ("bias_dot", None if t.bias is None else p.dense(t.bias), 3, False),
            ("out_dot", self.d_outputs.out, 3, False),
            ("lse_dot", self.d_outputs.lse, 2, False),
            ("entropy_dot", self.d_outputs.entropy, 2, False),
        ]

    def vectors(self, p: Problem) -> dict[str, Array]:
        return super().vectors(p) | ({} if self.t.sink is None else {"sink_dot": by_head(p, self.t.sink)})

    def words(self, p: Problem) -> dict[str, int | float]:
        words = super().words(p) | {"out_feature": self.out.strides[-1]}
        for name, x, keep, _ in self.arrays(p):
            if x is not None and keep == 3 and name.endswith("_dot"):
                axes = ("head", "row", "key" if name == "bias_dot" else "feature")
                words |= {f"{name}_{axis}": step for axis, step in zip(axes, x.strides[-3:], strict=True)}
        return words


def jvp(p: Problem, target: Target, t: Differential, outputs: Outputs | None) -> tuple[Outputs, Outputs]:
    """Outputs, and their tangents along tangents of the inputs; outputs that are given are not made again."""
    results = results_for(p, t, outputs)
    run(p, target, results)
    return outputs or Outputs(results.out, results.lse, results.entropy), results.d_outputs


def results_for(p: Problem, t: Differential, outputs: Outputs | None) -> Tangents:
    score = None
    if p.score_node is not None and (t.query is not None or t.key is not None or t.tables):
        tables = {table: Table(x) for table, x in t.tables.items()}
        score = Program.of([p.score_node, tangent(p.score_node, tables)])
    known = outputs or new_outputs(p)
    assert known.out is not None
    assert known.lse is not None
    return Tangents(known.out, known.lse, known.entropy, None, t, score, new_outputs(p), outputs is not None)


def new_outputs(p: Problem) -> Outputs:
    return Outputs(p.new_output(), *(np.empty(p.shape(p.n_q), p.compute) for _ in range(2)))
