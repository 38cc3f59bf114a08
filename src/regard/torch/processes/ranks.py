"""One rank's call inside of `context_parallel`, as the autograd functions of `torch/autograd/functions.py` see it.

Inputs have the rows of this rank; bias, sink and tables are those of the whole call. Forward and its derivatives are
programs of `regard.parallel`, run by all ranks together.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist

from regard.core.layout import Layout
from regard.core.options import ARRAYS, RULES
from regard.core.problem import KIND, ROLES, Differential, Outputs, Problem, of_role
from regard.core.tensors import NUMPY, tensor
from regard.engines import Engine, choose
from regard.ops.normalization import problem_from
from regard.parallel.gradients import GradientDirection, RankGradients
from regard.parallel.pipeline import GradientPipeline, pipeline_of
from regard.parallel.programs import Rank, Transfer, check_lse
from regard.parallel.sight import sight_of
from regard.parallel.unordered import unordered_of
from regard.rules import Program
from regard.runtime.bounded import insert
from regard.torch.call.bound import ArrayCall, bound
from regard.torch.call.record import TensorCall, keeps_low
from regard.torch.tensors.arrays import concrete, values
from regard.version import __version__

if TYPE_CHECKING:
    from regard.torch.processes.context_parallel import ContextParallel
    from regard.torch.public.attention import TensorArguments

Array = np.ndarray[Any, np.dtype[Any]]
PLANS = 64  # rules and shapes whose tiles and tasks are cached
DIGESTS = 64  # arrays whose digests are cached
_digests: dict[Any, tuple[Any, str]] = {}


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call of one rank: `call` on `inputs`, whose engine is `RankCall`."""

    call: TensorCall
    inputs: tuple[torch.Tensor, ...]
    observe: tuple[Any, ...]
    header: Mapping[str, Any]


def rank_call(cp: "ContextParallel", arguments: "TensorArguments", engine: str | None) -> Call:
    """Prepare a call of checked arguments."""
    floats, others = arguments.floats, arguments.others
    inputs = (*floats.values(), *others.values())
    low = keeps_low(*floats.values())
    ranks = RankCalls(cp)
    call = TensorCall(arguments.options, tuple(floats), tuple(others), engine, low=low, ranks=ranks)
    # What a transform wraps is not compared: it cannot be read.
    arrays = [values(x) if concrete(x) else unread(x) for x in inputs]
    header = ranks.on(call, arrays, "forward").header
    grad = torch.is_grad_enabled(), *(x.requires_grad for x in inputs)
    return Call(call, inputs, arguments.observe, header | {"requires_grad": grad})


def unread(x: torch.Tensor) -> Array:
    """Return zeros in the shape of a tensor."""
    return np.broadcast_to(np.zeros((), NUMPY[x.dtype]), tuple(x.shape))


@dataclass(frozen=True, eq=False)
class RankCalls:
    """Makes `RankCall`s, for a `TensorCall`."""

    cp: "ContextParallel"

    def on(self, call: TensorCall, arrays: Sequence[Array], function: str) -> "RankCall":
        """Return the call of an engine's `function` on this rank's arrays."""
        if call.folded:
            raise NotImplementedError("regard.attention inside of context_parallel does not know torch.vmap")
        inputs = dict(zip(call.inputs, arrays, strict=True))
        options, tables = bound(call, inputs)
        layout = Layout.of(inputs["query"], options.pop("layout"))
        operands = tuple(layout.to_bhnd(inputs[name]) for name in ("query", "key", "value"))
        n = self.cp.deal.n
        whole = (np.broadcast_to(np.empty((), x.dtype), (*x.shape[:-2], n, x.shape[-1])) for x in operands)
        p = problem_from(*whole, **options)
        if call.constants:
            p = replace(p, constants=frozenset(tables.get(x, x) for x in call.constants))
        engine: Any = RankEngine(self.cp, choose(p, call.engine, function), operands)
        return RankCall(call, p, layout, engine, tables)


