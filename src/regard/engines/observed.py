"""Statistics that follow from other statistics, on every engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.core.parts import scores_alone, scores_times
from regard.core.problem import Outputs, Problem
from regard.core.statistics import Statistic
from regard.engines.normalized import Maps, factors, row_sums, strips, too_large
from regard.rules import Mask
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]
Found = dict[Statistic, Any]


def basic(observe: tuple[Statistic, ...]) -> tuple[Statistic, ...]:
    """Return the statistics that an engine has to compute itself for those observed."""
    own = (s for s in observe if s.needs is None)
    return tuple(dict.fromkeys((*own, *(needed for s in observe for needed in s.needs or ()))))


def complete(found: Mapping[Statistic, Any], sums: "ForwardSums") -> Found:
    """Return every statistic that the call of `sums` observes, given those of `basic`."""
    p = sums.p
    return {
        s: found[s] if s.needs is None else s.follow([found[needed] for needed in s.needs], sums, p.sizes)
        for s in p.observe
    }


@dataclass
class ForwardSums:
    """The `LogSums` of a call, by further forward passes.

    raw: the lse of the scores; where too large, sums are of exp(S − raw), from weights. forward, maps, weights: those
    of the engine.
    """

    p: Problem
    raw: Array
    forward: Callable[[Problem], tuple[Outputs, Found]]
    maps: Maps
    weights: Callable[..., Array]

    @cached_property
    def factor(self) -> Array | None:
        """The factors of weights, see `factors`; None if there are none."""
        return factors(self.p, self.raw, self.maps)

    @property
    def lse(self) -> Array:
        return self.raw if self.factor is None else np.where(too_large(self.raw), -np.log(self.factor), self.raw)

    @np.errstate(all="ignore")
    def _sum(self, p: Problem, times: float, of_weights: Callable[[], Array]) -> Array:
        """Return the lse of scores times a number, or the logarithm of the same sum of weights."""
        lse = self.forward(p)[0].lse
        assert lse is not None
        if self.factor is None:
            return lse
        small = of_weights()
        small = np.where(np.isfinite(small), small, lse - self.raw.dtype.type(times) * self.raw)
        return np.where(too_large(self.raw), small, lse)

    def alone(self) -> Array:
        return self._of(scores_alone(self.p)) if self.p.denominators else self.lse

    def where(self, mask: Mask) -> Array:
        return self._of(scores_alone(self.p, mask if self.p.mask is None else self.p.mask & mask))

    def _of(self, p: Problem) -> Array:
        return self._sum(p, 1, lambda: np.log(row_sums(p, self.raw, self.maps)))

    def times(self, factor: float) -> Array:
        return self._sum(scores_times(self.p, factor), factor, lambda: self._powers(factor))

    def _powers(self, power: float) -> Array:
        """Return log Σ_j exp(power (S − raw)), in strips of rows that need it."""
        p, logs, large = self.p, power * self.lse, too_large(self.raw)
        for rows in strips(p, range(p.n_q)):
            part = ..., slice(rows.start, rows.stop)
            if large[part].any():
                P = self.weights(p, self.raw, rows, range(p.n_k))
                top = P.max(axis=-1, keepdims=True)
                logs[part] += power * np.log(top[..., 0]) + np.log(((P / top) ** power).sum(axis=-1))
        return logs
