"""What the README shows, runs: its Python as written, its commands as the command line reads them."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from regard.cli import main

README = Path(__file__).parent.parent.joinpath("README.md")
TEXT = README.read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
FRAMEWORK = re.compile(r"\b(jax|torch)\.")
COMMANDS = re.findall(r"^    regard (.*?)(?:\s+#.*)?$", TEXT, re.MULTILINE)


def run(blocks: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    return names


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for block in PYTHON if not FRAMEWORK.search(block)]
    assert len(blocks) >= 2
    assert run(blocks)["tile"].shape == (8, 10, 64)
    assert "causal() & mask(every_third)" in capsys.readouterr().out


def test_the_examples_with_torch_run() -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'regard[transformers]'")
    names = run([block for block in PYTHON if set(FRAMEWORK.findall(block)) <= {"torch"}])
    assert names["slopes"].grad.shape == (8,)
    assert len(names["decoder"].blocks) == 4


def test_the_examples_with_jax_run() -> None:
    pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")
    names = run([block for block in PYTHON if set(FRAMEWORK.findall(block)) <= {"jax"}])
    assert names["dq"].shape == (8, 1000, 64)
    assert names["dslopes"].shape == (8,)
    (block,) = re.findall(r"```python\n(.*?)```", README.with_name("docs").joinpath("jax.md").read_text(), re.DOTALL)
    assert run([block])["dslopes"].shape == (8,)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0


def test_there_are_commands() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["look", "steps", "plan", "doctor", "bench", "insight"]
