"""Scores: frozen rules over (s, b, h, i, j) that change scores before the softmax.

s is the scaled product of query and key; i, j, h and b are as for masks. Every array is a table
that trains. A `regard.table` given in its place is the key of its gradient.
"""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from regard.arguments.frameworks import adapter, constructor, plain
from regard.arguments.values import array_type, boolean, choice, integer, number
from regard.rules.buckets import t5_buckets
from regard.rules.expression import SCORE_LEAVES, make, substitute
from regard.rules.masks import Axis, Requirement, Rule
from regard.rules.tracing import Table, as_table, trace


@plain
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Score(Rule):
    """A rule that returns the new score.

    A sequence of scores is applied in order. Two scores that are built alike are not equal.

    >>> softcap(50.0)
    softcap(50.0)
    """


def as_score(score: Any, argument: str = "score") -> Score:
    """Return `score` as one `Score`.

    score: a score, a function, or a sequence of those, applied in order.

    >>> as_score([temperature(2.0), softcap(30.0)])
    [temperature(2.0), softcap(30.0)]
    """
    if isinstance(score, Score):
        return score
    if callable(score):
        return _traced(score)
    if not isinstance(score, list | tuple):
        raise TypeError(
            f"{argument} must be a score rule, a function of (s, b, h, i, j), or a sequence of those, "
            f"got {array_type(score)}"
        )
    return compose([as_score(part, f"{argument}[{n}]") for n, part in enumerate(score)])


def compose(scores: Sequence[Score]) -> Score:
    """Return the rule that applies `scores` in order; for none, the score unchanged."""
    node = make("s", "float")
    for score in scores:
        node = substitute(score.node, {make("s", "float"): node})
    requires = tuple(requirement for score in scores for requirement in score.requires)
    return Score(node, f"[{', '.join(score.text for score in scores)}]", requires)


@constructor
def score(function: Callable[..., Any]) -> Score:
    """Make a score rule of a function of (s, b, h, i, j), which is traced once, here.

    `score` is also a decorator. Raises TypeError if the function takes other arguments, returns a
    boolean, or branches on a traced value.

    >>> @score
    ... def recency(s, b, h, i, j):
    ...     return s - 0.1 * abs(i - j)
    >>> recency
    score(recency)
    """
    node = trace(function, SCORE_LEAVES)
    return Score(node, f"score({getattr(function, '__name__', type(function).__name__)})")


_traced: Callable[..., Score] = score.__wrapped__  # type: ignore[attr-defined]  # where an argument is called score


@constructor
def softcap(cap: float | ArrayLike | Table) -> Score:
    """Press scores smoothly into (-cap, cap): cap · tanh(s · (1 / cap)).

    Bello et al. 2016; Gemma Team 2024. cap: positive; a number, or (h,) for one per head.

    >>> softcap(50.0)
    softcap(50.0)
    """
    at, text, requires = _per_head("softcap", "cap", cap, positive=True)

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return at(h) * np.tanh(s * (1.0 / at(h)))

    return Score(trace(rule, SCORE_LEAVES), f"softcap({text})", requires)


@constructor
def temperature(t: float | ArrayLike | Table) -> Score:
    """Divide scores by a temperature: s · (1 / t).

    t: positive; a number, or (h,) for one per head.

    >>> temperature(np.array([1.0, 2.0]))
    temperature(array of shape (2,))
    """
    at, text, requires = _per_head("temperature", "t", t, positive=True)
    return Score(trace(lambda s, b, h, i, j: s * (1.0 / at(h)), SCORE_LEAVES), f"temperature({text})", requires)


@constructor
def alibi(slopes: float | ArrayLike | Table) -> Score:
    """Lower scores in proportion to distance: s - slope · |i - j| (Press et al. 2022).

    slopes: (h,), one per head, (b, h), one per batch entry and head, or one number.

    >>> alibi(np.array([0.5, 0.25]))
    alibi(array of shape (2,))
    """
    at, text, requires = _per_head("alibi", "slopes", slopes, batched=True)
    return Score(trace(lambda s, b, h, i, j: s - at(h, b) * abs(i - j), SCORE_LEAVES), f"alibi({text})", requires)


