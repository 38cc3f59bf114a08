"""Calls that were made before: the checks, the choice of an engine and the plan are those of the first time; and
steps of decoding, whose keys are more each time.
"""

import threading
from dataclasses import replace
from math import prod
from typing import Any

import torch

from regard import checks, memory
from regard.api import attention, problem_from
from regard.engines import choose
from regard.problem import remember
from regard.threads import num_threads
from regard.torch.arrays import NUMPY, PLAIN, array, tensor
from regard.torch.calls import DEFAULTS, Call
from regard.torch.modes import transforms_active, watched

OPTIONS = {"causal", "scale", "offset"}
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

    def __init__(self, run: Any, out: tuple[int, ...], dtype: torch.dtype) -> None:
        self.run, self.out, self.dtype = run, out, dtype
        self.real = torch.float64 if dtype is torch.float64 else torch.float32
        self.rows = out[:-1]
        self.large = prod(out) * dtype.itemsize >= memory.LARGE

    def results(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for out and lse, on the device of q: the default one may be another."""
        lse = q.new_empty(self.rows) if self.real is self.dtype else q.new_empty(self.rows, dtype=self.real)
        if self.large:
            return tensor(memory.empty(self.out, NUMPY[self.dtype])), lse
        return q.new_empty(self.out), lse

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.results(q)
        self.run(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        return out, lse


class Step(Short):
    """The same for one query of each head, and any number of keys."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.results(q)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
        self.run(addresses, k.shape[-2], k.stride(), v.stride())
        return out, lse


def short(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Call | None:
    """The call, if these tensors and options are of a kind that is kept for this thread, or is kept from now on."""
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN) or not options.keys() <= OPTIONS:
        return None
    if watched() or transforms_active() or torch.is_autocast_enabled("cpu"):
        return None
    shapes: tuple[Any, ...] = k.shape, v.shape, k.stride(), v.stride()
    if is_step(q, k, v, options):
        shapes = k.shape[:-2], v.shape[:-2], k.shape[-1], v.shape[-1], k.stride()[-2:], v.stride()[-2:]
    key = (
        q.shape, q.stride(), *shapes, q.dtype, k.dtype, v.dtype, q.device,
        k.device, v.device, num_threads(), q.layout, k.layout, v.layout, q.is_neg(), k.is_neg(), v.is_neg(),
        *options.items(), *map(type, options.values()),
    )  # fmt: skip
    try:
        known: dict[Any, Call | None] = _mine.known
    except AttributeError:
        known = _mine.known = {}
    try:
        return known[key]
    except KeyError:
        pass
    except TypeError:  # an option without a hash
        return None
    made = _made(q, k, v, options)
    remember(known, key, made, KEPT)
    return made


def is_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether this is a step of decoding: one query, which sees every key."""
    return q.ndim == k.ndim == v.ndim > 2 and q.shape[-2] == 1 <= k.shape[-2] == v.shape[-2] and "offset" not in options


def _made(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Call | None:
    plain = all(
        x.is_cpu and x.dtype in NUMPY and x.layout is torch.strided and not x.is_neg() and x.ndim > 2 for x in (q, k, v)
    )
    if not plain or isinstance(options.get("offset"), torch.Tensor):
        return None
    from regard.engines import cpu

    p = problem_from(array(q), array(k), array(v), **options)
    checks.fits(p)
    if choose(p, None) is not cpu:
        return None
    step = is_step(q, k, v, options)
    run = cpu.step(replace(p, mask=None)) if step else cpu.again(p)  # the last position sees all others
    if run is None:
        return None
    whole = DEFAULTS | options | {"observe": ()}
    again = (Step if step else Short)(run, p.shape(p.n_q, p.d_v), q.dtype)
    return Call(whole, ("query", "key", "value"), again=again)
