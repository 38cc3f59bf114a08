"""Users' type checkers: the calls in tests/typing get exact types, and the lines that say so are refused."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.joinpath("typing").glob("*_calls.py"))
CHECKERS = {
    "mypy": ("mypy", "--strict", "--config-file=", "--follow-imports=silent", "--cache-dir"),
    "pyright": ("basedpyright", "--level", "error", "--pythonversion", "3.11", "--pythonpath", sys.executable),
}


def complaints(checker: str, cache: Path) -> set[tuple[str, int]]:
    """The file and line of every error that a type checker reports in the users' files."""
    program, *options = CHECKERS[checker]
    if program == "mypy":
        options.append(str(cache))
    command = [sys.executable, "-m", program, *options, *map(str, FILES)]
    said = subprocess.run(command, cwd=HERE.parent / "src", capture_output=True, text=True, check=False).stdout
    found = re.findall(r"(\w+_calls\.py):(\d+)(?::\d+)?(?: -)?:? error", said)
    assert found, said
    return {(name, int(line)) for name, line in found}


@pytest.mark.parametrize("checker", CHECKERS)
def test_calls_have_types(checker: str, tmp_path: Path) -> None:
    pytest.importorskip(CHECKERS[checker][0], reason=f"{checker} is not installed")
    lines = [(f.name, n, line) for f in FILES for n, line in enumerate(f.read_text().splitlines(), 1)]
    refused = {(name, n) for name, n, line in lines if line.endswith("# refused")}
    assert len({name for name, _ in refused}) == len(FILES) == 3
    assert complaints(checker, tmp_path) == refused
