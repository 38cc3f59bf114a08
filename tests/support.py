"""The error bound of the project, and what tests of engines share."""

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cases import CASES
from regard.cli import main
from regard.core.layout import Layout
from regard.core.problem import Differential, Outputs, Problem
from regard.reference import specification
from regard.rules import tangent

Array = np.ndarray[Any, np.dtype[Any]]
# On other frameworks the product with a metric is theirs, and its bits are those of any product there.
SAME_BITS = [case for case in CASES if "metric" not in case.name]


def judge(p: Problem) -> Any:
    """The precision in which an engine is judged."""
    return np.longdouble if p.dtype == np.float64 else np.float64


def eps(dtype: np.dtype[Any]) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)


def naive(p: Problem) -> tuple[Any, Any]:
    """The arithmetic of the naive computation: float32 sums and S, P, O in the dtype for 16 bits; else the dtype."""
    return p.compute.type, None if p.dtype == p.compute else p.dtype


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def norm(x: Array) -> float:
    return float(np.sqrt((np.abs(x.astype(np.longdouble)) ** 2).sum()))


def assert_within(name: str, got: Array, exact: Array, naive: Array, size: Array, dtype: np.dtype[Any]) -> None:
    """‖err‖ ≤ 2 ‖err of the naive computation‖ + 8 · eps · ‖size‖, and the same entries finite.

    In float64 the relative error is at most 1e-10 besides, whatever the size (of 1 where a result is smaller).

    size: the same formula with every term taken absolutely, such as |P| |V| for the output.
    """
    assert got.shape == exact.shape, f"{name}: shape {got.shape}, expected {exact.shape}"
    wild = ~np.isfinite(exact.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact), err_msg=f"{name}: NaN where there should be none")
    np.testing.assert_array_equal(got[wild].astype(np.float64), exact[wild].astype(np.float64), err_msg=name)
    got, exact, naive, size = (np.where(wild, 0, x.astype(np.longdouble)) for x in (got, exact, naive, size))
    error, allowed = norm(got - exact), 2 * norm(naive - exact) + 8 * eps(dtype) * norm(size)
    if dtype == np.float64:
        allowed = min(allowed, 1e-10 * max(norm(exact), 1.0))
    assert error <= allowed, f"{name}: error {error:.3e} exceeds {allowed:.3e} (naive {norm(naive - exact):.3e})"


def turned(frame: Layout, x: Differential) -> Differential:
    """What a caller is given, or gives, as the problem has its inputs."""
    arrays = {name: getattr(x, name) for name in ("query", "key", "value")}
    return replace(x, **{name: None if a is None else frame.to_bhnd(a) for name, a in arrays.items()})


def to_bhnd(frame: Layout, x: Outputs) -> Outputs:
    return x._replace(out=None if x.out is None else frame.to_bhnd(x.out))


