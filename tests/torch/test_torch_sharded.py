"""Parameters that are sharded over processes, and freed while no module needs them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch is built without torch.distributed")
@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_gradients_are_those_of_one_process(how: str) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("sharded.py")), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
