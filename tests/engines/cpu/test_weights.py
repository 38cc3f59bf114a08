"""Parts of the weights by the compiled second pass, which small problems do not take."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from llvmlite import binding as llvm

import regard
from regard.engines import cpu
from regard.engines.cpu.schedule.second_work import second_spec, source
from regard.engines.cpu.schedule.weights_work import weights
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import chosen, targets
from regard.ops.normalization import problem_from
from regard.reference import specification
from support import assert_within, naive

Array = np.ndarray[Any, np.dtype[Any]]
N_Q, N_K = 70, 300
RNG = np.random.default_rng(0)
RULES: dict[str, Any] = {
    "mask": regard.window(90, 3) & regard.mask(RNG.random((N_Q, N_K)) < 0.8),
    "score": regard.softcap(3.0),
    "bias": RNG.standard_normal((4, 1, N_K)),
    "sink": RNG.standard_normal(4),
    "origin": (2, 1, 77),
    "offset": 180,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "rules": RULES,
    "one sink": {"sink": np.array(2.0)},
}
PARTS = [
    (range(N_Q), range(N_K)),
    (range(3, 61), range(N_K)),
    (range(69), range(130, 290)),
    (range(60, 2, -3), range(290, 8, -7)),
    (range(0, N_Q, 20), range(N_K)),
    (range(5, 6), range(128, 129)),
    (range(4, 4), range(9)),
]


def inputs(dtype: Any = np.float32) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 4, N_Q, 24), (2, 2, N_K, 24)))
    return q, k


def taken(x: Array, rows: range, cols: range) -> Array:
    return x[..., np.array(rows, int)[:, None], np.array(cols, int)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_part(name: str, dtype: Any) -> None:
    """Against the specification, and with the same bits however many threads compute it."""
    q, k = inputs(dtype)
    p = problem_from(q, k, k, **OPTIONS[name])
    lse = cpu.forward(p)[0].lse
    assert lse is not None
    exact, plain = specification.weights(p), specification.weights(p, naive(p)[0])
    for rows, cols in PARTS:
        alone = None
        for threads in (1, 3):
            regard.set_num_threads(threads)
            found = weights(p, chosen(), lse, rows, cols)
            alone = found if alone is None else alone
            np.testing.assert_array_equal(found, alone)
        size = taken(exact, rows, cols)
        assert_within("weights", found, size, taken(plain, rows, cols), size * (1 + np.abs(lse).max() / 8), p.compute)
        assert not found[size == 0].any()
    whole = weights(p, chosen(), lse, *PARTS[0])
    np.testing.assert_array_equal(weights(p, chosen(), lse, *PARTS[1]), taken(whole, *PARTS[1]))


def test_an_lse_that_is_off_changes_no_whole_row() -> None:
    q, k = inputs()
    p = problem_from(q, k, k, sink=np.array(1.0))
    lse = cpu.forward(p)[0].lse
    assert lse is not None
    right, off = (weights(p, chosen(), x, range(N_Q), range(N_K)) for x in (lse, lse + np.float32(0.01)))
    np.testing.assert_allclose(off, right, rtol=1e-5)


def test_rows_with_nan_and_rows_that_see_nothing() -> None:
    q, k = inputs()
    q[0, 0, 5], q[0, 0, 6, 0] = np.nan, np.inf
    mask = np.ones((N_Q, N_K), bool)
    mask[:, 7], mask[9] = False, False
    p = problem_from(q, k, k, mask=mask)
    lse = cpu.forward(p)[0].lse
    assert lse is not None
    P = weights(p, chosen(), lse, range(N_Q), range(N_K))
    np.testing.assert_array_equal(np.isnan(P), np.isnan(specification.weights(p)))
    assert not P[..., 7].any()
    assert not P[..., 9, :].any()


@pytest.mark.parametrize("target", [t.name for t in targets().values() if t.runs])
def test_every_instruction_set(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CPU", target)
    q, k = inputs()
    p = problem_from(q, k, k, **RULES)
    lse = cpu.forward(p)[0].lse
    assert lse is not None
    P = weights(p, chosen(), lse, range(N_Q), range(N_K))
    np.testing.assert_allclose(P, specification.weights(p), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_neon_compiles(dtype: Any) -> None:
    neon, (q, k) = targets()["neon"], inputs(dtype)
    code = source(second_spec(problem_from(q, k, k, **RULES), neon, ()), neon)
    assert llvm.ObjectFileRef.from_data(cache.compile_object(code, neon, "neon")).sections()
