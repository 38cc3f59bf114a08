"""The tangent-of-backward kernel: every instruction set, bits, what is hidden, and no element outside the arrays."""

from dataclasses import fields, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import regard
from cases import CASES, Case
from engines.cpu.test_backward import DO, OPTIONS, RNG, TURNS, H, K, N, Q, V, arrays, bits
from engines.cpu.test_tangent import DK, DQ, DV, tangents_of
from engines.cpu.test_targets import by_turns
from regard.core.problem import Differential, Outputs, Problem
from regard.engines import cpu, tiled
from regard.engines.cpu.schedule import backward_tangent_work
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import targets
from regard.ops.normalization import problem_from
from support import assert_second

DDO = RNG.standard_normal(DO.shape).astype(np.float32)
ROWS = RNG.standard_normal((4, 2, H, N)).astype(np.float32)
GIVEN = Q, K, V, DO, DQ, DK, DV, DDO
NAMES = "larger than a tile", "NaN behind the mask", "curved score", "everything"


class Call(NamedTuple):
    """What the engine's `backward_jvp` takes."""

    p: Problem
    outputs: Outputs
    ct: Outputs
    t: Differential
    d_outputs: Outputs
    d_ct: Outputs

    @classmethod
    def of(cls, given: Any = GIVEN, rows: Any = ROWS, outputs: Any = None, **options: Any) -> "Call":
        """A call along tangents of everything; outputs and their tangents from the tiled engine unless given."""
        q, k, v, dout, dq, dk, dv, ddout = given
        p = problem_from(q, k, v, **options)
        t = tangents_of(p, dq, dk, dv)
        known, moved = tiled.jvp(p, t) if outputs is None else outputs
        return cls(p, known, Outputs(dout, *rows[:2]), t, moved, Outputs(ddout, *rows[2:]))

    def run(self, engine: Any = cpu) -> Differential:
        found: Differential = engine.backward_jvp(*self)
        return found


