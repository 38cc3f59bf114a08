"""Every case, on every engine, against the specification, within the error bound."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from regard import spec
from regard.api import Frame, problem_from
from regard.bench.cases import CASES, Case
from regard.observing import NAMES, Statistic, Top
from regard.problem import Differential, Outputs, Problem
from support import absolute, assert_gradients, assert_outputs, assert_tangents, assert_within, eps, judge, norm

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
NEAR = regard.mass(lambda b, h, i, j: (i - j) % 5 <= h % 2)
POOLED = [regard.pooled(4, 3), regard.pooled(4, 3, "max"), regard.pooled(200, 1)]
ROWS_OF = regard.weights_of([2, 0])
SIMPLE = [*NAMES, regard.top(3)]
EVERYTHING = [*SIMPLE, NEAR, *POOLED, ROWS_OF]


def problem(case: Case, dtype: Any) -> tuple[Problem, Frame, tuple[Any, ...], dict[str, Any]]:
    q, k, v, options = case.inputs(dtype)
    frame = Frame.of(q, options.get("layout", "bhnd"))
    return problem_from(q, k, v, **options), frame, (q, k, v), options


def distances(p: Problem) -> Any:
    """i − j of every diagonal, (..., h, diagonals), from the indices themselves."""
    at = spec.place(p, np.float64)
    between = np.asarray(at.i - at.j)
    if not p.diagonals:
        return np.zeros(p.shape(0), np.int64)
    lowest = np.concatenate([between[:, 0, 0, ::-1], between[:, 0, 1:, 0]], axis=-1)
    return np.broadcast_to(lowest[:, None], (p.batch, p.heads, p.diagonals)).reshape(p.shape(p.diagonals))


class Conformance:
    """The suite. A subclass names an engine."""

    engine: str

    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_forward(self, case: Case, dtype: Any) -> None:
        p, frame, arrays, options = problem(case, dtype)
        before = [x.copy() for x in arrays]
        observe = [s for s in (EVERYTHING if dtype == np.float32 else SIMPLE) if s is not ROWS_OF or p.n_q > 2]
        out, seen = regard.attention(*arrays, **options, observe=observe, engine=self.engine)
        assert_outputs(p, Outputs(frame.inward(out), seen.lse, seen.entropy))
        self.check_statistics(p, seen)
        assert regard.attention(*arrays, **options, engine=self.engine).tobytes() == out.tobytes()
        for x, y in zip(arrays, before, strict=True):
            assert x.tobytes() == y.tobytes(), "an input was written to"

    def check_statistics(self, p: Problem, seen: regard.Seen) -> None:
        P, found = spec.weights(p, judge(p)), spec.statistics(p, judge(p))
        plain, naive = spec.weights(p, p.compute.type), spec.statistics(p, p.compute.type)
        for name in ("max", "received", "group_received", "profile"):
            got = seen.profile.values if name == "profile" else seen[name]
            assert_within(name, got, found[name], naive[name], found[name] * 4, p.compute)
        np.testing.assert_array_equal(np.broadcast_to(seen.profile.distances, found["profile"].shape), distances(p))
        np.testing.assert_array_equal(seen.visible, found["visible"])
        assert seen.visible.dtype == seen.profile.distances.dtype == np.int64
        size = np.where(found["visible"] > 1, absolute(p)["entropy"] / np.log(np.maximum(found["visible"], 2)), 0)
        name = "normalized_entropy"
        assert_within(name, seen[name], found[name], naive[name], size, p.compute)
        self.check_best(p, seen, P, found)
        parts: list[tuple[Statistic, Any]] = [(s, lambda P, s=s: spec.pooled(P, *s.of)) for s in POOLED]
        parts += [(NEAR, lambda P: spec.mass(p, P, NEAR.of)), (ROWS_OF, lambda P: P[..., ROWS_OF.of, :])]
        for s, part in parts:
            if s in seen:
                assert_within(repr(s), seen[s], part(P), part(plain), part(P) * 4, p.compute)

    @staticmethod
    def check_best(p: Problem, seen: regard.Seen, P: Any, found: dict[str, Any]) -> None:
        sane = ~np.isnan(found["max"])
        near = 64 * eps(p.compute) * (1 + P.max(axis=-1, initial=0))
        index = seen.argmax
        assert index.dtype == np.int64
        np.testing.assert_array_equal((index == -1)[sane], (found["argmax"] == -1)[sane])
        if p.n_k:
            chosen = np.take_along_axis(P, np.maximum(index, 0)[..., None], -1)[..., 0]
            assert (np.abs(chosen - found["max"]) <= near)[sane].all()
        top: Top = seen[regard.top(3)]
        k = min(3, p.n_k)
        best = np.take_along_axis(P, np.maximum(found["order"], 0), -1)[..., :k]
        best = np.where(found["order"][..., :k] < 0, 0, best)
        assert (np.abs(top.values[..., :k] - best) <= near[..., None])[sane].all()
        np.testing.assert_array_equal((top.indices[..., :k] == -1)[sane], (found["order"][..., :k] == -1)[sane])
        assert (top.indices[..., k:] == -1).all()
        assert (top.values[..., k:] == 0).all()
        if k:
            picked = np.take_along_axis(P, np.maximum(top.indices[..., :k], 0), -1)
            assert (np.abs(np.where(top.indices[..., :k] < 0, 0, picked) - best) <= near[..., None])[sane].all()

    @pytest.mark.parametrize(("n_q", "n_k"), [(40, 500), (2, 3000)])
    def test_ties_go_to_the_lowest_key(self, n_q: int, n_k: int) -> None:
        """Of scores that are exact, few values many times."""
        rng = np.random.default_rng(0)
        q, k = (rng.integers(-1, 2, (2, n, 3)).astype(np.float32) for n in (n_q, n_k))
        p = problem_from(q, k, k, causal=True, scale=0.5)
        order = np.pad(spec.statistics(p)["order"], [(0, 0), (0, 0), (0, 40)], constant_values=-1)
        for threads in (1, 3):
            regard.set_num_threads(threads)
            for k_best in (1, 2, 8, 20, 40):
                top = regard.top(k_best)
                _, seen = regard.attention(q, k, k, causal=True, scale=0.5, observe=["argmax", top], engine=self.engine)
                np.testing.assert_array_equal(seen[top].indices, order[..., :k_best])
                np.testing.assert_array_equal(seen.argmax, order[..., 0])

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_weights(self, case: Case) -> None:
        p, _, (q, k, v), options = problem(case, np.float32)
        for name in ("dropout", "seed"):
            options.pop(name, None)
        exact, naive = spec.weights(p), spec.weights(p, np.float32)
        _, whole = regard.attention(q, k, v, **options, return_weights=True, engine=self.engine)
        assert_within("weights", whole, exact, naive, 8 * exact, p.dtype)
        rows, cols = slice(1, 18, 3), slice(-9, None)
        tile = regard.weights(q, k, **options, rows=rows, cols=cols, engine=self.engine)
        np.testing.assert_array_equal(tile, whole[..., rows, cols])

    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_gradients(self, case: Case, dtype: Any) -> None:
        p, frame, arrays, options = problem(case, dtype)
        rng = np.random.default_rng(1)
        dout = rng.standard_normal(frame.out_shape(p)).astype(dtype)
        dlse, dentropy = rng.standard_normal((2, *p.shape(p.n_q)))
        for ct in (Outputs(dout, None, None), Outputs(dout, dlse, dentropy), Outputs(None, None, dentropy)):
            got = regard.attention_vjp(*arrays, ct[0], dlse=ct[1], dentropy=ct[2], **options, engine=self.engine)
            turned = {n: frame.inward(getattr(got, n)) for n in ("query", "key", "value")}
            inward = Outputs(None if ct[0] is None else frame.inward(ct[0]), *ct[1:])
            assert_gradients(p, inward, Differential(**turned, bias=got.bias, sink=got.sink, tables=got.tables))

    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_tangents(self, case: Case, dtype: Any) -> None:
        p, frame, arrays, options = problem(case, dtype)
        rng = np.random.default_rng(2)

        def like(x: Any) -> Any:
            return None if x is None else rng.standard_normal(x.shape).astype(x.dtype)

        dq, dk, dv = (like(x) for x in arrays)
        dbias, dsink, dtables = like(p.bias), like(p.sink), {table: like(table) for table in p.tables}
        for part in ({}, {"dkey": dk}, {"dquery": dq, "dkey": dk, "dvalue": dv}):
            t = Differential(
                *(None if part.get(n) is None else frame.inward(part[n]) for n in ("dquery", "dkey", "dvalue")),
                dbias, dsink, dtables,
            )  # fmt: skip
            primal, tangent = regard.attention_jvp(
                *arrays, **part, dbias=dbias, dsink=dsink, dtables=dtables, **options, engine=self.engine
            )
            assert primal.out is not None
            assert tangent.out is not None
            assert_tangents(p, t, tangent._replace(out=frame.inward(tangent.out)))
            assert primal.out.tobytes() == regard.attention(*arrays, **options, engine=self.engine).tobytes()


class TestCpu(Conformance):
    engine = "cpu"


class TestTiled(Conformance):
    engine = "tiled"


class TestSpecification(Conformance):
    engine = "spec"


def test_the_bound_can_fail() -> None:
    p = problem(CASES[0], np.float32)[0]
    out = spec.forward(p).out
    assert out is not None
    exact = out.copy()
    assert_within("out", exact, exact, exact, np.abs(exact), np.dtype(np.float32))
    out[0, 0, 0, 0] += 1e-4 * norm(exact)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_within("out", out, exact, exact, np.abs(exact), np.dtype(np.float32))


def test_observing_changes_no_bit() -> None:
    q, k, v, options = CASES[-1].inputs(np.float32)
    out = regard.attention(q, k, v, **options)
    for s in EVERYTHING:
        assert regard.attention(q, k, v, **options, observe=[s])[0].tobytes() == out.tobytes()


def test_statistics_have_names() -> None:
    q, k, v, _ = CASES[0].inputs(np.float32)
    _, seen = regard.attention(q, k, v, observe=EVERYTHING)
    assert list(seen) == [Statistic(s) if isinstance(s, str) else s for s in EVERYTHING]
    assert seen.lse is seen["lse"] is seen[Statistic("lse")]
    with pytest.raises(AttributeError, match="frozen"):
        seen.lse = 0
    with pytest.raises(KeyError, match="not observed"):
        seen[regard.top(4)]