def absolute(
    p: Problem,
    ct: Outputs | None = None,
    t: Differential | None = None,
    d_ct: Outputs | None = None,
    u: Differential | None = None,
    any_scores: bool = False,
) -> dict[str, Array]:
    """The size of every result: its formula with each term taken absolutely, in float64.

    Of gradients with ct, of tangents with t, of the tangents of gradients with these and d_ct, of the
    tangents of tangents with t and u. any_scores: they may be large. A weight exp(S − lse) is known to eps / 2 of |S|
    and of |lse|: beyond 16 that is more than its 8 eps, and the naive computation is now and then right by luck.
    """
    with np.errstate(all="ignore"):
        f = specification.terms(p)
        z = {name: np.nan_to_num(np.abs(getattr(f, name)), posinf=0) for name in "xqkv"}
        M = None if f.M is None else np.abs(f.M)
        z["q"] = z["q"] if M is None else specification.projected(z["x"], M)
        S = np.where(f.visible, np.abs(f.S), 0)
        raw = abs(p.scale) * specification.einsum("bhia,bhja->bhij", z["q"], z["k"])
        reach = np.where(f.visible, S + raw + 1, 0)
        lse = np.where(np.isfinite(f.lse), np.abs(f.lse), 0)
        P = f.P * (1 + (S + raw + lse[..., None]) / 16) if any_scores else f.P
        PD = P * f.D
        sizes = {
            "out": specification.einsum("bhij,bhjc->bhic", PD, z["v"]),
            "lse": 1 + lse + (f.P * reach).sum(-1),
            "entropy": (f.P * (1 + np.abs(f.logP) + lse[..., None] + reach)).sum(-1),
        }
        if ct is not None:
            dO, dlse, dH = (np.abs(x) for x in specification.cotangents(p, ct, np.float64))
            G = f.D * specification.einsum("bhic,bhjc->bhij", dO, z["v"])
            row = (f.P * G).sum(-1) + dlse + dH * (1 + np.abs(f.H))
            c = G + row[..., None] + dH[..., None] * (np.abs(f.logP) + 1)
            dS = P * c * (1 + reach)
            d_ds, d_tables = p.rules.score_partials

            def through(node: Any, x: Array) -> Array:
                return np.abs(specification.through(f, node, x))

            def metric_gradient(dq: Array, x: Array) -> Any:
                return None if M is None else specification.metric_gradient(p, f, dq, x)

            def gradients(dS: Array, dT: Array, parts: Any) -> dict[str, Any]:
                dq = abs(p.scale) * specification.einsum("bhij,bhja->bhia", dT, z["k"])
                return {
                    "query": specification.unprojected(dq, M),
                    "metric": metric_gradient(dq, z["x"]),
                    "key": abs(p.scale) * specification.einsum("bhij,bhia->bhja", dT, z["q"]),
                    "bias": dS,
                    "tables": specification.table_gradients(p, f, parts),
                }

            dT = through(d_ds, dS)
            sizes |= gradients(dS, dT, {leaf: through(node, dS) for leaf, node in d_tables.items()})
            sizes |= {
                "value": specification.einsum("bhij,bhic->bhjc", PD, dO),
                "sink": (f.p_sink * row).sum(axis=(0, 2)),
            }
        if t is not None:
            d = specification.term_tangents(p, t, f)
            moved = np.abs(d.S) * (1 + reach) + reach
            d_sink = np.zeros(()) if t.sink is None else np.broadcast_to(np.abs(t.sink), (p.heads,))[:, None]
            mean = (f.P * moved).sum(-1) + f.p_sink * d_sink
            dv = np.nan_to_num(np.abs(d.v), posinf=0)
            grown = moved + mean[..., None]
            spread = f.P * grown
            sizes |= {
                "d_out": specification.einsum("bhij,bhjc->bhic", spread * f.D, z["v"])
                + specification.einsum("bhij,bhjc->bhic", PD, dv),
                "d_lse": mean,
                "d_entropy": (spread * (1 + np.abs(f.logP))).sum(-1),
            }
        if t is not None and u is not None:
            # Terms of terms as they are, as below.
            e = specification.term_tangents(p, u, f)
            a, b = (np.where(f.visible, np.abs(x.S) + np.abs(x.lse)[..., None], 0) for x in (d, e))
            w = np.abs(specification.second_scores(p, f, d, e)) + a * b
            sinks = (f.p_sink * (np.abs(x.sink) + np.abs(x.lse)) for x in (d, e))
            mean = (f.P * w).sum(-1) + next(sinks) * next(sinks) / np.where(f.p_sink == 0, 1, f.p_sink)
            w = w + mean[..., None]
            parts = ((w, f.v), (a, e.v), (b, d.v))
            sizes |= {
                "dd_out": sum(
                    specification.einsum("bhij,bhjc->bhic", PD * x, np.nan_to_num(np.abs(v), posinf=0))
                    for x, v in parts
                ),
                "dd_lse": mean,
                "dd_entropy": (f.P * (w * (1 + np.abs(f.logP)) + a * b)).sum(-1),
            }
        if t is not None and d_ct is not None:
            # Terms of terms as they are: taken absolutely all the way down, the size would be hundreds of results.
            g = specification.adjoint(p, ct, f)
            g_dot = specification.adjoint(p, d_ct, f)
            dO_dot, dlse_dot, dH_dot = (np.abs(x) for x in specification.cotangents(p, d_ct, np.float64))
            G_dot = np.abs(g_dot.G) + f.D * np.abs(specification.einsum("bhic,bhjc->bhij", g.dO, d.v))
            O, O_dot = np.nan_to_num(np.abs(f.O)), np.nan_to_num(np.abs(d.O))
            row = (dO * O).sum(-1) + dlse + dH * (1 + np.abs(f.H))
            row_dot = (dO_dot * O + dO * O_dot).sum(-1) + dlse_dot + dH_dot * (1 + np.abs(f.H))
            row_dot += dH * (np.abs(d.P.sum(-1)) + np.abs(d.H))
            grown = np.where(f.visible, np.abs(d.S) + np.abs(d.lse)[..., None], 0)
            c = np.abs(g.G) + row[..., None] + dH[..., None] * (np.abs(f.logP) + 1)
            G_dot, c = np.nan_to_num(G_dot, posinf=0), np.nan_to_num(c, posinf=0)
            c_dot = G_dot + row_dot[..., None] + dH_dot[..., None] * (np.abs(f.logP) + 1) + dH[..., None] * grown
            dS_dot = P * (grown * c + c_dot)
            dT = through(d_ds, P * c)

            def second(node: Any) -> Array:
                if node is None:
                    return dS_dot
                bend = specification.evaluate_one(tangent(node, d.tables), d.at, dS.shape)
                return through(node, dS_dot) + np.where(f.visible, np.abs(P * c * bend), 0)

            sizes |= gradients(dS_dot, second(d_ds), {leaf: second(node) for leaf, node in d_tables.items()})
            moved_q = abs(p.scale) * specification.einsum("bhij,bhja->bhia", dT, np.abs(d.k))
            sizes["query"] += specification.unprojected(moved_q, M)
            if M is not None:
                G = abs(p.scale) * specification.einsum("bhij,bhja->bhia", dT, z["k"])
                sizes["query"] += specification.unprojected(G, np.abs(d.M))
                sizes["metric"] += metric_gradient(moved_q, z["x"]) + metric_gradient(G, np.abs(d.x))
            sizes["key"] += abs(p.scale) * specification.einsum("bhij,bhia->bhja", dT, np.abs(d.q))
            PD_dot = PD * grown
            sizes["value"] = specification.einsum("bhij,bhic->bhjc", PD_dot, dO) + specification.einsum(
                "bhij,bhic->bhjc", PD, dO_dot
            )
            sizes["sink"] = (f.p_sink * ((d_sink + np.abs(d.lse)) * row + row_dot)).sum(axis=(0, 2))
        if ct is not None:
            for name in ("query", "key", "value", "bias"):
                sizes[name] = specification.unflatten(p, sizes[name], getattr(p, name))  # type: ignore[assignment]
            sizes["sink"] = specification.sink_gradient(p, sizes["sink"])  # type: ignore[assignment]
    for name in (prefix + name for prefix in ("", "d_", "dd_") for name in Outputs._fields):
        if name in sizes:
            sizes[name] = sizes[name].reshape(p.shape(*sizes[name].shape[2:]))
    return sizes


