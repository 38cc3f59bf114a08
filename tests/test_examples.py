"""Examples run, in a small size, and show what they say."""

import runpy
import sys
from pathlib import Path

import pytest

from regard.engines.cpu.target.instructions import chosen, targets

EXAMPLE = Path(__file__).parents[1] / "examples" / "saturated_training.py"


def test_errors_of_saturated_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where weights are not rounded before they multiply values, as pairs of bfloat16 and AMX do."""
    if chosen().bf16_dot or chosen().amx:
        if not targets()["avx2"].runs:
            pytest.skip("products by pairs alone")
        monkeypatch.setenv("REGARD_CPU", "avx2")
    monkeypatch.setattr(sys, "argv", ["saturated_training.py", "--steps", "20", "--out", str(tmp_path)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert (tmp_path / "saturated-training.svg").read_text().startswith("<svg")
    last = {way: list(map(float, row)) for way, *row in map(str.split, capsys.readouterr().out.splitlines()[1:])}
    assert list(last) == ["rounded", "regard", "float32"]
    for column in (2, 3):  # errors of δ, and of the gradient of W_q
        assert abs(last["regard"][column]) < 0.02 * abs(last["rounded"][column])
        assert abs(last["float32"][column]) < 0.02 * abs(last["rounded"][column])
