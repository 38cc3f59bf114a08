"""`python -m benchmarks` on tiny sizes: results are checked first, no peer is dropped, and reports are whole."""

import json
import math
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from benchmarks import derivatives, measure, memory, naive, peers, plots, report
from benchmarks.__main__ import main
from benchmarks.cold import KINDS, FirstCallRow, ImportRow
from benchmarks.measure import SUBJECT, Contender, Report, Result, Setting, Wrong
from benchmarks.row_types import BackwardShareRow, CostRow, DerivativeRow, MemoryRow, ShareRow, SmallRow, SpeedupRow
from benchmarks.rows import chosen, derivative_rows, rows, sized
from benchmarks.run import run
from cases import CASES, case
from regard.engines.cpu import limits
from support import assert_refused

HERE = [peer for peer in ("NumPy", "tiled") if peer in peers.PEERS]
TINY = Setting(measure.cores()[:1], rounds=3, seconds=1e-9)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STEPS", 64)
    monkeypatch.setattr(limits, "MATRIX_STEPS", 64)
    monkeypatch.setattr(limits, "BUFFER", 2**16)


def tiny(name: str = "plain", **sizes: Any) -> Any:
    return sized(name, 24, d=8, h=2, **sizes)


def share(**more: Any) -> ShareRow:
    return ShareRow("forward", "tiny", tiny(), goal=0.5, peers=tuple(HERE), **more)


# Measuring


def test_what_is_compared_runs_in_turns() -> None:
    order: list[str] = []

    def call(name: str) -> Contender:
        def run() -> None:
            order.append(name)
            sum(range(200_000))

        return Contender(run)

    times = measure.in_turns({"a": call("a"), "b": call("b")}, Setting((0,), rounds=4, seconds=60))
    assert order == ["a", "b"] * 5
    assert [len(x) for x in times.values()] == [4, 4]
    assert min(map(min, times.values())) > 0


def test_a_short_call_is_repeated() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    (times,) = measure.in_turns({"a": Contender(call)}, Setting((0,), rounds=3)).values()
    assert count > 100
    assert len(times) == 3


def test_a_wrong_result_is_refused() -> None:
    x = np.random.default_rng(0).standard_normal((2, 5))
    for dtype, off in ((np.float32, 1e-4), (ml_dtypes.bfloat16, 2e-2), (np.float64, 1e-12)):
        measure.check({"out": x.astype(dtype)}, {"out": x}, np.dtype(dtype))
        with pytest.raises(Wrong, match="wrong out: relative error"):
            measure.check({"out": (x * (1 + off)).astype(np.float64)}, {"out": x}, np.dtype(dtype))
    with pytest.raises(Wrong, match="wrong out"):
        measure.check({"out": np.full_like(x, np.nan)}, {"out": x}, np.dtype(np.float32))
    with pytest.raises(Wrong, match=r"shape \(5,\), not \(2, 5\)"):
        measure.check({"out": x[0]}, {"out": x}, np.dtype(np.float32))


def test_a_process_of_its_own() -> None:
    assert measure.fresh("import sys; print(int(sys.argv[1]) + 1)", 41) == 42
    with pytest.raises(RuntimeError, match="ValueError: no"):
        measure.fresh("raise ValueError('no')")


# Rows


def test_a_row_is_measured_beside_its_limit_and_peers() -> None:
    found = share().measure(TINY)
    assert set(found.samples) == {"limit", SUBJECT, *HERE}
    assert found.failures == {}
    assert found.work["limit"] == limits.peak("float32").work
    assert found.work[SUBJECT] == 2 * 2 * 24 * 24 * 16
    rate, peak = (found.work[x] / found.samples[x][0] / 1e9 for x in (SUBJECT, "limit"))
    assert math.isclose(found.figures()[0], rate / peak)
    assert sorted(found.peers) == sorted(HERE)
    causal = replace(share(), case=tiny("causal")).measure(TINY)
    assert causal.work[SUBJECT] == found.work[SUBJECT] / 2


