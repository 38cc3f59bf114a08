"""A call on tensors as data: its options, the names of its inputs and results, and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard.core import options
from regard.core.statistics import ENTROPY, LSE, Seen, Statistic, asked_for, of_engine
from regard.ops.callcache import tables_in
from regard.rules import Table
from regard.rules.masks import foreign
from regard.runtime.forks import cached_property
from regard.torch.tensors.modes import transformed

if TYPE_CHECKING:
    from regard.torch.call.bound import RankCallMaker


SHORT = torch.float16, torch.bfloat16
HOST = ("offset", "seed")  # numbers that checks and plans read on the host
DEFAULTS = {name: x for name, x in options.DEFAULTS.items() if name != "observe"}


@dataclass(frozen=True, eq=False)
class TensorCall:
    """A call without its tensors.

    floats: inputs with a derivative, in the order of their tensors: "query", "key", "value", "bias", "sink", and the
    tables of the score. others: inputs without one: "offset", "seed", integers and masks in rules. options: those of
    `regard.attention` that are no tensors. folded: leading axes that `vmap` added, and that rules do not see. weights:
    the output is the weights, and the value the identity. before_weights: such a call follows, and needs memory for its
    results too. steps: of a derivative beyond the second (`torch/composed/higher.py`). low: what rounding takes from
    the output is a result too, for derivatives. cached: runs the call on tensors of the same signature
    (`torch/call/prepared.py`). shared: its problem, without the arrays of those. ranks: makes the calls of one rank
    of several (`torch/processes/ranks.py`).
    """

    options: dict[str, Any]
    floats: tuple[Any, ...]
    others: tuple[Any, ...] = ()
    engine: str | None = None
    folded: int = 0
    weights: bool = False
    before_weights: bool = False
    steps: tuple[Any, ...] = ()
    low: bool = False
    cached: Any = None
    ranks: "RankCallMaker | None" = None

    @property
    def observe(self) -> tuple[Statistic, ...]:
        found: tuple[Statistic, ...] = self.options["observe"]
        return found

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        return self.floats + self.others

    @cached_property
    def constants(self) -> tuple[Any, ...]:
        """The bias and float tables among `others`, which need no gradient."""
        score = self.options["score"]
        tables = [] if score is None else [x for x in foreign(score.node) if x.kind == "float"]
        return tuple(x for x in self.others if x == "bias" or x in tables)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables that its rules read."""
        return tables_in(self.options)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The names of the results.

        out, lse, entropy if it is observed, the other statistics in order, then low.
        """
        if self.weights:
            return "out", "lse"
        first, last = ("entropy",) if ENTROPY in self.observe else (), ("low",) if self.low else ()
        others = (name for s in self.observe if s not in (LSE, ENTROPY) for name in s.arrays)
        return "out", "lse", *first, *others, *last

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the results with a derivative, which are the first."""
        return tuple(name for name in ("out", "lse", "entropy") if name in self.results)


class CallSizes(NamedTuple):
    """Sizes of a call.

    lead: leading dimensions, broadcast. value: features of the output, 0 if the output is the weights.
    """

    lead: tuple[int, ...]
    heads: int
    groups: int
    n_q: int
    n_k: int
    d: int
    value: int
    positions_first: bool

    @staticmethod
    def of(call: TensorCall, shapes: Sequence[Any]) -> "CallSizes":
        """Read the sizes from the shapes of a call's inputs."""
        named: dict[Any, Any] = dict(zip(call.inputs, shapes, strict=False))
        q, k = named["query"], named["key"]
        v: Any = named.get("value", k)
        first = call.options["layout"] == "bnhd"
        n, h = (-3, -2) if first else (-2, -3)
        lead = torch.broadcast_shapes(*(x[:-3] for x in (q, k, v)))
        return CallSizes(tuple(lead), q[h], k[h], q[n], k[n], q[-1], 0 if call.weights else v[-1], first)


def keeps_low(*floats: torch.Tensor) -> bool:
    """Return whether gradients in 16 bits may follow a call, which are more exact with `Outputs.low`.

    floats: its query, and the other inputs with a derivative. On a device gradients compute the output again.
    """
    query = floats[0]
    if query.dtype not in SHORT or not (query.is_cpu or query.is_meta):
        return False
    return transformed() or (torch.is_grad_enabled() and any(x.requires_grad for x in floats))


def seen_of(observe: Sequence[Statistic], results: Sequence[Any]) -> Seen:
    """Return the statistics observed, from the results of a call.

    The call has asked an engine for those of `of_engine`.
    """
    computed = of_engine(observe)
    outputs = {LSE: results[1]} | ({ENTROPY: results[2]} if ENTROPY in computed else {})
    rest = iter(results[1 + len(outputs) :])
    values = {s: outputs[s] if s in outputs else s.result([next(rest) for _ in s.parts]) for s in computed}
    return asked_for(observe, values, torch.exp)
