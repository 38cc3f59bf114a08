"""Workers of PyTorch's DataLoader, made while another thread of their parent computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers(how: str) -> None:
    if how == "fork" and not hasattr(os, "fork"):
        pytest.skip("there is no fork")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(Path(__file__).with_name("workers.py")), how]
    done = subprocess.run(command, env=os.environ | {"REGARD_CACHE": "off"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
