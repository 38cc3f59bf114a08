"""Check on sampled rows that an lse belongs to the scores of a call.

With the right lse, Σ_j exp(S[i, j] − lse[i]) + exp(sink − lse[i]) = 1, and lse[i] = −∞ where row i sees nothing. A row
takes O(n_k · d) time and O(n_k) memory, on NumPy alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.core import checks
from regard.core.parts import part_of
from regard.core.problem import Problem, of_role, read
from regard.rules import At, evaluate
from regard.rules.expression import order
from regard.runtime.threads import num_threads, spread_numpy

Array = np.ndarray[Any, np.dtype[Any]]

MOST = 8.0
"""Maximum error of a row, in roundings."""

ROWS = 4
"""Rows sampled from each head."""

HEADS = 4
"""Maximum number of sampled heads."""

PAIRS = 2**17
"""Query-key pairs that may always be visited: some 4 ms of work on one thread."""

ON_LOADING = 2**24
"""The same for an lse that is loaded once, for many calls."""


class RowSum(NamedTuple):
    """The sum of a row's weights over all keys and the sink.

    head: row-major in (..., h). caller, computed: the lse of the row, by the caller and by its scores. roundings: their
    difference.
    """

    head: int
    row: int
    caller: float
    computed: float
    roundings: float

    @property
    def total(self) -> str:
        """The sum as text, with enough digits to tell it from 1."""
        with np.errstate(all="ignore"):
            off = float(np.expm1(np.float64(self.computed) - self.caller))
        return f"1 {'-' if off < 0 else '+'} {abs(off):.3g}" if abs(off) < 1e-3 else f"{1 + off:.4g}"


def require(name: str, p: Problem, lse: Array, rows: range | None = None, pairs: int = 0) -> None:
    """Raise ValueError unless an lse belongs to the scores of a call.

    name: the argument that holds it, (..., h, n_q). rows: the rows with a used lse, by default all. pairs: query-key
    pairs of the work that follows; a share of it is allowed for the check.
    """
    rows = range(p.n_q) if rows is None else rows
    worst = deviation(p, lse, rows, pairs=max(PAIRS, pairs // 8))
    if worst is not None and not worst.roundings <= MOST:
        raise ValueError(
            f"{name} does not belong to this query, key and options: {described(p, worst)}. Give the lse of the same "
            'call, as observe=["lse"] returns it, or leave it out'
        )


def taken(p: Problem, lse: object) -> Array:
    """Return a caller's lse, reshaped to (..., h, n_q).

    Raises TypeError or ValueError if it does not belong to the call.
    """
    checked = checks.array("lse", lse)
    if checked.size != p.all_heads * p.n_q:
        raise ValueError(f"lse must have shape {p.shape(p.n_q)}, got {checked.shape}")
    checked = checked.reshape(p.shape(p.n_q))
    require("lse", p, checked, pairs=ON_LOADING)
    return checked


def described(p: Problem, x: RowSum) -> str:
    """Describe the sum of a row in words, by its indices in the call."""
    b, h = divmod(x.head, p.heads)
    where = f"row {x.row} of head {h}" + (f" of batch element {b}" if p.batch > 1 else "")
    if x.computed == -np.inf:
        return f"{where} sees no key, so that its lse is -inf, and {x.caller:.6g} was given"
    sink = " with the sink" if p.sink is not None else ""
    return f"with it, the weights of {where} sum to {x.total}{sink} instead of 1"


def deviation(
    p: Problem, lse: Array, rows: Sequence[int], count: int = ROWS, pairs: int | None = None
) -> RowSum | None:
    """Return the sampled row with the largest error, None without rows.

    rows: rows to sample from. count: rows of each head. pairs: query-key pairs that may be visited; if all heads take
    more, some are sampled, with at least one row. None: all heads.
    """
    heads, n_k = p.all_heads, max(p.n_k, 1)
    if not heads or not len(rows):
        return None
    most = heads
    if pairs is not None:
        count = max(1, min(count, pairs // n_k))
        most = max(1, min(HEADS, pairs // (count * n_k)))
    sums: list[RowSum] = []

    def work(head: int) -> None:
        sums.extend(of_head(p, lse, head, [rows[n] for n in spread(len(rows), count, salt=head)]))

    some = spread(heads, most, salt=rows[0])
    spread_numpy(work, some, num_threads() if len(some) * count * n_k >= 2**20 else 1)
    return max(sums, key=lambda x: (np.inf if np.isnan(x.roundings) else x.roundings, -x.head, -x.row))


def of_head(p: Problem, lse: Array, head: int, rows: Sequence[int]) -> list[RowSum]:
    """Return the sums of some rows of one head.

    head: row-major in (..., h). lse: (..., h, n_q).
    """
    one = part_of(p, *divmod(head, p.heads))
    lse = lse[np.unravel_index(head, p.shape())]
    at, S = scores(one, np.asarray(rows))
    with np.errstate(all="ignore"):
        top = S.max(axis=-1, initial=-np.inf)
        shift = np.where(top == -np.inf, 0, top)
        total = shift + np.log(np.exp(S - shift[:, None]).sum(axis=-1, dtype=np.float64))
        for logit in one.denominators.values():
            total = np.logaddexp(total, read(np.asarray(logit)).astype(np.float64).reshape(-1)[:1])
        claim = read(lse, rows).astype(np.float64)
        eps = max(_eps(lse.dtype), _eps(p.compute))
        size = 4.0 + np.abs(np.where(np.isfinite(claim), claim, 0))
        apart = np.where((claim == total) | np.isnan(total) | (total == np.inf), 0, np.abs(claim - total))
        if (apart > eps * size).any():  # otherwise no second pass over the keys is needed
            size = size + _of_products(one, rows, at, S, total, eps)
        roundings = apart / (eps * size)
    numbers = (x.tolist() for x in (claim, total, roundings))
    return [RowSum(head, row, *x) for row, *x in zip(rows, *numbers, strict=True)]


def scores(p: Problem, rows: Array) -> tuple[At, Array]:
    """Return indices for rules, and the scores (rows, n_k) of some rows.

    Masked scores are −∞. p: a problem of one head, see `part_of`. Raises ValueError for an option that changes scores
    and is not known here.
    """
    if lost := p.used.intersection(of_role("scores")) - {"mask", "score", "bias"}:
        raise ValueError(f"an lse is not compared with scores that have {', '.join(map(repr, sorted(lost)))}")
    real: Any = p.compute.type
    q, k = read(p.query[0], rows).astype(real), read(p.key[0]).astype(real, copy=False)
    rules = [node for node in (p.mask_node, p.score_node) if node is not None]
    tables = {x.payload: read(x.payload.array) for x in order(rules) if x.op == "gather"}
    with np.errstate(all="ignore"):
        at = At(
            b=p.origin[0], h=p.origin[1], i=rows[:, None] + p.offset[0], j=np.arange(p.n_k) + p.origin[2],
            s=real(p.scale) * (q @ k.T), dtype=real, keys=p.keys, dense=lambda x: read(p.dense(x)[0], rows),
            tables=tables,
        )  # fmt: skip
        assert at.s is not None
        S = at.s if p.score_node is None else np.broadcast_to(evaluate([p.score_node], at)[0], at.s.shape)
        S = S if p.bias is None else S + read(p.dense(p.bias)[0], rows).astype(real)
        return at, S if p.mask_node is None else np.where(evaluate([p.mask_node], at)[0], S, real(-np.inf))


def _of_products(p: Problem, rows: Sequence[int], at: At, S: Array, lse: Array, eps: float) -> Array:
    """Return the error of lse from rounded products, for each row, over eps.

    √d / 4 Σ_j P |∂S/∂s| |scale| ‖q‖ ‖k_j‖: a sum of d products is off by some √d roundings of its largest part. P
    follows from scores raised by this error, and is at most 1.
    """
    q, k = (np.linalg.norm(x.astype(np.float64), axis=-1) for x in (read(p.query[0], rows), read(p.key[0])))
    size = np.sqrt(p.d) / 4 * abs(p.scale) * q[:, None] * k
    slope = p.rules.score_partials[0]
    if slope is not None:
        size = size * np.abs(np.broadcast_to(evaluate([slope], at)[0], S.shape))
    P = np.minimum(np.exp(S + MOST * eps * size - lse[:, None]), 1)
    total: Array = np.where(P > 0, P * size, 0).sum(axis=-1)
    return total


def spread(n: int, count: int, salt: int = 0) -> list[int]:
    """Return `count` of n positions, ascending; all if n is smaller.

    The first and the last are among them; a fixed hash chooses the others.

    >>> spread(4, 4), spread(1000, 4), spread(1000, 1, salt=7)
    ([0, 1, 2, 3], [0, 236, 618, 999], [944])
    """
    if n <= count:
        return list(range(n))
    ends = [0, n - 1][: count if count > 1 else 0]
    hashed = ((salt + at + 1) * 0x9E3779B97F4A7C15 % 2**64 * n >> 64 for at in range(count - len(ends)))
    return sorted({*ends, *hashed})


def _eps(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