@pytest.fixture(params=OPTIONS)
def option(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


def assert_near(got: Differential, expected: Differential, tolerance: float = 2e-5) -> None:
    for name, x in arrays(expected).items():
        size = np.abs(x).max(initial=1.0)  # the sum over all keys may be 0 but for rounding
        np.testing.assert_allclose(arrays(got)[name] / size, x / size, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", ["score", "dropout and sink", "bias of keys", "bias that the batch shares"])
def test_agrees_with_the_tiled_engine_whatever_varies(name: str) -> None:
    """One kernel serves all: what does not vary is a term less."""
    n, option = 300, dict(OPTIONS[name])  # tiles before, between and after others
    if "bias" in option:
        option["bias"] = option["bias"][..., :n, :n]
    call = Call.of([x[0, :, :n] for x in GIVEN], ROWS[:, 0, :, :n], **option)
    nothing, still = Differential(), Outputs(None, None, None)
    only = [replace(nothing, **{x.name: getattr(call.t, x.name)}) for x in fields(Differential)]
    calls = [call, *(call._replace(t=t, d_ct=still) for t in only), call._replace(t=nothing)]
    calls += [call._replace(d_ct=Outputs(*(x if n == m else None for m, x in enumerate(call.d_ct)))) for n in range(3)]
    for some in calls:
        outputs, moved = tiled.jvp(some.p, some.t)
        some = some._replace(outputs=outputs, d_outputs=moved)
        assert_near(some.run(), some.run(tiled))
    without = call._replace(ct=Outputs(None, None, None))
    assert_near(without.run(), without.run(tiled))


@pytest.mark.parametrize("lead", [slice(0, 2), 1])
def test_any_number_of_threads(option: dict[str, Any], lead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call.of([x[lead] for x in GIVEN], ROWS[:, lead], **option)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr("regard.runtime.threads._chosen", threads)
        found.append(bits(call.run()))
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("rows", [slice(N - 1, N), slice(500, 503), slice(31, 150)])
def test_dq_does_not_depend_on_the_other_rows(option: dict[str, Any], rows: slice) -> None:
    whole = Call.of(**option)
    part = dict(option)
    if "bias" in option and option["bias"].shape[-2:-1] == (N,):
        part["bias"] = option["bias"][..., rows, :]
    cut = [x[..., rows, :] if x.shape == Q.shape else x for x in GIVEN]
    outputs = [
        Outputs(*(None if x is None else x[:, :, rows] for x in some)) for some in (whole.outputs, whole.d_outputs)
    ]
    call = Call.of(cut, ROWS[..., rows], outputs, **part, offset=rows.start)
    bias = whole.t.bias
    if bias is not None and bias.shape[-2:-1] == (N,):
        bias = bias[..., rows, :]
    got, expected = call._replace(t=replace(call.t, bias=bias)).run().query, whole.run().query
    assert got is not None
    assert expected is not None
    assert got.tobytes() == expected[..., rows, :].tobytes()


def test_layouts_and_strides_change_no_bit(option: dict[str, Any]) -> None:
    call = Call.of(**option)
    expected, outputs = bits(call.run()), (call.outputs, call.d_outputs)
    for transpose in TURNS:
        turned = [some._replace(out=transpose(some.out)) for some in outputs]
        assert bits(Call.of([*(transpose(x) for x in GIVEN)], ROWS, turned, **option).run()) == expected


def test_a_plan_serves_other_tangents() -> None:
    """Schedules are cached by what varies, not by the numbers."""
    for case in ({}, OPTIONS["score"], OPTIONS["dropout and sink"]):
        call = Call.of([x[0, :, :60] for x in GIVEN], ROWS[:, 0, :, :60], **case)
        t = call.t
        parts = [t, replace(t, query=2 * DQ[0, :, :60]), replace(t, tables={}), replace(t, sink=None)]
        parts += [replace(t, tables={table: -x for table, x in t.tables.items()}), replace(t, key=None), t]
        for some in parts:
            outputs, moved = tiled.jvp(call.p, some)
            again = call._replace(t=some, outputs=outputs, d_outputs=moved)
            assert_near(again.run(), again.run(tiled))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_what_is_hidden_may_hold_anything(dtype: Any) -> None:
    """Keys behind a mask, and rows that see nothing: no bit of the others changes, and their own are 0."""
    n, hidden, blind = 150, 77, slice(100, 103)
    tame = [x[0, :, :n].astype(dtype) for x in GIVEN]
    rows = ROWS[:, 0, :, :n].astype(np.float64 if dtype is np.float64 else np.float32)
    rows[..., blind] = 0
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
        call = Call.of(tame, rows, **some)
        wild = [x.copy() for x in tame]
        for m, (x, bad) in enumerate(zip(wild, (np.nan, np.nan, np.inf, -np.inf) * 2, strict=True)):
            x[:, hidden if GIVEN[m].shape == K.shape else blind] = bad
        got = Call.of(wild, rows, (call.outputs, call.d_outputs), **some).run()
        assert bits(got) == bits(call.run())
        for name in ("key", "value"):
            assert (getattr(got, name)[:, hidden] == 0).all()
        assert got.query is not None
        assert (got.query[:, blind] == 0).all()


def test_what_is_visible_is_not_hidden() -> None:
    given = [x[0, :, :60].copy() for x in GIVEN]
    given[5][1, 30, 3] = np.nan  # the tangent of a key, which queries 2 and 3 see from row 30 on
    g = Call.of(given, ROWS[:, 0, :, :60], causal=True).run()
    assert g.query is not None
    assert g.key is not None
    assert np.isnan(g.query[2:, 30:]).all()
    assert np.isfinite(g.query[2:, :30]).all()
    assert np.isfinite(g.query[:2]).all()
    assert np.isnan(g.key[1]).all()
    assert np.isfinite(g.key[0]).all()


@pytest.mark.parametrize(
    ("case", "dtype"),
    by_turns([case for case in CASES if case.name in NAMES], np.float32, np.float64, ml_dtypes.bfloat16),
    ids=str,
)
def test_every_instruction_set(forced: str, case: Case, dtype: Any) -> None:
    q, k, v, options = case.inputs(dtype)
    p, rng = problem_from(q, k, v, **options), np.random.default_rng(1)
    shapes = [p.shape(p.n_q, p.d_v), p.query.shape, p.key.shape, p.value.shape] * 2
    given = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    rows = rng.standard_normal((4, *p.shape(p.n_q))).astype(p.compute)
    t, ct, moving = tangents_of(p, *given[1:4]), Outputs(given[0], *rows[:2]), Outputs(given[4], *rows[2:])
    outputs, moved = tiled.jvp(p, t)
    assert_second(p, t, ct, moving, Call(p, outputs, ct, t, moved, moving).run())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_neon_compiles(dtype: Any) -> None:
    neon, case = targets()["neon"], next(case for case in CASES if case.name == "everything")
    q, k, v, options = case.inputs(dtype)
    p = problem_from(q, k, v, **options)
    t = tangents_of(p, p.query, p.key, p.value)
    outputs, moved = tiled.jvp(p, t)
    arrays = backward_tangent_work.BackwardTangentArrays(p, outputs, outputs, t, moved, moved)
    spec = arrays.spec(neon)
    assert cache.compile_object(arrays.source(spec, neon), neon, "neon")


def test_nothing_outside_is_touched(guarded: Any) -> None:
    (n_q, n_k, d, d_v), array = guarded.sizes, guarded.array
    sides = (n_q, d), (n_k, d), (n_k, d_v), (n_q, d_v)
    q, k, v, dout, dq, dk, dv, ddout = (array(2, *side) for side in sides * 2)
    mask = guarded(RNG.random((n_q, n_k)) < 0.7)
    real = np.float64 if guarded.dtype is np.float64 else np.float32
    rows = [array(2, n_q, kind=real) for _ in range(4)]
    p = problem_from(q, k, v, mask=mask, bias=array(2, n_q, n_k, kind=np.float32), sink=array(2, kind=np.float64))
    t = Differential(dq, dk, dv, array(2, n_q, n_k, kind=np.float32), array(2, kind=np.float64))
    known = [Outputs(*(guarded(x) for x in some if x is not None)) for some in tiled.jvp(p, t)]
    call = Call(p, known[0], Outputs(dout, *rows[:2]), t, known[1], Outputs(ddout, *rows[2:]))
    got, expected = arrays(call.run()), arrays(call.run(tiled))
    for name, x in expected.items():
        assert np.allclose(got[name].astype(float), x.astype(float), rtol=0.02, atol=0.3), name
