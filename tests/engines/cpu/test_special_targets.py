"""Special values and saturated rows on every instruction set: those that this machine runs, and others emulated."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulated
import regard
from conformance.test_saturated import AMPLITUDES, check_values_alike, factors, saturated
from engines.cpu.test_targets import HERE
from regard.core.problem import Outputs
from regard.engines.cpu.target.instructions import targets
from special import ROWS, SPECIALS, Special, check, fixed
from support import assert_saturated

BF16 = ml_dtypes.bfloat16
DTYPES = np.float32, np.float64, np.float16, BF16


def dtypes_of(name: str) -> tuple[Any, ...]:
    """What a target's kernels have code of their own for; the default target is in `test_conformance`."""
    if name in emulated.TARGETS:
        return (np.float32,) if name == "avx512 emulated" else (BF16,)
    if targets()[name].amx:
        return (BF16,)
    return tuple(x for x in DTYPES if name != "baseline" or x is not np.float16)


@pytest.fixture(params=[*HERE, *emulated.TARGETS], scope="module")
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param in emulated.TARGETS:
            emulated.use(request.param, patch)
        else:
            patch.setenv("REGARD_CPU", request.param)
        yield request.param


@pytest.mark.parametrize("special", SPECIALS, ids=str)
def test_special_values(name: str, special: Special) -> None:
    for dtype in filter(special.fits, dtypes_of(name)):
        for rows in ROWS:
            check(special, dtype, "cpu", rows)


@pytest.mark.parametrize("x", [1e6, -5e8, 1e10, 2e38])
def test_a_lone_key_has_the_weight_1(name: str, x: float) -> None:
    """Exactly, whatever its score: the maximum is not rounded where the exponent's argument is not."""
    k, v = np.array([[x]], BF16), np.array([[2.0]], BF16)
    for rows in ROWS:
        q = np.ones((rows, 1), BF16)
        out, seen = regard.attention(q, k, v, observe=["lse", "max", regard.top(1)], engine="cpu")
        assert (out == 2).all()
        assert (seen.max == 1).all()
        assert (seen[regard.top(1)].values == 1).all()
        np.testing.assert_allclose(seen.lse, float(k[0, 0]), rtol=1e-6)
        g = regard.attention_vjp(q, k, v, np.ones((rows, 1), BF16), engine="cpu")
        assert (g.value == rows).all()


def test_gradients_of_saturated_rows(name: str) -> None:
    for amplitude in AMPLITUDES:
        p, dout = saturated(amplitude, BF16)
        g = regard.attention_vjp(p.query, p.key, p.value, dout, causal=True, engine="cpu")
        assert_saturated(p, Outputs(dout, None, None), g, *factors("cpu", BF16))


def test_scores_have_no_gradient_where_values_are_alike(name: str) -> None:
    for rows in (4, 300):  # decode and prefill
        check_values_alike(rows, sink=0.5)


@pytest.mark.skipif(not any(t.runs and (t.bf16_dot or t.amx) for t in targets().values()), reason="no bf16 pairs")
@pytest.mark.parametrize("rows", ROWS)
def test_scores_of_bf16_pairs_may_have_no_logarithm_of_base_2(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2.36e38, which times log2 e is infinite."""
    for name in [t.name for t in targets().values() if t.runs and (t.bf16_dot or t.amx)]:
        monkeypatch.setenv("REGARD_CPU", name)
        for keys in ((3e38, 2.5e38), (-3e38, -3.2e38), (3e38,)):
            values = [[float(n + 2), -3.0] for n in range(len(keys))]
            special = Special(str(keys), fixed(*keys), values, {"scale": 1.0}, most=3.2e38)
            check(special, ml_dtypes.bfloat16, "cpu", rows)
