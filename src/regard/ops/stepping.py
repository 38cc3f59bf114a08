"""Attention step by step: every intermediate of a call, with its formula."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, overload

import numpy as np

from regard.arguments.frameworks import dispatched
from regard.core import checks
from regard.core.layout import Layout
from regard.core.options import taking_options
from regard.core.problem import Outputs, Problem
from regard.core.types import Options
from regard.engines import engines
from regard.ops.normalization import problem_from
from regard.reference import specification
from regard.rules import Score, as_score

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Step:
    """One intermediate of a call.

    `symbol` and `indices` name it in `formula`; `einsum` is its contraction, empty if it is none.
    `value` is read-only and of the dtype of sums (float32, float64 for float64); the output and the
    gradients of inputs are of the inputs' dtype.
    """

    name: str
    symbol: str
    indices: str
    formula: str
    einsum: str
    shape: tuple[int, ...]
    make: Callable[[], Array] = field(repr=False)

    @property
    def value(self) -> Array:
        """The array; the softmax Jacobian is computed anew on each access."""
        value = self.make().view()
        value.flags.writeable = False
        return value

    @property
    def tensor(self) -> str:
        """The symbol with its indices, as in `Q[h,i,a]`."""
        return _tensor(self.symbol, self.indices)


class Steps(Sequence[Step]):
    """The steps of a call in order, also by name or symbol.

    `steps["softmax"]` is a step, `steps["P"]` the last one of a symbol. `str(steps)` is a table of
    names, formulas, contractions and shapes.
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
        """The names of the steps in order."""
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

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print what `str` gives as the last line of a notebook's cell."""
        printer.text(str(self))


@dispatched
@taking_options()
def steps(
    query: Array,
    key: Array,
    value: Array,
    *,
    dout: Array | None = None,
    **options: Unpack[Options],
) -> Steps:
    """Return every intermediate of `regard.attention` with these arguments, as data.

    Args:
        query, key, value: as in `regard.attention`, and so are the options.
        dout: a gradient of the output, in its shape and dtype. With it the steps of backward
            follow, in closed form (Dao et al. 2022, appendix B): the gradients of values, of
            weights, of scores through the Jacobian of softmax, and of queries and keys, as
            `regard.attention_vjp` returns them.

    Returns:
        `Steps`: queries, keys, values (and keys and values for each query head, if heads are
        grouped), raw scores, scaled, score, bias, masked, lse, softmax, dropout and output. Only
        those that happen appear. Arrays (..., h, n_q, n_k) are built. The Jacobian, (..., h, n_q,
        n_k, n_k), is built only where its `value` is read.

    Raises:
        TypeError, ValueError, MemoryError: as `regard.attention`.

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
    >>> x = np.eye(3)
    >>> steps = regard.steps(x, x, x, scale=1.0, dout=x)
    >>> print(steps[8:11])
    step              tensor    formula                              einsum     shape
    ─────────────────────────────────────────────────────────────────────────────────────
    value gradient    dV[j,b]   dV[j,b] = P[i,j] dO[i,b]             ij,ib->jb  (3, 3)
    weight gradient   dP[i,j]   dP[i,j] = dO[i,b] V[j,b]             ib,jb->ij  (3, 3)
    softmax Jacobian  J[i,j,k]  J[i,j,k] = P[i,j] (δ[j,k] − P[i,k])             (3, 3, 3)
    >>> print(steps["score gradient"].formula)
    dS[i,j] = P[i,j] (dP[i,j] − D[i]) = J[i,j,k] dP[i,k]
    """
    p, score = problem_from(query, key, value, **options), options.get("score")
    rules = score if isinstance(score, Sequence) else () if score is None else (score,)
    arranged = Layout.of(query, options.get("layout", "bhnd"))
    gradient = None if dout is None else checks.shaped("dout", dout, arranged.out_shape(p), p.dtype)
    with np.errstate(all="ignore"):
        call = _SteppedCall(p, arranged, options.get("scale") is None)
        steps = [*call.forward([as_score(rule) for rule in rules])]
        return Steps(steps if gradient is None else [*steps, *call.backward(arranged.to_bhnd(gradient))])


