"""`regard bench --device cuda` on a tiny scale: on tensors of the processor, the kernels on Triton's interpreter."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from benchmarks import measure, report
from benchmarks.measure import SUBJECT, Result, Setting
from benchmarks.run import run
from interpreter import language_patched_once
from regard.cli import main
from support import assert_refused

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from benchmarks import device, device_peers, device_rows  # noqa: E402
from benchmarks.device_peers import CAUSAL, OPTIONS, PLAIN, DeviceCall, DeviceSizes  # noqa: E402
from benchmarks.device_rows import FUSED, LIMIT, MATH, DeviceLimitRow, DeviceMemoryRow, DeviceSpeedRow, rows  # noqa: E402

HERE = torch.device("cpu")
SIZES = DeviceSizes(batch=2, h=4, n=24, d=8, h_kv=2)
SMALL = DeviceSizes(batch=1, h=2, n=16, d=8, h_kv=1)  # for the interpreter
NOT_HERE = {"FlexAttention": "compiles for long", "cuDNN": "not on processors"}
TINY = Setting(
    measure.cores()[:1], rounds=3, seconds=1e-9, engine="triton", device=HERE, time=partial(device.seconds, HERE),
    left_out=NOT_HERE,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    language_patched_once(monkeypatch)
    monkeypatch.setattr(device, "SIDE", 16)
    monkeypatch.setattr(device, "BYTES", 64)
    monkeypatch.setattr(device_peers, "BLOCK", 16)


def given(option: Any = PLAIN, sizes: DeviceSizes = SIZES, dtype: Any = torch.float32) -> DeviceCall:
    return DeviceCall.of(replace(sizes, batch=1) if option.biased else sizes, option, dtype, HERE, "cpu")


# Who computes what is right


@pytest.mark.parametrize("option", [PLAIN, CAUSAL, *OPTIONS], ids=lambda option: option.name)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_judge_knows_every_option(option: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written for PyTorch's indices, against the rules of `regard` on its engine for processors."""
    monkeypatch.setattr(device_peers, "WINDOW", 7)
    monkeypatch.setattr(device_peers, "CAP", 1.5)
    g = given(option)
    call, read = device_peers.prepared(SUBJECT, kind, g)
    found, expected = read(call()), device_peers.exact(kind, g)
    names = device_peers.NAMES[kind]
    assert list(found) == list(expected) == [*names[:3], *names[3:] * option.biased]
    measure.check(found, expected, np.dtype(np.float32))
    for x in expected.values():
        bent = {name: y * 1.01 for name, y in found.items()}
        assert x.any()
        with pytest.raises(measure.Wrong):
            measure.check(bent, expected, np.dtype(np.float32))


@pytest.mark.parametrize("kind", ["JVP", "double backward"])
@pytest.mark.parametrize("who", [SUBJECT, MATH])
def test_second_derivatives_are_judged_too(kind: str, who: str) -> None:
    g = given(CAUSAL)
    call, read = device_peers.prepared(who, kind, g)
    measure.check(read(call()), device_peers.exact(kind, g), np.dtype(np.float32))


@pytest.mark.parametrize("who", ["Flash", MATH])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_peers_compute_the_same(who: str, kind: str) -> None:
    g = given(CAUSAL)
    call, read = device_peers.prepared(who, kind, g)
    measure.check(read(call()), device_peers.exact(kind, g), np.dtype(np.float32))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled, which takes long."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for option in (CAUSAL, *OPTIONS):
        g = given(option, DeviceSizes(1, 2, 128, 16, 1))
        call, read = device_peers.prepared("FlexAttention", "forward", g)
        measure.check(read(call()), device_peers.exact("forward", g), np.dtype(np.float32))


def test_the_shares_that_may_be_seen() -> None:
    n = 512
    i, j = torch.arange(n)[:, None], torch.arange(n)
    for option in (PLAIN, CAUSAL, *OPTIONS):
        g = given(option, DeviceSizes(1, 2, n, 8, 2))
        mask, _ = g.mods(g.bias)
        share = 1.0 if mask is None else float(mask(0, 0, i, j).double().mean())
        assert option.visible(g.sizes) == pytest.approx(share, rel=0.35)


# Rows


