"""Attention over a set of keys from attention over its parts."""

from typing import Any

import numpy as np

from regard import checks
from regard.frameworks import dispatched
from regard.rules import type_name

Array = np.ndarray[Any, np.dtype[Any]]


@dispatched
def merge(*parts: tuple[Array, Array], sink: Array | None = None) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of keys, from (out, lse) over each.

    out (..., h, n_q, d_v) and lse (..., h, n_q) of one dtype each; computed in float32 (float64 where lse is).
    `sink` (h,) is counted once, so the parts must be computed without it. Returns (out, lse).

    With w = exp(lse_part − lse) the merged output is Σ w · out_part; a part that sees nothing has lse −∞ and weighs
    nothing (Rabe and Staats 2021, arXiv:2112.05682).

    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 4))
    >>> whole, seen = regard.attention(q, k, v, observe=["lse"])
    >>> parts = []
    >>> for keys in (slice(0, 3), slice(3, 8)):
    ...     out, part = regard.attention(q, k[:, keys], v[:, keys], observe=["lse"])
    ...     parts.append((out, part.lse))
    >>> out, lse = regard.merge(*parts)
    >>> bool(np.allclose(out, whole)), bool(np.allclose(lse, seen.lse))
    (True, True)
    """
    outs, sums = validated(parts, sink)
    real: Any = np.float64 if sums[0].dtype == np.float64 else np.float32
    stack = np.stack([lse.astype(real) for lse in sums])
    with np.errstate(all="ignore"):
        m = stack.max(axis=0)
        extra = None
        if sink is not None:
            extra = np.asarray(sink, real)[..., None] if outs[0].ndim > 2 else np.asarray(sink, real)
            m = np.maximum(m, extra)
        m = np.where(m == -np.inf, real(0), m)
        scale = np.exp(stack - m)
        total = scale.sum(axis=0) + (0 if extra is None else np.exp(extra - m))
        share = np.where(total == 0, real(0), scale / total)
        out = np.zeros(outs[0].shape, real)
        for x, w in zip(outs, share[..., None], strict=True):
            out += np.where(w == 0, real(0), w * x.astype(real))
        return out.astype(outs[0].dtype), m + np.log(total)


def validated(parts: tuple[Any, ...], sink: Any) -> tuple[list[Array], list[Array]]:
    """The outputs and the lse of the parts of `merge`, once they fit together."""
    if not parts:
        raise ValueError("merge needs at least one part (out, lse), got none")
    for n, given in enumerate(parts):
        if not isinstance(given, tuple) or len(given) != 2:
            what = f"a tuple of {len(given)}" if isinstance(given, tuple) else type_name(given)
            raise TypeError(f"merge: part {n} must be a tuple (out, lse), got {what}")
    outs = [checks.array(f"merge: out of part {n}", out) for n, (out, _) in enumerate(parts)]
    sums = [checks.array(f"merge: lse of part {n}", lse) for n, (_, lse) in enumerate(parts)]
    if outs[0].ndim < 2:
        raise ValueError(f"merge: out of part 0 must be (..., n_q, d_v), got shape {outs[0].shape}")
    for n, (out, lse) in enumerate(zip(outs, sums, strict=True)):
        checks.shaped(f"merge: out of part {n}", out, outs[0].shape, outs[0].dtype)
        checks.shaped(f"merge: lse of part {n}", lse, outs[0].shape[:-1], sums[0].dtype)
    if sink is not None:
        checks.sink(sink, outs[0].shape[-3] if outs[0].ndim > 2 else 1)
    return outs, sums