def steps_of_head(p: Problem) -> Steps:
    """Return every intermediate of a call with one head, as matrices."""
    default = bool(np.isclose(p.scale, p.d**-0.5, rtol=1e-6))
    with np.errstate(all="ignore"):
        call = _SteppedCall(p, Layout(matrices=True, positions_first=False), default)
        return Steps([*call.forward([p.score] if p.score else [])])


class _SteppedCall:
    """A call with its terms, and the names of its arrays in the caller's layout.

    default_scale: the scale is 1/√d, and is printed like that.
    """

    def __init__(self, p: Problem, arranged: Layout, default_scale: bool) -> None:
        engines()["spec"].require("forward", p)
        self.p, self.arranged, self.default_scale = p, arranged, default_scale
        self.terms = specification.terms(p, p.compute.type)
        self.lead, self.h = "..." if p.lead else "", "" if arranged.matrices else "h"
        self.ij, self.i = f"{self.lead}{self.h}ij", f"{self.lead}{self.h}i"
        self.q, self.k, self.v, self.o = (self.letters(self.h, *two) for two in ("ia", "ja", "jb", "ib"))
        self.raw = "S" if p.scale == 1 else "R"
        # With a metric, features c of a query become features a of the product.
        self.given_q, self.product = (self.q, "Q") if p.metric is None else (self.letters(self.h, "i", "c"), "Q'")
        self.m = "hca" if self.h and p.metric is not None and p.metric.ndim == 3 else "ca"

    def letters(self, head: str, position: str, feature: str) -> str:
        return self.lead + (position + head if self.arranged.positions_first else head + position) + feature

    def pairs(self, x: Array) -> Array:
        return self.arranged.per_head(x.reshape(self.p.shape(*x.shape[2:])))

    def positions(self, x: Array) -> Array:
        return self.arranged.from_bhnd(x.reshape(self.p.shape(*x.shape[2:])))

    def scaled(self, x: str) -> str:
        """Return scale · x as text."""
        return f"{x} / √{self.p.d}" if self.default_scale else f"{self.p.scale:g} · {x}"

    def forward(self, rules: Sequence[Score]) -> Iterator[Step]:
        p, f, ij, i, q, k, v, o = self.p, self.terms, self.ij, self.i, self.q, self.k, self.v, self.o
        real, pairs, positions, given = p.compute.type, self.pairs, self.positions, self.arranged.from_bhnd
        Q, K, V, O = (_tensor(*pair) for pair in ((self.product, q), ("K", k), ("V", v), ("O", o)))
        R, S, P, lse = (_tensor(*pair) for pair in ((self.raw, ij), ("S", ij), ("P", ij), ("lse", i)))

        query = p.query if p.factors is None else p.factors[0]
        yield _step("queries", "Q", self.given_q, given(query.astype(real, copy=False)))
        for name, symbol, x, own in (("keys", "K", p.key, k), ("values", "V", p.value, v)):
            yield _step(name, symbol, self.grouped(own), given(x.astype(real, copy=False)))
        if p.group > 1:
            shared = f"h // {p.group}"
            yield _step("keys per head", "K", k, positions(f.k), f"{K} = {K.replace('h', shared)}")
            yield _step("values per head", "V", v, positions(f.v), f"{V} = {V.replace('h', shared)}")

        if p.metric is not None:
            m = self.m
            yield _step("metric", "M", m, p.metric.astype(real).reshape(p.metric.shape[-len(m) :]))
            formula = f"{Q} = {_tensor('Q', self.given_q)} {_tensor('M', m)}"
            yield _step("queries times metric", "Q'", q, positions(f.q), formula, f"{self.given_q},{m}->{q}")
        scores = np.einsum("bhia,bhja->bhij", f.q, f.k)
        yield _step("raw scores", self.raw, ij, pairs(scores), f"{R} = {Q} {K}", f"{q},{k}->{ij}")
        if p.scale != 1:
            yield _step("scaled", "S", ij, pairs(f.T), f"{S} = {self.scaled(R)}")
        scores = f.T
        for number, rule in enumerate(rules, 1):
            scores = specification.evaluate_one(rule.node, specification.indices_of(p, real, scores), scores.shape)
            yield _step("score" if len(rules) == 1 else f"score {number}", "S", ij, pairs(scores), f"S ← {rule}")
        if p.bias is not None:
            scores = scores + specification.dense(p, p.bias).astype(real)
            yield _step("bias", "S", ij, pairs(scores), f"S ← S + {_tensor('bias', ij)}")
        if p.mask is not None:
            yield _step("masked", "S", ij, pairs(f.S), f"S ← −∞ unless {p.mask}")

        total = f"Σ_j exp {S}" if p.sink is None else f"(Σ_j exp {S} + exp sink{'[h]' if self.h else ''})"
        yield _step("lse", "lse", i, pairs(f.lse), f"{lse} = log {total}")
        yield _step("softmax", "P", ij, pairs(f.P), f"{P} = exp({S} − {lse})")
        if p.dropout:
            formula = f"P ← P · M / (1 − {p.dropout:g}), M from seed {p.seed}"
            yield _step("dropout", "P", ij, pairs(f.P * f.D), formula)
        yield _step("output", "O", o, positions(f.O).astype(p.dtype), f"{O} = {P} {V}", f"{ij},{v}->{o}")

    def backward(self, dout: Array) -> Iterator[Step]:
        """Yield the steps of backward.

        dout: (..., h, n_q, d_v).
        """
        engines()["spec"].require("backward", self.p)
        p, f, ij, i, q, k, v, o = self.p, self.terms, self.ij, self.i, self.q, self.k, self.v, self.o
        real, pairs = p.compute.type, self.pairs
        g = specification.adjoint(p, Outputs(dout, None, None), f)
        Q, K, V, O = (_tensor(*x) for x in ((self.product, q), ("K", k), ("V", v), ("O", o)))
        P, S = _tensor("P", ij), _tensor("S", ij)
        dO, dP, D, dS, dR = (_tensor(*x) for x in (("dO", o), ("dP", ij), ("D", i), ("dS", ij), (f"d{self.raw}", ij)))

        yield _step("output gradient", "dO", o, self.arranged.from_bhnd(dout.astype(real, copy=False)))
        x = specification.visible_einsum("bhij,bhic->bhjc", f.P * f.D, g.dO, f.visible)
        yield from self.gradient("value", "dV", v, x, p.value, f"{P} {dO}", f"{ij},{o}->{v}")
        products = np.einsum("bhic,bhjc->bhij", g.dO, f.v)
        yield _step("weight gradient", "dP", ij, pairs(products), f"{dP} = {dO} {V}", f"{o},{v}->{ij}")
        softmax, sums = P, f"{O} {dO} = {P} {dP}"
        if p.dropout:
            softmax, sums = f"exp({S} − {_tensor('lse', i)})", f"{O} {dO}"
            formula = f"dP ← dP · M / (1 − {p.dropout:g})"
            yield _step("dropout gradient", "dP", ij, pairs(g.G), formula)
        J, each = _tensor("J", f"{ij}k"), softmax.replace("j", "k")
        yield Step(
            "softmax Jacobian", "J", f"{ij}k", f"{J} = {softmax} (δ[j,k] − {each})", "",
            (*pairs(f.P).shape, p.n_k), lambda: _jacobian(pairs(f.P)),
        )  # fmt: skip
        yield _step("row sums", "D", i, pairs(-g.c_row), f"{D} = {sums}", f"{o},{o}->{i}")
        applied = f"{softmax} ({dP} − {D}) = {J} {dP.replace('j', 'k')}"
        yield _step("score gradient", "dS", ij, pairs(g.dS), f"{dS} = {applied}", f"{ij}k,{ij.replace('j', 'k')}->{ij}")
        if p.score is not None:
            yield _step("rule gradient", "dS", ij, pairs(g.dT), "dS ← dS · ∂S/∂s")
        if p.scale != 1:
            yield _step("scaled gradient", f"d{self.raw}", ij, pairs(p.scale * g.dT), f"{dR} = {self.scaled(dS)}")
        x = p.scale * specification.visible_einsum("bhij,bhja->bhia", g.dT, f.k, f.visible)
        formula, einsum = f"{dR} {K}", f"{ij},{k}->{q}"
        if p.metric is not None:
            dQ, M = _tensor("dQ'", q), _tensor("M", self.m)
            yield _step("gradient of queries times metric", "dQ'", q, self.positions(x), f"{dQ} = {formula}", einsum)
            total = (
                specification.metric_gradient(p, f, x).reshape(p.metric.shape[-len(self.m) :]).astype(p.metric.dtype)
            )
            formula, einsum = (
                f"{_tensor('dM', self.m)} = {_tensor('Q', self.given_q)} {dQ}",
                f"{self.given_q},{q}->{self.m}",
            )
            yield _step("metric gradient", "dM", self.m, total, formula, "" if self.lead else einsum)
            x, formula, einsum = specification.unprojected(x, f.M), f"{dQ} {M}", f"{q},{self.m}->{self.given_q}"
        yield from self.gradient("query", "dQ", self.given_q, x, p.query, formula, einsum)
        x = p.scale * specification.visible_einsum("bhij,bhia->bhja", g.dT, f.q, f.visible)
        yield from self.gradient("key", "dK", k, x, p.key, f"{dR} {Q}", f"{ij},{q}->{k}")

    def grouped(self, letters: str) -> str:
        """Return the letters of keys or values, with g for h where heads are grouped."""
        return letters.replace("h", "g") if self.p.group > 1 else letters

    def gradient(
        self, name: str, symbol: str, letters: str, x: Array, like: Array, formula: str, einsum: str
    ) -> Iterator[Step]:
        """Yield the steps of an input's gradient.

        like: the input. x: (b, h, n, features), not yet summed over the dimensions along which the
        input was broadcast.
        """
        p, text = self.p, _tensor(symbol, letters)
        found = specification.unflatten(p, x, like)
        assert found is not None
        if like is not p.query and p.group > 1:
            yield _step(f"{name} gradient per head", symbol, letters, self.positions(x), f"{text} = {formula}", einsum)
            letters = self.grouped(letters)
            formula, einsum = f"Σ {text} over h // {p.group} = g", ""
        if found.shape[:-3] != p.lead:
            formula, einsum = f"{formula}, summed where it was broadcast", ""
        value = self.arranged.from_bhnd(found).astype(p.dtype)
        yield _step(f"{name} gradient", symbol, letters, value, f"{_tensor(symbol, letters)} = {formula}", einsum)


def _step(name: str, symbol: str, indices: str, value: Array, formula: str = "", einsum: str = "") -> Step:
    return Step(name, symbol, indices, formula, einsum, tuple(value.shape), lambda: value)


def _jacobian(P: Array) -> Array:
    """Return ∂P[j] / ∂S[k] = P[j] (δ[j,k] − P[k]) of every row."""
    J: Array = P[..., :, None] * (np.eye(P.shape[-1], dtype=P.dtype) - P[..., None, :])
    return J


def _tensor(symbol: str, indices: str) -> str:
    letters = ("…" if indices.startswith("...") else "", *indices.removeprefix("..."))
    return f"{symbol}[{','.join(filter(None, letters))}]"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
