"""Every case, on every engine, against the specification, within the error bound."""

import os
import warnings
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from cases import CASES, Case
from regard.core.layout import Layout
from regard.core.problem import Differential, Outputs, Problem
from regard.core.statistics import KINDS, NAMES, Lse, Statistic, Top, statistic
from regard.engines import cpu, engines, tiled
from regard.ops.normalization import problem_from
from regard.reference import specification
from special import ROWS, SPECIALS, Special, check
from support import (
    absolute,
    assert_gradients,
    assert_outputs,
    assert_second,
    assert_second_tangents,
    assert_tangents,
    assert_within,
    eps,
    judge,
    norm,
    to_bhnd,
    turned,
)

HALVES = (np.float16, ml_dtypes.bfloat16)
DTYPES = (np.float32, np.float64, *HALVES)
NEAR = regard.mass(lambda b, h, i, j: (i - j) % 5 <= h % 2)
POOLED = [regard.pooled(4, 3), regard.pooled(4, 3, "max"), regard.pooled(200, 1)]
ROWS_OF = regard.weights_of([2, 0])
RENYI = [regard.renyi(alpha) for alpha in (0, 0.5, 1, 2, np.inf)]
BEST = regard.top(3)
SIMPLE = [*NAMES, BEST]
EVERYTHING = [*SIMPLE, NEAR, *POOLED, *RENYI, ROWS_OF]


def problem(case: Case, dtype: Any) -> tuple[Problem, Layout, tuple[Any, ...], dict[str, Any]]:
    q, k, v, options = case.inputs(dtype)
    frame = Layout.of(q, options.get("layout", "bhnd"))
    return problem_from(q, k, v, **options), frame, (q, k, v), options


def distances(p: Problem) -> Any:
    """i − j of every diagonal, (..., h, diagonals), from the indices themselves."""
    at = specification.indices_of(p, np.float64)
    between = np.asarray(at.i - at.j)
    if not p.extents.diagonals:
        return np.zeros(p.shape(0), np.int64)
    lowest = np.concatenate([between[:, 0, 0, ::-1], between[:, 0, 1:, 0]], axis=-1)
    return np.broadcast_to(lowest[:, None], (p.batch, p.heads, p.extents.diagonals)).reshape(
        p.shape(p.extents.diagonals)
    )


def assert_statistics(seen: regard.Seen, exact: regard.Seen, within: float) -> None:
    """Compare all statistics of two calls; NaN is equal to NaN."""
    for s in exact:
        one = statistic(s) if isinstance(s, str) else s
        for x, y in zip(one.split(seen[s]), one.split(exact[s]), strict=True):
            np.testing.assert_allclose(x, y, rtol=within, atol=within, err_msg=repr(s))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case in every dtype, as far as the engine's class runs it."""
    if metafunc.cls is None or "case" not in metafunc.fixturenames:
        return
    name = metafunc.function.__name__
    cases = [c for c in CASES if max(c.d, c.d_v) <= metafunc.cls.widest]
    if "dtype" in metafunc.fixturenames:
        pairs = [(c, t) for c in cases for t in DTYPES if metafunc.cls.runs(name, c, t)]
        metafunc.parametrize(("case", "dtype"), pairs, ids=[f"{c}-{np.dtype(t).name}" for c, t in pairs])
    else:
        metafunc.parametrize("case", [c for c in cases if metafunc.cls.runs(name, c, np.float32)], ids=str)