def test_wrong_and_failing_peers_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> Any:
        call, read = peers.naive_numpy(*given)
        return call, lambda out: read(out) * 1.001

    def failing(*given: Any) -> Any:
        raise peers.Unable("is asleep")

    monkeypatch.setitem(peers.PEERS, "NumPy", wrong)
    monkeypatch.setitem(peers.PEERS, "tiled", failing)
    found = share().measure(TINY)
    assert set(found.samples) == {"limit", SUBJECT}
    assert found.failures["NumPy"].startswith("wrong out: relative error 1.0e-03")
    assert found.failures["tiled"] == "is asleep"
    left_out = replace(TINY, left_out={"NumPy": "not now"})
    assert share().measure(left_out).failures["NumPy"] == "not now"


@pytest.mark.parametrize(
    "row",
    [
        share(),
        CostRow("options", "tiny", tiny("softcap"), tiny()),
        CostRow("options", "tiny", tiny(), tiny(), observe=("lse", regard.top(2))),
        SpeedupRow("threads", "tiny", tiny(), threads=1),
        DerivativeRow("tiny", "forward", tiny("softcap"), "forward", tiny()),
    ],
    ids=lambda row: type(row).__name__,
)
def test_a_wrong_result_of_ours_has_no_time(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = regard.attention
    assert SUBJECT in row.measure(TINY).samples

    def wrong(*arrays: Any, engine: str | None = None, **options: Any) -> Any:
        found = right(*arrays, engine=engine, **options)
        if engine == "tiled":
            return found
        return (found[0] * 1.001, *found[1:]) if isinstance(found, tuple) else found * 1.001

    monkeypatch.setattr(regard, "attention", wrong)
    found = row.measure(TINY)
    assert SUBJECT not in found.samples
    assert found.failures[SUBJECT].startswith("wrong out")
    assert found.met is (None if row.goal is None else False)


def test_backward_is_a_share_of_the_peak_too() -> None:
    row = BackwardShareRow("backward", "tiny", tiny(), goal=0.5, peers=tuple(HERE))
    found = row.measure(TINY)
    assert set(found.samples) == {"limit", SUBJECT, *HERE}
    assert found.failures == {}
    assert found.work[SUBJECT] == 2.5 * share().measure(TINY).work[SUBJECT]
    short = replace(row, dtype="bfloat16").measure(TINY)
    assert set(short.samples) == {"limit", SUBJECT, "tiled"}
    assert short.failures["NumPy"].startswith("NumPy has no products of 16-bit")


@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
def test_naive_gradients(causal: bool) -> None:
    g = derivatives.DerivativeCall.of(tiny("causal" if causal else "plain"), np.dtype(np.float64))
    got = naive.gradients(g.q, g.k, g.v, g.dout, causal)
    expected = regard.attention_vjp(g.q, g.k, g.v, g.dout, causal=causal, engine="spec")
    for x, y in zip(got, (expected.query, expected.key, expected.value), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-14)


@pytest.mark.parametrize("kind", ["backward", "JVP", "double backward", "forward over reverse"])
def test_a_wrong_derivative_has_no_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = DerivativeRow("tiny", kind, tiny("bias", lead=(2,)), "forward", goal=1e9)
    found = row.measure(TINY)
    assert {"forward", SUBJECT} <= set(found.samples)
    assert found.met is True
    name = {"backward": "attention_vjp", "JVP": "attention_jvp"}.get(kind, "attention_vjp_jvp")
    right = getattr(regard, name)

    def wrong(*arrays: Any, engine: str | None = None, **options: Any) -> Any:
        result = right(*arrays, engine=engine, **options)
        if engine == "tiled":
            return result
        if kind == "JVP":
            return result[0], result[1]._replace(out=result[1].out * 1.001)
        bent = result if kind == "backward" else result[0]
        bent = replace(bent, bias=bent.bias * 1.001)
        return bent if kind == "backward" else (bent, result[1])

    monkeypatch.setattr(regard, name, wrong)
    found = row.measure(TINY)
    assert found.samples == {}
    assert found.failures[SUBJECT].startswith("wrong tangent of out" if kind == "JVP" else "wrong dbias")
    assert found.met is False


@pytest.mark.filterwarnings("ignore")  # of PyTorch, about itself, as `run` does
def test_every_derivative_is_measured() -> None:
    """All rows at a tiny size, PyTorch beside them where it is installed and has the option."""
    torch = find_spec("torch") is not None
    for row in derivative_rows():
        assert isinstance(row, DerivativeRow)
        base = None if row.base_case is None else shrunk(row.base_case)
        found = replace(row, case=shrunk(row.case), base_case=base).measure(TINY)
        if row.versus and not torch:
            assert found.failures["PyTorch"] == "not installed: torch"
            continue
        assert SUBJECT in found.samples
        assert found.goal is not None
        assert found.reference in found.samples
        plain = row.case.name in ("plain", "causal", "bias", "bias of each head")
        has = row.kind in derivatives.TORCH and plain
        assert ("PyTorch" in found.samples) == (torch and has)
    assert {row.kind for row in derivative_rows() if isinstance(row, DerivativeRow)} == set(derivatives.OURS) - {
        "forward"
    }


def shrunk(c: Any) -> Any:
    return replace(c, n_q=24, n_k=24, d=8, d_v=8, h=2)


def test_what_is_visible_sets_the_goal_of_a_backward() -> None:
    c = tiny("padding", lead=(2,))
    found = DerivativeRow("tiny", "backward", c, base_case=tiny(lead=(2,)), visible=True).measure(TINY)
    assert found.goal == pytest.approx(1.25 * (24 // 5 + 24) / 48 + 0.05)


@pytest.mark.parametrize("name", ["PyTorch", "FlexAttention", "JAX", "ONNX Runtime", "OpenVINO"])
def test_a_missing_peer_gives_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "jax", "onnxruntime", "openvino"):
        monkeypatch.setitem(sys.modules, module, None)
    found = replace(share(), peers=(name,)).measure(TINY)
    assert found.failures[name].startswith("not installed: ")
    assert SUBJECT in found.samples


BACKWARD_AGREES = """
import json, sys
from benchmarks.row_types import BackwardShareRow, Setting
from benchmarks.rows import sized
found = [BackwardShareRow("", "", sized(x, 24, d=8, h=2), peers=sys.argv[1:]) for x in ("plain", "causal")]
found = [row.measure(Setting((0,))) for row in found]
print(json.dumps([[list(x.samples), x.failures] for x in found]))
"""


@pytest.mark.parametrize("name", [name for name in derivatives.BACKWARD if name != "FlexAttention"])
def test_peers_have_the_same_gradients(name: str) -> None:
    for samples, failures in measure.fresh(BACKWARD_AGREES, name):
        assert name in samples or failures[name].startswith("not installed: ")


AGREES = """
import json, sys
from benchmarks.row_types import Setting, ShareRow
from benchmarks.rows import sized
cases = [sized(name, 24, d=8, h=2) for name in ("plain", "causal")]
found = [ShareRow("", "", x, peers=sys.argv[1:]).measure(Setting((0,))) for x in cases]
print(json.dumps([[list(x.samples), x.failures] for x in found]))
"""


@pytest.mark.parametrize("name", [name for name in peers.PEERS if name != "FlexAttention"])  # it compiles for long
def test_peers_compute_the_same(name: str) -> None:
    for samples, failures in measure.fresh(AGREES, name):
        assert name in samples or failures[name].startswith("not installed: ")


def test_naive_numpy_shares_heads() -> None:
    q, k, v, _ = tiny("grouped heads", h_kv=1).inputs(np.float32)
    call, read = peers.naive_numpy(q, k, v, False, 1)
    measure.check({"out": read(call())}, {"out": regard.attention(q, k, v, engine="spec")}, np.dtype(np.float32))


def test_the_cost_of_a_mask_follows_what_is_visible() -> None:
    found = CostRow("options", "tiny", tiny("padding", lead=(2,)), tiny(lead=(2,)), visible=True).measure(TINY)
    visible = (24 // 5 + 24) / 48
    assert found.facts["visible"] == visible
    assert found.goal == pytest.approx(1.25 * visible + 0.05)
    assert set(found.samples) == {"plain", SUBJECT}


def test_small_calls_start_from_tensors() -> None:
    pytest.importorskip("torch")
    found = SmallRow("tiny", tiny()).measure(TINY)
    assert set(found.samples) == {SUBJECT, "PyTorch"}
    assert found.figure() == pytest.approx(np.median(np.divide(found.samples[SUBJECT], found.samples["PyTorch"])))


def test_threads_beside_what_the_peak_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"alone": [3.0, 2.0], "one thread": [8.0, 9.0], SUBJECT: [4.0, 6.0], "together": [4.0, 4.0]}

    def in_turns(contenders: Any, s: Setting, threads: int) -> Any:
        for contender in contenders.values():
            contender.call()
        assert list(contenders) == list(times)
        assert (s.rounds, threads) == (15, 2)
        return times

    monkeypatch.setattr("benchmarks.row_types.in_turns", in_turns)
    found = SpeedupRow("threads", "tiny", tiny(), 1.9).measure(replace(TINY, cores=measure.cores()[:1] * 2))
    assert found.figures() == [2.0, 1.5]
    assert found.figures("the peak") == [1.5, 1.0]
    assert found.peers == ["the peak"]


def test_threads_need_cores() -> None:
    found = SpeedupRow("threads", "tiny", tiny(), 1.9, threads=len(TINY.cores) + 1).measure(TINY)
    assert found.met is False
    assert found.failures[SUBJECT] == "needs 2 cores, may use 1"
    assert report.goal(found) == "≥ 1.90"


class Quick:
    """A row that is measured at once, after what it does first."""

    group, name = "forward", "any"

    def __init__(self, first: Callable[[], object] = lambda: None):
        self.first = first

    def measure(self, s: Setting) -> Result:
        self.first()
        return Result(self.group, self.name, "s", samples={SUBJECT: [1.0]})


def test_an_interrupted_run_reports_what_is_done() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    found = run([Quick(), Quick(), Quick(stop), Quick()], TINY)
    assert len(found.results) == 2
    assert found.method["interrupted"] == "after 2 of 4 rows"
    assert "interrupted" not in run([Quick()], TINY).method
    with pytest.raises(KeyboardInterrupt):
        run([Quick(stop), Quick()], TINY)


def test_cold_rows_run_in_processes_of_their_own() -> None:
    once = replace(TINY, rounds=1)
    found = ImportRow().measure(once)
    assert [len(x) for x in found.samples.values()] == [1, 1]
    cached, compiled = (FirstCallRow("plain", cached, 0.3).measure(once) for cached in (True, False))
    assert cached.samples[SUBJECT][0] < compiled.samples[SUBJECT][0]
    assert set(KINDS) == {row.kind for row in rows() if isinstance(row, FirstCallRow)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of memory is known on Linux alone")
def test_memory_is_that_of_one_call() -> None:
    n = 2048
    found = MemoryRow(n, ("NumPy, causal", "regard, causal", "nobody")).measure(TINY)
    scores = 2 * n * n * 4
    assert found.samples["NumPy, causal"][0] >= scores
    assert found.samples["regard, causal"][0] < scores / 2
    assert "KeyError" in found.failures["nobody"]
    assert found.samples["q, k and v"] == [3 * 2 * n * 64 * 4]
    assert memory.size(regard.attention(np.eye(4), np.eye(4), np.eye(4), observe=["lse", regard.top(2)])) == 8 * (
        16 + 4 + 2 * 8
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of memory is known on Linux alone")
def test_memory_of_training() -> None:
    n = 1024
    found = MemoryRow(n, (SUBJECT, "PyTorch"), what=", training with bias and dropout").measure(TINY)
    assert found.name == "training with bias and dropout, n = 1,024"
    assert found.samples[SUBJECT][0] < 32 * 2**20
    if "PyTorch" in found.samples:
        assert found.samples["PyTorch"][0] > 3 * 2 * n * n * 4
    else:
        assert "torch" in found.failures["PyTorch"]
    x = np.eye(4)
    assert memory.size((x, regard.attention_vjp(x, x, x, x, sink=np.ones(1)))) == 8 * (4 * 16 + 1)


def test_the_table_of_rows() -> None:
    names = [f"{row.group}: {row.name}" for row in rows()]
    assert len(set(names)) == len(names)
    assert {row.group for row in rows()} == set(report.TITLES)
    assert {row.group for row in chosen(quick=True)} == set(report.TITLES)
    assert len(chosen(quick=True)) < len(names)
    assert [row.name for row in chosen("options: softcap$")] == ["softcap"]
    known = {c.name for c in CASES}
    assert {row.case.name for row in rows() if isinstance(row, CostRow)} <= known | {"window of 256"}
    assert {row.case.name for row in rows() if isinstance(row, DerivativeRow)} <= known | {"bias of each head"}
    assert set(derivatives.BACKWARD) <= set(peers.PEERS)
    assert all(row.goal for row in chosen("^derivatives") if isinstance(row, DerivativeRow) and not row.visible)
    with pytest.raises(StopIteration):
        case("no such case")


# Results and reports


def test_goals_have_a_direction() -> None:
    faster = Result("g", "n", "×", True, 0.5, "limit", {"limit": [1.0, 2.0], SUBJECT: [1.0, 1.0]})
    faster.work = {"limit": 1e9, SUBJECT: 0.5e9}
    assert faster.figures() == [0.5, 1.0]
    assert (faster.figure(), faster.spread()) == (0.75, (0.625, 0.875))
    assert faster.met is True
    assert replace(faster, goal=0.8).met is False
    cost = Result("g", "n", "×", False, 1.2, "plain", {"plain": [2.0], SUBJECT: [2.2]})
    assert cost.met is True
    assert replace(cost, goal=1.0).met is False
    assert replace(cost, goal=None).met is None
    assert replace(cost, samples={}).met is False


def sweep(kind: str, n: int) -> ShareRow:
    return ShareRow("growth", f"{kind}, n = {n}", sized(kind, n, d=8, h=1), peers=("NumPy",))


@pytest.fixture(scope="module")
def found() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "STEPS", 64)
        patch.setattr(limits, "MATRIX_STEPS", 64)
        patch.setattr(limits, "BUFFER", 2**16)
        return run(
            [
                share(),
                replace(share(), name="decode", group="decode", reads=True),
                CostRow("options", "softcap", tiny("softcap"), tiny(), 1e6),
                CostRow("options", "padding", tiny("padding", lead=(2,)), tiny(lead=(2,)), visible=True),
                SpeedupRow("threads", "too many", tiny(), 1.9, threads=1000),
                BackwardShareRow("backward", "tiny backward", tiny(), peers=("NumPy",)),
                DerivativeRow("double backward", "double backward", tiny(), goal=1e6),
                *(sweep(kind, n) for kind in ("plain", "causal") for n in (8, 16)),
                CostRow("window over n", "window of 256, n = 16", sized("window", 16), sized("plain", 16)),
                MemoryRow(256, ("regard, causal", "nobody")),
                replace(MemoryRow(256, ("regard, causal", "nobody")), group="memory over n"),
            ],
            TINY,
        )


def test_a_report_survives_json(found: Report) -> None:
    text = found.to_json()
    assert Report.from_json(text) == found
    assert Report.from_json(text).to_json() == text
    assert json.loads(text)["machine"]["regard"] == regard.__version__


def test_a_report_is_the_same_bytes_each_time(found: Report, tmp_path: Path) -> None:
    once, again = (report.write(found, tmp_path / name) for name in ("once", "again"))
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]


def test_a_report_is_written_whole(found: Report, tmp_path: Path) -> None:
    written = report.write(found, tmp_path / "deep" / "out")
    assert {path.name for path in written} == {"report.json", "report.md", "speed.png"}
    assert (tmp_path / "deep" / "out" / "speed.png").read_bytes().startswith(b"\x89PNG")
    page = next(path for path in written if path.suffix == ".md").read_text()
    for row in found.results:
        assert row.name in page or row.group == "memory over n"
    assert "needs 1000 cores" in page
    assert "| nobody |" in page
    assert "](speed.png)" in page
    for secret in (platform.node(), str(Path.home()), os.getcwd()):
        assert secret not in page.split()
        assert not any(len(secret) > 4 and secret in path.read_text() for path in written if path.suffix != ".png")


def test_all_plots_are_drawn_from_a_written_report(found: Report, tmp_path: Path) -> None:
    report.write(found, tmp_path)
    assert main(["--plot-from", str(tmp_path / "report.json"), "--out", str(tmp_path / "plots")]) == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    names = ("speed", "forward", "options", "derivatives", "growth", "memory")
    assert set(drawn) == {f"{name}.{ending}" for name in names for ending in ("svg", "png")}
    for name, data in drawn.items():
        assert data.startswith(b"\x89PNG") if name.endswith(".png") else b"<?xml" in data[:200]
    assert drawn["speed.png"] == (tmp_path / "speed.png").read_bytes()
    assert main(["--plot-from", str(tmp_path / "report.json")]) == 0
    assert (tmp_path / "memory.svg").read_bytes() == drawn["memory.svg"]


COMMITTED = sorted((Path(__file__).parents[2] / "docs" / "benchmarks").glob("*/report.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_a_committed_report_can_be_read_and_plotted(path: Path) -> None:
    """It has one plot and the tables of its JSON, with today's names of groups and rows."""
    made = Report.from_json(path.read_text())
    drawn = plots.plots(made)
    assert {"speed", "options"} <= set(drawn)
    assert {x.name for x in path.parent.iterdir()} == {"report.json", "report.md", f"{next(iter(drawn))}.png"}
    page = (path.parent / "report.md").read_text()
    assert page[page.index("\n## ") :] == (text := report.markdown(made, []))[text.index("\n## ") :]


def test_where_naive_numpy_falls_behind(found: Report) -> None:
    def row(n: int, ours: float) -> Result:
        samples = {"limit": [1.0], SUBJECT: [ours], "NumPy": [1.0]}
        work = dict.fromkeys(samples, 1.0)
        return Result("growth", f"plain, n = {n}", "", True, None, "limit", samples, work, facts={"n_q": n})

    made = replace(found, results=[row(8, 2.0), row(16, 0.5), row(32, 2.0), row(64, 0.5), row(128, 0.5)])
    assert report.crossings(made) == ["plain: faster than naive NumPy from n = 64 on, up to n = 128"]
    assert report.crossings(replace(made, results=made.results[:1])) == ["plain: slower than naive NumPy at n = 8"]


def test_names_beside_lines_do_not_overlap() -> None:
    made = plots.apart([0.1, 0.5, 0.5, 0.52, 0.9], gap=0.05)
    assert made[0] == 0.1
    assert made[-1] == 0.9
    assert min(np.diff(made)) > 0.049
    assert np.mean(made[1:4]) == pytest.approx(np.mean([0.5, 0.5, 0.52]))


def test_only_what_missed_a_goal_is_hatched(found: Report) -> None:
    def row(goal: float | None) -> Result:
        return Result("options", f"at most {goal}", "× plain", goal=goal, reference="plain",
                      samples={SUBJECT: [2.0], "plain": [1.0]})  # fmt: skip

    plot = plots.options(replace(found, results=[row(None), row(3.0), row(1.0)]))
    assert plot is not None
    assert [bar.get_hatch() for bar in plot[1].axes[0].patches] == [None, None, "////"]


# The command


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--list", "--only", "options"]) == 0
    assert "options: softcap" in capsys.readouterr().out
    assert main(["--roofline", "--rounds", "1", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "read bandwidth" in text
    assert "GFLOP/s" in text
    assert len(Report.from_json((tmp_path / "out" / "report.json").read_text()).results) == 10


def test_a_run_that_is_told_to_end_writes_what_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    rows = [Quick(), Quick(lambda: os.kill(os.getpid(), signal.SIGTERM)), Quick()]
    monkeypatch.setattr("benchmarks.rows.chosen", lambda *_: rows)
    assert main(["--out", str(tmp_path)]) == 0
    written = Report.from_json((tmp_path / "report.json").read_text())
    assert len(written.results) == 1
    assert written.method["interrupted"] == "after 1 of 3 rows"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "("],
            "--only must be a regular expression, got (: missing ), unterminated subpattern at position 0",
        ),
        (["--only", "no such row"], "--only no such row finds no row; see `python -m benchmarks --list`"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--threads", "100000"], "--threads must be at most"),
        (["--engine", "steam"], "--engine must be one of cpu, tiled, device, spec, got steam"),
        (["--out", __file__], "is not a directory"),
        (["--plot-from", __file__], f"--plot-from must be a report.json of these benchmarks, got {__file__}"),
        (["--plot-from", "no-such.json"], "cannot read no-such.json: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(arguments, message, capsys, main)


def test_files_need_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("regard.arguments.packages.find_spec", lambda name: None)
    for option in ("--out", "--plot-from"):
        message = f"python -m benchmarks {option} needs matplotlib, which is missing: pip install 'regard[plots]'"
        assert_refused(["--quick", option, "report.json"], message, capsys, main)


def test_without_a_compiler_there_is_nothing_to_measure_against(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.engines.cpu.state", lambda: "llvmlite is missing: pip install llvmlite")
    assert main(["--list"]) == 2
    assert "compiled kernels: llvmlite is missing: pip install llvmlite" in capsys.readouterr().err
