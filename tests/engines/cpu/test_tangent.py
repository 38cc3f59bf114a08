"""The tangent kernel: every instruction set, bits, what is hidden, and no element outside the arrays."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from cases import CASES, Case
from engines.cpu.test_backward import TURNS
from engines.cpu.test_targets import SOME, by_turns
from regard.core.layout import Layout
from regard.core.problem import Differential, Outputs, Problem
from regard.engines import cpu, tiled
from regard.engines.cpu.schedule import tangent_work
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import targets
from regard.ops.normalization import problem_from
from support import assert_tangents

RNG = np.random.default_rng(0)
H, N, D = 4, 700, 24
Q, DQ = (RNG.standard_normal((2, H, N, D)).astype(np.float32) for _ in range(2))
K, V, DK, DV = (RNG.standard_normal((2, 2, N, D)).astype(np.float32) for _ in range(4))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"mask": regard.window(150, 20)},
    "score": {"score": [regard.softcap(5.0), regard.alibi(regard.table(np.full(H, 0.1)))], "causal": True},
    "dropout and sink": {"dropout": 0.2, "seed": 7, "sink": np.full(H, 0.3), "causal": True},
    "bias": {"bias": RNG.standard_normal((H, 1, N)), "score": regard.softcap(2.0)},
    "dense mask": {"mask": RNG.random((N, N)) < 0.7, "bias": RNG.standard_normal((N, N)).astype(np.float32)},
}


def tangents_of(p: Problem, q: Any = DQ, k: Any = DK, v: Any = DV, **parts: Any) -> Differential:
    """Tangents of q, k and v as given, and of all else that may vary the same in every call."""

    def like(x: Any) -> Any:
        return None if x is None else np.cos(np.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    return replace(
        Differential(q, k, v, like(p.bias), like(p.sink), {table: like(table.array) for table in p.rules.tables}),
        **parts,
    )


def run(q: Any, k: Any, v: Any, dq: Any, dk: Any, dv: Any, given: bool = False, **options: Any) -> tuple[bytes, ...]:
    """The bits of the outputs and of their tangents."""
    p = problem_from(q, k, v, **options)
    t = tangents_of(p, dq, dk, dv)
    outputs = cpu.jvp(p, t)[0]
    made, tangents = cpu.jvp(p, t, outputs if given else None)
    assert not given or made is outputs
    return tuple(x.tobytes() for x in (*made, *tangents) if x is not None)


@pytest.fixture(params=OPTIONS)
def option(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


def assert_near(got: Outputs, expected: Outputs, tolerance: float = 2e-6) -> None:
    for name, x, y in zip(("out", "lse", "entropy"), got[:3], expected[:3], strict=True):
        assert x is not None
        assert y is not None
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)


# What varies alone: each makes a kernel. Without a score, a bias or a sink all that varies is in "plain".
ALONE = {
    "plain": ("query", "key", "value", "nothing"),
    "score": ("query", "key", "value", "tables"),
    "dropout and sink": ("query", "key", "value", "sink"),
    "bias": ("query", "key", "value", "bias"),
    "dense mask": ("query", "key", "value", "bias"),
}


@pytest.mark.parametrize(
    ("name", "varies"), [(name, part) for name in OPTIONS for part in ("all", *ALONE.get(name, ()))]
)
def test_agrees_with_the_tiled_engine(name: str, varies: str) -> None:
    p = problem_from(Q, K, V, **OPTIONS[name])
    t = tangents_of(p)
    if varies != "all":
        part = {} if varies == "nothing" else {varies: getattr(t, varies)}
        assert all(x is not None and len(x) for x in part.values())
        t = replace(Differential(), **part)
    got, expected = cpu.jvp(p, t), tiled.jvp(p, t)
    assert_near(got[0], expected[0])
    assert_near(got[1], expected[1])


def test_outputs_are_those_of_forward_and_may_be_given(option: dict[str, Any]) -> None:
    p = problem_from(Q, K, V, **option)
    t, expected = tangents_of(p), cpu.forward(replace(p, observe=(cpu.ENTROPY,)))[0]
    outputs, tangents = cpu.jvp(p, t)
    for x, y in zip(outputs[:3], expected[:3], strict=True):
        assert x is not None
        assert y is not None
        assert x.tobytes() == y.tobytes()
    again, given = cpu.jvp(p, t, outputs)
    assert again is outputs
    for x, y in zip(given[:3], tangents[:3], strict=True):
        assert x is not None
        assert y is not None
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("lead", [slice(0, 2), 1])
@pytest.mark.parametrize("rows", [slice(None), slice(N - 1, N)])
def test_any_number_of_threads(
    option: dict[str, Any], rows: slice, lead: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks enough for all threads, or so few that their key splits run separately."""
    if "bias" in option and option["bias"].shape[-2] == N:
        option = option | {name: option[name][..., rows, :] for name in ("bias", "mask")}
    call = [x[lead][..., rows, :] if x is Q or x is DQ else x[lead] for x in (Q, K, V, DQ, DK, DV)]
    monkeypatch.setattr("regard.runtime.threads._chosen", 1)
    alone = run(*call, **option)
    monkeypatch.setattr("regard.runtime.threads._chosen", threads)
    monkeypatch.setattr("regard.engines.cpu.schedule.work.SMALL", 0)
    assert run(*call, **option) == alone


