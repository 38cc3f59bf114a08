"""What tests of kernels share."""

from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from test_guard_pages import SIZES, between_guards
from test_targets import HERE

from regard.engines.cpu.target.instructions import chosen, targets

DTYPES = np.float32, np.float64, np.float16, ml_dtypes.bfloat16


@pytest.fixture(params=HERE)
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set that this machine runs."""
    dtype = request.node.callspec.params.get("dtype")
    if targets()[request.param].amx and dtype is not ml_dtypes.bfloat16:
        pytest.skip("the code of another instruction set")
    monkeypatch.setenv("REGARD_CPU", request.param)
    return str(request.param)


class Guarded(NamedTuple):
    """Sizes (n_q, n_k, d, d_v) and a dtype, of arrays that end, or begin, where memory does."""

    sizes: tuple[int, int, int, int]
    dtype: Any
    at_end: bool
    rng: np.random.Generator

    def __call__(self, x: Any) -> Any:
        """A copy of an array."""
        return between_guards(x, self.at_end)

    def array(self, *shape: int, kind: Any = None) -> Any:
        """Normal numbers."""
        return self(self.rng.standard_normal(shape).astype(kind or self.dtype))


@pytest.fixture(params=product(SIZES, DTYPES, [True, False]), ids=str)
def guarded(request: pytest.FixtureRequest) -> Guarded:
    sizes, dtype, at_end = request.param
    if dtype is np.float16 and chosen().name == "baseline":
        pytest.skip("this processor does not convert float16")
    return Guarded(sizes, dtype, at_end, np.random.default_rng(0))
