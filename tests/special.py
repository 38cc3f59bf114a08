"""Calls with special values: infinities, NaN, numbers of any size, one key, equal scores, rows that see nothing.

`SPECIALS` names the numbers of each call; every engine and every target of the engine `cpu` answers for all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import regard
from regard.core.problem import Outputs, Problem
from regard.ops.normalization import problem_from
from regard.reference import specification
from support import assert_gradients, assert_outputs, assert_within

Array = np.ndarray[Any, np.dtype[Any]]
INF, NAN = float("inf"), float("nan")
ROWS = 1, 20  # queries: keys in lanes, queries in lanes


@dataclass(frozen=True)
class Special:
    """Keys (n_k, d) and values (n_k, d_v), as a function of a dtype, for queries that are all `query`.

    most: the largest number, which a dtype must hold.
    gradients: whether all numbers on the way are normal. last: the last query, if another.
    """

    name: str
    keys: Callable[[Any], Any]
    values: Any
    options: dict[str, Any] = field(default_factory=dict)
    query: tuple[float, ...] = (1.0,)
    last: tuple[float, ...] | None = None
    most: float = 0.0
    gradients: bool = True

    def __str__(self) -> str:
        return self.name

    def fits(self, dtype: Any) -> bool:
        return self.most <= float(ml_dtypes.finfo(dtype).max)

    def arrays(self, dtype: Any, rows: int) -> tuple[Array, Array, Array]:
        q = np.array([self.query] * rows, dtype)
        if self.last is not None:
            q[-1] = self.last
        k, v = (np.array(x, dtype) for x in (self.keys(ml_dtypes.finfo(dtype)), self.values))
        return q[None], k[None], v[None]


def fixed(*keys: Any) -> Callable[[Any], Any]:
    return lambda info: [x if isinstance(x, list) else [x] for x in keys]


def one_key(x: float) -> list[Special]:
    return [
        Special(f"one key, score {x:g}", fixed(x), [[2.0, -3.0]], {"scale": 1.0}, most=abs(x)),
        Special(f"a score of {x:g} beside less", fixed(x - abs(x) / 2, x, 2 * x if x < 0 else 0), [[5.0], [2], [7]],
                {"scale": 1.0}, most=2 * abs(x)),
    ]  # fmt: skip


HUGE = (1e4, -1e4, 1e7, -1e7, 5e8, -5e8, 1e10, -1e10, 1e20, 1e30, -1e30)
SPECIALS = (
    *(special for x in HUGE for special in one_key(x)),
    Special("the largest finite number", lambda f: [[f.max], [0]], [[2.0], [3]], {"scale": 0.5}),
    Special("the largest finite number, negative", lambda f: [[-f.max]], [[2.0]], {"scale": 0.5}),
    Special("the largest values", lambda f: [[0.0]] * 2, [[6e4, -6e4]] * 2),
    Special("large scale", fixed(1, 1, 0.5), [[1.0], [3], [100]], {"scale": 1e30}, most=1e30, gradients=False),
    Special("negative scale", fixed(-1e4, 1e4), [[1.0], [3]], {"scale": -3.0}),
    Special("scale 0", fixed(1e4, -1e4), [[1.0], [3]], {"scale": 0.0}),
    Special("equal scores", fixed(*[2.0] * 5), [[1.0], [2], [3], [4], [10]], {"scale": 1.0}),
    Special("equal large scores", fixed(*[1e10] * 5), [[1.0], [2], [3], [4], [10]], {"scale": 1.0}, most=1e10),
    Special("equal huge scores", fixed(*[1e30] * 300), [[float(n % 4)] for n in range(300)], {"scale": 1.0}, most=1e30),
    Special("large scores over tiles", fixed(*[1e10, -1e10, 1e9, 1e10][:3] * 200, 2e10), [[1.0]] * 600 + [[7.0]],
            {"scale": 1.0}, most=2e10),
    Special("large scores in falling order", fixed(*[2e10 - 1e7 * n for n in range(700)]),
            [[float(n % 7)] for n in range(700)], {"scale": 1.0}, most=2e10),
    Special("subnormal keys", lambda f: [[f.smallest_subnormal], [0], [-f.tiny]], [[1.0], [2], [3]],
            gradients=False),
    Special("keys of infinity", fixed(INF, 1), [[1.0], [2]]),
    Special("keys of minus infinity", fixed(-INF, 1), [[1.0], [2]]),
    Special("nothing but minus infinity", fixed(-INF), [[1.0]]),
    Special("NaN in a key", fixed(0, NAN, 1), [[1.0], [2], [3]]),
    Special("NaN in a query", fixed(0, 1), [[1.0], [2]], last=(NAN,)),
    Special("NaN in a value", fixed(0, 1), [[1.0, NAN], [2, 3]]),
    Special("infinity in a value", fixed(0, 1), [[1.0, INF], [2, -3]]),
    Special("infinities of both signs in values", fixed(0, 1), [[INF, INF], [-INF, 2]]),
    Special("NaN that is hidden", fixed(0, NAN, 1e4), [[1.0], [NAN], [3]], {"mask": regard.padding(1)}),
    Special("rows that see nothing", fixed(1e4, NAN), [[1.0], [NAN]], {"mask": regard.padding(0)}),
    Special("large bias", fixed(1, 2, 3), [[1.0], [2], [3]], {"bias": np.array([1e30, -1e30, 1e30])}, most=1e30),
    Special("all hidden by a bias of -3e38", fixed(*[1.0, 2.0, 3.0] * 50), [[float(n % 5)] for n in range(150)],
            {"bias": np.full(150, -3e38)}, most=1e30),
    Special("bias of one large number", fixed(1), [[4.0]], {"bias": np.array([-1e30])}, most=1e30),
    Special("infinite bias", fixed(1, 2), [[1.0], [2]], {"bias": np.array([INF, 0.0])}),
    Special("bias of minus infinity", fixed(1, 2), [[1.0], [2]], {"bias": np.array([-INF, -INF])}),
    Special("NaN in a bias", fixed(1, 2), [[1.0], [2]], {"bias": np.array([NAN, 0.0])}),
    Special("a large sink", fixed(1, 2), [[1.0], [2]], {"sink": np.array([1e30])}),
    Special("a small sink", fixed(1e4, 2), [[1.0], [2]], {"sink": np.array([-1e30])}),
    Special("a sink of minus infinity", fixed(1, 2), [[1.0], [2]], {"sink": np.array([-INF])}),
    *(Special(f"a sink of {x:g}", fixed(1, 2), [[1.0], [2]], {"sink": np.array([x])}) for x in (3e38, -3e38)),
    *(Special(f"a sink of {x:g} alone", fixed(1, 2), [[1.0], [2]], {"sink": np.array([x]), "mask": regard.padding(0)},
              gradients=x == x)
      for x in (3e38, -3e38, INF, NAN)),
    Special("a sink of 3e38 beside a score of 1e38", fixed(1e38, 2), [[1.0], [2]],
            {"sink": np.array([3e38]), "scale": 1.0}, most=1e38),
)  # fmt: skip
STATISTICS = ["lse", "entropy", "max", "argmax", "received"]


def check_weights(p: Problem, seen: regard.Seen, passes: bool) -> None:
    """The largest weight of a query, where it is, and, if numbers are normal, what keys receive."""
    exact, plain = specification.statistics(p), specification.statistics(p, p.compute.type)
    for name in ("max", "received") if passes else ("max",):
        assert_within(name, seen[name], exact[name], plain[name], 4 * exact[name], p.compute)
    sane = ~np.isnan(exact["max"])
    weights = np.take_along_axis(specification.weights(p), np.maximum(seen.argmax, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.where(seen.argmax < 0, 0, weights)[sane], exact["max"][sane], rtol=1e-5)


def check(special: Special, dtype: Any, engine: str, rows: int, derivatives: bool = True) -> None:
    """Forward, its statistics, and gradients of an engine against the specification."""
    q, k, v = special.arrays(dtype, rows)
    options = special.options
    p = problem_from(q, k, v, **options)
    with np.errstate(all="ignore"):
        out, seen = regard.attention(q, k, v, **options, observe=STATISTICS, engine=engine)
        assert_outputs(p, Outputs(out, seen.lse, seen.entropy))
        check_weights(p, seen, special.gradients)
        if not (derivatives and special.gradients):
            return
        dout = np.full(out.shape, 0.5, dtype)
        ct = Outputs(dout, np.full(seen.lse.shape, 0.25), None)
        got = regard.attention_vjp(q, k, v, dout, dlse=ct.lse, **options, engine=engine)
        assert_gradients(p, ct, got)
