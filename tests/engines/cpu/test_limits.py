"""Limits of the processor: kernels that do the work that they count, and `regard doctor --roofline`."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from regard.cli import main
from regard.engines.cpu import limits
from regard.engines.cpu.language.types import BF16, F32, F64, Type
from regard.engines.cpu.target.cache import kernel
from regard.engines.cpu.target.instructions import targets


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STEPS", 64)
    monkeypatch.setattr(limits, "MATRIX_STEPS", 64)
    monkeypatch.setattr(limits, "BUFFER", 2**16)


def result_of(text: str, name: str, target: Any, source: Any, count: int, lanes: int, dtype: Any) -> Any:
    compiled = kernel(f"test {name} {text}", name, target, lambda: text)
    got = np.zeros(lanes, dtype)
    fields = np.array([source.ctypes.data, got.ctypes.data, count], np.uint64)
    compiled(fields.ctypes.data)
    return got


@pytest.mark.parametrize("target", [t for t in targets().values() if t.runs], ids=lambda t: t.name)
@pytest.mark.parametrize("element", [F32, F64, BF16], ids=str)
def test_the_peak_is_made_of_the_operations_that_it_counts(target: Any, element: Type) -> None:
    if element is BF16 and not target.bf16_dot:
        pytest.skip("no products of bfloat16")
    lanes = target.vector // max(element.size, 4)
    steps, chains = 3, limits.chains(target)
    assert chains >= 12
    x, y = np.arange(1, 2 * lanes + 1) / 8, np.arange(2 * lanes, 0, -1) / 4
    start = np.arange(lanes + chains - 1) / 2
    expected = np.lib.stride_tricks.sliding_window_view(start, lanes)  # that of chain n begins at the n-th number
    if element is BF16:
        operands, start = np.concatenate([x, y]).astype(ml_dtypes.bfloat16), start.astype(np.float32)
        for _ in range(steps):
            expected = expected + (x * y).reshape(lanes, 2).sum(-1)
    else:
        operands, start = (z.astype(f"f{element.size}") for z in (np.concatenate([x[:lanes], y[:lanes]]), start))
        for _ in range(steps):
            expected = expected * x[:lanes] + y[:lanes]
    source = np.concatenate([operands.view(np.uint8), start.view(np.uint8)])
    text = limits.peak_kernel(element, target)
    got = result_of(text, "peak", target, source, steps, lanes, np.float64 if element is F64 else np.float32)
    np.testing.assert_allclose(got, expected.sum(0), rtol=1e-5)


@pytest.mark.parametrize("target", [t for t in targets().values() if t.runs], ids=lambda t: t.name)
@pytest.mark.parametrize("element", [F32, F64], ids=str)
def test_products_from_cache_are_made_of_the_operations_that_they_count(target: Any, element: Type) -> None:
    (rows, columns), lanes, steps = target.tile, target.lanes(element.size), 3
    v = np.arange(limits.FEATURES * columns * lanes).reshape(limits.FEATURES, -1) % 13 - 6.0
    f = np.arange(rows * limits.FEATURES).reshape(rows, -1) % 7 - 3.0
    dtype = np.dtype(f"f{element.size}")
    source = np.concatenate([v.ravel(), f.ravel()]).astype(dtype)
    text = limits.product_kernel(element, target)
    got = result_of(text, "product", target, source, steps, lanes, dtype)
    expected = steps * (f @ v).reshape(rows, columns, lanes).sum((0, 1))
    assert np.ptp(expected) > 0
    np.testing.assert_array_equal(got, expected)  # whole numbers


@pytest.mark.parametrize("target", [t for t in targets().values() if t.runs and t.amx], ids=lambda t: t.name)
def test_the_peak_of_matrices_is_made_of_products(target: Any) -> None:
    steps, totals = 3, limits.GROWING
    x, y = np.arange(512).reshape(16, 32) % 17 / 4, np.arange(512).reshape(16, 16, 2) % 13 / 2
    start = np.arange((15 + totals) * 16, dtype=np.float32).reshape(-1, 16)
    source = np.concatenate(
        [z.astype(ml_dtypes.bfloat16).view(np.uint8).ravel() for z in (x, y)] + [start.view(np.uint8).ravel()]
    )
    product = steps * np.einsum("rnh,nch->rc", x.reshape(16, 16, 2), y)
    text = limits.matrix_peak_kernel(target)
    got = result_of(text, "peak", target, source, steps, totals * 256, np.float32).reshape(totals, 16, 16)
    np.testing.assert_array_equal(got, [start[n : n + 16] + product for n in range(totals)])


@pytest.mark.parametrize("streams", limits.STREAMS)
@pytest.mark.parametrize("target", [t for t in targets().values() if t.runs], ids=lambda t: t.name)
def test_every_number_is_read(target: Any, streams: int) -> None:
    lanes = target.lanes(4)
    source = np.arange(max(limits.STREAMS) * lanes * 5, dtype=np.float32)
    got = result_of(limits.read_kernel(target, streams), "read", target, source, len(source), lanes, np.float32)
    np.testing.assert_array_equal(got, source.reshape(-1, lanes).sum(0))


def test_a_limit_knows_its_work() -> None:
    target = targets()[limits.chosen().name]
    one, two = limits.peak("float32"), limits.peak("float32", threads=2)
    one.call()
    two.call()
    assert one.work == limits.chains(target) * target.lanes(4) * 2 * limits.STEPS
    assert limits.peak("bfloat16", amx=False).work == one.work * (2 if target.bf16_dot else 1)
    if target.amx:
        assert limits.peak("bfloat16").work == 6 * 16 * 16 * 32 * 2 * limits.MATRIX_STEPS
        assert limits.peak("bfloat16").name == "peak of bfloat16 matrix products"
    assert two.work == 2 * one.work
    assert limits.peak("float64").work == one.work / 2
    assert limits.bandwidth().work == limits.BUFFER
    rows, columns = target.tile
    for dtype, size in (("float32", 4), ("float64", 8)):
        limits.product(dtype).call()
        assert limits.product(dtype).work == rows * columns * target.lanes(size) * 2 * limits.STEPS
    assert one.rate(1e-9) == one.work


def test_doctor_measures_each_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--roofline"]) == 0
    *_, measured = capsys.readouterr().out.partition("limits of one core\n")
    assert measured.count("GFLOP/s") == 4
    assert [line.split("  ")[1] for line in measured.splitlines()][::4] == ["peak of float32", "read bandwidth"]


def test_doctor_measures_with_compiled_kernels_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.engines.cpu.state", lambda: "llvmlite is missing: pip install llvmlite")
    assert main(["doctor", "--roofline"]) == 2
    assert "compiled kernels: llvmlite is missing: pip install llvmlite" in capsys.readouterr().err