@constructor
def relative(
    table: ArrayLike | Table,
    *,
    buckets: Literal["t5"] | None = None,
    bidirectional: bool = True,
    max_distance: int = 128,
) -> Score:
    """Add a learned bias by relative position to scores: s + table[h, j - i].

    table: (m,) for all heads or (h, m), m odd, for offsets j - i from -(m - 1)/2 to (m - 1)/2.
    Offsets beyond that take the ends (Shaw et al. 2018). With buckets="t5" it is (num_buckets,) or
    (h, num_buckets), looked up by T5's bucket of the offset (Raffel et al. 2020). `bidirectional`
    and `max_distance` are those of `regard.positions.t5_buckets`.

    >>> relative(np.zeros((8, 32)), buckets="t5")
    relative(array of shape (8, 32), buckets='t5')
    """
    look = _floats("table of relative", table)
    rank = len(look.shape)
    if rank not in (1, 2):
        raise ValueError(f"table of relative must be (m,) or (h, m), got shape {look.shape}")
    choice("buckets of relative", buckets, (None, "t5"))
    bidirectional = boolean("bidirectional of relative", bidirectional)
    max_distance = integer("max_distance of relative", max_distance, "an integer", least=1, below=2**24)
    text = f"array of shape {look.shape}"
    m = look.shape[-1]
    if buckets is None:
        if m % 2 == 0:
            raise ValueError(f"table of relative must have an odd length, one entry per offset, got {m}")
        if not bidirectional or max_distance != 128:
            raise ValueError("bidirectional and max_distance of relative belong to buckets='t5'")
        reach = (m - 1) // 2

        def entry(offset: Any) -> Any:
            return offset + reach
    else:
        least = 4 if bidirectional else 2
        if m < least:
            raise ValueError(f"table of relative must have at least {least} buckets, got {m}")
        text += ", buckets='t5'" + ("" if bidirectional else ", bidirectional=False")
        text += "" if max_distance == 128 else f", max_distance={max_distance}"
        offsets = np.arange(-max_distance, max_distance + 1)  # offsets beyond these share the last buckets
        bucket_of = Table(t5_buckets(offsets, m, max_distance, bidirectional))

        def entry(offset: Any) -> Any:
            return bucket_of[offset + max_distance]

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + look[(h, entry(j - i))[-rank:]]

    requires = (Requirement("relative", "table", "h", look.shape[0]),) if rank == 2 else ()
    return Score(trace(rule, SCORE_LEAVES), f"relative({text})", requires)


def _floats(what: str, value: Any, positive: bool = False) -> Table:
    table = value if isinstance(value, Table) else as_table(what, value)
    if table.kind != "float":
        raise TypeError(f"{what} must be an array of floats, got {table.dtype}")
    values = table.known
    if values is not None:
        if np.isnan(values).any():
            raise ValueError(f"{what} must not hold NaN")
        if positive and not (values > 0).all():
            raise ValueError(f"{what} must be positive, got {values.min()}")
    return table


def _per_head(
    rule: str, argument: str, value: Any, positive: bool = False, batched: bool = False
) -> tuple[Callable[..., Any], str, tuple[Requirement, ...]]:
    """Return a function of h and b for an argument, its text and its requirements.

    value: one number for all heads, or one for each. batched: or one for each batch entry and head.
    """
    what = f"{argument} of {rule}"
    if isinstance(value, Table | list | tuple) or getattr(value, "ndim", 0) > 0 or adapter(value):
        table = _floats(what, value, positive)
        rank = len(table.shape)
        if rank > 1 + batched:
            shapes = "a number, (h,) or (b, h)" if batched else "a number or (h,)"
            raise ValueError(f"{what} must be {shapes}, got shape {table.shape}")
        axes: tuple[Axis, ...] = ("b", "h")
        requires = tuple(
            Requirement(rule, argument, axis, length)
            for axis, length in zip(axes[2 - rank :], table.shape, strict=True)
        )
        return lambda h, b=None: table[(b, h)[2 - rank :]], f"array of shape {table.shape}", requires
    amount = number(what, value, "a number or an array of floats", positive=positive)
    return lambda h, b=None: amount, repr(amount), ()