def test_a_row_measures_everybody_who_is_right() -> None:
    found = DeviceSpeedRow("forward", "tiny", SMALL, CAUSAL, goal=1e9).measure(TINY)
    assert set(found.samples) == {LIMIT, SUBJECT, "Flash"}
    assert found.failures == NOT_HERE
    assert found.unit == "of the peak of bfloat16"
    assert found.work[SUBJECT] == found.work["Flash"] == 0.5 * 4 * 2 * 16 * 16 * 8
    assert found.work[LIMIT] == 2 * 16**3
    assert found.met is False
    back = DeviceSpeedRow("backward", "tiny", SMALL, CAUSAL, "backward", peers=(), dtype="float32").measure(TINY)
    assert back.work[SUBJECT] == 2.5 * found.work[SUBJECT]


def test_a_wrong_result_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = regard.attention
    monkeypatch.setattr(regard, "attention", lambda *args, **options: right(*args, **options) * 1.05)
    found = DeviceSpeedRow("forward", "tiny", SMALL, peers=("Flash",)).measure(TINY)
    assert SUBJECT not in found.samples
    assert found.failures[SUBJECT].startswith("wrong out: relative error")
    assert "Flash" in found.samples


def test_a_peer_that_is_the_reference_may_be_missing() -> None:
    """Then there is no figure, and the goal is not met."""
    found = DeviceSpeedRow("against cuDNN", "tiny", SMALL, reference="cuDNN", peers=("cuDNN",), goal=1.0).measure(TINY)
    assert (found.samples, found.met, found.failures) == ({}, False, {"cuDNN": NOT_HERE["cuDNN"]})
    there = DeviceSpeedRow("against Flash", "tiny", SMALL, reference="Flash", peers=("Flash",), goal=1e-9).measure(TINY)
    assert there.met is True
    ratio = np.divide(there.samples["Flash"], there.samples[SUBJECT])
    assert there.figure() == pytest.approx(float(np.median(ratio)))


@pytest.mark.parametrize(("kind", "base"), [("JVP", "forward"), ("double backward", "backward")])
def test_derivatives_cost_what_they_cost_over_another(kind: str, base: str) -> None:
    found = DeviceSpeedRow("derivatives", "tiny", SMALL, CAUSAL, kind, base, (), 3.3, "float32").measure(TINY)
    assert set(found.samples) == {SUBJECT, base}
    assert found.work == {}
    assert not found.higher_is_better


def test_memory_beyond_inputs_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the counters of the device: here those of one that has 1,000 bytes in use, 5,000 at the peak."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda where: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda where: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda where: 5000)
    assert device.extra(HERE, lambda: (torch.zeros(10), [torch.zeros(4, dtype=torch.float64), None])) == 4000 - 72
    found = DeviceMemoryRow("tiny", DeviceSizes(1, 1, 8, 8, 1), "forward", peers=(MATH, "cuDNN"), goal=100.0).measure(
        TINY
    )
    assert found.samples == {"q, k and v": [3 * 64 * 2.0], SUBJECT: [4000.0 - 128], MATH: [4000.0 - 128]}
    assert "cuDNN" in found.failures
    assert found.met is True


def test_the_table_of_rows() -> None:
    made = list(rows())
    names = [f"{row.group}: {row.name}" for row in made]
    assert len(set(names)) == len(names)
    assert {row.group for row in made} <= set(report.ON_DEVICE)
    assert {row.group for row in made} == {row.group for row in made if row.quick}
    speeds = [row for row in made if isinstance(row, DeviceSpeedRow)]
    assert {(x.kind, x.option.name, x.sizes.d, x.sizes.n) for x in speeds if x.group in ("forward", "backward")} >= {
        (kind, option, d, n)
        for kind in ("forward", "backward")
        for option in ("plain", "causal")
        for d in (64, 128, 256)
        for n in (512, 1024, 2048, 4096, 8192, 16384)
    }
    assert all(x.sizes.batch * x.sizes.n == device_rows.TOKENS for x in speeds if x.group in ("forward", "backward"))
    assert all(x.sizes.h * x.sizes.d == device_rows.FEATURES for x in speeds)
    assert any(x.sizes.h_kv < x.sizes.h for x in speeds)
    assert {x.option for x in speeds if x.group == "options"} == set(OPTIONS)
    assert set(FUSED) | {MATH} | {SUBJECT} == set(device_peers.WHO)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> measure.Report:
    monkeypatch.setattr(device, "extra", lambda where, call: 64.0)
    made = [
        DeviceLimitRow("peak, tf32", partial(device.peak, "tf32")),
        DeviceLimitRow("memory bandwidth", device.bandwidth),
        DeviceSpeedRow("forward", "tiny", SMALL, CAUSAL),
        DeviceSpeedRow("against cuDNN", "tiny", SMALL, reference="cuDNN", peers=("cuDNN",), goal=1.0),
        DeviceSpeedRow("derivatives", "tiny", SMALL, PLAIN, "JVP", "forward", (), 3.3),
        DeviceMemoryRow("tiny", SMALL, "forward"),
    ]
    return run(made, TINY)


