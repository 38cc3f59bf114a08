"""`context_parallel` over gloo processes has the bits of one process, and one error on all ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="built without torch.distributed")


def run(what: str, ranks: int, path: Path) -> None:
    script = str(Path(__file__).with_name("parallel_ranks.py"))
    command = [sys.executable, "-W", "ignore", script, what, str(ranks), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bits_of_one_process(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    run("same_bits", ranks, path)
    assert Path(f"{path}.wrong").read_text() == "none"


def test_derivatives_of_one_process(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    run("derivatives", 2, path)
    assert [Path(f"{path}.{rank}").read_text() for rank in range(2)] == ["none", "none"]


def test_ranks_that_disagree(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    run("disagreeing", 2, path)
    first, second = (Path(f"{path}.{rank}").read_text().splitlines() for rank in range(2))
    assert first[0] == second[0] == "ranks of context_parallel disagree: seed is 0 on rank 0, and 1 on rank 1"
    assert first[1].startswith("ranks of context_parallel disagree: mask is window(5)")
    assert second[1] == first[1]
    assert first[2].startswith("ranks of context_parallel disagree: rank 1 raised ValueError: dropout must be")
    assert second[2].startswith("dropout must be")
    assert first[3].startswith("ranks of context_parallel disagree: mask is ")
    assert first[4].startswith("ranks of context_parallel disagree: bias is float32 array of shape (300, 300), digest")
    assert second[3:5] == first[3:5]
    assert first[5] == "ranks of context_parallel disagree: offset is array([0]) on rank 0, and array([1]) on rank 1"
    assert first[6] == f"ranks of context_parallel disagree: rank 1 raised ValueError: {second[6]}"
    assert second[6].startswith("gradients over several ranks need scores of at most 2.9e+03, got an lse of 1e+30")
    assert first[7] == "ranks of context_parallel disagree: exact is True on rank 0, and False on rank 1"
    assert first[8] == second[8] == "(1, 2, 300, 8)"
