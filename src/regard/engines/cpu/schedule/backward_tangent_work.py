"""The tangent of backward: its arrays and spec; backward's schedules."""

from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np

from regard.core.problem import Differential, Outputs, Problem
from regard.engines.cpu.language.types import type_of
from regard.engines.cpu.schedule.arguments import Arrays
from regard.engines.cpu.schedule.backward_arrays import BackwardArrays, ScoreDerivatives, score_derivatives
from regard.engines.cpu.schedule.backward_work import run
from regard.engines.cpu.spec.specs import BackwardSpec
from regard.engines.cpu.target.instructions import Target
from regard.rules import Table
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]


class BackwardTangentArrays(BackwardArrays):
    """Backward's arrays and their tangents.

    Gradients become their tangents; inputs, outputs and cotangents get tangents.
    """

    name = "backward_tangent"

    def __init__(self, p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs):
        curved = ct.entropy is not None
        if not curved and d_ct.entropy is not None:
            ct = ct._replace(entropy=np.zeros_like(d_ct.entropy))
        super().__init__(p, outputs, ct)
        real = p.compute
        assert d_outputs.out is not None
        assert d_outputs.lse is not None
        self.t, self.bias_dot = t, t.bias
        if p.bias is not None and t.bias is not None and t.bias.dtype not in (real, p.bias.dtype):
            self.bias_dot = t.bias.astype(real)
        self.out_dot, self.dout_dot = d_outputs.out, d_ct.out
        self.lse_dot = np.ascontiguousarray(d_outputs.lse, real)
        logits = {name: getattr(t, name, None) for name in self.shares}
        dots = {name: 0 if x is None else p.per_head(x)[:, None] for name, x in logits.items()}
        self.shares_dot = {name: x * (dots[name] - self.lse_dot) for name, x in self.shares.items()}
        self.given_dot = np.zeros(self.lse.shape, real) if d_ct.lse is None else d_ct.lse.astype(real)
        self.d_entropy_dot: Array | None = None
        if self.d_entropy is not None:
            self.d_entropy_dot = np.zeros_like(self.d_entropy)
            if d_ct.entropy is not None:
                self.d_entropy_dot[...] = d_ct.entropy
                self.given_dot = self.given_dot + self.d_entropy_dot * self.spread
            if curved:
                assert d_outputs.entropy is not None
                outside_dot = sum(self.shares_dot.values(), real.type(0))
                self.given_dot = self.given_dot - self.d_entropy * (outside_dot + d_outputs.entropy)
        self.given_dot = np.ascontiguousarray(self.given_dot)
        self.c_dot = np.zeros(self.lse.shape, real) if self.shares else None
        self.tables = {table: np.ascontiguousarray(x, real) for table, x in t.tables.items()}

    def own(self, p: Problem) -> Arrays:
        t = self.t
        return {
            **super().own(p), "q_dot": t.query, "k_dot": t.key, "v_dot": t.value, "dout_dot": self.dout_dot,
            "bias_dot": None if self.bias_dot is None else p.dense(self.bias_dot), "out_dot": self.out_dot,
            "lse_dot": self.lse_dot, "given_dot": self.given_dot, "d_entropy_dot": self.d_entropy_dot,
            "c_dot": self.c_dot,
        }  # fmt: skip

    @property
    def identity(self) -> tuple[Any, ...]:
        return (*super().identity, tuple(ref(table) for table in self.tables))

    @cached_property
    def rule(self) -> ScoreDerivatives:
        return score_derivatives(self.p, {table: Table(x) for table, x in self.t.tables.items()})

    def spec(self, target: Target) -> BackwardSpec:
        bias = self.p.trained_bias if self.bias_dot is None else self.bias_dot
        return replace(super().spec(target), tangent=True, bias_dot=None if bias is None else type_of(bias.dtype))

    def sink_rows(self) -> Array:
        assert self.c is not None
        assert self.c_dot is not None
        rows: Array = self.shares_dot["sink"] * self.c + self.shares["sink"] * self.c_dot
        return rows


def backward_jvp(
    p: Problem, target: Target, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    """Return the tangents of `backward` along t of the inputs and d_ct of the cotangents."""
    with np.errstate(all="ignore"):
        return run(p, target, BackwardTangentArrays(p, outputs, ct, t, d_outputs, d_ct))
