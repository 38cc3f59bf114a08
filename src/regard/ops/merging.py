"""Attention over a set of keys from attention over its parts."""

from __future__ import annotations  # so that `help` shows the names of types

from typing import Any

import numpy as np

from regard.arguments.frameworks import NUMPY, Namespace, dispatched
from regard.core import checks
from regard.core.types import Array, ArrayLike
from regard.rules import type_name

NDArray = np.ndarray[Any, np.dtype[Any]]


@dispatched
def merge(*parts: tuple[Array, Array], sink: ArrayLike | None = None) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys, from (out, lse) over each.

    Args:
        parts: tuples of out (..., h, n_q, d_v) and lse (..., h, n_q), in one shape and dtype each.
        sink: (h,), counted once: the parts are computed without it.

    Returns:
        (out, lse) in the shapes and dtypes of a part, computed in float32, or float64 where lse is.

    Raises:
        TypeError: for a part that is no tuple of two arrays, or of another dtype.
        ValueError: without a part, and for a shape that does not fit.

    With w = exp(lse_part − lse) the merged output is Σ w · out_part; a part that sees nothing has
    lse −∞ and weighs nothing (Rabe and Staats 2021, arXiv:2112.05682). Gradients through parts in
    16 bits are those of outputs that were rounded.

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
    with np.errstate(all="ignore"):
        return combined(NUMPY, parts, sink)


def combined(space: Namespace, parts: tuple[Any, ...], sink: Any) -> tuple[Any, Any]:
    """Merge parts on the arrays of a framework.

    Its derivatives are those of that framework's functions.
    """
    xp, cast = space.xp, space.cast

    def hollow(n: int, part: Any) -> Any:
        if not isinstance(part, tuple) or len(part) != 2:
            return part
        return tuple(
            space.hollow(f"merge: {name} of part {n}", x) for name, x in zip(("out", "lse"), part, strict=True)
        )

    shapes = tuple(hollow(n, part) for n, part in enumerate(parts))
    outs, sums = validated(shapes, None if sink is None else space.hollow("sink", sink))
    real = np.dtype(np.float64 if sums[0].dtype == np.float64 else np.float32)
    logits = xp.stack([cast(lse, real) for _, lse in parts])
    if sink is not None:
        extra = cast(sink, real)
        extra = extra[..., None] if outs[0].ndim > 2 else extra
        logits = xp.concatenate([logits, xp.broadcast_to(extra, (1, *logits.shape[1:]))])
    m = space.constant(xp.amax(logits, 0))
    m = xp.where(m == -np.inf, 0.0, m)
    scale = xp.exp(logits - m)
    total = scale.sum(0)
    empty = total == 0
    positive = xp.where(empty, 1.0, total)
    merged = None
    for n, (x, _) in enumerate(parts):
        share = (scale[n] / positive)[..., None]
        term = xp.where(share == 0, 0.0, cast(x, real)) * share
        merged = term if merged is None else merged + term
    return cast(merged, outs[0].dtype), xp.where(empty, -np.inf, m + xp.log(positive))


def validated(parts: tuple[Any, ...], sink: Any) -> tuple[list[NDArray], list[NDArray]]:
    """Return the outputs and the lse of the parts of `merge`, once they fit together."""
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
