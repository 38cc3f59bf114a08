"""Attention step by step: every intermediate of one call, with its indices, its formula and its values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from regard import spec
from regard.api import Frame, Layout, MaskLike, ScoreLike, problem_from
from regard.problem import Problem
from regard.rules import as_score

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Step:
    """One intermediate: `symbol` and `indices` name it in `formula`, `einsum` is its contraction (empty if it is none).

    `value` is read-only and of the dtype of sums (float32, float64 for float64); the output is of the inputs' dtype.
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
        return self.value.shape

    @property
    def tensor(self) -> str:
        """The symbol with its indices, as in `Q[h,i,a]`."""
        letters = self.indices.replace("...", "…")
        return f"{self.symbol}[{','.join(letters)}]"


class Steps(Sequence[Step]):
    """The steps of a call in order; also by name or symbol, `steps["softmax"]` or `steps["P"]` (the last of a symbol).

    `str(steps)` is a table of names, formulas, contractions and shapes.
    """

    def __init__(self, steps: Sequence[Step]):
        self._steps = tuple(steps)

    @overload
    def __getitem__(self, at: int | str) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> "Steps": ...
    def __getitem__(self, at: int | str | slice) -> "Step | Steps":
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
        """What `str` prints, a row for each step: name, tensor, formula, einsum, shape."""
        return [(step.name, step.tensor, step.formula, step.einsum, _shape(step.shape)) for step in self]

    def __str__(self) -> str:
        rows = [("step", "tensor", "formula", "einsum", "shape"), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])

    def __repr__(self) -> str:
        return f"<Steps: {', '.join(self.names)}>"


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
    layout: Layout = "bhnd",
) -> Steps:
    """Every intermediate of `regard.attention` with these arguments, as data.

    The steps are queries, keys, values (and keys and values for each query head, if heads are grouped), raw scores,
    scaled, score, bias, masked, lse, softmax, dropout and output; only those that happen appear. Asked for by name,
    so arrays (..., h, n_q, n_k) are built. Raises what `regard.attention` raises.

    >>> import numpy as np, regard
    >>> rng = np.random.RandomState(42)
    >>> steps = regard.steps(rng.randn(2, 4), rng.randn(3, 4), rng.randn(3, 4))
    >>> steps["softmax"].value.round(3)
    array([[0.445, 0.389, 0.166],
           [0.507, 0.221, 0.272]])
    >>> print(steps[3:])
    step        tensor    formula                         einsum     shape
    ────────────────────────────────────────────────────────────────────────
    raw scores  R[i,j]    R[i,j] = Q[i,a] K[j,a]          ia,ja->ij  (2, 3)
    scaled      S[i,j]    S[i,j] = R[i,j] / √4                       (2, 3)
    lse         lse[i]    lse[i] = log Σ_j exp S[i,j]                (2,)
    softmax     P[i,j]    P[i,j] = exp(S[i,j] − lse[i])              (2, 3)
    output      O[i,b]    O[i,b] = P[i,j] V[j,b]          ij,jb->ib  (2, 4)
    """
    p = problem_from(
        query, key, value, mask=mask, causal=causal, score=score, bias=bias, scale=scale, sink=sink, dropout=dropout,
        seed=seed, offset=offset, origin=origin, layout=layout,
    )  # fmt: skip
    rules = score if isinstance(score, Sequence) else () if score is None else (score,)
    with np.errstate(all="ignore"):
        return Steps([*_steps(p, Frame.of(query, layout), [as_score(rule) for rule in rules], scale is None)])


def _steps(p: Problem, frame: Frame, rules: Sequence[Any], plain_scale: bool) -> Iterator[Step]:
    real: Any = p.compute.type
    f = spec.terms(p, real)
    lead = "..." if p.lead else ""
    h = "" if frame.matrices else "h"

    def positions(head: str, n: str, feature: str) -> str:
        return f"{lead}{n}{head}{feature}" if frame.positions_first else f"{lead}{head}{n}{feature}"

    def pairs(x: Array) -> Array:
        return frame.per_head(x.reshape(p.shape(*x.shape[2:])))

    def step(name: str, symbol: str, indices: str, value: Array, formula: str = "", einsum: str = "") -> Step:
        value = value.view()
        value.flags.writeable = False
        return Step(name, symbol, indices, formula, einsum, value)

    q, k, v, o = (positions(h, *two) for two in (("i", "a"), ("j", "a"), ("j", "b"), ("i", "b")))
    ij, i = f"{lead}{h}ij", f"{lead}{h}i"
    Q, K, V, O, R, S, P, lse = (_tensor(*pair) for pair in zip("QKVORSP", (q, k, v, o, ij, ij, ij), strict=True)), None

    grouped = p.group > 1
    yield step("queries", "Q", q, frame.outward(p.query.astype(real, copy=False)))
    for name, symbol, feature, x in (("keys", "K", "a", p.key), ("values", "V", "b", p.value)):
        own = positions("g" if grouped else h, "j", feature)
        yield step(name, symbol, own, frame.outward(x.astype(real, copy=False)))
