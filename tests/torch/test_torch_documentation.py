"""What docs/pytorch.md shows, runs."""

import re
from pathlib import Path

import pytest
import torch

TEXT = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(block, names)
    slopes = names["slopes"]
    assert isinstance(slopes, torch.Tensor)
    assert slopes.grad is not None
    assert slopes.grad.shape == (8,)
    assert names["out"].shape[:2] == (2, 8)  # type: ignore[attr-defined]
