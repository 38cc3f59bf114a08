"""The examples of the README and of the pages beside it run: Python as written, commands as the command line reads."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from regard.cli import main

README = Path(__file__).parent.parent.joinpath("README.md")
TEXT = README.read_text(encoding="utf-8")
PAGES = [README, *(README.parent / "docs" / name for name in ("index.md", "meaning.md", "derivatives.md"))]
PYTHON = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
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
    names = run(blocks)
    assert names["tile"].shape == (8, 10, 64)
    assert names["second"].query.shape == (8, 1000, 64)
    assert "causal() & mask(every_third)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("framework", "shapes"), [("torch", {"out": (2, 8, 100, 64)}), ("jax", {"dq": (2, 100, 8, 64)})]
)
def test_the_examples_with_a_framework_run(framework: str, shapes: dict[str, Any]) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    (block,) = [block for block in PYTHON if framework in FRAMEWORK.findall(block)]
    names = run([block])
    assert {name: names[name].shape for name in shapes} == shapes


def test_the_page_of_jax_runs() -> None:
    pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")
    (block,) = re.findall(r"```python\n(.*?)```", README.with_name("docs").joinpath("jax.md").read_text(), re.DOTALL)
    assert run([block])["dslopes"].shape == (8,)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0


def test_there_are_commands() -> None:
    named = [command.split()[0] for command in COMMANDS]
    assert named == ["look", "look", "look", "insight", "steps", "plan", "doctor"]
