"""Calls that the compiled engine refuses, and a Python that lacks threadpoolctl."""

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

import regard
from regard import engines
from regard.engines import cpu
from regard.warning import RegardWarning

NARROW, WIDE, WIDER = (np.ones((1, 3, d), np.float32) for d in (8, 1025, 1030))
REASON = "heads of at most 1024 features, got d = {0} and d_v = {0}"
TEXT = (
    "the engine 'cpu' refuses this call: {}; 'tiled' runs it, many times slower (engine='tiled' silences this warning, "
    "which is given once)"
)


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_warned", set())


def warned(*calls: Any, **options: Any) -> list[warnings.WarningMessage]:
    """What is said of attention among these arrays."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for x in calls:
            regard.attention(x, x, x, **options)
    return found


def test_a_fallback_warns_once_and_names_its_reason() -> None:
    (found,) = warned(WIDE, WIDE, WIDER)
    assert found.category is RegardWarning
    assert str(found.message) == TEXT.format(REASON.format(1025))
    assert found.filename == __file__
    assert not warned(WIDER)


def test_derivatives_warn_too() -> None:
    with pytest.warns(RegardWarning) as found:
        regard.attention_vjp(WIDER, WIDER, WIDER, WIDER)
    assert [str(x.message) for x in found] == [TEXT.format(REASON.format(1030))]
    assert found[0].filename == __file__


def test_every_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(warned(WIDE)) == 1
    monkeypatch.setattr(cpu, "supports", lambda p: "an even number of heads, got 1")
    (found,) = warned(WIDE, NARROW)
    assert str(found.message) == TEXT.format("an even number of heads, got 1")


def test_a_named_engine_says_nothing() -> None:
    assert not warned(NARROW)
    assert not warned(WIDE, engine="tiled")


def test_an_engine_that_cannot_run_here_is_named_once_but_in_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "state", lambda: "no kernels for riscv64")
    (found,) = warned(NARROW, WIDE)
    assert found.filename == __file__
    assert str(found.message) == (
        "the engine 'cpu' cannot run here: no kernels for riscv64; 'tiled' runs all calls, many times slower "
        "(engine='tiled' silences this warning, which is given once)"
    )
    monkeypatch.setattr(cpu, "state", lambda: "no kernels for wasm32")
    monkeypatch.setattr(sys, "platform", "emscripten")
    assert not warned(NARROW)


WITHOUT = """
import sys
sys.modules["threadpoolctl"] = None  # so that importing it fails
import numpy, regard
x = numpy.random.default_rng(0).standard_normal((2, 300, 8), numpy.float32)
"""


def without_threadpoolctl(code: str) -> str:
    command = [sys.executable, "-c", WITHOUT + code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_one_thread_needs_no_threadpoolctl() -> None:
    found = without_threadpoolctl("""
regard.set_num_threads(1)
for made in (
    regard.attention(x, x, x, engine="tiled"),
    regard.attention_vjp(x, x, x, x, engine="tiled").query,
    regard.linear_attention(x, x, x),
    regard.attention(x, x, x),
):
    print(made.shape, numpy.isfinite(made).all())
""")
    assert found == "(2, 300, 8) True\n" * 4
    assert "used by regard" in without_threadpoolctl("from regard.cli import main\nmain(['doctor'])")


def test_more_threads_ask_for_it() -> None:
    found = without_threadpoolctl("""
regard.set_num_threads(3)
for call in (lambda: regard.attention(x, x, x, engine="tiled"), lambda: regard.linear_attention(x, x, x)):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error.name, error)
regard.set_num_threads(1)
print(regard.attention(x, x, x, engine="tiled").shape)
""")
    message = (
        "threadpoolctl 3 threads need threadpoolctl, which is missing: pip install threadpoolctl, or "
        "regard.set_num_threads(1)\n"
    )
    assert found == message * 2 + "(2, 300, 8)\n"


NO_EXECUTABLE_MEMORY = """
import ctypes, sys, warnings
import numpy as np
if len(sys.argv) > 1:
    import torch
import regard
if ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, Linux 6.3
    sys.exit(77)
x = np.random.default_rng(0).standard_normal((2, 50, 8)).astype("f")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        given = torch.from_numpy(x) if len(sys.argv) > 1 else x
        out = regard.attention(given, given, given)
    regard.attention_vjp(x, x, x, x)
assert np.array_equal(out, regard.attention(x, x, x, engine="tiled"))
print(*(str(x.message) for x in said), sep="\\n")
print(regard.available_engines()[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux takes the permission away")
@pytest.mark.parametrize("arrays", [(), ("torch",)])
def test_without_executable_memory_tiled_runs_all_calls(arrays: tuple[str, ...]) -> None:
    """LLVM ends the process there, whether kernels are cached or not."""
    regard.attention(np.ones((2, 50, 8), np.float32), *[np.ones((2, 50, 8), np.float32)] * 2)  # is cached now
    done = subprocess.run(
        [sys.executable, "-c", NO_EXECUTABLE_MEMORY, *arrays], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE")
    assert done.returncode == 0, done.stderr
    warning, state = done.stdout.splitlines()
    reason = "the system refuses memory for compiled code (cannot allocate executable memory."
    assert warning.startswith(f"the engine 'cpu' cannot run here: {reason}")
    assert "'tiled' runs all calls" in warning
    assert state.startswith(f"cpu: not available: {reason}")