def test_layouts_and_strides_change_no_bit(option: dict[str, Any]) -> None:
    arrays = (Q, K, V, DQ, DK, DV)
    for given in (False, True):
        expected = run(*arrays, given, **option)
        for transpose in TURNS:
            assert run(*(transpose(x) for x in arrays), given, **option) == expected
            assert run(*arrays[:3], *(transpose(x) for x in arrays[3:]), given, **option) == expected


def test_a_plan_serves_other_tangents() -> None:
    """Schedules are cached by what varies, not by the numbers."""
    for case in ({}, OPTIONS["score"], OPTIONS["dropout and sink"]):
        p = problem_from(Q[0, :, :50], K[0, :, :60], V[0, :, :60], **case)
        some = tangents_of(p, DQ[0, :, :50], DK[0, :, :60], DV[0, :, :60])
        parts = [some, replace(some, query=2 * DQ[0, :, :50]), replace(some, tables={}), replace(some, sink=None)]
        parts += [replace(some, key=None), replace(some, value=None, query=None), some]
        for t in parts:
            assert_near(cpu.jvp(p, t)[1], tiled.jvp(p, t)[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_what_is_hidden_may_hold_anything(dtype: Any) -> None:
    """Keys behind a mask, and rows that see nothing: no bit of other tangents changes, and their own are 0."""
    n, hidden, blind = 150, 77, slice(100, 103)
    q, k, v, dq, dk, dv = (x[0, :, :n].astype(dtype) for x in (Q, K, V, DQ, DK, DV))
    mask = np.ones((n, n), bool)
    mask[:, hidden], mask[blind] = False, False
    option = {
        "mask": mask,
        "score": regard.softcap(3.0),
        "bias": RNG.standard_normal((H, 1, n)),
        "dropout": 0.1,
        "seed": 1,
    }
    for some in (option, {"mask": mask}):
        wild = [x.copy() for x in (q, k, v, dq, dk, dv)]
        at = (blind, hidden, hidden, blind, hidden, hidden)
        for x, place, value in zip(wild, at, (np.nan, np.nan, np.inf, np.inf, np.nan, np.nan), strict=True):
            x[:, place] = value
        for given in (False, True):
            assert run(*wild, given, **some) == run(q, k, v, dq, dk, dv, given, **some)
        p = problem_from(*wild[:3], **some)
        for x in cpu.jvp(p, tangents_of(p, *wild[3:]))[1][:3]:
            assert x is not None
            assert (x[:, blind] == 0).all()


def test_what_is_visible_is_not_hidden() -> None:
    q, k, v, dq, dk, dv = (x[0, :, :60].copy() for x in (Q, K, V, DQ, DK, DV))
    dk[1, 30, 3] = np.nan
    dv[0, 40, 5] = np.nan
    p = problem_from(q, k, v, causal=True)
    outputs, tangents = cpu.jvp(p, Differential(dq, dk, dv))
    assert all(np.isfinite(x).all() for x in outputs if x is not None)
    assert tangents.out is not None
    assert tangents.lse is not None
    assert np.isnan(tangents.out[2:, 30:]).all()
    assert np.isnan(tangents.lse[2:, 30:]).all()
    assert np.isfinite(tangents.out[2:, :30]).all()
    assert np.isnan(tangents.out[:2, 40:, 5]).all()
    assert np.isfinite(tangents.out[:2, :, :5]).all()
    assert np.isfinite(tangents.lse[:2]).all()


@pytest.mark.parametrize(("case", "dtype"), by_turns(SOME, np.float32, np.float64, ml_dtypes.bfloat16), ids=str)
def test_every_instruction_set(forced: str, case: Case, dtype: Any) -> None:
    q, k, v, options = case.inputs(dtype)
    p, frame = problem_from(q, k, v, **options), Layout.of(q, options.get("layout", "bhnd"))
    rng = np.random.default_rng(1)
    t = tangents_of(p, *(frame.to_bhnd(rng.standard_normal(x.shape).astype(dtype)) for x in (q, k, v)))
    outputs, made = cpu.jvp(p, t)
    assert_tangents(p, t, made)
    assert_tangents(p, t, cpu.jvp(p, t, outputs)[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_neon_compiles(dtype: Any) -> None:
    neon, case = targets()["neon"], next(case for case in CASES if case.name == "everything")
    q, k, v, options = case.inputs(dtype)
    p = problem_from(q, k, v, **options)
    results = tangent_work.tangents(p, tangents_of(p, p.query, p.key, p.value), None)
    spec = results.spec(p, neon, p.n_q)
    assert cache.compile_object(results.source(spec, neon), neon, "neon")


def test_nothing_outside_is_touched(guarded: Any) -> None:
    (n_q, n_k, d, d_v), array = guarded.sizes, guarded.array
    q, k, v, dq, dk, dv = (array(2, n, width) for _ in range(2) for n, width in ((n_q, d), (n_k, d), (n_k, d_v)))
    mask = guarded(RNG.random((n_q, n_k)) < 0.7)
    bias, sink = array(2, n_q, n_k, kind=np.float32), array(2, kind=np.float64)
    p = problem_from(q, k, v, mask=mask, bias=bias, sink=sink)
    t = Differential(dq, dk, dv, array(2, n_q, n_k, kind=np.float32), sink)
    outputs, expected = tiled.jvp(p, t)
    assert outputs.out is not None
    given = outputs._replace(out=guarded(outputs.out))
    for before in (None, given):
        for x, y in zip(cpu.jvp(p, t, before)[1][:3], expected[:3], strict=True):
            assert x is not None
            assert y is not None
            assert np.allclose(x.astype(float), y.astype(float), rtol=0.02, atol=0.1)
