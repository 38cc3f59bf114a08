"""What takes hours, or needs what no extra installs: samples of PyTorch, many random calls, an emulated Arm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*arguments: str, **environment: str) -> None:
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=HERE.parent, env=os.environ | environment, check=True)


def test_samples_of_pytorch() -> None:
    pytest.importorskip("expecttest", reason="expecttest is not installed: pip install expecttest")
    run("tests/foreign/run.py", "opinfo")


def test_random_calls() -> None:
    run("tests/foreign/run.py", "fuzz", "--count", "10000")


def test_what_else_the_cpu_engine_does_by_turns() -> None:
    run("-m", "pytest", "-m", "", "tests/conformance/test_conformance.py", "-k", "TestCpu", REGARD_FUZZ="1")


def test_kernels_on_an_emulated_processor(tmp_path: Path) -> None:
    if shutil.which("apt-get") is None or os.geteuid():
        pytest.skip("QEMU and Arm's Python are installed by apt-get, as root")
    run("tests/emulated_neon.py", str(tmp_path))