class Conformance:
    """The suite. A subclass names an engine, and may take less of what is slow on it."""

    engine: str
    threads: tuple[int, ...] = (1, 3)
    best: tuple[int, ...] = (1, 2, 8, 20, 40)
    length = 150
    long = 10_000  # keys that make a large problem with the 120 queries of these tests
    widest = 1024  # features of a head
    same_bits = True  # of a part of the weights and of all, of results beside others and alone

    @staticmethod
    def runs(test: str, case: Case, dtype: Any) -> bool:
        """Derivatives in one of the dtypes of 16 bits, by turns."""
        return test == "test_forward" or dtype not in HALVES or dtype is HALVES[CASES.index(case) % 2]

    @classmethod
    def observed(cls, case: Case, dtype: Any) -> list[Any]:
        return EVERYTHING if dtype == np.float32 else SIMPLE

    @classmethod
    def variants(cls, case: Case, dtype: Any, *of: Any) -> tuple[Any, ...]:
        """The first, which holds everything, and in float32 one of the others by turns: each is a kernel to compile."""
        return (of[0], of[1 + CASES.index(case) % (len(of) - 1)]) if dtype == np.float32 else of[:1]

    def test_forward(self, case: Case, dtype: Any) -> None:
        p, frame, arrays, options = problem(case, dtype)
        before = [x.copy() for x in arrays]
        observe = [s for s in self.observed(case, dtype) if s is not ROWS_OF or p.n_q > 2]
        out, seen = regard.attention(*arrays, **options, observe=observe, engine=self.engine)
        assert_outputs(p, Outputs(frame.to_bhnd(out), seen.lse, seen.entropy))
        if "max" in observe:
            self.check_statistics(p, seen)
        assert regard.attention(*arrays, **options, engine=self.engine).tobytes() == out.tobytes()
        for x, y in zip(arrays, before, strict=True):
            assert x.tobytes() == y.tobytes(), "an input was written to"

    def check_statistics(self, p: Problem, seen: regard.Seen) -> None:
        P, found = specification.weights(p, judge(p)), specification.statistics(p, judge(p))
        plain, naive = specification.weights(p, p.compute.type), specification.statistics(p, p.compute.type)
        for name in ("max", "received", "group_received", "profile"):
            got = seen.profile.values if name == "profile" else seen[name]
            assert_within(name, got, found[name], naive[name], found[name] * 4, p.compute)
        np.testing.assert_array_equal(np.broadcast_to(seen.profile.distances, found["profile"].shape), distances(p))
        np.testing.assert_array_equal(seen.visible, found["visible"])
        assert seen.visible.dtype == seen.profile.distances.dtype == np.int64
        size = np.where(found["visible"] > 1, absolute(p)["entropy"] / np.log(np.maximum(found["visible"], 2)), 0)
        name = "normalized_entropy"
        assert_within(name, seen[name], found[name], naive[name], size, p.compute)
        name, size = "effective_states", found["effective_states"] * absolute(p)["entropy"]
        assert_within(name, seen[name], found[name], naive[name], size, p.compute)
        if BEST in seen:
            self.check_best(p, seen, P, found)
        parts: list[tuple[Statistic, Any]] = [(s, lambda P, s=s: specification.pooled(P, *s.of)) for s in POOLED]
        parts += [(NEAR, lambda P: specification.mass(p, P, NEAR.of)), (ROWS_OF, lambda P: P[..., ROWS_OF.of, :])]
        for s, part in parts:
            if s in seen:
                assert_within(repr(s), seen[s], part(P), part(plain), part(P) * 4, p.compute)
        sizes, spread = absolute(p), P.sum(-1) + (P.sum(-1) == 0)
        for s in filter(seen.__contains__, RENYI):
            exact, other = (specification.renyi(p, s.of, real) for real in (judge(p), p.compute.type))
            # Both lse, the second of scores alpha times as large, over |1 − alpha|; at 1 and ∞ the entropy itself.
            size = sizes["lse"] * 2 * (1 + s.of) / abs(1 - s.of) if s.of not in (1, np.inf) else sizes["entropy"]
            assert_within(repr(s), seen[s], exact, other, np.where(found["visible"] > 0, size / spread, 0), p.compute)

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
        top: Top = seen[BEST]
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

    @pytest.mark.parametrize("where", ["query", "key", "bias", "one key", "sink", "hidden"])
    def test_nan_is_not_hidden_in_statistics(self, where: str) -> None:
        """A row that sees NaN has keys and no numbers; one that sees nothing has neither."""
        q, k = np.random.default_rng(0).standard_normal((2, 2, 6, 8))
        bias, mask = np.zeros((2, 6, 6)), np.ones((6, 6), bool)
        mask[4], sink = False, None
        {"query": q[0, 1], "key": k[0, 1], "one key": k[0, 2], "hidden": k[0, 5]}.get(where, bias[0, 1, 2:3])[:] = (
            np.nan
        )
        if where == "one key":
            mask[1] = np.arange(6) == 2
        elif where == "hidden":
            mask[:, 5] = False
        elif where == "sink":
            bias[:], mask[4], sink = 0, True, np.array([np.nan, 0.5])
        options = {"bias": bias, "mask": mask, "sink": sink}
        seen, found = (
            regard.attention(q, k, k, observe=SIMPLE, engine=engine, **options)[1] for engine in (self.engine, "spec")
        )
        for name in ("argmax", "max", "entropy", "visible", "normalized_entropy", "effective_states", "received"):
            np.testing.assert_allclose(seen[name], found[name], rtol=1e-6, err_msg=name)
        np.testing.assert_array_equal(seen[BEST].indices, found[BEST].indices)
        np.testing.assert_allclose(seen[BEST].values, found[BEST].values, rtol=1e-6)
        np.testing.assert_array_equal(seen.argmax == -1, ~mask.any(1) & [[True], [True]])

    @pytest.mark.parametrize("sink", [np.nan, np.inf, -np.inf])
    def test_a_sink_gives_no_weight_to_a_row_that_sees_nothing(self, sink: float) -> None:
        q, k = np.random.default_rng(0).standard_normal((2, 2, 20, 8))
        observe = [*SIMPLE, NEAR, *POOLED, ROWS_OF]
        for mask in (np.arange(20)[:, None] % 3 > 0, False):
            options = {"mask": np.broadcast_to(mask, (20, 20)), "sink": np.array([sink, 0.5]), "observe": observe}
            found, exact = (regard.attention(q, k, k, **options, engine=engine) for engine in (self.engine, "spec"))
            np.testing.assert_allclose(found[0], exact[0], rtol=1e-6, atol=1e-12, err_msg="out")
            assert_statistics(found[1], exact[1], 1e-6)

    @pytest.mark.parametrize(
        ("least", "dtype", "by_bias"),
        [
            *(
                (least, np.float32, by_bias)
                for least in (-(2.0**14), -(2.0**30), -(2.0**100))
                for by_bias in (False, True)
            ),
            *((float(np.finfo(np.float32).min), dtype, True) for dtype in DTYPES),
            (-(2.0**30), np.float64, True),
            (2.0**30, np.float32, False),
        ],
    )
    def test_rows_of_one_large_score(self, least: float, dtype: Any, by_bias: bool) -> None:
        """Their lse cannot hold the logarithm of how many keys they see, nor the score times alpha."""
        rng = np.random.default_rng(0)
        q, k = (rng.standard_normal(shape).astype(dtype) for shape in ((4, 40, 16), (2, 150, 16)))
        far, each = np.arange(40) % 20 > 8, abs(least) ** 0.5
        options: dict[str, Any] = {"causal": True, "sink": np.array([-np.inf, -abs(least)] * 2)}
        q[:, far] = q[..., 0] = k[..., 0] = 0
        if by_bias:
            options["bias"] = np.where(far[:, None], least, 0).astype(np.promote_types(dtype, np.float32))
        else:
            k[..., 0], q[:, far, 0], options["scale"] = each, np.sign(least) * each, 1.0
        observe = [*EVERYTHING, regard.renyi(1.5)]
        seen, exact = (
            regard.attention(q, k, k, **options, observe=observe, engine=engine)[1] for engine in (self.engine, "spec")
        )
        assert_statistics(seen, exact, 2e-3 if dtype in HALVES else 1e-4)

    @pytest.mark.parametrize("least", [-1e9, 1e9])
    def test_a_part_of_the_weights_of_rows_of_one_large_score(self, least: float) -> None:
        q, k = np.zeros((2, 120, 16), np.float32), np.zeros((1, self.long, 16), np.float32)
        bias = np.full((120, 1), least, np.float32)
        P = regard.weights(q, k, bias=bias, rows=slice(7, 90, 3), cols=slice(5, -7), engine=self.engine)
        np.testing.assert_allclose(P, 1 / self.long, rtol=1e-5)

    @pytest.mark.parametrize(("n_q", "n_k"), [(40, 500), (2, 3000)])
    def test_ties_go_to_the_lowest_key(self, n_q: int, n_k: int) -> None:
        """Of scores that are exact, few values many times."""
        rng = np.random.default_rng(0)
        q, k = (rng.integers(-1, 2, (2, n, 3)).astype(np.float32) for n in (n_q, n_k))
        p = problem_from(q, k, k, causal=True, scale=0.5)
        order = np.pad(specification.statistics(p)["order"], [(0, 0), (0, 0), (0, 40)], constant_values=-1)
        for threads in self.threads:
            regard.set_num_threads(threads)
            for k_best in self.best:
                top = regard.top(k_best)
                _, seen = regard.attention(q, k, k, causal=True, scale=0.5, observe=["argmax", top], engine=self.engine)
                np.testing.assert_array_equal(seen[top].indices, order[..., :k_best])
                np.testing.assert_array_equal(seen.argmax, order[..., 0])

    def test_weights(self, case: Case) -> None:
        p, _, (q, k, v), options = problem(case, np.float32)
        for name in ("dropout", "seed"):
            options.pop(name, None)
        exact, naive = specification.weights(p), specification.weights(p, np.float32)
        _, whole = regard.attention(q, k, v, **options, return_weights=True, engine=self.engine)
        assert_within("weights", whole, exact, naive, 8 * exact, p.dtype)
        rows, cols = slice(1, 18, 3), slice(-9, None)
        tile = regard.weights(q, k, **options, rows=rows, cols=cols, engine=self.engine)
        if self.same_bits:
            np.testing.assert_array_equal(tile, whole[..., rows, cols])
        exact, naive = exact[..., rows, cols], naive[..., rows, cols]
        assert_within("weights of some", tile, exact, naive, 8 * exact, p.dtype)

    def test_weights_of_large_scores(self) -> None:
        """Scores up to 400, as real models have, where a rounded lse is off by more than the bound."""
        rng = np.random.default_rng(6)
        rows, cols = slice(2, 40, 3), slice(5, -7)
        for n, dtype, largest in (
            (self.length, np.float32, 100),
            (self.long, np.float32, 400),
            (self.long, ml_dtypes.bfloat16, 400),
        ):
            q, k = rng.standard_normal((2, 60, 16)), rng.standard_normal((1, n, 16))
            q *= largest / np.abs(q @ k.swapaxes(-1, -2)).max(axis=(1, 2), keepdims=True)
            q, k = q.astype(dtype), k.astype(dtype)
            options: dict[str, Any] = {"scale": 1.0, "sink": np.array([0.5, largest / 2])}
            p = problem_from(q, k, k, **options)
            exact, naive = specification.weights(p), specification.weights(p, np.float32)
            options["engine"] = self.engine
            _, P, seen = regard.attention(q, k, k, **options, return_weights=True, observe=["lse", ROWS_OF])
            assert_within("weights", P, exact, naive, exact, p.dtype)
            some = ..., [2, 0], slice(None)
            assert_within("rows", seen[ROWS_OF], exact[some], naive[some], exact[some], p.compute)
            tile = regard.weights(q, k, **options, lse=seen.lse, rows=rows, cols=cols)
            size = exact * (1 + np.abs(seen.lse[..., None]) / 8)  # an eps of |lse| in addition
            assert_within("tile", tile, *(x[..., rows, cols] for x in (exact, naive, size)), p.dtype)

    @pytest.mark.parametrize("score", [15_600.0, -15_600.3, 3e6])
    def test_a_lone_key_has_all_of_the_weight(self, score: float) -> None:
        """However its score is rounded, in a long call as in a short one, in parts and in statistics."""
        for n in (4, self.long):
            rng = np.random.default_rng(7)
            q, k = np.ones((1, 120, 64), np.float32), rng.standard_normal((1, n, 64), np.float32) / 100
            key = np.float32(score / 64) * rng.uniform(0.5, 1.5, 64).astype(np.float32)
            k[0, n // 2] = key
            options: dict[str, Any] = {"scale": 1.0, "engine": self.engine}
            if score < 0:
                options["mask"] = np.arange(n) == n // 2
            _, P, seen = regard.attention(q, k, k, **options, return_weights=True, observe=["lse", "max", ROWS_OF])
            tile = regard.weights(q, k, **options, lse=seen.lse, cols=slice(n // 2, n // 2 + 1))
            for found in (P[..., n // 2], tile[..., 0], seen.max, seen[ROWS_OF][..., n // 2]):
                np.testing.assert_array_equal(found, 1)

    def test_gradients(self, case: Case, dtype: Any) -> None:
        p, frame, arrays, options = problem(case, dtype)
        rng = np.random.default_rng(1)
        dout = rng.standard_normal(frame.out_shape(p)).astype(dtype)
        dlse, dentropy = rng.standard_normal((2, *p.shape(p.n_q)))
        whole = Outputs(dout, dlse, dentropy)
        for ct in self.variants(case, dtype, whole, Outputs(dout, None, None), Outputs(None, None, dentropy)):
            got = regard.attention_vjp(*arrays, ct[0], dlse=ct[1], dentropy=ct[2], **options, engine=self.engine)
            assert_gradients(p, to_bhnd(frame, ct), turned(frame, got))

    def test_tangents(self, case: Case, dtype: Any) -> None:
        p, frame, arrays, options = problem(case, dtype)
        rng = np.random.default_rng(2)

        def like(x: Any) -> Any:
            return None if x is None else rng.standard_normal(x.shape).astype(x.dtype)

        dq, dk, dv = (like(x) for x in arrays)
        dbias, dsink, dtables = like(p.bias), like(p.sink), {table: like(table) for table in p.rules.tables}
        dmetric = like(p.metric)
        for part in self.variants(case, dtype, {"dquery": dq, "dkey": dk, "dvalue": dv}, {"dkey": dk}, {}):
            t = Differential(
                *(None if part.get(n) is None else frame.to_bhnd(part[n]) for n in ("dquery", "dkey", "dvalue")),
                dbias, dsink, dtables, dmetric,
            )  # fmt: skip
            primal, tangent = regard.attention_jvp(
                *arrays, **part, dbias=dbias, dsink=dsink, dtables=dtables, dmetric=dmetric, **options,
                engine=self.engine,
            )  # fmt: skip
            assert primal.out is not None
            assert tangent.out is not None
            assert_tangents(p, t, tangent._replace(out=frame.to_bhnd(tangent.out)))
            assert primal.out.tobytes() == regard.attention(*arrays, **options, engine=self.engine).tobytes()

    def test_second_derivatives(self, case: Case, dtype: Any) -> None:
        """Of everything that may vary along everything, of the output alone as double backward has it, of lse."""
        p, frame, arrays, options = problem(case, dtype)
        rng = np.random.default_rng(3)

        def like(x: Any) -> Any:
            return None if x is None else rng.standard_normal(x.shape).astype(x.dtype)

        def cotangents() -> Outputs:
            dlse, dentropy = rng.standard_normal((2, *p.shape(p.n_q)))
            return Outputs(rng.standard_normal(frame.out_shape(p)).astype(dtype), dlse, dentropy)

        everything = Differential(
            *map(like, arrays), like(p.bias), like(p.sink), {x: like(x) for x in p.rules.tables}, like(p.metric)
        )
        ct, d_ct, none = cotangents(), cotangents(), Outputs(None, None, None)
        for t, given, moving in self.variants(
            case,
            dtype,
            (everything, ct, d_ct),
            (everything, Outputs(ct.out, None, None), none),
            (Differential(key=everything.key), Outputs(None, ct.lse, None), Outputs(None, None, d_ct.entropy)),
        ):
            got, tangent = regard.attention_vjp_jvp(
                *arrays, given.out, t, dlse=given.lse, dentropy=given.entropy, cotangent_tangents=moving,
                **options, engine=self.engine,
            )  # fmt: skip
            t, got = turned(frame, t), turned(frame, got)
            given, moving, tangent = (to_bhnd(frame, x) for x in (given, moving, tangent))
            assert_second(p, t, given, moving, got)
            assert_tangents(p, t, tangent)

    def test_gradients_that_nobody_wants_are_left_out(self) -> None:
        """First and second ones of a bias and of a table; no bit of the others changes."""
        engine, rng = engines()[self.engine], np.random.default_rng(5)
        q, k, v, dout, ddout, dq = rng.standard_normal((6, 2, 20, 4), np.float32)
        table = regard.table(rng.standard_normal((2, 3)))
        bias = rng.standard_normal((20, 20))
        p = problem_from(q, k, v, bias=bias, score=lambda s, b, h, i, j: s + table[h, j % 3])
        fixed = replace(p, constants=frozenset({"bias", table}))
        ct, moving, t = Outputs(dout, None, None), Outputs(ddout, None, None), Differential(query=dq)
        outputs, along = tiled.jvp(p, t)
        pairs = [[engine.backward(x, outputs, ct) for x in (p, fixed)]]
        pairs += [[engine.backward_jvp(x, outputs, ct, t, along, moving) for x in (p, fixed)]]
        for whole, part in pairs:
            assert whole.bias is not None
            assert list(whole.tables) == [table]
            assert part.bias is None
            assert not part.tables
            for name in ("query", "key", "value"):
                assert getattr(part, name).tobytes() == getattr(whole, name).tobytes()

    def test_second_tangents(self, case: Case, dtype: Any) -> None:
        """Along two directions in which everything varies, in which little does, and twice along one."""
        p, engine = replace(problem(case, dtype)[0], factors=None), engines()[self.engine]  # as engines have it
        rng = np.random.default_rng(4)

        def like(x: Any) -> Any:
            return None if x is None else rng.standard_normal(x.shape).astype(x.dtype)

        def direction() -> Differential:
            arrays = (p.query, p.key, p.value, p.bias, p.sink)
            return Differential(*map(like, arrays), {x: like(x) for x in p.rules.tables})

        t, u = direction(), direction()
        some = Differential(key=u.key, bias=u.bias), Differential(value=t.value, tables=t.tables)
        for x, y in self.variants(case, dtype, (t, u), some, some[::-1], (t, t)):
            primal, d_x = tiled.jvp(p, x)  # of any engine, and no kernel has to be compiled
            d_y = tiled.jvp(p, y, primal)[1]
            got = engine.jvp_jvp(p, primal, x, y, d_x, d_y)
            assert_second_tangents(p, x, y, got)
        known = (given._replace(entropy=None) for given in (d_x, d_y))
        without = engine.jvp_jvp(p, primal._replace(entropy=None), x, y, *known)
        if self.engine != "spec":
            assert without.entropy is None
        if self.engine != "spec" and self.same_bits:
            for name in ("out", "lse"):
                assert getattr(without, name).tobytes() == getattr(got, name).tobytes()

    @pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=["float16", "float32"])
    def test_what_overflows_is_infinite_without_a_warning(self, dtype: Any) -> None:
        rng, largest = np.random.default_rng(8), float(np.finfo(dtype).max) / 2
        q, k, dout = (rng.standard_normal((2, 20, 4)).astype(dtype) for _ in range(3))
        metric, v = np.full((4, 4), 200, dtype), (rng.choice([-1, 1], (2, 20, 4)) * largest).astype(dtype)
        dout *= dtype(largest / 8)
        options: dict[str, Any] = {"sink": rng.standard_normal(2).astype(dtype), "engine": self.engine}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for more in ({"metric": metric}, {}):
                g = regard.attention_vjp(q, k, v, dout, **options, **more)
                regard.attention_jvp(q, k, v, dquery=dout, dvalue=v, **options, **more)
                regard.attention_vjp_jvp(q, k, v, dout, regard.Differential(query=dout), **options, **more)
            regard.attention(q, k, v, **options, dropout=0.5, seed=1)
        assert g.query is not None
        assert not np.isfinite(g.query).all()

    @pytest.mark.parametrize("special", SPECIALS, ids=str)
    def test_special_values(self, special: Special) -> None:
        for dtype in filter(special.fits, self.dtypes_of_specials(special)):
            for rows in ROWS:
                check(special, dtype, self.engine, rows)

    @staticmethod
    def dtypes_of_specials(special: Special) -> tuple[Any, ...]:
        return DTYPES

    def test_what_is_hidden_has_no_derivative(self) -> None:
        """First and second ones: 0 for what nothing sees and for rows that see nothing, finite elsewhere."""
        rng, n, hidden, blind = np.random.default_rng(0), self.length, self.length - 4, slice(3, 9)
        q, k, v, dq, dk, dv, dout, ddout = rng.standard_normal((8, 2, n, 8))
        rows = rng.standard_normal((2, n))
        sees = np.ones((n, n), bool)
        sees[blind], sees[:, hidden] = False, False
        bias, dbias = rng.standard_normal((2, 1, n, n))
        for x, bad in ((k, np.nan), (v, np.inf), (dk, np.inf), (dv, np.nan)):
            x[:, hidden] = bad
        for x in (q, dq, dout, ddout):
            x[:, blind] = np.nan
        bias[:, blind], dbias[..., hidden] = np.nan, np.nan
        table = regard.table(rng.standard_normal((2, 3)))
        wishes = {
            "mask": sees, "bias": bias, "dropout": 0.2, "seed": 1, "engine": self.engine,
            "score": lambda s, b, h, i, j: np.tanh(s) * table[h, j % 3] + s,
        }  # fmt: skip
        t = regard.Differential(dq, dk, dv, dbias, None, {table: rng.standard_normal((2, 3))})
        moving = regard.Outputs(ddout, rows, -rows)
        first = regard.attention_vjp(q, k, v, dout, dlse=rows, dentropy=rows, **wishes)
        second, tangent = regard.attention_vjp_jvp(
            q, k, v, dout, t, dlse=rows, dentropy=rows, cotangent_tangents=moving, **wishes
        )
        for g in (first, second):
            for x in (g.query, g.key, g.value, g.bias, g.tables[table]):
                assert x is not None
                assert np.isfinite(x).all()
                assert x.any()
            for x in (g.query[:, blind], g.key[:, hidden], g.value[:, hidden], g.bias[:, ~sees]):  # type: ignore[index]
                assert not x.any()
        p, engine = problem_from(q, k, v, **{n: x for n, x in wishes.items() if n != "engine"}), engines()[self.engine]
        primal, along = engine.jvp(p, t)
        bend = engine.jvp_jvp(p, primal, t, t, along, along)
        for x in (*tangent[:3], *bend[:3]):
            assert x is not None
            assert np.isfinite(x).all()
            assert x.any()
            assert not x[:, blind].any()


class ByTurns(Conformance):
    """Nearly all of the time goes into compiling kernels; where one is the code of another in another type, by turns.

    A mask that is a rule and nothing else is one expression, written wherever a pair is looked at: in float32 and one
    of the other dtypes. Of these, and of scores that are alike, "mask rule" and "score with a table" have the variants,
    and of the other cases one in three. Tangents and second derivatives: in float32 and in float64 or 16 bits.
    Statistics: in float32 those of one in three of the kernels that only they need; else in every other case, and in 16
    bits where no derivatives are taken. `TestTiled` leaves nothing out, nor does REGARD_FUZZ.
    """

    MASKS = (
        "no queries, keys beyond the last", "window", "window both ways", "prefix", "padding", "padding left",
        "documents", "strided", "dilated", "blocks", "composed masks", "mask rule with large integers",
    )  # fmt: skip
    SCORES = ("alibi", "relative", "T5 buckets", "temperature", "score rule")
    WHOLE = ("mask rule", "score with a table", "everything")
    ADDED = ["argmax", BEST], [NEAR], POOLED  # statistics, by the kernel that they need

    @classmethod
    def runs(cls, test: str, case: Case, dtype: Any) -> bool:
        n = CASES.index(case)
        if dtype == np.float32 or case.name == "everything":
            return super().runs(test, case, dtype)
        if case.name in cls.MASKS:
            return dtype is DTYPES[1 + n % 3]
        if test in ("test_tangents", "test_second_derivatives") and (dtype is np.float64) == (n % 4 > 1):
            return False
        return super().runs(test, case, dtype)

    @classmethod
    def observed(cls, case: Case, dtype: Any) -> list[Any]:
        n = CASES.index(case)
        if dtype == np.float32:
            if n % 16 == 0 or case.name == "everything":
                return EVERYTHING
            skipped = [] if case.name in cls.WHOLE else [*cls.ADDED[n % 3 - 1], *cls.ADDED[n % 3 - 2]]
            return [s for s in EVERYTHING if s not in RENYI + skipped]
        turn = case.name == "everything" or dtype is HALVES[1 - n % 2] or (dtype is np.float64 and n % 2 == 0)
        return super().observed(case, dtype) if turn else ["lse", "entropy"]

    @classmethod
    def variants(cls, case: Case, dtype: Any, *of: Any) -> tuple[Any, ...]:
        turn, rest = divmod(CASES.index(case), 3)
        if dtype != np.float32 or case.name in cls.MASKS + cls.SCORES or (rest and case.name not in cls.WHOLE):
            return of[:1]
        return of[0], of[1 + turn % (len(of) - 1)]


class TestCpu(Conformance if "REGARD_FUZZ" in os.environ else ByTurns):  # type: ignore[misc]
    engine = "cpu"


class TestTiled(Conformance):
    engine = "tiled"


class TestDevice(Conformance):
    """Several blocks of rows in each call."""

    engine = "device"
    same_bits = False  # products are those of BLAS, and on some processors (seen: Zen 3) their bits depend on the shape

    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("regard.engines.device.call.ON_HOST", 2**10)
        monkeypatch.setattr("regard.engines.device.call.TILE", 8)


class TestSpecification(Conformance):
    engine = "spec"


@pytest.mark.parametrize("engine", ["cpu", "tiled"])
def test_outputs_that_are_known_are_not_made_again(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, options = CASES[-1].inputs(np.float32)
    rng = np.random.default_rng(0)
    out, seen = regard.attention(q, k, v, observe=["lse", "entropy"], engine=engine, **options)
    dout, rows = rng.standard_normal(out.shape, np.float32), rng.standard_normal(seen.lse.shape)
    t = regard.Differential(key=rng.standard_normal(k.shape, np.float32))
    known = regard.Outputs(out, seen.lse, seen.entropy)

    def derivatives(outputs: Outputs | None, rows: Any) -> list[Any]:
        wishes = options | {"engine": engine, "outputs": outputs}
        g = regard.attention_vjp(q, k, v, dout, dentropy=rows, **wishes)
        primal, tangent = regard.attention_jvp(q, k, v, dkey=t.key, **wishes)
        second, moved = regard.attention_vjp_jvp(q, k, v, dout, t, dentropy=rows, **wishes)
        return [g.query, g.key, g.sink, *primal[:3], *tangent[:3], second.query, second.key, second.sink, *moved[:3]]

    def bits(found: list[Any]) -> list[Any]:
        return [None if x is None else x.tobytes() for x in found]

    fresh = bits(derivatives(None, rows))

    def forward(*args: Any) -> None:
        pytest.fail("forward ran")

    for module in (cpu, tiled):  # engines enter each other, and themselves, by these
        monkeypatch.setattr(module, "forward", forward)
    assert bits(derivatives(known, rows)) == fresh
    without = derivatives(Outputs(out, seen.lse, None), None)
    assert [n for n, x in enumerate(without) if x is None] == [5, 8, 14]  # the entropy and its tangents
    with pytest.raises(pytest.fail.Exception, match="forward ran"):
        derivatives(None, rows)


def test_the_bound_can_fail() -> None:
    p = problem(CASES[0], np.float32)[0]
    out = specification.forward(p).out
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
    assert list(seen) == [KINDS[s]() if isinstance(s, str) else s for s in EVERYTHING]
    assert seen.lse is seen["lse"] is seen[Lse()]
    with pytest.raises(AttributeError, match="frozen"):
        seen.lse = 0
    with pytest.raises(KeyError, match="not observed"):
        seen[regard.top(4)]