def assert_outputs(p: Problem, got: Outputs, any_scores: bool = False) -> None:
    """out, lse and entropy (None: not asked for) of an engine against the specification."""
    exact, plain = specification.forward(p, judge(p)), specification.forward(p, *naive(p))
    sizes = absolute(p, any_scores=any_scores)
    assert got.out is not None
    assert got.out.dtype == p.dtype
    for name in ("out", "lse", "entropy"):
        value = getattr(got, name)
        if value is not None:
            dtype = p.dtype if name == "out" else p.compute
            assert value.dtype == dtype
            rounded = getattr(plain, name).astype(dtype)
            assert_within(name, value, getattr(exact, name), rounded, sizes[name], dtype)


def assert_gradients(p: Problem, ct: Outputs, got: Differential, any_scores: bool = False) -> None:
    exact, plain = specification.gradients(p, ct, judge(p)), specification.gradients(p, ct, *naive(p))
    assert_differential(p, "d{}", got, exact, plain, absolute(p, ct=ct, any_scores=any_scores))


def assert_saturated(p: Problem, ct: Outputs, got: Differential, times: float, times_at_99: float) -> None:
    """dq and dk of saturated rows in 16 bits, over float32 arithmetic whose results are rounded once.

    Its error is allowed `times`. At the 99th percentile of rows, those above 1e-3 of the root mean square, their
    relative error is allowed `times_at_99`.
    """
    exact, plain = specification.gradients(p, ct), specification.gradients(p, ct, np.float32)
    for name in ("query", "key"):
        once = getattr(plain, name).astype(p.dtype)
        assert_rows_near(f"d{name}", getattr(got, name), getattr(exact, name), once, times, times_at_99)


