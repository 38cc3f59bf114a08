"""The sums of a part are those that the engine promises."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.core.problem import CallPart, Carried, Differential, Outputs
from regard.core.statistics import ENTROPY
from regard.engines import choose
from regard.ops.normalization import problem_from
from regard.parallel.programs import part_of, untrained


@pytest.mark.parametrize("engine", ["tiled", "cpu"])
@pytest.mark.parametrize("gradients", ["query", "key", "query and key"])
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
    query, key = (Carried(True, False, {}) if name in gradients else None for name in ("query", "key"))
    part = CallPart(p.n_q, p.keys, query, key, p.bias_axes)
    piece = replace(part_of(untrained(p), part, range(n), range(n), q, k, v), observe=p.observe)
    if gradients == "query":
        assert query is not None
        found.forward(piece, None, p.new_low())
        assert like(query.sums) == found.carried(piece, p.new_low() is not None)
        t = Differential(q, k, v)
        query.sums.clear()
        found.jvp(piece, t, outputs)
        assert like(query.sums) == found.carried(piece, outputs.low is not None, t)
        query.sums.clear()
    found.backward(piece, outputs, Outputs(q, None, None))
    names = [name for x, names in ((query, ["query"]), (key, ["key", "value"])) if x is not None for name in names]
    sums = {name: x for of in (query, key) if of is not None for name, x in of.sums.items() if name != "sink"}
    assert like(sums) == {name: p.gradient_sums[name] for name in names}


def like(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes and dtypes of arrays."""
    return {name: (x.shape, x.dtype) for name, x in arrays.items()}
