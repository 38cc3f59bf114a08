"""The sums of a part are those that the engine promises."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.core.problem import CallPart, Outputs
from regard.core.statistics import ENTROPY
from regard.engines import choose
from regard.ops.normalization import problem_from
from regard.parallel.programs import part_of


@pytest.mark.parametrize("engine", ["tiled", "cpu"])
@pytest.mark.parametrize("gradients", ["", "query", "key"])
@pytest.mark.parametrize(
    ("n", "dtype", "entropy"), [(300, "float32", True), (70, "bfloat16", False), (5, "float64", True)]
)
def test_shapes_and_dtypes(n: int, dtype: str, entropy: bool, gradients: str, engine: str) -> None:
    rng = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    q, k, v = (rng.standard_normal((3, h, n, 12)).astype(kind) for h in (4, 2, 2))
    p = problem_from(q, k, v, causal=True, score=regard.softcap(9.0), observe=[ENTROPY] if entropy else [])
    found = choose(p, engine)
    outputs, _ = found.forward(p, None, p.new_low())
    part = CallPart(p.n_q, p.keys, True, False, gradients, {})
    piece = replace(part_of(p, part, range(n), range(n), q, k, v), observe=p.observe)
    if gradients:
        found.backward(piece, outputs, Outputs(q, None, None))
    else:
        found.forward(piece, None, p.new_low())
    sums = {name: (x.shape, x.dtype) for name, x in part.sums.items() if name != "sink"}
    assert found.carried(piece, p.new_low() is not None) == sums
