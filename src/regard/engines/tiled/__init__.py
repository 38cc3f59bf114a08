"""Attention in tiles on NumPy alone: O(n) memory, every option, wherever NumPy runs.

| Module | Contents |
|---|---|
| `tiles` | the tiles of a call: query blocks, the pairs that a tile sees, its scores |
| `forward_pass` | forward by the online softmax; statistics; weights |
| `derivatives` | what derivatives share; `jvp` and its tangent |
| `backward_pass` | backward and its tangent |
"""

from regard.core.problem import Differential, Outputs, Problem
from regard.engines.normalized import normalized
from regard.engines.tiled.forward_pass import forward, maps, weights

__all__ = [
    "ABOUT",
    "NAME",
    "backward",
    "backward_jvp",
    "forward",
    "jvp",
    "jvp_jvp",
    "maps",
    "state",
    "supports",
    "weights",
]

NAME = "tiled"
ABOUT = "tiles on NumPy, O(n) memory, any platform"


def supports(p: Problem) -> str | None:
    """None: every valid problem."""
    return None


def state() -> str | None:
    """None: NumPy is always there."""
    return None


def backward(p: Problem, outputs: Outputs, ct: Outputs, into: Differential | None = None) -> Differential:
    from regard.engines.tiled import backward_pass

    return backward_pass.backward(p, outputs, normalized(p, outputs, ct, maps))


def jvp(
    p: Problem, t: Differential, outputs: Outputs | None = None, into: Outputs | None = None
) -> tuple[Outputs, Outputs]:
    from regard.engines.tiled import derivatives

    return derivatives.jvp(p, t, outputs)


def backward_jvp(
    p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs
) -> Differential:
    from regard.engines.tiled import backward_pass

    return backward_pass.backward_jvp(p, outputs, ct, t, d_outputs, d_ct)


def jvp_jvp(p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs) -> Outputs:
    from regard.engines.tiled import derivatives

    return derivatives.jvp_jvp(p, outputs, t, u, d_t, d_u)