@dataclass(frozen=True, eq=False)
class RankCall(ArrayCall):
    """A call of one rank with its arrays; its problem is the whole call."""

    def forward(self) -> list[Array]:
        outputs = self.ranks.forward(self.problem, self.call.low)
        low = [self.layout.from_bhnd(outputs.low)] if outputs.low is not None else []
        return [*self.to_caller(outputs), *low]

    @property
    def ranks(self) -> "RankEngine":
        engine: Any = self.engine
        assert isinstance(engine, RankEngine)
        return engine

    @property
    def header(self) -> dict[str, Any]:
        """What all ranks have to agree on."""
        p = self.problem
        names = (name for role in ROLES if role not in ("gradients", "part") for name in of_role(role))
        options = {name: None if (x := getattr(p, name)) is None else TEXTS[KIND[name]](x) for name in names}
        floats = tuple(x if isinstance(x, str) else "table" for x in self.call.floats)
        return {
            **options, "dtype": p.dtype.name, "deal": self.ranks.cp.deal.name, "gradients": (floats, self.call.low),
            "exact": self.ranks.cp.exact, "engine": self.ranks.local.NAME, "version": __version__,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class RankEngine:
    """An engine's functions on one rank, for the problem of the whole call.

    local: computes parts. operands: query, key and value, (..., h, n, d), of this rank.
    """

    cp: "ContextParallel"
    local: Engine
    operands: tuple[Array, ...]

    def rank(self, p: Problem) -> Rank:
        return Rank(p, self.local, self.planned(p, sight_of), self.cp.rank, *map(np.ascontiguousarray, self.operands))

    def forward(self, p: Problem, low: bool) -> Outputs:
        outputs: Outputs = self.cp.run(self.rank(p).forward(low))
        return outputs

    def backward(self, p: Problem, outputs: Outputs, ct: Outputs) -> Differential:
        self.agree("backward", outputs, given(ct))
        return self.gradients(p, outputs, ct)

    def backward_jvp(
        self, p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
    ) -> Differential:
        self.agree("backward_jvp", outputs, (given(ct), given(t), given(d_ct)))
        return self.gradients(p, outputs, ct, GradientDirection(t, d_outputs, d_ct))

    def jvp(self, p: Problem, t: Differential, outputs: Outputs) -> tuple[Outputs, Outputs]:
        self.agree("jvp", outputs, given(t))
        return outputs, self.cp.run(self.rank(p).tangent(outputs, t))

    def jvp_jvp(self, *args: Any) -> Outputs:
        raise NotImplementedError("regard.attention inside of context_parallel has no second forward mode")

    def gradients(
        self, p: Problem, outputs: Outputs, ct: Outputs, along: GradientDirection | None = None
    ) -> Differential:
        plan: GradientPipeline = self.planned(p, pipeline_of if self.cp.exact else unordered_of)
        program = RankGradients.of(p, self.local, plan, self.cp.rank, self.operands, outputs, ct, along)
        g: Differential = self.cp.run(program.run(self.cp.deal))
        return g

    def planned(self, p: Problem, plan: Callable[..., Any]) -> Any:
        """Return the sight or the pipeline of a call; cached, since layers make the same calls."""
        cp = self.cp
        rules = (None if (x := getattr(p, name)) is None else rule_text(x) for name in RULES)
        key = plan, p.query.shape, p.key.shape, *rules, p.offset.tobytes(), p.origin, cp.deal.runs
        if key not in cp.plans:
            insert(cp.plans, key, plan(p, cp.deal, cp.deal), PLANS)
        return cp.plans[key]

    def agree(self, function: str, outputs: Outputs, arrays: Any) -> None:
        """Raise on all ranks unless all have outputs that derivatives can start from, and give the same arrays."""
        try:
            check_lse(outputs.lse)
        except ValueError as error:
            self.cp.compare({"error": f"ValueError: {error}"}, error)
            raise
        self.cp.compare({"derivative": function, "arrays": arrays})


def given(x: Outputs | Differential) -> tuple[str, ...]:
    """Return the names of the arrays that are not None."""
    names = x._fields if isinstance(x, Outputs) else ("query", "key", "value", *ARRAYS)
    tables = () if isinstance(x, Outputs) else (f"{len(x.tables)} tables",)
    return (*(name for name in names if getattr(x, name) is not None), *tables)


def transferred(x: Transfer, group: Any) -> tuple[dict[int, list[Array]], list[Any], list[Any]]:
    """Begin to send arrays to other ranks; return theirs, and what waits for them, and for those that were sent.

    Until others have what was sent to them it must not change.
    """
    parts = {owner: [np.empty(*form) for form in forms] for owner, forms in x.expected.items()}
    sent = {to: [np.ascontiguousarray(a) for a in arrays] for to, arrays in x.sent.items()}
    receiving = [
        dist.irecv(tensor(a), group=group, group_src=rank) for rank, arrays in parts.items() for a in arrays if a.size
    ]
    sending = [
        dist.isend(tensor(a), group=group, group_dst=rank) for rank, arrays in sent.items() for a in arrays if a.size
    ]
    return parts, receiving, sending


def rule_text(rule: Any) -> str:
    """Return a text that is the same for rules that mean the same: structure, numbers, tables and array masks."""
    program = Program.of([rule.node])
    arrays = [*(x.array for x in program.tables), *program.dense]
    meaning = program.structure, str(program.numbers), [digest(x) for x in arrays]
    return f"{rule} {hashlib.sha256(repr(meaning).encode()).hexdigest()[:12]}"


def array_text(x: Array) -> str:
    return f"{x.dtype.name} array of shape {x.shape}, digest {digest(x)[:12]}"


TEXTS: dict[str, Callable[[Any], Any]] = {
    "rows": np.shape, "keys": np.shape, "batch": repr, "pairs": array_text, "heads": array_text, "rule": rule_text,
    "value": repr,
}  # fmt: skip
"""Functions to what ranks compare of a field, by its kind. Of operands each has rows of its own."""


def digest(x: Array) -> str:
    """Return a digest of an array's shape and contents.

    Digests are cached: of a tensor until that changes in place, and of an array as long as it lives.
    """
    owner: Any = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    owner = getattr(owner.base, "tensor", owner)
    version = owner._version if isinstance(owner, torch.Tensor) else 0
    key = x.ctypes.data, x.shape, x.strides, x.dtype.str, version
    cached = _digests.get(key)
    if cached is None or cached[0]() is not owner:
        text = hashlib.sha256(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data).hexdigest()
        insert(_digests, key, (ref(owner), text), DIGESTS)
        return text
    return cached[1]
