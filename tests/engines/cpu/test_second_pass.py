"""Statistics on the cpu engine: what its own kernels could get wrong beside the cases of the table."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from llvmlite import binding as llvm

import regard
from regard.core.parts import scores_alone
from regard.engines.cpu.schedule import stages, work
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.second_work import second_spec
from regard.engines.cpu.schedule.second_work import source as second_source
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import targets
from regard.ops.normalization import problem_from

Array = np.ndarray[Any, np.dtype[Any]]

MAPS = [regard.pooled(5, 70), regard.pooled(300, 2, "max"), regard.pooled(300, 2)]
OBSERVE: list[Any] = ["visible", "received", "profile", "argmax", regard.top(8), *MAPS]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"mask": regard.window(150, 3), "score": regard.softcap(2.0)},
    "shard": {"causal": True, "origin": (3, 1, 77), "offset": 400},
    "sink": {"sink": np.array([0.5, -1.0]), "mask": regard.mask(lambda b, h, i, j: (i % 7 != 3) & (j % 5 < 3))},
}


def inputs(n_q: int, n_k: int, dtype: Any = np.float32, h_kv: int = 1) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(n_q)
    shapes = ((2, n_q, 24), (h_kv, n_k, 24), (h_kv, n_k, 24))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def arrays(seen: regard.Seen) -> list[Array]:
    found = []
    for x in seen.values():
        found += (
            [x.values] if isinstance(x, regard.Profile) else [x.values, x.indices] if isinstance(x, regard.Top) else [x]
        )
    return found


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [(900, 1000), (3, 9000)], ids=str)
def test_as_in_tiles_and_the_same_bits_on_any_number_of_threads(name: str, sizes: tuple[int, int]) -> None:
    q, k, v = inputs(*sizes)
    alone: list[Array] = []
    for threads in (1, 2, 5):
        regard.set_num_threads(threads)
        out, seen = regard.attention(q, k, v, **OPTIONS[name], observe=OBSERVE, engine="cpu")
        assert out.tobytes() == regard.attention(q, k, v, **OPTIONS[name], engine="cpu").tobytes()
        found = arrays(seen)
        alone = alone or found
        for x, y in zip(found, alone, strict=True):
            np.testing.assert_array_equal(x, y)
    _, expected = regard.attention(q, k, v, **OPTIONS[name], observe=OBSERVE, engine="tiled")
    for x, y in zip(found, arrays(expected), strict=True):
        if x.dtype == np.int64:
            assert np.mean(x != y) < 1e-3  # of two weights that nearly agree, either may come first
        else:
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("instructions", [t.name for t in targets().values() if t.runs and not t.amx])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_instruction_set(instructions: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CPU", instructions)
    q, k, v = inputs(150, 300, dtype)
    _, seen = regard.attention(q, k, v, **OPTIONS["window"], observe=OBSERVE, engine="cpu")
    _, expected = regard.attention(q, k, v, **OPTIONS["window"], observe=OBSERVE, engine="tiled")
    for x, y in zip(arrays(seen), arrays(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_neon_compiles(dtype: Any) -> None:
    neon, p = targets()["neon"], problem_from(*inputs(150, 300, dtype), **OPTIONS["window"], observe=OBSERVE)
    second = second_spec(scores_alone(p), neon, tuple(s for s in p.observe if s.name not in ("argmax", "top")))
    for code in (second_source(second, neon), work.source(spec_of(p, neon, p.n_q, False, best=8), neon)):
        assert llvm.ObjectFileRef.from_data(cache.compile_object(code, neon, "neon")).sections()


def test_what_is_asked_beside_a_sum_changes_no_bit_of_it() -> None:
    q, k, v = inputs(700, 700)
    _, alone = regard.attention(q, k, v, causal=True, observe=["received", "profile"])
    _, seen = regard.attention(q, k, v, causal=True, observe=["visible", "received", "profile", regard.top(2)])
    np.testing.assert_array_equal(alone.received, seen.received)
    np.testing.assert_array_equal(alone.profile.values, seen.profile.values)


def test_waves_of_items_are_summed_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(900, 400)
    monkeypatch.setattr(stages, "CHUNK_BLOCKS", 4)
    found = []
    for threads in (1, 3):
        regard.set_num_threads(threads)
        found.append(arrays(regard.attention(q, k, v, causal=True, offset=0, observe=OBSERVE, engine="cpu")[1]))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_span_that_is_done_again_offers_its_keys_once() -> None:
    """NaN in a hidden value: the split is computed again without hidden values."""
    q, k, v = inputs(60, 1500)
    v[:, 700] = np.nan
    hidden = regard.mask(lambda b, h, i, j: j != 700)
    for threads in (1, 4):
        regard.set_num_threads(threads)
        out, seen = regard.attention(q, k, v, mask=hidden, observe=[regard.top(8)], engine="cpu")
        assert np.isfinite(out).all()
        v_clean = np.where(np.isnan(v), np.float32(0), v)
        _, expected = regard.attention(q, k, v_clean, mask=hidden, observe=[regard.top(8)], engine="cpu")
        np.testing.assert_array_equal(seen[regard.top(8)].indices, expected[regard.top(8)].indices)


def test_visible_nan_spoils_its_row_and_nothing_hidden_does() -> None:
    q, k, v = inputs(50, 300)
    k[:, 250] = np.nan
    _, seen = regard.attention(q, k, v, causal=True, offset=230, observe=["received", "visible", MAPS[0], "profile"])
    assert np.isfinite(seen[MAPS[0]][:, :2]).all()  # rows 0 to 19 end before key 250
    assert np.isnan(seen.received[:, :251]).all()
    np.testing.assert_array_equal(seen.received[:, 280:], 0)
    np.testing.assert_array_equal(seen.visible[0], np.arange(231, 281))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, "bfloat16"])
def test_sums_of_a_long_call_come_to_its_queries(dtype: Any) -> None:
    q, k, v = inputs(2000, 2000, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, h_kv=2)
    _, seen = regard.attention(q, k, v, causal=True, observe=["received", "profile", MAPS[0], "visible"])
    for total in (seen.received.sum(-1), seen.profile.values.sum(-1)):
        np.testing.assert_allclose(total, 2000, rtol=1e-5)
    np.testing.assert_allclose(seen[MAPS[0]].sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(seen.visible[1], np.arange(1, 2001))
    np.testing.assert_array_equal(seen.profile.values[:, seen.profile.distances[0] < 0], 0)