def test_a_report_is_written_whole(found: measure.Report, tmp_path: Path) -> None:
    written = {path.name for path in report.write(found, tmp_path)}
    assert written == {"report.json", "report.md", "forward.png"}
    page = (tmp_path / "report.md").read_text()
    for text in ("regard bench --device cuda", "16,384 tokens", "Limits of this device", "Against cuDNN", "torch: "):
        assert text in page
    assert "processor time" not in page
    assert found.machine["device"] == "the processor, in place of a device"
    assert measure.Report.from_json(found.to_json()) == found
    rates = {x.name: x for x in found.group("limits")}
    assert rates["memory bandwidth"].work == {SUBJECT: 128.0}


# The device


def test_what_a_device_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Properties:
        name, multi_processor_count, total_memory, major, minor = "NVIDIA H100 80GB HBM3", 132, 80 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: Properties)
    monkeypatch.setattr(device, "driver", lambda: "570.1")
    machine = device.machine(torch.device("cuda:0"))
    assert machine["device"] == "NVIDIA H100 80GB HBM3, 132 multiprocessors, 80 GiB"
    assert (machine["capability"], machine["driver"]) == ("sm_90", "570.1")
    assert {"CUDA", "cuDNN", "torch", "triton", "regard", "python"} <= set(machine)
    file = tmp_path / "version"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"
    file.write_text(f"{line}\nGCC version: 12.3.0\n")
    monkeypatch.undo()
    assert device.driver(file) == "570.124.06"
    assert device.driver(tmp_path / "none", lambda name: None) == "unknown"


def test_time_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that were queued while the device slept; the first, which may compile, is not among them."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, other: "Event") -> float:
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: log.append("wait"))
    monkeypatch.setattr(device, "busy", lambda cycles: log.append("sleep") if cycles > 1e5 else None)
    assert device.seconds(torch.device("cuda:0"), lambda: log.append("call"), 2) == 6e-3
    assert log == ["wait", "call", "sleep", "event", "call", "call", "event", "wait"]


def test_the_device_is_current_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And float32 is float32, whatever PyTorch was told before."""
    where, switch = torch.device("cuda:3"), torch.backends.cuda.matmul
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(device, "machine", lambda device: {})
    before = switch.fp32_precision

    class Noted:
        group, name, goal, quick = "limits", "noted", None, True

        def measure(self, s: Setting) -> Result:
            entered.append(switch.fp32_precision)
            return Result(self.group, self.name, "")

    try:
        switch.fp32_precision = "tf32"
        run([Noted()], replace(TINY, device=where))
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before
    assert entered == [where, "ieee"]


def test_limits_say_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "matmul", lambda a, b, out: seen.append((a.dtype, switch.fp32_precision)))
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    for dtype in device.PEAKS:
        device.peak(dtype, HERE).call()
    assert seen[:2] == [(torch.bfloat16, "ieee"), (torch.float16, "ieee")]
    assert seen[2:] == [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float64, "ieee")]
    assert switch.fp32_precision == before


# The command


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], f"--device cuda: PyTorch {torch.__version__} finds no CUDA device here"),
        (["--device", "tpu"], "--device must be cuda or cuda:N, got tpu"),
        (["--device", "cuda", "--threads", "2"], "--threads is of the processor: give it without --device"),
        (["--device", "cuda", "--only", "no such row"], "--only no such row finds no row"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(["bench", *arguments], message, capsys)


def test_rows_are_listed_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda", "--list", "--only", "options"]) == 0
    assert "options: backward, bias of each pair" in capsys.readouterr().out


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(device, "device", lambda name: HERE)
    assert main(["bench", "--device", "cuda", "--roofline", "--rounds", "1", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "peak, bfloat16" in text
    assert "memory bandwidth" in text
    made = measure.Report.from_json((tmp_path / "out" / "report.json").read_text())
    assert made.method["device"] == "cpu"
    assert [isinstance(x, Result) for x in made.results] == [True] * (len(device.PEAKS) + 1)
