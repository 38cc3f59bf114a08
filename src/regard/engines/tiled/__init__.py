"""Attention in tiles on NumPy: O(n) memory, every option, on any platform.

| Module | Contents |
|---|---|
| `tiles` | tiles of a call: query blocks, their visible key tiles, scores |
| `forward_pass` | forward by the online softmax; statistics; weights |
| `derivatives` | weights and tangents of a chunk; `jvp` and its tangent |
| `backward_pass` | backward and its tangent |

Read them in this order. `reference.specification` has the same formulas without tiles.
"""

from regard.core.problem import KNOWS_PARTS, Differential, Outputs, Problem, SumShapes
from regard.engines import engines
from regard.engines.normalized import normalized
from regard.engines.tiled import forward_pass
from regard.engines.tiled.forward_pass import forward, maps, weights
from regard.engines.tiled.tiles import working_memory

__all__ = [
    "ABOUT",
    "KNOWS",
    "NAME",
    "backward",
    "backward_jvp",
    "carried",
    "forward",
    "jvp",
    "jvp_jvp",
    "maps",
    "state",
    "supports",
    "weights",
    "working_memory",
]

NAME = "tiled"
ABOUT = "tiles on NumPy, O(n) memory, any platform"
KNOWS = KNOWS_PARTS
DEVICES, NAMED_ONLY, SKIPS_TILES = False, False, True


def supports(p: Problem) -> str | None:
    """Return None: every valid problem is supported."""
    return None


def state() -> str | None:
    """Return None: NumPy is always available."""
    return None


def carried(p: Problem, low: bool, t: Differential | None = None) -> SumShapes:
    """Return the shapes and dtypes of the sums that go on from a part of forward, or of its tangent along t."""
    from regard.engines.tiled import derivatives

    return forward_pass.carried(p) if t is None else derivatives.carried(p)


def backward(p: Problem, outputs: Outputs, ct: Outputs, into: Differential | None = None) -> Differential:
    from regard.engines.tiled import backward_pass

    return backward_pass.backward(p, outputs, normalized(p, outputs, ct, lambda *x: engines()[NAME].maps(*x)))


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
