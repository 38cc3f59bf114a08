"""Sums rounded to 16 bits by a kernel, against NumPy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from regard.engines.cpu.schedule import narrowing
from regard.engines.cpu.schedule.narrowing import narrowed
from regard.engines.cpu.target.instructions import targets


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_rounds_as_numpy_does(forced: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, numbers that are not finite, small ones; rows that are apart, shared out over threads."""
    if dtype is np.float16 and forced == "baseline":
        pytest.skip("it does not convert float16")
    monkeypatch.setattr(narrowing, "SMALL", 0)
    monkeypatch.setattr(narrowing, "PART", 200)
    monkeypatch.setattr("regard.runtime.threads._chosen", 2)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 7, 60)) * 2.0 ** rng.integers(-12, 12, (3, 7, 60))).astype(np.float32)
    x[0, 0] = np.float32(1) + np.arange(60) * np.float32(2.0**-9)
    x[1, 0, :5] = np.nan, np.inf, -np.inf, -0.0, 1e38
    rows = x[..., :53]
    with np.errstate(over="ignore"):
        expected = rows.astype(dtype)
    got = narrowed(rows, np.dtype(dtype), targets()[forced])
    assert got.flags.c_contiguous
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(rows))
    sane = ~np.isnan(rows)
    np.testing.assert_array_equal(got.view(np.uint16)[sane], expected.view(np.uint16)[sane])


def test_float32_stays_where_it_is() -> None:
    x = np.ones((4, 5), np.float32)
    assert narrowed(x, x.dtype, next(t for t in targets().values() if t.runs)) is x
