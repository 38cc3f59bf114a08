"""Calls on arrays that were made before: the checks, the choice of an engine and the plan are those of then.

A call that only reads its keys once, or has few queries, takes less time than Python does to prepare it: most of all
after a call that filled the processor's caches, which Python's own memory is thrown out of.
"""

import math
import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np

from regard.core.problem import Problem, remember
from regard.engines import cpu
from regard.engines.cpu.schedule.fields import address_of
from regard.rules.masks import Rule
from regard.runtime import memory
from regard.runtime.threads import num_threads

Array = np.ndarray[Any, np.dtype[Any]]
KEPT = 64
_mine = threading.local()
_met: WeakSet[Rule] = WeakSet()
# What os.environ keeps: it tells by an error what it lacks, which takes 30 µs in cold caches.
_environment: Any = getattr(os.environ, "_data", os.environ)
_name = os.environ.encodekey("REGARD_CPU") if hasattr(os.environ, "_data") else "REGARD_CPU"


class Short:
    """The output of a call on arrays of the form that it was made for, on the cpu engine."""

    def __init__(self, run: Any, p: Problem, shape: tuple[int, ...], address: Callable[[Array], int]):
        self.run, self.shape, self.dtype, self.address = run, shape, p.dtype, address
        self.new = memory.empty if math.prod(shape) * p.dtype.itemsize >= memory.LARGE else np.empty
        self.lse = np.empty(p.shape(p.n_q), p.compute)  # which nobody sees

    def __call__(self, query: Array, key: Array, value: Array) -> Array:
        out, address = self.new(self.shape, self.dtype), self.address
        self.run(address(query), address(key), address(value), address(out), address(self.lse))
        return out


def known(signature: Any) -> Short | None:
    """The call that this thread has kept for a problem's signature."""
    call: Short | None = _calls().get(_here(signature))
    return call


def lasting(rule: Rule | None) -> bool:
    """Whether a rule has been in an earlier call: for one that is made anew in each, a call is not worth keeping."""
    if rule is None or rule in _met:
        return True
    _met.add(rule)
    return False


def keep(p: Problem, shape: tuple[int, ...]) -> None:
    """Keep the call of a problem with a signature, if it can run again; shape: of the output as the caller sees it."""
    calls, here = _calls(), _here(p.signature)
    if here not in calls and all([lasting(p.mask), lasting(p.score)]):
        run = cpu.again(p)
        remember(calls, here, None if run is None else Short(run, p, shape, address_of), KEPT)


def _calls() -> dict[Any, Short | None]:
    try:
        calls: dict[Any, Short | None] = _mine.calls
    except AttributeError:
        calls = _mine.calls = {}
    return calls


def _here(signature: Any) -> tuple[Any, ...]:
    """What a kept call depends on beside its problem."""
    return signature, num_threads(), _environment.get(_name)
