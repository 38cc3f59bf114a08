"""Calls that were made before: the checks, the choice of an engine and the plan are those of the first time; and
steps of decoding, whose keys are more each time.
"""

import threading
from dataclasses import replace
from math import prod
from typing import Any
from weakref import ref

import torch

from regard.core import checks
from regard.core.problem import remember
from regard.core.tensors import NUMPY, array, tensor
from regard.engines import choose, cpu
from regard.ops.attention import Frame, attention, problem_from
from regard.ops.fastpath import lasting
from regard.rules.masks import Rule
from regard.runtime import memory
from regard.runtime.threads import num_threads, on_team
from regard.torch.arrays import PLAIN
from regard.torch.calls import DEFAULTS, TensorCall
from regard.torch.graph.modes import transformed, transforms_active, watched
from regard.torch.team import TEAM

OPTIONS = {"causal", "scale", "offset", "mask", "score", "layout"}
STEP_OPTIONS = {"causal", "scale"}
KEPT = 64
_mine = threading.local()


def positions_first(query: Any, key: Any, value: Any, **wishes: Any) -> Any:
    """`regard.attention` of (..., n, h, d), but for the wishes that are None."""
    given = {name: wish for name, wish in wishes.items() if wish is not None}
    if query.shape[-3] > 1:
        return attention(query, key, value, layout="bnhd", **given)
    # One row lies alike in both layouts, and calls without options are the quicker ones.
    found = attention(*(x.transpose(-2, -3) for x in (query, key, value)), **given)
    if isinstance(found, tuple):
        return found[0].transpose(-2, -3), *found[1:]
    return found.transpose(-2, -3)


class Short:
    """out and lse of a call on tensors of the shapes, strides and dtypes that it was made for, on the cpu engine."""

    def __init__(self, run: Any, out: tuple[int, ...], rows: tuple[int, ...], dtype: torch.dtype) -> None:
        self.run = run if num_threads() == 1 else on_team(TEAM)(run)
        self.out, self.rows, self.dtype = out, rows, dtype
        self.real = torch.float64 if dtype is torch.float64 else torch.float32
        self.large = prod(out) * dtype.itemsize >= memory.LARGE
        self.unseen = torch.empty(self.rows, dtype=self.real, device="cpu")

    def output(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output alone: lse goes where it went before."""
        out = self.new(q)
        self.run(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), self.unseen.data_ptr())
        return out

    def new(self, q: torch.Tensor) -> torch.Tensor:
        """Memory for the output, on the device of q: the default one may be another."""
        return tensor(memory.empty(self.out, NUMPY[self.dtype])) if self.large else q.new_empty(self.out)

    def results(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for out and lse."""
        lse = q.new_empty(self.rows) if self.real is self.dtype else q.new_empty(self.rows, dtype=self.real)
        return self.new(q), lse

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.results(q)
        self.run(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        return out, lse


class Step(Short):
    """The same for one query of each head, and any number of keys."""

    def output(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = self.new(q)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), self.unseen.data_ptr()
        self.run(addresses, k.shape[-2], k.stride(), v.stride())
        return out

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.results(q)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
        self.run(addresses, k.shape[-2], k.stride(), v.stride())
        return out, lse


def short(q: Any, k: Any, v: Any, options: dict[str, Any]) -> TensorCall | None:
    """The call, if these tensors and options are of a kind that is kept for this thread, or is kept from now on."""
    if not options.keys() <= OPTIONS:
        return None
    for name in ("mask", "score"):
        rule = options.get(name)
        if rule is not None and not (_fixed(rule) and lasting(rule)):
            return None
    form = form_of(q, k, v, options.keys() <= STEP_OPTIONS)
    if form is None:
        return None
    key = (*form, *map(_hashable, options), *map(_hashable, options.values())) if options else form
    known = _calls()
    try:
        return known[key]
    except KeyError:
        pass
    except TypeError:  # an option without a hash
        return None
    made = _made(q, k, v, options)
    remember(known, key, made, KEPT)
    return made


def _fixed(rule: Any) -> bool:
    """Whether this is a rule, and not an array, and reads none whose values may be others in the next call."""
    return isinstance(rule, Rule) and not rule.tensors and not rule.dense


def _hashable(option: Any) -> Any:
    """What tells options apart, numbers of different types too; a reference to a rule that is gone equals no other."""
    return ref(option) if isinstance(option, Rule) else (type(option), option)


def output_of(form: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """The output of a call whose form `keep_output` was told of, where nobody may ask for a derivative; else None."""
    call = _calls().get(form)
    if call is None or transformed():
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    out: torch.Tensor = call.again.output(q, k, v)
    return out


def keep_output(form: Any, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """Keep the call of a form and of whatever else its caller's arguments say, if it is of a kind that is kept."""
    call = short(q, k, v, options)
    if call is not None:
        remember(_calls(), form, call, KEPT)


def _calls() -> dict[Any, TensorCall | None]:
    try:
        known: dict[Any, TensorCall | None] = _mine.known
    except AttributeError:
        known = _mine.known = {}
    return known


def form_of(q: Any, k: Any, v: Any, steps: bool = True) -> tuple[Any, ...] | None:
    """What tells the calls on plain tensors apart; None where a mode or a transform of PyTorch has a part in them.

    steps: whether a query that sees all keys is of one form for any number of them.
    """
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN) or q.is_nested or k.is_nested or v.is_nested:
        return None
    if watched() or transforms_active() or torch.is_autocast_enabled("cpu"):
        return None
    rows, keys, values = q.shape, k.shape, v.shape
    place, other = k.stride(), v.stride()
    step = steps and len(rows) == len(keys) == len(values) > 2 and rows[-2] == 1 <= keys[-2] == values[-2]
    if step:
        keys, values, place, other = (*keys[:-2], keys[-1]), (*values[:-2], values[-1]), place[-2:], other[-2:]
    return (
        step, rows, q.stride(), keys, values, place, other, q.dtype, k.dtype, v.dtype, q.device,
        k.device, v.device, num_threads(), q.layout, k.layout, v.layout, q.is_neg(), k.is_neg(), v.is_neg(),
    )  # fmt: skip


def is_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether this is a step of decoding: one query, which sees every key."""
    simple = q.ndim == k.ndim == v.ndim > 2 and q.shape[-2] == 1 <= k.shape[-2] == v.shape[-2]
    return simple and options.keys() <= STEP_OPTIONS


def _made(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> TensorCall | None:
    plain = all(
        x.is_cpu and x.dtype in NUMPY and x.layout is torch.strided and not x.is_neg() and x.ndim > 2 for x in (q, k, v)
    )
    if not plain or isinstance(options.get("offset"), torch.Tensor):
        return None
    p = problem_from(array(q), array(k), array(v), **options)
    checks.fits(p)
    if choose(p, None) is not cpu:
        return None
    step = is_step(q, k, v, options)
    run = cpu.step(replace(p, mask=None)) if step else cpu.again(p)  # the last position sees all others
    if run is None:
        return None
    whole = DEFAULTS | options | {"observe": ()}
    out = Frame.of(q, options.get("layout", "bhnd")).out_shape(p)
    again = (Step if step else Short)(run, out, p.shape(p.n_q), q.dtype)
    return TensorCall(whole, ("query", "key", "value"), again=again)