def assert_rows_near(name: str, got: Any, right: Any, once: Any, times: float, times_at_99: float) -> None:
    """Bound the error of rows by that of float32 arithmetic rounded `once`, as `assert_saturated` does."""
    size = np.linalg.norm(right, axis=-1)
    error, least = (np.linalg.norm(x.astype(np.float64) - right, axis=-1) for x in (got, once))
    total, allowed = norm(error), times * norm(least)
    assert total <= allowed, f"{name}: error {total:.3e} exceeds {allowed:.3e}"
    counted = size > 1e-3 * np.sqrt((size**2).mean())
    of_rows, of_least = (np.percentile(x[counted] / size[counted], 99) for x in (error, least))
    assert of_rows <= times_at_99 * of_least, f"{name}: rows {of_rows:.1e} exceed {times_at_99} · {of_least:.1e}"


def assert_second(
    p: Problem, t: Differential, ct: Outputs, d_ct: Outputs, got: Differential, any_scores: bool = False
) -> None:
    exact, plain = (
        specification.gradients_jvp(p, t, ct, d_ct, judge(p)),
        specification.gradients_jvp(p, t, ct, d_ct, *naive(p)),
    )
    sizes = absolute(p, ct=ct, t=t, d_ct=d_ct, any_scores=any_scores)
    assert_differential(p, "tangent of d{}", got, exact, plain, sizes)


def assert_differential(
    p: Problem, label: str, got: Differential, exact: Differential, plain: Differential, sizes: dict[str, Any]
) -> None:
    for name in ("query", "key", "value", "bias", "sink", "metric"):
        value, like = getattr(got, name), getattr(p, name)
        assert (value is None) == (like is None), name
        if value is not None:
            assert isinstance(value, np.ndarray), name  # not a scalar of NumPy, if it has no axes
            assert value.dtype == like.dtype
            rounded = getattr(plain, name).astype(like.dtype)
            assert_within(label.format(name), value, getattr(exact, name), rounded, sizes[name], p.dtype)
    assert set(got.tables) == set(p.rules.tables)
    for table, value in got.tables.items():
        assert isinstance(value, np.ndarray)
        size = sizes["tables"][table]
        assert_within(label.format("table"), value, exact.tables[table], plain.tables[table], size, p.dtype)


def assert_tangents(p: Problem, t: Differential, got: Outputs) -> None:
    exact, plain = specification.jvp(p, t, judge(p))[1], specification.jvp(p, t, *naive(p))[1]
    assert_along(p, "tangent of {}", got, exact, plain, absolute(p, t=t), "d_")


def assert_second_tangents(p: Problem, t: Differential, u: Differential, got: Outputs) -> None:
    exact, plain = specification.jvp_jvp(p, t, u, judge(p)), specification.jvp_jvp(p, t, u, *naive(p))
    assert_along(p, "second tangent of {}", got, exact, plain, absolute(p, t=t, u=u), "dd_")


def assert_along(
    p: Problem, label: str, got: Outputs, exact: Outputs, plain: Outputs, sizes: dict[str, Any], prefix: str
) -> None:
    for name in ("out", "lse", "entropy"):
        dtype = p.dtype if name == "out" else p.compute
        value = getattr(got, name)
        assert value.dtype == dtype
        rounded = getattr(plain, name).astype(dtype)
        assert_within(label.format(name), value, getattr(exact, name), rounded, sizes[prefix + name], dtype)


def on_cpu(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return parameters for `parametrize`: the chosen ones run on compiled kernels, whatever the file's mark says."""
    return [pytest.param(x, marks=pytest.mark.engine("cpu") if x in chosen else ()) for x in cases]


@contextmanager
def traced_memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Trace allocations; yields a function that returns the bytes held now, garbage collected, and at the peak.

    Garbage of earlier tests is collected first: freed in between, it would change when Python collects, and the peak.
    All that is left then is no longer looked at, which would take 0.3 s each time.
    """

    def held() -> tuple[int, int]:
        gc.collect()
        return tracemalloc.get_traced_memory()

    gc.collect()
    gc.freeze()
    tracemalloc.start()
    try:
        yield held
    finally:
        tracemalloc.stop()


def assert_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], int] = main
) -> None:
    """A command line that is answered by one line, and by nothing else."""
    assert command(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
