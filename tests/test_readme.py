"""What the README shows, runs: its Python as written, its commands as the command line reads them."""

import re
import shlex
from pathlib import Path

import pytest

from regard.cli import main

README = Path(__file__).parent.parent.joinpath("README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^    regard (.*?)(?:\s+#.*)?$", README, re.MULTILINE)


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(PYTHON) >= 2
    names: dict[str, object] = {}
    for block in PYTHON:
        exec(block, names)
    assert names["tile"].shape == (8, 10, 64)  # type: ignore[attr-defined]
    assert "causal() & mask(every_third)" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0


def test_there_are_commands() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["look", "steps", "plan", "doctor", "bench"]
