"""An lse is believed only if sampled rows sum to 1: in tiles of weights, in derivatives and where it is kept."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import regard
from regard.core import rowsums
from regard.core.tensors import DeviceMemory
from regard.ops.normalization import problem_from
from regard.viewer.scene import sources

pytestmark = pytest.mark.engine("tiled")

RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, 6, 40, 16), np.float32), RNG.standard_normal((2, 3, 50, 16), np.float32)
NOT_ITS = r"^lse does not belong to this query, key and options: "
BEYOND = regard.mask(lambda b, h, i, j: (j > i) & (i > 20))
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.5},
    "rules": {"mask": regard.window(9, 3), "score": [regard.alibi(RNG.random(6)), regard.softcap(2.0)]},
    "a steep rule": {"score": [regard.softcap(3.0), regard.temperature(1e-3)]},
    "arrays": {"mask": RNG.random((2, 6, 40, 50)) < 0.8, "bias": 100 * RNG.standard_normal((6, 1, 50))},
    "a sink": {"sink": RNG.standard_normal(6)},
    "one sink": {"sink": np.array(3.0)},
    "rows that see nothing": {"mask": BEYOND},
    "rows that see a sink alone": {"mask": BEYOND, "sink": np.ones(6)},
    "places": {"causal": True, "offset": np.array([3, 5]), "origin": (1, 0, 2)},
}


def lse_of(q: Any, k: Any, engine: str | None = None, **options: Any) -> Any:
    return regard.attention(q, k, k, observe=["lse"], engine=engine, **options)[1].lse


@pytest.mark.parametrize("engine", ["cpu", "tiled"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_every_row_of_a_right_one_is_within_the_bound(call: str, dtype: Any, engine: str) -> None:
    """Even where scores are small differences of large numbers."""
    for large in (0, 30):
        q, k = (np.concatenate([x, np.full((*x.shape[:-1], 1), large)], -1).astype(dtype) for x in (Q, K))
        p = problem_from(q, k, k, **CALLS[call])
        found = rowsums.deviation(p, lse_of(q, k, engine, **CALLS[call]), range(40), count=40)
        assert found is not None
        assert found.roundings < 4


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_one_is_an_error(call: str) -> None:
    options = CALLS[call]
    lse = lse_of(Q, K, **options)
    regard.weights(Q, K, lse=lse, **options)
    others = {name: lse_of(Q, K, **other) for name, other in CALLS.items() if name != call}
    wrong = [np.zeros_like(lse), lse - 0.01, lse + 0.01, np.full_like(lse, -np.inf), *others.values()]
    wrong = [x for x in wrong if ((x > lse + 1e-3) | (x < lse - 1e-3)).all()]
    assert len(wrong) > 3 or "nothing" in call
    for rows, cols in ((slice(None), slice(None)), (slice(7, 9), slice(3, 4)), (slice(39, None, -7), slice(0))):
        regard.weights(Q, K, lse=lse, rows=rows, cols=cols, **options)
        for x in wrong:
            with pytest.raises(ValueError, match=NOT_ITS):
                regard.weights(Q, K, lse=x, rows=rows, cols=cols, **options)


def test_values_that_are_none_are_left_alone() -> None:
    """NaN and infinite scores make an lse that says nothing; what is masked does not."""
    q, k = Q.copy(), K.copy()
    q[0, 0, 3], k[1, 2, 7] = np.nan, np.inf
    lse = lse_of(q, k)
    assert np.isnan(lse).any()
    regard.weights(q, k, lse=lse)
    hidden = regard.mask(lambda b, h, i, j: j != 7)
    lse = lse_of(Q, k, mask=hidden)
    assert np.isfinite(lse).all()
    regard.weights(Q, k, lse=lse, mask=hidden)
    with pytest.raises(ValueError, match="does not belong"):
        regard.weights(Q, k, lse=np.full_like(lse, np.nan), mask=hidden)


def test_a_wrong_lse_of_tensors_and_of_16_bits_is_an_error() -> None:
    q, k = torch.from_numpy(Q).bfloat16(), torch.from_numpy(K).bfloat16()
    lse = lse_of(q, k, causal=True)
    assert regard.weights(q, k, lse=lse, causal=True).shape == (2, 6, 40, 50)
    assert regard.weights(q, k, lse=lse.bfloat16(), causal=True).shape == (2, 6, 40, 50)
    with pytest.raises(ValueError, match=NOT_ITS):
        regard.weights(q, k, lse=lse)


@pytest.mark.parametrize("derivative", ["vjp", "jvp", "vjp_jvp"])
def test_outputs_of_another_call_have_no_derivatives(derivative: str) -> None:
    v, bias = K[..., :5], RNG.standard_normal((40, 50), np.float32)
    calls: dict[str, Callable[..., Any]] = {
        "vjp": lambda **given: regard.attention_vjp(Q, K, v, v[:, [0] * 6, :40], **given),
        "jvp": lambda **given: regard.attention_jvp(Q, K, v, Q, **given),
        "vjp_jvp": lambda **given: regard.attention_vjp_jvp(
            Q, K, v, v[:, [0] * 6, :40], regard.Differential(query=Q), **given
        ),
    }
    out, seen = regard.attention(Q, K, v, bias=bias, observe=["lse"])
    outputs = regard.Outputs(out, seen.lse, None)
    calls[derivative](outputs=outputs, bias=bias)
    with pytest.raises(ValueError, match=r"^outputs\.lse does not belong to this query, key and options: with it"):
        calls[derivative](outputs=outputs)


def test_what_is_looked_at_by_a_wrong_lse_is_refused() -> None:
    lse = lse_of(Q, K)
    sources.arrays(Q, K, lse=lse)
    sources.arrays(Q[0, 0], K[0, 0], lse=lse[0, 0])
    with pytest.raises(ValueError, match=NOT_ITS):
        regard.look(Q, K, lse=lse, causal=True, block=False, open_browser=False)
    with pytest.raises(TypeError, match=r"^lse must have a floating dtype"):
        sources.arrays(Q, K, lse=np.zeros(lse.shape, int))


def test_few_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long call one row of one head, before a small tile; more where the tile takes more."""
    seen: list[tuple[int, int]] = []
    original = rowsums.of_head

    def counted(p: Any, lse: Any, head: int, rows: Any) -> Any:
        seen.append((head, len(rows)))
        return original(p, lse, head, rows)

    monkeypatch.setattr(rowsums, "of_head", counted)
    for n_k, rows, cols, expected in (
        (50, 1, 1, (4, 1)),
        (50, 40, 50, (4, 4)),
        (2**17, 40, 1, (1, 1)),
        (2**17, 40, 2**17, (4, 4)),
    ):
        k = np.broadcast_to(K[:1, :1, :1], (1, 3, n_k, 16))
        lse = np.broadcast_to(np.float32(np.log(n_k)), (1, 6, 40)) + Q[:1] @ K[0, 0, 0] / 4
        regard.weights(Q[:1], k, lse=lse, rows=slice(rows), cols=slice(cols)) if cols < 2**17 else rowsums.require(
            "lse", problem_from(Q[:1], k, k), lse, pairs=6 * 40 * n_k
        )
        assert (len(seen), max(count for _, count in seen)) == expected
        seen.clear()


def test_arrays_of_a_device_are_read_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "score": regard.alibi(RNG.random(6)),
        "sink": RNG.standard_normal(6),
        "bias": RNG.standard_normal((40, 50)),
    }

    def on_device(x: Any) -> Any:
        memory = DeviceMemory.from_address(x.ctypes.data)
        memory.tensor = torch.from_numpy(x)
        return np.ndarray(x.shape, x.dtype, memory)

    there = {name: on_device(x) for name, x in options.items() if name != "score"}
    q, k, lse = (on_device(np.ascontiguousarray(x)) for x in (Q, K, lse_of(Q, K, **options)))
    p = problem_from(q, k, k, score=options["score"], **there)
    assert p.device is not None
    copied: list[int] = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copied.append(x.numel()) or original(x))
    rowsums.require("lse", p, lse)
    assert max(copied) == 50 * 16
    with pytest.raises(ValueError, match="does not belong"):
        rowsums.require("lse", problem_from(q, k, k, **there), lse)
