"""Attention step by step: every intermediate of a call, with its formula."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from regard.arguments.frameworks import dispatched
from regard.core.layout import Layout
from regard.core.problem import Problem
from regard.core.types import LayoutName, MaskLike, ScoreLike
from regard.ops.attention import problem_from
from regard.reference import specification
from regard.rules import Score, as_score

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Step:
    """One intermediate of a call.

    `symbol` and `indices` name it in `formula`; `einsum` is its contraction, empty if it is none.
    `value` is read-only and of the dtype of sums (float32, float64 for float64); the output is of
    the inputs' dtype.
    """

    name: str
    symbol: str
    indices: str
    formula: str
    einsum: str
    value: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(self.value.shape)

    @property
    def tensor(self) -> str:
        """The symbol with its indices, as in `Q[h,i,a]`."""
        return _tensor(self.symbol, self.indices)


class Steps(Sequence[Step]):
    """The steps of a call in order, also by name or symbol.

    `steps["softmax"]` is a step, `steps["P"]` the last of a symbol.

    `str(steps)` is a table of names, formulas, contractions and shapes.
    """

    def __init__(self, steps: Sequence[Step]):
        self._steps = tuple(steps)

    @overload
    def __getitem__(self, at: int | str) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> Steps: ...
    def __getitem__(self, at: int | str | slice) -> Step | Steps:
        if isinstance(at, slice):
            return Steps(self._steps[at])
        if isinstance(at, int):
            return self._steps[at]
        for kind in ("name", "symbol"):
            for step in reversed(self._steps):
                if getattr(step, kind) == at:
                    return step
        raise KeyError(f"no step {at!r}; there are {', '.join(self.names)}")

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __contains__(self, at: object) -> bool:
        return at in self._steps or any(at in (step.name, step.symbol) for step in self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the steps that happen, in order."""
        return tuple(step.name for step in self)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return the rows that `str` prints: name, tensor, formula, einsum, shape."""
        return [(step.name, step.tensor, step.formula, step.einsum, _shape(step.shape)) for step in self]

    def __str__(self) -> str:
        rows = [("step", "tensor", "formula", "einsum", "shape"), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])

    def __repr__(self) -> str:
        return f"<Steps: {', '.join(self.names)}>"


@dispatched
def steps(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: MaskLike = None,
    causal: bool = False,
    score: ScoreLike = None,
    bias: Array | None = None,
    scale: float | None = None,
    sink: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int | Array | None = None,
    origin: tuple[int, int, int] = (0, 0, 0),
    layout: LayoutName = "bhnd",
) -> Steps:
    """Return every intermediate of `regard.attention` with these arguments, as data.

    The steps are queries, keys, values (and keys and values for each query head, if heads are
    grouped), raw scores, scaled, score, bias, masked, lse, softmax, dropout and output; only those
    that happen appear. Asked for by name, so arrays (..., h, n_q, n_k) are built. Raises what
    `regard.attention` raises.

    >>> import numpy as np, regard
    >>> rng = np.random.RandomState(42)
    >>> steps = regard.steps(rng.randn(2, 4), rng.randn(3, 4), rng.randn(3, 4))
    >>> steps["softmax"].value.round(3)
    array([[0.445, 0.389, 0.166],
           [0.507, 0.221, 0.272]])
    >>> print(steps[3:])
    step        tensor  formula                        einsum     shape
    ────────────────────────────────────────────────────────────────────
    raw scores  R[i,j]  R[i,j] = Q[i,a] K[j,a]         ia,ja->ij  (2, 3)
    scaled      S[i,j]  S[i,j] = R[i,j] / √4                      (2, 3)
    lse         lse[i]  lse[i] = log Σ_j exp S[i,j]               (2,)
    softmax     P[i,j]  P[i,j] = exp(S[i,j] − lse[i])             (2, 3)
    output      O[i,b]  O[i,b] = P[i,j] V[j,b]         ij,jb->ib  (2, 4)
    """
    p = problem_from(
        query, key, value, mask=mask, causal=causal, score=score, bias=bias, scale=scale, sink=sink, dropout=dropout,
        seed=seed, offset=offset, origin=origin, layout=layout,
    )  # fmt: skip
    rules = score if isinstance(score, Sequence) else () if score is None else (score,)
    with np.errstate(all="ignore"):
        return Steps([*_steps(p, Layout.of(query, layout), [as_score(rule) for rule in rules], scale is None)])


def steps_of_head(p: Problem) -> Steps:
    """Return every intermediate of a call with one head, as matrices."""
    default = bool(np.isclose(p.scale, p.d**-0.5, rtol=1e-6))
    with np.errstate(all="ignore"):
        return Steps([*_steps(p, Layout(matrices=True, positions_first=False), [p.score] if p.score else [], default)])


def _steps(p: Problem, arranged: Layout, rules: Sequence[Score], default_scale: bool) -> Iterator[Step]:
    real: Any = p.compute.type
    f = specification.terms(p, real)
    lead, h = "..." if p.lead else "", "" if arranged.matrices else "h"

    def letters(head: str, position: str, feature: str) -> str:
        return lead + (position + head if arranged.positions_first else head + position) + feature

    def step(name: str, symbol: str, indices: str, value: Array, formula: str = "", einsum: str = "") -> Step:
        value = value.view()
        value.flags.writeable = False
        return Step(name, symbol, indices, formula, einsum, value)

    def pairs(x: Array) -> Array:
        return arranged.per_head(x.reshape(p.shape(*x.shape[2:])))

    def positions(x: Array) -> Array:
        return arranged.from_bhnd(x.reshape(p.shape(*x.shape[2:])))

    q, k, v, o = (letters(h, *two) for two in ("ia", "ja", "jb", "ib"))
    ij, i = f"{lead}{h}ij", f"{lead}{h}i"
    Q, K, V, O = (_tensor(*pair) for pair in (("Q", q), ("K", k), ("V", v), ("O", o)))
    raw = "S" if p.scale == 1 else "R"
    R, S, P, lse = (_tensor(*pair) for pair in ((raw, ij), ("S", ij), ("P", ij), ("lse", i)))

    yield step("queries", "Q", q, arranged.from_bhnd(p.query.astype(real, copy=False)))
    yield step(
        "keys", "K", letters("g", "j", "a") if p.group > 1 else k, arranged.from_bhnd(p.key.astype(real, copy=False))
    )
    yield step(
        "values",
        "V",
        letters("g", "j", "b") if p.group > 1 else v,
        arranged.from_bhnd(p.value.astype(real, copy=False)),
    )
    if p.group > 1:
        shared = f"h // {p.group}"
        yield step("keys per head", "K", k, positions(f.k), f"{K} = {K.replace('h', shared)}")
        yield step("values per head", "V", v, positions(f.v), f"{V} = {V.replace('h', shared)}")

    scores = np.einsum("bhia,bhja->bhij", f.q, f.k)
    yield step("raw scores", raw, ij, pairs(scores), f"{R} = {Q} {K}", f"{q},{k}->{ij}")
    if p.scale != 1:
        factor = f"{R} / √{p.d}" if default_scale else f"{p.scale:g} · {R}"
        yield step("scaled", "S", ij, pairs(f.T), f"{S} = {factor}")
    scores = f.T
    for number, rule in enumerate(rules, 1):
        scores = specification.evaluate_one(rule.node, specification.indices_of(p, real, scores), scores.shape)
        yield step("score" if len(rules) == 1 else f"score {number}", "S", ij, pairs(scores), f"S ← {rule}")
    if p.bias is not None:
        scores = scores + specification.dense(p, p.bias).astype(real)
        yield step("bias", "S", ij, pairs(scores), f"S ← S + {_tensor('bias', ij)}")
    if p.mask is not None:
        yield step("masked", "S", ij, pairs(f.S), f"S ← −∞ unless {p.mask}")

    total = f"Σ_j exp {S}" if p.sink is None else f"(Σ_j exp {S} + exp sink{'[h]' if h else ''})"
    yield step("lse", "lse", i, pairs(f.lse), f"{lse} = log {total}")
    yield step("softmax", "P", ij, pairs(f.P), f"{P} = exp({S} − {lse})")
    if p.dropout:
        formula = f"P ← P · M / (1 − {p.dropout:g}), M from seed {p.seed}"
        yield step("dropout", "P", ij, pairs(f.P * f.D), formula)
    yield step("output", "O", o, positions(f.O).astype(p.dtype), f"{O} = {P} {V}", f"{ij},{v}->{o}")


def _tensor(symbol: str, indices: str) -> str:
    letters = ("…" if indices.startswith("...") else "", *indices.removeprefix("..."))
    return f"{symbol}[{','.join(filter(None, letters))}]"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
