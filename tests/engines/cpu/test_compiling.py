"""A first call that compiles for seconds says so: on a terminal, or by a log record, and never for less."""

import io
import logging
import threading
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.engines.cpu.target import cache

X = np.random.default_rng(0).standard_normal((1, 20, 8)).astype(np.float32)


class Stream(io.StringIO):
    """Standard error, which is a terminal or is not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.written = terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.given = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")
        self.given.set()


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    found, logger = Records(), logging.getLogger("regard")
    monkeypatch.setattr(logger, "handlers", [found])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]  # of what each logger lets pass
    return found


def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have been compiled for hours."""
    monkeypatch.setattr(cache, "_busy", cache._Busy(since=-1e9, until=float("inf")))


def test_on_a_terminal_a_line_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch, records: Records, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr("sys.stderr", stream)
    long(monkeypatch)
    with cache.announced():
        assert stream.written.wait(60)
    shown = stream.getvalue()
    assert shown.startswith("\r\033[Kregard: compiling kernels, ")
    assert shown.endswith(" s\r\033[K")
    assert not records.texts
    assert capsys.readouterr().out == ""


def test_elsewhere_it_is_one_log_record(monkeypatch: pytest.MonkeyPatch, records: Records) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr("sys.stderr", stream)
    long(monkeypatch)
    with cache.announced():
        assert records.given.wait(60)
    cache._busy.until = float("inf")
    with cache.announced():
        pass
    assert records.texts == ["INFO compiling kernels for this processor, which is done once for each kind"]
    assert stream.getvalue() == ""


def test_without_standard_error_it_is_a_log_record_too(monkeypatch: pytest.MonkeyPatch, records: Records) -> None:
    monkeypatch.setattr("sys.stderr", None)
    long(monkeypatch)
    with cache.announced():
        assert records.given.wait(60)
    assert len(records.texts) == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_said_before_a_second(monkeypatch: pytest.MonkeyPatch, records: Records, terminal: bool) -> None:
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(cache, "SOON", 3600.0)
    monkeypatch.setattr(cache, "_busy", cache._Busy(since=-1e9, until=-1e9))  # long ago
    with cache.announced():
        pass
    assert (stream.getvalue(), records.texts) == ("", [])
    assert not any(thread.name == "regard-compiling" for thread in threading.enumerate())


def test_a_kernel_is_announced_when_it_is_compiled_and_not_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "objects"))
    monkeypatch.delenv("REGARD_DUMP", raising=False)
    cache.forget()
    original, calls = cache.announced, []

    def announced() -> object:
        calls.append(1)
        return original()

    monkeypatch.setattr(cache, "announced", announced)
    for _ in range(2):
        regard.attention(X, X, X, causal=True, engine="cpu")
        assert len(calls) == 1
        cache.forget()
