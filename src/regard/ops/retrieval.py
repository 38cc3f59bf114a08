"""Modern Hopfield networks: patterns retrieved by repeated attention."""

from __future__ import annotations  # so that `help` shows the names of types

import math
from typing import Any, Generic, NamedTuple, cast

import numpy as np

from regard.arguments.frameworks import NUMPY, Namespace, dispatched
from regard.core import checks
from regard.core.types import Array
from regard.ops.attention import attention


class Retrieval(NamedTuple, Generic[Array]):
    """The states of `hopfield`, and their energies.

    `states` (steps + 1, ..., n, d) begins with the given state, and `energies` (steps + 1, ..., n)
    with its energy; `states[-1]` is the retrieved state. States have the dtype of the patterns,
    energies float32 (float64 for float64).

    >>> import numpy as np, regard
    >>> found = regard.hopfield(np.eye(3)[:1], np.eye(3), beta=4.0, steps=2)
    >>> found.states.shape, found.energies.shape
    ((3, 1, 3), (3, 1))
    """

    states: Array
    energies: Array


@dispatched
def hopfield(state: Array, patterns: Array, *, beta: float | None = None, steps: int = 1) -> Retrieval[Array]:
    """Retrieve stored patterns from states, by attention to the patterns.

    The patterns are keys and values. This is a continuous modern Hopfield network (Ramsauer et al.
    2020, "Hopfield Networks is All You Need"). With ξ a state, x_j the m patterns and M the largest
    of their norms, a step is

        ξ ← Σ_j softmax_j(beta ξ·x_j) x_j                     attention(ξ, X, X, scale=beta)

    It never raises the energy, which is at least 0, and at most 2 M² if ‖ξ‖ ≤ M:

        E(ξ) = ξ·ξ / 2 − log(Σ_j exp(beta ξ·x_j)) / beta + log(m) / beta + M² / 2

    A large beta retrieves single patterns, a small one means of many. O(n · d) memory for each
    state. PyTorch and JAX differentiate states and energies.

    Args:
        state: (..., n, d), n states.
        patterns: (..., m, d), at least one, in the state's dtype. Leading dimensions broadcast.
        beta: inverse temperature, positive; 1/√d by default, as in attention.
        steps: the number of updates of the states, at least 0.

    Returns:
        A `Retrieval` of states (steps + 1, ..., n, d) and energies (steps + 1, ..., n).

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected.
        MemoryError: for states larger than the memory of this machine.

    >>> import numpy as np, regard
    >>> patterns = np.array([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]])
    >>> damaged = np.array([[1.0, 1.0, -1.0, 0.0]])
    >>> found = regard.hopfield(damaged, patterns, beta=2.0, steps=3)
    >>> found.states[-1].round(2)
    array([[ 1.,  1., -1., -1.]])
    >>> bool((np.diff(found.energies[:, 0]) <= 0).all())
    True
    """
    return cast(Retrieval[Array], retrieved(NUMPY, state, patterns, beta, steps))


def retrieved(space: Namespace, state: Any, patterns: Any, beta: Any, steps: Any) -> Any:
    """Compute `hopfield` on the arrays of a framework."""
    arrays = {"state": state, "patterns": patterns}
    hollow = {name: checks.array(name, space.hollow(name, x)) for name, x in arrays.items()}
    checks.same_dtype(**hollow)
    s, x = hollow.values()
    shapes = f"state {s.shape}, patterns {x.shape}"
    if min(s.ndim, x.ndim) < 2:
        raise ValueError(f"state and patterns must be (..., n, d), got {shapes}")
    if s.shape[-1] != x.shape[-1]:
        raise ValueError(f"state and patterns must have the same number of features d, got {shapes}")
    if not x.shape[-2]:
        raise ValueError(f"patterns must hold at least one, got {shapes}")
    try:
        lead = np.broadcast_shapes(s.shape[:-2], x.shape[:-2])
    except ValueError:
        raise ValueError(f"the leading dimensions must broadcast, got {shapes}") from None
    m, d = x.shape[-2:]
    scale = checks.scale(None, d, x.dtype) if beta is None else checks.number("beta", beta, positive=True)
    updates = checks.integer("steps", steps, least=0, below=2**62)
    checks.room({"states": (updates + 1) * math.prod((*lead, *s.shape[-2:])) * s.dtype.itemsize})
    xp, wide = space.xp, np.result_type(x.dtype, np.float32)

    def squares(a: Any) -> Any:
        a = space.cast(a, wide)
        return (a * a).sum(-1)

    def over(shape: tuple[int, ...], a: Any) -> Any:
        return xp.broadcast_to(a, (*lead, *shape))

    keys = patterns[..., None, :, :]  # one head
    offset = over((1,), xp.amax(squares(patterns), -1)[..., None]) / 2 + math.log(m) / scale
    states, energies = [over(s.shape[-2:], state)], []
    for step in range(updates + 1):
        last = step == updates  # only its energy is needed
        out, seen = attention(
            states[-1][..., None, :, :], keys, keys[..., :0] if last else keys, scale=scale, observe=["lse"]
        )
        energies.append(squares(states[-1]) / 2 - seen.lse[..., 0, :] / scale + offset)
        if not last:
            states.append(out[..., 0, :, :])
    return Retrieval(xp.stack(states), xp.stack(energies))
